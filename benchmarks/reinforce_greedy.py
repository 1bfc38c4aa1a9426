"""Did chapter 24's ways learn more than the start's likeliest answers show for nothing?

    python benchmarks/reinforce_greedy.py --base RUN --runs DIR --save   # groups, rejection, online; one seed
    python benchmarks/reinforce_greedy.py --base RUN --runs DIR --ways groups --seeds 10 11 12

RUN is a trained run of the preset laptop. What is finished in DIR is not made again.

reinforce.py compares draws at temperature 1. At temperature 0 the start costs no training, and no record has
its score. If it is right as often as a trained way is in its draws, then that way's gain may be a sharpening:
the model draws more often what it held likeliest before. What is new shows at temperature 0 on both sides,
and in pass@8. (The objection is Yue et al.'s, 2025, who compare pass@k for large k.)

The runs are those of reinforce.py, from a base and a start made anew: start, questions, steps, the record's
rates, seeds. Each of the test's sums is asked once, 228 pairs of numbers: 16 draws at temperature 1, and one
answer at temperature 0. START_STEPS stays 600; a start that is right in less than 0.1 or more than 0.45 of
its draws of practiced sums would say little about the record, and is then reported as such.

The rule: a difference of shares, paired by question and averaged over the seeds that were run; of it a 95 %
interval by Student's t over the questions. So it is about these runs, not about others: in the record a seed
moves pass@1 by 0.02 (one standard deviation). A claim holds if the interval lies on its side of 0, is refuted
on the other side, and is undecided if 0 is inside.

Written before the first run. Known were the record of reinforce.py (pass@1: start 0.22, groups 0.31, online
0.47, rejection 0.68), the page's toy, whose start is right in 0.24 of its draws and in 0.95 at temperature 0,
and whole.json: there 300 steps of online, from another start, took sums at temperature 0 from 25, 30 and 41
of 50 to 43, 40 and 48.

1. Temperature 0 gives for nothing what the recipe gives: the start at temperature 0 is right more often than
   groups in its draws. Refuted if less often.
2. groups learned more than to sharpen: at temperature 0 it is right more often than the start at temperature
   0. Refuted if less often.
3. So did online. Refuted likewise.
4. So did rejection. Refuted likewise.
5. rejection's draws are right more often than the start at temperature 0. Refuted if less often.

Before the runs of the record only the start was made and asked: 0.445 in draws, 0.623 at temperature 0. It
is right in 0.475 of its draws of practiced sums, so it says little about the record. A run of groups that
was stopped after 24 of its 150 steps was seen as well, and thrown away: 0.474 and 0.601.
"""

import argparse
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from data_machine import load, save
from reinforce import DRAWS, PRACTICED, RECIPE, SEEDS, STEPS, make_start, measure, quick_score, write

from tinygpt.checkpoint_open import open_model
from tinygpt.evaluate.tasks import pass_at_k
from tinygpt.finetune.answers import ask
from tinygpt.finetune.tasks import Example, is_right, make_examples
from tinygpt.reinforce.rollout import ask_and_judge, draw_seed
from tinygpt.support import interval

WAYS = ("groups", "rejection", "online", "frozen", "none", "fewer")
CLAIMS = (  # what is claimed, the side that should be right more often, its rival: (who, which score)
    ("temperature 0 gives what the recipe gives", ("start", "cold"), ("groups", "drawn")),
    ("groups learned more than to sharpen", ("groups", "cold"), ("start", "cold")),
    ("so did online", ("online", "cold"), ("start", "cold")),
    ("so did rejection", ("rejection", "cold"), ("start", "cold")),
    ("rejection's draws beat the start's best", ("rejection", "drawn"), ("start", "cold")),
)


def every_sum() -> list[Example]:
    "The sums of the test, one question for each pair of numbers."
    found = {}
    for example in make_examples(4000, 10, "test", [PRACTICED]):
        numbers = re.findall(r"\d+", example.messages[-1]["content"])
        found.setdefault(tuple(sorted(numbers)), example)
    return list(found.values())


def outcomes(model, tokenizer) -> dict:
    "By question: the number of draws that are right, and whether the answer at temperature 0 is."
    examples, drawn = every_sum(), []
    for first in range(0, len(examples), 16):  # a few at a time: a cache takes memory
        part = examples[first : first + 16]
        seeds = [draw_seed(20, first + i, j) for i in range(len(part)) for j in range(DRAWS)]
        _, verdicts = ask_and_judge(model, tokenizer, part, seeds, replace(RECIPE, group=DRAWS))
        drawn += verdicts.sum(1).int().tolist()
    answers = ask(model, tokenizer, [e.messages for e in examples], max_new_tokens=RECIPE.max_new_tokens)
    return dict(drawn=drawn, cold=[int(is_right(e, answer)) for e, answer in zip(examples, answers)])


def asked(place: Path, name: str, folder: Path) -> dict:
    "The outcomes of this model; taken from the folder where they are there."
    path = place / f"outcomes-{name}.json"
    if not path.exists():
        model, tokenizer, _ = open_model(folder)
        write(path, outcomes(model, tokenizer))
    found = json.loads(path.read_text())
    means = {"pass@1": statistics.mean(found["drawn"]) / DRAWS, "greedy": statistics.mean(found["cold"])}
    means["pass@8"] = statistics.mean(pass_at_k(DRAWS, right, 8) for right in found["drawn"])
    print(name, {key: round(value, 3) for key, value in means.items()}, flush=True)
    return found | means


def shares(runs: list[dict], score: str) -> list[float]:
    "By question, the share that is right, averaged over the runs."
    scale = DRAWS if score == "drawn" else 1
    return [statistics.mean(rights) / scale for rights in zip(*(run[score] for run in runs))]


def judged(runs: dict[str, list[dict]]) -> list[dict]:
    "The claims whose two sides were run."
    found = []
    for claim, side, rival in CLAIMS:
        if side[0] in runs and rival[0] in runs:
            pairs = zip(shares(runs[side[0]], side[1]), shares(runs[rival[0]], rival[1]))
            mean, half = interval([a - b for a, b in pairs])
            verdict = "undecided" if abs(mean) < half else "confirmed" if mean > 0 else "refuted"
            found.append(dict(claim=claim, side=side, rival=rival, mean=mean, half=half, verdict=verdict))
            print(f"{claim:44s} {mean:+.3f} ± {half:.3f}  {verdict}")
    return found


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--base", type=Path, required=True, help="a trained run of the preset laptop")
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS[:3])
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS[:1])
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.runs.mkdir(parents=True, exist_ok=True)
    folder = make_start(args.runs, args.base)
    runs = {"start": [asked(args.runs, "start", folder)]}
    model, tokenizer, _ = open_model(folder)
    practiced = quick_score(model, tokenizer)["practiced"]
    print(f"the start, practiced sums: {practiced:.3f}", flush=True)
    rates = load("reinforce")["rates"]
    for seed in args.seeds:
        for name in args.ways:
            measure(args.runs, name, rates[name], seed)
            run = f"{name}-{rates[name]:g}-{seed}"
            runs.setdefault(name, []).append(asked(args.runs, run, args.runs / run))
    claims = judged(runs)
    if args.save:
        about = dict(steps=STEPS, draws=DRAWS, seeds=args.seeds, rates=rates, practiced=practiced)
        save("reinforce_greedy", dict(**about, claims=claims, runs=runs))


if __name__ == "__main__":
    main()
