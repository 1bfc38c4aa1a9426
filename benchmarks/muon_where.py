"""Muon for the head, or for the embedding? Chapter 14's small GPT, one weight moved, equal tuning.

    python benchmarks/muon_where.py    # about five CPU minutes; goes on where its record ends

Muon has the matrices of the blocks, AdamW the rest: that is the split so far. Here one weight, the head or
the embedding, is given to Muon, against the same weight in AdamW. On both sides it has a rate of its own, and
the rest of AdamW's weights has one, too. They are tuned in turn, by factors of two, until each of the two
has a worse one on either side. So AdamW's side contains the split so far, where the two rates are equal.
Two seeds choose, ten others compare, pair by pair. (Three were planned to choose, but the machine was busy:
cut after seven runs of AdamW's grid, before all others.) Model, text, 100 steps, the rate of the blocks
(0.04) and the warm-up (5 %) are those of `muon.py`. That rate and the warm-up were chosen there with both
weights in AdamW, and are not tuned again: if anything, an advantage of AdamW's side.

Written down before the first run, when only the runs of muon.json were known (none has moved these weights):

1. The head is better off with AdamW: the interval of the loss, Muon minus AdamW, lies above 0.
2. So is the embedding: the same.
Refuted if the interval lies below 0, undecided if it contains 0.
"""

import itertools
from functools import partial

import torch
from ablation import worth
from data_machine import Kept, lowest, tune
from muon import STEPS, data, train

from tinygpt.adamw import adamw_groups
from tinygpt.muon import make_optimizer, muon_groups
from tinygpt.support import interval

NAME = "muon_where"
BLOCK, WARMUP = 0.04, 0.05  # the best of Muon in muon.json
OWN = {"AdamW": (0.024, 0.048, 0.096), "Muon": (0.04, 0.08, 0.16)}  # of the weight, to begin with
REST = (0.024, 0.048, 0.096)  # 0.048 is the best in muon.json
TUNING_SEEDS = (100, 101)
SEEDS = range(10, 20)
WEIGHTS = ("head", "embedding")


def split(_, model, block: float, rest: float, weight: str, optimizer: str, own: float):
    "Muon for the blocks, AdamW for the rest, and `weight` at its own rate with the optimizer named."
    adamw = adamw_groups(model, rest, weight_decay=0.0, lr_multipliers={weight: own / rest})
    groups = muon_groups(model, adamw, block)
    if optimizer == "Muon":
        moved = {"head": model.lm_head, "embedding": model.wte}[weight].weight
        groups = [g | dict(params=[p for p in g["params"] if p is not moved]) for g in groups]
        groups = [g for g in groups if g["params"]] + [dict(kind="muon", params=[moved], lr=own)]
    return make_optimizer(groups)[0]


class Runs(Kept):
    "All runs."

    def __init__(self):
        setup = dict(steps=STEPS, block=BLOCK, warmup=WARMUP, tuning_seeds=TUNING_SEEDS, seeds=[*SEEDS])
        # weight -> optimizer -> rates and losses by seed: what the page reads
        self.texts, self.compared = data(), {}
        super().__init__(NAME, **setup, compared=self.compared)

    def loss(self, weight: str, optimizer: str, own: float, rest: float, seed: int) -> float:
        if optimizer == "AdamW" and own == rest:
            weight = "head"  # a run of both comparisons, made once
        key = dict(weight=weight, optimizer=optimizer, own=own, rest=rest, seed=seed)
        make = partial(split, weight=weight, optimizer=optimizer, own=own)
        args = (self.texts, optimizer, BLOCK, rest, WARMUP, STEPS, seed, make)
        return self.get(key, partial(train, *args))["loss"]


def tuned(runs: Runs, weight: str, optimizer: str) -> tuple[float, float]:
    "(own rate, rate of the rest), each the best where the other stands, with a worse one on either side."

    def measure(own, rest):
        return worth([runs.loss(weight, optimizer, own, rest, seed) for seed in TUNING_SEEDS])

    own, rest, before = OWN[optimizer][1], REST[1], None
    while before != (own, rest):
        before = own, rest
        own = lowest(tune(lambda rate: measure(rate, rest), OWN[optimizer]))
        rest = lowest(tune(lambda rate: measure(own, rate), REST))
    return own, rest


def main():
    torch.set_num_threads(1)
    runs = Runs()
    for weight in WEIGHTS:
        best = {optimizer: tuned(runs, weight, optimizer) for optimizer in OWN}
        losses = {optimizer: [] for optimizer in OWN}
        for seed, optimizer in itertools.product(SEEDS, OWN):
            losses[optimizer].append(runs.loss(weight, optimizer, *best[optimizer], seed))
        runs.compared[weight] = {
            o: dict(own=own, rest=rest, losses=losses[o]) for o, (own, rest) in best.items()
        }
        runs.save()
        mean, half = interval([a - b for a, b in zip(losses["Muon"], losses["AdamW"])])
        print(weight, best, f"Muon minus AdamW {mean:+.3f} ± {half:.3f}", flush=True)


if __name__ == "__main__":
    main()
