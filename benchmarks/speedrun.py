"""nanoGPT's CPU run against `python -m tinygpt.train speedrun`, and the ladder between them.

    python benchmarks/speedrun.py --peer PATH      ten seeds, and nanoGPT in turn for five of them;
                                                   PATH is a clone of it
    python benchmarks/speedrun.py --ladder         every rung of chapter 20, five seeds, its losses
    python benchmarks/speedrun.py --clock          and its seconds
    python benchmarks/speedrun.py --ladder --left-out     the last rung with one idea left out, losses
    python benchmarks/speedrun.py --clock --left-out      and seconds
    python benchmarks/speedrun.py --long           to nanoGPT's GPU run, 1.4697: three seeds
    python benchmarks/speedrun.py --long --float32                      and in float32

The run is Tiny Shakespeare by characters, to a validation loss of 1.88. Each command writes its file in
benchmarks/results. The time of a run is that of all its commands, from an empty cache: tokenizing, imports,
compilation and evaluation counted; the text itself lies there. The peer (github.com/karpathy/nanoGPT) runs as
its README says for a CPU, from a copy in which only the seed is changed; its best checkpoint is then scored
over the whole validation part, in rows of 64 characters, like ours. That scoring is not counted. Beside
each pair run two floors: our command with a single step, and `import torch` alone.
"""

import argparse
import importlib.util
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data_machine import load, save, spread
from filelock import FileLock

from tinygpt.data.tokens import load_corpus
from tinygpt.run.command import parse_arguments
from tinygpt.run.loop import Stepper
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import open_run
from tinygpt.speedrun import LADDER, Rung, run_command, rung_flags, timed_process
from tinygpt.speedrun_gain import GOAL
from tinygpt.support import cache_dir
from tinygpt.train import train

# the settings were chosen on other seeds
SEEDS = [701, 702, 703, 704, 705, 706, 707, 708, 709, 710]
PEER_SEEDS = SEEDS[:5]  # a run of nanoGPT takes as long as twenty of ours
LONG_SEEDS = [411, 412, 413]
LONG_GOAL = 1.4697  # what nanoGPT's README gives for its run of 10.7 M parameters on a GPU
LONG = """shakespeare-char --n-layer 4 --n-head 3 --n-embd 192 --batch-size 8
          --position rope --norm rmsnorm --qk-norm --mlp relu2 --init zero
          --no-tie-weights --logit-softcap 15 --dropout 0.1
          --optimizer muon --muon-lr 0.01 --learning-rate 0.006
          --schedule trapezoid --cooldown 0.8 --final-lr 0 --warmup-steps 10 --max-steps 4000
          --eval-every 460 --eval-tokens 20000 --save-every 0 --sample-tokens 0 --no-compressors""".split()
README = """--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12
            --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000
            --dropout=0.0""".split()


def _without(name: str, flags: str, steps: int = 110) -> Rung:
    "The last rung, with flags that take back what one idea below it set."
    return Rung(f"without {name}", flags, steps, "", kept=False)


# What had come only because of an idea goes with it: without Muon, AdamW has the rate and the warm-up that it
# had before Muon came.
LEFT_OUT = (
    _without("straight down to 0", "--schedule cosine --final-lr 0.1"),
    _without("Muon", "--optimizer adamw --learning-rate 4e-3 --warmup-steps 20", 300),
    _without("three times AdamW's rate", "--learning-rate 4e-3"),
    _without("no warm-up", "--warmup-steps 20"),
    _without("RoPE", "--position learned"),
    _without("RMSNorm", "--norm layernorm"),
    _without("QK-norm", "--no-qk-norm"),
    _without("ReLU²", "--mlp gelu"),
    _without("own head", "--tie-weights --init gpt2"),  # a start at zero needs a head of its own
    _without("start at zero", "--init gpt2"),
    _without("soft cap", "--logit-softcap 0"),
    _without("n-gram tables", "--ngram-rows None", 300),
    _without("one layer", "--n-layer 4"),
    _without("bfloat16 where the CPU has it", "--dtype float32"),
    _without("half as wide", "--n-embd 128 --n-head 4"),
    _without("32 rows a step", "--batch-size 12", 200),
    _without(
        "the eleven inside the noise",
        """--learning-rate 4e-3 --warmup-steps 100 --schedule cosine --final-lr 0.1 --batch-size 12
        --norm layernorm --no-qk-norm --mlp gelu --tie-weights --init gpt2 --logit-softcap 0""",
        250,
    ),
)
LAST = [rung for rung in LADDER if rung.kept][-1]


