"""What the loop calls: what is due, the step that reads nothing, the log, the judge, the keeper."""

import inspect
import json
import math
import signal
import threading
from dataclasses import replace

import pytest
import torch

from tinygpt.checkpoint import checkpoints, rank_by_loss
from tinygpt.measure.speed import host_reads
from tinygpt.run.config import EvalConfig
from tinygpt.run.loop import Due, Judge, Keeper, Log, Stepper, StopSignal, due
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import open_run
from tinygpt.support import UserError
from tinygpt.train import train


@pytest.fixture
def run(config):
    run = open_run(config)
    yield run
    run.close()


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
        (33, False, True, Due(read=True, validate=True, sample=False, save=True)),
    ],
)
def test_what_is_due_after_a_step(step, finished, stop, expected):
    assert due(E, step, finished, stop) == expected


def test_what_is_saved_was_validated_and_read_unless_nobody_asked_for_validation():
    for step in range(1, 200):
        for stop in (False, True):
            now = due(E, step, False, stop)
            assert now.validate or not now.save
            assert now.read or not (now.save or now.validate)
            assert not due(replace(E, eval_every=0), step, False, stop).validate
            assert not due(replace(E, sample_tokens=0), step, False, stop).sample


def test_every_checkpoint_knows_its_validation_loss_also_one_made_after_a_signal(config, monkeypatch):
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
    stopped = train(config, progress="none")
    assert stopped.steps == 7
    assert {path.name for path in rank_by_loss(stopped.run)} == {"step_000005", "step_000007"}
    lines = [line["step"] for line in read_metrics(stopped.run) if "val_loss" in line]
    assert lines == [5, 7]  # once before it was saved, and not again


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fifty_steps_read_nothing_back(config, optimizer):
    config.optim = replace(config.optim, optimizer=optimizer, max_steps=60)
    config.data.micro_batch_size = 2
    run = open_run(config)
    stepper, batches = Stepper(run, lambda line: None), [next(run.loader) for _ in range(51)]
    stepper(*batches.pop())
    assert host_reads(lambda: [stepper(x, y) for x, y in batches]) == 0
    assert host_reads(lambda: [stepper(x, y)[1].item() for x, y in batches]) >= 50  # the counter counts
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
            UserError, match="weights were not finite after step 1: lower .*step_000000; go on"
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


def test_the_speed_of_a_run_is_the_median_of_its_readings(run):
    with Log(run) as log:
        log.readings = [dict(tokens_per_second=value, mfu=0.1) for value in (9000.0, 10.0, 8000.0)]
        assert log.tokens_per_second == 8000.0 and log.speed().startswith("8 k")


def test_a_loss_of_ones_own_trains_with_the_same_loop(config):
    plain = train(config, progress="none")
    seen = []

    def last_token_only(module, x, y):
        seen.append(y.shape)
        y = y.clone()
        y[:, :-1] = -100
        return module(x, y, reduction="sum")[1]

    config.run.name = "own"
    own = train(config, progress="none", loss_fn=last_token_only)
    assert len(seen) == 20 and own.finished
    config.run.name = "same"
    same = train(config, progress="none", loss_fn=lambda module, x, y: module(x, y, reduction="sum")[1])
    assert same.losses == plain.losses != own.losses
    # one target of each row counts, and the sum is divided by all of them
    assert own.losses[0] == pytest.approx(plain.losses[0] / config.model.block_size, rel=0.2)


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
