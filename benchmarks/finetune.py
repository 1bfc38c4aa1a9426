"""What fine-tuning on answers brings, and what it costs: the records of chapter 22.

    python benchmarks/finetune.py laptop --base runs/laptop --steps 500 --save  # the preset, eight tasks
    python benchmarks/finetune.py small --seeds 10 --save           # comparisons of ways, on a smaller model
    python benchmarks/finetune.py lora --seeds 10 --save            # the same for LoRA
    python benchmarks/finetune.py words --base runs/laptop --steps 500 --save   # more words to copy
    python benchmarks/finetune.py mask --base runs/laptop --steps 500 --seeds 5 --save  # and to mask in a row
    python benchmarks/finetune.py random --base runs/laptop --steps 500 --save  # from random weights
    python benchmarks/finetune.py short --base runs/laptop --save   # and that in 100 and 250 steps
    python benchmarks/finetune.py small --steps 3 --seeds 1         # a trial of the script itself

Each part writes its own entry of results/finetune.json. Without --base the part `laptop` trains the preset.
With --work DIR the runs are kept in DIR, and a second call takes from there what is finished: give each base
and each number of rows a folder of its own.
Rates are multiples of the base's own. Each way gets the same grid, three seeds that serve for nothing else,
and 200 questions for choosing. The rate with the most right answers is then run with all seeds and judged on
400 questions of another draw. The part `laptop` has four rates, one seed, and 160 questions for choosing.
Where the highest rate is the best, a rate twice as high is tried too, until that ends. All wordings of
questions are held out.

What would refute what the chapter expects, written down before the first run (2 and 3 are judged by ten seeds
now, as the first three did not decide them):

1. Fine-tuning teaches the tasks: refuted if the base with as many solved examples before the question as fit
   answers as many right, within the intervals.
2. Loss on answers only beats loss on everything, at equal steps and equal tuning: refuted if the interval of
   the difference over three seeds holds 0.
3. Packed rows beat padded ones at equal tokens of compute: refuted in the same way.
4. A lower rate forgets less: refuted if bits per byte on the addresses do not rise with the rate.
5. LoRA at its best rate answers as many right as full fine-tuning, and forgets less: two claims, each refuted
   if the interval of the difference lies on the wrong side of 0; undecided if it holds 0.

Written down after one trial with one seed, and before the runs of the part `laptop`:

6. A quarter of the rows from the old text keeps what the base knew: refuted if bits per byte end more than
   0.2 above the base's in any of three seeds.
7. At equal steps it costs right answers: undecided if the interval of the difference over three seeds holds
   0.
8. No lower rate without old text does both as well: refuted if a rate of the grid has at most the bits per
   byte of the runs with old text, and as many right answers.
9. Whoever copies only words that were answers in training has not learned to copy: refuted if held-out words
   are copied as often as those of training, within the intervals.

Written down after three seeds of the part `small`, whose intervals held 0 for 2 and 3, and whose tasks could
partly be guessed; and before the run with ten seeds and today's tasks:

10. With loss on answers only the model sorts better, and counts worse, than with loss on everything, as the
   three seeds seemed to say: two claims, each refuted if the interval over ten seeds lies on the other side
   of 0, undecided if it holds 0.

Written down after ten seeds, which had put packed rows behind padded ones, at rates that one seed had chosen;
and before the first run of `masked`, and of the three seeds that choose the rates now:

11. What packing costs is that a conversation sees others of its row: with a mask between them (`masked`) more
   answers are right than in packed rows without. Undecided if the interval over ten seeds holds 0.
12. With that mask packing costs nothing: refuted if the interval of masked less padded lies below 0.

Written down after a trial of one seed, before the part `words`. Its runs are fine-tuned with the 3,500 words
that stand 10 times in the addresses, in place of the 700 that stand there 200 times (a fifth are held out):

13. What kept the model from copying was that it had seen few words: with more of them, and as many steps,
   more held-out words are copied, named last and reversed, in sum, of the same questions. Refuted if the
   interval of the difference over three seeds holds 0. (Not for want of steps: the whole process, with three
   times as many tokens and 700 words, has none right either.)

Written down before the first run of the part `mask`: the preset's model in packed rows, an eighth of them old
text as in the command, with the mask and without, five seeds each, at the rate that three other seeds choose
for each way:

14. With the mask more answers are right here, too. Undecided if the interval of the difference holds 0. If
   it lies below 0, the command keeps its rows without a mask.
15. The mask costs nothing of what the base knew: refuted if the interval of the difference in bits per byte
   on the addresses lies above 0 at one and the same rate.

Written down before the first run of the part `random`: the runs of the part `laptop` without old text once
more, with the same rows, steps and number of rates, but each seed begins with random weights of its own:

16. The base helps: from random weights fewer answers are right. Refuted if the interval of the difference
   over three seeds (base less random weights) lies below 0, undecided if it holds 0.
17. It helps with each of the tasks that the base's runs answer at all (president, sort, spell): judged alike,
   task by task; confirmed if all three intervals lie above 0, refuted if one lies below.

Added when one seed of these was known (right of 400 at rates of 0.3, 1 and 2: 102, 118, 109; the base's three
seeds: 140, 116, 122), before the first run from random weights with a quarter of the rows from the old text:

18. With old text the base helps: from random weights fewer answers are right. As 16.
19. And it keeps what the base knew: from random weights bits per byte on the addresses end higher by 0.3 or
   more. Refuted if the interval of the difference lies below 0.3, undecided if it contains 0.3.

Added when all runs of the part `random` but one were known (without old text 118, 129 and 130 right, with it
99 and 85; 1.66 bits per byte). Its 500 steps have half as many tokens as the base's own training. So the part
`short` asks the same of 100 steps, without old text, each side at its best of the same four rates (and beyond
while the highest is best). Written before its first run:

20. In 100 steps the base helps: from random weights fewer answers are right. As 16.

In 100 steps hardly anything is learned from either (base 23, 21, 20; random weights 26, 21, 27). So, written
before its first run:

21. In 250 steps the base helps. As 16.
"""