@dataclass(frozen=True)
class Race:
    "Rungs that are compared, and where their record is."

    record: str
    rungs: tuple[Rung, ...]
    seeds: tuple[int, ...]
    option: str = ""  # that this race wants on the command line


CLIMB = Race("speedrun_ladder", LADDER, (101, 102, 103, 104, 105))
# on seeds on which nothing was chosen
LEAVE_OUT = Race("speedrun_left_out", (LAST, *LEFT_OUT), (721, 722, 723, 724, 725), " --left-out")


def run_peer(peer: Path, folder: Path, seed: int, text: str, iters: int | None) -> dict:
    "Prepare the data, train, and score nanoGPT's best checkpoint."
    shutil.copytree(peer, folder, ignore=shutil.ignore_patterns(".git"))
    script = folder / "train.py"
    source = script.read_text()
    known = source.count("torch.manual_seed(1337 + seed_offset)") == 1
    assert known, "another nanoGPT than the one this was written for"
    script.write_text(source.replace("1337 + seed_offset", f"{seed} + seed_offset"))
    data = folder / "data/shakespeare_char"
    (data / "input.txt").write_text(text, encoding="utf-8")
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *README]
    if iters:
        command += [f"--max_iters={iters}", f"--lr_decay_iters={iters}", f"--eval_interval={iters}"]
    prepared, *preparing = timed_process([sys.executable, "prepare.py"], cwd=data)
    prepared.check_returncode()
    out, *training = timed_process(command, cwd=folder)
    out.check_returncode()
    wall, cpu = map(sum, zip(preparing, training))
    estimates = [float(line.rpartition(" ")[2]) for line in out.stdout.splitlines() if "val loss" in line]
    loss, steps = score_peer(folder, data)
    return dict(
        seed=seed,
        loss=loss,
        own_estimate=min(estimates),
        steps=steps,
        wall_s=round(wall, 2),
        cpu_s=round(cpu, 2),
    )


def score_peer(folder: Path, data: Path) -> tuple[float, int]:
    "Loss of nanoGPT's checkpoint over the whole validation part, in rows of 64 characters; its steps."
    spec = importlib.util.spec_from_file_location("peer_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = torch.load(folder / "out-shakespeare-char/ckpt.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    val = torch.from_numpy(np.fromfile(data / "val.bin", dtype=np.uint16).astype(np.int64))
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(val) - 1, 64):
            y = val[start + 1 : start + 65]
            x = val[start : start + len(y)]
            nats += F.cross_entropy(model(x[None], y[None])[0][0], y, reduction="sum").item()
    return nats / (len(val) - 1), saved["iter_num"]


def run_ours(flags: list[str], folder: Path, seed: int, text: str) -> dict:
    "Our command from an empty cache, in which only the text lies."
    cache = folder / "cache"
    cache.mkdir(parents=True)
    (cache / "tinyshakespeare.txt").write_text(text, encoding="utf-8", newline="")
    return run_command(["speedrun", *flags], folder, seed, cache=cache)


def against_peer(args):
    "nanoGPT and tinygpt in turn, for each seed, and the floors."
    corpus = load_corpus("shakespeare")
    text = "".join(corpus.train + corpus.val)
    ways = {"tinygpt": [], "tinygpt in float32": ["--dtype", "float32"]}
    one_step = ["--max-steps", "1", "--warmup-steps", "0"]
    runs = {name: [] for name in ("nanoGPT", *ways)}
    floors = {"tinygpt, one step": [], "import torch": []}
    for seed in SEEDS[: args.seeds]:
        with tempfile.TemporaryDirectory() as tmp:
            tmp = Path(tmp)
            if seed in PEER_SEEDS:
                runs["nanoGPT"].append(run_peer(args.peer, tmp / "peer", seed, text, args.steps))
            for name, flags in ways.items():
                runs[name].append(run_ours(flags, tmp / name, seed, text))
            floors["tinygpt, one step"].append(run_ours(one_step, tmp / "one", seed, text)["wall_s"])
        _, wall, _ = timed_process([sys.executable, "-c", "import torch"])
        floors["import torch"].append(round(wall, 2))
        print(*(ours[-1] for ours in (runs | floors).values()), sep="\n", flush=True)
    ratios = {}
    for name in ways:
        ratios[name] = {}
        for kind in ("wall_s", "cpu_s"):
            times_as_fast = [a[kind] / b[kind] for a, b in zip(runs["nanoGPT"], runs[name])]
            ratios[name][kind] = spread(times_as_fast)
    losses = {name: [run["loss"] for run in own] for name, own in runs.items()}
    result = dict(
        command="python benchmarks/speedrun.py --peer PATH",
        goal=GOAL,
        ratios=ratios,
        loss={name: spread(own) for name, own in losses.items()},
        at_goal={name: sum(loss <= GOAL for loss in own) for name, own in losses.items()},
        floors={name: spread(seconds) for name, seconds in floors.items()},
        runs=runs,
    )
    print({k: v for k, v in result.items() if k != "runs"})
    if args.steps is None:
        save("speedrun", result)


