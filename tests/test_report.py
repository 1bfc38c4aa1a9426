import json
import math

import pytest

from tinygpt.report import RunLog, plot_losses, read_metrics, smooth
from tinygpt.support import UserError


def test_lines_are_on_the_disk_as_soon_as_they_are_written(tmp_path):
    log = RunLog(tmp_path, show=lambda text: None)
    log.write(step=0, loss=1.5)
    log.say("hello")
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 1.5}] and (tmp_path / "log.txt").read_text().endswith("hello\n")
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
