"""Tests that start processes wait for an event, never for a time: a busy machine takes longer for all."""

import os
import socket
import subprocess
import time

LAST_RESORT = 600  # seconds; nothing takes as long, but a test must not hang for ever


def wait_until(
    event,  # called without arguments: has it come? What it returns is returned
    process=None,  # a Popen that brings it about: where it ends first, the test fails at once
    what: str = "",  # for the message
):
    "Wait for an event: a file, a line of output, a lock."
    deadline = time.monotonic() + LAST_RESORT
    while True:
        ended = process is not None and process.poll() is not None  # asked before the event is
        if found := event():
            return found
        what = what or getattr(event, "__name__", "the event")
        assert not ended, f"the process ended with {process.returncode} before {what}"
        if time.monotonic() > deadline:
            if process is not None:
                process.kill()
            raise AssertionError(f"waited {LAST_RESORT} s for {what}")
        time.sleep(0.05)


def first_of_two(
    argv: list,  # the command of both
    **how,  # of Popen
) -> tuple[int, str]:
    "(exit status, errors) of rank 0 of two processes; rank 1, which may never end, is killed then."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = []
    for rank in ("0", "1"):
        env = os.environ | place | dict(RANK=rank, LOCAL_RANK=rank, OMP_NUM_THREADS="1")
        ranks.append(subprocess.Popen([*map(str, argv)], env=env, **pipes, **how))
    try:
        said = ranks[0].communicate(timeout=LAST_RESORT)[1]
    finally:
        for process in ranks:
            process.kill()
        ranks[1].communicate()
    return ranks[0].returncode, said
