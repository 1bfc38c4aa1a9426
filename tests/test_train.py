import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from events import LAST_RESORT, wait_until

import tinygpt.run.loop as loop_module
import tinygpt.run.setup as run_setup
from tinygpt.checkpoint import checkpoints, load_model, rank_by_loss
from tinygpt.ddp.world import run_processes
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.folder import check_folder
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import compare_with_compressors
from tinygpt.schedule import make_schedule
from tinygpt.support import UserError
from tinygpt.train import losses_of, main, train

TINY = dict(vocab_size=280, block_size=16, n_layer=2, n_head=2, n_embd=32, dropout=0.1)


@pytest.fixture
def config(tmp_path, words):
    config = preset("laptop")
    config.run.out, config.run.name = str(tmp_path / "runs"), "test"
    config.system = replace(config.system, device="cpu", dtype="float32")  # the same on every CPU
    config.data.source, config.data.batch_size = str(words), 8
    config.model = GPTConfig.gpt2(**TINY)
    config.optim = replace(config.optim, max_steps=20, warmup_steps=2)
    config.eval = replace(
        config.eval, eval_every=5, eval_tokens=300, save_every=5, sample_tokens=5, log_every=3, keep=10
    )
    return config


def quiet(config, **kw):
    return train(config, progress="none", **kw)


@pytest.mark.slow
def test_a_run_learns_and_leaves_everything_behind(config):
    config.optim = replace(config.optim, max_steps=150)
    result = quiet(config)
    assert result.finished and result.steps == 150 and len(result.losses) == 150
    assert result.losses[0] == pytest.approx(math.log(280), abs=0.3) and result.losses[-1] < 3.5
    assert result.val.loss == pytest.approx(result.losses[-1], abs=0.6)
    names = {"config.json", "metrics.jsonl", "log.txt", "loss.png", "samples.txt", "report.md", "checkpoints"}
    assert names <= {p.name for p in result.run.iterdir()}
    lines = read_metrics(result.run)
    assert [line["loss"] for line in lines if "loss" in line] == result.losses
    assert [line["step"] for line in lines if "val_loss" in line] == [
        *range(5, 150, 5),
        150,
        150,
    ]  # at the end on few tokens, as before, and on all
    model, tokenizer, folder = load_model(result.run)
    assert folder.name == "step_000150" and all(
        torch.equal(a, b) for a, b in zip(model.parameters(), result.model.parameters())
    )


@pytest.mark.slow
def test_a_new_process_gives_back_the_losses_that_stand_in_its_runs_metrics(config):
    [losses] = run_processes(losses_of, 1, config)
    assert (
        losses == [line["loss"] for line in read_metrics(config.folder) if "loss" in line]
        and len(losses) == 20
    )


def without_speeds(run):
    "The lines of metrics, without what the clock and the machine put there."
    measured = ("tokens_per_second", "of_measured_peak", "mfu", "memory_gb")
    return [{k: v for k, v in line.items() if k not in measured} for line in read_metrics(run)]


@pytest.mark.parametrize(
    "model, dtype",
    [
        (GPTConfig.gpt2(**TINY), "float32"),
        (GPTConfig.llama(**TINY, n_kv_head=1), "float32"),
        (GPTConfig.modern(**TINY), "float32"),
        (GPTConfig.modern(**TINY, ngram_rows=50), "bfloat16"),
    ],
    ids=["gpt2", "llama", "modern", "modern in bfloat16"],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(config, model, dtype):
    config.model, config.system.dtype = model, dtype
    whole = quiet(config)
    for stop in (5, 15):
        config.run.name = f"stopped{stop}"
        shutil.copytree(whole.run, config.folder)
        for folder in checkpoints(config.folder):
            if int(folder.name[5:]) > stop:
                shutil.rmtree(folder)
        resumed = quiet(config, resume=True)
        assert resumed.losses == whole.losses[stop:]
        assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))
        assert without_speeds(config.folder) == without_speeds(whole.run)


def test_evaluating_sampling_and_saving_do_not_change_the_run(config):
    often = quiet(config).losses
    config.run.name = "seldom"
    config.eval = replace(config.eval, eval_every=0, save_every=0, log_every=100)
    assert quiet(config).losses == often


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_micro_batches_do_not_change_the_run_beyond_rounding(config, micro):
    config.model = replace(config.model, dropout=0.0)
    whole = quiet(config).losses
    config.run.name, config.data.micro_batch_size = f"micro{micro}", micro
    assert quiet(config).losses == pytest.approx(whole, abs=1e-3)


def test_the_ways_to_save_memory_do_not_change_the_run_beyond_rounding(config):
    plain = quiet(config).losses
    config.run.name, config.system.checkpoint_activations, config.system.loss_chunk = "small", True, 10
    assert quiet(config).losses == pytest.approx(plain, abs=1e-4)


