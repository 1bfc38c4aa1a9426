"""The laptop preset, the one before it, and the preset with n-gram tables: whole commands, in turns.

    python benchmarks/laptop.py --seeds 5         # goes on where results/laptop.json ends; 13 minutes a seed

Each run is `python -m tinygpt.train` in a process of its own, from start to end, with an empty folder for
compiled code; the tokens are made beforehand. Bits per byte are those of all held-out addresses. The rates
were chosen with another seed. The form with tables gets as many steps as take the preset's
time. Nothing else may run on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from data_machine import load, save

TRAIN = [sys.executable, "-m", "tinygpt.train", "laptop"]
# what makes the preset of before out of today's; readings.py trains that one, too
BEFORE = """--batch-size 8 --n-layer 2 --n-head 6 --n-embd 192 --mlp relu2 --logit-softcap 15
            --ngram-rows 32768 --max-steps 1200 --save-every 600 --muon-lr 0.025 --attention fused""".split()
TABLES = "the preset, with tables"
FORMS = {
    "two layers of 192, tables (the preset before)": BEFORE,
    "the preset: four layers of 128": [],
    TABLES: "--ngram-rows 32768 --max-steps 800".split(),
}


def run(flags: list[str], seed: int, folder: Path) -> dict:
    "Seconds of the whole command, and what its log tells."
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    command = [*TRAIN, "--seed", str(seed), "--out", str(folder), *flags]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, os.times()
    if done.returncode:
        sys.exit(done.stderr)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    lines = [json.loads(line) for line in (folder / "laptop/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]
    steps = [line for line in lines if "tokens_per_second" in line]
    speed, mfu = (
        sorted(step[key] for step in steps)[len(steps) // 2] for key in ("tokens_per_second", "mfu")
    )
    kept = max((folder / "laptop/checkpoints").iterdir())
    size = sum(file.stat().st_size for file in kept.iterdir())
    return dict(
        seed=seed,
        wall_s=round(wall, 1),
        cpu_s=round(cpu, 1),
        bits_per_byte=round(last["val_bits_per_byte"], 4),
        val_tokens=last["val_tokens"],
        steps=last["step"],
        tokens_per_second=round(speed),
        mfu=round(mfu, 3),
        checkpoint_bytes=size,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", type=int, default=3, help="seeds of the form with tables")
    args = parser.parse_args()
    there = (Path(__file__).parent / "results/laptop.json").exists()
    runs = load("laptop")["runs"] if there else {name: [] for name in FORMS}
    for seed in range(1, 1 + args.seeds):
        for name, flags in FORMS.items():
            if seed in [one["seed"] for one in runs[name]] or (name == TABLES and seed > args.tables):
                continue
            with tempfile.TemporaryDirectory() as folder:
                runs[name].append(run(flags, seed, Path(folder)))
            print(name, runs[name][-1], flush=True)
            save("laptop", dict(flags={name: " ".join(flags) for name, flags in FORMS.items()}, runs=runs))


if __name__ == "__main__":
    main()
