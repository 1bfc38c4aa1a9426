"""The trainer on several processes: the same run as on one, whichever way it is spread.

Stopped and resumed; all ranks of one mind.
"""

import io
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from events import LAST_RESORT, first_of_two, wait_until
from lion import Lion
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from two_hosts import TwoHosts, why_not

import tinygpt.accumulate as accumulate_module
import tinygpt.ddp.world as ddp_world
import tinygpt.run.loop as loop_module
import tinygpt.run.setup as run_setup
from tinygpt.checkpoint import checkpoints
from tinygpt.compile import compile_model
from tinygpt.ddp.agree import on_all, on_first
from tinygpt.ddp.world import World, run_processes
from tinygpt.model import GPT, GPTConfig
from tinygpt.precision import Policy
from tinygpt.run.parallel import (
    FSDP,
    Single,
    Zero,
    choose_parallel,
    optimizer_groups,
)
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import Objective
from tinygpt.support import UserError
from tinygpt.train import train

SAVING = {
    "ddp": dict(checkpoint_activations=True, loss_chunk=20),
    "zero": dict(loss_chunk=20),
    "fsdp": dict(checkpoint_activations=True, loss_chunk=20),
}  # for AdamW
WAYS = [("ddp", "adamw"), ("zero", "adamw"), ("fsdp", "adamw"), ("ddp", "muon"), ("zero", "muon")]
RESUMED = [
    ("ddp", "muon", "shard"),
    ("zero", "adamw", "shard"),
    ("zero", "muon", "random"),
    ("ddp", "adamw", "random"),
    ("zero", "muon", "stream"),
    ("ddp", "adamw", "stream"),
]


def make_config(folder, words, name, optimizer="adamw", parallel="auto", steps=24, dropout=0.0, **data):
    config = preset("laptop")
    config.run.out, config.run.name = str(folder), name
    # float32: the same on every CPU
    config.system = replace(config.system, device="cpu", parallel=parallel, dtype="float32")
    if optimizer == "adamw":
        config.system = replace(config.system, **SAVING.get(parallel, {}))
    config.data = replace(
        config.data, source=str(words), tokenizer="byte", batch_size=12, micro_batch_size=2, **data
    )
    config.model = GPTConfig.llama(
        vocab_size=257, block_size=16, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, dropout=dropout
    )
    config.optim = replace(
        config.optim, optimizer=optimizer, learning_rate=3e-3, max_steps=steps, warmup_steps=2, clip=0.5
    )
    config.eval = replace(
        config.eval,
        eval_every=20,
        eval_tokens=300,
        final_eval_tokens=2000,
        save_every=0,
        sample_tokens=3,
        log_every=7,
        keep=10,
    )
    return config


def weights(model):
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double()
        for n, p in model.named_parameters()
    }


def run_ways(world, folder, words, ways):
    "Losses, validation loss and weights of each way, on this rank."
    found = {}
    for parallel, optimizer in ways:
        result = train(
            make_config(folder, words, f"{parallel}-{optimizer}-{world.world_size}", optimizer, parallel),
            progress="none",
        )
        found[parallel, optimizer] = result.losses, result.val.loss, weights(result.model)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    "(a folder for runs, a text file); beside the text its lines as documents."
    folder = tmp_path_factory.mktemp("parallel")
    path = folder / "words.txt"
    lines = [
        f"The {i % 17}th of {i % 12} months is a good day for number {i}. Or is it?\n" for i in range(300)
    ]
    path.write_text("".join(lines), encoding="utf-8")
    path.with_suffix(".jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8"
    )
    return folder, path


@pytest.fixture(scope="module")
def alone(place):
    "What one process gets, for each optimizer."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    results = {o: train(make_config(*place, f"alone-{o}", o), progress="none") for o in ("adamw", "muon")}
    torch.set_num_threads(before)
    return {o: (r.losses, r.val.loss, weights(r.model)) for o, r in results.items()}


