"""The ladder: rungs are command lines that work and stand on the kept ones below; the record is theirs."""

import importlib
import json
import math
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tinygpt.run.command import parse_arguments
from tinygpt.run.presets import preset
from tinygpt.speedrun import (
    GOAL,
    LADDER,
    Rung,
    climb,
    clock_error,
    gain,
    ladder_table,
    plot_ladder,
    run_command,
    rung_flags,
    seconds_to_goal,
    steps_to_goal,
)
from tinygpt.support import UserError

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
SMALL = (
    Rung("start", "", 100, ""),
    Rung("rate", "--learning-rate 4e-3", 80, ""),
    Rung("wide", "--n-embd 256", 70, "", kept=False),
    Rung("one layer", "--n-layer 1", 60, ""),
)


def settings(flags):
    return parse_arguments(flags).train


def test_a_rung_stands_on_the_kept_rungs_below_it_and_on_no_other():
    top = settings(rung_flags("one layer", SMALL))
    assert (top.model.n_layer, top.model.n_embd, top.optim.learning_rate, top.optim.max_steps) == (
        1,
        128,
        4e-3,
        60,
    )
    rejected = settings(rung_flags("wide", SMALL))
    assert (
        rejected.model.n_layer,
        rejected.model.n_embd,
        rejected.optim.learning_rate,
        rejected.optim.max_steps,
    ) == (4, 256, 4e-3, 70)


def test_the_first_rung_is_nanogpts_run_and_the_top_one_is_the_preset():
    first, top = (
        settings(rung_flags(LADDER[0].name)),
        settings(rung_flags([r for r in LADDER if r.kept][-1].name)),
    )
    published = preset("shakespeare-char-cpu")
    assert asdict(first.model) == asdict(published.model)
    assert replace(first.optim, max_steps=0) == replace(published.optim, max_steps=0)
    ours = preset("speedrun")
    assert (top.model, top.optim, top.data, top.system.dtype) == (
        ours.model,
        ours.optim,
        ours.data,
        ours.system.dtype,
    )


@pytest.mark.parametrize("rung", LADDER, ids=lambda r: r.name)
def test_every_rung_is_a_command_that_can_run_and_says_why(rung):
    config = settings(rung_flags(rung.name))
    config.data.source = "sotu"  # Tiny Shakespeare need not be there
    assert config.problems() == [] and rung.why.endswith(".")
    assert config.optim.max_steps == rung.steps


def test_the_record_is_that_of_this_ladder():
    record = json.loads((RESULTS / "speedrun_ladder.json").read_text())
    assert [r["name"] for r in record["rungs"]] == [r.name for r in LADDER]
    for rung in record["rungs"]:
        flags = rung_flags(rung["name"])
        length = flags.index("--max-steps")  # a rung runs at several
        assert rung["flags"] == flags[:length] + flags[length + 2 :], rung["name"]
        assert all(run["val_tokens"] == 111_540 for run in rung["runs"])
        assert len(steps_to_goal(rung["runs"])) >= 5, rung["name"]  # all seeds, on both sides of the goal


@pytest.mark.slow
def test_a_run_is_told_as_its_own_files_tell_it(tmp_path, words):
    flags = [
        "--data",
        str(words),
        "--tokenizer",
        "byte",
        "--max-steps",
        "3",
        "--n-layer",
        "1",
        "--n-embd",
        "16",
        "--block-size",
        "8",
        "--device",
        "cpu",
        "--eval-every",
        "1",
    ]
    found = run_command(
        ["speedrun", *flags, "--sample-tokens", "0", "--vocab-size", "257", "--ngram-rows", "50"],
        tmp_path,
        seed=5,
    )
    lines = [json.loads(line) for line in (tmp_path / "seed5/metrics.jsonl").read_text().splitlines()]
    assert found["loss"] == lines[-1]["val_loss"] and (found["steps"], found["seed"], found["tokens"]) == (
        3,
        5,
        3 * preset("speedrun").data.batch_size * 8,
    )
    assert json.loads((tmp_path / "seed5/config.json").read_text())["run"]["seed"] == 5
    assert 0 < found["cpu_s"] and 0 < found["wall_s"]


