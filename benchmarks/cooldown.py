"""When should the learning rate begin to come down, and does the shape of the way down matter?

    python benchmarks/cooldown.py            # prints; about ten minutes of one core that is idle
    python benchmarks/cooldown.py --save     # and adds its runs to results/cooldown.json
    python benchmarks/cooldown.py --save --best    # and compares at the rates with the lowest means, too
    python benchmarks/cooldown.py --save --steps 1200    # the longer runs; 20 to 30 minutes
    python benchmarks/cooldown.py --show     # the tables of what the record holds (--steps 1200: of those)

The GPT, the text, the batches, AdamW and the clipping are those of chapter 11 (`optimizers.py`), 300 steps
with a warm-up of 10 %. All ways come down to 0.1 of the rate. They differ in two things only: where the way
down begins (at 10 % of the run, which is right after the warm-up, or at 60, 80 or 90 %), and its shape: a
straight line, or half a cosine. Ways with the same rate and seed share the steps before they come down.

Rates are those of `LADDER`, sqrt(2) apart. Each way begins with the same three, and gets the lowest of those
whose mean is within 0.01 nats of its best one's (chapter 11's rule), by the seeds 100 to 102. It tries the
next rate beyond while its best one is its highest, or the chosen one its lowest. Then seeds from 200 on
compare, paired by seed: eight, and up to eight more if there is time; intervals are 95 %, by Student's t.

Written before the first run. Known by then: `compare` of optimizers.json. There, with other seeds, the line
from 80 % ends 0.022 ± 0.007 below the cosine from 10 %; shape and start differ at once.

1. Late is better: the line from 10 % ends above the line from 80 %. Refuted if below.
2. The start counts for more than the shape: the line from 10 % ends above the half cosine from 80 %. (This
   difference is the mean cost of the early start, over both shapes, minus the mean cost of the cosine, over
   both starts.) Refuted if below.
3. 80 %, the trainer's default, is the best of the four starts of a line: confirmed if the three others end
   above it, refuted if one of them ends below.

A difference counts only if its interval leaves 0 out; otherwise the claim is undecided. The rule for the
rates may cost a way up to 0.01, as much as the differences may be. So a difference must also leave 0 out, on
the same side, after subtracting what the rule costs the first way more than the second, by the tuning seeds.
(Added when most of the tuning was known, and no other run: if there is time for it, `--best` runs the eight
seeds at each way's lowest mean instead, and a claim stands if it stands there as well. There was none.)

The first plan had five tuning seeds, sixteen others, more ways ("line 30"; "cosine 10", the usual one; "line
100", which never comes down) and runs of 1,200 steps. The machine was too busy: it was cut to this when six
runs were known, all of seed 100 at 0.002: the lines from 10, 30, 60, 80 and 90 % ended at 2.463, 2.453,
2.444, 2.442 and 2.444, the half cosine from 80 % at 2.442. If time is left, the ways are added, without a
claim.

The runs of 1,200 steps. Known before: the 300 steps above (+0.023 ± 0.005 for an early start, and nothing for
the shape), and `compare-longer-again` of optimizers.json: with other seeds the trapezoid from 80 % at 0.0057
ends 0.036 ± 0.029 below the cosine from 10 % at 0.008. So the first three rates are 0.004, 0.0057 and 0.008;
all else is as above. Written before the first of these runs:

4. Late is better after 1,200 steps as well: the same as 1.
5. The start counts for more than the shape: the same as 2.
6. 80 % is the best of the four starts: the same as 3.
7. The shape hardly counts: the half cosine and the line, both from 80 %, differ by less than 0.005 (the whole
   interval; refuted if it lies outside, else undecided).

When six of the eight seeds were known (line 10 minus line 80: -0.001 ± 0.023), two things were added: eight
more seeds, as the rule allows, and "cosine 10", the usual cosine, without a claim: is its trouble in 1,200
steps (2.193 in `compare-longer-again`) its early start, its shape, or its rate?
"""

import itertools
import statistics
import time
from pathlib import Path

import torch
from ablation import parser_of, worth
from optimizers import LADDER
from schedules import Runs, Schedules

from tinygpt.schedule import SCHEDULES, make_schedule
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "cooldown.json"
WARMUP, SLACK, FIRST = 0.1, 0.01, 200
RATES = {300: (0.002, 0.0028, 0.004), 1200: (0.004, 0.0057, 0.008)}  # of so many steps
# in the order in which they leave the shared run
ALL = "line 10", "cosine 10", "line 30", "line 60", "line 80", "cosine 80", "line 90", "line 100"
WAYS = "line 10", "line 60", "line 80", "cosine 80", "line 90"


def late_cosine(step, top, last, cooldown):
    "Half a cosine, as late as the trapezoid's straight line."
    top = max(top, last - cooldown)
    return 1.0 if step <= top else SCHEDULES["cosine"](step, top, last, cooldown)


