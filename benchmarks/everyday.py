"""What everyday use costs on this machine: imports, the first step, tokens per second.

    python benchmarks/everyday.py            # prints
    python benchmarks/everyday.py --save     # and writes benchmarks/results/everyday.json
    python benchmarks/everyday.py --suite    # also the times of the tests and the chapters; twenty minutes

Ratios and medians of several runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_machine import save, spread

from tinygpt.speedrun import timed_process

RUNS = 5


def seconds(code_a: str, code_b: str) -> tuple[list[float], list[float]]:
    "Wall-clock seconds of two pieces of Python in fresh processes, in turn: a drifting machine hits both."
    times = ([], [])
    for i in range(RUNS + 1):
        for which, code in enumerate((code_a, code_b)):
            done, wall, _ = timed_process([sys.executable, "-c", code])
            done.check_returncode()
            if i:  # the first round warms the disk's cache
                times[which].append(wall)
    return times


def training(folder: str, *flags: str) -> list[str]:
    "The command of a run of the preset laptop that does nothing but train."
    command = [sys.executable, "-m", "tinygpt.train", *flags, "--out", folder, "--eval-every", "0"]
    command += ["--save-every", "0", "--sample-tokens", "0", "--final-eval-tokens", "1000"]
    return [*command, "--warmup-steps", "0"]


def run_times() -> dict[str, dict]:
    "What a run of one step takes with an empty and a full cache, and the tokens per second of a longer one."
    cold = []
    first = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(RUNS):
            command = training(folder, "--max-steps", "1", "--name", f"first{i}", "--overwrite")
            for times, cache in ((cold, {"TINYGPT_CACHE": f"{folder}/cache{i}"}), (first, {})):
                done, wall, _ = timed_process(command, env=os.environ | cache)
                done.check_returncode()
                times.append(wall)
        command = training(folder, "--max-steps", "40", "--name", "speed", "--log-every", "5")
        subprocess.run(command, check=True, capture_output=True)
        lines = (Path(folder) / "speed/metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines[10:]) if "loss" in step]
    return {
        "a run of one step, start to end, empty cache, s": spread(cold),
        "a run of one step, start to end, tokens cached, s": spread(first),
        "laptop preset, tokens/s": spread(step.get("tokens_per_second") for step in steps),
    }


def suite_times() -> dict[str, dict]:
    "How long the tests and the chapters take."
    commands = {
        "the tests, two at a time, s": ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"],
        "the chapters, two at a time, s": ["tools/book.py", "run", "--jobs", "2"],
    }
    root = Path(__file__).parent.parent
    rows = {}
    for name, command in commands.items():
        start = time.perf_counter()
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *command], cwd=root, env=env)
        rows[name] = spread([time.perf_counter() - start])
        if done.returncode:
            sys.exit(f"error: {' '.join(command)} failed: its time says nothing")
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--suite", action="store_true")
    args = parser.parse_args()
    ours, alone = seconds("import tinygpt.train", "import torch")
    rows = {
        "import torch, s": spread(alone),
        "import tinygpt.train, s": spread(ours),
        "import tinygpt.train / import torch": spread([a / b for a, b in zip(ours, alone)]),
    }
    rows |= run_times()
    if args.suite:
        rows |= suite_times()
    for name, row in rows.items():
        print(f"{name:52s} {row['median']:10.3f}  ({row['min']} to {row['max']})")
    if args.save:
        save("everyday", dict(rows=rows))


if __name__ == "__main__":
    main()
