"""Does torch.compile gain anything where a model has dropout? The same model with and without it.

    python benchmarks/dropout.py             # prints; about five minutes on one core
    python benchmarks/dropout.py --save      # and writes results/dropout.json, which chapter 09 shows

The presets `speedrun` and `laptop`, without dropout and with 0.2; and `laptop` with dropout of the attention
weights alone, and with all dropout but that. Forward and backward passes, eager and compiled in turn, one
thread, CPU time. Three fresh processes for each model; a ratio is the median over a process's turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch
from data_machine import save

import tinygpt.model
from tinygpt.model import GPT
from tinygpt.precision import choose_policy
from tinygpt.run.presets import preset

BOTH = ("float32", "bfloat16")
CASES = [
    ("speedrun", "none", BOTH),
    ("speedrun", "everywhere", BOTH),
    ("laptop", "none", BOTH),
    ("laptop", "everywhere", BOTH),
    ("laptop", "attention weights only", ("float32",)),
    ("laptop", "all but the attention weights", ("float32",)),
]
RATE = 0.2


def build(name: str, where: str) -> tuple[GPT, int]:
    "(the preset's model with dropout at these places, rows of its batch)."
    config = preset(name)
    if where == "attention weights only":  # the fused attention drops by itself
        tinygpt.model.drop = lambda x, *_: x
    if where == "all but the attention weights":
        kept = tinygpt.model.attention
        tinygpt.model.attention = lambda *qkv, dropout, **how: kept(*qkv, **how)
    model = GPT(replace(config.model, dropout=0.0 if where == "none" else RATE))
    return model, min(config.data.batch_size, 8)


def child(name: str, where: str, dtype: str, turns: int) -> dict:
    "One process: median CPU seconds of a pass, eager and compiled, and the median of their ratio."
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rows = build(name, where)
    autocast = choose_policy("cpu", dtype).autocast
    config = model.config
    x, y = torch.randint(config.vocab_size, (2, rows, config.block_size))

    def once(fn) -> float:
        start = time.process_time()
        with autocast():
            loss = fn(x, y)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
        return time.process_time() - start

    compiled = torch.compile(model)
    pairs = [(once(model), once(compiled)) for _ in range(turns + 2)][2:]  # the first two warm up
    eager, fast = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(a / b for a, b in pairs)
    return dict(eager_s=round(eager, 5), compiled_s=round(fast, 5), ratio=round(ratio, 3))


def fresh_process(case: tuple, turns: int, cache: str) -> dict:
    "What `child` returns in a process of its own."
    command = [sys.executable, __file__, "--child", *case, "--turns", str(turns)]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(*args.child, args.turns)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for name, where, dtypes in CASES:
            for dtype in dtypes:
                case = (name, where, dtype)
                found = [fresh_process(case, args.turns, cache) for _ in range(args.processes)]
                rows.append(dict(preset=name, dropout=where, dtype=dtype, processes=found))
                print(*case, [one["ratio"] for one in found], found[0], flush=True)
    if args.save:
        save("dropout", dict(rate=RATE, turns=args.turns, rows=rows))


if __name__ == "__main__":
    main()
