"""Predicted bytes against what autograd, the optimizers, the allocator and the operating system count."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.accumulate import train_step
from tinygpt.accumulate_memory import ChunkedLossGPT
from tinygpt.adamw import adamw_groups
from tinygpt.measure.memory import (
    activation_bytes,
    available_memory,
    largest_batch,
    machine_memory,
    measure_memory,
    memory_timeline,
    param_counts,
    predict_memory,
    state_bytes,
    training_step,
    used_memory,
)
from tinygpt.model import GPT, MLP, GPTConfig
from tinygpt.muon import Muon, by_kind, make_optimizer, muon_groups
from tinygpt.run.presets import PRESETS, preset
from tinygpt.support import UserError, peak_bytes

SHAPE = dict(vocab_size=1000, block_size=64, n_layer=2, n_head=4, n_embd=128)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SHAPE),
    "gpt2 without biases": GPTConfig.gpt2(**SHAPE | dict(bias=False)),
    "gpt2 with qk-norm": GPTConfig.gpt2(**SHAPE | dict(qk_norm=True)),
    "gpt2 with RMSNorm": GPTConfig.gpt2(**SHAPE | dict(norm="rmsnorm")),
    "llama": GPTConfig.llama(**SHAPE),
    "llama with grouped queries": GPTConfig.llama(**SHAPE | dict(n_kv_head=2)),
    "tied llama": GPTConfig.llama(**SHAPE | dict(tie_weights=True)),
    "modern": GPTConfig.modern(**SHAPE),
}
SIZES = {  # name: (shape, rows): dominated by the loss, by the blocks, by weights and optimizer state
    "loss": (dict(vocab_size=8192, block_size=128, n_layer=2, n_head=4, n_embd=128), 4),
    "blocks": (dict(vocab_size=512, block_size=256, n_layer=6, n_head=6, n_embd=192), 2),
    "weights": (dict(vocab_size=2048, block_size=32, n_layer=6, n_head=4, n_embd=256), 1),
}


def saved_for_backward(config, rows, dtype):
    "Bytes of the storages that autograd keeps after a forward pass, weights and batch left out."
    model = GPT(config)
    x = torch.randint(config.vocab_size, (rows, config.block_size))
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), x]}
    kept = {}
    alive = []

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # so that no address is given out twice
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
    ):
        model(x, x)
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_bytes_that_autograd_saves_are_those_of_the_formula(name, dtype):
    config = VARIANTS[name]
    rows = 4
    a = activation_bytes(config, rows, dtype=dtype)
    want = config.n_layer * (a["attention"] + a["mlp"]) + a["outer"] + a["loss"]
    if dtype != torch.float32:  # the weights' rounded copies are saved too
        want += 2 * (param_counts(config)["matrices"] + config.vocab_size * config.n_embd)
    assert saved_for_backward(config, rows, dtype) == pytest.approx(want, rel=5e-3)


@settings(max_examples=30, deadline=None)
@given(
    variant=st.sampled_from(["gpt2", "llama", "modern"]),
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 1), (4, 2), (4, 4)]),
    width=st.sampled_from([32, 64, 96]),
    vocab=st.integers(2, 300),
    bias=st.booleans(),
    tied=st.booleans(),
    norm=st.sampled_from(["layernorm", "rmsnorm"]),
    mlp=st.sampled_from(["gelu", "gelu_exact", "swiglu", "relu2"]),
    position=st.sampled_from(["learned", "rope"]),
)
def test_parameters_are_counted_as_the_model_has_them(
    variant, layers, heads, width, vocab, bias, tied, norm, mlp, position
):
    shape = dict(n_layer=layers, n_head=heads[0], n_kv_head=heads[1], n_embd=width, vocab_size=vocab)
    parts = dict(bias=bias, tie_weights=tied, norm=norm, mlp=mlp, position=position, init="gpt2")
    config = getattr(GPTConfig, variant)(block_size=16, **shape, **parts)
    with torch.device("meta"):
        model = GPT(config)
    n = param_counts(config)
    assert sum(n.values()) == sum(p.numel() for p in model.parameters())
    assert n["matrices"] == sum(p.numel() for p in model.h.parameters() if p.dim() == 2)


def by_hand(c):
    "The counts by a formula of the config."
    C, V = c.n_embd, 128 * -(-c.vocab_size // 128)
    qkv = (c.n_head + 2 * c.kv_heads) * c.head_dim
    ups = 2 if c.mlp == "swiglu" else 1
    return {
        "wte": V * C,
        "wpe": c.block_size * C if c.position == "learned" else 0,
        "ngrams": 2 * (c.ngram_rows or 0) * C,
        "lm_head": 0 if c.tie_weights else V * C,
        "matrices": c.n_layer * (C * qkv + C * C + (ups + 1) * C * c.hidden),
        "vectors": (c.n_layer * (qkv + ups * c.hidden + 2 * C) if c.bias else 0)
        + (2 * c.n_layer + 1) * C * (2 if c.norm == "layernorm" and c.bias else 1),
    }


@pytest.mark.parametrize("name", PRESETS)
def test_the_counts_of_a_preset_are_those_of_the_formula(name):
    config = preset(name).model
    n = param_counts(config)
    assert n == by_hand(config)
    assert state_bytes(config) == 8 * sum(n.values())
    assert state_bytes(config, "muon") == 8 * sum(n.values()) - 4 * n["matrices"]


def test_a_part_that_the_config_does_not_describe_is_counted(monkeypatch):
    class Routed(MLP):
        def __init__(self, config):
            super().__init__(config)
            self.router = nn.Linear(config.n_embd, 7, bias=False)
            self.scale = nn.LayerNorm(5, bias=False)

    config = GPTConfig.llama(**SHAPE | dict(vocab_size=777))
    want = by_hand(config)
    assert param_counts(config) == want  # before, beside and after it: no count is taken for another
    with monkeypatch.context() as patch:
        patch.setattr("tinygpt.model.MLP", Routed)
        routed = param_counts(config)
    assert routed["matrices"] == want["matrices"] + config.n_layer * 7 * config.n_embd
    assert routed["vectors"] == want["vectors"] + config.n_layer * 5
    assert param_counts(config) == want


def test_counting_takes_no_memory_and_no_random_numbers():
    before = torch.get_rng_state()
    config = GPTConfig.llama(n_layer=3, n_embd=2**15, n_head=16, block_size=2**31)  # a table of 8 TB
    assert peak_bytes(lambda: param_counts(config)) < 1e6
    assert torch.equal(before, torch.get_rng_state())


def test_the_state_of_an_unknown_optimizer_is_refused():
    with pytest.raises(UserError, match="optimizer = lion is not known: choose adamw or muon"):
        state_bytes(VARIANTS["gpt2"], "lion")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "modern"])
def test_optimizer_state_is_as_large_as_torchs(name, optimizer):
    step, tensors = training_step(VARIANTS[name], 1, optimizer=optimizer)
    before = sum(t.nbytes for t in tensors())
    step()
    state = sum(t.nbytes for t in tensors()) - before
    # beside it, a step count for each parameter
    assert state == pytest.approx(state_bytes(VARIANTS[name], optimizer), rel=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", ["gpt2", "llama", "modern"])
def test_predicted_peak_is_within_15_percent_of_measured(variant, size):
    shape, rows = SIZES[size]
    config = getattr(GPTConfig, variant)(**shape)
    assert predict_memory(config, rows).total == pytest.approx(measure_memory(config, rows), rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [dict(optimizer="muon"), dict(micro_steps=2), dict(micro_steps=2, optimizer="muon")], ids=str
)
@pytest.mark.parametrize("size", ["loss", "weights"])
def test_predicted_peak_holds_with_muon_and_with_micro_steps(size, settings):
    shape, rows = SIZES[size]
    for variant in ("gpt2", "modern"):
        config = getattr(GPTConfig, variant)(**shape)
        predicted = predict_memory(config, rows, **settings, stacked=False).total
        assert predicted == pytest.approx(measure_memory(config, rows, **settings), rel=0.15)


@pytest.mark.parametrize("settings", [{}, dict(micro_steps=2), dict(dtype=torch.bfloat16)], ids=str)
@pytest.mark.parametrize("chunk", [64, 100_000])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "modern"])
def test_predicted_peak_holds_where_the_loss_is_made_in_chunks(variant, chunk, settings):
    def measured(config, rows, dtype=torch.float32, micro_steps=1):
        model = GPT(config)
        whole, optimizer = ChunkedLossGPT(model, chunk), torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.zeros(rows, config.block_size, dtype=torch.int64)

        def step():
            for _ in range(micro_steps):
                with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                    loss = whole(x, x)[1]
                loss.backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)

        step()
        kept = [t for state in optimizer.state.values() for t in state.values()]
        kept += [*model.parameters(), *model.buffers(), x, x]
        return sum(t.untyped_storage().nbytes() for t in kept) + peak_bytes(step)

    wide = dict(vocab_size=16384, n_embd=64, n_layer=1, n_head=2, block_size=64)
    for shape, rows in ((wide, 4), (SHAPE, 8)):
        config = getattr(GPTConfig, variant)(**shape)
        predicted = predict_memory(config, rows, loss_chunk=chunk, **settings)
        assert 0.99 < predicted.total / measured(config, rows, **settings) < 1.08
        assert predicted.total < predict_memory(config, rows, **settings).total or chunk > 64


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_predicted_peak_holds_under_autocast(variant, rows):  # small: not every CPU is quick with bfloat16
    for shape in (SHAPE, dict(vocab_size=128, block_size=16, n_layer=4, n_head=4, n_embd=128)):
        config = getattr(GPTConfig, variant)(**shape)
        predicted = predict_memory(config, rows, dtype=torch.bfloat16).total
        measured = measure_memory(config, rows, dtype=torch.bfloat16)
        assert 0.99 < predicted / measured < 1.08  # if it errs, then upwards


def beside_a_product(rows, columns):
    "Bytes that a bfloat16 product takes beside its result: none, or a packed copy where the CPU has AMX."
    square, matrix = torch.zeros(rows, rows).bfloat16(), torch.zeros(rows, columns).bfloat16()
    return peak_bytes(lambda: square @ matrix) - matrix.nbytes


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_predicted_peak_holds_where_newton_schulz_makes_it(variant):
    config = getattr(GPTConfig, variant)(vocab_size=128, block_size=16, n_layer=1, n_head=4, n_embd=512)
    predicted = predict_memory(config, 1, optimizer="muon", stacked=False)
    assert predicted.name == "optimizer step"
    C = config.n_embd
    packed = beside_a_product(C, max(C + 2 * config.kv_heads * config.head_dim, config.hidden))
    measured = measure_memory(config, 1, optimizer="muon")
    assert predicted.total + packed == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("size", ["loss", "weights"])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "modern"])
def test_predicted_peak_holds_with_the_packages_own_muon(variant, size):
    def ours(model):
        matrices, rest = by_kind(muon_groups(model, adamw_groups(model, 1e-3)))
        return [Muon(matrices), torch.optim.AdamW(rest, fused=True)]

    shape, rows = SIZES[size]
    config = getattr(GPTConfig, variant)(**shape)
    measured = measure_memory(config, rows, optimizer=ours)
    assert predict_memory(config, rows, optimizer="muon").total == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("settings", [{}, dict(micro_steps=2)], ids=str)
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_a_peak_that_one_tensor_makes_is_predicted_to_the_byte_or_nearly(variant, settings):
    embedding = getattr(GPTConfig, variant)(vocab_size=16384, n_embd=128, n_layer=1, n_head=2, block_size=16)
    tables = replace(embedding, vocab_size=256, ngram_rows=16384)
    loss = getattr(GPTConfig, variant)(**SIZES["loss"][0])
    for config, rows in ((embedding, 1), (tables, 1), (replace(tables, vocab_size=8192), 1), (loss, 8)):
        predicted = predict_memory(config, rows, **settings).total
        assert predicted == pytest.approx(measure_memory(config, rows, **settings), rel=1e-3)


def test_the_peak_is_where_the_allocator_has_it():
    shape, rows = SIZES["loss"]
    assert predict_memory(GPTConfig.gpt2(**shape), rows).name == "loss backward"
    fullest = predict_memory(GPTConfig.gpt2(**SIZES["weights"][0]), 1).name
    assert fullest in ("block 0 backward", "embedding backward")


def test_the_sum_of_everything_is_not_the_peak():
    shape, rows = SIZES["loss"]
    config = GPTConfig.gpt2(**shape)
    moments = memory_timeline(config, rows)
    everything = sum(max(m.parts[kind] for m in moments) for kind in moments[0].parts)
    assert everything > 1.05 * measure_memory(config, rows)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_the_operating_system_sees_the_predicted_bytes():
    script = """