def test_the_learning_rate_follows_the_schedule_and_exactly_max_steps_are_made(config, monkeypatch):
    rates, real = [], loop_module.train_step
    config.optim.optimizer = "adamw"

    def noting(model, optimizer, *args, **kw):
        rates.append(optimizer.param_groups[0]["lr"])
        return real(model, optimizer, *args, **kw)

    monkeypatch.setattr(loop_module, "train_step", noting)
    result = quiet(config)
    o = config.optim
    schedule = make_schedule(o.schedule, 20, 2, o.final_lr, o.cooldown)
    assert rates == [o.learning_rate * schedule(step) for step in range(20)] and rates[0] > 0
    assert [line["lr"] for line in read_metrics(result.run) if "lr" in line] == rates


def test_with_muon_the_metrics_have_both_rates_as_the_optimizer_had_them(config, monkeypatch):
    rates, real = [], loop_module.train_step
    config.optim = replace(config.optim, optimizer="muon", muon_lr=0.03, max_steps=6)

    def noting(model, optimizer, *args, **kw):
        rates.append({group["lr"] for group in optimizer.param_groups})
        return real(model, optimizer, *args, **kw)

    monkeypatch.setattr(loop_module, "train_step", noting)
    lines = [line for line in read_metrics(quiet(config).run) if "lr" in line]
    assert [{line["lr"], line["muon_lr"]} for line in lines] == rates and len(rates) == 6
    schedule = make_schedule(config.optim.schedule, 6, 2, config.optim.final_lr, config.optim.cooldown)
    assert [line["muon_lr"] for line in lines] == [0.03 * schedule(step) for step in range(6)]
    config.optim.optimizer, config.run.name = "adamw", "alone"
    assert not any("muon_lr" in line for line in read_metrics(quiet(config).run))


def test_a_signal_ends_the_run_after_the_step_and_resuming_completes_it(config, monkeypatch):
    whole = quiet(config)
    config.run.name = "signalled"
    real = loop_module.train_step
    calls = []

    def with_signal(*args, **kw):
        calls.append(1)
        if len(calls) == 8:
            signal.raise_signal(signal.SIGTERM)
        return real(*args, **kw)

    monkeypatch.setattr(loop_module, "train_step", with_signal)
    stopped = quiet(config)
    assert not stopped.finished and stopped.steps == 8 and checkpoints(stopped.run)[-1].name == "step_000008"
    assert f"--resume {stopped.run}" in (stopped.run / "log.txt").read_text()
    resumed = quiet(config, resume=True)
    assert stopped.losses + resumed.losses == whole.losses and resumed.finished
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))


class Poisoned(GPT):
    "Gives a loss of NaN in chosen steps."

    bad_steps = ()
    calls = 0

    def forward(self, idx, targets=None, **kw):
        logits, loss = super().forward(idx, targets, **kw)
        if self.training and targets is not None:
            if type(self).calls in self.bad_steps:
                loss = loss * math.nan
            type(self).calls += 1
        return logits, loss


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(run_setup, "GPT", Poisoned)
    Poisoned.calls = 0
    yield Poisoned
    Poisoned.bad_steps = ()


def test_a_step_with_a_loss_that_is_not_finite_changes_no_weight(config, poisoned):
    poisoned.bad_steps = (4, 7, 8)
    result = quiet(config)
    assert [i for i, loss in enumerate(result.losses) if math.isnan(loss)] == [4, 7, 8]
    assert all(torch.isfinite(p).all() for p in result.model.parameters()) and math.isfinite(result.val.loss)
    assert "not finite" in (result.run / "log.txt").read_text()


def test_ten_bad_steps_in_a_row_end_the_run_and_name_the_last_good_checkpoint(config, poisoned):
    poisoned.bad_steps = range(6, 100)
    with pytest.raises(UserError, match=r"10 steps in a row \(to step 16\).*step_000015"):
        quiet(config)
    assert poisoned.calls <= 6 + 10 + config.eval.log_every
    losses = [line["loss"] for line in read_metrics(config.folder) if "loss" in line]
    assert [math.isnan(loss) for loss in losses] == [False] * 6 + [True] * 10
    load_model(checkpoints(config.folder)[0])


def test_ten_bad_steps_are_counted_between_readings_too(config, poisoned):
    poisoned.bad_steps = range(2, 12)  # the steps before and after are good, and all are read together
    config.eval = replace(config.eval, log_every=20, save_every=0, eval_every=0)
    with pytest.raises(UserError, match=r"10 steps in a row \(to step 12\)"):
        quiet(config)