# the micro-steps of 2 rows on a rank: three on two processes, two on three, two of different sizes on four
@pytest.mark.slow
@pytest.mark.parametrize("size, ways", [(2, [("fsdp", "adamw"), ("zero", "muon")]), (3, WAYS), (4, WAYS)])
def test_every_way_of_training_gives_the_losses_of_one_process(place, alone, size, ways):
    ranks = run_processes(run_ways, size, *place, ways, timeout=1000)
    for (parallel, optimizer), (losses, val, model) in ranks[0].items():
        expected, expected_val, expected_model = alone[optimizer]
        assert len(losses) == 24 and losses[-1] < losses[0] - 1
        assert losses == pytest.approx(expected, abs=1e-4), (parallel, optimizer)
        assert losses[:10] == pytest.approx(expected[:10], abs=1e-5), (parallel, optimizer)
        assert val == pytest.approx(expected_val, abs=1e-4)
        assert max((model[n] - expected_model[n]).abs().max() for n in model) < 1e-3, (parallel, optimizer)
        for other in ranks[1:]:
            assert other[parallel, optimizer][:2] == (losses, val)
            assert all(torch.equal(other[parallel, optimizer][2][n], model[n]) for n in model)


def test_a_sum_of_losses_is_divided_by_what_counts_for_its_own_objective(place):
    way = Single(GPT(make_config(*place, "count", "adamw").model), World())
    y = torch.tensor([[1, -100, 3], [-100, 5, 6]])
    assert way.share_of_targets(y).item() == 4
    assert way.share_of_targets(y, lambda y: (y == 3).sum()).item() == 1


def test_a_count_that_an_objective_gives_twice_is_the_same_number_in_each_step(place, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_: tensor.mul_(2))  # the other rank has as many
    way = Single(GPT(make_config(*place, "counts", "adamw").model), World(0, 0, 2, torch.device("cpu")))
    always = torch.tensor(8.0)  # its own, for every batch
    assert [way.share_of_targets(torch.zeros(2, 4), lambda y: always).item() for _ in range(3)] == [8, 8, 8]


