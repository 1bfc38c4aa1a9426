"""The ten changes of chapter 20's ladder that lie inside its noise, with nanoGPT's layers: what do they buy?

    python benchmarks/speedrun_ten.py    # goes on where results/speedrun_ten.json ends; two hours of one core

The run is the ladder's rung "soft cap": four layers 128 wide, all kept changes up to there. One of the ten
is taken back at a time, and then all of them, so that a bolder rate, Muon and RoPE remain. ("A short warm-up"
and "no warm-up" change one setting: taken back together. An own head that starts at zero cannot be tied: to
tie it takes back the start, too, so it is compared with the run without that start.) Twelve seeds that the
ladder has not seen, paired; the loss is that of the whole validation part, after 275 steps. Two further
lengths say how many steps a loss is worth. Nothing is tuned anew.

Written before the first run. Known: the ladder's five seeds, where 0.245 nats are a factor of e in steps,
and where GELU in place of ReLU² took 1.16 times the steps. A cost is the loss without an idea minus the loss
with it. Claims 1 and 2 are confirmed if the whole interval is above 0, and refuted if it is below; 3 to 5 are
confirmed if the whole interval holds them, refuted if none of it does; else undecided.

1. Without QK-norm; without the start at zero; without the straight line to 0: each costs.
2. With GELU in place of ReLU²: it costs.
3. Without RMSNorm; with a tied head; without the soft cap: each costs less than 0.012, and gains less than
   that (5 % of the steps).
4. At AdamW's earlier rate; with 20 steps of warm-up: each costs less than 0.012.
5. Without all of them it takes 1.2 times the steps or more.
6. All taken back together cost more than the sum of what each costs alone: one stands in for another.
   (Whole interval above 0; refuted if below.)
"""

from functools import partial
from statistics import median

from data_machine import Kept
from speedrun import train_flags

from tinygpt.speedrun import LADDER, rung_flags
from tinygpt.speedrun_gain import gain, steps_to_goal
from tinygpt.support import interval

SEEDS = range(741, 753)
STEPS, SHORTER = 275, 229
LONGER = 345, 414  # around the goal, without the ten
BACK = {
    "straight down to 0": "--schedule cosine --final-lr 0.1",
    "three times AdamW's rate": "--learning-rate 4e-3",
    "no warm-up": "--warmup-steps 20",
    "RMSNorm": "--norm layernorm",
    "QK-norm": "--no-qk-norm",
    "ReLU²": "--mlp gelu",
    "start at zero": "--init gpt2",
    "own head": "--tie-weights --init gpt2",
    "soft cap": "--logit-softcap 0",
}
NONE, ALL = "", "all"
BACK |= {NONE: "", ALL: " ".join(BACK.values()) + " --warmup-steps 100"}


def train(back: str, steps: int, seed: int) -> dict:
    "The rung, with one idea taken back, or none, or all."
    return train_flags([*rung_flags("soft cap", LADDER, steps), *BACK[back].split()], seed)


def main():
    kept = Kept("speedrun_ten", back=BACK)

    def loss(back: str, seed: int, steps: int = STEPS) -> float:
        asked = dict(back=back, steps=steps, seed=seed)
        return kept.get(asked, partial(train, **asked))["loss"]

    for seed in SEEDS:
        for back in BACK:
            loss(back, seed)
        loss(NONE, seed, SHORTER)
        for steps in LONGER:
            loss(ALL, seed, steps)
    kept.save()

    costs = {}
    for back in BACK:
        over = "start at zero" if back == "own head" else NONE
        costs[back] = [loss(back, seed) - loss(over, seed) for seed in SEEDS]
        print(f"without {back or 'any change'}: {interval(costs[back])}", flush=True)
    alone = [sum(costs[back][i] for back in BACK if back != ALL) for i in range(len(SEEDS))]
    print("all together minus the sum:", interval(a - b for a, b in zip(costs[ALL], alone)))
    runs = {back: [run for run in kept.runs if run["back"] == back] for back in (NONE, ALL)}
    runs[ALL] = [run for run in runs[ALL] if run["steps"] in LONGER]
    needed = {back: steps_to_goal(found) for back, found in runs.items()}
    print({back: median(steps.values()) for back, steps in needed.items()})
    print("times fewer steps with the ten:", gain(needed[ALL], needed[NONE]))


if __name__ == "__main__":
    main()
