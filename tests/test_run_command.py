"""The command line of the trainer: the same command again, files of settings, budgets."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from events import LAST_RESORT

from tinygpt.checkpoint import load_model
from tinygpt.run.command import parse_arguments
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.support import UserError
from tinygpt.train import main


# `--resume auto`

QUICK = "--data {} --tokenizer byte --n-layer 1 --n-embd 16 --n-head 2 --block-size 16 --ngram-rows 8"
QUICK += " --eval-every 0 --save-every 2 --eval-tokens 50 --final-eval-tokens 50 --sample-tokens 0 --keep 9"
QUICK += " --no-compressors --device cpu --dtype float32 --threads 1 --compile off --batch-size 4 --name same"


def test_the_same_command_begins_a_run_goes_on_with_it_and_ends_at_once(tmp_path, words, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*QUICK.format(words).split(), "--max-steps", "6", "--resume", "auto"]
    assert main(command) == 0
    whole = weights_of("runs/same")
    assert "resumed" not in capsys.readouterr().out
    lines = Path("runs/same/metrics.jsonl").read_text()

    shutil.rmtree("runs/same/checkpoints/step_000006")  # as after a kill at step 5
    assert main(command) == 0
    assert "resumed from runs/same/checkpoints/step_000004 after step 4" in capsys.readouterr().out
    assert torch.equal(weights_of("runs/same"), whole)
    assert [line["loss"] for line in map(json.loads, lines.splitlines()) if "loss" in line] == [
        line["loss"] for line in read_metrics(Path("runs/same")) if "loss" in line
    ]

    before = {path: path.stat().st_mtime for path in Path("runs/same").rglob("*")}
    assert main(command) == 0
    assert capsys.readouterr().out == "runs/same is finished: it has made its 6 steps\n"
    assert before == {path: path.stat().st_mtime for path in Path("runs/same").rglob("*")}

    assert main([*command, "--max-steps", "8"]) == 0  # made longer
    assert "after step 6" in capsys.readouterr().out and Path("runs/same/checkpoints/step_000008").is_dir()


def weights_of(run: str) -> torch.Tensor:
    return torch.cat([p.flatten() for p in load_model(Path(run))[0].parameters()])


def test_a_run_that_saved_nothing_is_begun_anew_and_one_without_its_report_makes_it(
    tmp_path, words, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = [*QUICK.format(words).split(), "--max-steps", "4", "--resume", "auto"]
    assert main(command) == 0
    whole = weights_of("runs/same")
    shutil.rmtree("runs/same/checkpoints")  # killed before its first save
    assert main(command) == 0 and torch.equal(weights_of("runs/same"), whole)
    assert "resumed" not in capsys.readouterr().out
    Path("runs/same/report.md").unlink()  # killed after its last save
    assert main(command) == 0 and Path("runs/same/report.md").is_file()
    Path("runs/same/thesis.tex").write_text("years of work")
    shutil.rmtree("runs/same/checkpoints")
    assert main(command) == 2
    assert "thesis.tex, which no run made" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--n-layer 5", r"other settings \(n_layer = 5, not 4\): give those, or another --name"),
        ("--seed 7 --dropout 0.1", r"\(seed = 7, not 1337, dropout = 0.1, not 0.0\)"),
        ("--init-from gpt2", "init_from = gpt2, not "),
        ("--overwrite", "--overwrite deletes it"),
    ],
)
def test_a_command_that_would_make_another_run_is_refused_with_what_differs(tmp_path, flags, words):
    (tmp_path / "laptop/checkpoints/step_000500").mkdir(parents=True)
    config = preset("laptop")
    config.model.vocab_size = 1234  # as the data had it
    (tmp_path / "laptop/config.json").write_text(json.dumps(asdict(config)))
    same = ["--resume", "auto", "--out", str(tmp_path)]
    assert parse_arguments([*same, "--learning-rate", "1", "--max-steps", "600"]).nothing_left == ""
    with pytest.raises(UserError, match=words):
        parse_arguments([*same, *flags.split()])


def test_weights_to_begin_with_bring_their_form_when_the_run_goes_on_too(
    tmp_path, words, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    quick = [*QUICK.format(words).split(), "--max-steps", "4"]
    assert main([*quick, "--name", "first"]) == 0
    tuned = (
        "--init-from runs/first --block-size 16 --max-steps 4 --eval-every 0 --save-every 2 --sample-tokens 0"
    )
    tuned += (
        f" --data {words} --final-eval-tokens 50 --no-compressors --device cpu --batch-size 4 --name tuned"
    )
    for stays in ("", "step_000004"):  # the model of the command is the preset's, that of the run is not
        assert main([*tuned.split(), "--resume", "auto"]) == 0, capsys.readouterr().err
        if stays == "":
            shutil.rmtree("runs/tuned/checkpoints/step_000004")
    assert "resumed from runs/tuned/checkpoints/step_000002" in capsys.readouterr().out
    assert main([*tuned.split(), "--resume", "auto", "--n-layer", "3"]) == 2
    assert "n_layer = 3, not 1" in capsys.readouterr().err


# torchrun starts it: in the first attempt, rank 1 is killed before its seventh step
KILLED_ONCE = """
import os
import signal
import sys

import tinygpt.run.loop as loop
from tinygpt.train import Stepper, main

real = loop.Stepper.__call__


def step(self, x, y):
    if self.run.step == 6 and self.run.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, x, y)


loop.Stepper.__call__ = step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_job_that_torchrun_starts_again_ends_with_the_weights_of_one_that_was_not_killed(tmp_path, words):
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    flags = [*QUICK.format(words).split(), "--max-steps", "10", "--save-every", "4", "--dropout", "0.1"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = dict(cwd=tmp_path, capture_output=True, text=True, timeout=LAST_RESORT, env=env)
    whole = [*torchrun, "-m", "tinygpt.train", *flags, "--name", "whole"]
    again = [
        *torchrun,
        "--max-restarts",
        "1",
        "killed_once.py",
        *flags,
        "--name",
        "killed",
        "--resume",
        "auto",
    ]
    done = [subprocess.run(words, **how) for words in (whole, again)]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr + done[1].stdout + done[1].stderr
    assert (
        "rank 1 " in done[1].stderr and "resumed from runs/killed/checkpoints/step_000004" in done[1].stdout
    )
    weights = [weights_of(str(tmp_path / "runs" / name)) for name in ("whole", "killed")]
    assert torch.equal(*weights)