@pytest.mark.slow
def test_mistakes_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="'flying' is not a rung: choose one of start, rate"):
        rung_flags("flying", SMALL)
    with pytest.raises(UserError, match="failed.*n_head = 5"):
        run_command(["speedrun", "--n-head", "5"], tmp_path, seed=1)


def runs_of(curve, lengths=(80, 100), seeds=(1, 2, 3)):
    return [dict(seed=seed, steps=steps, loss=curve(steps, seed)) for steps in lengths for seed in seeds]


def test_a_command_that_dies_without_a_word_is_told_by_its_status(monkeypatch, tmp_path):
    "As one that the kernel kills: nothing stands in its stderr."
    died = SimpleNamespace(returncode=-9, stderr="")
    monkeypatch.setattr("tinygpt.speedrun.timed_process", lambda *_, **__: (died, 1.0, 1.0))
    with pytest.raises(UserError, match="failed: status -9"):
        run_command(["speedrun"], tmp_path, seed=1)


def test_steps_to_the_goal_are_found_where_the_loss_is_a_line_over_the_logarithm():
    def curve(steps, seed):
        return 2.5 - 0.14 * math.log(steps) + 0.003 * seed

    runs = runs_of(curve, (60, 80, 100))
    assert {s: round(curve(steps, s), 9) for s, steps in steps_to_goal(runs).items()} == dict.fromkeys(
        (1, 2, 3), GOAL
    )
    with pytest.raises(UserError, match=r"\[60, 80\] steps end on one side of 1.88: add a length"):
        steps_to_goal(runs_of(curve, (60, 80)))


def test_only_the_two_lengths_beside_the_goal_count():
    runs = runs_of(lambda steps, seed: {50: 9.0, 80: 1.9, 100: 1.86, 200: -5.0}[steps], (50, 80, 100, 200))
    assert all(steps == pytest.approx(math.sqrt(80 * 100)) for steps in steps_to_goal(runs).values())


def test_what_a_seed_has_too_much_at_one_length_and_too_little_at_the_other_evens_out():
    runs = runs_of(lambda steps, seed: {80: 1.9 + 0.01 * (seed - 2), 100: 1.86 - 0.01 * (seed - 2)}[steps])
    assert list(steps_to_goal(runs).values()) == pytest.approx([math.sqrt(80 * 100)] * 3)


def rung_of(name, kept, wins=0.0, a_step=0.1):
    "A rung whose losses are lower by `wins`, and whose commands take 3 seconds and `a_step` for each step."
    runs = runs_of(lambda steps, seed: 1.93 - 0.09 * (steps == 100) - wins * (steps == 100) + 0.001 * seed)
    clock = dict(command_s=[2.9 + a_step, 3.1 + a_step], step_s=[0.99 * a_step, a_step, 1.01 * a_step])
    return dict(name=name, kept=kept, runs=runs, clock=clock)


def test_seconds_are_what_every_run_costs_and_what_its_steps_cost():
    rung = rung_of("one layer", True)
    steps = steps_to_goal(rung["runs"])
    assert seconds_to_goal(rung) == {seed: pytest.approx(3 + 0.1 * n) for seed, n in steps.items()}


def test_the_clocks_error_is_that_of_command_and_steps_together():
    rung = rung_of("one layer", True, a_step=0.2)
    steps = sorted(steps_to_goal(rung["runs"]).values())[1]
    rng = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 100_000, generator=rng, dtype=torch.float64)
    # of two readings 0.1 above and below, and of three, 0.002 apart: deviation / sqrt(readings)
    command, step = 3.2 + 0.1 * draws[0], 0.2 + 0.002 / 3**0.5 * draws[1]
    seconds = command + (steps - 1) * step
    assert clock_error(rung) == pytest.approx((seconds.std() / seconds.median()).item(), rel=0.02)