import re
from pathlib import Path
from tinygpt.measure.memory import predict_memory, training_step
from tinygpt.model import GPTConfig

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

shape = dict(vocab_size=4096, block_size=128, n_layer=4, n_head=6, n_embd=384)
training_step(GPTConfig.gpt2(**shape | dict(n_layer=1, n_embd=96)), 1)[0]()
before = status("VmRSS")
step, tensors = training_step(GPTConfig.gpt2(**shape), 8)
step()
Path("/proc/self/clear_refs").write_text("5")
step()
print(status("VmHWM") - before, predict_memory(GPTConfig.gpt2(**shape), 8).total)
"""
    # the C library gives large blocks back at once
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    if "Permission" in done.stderr:
        pytest.skip("this system does not let a process reset its high-water mark")
    seen, predicted = map(int, done.stdout.split())
    assert predicted == pytest.approx(seen, rel=0.15)


@pytest.mark.parametrize("settings", [{}, dict(optimizer="muon"), dict(dtype=torch.bfloat16)], ids=str)
def test_the_largest_batch_fits_and_one_row_more_does_not(settings):
    config = VARIANTS["llama"]
    for memory in (2e7, 1e8, 1.23e9):
        rows = largest_batch(config, memory, **settings)
        assert rows >= 1
        assert predict_memory(config, rows, **settings).total <= memory
        assert memory < predict_memory(config, rows + 1, **settings).total
    assert largest_batch(config, 1e6) == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 64), st.sampled_from(list(VARIANTS)), st.integers(1, 3))
def test_more_rows_never_need_less(rows, name, micro_steps):
    fewer = predict_memory(VARIANTS[name], rows, micro_steps=micro_steps).total
    more = predict_memory(VARIANTS[name], rows + 1, micro_steps=micro_steps).total
    assert fewer < more


@pytest.mark.parametrize(
    "change, settings, word",
    [
        (dict(dropout=0.1), {}, "dropout = 0.1"),
        ({}, dict(optimizer="sgd"), "optimizer = sgd"),
        ({}, dict(block_size=65), "block_size = 65"),
        ({}, dict(block_size=0), "block_size = 0"),
        ({}, dict(dtype=torch.float64), "dtype = torch.float64: choose torch.float32, torch.bfloat16"),
        ({}, dict(dtype="bfloat16"), "dtype = bfloat16: choose torch.float32"),
        ({}, dict(micro_steps=0), "micro_steps = 0"),
        ({}, dict(loss_chunk=-1), "loss_chunk = -1: give a number of tokens, or 0 for all at once"),
        ({}, dict(batch_size=0), "batch_size = 0"),
        (dict(n_embd=130), {}, "n_embd = 130"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_sentence(change, settings, word):
    with pytest.raises(UserError, match=word):
        predict_memory(replace(VARIANTS["gpt2"], **change), **dict(batch_size=1) | settings)


@pytest.mark.parametrize("memory", [float("inf"), float("nan"), -1])
def test_an_impossible_amount_of_memory_is_refused(memory):
    with pytest.raises(UserError, match="memory"):
        largest_batch(VARIANTS["gpt2"], memory)


def test_used_and_available_memory_of_this_machine():
    used = used_memory()
    free = available_memory()
    if sys.platform.startswith("linux"):
        block = torch.ones(2**26)  # 256 MB
        assert used_memory() >= used and used_memory() >= block.nbytes
        assert 1e7 < free < 1e14


def fake_system(monkeypatch, files: dict[str, str]):
    "A Linux machine of 16 GB with these files, and no others."
    import tinygpt.measure.memory as module

    class Fake:
        def __init__(self, path):
            self.path = str(path)

        def exists(self):
            return self.path in files

        def read_text(self):
            return files[self.path]

    monkeypatch.setattr(module, "Path", Fake)
    monkeypatch.setattr(module.os, "sysconf", {"SC_PHYS_PAGES": 4_000_000, "SC_PAGE_SIZE": 4096}.get)


@pytest.mark.parametrize(
    "names, cached",
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "memory/memory.stat",
            ),
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_containers_limit_counts_and_what_is_used_of_it_is_not_free(monkeypatch, names, cached):
    limit, used, stat = (f"/sys/fs/cgroup/{name}" for name in names)
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000000 kB\n",
        limit: "1000000\n",
        used: "0\n",
        stat: f"anon 1\n{cached} 0\n",
    }
    fake_system(monkeypatch, files)
    assert machine_memory() == available_memory() == 1_000_000
    files[used] = "700000\n"
    assert (machine_memory(), available_memory()) == (1_000_000, 300_000)
    files[stat] = f"anon 1\n{cached} 200000\n"  # copies of files give way to a program
    assert available_memory() == 500_000
    files[limit] = "max\n"
    assert (machine_memory(), available_memory()) == (4_000_000 * 4096, 8_192_000_000)
    del files["/proc/meminfo"]
    assert available_memory() == 4_000_000 * 4096


@pytest.mark.parametrize("version", [2, 1])
def test_the_limit_of_a_clusters_job_counts_and_that_of_the_group_above_it(monkeypatch, version):
    root, line = {
        2: ("/sys/fs/cgroup", "0::/slurm/job_7/step_0\n"),
        1: ("/sys/fs/cgroup/memory", "9:cpu,cpuacct:/elsewhere\n4:memory:/slurm/job_7/step_0\n0::/\n"),
    }[version]
    limit, used = {
        2: ("memory.max", "memory.current"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    }[version]
    files = {"/proc/meminfo": "MemAvailable: 8000000 kB\n", "/proc/self/cgroup": line}
    for folder, most, taken in (("slurm/job_7/step_0", 500, 100), ("slurm/job_7", 700, 650)):
        files[f"{root}/{folder}/{limit}"] = f"{most}\n"
        files[f"{root}/{folder}/{used}"] = f"{taken}\n"
        files[f"{root}/{folder}/memory.stat"] = ""
    fake_system(monkeypatch, files)
    assert machine_memory() == 500  # the step's own
    assert available_memory() == 50  # what other steps have left of the job's


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "modern"])
def test_predicted_peak_holds_on_a_gpu(variant, dtype):
    config = getattr(GPTConfig, variant)(vocab_size=8192, block_size=512, n_layer=6, n_head=8, n_embd=512)
    measured = measure_memory(config, 8, device="cuda", dtype=dtype)
    assert predict_memory(config, 8, device="cuda", dtype=dtype).total == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("count", [1, 8])
def test_a_step_of_muon_has_six_tensors_at_its_peak(count):
    weights = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
    for p in weights:
        p.grad = torch.randn(64, 64)
    opt = Muon(weights)
    opt.step()
    # the directions, their stack, and X, A, B and the next X of Newton-Schulz
    assert peak_bytes(opt.step) == 6 * sum(p.nbytes for p in weights)


@pytest.mark.parametrize("variant", [GPTConfig.gpt2, GPTConfig.llama])
def test_the_trainers_step_with_muon_takes_the_memory_that_is_predicted(variant):
    config = variant(vocab_size=128, block_size=16, n_layer=2, n_head=4, n_embd=256)
    predicted = predict_memory(config, 1, optimizer="muon")
    assert predicted.name == "optimizer step"
    model = GPT(config)
    opt, _ = make_optimizer(muon_groups(model, adamw_groups(model, 5e-3), 0.02))
    x = torch.randint(128, (1, 16), generator=torch.Generator().manual_seed(0))

    def step():
        train_step(model, opt, x, x, clip=1.0)
        model.zero_grad(set_to_none=True)

    step()  # the state appears
    state = [t for of_one in opt.state.values() for t in of_one.values()]
    kept = sum(t.nbytes for t in [*model.parameters(), *model.buffers(), *state])
    assert kept + peak_bytes(step) == pytest.approx(predicted.total, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mlp", ["gelu", "relu2", "swiglu"])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_predicted_peak_holds_where_a_single_block_makes_it(variant, mlp, dtype):
    "With many blocks the room that one works in is a small part, and an error in it does not show."
    shape = dict(vocab_size=64, block_size=256, n_layer=1, n_head=2, n_embd=64, mlp=mlp)
    config = getattr(GPTConfig, variant)(**shape)
    predicted = predict_memory(config, 8, dtype=dtype)
    assert predicted.name == "block 0 backward"
    assert predicted.total == pytest.approx(measure_memory(config, 8, dtype=dtype), rel=0.11)


def test_a_device_may_have_a_number():
    config = VARIANTS["llama"]
    first, numbered = (
        memory_timeline(config, 2, device=device, dtype=torch.bfloat16, optimizer="muon")
        for device in ("cuda", "cuda:1")
    )
    assert first == numbered != memory_timeline(config, 2, dtype=torch.bfloat16, optimizer="muon")
    assert activation_bytes(config, 2, device="cuda:0") == activation_bytes(config, 2, device="cuda")


def test_a_step_with_an_unknown_optimizer_is_not_measured_as_one_with_adamw():
    with pytest.raises(UserError, match="optimizer = lion is not known"):
        measure_memory(VARIANTS["gpt2"], 1, optimizer="lion")
