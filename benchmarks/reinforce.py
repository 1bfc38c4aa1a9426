"""What chapter 24's recipe brings on generated questions, beside a rival that may draw as many answers.

    python benchmarks/reinforce.py              # prints; about three hours of one core
    python benchmarks/reinforce.py --save       # and writes results/reinforce.json, which chapter 24 shows
    python benchmarks/reinforce.py --base RUN   # from this trained run of the preset laptop; else one is made
    python benchmarks/reinforce.py --runs DIR   # keeps what is finished in DIR, and goes on there
    python benchmarks/reinforce.py --jobs 2     # two runs at a time, one core each

A base model is fine-tuned for a short while on right answers to two tasks, sums and letters to sort: the
start. Some of its sums are right, nearly all of its letters are. From there on nobody shows it an answer. It
practices sums only, and is asked others: no pair of numbers of the test occurs in training, in either order.
Each run makes 150 steps and draws the same number of answers, 128 for each step, in the format of training:

- groups: the chapter's recipe, a policy gradient: 16 questions a step, asked 8 times each, with the group's
  mean as baseline.
- none: groups without a baseline, which imitates its own right answers, drawn anew at each step.
- online: none with 128 questions a step, asked once each.
- batch: online with the mean of the step's 128 rewards as baseline.
- frozen: online, but the start answers, at each step. Questions, seeds, format and loss are those of online.
- rejection: all answers are drawn from the start, as groups asks them, the right ones are kept, and it is
  fine-tuned on those for as many steps of as many rows (Yuan et al., 2023). The rival.
- fewer: rejection with 34 rows a step instead of 128, as many as frozen has right answers; nothing else is
  changed. 150 steps read 5,100 rows, and about 4,950 answers are kept: each is read about once, as in frozen
  (rows are taken at random, so about a third is never read). So the number in a step and how often an answer
  is read change together, as they do between frozen and rejection: at 150 steps, one gives the other.

Learning rates: each way by itself, by the mean of seeds 0 and 6, by pass@1 on questions of the training kind,
most of whose pairs of numbers those runs have practiced. First 3e-4 and 5e-4 (rejection and fewer: 1e-3 and
1.5e-3), then outward, by factors of 1.3 to 2, while the best is at an edge. A cliff is an edge, too: where
the next higher rate ends below the start, and is more than 1.5 times the best, the rate halfway (the
geometric mean) is tried as well. The compared seeds are others: 10 to 17. *gentle* in the record is rejection
at 1e-3, as it was compared before it was tuned, and fewer at 1e-3; frozen's own rate is the same.

Asked again. An earlier record (the old one below: git has it, and EXPERIMENTS.md its answers) had these ways
but frozen, five more, five seeds, and two faults. All ways that draw as they learn drew their answers in
float32 and trained in bfloat16, a bug that is mended; and each rate came from one seed and a grid with a
factor of 3.3, beside a cliff. So its answers, in brackets, were known when the claims were written, but its
numbers can't be carried over: base and start are new, too. Claims and rule were written before the first of
the new runs.

One thing was changed after some of them. From the new base 400 steps of fine-tuning, as before, gave a start
that is right in 0.08 of its draws of practiced sums; the old one was right in 0.35 of held-out ones. Of 600
and 900 steps (0.23 and 0.79) the one nearer to 0.35 was taken, by the start's score alone. Known were then,
from the weak start, by rate: groups 0.12, 0.08 and 0.04, none 0.13, 0.11 and 0.06, online 0.15 at 3e-4.
Claims and rule stayed. Then time ran short, when groups at 3e-4 and 5e-4 was known from the new start: the
grid lost its 1e-3 (where 5e-4 is better, it comes back), rejection its tuning, and online its twin with a
baseline, claim 6. Both were made up for later, with frozen, which is new. Known were then all numbers of
groups, none and online, and rejection's at 1e-3: 0.628. Claims 4 and 8 are as they were, for rejection at its
own best rate. Claim 9 and its reason were written before the first run of frozen.

The rule: of the differences, paired by seed, a 95 % interval by Student's t. A claim holds if it lies on the
claim's side of 0, is refuted if it lies on the other side, and is undecided if 0 is inside. The intervals are
over the seeds of the training: all runs begin with one start, and are asked the same questions. Nothing is
corrected for the number of claims. All are of held-out questions.

1. groups raises pass@1 over the start. Refuted if it lowers it. (Held.)
2. pass@8 gains less than pass@1: groups sharpens what the start can do. Refuted if it gains more. (Held, but
   pass@8 began at 0.88, so it could hardly fail.)
3. The group's mean helps: groups ends with a higher pass@1 than none. Refuted if lower. (Refuted. It is asked
   because a baseline pulls where answers come from another distribution than that of the loss.)
4. Fresh answers are better than the start's: online ends with a higher pass@1 than rejection. Refuted if
   lower. (Refuted; only online had the bug.)
5. A step of more questions is better: online ends with a higher pass@1 than none. Refuted if lower. (Held.)
6. A baseline costs where each question is asked once: batch ends with a lower pass@1 than online. Refuted if
   higher. (Held.)
7. What is not practiced suffers: groups ends with a lower pass@1 in sorting than the start. Refuted if
   higher. (Undecided.)
8. groups ends with a higher pass@1 than rejection. Refuted if lower. (Refuted.)
9. All else equal, fresh answers are better: online ends with a higher pass@1 than frozen. Refuted if lower.
   (Not in the old record. Rejection differs from online in its rate, its questions, and the right answers in
   a step, and it reads an answer several times; frozen differs in who answers. Online's right answers grow
   from 34 of 128 a step to 72, frozen's stay near 34: so online should win.)

fewer came last. Known were all numbers of the six ways: rejection 0.677, at 1e-3 0.628, frozen 0.474. Does
the number of right answers in a step bring rejection's lead? Written before the first run of fewer:

10. Something else brings a part: fewer ends with a higher pass@1 than frozen. Refuted if lower. (What differs
    between the two is the questions: 2,400, with several right answers to one, instead of 19,200. And the
    loss is the mean of 34 rows, not the sum over right ones divided by 128; AdamW hardly notices. So fewer
    should not win.)
11. The number brings a part: fewer ends with a lower pass@1 than rejection. Refuted if higher.
12. The number brings most of it: fewer ends nearer to frozen than to rejection, so below the mean of the two,
    seed by seed. Refuted if nearer to rejection.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from data_machine import save

from tinygpt.checkpoint_open import open_model
from tinygpt.finetune.tasks import make_examples
from tinygpt.finetune.template import make_chat_base, render
from tinygpt.precision import choose_policy
from tinygpt.prefer.train import open_reference
from tinygpt.reinforce.policy import Answer, answer_table, policy_loss
from tinygpt.reinforce.rollout import (
    Recipe,
    RolloutLoader,
    answer_logprobs,
    ask_and_judge,
    divided_already,
    draw_seed,
    measure_pass,
    reinforce_objective,
)
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import Objective
from tinygpt.support import atomic_path
from tinygpt.train import train

PRACTICED, OTHER = "add", "sort"
START_STEPS = 600  # of fine-tuning on right answers to both
STEPS = 150
QUESTIONS, GROUP = 16, 8  # of a step
LADDER = (1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2)
RATES = (3e-4, 5e-4)  # of the ladder, for a beginning
REJECTION_RATES = (1e-3, 1.5e-3)  # of the ways that imitate kept answers
TUNING_SEEDS = (0, 6)
SEEDS = (10, 11, 12, 13, 14, 15, 16, 17)
HELD_OUT, DRAWS = 120, 16  # questions of a score, and answers to each
RECIPE = Recipe(tasks=(PRACTICED,), group=GROUP, baseline="group")
VARIANTS = {
    "groups": RECIPE,
    "none": replace(RECIPE, baseline="none"),
    "online": replace(RECIPE, group=1, baseline="none"),
    "batch": replace(RECIPE, group=1, baseline="batch"),
    "frozen": replace(RECIPE, group=1, baseline="none"),
}
ROWS = {"rejection": QUESTIONS * GROUP, "fewer": 34}  # of a step, for the ways that imitate kept answers
WAYS = (*VARIANTS, *ROWS)


class FromStart(RolloutLoader):
    "Asks what a run asks, but the start answers."

    def __init__(self, run, recipe, questions):
        super().__init__(run, recipe, questions)
        self.answering = open_reference(run)

    def _draw(self):
        with patch.object(self.run, "model", self.answering):
            return super()._draw()


class Pool:
    "A loader over given answers: each step takes some of them at random. Used for right answers only."

    def __init__(self, run, answers: list[Answer], rows: int):
        self.run, self.answers, self.rows, self.step = run, answers, rows, 0

    def __next__(self):
        rng = random.Random(f"{self.run.config.run.seed} {self.step}")
        answers = [rng.choice(self.answers) for _ in range(self.rows)]
        self.step += 1
        longest = max(len(a.prompt) + len(a.new) for a in answers) - 1
        weights = [1 / RECIPE.max_new_tokens / self.rows] * self.rows
        return answer_table(answers, torch.ones(self.rows), -(-longest // 16) * 16, weights)

    def state_dict(self):
        return dict(step=self.step)

    def load_state_dict(self, state):
        self.step = state["step"]

    def close(self):
        pass


def imitate(answers: list[Answer], rows: int) -> Objective:
    "The loss of these answers' tokens: `policy_loss` with an advantage of 1 for all."
    return Objective(policy_loss, partial(Pool, answers=answers, rows=rows), divided_already)


def settings(place: Path, name: str, source: Path, steps: int, rate: float, seed: int, rows: int):
    "A run's config: the laptop's, with a second training's rates."
    config = preset("laptop")
    config.run.name, config.run.out, config.run.seed = name, str(place), seed
    config.run.init_from = str(source)
    config.data.batch_size = rows
    o, e = config.optim, config.eval
    o.optimizer, o.learning_rate, o.weight_decay, o.max_steps = "adamw", rate, 0.0, steps
    o.schedule, o.warmup_steps, o.cooldown, o.final_lr = "trapezoid", 5, 0.3, 0.1
    e.eval_every, e.save_every, e.sample_tokens, e.compressors, e.log_every = 0, 0, 0, False, 5
    e.final_eval_tokens = 16_000
    config.system.compile, config.system.device = "off", "cpu"
    return config


def right_answers(tokenizer, n: int) -> list[Answer]:
    "Questions of the training kind, with the answers that a program computed."
    pool = []
    for example in make_examples(n, 1, "train", [PRACTICED, OTHER]):
        prompt, _ = render(tokenizer, example.messages, add_generation_prompt=True)
        new = [*tokenizer.encode(example.answer), tokenizer.special["<|end|>"]]
        pool.append(Answer(prompt, new=new, logprobs=[0.0] * len(new)))
    return pool


def make_start(place: Path, base: Path) -> Path:
    "The fine-tuned start, made once."
    folder = place / "start"
    if not (folder / "report.md").exists():
        chat = place / "chat_base"
        if not chat.exists():
            make_chat_base(base, chat)
        _, tokenizer, _ = open_model(chat)
        config = settings(place, "start", chat, START_STEPS, 3e-3, 0, 64)
        train(
            config, overwrite=True, progress="lines", objective=imitate(right_answers(tokenizer, 20_000), 64)
        )
    return folder


def start_answers(model, tokenizer, seed: int):
    "As many answers as a run of groups draws, all from the start: (answers, verdicts) of each step."
    for step in range(STEPS):
        examples = make_examples(QUESTIONS, draw_seed(seed, step), "train", [PRACTICED])
        seeds = [draw_seed(seed, step, row) for row in range(QUESTIONS * GROUP)]
        with choose_policy("cpu").autocast():  # the format of training, as where a run draws
            drawn = ask_and_judge(model, tokenizer, examples, seeds, RECIPE)
        yield drawn


def kept_answers(place: Path, model, tokenizer, seed: int) -> tuple[list[Answer], int]:
    """Rejection sampling: of `start_answers`, (the right ones, the tokens of all).

    A seed's are drawn once, for all rates.
    """
    path = place / f"kept-{seed}.json"
    if not path.exists():
        kept, tokens = [], 0
        for answers, verdicts in start_answers(model, tokenizer, seed):
            tokens += sum(len(answer.new) for answer in answers)
            for answer, verdict in zip(answers, verdicts.flatten()):
                if verdict:
                    kept.append([answer.prompt, answer.new, answer.logprobs])
        write(path, dict(kept=kept, tokens=tokens))
    found = json.loads(path.read_text())
    kept = [Answer(prompt, new=new, logprobs=logs) for prompt, new, logs in found["kept"]]
    return kept, found["tokens"]


def write(path: Path, found: dict):
    "Whole or not at all: another process may be reading."
    with atomic_path(path) as tmp:
        tmp.write_text(json.dumps(found))


def score(model, tokenizer, start) -> dict:
    """Held out: pass@1 and pass@8 of what is practiced, and `other`, pass@1 in the other task.

    `kl`: how far it went from the start, in nats an answer.
    """
    examples = make_examples(HELD_OUT, 10, "test", [PRACTICED])
    found = measure_pass(model, tokenizer, examples, RECIPE, DRAWS)
    others = make_examples(HELD_OUT // 2, 10, "test", [OTHER])
    found["other"] = measure_pass(model, tokenizer, others, RECIPE, DRAWS)["pass@1"]
    examples = make_examples(30, 11, "test", [PRACTICED])
    seeds = [draw_seed(12, i) for i in range(30 * GROUP)]
    answers, _ = ask_and_judge(model, tokenizer, examples, seeds, RECIPE)
    there = answer_logprobs(start, answers)
    found["kl"] = sum(sum(a.logprobs) - sum(b) for a, b in zip(answers, there)) / len(answers)
    return found


def quick_score(model, tokenizer) -> dict:
    "For tuning, on questions of the training kind: pass@1 of what is practiced, and of the other task."
    practiced = make_examples(HELD_OUT, 10, "train", [PRACTICED])
    others = make_examples(HELD_OUT // 2, 10, "train", [OTHER])
    return dict(
        practiced=measure_pass(model, tokenizer, practiced, RECIPE, DRAWS)["pass@1"],
        other=measure_pass(model, tokenizer, others, RECIPE, 4, ks=(1,))["pass@1"],
    )


def measure(place: Path, name: str, rate: float, seed: int) -> dict:
    "One run and its scores; taken from the folder where it is there."
    path = place / f"{name}-{rate:g}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    start_folder = place / "start"
    start, tokenizer, _ = open_model(start_folder)
    rows = ROWS.get(name, QUESTIONS * GROUP)
    config = settings(place, path.stem, start_folder, STEPS, rate, seed, rows)
    begin, found = time.process_time(), dict(name=name, rate=rate, seed=seed)
    if name in ROWS:
        kept, found["sampled_tokens"] = kept_answers(place, start, tokenizer, seed)
        found["kept"] = len(kept)
        objective = imitate(kept, rows)
    else:
        objective = reinforce_objective(VARIANTS[name], questions=0)
        if name == "frozen":
            loader = partial(FromStart, recipe=VARIANTS[name], questions=0)
            objective = replace(objective, loader=loader)
        config.eval.eval_every = 5  # the figures of the samples
        config.eval.eval_tokens = 130
    result = train(config, overwrite=True, progress="none", objective=objective)
    if not result.finished:
        sys.exit("stopped: this run is not recorded")
    found |= dict(cpu_s=time.process_time() - begin, bits_per_byte=result.val.bits_per_byte)
    lines = [line for line in read_metrics(result.run) if "reward" in line]
    found["curve"] = [[line["step"], line["reward"], line["tokens"], line.get("alike")] for line in lines]
    if name not in ROWS:
        found["sampled_tokens"] = sum(5 * QUESTIONS * GROUP * line["tokens"] for line in lines)
    if seed in TUNING_SEEDS:
        found |= quick_score(result.model, tokenizer)
    else:
        found |= score(result.model, tokenizer, start)
    write(path, found)
    told = {k: round(v, 3) for k, v in found.items() if isinstance(v, float)}
    print(time.strftime("%H:%M"), name, rate, seed, told, flush=True)
    return found


def practiced(tried: list[dict]) -> dict:
    "Rate: the mean of its seeds, with the rates in order."
    rates = sorted({run["rate"] for run in tried})
    return {rate: statistics.mean(run["practiced"] for run in tried if run["rate"] == rate) for rate in rates}


def best_rate(tried: list[dict]) -> float:
    means = practiced(tried)
    return max(means, key=means.get)


def next_rate(tried: list[dict], begun: float) -> float | None:
    "What else has to be tried, by the rule above; None: nothing. `begun`: the start's pass@1 in tuning."
    means = practiced(tried)
    rates, best = list(means), best_rate(tried)
    if best == rates[0]:
        return max((rate for rate in LADDER if rate < best), default=None)
    if best == rates[-1]:
        return min((rate for rate in LADDER if rate > best), default=None)
    above = rates[rates.index(best) + 1]
    if means[above] < begun and above > 1.5 * best:
        return float(f"{math.sqrt(best * above):.1e}")
    return None


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--base", type=Path, help="a trained run of the preset laptop; without it, one is made"
    )
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = args.runs or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        base = args.base
        if base is None and not (place / "start" / "report.md").exists():
            config = preset("laptop")
            config.run.out = str(place)
            base = train(config, resume=config.folder.exists()).run
        result = compare(place, base, args.jobs)
    if args.save:
        save("reinforce", result)


def compare(place: Path, base: Path, jobs: int) -> dict:
    start, tokenizer, _ = open_model(make_start(place, base))
    path = place / "start.json"
    if not path.exists():
        lines = [line for line in read_metrics(place / "start") if "val_bits_per_byte" in line]
        scored = score(start, tokenizer, start) | dict(tuning=quick_score(start, tokenizer))
        scored["bits_per_byte"] = lines[-1]["val_bits_per_byte"]
        write(path, scored)
    before = json.loads(path.read_text())
    print("start", before, flush=True)
    tuning = {name: [] for name in WAYS}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:

        def made(asked: list[tuple]) -> list[dict]:
            "The runs of these names, rates and seeds."
            return list(pool.map(measure, *zip(*((place, *one) for one in asked))))

        first = {name: RATES for name in VARIANTS} | {name: REJECTION_RATES for name in ROWS}
        asked = [(name, rate, seed) for name in WAYS for rate in first[name] for seed in TUNING_SEEDS]
        while asked:
            for run in made(asked):
                tuning[run["name"]].append(run)
            more = {name: next_rate(tried, before["tuning"]["practiced"]) for name, tried in tuning.items()}
            asked = [(name, rate, seed) for name, rate in more.items() if rate for seed in TUNING_SEEDS]
        rates = {name: best_rate(tried) for name, tried in tuning.items()}
        print("rates", rates, flush=True)
        compared = made([(name, rates[name], seed) for seed in SEEDS for name in rates])
        gentle = made([(name, REJECTION_RATES[0], seed) for name in ROWS for seed in SEEDS])
    return dict(
        practiced=PRACTICED,
        other=OTHER,
        start_steps=START_STEPS,
        steps=STEPS,
        questions=QUESTIONS,
        group=GROUP,
        held_out=HELD_OUT,
        draws=DRAWS,
        tuning_seeds=TUNING_SEEDS,
        seeds=SEEDS,
        rates=rates,
        start=before,
        tuning=[found for tried in tuning.values() for found in tried],
        compared=compared,
        gentle=gentle,
    )


if __name__ == "__main__":
    main()
