"""Cases that get ready side by side, each in a process of its own, and are measured one at a time.

To import, to build and to compile takes a case longer than to measure it, and needs a core, not the GPU. A
process asks for its turn by a file, and gets it by another one when no process is measured or gets ready.
"""

import gc
import os
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
            time.sleep(0.02)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if outermost:
            (folder / f"over-{number}").touch()


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

    def state(self) -> str:
        "ended, gets ready, waits or is measured."
        if self.process.poll() is not None:
            return "ended"
        number = len(list(self.folder.glob("waits-*"))) - 1
        if number < 0 or (self.folder / f"over-{number}").exists():
            return "gets ready"
        return "is measured" if (self.folder / f"goes-{number}").exists() else "waits"

    def go(self):
        number = len(list(self.folder.glob("waits-*"))) - 1
        (self.folder / f"goes-{number}").touch()


def run_side_by_side(
    # (label, command, more of its environment), in the order in which they are measured
    commands: list[tuple[object, list[str], dict[str, str]]],
    at_once: int,  # processes: each begins when those before it have ended, or with them
    deadline: float,  # of time.monotonic(): nobody gets a turn after it
    ended: Callable[[object, Path, int], None],  # is told label, file with what was printed, and exit status
):
    "Run the commands. Those that had no turn before the deadline are stopped; `ended` does not hear of them."
    for first in range(0, len(commands), at_once):
        if time.monotonic() < deadline:
            with tempfile.TemporaryDirectory(prefix="tinygpt-turns-") as place:
                _together(commands[first : first + at_once], Path(place), deadline, ended)


def _start(order, label, command, more, folder) -> Child:
    folder.mkdir()
    with open(folder / "said", "w") as said:
        env = os.environ | more | {TURNS: str(folder)}
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=env)
    return Child(order, label, folder, process)


def _together(commands, place, deadline, ended):
    children = [_start(i, *each, place / str(i)) for i, each in enumerate(commands)]
    try:
        while children:
            states = [child.state() for child in children]
            for child in [c for c, state in zip(children, states) if state == "ended"]:
                children.remove(child)
                ended(child.label, child.folder / "said", child.process.returncode)
            if time.monotonic() > deadline and "is measured" not in states:
                return
            if children and all(state == "waits" for state in states):
                min(children, key=lambda child: child.order).go()
            time.sleep(0.02)
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
            sys.stdout.write((child.folder / "said").read_text()[-2000:])
