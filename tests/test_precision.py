"""The policy for each machine, and the loss scaler against torch's, bit for bit."""

import contextlib
import functools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.ddp.world import run_processes
from tinygpt.precision import (
    LossScaler,
    Policy,
    auto_dtype,
    choose_device,
    choose_policy,
    cpu_has_bf16,
    next_scale,
    unscale_gradients,
)
from tinygpt.support import UserError


class FakeCuda:
    "Makes torch say that it has GPUs, with bfloat16 or without."

    def __init__(self, monkeypatch, bf16):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a pretend GPU")
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        # emulation makes the default answer yes on every GPU: only the strict question counts
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation
        )


@pytest.mark.parametrize(
    "bf16, asked, dtype, scaler, matmul",
    [
        (True, "auto", torch.bfloat16, False, "high"),
        (False, "auto", torch.float16, True, "high"),
        (True, "float16", torch.float16, True, "high"),
        (True, "float32", torch.float32, False, "highest"),
    ],
)
def test_a_gpu_gets_the_format_that_its_hardware_has(monkeypatch, switch, bf16, asked, dtype, scaler, matmul):
    FakeCuda(monkeypatch, bf16)
    policy = choose_policy("auto", asked)
    assert (policy.device.type, policy.dtype, policy.scaler) == ("cuda", dtype, scaler)
    policy.apply()
    assert switch() == matmul
    assert policy.tf32 == (matmul == "high") == ("TF32" in str(policy)), "what is set for TF32 is said"


@pytest.mark.parametrize("now", ["highest", "high", "medium"])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16"])
def test_choosing_a_policy_or_checking_a_config_leaves_a_live_runs_switch_alone(
    monkeypatch, switch, config, now, asked
):
    FakeCuda(monkeypatch, bf16=True)
    torch.set_float32_matmul_precision(now)
    for device in ("cuda", "cpu"):
        choose_policy(device, asked)
        config.system = replace(config.system, device=device, dtype=asked)
        config.check()
        assert switch() == now


def test_the_policy_applied_last_holds_in_either_order(monkeypatch, switch):
    FakeCuda(monkeypatch, bf16=True)
    rounding, exact, on_cpu = choose_policy("cuda"), choose_policy("cuda", "float32"), choose_policy("cpu")
    for policy, said in [(rounding, "high"), (exact, "highest"), (rounding, "high"), (on_cpu, "highest")]:
        policy.apply()
        assert switch() == said


@pytest.mark.parametrize(
    "kind, bf16, dtype",
    [
        ("cuda", True, torch.bfloat16),
        ("cuda", False, torch.float16),
        ("mps", True, torch.float32),
        ("cpu", True, torch.bfloat16),
        ("cpu", False, torch.float32),
    ],
)
def test_the_table_of_devices_and_formats(kind, bf16, dtype):
    pick, why = auto_dtype(kind, bf16)
    assert pick == dtype and why


def test_bfloat16_is_refused_on_a_gpu_that_only_emulates_it(monkeypatch):
    FakeCuda(monkeypatch, bf16=False)
    with pytest.raises(UserError, match="bfloat16"):
        choose_policy("cuda", "bfloat16")


