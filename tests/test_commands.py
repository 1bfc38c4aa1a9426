"""What all commands have in common, from outside."""

import importlib
import os
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from events import LAST_RESORT, wait_until

settings = ConfigParser(delimiters=["="])
settings.read(Path(__file__).parent.parent / "settings.ini", encoding="utf-8")
SCRIPTS = dict(
    line.split("=") for line in settings["DEFAULT"]["console_scripts"].split() if "=" in line
)  # tinygpt-train -> tinygpt.train:main
MODULES = {script: where.removesuffix(":main") for script, where in SCRIPTS.items()}


def interrupt(process) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LAST_RESORT)
    return process.returncode, said


def test_the_commands_are_those_of_the_settings():
    for module in MODULES.values():
        assert hasattr(importlib.import_module(module).main, "__wrapped__"), f"{module} ends in its own way"


# imports torch once; a fork for each command runs it as `python -m` does, with nobody who reads its output
HELP = """
import gc
import os
import runpy
import sys

import torch
import tyro

import tinygpt.model

gc.freeze()  # at its end a child need not look through what was imported here
for module in sys.argv[1:]:
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 141, f"{module}: {status}"
        continue
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.argv = [module, "--help"]
    sys.exit(runpy.run_module(module, run_name="__main__"))
"""


@pytest.mark.slow
def test_help_ends_quietly_where_its_reader_has_read_enough():
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    if hasattr(os, "fork"):
        command = [sys.executable, "-c", HELP, *MODULES.values()]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LAST_RESORT)
        assert (done.returncode, done.stderr) == (0, "")
        return
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    for module in MODULES.values():
        process = subprocess.Popen([sys.executable, "-m", module, "--help"], **how)
        assert process.stdout.readline()  # as head -1 does
        process.stdout.close()
        assert process.stderr.read() == b"", module
        assert process.wait() in (0, 141), module


CATCHES = """
import sys, time
from tinygpt.support import command

@command
def main(argv):
    try:
        open("begun", "w").close()
        time.sleep(1000)
    except KeyboardInterrupt:
        print("saved", file=sys.stderr)

sys.exit(main())
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_a_command_that_has_begun_handles_ctrl_c_itself(tmp_path):
    (tmp_path / "tinygpt-train").write_text(CATCHES)
    command = [sys.executable, "tinygpt-train"]
    how = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, **how)
    wait_until((tmp_path / "begun").exists, process, "the command has begun")
    assert interrupt(process) == (0, "saved\n")
