"""Lion: an optimizer that the package does not have, for tests of an optimizer of one's own."""

import torch


class Lion(torch.optim.Optimizer):
    "Chen et al. 2023, with betas 0.9 and 0.99."

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, m, 0.9).sign())
                m.lerp_(p.grad, 0.01)
