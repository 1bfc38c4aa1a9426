"""Tests that start processes wait for an event, never for a time: a busy machine takes longer for all."""

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
