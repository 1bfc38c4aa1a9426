"""Tokens a second on one and on two processes, and what the size of a bucket does, on this machine's CPU.

    python benchmarks/ddp_speed.py            # prints; about five minutes, on an idle machine
    python benchmarks/ddp_speed.py --save     # and writes results/ddp_speed.json
    python benchmarks/ddp_speed.py --rounds 1 --steps 3 --small    # a trial of the script itself

*Ranks*: the same GPT on the same 16 rows a step by one process with one thread, one process with two threads,
and two processes with one thread each (torch's DDP, and chapter 13's `AfterBackward`, whose messages wait for
the end of backward); and two processes with 16 rows each. *Buckets*: two processes, torch's DDP and the
chapter's `Bucketed`, with buckets from a few kilobytes to more than the whole model.

Everything is run in turn, in several rounds, and a time is the median of a run's steps. The first job of new
processes is thrown away, and the others come in another order in each round.

What two processes on one CPU can show: how much of two cores a second process brings, and what many small
messages cost. What they cannot: a network, which carries bytes while the processors compute. Here gloo's
messages are copied by the same cores that compute, so the gain of overlap does not show.
"""

import argparse
import random
import statistics
import time

import torch
from data_machine import save, spread

from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.ddp.world import World, run_processes
from tinygpt.ddp.wrap import AfterBackward, Bucketed, wrap_ddp
from tinygpt.model import GPT, GPTConfig

CONFIG = dict(vocab_size=512, block_size=64, n_layer=4, n_head=4, n_embd=128)
SMALL = dict(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32)
ROWS = 16  # of a step, over all processes
BUCKETS = 0.02, 0.1, 0.5, 1.0, 2.0, 25.0  # MiB; all gradients are 3.3


def wrap(how: str, model: GPT, world: World, bucket_mb: float):
    if how == "alone":
        return model
    if how == "after backward":
        return AfterBackward(model)
    return Bucketed(model, bucket_mb) if how == "buckets" else wrap_ddp(model, world, bucket_mb)


def step_seconds(world: World, how: str, bucket_mb: float, rows: int, config: dict, steps: int) -> dict:
    "Median seconds of a step, and the all-reduces of the last one, of a run with `rows` rows a rank."
    torch.manual_seed(0)
    model = GPT(GPTConfig(**config))
    net = wrap(how, model, world, bucket_mb)
    optimizer, _ = make_adamw(adamw_groups(model, lr=1e-3))
    x = torch.randint(config["vocab_size"], (rows, config["block_size"]))
    seconds = []
    for _ in range(steps + 2):  # two to warm up
        start = time.perf_counter()
        optimizer.zero_grad()
        net(x, x)[1].backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    messages = len(net.timeline) - 1 if hasattr(net, "timeline") else None  # beside "backward ends"
    grads = sum(p.nbytes for p in model.parameters())
    return dict(seconds=statistics.median(seconds[2:]), messages=messages, gradient_bytes=grads)


def several(world: World, runs: list[dict], config: dict, steps: int) -> list[dict]:
    return [step_seconds(world, **run, config=config, steps=steps) for run in runs]


def ranks_table(rounds: list[dict]) -> list[dict]:
    "Tokens a second as a ratio to one process with one thread in the same round."
    rows = []
    for name in rounds[0]:
        speed = [r[name]["rows"] / r[name]["seconds"] for r in rounds]
        base = [r["1 process, 1 thread"] for r in rounds]
        ratios = [s * b["seconds"] / b["rows"] for s, b in zip(speed, base)]
        ms = spread(1000 * r[name]["seconds"] for r in rounds)
        rows.append(dict(what=name, step_ms=ms, times_one_thread=spread(ratios)))
        print(rows[-1], flush=True)
    return rows


def bucket_table(rounds: list[dict]) -> list[dict]:
    "Step time as a ratio to the largest bucket in the same round."
    rows = []
    for how, mb in rounds[0]:
        ratios = [r[how, mb]["seconds"] / r[how, BUCKETS[-1]]["seconds"] for r in rounds]
        row = dict(how=how, bucket_mb=mb, messages=rounds[0][how, mb]["messages"])
        ms = spread(1000 * r[how, mb]["seconds"] for r in rounds)
        rows.append(row | dict(step_ms=ms, times_largest=spread(ratios)))
        print(rows[-1], flush=True)
    return rows


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    config = SMALL if args.small else CONFIG
    half = ROWS // 2
    alone = {"how": "alone", "bucket_mb": 0.0, "rows": ROWS}
    two = {
        "2 processes, torch's DDP": dict(how="ddp", bucket_mb=25.0, rows=half),
        "2 processes, after backward": dict(how="after backward", bucket_mb=25.0, rows=half),
        "2 processes, DDP, twice the rows": dict(how="ddp", bucket_mb=25.0, rows=ROWS),
    }
    sweep = [dict(how=how, bucket_mb=mb, rows=half) for how in ("buckets", "ddp") for mb in BUCKETS]
    jobs = [*two.values(), *sweep]
    order = random.Random(0)
    ranks, buckets, size = [], [], 0
    for _ in range(args.rounds):
        found = {}
        for threads in (1, 2):
            name = f"1 process, {threads} thread{'s' * (threads > 1)}"
            job = [alone, alone], config, args.steps  # the first one is thrown away
            found[name] = run_processes(several, 1, *job, threads=threads, timeout=600)[0][1] | {"rows": ROWS}
        turns = order.sample(range(len(jobs)), len(jobs))
        in_turn = [jobs[0], *(jobs[i] for i in turns)]  # the first one is thrown away
        times = run_processes(several, 2, in_turn, config, args.steps, timeout=1200)[0][1:]
        done = [times[turns.index(i)] for i in range(len(jobs))]
        for (name, run), result in zip(two.items(), done):
            found[name] = result | {"rows": 2 * run["rows"]}
        ranks.append(found)
        buckets.append({(run["how"], run["bucket_mb"]): r for run, r in zip(sweep, done[len(two) :])})
        size = done[0]["gradient_bytes"]
    result = dict(
        config=config, rows=ROWS, rounds=args.rounds, steps=args.steps, gradient_mib=round(size / 2**20, 2)
    )
    result |= dict(ranks=ranks_table(ranks), buckets=bucket_table(buckets))
    if args.save:
        save("ddp_speed", result)


if __name__ == "__main__":
    main()