def test_the_checkpoint_with_the_lowest_validation_loss_stays(config):
    config.eval = replace(config.eval, eval_every=0, save_every=5, keep=1)
    without = quiet(config)
    assert rank_by_loss(without.run) == []  # nobody asked for validations
    config.run.name, config.eval.eval_every = "with", 7
    judged = quiet(config)
    losses = {line["step"]: line["val_loss"] for line in read_metrics(judged.run) if "val_loss" in line}
    best = min((5, 10, 15, 20), key=losses.get)
    assert rank_by_loss(judged.run)[0].name == f"step_{best:06d}"


def test_what_is_saved_after_bad_steps_is_the_state_that_they_did_not_change(config, poisoned):
    poisoned.bad_steps = (3, 4, 9, 19)  # the steps before each save
    result = quiet(config)
    assert [p.name for p in checkpoints(result.run)] == [f"step_{step:06d}" for step in (5, 10, 15, 20)]
    assert math.isfinite(result.val.loss)
    for folder in checkpoints(result.run):
        assert all(torch.isfinite(p).all() for p in load_model(folder)[0].parameters())
    config.run.name, poisoned.calls, poisoned.bad_steps = "stopped", 0, (3, 4)
    config.optim = replace(config.optim, max_steps=5)
    short = quiet(config)
    early = load_model(checkpoints(result.run)[0])[0]
    assert all(torch.equal(a, b) for a, b in zip(short.model.parameters(), early.parameters()))


def test_nine_bad_steps_in_a_row_do_not(config, poisoned):
    poisoned.bad_steps = range(6, 15)
    assert quiet(config).finished


def test_an_existing_run_is_not_touched_unless_asked(config):
    quiet(config)
    before = {p: p.stat().st_mtime_ns for p in config.folder.rglob("*")}
    with pytest.raises(UserError, match="--resume .* --overwrite"):
        quiet(config)
    assert {p: p.stat().st_mtime_ns for p in config.folder.rglob("*")} == before
    config.optim = replace(config.optim, max_steps=3)
    assert quiet(config, overwrite=True).steps == 3
    assert [p.name for p in checkpoints(config.folder)] == ["step_000003"]


