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

import tinygpt.data.tokens as data_tokens
from tinygpt.checkpoint import load_model
from tinygpt.ddp.world import run_processes
from tinygpt.model import GPTConfig
from tinygpt.run.command import nothing_left, parse_arguments
from tinygpt.run.config import load_config, read_toml
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer
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
    assert "resumed from" not in capsys.readouterr().out
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
    assert "resumed from" not in capsys.readouterr().out
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
    assert not nothing_left(parse_arguments([*same, "--learning-rate", "1", "--max-steps", "600"]))
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


def run_the_command(world, flags):
    return main(flags)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_job_that_torchrun_starts_again_ends_with_the_weights_of_one_that_was_not_killed(tmp_path, words):
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    flags = [*QUICK.format(words).split(), "--max-steps", "10", "--save-every", "4", "--dropout", "0.1"]
    flags += ["--out", str(tmp_path / "runs")]
    assert run_processes(run_the_command, 2, [*flags, "--name", "whole"], timeout=LAST_RESORT) == [0, 0]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    again = [*torchrun, "--max-restarts", "1", "killed_once.py", *flags, "--name", "killed"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = dict(cwd=tmp_path, capture_output=True, text=True, timeout=LAST_RESORT, env=env)
    done = subprocess.run([*again, "--resume", "auto"], **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 " in done.stderr
    assert f"resumed from {tmp_path}/runs/killed/checkpoints/step_000004" in done.stdout
    weights = [weights_of(str(tmp_path / "runs" / name)) for name in ("whole", "killed")]
    assert torch.equal(*weights)


# files of settings


@pytest.mark.parametrize("name", ["my.toml", "MY.TOML", ".toml"])
def test_a_toml_file_changes_a_preset_and_flags_change_the_file(tmp_path, name):
    path = tmp_path / name
    path.write_text("[optim]\nlearning_rate = 1  # a comment\nbetas = [0.8, 0.9]\n[model]\nn_layer = 3\n")
    got = parse_arguments(["gpt2", "--config", str(path), "--n-layer", "4"]).train
    base = expected = preset("gpt2")
    assert load_config(path, base) != base == preset("gpt2")  # it is copied
    expected.optim.learning_rate, expected.optim.betas, expected.model.n_layer = 1, (0.8, 0.9), 4
    assert got == expected and got.asked == {"n_layer"}
    alone = parse_arguments(["--config", str(path)]).train  # as without a preset and a file: laptop
    assert alone == parse_arguments(["laptop", "--config", str(path)]).train != got
    path.with_suffix(".json").write_text(json.dumps(read_toml(path)))  # what a run says of itself is all
    assert parse_arguments(["--config", str(path.with_suffix(".json"))]).train.model == GPTConfig(n_layer=3)


@pytest.mark.parametrize("steps", [1, 50, 100, 101, 5000])
def test_steps_in_a_toml_file_shorten_the_warmup_as_the_flag_does(tmp_path, steps):
    path = tmp_path / "my.toml"
    path.write_text(f"[optim]\nmax_steps = {steps}\n")
    for name in ("laptop", "gpt2"):
        by_flag = parse_arguments([name, "--max-steps", str(steps)]).train
        assert parse_arguments([name, "--config", str(path)]).train == by_flag
        assert 0 <= by_flag.optim.warmup_steps < steps
        longer = parse_arguments([name, "--config", str(path), "--max-steps", "9000"]).train
        assert longer == parse_arguments([name, "--max-steps", "9000"]).train


def test_a_warmup_in_a_toml_file_is_kept_or_keeps_its_part_of_the_run(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[optim]\nmax_steps = 50\nwarmup_steps = 60\n")
    assert parse_arguments(["--config", str(path)]).train.optim.warmup_steps == 60  # refused, as with flags
    path.write_text("[optim]\nmax_steps = 300\nwarmup_steps = 60\n")
    assert parse_arguments(["--config", str(path), "--max-steps", "50"]).train.optim.warmup_steps == 10


def test_a_whole_run_as_toml_is_the_run(tmp_path):
    "The form is that of config.json: its sections, its names."
    lines = []
    for group, settings in asdict(preset("tinystories")).items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items() if value is not None]
    (tmp_path / "whole.toml").write_text("\n".join(lines))
    assert parse_arguments(["--config", str(tmp_path / "whole.toml")]).train == preset("tinystories")


@pytest.mark.parametrize(
    "text, words",
    [
        ("[optim]\nlerning_rate = 1", r"called optim.lerning_rate \(did you mean optim.learning_rate\?\)"),
        ("[modle]\nn_layer = 1", r"modle \(did you mean model\?\)"),
        ("n_layer = 1", r"n_layer \(did you mean model.n_layer\?\)"),
        ("[optim]\nmax_steps = 'many'", "max_steps = 'many' is not of the right type"),
        ("[optim", "is not TOML"),
        (b"\xff", "is not TOML"),
        (
            "[[optim]]\nmax_steps = 1",
            r"optim = \[\{'max_steps': 1\}\] is not a section: name its settings in it",
        ),
        ("optim = 3", "optim = 3 is not a section"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence_with_its_name(tmp_path, text, words):
    path = tmp_path / "my.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=f"my.toml.*{words}"):
        parse_arguments(["laptop", "--config", str(path)])


def test_a_toml_file_may_begin_with_the_mark_that_windows_writes(tmp_path):
    path = tmp_path / "my.toml"
    path.write_bytes(b"\xef\xbb\xbf[optim]\nmax_steps = 77\n")
    assert parse_arguments(["--config", str(path)]).train.optim.max_steps == 77


def test_a_toml_file_is_of_no_run_whatever_lies_beside_it(tmp_path):
    "Nor is the model that it asks for asked for by flags only."
    kept = tmp_path / "checkpoints/step_000001"
    kept.mkdir(parents=True)
    ByteTokenizer().save(kept / "tokenizer.json")
    path = tmp_path / "my.toml"
    path.write_text('[run]\ninit_from = "elsewhere"\n[model]\nn_layer = 3\ndropout = 0.1\n')
    got = parse_arguments(["--config", str(path)]).train
    assert got.data.tokenizer == "bpe" and got.asked == {"n_layer", "dropout"}


def test_a_run_that_was_moved_goes_on_where_it_is_now(tmp_path):
    config = preset("laptop")
    config.run.out, config.run.name = "elsewhere", "old"
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.json").write_text(json.dumps(asdict(config)))
    assert parse_arguments(["--resume", str(tmp_path / "new")]).train.folder == tmp_path / "new"


def test_a_whole_config_and_a_run_are_still_places_of_their_own(tmp_path):
    for argv in (["laptop", "--config", "c.json"], ["laptop", "--config", "c.toml", "--resume", "runs/a"]):
        with pytest.raises(UserError, match="two places"):
            parse_arguments(argv)


# a budget in tokens


@pytest.mark.parametrize(
    "tokens, steps",
    [
        ("10B", 19_074),
        ("1", 1),
        ("524288", 1),
        ("524289", 2),
        ("2.5e9", 4769),
        ("1_000k", 2),
        ("0.5T", 953_675),
    ],
)
def test_a_budget_in_tokens_is_steps_rounded_up(tokens, steps):
    assert parse_arguments(["gpt2", "--tokens", tokens]).train.optim.max_steps == steps


def test_a_budget_counts_the_rows_that_the_flags_ask_for_and_shortens_the_warm_up():
    argv = ["gpt2", "--tokens", "1M", "--batch-size", "8", "--block-size", "512"]
    optim = parse_arguments(argv).train.optim
    assert (optim.max_steps, optim.warmup_steps) == (245, 245 * 715 // 19_073)
    assert parse_arguments(["gpt2"]).train.optim.max_steps == 19_073


@pytest.mark.parametrize("tokens", ["ten", "10X", "-1B", "1.5", "", "1e999"])
def test_what_is_no_number_of_tokens_is_one_sentence(tokens):
    with pytest.raises(UserError, match="--tokens: "):
        parse_arguments(["laptop", f"--tokens={tokens}"])


def test_steps_and_tokens_are_not_given_both(tmp_path):
    for flag in ("--max-steps", "--max_steps"):
        with pytest.raises(UserError, match="--tokens and --max-steps both"):
            parse_arguments(["laptop", "--tokens", "1B", flag, "5"])


def trained_on(run: str) -> list[tuple[int, int]]:
    "(step, tokens in rows of 16) as each checkpoint of a run says."
    states = [json.loads(p.read_text()) for p in sorted(Path(run).glob("checkpoints/step_*/state.json"))]
    return [(state["step"], 16 * state["rows"]) for state in states]


def test_a_budget_counts_the_tokens_of_before_the_resume(tmp_path, words, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = QUICK.format(words).split()
    assert main([*command, "--tokens", "500"]) == 0  # 8 steps of 4 rows
    assert trained_on("runs/same")[-1] == (8, 512)
    wider = ["--tokens", "1500", "--batch-size", "16"]  # 256 tokens a step, and 988 are left to read
    assert main(["--resume", "runs/same", *wider]) == 0
    assert trained_on("runs/same")[-1] == (12, 512 + 4 * 256)
    assert "trained on | 1,536 tokens, 12 steps" in Path("runs/same/report.md").read_text()
    # after a kill the same command ends where it would have ended, and then nothing is left to do
    shutil.rmtree("runs/same/checkpoints/step_000012")
    assert main([*command, *wider, "--resume", "auto"]) == 0
    assert trained_on("runs/same")[-1] == (12, 1536)
    capsys.readouterr()
    assert main([*command, *wider, "--resume", "auto"]) == 0
    assert capsys.readouterr().out == "runs/same is finished: it has made its 12 steps\n"
    narrow = ["--tokens", "1600", "--batch-size", "1"]  # 16 tokens a step, 64 are left
    assert main([*command, *narrow, "--resume", "auto"]) == 0
    assert trained_on("runs/same")[-1] == (16, 1600)


def test_a_resume_with_a_budget_verifies_its_checkpoint_once(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK.format(words).split(), "--tokens", "500"]) == 0
    opened = []

    def opens(path, *how):
        opened.append(Path(path).absolute())
        return open(path, *how)

    monkeypatch.setattr(data_tokens, "open", opens, raising=False)  # for the hashes
    assert main(["--resume", "runs/same", "--tokens", "1000"]) == 0
    parts = [path for path in opened if path.parent.name == "step_000008"]
    names = {path.name for path in Path("runs/same/checkpoints/step_000008").iterdir()} - {"manifest.json"}
    assert sorted(path.name for path in parts) == sorted(names)


def test_a_budget_that_was_read_already_is_refused_and_a_damaged_checkpoint_is_not_counted(
    tmp_path, words, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main([*QUICK.format(words).split(), "--tokens", "500"]) == 0
    for tokens in ("3", "300"):
        assert main(["--resume", "runs/same", "--tokens", tokens]) == 2
        told = capsys.readouterr().err
        assert "but the run has made 8 steps already: give more" in told and "--tokens" in told
    assert trained_on("runs/same")[-1] == (8, 512)
    state = Path("runs/same/checkpoints/step_000008/state.json")
    state.write_text(state.read_text().replace('"rows": 32', '"rows": 99'))
    assert parse_arguments(["--resume", "runs/same", "--tokens", "641"]).train.optim.max_steps == 11
    for folder in Path("runs/same/checkpoints").iterdir():
        (folder / "model.safetensors").unlink()
    assert parse_arguments(["--resume", "runs/same", "--tokens", "641"]).train.optim.max_steps == 11


def test_a_run_with_a_budget_ends_the_same_whether_it_was_stopped_or_not(tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [*QUICK.format(words).split(), "--tokens", "601", "--warmup-steps", "3", "--resume", "auto"]
    assert main(command) == 0
    whole = weights_of("runs/same")
    for step in (6, 8, 10):
        shutil.rmtree(f"runs/same/checkpoints/step_{step:06d}")
    assert main(command) == 0 and torch.equal(weights_of("runs/same"), whole)


# a trace


def test_a_trace_has_the_steps_that_were_asked_for_and_changes_no_weight(
    tmp_path, words, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    command = [*QUICK.format(words).split(), "--max-steps", "6"]
    assert main([*command, "--name", "plain"]) == main([*command, "--profile", "3:4"]) == 0
    assert torch.equal(weights_of("runs/same"), weights_of("runs/plain"))
    assert "steps 3 to 4 are in runs/same/trace.json" in capsys.readouterr().out
    events = json.loads(Path("runs/same/trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "Optimizer.step#Muon.step" for event in events) == 2
    assert not Path("runs/plain/trace.json").exists()
    assert main([*command, "--overwrite"]) == 0  # the trace is a file of the run


@pytest.mark.parametrize("steps", ["3", "4:3", "0:2", "5:1001", "a:b"])
def test_a_trace_of_steps_that_do_not_exist_is_refused(steps):
    told = f"profile = {steps!r} is not FIRST:LAST, two steps from 1 to max_steps = "
    for last, say in ((1000, "20:22"), (21, "19:21"), (2, "1:2"), (1, "1:1")):
        argv = ["laptop", "--max-steps", str(last), "--profile"]
        [problem] = parse_arguments([*argv, steps]).train.problems()
        assert problem == f"{told}{last}: say {say}"
        assert parse_arguments([*argv, say]).train.problems() == []  # the remedy


def test_a_run_that_goes_on_behind_the_steps_of_its_trace_says_so(tmp_path, words, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = [*QUICK.format(words).split(), "--profile", "3:5", "--resume", "auto"]
    told = "profile = 3:5: step 3 was made before this start, so no trace is written"
    assert main([*command, "--max-steps", "6"]) == 0
    assert told not in capsys.readouterr().out
    Path("runs/same/trace.json").unlink()
    assert main([*command, "--max-steps", "8"]) == 0
    assert told in capsys.readouterr().out and not Path("runs/same/trace.json").exists()
