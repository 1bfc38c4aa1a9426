"""What the loop calls: what is due, the step that reads nothing, the log, the judge, the keeper."""

import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from events import LAST_RESORT

import tinygpt.run.loop as run_loop
from tinygpt.checkpoint import checkpoints, load_model, rank_by_loss, verify_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.ddp.world import run_processes
from tinygpt.evaluate.export import export_model
from tinygpt.evaluate.score import evaluate
from tinygpt.finetune.template import chat_tokenizer
from tinygpt.measure.speed import StepMeter, host_reads
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.config import EvalConfig
from tinygpt.run.folder import claim_folder
from tinygpt.run.loop import Due, Judge, Keeper, Log, Stepper, StopSignal, due, shows_bar
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import NEXT_TOKEN, Objective, next_token_loader, open_run
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer
from tinygpt.train import losses_of, main, train


@pytest.fixture
def run(config):
    run = open_run(config)
    yield run
    run.close()


def test_documents_that_a_stream_leaves_out_are_told_at_the_end_and_only_if_there_are_any(config, tmp_path):
    config.data.loader = "stream"
    lines = [json.dumps({"text": f"document {i} is a good one " * 3}) for i in range(400)]
    for odd in ([], ['{"body": "x"}', '{"text": 12}']):
        config.data.source = str(tmp_path / f"{len(odd)}.jsonl")
        (tmp_path / f"{len(odd)}.jsonl").write_text("\n".join([lines[0], *odd, *lines[1:]]))
        config.run.name = f"odd-{len(odd)}"
        train(config, progress="none")
        told = (config.folder / "log.txt").read_text()
        assert told.count("of the documents read") == len(odd)
    assert re.search("1 x nothing in place of text, left out: .*2.jsonl line 2\n", told)
    assert re.search("1 x int in place of text, left out: .*2.jsonl line 3\n", told)


def test_signal_handlers_are_put_back_and_other_threads_may_train():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    failures = []

    def elsewhere():
        try:
            with StopSignal() as caught:
                assert not caught.stop
        except ValueError as error:  # what Python says to handlers set outside the main thread
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_every_signal_to_stop_sets_the_flag_and_an_ignored_one_stays_ignored(name):
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"no {name} on this system")
    with StopSignal() as caught:
        signal.raise_signal(number)
        assert caught.stop
        if name != "SIGINT":  # a scheduler may send it twice; a second Ctrl-C is a person's
            signal.raise_signal(number)
    before = signal.signal(number, signal.SIG_IGN)  # as nohup does with SIGHUP
    try:
        with StopSignal() as caught:
            signal.raise_signal(number)
            assert not caught.stop and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


E = EvalConfig(eval_every=40, save_every=60, log_every=20, sample_tokens=10)


@pytest.mark.parametrize(
    "step, finished, stop, expected",
    [
        (1, False, False, Due(read=False, validate=False, sample=False, save=False)),
        (20, False, False, Due(read=True, validate=False, sample=False, save=False)),
        (40, False, False, Due(read=True, validate=True, sample=True, save=False)),
        (60, False, False, Due(read=True, validate=True, sample=False, save=True)),
        (120, False, False, Due(read=True, validate=True, sample=True, save=True)),
        (120, True, True, Due(read=True, validate=True, sample=False, save=True)),
        (33, False, True, Due(read=True, validate=False, sample=False, save=True)),
    ],
)
def test_what_is_due_after_a_step(step, finished, stop, expected):
    assert due(E, step, finished, stop) == expected


def test_what_is_saved_was_validated_and_read_unless_nobody_asked_for_validation():
    for step in range(1, 200):
        for stop in (False, True):
            now = due(replace(E, log_every=7), step, False, stop)
            assert now.validate == (not stop and (now.save or step % 40 == 0))  # a stop saves first
            assert now.read or not (now.save or now.validate)
            assert not due(replace(E, eval_every=0), step, False, stop).validate
            assert not due(replace(E, sample_tokens=0), step, False, stop).sample


def test_every_checkpoint_knows_its_validation_loss_and_after_a_signal_saving_comes_first(
    config, monkeypatch
):
    config.eval = replace(config.eval, eval_every=8, save_every=5)
    result = train(config, progress="none")
    assert set(rank_by_loss(result.run)) == set(checkpoints(result.run))
    config.run.name = "stopped"
    real = Stepper.__call__

    def with_signal(self, x, y):
        if self.run.step == 6:
            signal.raise_signal(signal.SIGTERM)
        return real(self, x, y)

    monkeypatch.setattr(Stepper, "__call__", with_signal)
    validate, seen = Judge.validate, []

    def after_saving(self, *args):
        seen.append([path.name for path in checkpoints(self.run.folder)])
        return validate(self, *args)

    monkeypatch.setattr(Judge, "validate", after_saving)
    stopped = train(config, progress="none")
    assert stopped.steps == 7
    assert seen == [[], ["step_000005", "step_000007"]]  # who sent the signal may not wait for a validation
    assert {path.name for path in rank_by_loss(stopped.run)} == {"step_000005", "step_000007"}
    learned = json.loads((stopped.run / "checkpoints/step_000007/val_loss.json").read_text())
    assert learned == {"val_loss": stopped.val.loss} and verify_checkpoint(checkpoints(stopped.run)[-1]) == ""
    lines = [line["step"] for line in read_metrics(stopped.run) if "val_loss" in line]
    assert lines == [5, 7]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_dozen_steps_read_nothing_back(config, optimizer):
    config.optim = replace(config.optim, optimizer=optimizer, max_steps=20)
    config.data.micro_batch_size = 2
    run = open_run(config)
    stepper, batches = Stepper(run, lambda line: None), [next(run.loader) for _ in range(13)]
    stepper(*batches.pop())
    assert host_reads(lambda: [stepper(x, y) for x, y in batches]) == 0
    assert host_reads(lambda: [stepper(x, y)[1].item() for x, y in batches[:3]]) >= 3  # the counter counts
    run.close()


