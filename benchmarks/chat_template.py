"""What a slip in the chat template costs: exact answers of models that were trained with the right one.

    python benchmarks/chat_template.py                  five seeds of chapter 25's model, and the first one
                                                        with two other roundings: two minutes
    python benchmarks/chat_template.py --runs A B C     fine-tuned runs as well, on held-out wordings

Chapter 25's model knows the capitals of 24 states by heart. Here it is trained with five seeds; each model is
asked all 24 questions under each template, after two other questions with their right answers.

Decided beforehand. The claim "one wrong space can cost every answer" is refuted if, for each slip, more than
half of the answers of some seed are right. The claim "a slip that stays the same for one model costs the same
for another one" is refuted if the seeds' shares differ by more than their intervals allow.

*rounding*, no claim: the first seed, trained and asked again with torch's plain and AVX2 kernels, which add
up in another order.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import data_machine
import torch

from tinygpt.accumulate import train_step
from tinygpt.adamw import AdamW, adamw_groups
from tinygpt.checkpoint_open import open_model
from tinygpt.finetune.template import chat_ids, chat_tokenizer, render
from tinygpt.generate.sample import generate_batch
from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import BPETokenizer

PAIRS = """Alabama Montgomery, Alaska Juneau, Arizona Phoenix, Colorado Denver, Florida Tallahassee,
Georgia Atlanta, Hawaii Honolulu, Idaho Boise, Indiana Indianapolis, Kansas Topeka, Kentucky Frankfort,
Maine Augusta, Maryland Annapolis, Michigan Lansing, Montana Helena, Nebraska Lincoln, Ohio Columbus,
Oregon Salem, Tennessee Nashville, Texas Austin, Vermont Montpelier, Virginia Richmond, Wisconsin Madison,
Wyoming Cheyenne"""
CAPITAL = dict(pair.split() for pair in PAIRS.replace("\n", " ").split(", "))
STATES = list(CAPITAL)
SLIPS = {
    "as trained": {},
    "start twice": {"start": 2},
    "no start": {"start": 0},
    "space after <|user|>": {"user": " "},
    "space after <|assistant|>": {"assistant": " "},
    "line break after <|assistant|>": {"assistant": "\n"},
    "line break after <|end|>": {"after": "\n"},
    "no <|end|>": {"end": 0},
}


def exchange(state: str) -> list[dict]:
    said = f"The capital of {state} is {CAPITAL[state]}."
    asked = {"role": "user", "content": f"What is the capital of {state}?"}
    return [asked, {"role": "assistant", "content": said}]


def prompt_with(tokenizer, messages, user="", assistant="", after="", end=1, start=1) -> list[int]:
    "Ids of a conversation that ends with a question, with a slip in its template."
    token = chat_ids(tokenizer)
    ids = list(tokenizer.start) * start
    for m in messages:
        before = assistant if m["role"] == "assistant" else user if m["role"] == "user" else ""
        ids += [token[f"<|{m['role']}|>"], *tokenizer.encode(before + m["content"])]
        ids += [token["<|end|>"]] * end + tokenizer.encode(after)
    return [*ids, token["<|assistant|>"], *tokenizer.encode(assistant)]


def train(seed: int, steps: int = 240, T: int = 160):
    "Chapter 25's model: (model, tokenizer)."
    text = "\n".join(" ".join(m["content"] for m in exchange(s)) for s in STATES)
    tokenizer = chat_tokenizer(BPETokenizer.train(text * 3, 400))
    generator = torch.Generator().manual_seed(seed)

    def row():
        order = torch.randperm(len(STATES), generator=generator).tolist()
        ids, mask = render(tokenizer, [m for i in order for m in exchange(STATES[i])])
        targets = [i if own else -100 for i, own in zip(ids, mask)]
        return ids[:T], targets[1 : T + 1]

    torch.manual_seed(seed)
    sizes = dict(block_size=T, n_layer=2, n_head=4, n_embd=64)
    model = GPT(GPTConfig.llama(vocab_size=tokenizer.n_vocab, **sizes))
    optimizer = AdamW(adamw_groups(model, lr=6e-3))
    rate = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, 2 * (steps - step) / steps)
        x, y = torch.tensor([row() for _ in range(8)]).unbind(1)
        train_step(model, optimizer, x, y)
    return model.eval(), tokenizer


def written(model, tokenizer, prompts, most: int) -> list[str]:
    "The greedy answers, without white space around them."
    rows = generate_batch(model, prompts, most, temperature=0, eot=tokenizer.ends)
    return [tokenizer.decode(new).strip() for new in rows]


def capitals(seed: int) -> dict:
    "(exact answers, answers that name the capital) of one seed under each template."
    model, tokenizer = train(seed)
    asked = [
        [*exchange(STATES[i - 2]), *exchange(STATES[i - 1]), exchange(s)[0]] for i, s in enumerate(STATES)
    ]
    answers = [exchange(s)[1]["content"] for s in STATES]
    found = {}
    for name, slip in SLIPS.items():
        prompts = [prompt_with(tokenizer, messages, **slip) for messages in asked]
        texts = written(model, tokenizer, prompts, 30)
        exact = sum(text == answer for text, answer in zip(texts, answers))
        found[name] = exact, sum(CAPITAL[state] in text for state, text in zip(STATES, texts))
    return found


def with_kernels(kernels: str) -> dict:
    "The first seed's counts in a process of its own, where torch uses these kernels."
    code = "import json, torch; torch.set_num_threads(1); from chat_template import capitals"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(json.dumps(capitals(0)))"],
        cwd=Path(__file__).parent,
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels},
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(done.stdout)
    right, named = ([count[i] for count in counts.values()] for i in (0, 1))
    return {"kernels": kernels, "right": dict(zip(counts, right)), "named": dict(zip(counts, named))}


def fine_tuned(place: str, n: int) -> dict:
    "Right answers of a fine-tuned run, on held-out wordings."
    from tinygpt.finetune.tasks import make_examples

    model, tokenizer, _ = open_model(place)
    examples = make_examples(n, 0, "test")
    found = {"run": place, "questions": n}
    for name, slip in SLIPS.items():
        prompts = [prompt_with(tokenizer, e.messages, **slip) for e in examples]
        texts = written(model, tokenizer, prompts, 40)
        found[name] = sum(text == e.answer for text, e in zip(texts, examples))
        print(place, name, found[name], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", nargs="*", default=[])
    parser.add_argument("--questions", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begin, by_seed = time.process_time(), []
    for seed in range(args.seeds):
        by_seed.append(capitals(seed))
        print(seed, by_seed[-1], flush=True)
    rows = [
        {"template": name, "of": len(STATES)}
        | {"right": [each[name][0] for each in by_seed], "named": [each[name][1] for each in by_seed]}
        for name in SLIPS
    ]
    rounding = [with_kernels(kernels) for kernels in ("default", "avx2")]
    print(rounding, flush=True)
    runs = [fine_tuned(place, args.questions) for place in args.runs]
    cost = {"cpu_seconds": round(time.process_time() - begin)}
    data_machine.save("chat_template", {"capitals": rows, "rounding": rounding, "runs": runs} | cost)
