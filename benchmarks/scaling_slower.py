"""Does the growth of the best size survive another rate? The record of `scaling.py` again, at half of Muon's.

    python benchmarks/scaling_slower.py           # the runs, then the tables; about 30 minutes of one core
    python benchmarks/scaling_slower.py --tune    # and each cell at its own rate; about 40 minutes more
    python benchmarks/scaling_slower.py --show    # the tables of what the record holds

`scaling.py` found that the best size grows as C^(0.458 ± 0.020), with one pair of rates for all sizes and
budgets: 0.02 for Muon and 0.012 for AdamW, chosen by one seed at its smaller two budgets. Here the 15 cells
(five sizes at each of three budgets) are run at 0.01 for Muon; everything else is the same, seed by seed. One
seed after the other, each with all 15 cells; a seed counts when it is complete. It goes on where its record
ends, results/scaling_slower.json.

Written before the first run. By then this was known: seed 0 had both rates at five cells (0.01 ended lower by
0.011 and 0.007 at two of them, higher by 0.030, 0.004 and 0.008 at three); with four times the largest budget
the model 84 wide ended 0.014 ± 0.003 lower at 0.01, at 1.229 over three seeds. One run of the old record (12
wide, seed 1) was repeated on this machine and ended at the same loss to all five digits.

Intervals are 95 % by Student's t over seeds, differences paired by seed. With two seeds they are wide, and a
claim may stay undecided for that alone. a is the exponent of the line through the parabolas' lowest points.

1. The exponent survives half the rate: a at 0.01 less a at 0.02 lies within ± 0.04 (what lies between 0.46
   and 0.5). Refuted if the whole interval lies outside, undecided if it contains a bound.
2. At 0.01, too, the best size grows more slowly than C^0.5: the interval of a lies below 0.5. Refuted if it
   lies above, undecided if it contains 0.5.
3. So it does with each cell at the better of its two rates, by the mean over the seeds here. As 2.
4. A law fitted to the runs at 0.01 foretells the run at 0.01 with four times the largest budget (84 wide):
   the bootstrap's interval of 90 %, made as in `scaling.py predict`, holds 1.229. Refuted if it does not.
5. So does the law of the cells at the better of their two rates. As 4.

In 12 of the 15 cells the lower of these two rates was the better one: no cell's rate was tuned. `--tune` goes
on in each, with all three seeds and by factors of two, until the best rate by the mean has a worse one on
either side. Written before the first run:

6. With each cell at its best rate, too, the best size grows more slowly than C^0.5, by five sizes. As 2.
7. So it does by the three sizes around each minimum. As 2.
8. By these three, the text grows faster than the size: the difference of the exponents lies above 0. Refuted
   if the interval lies below, undecided if it contains 0.
"""

import argparse
import statistics
from functools import partial

import numpy as np
import scaling
from data_machine import Kept, load, lowest, tune
from scaling import BUDGETS, LARGE, SEEDS, at_budget, best_size, matrices

from tinygpt.scaling import bootstrap_laws, fit_law, power_law, predict_loss
from tinygpt.support import interval

NAME, USUAL, MUON, ADAMW = "scaling_slower", 0.02, 0.01, 0.012
WIDTH = 84  # of the run that is foretold


def recorded() -> list[dict]:
    return Kept(NAME).runs


def halved() -> list[dict]:
    "The runs at half of Muon's rate."
    return [row for row in recorded() if row["muon_lr"] == MUON]


def add(flops: float, width: int, rate: float, seed: int):
    "One run, unless the record has it."
    config = scaling.settings(width, flops, rate, ADAMW, seed)
    key = dict(width=width, steps=config.optim.max_steps, muon_lr=rate, seed=seed)
    Kept(NAME).get(key, partial(scaling.run, config))


def make():
    for seed in SEEDS:
        # the middle of a budget first, and its slowest run last: the time may run out
        for flops, width in [(f, widths[i]) for f, widths in BUDGETS.items() for i in (2, 4, 1, 3, 0)]:
            add(flops, width, MUON, seed)


def of_cell(rows: list[dict], flops: float, width: int, rate: float) -> list[dict]:
    "The runs of a size at a budget, at a rate of Muon."
    steps = scaling.settings(width, flops, rate, ADAMW, SEEDS[0]).optim.max_steps
    key = dict(width=width, steps=steps, muon_lr=rate)
    return [row for row in rows if key.items() <= row.items()]


