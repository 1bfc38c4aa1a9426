"""The laptop preset, the one before it, and the preset with n-gram tables: whole commands, in turns.

    python benchmarks/laptop.py          # goes on where results/laptop.json ends; 3 to 7 minutes a run
    python benchmarks/laptop.py --tried  # how the preset was found: one seed each, eager, one thread
    python benchmarks/laptop.py --starts # a start at zero against GPT-2's, into results/laptop_starts.json
    python benchmarks/laptop.py --full   # the same at the preset's own size, into laptop_starts_full.json

Each run is `python -m tinygpt.train` in a process of its own, from start to end, with an empty folder for
compiled code; the tokens are made beforehand. Bits per byte are those of all held-out addresses. The rates
were chosen with another seed. The form with tables gets as many steps as take the preset's
time. Nothing else may run on the machine.

`--starts` trains a smaller model of the preset's form, 64 wide, for 150 steps of 8 rows of 64 tokens (the
machine was shared; a first run of the preset's own width was given up as too slow). The schedule is in
proportion; both sides have the same batches and the preset's rate of AdamW. One side starts at zero, as the
preset does, the other from GPT-2's weights. Each side has the best of its Muon rates, which two seeds choose:
half of the preset's, the preset's, twice it, and on by factors of two where the best is at an edge. Five
other seeds compare. The loss is that of the first 20,000 held-out tokens.

Written before `--starts` was run: "a start at zero costs something with Muon" is confirmed if the loss from
zero is the higher one and the interval leaves 0 out, refuted if it is the lower one and the interval leaves
0 out, undecided if the interval holds 0.

`--full` asks it of the preset itself: its width, its rows, its 1,000 steps and 100,000 held-out tokens (an
hour or more of one core). The preset's seeds deviate by about 0.003, so one seed chooses the rates and three
others compare. Known before: the smaller model above, -0.004 ± 0.012. The claim is the same, and was written
before the first of these runs.
"""

import argparse
import os
import statistics
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from data_machine import Kept, load, lowest, save, tune

from tinygpt.checkpoint import checkpoints
from tinygpt.run.loop import Stepper
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import judge_of, open_run
from tinygpt.speedrun import run_command
from tinygpt.support import interval

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
STARTS, START_RATES = ("zero", "gpt2"), (0.005, 0.01, 0.02)
# what of the preset is smaller, on how many held-out tokens, and the seeds that choose and compare
SMALL = dict(shape=dict(n_embd=64, n_head=1, block_size=64), steps=150, rows=8, held_out=20_000)
SMALL_SEEDS = (101, 102), (1, 2, 3, 4, 5)
FULL = dict(shape={}, steps=1000, rows=16, held_out=100_000)
FULL_SEEDS = (101,), (1, 2, 3)


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


def run_start(
    init: str,
    muon_lr: float,
    seed: int,
    steps: int,
    shape: dict,
    rows: int,
    held_out: int,
    prepare=lambda model: None,
) -> dict:
    "A model of the preset's form, trained by the trainer from these first weights, and its held-out loss."
    config = preset("laptop")
    part = steps / config.optim.max_steps
    config.model = replace(config.model, init=init, **shape)
    config.optim.muon_lr, config.optim.max_steps = muon_lr, steps
    config.optim.warmup_steps = round(part * config.optim.warmup_steps)
    config.data.batch_size = rows
    config.run.seed = seed
    return dict(init=init, muon_lr=muon_lr, seed=seed, steps=steps) | train_here(config, held_out, prepare)


def train_here(config, held_out: int, prepare=lambda model: None) -> dict:
    "Train here, eager and with one thread: held-out loss and CPU seconds. `prepare` may set the weights."
    config.system.compile, config.system.threads = "off", 1
    start = time.process_time()
    with tempfile.TemporaryDirectory() as config.run.out, closing(open_run(config)) as run:
        prepare(run.model)
        step = Stepper(run)
        while not run.finished:
            step(*next(run.loader))
            run.step += 1
        loss = judge_of(run)(run.model, run.data.val, max_tokens=held_out).loss
    return dict(loss=round(loss, 4), cpu_s=round(time.process_time() - start, 1))


def starts(name: str, size: dict, choosing: tuple, comparing: tuple):
    "Tune both sides, then compare them; what the record `name` holds is not run again."
    kept = Kept(name)

    def loss(init: str, muon_lr: float, seed: int) -> float:
        asked = dict(init=init, muon_lr=muon_lr, seed=seed, steps=size["steps"])
        return kept.get(asked, partial(run_start, **asked | size))["loss"]

    def mean(init: str, muon_lr: float) -> float:
        return statistics.mean(loss(init, muon_lr, seed) for seed in choosing)

    best = {init: lowest(tune(partial(mean, init), START_RATES)) for init in STARTS}
    kept.head["best"] = best
    for seed in comparing:
        for init in STARTS:
            loss(init, best[init], seed)
    apart = [loss("zero", best["zero"], seed) - loss("gpt2", best["gpt2"], seed) for seed in comparing]
    print(best, "zero minus gpt2: {:+.4f} ± {:.4f}".format(*interval(apart)))
    kept.save()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tried", action="store_true", help="the runs that led to the preset")
    parser.add_argument("--starts", action="store_true", help="a start at zero against GPT-2's")
    parser.add_argument("--full", action="store_true", help="the same at the preset's own size")
    args = parser.parse_args()
    if args.starts:
        return starts("laptop_starts", SMALL, *SMALL_SEEDS)
    if args.full:
        return starts("laptop_starts_full", FULL, *FULL_SEEDS)
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
