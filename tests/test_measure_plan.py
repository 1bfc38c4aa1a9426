"""The planner's table: sizes as published, arithmetic by hand, mistakes told in one sentence."""

import pytest
import torch

from tinygpt.measure.__main__ import main
from tinygpt.measure.memory import predict_memory
from tinygpt.measure.plan import SIZES, measure_training_flops, plan, table
from tinygpt.measure.speed import flops_per_token
from tinygpt.model import GPTConfig


def run(capsys, *argv):
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


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
    small = next(
        p
        for p in plan(1e10, 2e12, tokens=10**9, variant="llama", block_size=256, vocab_size=5000)
        if p.name == "small"
    )
    assert small.seconds == pytest.approx(1e9 * flops_per_token(config) / 2e12)
    assert small.memory == predict_memory(config, 1).total


def test_without_tokens_each_size_gets_twenty_for_each_parameter():
    assert all(p.tokens == 20 * p.params for p in plan(1e10, 1e12))


def test_the_largest_that_fits_is_the_last_that_says_yes(capsys):
    status, out, err = run(capsys, "--memory", "8", "--speed", "50", "--batch-size", "2", "--device", "cpu")
    assert status == 0 and not err
    fits = [line.split()[0] for line in out.splitlines() if "  yes " in line]
    assert fits and f"is {fits[-1]}." in out and "Assumed" in out
    assert all(p.memory <= 8e9 for p in plan(8e9, 5e13, batch_size=2) if p.name in fits)


def test_a_machine_too_small_for_anything_gets_a_table_all_the_same(capsys):
    status, out, err = run(capsys, "--memory", "0.01", "--speed", "1", "--device", "cpu")
    assert status == 0 and "none trains in 0.0 GB" in out and " yes " not in out


def test_a_gpu_that_is_not_here_can_be_planned_for(capsys):
    status, out, _ = run(
        capsys, "--device", "cuda", "--memory", "80", "--speed", "400", "--tokens", "10B", "--batch-size", "8"
    )
    assert status == 0 and "bfloat16" in out and "10 B" in out


@pytest.mark.parametrize("argv, words", [
    (["--tokens", "abc"], "--tokens"), (["--tokens", "-5"], "--tokens"), (["--tokens", "1.5"], "--tokens"), (["--tokens", "nan"], "--tokens"),
    (["--tokens", "1e99"], "--tokens"), (["--tokens", ""], "--tokens"), (["--batch-size", "0"], "--batch-size"),
    (["--memory", "inf"], "--memory"), (["--memory", "0"], "--memory"), (["--variant", "gpt5"], "gpt5"), (["--fast"], "--fast"),
    (["--speed"], "--speed"), (["--vocab-size", "1e15", "--memory", "8"], "vocab_size"), (["--dtype", "int8"], "int8"),
    pytest.param(["--device", "cuda"], "device = cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
])  # fmt: skip
def test_a_mistake_is_told_in_one_sentence_with_exit_code_2(capsys, argv, words):
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.parametrize(
    "text, count",
    [("10", "10"), ("300M", "300 M"), ("10B", "10 B"), ("1e9", "1 B"), ("2.5k", "2.5 k"), ("1T", "1 T")],
)
def test_counts_may_have_a_suffix(capsys, text, count):
    _, out, _ = run(capsys, "--tokens", text, "--memory", "8", "--speed", "1", "--device", "cpu")
    assert f"  {count}  " in out.splitlines()[1]


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0 and "--tokens" in capsys.readouterr().out


def test_every_size_works_in_every_variant():
    for variant in ("gpt2", "llama", "modern"):
        for optimizer in ("adamw", "muon"):
            plans = plan(24e9, 1e12, variant=variant, optimizer=optimizer)
            assert [p.name for p in plans] == list(SIZES)
            assert table(plans, 24e9).count("\n") == len(SIZES)


def test_the_speed_is_measured_on_real_training_steps():
    config = GPTConfig.gpt2(vocab_size=256, block_size=64, n_layer=2, n_head=2, n_embd=64)
    assert 1e7 < measure_training_flops(config, tokens=128) < 1e13
