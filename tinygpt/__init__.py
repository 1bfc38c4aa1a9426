__version__ = "0.1.0"

import os
import signal
import sys


_COMMANDS = "train data measure ddp evaluate export generate learn finetune prefer reinforce chat whole".split()
_SCRIPTS = {f"tinygpt-{name}" for name in _COMMANDS}


def _interrupted(*_):
    "Ctrl-C while a command is being imported, which takes torch seconds: end as the command itself would."
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"interrupted\n")
    os._exit(130)


def _is_command() -> bool:
    "Is this the process of `python -m tinygpt.train`, `tinygpt-train` or another of our commands?"
    words = sys.orig_argv
    if not sys.argv or len(sys.argv) >= len(words):
        return False
    program = words[-len(sys.argv)].removeprefix("-m")  # what stands before the command's own words
    if sys.argv[0] == "-m":  # so it is while `python -m` imports the package
        return program == "tinygpt" or program.startswith("tinygpt.")
    # of a console script; a process that it started has other words
    return program == sys.argv[0] and os.path.basename(program) in _SCRIPTS


# `tinygpt.support.command` takes over where the imports are done; for a library nothing changes
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupted)
