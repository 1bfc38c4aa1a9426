"""Chapter 20's gain of Muon, against an AdamW that was tuned as well.

    python benchmarks/speedrun_rival.py    # goes on where results/speedrun_rival.json ends; forty minutes

The ladder compares its rung "Muon" with the rung below, "a short warm-up", whose AdamW has one rate, 4e-3.
Here both get a search of the same size: AdamW's rate, and Muon's for the matrices (AdamW's for the rest stays
4e-3), each from half the ladder's value to twice it, and on by factors of two while the best is at an edge.
Two seeds choose, at the length that the ladder's rung needed. Five fresh seeds compare, at two lengths or
more around the goal of 1.88, as in the ladder; the price of a step is the ladder's.

Written before the first run. Known: the ladder, where Muon needs 2.51 (2.39 to 2.63) times fewer steps and
takes 1.59 (1.47 to 1.72) times less time; and a race on another text, where half of Muon's lead went when
AdamW had the best of three rates. Confirmed if the whole interval holds the claim, refuted if none of it
does, else undecided.

1. The tuned AdamW needs at most 10 % fewer steps than the ladder's (median of 1214, other seeds).
2. Muon needs 2 times fewer steps, or more.
3. Muon takes 1.3 times less CPU time, or more.
"""

from functools import partial
from statistics import mean, median

from data_machine import Kept, load, lowest, tune
from speedrun import next_length, train_flags

from tinygpt.speedrun import rung_flags
from tinygpt.speedrun_gain import GOAL, gain, rung_gain, steps_to_goal

CHOOSING, COMPARING = (731, 732), range(733, 738)
# name: (the rung, the flag of its rate, the rates to begin with, the steps that the ladder's rung needed)
SIDES = {
    "AdamW": ("a short warm-up", "--learning-rate", (2e-3, 4e-3, 8e-3), 1214),
    "Muon": ("Muon", "--muon-lr", (0.01, 0.02, 0.04), 492),
}


def train(side: str, rate: float, steps: int, seed: int) -> dict:
    "The side's rung at this rate."
    rung, flag, *_ = SIDES[side]
    return train_flags([*rung_flags(rung, steps=steps), flag, str(rate)], seed)


def main():
    kept = Kept("speedrun_rival", goal=GOAL)

    def run(side: str, rate: float, steps: int, seed: int) -> dict:
        asked = dict(side=side, rate=rate, steps=steps, seed=seed)
        return kept.get(asked, partial(train, **asked))

    def around_goal(side: str, rate: float) -> list[dict]:
        "Runs of all seeds at lengths a factor of 1.2 apart, until the goal lies between two medians."
        found = []
        while (steps := next_length(found, SIDES[side][3], len(COMPARING))) is not None:
            found += [run(side, rate, steps, seed) for seed in COMPARING]
        return found

    best, rungs = {}, {}
    clocks = {rung["name"]: rung["clock"] for rung in load("speedrun_ladder")["rungs"]}
    for side, (rung, _, rates, steps) in SIDES.items():

        def loss(rate: float) -> float:
            return mean(run(side, rate, steps, seed)["loss"] for seed in CHOOSING)

        best[side] = lowest(tune(loss, rates))
        rungs[side] = dict(runs=around_goal(side, best[side]), clock=clocks[rung])
    kept.head["best"] = best
    kept.save()
    needed = {side: steps_to_goal(rung["runs"]) for side, rung in rungs.items()}
    print(best, {side: median(steps.values()) for side, steps in needed.items()})
    print("times fewer steps:", gain(needed["AdamW"], needed["Muon"]))
    print("times less CPU time:", rung_gain(rungs["AdamW"], rungs["Muon"]))


if __name__ == "__main__":
    main()