@pytest.mark.parametrize("asked, dtype", [("cuda:0", torch.bfloat16), ("cuda:1", torch.float16)])
def test_of_two_unlike_gpus_the_one_asked_for_decides(monkeypatch, asked, dtype):
    FakeCuda(monkeypatch, bf16=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = [0]

    @contextlib.contextmanager
    def device(chosen):  # makes this GPU the current one, as torch's does
        current.append(chosen.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: current[-1] == 0)
    assert choose_policy(asked).dtype == dtype and current == [0]


@pytest.mark.parametrize(
    "has, machine, dtype",
    [
        (True, "x86_64", torch.bfloat16),
        (True, "AMD64", torch.bfloat16),
        (False, "x86_64", torch.float32),
        (True, "aarch64", torch.float32),
    ],
)
def test_a_cpu_gets_bfloat16_only_where_it_was_measured_to_be_faster(monkeypatch, has, machine, dtype):
    monkeypatch.setattr("tinygpt.precision.cpu_has_bf16", lambda: has)
    monkeypatch.setattr("platform.machine", lambda: machine)
    policy = choose_policy("cpu")
    assert policy.dtype == dtype and not policy.scaler and "WARNING" not in str(policy)
    assert choose_policy("cpu", "float32").dtype == torch.float32, "who asks gets it"


def test_mps_gets_float32_and_is_not_taken_for_a_cpu(monkeypatch):
    monkeypatch.setattr("tinygpt.precision.cpu_has_bf16", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    policy = choose_policy()
    assert (policy.device.type, policy.dtype) == ("mps", torch.float32)
    policy = choose_policy("mps", "bfloat16")
    assert policy.dtype == torch.bfloat16 and "WARNING" not in policy.reason


@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_on_a_cpu_without_it_is_done_with_a_warning(monkeypatch, has):
    monkeypatch.setattr("tinygpt.precision.cpu_has_bf16", lambda: has)
    policy = choose_policy("cpu", "bfloat16")
    assert policy.dtype == torch.bfloat16 and ("WARNING" in str(policy)) == (not has)


def test_a_cpu_held_to_avx2_is_seen_to_have_no_bfloat16():
    code = "from tinygpt.precision import cpu_has_bf16; print(cpu_has_bf16())"
    env = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=env, capture_output=True, text=True).stdout.strip()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # it means nothing on other chips
        assert said == "False"
    assert isinstance(cpu_has_bf16(), bool)


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_the_products_run_in_the_format_of_the_policy(asked):
    policy = choose_policy("cpu", asked)
    w = torch.ones(4, 4, requires_grad=True)
    with policy.autocast():
        product = torch.ones(4, 4) @ w
    assert product.dtype == policy.dtype == getattr(torch, asked)
    product.float().sum().backward()
    assert w.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "device, dtype, words",
    [
        ("tpu", "auto", "tpu"),
        ("cuda:99", "auto", "cuda:99"),
        ("cpu", "float16", "float16"),
        ("cpu", "int8", "int8"),
        ("", "auto", "device = "),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_names_it(device, dtype, words):
    with pytest.raises(UserError, match=words):
        choose_policy(device, dtype)


def test_the_reason_is_part_of_the_printed_policy():
    policy = choose_policy("cpu", "float32")
    assert policy.reason and policy.reason in str(policy) and "float32" in str(policy)
    assert "loss scaler" in str(Policy(torch.device("cpu"), torch.float16, "why", scaler=True))


def test_a_device_may_carry_an_index_and_autocast_still_works():
    device, _ = choose_device("cpu:0")
    assert Policy(device, torch.bfloat16, "").autocast().device == "cpu"


# the loss scaler


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=6), scale=st.floats(2.0**-20, 2.0**40, width=32)
)
@settings(max_examples=200, deadline=None)
def test_unscaling_is_torchs_kernel_bit_for_bit(values, scale):
    scale = torch.tensor(scale)
    ours = [torch.tensor(values), torch.ones(2)]
    theirs = [torch.tensor(values), torch.ones(2)]
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, scale.double().reciprocal().float())
    assert unscale_gradients(ours, scale) == found == float(not all(map(math.isfinite, values)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@given(
    scale=st.floats(2.0**-30, torch.finfo(torch.float32).max, width=32),
    good=st.integers(0, 5),
    overflow=st.booleans(),
    growth=st.floats(1.01, 10),
    backoff=st.floats(0.01, 0.99),
    interval=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_the_rule_for_the_scale_is_torchs_kernel_bit_for_bit(
    scale, good, overflow, growth, backoff, interval
):
    theirs = torch.tensor(scale), torch.tensor(good, dtype=torch.int32)
    ours = next_scale(*(t.clone() for t in theirs), torch.tensor(overflow), growth, backoff, interval)
    torch._amp_update_scale_(*theirs, torch.tensor(float(overflow)), growth, backoff, interval)
    assert ours == theirs and ours[1].dtype == torch.int32


def test_a_scale_that_would_grow_to_infinity_stays():
    state = torch.tensor(3e38), torch.tensor(4, dtype=torch.int32)
    scale, good = next_scale(*state, torch.tensor(False), 2.0, 0.5, 5)
    assert scale == torch.tensor(3e38) and good == 0


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))


def small_batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(7, 6, generator=generator), torch.randint(5, (7,), generator=generator))
        for _ in range(steps)
    ]


