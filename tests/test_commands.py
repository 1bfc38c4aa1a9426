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

import tinygpt

settings = ConfigParser(delimiters=["="])
settings.read(Path(__file__).parent.parent / "settings.ini", encoding="utf-8")
SCRIPTS = dict(
    line.split("=") for line in settings["DEFAULT"]["console_scripts"].split() if "=" in line
)  # tinygpt-train -> tinygpt.train:main
MODULES = {script: where.removesuffix(":main") for script, where in SCRIPTS.items()}

# torch is never imported: the process says that it begins to, and waits
STUCK = """
import os, sys, time

class Stuck:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open(os.environ["IMPORTING"], "w").close()
            time.sleep(1000)

sys.meta_path.insert(0, Stuck())
"""


@pytest.fixture
def start(tmp_path):
    "Starts Python with these words; its import of torch never ends."
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    importing = tmp_path / "importing"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": path, "IMPORTING": str(importing)}
    started = []

    def run(*words, **more):
        importing.unlink(missing_ok=True)
        command = [sys.executable, *map(str, words)]
        how = dict(env=env | more, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        # in the background a shell makes its children deaf to SIGINT, and pytest may be such a child
        started.append(subprocess.Popen(command, preexec_fn=hear_sigint, **how))
        wait_until(importing.exists, started[-1], "torch is imported")
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def hear_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(process) -> tuple[int, str]:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LAST_RESORT)
    return process.returncode, said


def test_the_commands_are_those_of_the_settings():
    assert tinygpt._SCRIPTS == set(SCRIPTS)
    for module in MODULES.values():
        assert hasattr(importlib.import_module(module).main, "__wrapped__"), f"{module} ends in its own way"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_a_command_is_imported_is_a_word_and_130(start, tmp_path, script):
    assert interrupt(start("-m", MODULES[script], "--some", "flag")) == (130, "interrupted\n")
    file = tmp_path / "bin" / script
    file.parent.mkdir()
    file.write_text(f"import sys\nfrom {MODULES[script]} import main\nsys.exit(main())\n")
    assert interrupt(start("-X", "utf8", file, "a", "b")) == (130, "interrupted\n")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_of_several_ranks_one_says_that_it_was_interrupted(start):
    assert interrupt(start("-m", "tinygpt.train", RANK="0")) == (130, "interrupted\n")
    assert interrupt(start("-m", "tinygpt.train", RANK="1")) == (130, "")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_where_the_package_is_a_library_ctrl_c_stays_what_it_was(start, tmp_path):
    theirs = "import tinygpt, signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    (tmp_path / "theirs").mkdir()
    for name in ("script.py", "tinygpt-mine", "theirs/__init__.py"):
        (tmp_path / name).write_text(theirs + "import tinygpt.train\n")
    (tmp_path / "theirs/__main__.py").write_text("")
    for words in (["script.py"], ["tinygpt-mine"], ["-m", "theirs"], ["-c", "import tinygpt.train"]):
        status, said = interrupt(start(*words))
        assert status == -signal.SIGINT and "KeyboardInterrupt" in said, words


@pytest.mark.slow
def test_help_ends_quietly_where_its_reader_has_read_enough():
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    processes = {}
    for module in MODULES.values():
        command = [sys.executable, "-m", module, "--help"]
        processes[module] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    for module, process in processes.items():
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
    how = dict(cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=hear_sigint)
    process = subprocess.Popen(command, **how)
    wait_until((tmp_path / "begun").exists, process, "the command has begun")
    assert interrupt(process) == (0, "saved\n")