def test_an_optimizer_of_ones_own_is_refused_by_name_where_its_state_would_be_divided(config):
    config.optim.optimizer = "lion"
    alone = Zero(GPT(config.model), World(0, 0, 1, torch.device("cpu")))
    told = "optimizer = lion with parallel = zero, .* adamw and muon only: use --parallel ddp"
    with pytest.raises(UserError, match=told):
        alone.make_optimizer(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_muon_gets_its_settings_and_the_format_of_the_run(place, dtype):
    config = make_config(*place, "settings", "muon")
    config.optim.muon_weight_decay, config.optim.weight_decay = 0.3, 0.2
    model = GPT(config.model)
    for Way in (Single, Zero):
        way = Way(model, World(), dtype=getattr(torch, dtype))
        line = way.make_optimizer(config)
        muon, adamw = way.optimizer.optimizers
        assert muon.dtype == getattr(torch, dtype) and f"({dtype} Newton-Schulz)" in line
        assert {group["weight_decay"] for group in muon.param_groups} == {0.3}
        assert [group["weight_decay"] for group in adamw.param_groups] == [0.2, 0.0]


def run_with_a_broken_compiler_on_one_rank(world, config):
    "What it says on stderr. (It starts in a server's process, whose stderr is not the test's.)"

    def full_disk(graph, inputs):
        raise OSError("No space left on device")

    sys.stderr = said = io.StringIO()
    loop_module.compile_model = partial(compile_model, backend="eager" if world.is_main else full_disk)
    train(config, progress="none")
    config.run.name = "another"
    line = "compiled" if world.is_main else "not compiled: no C++ compiler"
    loop_module.compile_model = lambda module, *_: (module, line)
    train(config, progress="none")
    return said.getvalue().splitlines()


def test_a_rank_that_does_not_compile_says_so_with_its_number(tmp_path, words):
    config = make_config(tmp_path, words, "broken", parallel="zero", steps=4)
    config.system = replace(config.system, compile="on", loss_chunk=0)
    said = run_processes(run_with_a_broken_compiler_on_one_rank, 2, config, timeout=LAST_RESORT)
    first, lines = ([line for line in rank if "not compiled" in line] for rank in said)
    assert not first and len(lines) == 2 and lines[1] == "rank 1: not compiled: no C++ compiler"
    assert lines[0].startswith("rank 1: not compiled, continuing without:") and "No space left" in lines[0]


def run_in_bfloat16(world, folder, words):
    config = make_config(
        folder,
        words,
        f"bf16-{world.world_size}",
        "muon",
        "zero" if world.world_size > 1 else "auto",
        steps=12,
    )
    config.system.dtype = "bfloat16"
    return train(config, progress="none").losses


@pytest.mark.slow
def test_in_bfloat16_too_several_processes_give_the_losses_of_one(place, alone):
    (one, _), short = (
        run_processes(run_in_bfloat16, 2, *place, timeout=1000),
        run_in_bfloat16(World(), *place),
    )
    assert short != alone["muon"][0][:12], "it was another format"
    assert one == pytest.approx(short, abs=5e-3)  # its rounding: 2**-9 of each number in a product


def in_bfloat16(folder, words, name, parallel):
    "Settings of a run that saves in its middle, writes samples, and validates."
    config = make_config(folder, words, name, "adamw", parallel, steps=12)
    config.system.dtype = "bfloat16"
    config.eval = replace(config.eval, save_every=6, eval_every=6)
    return config


def spread_in_bfloat16(world, folder, words):
    "Losses of runs with DDP and FSDP; of both that go on from the other's checkpoint, and from their own."
    begun = {}
    for way in ("ddp", "fsdp"):
        result = train(in_bfloat16(folder, words, f"begun-{way}", way), progress="none")
        begun[way] = result.losses, result.val.loss, weights(result.model)
    gone_on = {}
    for first, then in (("fsdp", "ddp"), ("ddp", "fsdp"), ("fsdp", "fsdp")):
        config = in_bfloat16(folder, words, f"{first}-then-{then}", then)
        if world.is_main:
            shutil.copytree(folder / f"begun-{first}", config.folder)
            shutil.rmtree(checkpoints(config.folder)[-1])
        on_all(world, lambda: None)
        result = train(config, resume=True, progress="none")
        gone_on[first, then] = result.losses, weights(result.model)
    return begun, gone_on


@pytest.mark.slow
def test_a_run_in_bfloat16_is_the_same_where_the_weights_are_spread_and_goes_on_in_any_way(place):
    folder, words = place
    one = train(in_bfloat16(folder, words, "one", "auto"), progress="none")
    ranks = run_processes(spread_in_bfloat16, 2, folder, words, timeout=1000)
    for begun, gone_on in ranks:
        losses, val, model = begun["fsdp"]
        assert losses == pytest.approx(one.losses, abs=5e-3) == begun["ddp"][0]
        assert val == pytest.approx(one.val.loss, abs=5e-3)
        for way, (later, _) in gone_on.items():
            assert later == pytest.approx(losses[6:], abs=5e-3), way
        later, same = gone_on["fsdp", "fsdp"]
        assert later == losses[6:] and all(torch.equal(same[name], model[name]) for name in model)
    saved = load_file(checkpoints(folder / "begun-fsdp")[-1] / "model.safetensors")
    assert saved.keys() == model.keys() and {t.dtype for t in saved.values()} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in saved.values())
    assert (folder / "begun-fsdp/samples.txt").read_text().count("--- step") == 2
    config = in_bfloat16(folder, words, "fsdp-then-one", "auto")
    shutil.copytree(folder / "begun-fsdp", config.folder)
    shutil.rmtree(checkpoints(config.folder)[-1])
    assert train(config, resume=True, progress="none").losses == pytest.approx(one.losses[6:], abs=5e-3)


def watch_whole_tensors():
    """A list that gets, for each tensor that is made whole from now on, the bytes of all those still held.

    The storages are asked: on a busy machine gloo's threads release some, and no profiler sees that.
    """
    from torch.distributed.tensor import DTensor  # takes seconds

    made, held = [], []
    full_tensor = DTensor.full_tensor

    def watched(self):
        whole = full_tensor(self)
        made.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        held.append(sum(nbytes for storage, nbytes in made if not storage.expired()))
        return whole

    DTensor.full_tensor = watched
    return held


def whole_on_first(world, config):
    "What a rank has when weights and optimizer state are brought together, and the most it had meanwhile."
    torch.manual_seed(0)
    way = FSDP(GPT(config.model), world)
    way.make_optimizer(config)
    x = torch.zeros(1, 16, dtype=torch.int64)
    for _ in range(2):
        with way.no_sync():
            way.module(x, x)[1].backward()
        spread = all(p.grad is not None for p in way.model.parameters())  # whole ones wait inside FSDP2
        way.module(x, x)[1].backward()
        way.optimizer.step()
        way.optimizer.zero_grad()
    held = watch_whole_tensors()
    found = dict(weights=way.weights(), state=way.optimizer_state())
    peak = max(held)
    names = [name for name, _ in way.model.named_parameters()]
    parts = [getattr(p, "full_tensor", p.clone)().detach() for p in way.model.parameters()]
    return found, dict(zip(names, parts)), peak, spread


