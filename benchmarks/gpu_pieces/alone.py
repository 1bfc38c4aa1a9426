"""Cases that get ready side by side, each in a process of its own, and are measured one at a time.

To import, to build and to compile takes a case longer than to measure it, and needs a core, not the GPU. A
process asks for its turn by a file, and gets it by another one when no process is measured or gets ready.
What hangs is stopped, wherever it hangs: time on a GPU is dear.
"""

import faulthandler
import gc
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from tinygpt.support import synchronize

TURNS = "TINYGPT_GPU_TURNS"  # names the folder of files, in a process that waits for its turns
READY = 300  # seconds in which a process gets ready
PATIENCE = 200  # of them, where others wait for it
TURN = 150  # seconds that a turn may take
GRACE = 120  # seconds after the deadline in which what has begun may be finished: more than tests get
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
    return TURNS in os.environ and not (Path(os.environ[TURNS]) / "by itself").exists()


def short_of_memory(said: str) -> bool:
    "Whether an error, or what a process printed, says so: torch's words, or those of cuBLAS and cuDNN."
    words = "out of memory|status_alloc_failed|cublas_status_not_initialized|cudnn_status_internal_error"
    return re.search(words, said.lower()) is not None


def crowded(error: BaseException) -> bool:
    "Whether memory was missing that other processes may have held: that is no finding."
    return with_others() and short_of_memory(str(error))


def end_in_time(deadline: float):
    """From now on this process ends GRACE seconds after the deadline, whatever it does.

    One that waits for turns ends also when the command that gives them has ended. It says where it was. First
    it gets a SIGTERM, which lets it end what it has started.
    """
    if hasattr(faulthandler, "register"):  # not on Windows
        faulthandler.register(signal.SIGUSR1)

    def watch():
        orphan = False
        while time.monotonic() < deadline + GRACE and not orphan:
            time.sleep(1)
            orphan = TURNS in os.environ and os.getppid() != PARENT
        faulthandler.dump_traceback()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def alone():
    "Within it nothing else is measured or gets ready. Alone anyway: nothing to wait for."
    global _depth
    outermost = TURNS in os.environ and _depth == 0
    if outermost:
        folder, number = Path(os.environ[TURNS]), next(_number)
        free_memory()
        (folder / f"waits-{number}").touch()
        while not (folder / f"goes-{number}").exists():
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
class Job:
    "A case that gets ready in a process of its own."

    label: object  # what the caller knows it by
    command: Callable[[float], list[str]]  # minutes that are left -> the command
    env: dict[str, str]  # more of its environment
    turn: float = TURN  # seconds that it may be measured for


@dataclass
class Child:
    "The process of a job, and the folder in which it asks for its turns."

    job: Job
    folder: Path
    process: subprocess.Popen
    by_itself: bool  # then it gets ready in its turn
    turn: int = -1  # the last one that it asked for
    state: str = "gets ready"
    since: float = field(default_factory=time.monotonic)  # in this state

    def look(self):
        "What it does: gets ready (before its first turn), waits, is measured, goes on (after a turn), ended."
        turn, state = len(list(self.folder.glob("waits-*"))) - 1, "gets ready"
        for name, then in (("waits", "waits"), ("goes", "is measured"), ("over", "goes on")):
            if (self.folder / f"{name}-{turn}").exists():
                state = then
        if self.process.poll() is not None:
            state = "ended"
        if (turn, state) != (self.turn, self.state):
            self.turn, self.state, self.since = turn, state, time.monotonic()

    def go(self):
        (self.folder / f"goes-{self.turn}").touch()

    def hangs(self, waited: float) -> bool:
        "Whether it does, as it seems, where others have waited so many seconds."
        seconds = time.monotonic() - self.since
        if self.state == "is measured":
            return seconds > self.job.turn + READY * self.by_itself
        return self.state != "waits" and (min(seconds, waited) > PATIENCE or seconds > READY)


def run_side_by_side(
    jobs: list[Job],  # in the order of measuring
    at_once: int,  # processes: so many begin, and when all of them have ended the next
    deadline: float,  # of time.monotonic(): nobody gets a turn after it
    ended: Callable[[object, Path, int], None],  # is told label, file with what was printed, and exit status
):
    """Run the commands; stop those that had no turn before the deadline, and those that hang.

    To get ready takes too long after READY seconds, where others have waited for it after PATIENCE; a turn,
    where it is longer than its job says; and all, GRACE seconds after the deadline. `ended` hears of the
    stopped ones, too.
    """
    for first in range(0, len(jobs), at_once):
        if time.monotonic() < deadline:
            with tempfile.TemporaryDirectory(prefix="tinygpt-turns-") as place:
                _together(jobs[first : first + at_once], Path(place), deadline, ended)


def _start(job: Job, folder: Path, minutes: float, by_itself: bool) -> Child:
    folder.mkdir()
    if by_itself:
        (folder / "by itself").touch()
    with open(folder / "said", "w") as said, heeds_interrupts():
        env = os.environ | job.env | {TURNS: str(folder)}
        process = subprocess.Popen(job.command(minutes), stdout=said, stderr=subprocess.STDOUT, env=env)
    return Child(job, folder, process, by_itself)


def stop(processes: list[subprocess.Popen]):
    "First as Ctrl-C does, so that they end what they have started."
    for process in processes:
        process.send_signal(signal.SIGINT)
    until = time.monotonic() + 20
    for process in processes:
        try:
            process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it says where it hangs
            time.sleep(0.2)
            process.kill()
            process.wait()


def _together(jobs, place, deadline, ended):
    minutes = max(0.01, (deadline - time.monotonic()) / 60)
    children = []
    try:
        for i, job in enumerate(jobs):
            children.append(_start(job, place / str(i), minutes, by_itself=len(jobs) == 1))
        while children:
            for child in list(children):
                child.look()
                if child.state == "ended":
                    children.remove(child)
                    ended(child.job.label, child.folder / "said", child.process.returncode)
            now = time.monotonic()
            waiting = [child for child in children if child.state == "waits"]
            waited = max((now - child.since for child in waiting), default=0)
            # after the deadline what has begun may be finished: a case can need a second turn
            new = [
                child
                for child in children
                if child.state == "gets ready" or child in waiting and not child.turn
            ]
            late = [child for child in children if child.hangs(waited) or now > deadline and child in new]
            stop([child.process for child in (children if now > deadline + GRACE else late)])
            if waiting and len(waiting) == len(children) and not late:
                waiting[0].go()
            time.sleep(0.02)
    finally:
        stop([child.process for child in children])
        for child in children:  # what was at its end, unseen
            if child.process.returncode == 0:
                ended(child.job.label, child.folder / "said", 0)
