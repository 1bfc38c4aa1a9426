"""Our optimizers and PyTorch's on the same gradients, step by step.

test_adamw.py and test_muon.py ask whether they end close, test_bits.py whether they end at the same bits.

The classes are arguments: in learn mode they are a learner's.
"""

import copy

import torch
from torch import nn

STEPS = 300  # of AdamW: the corrections of its means are 1 in float32 long before


def with_gradients(model_or_params, seed=0):
    "Give every parameter a gradient that follows from the seed."
    params = (
        list(model_or_params.parameters())
        if isinstance(model_or_params, nn.Module)
        else list(model_or_params)
    )
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)
    return params


def many_steps(AdamW, eps, weight_decay, dtype):
    "Pairs of parameters, ours and torch's, whose gradients went from far below any eps to far above."
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=g, dtype=dtype) for shape in [(3, 4), (1,)]]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    how = dict(lr=0.01, betas=(0.9, 0.95), eps=eps, weight_decay=weight_decay)
    a, b = AdamW(ours, **how), torch.optim.AdamW(theirs, **how, foreach=False)
    for step in range(STEPS):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=g, dtype=dtype) * 10.0 ** (step % 12 - 10)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    return list(zip(ours, theirs))


def fifty_steps(AdamW, betas, dtype):
    "A parameter of ours and one of torch's."
    p, q = (nn.Parameter(torch.linspace(-1, 1, 7).to(dtype)) for _ in range(2))
    a = AdamW([p], lr=0.01, betas=betas)
    b = torch.optim.AdamW([q], lr=0.01, betas=betas, weight_decay=0.1, foreach=False)
    for step in range(50):
        for x in (p, q):
            with_gradients([x], step)
        a.step()
        b.step()
    return p, q


def change_over(make_adamw, first, second):
    """A run of our own, and one half made under `first` that goes on under `second`.

    Returns (parameters of the one, of the other, the second optimizer, its name, what makes the other half).
    """

    def steps(optimizer, params, which):
        for step in which:
            with_gradients(params, step)
            optimizer.step()

    p, q = ([nn.Parameter(torch.linspace(-1, 1, 5)), nn.Parameter(torch.ones(2, 2))] for _ in range(2))
    whole, _ = make_adamw([dict(params=p, weight_decay=0.1)], "own", lr=0.01)
    steps(whole, p, range(20))
    a, _ = make_adamw([dict(params=q, weight_decay=0.1)], first, lr=0.01)
    steps(a, q, range(10))
    b, name = make_adamw([dict(params=q, weight_decay=0.1)], second, lr=0.5)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    return p, q, b, name, lambda: steps(b, q, range(10, 20))


def fifty_steps_of_muon(Muon, nesterov, scale, theirs, weight_decay):
    "(Parameter of ours, of torch's, where both began) for four matrices, with bfloat16 products."

    def rand(shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    start = [rand(shape, i) for i, shape in enumerate([(64, 64), (64, 64), (48, 16), (16, 48)])]
    a, b = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    ours = Muon(a, lr=0.02, weight_decay=weight_decay, nesterov=nesterov, scale=scale, dtype=torch.bfloat16)
    torchs = torch.optim.Muon(b, lr=0.02, weight_decay=weight_decay, nesterov=nesterov, adjust_lr_fn=theirs)
    for step in range(50):
        for p, q in zip(a, b):
            p.grad = rand(p.shape, step) * 10.0 ** (step % 5 - 3)
            q.grad = p.grad.clone()
        ours.step()
        torchs.step()
    return list(zip(a, b, start))