def _flags(name: str, steps: int | None = None) -> list[str]:
    "The command line of a rung: what is left out is left out of the last one of the ladder."
    return rung_flags(name, (*LADDER, *LEFT_OUT), steps)


def _settings(name: str) -> list[str]:
    "The flags of a rung without its length: it runs at several."
    flags = _flags(name)
    at = flags.index("--max-steps")
    return flags[:at] + flags[at + 2 :]


@contextmanager
def _recorded(race: Race):
    "The rungs on record, to be changed; processes with different rungs may write in turn."
    with FileLock(cache_dir() / f"{race.record}.lock"):
        try:
            record = load(race.record)
        except FileNotFoundError:
            record = dict(rungs=[])
        known = {rung["name"]: rung for rung in record["rungs"]}
        for rung in race.rungs:
            new = dict(name=rung.name, flags=_settings(rung.name), kept=rung.kept)
            if known.get(rung.name, {}).get("flags") != new["flags"]:
                known[rung.name] = dict(new, runs=[], clock={})
        yield known
        rungs = [known[rung.name] for rung in race.rungs]
        start = "OMP_NUM_THREADS=1 python benchmarks/speedrun.py"
        command = " and ".join(f"{start} {kind}{race.option}" for kind in ("--ladder", "--clock"))
        save(race.record, dict(command=command, goal=GOAL, rungs=rungs))


def train_flags(flags: list[str], seed: int) -> dict:
    "A run in this process, for its loss over the whole validation part; it is not timed."
    with tempfile.TemporaryDirectory() as tmp:
        argv = [*flags, "--seed", str(seed), "--out", tmp, "--name", "run"]
        result = train(parse_arguments(argv).train, progress="none")
        if not result.finished:
            sys.exit("stopped: this run is not recorded")
        return dict(loss=result.val.loss, val_tokens=result.val.tokens)


def _train_rung(name: str, steps: int, seed: int) -> dict:
    "A run of a rung, for its loss; its seconds are `clock_rungs`'s."
    return dict(seed=seed, steps=steps, **train_flags(_flags(name, steps), seed))


def next_length(runs: list[dict], first: int, seeds: int) -> int | None:
    "The length to run next, each with so many seeds; None where the goal lies between two lengths."
    lengths = {}
    for run in runs:
        lengths.setdefault(run["steps"], []).append(run["loss"])
    for steps in lengths or [first]:
        if len(lengths.get(steps, [])) < seeds:
            return steps
    above = [steps for steps, losses in lengths.items() if statistics.median(losses) > GOAL]
    below = [steps for steps, losses in lengths.items() if statistics.median(losses) <= GOAL]
    if not below:
        return round(max(above) * 1.2)
    return None if above else round(min(below) / 1.2)


def climb(race: Race, args):
    "Every rung, or those that were asked for, at lengths on both sides of the goal. Goes on where it was."
    for name in _wanted(race, args):
        first = next(rung.steps for rung in race.rungs if rung.name == name)
        while True:
            with _recorded(race) as known:
                runs = known[name]["runs"]
            steps = next_length(runs, first, len(race.seeds))
            if steps is None:
                break
            done = {run["seed"] for run in runs if run["steps"] == steps}
            run = _train_rung(name, steps, next(seed for seed in race.seeds if seed not in done))
            with _recorded(race) as known:
                known[name]["runs"].append(run)
            print(f"{name:32s} {run}", flush=True)


def _wanted(race: Race, args) -> list[str]:
    "The rungs that were asked for, or all."
    return [rung.name for rung in race.rungs if not args.rung or rung.name in args.rung]


def _step_timer(run):
    "A function that makes some steps of a run, here and warm, and returns the CPU seconds of one."
    stepper = Stepper(run)

    def seconds(steps: int = 10) -> float:
        start = time.process_time()
        for _ in range(steps):
            stepper(*next(run.loader))
        return round((time.process_time() - start) / steps, 5)

    seconds(3)  # compiles, where it does
    return seconds