def tuned(run: bool = True) -> list[dict]:
    "The runs of each cell at its best rate by the mean; makes what the record lacks, if it may."
    usual, found = load("scaling")["runs"], []
    for flops, width in [(flops, width) for flops, widths in BUDGETS.items() for width in widths]:

        def rows_at(rate, flops=flops, width=width):
            return of_cell(usual + recorded(), flops, width, rate)

        def measure(rate, flops=flops, width=width, rows_at=rows_at):
            for seed in SEEDS if run and rate != USUAL else ():
                add(flops, width, rate, seed)
            return statistics.mean(row["loss"] for row in rows_at(rate))

        tried = tune(measure, [USUAL, MUON])
        print(
            f"{flops:.3g}, {width} wide:", ", ".join(f"{rate:g} {tried[rate]:.4f}" for rate in sorted(tried))
        )
        found += rows_at(lowest(tried))
    return found


def show_tuned():
    rows = tuned(run=False)
    for near in (5, 3):
        growth = [exponent(rows, seed, near) for seed in SEEDS]
        print(f"each cell at its best rate, {near} sizes: C^({{:.3f}} ± {{:.3f}})".format(*interval(growth)))


def better(usual: list[dict], slower: list[dict]) -> list[dict]:
    "The runs of each cell at the rate with the lower mean."
    chosen = []
    for flops in BUDGETS:
        old, new = at_budget(usual, flops), at_budget(slower, flops)
        for width in BUDGETS[flops]:
            rate = MUON if new[width] < old[width] else USUAL
            chosen += of_cell(usual + slower, flops, width, rate)
    return chosen


def exponent(made: list[dict], seed: int | None = None, near: int = 5) -> float:
    return power_law(list(BUDGETS), [best_size(made, flops, seed, near)[0] for flops in BUDGETS])[1]


def foretell(made: list[dict], measured: int) -> tuple[float, float, float]:
    "(low, the law's loss, high) for the large run's mean over so many seeds, as `scaling.predict` does it."
    columns = [np.array([row[key] for row in made], float) for key in ("matrices", "tokens", "loss")]
    groups = {}
    for row in made:
        groups.setdefault((row["width"], row["steps"]), []).append(np.log(row["loss"]))
    noise = statistics.mean(statistics.variance(group) for group in groups.values()) ** 0.5
    steps = scaling.settings(WIDTH, LARGE, MUON, ADAMW, SEEDS[0]).optim.max_steps
    where = matrices(WIDTH), steps * scaling.ROWS * scaling.LENGTH
    low, _, high = predict_loss(bootstrap_laws(*columns), *where, noise / measured**0.5)
    return low, float(fit_law(*columns).loss(*where)), high


def show():
    record, slower = load("scaling"), halved()
    cells = sum(map(len, BUDGETS.values()))
    seeds = [seed for seed in SEEDS if sum(row["seed"] == seed for row in slower) == cells]
    usual, slower = ([row for row in rows if row["seed"] in seeds] for rows in (record["runs"], slower))
    print(f"complete: seeds {seeds}. The loss at {MUON} less the loss at 0.02:")
    for flops in BUDGETS:
        gaps = {width: [] for width in BUDGETS[flops]}
        for seed in seeds:
            old, new = at_budget(usual, flops, seed), at_budget(slower, flops, seed)
            for width, found in gaps.items():
                found.append(new[width] - old[width])
        print(f"{flops:.3g}: ", ", ".join(f"{w} wide {statistics.mean(g):+.3f}" for w, g in gaps.items()))
    sets = {"0.02": usual, "0.01": slower, "the better": better(usual, slower)}
    growth = {name: [exponent(rows, seed) for seed in seeds] for name, rows in sets.items()}
    measured = {"0.02": record["large"], "0.01": record["slower"], "the better": record["slower"]}
    for name, rows in sets.items():
        sizes = ", ".join(f"{best_size(rows, flops)[0] / 1e3:.0f} k" for flops in BUDGETS)
        mean, half = interval(growth[name])
        print(f"{name}: {sizes}; grows as C^({mean:.3f} ± {half:.3f}), of the means {exponent(rows):.3f}")
        came = [row["loss"] for row in measured[name] if row["width"] == WIDTH]
        low, loss, high = foretell(rows, len(came))
        came = statistics.mean(came)
        told = f"the law foretells {loss:.3f} ({low:.3f} to {high:.3f}); {came:.3f} came"
        print(f"    {told}, {loss / came - 1:+.1%}")
    for name in ("0.01", "the better"):
        mean, half = interval(new - old for new, old in zip(growth[name], growth["0.02"]))
        print(f"exponent at {name} less the one at 0.02: {mean:+.3f} ± {half:.3f}")


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--tune", action="store_true", help="each cell at its own rate, too")
    parser.add_argument("--show", action="store_true", help="make no runs")
    args = parser.parse_args()
    if not args.show:
        make()
    if args.tune and not args.show:
        tuned()
    show()
    if any(row["muon_lr"] not in (MUON, USUAL) for row in recorded()):
        show_tuned()


if __name__ == "__main__":
    main()
