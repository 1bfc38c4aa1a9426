"""Tokens a second with the cache, ours against transformers' `generate`, on the same weights in the same run.

    python benchmarks/generate_speed.py             # prints; about six minutes on two cores
    python benchmarks/generate_speed.py --save      # writes results/generate_speed.json, for chapter 18

Two models with random weights (speed does not depend on their values): the laptop preset's, and a Llama of
about 100 million. Both are exported and read by transformers, and write greedily, in float32, from the same
prompts; the tokens must be equal. One thread and two, one row and eight. The two take turns, wall time; a
ratio is the median over the turns. Needs transformers.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from data_machine import machine, save, spread
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tinygpt.generate.sample import generate_batch
from tinygpt.model import GPT, GPTConfig
from tinygpt.model_hf import export_hf
from tinygpt.run.presets import preset

LLAMA = dict(vocab_size=32_000, block_size=512, n_layer=12, n_head=10, n_embd=640)
PROMPT = 16  # tokens
CASES = {  # name -> (config, new tokens)
    "laptop": (preset("laptop").model, 100),
    "llama": (GPTConfig.llama(**LLAMA), 48),
}


def pair(config: GPTConfig) -> tuple[GPT, torch.nn.Module]:
    "Our model, and transformers' with the same weights."
    torch.manual_seed(0)
    config.init = "torch"  # a head that starts at zero would call all tokens equally likely
    ours = GPT(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = export_hf(ours, Path(folder) / "model")
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None  # both write all tokens
    return ours, theirs


@torch.no_grad()
def speeds(ours: GPT, theirs, rows: int, new: int, turns: int) -> dict:
    "Tokens a second of both, and how many times as fast we are."
    prompts = torch.randint(ours.config.vocab_size, (rows, PROMPT))
    seconds = {"tinygpt": [], "transformers": []}

    def write_ours() -> list:
        return generate_batch(ours, prompts.tolist(), new, temperature=0)

    def write_theirs() -> list:
        how = dict(max_new_tokens=new, do_sample=False, use_cache=True)
        ids = theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **how)
        return ids[:, PROMPT:].tolist()

    for turn in range(turns + 1):
        written = {}
        for name, write in (("tinygpt", write_ours), ("transformers", write_theirs)):
            start = time.perf_counter()
            written[name] = write()
            seconds[name] += [time.perf_counter() - start] * (turn > 0)  # the first one warms up
    ratio = statistics.median(b / a for a, b in zip(*seconds.values()))
    per_second = {name: spread(rows * new / s for s in values) for name, values in seconds.items()}
    same = written["tinygpt"] == written["transformers"]
    return dict(tokens_per_second=per_second, ratio=round(ratio, 3), same_tokens=same)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    logging.set_verbosity_error()
    print(machine())
    found = []
    for name, (config, new) in CASES.items():
        ours, theirs = pair(config)
        form, params = type(theirs).__name__, sum(p.numel() for p in theirs.parameters())
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 8):
                case = dict(model=name, form=form, params=params, threads=threads, rows=rows, new=new)
                found.append(case | speeds(ours, theirs, rows, new, args.turns))
                print(found[-1], flush=True)
    if args.save:
        save("generate_speed", dict(prompt=PROMPT, turns=args.turns, cases=found))


if __name__ == "__main__":
    main()
