"""What bfloat16 and torch.compile give on this CPU: seconds of a forward and backward pass, four ways.

    python benchmarks/formats.py             # prints; about eight minutes on one core
    python benchmarks/formats.py --save      # and writes results/formats.json, which chapters 08 and 09 show

The ways are eager and compiled, in float32 and in bfloat16. One thread. They take turns within a process, and
what is compared is CPU time, so that other work on the machine slows none more than the others. The optimizer
is left out. Each ratio is the median over the turns, with its quartiles.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch
from data_machine import save

from tinygpt.model import GPT
from tinygpt.precision import choose_policy, cpu_has_bf16
from tinygpt.run.presets import preset

CASES = [
    ("shakespeare-char-cpu", 0.0),
    ("speedrun", 0.0),
    ("laptop", 0.0),
    ("shakespeare-char", 0.0),
    ("shakespeare-char-cpu", 0.2),
    ("shakespeare-char", 0.2),
]
WAYS = [("eager", "float32"), ("eager", "bfloat16"), ("compiled", "float32"), ("compiled", "bfloat16")]


def passes(config, rows: int, turns: int) -> dict:
    "One model, one batch of `rows` sequences: CPU seconds of each way, and its speed-up over eager float32."
    torch.manual_seed(0)
    model = GPT(config)
    fns = dict(eager=model, compiled=torch.compile(model))
    autocast = {dtype: choose_policy("cpu", dtype).autocast for _, dtype in WAYS}
    x, y = torch.randint(config.vocab_size, (2, rows, config.block_size))

    def once(how, dtype) -> float:
        start = time.process_time()
        with autocast[dtype]():
            loss = fns[how](x, y)[1]
        loss.backward()
        model.zero_grad(set_to_none=True)
        return time.process_time() - start

    times = {way: [] for way in WAYS}
    for turn in range(turns + 2):
        for way in WAYS:
            seconds = once(*way)
            if turn >= 2:  # the first two warm up, and compile
                times[way].append(seconds)

    found = {}
    for way, own in times.items():
        ratios = [base / t for base, t in zip(times[WAYS[0]], own)]
        speedup = [round(q, 3) for q in statistics.quantiles(ratios, n=4)]
        found[" ".join(way)] = dict(seconds=round(statistics.median(own), 4), speedup=speedup)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("this CPU multiplies bfloat16 in hardware:", cpu_has_bf16(), flush=True)
    rows = []
    for name, dropout in CASES:
        config = preset(name)
        model = replace(config.model, dropout=dropout)
        batch = min(config.data.batch_size, 8)
        row = dict(
            preset=name,
            n_embd=model.n_embd,
            dropout=dropout,
            tokens=batch * model.block_size,
            ways=passes(model, batch, args.turns),
        )
        rows.append(row)
        print(row, flush=True)
    if args.save:
        save("formats", dict(threads=1, bf16=cpu_has_bf16(), rows=rows))


if __name__ == "__main__":
    main()