SCHEDULES["late cosine"] = late_cosine


class Cooldown(Runs):
    model = "chapter 11"

    def __call__(self, row: str, rate: float, seed: int, steps: int) -> dict:
        "One run, and its loss on held-out text."
        start = time.process_time()
        shape, begin = row.split()
        kind, warm = {"line": "trapezoid", "cosine": "late cosine"}[shape], round(WARMUP * steps)
        schedule = make_schedule(kind, steps, warm, cooldown=1 - int(begin) / 100)
        flat = make_schedule("constant", steps, warm)
        leaves = next((s for s in range(steps) if schedule(s) != flat(s)), steps)
        loss = self.branch((rate, seed, steps), seed, leaves, [rate * schedule(s) for s in range(steps)])
        seconds = round(time.process_time() - start, 1)
        print(f"{row:9} rate {rate:<6g} seed {seed}: {loss:.4f} ({seconds} s)", flush=True)
        return dict(row=row, rate=rate, seed=seed, steps=steps, loss=loss, cpu_s=seconds)


class Cooldowns(Schedules):
    def choose(self, losses: dict) -> float:
        "The lowest rate about as good as the best."
        best = min(map(worth, losses.values()))
        return min(rate for rate in losses if worth(losses[rate]) <= best + SLACK)

    def grid(self, ways, steps: int):
        "Each way at the first three rates, and outward while it must."
        wanted = {rate: ways for rate in RATES[steps]}
        while wanted:
            for rate, seed in itertools.product(sorted(wanted), self.seeds):
                for row in wanted[rate]:
                    self.ensure(row, rate, [seed], steps)
            wanted = {}
            for row in ways:
                tried = self.tuning(row, steps)
                for edge, up in ((min(tried), -1), (max(tried), 1)):
                    at = self.choose(tried) if up < 0 else self.best(row, steps)
                    if at == edge:
                        wanted.setdefault(LADDER[LADDER.index(edge) + up], []).append(row)

    def rates_of(self, row: str, steps: int) -> dict:
        "The rate by the rule, what that costs, and the rate with the lowest mean."
        tried = self.tuning(row, steps)
        rate, best = self.choose(tried), self.best(row, steps)
        return dict(rate=rate, best=best, rule_costs=round(worth(tried[rate]) - worth(tried[best]), 4))

    def summary(self) -> dict:
        "Steps: the ways. What the page reads."
        return {str(steps): self.ways(steps) for steps in RATES}

    def ways(self, steps: int) -> dict:
        "Of each way: its rate, what the rule costs it, its losses by compared seed."
        found = {}
        for row in ALL:
            if self.tuning(row, steps):
                rates = self.rates_of(row, steps)
                for name, rate in (("losses", rates["rate"]), ("losses_best", rates["best"])):
                    by = self.losses(row, rate, steps)
                    rates[name] = {str(seed): by[seed] for seed in sorted(by) if seed >= FIRST}
                if rates["losses"]:
                    found[row] = rates
        return found


def show(record: Cooldowns, steps: int):
    found = record.ways(steps)
    for which, rate in (("losses", "rate"), ("losses_best", "best")):
        print(f"\n{steps} steps, {which}, minus line 80; in brackets less what the rule costs")
        for first, second in [(row, "line 80") for row in found] + [("line 10", "cosine 80")]:
            a, b = found[first], found[second]
            both = a[which].keys() & b[which].keys()
            if len(both) > 1:
                mean, half = interval(a[which][s] - b[which][s] for s in both)
                less = mean - (a["rule_costs"] - b["rule_costs"] if rate == "rate" else 0)
                print(f"{first:9} rate {a[rate]:<6g} {statistics.mean(a[which].values()):.4f}, ", end="")
                print(f"minus {second:9} {mean:+.4f} ({less:+.4f}) ± {half:.4f}, {len(both)} seeds")


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ALL, default=WAYS, help="in this order")
    parser.add_argument("--seeds", type=int, default=8, help="that compare")
    parser.add_argument("--steps", type=int, choices=RATES, default=300)
    parser.add_argument("--best", action="store_true", help="compare at the lowest means, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = dict(rule=f"the lowest rate within {SLACK} of the lowest mean", warmup=WARMUP, final=0.1)
    record = Cooldowns(RECORD, None if args.show else Cooldown(), args.save, **head)
    if not args.show:
        record.grid(args.rows, args.steps)
        for which in ("rate", "best") if args.best else ("rate",):
            for seed in range(FIRST, FIRST + args.seeds):
                chosen = {row: record.rates_of(row, args.steps)[which] for row in args.rows}
                for row in sorted(chosen, key=chosen.get):  # one rate after the other
                    record.ensure(row, chosen[row], [seed], args.steps)
    show(record, args.steps)


if __name__ == "__main__":
    main()