def test_only_rank_0_has_whole_weights_and_states_for_a_checkpoint_and_no_rank_whole_gradients(place):
    config = make_config(*place, "first", "adamw", "fsdp")
    config.model.n_layer = 8
    found = run_processes(whole_on_first, 2, config, timeout=1000)
    (first, model, peak, spread), (second, _, other_peak, spread_too) = found
    assert spread and spread_too, "also between micro-steps"
    assert first["weights"].keys() == model.keys()
    assert all(torch.equal(first["weights"][name], t) for name, t in model.items())
    states = first["state"]["state"].values()
    assert sorted(s["exp_avg"].shape for s in states) == sorted(t.shape for t in model.values())
    assert second["weights"] == {} and not any(second["state"]["state"].values())
    whole = 3 * sum(t.nbytes for t in model.values())
    assert peak > 0.9 * whole and other_peak < whole / 4  # a tensor or two, as they come


def run_and_resume(world, folder, words, ways):
    """For each way, what a whole run and one that stopped at step 7 and went on have in common.

    (losses of the one, losses of the other, whether the weights are the same bits).
    """
    found = {}
    for parallel, optimizer, loader in ways:
        name = f"whole-{parallel}-{optimizer}-{loader}-{world.world_size}"
        source = words.with_suffix(".jsonl") if loader == "stream" else words
        config = make_config(folder, source, name, optimizer, parallel, 20, dropout=0.2, loader=loader)
        config.eval = replace(config.eval, save_every=7)
        whole = train(config, progress="none")
        config.run.name = "stopped" + config.run.name
        if world.is_main:
            shutil.copytree(whole.run, config.folder)
            for later in checkpoints(config.folder)[1:]:
                shutil.rmtree(later)
        on_all(world, lambda: None)
        resumed = train(config, resume=True, progress="none")
        same = all(
            torch.equal(a, b) for a, b in zip(weights(whole.model).values(), weights(resumed.model).values())
        )
        found[parallel, optimizer, loader] = whole.losses[7:], resumed.losses, same
    return found


