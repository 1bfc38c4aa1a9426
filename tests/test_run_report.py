import json
import math

import pytest
import torch
from events import wait_until

from tinygpt.run.report import RunLog, metric_sinks, plot_losses, read_metrics, smooth, write_report
from tinygpt.support import UserError


def test_lines_are_on_the_disk_as_soon_as_they_are_written(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.write(step=0, loss=1.5)
    log.say("hello")
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 1.5}] and (
        tmp_path / "log.txt"
    ).read_text().endswith("hello\n")
    log.close()


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_metrics(tmp_path) == [{"step": 0}]
    assert read_metrics(tmp_path / "nowhere") == []


def test_a_resumed_run_cuts_what_it_will_make_again(tmp_path):
    first = RunLog(tmp_path, show=lambda text: None)
    for step in range(10):
        first.write(step=step)
    first.close()
    second = RunLog(tmp_path, from_step=6, show=lambda text: None)
    second.write(step=6, again=True)
    second.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(7))
    RunLog(tmp_path, show=lambda text: None).close()  # a fresh run starts with nothing
    assert read_metrics(tmp_path) == []


def test_values_that_are_not_finite_can_be_read_back(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.write(step=0, loss=math.nan)
    log.close()
    assert math.isnan(read_metrics(tmp_path)[0]["loss"])


def test_the_running_mean_starts_at_the_first_value_and_stays_within_the_values():
    assert smooth([3.0])[0] == pytest.approx(3.0)
    values = [5.0, 1.0, 4.0, 2.0, 8.0]
    assert all(min(values) <= v <= max(values) for v in smooth(values))
    assert smooth([2.0] * 7) == pytest.approx([2.0] * 7)


def test_the_picture_is_a_png_and_nothing_to_draw_is_a_sentence(tmp_path):
    lines = [dict(step=i, loss=3.0 - i) for i in range(3)] + [dict(step=3, val_loss=1.0)]
    plot_losses(lines, tmp_path / "loss.png", "title", {"mark": 2.0})
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
        "> late words\n> and more",
        "| lr | `0.25` |",
        "```bash\npython -m x\n```",
        "![training and validation loss](loss.png)",
        torch.__version__,
    ):
        assert part in text, part
    assert "early" not in text
