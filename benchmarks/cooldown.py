"""When should the learning rate begin to come down, and does the shape of the way down matter?

    python benchmarks/cooldown.py --save                 # about 12 minutes of one core
    python benchmarks/cooldown.py --save --steps 1200    # three ways, fewer seeds: about 15 more
    python benchmarks/cooldown.py --show                 # the tables of what the record holds

The GPT, the text, the batches, AdamW and the clipping are those of chapter 11 (`optimizers.py`), with a
warm-up of 10 % of the steps. All ways come down to 0.1 of the rate. They differ in two things only: where the
way down begins (at 10 % of the run, which is right after the warm-up, or at 30, 60, 80 or 90 %), and its
shape: a straight line, or half a cosine. "cosine 10" is the usual one; "line 100" never comes down; the two
have no claim and are run last. Ways with the same rate and seed share the steps before they come down.

Rates are those of `LADDER`, sqrt(2) apart. Each way begins with the same three, and gets the lowest of those
whose mean is within 0.01 nats of its best one's (chapter 11's rule), by the seeds 100 to 104 (after 1,200
steps 100 to 102). It tries the next rate beyond while its best one is its highest, or the chosen one its
lowest. Then the seeds 200 to 215 (207) compare, paired by seed; intervals are 95 %, by Student's t.

Written before the first run. Known by then: `compare` of optimizers.json. There, with other seeds, the line
from 80 % ends 0.022 ± 0.007 below the cosine from 10 %; shape and start differ at once. (And twelve runs of
20 steps, a trial of this script.)

1. Late is better: after 300 steps, the line from 10 % ends above the line from 80 %. Refuted if below.
2. The start counts for more than the shape: the line from 10 % ends above the half cosine from 80 %. (This
   difference is the mean cost of the early start, over both shapes, minus the mean cost of the cosine, over
   both starts.) Refuted if below.
3. 80 %, the trainer's default, is the best of the five starts of a line, after 300 steps: confirmed if the
   four others end above it, refuted if one of them ends below.
4. As 1, after 1,200 steps.
5. After 1,200 steps the line from 60 % ends above the line from 80 %. Refuted if below.

A difference counts only if its interval leaves 0 out; otherwise the claim is undecided. The rule for the
rates may cost a way up to 0.01, as much as the differences may be. So the claims of 300 steps are asked once
more at the rates with the lowest mean, where these are others, with the same seeds; then a claim stands if
both agree. (Should time run short, what is left out is the 1,200 steps, then this, then some of the seeds,
before any of them is known.)
"""

import argparse
import copy
import itertools
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from ablation import Record, worth
from optimizers import BATCH_SIZE, FRESH, LADDER, T, held_out_loss, make_model, make_optimizer, rows
from torch import nn

from tinygpt.data.tokens import prepare
from tinygpt.schedule import SCHEDULES, make_schedule
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "cooldown.json"
WARMUP, SLACK, FIRST, RATES = 0.1, 0.01, 200, (0.002, 0.0028, 0.004)
# in the order in which they leave the shared run
WAYS = "line 10", "cosine 10", "line 30", "line 60", "line 80", "cosine 80", "line 90", "line 100"
LONG = "line 10", "line 60", "line 80"


def late_cosine(step, top, last, cooldown):
    "Half a cosine, as late as the trapezoid's straight line."
    top = max(top, last - cooldown)
    return 1.0 if step <= top else SCHEDULES["cosine"](step, top, last, cooldown)


SCHEDULES["late cosine"] = late_cosine