def test_the_norm_of_a_run_is_that_of_what_its_optimizer_trains():
    model = GPT(GPTConfig(vocab_size=9, block_size=4, n_layer=1, n_head=1, n_embd=4))
    single = Single(model, World(), 0, torch.float32)
    single.optimizer = torch.optim.SGD([model.ln_f.weight], lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert single.clip(0.0) == model.ln_f.weight.grad.norm()


# on two processes a sum rounds in one way only, on three the order counts
@pytest.mark.slow
@pytest.mark.parametrize("size, ways", [(2, RESUMED[3:5]), (3, RESUMED)])
def test_a_resumed_run_on_several_processes_equals_the_uninterrupted_one_bit_for_bit(place, size, ways):
    for rank in run_processes(run_and_resume, size, *place, ways, timeout=1000):
        for way, (whole, resumed, same) in rank.items():
            assert resumed == whole and same, way


def own_optimizer(world, folder, words):
    "For each way, the losses of a run with Lion, whole and resumed at step 7; what zero says."
    own = Objective(
        optimizer=lambda run: Lion(optimizer_groups(run.config, run.model), {}),
        schedule=lambda run: lambda step: 1 / (1 + step),
    )
    found = {}
    for way in ("auto",) if world.world_size == 1 else ("ddp", "fsdp", "zero"):
        config = make_config(folder, words, f"lion-{way}-{world.world_size}", "adamw", way, 14)
        config.eval = replace(config.eval, save_every=7)
        try:
            whole = train(config, progress="none", objective=own).losses
        except UserError as error:
            found[way] = str(error), config.folder.exists()
            continue
        on_first(world, lambda run=config.folder: shutil.rmtree(checkpoints(run)[-1]))
        found[way] = whole, train(config, resume=True, progress="none", objective=own).losses
    return found


@pytest.mark.slow
def test_an_optimizer_of_ones_own_trains_on_several_processes_and_zero_refuses_it(place):
    [one] = run_processes(own_optimizer, 1, *place, timeout=1000)
    for rank in run_processes(own_optimizer, 2, *place, timeout=1000):
        assert rank.pop("zero") == (
            "parallel = zero shards AdamW and Muon only, not an optimizer of your own: use ddp or fsdp",
            False,  # nothing is written
        )
        for whole, resumed in rank.values():
            assert resumed == whole[7:]
            assert whole == pytest.approx(one["auto"][0], abs=1e-3)  # a sign turns where a sum is rounded


def resume_all(world, folder, words, names):
    "The losses of runs that go on on this number of processes."
    found = {}
    for name, parallel, optimizer in names:
        config = make_config(folder, words, f"{name}-on-{world.world_size}", optimizer, parallel)
        if world.is_main:
            shutil.copytree(folder / name, config.folder)
            for later in checkpoints(config.folder)[1:]:
                shutil.rmtree(later)
        on_all(world, lambda: None)
        found[name, parallel] = train(config, resume=True, progress="none").losses
    return found


def begin_all(world, folder, words, names):
    for name, parallel, optimizer in names:
        config = make_config(folder, words, name, optimizer, parallel)
        config.eval = replace(config.eval, save_every=12)
        train(config, progress="none")


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_processes_and_in_another_way(place, alone):
    folder, words = place
    begun = [
        ("zero-a", "zero", "adamw"),
        ("zero-m", "zero", "muon"),
        ("ddp-m", "ddp", "muon"),
        ("fsdp-a", "fsdp", "adamw"),
    ]
    run_processes(begin_all, 2, folder, words, begun, timeout=1000)
    on_three = run_processes(
        resume_all,
        3,
        folder,
        words,
        [("zero-a", "fsdp", "adamw"), ("zero-m", "zero", "muon"), ("fsdp-a", "zero", "adamw")],
        timeout=1000,
    )[0]
    on_one = resume_all(World(), folder, words, [(n, "auto", o) for n, _, o in begun])
    for (name, way), losses in [*on_three.items(), *on_one.items()]:
        expected = alone["adamw" if name.endswith("-a") else "muon"][0][12:]
        assert losses == pytest.approx(expected, abs=2e-4), (name, way)


def bad_things(world, folder, words):
    """What one rank meets or does wrong.

    A signal that only rank 1 gets; a NaN that only rank 1 meets; a folder that is there already; a batch that
    does not divide.
    """
    found = {}
    config = make_config(folder, words, "signalled", steps=30)
    count, old = [0], accumulate_module.accumulate_gradients

    def signal_at_5(*args, **kw):
        count[0] += 1
        if count[0] == 5 and world.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return old(*args, **kw)

    accumulate_module.accumulate_gradients = signal_at_5
    result = train(config, progress="none")
    found["signalled"] = result.steps, result.finished, [c.name for c in checkpoints(config.folder)]

    def poison_at_3(*args, **kw):
        count[0] += 1
        scale = args[6] if count[0] != 3 or world.rank == 0 else lambda loss: loss * math.nan
        return old(*args[:6], scale, *args[7:], **kw)

    count[0] = 0
    accumulate_module.accumulate_gradients = poison_at_3
    config = make_config(folder, words, "poisoned", "adamw", "zero", steps=6)
    model = train(config, progress="none").model
    found["poisoned"] = all(bool(p.isfinite().all()) for p in model.parameters())
    accumulate_module.accumulate_gradients = old
    for name, change in {"exists": {}, "uneven": dict(name="uneven", batch_size=13)}.items():
        config.run.name = change.pop("name", config.run.name)
        config.data = replace(config.data, **change)
        try:
            train(config, progress="none")
        except UserError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
def test_a_signal_or_a_mistake_on_one_rank_is_one_on_all(place):
    for found in run_processes(bad_things, 2, *place, timeout=1000):
        assert found["signalled"] == (5, False, ["step_000005"])
        assert found["poisoned"]
        assert "exists: continue it with --resume" in found["exists"]
        assert "batch_size = 13" in found["uneven"]


def scaled_runs(world, folder, words):
    """For each way: (scale, losses, weights) of a run with a loss scaler.

    Rank 1 alone meets an overflow in step 3.
    """
    found, count, old = {}, [0], accumulate_module.accumulate_gradients
    # float16 itself needs a GPU
    policy = Policy(world.device, torch.float32, "for a test", scaler=True)
    run_setup.choose_policy = lambda *_: policy

    def overflow_at_3(*args, **kw):
        count[0] += 1
        scale = args[6] if count[0] != 3 or world.rank == 0 else lambda loss: loss * math.inf
        return old(*args[:6], scale, *args[7:], **kw)

    accumulate_module.accumulate_gradients = overflow_at_3
    for parallel, optimizer in [("ddp", "adamw"), ("zero", "adamw"), ("zero", "muon")]:
        count[0] = 0
        config = make_config(folder, words, f"scaled-{parallel}-{optimizer}", optimizer, parallel, steps=8)
        result = train(config, progress="none")
        scales = (
            [line["loss_scale"] for line in read_metrics(config.folder) if "loss_scale" in line]
            if world.is_main
            else None
        )
        found[parallel, optimizer] = scales and scales[-1], result.losses, weights(result.model)
    return found


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_step_and_halves_the_scale_on_all(place):
    first, second = run_processes(scaled_runs, 2, *place, timeout=1000)
    for way, (scale, losses, model) in first.items():
        assert scale == 2.0**15, way
        assert (
            all(map(math.isfinite, losses))
            and losses[3] == pytest.approx(losses[2], abs=0.5)
            and losses[-1] < losses[0]
        )
        assert second[way][1] == losses and all(
            torch.equal(second[way][2][n], model[n]) and model[n].isfinite().all() for n in model
        ), way


def test_one_process_is_always_the_single_way_and_says_how_to_get_more():
    for name in ("auto", "ddp", "zero", "fsdp"):
        chosen, line = choose_parallel(name, World())
        assert chosen is Single and ("torchrun" in line) == (name != "auto")


def test_float16_that_auto_takes_is_refused_where_the_weights_are_spread(place, monkeypatch):
    config = make_config(*place, "auto", "adamw", "fsdp")
    config.system.dtype = "auto"
    assert not any("float16" in p for p in config.problems())
    policy = Policy(torch.device("cpu"), torch.float16, "as on a GPU without bfloat16", scaler=True)
    monkeypatch.setattr("tinygpt.run.config.choose_policy", lambda *_: policy)
    assert any("fsdp does not go with dtype = float16" in p for p in config.problems())


@pytest.mark.parametrize(
    "parallel, optimizer, dtype, refused",
    [
        ("ddp", "adamw", "float32", ""),
        ("zero", "adamw", "float32", ""),
        ("fsdp", "adamw", "float32", ""),
        ("ddp", "muon", "float32", ""),
        ("zero", "muon", "float32", ""),
        ("fsdp", "muon", "float32", "Muon needs whole matrices"),
        ("fsdp", "adamw", "float16", "loss scaler does not know sharded gradients"),
    ],
)
def test_the_table_of_what_combines_with_what(place, parallel, optimizer, dtype, refused):
    config = make_config(*place, "table", optimizer, parallel)
    config.system.dtype = dtype
    problems = [p for p in config.problems() if "parallel" in p]
    assert bool(problems) == bool(refused) and all(refused in p for p in problems)


def unlike(world, folder, words):
    "What is said where rank 1 differs: in a setting, its text, what its processor can, what is installed."
    other = folder / "other-words.txt"
    if world.is_main:
        other.write_text(words.read_text(encoding="utf-8") + "One line more.\n", encoding="utf-8")
    dist.barrier()
    old = run_setup.choose_policy
    said = {}
    for what in ("settings", "command", "text", "dtype", "versions", "nothing"):
        config = make_config(folder, words, f"unlike-{what}", steps=4)
        how = dict(progress="none")
        if world.rank == 1:
            config.run.out = str(folder / "." if what == "nothing" else folder)  # a machine has its own
            if what == "settings":
                config.optim.max_steps, config.run.seed = 3, 5
            if what == "command":
                how["resume"] = "auto"
            if what == "text":
                config.data.source = str(other)
            if what == "dtype":
                run_setup.choose_policy = lambda device, name: old(device, "bfloat16")
            if what == "versions":
                np.__version__, kept = "1.0", np.__version__
        try:
            said[what] = train(config, **how).steps
        except UserError as error:
            said[what] = str(error), error.agreed, config.folder.exists()
        run_setup.choose_policy = old
        if what == "versions" and world.rank == 1:
            np.__version__ = kept
    return said


@pytest.mark.slow
def test_ranks_that_would_train_different_things_are_refused_on_all_before_anything_is_written(place):
    "They would run on, each on its own, or wait for each other."
    first, second = run_processes(unlike, 2, *place, timeout=1000)
    assert first == second and first.pop("nothing") == 4
    begins = {
        "settings": "max_steps = 3 on rank 1, 4 on rank 0; seed = 5 on rank 1, 1337 on rank 0: start all",
        "command": "resume = auto on rank 1, False on rank 0: start all of them with the same command",
        "text": "text = ",
        "dtype": "dtype = torch.bfloat16 on rank 1, torch.float32 on rank 0: --dtype float32 works",
        "versions": "numpy = 1.0 on rank 1, ",
    }
    for what, (sentence, agreed, written) in first.items():
        assert sentence.startswith(f"not the same on all ranks: {begins[what]}"), sentence
        assert agreed and not written


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def flags(place, name, *more):
    folder, words = place
    sizes = "--tokenizer byte --batch-size 12 --block-size 16 --n-layer 2 --n-head 2 --n-embd 32"
    steps = "--warmup-steps 2 --eval-every 0 --sample-tokens 0 --log-every 5"
    return [
        "-m",
        "tinygpt.train",
        "--data",
        str(words),
        "--out",
        str(folder),
        "--name",
        name,
        "--device",
        "cpu",
        *sizes.split(),
        *steps.split(),
        *more,
    ]


@pytest.mark.slow
def test_the_command_trains_under_torchrun_and_prints_everything_once(place):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TORCHRUN, "2", *flags(place, "torchrun", "--parallel", "zero", "--max-steps", "12")],
        env=env,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("write more with:") == 1
    assert len([line for line in read_metrics(place[0] / "torchrun") if "loss" in line]) == 12
    again = subprocess.run(
        [*TORCHRUN, "2", *flags(place, "torchrun", "--max-steps", "12")],
        env=env,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (
        again.returncode != 0
        and again.stderr.count("error: ") == 1
        and "continue it with --resume" in again.stderr
    )


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_command_of_the_readme_for_two_machines_trains_on_two_hosts(place):
    folder, words = place
    lines = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines if line.startswith("torchrun --nnodes 2")).replace(
        "node0", TwoHosts.hosts[0]
    )
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 1")  # no GPUs here
    documents = folder / "documents.jsonl"
    texts = words.read_text().split("\n")
    documents.write_text(
        "".join(json.dumps({"text": f"{i}: {text}"}) + "\n" for i, text in enumerate(texts * 5))
    )
    sizes = "--tokenizer byte --batch-size 4 --micro-batch-size 2 --block-size 16 --n-layer 2 --n-head 2"
    steps = "--n-embd 32 --max-steps 6 --warmup-steps 2 --sample-tokens 0"
    args = [
        *shlex.split(command)[1:],
        "--data",
        documents,
        "--out",
        folder,
        "--name",
        "hosts",
        "--device",
        "cpu",
        *sizes.split(),
        *steps.split(),
    ]
    with TwoHosts() as hosts:
        started = [hosts.start(host, sys.executable, "-m", "torch.distributed.run", *args) for host in (0, 1)]
        first, second = hosts.finish(started, LAST_RESORT)
    assert first.returncode == second.returncode == 0, first.stdout[-3000:] + second.stdout[-3000:]
    assert "ddp on 2 processes" in first.stdout + second.stdout
    assert [line["step"] for line in read_metrics(folder / "hosts") if "loss" in line] == list(range(6))


