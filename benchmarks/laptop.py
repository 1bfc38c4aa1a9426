"""The laptop preset, the one before it, and the preset with n-gram tables: whole commands, in turns.

    python benchmarks/laptop.py          # goes on where results/laptop.json ends; 3 to 7 minutes a run
    python benchmarks/laptop.py --tried  # how the preset was found: one seed each, eager, one thread

Each run is `python -m tinygpt.train` in a process of its own, from start to end, with an empty folder for
compiled code; the tokens are made beforehand. Bits per byte are those of all held-out addresses. The rates
were chosen with another seed. The form with tables gets as many steps as take the preset's
time. Nothing else may run on the machine.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from data_machine import load, save

from tinygpt.checkpoint import checkpoints
from tinygpt.run.report import read_metrics
from tinygpt.speedrun import run_command

RESULTS = Path(__file__).parent / "results"
SPEED = ("tokens_per_second", "of_measured_peak")
# what makes the preset of before out of today's; readings.py trains that one, too
BEFORE = """--batch-size 8 --n-layer 2 --n-head 6 --n-embd 192 --mlp relu2 --logit-softcap 15
            --ngram-rows 32768 --max-steps 1200 --save-every 600 --muon-lr 0.025 --attention fused""".split()
FLOAT32 = ["--dtype", "float32"]  # what a CPU does that does not multiply bfloat16
FORMS = {  # the flags of each, and how many seeds
    "two layers of 192, tables (the preset before)": (BEFORE, 5),
    "the preset: four layers of 128": ([], 5),
    "the preset, with tables": ("--ngram-rows 32768 --max-steps 800".split(), 2),
    "the preset before, in float32": ([*BEFORE, *FLOAT32], 3),
    "the preset, in float32": (FLOAT32, 3),
    "the preset, in float32, 880 steps": ([*FLOAT32, "--max-steps", "880"], 3),
}
# the way to the preset: each row is today's preset but for these flags, at about equal time
TRIED = {
    "vocabulary of 2048": "--vocab-size 2048 --muon-lr 0.025 --max-steps 1530",
    "the first with 4096": "--muon-lr 0.025 --max-steps 1270",
    "vocabulary of 8192": "--vocab-size 8192 --muon-lr 0.025 --max-steps 950",
    "160 wide": "--n-embd 160 --muon-lr 0.025 --max-steps 960",
    "rows of 256, 16 of them": "--block-size 256 --muon-lr 0.025 --max-steps 640",
    "8 rows": "--batch-size 8 --muon-lr 0.025 --max-steps 2400",
    "32 rows": "--batch-size 32 --muon-lr 0.025 --max-steps 640",
    "half of AdamW's rate": "--learning-rate 0.006 --muon-lr 0.025 --max-steps 1270",
    "half of Muon's rate": "--muon-lr 0.0125 --max-steps 1270",
    "a third of Muon's rate": "--muon-lr 0.0075 --max-steps 1270",
    "32 rows, half of Muon's, more of AdamW's": (
        "--batch-size 32 --muon-lr 0.0125 --learning-rate 0.018 --max-steps 640"
    ),
}
EAGER = ("--compile", "off", "--threads", "1")


def run(flags: list[str], seed: int, more: tuple = ()) -> dict:
    "What `run_command` says of a run, with its flags, its median speed and the size of its last checkpoint."
    with tempfile.TemporaryDirectory() as tmp:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tmp}/compiled"  # the command finds nothing compiled
        found = run_command(["laptop", *flags, *more], Path(tmp), seed)
        place = Path(tmp) / f"seed{seed}"
        readings = [line for line in read_metrics(place) if "tokens_per_second" in line]
        speed = {key: statistics.median(line[key] for line in readings) for key in SPEED}
        size = sum(file.stat().st_size for file in checkpoints(place)[-1].iterdir())
    return found | speed | dict(flags=" ".join(flags), checkpoint_bytes=size)


def keep(record: dict, kind: str, name: str, found: dict):
    "Show a run, and write it into the record."
    print(name, found, flush=True)
    record[kind].setdefault(name, []).append(found)
    save("laptop", record)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tried", action="store_true", help="the runs that led to the preset")
    args = parser.parse_args()
    record = {"runs": {}, "tried": {}}
    if (RESULTS / "laptop.json").exists():
        record |= {kind: load("laptop")[kind] for kind in record}
    if args.tried:
        for name, flags in TRIED.items():
            if name not in record["tried"]:
                keep(record, "tried", name, run(flags.split(), 1337, EAGER))
        return
    for seed in range(1, 1 + max(seeds for _, seeds in FORMS.values())):
        for name, (flags, seeds) in FORMS.items():
            known = [run["seed"] for run in record["runs"].get(name, [])]
            if seed <= seeds and seed not in known:
                keep(record, "runs", name, run(flags, seed))


if __name__ == "__main__":
    main()