def run(scaler, optimizers, model, batches, overflow, unscale=True, clip=1.0):
    "Train with injected overflows {step: (parameter index, value)}; yield state and weights after each step."
    for i, (x, y) in enumerate(batches):
        model.zero_grad(set_to_none=True)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if i in overflow:
            which, value = overflow[i]
            list(model.parameters())[which].grad.view(-1)[0] = value
        if unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        yield scaler.state_dict(), torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


OVERFLOWS = {
    0: (0, math.inf),
    1: (3, math.nan),
    9: (1, -math.inf),
    10: (2, math.inf),
    11: (0, math.nan),
    20: (3, math.inf),
}
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("unscale", [True, False], ids=["unscaled-and-clipped", "step-unscales"])
@pytest.mark.parametrize(
    "make",
    [ADAMW, functools.partial(ADAMW, fused=True), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["adamw", "fused", "sgd"],
)
def test_it_is_torchs_scaler_state_by_state_with_overflows_thrown_in(make, unscale):
    histories = []
    for kind in (LossScaler, torch.amp.GradScaler):
        model = small_model()
        # a fused optimizer that unscales by itself divides, and the rest multiply by the reciprocal:
        # the same for powers of two
        odd = dict(init_scale=3000.0, growth_factor=1.7, backoff_factor=0.3)
        if make.keywords.get("fused") and not unscale:
            odd = {}
        scaler = kind("cpu", growth_interval=4, **odd)
        optimizers = [make(model.parameters())]
        histories.append(list(run(scaler, optimizers, model, small_batches(30), OVERFLOWS, unscale)))
    for step, ((state, weights), (their_state, their_weights)) in enumerate(zip(*histories)):
        assert state == their_state, f"after step {step}"
        assert torch.equal(weights, their_weights), f"after step {step}"
    assert len({s["scale"] for s, _ in histories[0]}) > 3, "the run should have moved the scale"


@pytest.mark.parametrize("fused", [False, True])
def test_with_two_optimizers_both_step_or_none_while_the_scale_follows_torchs(fused):
    histories = []
    for kind in (LossScaler, torch.amp.GradScaler):
        model = small_model()
        scaler = kind("cpu", init_scale=64.0, growth_interval=3)
        first = ADAMW(model[0].parameters(), fused=fused)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        steps = run(scaler, [first, second], model, small_batches(24), OVERFLOWS, clip=None)
        histories.append(list(steps))
    ours, torchs = histories
    assert [state for state, _ in ours] == [state for state, _ in torchs]
    for i in range(1, 24):
        for part in (slice(0, 56), slice(56, None)):  # the first optimizer's weights, the second's
            assert torch.equal(ours[i][1][part], ours[i - 1][1][part]) == (i in OVERFLOWS), f"step {i}"


def test_an_overflow_under_one_optimizer_does_not_reach_the_other_through_clipping():
    for kind, survives in ((LossScaler, True), (torch.amp.GradScaler, False)):
        model = small_model()
        optimizers = [ADAMW(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
        *_, (_, weights) = run(kind("cpu"), optimizers, model, small_batches(4), {1: (0, math.nan)})
        assert weights.isfinite().all() == survives


@given(overflow=st.sets(st.integers(0, 19)), interval=st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_whatever_the_pattern_of_overflows_the_scale_follows_torchs(overflow, interval):
    thrown = {i: (0, math.inf) for i in overflow}
    histories = []
    for kind in (LossScaler, torch.amp.GradScaler):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu", growth_interval=interval)
        steps = run(scaler, [optimizer], model, small_batches(20), thrown)
        histories.append([state for state, _ in steps])
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    "first, second",
    [(LossScaler, torch.amp.GradScaler), (torch.amp.GradScaler, LossScaler), (LossScaler, LossScaler)],
)
def test_a_state_goes_through_json_into_either_scaler_and_on_as_if_nothing_had_happened(first, second):
    batches = small_batches(30)
    model = small_model()
    optimizer = ADAMW(model.parameters())
    scaler = first("cpu", init_scale=512.0, growth_interval=4)
    whole = list(run(scaler, [optimizer], model, batches, OVERFLOWS))

    model = small_model()
    optimizer = ADAMW(model.parameters())
    scaler = first("cpu", init_scale=512.0, growth_interval=4)
    list(run(scaler, [optimizer], model, batches[:13], OVERFLOWS))
    state = json.loads(json.dumps(scaler.state_dict()))
    fresh = second("cpu")
    fresh.load_state_dict(state)
    late = {i - 13: o for i, o in OVERFLOWS.items()}
    rest = run(fresh, [optimizer], model, batches[13:], late)
    for (got, weights), (want, their_weights) in zip(rest, whole[13:]):
        assert got == want and torch.equal(weights, their_weights)


def test_a_skipped_step_leaves_weights_and_optimizer_state_alone():
    model = small_model()
    optimizer = ADAMW(model.parameters())
    steps = run(LossScaler(), [optimizer], model, small_batches(4), {3: (0, math.nan)})
    for _ in range(3):
        _, before = next(steps)
    state = {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
    _, after = next(steps)
    assert torch.equal(before, after)
    assert all(torch.equal(v, state[k]) for k, v in optimizer.state_dict()["state"][0].items())


def test_a_disabled_scaler_does_nothing_and_has_no_state():
    scaler = LossScaler(enabled=False)
    w = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([w], lr=1.0)
    scaler.scale(w * 0.5).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (w, scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (0.5, 1.0, {}, False)
    scaler.load_state_dict({})


def test_a_state_from_a_run_without_scaler_is_refused_in_a_sentence():
    with pytest.raises(UserError, match="dtype|scaler"):
        LossScaler().load_state_dict(LossScaler(enabled=False).state_dict())


@pytest.mark.parametrize(
    "wrong",
    [
        dict(growth_factor=1.0),
        dict(backoff_factor=1.0),
        dict(backoff_factor=0.0),
        dict(growth_interval=0),
        dict(init_scale=math.inf),
        dict(init_scale=1e39),  # inf in float32: no step would ever be good
        dict(init_scale=1e-50),  # 0 in float32: gradients of 0 / 0
    ],
)
def test_settings_that_cannot_work_are_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        LossScaler(**wrong)


def test_calls_in_a_wrong_order_are_refused():
    w = nn.Parameter(torch.ones(2))
    w.grad = torch.ones(2)
    scaler = LossScaler()
    optimizer = torch.optim.SGD([w], lr=1.0)
    with pytest.raises(RuntimeError, match="update|step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="twice"):
        scaler.unscale_(optimizer)


def test_gradients_in_float16_are_refused():
    w = nn.Parameter(torch.ones(2, dtype=torch.float16))
    w.grad = torch.ones_like(w)
    with pytest.raises(RuntimeError, match="float32"):
        LossScaler().step(torch.optim.SGD([w], lr=1.0))


def test_parameters_without_gradient_and_empty_ones_do_no_harm():
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0))]
    weights[0].grad = torch.full((2,), 2.0**16)
    weights[2].grad = torch.ones(0)
    scaler = LossScaler()
    optimizer = torch.optim.SGD(weights, lr=0.5)
    scaler.step(optimizer)
    scaler.update()
    assert weights[0].tolist() == [0.5, 0.5] and weights[1].tolist() == [1, 1]
    scaler = LossScaler()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scaler.step(optimizer)  # no gradient at all
    scaler.update()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_clipping_after_unscaling_clips_the_true_gradients():
    true = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    weights = [nn.Parameter(torch.zeros_like(g)) for g in true]
    scaler = LossScaler()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    scaler.scale(sum((w * g).sum() for w, g in zip(weights, true))).backward()
    scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_(weights, 1.0) == 5.0, "the logged norm is the true one"
    scaler.step(optimizer)
    torch.testing.assert_close([w.data for w in weights], [-g / 5 for g in true])


def float16_run(steps, stop_at=None, keep_scaler=True):
    "Weights and number of skipped steps; at `stop_at` everything goes through json and into new objects."
    make = functools.partial(LossScaler, init_scale=2.0**24, growth_interval=6)
    model = small_model()
    scaler = make()
    optimizer = ADAMW(model.parameters())
    for i, (x, y) in enumerate(small_batches(steps)):
        if i == stop_at:
            weights = model.state_dict()
            moments = optimizer.state_dict()
            state = json.dumps(scaler.state_dict())
            model = small_model()
            scaler = make()
            model.load_state_dict(weights)
            optimizer = ADAMW(model.parameters())
            optimizer.load_state_dict(moments)
            if keep_scaler:
                scaler.load_state_dict(json.loads(state))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_float16_run_resumes_bit_for_bit_with_its_scaler_and_not_without():
    straight = float16_run(40)
    assert torch.equal(straight, float16_run(40, stop_at=20))
    forgetful = float16_run(40, stop_at=20, keep_scaler=False)
    assert not torch.equal(straight, forgetful), "the check would see a forgotten scaler"


def overflow_on_one_rank(world, share_it):
    """Weight and scaler of this process, one of two: rank 1 overflows in step 2.

    Their gradients are their own, as those of sharded parameters are.
    """
    reduce = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX) if share_it else None
    w = nn.Parameter(torch.ones(3))
    scaler = LossScaler(reduce=reduce)
    optimizer = torch.optim.SGD([w], lr=0.25)
    for i in range(4):
        w.grad = torch.full((3,), scaler.get_scale())
        if (i, world.rank) == (2, 1):
            w.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
    return w.tolist(), scaler.state_dict()


def shared_and_not(world):
    return [overflow_on_one_rank(world, share_it) for share_it in (True, False)]


@pytest.mark.slow
def test_found_inf_is_shared_over_processes_so_that_all_skip_or_none():
    (first, first_alone), (second, second_alone) = run_processes(shared_and_not, 2)
    assert first == second and first[0] == [0.25] * 3 and first[1]["scale"] == 2.0**15
    assert first_alone != second_alone, "without sharing they part: the check would see it"


def test_the_trainer_resumes_a_float16_run_exactly(tmp_path, words, monkeypatch):
    "On CPU the policy refuses float16; here it is put in by hand, with a scaler that moves often."
    import tinygpt.run.setup as setup
    import tinygpt.train as trainer
    from tinygpt.model import GPTConfig
    from tinygpt.run.config import DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig

    make = functools.partial(LossScaler, init_scale=2.0**30, growth_interval=3)
    policy = Policy(torch.device("cpu"), torch.float16, "for the test", scaler=True)
    monkeypatch.setattr(setup, "choose_policy", lambda *a: policy)
    monkeypatch.setattr(setup, "LossScaler", make)

    def config(name, steps):
        return TrainConfig(
            RunConfig(name=name, out=str(tmp_path)),
            DataConfig(source=str(words), tokenizer="byte", batch_size=2),
            GPTConfig.modern(vocab_size=257, block_size=16, n_layer=1, n_head=2, n_embd=32),
            OptimConfig(max_steps=steps, warmup_steps=2, schedule="constant"),
            EvalConfig(eval_every=0, eval_tokens=64, final_eval_tokens=64, sample_tokens=0, save_every=12),
        )

    straight = trainer.train(config("straight", 24), progress="none")
    half = trainer.train(config("halves", 12), progress="none")
    resumed = trainer.train(config("halves", 24), resume=True, progress="none")
    saved = json.loads(next((half.run / "checkpoints").glob("*12/state.json")).read_text())["scaler"]
    assert saved["scale"] < 2.0**30, "the run should have had overflows"
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(a, b), name
    # the bug: a new scaler on resume
    monkeypatch.setattr(LossScaler, "load_state_dict", lambda self, state: None)
    trainer.train(config("forgetful", 12), progress="none")
    forgetful = trainer.train(config("forgetful", 24), resume=True, progress="none")
    pairs = zip(straight.model.parameters(), forgetful.model.parameters())
    assert any(not torch.equal(a, b) for a, b in pairs)