def test_the_gain_is_students_interval_of_the_logarithms_of_paired_ratios():
    below, here = {1: 10.0, 2: 12.0, 3: 9.0}, {3: 6.0, 1: 5.0, 2: 5.5}
    logs = torch.tensor([10 / 5, 12 / 5.5, 9 / 6], dtype=torch.float64).log()
    half = 4.302652729696142 * logs.std() / 3**0.5  # Student's point for two degrees of freedom
    expected = torch.stack([logs.mean(), logs.mean() - half, logs.mean() + half]).exp()
    assert gain(below, here) == pytest.approx(expected.tolist(), rel=1e-3)
    mean, low, high = gain(below, here, clock=0.3)
    assert mean == pytest.approx(expected[0].item(), rel=1e-3)
    assert math.log(high / mean) == pytest.approx(math.hypot(half.item(), 0.6), rel=1e-3) and low < mean


def test_each_rung_is_compared_with_the_kept_one_below_it():
    rungs = [
        rung_of("start", True),
        rung_of("wide", False, a_step=1.0),
        rung_of("one layer", True, a_step=0.05),
    ]
    rows = climb(rungs)
    assert [row["gain"][0] for row in rows] == [
        1,
        pytest.approx(12 / 93, rel=0.1),
        pytest.approx(12 / 7.5, rel=0.1),
    ]
    assert not any(row["noise"] for row in rows)  # the first one has nothing to be compared with
    table = ladder_table(rows).splitlines()
    assert table[2].lstrip().startswith("(wide)") and "inside" not in table[3] and "to" in table[3]
    rows[2]["seconds"] = {1: 5.0, 2: 7.0, 3: 30.0}
    assert f" {rows[2]['steps']:.0f} " in table[3] and " 7.0 " in ladder_table(rows).splitlines()[3]
    ax = plot_ladder(rows)
    small, large = ax.lines[0::2], ax.lines[1::2]
    assert [len(line.get_xdata()) for line in small] == [3] * 3
    assert [line.get_xdata()[0] for line in large] == [
        statistics.median(row["seconds"].values()) for row in rows
    ]
    assert small[1].get_color() != small[0].get_color() == small[2].get_color()


def test_a_gain_whose_interval_holds_1_is_told_to_be_noise():
    same = rung_of("again", True)
    for run in same["runs"]:
        run["loss"] += 0.004 * (run["seed"] - 2)
    assert climb([rung_of("start", True), same])[1]["noise"] and "inside the noise" in ladder_table(
        climb([rung_of("start", True), same])
    )


def test_a_new_clock_is_not_mixed_with_an_older_days_readings(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(RESULTS.parent)
    benchmark = importlib.import_module("speedrun")
    first, other = LADDER[0].name, LADDER[1].name
    older = {"step_s": [9.0], "command_s": [99.0]}
    record = {"rungs": []}
    for rung in LADDER:
        flags = benchmark._settings(rung.name)
        record["rungs"].append(dict(name=rung.name, flags=flags, kept=rung.kept, runs=[], clock=dict(older)))
    monkeypatch.setattr(benchmark, "load", lambda name: record)
    monkeypatch.setattr(benchmark, "save", lambda name, found: record.update(found))
    monkeypatch.setattr(benchmark, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(benchmark, "open_run", lambda config: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(benchmark, "_step_timer", lambda run: lambda: 0.1)
    monkeypatch.setattr(benchmark, "run_command", lambda *_: {"cpu_s": 5.0})

    benchmark.clock_rungs(SimpleNamespace(rung=[first], repeats=2))
    clocks = {rung["name"]: rung["clock"] for rung in record["rungs"]}
    assert clocks[first] == {"step_s": [0.1] * 10, "command_s": [5.0] * 2}
    assert clocks[other] == older
