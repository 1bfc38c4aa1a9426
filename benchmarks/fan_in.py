"""nanoGPT's run for a laptop, with the MLP's first weights by their fan-in: 1/√128 = 0.088 instead of 0.02.

    python benchmarks/fan_in.py          # goes on where results/fan_in.json ends; half an hour of one core
    python benchmarks/fan_in.py --muon   # the preset `laptop`, into results/fan_in_muon.json; an hour

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

`--muon` asks whether a preset that uses Muon should begin so, too: the preset `laptop`, 128 wide, SwiGLU
and a start at zero, in its full length. The side with 0.02 are the runs of `laptop.py --full`; one of them is
repeated here to see that it still comes out the same. The other side gets the same search: half of the
preset's Muon rate, the preset's, twice it, and on by factors of two where the best is at an edge. One seed
chooses; three others compare, paired. The seeds deviate by about 0.003.

Asked before in a smaller form, 64 wide, and given up: after 150 steps the best Muon rate by fan-in was
0.00008, so almost no training, and the loss (5.45, +0.033 ± 0.008 against 0.02) says that neither side had
learned to read. One look at that form, one seed and one rate, had been 0.11 worse by fan-in.

Written before the first run of the full form:

2. By fan-in the preset is no better: it does not gain 0.01. Confirmed if none of the interval does, refuted
   if the whole interval does, else undecided.
"""

import argparse
import statistics
from functools import partial

from data_machine import Kept, load, lowest, tune
from exchange import by_fan_in
from laptop import FULL, FULL_SEEDS, START_RATES, run_start, train_here

from tinygpt.run.presets import preset
from tinygpt.support import interval

CHOOSING, COMPARING, AGAIN = (100,), range(1, 6), range(6, 16)
RATES = 0.002, 0.004
FIRST = {"0.02": lambda model: None, "fan-in": by_fan_in}  # what gives a new model these first weights
HELD_OUT = 50_000


def train(first: str, rate: float, seed: int) -> dict:
    "The preset with these first weights of the MLP."
    config = preset("shakespeare-char-cpu")
    config.optim.learning_rate, config.run.seed = rate, seed
    return train_here(config, HELD_OUT, FIRST[first])


def train_muon(first: str, rate: float, seed: int) -> dict:
    "The preset `laptop` with these first weights of the MLP and Muon at this rate."
    return dict(loss=run_start("zero", rate, seed, prepare=FIRST[first], **FULL)["loss"])


def with_muon():
    kept, known = Kept("fan_in_muon"), load("laptop_starts_full")
    (choosing,), comparing = FULL_SEEDS

    def loss(first: str, rate: float, seed: int) -> float:
        asked = dict(first=first, rate=rate, seed=seed)
        return kept.get(asked, partial(train_muon, **asked))["loss"]

    usual = known["best"]["zero"]
    plain = {r["seed"]: r["loss"] for r in known["runs"] if (r["init"], r["muon_lr"]) == ("zero", usual)}
    print("repeated:", loss("0.02", usual, comparing[0]), "known:", plain[comparing[0]], flush=True)
    rate = lowest(tune(lambda rate: loss("fan-in", rate, choosing), START_RATES))
    kept.head["best"] = {"0.02": usual, "fan-in": rate}
    apart = [loss("fan-in", rate, seed) - plain[seed] for seed in comparing]
    print(kept.head["best"], "fan-in minus 0.02: {:+.4f} ± {:.4f}".format(*interval(apart)))
    kept.save()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--muon", action="store_true", help="the preset `laptop`, which uses Muon")
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
