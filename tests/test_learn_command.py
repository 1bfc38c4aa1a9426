import os
import subprocess
import sys

import pytest
from events import LAST_RESORT

from tinygpt.learn.__main__ import main, split_train
from tinygpt.learn.book import find_project, is_exported, read_notebook
from tinygpt.learn.folder import Progress, start, text_hash
from tinygpt.learn.overlay import read_work

ROOT = find_project()
MISTAKES = {
    "check 10": "10_adamw.ipynb is not there: begin with python -m tinygpt.learn start 10_adamw",
    "start 99": "chapter = 99 is not one of those with exercises",
    "start 10 --only adam": "only = adam is not an exercise of 10_adamw",
    "start 10 --only": "--only: name at least one function",
    "hint 10 adam": "adam is not an exercise of chapter 10",
    "reset": "reset: name one chapter, or say --all",
    "reset 10 --all": "reset: name one chapter, or say --all",
    "train laptop --max-steps 1": "no function of yours passes yet",
    "reset --al": "--al is not a setting: did you mean --all?",
    "list --al": "--al is not a setting: see --help for all of them",
    "check 10 --second 3": "--second is not a setting: did you mean --seconds?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_on_the_command_line_are_told_in_a_sentence(words, tmp_path, capsys):
    assert main(["--folder", str(tmp_path), *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and MISTAKES[words] in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.ipynb"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("learn", "Expected one of {list, start, check, hint, show, train, reset}"),
        ("check 10 --seconds many", "could not convert string to float"),
        ("hint 10", "NAME"),
    ],
)
def test_what_cannot_be_parsed_ends_with_status_2(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_the_commands_tell_what_they_did(tmp_path, capsys):
    def run(*argv):
        return main(["--folder", str(tmp_path), *argv]), capsys.readouterr().out

    said = f"{tmp_path / '10_adamw.ipynb'}: open it in JupyterLab, fill the holes, run its last cell\n"
    assert run("start", "10") == (0, said)
    assert "hint 1 of 3" in run("hint", "10", "adamw_update")[1]
    assert "addcdiv_" in run("show", "10", "adamw_update")[1]
    assert "adamw_update                       open, 1 hint, shown" in run("list")[1]
    status, text = run("check", "10")  # nothing but holes: no test is run
    assert status == 0 and text.count("still a hole") > 5
    assert run("reset", "10") == (0, "moved to old/1: 10_adamw.ipynb\n")
    assert run("reset", "--all") == (0, "moved to old/2: 10_adamw.ipynb, progress.json\n")
    assert run("reset", "--all") == (0, "there was nothing to move\n")
    assert not list(tmp_path.glob("*.ipynb"))


def test_the_folder_may_be_named_before_or_after_the_command(tmp_path, capsys):
    start("10", folder=tmp_path)
    for argv in (["--folder", str(tmp_path), "list"], ["list", f"--folder={tmp_path}"]):
        assert main(argv) == 0 and "adamw_update                       open" in capsys.readouterr().out


def test_all_that_comes_after_train_is_the_trainers_but_folder_and_help():
    assert split_train(["train", "--help"]) == (["train", "--help"], [])
    before = ["--folder", "mine", "train"]
    assert split_train([*before, "laptop", "--lr", "1"]) == (before, ["laptop", "--lr", "1"])
    after = ["train", "laptop", "--folder", "x", "--lr", "1", "--folder=y"]
    assert split_train(after) == (["train", "--folder", "x", "--folder=y"], ["laptop", "--lr", "1"])
    assert split_train(["train", "--folder"]) == (["train", "--folder"], [])
    assert split_train(["--folder=mine", "train", "-h"]) == (["--folder=mine", "train", "-h"], [])


def test_train_has_help_and_names_the_folder_it_searched(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0 and "--folder PATH" in capsys.readouterr().out
    assert main(["train", "--folder", str(tmp_path), "laptop"]) == 2
    assert f"passes yet in {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["check train", "start train --only train", "--folder train list", "", "-h"]
)
def test_a_chapter_or_a_folder_may_be_called_train(words):
    assert split_train(words.split()) == (words.split(), [])


def test_the_module_runs_as_a_command():
    command = [sys.executable, "-m", "tinygpt.learn", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "your solution trains the GPT" in done.stdout
    for name in ("list", "start", "check", "hint", "show", "train", "reset"):
        assert f"• {name} " in done.stdout


@pytest.fixture
def solved(tmp_path):
    "A folder in which one function was solved, and its verdict noted without running a test."
    folder = tmp_path / "learn"
    [path] = start("03_data_pack", ["Lane.wants"], folder)
    hole = 'raise NotImplementedError("hole: Lane.wants")'
    solution = "return tuple(self.cursor[:2]) <= (chunk, document)"
    path.write_text(path.read_text().replace(hole.replace('"', '\\"'), solution))
    nb = read_notebook(path)
    assert any(solution in cell["source"] for cell in nb["cells"] if is_exported(cell))
    work = read_work(nb, read_notebook(ROOT / "nbs/more/03_data_pack.ipynb"), "03_data_pack")
    progress = Progress(folder)
    sha = text_hash(work.written["Lane.wants"].text)
    progress.of("03_data_pack", "Lane.wants").update(state="passes", sha=sha)
    progress.save()
    return folder


@pytest.mark.slow
def test_under_torchrun_every_process_trains_with_the_learners_functions_and_the_first_one_speaks(
    solved, tmp_path
):
    corpus = tmp_path / "lines.jsonl"
    corpus.write_text("".join(f'{{"text": "Line {i} of a very small corpus."}}\n' for i in range(400)))
    flags = f"--data {corpus} --tokenizer byte --loader stream --packing bos --out {tmp_path} --max-steps 2"
    flags += " --warmup-steps 1 --batch-size 4 --block-size 32 --n-layer 1 --n-head 2 --n-embd 32"
    flags += " --eval-every 0 --sample-tokens 0 --compile off --threads 1 --device cpu --no-compressors"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "tinygpt.learn", "--folder", str(solved), "train", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAST_RESORT)
    assert done.returncode == 0, done.stderr
    assert "on 2 processes" in done.stdout
    assert done.stdout.count("yours: data.pack.Lane.wants") == 1
    assert done.stdout.count("yours that ran: data.pack.Lane.wants") == 1


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_under_torchrun_a_mistake_is_told_once(rank, times, tmp_path):
    command = [sys.executable, "-m", "tinygpt.learn", "--folder", str(tmp_path), "train"]
    env = os.environ | {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert done.stderr.count("no function of yours passes yet") == times


def test_check_gives_each_notebook_of_a_number_the_names_that_it_has(tmp_path, capsys):
    start("11", folder=tmp_path)
    assert main(["--folder", str(tmp_path), "check", "11", "make_schedule"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("make_schedule                    still a hole") and "finder" not in said
    assert main(["--folder", str(tmp_path), "check", "11", "make_schedule", "find_l"]) == 2
    assert "find_l is not an exercise of 11_schedule, 11_schedule_finder" in capsys.readouterr().err
