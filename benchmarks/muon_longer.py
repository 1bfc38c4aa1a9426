"""Does Muon's lead over AdamW last? Chapter 14's comparison in runs four times as long.

    python benchmarks/muon_longer.py    # about half an hour of one core; goes on where its record ends

Model, text, batch and schedule are those of `muon.py`; a run has 400 steps, not 100. Each of the two
has three settings: the rate of the blocks, the rate of all else, and the warm-up. They begin at what
was best for 100 steps, and are tuned in turn: rates by factors of two until each has a worse one on either
side, then the warm-up among 5, 10, 30 and 50 % of the run, and again while anything moves. Two seeds choose,
five others compare. As in `muon.py`, AdamW also runs twice as long and Muon shorter, each with its whole
schedule, so that one can read off how many steps the one needs for the loss of the other.

Known before: after 100 steps AdamW needs 1.63 ± 0.24 times Muon's tokens to its own loss, and 1.89 ± 0.06 to
Muon's. Written before the first run:

1. After 400 steps Muon ends below AdamW. Confirmed if the interval of the difference lies below 0, refuted if
   above.
2. AdamW needs at least 1.3 times Muon's tokens to the loss that it reaches in 400 steps. Confirmed if the
   interval of the factor lies above 1.3, refuted if below.
3. The lead shrinks: that factor is less than 1.63. Confirmed if its interval lies below 1.63, refuted
   if above.

Else undecided. A seed's factor that lies outside the lengths that were run makes 2 and 3 undecided.

Then Muon's own decay, of the matrices that it moves (five more minutes). Decays are about a factor
of 3 apart. Each begins at the rate for the blocks that is best without, and tries others by factors of two
until it has a worse one on either side; the rate of the rest and the warm-up stay. The same two seeds choose
the best pair of decay and rate, the same five compare it with none, paired. Written before the first run:

4. Decay makes no difference here: the loss changes by less than 0.01. Confirmed if the whole interval lies
   within ± 0.01, refuted if it lies outside, else undecided.
"""

import itertools
from functools import partial

import numpy as np
import torch
from ablation import worth
from data_machine import Kept, load, lowest, tune
from muon import WARMUP, data, train

from tinygpt.support import interval

NAME = "muon_longer"
STEPS = 400
TUNING_SEEDS, SEEDS = (100, 101), (10, 11, 12, 13, 14)
DECAYS = (0.03, 0.1, 0.3, 1.0)
LENGTHS = {"AdamW": (400, 800), "Muon": (160, 220, 280, 340, 400)}


class Runs(Kept):
    "All runs."

    def __init__(self):
        self.texts, self.compared, self.decay = data(), {}, {}
        setup = dict(steps=STEPS, tuning_seeds=TUNING_SEEDS, seeds=SEEDS)
        super().__init__(NAME, **setup, compared=self.compared, decay=self.decay)

    def loss(self, optimizer: str, settings: dict, seed: int, steps: int = STEPS) -> float:
        key = dict(optimizer=optimizer, **settings, steps=steps, seed=seed)
        return self.get(key, partial(train, self.texts, **key))["loss"]


def tuned(runs: Runs, optimizer: str) -> dict:
    "Its settings, each the best where the two others stand."
    at, before = load("muon")["best"][optimizer], None

    def measure(name, value):
        return worth([runs.loss(optimizer, at | {name: value}, seed) for seed in TUNING_SEEDS])

    while at != before:
        before = at
        for name in ("block", "rest"):
            rates = [at[name] / 2, at[name], at[name] * 2]
            at = at | {name: lowest(tune(partial(measure, name), rates))}
        at = at | {"warmup": lowest({part: measure("warmup", part) for part in WARMUP})}
    return at


def steps_to(goal: float, lengths: tuple, losses: list) -> float:
    "Where the falling losses cross the goal, on lines over the logarithm of the length; NaN outside."
    if not losses[-1] <= goal <= losses[0]:
        return float("nan")
    return float(np.exp(np.interp(-goal, -np.array(losses), np.log(lengths))))


def factors(losses: dict) -> tuple[list, list]:
    "AdamW's tokens over Muon's to the loss of AdamW's 400 steps, and to that of Muon's; one of each a seed."
    own, others = [], []
    for adamw, muon in zip(losses["AdamW"], losses["Muon"]):
        own.append(STEPS / steps_to(adamw[0], LENGTHS["Muon"], muon))
        others.append(steps_to(muon[-1], LENGTHS["AdamW"], adamw) / STEPS)
    return own, others


def decayed(runs: Runs, at: dict):
    "Muon with decay, at its best pair of decay and rate, beside the same without."
    tried = {}  # decay -> rate -> mean over the seeds that choose
    for decay in DECAYS:

        def measure(rate, name=f"Muon, decay {decay:g}"):
            return worth([runs.loss(name, at | dict(block=rate), seed) for seed in TUNING_SEEDS])

        tried[decay] = tune(measure, [at["block"] / 2, at["block"], at["block"] * 2])
    decay = min(tried, key=lambda decay: min(tried[decay].values()))
    best = at | dict(block=lowest(tried[decay]))
    losses = [runs.loss(f"Muon, decay {decay:g}", best, seed) for seed in SEEDS]
    without = [runs.loss("Muon", at, seed) for seed in SEEDS]
    runs.decay |= dict(tried=tried, best=decay, block=best["block"], losses=losses, without=without)
    mean, half = interval(a - b for a, b in zip(losses, without))
    print(f"decay {decay:g} at {best['block']:g} minus none at {at['block']:g}: {mean:+.4f} ± {half:.4f}")


def main():
    torch.set_num_threads(1)
    runs = Runs()
    best = {optimizer: tuned(runs, optimizer) for optimizer in LENGTHS}
    losses = {optimizer: [] for optimizer in LENGTHS}
    for seed, optimizer in itertools.product(SEEDS, LENGTHS):
        losses[optimizer].append(
            [runs.loss(optimizer, best[optimizer], seed, steps) for steps in LENGTHS[optimizer]]
        )
    own, others = factors(losses)
    for optimizer in LENGTHS:
        runs.compared[optimizer] = best[optimizer] | dict(
            lengths=LENGTHS[optimizer], losses=losses[optimizer]
        )
    runs.compared |= dict(factors=own, factors_to_muons=others)
    decayed(runs, best["Muon"])
    runs.save()
    lead = interval(muon[-1] - adamw[0] for muon, adamw in zip(losses["Muon"], losses["AdamW"]))
    print(best)
    print("Muon minus AdamW {:+.3f} ± {:.3f}".format(*lead))
    print(
        "tokens of AdamW over Muon's {:.2f} ± {:.2f}, to Muon's loss {:.2f} ± {:.2f}".format(
            *interval(own), *interval(others)
        )
    )


if __name__ == "__main__":
    main()
