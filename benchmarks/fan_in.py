"""nanoGPT's run for a laptop, with the MLP's first weights by their fan-in: 1/√128 = 0.088 instead of 0.02.

    python benchmarks/fan_in.py          # goes on where results/fan_in.json ends; half an hour of one core
    python benchmarks/fan_in.py --muon   # the same with Muon, into results/fan_in_muon.json; half an hour

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

`--muon` asks whether the presets that use Muon should begin so, too. It trains the small form of the preset
`laptop` that `laptop.py --starts` describes, 64 wide, with 1/√64 = 0.125 for 0.02. Each side has the best of
its Muon rates: half of the preset's, the preset's, twice it, and on by factors of two where the best is at an
edge. Two seeds choose; five others compare, paired; 150 steps and 600.

Written before the first run of `--muon`. Known: one look at it, one seed and one rate for both, was 0.11
worse by fan-in.

2. After 150 steps it costs something with Muon. Confirmed if the interval is above 0, refuted if it is below,
   else undecided.
3. After 600 steps it makes no difference of 0.02. Confirmed if the whole interval is within ±0.02, refuted if
   none of it is, else undecided.
"""

import argparse
import statistics
from functools import partial

from data_machine import Kept, lowest, tune
from exchange import by_fan_in
from laptop import SMALL, SMALL_SEEDS, START_RATES, run_start, train_here

from tinygpt.run.presets import preset
from tinygpt.support import interval

CHOOSING, COMPARING, AGAIN = (100,), range(1, 6), range(6, 16)
RATES, FIRST = (0.002, 0.004), ("0.02", "fan-in")
HELD_OUT = 50_000
MUON_STEPS = 150, 600


def train(first: str, rate: float, seed: int) -> dict:
    "The preset with these first weights of the MLP."
    config = preset("shakespeare-char-cpu")
    config.optim.learning_rate, config.run.seed = rate, seed
    return train_here(config, HELD_OUT, prepare(first))


def prepare(first: str):
    "What gives a new model these first weights."
    return by_fan_in if first == "fan-in" else lambda model: None


def train_muon(first: str, rate: float, seed: int, steps: int) -> dict:
    "The small form of the preset `laptop` with these first weights of the MLP, and Muon at this rate."
    return run_start("zero", rate, seed, prepare=prepare(first), **SMALL | dict(steps=steps))


def with_muon():
    kept = Kept("fan_in_muon")
    choosing, comparing = SMALL_SEEDS

    def loss(steps: int, first: str, rate: float, seed: int) -> float:
        asked = dict(first=first, rate=rate, seed=seed, steps=steps)
        return kept.get(asked, partial(train_muon, **asked))["loss"]

    def mean(steps: int, first: str, rate: float) -> float:
        return statistics.mean(loss(steps, first, rate, seed) for seed in choosing)

    kept.head["best"] = {}
    for steps in MUON_STEPS:
        best = {first: lowest(tune(partial(mean, steps, first), START_RATES)) for first in FIRST}
        kept.head["best"][str(steps)] = best
        apart = [
            loss(steps, "fan-in", best["fan-in"], s) - loss(steps, "0.02", best["0.02"], s) for s in comparing
        ]
        print(steps, best, "fan-in minus 0.02: {:+.4f} ± {:.4f}".format(*interval(apart)), flush=True)
    kept.save()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--muon", action="store_true", help="the same with Muon, in a smaller model")
    if parser.parse_args().muon:
        return with_muon()
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