def workers_of(folder, name):
    "rank -> pid of the processes that train this run (torchrun gives each a session of its own)."
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            env = dict(
                v.split("=", 1) for v in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in v
            )
        except OSError:
            continue
        if "RANK" in env and str(folder) in words and name in words:
            found[int(env["RANK"])] = int(pid)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds the processes of a run in /proc")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_a_survivor_names_it_and_the_checkpoint(place, victim):
    name, env = f"killed{victim}", os.environ | {"OMP_NUM_THREADS": "1"}
    steps = ["--max-steps", "100000", "--save-every", "5", "--keep", "2"]
    command = [*TORCHRUN, "2", *flags(place, name, *steps)]
    run = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: checkpoints(place[0] / name), run, "the first checkpoint")
        workers = workers_of(place[0], name)
        os.kill(workers[victim], signal.SIGKILL)
        output, _ = run.communicate(timeout=LAST_RESORT)  # the collectives would wait for 30 minutes
        assert run.returncode != 0
    finally:
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        run.wait()
    line = next(line for line in output.splitlines() if f"rank {victim} (" in line)
    assert (
        f"pid {workers[victim]}" in line
        and f"checkpoints{os.sep}step_" in line
        and f"--resume {place[0] / name}" in line
    )
    assert output.index(line) < output.index("ChildFailedError")


