"""Does a wrong answer teach, too? DPO on right over wrong, beside imitation of the right answers alone.

    python benchmarks/right_over_wrong.py --runs DIR          # prints; about two hours of one core
    python benchmarks/right_over_wrong.py --runs DIR --save   # and writes results/right_over_wrong.json

DIR is that of `reinforce.py --runs DIR`, which made the start there and drew its answers: 16 sums a step, 8
answers to each, for 150 steps. Its way *rejection* is one side here: it imitates the right answers, 128 rows
a step. The other side:

- dpo: each right answer is paired with a wrong one to the same question, also drawn from the start; the wrong
  ones take turns. A question that has no right one, or no wrong one, gives no pair. DPO's loss, 64 pairs a
  step, so as many rows; the reference is the start. Steps, optimizer, schedule and seeds are rejection's.
- anchored: dpo with beta 0.1, less the log-probability of the right answer's mean token (Pang et al., 2024,
  with their alpha = 1). It begins at 5e-4, 1e-3 and 2e-3.

- held: anchored, but DPO's loss moves the wrong answers alone; it takes the right ones as given.
- anchor: anchored without DPO's loss. It has the same pairs in the same batches, and looks at the right
  answers only, 64 a step. It begins at the rates of anchored.

Each side at its own best rate, by the mean of the tuning seeds 0 and 6, by pass@1 on questions of the
training kind. dpo begins at 1e-4, 2e-4 and 4e-4 and goes outward by factors of 2 from a best at an edge,
for each beta; the best beta, by the same means, is compared. Seeds 10 to 17 compare.

Written before the first run of dpo; rejection's score was known by then, at 1e-3 (0.628), and so was that its
own best rate is higher. The rule is that of reinforce.py: of the differences, paired by seed, a 95 % interval
by Student's t; a claim is undecided where 0 is inside.

1. Right over wrong teaches: dpo ends with a higher pass@1 on held-out sums than the start. Refuted if lower.
2. Wrong answers teach, too: dpo ends with a higher pass@1 than rejection. Refuted if lower.

anchored and its claims came when three runs of dpo were known: with beta 0.1, practiced sums fell from 0.233
to 0.217 and 0.217 at 1e-4, and to 0.198 at 2e-4 (one seed), while the loss fell from 0.69 to 0.6 and below.
Since such a side is best where it hardly trains, no way gets more than five rates for a beta. beta = 2 was
added when 0.5 at up to 4e-4 was known to be better than 0.1 (0.286 against 0.240 at best).

3. The anchor helps: anchored ends with a higher pass@1 than dpo. Refuted if lower.
4. With it, wrong answers teach: anchored ends with a higher pass@1 than rejection. Refuted if lower.

In a first record, of seeds 10 to 15, claims 1 and 3 were confirmed, 2 and 4 refuted, and the best beta was 2,
the largest. So beta = 8 was added, and 32 in case that 8 is the best, and with them the two seeds that time
had left out. Expected: all four claims stay as they are.

A step of rejection has twice as many right answers as one of anchored, so 4 does not say what the wrong ones
are worth. anchor differs from anchored in DPO's term alone. Written before its first run:

5. Wrong answers teach, beside the right ones: anchored ends with a higher pass@1 than anchor. Refuted if
   lower.

5 was confirmed, +0.058 ± 0.022. But DPO's term also pushes the right answers up, with about a tenth of the
anchor's weight. In held it pushes on the wrong ones only. Both anchor and anchored chose 0.002, so that is
its rate. Written before its first run:

6. It is the wrong answers: held ends with a higher pass@1 than anchor. Refuted if lower.
"""

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from data_machine import load, save, tune
from reinforce import (
    GROUP,
    QUESTIONS,
    STEPS,
    TUNING_SEEDS,
    quick_score,
    score,
    settings,
    start_answers,
    write,
)

from tinygpt.checkpoint_open import open_model
from tinygpt.prefer.dpo import dpo_loss
from tinygpt.prefer.train import Preferences, dpo_objective, pair_logps
from tinygpt.train import train

BETAS, RATES = (0.1, 0.5, 2.0, 8.0), (1e-4, 2e-4, 4e-4)
SEEDS = (10, 11, 12, 13, 14, 15, 16, 17)
ANCHORED_RATES = (5e-4, 1e-3, 2e-3)
HELD_OUT = 32  # pairs that are not learned from