def test_overwrite_deletes_only_run_folders(config, tmp_path):
    (tmp_path / "runs/test").mkdir(parents=True)
    (tmp_path / "runs/test/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="not a run folder"):
        quiet(config, overwrite=True)
    assert (tmp_path / "runs/test/thesis.tex").exists()
    with pytest.raises(UserError, match="not a run folder"):
        check_folder(tmp_path / "runs/test", resume=True, overwrite=False)


def test_a_finished_run_can_be_made_longer(config):
    quiet(config)
    config.optim = replace(config.optim, max_steps=25)
    longer = quiet(config, resume=True)
    assert longer.steps == 25 and len(longer.losses) == 5


def test_compressors_are_computed_once_and_not_for_large_data(config, monkeypatch):
    data = quiet(config).data
    first = compare_with_compressors(data)
    assert set(first) == {"bzip2 -9", "xz -9", "xz -9 primed with the training text"}
    monkeypatch.setattr(run_setup, "compressor_bits", lambda *a: pytest.fail("computed again"))
    assert compare_with_compressors(data) == first
    assert compare_with_compressors(data, max_bytes=10) == {}


def test_a_signal_during_a_validation_is_saved_too(config, monkeypatch):
    real = run_setup.evaluate

    def with_signal(*args, **kw):
        if not signalled:
            signalled.append(signal.raise_signal(signal.SIGINT))
        return real(*args, **kw)

    signalled = []
    monkeypatch.setattr(run_setup, "evaluate", with_signal)
    config.eval = replace(config.eval, eval_every=4, save_every=0)
    stopped = quiet(config)
    assert not stopped.finished and [p.name for p in checkpoints(stopped.run)] == [
        f"step_{stopped.steps:06d}"
    ]


@pytest.mark.parametrize("loader", ["random", "shard", "stream"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_loader_and_optimizer_resumes_bit_for_bit(config, loader, optimizer, tmp_path, words):
    config.data.loader, config.optim.optimizer = loader, optimizer
    if loader == "stream":  # many documents: a hundredth of them is held out
        path = tmp_path / "documents.jsonl"
        path.write_text(
            "".join(
                json.dumps({"text": f"{line} Document {i} ends here."}) + "\n"
                for i, line in enumerate(words.read_text().splitlines())
            )
        )
        config.data.source = str(path)
    config.optim = replace(config.optim, max_steps=12)
    config.eval = replace(config.eval, save_every=7, eval_every=0)
    whole = quiet(config)
    config.run.name = "again"
    shutil.copytree(whole.run, config.folder)
    shutil.rmtree(config.folder / "checkpoints/step_000012")
    resumed = quiet(config, resume=True)
    assert resumed.losses == whole.losses[7:] and whole.losses[-1] < whole.losses[0]
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.slow
def test_where_compiling_is_not_possible_the_run_goes_on_without(config, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    config.system.compile = "on"
    result = quiet(config)
    assert result.finished and "not compiled" in (result.run / "log.txt").read_text()


MISTAKES = {
    "unknown preset": (["laptob"], "laptob"),
    "unknown flag": (["--blok-size", "3"], "--block-size"),
    "heads that do not divide": (["--n-head", "5"], "n_head = 5"),
    "no steps": (["--max-steps", "0"], "max_steps = 0"),
    "steps below zero": (["--max-steps", "-2"], "max_steps = -2"),
    "missing corpus": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty corpus": (["--data", "empty.txt"], "empty.txt"),
    "not UTF-8": (["--data", "latin.txt"], "UTF-8"),
    "shorter than a block": (["--data", "short.txt", "--tokenizer", "byte"], "block"),
    "too small for the vocabulary": (["--data", "short.txt"], "4096"),
    "truncated token file": (["--data", "tokens"], "train.bin"),
    "no such GPU": (["--device", "cuda:7"], "cuda:7"),
    "existing folder": (["--name", "existing"], "choose another --name"),
    "resume nothing": (["--resume", "runs/nothing"], "runs/nothing"),
    "a broken config": (["--config", "latin.txt"], "latin.txt"),
}


@pytest.fixture
def mistakes_folder(tmp_path, monkeypatch):
    from tinygpt.data.tokens import Corpus, write_token_data
    from tinygpt.tokenizer import ByteTokenizer

    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("Äpfel".encode("latin-1"))
    (tmp_path / "short.txt").write_text("too short")
    write_token_data(tmp_path / "tokens", Corpus("t", ["abc" * 100], ["held out"], "a test"), ByteTokenizer())
    with open(tmp_path / "tokens/train.bin", "r+b") as f:
        f.truncate(21)
    (tmp_path / "runs/existing").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_exit_code_2_and_leaves_nothing(mistakes_folder, name, capsys):
    argv, words = MISTAKES[name]
    before = {p for p in mistakes_folder.rglob("*")}
    assert main(argv) == 2
    err = capsys.readouterr().err
    sentence = err.replace("\r", "\n").strip().splitlines()[-1]  # a progress bar may come first
    assert (
        sentence.startswith("error: ")
        and words in sentence
        and err.count("error") == 1
        and "Traceback" not in err
    ), err
    assert {p for p in mistakes_folder.rglob("*")} == before


def test_several_mistakes_are_told_at_once(mistakes_folder, capsys):
    assert main(["--n-head", "5", "--max-steps", "0", "--data", "nowhere"]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in ("n_head", "max_steps", "nowhere")) and err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for another process")
def test_the_command_trains_stops_at_ctrl_c_and_goes_on_with_the_command_it_prints(tmp_path, words):
    argv = [
        sys.executable,
        "-m",
        "tinygpt.train",
        "--data",
        str(words),
        "--tokenizer",
        "byte",
        "--n-layer",
        "1",
        "--n-embd",
        "16",
        "--n-head",
        "2",
    ]
    argv += [
        "--max-steps",
        "100000",
        "--block-size",
        "16",
        "--sample-tokens",
        "5",
        "--eval-every",
        "50",
        "--name",
        "cli",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_until(lambda: len(read_metrics(tmp_path / "runs/cli")) >= 60, process, "60 lines of metrics")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LAST_RESORT)[0]
    assert process.returncode == 0 and "continue with: python -m tinygpt.train --resume runs" in output, (
        output
    )
    assert "tokens/s" in output and "validation loss" in output and "bits per byte" in output
    step = int(checkpoints(tmp_path / "runs/cli")[-1].name[5:])
    again = subprocess.run(
        [sys.executable, "-m", "tinygpt.train", "--resume", "runs/cli", "--max-steps", str(step + 20)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LAST_RESORT,
    )
    assert again.returncode == 0 and f"after step {step}" in again.stdout + again.stderr, again.stderr
    assert json.loads((tmp_path / "runs/cli/config.json").read_text())["optim"]["max_steps"] == step + 20
    assert "python -m tinygpt.generate" in again.stdout


def test_the_callers_config_stays_as_it_was(config):
    config.data.tokenizer, config.optim = "byte", replace(config.optim, max_steps=1, warmup_steps=0)
    before = asdict(config)
    assert (
        quiet(config).model.config.vocab_size == 257 != config.model.vocab_size and asdict(config) == before
    )
