"""FLOPs against torch's counter, the peaks, waits of the host, and the meter under a clock of our own."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tinygpt.measure.speed as module
from tinygpt.measure.memory import training_step, used_memory
from tinygpt.measure.speed import (
    PEAKS,
    StepMeter,
    datasheet,
    describe,
    flops_by_part,
    flops_per_token,
    host_reads,
    machine_peak,
    measure_bandwidth,
    measure_peak_flops,
    promised_peak,
    si,
)
from tinygpt.model import GPT, MLP, GPTConfig
from tinygpt.support import Timing, UserError

SHAPE = dict(vocab_size=384, block_size=48, n_layer=3, n_head=4, n_embd=64)
MODELS = {
    "gpt2": GPTConfig.gpt2(**SHAPE),
    "gpt2 untied": GPTConfig.gpt2(**SHAPE | dict(tie_weights=False)),
    "llama": GPTConfig.llama(**SHAPE),
    "llama with grouped queries": GPTConfig.llama(**SHAPE | dict(n_kv_head=2)),
    "modern": GPTConfig.modern(**SHAPE),
    "odd hidden width": GPTConfig.modern(**SHAPE | dict(mlp_hidden=100, n_kv_head=1)),
}


def counted(config, training, backend=SDPBackend.MATH, device="cpu"):
    "FLOPs per token by torch's counter."
    B = 2
    T = config.block_size
    model = GPT(config).to(device)
    x = torch.randint(config.vocab_size, (B, T), device=device)
    with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        loss = model(x, x)[1]
        if training:
            loss.backward()
    return counter.get_total_flops() / (B * T)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_flops_per_token_are_those_of_torchs_counter(name, training):
    config = MODELS[name]
    assert flops_per_token(config, training=training) == pytest.approx(counted(config, training), rel=1e-3)


def test_flops_follow_the_length_of_the_rows_not_the_configs_limit():
    long = GPTConfig.gpt2(**SHAPE | dict(block_size=480))
    assert flops_per_token(long, block_size=48) == flops_per_token(MODELS["gpt2"])
    assert flops_by_part(long)["attention"] == 10 * flops_by_part(MODELS["gpt2"])["attention"]


def test_flops_of_gpt2_small_by_hand():
    forward = 12 * (2 * 768 * (3 * 768 + 768 + 8 * 768) + 4 * 1024 * 768) + 2 * 768 * 50257
    assert flops_per_token(GPTConfig(), training=False) == forward
    assert flops_per_token(GPTConfig()) == 3 * forward


def test_padding_of_the_vocabulary_is_no_work():
    assert flops_by_part(GPTConfig.gpt2(**SHAPE | dict(vocab_size=300)))["head"] == 2 * 64 * 300


def test_the_fused_kernel_of_the_cpu_counts_as_nothing():
    config = MODELS["gpt2"]
    missing = flops_per_token(config, training=False) - counted(config, False, SDPBackend.FLASH_ATTENTION)
    assert missing == flops_by_part(config)["attention"]


def test_a_matrix_that_the_formula_does_not_know_is_an_error_and_not_a_wrong_count(monkeypatch):
    class Routed(MLP):
        def __init__(self, config):
            super().__init__(config)
            self.router = torch.nn.Linear(config.n_embd, 5, bias=False)

    config = GPTConfig.llama(**SHAPE | dict(vocab_size=99))
    weights = sum(p.numel() for p in GPT(config).h.parameters() if p.dim() == 2)
    monkeypatch.setattr("tinygpt.model.MLP", Routed)
    words = (
        f"the blocks have {weights + 3 * 5 * 64:,} weights in matrices, and flops_by_part counts {weights:,}:"
    )
    with pytest.raises(UserError, match=words):
        flops_by_part(config)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", MODELS)
def test_flops_on_a_gpu_are_those_of_torchs_counter(name):
    assert flops_per_token(MODELS[name]) == pytest.approx(
        counted(MODELS[name], True, device="cuda"), rel=1e-3
    )


NAMES = {
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "A100-SXM4-40GB": "A100 40GB",  # as older drivers call it
    "NVIDIA A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "NVIDIA A10": "A10",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "Tesla T4": "T4",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "Tesla V100-SXM2-16GB": "V100",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "AMD Instinct MI300X": "MI300X",
}


@pytest.mark.parametrize("name, key", NAMES.items())
def test_a_gpu_is_found_in_the_table_by_the_name_that_torch_gives(name, key):
    assert datasheet(name) is PEAKS[key]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce GTX 1080",
        "NVIDIA A1000",
        "NVIDIA L400",
        "",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "Tesla V100-PCIE-16GB",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A10-8Q",  # a share of the card, rented out by a hypervisor
        "GRID A100-10C",
    ],
)
def test_an_unknown_gpu_is_not_taken_for_another(name):
    assert datasheet(name) is None


def test_every_peak_has_a_source_and_half_precision_is_faster():
    for name, peak in PEAKS.items():
        assert peak.source and peak.single < peak.half and peak.bandwidth > 100, name


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]


def set_clock(monkeypatch, seconds_of):
    "Timings that no other program can disturb: `seconds_of(result)` at best. Returns the list of results."
    results = []

    def timed(fn, **settings):
        results.append(fn())
        seconds = seconds_of(results[-1])
        return Timing(median=2 * seconds, min=seconds, max=3 * seconds)

    monkeypatch.setattr(module, "measure_time", timed)
    return results


@pytest.mark.parametrize("device", DEVICES)
def test_the_peak_is_the_best_speed_of_all_sizes_up_to_one_that_takes_4_ms(monkeypatch, device):
    speeds = {256: 1e11, 512: 3e11, 1024: 2e11}  # FLOP/s; the last takes 10.7 ms
    products = set_clock(monkeypatch, lambda product: 2 * len(product) ** 3 / speeds[len(product)])
    assert measure_peak_flops(device, torch.bfloat16) == pytest.approx(3e11)
    assert [tuple(product.shape) for product in products] == [(n, n) for n in speeds]
    assert all(product.dtype == torch.bfloat16 and product.device.type == device for product in products)


def test_measuring_the_peak_leaves_the_random_numbers_of_a_run_alone():
    before = torch.get_rng_state()
    measure_peak_flops()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_peak_is_measured_once(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "measure_peak_flops", lambda *a: calls.append(a) or 1e12)
    module._peak.cache_clear()
    try:
        assert machine_peak("cpu", torch.float32) == machine_peak(torch.device("cpu"), torch.float32)
        assert len(calls) == 1 and "1 TFLOP/s" in machine_peak()[1] and "float32" in machine_peak()[1]
    finally:
        module._peak.cache_clear()


@pytest.mark.parametrize(
    "name, dtype, promise",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, "; the datasheet says 989 T"),
        ("NVIDIA H100 80GB HBM3", torch.float32, "; the datasheet says 67 T"),
        ("a pretend GPU", torch.bfloat16, " in bfloat16"),
    ],
)
def test_beside_a_gpus_measured_peak_stands_what_its_datasheet_promises(monkeypatch, name, dtype, promise):
    monkeypatch.setattr(module, "_peak", lambda device, dtype, threads: 6e14)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak, said = machine_peak("cuda", dtype)
    assert peak == 6e14 and said.startswith("600 TFLOP/s measured") and said.endswith(promise)


@pytest.mark.parametrize("device", DEVICES)
def test_bandwidth_counts_each_byte_as_read_and_as_written(monkeypatch, device):
    products = set_clock(monkeypatch, lambda product: 0.5)
    assert measure_bandwidth(device, megabytes=8) == 2 * 8 * 2**20 / 0.5
    (product,) = products
    assert product.nbytes == 8 * 2**20 and product.device.type == device and bool((product == 1).all())


def test_reads_of_a_tensors_number_are_counted_one_by_one():
    x = torch.ones(())
    assert host_reads(lambda: [x.item(), bool(x > 0), float(x)]) == 3
    assert host_reads(lambda: [x.item() for _ in range(10)]) == 10
    assert host_reads(lambda: [x + x for _ in range(10)]) == 0


def test_the_work_whose_reads_are_counted_runs_once():
    calls = []
    assert host_reads(lambda: calls.append(1)) == 0
    assert calls == [1]


def test_a_read_deep_inside_torch_is_counted():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    clip = torch.nn.utils.clip_grad_norm_
    assert host_reads(lambda: clip([p], 1.0)) == 0
    assert host_reads(lambda: clip([p], 1.0, error_if_nonfinite=True)) > 0


def test_what_fused_adamw_reads_inside_its_kernel_is_no_wait():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    fused = torch.optim.AdamW([p], fused=True)
    plain = torch.optim.AdamW([p], foreach=False)
    assert host_reads(fused.step) == 0
    assert host_reads(plain.step) > 0, "it asks for its step count in Python"
    assert host_reads(lambda: [fused.step(), p.sum().item(), fused.step()]) == 1, "a read beside it counts"


def test_a_training_step_reads_nothing():
    step, _ = training_step(MODELS["gpt2"], 2)
    assert host_reads(step) == 0


class Clock:
    "Seconds that a test sets."

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


@pytest.mark.parametrize("start", [0.0, 12345.6, 1.7e9], ids=["zero", "uptime", "date"])
def test_throughput_does_not_depend_on_what_the_clock_shows(start):  # divided by a timestamp it would
    clock = Clock(start)
    meter = StepMeter(flops_per_token=6e6, peak_flops=1e10, clock=clock)
    for _ in range(3):
        for _ in range(10):
            clock.now += 0.5
            meter.add(256)
        reading = meter.read()
        assert reading["tokens_per_second"] == pytest.approx(512, rel=1e-3)
        assert reading["of_measured_peak"] == pytest.approx(512 * 6e6 / 1e10, abs=1e-3)
        assert "mfu" not in reading  # no datasheet


def test_each_reading_counts_only_what_came_after_the_one_before():
    clock = Clock(100.0)
    meter = StepMeter(1, 1, clock=clock)
    for seconds in (1.0, 4.0, 2.0):
        clock.now += seconds
        meter.add(1000)
        assert meter.read()["tokens_per_second"] == 1000 / seconds


def test_time_in_a_pause_is_not_counted():
    clock = Clock(50.0)
    meter = StepMeter(1, 1, clock=clock)
    clock.now += 1
    meter.add(100)
    with meter.pause():
        clock.now += 1000
    clock.now += 1
    meter.add(100)
    assert meter.read()["tokens_per_second"] == 100


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0, 2e9),
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(0, 10**6), st.booleans()), min_size=1, max_size=20),
)
def test_tokens_over_time_for_any_run(start, events):
    clock = Clock(start)
    meter = StepMeter(1, 1, clock=clock)
    tokens = 0
    seconds = 0.0
    for duration, count, paused in events:
        before = clock.now
        if paused:
            with meter.pause():
                clock.now += duration
        else:
            clock.now += duration
            meter.add(count)
            tokens += count
            seconds += clock.now - before
    want = tokens / seconds if seconds else 0.0
    assert meter.read()["tokens_per_second"] == pytest.approx(want, rel=0.01, abs=0.1)


def test_a_clock_that_stood_still_gives_a_number_that_json_knows():
    meter = StepMeter(1, 1, clock=Clock(5.0))
    meter.add(10)
    assert json.loads(json.dumps(meter.read()))["tokens_per_second"] == 0.0


def test_a_reading_tells_the_memory_and_fits_into_a_bar():
    meter = StepMeter(1e6, 1e9, clock=Clock(0.0))
    meter.clock.now = 2.0
    meter.add(1000)
    reading = meter.read()
    assert reading["memory_gb"] == pytest.approx(used_memory() / 1e9, rel=0.01)
    assert describe(reading).startswith("500 tokens/s, 50% of the measured peak, ")
    assert describe(reading).endswith(" GB")
    assert ", faster than the measured peak, " in describe(reading | dict(of_measured_peak=3.85))


def test_mfu_is_the_share_of_the_datasheets_peak_as_in_the_field_and_the_measured_one_has_its_own_name():
    meter = StepMeter(1e6, 1e9, clock=Clock(0.0), promised=2e9)
    meter.clock.now = 2.0
    meter.add(1000)
    reading = meter.read()
    assert (reading["mfu"], reading["of_measured_peak"]) == (0.25, 0.5)
    assert describe(reading).startswith("500 tokens/s, MFU 25%")


@pytest.mark.parametrize(
    "name, dtype, promise",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, 67e12),
        ("a pretend GPU", torch.bfloat16, None),
    ],
)
def test_what_mfu_is_relative_to_is_known_for_gpus_of_the_table_only(monkeypatch, name, dtype, promise):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert promised_peak("cuda", dtype) == promise and promised_peak("cpu", dtype) is None


@pytest.mark.parametrize(
    "x, text",
    [
        (0.5, "0.5 "),
        (999, "999 "),
        (999.9, "1 k"),
        (999_960, "1 M"),
        (12345, "12.3 k"),
        (1.5e9, "1.5 G"),
        (2.5e15, "2.5 P"),
    ],
)
def test_numbers_are_written_with_three_digits_and_a_prefix(x, text):
    assert si(x) == text