class Runs:
    "Trains on the same text; keeps the run that the ways share, as far as the last one asked for."

    def __init__(self):
        data = prepare("sotu", "char", progress=False)
        self.train, self.val = (
            torch.from_numpy(np.asarray(text[:FRESH]).astype(np.int64)) for text in (data.train, data.val)
        )
        self.n_vocab, self.key = data.tokenizer.n_vocab, None

    def go(self, model, optimizer, rate, steps):
        "Train on: `steps` are the multipliers of the rate."
        for multiplier in steps:
            for group in optimizer.param_groups:
                group["lr"] = rate * multiplier
            x, y = rows(self.train, torch.randint(len(self.train) - T, (BATCH_SIZE,)))
            optimizer.zero_grad()
            model(x, y)[1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    def __call__(self, row: str, rate: float, seed: int, steps: int) -> dict:
        "One run, and its loss on held-out text."
        start = time.process_time()
        shape, begin = row.split()
        kind, warm = {"line": "trapezoid", "cosine": "late cosine"}[shape], round(WARMUP * steps)
        schedule = make_schedule(kind, steps, warm, cooldown=1 - int(begin) / 100)
        flat = make_schedule("constant", steps, warm)
        leaves = next((s for s in range(steps) if schedule(s) != flat(s)), steps)
        if self.key != (rate, seed, steps) or self.at > leaves:
            torch.manual_seed(seed)
            model = make_model("chapter 11", self.n_vocab)
            optimizer = make_optimizer(model, dict(optimizer="AdamW", lr=rate))
            self.key, self.at, self.shared = (rate, seed, steps), 0, (model, optimizer)
            self.random = torch.get_rng_state()
        torch.set_rng_state(self.random)
        self.go(*self.shared, rate, map(flat, range(self.at, leaves)))
        self.at, self.random = leaves, torch.get_rng_state()
        model, optimizer = copy.deepcopy(self.shared)
        self.go(model, optimizer, rate, map(schedule, range(leaves, steps)))
        loss, seconds = round(held_out_loss(model, self.val), 4), round(time.process_time() - start, 1)
        print(f"{row:9} rate {rate:<6g} seed {seed}: {loss:.4f} ({seconds} s)", flush=True)
        return dict(row=row, rate=rate, seed=seed, steps=steps, loss=loss, cpu_s=seconds)


class Cooldowns(Record):
    slack = SLACK

    def choose(self, losses: dict) -> float:
        "The lowest rate about as good as the best."
        best = min(map(worth, losses.values()))
        return min(rate for rate in losses if worth(losses[rate]) <= best + self.slack)

    def tuning(self, row: str, steps: int) -> dict:
        "Rate: the losses of the tuning seeds."
        at = {r["rate"] for r in self.runs if (r["row"], r["steps"]) == (row, steps)}
        by = {rate: self.losses(row, rate, steps) for rate in sorted(at)}
        return {r: [of[s] for s in self.seeds] for r, of in by.items() if of.keys() >= set(self.seeds)}

    def grid(self, ways, steps: int):
        "Each way at the first three rates, and outward while it must."
        wanted = {rate: ways for rate in RATES}
        while wanted:
            for rate, seed in itertools.product(sorted(wanted), self.seeds):
                for row in wanted[rate]:
                    self.ensure(row, rate, [seed], steps)
            wanted = {}
            for row in ways:
                tried = self.tuning(row, steps)
                for edge, up in ((min(tried), -1), (max(tried), 1)):
                    at = self.choose(tried) if up < 0 else min(tried, key=lambda rate: worth(tried[rate]))
                    if at == edge:
                        wanted.setdefault(LADDER[LADDER.index(edge) + up], []).append(row)

    def at_both(self, row: str, steps: int) -> dict:
        "The rate by the rule and the one with the lowest mean, and what the first costs by the tuning seeds."
        self.slack, careful = 0.0, self.tuned(row, steps)
        best, self.slack = self.tuned(row, steps), SLACK
        tried = self.tuning(row, steps)
        return dict(rate=careful, best=best, rule_costs=round(worth(tried[careful]) - worth(tried[best]), 4))

    def summary(self) -> dict:
        "By steps and row: the rates, and the compared losses at the rate by the rule and at the lowest mean."
        found = {}
        for steps in sorted({r["steps"] for r in self.runs}):
            self.seeds = tuning_seeds(steps)
            for row in [w for w in WAYS if self.tuned(w, steps)]:
                both = self.at_both(row, steps)
                for key, rate in (("losses", both["rate"]), ("losses_best", both["best"])):
                    by = self.losses(row, rate, steps)
                    both[key] = {str(s): by[s] for s in sorted(by) if s >= FIRST}
                found.setdefault(str(steps), {})[row] = both
        return found


def tuning_seeds(steps: int) -> range:
    return range(100, 105 if steps < 1200 else 103)


def show(record: Cooldowns):
    for steps, by_row in record.summary().items():
        for key in ("losses", "losses_best"):
            print(f"\n{steps} steps, {key}; minus line 80")
            base = by_row["line 80"][key]
            for row, of in by_row.items():
                both = [s for s in of[key] if s in base]
                if len(both) > 1:
                    mean, half = interval(of[key][s] - base[s] for s in both)
                    at = of["rate" if key == "losses" else "best"]
                    print(f"{row:9} rate {at:<6g} (the rule costs {of['rule_costs']:.4f})", end=" ")
                    print(
                        f"{statistics.mean(of[key].values()):.4f} {mean:+.4f} ± {half:.4f}, {len(both)} seeds"
                    )


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, help="that compare; 16, after 1,200 steps 8")
    parser.add_argument("--rows", nargs="+", choices=WAYS)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, long = args.steps, args.steps >= 1200
    ways = args.rows or (LONG if long else WAYS)
    head = dict(rule=f"the lowest rate within {SLACK} of the lowest mean", warmup=WARMUP, final=0.1)
    record = Cooldowns(RECORD, None if args.show else Runs(), args.save, **head)
    record.seeds = tuning_seeds(steps)
    if not args.show:
        record.grid(ways, steps)
        chosen = {row: record.at_both(row, steps) for row in ways}
        for key in ("rate", "best")[: 1 if long else 2]:
            for seed in range(FIRST, FIRST + (args.seeds or (8 if long else 16))):
                for row in sorted(ways, key=lambda row: (chosen[row][key], WAYS.index(row))):
                    record.ensure(row, chosen[row][key], [seed], steps)
    show(record)


if __name__ == "__main__":
    main()
