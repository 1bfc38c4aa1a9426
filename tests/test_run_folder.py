"""Whose folder is it: a lock for as long as a run lives, and nothing deleted that no run made."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import tinygpt.run.folder as run_folder
from tinygpt.checkpoint import checkpoints
from tinygpt.run.folder import check_folder, claim_folder, remove_run, run_problem
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import Objective, open_run
from tinygpt.support import UserError
from tinygpt.train import main

FLAGS = "--tokenizer byte --n-layer 1 --n-embd 16 --n-head 2 --block-size 16 --ngram-rows 8 --max-steps 4"
FLAGS += " --eval-every 0 --save-every 0 --eval-tokens 100 --final-eval-tokens 100 --sample-tokens 0"
FLAGS += " --no-compressors --device cpu --threads 1 --compile off --name same"

# a process that stands still while it reads its data, until it is told to go on
WAITS = """
import sys
import time
from pathlib import Path

import tinygpt.run.setup as setup
from tinygpt.train import main

real = setup.open_run_data


def waiting(*args):
    Path("reading").touch()
    while not Path("go").exists():
        time.sleep(0.02)
    return real(*args)


setup.open_run_data = waiting
sys.exit(main(sys.argv[1:]))
"""


def start_and_wait(folder, *flags):
    "A real process that trains in `folder`, stopped where it reads its data."
    argv = [sys.executable, "-c", WAITS, *flags]
    process = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (folder / "reading").exists():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    (folder / "reading").unlink()
    return process


def test_of_two_runs_of_one_name_the_second_is_refused_and_the_first_ends_well(tmp_path, capsys, monkeypatch):
    "B has the large text and is still reading it when A comes, with every way to begin."
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{i} days are {i * 24} hours. " for i in range(300))
    Path("large.txt").write_text(text * 3)
    Path("small.txt").write_text(text)
    small = [*FLAGS.split(), "--data", "small.txt"]
    assert main([*small, "--seed", "1"]) == 0  # an earlier run of that name
    b = start_and_wait(tmp_path, *FLAGS.split(), "--data", "large.txt", "--seed", "2", "--overwrite")
    before = {path: path.read_bytes() for path in Path("runs/same").rglob("*") if path.is_file()}
    for way in ([*small], [*small, "--overwrite"], ["--resume", "runs/same"]):
        capsys.readouterr()
        assert main(way) == 2
        said = capsys.readouterr().err
        assert f"process {b.pid} on " in said and "--name" in said, said
    assert {path: path.read_bytes() for path in Path("runs/same").rglob("*") if path.is_file()} == before
    assert main([*small, "--name", "other"]) == 0  # the remedy
    Path("go").touch()
    output = b.communicate(timeout=120)[0]
    assert b.returncode == 0, output
    assert json.loads(Path("runs/same/config.json").read_text())["run"]["seed"] == 2
    assert [line["step"] for line in read_metrics("runs/same") if "loss" in line] == [0, 1, 2, 3]
    assert [folder.name for folder in checkpoints("runs/same")] == ["step_000004"]
    assert sorted(os.listdir("runs")) == ["other", "same"]  # no lock is left


def test_a_lock_that_a_killed_process_left_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} days are {i * 24} hours. " for i in range(300)))
    flags = [*FLAGS.split(), "--data", "text.txt"]
    killed = start_and_wait(tmp_path, *flags)
    killed.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
    killed.communicate()
    assert ".same.lock" in os.listdir("runs")
    assert main(flags) == 0 and main([*flags, "--overwrite"]) == 0
    assert os.listdir("runs") == ["same"]


def test_a_held_folder_is_free_again_after_the_block_and_also_by_another_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for other in ("run", "link", "../" + tmp_path.name + "/run"):
        with claim_folder(tmp_path / "run"):
            with pytest.raises(UserError, match=f"process {os.getpid()} on .* --name"):
                with claim_folder(tmp_path / other):
                    pytest.fail("two hold it")
    with pytest.raises(ZeroDivisionError), claim_folder(tmp_path / "run"):
        raise ZeroDivisionError
    assert sorted(os.listdir(tmp_path)) == ["link", "run"]


def test_folders_that_were_made_for_the_lock_are_removed_unless_something_is_in_them(tmp_path):
    with claim_folder(tmp_path / "a/b/run"):
        assert not (tmp_path / "a/b/run").exists()
    assert os.listdir(tmp_path) == []
    with claim_folder(tmp_path / "a/b/run"):
        (tmp_path / "a/note").touch()
    assert os.listdir(tmp_path / "a") == ["note"]


def test_an_empty_folder_that_a_refused_write_has_left_is_removed_so_that_the_same_command_works(tmp_path):
    with pytest.raises(OSError, match="no room"), claim_folder(tmp_path / "run"):
        (tmp_path / "run").mkdir()
        raise OSError("no room")
    assert os.listdir(tmp_path) == []
    (tmp_path / "run").mkdir()  # somebody's own, empty as it is
    with claim_folder(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path) == ["run"]


def test_a_holder_that_cannot_be_named_is_another_process(tmp_path):
    with claim_folder(tmp_path / "run"):
        (tmp_path / ".run.owner.json").write_text("[]")
        with pytest.raises(UserError, match="another process"), claim_folder(tmp_path / "run"):
            pytest.fail("two hold it")


@pytest.fixture
def run(tmp_path):
    "A folder as a run leaves it, as far as its names go."
    folder = tmp_path / "runs/run"
    for name in (
        "checkpoints/step_000005",
        "checkpoints/.step_000006.x1.tmp",
        "tensorboard",
        ".log.txt.a_1.tmp",
    ):
        (folder / name).mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "eval.json", "checkpoints/step_000005/state.json"):
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps(asdict(preset("laptop"))))
    return folder


def test_what_a_run_made_is_deleted_and_nothing_beside_it(run):
    (run.parent / "beside").touch()
    assert run_problem(run) == ""
    remove_run(run)
    assert os.listdir(run.parent) == ["beside"]


FOREIGN = [
    ("thesis.tex", "file", "thesis.tex, which no run made"),
    ("checkpoints/notes", "folder", "checkpoints/notes, which no run made"),
    ("checkpoints/step_000009", "file", "checkpoints/step_000009, which"),
    ("data", "folder", "data, which no run made"),
    ("report.md", "folder", "report.md, which"),
    ("tensorboard/../wandb", "file", "wandb, which"),
    ("samples.txt", "link", "samples.txt, which"),
    ("checkpoints/step_000010", "link", "checkpoints/step_000010, which"),
    ("config.json", "HTML", "not a run folder"),
    ("config.json", '{"architectures": ["GPT"]}', "architectures"),
    ("config.json", '{"optim": {"max_steps": "many"}}', "max_steps = 'many'"),
    ("config.json", "gone", "has no config.json"),
]


@pytest.mark.parametrize("name, kind, word", FOREIGN)
def test_what_no_run_made_is_never_deleted(run, tmp_path, name, kind, word):
    path, elsewhere = run / name, tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    elif kind == "gone":
        path.unlink()
    else:
        path.write_text(kind)
    before = sorted(tmp_path.rglob("*"))
    for delete in (remove_run, lambda folder: check_folder(folder, resume=False, overwrite=True)):
        with pytest.raises(UserError, match="not deleted: choose another --name") as error:
            delete(run)
        assert word in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_to_a_run_is_not_followed(run):
    link = run.with_name("link")
    link.symlink_to(run)
    with pytest.raises(UserError, match="is a link"):
        remove_run(link)
    assert link.is_symlink() and run_problem(run) == ""


def test_links_deep_inside_are_removed_and_what_they_lead_to_stays(run, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (run / "tensorboard/latest").symlink_to(tmp_path / "precious")
    remove_run(run)
    assert (tmp_path / "precious/file").exists() and not run.exists()


def test_a_deletion_that_was_killed_can_be_done_again(run, monkeypatch):
    def killed(path, real=run_folder.shutil.rmtree):
        if path.name == "checkpoints":
            raise KeyboardInterrupt
        real(path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run_folder.shutil, "rmtree", killed)
        remove_run(run)
    assert run_problem(run) == ""  # half of it is gone, and it is still a run
    remove_run(run)
    assert not run.exists()


@pytest.mark.parametrize(
    "there, resume, overwrite, words",
    [
        ("", False, False, ""),
        ("", False, True, ""),
        ("", True, False, "not a run folder"),
        ("config.json", False, False, "exists"),
        ("config.json", False, True, ""),
        ("config.json", True, False, "holds no checkpoint yet"),
        ("step_000005", False, False, "exists: continue it with --resume"),
        ("step_000005", False, True, ""),
        ("step_000005", True, False, ""),
        ("thesis.txt", False, False, "exists: choose another --name"),
        ("thesis.txt", False, True, "not deleted"),
        ("thesis.txt", True, False, "not a run folder"),
    ],
)
def test_a_folder_is_taken_only_where_it_is_what_was_asked_for(tmp_path, there, resume, overwrite, words):
    folder = tmp_path / "my run"
    if there:
        folder.mkdir()
        (folder / "thesis.txt").touch() if there == "thesis.txt" else None
    if there in ("config.json", "step_000005"):
        (folder / "config.json").write_text(json.dumps(asdict(preset("laptop"))))
    if there == "step_000005":
        (folder / "checkpoints/step_000005").mkdir(parents=True)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_folder(folder, resume, overwrite)


def test_resuming_a_run_that_has_saved_nothing_names_a_way_that_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} days are {i * 24} hours. " for i in range(300)))
    assert main([*FLAGS.split(), "--data", "text.txt", "--name", "my run; $(touch pwned)"]) == 0
    folder = Path("runs/my run; $(touch pwned)")
    for path in checkpoints(folder):
        remove = sorted(path.rglob("*"), reverse=True)
        [item.unlink() for item in remove]
        path.rmdir()
    with pytest.raises(UserError) as error:
        check_folder(folder, resume=True, overwrite=False)
    command = shlex.split(str(error.value).partition("again with ")[2])
    assert command[:3] == ["python", "-m", "tinygpt.train"] and main(command[3:]) == 0
    assert checkpoints(folder) and not Path("pwned").exists()


def test_a_run_that_saved_nothing_and_was_moved_is_begun_again_where_it_is_now(tmp_path, monkeypatch):
    "Not where its config.json says: another run of the old name is there by now."
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"{i} days are {i * 24} hours. " for i in range(300)))
    flags = [*FLAGS.split(), "--data", "text.txt"]
    assert main(flags) == 0
    Path("old").mkdir()
    Path("runs/same").rename("old/same")
    shutil.rmtree("old/same/checkpoints")
    assert main([*flags, "--seed", "5"]) == 0
    before = {path: path.read_bytes() for path in Path("runs/same").rglob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        check_folder(Path("old/same"), resume=True, overwrite=False)
    assert main(shlex.split(str(error.value).partition("again with ")[2])[3:]) == 0
    assert checkpoints(Path("old/same"))
    assert {path: path.read_bytes() for path in Path("runs/same").rglob("*") if path.is_file()} == before


def test_a_run_for_another_objective_is_not_sent_to_the_command_that_trains_the_next_token(config):
    open_run(config, objective=Objective(command="tinygpt.finetune", settings={"draws": 3})).close()
    with pytest.raises(
        UserError, match="as it was started, with python -m tinygpt.finetune, with --overwrite"
    ):
        check_folder(config.folder, resume=True, overwrite=False)


def test_a_folder_with_foreign_files_and_no_checkpoint_is_not_said_to_be_overwritten(run):
    (run / "thesis.tex").touch()
    shutil.rmtree(run / "checkpoints/step_000005")
    with pytest.raises(
        UserError, match="holds thesis.tex, which no run made: start a run with another --name"
    ):
        check_folder(run, resume=True, overwrite=False)


def test_what_a_file_manager_leaves_is_no_obstacle(run):
    for name in (".DS_Store", "checkpoints/.DS_Store", "Thumbs.db"):
        (run / name).touch()
    assert run_problem(run) == ""
    remove_run(run)
    assert not run.exists()


def test_a_run_may_be_called_checkpoints(run):
    folder = run.rename(run.with_name("checkpoints"))
    assert run_problem(folder) == ""
    remove_run(folder)
    assert not folder.exists()