def test_weights_that_are_not_finite_end_the_run_and_are_not_saved_even_after_a_finite_loss(run, monkeypatch):
    gathered = []
    monkeypatch.setattr(run.parallel, "optimizer_state", lambda: gathered.append(1) or {})
    with Log(run) as log:
        keeper = Keeper(run, log)
        keeper.save()
        assert len(checkpoints(run.folder)) == len(gathered) == 1
        run.step = 1
        with torch.no_grad():
            run.model.wte.weight[0, 0] = math.inf
        with pytest.raises(
            UserError, match="weights were not finite after step 1: lower .*step_000000; continue"
        ):
            keeper.save()
        assert len(checkpoints(run.folder)) == 1
        assert len(gathered) == 1  # what is not saved is not gathered either
    assert "not finite" in (run.folder / "log.txt").read_text()


def test_the_judge_knows_the_loss_of_the_weights_as_they_are_only(run):
    with Log(run) as log:
        judge = Judge(run, log)
        assert judge.val_loss() is None
        assert judge.validate().loss == judge.val_loss()
        run.step += 1
        assert judge.val_loss() is None


def test_the_log_writes_each_step_once_however_rarely_it_is_read(run):
    with Log(run) as log:
        stepper = Stepper(run, log.say)
        for step in range(7):
            log.add(*stepper(*next(run.loader)))
            run.step += 1
            if step in (2, 3):
                log.read()
        log.read()
        log.read()  # nothing is left to read
    lines = read_metrics(run.folder)
    assert [line["step"] for line in lines] == list(range(7)) and [
        line["loss"] for line in lines
    ] == log.losses
    assert len(log.readings) == 3 and log.tokens_per_second > 0


LINE = r"step (\d+): loss [\d.]+, lr [\d.e-]+, norm [\d.]+, [\d.e+]+ ms a step, .* tokens/s, \d+% of the"


@pytest.mark.parametrize("progress", ["lines", "bar", "none"])
def test_a_line_for_each_reading_is_in_the_log_and_shown_where_no_bar_is(config, progress, capsys):
    config.eval = replace(config.eval, log_every=5, eval_every=0, save_every=0)
    result = train(config, progress=progress)
    out, err = capsys.readouterr()
    log = (result.run / "log.txt").read_text()
    train_kb, val_kb = re.search(r"data .*: ([\d.]+) kB to train on, ([\d.]+) kB held out", log).groups()
    size = Path(config.data.source).stat().st_size / 1e3
    assert float(train_kb) + float(val_kb) == pytest.approx(size, abs=0.2)
    assert re.findall(LINE, log) == ["5", "10", "15", "20"]
    assert f"step 20: loss {result.losses[-1]:.4f}, lr" in log
    assert re.findall(LINE, out) == (["5", "10", "15", "20"] if progress == "lines" else [])
    assert ("\r" in err) == (progress == "bar") and ("validation loss" in out) == (progress != "none")


@pytest.mark.parametrize(
    "out, err, expected", [(1, 1, "bar"), (1, 0, "lines"), (0, 1, "lines"), (0, 0, "lines")]
)
def test_a_bar_is_for_terminals_and_what_was_asked_for_stays(monkeypatch, out, err, expected):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: bool(out), raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: bool(err), raising=False)
    assert shows_bar("auto") == (expected == "bar")
    assert shows_bar("bar") and not shows_bar("lines") and not shows_bar("none")


TWICE = """
import sys
from tinygpt.train import main

for more in ([], ["--progress", "none"]):
    print(f"status {main([*sys.argv[1:], *more])}", flush=True)
"""