# rank 1 stands still before the first step: when all have met, or while it reads its data
STANDS_STILL = """
import os
import signal
import sys

import tinygpt.run.setup as setup
import tinygpt.train as trainer

where, *argv = sys.argv[1:]
init_world, open_run_data, watchdog = trainer.init_world, setup.open_run_data, trainer.Watchdog


def stop_at(place):
    if place == where and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)


def meeting(*args, **kw):
    world = init_world(*args, **kw)
    os.environ["TINYGPT_MEETING"] = "2"  # seconds, of what comes after
    stop_at("met")
    return world


def reading(*args):
    stop_at("reading")
    return open_run_data(*args)


trainer.init_world, setup.open_run_data = meeting, reading
trainer.Watchdog = lambda world, words, patience: watchdog(world, words, patience=3)
sys.exit(trainer.main(argv))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGSTOP")
@pytest.mark.parametrize(
    "where, status, told",
    [("met", 2, "waiting for 1 of 2 processes"), ("reading", 1, "no sign of life for 3 s")],
)
def test_a_rank_that_stands_still_before_the_first_step_ends_the_others(tmp_path, words, where, status, told):
    "In the collectives they would wait for half an hour."
    (tmp_path / "script.py").write_text(STANDS_STILL)
    argv = [sys.executable, "script.py", where, "--data", words, "--tokenizer", "byte", "--device", "cpu"]
    ended, said = first_of_two(argv, cwd=tmp_path)
    assert told in said and "rank 1" in said and "Traceback" not in said, said
    assert ended == status and not (tmp_path / "runs/laptop").exists()


def slow_to_read(world, folder, words):
    "Rank 0 prepares its text for longer than the others would wait in a step, here four seconds."
    limits = []
    read, set_timeout, check_memory = run_setup.open_run_data, ddp_world.set_timeout, run_setup.check_memory

    def short_patience(*args):  # what comes right before the text
        if not limits:
            dist.barrier()
            set_timeout(4)
        check_memory(*args)

    def reading(*args):
        if world.is_main:
            time.sleep(9)
        return read(*args)

    def new_limit(seconds):
        limits.append(seconds)
        set_timeout(LAST_RESORT)

    run_setup.check_memory, run_setup.open_run_data = short_patience, reading
    ddp_world.set_timeout = new_limit
    run = run_setup.begin_run(make_config(folder, words, "slow"), world=world)
    return limits, len(run.data.train)


@pytest.mark.slow
def test_ranks_wait_for_one_that_prepares_a_long_text_and_only_there(place):
    first, second = run_processes(slow_to_read, 2, *place, timeout=LAST_RESORT)
    assert first == second and first[0] == [86400, 1800] and first[1] > 0


def refused_alike(world, folder, words):
    "Mistakes that every rank finds by itself, and whether each is marked as one that all ranks know."
    found = {}

    def ask(name, change=lambda config: None, **how):
        config = make_config(folder, words, name, parallel="zero" if "lion" in name else "ddp", steps=12)
        change(config)
        try:
            return train(config, progress="none", **how)
        except UserError as error:
            found[str(error)[:20]] = getattr(error, "agreed", False)

    def fewer_steps(config):
        config.optim.max_steps = 5

    def another_mask(config):
        config.data.mask_documents = True

    def all_logits(config):
        config.system.loss_chunk = 0

    ask("alike")
    ask("alike", fewer_steps, resume=True)
    ask("alike", another_mask, resume=True)
    ask("alike-lion", objective=Objective(optimizer=lambda run: Lion(run.model.parameters())))
    nan = Objective(loss_fn=lambda module, x, y: module(x, y, reduction="sum")[1] * math.nan)
    ask("alike-chunks", objective=nan)
    ask("alike-nan", all_logits, objective=nan)
    return found


@pytest.mark.slow
def test_no_rank_is_said_to_have_failed_for_a_mistake_that_all_ranks_find(place):
    first, second = run_processes(refused_alike, 2, *place, timeout=LAST_RESORT)
    assert first == second and list(first.values()) == [True] * 5, first
