"""nanoGPT's run for a laptop, with the MLP's first weights by their fan-in: 1/√128 = 0.088 instead of 0.02.

    python benchmarks/fan_in.py     # goes on where results/fan_in.json ends; about half an hour of one core

The preset `shakespeare-char-cpu`: four layers 128 wide, GELU, 2,000 steps of AdamW. Only `c_fc` begins
otherwise. Each side has its own rate: 0.002, 0.004, and on by factors of two until the best has a worse one
on either side. One seed chooses it, five others compare, paired. The loss is that of the first 50,000
held-out characters.

Written before the first run. Known: in `exchange.py`, in a model 64 wide with Llama's other parts, the same
change gained 0.056 ± 0.010 nats per byte with GELU (thirty seeds).

1. It gains 0.02 or more here. Confirmed if the whole interval does, refuted if none of it does, else
   undecided.

Five seeds did not decide: -0.033 ± 0.019. So it is asked again on ten seeds that nobody has seen, 6 to 15, by
the same rule; they alone decide, and no more are added.
"""

import statistics
from functools import partial

from data_machine import Kept, lowest, tune
from exchange import by_fan_in
from laptop import train_here

from tinygpt.run.presets import preset
from tinygpt.support import interval

CHOOSING, COMPARING, AGAIN = (100,), range(1, 6), range(6, 16)
RATES, FIRST = (0.002, 0.004), ("0.02", "fan-in")
HELD_OUT = 50_000


def train(first: str, rate: float, seed: int) -> dict:
    "The preset with these first weights of the MLP."
    config = preset("shakespeare-char-cpu")
    config.optim.learning_rate, config.run.seed = rate, seed
    return train_here(config, HELD_OUT, by_fan_in if first == "fan-in" else lambda model: None)


def main():
    kept = Kept("fan_in")

    def loss(first: str, rate: float, seed: int) -> float:
        asked = dict(first=first, rate=rate, seed=seed)
        return kept.get(asked, partial(train, **asked))["loss"]

    def mean(first: str, rate: float) -> float:
        return statistics.mean(loss(first, rate, seed) for seed in CHOOSING)

    best = {first: lowest(tune(partial(mean, first), RATES)) for first in FIRST}
    kept.head["best"] = best
    for seeds in COMPARING, AGAIN:
        apart = [loss("fan-in", best["fan-in"], s) - loss("0.02", best["0.02"], s) for s in seeds]
        print(best, "fan-in minus 0.02: {:+.4f} ± {:.4f}".format(*interval(apart)), len(apart), "seeds")
    kept.save()


if __name__ == "__main__":
    main()
