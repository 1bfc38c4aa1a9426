"""Kill a training run again and again, at random: does it lose a weight or a line of its metrics?

    python benchmarks/kills.py                              # 200 kills; prints
    python benchmarks/kills.py --save                       # and writes results/kills.json
    python benchmarks/kills.py --kills 20 --ways single zero --seed 7

A run that nobody disturbs is the reference. Then the same run is started, killed with SIGKILL (all of its
processes at once) after a random time, gone on with, killed again, until it is through; and again, until
there were as many kills as asked for. Each run that came through has to end with the reference's weights,
bit for bit, and with its metrics: the same lines, each once, in order, timings aside.
Linux and macOS.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from data_machine import save

from tinygpt.checkpoint import find_checkpoint
from tinygpt.data.tokens import sha256_file

KEPT = ("step", "loss", "grad_norm", "lr", "val_loss", "val_bits_per_byte", "val_tokens")  # no timings
WAYS = {"single": 1, "ddp": 2, "zero": 2}  # how many processes
STEPS = 150
MOST = 15  # kills of one run; then it may go on to its end, and is compared


def command(way: str, folder: Path, resume: bool) -> list[str]:
    "The run, or how it is gone on with."
    start = [sys.executable, "-m"]
    if WAYS[way] > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WAYS[way]), "-m"]
    if resume:
        return [*start, "tinygpt.train", "--resume", str(folder)]
    small = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --batch-size 4 --ngram-rows None"
    often = f"--max-steps {STEPS} --warmup-steps 5 --eval-every 10 --save-every 7 --log-every 3 --keep 2"
    less = "--eval-tokens 500 --final-eval-tokens 2000 --sample-tokens 4 --no-compressors --threads 1"
    place = ["--out", str(folder.parent), "--name", folder.name, "--source", str(folder.parent / "text.txt")]
    parallel = ["--parallel", way] if WAYS[way] > 1 else []
    more = f"--tokenizer byte --dropout 0.1 {small} {often} {less}".split()
    return [*start, "tinygpt.train", "laptop", *place, *more, *parallel]


def run(way: str, folder: Path, patience: float | None) -> tuple[bool, str]:
    "(whether it came through, what it said). With patience: killed so many seconds after its first step."
    resume = any(folder.glob("checkpoints/step_*"))
    if not resume and folder.exists():  # killed before its first checkpoint
        more = ["--overwrite"]
    else:
        more = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command(way, folder, resume), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    said, begun = [], []
    ready = threading.Event()

    def listen():
        for line in process.stdout:
            said.append(line)
            if "device " in line or "resumed from" in line:  # behind the bar of progress
                begun.append(line)
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    if patience is not None:
        ready.wait()
        time.sleep(patience)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    status = process.wait()
    listener.join()
    text = "".join(said)
    if status not in (0, -signal.SIGKILL) or not begun:
        raise RuntimeError(f"the run ended with {status}: {text[-2000:]}")
    return status == 0, text


def outcome(folder: Path) -> tuple[dict, list]:
    "(hashes of the last weights and of the optimizer's state, the metrics without timings)."
    last = find_checkpoint(folder)
    assert last.name == f"step_{STEPS:06d}", last
    hashes = {name: sha256_file(last / name) for name in ("model.safetensors", "optimizer.pt")}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: line.get(name) for name in KEPT} for line in lines]
    return hashes, kept


def disturb(way: str, kills: int, folder: Path, dice: random.Random) -> dict:
    "Runs of one kind with so many kills in all; raises where one ends otherwise than the reference."
    begun = time.perf_counter()
    run(way, folder / f"{way}-reference", None)
    reference = outcome(folder / f"{way}-reference")
    seconds = time.perf_counter() - begun
    done = runs = 0
    while done < kills:
        place = folder / f"{way}-{runs}"
        through, here = False, 0
        while not through:
            patience = dice.uniform(0, 1.5) if done < kills and here < MOST else None
            through, _ = run(way, place, patience)
            done += not through
            here += not through
            print(f"\r{way}: {done} kills", end="", flush=True)
        weights, lines = outcome(place)
        assert weights == reference[0], f"{place}: other weights, after {done} kills"
        differ = [pair for pair in zip(lines, reference[1]) if pair[0] != pair[1]]
        problem = f"{place}: {len(lines)} lines of metrics and not {len(reference[1])}, first {differ[:1]}"
        assert lines == reference[1], problem
        runs += 1
        print(f"\r{way}: {done} kills, {runs} runs came through alike", flush=True)
    return dict(processes=WAYS[way], kills=done, runs=runs, seconds_undisturbed=round(seconds, 1))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, help="in all, half of them on one process")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--seed", type=int, default=0, help="of the times of the kills")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    dice = random.Random(args.seed)
    parts = {way: args.kills // 4 for way in args.ways}
    if "single" in parts:
        parts["single"] = args.kills - sum(n for way, n in parts.items() if way != "single")
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        text = "".join(f"The {i % 17}th of {i % 12} months is a good day for {i}.\n" for i in range(5000))
        (folder / "text.txt").write_text(text, encoding="utf-8")
        results = {way: disturb(way, kills, folder, dice) for way, kills in parts.items()}
    print(results)
    if args.save:
        save("kills", results)


if __name__ == "__main__":
    main()
