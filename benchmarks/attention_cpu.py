"""Which attention is the fastest in a training step on a CPU? Forward and backward, by length and format.

    OMP_NUM_THREADS=1 python benchmarks/attention_cpu.py             # prints; a minute
    OMP_NUM_THREADS=1 python benchmarks/attention_cpu.py --save      # writes results/attention_cpu.json

2048 tokens and 2 heads of 64 in every case; a longer row means fewer rows. The implementations take turns;
the figure is the median of their CPU times. With and without dropout; bfloat16 only where the CPU multiplies
it.
"""

import argparse
import itertools
import statistics
import time

import torch
from data_machine import machine, save

from tinygpt.attention import attention
from tinygpt.precision import cpu_has_bf16

LENGTHS = (64, 128, 256, 512, 1024, 2048)
HEADS, WIDTH, TOKENS = 2, 64, 2048
IMPLEMENTATIONS = ("fused", "naive")


def times(T: int, dtype: torch.dtype, dropout: float, turns: int) -> dict[str, float]:
    "Milliseconds of a forward and backward pass, for each implementation."
    qkv = torch.randn(TOKENS // T, T, 3 * HEADS, WIDTH, dtype=dtype, requires_grad=True)
    taken = {impl: [] for impl in IMPLEMENTATIONS}
    for _ in range(turns + 2):
        for impl in IMPLEMENTATIONS:
            start = time.process_time()
            q, k, v = qkv.transpose(1, 2).split(HEADS, dim=1)  # laid out as in the model
            y = attention(q, k, v, dropout=dropout, impl=impl)
            y.backward(torch.ones_like(y))
            taken[impl].append(1e3 * (time.process_time() - start))
            qkv.grad = None
    return {impl: round(statistics.median(values[2:]), 3) for impl, values in taken.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(machine())
    rows = []
    formats = (torch.float32, torch.bfloat16) if cpu_has_bf16() else (torch.float32,)
    for dtype, dropout, T in itertools.product(formats, (0.0, 0.2), LENGTHS):
        ms = times(T, dtype, dropout, args.turns)
        row = dict(dtype=str(dtype).removeprefix("torch."), dropout=dropout, length=T, ms=ms)
        rows.append(row)
        told = ", ".join(f"{impl} {value:.1f} ms" for impl, value in ms.items())
        print(f"{row['dtype']:9s} dropout {dropout}, rows of {T:4d}: {told}", flush=True)
    if args.save:
        shape = dict(tokens=TOKENS, heads=HEADS, head_dim=WIDTH)
        save("attention_cpu", dict(shape=shape, turns=args.turns, rows=rows))


if __name__ == "__main__":
    main()
