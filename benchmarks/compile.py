"""What torch.compile costs and gives on a preset's training step: cold and warm compile times, eager and compiled steps, break-even.

    python benchmarks/compile.py                      measure the preset laptop, print the table
    python benchmarks/compile.py --write              and store it in benchmarks/results/compile_<device>_<preset>.json
    python benchmarks/compile.py --preset NAME --rounds 3 --steps 15 --threads 2 --device cuda

Each round is two fresh processes with one empty cache folder: the first compiles everything (cold), the second finds it there (warm).
Within a process eager and compiled steps alternate, so that other work on the machine slows both. All figures are medians.
Seconds of CPU time (of all threads and of the compilers that were started) stand beside wall-clock seconds: they do not grow
when other work takes the cores.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def clocks() -> list[float]:
    "Seconds of wall-clock time, and of CPU time of this process and the finished ones that it started."
    used = os.times()
    return [time.perf_counter(), time.process_time() + used.children_user + used.children_system]


def child(args) -> dict:
    "One process: seconds (wall, CPU) of the first compiled step, and of each later step."
    import torch

    from tinygpt.accumulate import accumulate_gradients, clip_gradients
    from tinygpt.model import GPT
    from tinygpt.precision import choose_policy
    from tinygpt.run.parallel import make_optimizer
    from tinygpt.run.presets import preset
    from tinygpt.support import synchronize

    if args.threads:
        torch.set_num_threads(args.threads)
    config, policy = preset(args.preset), choose_policy(args.device, args.dtype)
    torch.manual_seed(0)
    model = GPT(config.model).to(policy.device)
    o = config.optim
    optimizer, name = make_optimizer(config, model)
    x, y = torch.randint(
        config.model.vocab_size, (2, config.data.batch_size, config.model.block_size), device=policy.device
    )
    compiled = torch.compile(model)

    def step(fn):
        synchronize()
        start = clocks()
        optimizer.zero_grad(set_to_none=True)
        accumulate_gradients(fn, x, y, config.data.micro_batch_size, autocast=policy.autocast)
        clip_gradients(model.parameters(), o.clip)
        optimizer.step()
        synchronize()
        return [now - before for now, before in zip(clocks(), start)]

    step(model)
    first = step(compiled)
    pairs = [(step(model), step(compiled)) for _ in range(args.steps)][2:]  # the first two warm up
    eager, fast = zip(*pairs)
    return dict(
        first=first,
        eager=eager,
        compiled=fast,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens=x.numel(),
        preset_steps=o.max_steps,
        policy=str(policy),
        optimizer=name,
        threads=torch.get_num_threads(),
    )


def fresh_process(args, cache: str) -> dict:
    command = [
        sys.executable,
        __file__,
        "--child",
        "--preset",
        args.preset,
        "--steps",
        str(args.steps),
        "--threads",
        str(args.threads),
        "--device",
        args.device,
        "--dtype",
        args.dtype,
    ]
    done = subprocess.run(
        command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict:
    import torch

    from tinygpt.run.report import cpu_name

    return dict(
        cpu=cpu_name(), cores=os.cpu_count(), isa=torch.backends.cpu.get_cpu_capability(), gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(), torch=torch.__version__, load=[round(v, 1) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps in each process")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    about, rounds = machine(), []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = fresh_process(args, cache), fresh_process(args, cache)
        row = {"cold_first": cold["first"], "warm_first": warm["first"]}
        for kind in ("eager", "compiled"):
            row[kind] = [
                statistics.median(step[clock] for step in cold[kind] + warm[kind]) for clock in (0, 1)
            ]
        rounds.append(row | {"load": machine()["load"]})
        print(
            f"round {number}, wall and CPU seconds: "
            + ", ".join(f"{k} {wall:.3g} {cpu:.3g}" for k, (wall, cpu) in row.items()),
            flush=True,
        )
    median = {}
    for clock, name in enumerate(("wall", "cpu")):
        m = {
            k: statistics.median(r[k][clock] for r in rounds)
            for k in ("eager", "compiled", "cold_first", "warm_first")
        }
        gain = m["eager"] - m["compiled"]
        even = {
            f"break_even_{k}": round((m[f"{k}_first"] - m["eager"]) / gain) if gain > 0 else None
            for k in ("cold", "warm")
        }  # steps
        median[name] = m | {"speedup": m["eager"] / m["compiled"]} | even
    result = dict(
        what="one optimizer step of the preset, eager and compiled", preset=args.preset, policy=cold["policy"], optimizer=cold["optimizer"], threads=cold["threads"],
        median=median, rounds=rounds, parameters=cold["parameters"], tokens_per_step=cold["tokens"], preset_steps=cold["preset_steps"],
        machine=about, date=date.today().isoformat(), command="python " + " ".join(["benchmarks/compile.py", *sys.argv[1:]]),
    )  # fmt: skip
    print(json.dumps(result["median"], indent=2))
    if args.write:
        device = cold["policy"].split(",")[0].split(":")[0]
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"compile_{device}_{args.preset}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
