"""Chapter 24's toy: several updates on the same answers, each way at its own best rate.

    python benchmarks/old_samples.py              # prints; about ten minutes of one core
    python benchmarks/old_samples.py --save       # and writes results/old_samples.json, for chapter 24

Every run gets twelve draws of 128 answers. The ways:

- one update: one update on each draw.
- clipped: eight updates on each draw, PPO's clipped ratio with ε = 0.2.
- ratio: eight updates, the ratio of new to old probability without the clip.
- plain: eight updates with the plain loss, which takes old answers for fresh ones.

The functions are the chapter's own: its cells are run as far as they are needed. Only `one_step` is
replaced, by one that can make several updates. Each way is run at all rates of a grid from the tuning
starts; where its best rate is an edge of the grid, the grid grows on that side. Then each is run at its best
rate from other starts, thirty of them, and at twice that rate, too. A start is a model, badly taught anew.

The claims, written before the first run. "Holds" is said of a 95 % interval (Student's t, over the thirty
starts, way less way) that lies on the claim's side, "refuted" of one on the other side, "undecided" of one
that holds 0. Nothing is corrected for their number.

1. Each at its best rate, clipped ends with a higher pass@1 than one update.
2. Each at its best rate, clipped ends with a higher pass@1 than the ratio alone.
3. Each at its best rate, the ratio alone ends with a higher pass@1 than the plain loss.
4. The clip forgives: at twice its best rate, clipped loses less than the ratio alone at twice its own.

A first run had a grid of factors of two: 1 to 3 held (+0.136 ± 0.024, +0.033 ± 0.025, +0.102 ± 0.036), 4 was
undecided. A best rate between two rates of that grid might have decided the second, so the grid has the rates
between them, too.
"""

import argparse
import contextlib
import io
import math
import statistics
from functools import partial
from pathlib import Path

import matplotlib
import nbformat
import torch
from data_machine import save, tune

from tinygpt.support import interval

PAGE = Path(__file__).parent.parent / "nbs" / "24_reinforce.ipynb"
CELLS = ("imports", "nb-imports", "toy", "toy-train", "answer", "advantages", "answer-table", "loss")
CELLS += ("toy-judge", "one-step", "train")
WAYS = {
    "one update": {},
    "clipped": dict(reuse=8, clip=0.2),
    "ratio": dict(reuse=8, clip=math.inf),
    "plain": dict(reuse=8),
}
RATES = (2.5e-4, 3.5e-4, 5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3)
TUNING, STARTS = range(101, 106), range(1, 31)
DRAWS, SCORE_SEED = 12, 20_000


def several_updates(toy: dict, model, optimizer, prompts, seeds, reuse=1, clip=None) -> float:
    "The chapter's `one_step`, but with `reuse` updates on the same answers. Returns the mean reward."
    answers = toy["draw_answers"](model, prompts, 8, 4, {toy["END"]}, seeds)
    rewards = torch.tensor([toy["judge"](answer) for answer in answers]).view(len(prompts), 8)
    advantage = toy["advantages"](rewards).flatten()
    table = toy["answer_table"](answers, advantage, 6, [1 / len(answers)] * len(answers))
    for _ in range(reuse):
        optimizer.zero_grad()
        toy["policy_loss"](model, *table, clip=clip).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


def chapter() -> dict:
    "The chapter's functions, by name."
    matplotlib.use("Agg")
    names = {}
    cells = {cell.id: cell.source for cell in nbformat.read(PAGE, 4).cells}
    with contextlib.redirect_stdout(io.StringIO()):
        for name in CELLS:
            exec(compile(cells[name], name, "exec"), names)
    names["one_step"] = partial(several_updates, names)  # `reinforce` calls it
    torch.set_num_threads(1)
    return names


def measure(toy: dict, starts: dict, way: str, rate: float) -> list[float]:
    "pass@1 after a run from each of the starts."
    found = []
    for seed, start in starts.items():
        toy["taught"] = start  # where `reinforce` begins
        model, _ = toy["reinforce"](DRAWS, lr=rate, seed=seed, **WAYS[way])
        found.append(round(toy["score"](model, SCORE_SEED, n=8)[0], 4))
    return found


def half_an_octave(rate: float, up: bool) -> float:
    return rate * math.sqrt(2) if up else rate / math.sqrt(2)


def best_rate(found: dict[float, list[float]]) -> float:
    return max(found, key=lambda rate: statistics.mean(found[rate]))


def verdict(mean: float, half: float) -> str:
    return "undecided" if abs(mean) < half else "holds" if mean > 0 else "refuted"


def less(ours: list[float], theirs: list[float]) -> list[float]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def judge_claims(best: dict, double: dict) -> list[dict]:
    "The four claims and what came out."
    lost = {way: less(best[way], double[way]) for way in WAYS}
    claims = {
        "1 clipped over one update": less(best["clipped"], best["one update"]),
        "2 clipped over the ratio alone": less(best["clipped"], best["ratio"]),
        "3 the ratio alone over the plain loss": less(best["ratio"], best["plain"]),
        "4 the clip loses less at twice the rate": less(lost["ratio"], lost["clipped"]),
    }
    told = []
    for claim, differences in claims.items():
        mean, half = interval(differences)
        told.append(dict(claim=claim, mean=mean, half=half, verdict=verdict(mean, half)))
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write the record")
    args = parser.parse_args()
    toy = chapter()
    tuning = {seed: toy["teach"](seed) for seed in TUNING}
    starts = {seed: toy["teach"](seed) for seed in STARTS}
    tuned, rates, best, double = {}, {}, {}, {}
    for way in WAYS:
        found = tune(partial(measure, toy, tuning, way), RATES, best_rate, half_an_octave)
        tuned[way] = dict(sorted(found.items()))
        rates[way] = best_rate(tuned[way])
        for rate, found in tuned[way].items():
            print(f"{way:12s} rate {rate:<8g} pass@1 {statistics.mean(found):.3f}", flush=True)
        best[way] = measure(toy, starts, way, rates[way])
        double[way] = measure(toy, starts, way, 2 * rates[way])
        for name, found in ((rates[way], best[way]), (2 * rates[way], double[way])):
            print(f"{way:12s} rate {name:<8g} thirty starts: {interval(found)}", flush=True)
    claims = judge_claims(best, double)
    for row in claims:
        print(f"{row['claim']:42s} {row['mean']:+.3f} ± {row['half']:.3f}  {row['verdict']}")
    if args.save:
        curves = {way: [dict(rate=rate, runs=runs) for rate, runs in tuned[way].items()] for way in WAYS}
        save("old_samples", dict(tuned=curves, rates=rates, best=best, double=double, claims=claims))
