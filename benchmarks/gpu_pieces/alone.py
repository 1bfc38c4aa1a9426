"""Cases that get ready side by side, each in a process of its own, and are measured one at a time.

To import, to build and to compile takes a case longer than to measure it, and needs a core, not the GPU. A
process asks for its turn by a file, and gets it by another one when no process is measured or gets ready.
"""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from tinygpt.support import synchronize

TURNS = "TINYGPT_GPU_TURNS"  # names the folder of files, in a process that waits for its turns
PATIENCE = 150  # seconds for which those who are ready wait for the others
PARENT = os.getppid()
_number, _depth = count(), 0


def free_memory():
    "Give back what a case held; raises where the GPU can no longer be used."
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.synchronize()


def with_others() -> bool:
    "Whether other processes get ready meanwhile."
    return TURNS in os.environ


def crowded(error: BaseException) -> bool:
    "Whether memory was missing that other processes may have held: no finding, and no row of a record."
    return with_others() and "out of memory" in str(error).lower()


@contextmanager
def alone():
    "Within it nothing else is measured or gets ready. Alone anyway: nothing to wait for."
    global _depth
    outermost = with_others() and _depth == 0
    if outermost:
        folder, number = Path(os.environ[TURNS]), next(_number)
        free_memory()
        (folder / f"waits-{number}").touch()
        while not (folder / f"goes-{number}").exists():
            if os.getppid() != PARENT:
                sys.exit("the command that gives the turns has ended")
            time.sleep(0.02)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if outermost:
            (folder / f"over-{number}").touch()


@contextmanager
def heeds_interrupts():
    "A process that begins within it gets Ctrl-C, also where this one is a background job, which ignores it."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def get_ready(work: Callable):
    "Call it once, so that all that it compiles, loads and allocates is there."
    work()
    synchronize()


@dataclass
class Child:
    "A process with one case, and the folder in which it asks for its turns."

    order: int
    label: object  # what the caller knows it by
    folder: Path
    process: subprocess.Popen

    @property
    def number(self) -> int:
        "Of the last turn that it asked for; -1 before the first."
        return len(list(self.folder.glob("waits-*"))) - 1

    def state(self) -> str:
        "ended, gets ready (before its first turn), waits, is measured, or goes on (after a turn)."
        if self.process.poll() is not None:
            return "ended"
        if (number := self.number) < 0:
            return "gets ready"
        if (self.folder / f"over-{number}").exists():
            return "goes on"
        return "is measured" if (self.folder / f"goes-{number}").exists() else "waits"

    def waited(self) -> float:
        "Seconds since it asked for its turn."
        return time.time() - (self.folder / f"waits-{self.number}").stat().st_mtime

    def go(self):
        (self.folder / f"goes-{self.number}").touch()


def run_side_by_side(
    # (label, minutes that are left -> command, more of its environment), in the order of measuring
    jobs: list[tuple[object, Callable[[float], list[str]], dict[str, str]]],
    at_once: int,  # processes: so many begin, and when all of them have ended the next
    deadline: float,  # of time.monotonic(): nobody gets a turn after it
    ended: Callable[[object, Path, int], None],  # is told label, file with what was printed, and exit status
):
    """Run the commands; stop those that had no turn before the deadline, or are not ready in time.

    In time: before others have waited PATIENCE seconds. `ended` hears of the stopped ones, too.
    """
    for first in range(0, len(jobs), at_once):
        if time.monotonic() < deadline:
            with tempfile.TemporaryDirectory(prefix="tinygpt-turns-") as place:
                _together(jobs[first : first + at_once], Path(place), deadline, ended)


def _start(order, label, command, more, folder, minutes) -> Child:
    folder.mkdir()
    with open(folder / "said", "w") as said, heeds_interrupts():
        env = os.environ | more | {TURNS: str(folder)}
        process = subprocess.Popen(command(minutes), stdout=said, stderr=subprocess.STDOUT, env=env)
    return Child(order, label, folder, process)


def _stop(children: list[Child]):
    "First as Ctrl-C does, so that they end what they have started."
    for child in children:
        child.process.send_signal(signal.SIGINT)
    until = time.monotonic() + 20
    for child in children:
        try:
            child.process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _together(jobs, place, deadline, ended):
    minutes = max(0.01, (deadline - time.monotonic()) / 60)
    children = []
    try:
        for i, job in enumerate(jobs):
            children.append(_start(i, *job, place / str(i), minutes))
        while children:
            states = {child.order: child.state() for child in children}
            for child in [c for c in children if states[c.order] == "ended"]:
                children.remove(child)
                ended(child.label, child.folder / "said", child.process.returncode)
            waiting = [child for child in children if states[child.order] == "waits"]
            # what has begun may be finished: a case can need a second turn
            new = [child for child in waiting if child.number == 0]
            unready = [child for child in children if states[child.order] == "gets ready"]
            if time.monotonic() > deadline:
                _stop(new + unready)
            elif waiting and max(child.waited() for child in waiting) > PATIENCE:
                _stop(unready)
            waiting = [child for child in waiting if child.process.poll() is None]
            if waiting and len(waiting) == len(children):
                waiting[0].go()
            time.sleep(0.02)
    finally:
        _stop(children)