def test_the_command_writes_no_bar_into_a_file(config, tmp_path):
    flags = f"--data {config.data.source} --tokenizer byte --n-layer 1 --n-embd 16 --n-head 2 --block-size 16"
    flags += " --max-steps 20 --eval-every 0 --sample-tokens 0 --final-eval-tokens 50 --no-compressors"
    flags += " --device cpu --compile off --ngram-rows 8 --overwrite"
    with open(tmp_path / "job.log", "w") as log:
        command = [sys.executable, "-c", TWICE, *flags.split()]
        done = subprocess.run(command, cwd=tmp_path, stdout=log, stderr=log, timeout=LAST_RESORT)
    text = (tmp_path / "job.log").read_text()
    assert done.returncode == 0 and "\r" not in text, text
    usual, none, end = text.split("status 0\n")
    assert re.findall(LINE, usual) == ["10", "20"] and re.findall(LINE, none + end) == []


def test_the_loss_in_the_log_is_the_mean_over_the_ranks(run, monkeypatch):
    monkeypatch.setattr(run.parallel, "mean", lambda losses: losses / 2 + 5)  # another rank has 10
    with Log(run) as log:
        log.add(torch.tensor(3.0), torch.tensor(1.0), 1e-3, 128)
        log.read()
        assert log.losses == [6.5]


def test_the_speed_of_a_run_is_the_median_of_its_readings(run):
    with Log(run) as log:
        log.readings = [
            dict(tokens_per_second=value, of_measured_peak=0.1) for value in (9000.0, 10.0, 8000.0)
        ]
        assert log.tokens_per_second == 8000.0 and log.speed().startswith("8 k")


def test_the_shares_in_the_log_are_of_all_processes_together(run, monkeypatch):
    monkeypatch.setattr(run_loop, "promised_peak", lambda device, dtype: 3e12)
    run.world = replace(run.world, world_size=2)
    with Log(run) as log:
        assert (log.meter.promised, log.meter.peak_flops) == (6e12, 2 * run.peak[0])


def test_of_many_processes_the_first_alone_makes_a_trace(run):
    run.config.eval.profile = "1:2"
    for rank in (0, 1):
        run.world = replace(run.world, rank=rank)
        tracer = run_loop.Tracer(run, print)
        tracer.before_step()
        assert (tracer.profiler is not None) == (rank == 0)
        if tracer.profiler:
            tracer.profiler.stop()


def test_a_loss_of_ones_own_trains_with_the_same_loop(config):
    plain = train(config, progress="none")
    seen = []

    def last_token_only(module, x, y):
        seen.append(y.shape)
        y = y.clone()
        y[:, :-1] = -100
        return module(x, y, reduction="sum")[1]

    config.run.name = "own"
    own = train(config, progress="none", objective=Objective(last_token_only))
    assert len(seen) == 20 and own.finished
    config.run.name = "same"
    plainly = Objective(lambda module, x, y: module(x, y, reduction="sum")[1])
    same = train(config, progress="none", objective=plainly)
    assert same.losses == plain.losses != own.losses
    # one target of each row counts, and the sum is divided by all of them
    assert own.losses[0] == pytest.approx(plain.losses[0] / config.model.block_size, rel=0.2)


class Weighted:
    "Rows whose targets are told with a weight of 2 each: y is (B, T, 2) float64."

    def __init__(self, run):
        self.rows = next_token_loader(run)
        self.state_dict, self.load_state_dict = self.rows.state_dict, self.rows.load_state_dict
        self.close = self.rows.close

    def __next__(self):
        x, y = next(self.rows)
        return x, torch.stack([y, torch.full_like(y, 2)], -1).double()


def weighted_loss(module, x, y):
    losses = torch.nn.functional.cross_entropy(
        module(x)[0].flatten(0, 1), y[..., 0].long().flatten(), reduction="none"
    )
    return (losses * y[..., 1].flatten().float()).sum()


def last_target(run):
    return {"steps made": float(run.step)}


WEIGHTED = Objective(
    weighted_loss, Weighted, lambda y: y[..., 1].sum(), last_target, "tests.weighted", dict(weight=2)
)


def weighted_losses(world, config):
    return train(config, progress="none", objective=WEIGHTED).losses


def test_an_objective_brings_its_rows_its_loss_its_count_and_its_figures(config):
    plain = train(config, progress="none")
    config.run.name = "weighted"
    own = train(config, progress="none", objective=WEIGHTED)
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)  # 2 in the sum and 2 in the count
    assert own.figures == {"steps made": 20.0}
    seen = [line["steps made"] for line in read_metrics(config.folder) if "steps made" in line]
    assert seen == [20.0]
    assert "steps made" in (config.folder / "report.md").read_text()
    config.run.name = "on-two"
    for losses in run_processes(weighted_losses, 2, config):
        assert losses == pytest.approx(plain.losses, rel=1e-4)