import argparse
import json
import random
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from data_machine import load, machine, save

from tinygpt.accumulate import train_step
from tinygpt.adamw import make_adamw
from tinygpt.checkpoint import save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.evaluate.score import evaluate
from tinygpt.finetune.answers import AnswerLoader, encode_conversations, exact_match, finetune
from tinygpt.finetune.lora import add_lora, merge_lora
from tinygpt.finetune.tasks import (
    TASKS,
    Example,
    answered,
    is_right,
    make_conversations,
    make_examples,
    words,
)
from tinygpt.finetune.template import make_chat_base
from tinygpt.generate.text import generate_texts
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.presets import preset
from tinygpt.schedule import make_schedule
from tinygpt.support import interval
from tinygpt.train import train

RATES = (0.1, 0.3, 1.0, 2.0, 4.0)  # times the base's
LORA_RATES = (0.001, 0.003, 0.01, 0.03)  # AdamW's own
TUNING_SEEDS = (101, 102, 103)  # parts small and lora
EASY = ["president", "count", "add", "sort"]  # of the part `small`
SHORT = (100, 250)  # steps of the part `short`
COPIES = {  # questions about words: (are the words held out? are the wordings?)
    "seen": (False, False),
    "new_words": (True, False),
    "new_wordings": (False, True),
    "new": (True, True),
}
WAYS = {
    "answers": dict(train_on="answers", packed=True, document_mask=False),
    "all": dict(train_on="all", packed=True, document_mask=False),
    "padded": dict(train_on="answers", packed=False),
    "masked": dict(train_on="answers", packed=True, document_mask=True),
}


