import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from events import wait_until

from tinygpt.run.report import RunLog, metric_sinks, plot_losses, read_metrics, smooth, write_report
from tinygpt.support import UserError
from tinygpt.train import train


def test_lines_are_on_the_disk_as_soon_as_they_are_written(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.write(step=0, loss=1.5)
    log.say("hello")
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 1.5}] and (
        tmp_path / "log.txt"
    ).read_text().endswith("hello\n")
    log.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows moves no folder with an open file in it")
def test_a_log_whose_folder_was_moved_goes_on_in_the_new_one_with_all_its_lines(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = RunLog(folder, show=lambda text: None)
    log.write(step=0, loss=1.5)
    log.say("hello")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    log.follow()
    log.write(step=1, loss=1.25)
    log.say("again")
    log.close()
    assert read_metrics(folder) == [{"step": 0, "loss": 1.5}, {"step": 1, "loss": 1.25}]
    said = [line.split(" ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]
    assert said == ["hello", "again"]
    assert len(read_metrics(tmp_path / "moved")) == 1


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_metrics(tmp_path) == [{"step": 0}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_resumed_run_cuts_what_it_will_make_again(tmp_path):
    first = RunLog(tmp_path, show=lambda text: None)
    for step in range(10):
        first.write(step=step, loss=3.0)
    first.close()
    second = RunLog(tmp_path, from_step=6, show=lambda text: None)
    second.write(step=6, loss=2.0)
    second.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(7))
    RunLog(tmp_path, show=lambda text: None).close()  # a fresh run starts with nothing
    assert read_metrics(tmp_path) == []


def test_the_last_validation_stands_once_however_often_a_finished_run_is_resumed(tmp_path):
    log = RunLog(tmp_path)
    log.write(step=0, loss=2.0)
    log.write(step=1, val_loss=1.5, val_tokens=10)
    log.write(step=1, val_loss=1.25, val_tokens=99)
    log.close()
    whole = (tmp_path / "metrics.jsonl").read_text()
    for _ in range(3):
        resumed = RunLog(tmp_path, from_step=1)
        resumed.write(step=1, val_loss=1.25, val_tokens=99)
        resumed.close()
        assert (tmp_path / "metrics.jsonl").read_text() == whole
    # another value is another line: nothing that was measured is dropped
    other = RunLog(tmp_path, from_step=1)
    other.write(step=1, val_loss=1.26, val_tokens=99)
    other.close()
    assert [line["val_loss"] for line in read_metrics(tmp_path) if "val_loss" in line] == [1.5, 1.25, 1.26]


def test_what_an_objective_measured_at_the_step_of_a_resume_is_not_made_again_and_stays(tmp_path):
    log = RunLog(tmp_path)
    for step in range(4):
        log.write(step=step, loss=2.0)
    log.write(step=4, val_loss=1.5)
    log.write(step=4, right_all=0.25)
    log.close()
    whole = (tmp_path / "metrics.jsonl").read_text()
    for again in ({}, dict(step=4, right_all=0.25)):  # in mid-run, and of a finished one
        resumed = RunLog(tmp_path, from_step=4)
        if again:
            resumed.write(**again)
        resumed.close()
        assert (tmp_path / "metrics.jsonl").read_text() == whole


def test_values_that_are_not_finite_can_be_read_back(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.write(step=0, loss=math.nan, grad_norm=math.inf)
    log.write(step=1, val_loss=-math.inf)
    log.close()
    before, after = read_metrics(tmp_path)
    assert math.isnan(before["loss"]) and math.isnan(before["grad_norm"]) and math.isnan(after["val_loss"])
    plot_losses([before, after], tmp_path / "loss.png")


def test_every_line_of_the_metrics_is_json_also_after_a_resume(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": NaN}\n')  # of an older version
    log = RunLog(tmp_path, from_step=1, show=lambda text: None)
    log.write(step=1, loss=math.nan, grad_norm=math.inf, figures=[-math.inf, 1.5])
    log.write(step=2, val_loss=math.nan)
    log.close()
    log = RunLog(tmp_path, from_step=2, show=lambda text: None)
    log.write(step=2, val_loss=math.nan)  # once more: it stands there already
    log.close()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(text, parse_constant=refuse) for text in texts]
    assert lines == [
        dict(step=0, loss=None),
        dict(step=1, loss=None, grad_norm=None, figures=[None, 1.5]),
        dict(step=2, val_loss=None),
    ]


def test_the_running_mean_starts_at_the_first_value_and_stays_within_the_values():
    assert smooth([3.0])[0] == pytest.approx(3.0)
    values = [5.0, 1.0, 4.0, 2.0, 8.0]
    assert all(min(values) <= v <= max(values) for v in smooth(values))
    assert smooth([2.0] * 7) == pytest.approx([2.0] * 7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_leaves_the_running_mean_as_it_was(bad):
    mean = smooth([2.0, 1.0, bad, 3.0])
    assert mean[:2] == smooth([2.0, 1.0]) and mean[2] == mean[1] and mean[3] == smooth([2.0, 1.0, 3.0])[-1]
    assert math.isnan(smooth([bad, 2.0])[0]) and smooth([bad, 2.0])[1] == 2.0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["c$_$", "文", "a\\$b$"])
def test_a_picture_is_drawn_under_any_name_that_a_run_may_have(name, tmp_path):
    "One would be a formula that cannot be read, one has a letter that the font lacks."
    plot_losses([dict(step=0, loss=3.0)], tmp_path / "loss.png", f"{name}: validation 3.000")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_a_png_and_nothing_to_draw_is_a_sentence(tmp_path):
    lines = [dict(step=i, loss=3.0 - i) for i in range(3)] + [dict(step=3, val_loss=1.0)]
    plot_losses(lines, tmp_path / "loss.png", "title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError):
        plot_losses([json.loads("{}")], tmp_path / "none.png")


def test_tensorboard_gets_the_same_values(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, show=lambda text: None, sinks=metric_sinks(tmp_path, True, "", {}))
    for step in range(3):
        log.write(step=step, loss=5.0 - step, lr=0.1)
    log.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [(e.step, e.value) for e in seen.Scalars("loss")] == [(0, 5.0), (1, 4.0), (2, 3.0)]


def test_wandb_keeps_the_values_on_the_disk_when_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in dict(
        WANDB_MODE="offline",
        WANDB_SILENT="true",
        WANDB_CACHE_DIR=str(tmp_path),
        WANDB_CONFIG_DIR=str(tmp_path),
        WANDB_DATA_DIR=str(tmp_path),
    ).items():
        monkeypatch.setenv(name, value)
    log = RunLog(
        tmp_path,
        show=lambda text: None,
        sinks=metric_sinks(tmp_path, False, "lessons", {"optim": {"lr": 0.1}}),
    )
    log.write(step=0, loss=5.0)
    log.close()
    files = "wandb/offline-run-*/*.wandb"  # another process of W&B's writes them
    wait_until(lambda: any(b"loss" in file.read_bytes() for file in tmp_path.glob(files)))


HOSTILE = "# a | b\n```\n<script>x</script> [here](http://x) `code` ``more`` ![](x) ~~gone~~ $x$ &amp; *so*"


def test_hostile_text_stands_in_the_report_as_text(tmp_path):
    "Names, settings, prompts and samples: no heading, no table, no link, no block of theirs."
    (tmp_path / "samples.txt").write_text(f"--- step 5\n{HOSTILE}\n````\n# out\n", encoding="utf-8")
    commands = {"Write": f"python -m x --prompt '{HOSTILE}'"}
    settings = {"eval": {"prompt": HOSTILE, "name": "a|b`c`", "empty": "", "ticks": "`"}}
    text = write_report(tmp_path, f"The run {HOSTILE}", {"speed": HOSTILE}, settings, commands).read_text()
    outside, fence = [], ""
    for line in text.splitlines():  # leave out what stands between fences
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = "`" * (len(line) - len(line.lstrip("`")))
        else:
            outside.append(line)
    assert not fence
    headings = [line for line in outside if line.startswith("#")]
    assert headings[1:] == ["## A sample", "## Go on", "## Settings", "## Environment"]
    rows = [line for line in outside if line.startswith("|")]
    for row in rows:  # a name, a value: two cells
        assert len(re.findall(r"(?<!\\)\|", row)) == 3, row
    plain = "\n".join(outside)
    for markup in ("<script>", "[here](", "~~gone~~", "$x$"):
        assert not re.search(
            r"(?<![\\])" + re.escape(markup), re.sub(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)", "", plain)
        )
    assert "| ticks | `` ` `` |" in plain


def test_ordinary_text_is_not_disfigured(tmp_path):
    text = write_report(
        tmp_path, "The run laptop", {"loss": "3.1, 20 k tokens/s (2 %)"}, {"a": {"b": (1, 2)}}, {}
    )
    assert (
        "# The run laptop\n" in text.read_text() and "| loss | 3.1, 20 k tokens/s (2 %) |" in text.read_text()
    )
    assert "| b | `(1, 2)` |" in text.read_text()


def test_to_disk_waits_for_the_file_of_the_metrics(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    log = RunLog(tmp_path, show=lambda text: None)
    synced.clear()  # opening it is another matter
    log.to_disk()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_ino]
    log.close()


def test_what_fails_is_said_once_and_not_tried_again(tmp_path, capsys):
    log, tries = RunLog(tmp_path, show=lambda text: None), []

    def fail(number):
        tries.append(number)
        raise ValueError(f"no {number}")

    assert [log.attempt("curve", fail, number) for number in range(3)] == [None] * 3
    assert tries == [0] and log.attempt("report", lambda: 7) == 7
    said = capsys.readouterr().err
    assert said == "curve cannot be written (ValueError: no 0); the run continues without it\n"
    log.close()


def test_a_service_that_fails_is_left_out_and_the_file_and_the_others_go_on(tmp_path, capsys):
    got, closed = [], []

    def down(values):
        raise ConnectionError("no network")

    sinks = [(down, lambda: closed.append(0)), (got.append, lambda: closed.append(1))]
    log = RunLog(tmp_path, show=lambda text: None, sinks=sinks)
    for step in range(3):
        log.write(step=step)
    log.close()
    assert got == read_metrics(tmp_path) == [dict(step=0), dict(step=1), dict(step=2)] and 1 in closed
    assert capsys.readouterr().err.count("continues without it") == 1


def test_a_file_that_cannot_be_opened_is_left_out(tmp_path, capsys):
    (tmp_path / "log.txt").mkdir()
    log = RunLog(tmp_path, show=lambda text: None)
    log.say("hello")
    log.write(step=0)
    log.close()
    assert read_metrics(tmp_path) == [dict(step=0)]
    assert "log.txt: Is a directory" in capsys.readouterr().err


def test_half_of_a_surrogate_pair_can_be_said(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.say("a\ud800b")
    log.close()
    assert r"a\ud800b" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    "text, word",
    [
        ("noise\n" + '{"step": 1}\n', "line 1"),
        ('{"step": 0}\n[]\n{"step": 1}\n', "line 2"),
        ('{"step": 0}\n{"loss": 1}\n{"step": 1}\n', "line 2"),
        ('{"step": "0"}\n{"step": 1}\n', "line 1"),
        ('{"step": 0, "loss": "low"}\n{"step": 1}\n', "line 1"),
        ('{"step": 0, "val_loss": [1]}\n{"step": 1}\n', "line 1"),
        ("[" * 100_000 + "\n{}", "line 1"),
    ],
)
def test_a_line_that_is_none_of_a_run_is_named_with_a_remedy_that_works(tmp_path, text, word):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=f"metrics.jsonl, {word} .*, or move it away"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "away")
    assert read_metrics(tmp_path) == []


def test_the_report_holds_results_settings_the_last_sample_and_the_commands(tmp_path):
    (tmp_path / "samples.txt").write_text(
        "--- step 5\nearly\n--- step 10\nlate words\nand more\n", encoding="utf-8"
    )
    text = write_report(
        tmp_path, "A run", {"loss": "3.1"}, {"optim": {"lr": 0.25}}, {"Go on": "python -m x"}
    ).read_text(encoding="utf-8")
    for part in (
        "# A run",
        "| loss | 3.1 |",
        "```\nlate words\nand more\n```",
        "| lr | `0.25` |",
        "```bash\npython -m x\n```",
        "![training and validation loss](loss.png)",
        torch.__version__,
    ):
        assert part in text, part
    assert "early" not in text


class Stub:
    "W&B's module, which notes how it is called."

    def __init__(self):
        self.calls, self.logged = [], []

    def init(self, **settings):
        self.calls.append(settings)
        logged = self.logged
        return SimpleNamespace(
            id=settings.get("id", f"made{len(self.calls)}"),
            log=lambda values, step: logged.append((step, values)),
            finish=lambda: None,
        )


@pytest.fixture
def stub(monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    stub = Stub()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_a_run_that_goes_on_is_the_same_one_of_wandb_and_a_new_one_is_another(stub, tmp_path):
    for from_step in (0, 5, 0):
        [(write, close)] = metric_sinks(tmp_path, False, "lessons", {"optim": {"lr": 0.1}}, from_step)
        write(dict(step=from_step, loss=1.0))
    first, resumed, anew = stub.calls
    assert first["project"] == "lessons" and first["name"] == tmp_path.name and "id" not in first
    assert resumed == first | dict(id="made1") and resumed["resume"] == "allow"
    assert "id" not in anew and (tmp_path / "wandb/id.txt").read_text() == "made3\n"
    assert stub.logged == [(0, {"loss": 1.0}), (5, {"loss": 1.0}), (0, {"loss": 1.0})]


def test_the_environments_wandb_variables_win_over_what_the_run_would_say(stub, tmp_path, monkeypatch):
    for name in ("NAME", "DIR", "RESUME", "RUN_ID", "ENTITY", "RUN_GROUP", "TAGS"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    metric_sinks(tmp_path, False, "lessons", {})
    assert stub.calls == [dict(project="lessons", config={}, allow_val_change=True)]


def test_a_resumed_run_goes_on_with_its_wandb_run(stub, config):
    config.run.wandb, config.eval = "lessons", replace(config.eval, save_every=10, eval_every=0)
    stub.__spec__ = object()  # the settings' check looks whether the package is there
    whole = train(config, progress="none")
    shutil.rmtree(whole.run / "checkpoints/step_000020")
    train(config, progress="none", resume=True)
    assert [call.get("id") for call in stub.calls] == [None, "made1"]
    assert [step for step, values in stub.logged if "loss" in values] == [*range(20), *range(10, 20)]


def test_tensorboard_hides_the_steps_that_are_made_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, from_step in ((range(8), 0), (range(5, 10), 5)):  # killed at 8, saved at 5
        log = RunLog(tmp_path, from_step, lambda text: None, metric_sinks(tmp_path, True, "", {}, from_step))
        for step in steps:
            log.write(step=step, loss=10.0 * (from_step + 1) + step)
            if step == 4:
                log.write(step=5, val_loss=3.0)  # of the checkpoint: it is not made again
        log.close()
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    made = {e.step: e.value for e in seen.Scalars("loss")}  # the later one of a step
    assert made == {step: 10.0 + step for step in range(5)} | {step: 60.0 + step for step in range(5, 10)}
    assert [e.step for e in seen.Scalars("loss")].count(6) == 1
    assert [(e.step, e.value) for e in seen.Scalars("val_loss")] == [(5, 3.0)]
