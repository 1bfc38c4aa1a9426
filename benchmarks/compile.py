"""What torch.compile costs and gives on a preset's training step: compile times, steps, break-even.

    python benchmarks/compile.py             measure the preset laptop, print the table
    python benchmarks/compile.py --write     and write benchmarks/results/compile_<device>_<preset>.json
    python benchmarks/compile.py --preset NAME --rounds 3 --steps 15 --threads 2 --device cuda

Each round is two fresh processes with one empty cache folder: the first compiles everything (cold), the
second finds it there (warm). Within a process eager and compiled steps alternate, so that other work on the
machine slows both. All figures are medians. Seconds of CPU time (of all threads and of the compilers that
were started) stand beside wall-clock seconds: they do not grow when other work takes the cores.
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
    from tinygpt.ddp.world import World
    from tinygpt.model import GPT
    from tinygpt.precision import choose_policy
    from tinygpt.run.parallel import Single
    from tinygpt.run.presets import preset
    from tinygpt.support import synchronize

    if args.threads:
        torch.set_num_threads(args.threads)
    config = preset(args.preset)
    policy = choose_policy(args.device, args.dtype)
    policy.apply()
    torch.manual_seed(0)
    model = GPT(config.model).to(policy.device)
    o = config.optim
    way = Single(model, World(), dtype=policy.dtype)
    name = way.make_optimizer(config)
    optimizer = way.optimizer
    shape = (2, config.data.batch_size, config.model.block_size)
    x, y = torch.randint(config.model.vocab_size, shape, device=policy.device)
    compiled = torch.compile(model, backend=args.backend)

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
    "What `child` returns in a process of its own that compiles into the folder `cache`."
    command = [sys.executable, __file__, "--child", "--preset", args.preset, "--steps", str(args.steps)]
    command += ["--threads", str(args.threads), "--device", args.device, "--dtype", args.dtype]
    command += ["--backend", args.backend]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> dict:
    import torch

    from tinygpt.run.report import cpu_name

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    load = [round(v, 1) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return dict(
        cpu=cpu_name(),
        cores=os.cpu_count(),
        isa=torch.backends.cpu.get_cpu_capability(),
        gpu=gpu,
        python=platform.python_version(),
        torch=torch.__version__,
        load=load,
    )


def measure(args) -> tuple[list[dict], dict]:
    "The rounds, each with (wall, CPU) seconds of every kind of step; and what a process says of the model."
    rounds = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold = fresh_process(args, cache)
            warm = fresh_process(args, cache)
        row = {"cold_first": cold["first"], "warm_first": warm["first"]}
        for kind in ("eager", "compiled"):
            walls, cpus = zip(*cold[kind], *warm[kind])
            row[kind] = [statistics.median(walls), statistics.median(cpus)]
        rounds.append(row | {"load": machine()["load"]})
        told = [f"{kind} {wall:.3g} {cpu:.3g}" for kind, (wall, cpu) in row.items()]
        print(f"round {number}, wall and CPU seconds: {', '.join(told)}", flush=True)
    return rounds, cold


def medians(rounds: list[dict], clock: int) -> dict:
    "Over the rounds, on the wall's clock (0) or the CPU's (1): seconds, the speed-up, steps to break even."
    median = {}
    for kind in ("eager", "compiled", "cold_first", "warm_first"):
        median[kind] = statistics.median(r[kind][clock] for r in rounds)
    gain = median["eager"] - median["compiled"]
    median["speedup"] = median["eager"] / median["compiled"]
    for kind in ("cold", "warm"):
        cost = median[f"{kind}_first"] - median["eager"]
        median[f"break_even_{kind}"] = round(cost / gain) if gain > 0 else None
    return median


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; eager: a trial of the script"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps in each process")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args)))
        return
    about = machine()
    rounds, found = measure(args)
    result = dict(
        what="one optimizer step of the preset, eager and compiled",
        preset=args.preset,
        policy=found["policy"],
        optimizer=found["optimizer"],
        threads=found["threads"],
        median={"wall": medians(rounds, 0), "cpu": medians(rounds, 1)},
        rounds=rounds,
        parameters=found["parameters"],
        tokens_per_step=found["tokens"],
        preset_steps=found["preset_steps"],
        machine=about,
        date=date.today().isoformat(),
        command="python " + " ".join(["benchmarks/compile.py", *sys.argv[1:]]),
    )
    print(json.dumps(result["median"], indent=2))
    if args.write:
        device = found["policy"].split(",")[0].split(":")[0]
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"compile_{device}_{args.preset}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
