"""`python -m tinygpt.measure`: the table, the flags, and mistakes told in one sentence."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

import tinygpt.measure.__main__ as module
from tinygpt.measure.__main__ import Options, main, read_request, table, usable_speed
from tinygpt.measure.memory import predict_memory
from tinygpt.measure.plan import SIZES, plan, plan_one, sized_config
from tinygpt.model import GPTConfig
from tinygpt.run.presets import preset
from tinygpt.support import UserError


def run(capsys, *argv):
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


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


MISTAKES = [
    (["--tokens", "abc"], "--tokens"),
    (["--tokens", "-5"], "--tokens"),
    (["--tokens", "1.5"], "--tokens"),
    (["--tokens", "nan"], "--tokens"),
    (["--tokens", "1e99"], "--tokens"),
    (["--tokens", "1e999999999"], "--tokens"),
    (["--tokens", ""], "--tokens"),
    (["--batch-size", "0"], "--batch-size"),
    (["--memory", "inf"], "--memory"),
    (["--memory", "0"], "--memory"),
    (["--variant", "gpt5"], "gpt5"),
    (["--fast"], "--fast"),
    (["--vocab-size", "1e9", "--memory", "8"], "vocab_size"),
    (["--dtype", "int8"], "int8"),
]


@pytest.mark.parametrize("argv, words", MISTAKES)
def test_a_mistake_is_told_in_one_sentence_with_exit_code_2(capsys, argv, words):
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_needs_its_memory_and_speed(capsys):
    status, out, err = run(capsys, "--device", "cuda")
    assert status == 2 and not out
    assert err.startswith("error: ") and err.count("\n") == 1 and "device = cuda" in err


def test_a_flag_without_its_value_ends_with_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--speed"])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and not out and "--speed" in err


@pytest.mark.parametrize(
    "text, count",
    [
        ("10", "10"),
        ("300M", "300 M"),
        ("10B", "10 B"),
        ("1e9", "1 B"),
        ("2.5k", "2.5 k"),
        ("4.1B", "4.1 B"),
        ("1T", "1 T"),
    ],
)
def test_counts_may_have_a_suffix(capsys, text, count):
    _, out, _ = run(capsys, "--tokens", text, "--memory", "8", "--speed", "1", "--device", "cpu")
    assert f"  {count}  " in out.splitlines()[1]


def test_a_plan_for_a_larger_machine_measures_no_more_than_fits_here(monkeypatch):
    request = read_request(Options(memory="80", vocab_size="128256", device="cpu"))
    probe = sized_config("gpt2", 128256, 512)
    two_rows = predict_memory(probe, 2, **request.settings).total
    asked = []
    monkeypatch.setattr(module, "measure_training_flops", lambda *given: asked.append(given[-1]) or 1e12)
    request.device = "cuda"  # where the probe would like 32 rows
    monkeypatch.setattr(module, "available_memory", lambda device: two_rows / 0.79)
    assert usable_speed(request, 80e9) == 1e12 and asked == [2 * 512]
    monkeypatch.setattr(module, "available_memory", lambda device: 1e6)
    with pytest.raises(UserError, match="0.0 GB here.*give --speed"):
        usable_speed(request, 80e9)
    monkeypatch.setattr(module, "available_memory", lambda device: None)  # the system does not tell
    assert usable_speed(request, 80e9) == 1e12 and asked[1:] == [32 * 512]


def test_help_explains_itself(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0 and "--tokens" in capsys.readouterr().out


def test_the_table_has_a_line_for_every_size_in_every_variant():
    for variant in ("gpt2", "llama", "modern"):
        for optimizer in ("adamw", "muon"):
            plans = plan(24e9, 1e12, variant=variant, optimizer=optimizer)
            assert table(plans, 24e9).count("\n") == len(SIZES)


def test_python_m_measure_prints_the_plan_and_tells_a_mistake_in_one_line():
    flags = ["--memory", "4", "--speed", "1", "--tokens", "1B"]
    command = [sys.executable, "-m", "tinygpt.measure", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "the largest that trains in 4.0 GB is" in done.stdout and not done.stderr
    done = subprocess.run([*command, "--batch-size", "many"], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "'many'" in done.stderr


@pytest.fixture
def a_run(tmp_path):
    "A run's folder as the trainer writes it, before its first step."
    config = preset("laptop")
    config.model = GPTConfig.modern(vocab_size=300, block_size=64, n_layer=3, n_head=2, n_embd=32)
    config.data.batch_size, config.data.micro_batch_size = 8, 4
    config.optim.optimizer, config.optim.max_steps = "muon", 100
    (tmp_path / "mine/checkpoints/step_000100").mkdir(parents=True)
    (tmp_path / "mine/config.json").write_text(json.dumps(asdict(config)))
    return tmp_path / "mine", config.model


@pytest.mark.parametrize("part", ["", "checkpoints/step_000100"])
def test_a_run_is_planned_for_with_its_own_settings(capsys, a_run, part):
    folder, model = a_run
    here = ["--memory", "8", "--speed", "1", "--device", "cpu"]
    status, out, err = run(capsys, str(folder / part), *here)
    assert status == 0 and not err
    own = dict(optimizer="muon", micro_steps=2)
    lines, p = out.splitlines(), plan_one("the run", model, 8e9, 1e12, 100 * 8 * 64, 4, **own)
    assert lines[:2] == table([p], 8e9).splitlines() and not lines[2]
    step = "4 rows of 64 tokens per forward pass, muon, 2 micro-steps"
    assert lines[3] == f"{folder / part}, {step}: it trains in 8.0 GB."
    more = ["--batch-size", "2", "--block-size", "32", "--optimizer", "adamw", "--tokens", "1M"]
    out = run(capsys, str(folder / part), *more, *here)[1]
    p = plan_one("the run", replace(model, block_size=32), 8e9, 1e12, 10**6, 2, micro_steps=4)
    assert out.startswith(table([p], 8e9))
    assert "2 rows of 32 tokens per forward pass, adamw, 4 micro-steps: it trains" in out
    out = run(capsys, str(folder / part), "--batch-size", "9", *here)[1]
    assert "9 rows of 64 tokens per forward pass, muon: it trains" in out
    out = run(capsys, str(folder / part), "--memory", "0.0001", "--speed", "1", "--device", "cpu")[1]
    assert "it does not train in 0.0 GB" in out


@pytest.mark.parametrize("saving", [{}, dict(checkpoint_activations=True), None])  # None: an older run
@pytest.mark.parametrize("chunk", [0, 64])
def test_a_runs_loss_chunk_is_counted_and_its_checkpointing_said_not_to_be(capsys, a_run, saving, chunk):
    folder, model = a_run
    kept = json.loads((folder / "config.json").read_text())
    kept["model"]["vocab_size"] = 20_000
    if saving is None:
        del kept["system"]
    else:
        kept["system"] |= saving | dict(loss_chunk=chunk)
    (folder / "config.json").write_text(json.dumps(kept))
    chunk = 0 if saving is None else chunk
    # in float32 a step holds log-probabilities, tanh, logits and their gradient: 16 bytes a token and id
    whole = 16 * 4 * 64 * 20_000
    out = run(capsys, str(folder), "--memory", f"{whole / 1e9}", "--speed", "1", "--device", "cpu")[1]
    told = ", without its checkpoint_activations" if saving else ""
    verdict = "trains" if chunk else "does not train"
    assert f"per forward pass, muon, 2 micro-steps{told}: it {verdict} in 0.1 GB.\n" in out
    logits = "the logits of 64 tokens" if chunk else "all logits"
    assert f"no activation checkpointing, {logits} at once;" in out


def test_the_speed_of_a_run_is_measured_on_two_layers_of_its_model(capsys, a_run, monkeypatch):
    folder, model = a_run
    asked = []
    monkeypatch.setattr(module, "measure_training_flops", lambda *given: asked.append(given[0]) or 1e12)
    out = run(capsys, str(folder), "--memory", "8", "--device", "cpu")[1]
    assert asked == [replace(model, n_layer=2)] and "measured here on two layers 32 wide" in out


def test_what_is_no_run_is_told_in_one_sentence(capsys, a_run, tmp_path):
    folder, _ = a_run
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text('{"model_type": "llama"}')
    for argv, words in (
        ([str(tmp_path / "nowhere")], "holds no config.json"),
        ([tmp_path.root], "holds no config.json"),
        ([tmp_path.root + tmp_path.parts[1]], "holds no config.json"),
        ([""], "holds no config.json"),
        ([str(tmp_path / "theirs")], "holds no settings of a run"),
        ([str(folder), "--variant", "llama"], "leave --variant out"),
        ([str(folder), "--batch-size", "many"], "--batch-size"),
    ):
        status, out, err = run(capsys, *argv)
        assert status == 2 and not out and words in err and err.count("\n") == 1
