"""A batch four times as large, as four times as many processes have: which learning rate does it want?

    python benchmarks/batch_rate.py --jobs 2                # prints; about two minutes on two idle cores
    python benchmarks/batch_rate.py --jobs 2 --save         # and writes results/batch_rate.json
    python benchmarks/batch_rate.py --steps 32 --seeds 1    # a trial of the script itself

A small language model (four bytes in, the next one out) is trained with batches of 32 examples at each rate
of a grid; then with 128 and with 512 for as many bytes (a quarter and a sixteenth of the steps), and with 128
for as many steps (four times the bytes), at the same rates. All runs warm up for a tenth of their steps and
come down along a cosine. The optimizers are AdamW, without decay, and SGD with momentum 0.9; AdamW once more
with its betas changed as Malladi et al. (2022) ask. Nothing is clipped. A GPT of this price was tried first:
its seeds differed by 0.3 nats, more than the rates do.

One process takes the steps of many: chapter 13 shows that the weights are the same. It draws the results.
What the rules say of a batch k times as large was written down before the runs: linear (Goyal et al. 2017,
section 2.1, for SGD), the best rate is k times the old one; square root (Malladi et al. 2022, for Adam), it
is sqrt(k) times the old one. A rule is refuted for this model where another rate of the grid has the lower
loss in every seed.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from data_machine import save
from torch import nn

from tinygpt.accumulate import gradient_noise_scale
from tinygpt.data.tokens import load_corpus
from tinygpt.schedule import make_schedule

EXAMPLES = 32  # in the small batch
GRIDS = {"AdamW": [1e-3 * 2**i for i in range(8)], "SGD": [0.025 * 2**i for i in range(8)]}
BETAS = 0.9, 0.95
CONTEXT = 4  # bytes


class Model(nn.Module):
    "Bengio et al. 2003: the embeddings of a few bytes, side by side, a hidden layer, the next byte."

    def __init__(self, width: int = 16, hidden: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.hidden = nn.Linear(CONTEXT * width, hidden)
        self.out = nn.Linear(hidden, 256)

    def forward(self, x, y):
        return F.cross_entropy(self.out(torch.tanh(self.hidden(self.embedding(x).flatten(1)))), y)


def draw(tokens: torch.Tensor, n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    "n examples at random places: (n, CONTEXT) bytes and the byte after each."
    starts = torch.randint(len(tokens) - CONTEXT, (n,), generator=generator)
    rows = tokens[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, -1]


@cache
def data() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    "Training bytes, and 20,000 examples of validation."
    torch.set_num_threads(1)
    corpus = load_corpus("sotu")
    train, held = (
        torch.from_numpy(np.frombuffer("\n".join(docs).encode(), np.uint8).copy())
        for docs in (corpus.train, corpus.val)
    )
    return train, draw(held, 20_000, torch.Generator().manual_seed(1234))


def make(name: str, model: nn.Module, rate: float, times: int) -> torch.optim.Optimizer:
    "`times`: how often the batch has grown, for an optimizer whose betas follow it."
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    betas = tuple(1 - times * (1 - beta) for beta in BETAS)
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=betas, eps=1e-8 / times**0.5, weight_decay=0.0
    )


def train(name, rate, examples, steps, times, seed, look=None) -> float:
    "One run; the loss on the validation examples at its end, nan where it blew up."
    tokens, val = data()
    torch.manual_seed(seed)
    model = Model()
    optimizer = make(name, model, rate, times)
    multiplier = make_schedule("cosine", steps, warmup_steps=max(1, steps // 10))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * multiplier(step)
        if look is not None and step == steps // 2:
            look(model)
        optimizer.zero_grad()
        model(*draw(tokens, examples, generator)).backward()
        optimizer.step()
    with torch.no_grad():
        return round(model(*val).item(), 4)


def noise_scale(steps: int) -> float:
    "In examples, in the middle of the small batch's run with AdamW at a middling rate."
    found = []

    def norm(model, examples, generator):
        model.zero_grad()
        model(*draw(data()[0], examples, generator)).backward()
        return nn.utils.get_total_norm([p.grad for p in model.parameters()])

    def look(model):
        generator = torch.Generator().manual_seed(99)
        small = [norm(model, 16, generator) for _ in range(400)]
        big = [norm(model, 1024, generator) for _ in range(100)]
        found.append(gradient_noise_scale(small, big, 16, 1024).batch)

    train("AdamW", 4e-3, EXAMPLES, steps, 1, 0, look)
    return round(found[0], 1)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=800, help="of the small batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    shapes = {  # examples, steps, how often the betas think that the batch has grown
        "small": (EXAMPLES, args.steps, 1),
        "4 times, equal tokens": (4 * EXAMPLES, args.steps // 4, 1),
        "16 times, equal tokens": (16 * EXAMPLES, args.steps // 16, 1),
        "4 times, equal steps": (4 * EXAMPLES, args.steps, 1),
        "4 times, equal tokens, betas too": (4 * EXAMPLES, args.steps // 4, 4),
    }
    results = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        noise = pool.submit(noise_scale, args.steps)
        for name, rates in GRIDS.items():
            for what, shape in shapes.items():
                if name == "SGD" and what.endswith("betas too"):
                    continue
                runs = {
                    f"{rate:g}": [pool.submit(train, name, rate, *shape, seed) for seed in range(args.seeds)]
                    for rate in rates
                }
                results.setdefault(name, {})[what] = runs
        for name, kinds in results.items():
            for what, runs in kinds.items():
                for rate, losses in runs.items():
                    runs[rate] = [loss.result() for loss in losses]
                    print(f"{name:5s} {what}, rate {rate}: {runs[rate]}", flush=True)
        count = sum(p.numel() for p in Model().parameters())
        about = dict(examples=EXAMPLES, steps=args.steps, seeds=args.seeds, parameters=count)
        about |= dict(noise_scale=noise.result())
    print(about)
    if args.save:
        save("batch_rate", dict(jobs=args.jobs, **about, results=results))


if __name__ == "__main__":
    main()
