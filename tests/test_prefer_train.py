"""Pairs in the trainer: their order, the reference, exact resume, micro-steps, two processes, bad input."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from preferences import BYTE, pairs_of, random_model

from tinygpt.checkpoint import save_checkpoint
from tinygpt.ddp.world import run_processes
from tinygpt.prefer.dpo import answer_logps, pair_rows
from tinygpt.prefer.train import (
    PairJudge,
    PairLoader,
    Preferences,
    batch_problems,
    count_pairs,
    dpo_objective,
    dpo_rows,
    fingerprint,
    open_reference,
    pair_figures,
    pair_logps,
    reference_logps,
    rows_at_once,
    save_preferences,
    weights_hash,
)
from tinygpt.run.setup import Objective, open_run
from tinygpt.support import UserError
from tinygpt.train import train


@pytest.fixture
def start(tmp_path):
    "A folder with a model of bytes, for `init_from`."
    folder = tmp_path / "start"
    save_checkpoint(folder, random_model(), BYTE)
    return folder


@pytest.fixture
def config(config, start):
    config.run.init_from, config.model = str(start), random_model().config
    config.optim = replace(
        config.optim, optimizer="adamw", learning_rate=3e-3, max_steps=6, warmup_steps=0, schedule="constant"
    )
    config.data.batch_size = 8
    config.system = replace(config.system, compile="off")
    return config


LEARN = Preferences(pairs_of(10), pairs_of(4, seed=1), beta=0.3)


@pytest.mark.parametrize("seed", [1337, 2**62])  # the largest that a config may have
def test_every_pair_comes_once_an_epoch_chosen_above_rejected(config, seed):
    config.run.seed = seed
    with_pairs = Objective(loader=lambda run: PairLoader(run, LEARN))
    run = open_run(config, objective=with_pairs)
    rows, all_x = [], pair_rows(LEARN.pairs)[0].tolist()
    for _ in range(5):  # of 4 pairs each: two epochs of 10
        x, y = next(run.loader)
        assert y.shape == (*x.shape, 2)
        rows += [all_x.index(row) for row in x.tolist()]
    run.close()
    assert all(low % 2 == 0 and high == low + 1 for low, high in zip(rows[::2], rows[1::2]))
    first, second = rows[0:20:2], rows[20::2]
    assert sorted(first) == sorted(second) == list(range(0, 20, 2)) and first != second


def test_a_long_pair_lengthens_its_own_step_only_and_the_reference_judges_each_alone(config, tmp_path):
    save_checkpoint(tmp_path / "base", random_model(block_size=128), BYTE)
    config.run.init_from, config.model.block_size = str(tmp_path / "base"), 128
    pairs = [*LEARN.pairs[:7], ([97] * 60, [98] * 60, [99])]
    preferences = Preferences(pairs, LEARN.held_out)
    run = open_run(config, objective=Objective(loader=partial(PairLoader, preferences=preferences)))
    steps = [next(run.loader) for _ in range(2)]  # of 4 pairs: one epoch
    run.close()
    assert sorted(x.shape[1] for x, _ in steps) == [32, 119]
    reference = open_reference(run)
    seen = 0
    for x, y in steps:
        for row, packed in zip(x.view(-1, 2, x.shape[1]), y.view(-1, 2, x.shape[1], 2)):
            targets = packed[..., 0].long()
            wide = (targets != -100).any(0).nonzero().max() + 1
            with torch.no_grad():
                alone = answer_logps(reference, row[:, :wide], targets[:, :wide])
            torch.testing.assert_close(packed[..., 1].sum(1), alone, atol=1e-4, rtol=1e-5)
            seen += 1
    assert seen == len(pairs)


def test_the_reference_is_the_model_of_init_from_without_dropout(config, tmp_path):
    save_checkpoint(tmp_path / "drops", random_model(dropout=0.5), BYTE)
    config.run.init_from = str(tmp_path / "drops")
    run = open_run(config)
    x, targets = pair_rows(LEARN.pairs)
    with torch.no_grad():
        wanted = answer_logps(random_model(), x, targets)
        for p in run.model.parameters():  # as after some steps
            p.add_(0.1)
    logps = reference_logps(run, open_reference(run), x, targets)
    run.close()
    torch.testing.assert_close(logps.sum(1), wanted)
    assert (logps[targets == -100] == 0).all()


def test_a_pass_without_gradients_takes_no_more_rows_than_a_step_of_this_process(config):
    run = open_run(config)
    assert rows_at_once(run) == 8
    run.world = replace(run.world, world_size=2)
    assert rows_at_once(run) == 4
    run.config.data.micro_batch_size = 2
    assert rows_at_once(run) == 2
    run.close()


def test_training_begins_at_log_2_and_the_margin_grows(config):
    config.optim.max_steps = 30
    config.eval.eval_every = 15
    result = train(config, progress="none", objective=dpo_objective(LEARN))
    assert result.losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert result.losses[-1] < 0.4
    lines = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if "rewards/margins" in line} == {15, 30}
    assert json.loads((result.run / "pairs.json").read_text())["beta"] == 0.3


def test_the_first_loss_is_log_2_in_the_format_of_the_training_too(config):
    config.optim.max_steps, config.system.dtype = 1, "bfloat16"
    result = train(config, progress="none", objective=dpo_objective(LEARN))
    assert result.losses[0] == pytest.approx(math.log(2), abs=1e-5)


def test_the_step_is_the_gradient_of_the_mean_loss_also_in_micro_steps(config):
    config.optim.max_steps = 1
    whole = train(config, progress="none", objective=dpo_objective(LEARN))
    config.run.name, config.data.micro_batch_size = "parts", 2
    parts = train(config, progress="none", objective=dpo_objective(LEARN))
    for a, b in zip(whole.model.parameters(), parts.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert parts.losses == pytest.approx(whole.losses, abs=1e-6)


def test_a_resumed_run_is_the_uninterrupted_one(config):
    objective = dpo_objective(LEARN)
    whole = train(config, progress="none", objective=objective)
    config.run.name, config.optim.max_steps = "again", 3
    first = train(config, progress="none", objective=objective)
    config.optim.max_steps = 6
    rest = train(config, progress="none", objective=objective, resume=True)
    assert first.losses + rest.losses == whole.losses
    assert all(map(torch.equal, whole.model.parameters(), rest.model.parameters()))


def test_a_resume_with_other_pairs_or_another_reference_is_refused(config, start):
    train(config, progress="none", objective=dpo_objective(LEARN))
    config.optim.max_steps = 8
    other = replace(LEARN, pairs=pairs_of(10, seed=5))
    with pytest.raises(UserError, match="not the pairs that the run began with"):
        train(config, progress="none", objective=dpo_objective(other), resume=True)
    save_checkpoint(start.with_name("other"), random_model(1), BYTE)
    start.rename(start.with_name("moved"))
    start.with_name("other").rename(start)
    with pytest.raises(UserError, match="weights in .*start are not those"):
        train(config, progress="none", objective=dpo_objective(LEARN), resume=True)


def losses_on(world, configs):
    return [train(config, progress="none", objective=dpo_objective(LEARN)).losses for config in configs]


def test_two_processes_train_as_one(config):
    config.optim.max_steps = 3
    alone = train(config, progress="none", objective=dpo_objective(LEARN)).losses
    ways = []
    for way in ("ddp", "zero"):
        run, system = replace(config.run, name=way), replace(config.system, parallel=way)
        ways.append(replace(config, run=run, system=system))
    for ddp, zero in run_processes(losses_on, 2, ways):
        assert ddp == pytest.approx(alone, rel=1e-3, abs=1e-5)
        assert zero == pytest.approx(alone, rel=1e-3, abs=1e-5)


def test_the_figures_are_those_of_the_pairs():
    model, other = random_model(0), random_model(1)
    x, targets = pair_rows(LEARN.held_out)
    refs = -other(x, targets, reduction="none")[1].detach()
    y = torch.stack([targets.float(), refs], -1)
    figures = pair_figures(answer_logps(model, x, targets).detach(), refs.sum(1), 0.3)
    chosen, rejected, *both = pair_logps(model, x, y)
    assert figures["logps/chosen"] == pytest.approx(chosen.mean().item())
    margins = 0.3 * ((chosen - both[0]) - (rejected - both[1]))
    assert figures["rewards/margins"] == pytest.approx(margins.mean().item(), abs=1e-6)
    assert figures["rewards/accuracies"] == (margins > 0).float().mean()
    assert figures["pairs/loss"] == pytest.approx(
        np.log1p(np.exp(-margins.detach().numpy())).mean(), rel=1e-5
    )
    assert figures["pairs/loss"] == pytest.approx(dpo_rows(model, x, y, 0.3).item() / count_pairs(y).item())


def test_the_judge_asks_without_dropout_whatever_the_model_was_doing(config, tmp_path):
    model = random_model(dropout=0.5)
    save_checkpoint(tmp_path / "drops", model, BYTE)
    config.run.init_from, config.model = str(tmp_path / "drops"), model.config
    run = open_run(config)
    figures = PairJudge(LEARN)(run)
    assert run.model.training
    run.close()
    assert figures["pairs/loss"] == pytest.approx(math.log(2), abs=1e-6)


def passes_on(world, configs):
    "Of this process: how often each model was called, the figures, and the reference's log-probabilities."
    found = []
    for config in configs:
        run = open_run(config)
        reference, calls = open_reference(run), dict(reference=0, model=0)

        def count(name):
            return lambda *_: calls.update({name: calls[name] + 1})

        reference.register_forward_pre_hook(count("reference"))
        run.parallel.model.register_forward_pre_hook(count("model"))
        logps = reference_logps(run, reference, *pair_rows(LEARN.pairs))
        figures = PairJudge(LEARN)(run)
        run.close()
        found.append((calls, figures, logps))
    return found


@pytest.mark.slow
def test_processes_share_the_passes_and_all_get_all_results(config):
    config.data.micro_batch_size = 2
    config.data.batch_size = 12
    run = open_run(config)
    alone = PairJudge(LEARN)(run), reference_logps(run, open_reference(run), *pair_rows(LEARN.pairs))
    run.close()
    ways = []
    for way in ("ddp", "fsdp"):
        named, system = replace(config.run, name=way), replace(config.system, parallel=way)
        ways.append(replace(config, run=named, system=system))
    for rank in run_processes(passes_on, 3, ways):
        for calls, figures, logps in rank:
            # 20 rows in 10 passes, 8 in 4: of three processes, some have nothing left, and join in
            assert calls == dict(reference=4, model=2)
            assert figures == pytest.approx(alone[0], abs=1e-5)
            torch.testing.assert_close(logps, alone[1])


def test_before_the_first_step_the_judge_sees_no_margin(config):
    run = open_run(config)
    figures = PairJudge(LEARN)(run)
    run.close()
    assert figures["pairs/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert figures["rewards/margins"] == pytest.approx(0, abs=1e-5)


def test_passes_without_gradients_take_no_more_rows_than_a_micro_step(config):
    config.data.micro_batch_size = 2
    run = open_run(config)
    x, targets = pair_rows(LEARN.pairs)
    reference, rows = open_reference(run), []
    for model in (reference, run.model):
        model.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    found = reference_logps(run, reference, x, targets)
    PairJudge(LEARN)(run)
    run.close()
    assert set(rows) == {2} and len(rows) == 10 + 4
    torch.testing.assert_close(found.sum(1), answer_logps(random_model(), x, targets).detach())


def test_pairs_are_kept_once_and_known_by_their_hash(tmp_path):
    save_preferences(tmp_path, LEARN)
    kept = json.loads((tmp_path / "pairs.json").read_text())
    assert (
        fingerprint(Preferences(**kept))
        == fingerprint(LEARN)
        != fingerprint(replace(LEARN, pairs=pairs_of(3)))
    )
    save_preferences(tmp_path, replace(LEARN, beta=9.0))
    assert json.loads((tmp_path / "pairs.json").read_text()) == kept


def test_a_hash_of_weights_sees_one_bit_and_no_change_of_mode():
    model = random_model()
    before = weights_hash(model)
    assert weights_hash(random_model(0).train()) == before
    with torch.no_grad():
        model.wte.weight[0, 0] *= 1 + 2**-23
    assert weights_hash(model) != before


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(pairs=[([1], [2, 3], [2, 3])]), "pair 0 has the same answer twice"),
        (dict(pairs=[([1], [2], [3]), ([1], [], [3])]), "pair 1 has an empty prompt or answer"),
        (dict(pairs=[([], [1], [3])]), "pair 0 has an empty prompt or answer"),
        (dict(pairs=[([1] * 9, [2] * 9, [3])]), "pair 0 has 17 tokens, the context 16"),
        (dict(pairs=[]), "there are no pairs"),
        (dict(held_out=[]), "none to hold out"),
        (dict(held_out=[([1], [2], [2])]), "held-out pair 0 has the same answer twice"),
        (dict(beta=0.0), "beta = 0.0"),
        (dict(beta=math.inf), "beta = inf"),
    ],
)
def test_pairs_that_teach_nothing_are_refused_before_work_starts(config, change, sentence):
    with pytest.raises(UserError, match=sentence):
        train(config, progress="none", objective=dpo_objective(replace(LEARN, **change)))
    assert not config.folder.exists()


@pytest.mark.parametrize(
    "rows, micro, sentence", [(7, None, "batch_size = 7"), (8, 3, "micro_batch_size = 3")]
)
def test_a_batch_that_splits_a_pair_is_refused(config, rows, micro, sentence):
    config.data.batch_size, config.data.micro_batch_size = rows, micro
    with pytest.raises(UserError, match=f"{sentence} splits a pair"):
        train(config, progress="none", objective=dpo_objective(LEARN))
    assert "for each of 4 processes" in batch_problems(12, None, world_size=4)[0]
    assert batch_problems(16, 4, world_size=4) == LEARN.problems(16) == []


def test_without_a_model_to_begin_with_there_is_no_reference(config):
    config.run.init_from = ""
    with pytest.raises(UserError, match="init_from is empty"):
        train(config, progress="none", objective=dpo_objective(LEARN))