def small_config(folder: Path):
    "A base of 0.2 M parameters, trained on the addresses."
    config = preset("laptop")
    config.run = replace(config.run, name="small", out=str(folder))
    config.model = GPTConfig.modern(vocab_size=1024, block_size=128, n_layer=2, n_head=2, n_embd=64)
    config.data = replace(config.data, batch_size=8)
    config.optim = replace(config.optim, max_steps=800)
    config.eval = replace(config.eval, eval_every=0, save_every=0, sample_tokens=0, compressors=False)
    config.eval = replace(config.eval, final_eval_tokens=60_000)
    config.system = replace(config.system, compile="off", dtype="float32", device="cpu")
    return config


def chat_base(config, folder: Path) -> str:
    "The base with the tokens of a chat; trained where it is not there yet."
    start = folder / f"{config.run.name}-start"
    if not start.exists():
        if not config.folder.exists():
            train(config, progress="lines")
        make_chat_base(config.folder, start)
    return str(start)


def about_words(new_words: bool, new_wordings: bool, n: int = 50) -> list[Example]:
    "Questions to copy, reverse and give the last word, with words and wordings of training or held-out ones."
    found, rng = [], random.Random(903)
    for name in ("copy", "last", "reverse"):
        task = TASKS[name]
        for _ in range(n):
            given, answer = task.draw(rng, new_words)
            wording = rng.choice(task.test if new_wordings else task.train)
            found.append(Example(name, [dict(role="user", content=wording.format(**given))], answer))
    return found


def few_shot_text(example, shown) -> str:
    "Solved examples, then the question, as lines of a list."
    lines = [f"Question: {e.messages[0]['content']}\nAnswer: {e.answer}\n\n" for e in shown]
    return "".join(lines) + f"Question: {example.messages[0]['content']}\nAnswer:"


def few_shot(model, tokenizer, examples, k: int | None, seed: int = 0) -> dict:
    "Right answers of the base by task, with k solved examples of the same task; None: as many as fit."
    rng = random.Random(seed)
    pool = {task: make_examples(200, 1000 + seed, "train", [task]) for task in TASKS}
    prompts, counts = [], []
    room = model.config.block_size - 16 - 1  # for the answer and the eot
    for example in examples:
        shown = rng.sample(pool[example.task], 12 if k is None else k)
        while len(tokenizer.encode(few_shot_text(example, shown))) > room:
            shown = shown[1:]
        prompts.append(few_shot_text(example, shown))
        counts.append(len(shown))
    said = generate_texts(model, tokenizer, prompts, 16, temperature=0)
    said = [text.strip().split("\n")[0] for text in said]  # it may begin with a line break
    right = {task: [0, 0] for task in TASKS}
    for example, text in zip(examples, said):
        right[example.task][0] += is_right(example, text)
        right[example.task][1] += 1
    return dict(k=k, shown=sum(counts) / len(counts), tasks=right, right=sum(r for r, _ in right.values()))