class Short(Weighted):
    "The same rows, cut to a quarter of their tokens."

    def __next__(self):
        x, y = super().__next__()
        return x[:, : x.shape[1] // 4], y[:, : x.shape[1] // 4]


class Uneven(Weighted):
    "Half the rows for the first process, as where a loader leaves rows out."

    def __init__(self, run):
        super().__init__(run)
        self.rank = run.world.rank

    def __next__(self):
        x, y = super().__next__()
        return (x, y) if self.rank else (x[: len(x) // 2], y[: len(y) // 2])


def counted_tokens(world, config):
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepMeter, "add", lambda meter, tokens: counted.append(tokens))
        train(config, progress="none", objective=replace(WEIGHTED, loader=Uneven))
    return sum(counted)


def test_tokens_are_those_of_all_processes_also_where_one_has_fewer(config):
    whole = config.optim.max_steps * config.data.batch_size * config.model.block_size
    assert run_processes(counted_tokens, 2, config) == [whole * 3 // 4] * 2


def test_rows_that_are_shorter_than_the_context_count_with_the_tokens_that_they_have(config, monkeypatch):
    counted = []
    monkeypatch.setattr(StepMeter, "add", lambda meter, tokens: counted.append(tokens))
    rows, T = config.data.batch_size, config.model.block_size
    train(config, progress="none")
    assert counted == [10 * rows * T] * 2  # a reading every ten steps
    report = config.folder / "report.md"
    assert f"| trained on | {20 * rows * T:,} tokens, 20 steps |" in report.read_text()
    config.run.name, counted[:] = "short", []
    train(config, progress="none", objective=replace(WEIGHTED, loader=Short))
    assert counted == [10 * rows * T // 4] * 2
    report, log = config.folder / "report.md", (config.folder / "log.txt").read_text()
    assert f"| trained on | {20 * rows:,} rows, 20 steps |" in report.read_text()
    assert f"20 steps of {rows} rows" in log and f"this model, after {20 * rows:,} rows" in log


def test_what_was_read_before_a_resume_counts_with_the_batch_size_that_it_had(config):
    T = config.model.block_size
    train(config, progress="none")
    config.optim.max_steps, config.data.batch_size = 22, 8
    train(config, resume=True, progress="none")
    assert (
        f"| trained on | {(20 * 4 + 2 * 8) * T:,} tokens, 22 steps |"
        in (config.folder / "report.md").read_text()
    )
    config.optim.max_steps, config.data.batch_size = 23, 16
    train(config, resume=True, progress="none")
    assert (
        f"this model, after {(20 * 4 + 2 * 8 + 16) * T:,} tokens" in (config.folder / "log.txt").read_text()
    )


def test_the_last_lines_name_the_files_that_are_there_and_no_others(config):
    for tokens in (0, 5):
        config.eval.sample_tokens = tokens
        train(config, progress="none", overwrite=True)
        [line] = [
            line for line in (config.folder / "log.txt").read_text().splitlines() if ": report.md" in line
        ]
        named = set(line.split(": ")[1].split(", "))
        assert named | {"log.txt"} == {path.name for path in config.folder.iterdir()}


def test_figures_of_a_judge_may_be_tensors_that_hold_one_number(config):
    values = dict(loss=torch.tensor(0.5, requires_grad=True), asked=torch.tensor(3), share=np.float32(0.25))
    config.eval = replace(config.eval, eval_every=2)
    result = train(config, objective=replace(WEIGHTED, judge=lambda run: values), progress="none")
    told = dict(loss=0.5, asked=3, share=0.25)
    assert result.figures == told and {type(value) for value in result.figures.values()} == {float, int}
    lines = [line for line in read_metrics(result.run) if "asked" in line]
    assert lines and all(told.items() <= line.items() for line in lines)


@pytest.mark.parametrize(
    "found, told",
    [
        ({"reward": torch.ones(2)}, "judge: reward = tensor.* is not one number: return one for each name"),
        ({"reward": np.ones(2)}, "judge: reward = array.* is not one number"),
        ({"reward": "high"}, "judge: reward = 'high' is not one number"),
        (torch.ones(2), "judge returned tensor.*: return a dict of names and numbers"),
    ],
)
def test_a_judge_that_gives_no_single_numbers_is_told_so(config, found, told):
    config.eval.eval_every = 2
    with pytest.raises(UserError, match=told):
        train(config, progress="none", objective=replace(WEIGHTED, judge=lambda run: found))


def test_the_judge_looks_once_a_step_and_a_look_that_finds_nothing_leaves_the_figures_before_it(config):
    found = [{"reward": 0.5}, {}]  # as a loader's, of what was drawn since the look before
    config.eval.eval_every = 10
    objective = replace(WEIGHTED, judge=lambda run: found.pop(0))
    result = train(config, progress="none", objective=objective)
    assert found == [] and result.figures == {"reward": 0.5}
    assert [line["step"] for line in read_metrics(config.folder) if "val_loss" in line] == [10, 20, 20]
    assert [line["step"] for line in read_metrics(config.folder) if "reward" in line] == [10]
    assert all(len(line) > 1 for line in read_metrics(config.folder))  # a number beside the step
    assert "reward" in (config.folder / "report.md").read_text()
    assert (config.folder / "log.txt").read_text().count("step 20: validation") == 2


@pytest.mark.parametrize(
    "on_the_way, at_the_end, steps",
    [(400, 400, [10, 20]), (10**6, 10**7, [10, 20]), (400, 415, [10, 20]), (400, 416, [10, 20, 20])],
)
def test_the_last_step_is_validated_again_only_on_more_text(config, on_the_way, at_the_end, steps):
    config.eval = replace(config.eval, eval_every=10, eval_tokens=on_the_way, final_eval_tokens=at_the_end)
    result = train(config, progress="none")
    lines = [line for line in read_metrics(config.folder) if "val_loss" in line]
    assert [line["step"] for line in lines] == steps
    assert (lines[-1]["val_loss"], lines[-1]["val_tokens"]) == (result.val.loss, result.val.tokens)
    data = result.data
    direct = evaluate(result.model, data.val, data.tokenizer.token_bytes(), max_tokens=at_the_end)
    assert result.val.tokens == direct.tokens and result.val.loss == pytest.approx(direct.loss, rel=1e-6)
    assert train(config, resume=True, progress="none").val == result.val  # of a finished run: once more


def test_a_run_with_an_objective_goes_on_exactly_and_only_with_its_own_command(config):
    config.optim = replace(config.optim, schedule="constant")
    whole = train(config, progress="none", objective=WEIGHTED)
    config.run.name, config.optim.max_steps = "again", 8
    first = train(config, progress="none", objective=WEIGHTED)
    config.optim.max_steps = 20
    with pytest.raises(UserError) as refused:
        train(config, progress="none", resume=True)
    assert f"python -m tests.weighted --resume {config.folder}" in str(refused.value)
    kept = json.loads((config.folder / "objective.json").read_text())
    assert kept == dict(command="tests.weighted", settings=dict(weight=2))
    rest = train(config, progress="none", resume=True, objective=WEIGHTED)
    assert first.losses + rest.losses == whole.losses
    assert f"python -m tests.weighted --resume {config.folder}" in (config.folder / "report.md").read_text()


def test_a_resumed_runs_metrics_are_whole_before_it_goes_on(run):
    "What is kept of an old metrics.jsonl is on the disk before the first new line."
    (run.folder / "metrics.jsonl").write_text(
        "".join(json.dumps(dict(step=i, loss=1.0)) + "\n" for i in range(9))
    )
    run.step = 5
    log = Log(run)
    assert [line["step"] for line in read_metrics(run.folder)] == list(range(5))
    log.files.close()


def test_train_is_short_enough_to_be_read_in_one_look():
    lines = inspect.getsource(train).splitlines()
    assert len(lines) <= 45


def test_the_rates_of_all_groups_follow_the_schedule_from_its_first_step(run):
    rates = []
    with Log(run) as log:
        stepper = Stepper(run, log.say)
        tops = [group["lr"] for group in run.parallel.optimizer.param_groups]
        for _ in range(4):
            told = stepper(*next(run.loader))[2]
            rates.append([group["lr"] for group in run.parallel.optimizer.param_groups])
            assert told == run.config.optim.learning_rate * run.schedule(run.step)
            run.step += 1
    assert rates == [[top * run.schedule(step) for top in tops] for step in range(4)]
    assert len(set(tops)) > 1  # Muon's rate and AdamW's


def test_a_sample_is_written_down_with_its_prompt_and_its_step(config):
    config.eval = replace(config.eval, sample_tokens=7, prompt="The ")
    run = open_run(config)
    run.step = 3
    with Log(run) as log:
        text = Judge(run, log).sample()
    run.close()
    assert text.startswith("The ") and len(text) > 4
    assert (run.folder / "samples.txt").read_text(encoding="utf-8") == f"--- step 3\n{text}\n"


@pytest.mark.parametrize("settings", [dict(eps=1e-30), dict(learning_rate=1e15), dict(muon_lr=1e15)])
def test_a_run_that_diverges_ends_with_its_sentence_and_keeps_no_bad_checkpoint(config, settings):
    "Also where it is asked for samples: there are no probabilities to draw from."
    config.optim = replace(config.optim, max_steps=20, **settings)
    config.eval = replace(config.eval, eval_every=1, save_every=1, sample_tokens=3, keep=99)
    try:
        assert train(config, progress="none").finished
    except UserError as error:
        assert "not finite" in str(error) and "lower learning_rate" in str(error), error
    for folder in checkpoints(config.folder):
        assert all(torch.isfinite(p).all() for p in load_model(folder)[0].parameters())


def test_a_sample_of_a_model_without_probabilities_is_none(config):
    config.eval = replace(config.eval, sample_tokens=7)
    run = open_run(config)
    with torch.no_grad():
        run.model.wte.weight.fill_(math.nan)
    with Log(run) as log:
        judge = Judge(run, log)
        judge.validate()
        assert judge.sample() == ""
    run.close()


# a process that kills itself as soon as its second checkpoint is good
KILLED = """
import os
import signal
import sys
from dataclasses import replace

import tinygpt.run.loop as loop
from tinygpt.run.config import load_config
from tinygpt.train import train

real, saved = loop.prune, []


def prune(*args):
    saved.append(1)
    if len(saved) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)


loop.prune = prune
train(load_config(sys.argv[1]), resume=len(sys.argv) > 2, progress="none")
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_kill_right_after_a_checkpoint_loses_no_line_of_what_it_covers(config, tmp_path):
    "Neither in a new run nor in one that was resumed, and so has cut and copied its file."
    config.eval = replace(config.eval, eval_every=5, save_every=5, log_every=7)
    config.optim.max_steps = 40
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(asdict(config)))
    for resume, reached in ((), 10), (("resume",), 20):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, settings, *resume], capture_output=True, text=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert checkpoints(config.folder)[-1].name == f"step_{reached:06d}"
        lines = read_metrics(config.folder)
        assert [line["step"] for line in lines if "loss" in line] == list(range(reached))
        assert [line["step"] for line in lines if "val_loss" in line] == list(range(5, reached + 1, 5))
    assert train(config, resume=True, progress="none").finished
    assert [line["step"] for line in read_metrics(config.folder) if "loss" in line] == list(range(40))


def test_metrics_are_on_the_disk_before_a_checkpoint_is_made_of_them(run, monkeypatch):
    "Not only with the system: a machine without power has no system."
    done = []
    metrics = os.stat(run.folder).st_dev, None
    with Log(run) as log:
        metrics = os.fstat(log.files.metrics.fileno()).st_ino
        real_sync, real_save = os.fsync, run_loop.save_checkpoint

        def sync(number):
            done.append("metrics") if os.fstat(number).st_ino == metrics else None
            real_sync(number)

        def save(*args):
            done.append("checkpoint")
            real_save(*args)

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(run_loop, "save_checkpoint", save)
        Keeper(run, log).save()
    assert done == ["metrics", "checkpoint"]


def complaints(capsys):
    "The lines on stderr that say what cannot be written."
    return [line for line in capsys.readouterr().err.splitlines() if "the run continues without it" in line]


def full_disk(*args, **kw):
    raise OSError(28, "No space left on device", "somewhere")


RECORDS = {
    "samples.txt": (Judge, "_keep"),
    "loss.png": (run_loop, "_draw"),
    "report.md": (run_loop, "write_report"),
    "tensorboard or wandb": (run_loop, "metric_sinks"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_record_that_cannot_be_written_is_said_once_and_the_run_ends_well(
    config, what, monkeypatch, capsys
):
    config.eval = replace(config.eval, eval_every=5, sample_tokens=3)
    monkeypatch.setattr(*RECORDS[what], full_disk)
    result = train(config, progress="none")
    assert result.finished and math.isfinite(result.val.loss) and len(checkpoints(result.run)) == 1
    [line] = complaints(capsys)
    assert line.startswith(f"{what} cannot be written (somewhere: No space left on device: make room there)")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("what", ["metrics.jsonl", "log.txt"])
def test_a_log_that_cannot_be_written_is_said_once_and_the_run_goes_on(config, what, monkeypatch, capsys):
    real = open

    def refused(path, *args, **kw):
        return real("/dev/full" if str(path).endswith(what) else path, *args, **kw)

    monkeypatch.setattr("builtins.open", refused)
    result = train(config, progress="none")
    monkeypatch.undo()
    assert result.finished and len(result.losses) == 20 and len(checkpoints(result.run)) == 1
    lines = complaints(capsys)
    assert lines[0].startswith(f"{what} cannot be written (") and "No space left" in lines[0]
    assert len(lines) == (2 if what == "metrics.jsonl" else 1)  # and no curve without its numbers
    other = {"metrics.jsonl": "log.txt", "log.txt": "metrics.jsonl"}[what]
    assert (result.run / other).stat().st_size > 100


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


STDOUTS = {"a closed pipe": broken_pipe, "a full disk": lambda: open("/dev/full", "w")}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("kind", STDOUTS)
def test_a_run_that_nobody_reads_any_more_goes_on_and_ends_with_status_0(config, kind, monkeypatch, capsys):
    words = f"--data {config.data.source} --out {config.run.out} --name test --tokenizer byte --n-layer 1"
    words += " --n-embd 16 --n-head 2 --block-size 16 --ngram-rows 8 --max-steps 4 --final-eval-tokens 100"
    words += " --sample-tokens 0 --no-compressors --device cpu --compile off"
    with STDOUTS[kind]() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(shlex.split(words)) == 0
    assert (config.folder / "report.md").exists()
    [line] = complaints(capsys)
    assert "stdout cannot be written" in line


def at_step(number, act):
    "The loss of the next token; in step `number` something happens."
    calls = []

    def loss(module, x, y):
        calls.append(1)
        if len(calls) == number:
            act()
        return module(x, y, reduction="sum")[1]

    return loss


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_whose_folder_is_gone_in_mid_run_loses_no_weight_and_no_line(config, how, capsys):
    config.eval = replace(config.eval, eval_every=5, save_every=5, sample_tokens=2)
    whole = train(config, progress="none")
    config.run.name = how
    elsewhere = config.folder.with_name("elsewhere")
    act = dict(deleted=lambda: shutil.rmtree(config.folder), moved=lambda: config.folder.rename(elsewhere))
    objective = Objective(at_step(12, act[how]))
    result = train(config, progress="lines", objective=objective)
    assert result.finished and result.losses == whole.losses
    out = capsys.readouterr()
    assert out.out.count("is gone (moved or deleted") == 1 and "Traceback" not in out.err
    assert [folder.name for folder in checkpoints(config.folder)] == ["step_000015", "step_000020"]

    def losses(folder):
        return [line["loss"] for line in read_metrics(folder) if "loss" in line]

    assert losses(config.folder) == whole.losses
    log = (config.folder / "log.txt").read_text()
    assert " 20 steps of " in log and "step 5: validation" in log and "step 20: validation" in log
    assert (config.folder / "report.md").exists() and "--- step 15" in (
        config.folder / "samples.txt"
    ).read_text()
    config.optim = replace(config.optim, max_steps=22)
    assert train(config, progress="none", resume=True, objective=objective).finished
    assert len(losses(config.folder)) == 22
    if how == "moved":  # there the run stands as it was
        assert [folder.name for folder in checkpoints(elsewhere)] == ["step_000005", "step_000010"]
        assert losses(elsewhere) == whole.losses[:10]


def test_where_the_folder_cannot_be_made_again_the_run_ends_in_a_sentence_before_a_save(
    config, monkeypatch, capsys
):
    config.eval = replace(config.eval, save_every=5)
    elsewhere = config.folder.with_name("elsewhere")
    real = run_loop.write_config

    def read_only(run):
        if config.folder.exists():
            return real(run)
        raise OSError(30, "Read-only file system", str(config.folder))

    def move():
        config.folder.rename(elsewhere)
        monkeypatch.setattr(run_loop, "write_config", read_only)

    objective = Objective(at_step(7, move))
    with pytest.raises(UserError, match="test: Read-only file system: choose a place"):
        train(config, progress="none", objective=objective)
    assert not config.folder.exists() and len(complaints(capsys)) == 1
    assert load_model(elsewhere)[2].name == "step_000005"
    elsewhere.rename(config.folder)
    monkeypatch.undo()
    assert len(train(config, resume=True, progress="none", objective=objective).losses) == 15


REFUSALS = {
    "a quota, as torch says it": RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5"),
    "a file too large": OSError(27, "File too large", "optimizer.pt"),
    "no more room": OSError(28, "No space left on device", "optimizer.pt"),
    "a disk that became read-only": OSError(30, "Read-only file system", "optimizer.pt"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_checkpoint_that_cannot_be_saved_ends_the_run_in_a_sentence_and_the_last_one_is_whole(
    config, why, monkeypatch
):
    config.eval = replace(config.eval, save_every=5)
    real = run_loop.save_checkpoint

    def refused(path, *args):
        if path.name == "step_000010":
            raise REFUSALS[why]
        return real(path, *args)

    monkeypatch.setattr(run_loop, "save_checkpoint", refused)
    with pytest.raises(UserError) as error:
        train(config, progress="none")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600, error.value
    monkeypatch.undo()
    assert [folder.name for folder in checkpoints(config.folder)] == ["step_000005"]
    resumed = train(config, resume=True, progress="none")
    assert resumed.finished and len(resumed.losses) == 15


def test_what_packing_cropped_away_stands_in_log_and_report(config, tmp_path):
    documents = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": f"Number {i}: " + "long and longer " * 20}) for i in range(300)]
    documents.write_text("\n".join(lines))
    config.data = replace(config.data, source=str(documents), loader="stream", packing="bos")
    config.eval = replace(config.eval, save_every=10)
    result = train(config, progress="none")
    log = (result.run / "log.txt").read_text()
    told = [line for line in log.splitlines() if "cropped away" in line]
    assert len(told) == 1 and "(packing bos; concat crops none)" in told[0]
    dropped, trained = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+(?= t)", told[0]))
    assert trained == 20 * 4 * 16 and dropped > 10 * trained
    assert f"| left out | {dropped:,} tokens" in (result.run / "report.md").read_text()
    config.run.name, config.data.packing = "concat", "concat"  # the remedy
    assert "cropped away" not in (train(config, progress="none").run / "log.txt").read_text()


def test_two_ranks_hold_one_folder_and_add_up_what_they_cropped(config, tmp_path):
    documents = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": f"Number {i}: " + "long and longer " * 20}) for i in range(300)]
    documents.write_text("\n".join(lines))
    config.data = replace(config.data, source=str(documents), loader="stream", packing="bos")
    run_processes(losses_of, 2, config, timeout=240)
    [told] = re.findall(
        r"[\d,]+ tokens were cropped away, ([\d,]+) trained on", (config.folder / "log.txt").read_text()
    )
    assert int(told.replace(",", "")) == 20 * 4 * 16
    before = sorted(config.folder.rglob("*"))
    with (
        claim_folder(config.folder),
        pytest.raises(RuntimeError, match="belongs to a run that is still working"),
    ):
        run_processes(losses_of, 2, config, timeout=240)
    assert sorted(config.folder.rglob("*")) == before


def test_a_run_of_a_program_names_no_command_that_would_train_something_else(config, capsys):
    "The closing line of a stopped run, the last line of a failed one, and the report."
    config.optim.max_steps = 9
    stopped = Objective(at_step(5, lambda: signal.raise_signal(signal.SIGINT)))
    assert not train(config, progress="lines", objective=stopped).finished
    way_on = "continue with: train(config, resume=True, objective=...) in the program that started the run"
    assert capsys.readouterr().out.splitlines()[-1].endswith(way_on)
    assert train(config, progress="lines", resume=True, objective=stopped).finished
    report = (config.folder / "report.md").read_text()
    call = "config.optim.max_steps = 18\ntrain(config, resume=True, objective=...)"
    assert f"Train longer:\n\n```python\n# in the program that began the run\n{call}\n```" in report
    assert "tinygpt.train" not in report + capsys.readouterr().out
    assert "```bash\npython -m tinygpt.evaluate" in report
    config.run.name, config.eval.save_every, config.optim.max_steps = "fails", 5, 30
    with pytest.raises(UserError, match=re.escape(way_on)):
        train(
            config, progress="none", objective=Objective(lambda module, x, y: module(x)[0].sum() * torch.nan)
        )


def test_the_closing_line_of_a_model_that_answers_is_the_command_to_talk_to_it(config, tmp_path):
    chat = SimpleNamespace(tokenizer=chat_tokenizer(ByteTokenizer()))
    small = dict(block_size=8, n_layer=1, n_head=1, n_embd=8)
    folders = {}
    for name, tokenizer in (("chat", chat.tokenizer), ("base", ByteTokenizer())):
        model = GPT(GPTConfig.gpt2(vocab_size=tokenizer.n_vocab, **small))
        folders[name] = export_model(model, tokenizer, tmp_path / name)
    # as transformers has it: there the names are known by the file alone
    exported, no_chat = (SimpleNamespace(tokenizer=open_model(folder)[1]) for folder in folders.values())
    place = dict(folder=config.folder, config=config)
    for command, settings, data, module in (
        ("tinygpt.finetune", {"data": "tasks"}, chat, "tinygpt.chat"),
        ("tinygpt.prefer", {"kind": "dpo"}, chat, "tinygpt.chat"),
        ("tinygpt.reinforce", {"group": 4}, chat, "tinygpt.chat"),
        ("tinygpt.prefer", {"kind": "reward"}, chat, "tinygpt.generate"),
        ("tinygpt.prefer", {"kind": "dpo"}, SimpleNamespace(tokenizer=ByteTokenizer()), "tinygpt.generate"),
        ("tinygpt.finetune", {"data": "tasks"}, exported, "tinygpt.chat"),
        ("tinygpt.prefer", {"kind": "dpo"}, no_chat, "tinygpt.generate"),
        ("tinygpt.train", {}, chat, "tinygpt.generate"),  # it has read more text
    ):
        objective = Objective(command=command, settings=settings)
        run = SimpleNamespace(objective=objective, data=data, **place)
        assert f"-m {module} {config.folder}" in list(run_loop.ways_on(run).values())[-1]


def test_commands_that_are_printed_are_quoted_for_a_shell(config, capsys):
    config.run.name = "my run; $(touch pwned)"
    config.eval.prompt = "-- it's `so`; $(touch pwned)"
    result = train(config, progress="lines")
    printed = capsys.readouterr().out
    commands = run_loop.ways_on(SimpleNamespace(folder=result.run, config=config, objective=NEXT_TOKEN))
    assert commands["Write"] in printed
    for command in commands.values():
        assert command in (result.run / "report.md").read_text()
        words = shlex.split(command)
        assert words[0] == "python" and str(result.run) in words
    assert f"--prompt={config.eval.prompt}" in shlex.split(commands["Write"])


def test_ten_bad_steps_in_a_row_end_a_run_and_nine_do_not(run):
    fine, bad, norm = torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(1.0)
    with Log(run) as log:
        for losses in ([bad] * 9 + [fine], [bad] * 9):
            for loss in losses:
                log.add(loss, norm, 1e-3, 128)
            log.read()  # however the steps fall into readings
        log.add(bad, norm, 1e-3, 128)
        with pytest.raises(UserError, match="10 steps in a row"):
            log.read()


def test_no_checkpoint_is_removed_while_steps_go_wrong(run):
    run.config.eval.keep = 1
    bad, fine, norm = torch.tensor(math.nan), torch.tensor(2.0), torch.tensor(1.0)
    with Log(run) as log:
        keeper = Keeper(run, log)

        def after(step, loss):
            run.step = step
            log.add(loss, norm, 1e-3, 128)
            log.read()
            keeper.save()
            return [folder.name for folder in checkpoints(run.folder)]

        assert after(1, fine) == ["step_000001"]
        assert after(2, bad) == ["step_000001", "step_000002"]
        assert after(3, bad) == ["step_000001", "step_000002", "step_000003"]
        assert after(4, fine) == ["step_000004"]
