"""What everyday use costs on this machine: imports, the first step, tokens per second. Ratios and medians of several runs.

python benchmarks/everyday.py            # prints
python benchmarks/everyday.py --save     # and writes benchmarks/results/everyday.json
python benchmarks/everyday.py --suite    # also the run times of what CI runs: the tests and the chapters, some twenty minutes
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
    "Wall-clock seconds of two pieces of Python in fresh processes, in turn, so that a drifting machine hits both."
    times = ([], [])
    for i in range(RUNS + 1):
        for which, code in enumerate((code_a, code_b)):
            done, wall, _ = timed_process([sys.executable, "-c", code])
            done.check_returncode()
            if i:  # the first round warms the disk's cache
                times[which].append(wall)
    return times


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
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--out",
            folder,
            "--eval-every",
            "0",
            "--save-every",
            "0",
            "--sample-tokens",
            "0",
            "--final-eval-tokens",
            "1000",
            "--warmup-steps",
            "0",
        ]
        first, cold, speeds = [], [], []
        for i in range(RUNS):
            for times, cache in ((cold, {"TINYGPT_CACHE": f"{folder}/cache{i}"}), (first, {})):
                command = [
                    sys.executable,
                    "-m",
                    "tinygpt.train",
                    "--max-steps",
                    "1",
                    "--name",
                    f"first{i}",
                    "--overwrite",
                    *flags,
                ]
                done, wall, _ = timed_process(command, env=os.environ | cache)
                done.check_returncode()
                times.append(wall)
        command = [
            sys.executable,
            "-m",
            "tinygpt.train",
            "--max-steps",
            "40",
            "--name",
            "speed",
            "--log-every",
            "5",
            *flags,
        ]
        subprocess.run(command, check=True, capture_output=True)
        for line in (Path(folder) / "speed/metrics.jsonl").read_text().splitlines()[10:]:
            speeds += [json.loads(line).get("tokens_per_second")] if "loss" in json.loads(line) else []
    rows["a run of one step, start to end, empty cache, s"] = spread(cold)
    rows["a run of one step, start to end, tokens cached, s"] = spread(first)
    rows["laptop preset, tokens/s"] = spread(speeds)
    if args.suite:
        root = Path(__file__).parent.parent
        for name, command in {
            "the tests, two at a time, s": ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"],
            "the chapters, two at a time, s": ["tools/book.py", "run", "--jobs", "2"],
        }.items():
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *command], cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            rows[name] = spread([time.perf_counter() - start])
            if done.returncode:
                sys.exit(f"error: {' '.join(command)} failed: its time says nothing")
    for name, row in rows.items():
        print(f"{name:52s} {row['median']:10.3f}  ({row['min']} to {row['max']})")
    if args.save:
        save("everyday", dict(rows=rows))


if __name__ == "__main__":
    main()