def clock_rungs(race: Race, args):
    """CPU seconds of a step of each rung, and of its whole command with a single step. Wants an idle machine.

    In turn, many times, so that all rungs have their share of what else goes on, and in another order each
    time: what is timed first, after the record is written, reads higher. Earlier readings go: they are of
    another day or another machine.
    """
    with _recorded(race) as known:
        for name in _wanted(race, args):
            known[name]["clock"] = {}
    with ExitStack() as stack:
        tmp = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        timers = {}
        for i, name in enumerate(_wanted(race, args)):
            run = open_run(parse_arguments([*_flags(name), "--out", str(tmp), "--name", f"rung{i}"]).train)
            stack.callback(run.close)
            timers[name] = _step_timer(run)
        for _ in range(5 * args.repeats):
            _note_round(race, "step_s", {name: timers[name]() for name in _shuffled(timers)})
        for _ in range(args.repeats):
            commands = {name: [*_flags(name, steps=1), "--warmup-steps", "0"] for name in timers}
            names = _shuffled(commands)
            runs = {name: run_command(commands[name], tmp, race.seeds[0]) for name in names}
            _note_round(race, "command_s", {name: run["cpu_s"] for name, run in runs.items()})


def _shuffled(names) -> list:
    return random.sample(list(names), len(names))


def _note_round(race: Race, kind: str, seconds: dict[str, float]):
    "Put one reading of each rung into the record."
    with _recorded(race) as known:
        for name, reading in seconds.items():
            known[name]["clock"].setdefault(kind, []).append(reading)
    print(kind, seconds, flush=True)


def run_long(args):
    """Runs to the loss of nanoGPT's GPU run; goes on where it was. What was tried before stays in the record.

    The first seed has the machine for itself, and its time counts. The others run side by side, with a
    thread each: for their losses.
    """
    kind, more = ("float32", ["--dtype", "float32"]) if args.float32 else ("runs", [])
    flags = LONG + (["--max-steps", str(args.steps)] if args.steps else [])
    record = load("speedrun_long")
    known = {k: record.get(k, []) if record.get("flags") == flags else [] for k in ("runs", "float32")}
    runs = known[kind]

    def run_one(seed: int, *threads: str):
        with tempfile.TemporaryDirectory() as tmp:
            run = run_command([*flags, *more, *threads], Path(tmp), seed) | dict(alone=not threads)
            if threads:
                del run["wall_s"], run["cpu_s"]  # of all that ran meanwhile
            runs.append(run | dict(curve=_curve(read_metrics(Path(tmp) / f"seed{seed}"))))
        print(run, flush=True)
        if args.steps is None:
            command = "python benchmarks/speedrun.py --long, and the same with --float32 --seeds 1"
            about = dict(command=command, goal=LONG_GOAL, flags=flags)
            save("speedrun_long", dict(**about, **known, tried=record["tried"]))

    first, *others = LONG_SEEDS[: args.seeds]
    if not runs:
        run_one(first)
    missing = [seed for seed in others if seed not in {run["seed"] for run in runs}]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda seed: run_one(seed, "--threads", "1"), missing))


def _curve(lines: list[dict]) -> list[dict]:
    "The validations of a run, each with the mean training loss of the fifty steps before it."
    train = [line["loss"] for line in lines if "loss" in line]
    curve = []
    for line in lines:
        if "val_loss" in line:
            recent = train[: line["step"]][-50:]
            point = dict(step=line["step"], val_loss=line["val_loss"], train_loss=statistics.mean(recent))
            curve.append(point)
    return curve


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="a clone of nanoGPT")
    parser.add_argument("--ladder", action="store_true")
    parser.add_argument("--clock", action="store_true")
    what = "with --ladder or --clock: the last rung, each time with one idea left out"
    parser.add_argument("--left-out", action="store_true", help=what)
    parser.add_argument("--repeats", type=int, default=5, help="with --clock")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--float32", action="store_true", help="with --long")
    parser.add_argument("--rung", nargs="+", help="with --ladder or --clock: only these")
    parser.add_argument("--seeds", type=int, default=10, help="with --peer or --long: so many of theirs")
    parser.add_argument(
        "--steps", type=int, default=None, help="a trial of the script with so few steps; writes nothing"
    )
    args = parser.parse_args()
    if args.peer:
        if not (args.peer / "train.py").exists():
            remedy = "give --peer the folder of a clone of github.com/karpathy/nanoGPT"
            sys.exit(f"error: {args.peer} has no train.py: {remedy}")
        against_peer(args)
    race = LEAVE_OUT if args.left_out else CLIMB
    if args.ladder:
        climb(race, args)
    if args.clock:
        clock_rungs(race, args)
    if args.long:
        run_long(args)
    if not (args.peer or args.ladder or args.clock or args.long):
        parser.print_help()


if __name__ == "__main__":
    main()