def tuned_run(
    base_config, start: str, folder: Path, name: str, rate: float, seed: int, steps: int, judge, **way
):
    "Fine-tune once; what was right, what was forgotten, what it cost. Taken from the folder if it is there."
    path = folder / f"{name}-{rate:g}-{seed}-{steps}.json"
    if path.exists():
        return json.loads(path.read_text())
    config = replace(base_config, run=replace(base_config.run, name=name, out=str(folder), init_from=start))
    o = config.optim
    rates = dict(learning_rate=o.learning_rate * rate, muon_lr=o.muon_lr * rate)
    config.run.seed = seed
    config.optim = replace(o, max_steps=steps, warmup_steps=min(20, steps // 5), **rates)
    config.data = replace(
        config.data, tokenizer="bpe", batch_size=judge["rows"] * (1 if way["packed"] else 4)
    )
    began = time.process_time()
    result = finetune(config, judge["conversations"](seed), **way, overwrite=True, progress="none")
    seconds = time.process_time() - began
    line = dict(rate=rate, seed=seed, bits=result.val.bits_per_byte, loss=result.losses[-1])
    line |= judged(result.model, result.data.tokenizer, judge) | dict(cpu_s=round(seconds, 1))
    print(name, line, flush=True)
    path.write_text(json.dumps(line))
    return line


def by_three(run) -> dict:
    "The runs of one rate with the seeds for choosing: bits per byte on average, right answers in sum."
    lines = [run(seed) for seed in TUNING_SEEDS]
    found = dict(rate=lines[0]["rate"], bits=sum(line["bits"] for line in lines) / len(lines), seeds=lines)
    for name in ("choose", "right"):
        found[name] = dict(all=[sum(n) for n in zip(*(line[name]["all"] for line in lines))])
    return found


def by_one(run) -> dict:
    "The run of one rate with seed 1."
    return run(1)


def tune(run, rates) -> list[dict]:
    "The runs of the grid, and of higher rates as long as the highest is the best."
    grid = [run(rate) for rate in rates]
    while best_of(grid) is grid[-1] and len(grid) < len(rates) + 3:
        grid.append(run(2 * grid[-1]["rate"]))
    return grid


def tuned(run, rates, seeds: int, choose=by_three) -> dict:
    "The grid, as `choose` runs each of its rates; its best rate, and the runs of that rate that are judged."
    grid = tune(lambda rate: choose(partial(run, rate)), rates)
    best = best_of(grid)["rate"]
    return dict(grid=grid, best=best, runs=[run(best, seed) for seed in range(1, seeds + 1)])


def judged(model, tokenizer, judge) -> dict:
    "Right answers by task, as [right, asked], on each of the judge's sets of questions."
    found = {}
    for name in [name for name in ("choose", "right", *COPIES) if name in judge]:
        scores = exact_match(model, tokenizer, judge[name])
        found[name] = {task: [m.right, m.n] for task, m in scores.items()}
    return found


def best_of(grid: list[dict]) -> dict:
    "The run with the most right answers on the questions for choosing; of equals the lowest rate."
    return max(grid, key=lambda line: line["choose"]["all"][0])


def share(line) -> float:
    right, n = line["right"]["all"]
    return right / n


def compare(first: list[dict], second: list[dict], key=share) -> dict:
    "The mean difference over seeds, first minus second, with its 95 % interval."
    gaps = [key(a) - key(b) for a, b in zip(first, second, strict=True)]
    if len(gaps) < 2:
        return dict(gaps=gaps)
    middle, half = interval(gaps)
    return dict(gaps=gaps, mean=middle, low=middle - half, high=middle + half)


def bits(line) -> float:
    return line["bits"]


def part_small(args, folder: Path) -> dict:
    "The ways compared on the small base, each at its best rate."
    config = small_config(folder)
    start = chat_base(config, folder)
    base, tokenizer, _ = open_model(start)

    def conversations(seed):
        return [answered(e) for e in make_examples(8000, seed, "train", EASY)]

    judge = dict(conversations=conversations, rows=8)
    judge |= dict(choose=make_examples(200, 901, "test", EASY), right=make_examples(400, 902, "test", EASY))
    place = (config, start, folder)
    found = dict(steps=args.steps, parameters=base.num_params(), tasks=EASY, rates=RATES, ways={})
    found["before"] = tuned_run(*place, "before", 0.0, 1, 1, judge, **WAYS["answers"])["bits"]
    for name, way in WAYS.items():

        def run(rate, seed):
            return tuned_run(*place, name, rate, seed, args.steps, judge, **way)

        found["ways"][name] = tuned(run, RATES, args.seeds)
    ways = {name: way["runs"] for name, way in found["ways"].items()}
    found["answers_minus_all"] = compare(ways["answers"], ways["all"])
    found["packed_minus_padded"] = compare(ways["answers"], ways["padded"])
    found["masked_minus_packed"] = compare(ways["masked"], ways["answers"])
    found["masked_minus_padded"] = compare(ways["masked"], ways["padded"])
    encoded = encode_conversations(tokenizer, conversations(1), config.model.block_size)
    found["fill"] = fill(encoded, config.model.block_size)
    return found


def fill(encoded, block_size: int) -> dict:
    "The share of the places of a row that hold a token, by way of filling it."
    tokens = sum(len(ids) for ids, _ in encoded)
    packed = AnswerLoader(encoded, 8, block_size)
    padded = AnswerLoader(encoded, 32, block_size, packed=False)
    trimmed = sum(32 * padded.width(padded.rows[i : i + 32]) for i in range(0, len(padded.rows), 32))
    targets = sum(sum(mask) for _, mask in encoded)
    return dict(
        packed=tokens / len(packed.rows) / (block_size + 1),
        padded=tokens / trimmed,
        to_context=tokens / len(encoded) / (block_size + 1),
        targets=targets / tokens,
    )


def lora_run(start: str, rate: float, seed: int, steps: int, judge, val, **lora) -> dict:
    "Train LoRA's numbers only; the same rows as the full run of this seed."
    model, tokenizer, _ = open_model(start)
    params = add_lora(model, new_tokens=list(tokenizer.special.values()), seed=seed, **lora)
    encoded = encode_conversations(tokenizer, judge["conversations"](seed), model.config.block_size)
    loader = AnswerLoader(encoded, judge["rows"], model.config.block_size, seed=seed)
    optimizer, _ = make_adamw(params, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = make_schedule("trapezoid", steps, min(20, steps // 5), 0.02, 0.6)
    began = time.process_time()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step)
        loss, _ = train_step(model, optimizer, *next(loader), clip=1.0)
    seconds = time.process_time() - began
    merge_lora(model)
    score = evaluate(model, val, tokenizer.token_bytes(), max_tokens=60_000)
    trained = sum(p.numel() for p in params)
    line = dict(rate=rate, seed=seed, bits=score.bits_per_byte, loss=loss.item(), trained=trained)
    line |= judged(model, tokenizer, judge) | dict(cpu_s=round(seconds, 1))
    print("lora", line, flush=True)
    return line


def part_lora(args, folder: Path) -> dict:
    "LoRA on the small base, at its best rate, beside the full runs of the part `small`."
    from tinygpt.data.tokens import prepare

    config = small_config(folder)
    start = chat_base(config, folder)
    base, _, _ = open_model(start)
    val = prepare("sotu", "bpe", 1024).val
    full = load("finetune")["small"]

    def conversations(seed):
        return [answered(e) for e in make_examples(8000, seed, "train", EASY)]

    judge = dict(conversations=conversations, rows=8)
    judge |= dict(choose=make_examples(200, 901, "test", EASY), right=make_examples(400, 902, "test", EASY))
    how = dict(rank=args.rank, alpha=2.0 * args.rank)

    def run(rate, seed):
        return lora_run(start, rate, seed, full["steps"], judge, val, **how)

    found = tuned(run, LORA_RATES, args.seeds)
    runs, rivals = found["runs"], full["ways"]["answers"]["runs"]
    return dict(
        how,
        **found,
        all_parameters=base.num_params(),
        lora_minus_full=compare(runs, rivals),
        forgets_more=compare(runs, rivals, bits),
    )


def laptop_config(folder: Path):
    "The preset, without what the records do not need."
    config = preset("laptop")
    config.run = replace(config.run, out=str(folder))
    config.system = replace(config.system, compile="off")
    config.eval = replace(config.eval, eval_every=0, save_every=0, sample_tokens=0, compressors=False)
    config.eval = replace(config.eval, final_eval_tokens=60_000)
    return config


def laptop_start(args, config, folder: Path) -> tuple[str, Path]:
    "(the preset's model with the tokens of a chat, its base): of --base, or trained here."
    if not args.base:
        return chat_base(config, folder), config.folder
    start = folder / "laptop-start"
    if not start.exists():
        make_chat_base(args.base, start)
    return str(start), Path(args.base)


def laptop_judge(args) -> dict:
    judge = dict(conversations=lambda seed: make_conversations(20_000, seed), rows=args.rows)
    judge |= dict(choose=make_examples(160, 901, "test"), right=make_examples(400, 902, "test"))
    return judge | {name: about_words(*new) for name, new in COPIES.items()}


def part_laptop(args, folder: Path) -> dict:
    "The preset's model on the eight tasks: few-shot before, fine-tuned after."
    config = laptop_config(folder)
    start, base = laptop_start(args, config, folder)
    model, tokenizer, _ = open_model(base)
    judge = laptop_judge(args)
    choose, examples = judge["choose"], judge["right"]
    shots = [few_shot(model, tokenizer, choose, k) for k in (0, 1, 2, 4, None)]
    best = max(shots, key=lambda line: line["right"])["k"]
    found = dict(steps=args.steps, rows=args.rows, few_shot=shots, best_k=best)
    found["few_shot_best"] = few_shot(model, tokenizer, examples, best)
    print({line["k"]: line["right"] for line in shots}, found["few_shot_best"], flush=True)
    found |= dict(before=evaluate_bits(model, tokenizer), ways={})
    for replay in (0.0, 0.25):  # the part of the rows that is the old text

        def run(rate, seed, name=f"chat-{replay}", way=WAYS["answers"] | dict(replay=replay)):
            return tuned_run(config, start, folder, name, rate, seed, args.steps, judge, **way)

        found["ways"][str(replay)] = tuned(run, args.rates or (0.1, 0.3, 1.0, 2.0), args.seeds, by_one)
    without, with_text = (way["runs"] for way in found["ways"].values())
    found["right_with_minus_without"] = compare(with_text, without)
    found["bits_with_minus_without"] = compare(with_text, without, bits)
    return found


def part_mask(args, folder: Path) -> dict:
    "The preset's model on the eight tasks, in packed rows with a mask between conversations and without."
    config = laptop_config(folder)
    start, _ = laptop_start(args, config, folder)
    judge = laptop_judge(args)
    judge = dict(conversations=judge["conversations"], rows=args.rows, right=judge["right"])
    judge |= dict(choose=make_examples(400, 901, "test"))
    found = dict(steps=args.steps, rows=args.rows, replay=0.125, ways={})
    for name in ("answers", "masked"):
        way = WAYS[name] | dict(replay=found["replay"])

        def run(rate, seed, place=(config, start, folder, f"mask-{name}"), way=way):
            return tuned_run(*place, rate, seed, args.steps, judge, **way)

        found["ways"][name] = tuned(run, args.rates or (0.5, 1.0, 2.0), args.seeds)
    plain, masked = (way["runs"] for way in found["ways"].values())
    found["masked_minus_packed"] = compare(masked, plain)
    grids = {}
    for name, way in found["ways"].items():
        grids[name] = {line["rate"]: line["seeds"] for line in way["grid"]}
    both = [rate for rate in grids["answers"] if rate in grids["masked"]]
    found["bits"] = {rate: compare(grids["masked"][rate], grids["answers"][rate], bits) for rate in both}
    return found


def random_weights(model: GPT, tokenizer, folder: Path, seed: int) -> str:
    "A checkpoint of such a model, untrained."
    weights = folder / f"weights-{seed}"
    if not weights.exists():
        torch.manual_seed(seed)
        save_checkpoint(weights, GPT(model.config), tokenizer)
    return str(weights)


def part_random(args, folder: Path) -> dict:
    "The preset's model on the eight tasks from random weights, beside the part `laptop`."
    config = laptop_config(folder)
    model, tokenizer, _ = open_model(laptop_start(args, config, folder)[0])
    judge, found = laptop_judge(args), dict(steps=args.steps, rows=args.rows, ways={})
    for replay, rivals in load("finetune")["laptop"]["ways"].items():

        def run(rate, seed, name=f"random-{replay}", way=WAYS["answers"] | dict(replay=float(replay))):
            start = random_weights(model, tokenizer, folder, seed)
            return tuned_run(config, start, folder, name, rate, seed, args.steps, judge, **way)

        way = tuned(run, args.rates or (0.3, 1.0, 2.0, 4.0), args.seeds, by_one)
        way |= dict(base_minus_random=compare(rivals["runs"], way["runs"]))
        found["ways"][replay] = way | dict(random_minus_base=compare(way["runs"], rivals["runs"], bits))
    return found


def part_short(args, folder: Path) -> dict:
    "From the base and from random weights, in fewer steps than the part `laptop`."
    config = laptop_config(folder)
    start, _ = laptop_start(args, config, folder)
    model, tokenizer, _ = open_model(start)
    judge, found = laptop_judge(args), dict(rows=args.rows)
    starts = dict(base=lambda seed: start, random=partial(random_weights, model, tokenizer, folder))
    for steps in SHORT:
        ways = {}
        for name, start_of in starts.items():

            def run(rate, seed, name=f"short-{name}", start_of=start_of, steps=steps):
                way = WAYS["answers"] | dict(replay=0.0)
                return tuned_run(config, start_of(seed), folder, name, rate, seed, steps, judge, **way)

            ways[name] = tuned(run, args.rates or (0.3, 1.0, 2.0, 4.0), args.seeds, by_one)
        base, untrained = (way["runs"] for way in ways.values())
        found[str(steps)] = dict(ways=ways, base_minus_random=compare(base, untrained))
    return found


def part_words(args, folder: Path) -> dict:
    "The preset's model fine-tuned with many or few different words, at one rate: does it copy new ones?"
    config = laptop_config(folder)
    start, _ = laptop_start(args, config, folder)
    judge, way = laptop_judge(args), WAYS["answers"] | dict(replay=0.0)
    found = dict(steps=args.steps, rows=args.rows, words={}, runs=[])
    for least in (200, 10):
        drawn = words(least)
        found["words"][least] = len(drawn)
        name = "chat-0.0" if least == 200 else f"words-{least}"  # as in the part laptop
        place = (config, start, folder, name)
        with patch("tinygpt.finetune.tasks.words", lambda drawn=drawn: drawn):
            for seed in range(1, args.seeds + 1):
                run = tuned_run(*place, 1.0, seed, args.steps, judge, **way)
                found["runs"].append(dict(least=least) | run)
    return found


def evaluate_bits(model, tokenizer) -> float:
    from tinygpt.data.tokens import prepare

    data = prepare("sotu")
    return evaluate(model, data.val, tokenizer.token_bytes(), max_tokens=60_000).bits_per_byte


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["laptop", "small", "lora", "words", "mask", "random", "short"])
    parser.add_argument("--base", help="a trained run of the preset laptop; without it one is trained")
    parser.add_argument("--work", help="a folder for the runs, kept; without it a temporary one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=16, help="of a batch, part laptop")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rates", type=float, nargs="*", help="part laptop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.work or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        parts = dict(small=part_small, lora=part_lora, laptop=part_laptop, words=part_words)
        parts |= dict(mask=part_mask, random=part_random, short=part_short)
        part = parts[args.part](args, folder)
    # without the folders, which are of the machine
    read = dict(laptop=("steps", "rows", "seeds"), small=("steps", "seeds"), lora=("rank", "seeds"))
    read |= dict(words=read["laptop"], mask=read["laptop"], random=read["laptop"], short=("rows", "seeds"))
    words = [f"--{name} {getattr(args, name)}" for name in read[args.part]]
    line = " ".join(["python benchmarks/finetune.py", args.part, *words])
    part |= dict(on=machine(), ran=line)
    if args.save:
        try:
            before = {name: entry for name, entry in load("finetune").items() if name in parts}
        except FileNotFoundError:
            before = {}
        save("finetune", before | {args.part: part} | dict(command=line))


if __name__ == "__main__":
    main()