def drawn_pairs(place: Path, seed: int) -> list[tuple[list[int], list[int], list[int]]]:
    "(prompt, right, wrong) from the answers that rejection draws; made once a seed."
    path = place / f"pairs-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    model, tokenizer, _ = open_model(place / "start")
    pairs, right_ones = [], 0
    for answers, verdicts in start_answers(model, tokenizer, seed):
        for i, row in enumerate(verdicts.tolist()):
            group = answers[i * GROUP : (i + 1) * GROUP]
            right = [answer for answer, verdict in zip(group, row) if verdict]
            wrong = [answer for answer, verdict in zip(group, row) if not verdict]
            right_ones += len(right)
            if wrong:
                pairs += [(a.prompt, a.new, wrong[k % len(wrong)].new) for k, a in enumerate(right)]
    kept = len(json.loads((place / f"kept-{seed}.json").read_text())["kept"])
    assert kept == right_ones, "these are not the answers that rejection learned from"
    write(path, pairs)
    return pairs


def anchored_rows(module, x, y, beta: float, way: str):
    "Minus the log-probability of each chosen answer's mean token; DPO's loss is added as the way says."
    chosen, rejected, *refs = pair_logps(module, x, y)
    length = (y[0::2, :, 0] >= 0).sum(1)
    loss = -chosen / length
    if way == "anchored":
        loss = loss + dpo_loss(chosen, rejected, *refs, beta)
    if way == "held":
        loss = loss + dpo_loss(chosen.detach(), rejected, *refs, beta)
    return loss.sum()


def measure(place: Path, way: str, beta: float, rate: float, seed: int) -> dict:
    "One run and its scores; taken from the folder where it is there."
    path = place / f"{way}-{beta:g}-{rate:g}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    start, tokenizer, _ = open_model(place / "start")
    pairs = drawn_pairs(place, seed)
    preferences = Preferences(pairs[HELD_OUT:], pairs[:HELD_OUT], beta)
    config = settings(place, path.stem, place / "start", STEPS, rate, seed, QUESTIONS * GROUP)
    objective = dpo_objective(preferences)
    if way != "dpo":
        objective = replace(objective, loss_fn=partial(anchored_rows, beta=beta, way=way))
    result = train(config, overwrite=True, progress="none", objective=objective)
    found = dict(way=way, beta=beta, rate=rate, seed=seed, pairs=len(preferences.pairs))
    found |= dict(first_loss=result.losses[0], last_loss=statistics.mean(result.losses[-10:]))
    found |= {name: result.figures[name] for name in ("rewards/chosen", "rewards/rejected")}
    if seed in TUNING_SEEDS:
        found |= quick_score(result.model, tokenizer)
    else:
        found |= score(result.model, tokenizer, start)
    write(path, found)
    print(found, flush=True)
    return found


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    tuning = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:

        def made(asked: list[tuple]) -> list[dict]:
            return list(pool.map(measure, *zip(*((args.runs, *one) for one in asked))))

        def chosen(way: str, betas: tuple, rates: tuple) -> tuple:
            "(way, beta, rate): the best in tuning."
            values = {}
            for beta in betas:

                def loss(rate: float, beta=beta) -> float:
                    runs = made([(way, beta, rate, seed) for seed in TUNING_SEEDS])
                    tuning.extend(runs)
                    return -statistics.mean(run["practiced"] for run in runs)

                values |= {(beta, rate): value for rate, value in tune(loss, rates, most=5).items()}
            return way, *min(values, key=values.get)

        settled = [
            chosen("dpo", BETAS, RATES),
            chosen("anchored", BETAS[:1], ANCHORED_RATES),
            chosen("anchor", BETAS[:1], ANCHORED_RATES),
        ]
        settled.append(("held", *settled[-1][1:]))
        print(settled, flush=True)
        compared = made([(*best, seed) for seed in SEEDS for best in settled])
    record = load("reinforce")
    recorded = [run for run in record["compared"] if run["name"] == "rejection" and run["seed"] in SEEDS]
    compared += [dict(run, way="rejection") for run in recorded]
    gentle = [run for run in record["gentle"] if run["name"] == "rejection" and run["seed"] in SEEDS]
    compared += [dict(run, way="gentle") for run in gentle]  # rejection at 1e-3
    if args.save:
        about = dict(tuning_seeds=TUNING_SEEDS, seeds=SEEDS, settled=settled, tuning=tuning)
        save("right_over_wrong", dict(**about, start=record["start"], compared=compared))


if __name__ == "__main__":
    main()
