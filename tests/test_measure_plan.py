"""The planner: sizes as published, arithmetic by hand."""

import pytest

import tinygpt.measure.plan as module
from tinygpt.measure.memory import predict_memory
from tinygpt.measure.plan import SIZES, measure_training_flops, plan
from tinygpt.measure.speed import flops_per_token
from tinygpt.model import GPTConfig
from tinygpt.support import Timing


def test_sizes_have_the_parameters_that_the_papers_say():
    params = {p.name: p.params for p in plan(1e12, 1e12)}
    published = {
        "small": 124e6,
        "medium": 355e6,
        "large": 774e6,
        "xl": 1558e6,
        "2.7b": 2.65e9,
        "6.7b": 6.65e9,
        "13b": 12.85e9,
    }
    for name, n in published.items():
        assert params[name] == pytest.approx(n, rel=0.01), name
    assert sorted(params.values()) == list(params.values())


def test_time_is_tokens_times_flops_over_speed():
    config = GPTConfig.llama(vocab_size=5000, block_size=256, n_layer=12, n_head=12, n_embd=768)
    plans = plan(1e10, 2e12, tokens=10**9, variant="llama", block_size=256, vocab_size=5000)
    small = next(p for p in plans if p.name == "small")
    assert small.seconds == pytest.approx(1e9 * flops_per_token(config) / 2e12)
    assert small.memory == predict_memory(config, 1).total


def test_without_tokens_each_size_gets_twenty_for_each_parameter():
    assert all(p.tokens == 20 * p.params for p in plan(1e10, 1e12))


def test_every_size_works_in_every_variant():
    for variant in ("gpt2", "llama", "modern"):
        for optimizer in ("adamw", "muon"):
            plans = plan(24e9, 1e12, variant=variant, optimizer=optimizer)
            assert [p.name for p in plans] == list(SIZES)


def test_the_speed_is_that_of_real_training_steps_of_the_tokens_asked_for(monkeypatch):
    config = GPTConfig.gpt2(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=64)
    real = module.training_step
    made = []

    def training_step(config, rows, **settings):
        step, tensors = real(config, rows, **settings)
        made.append((rows, tensors))
        return step, tensors

    def timed(step, **settings):
        _, tensors = made[-1]
        before = [t.clone() for t in tensors()[:1]]
        step()
        assert not tensors()[0].equal(before[0]), "the weights move"
        return Timing(median=0.5, min=0.1, max=0.9)

    monkeypatch.setattr(module, "training_step", training_step)
    monkeypatch.setattr(module, "measure_time", timed)  # no other program can disturb it
    for tokens, rows in ((128, 2), (200, 3), (10, 1)):
        speed = measure_training_flops(config, tokens=tokens)
        assert made[-1][0] == rows
        assert speed == pytest.approx(flops_per_token(config) * rows * 64 / 0.5)
