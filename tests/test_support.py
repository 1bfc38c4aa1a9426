import gc
import os
import time

import pytest
import torch

from tinygpt.support import (
    PALETTE,
    Timing,
    atomic_path,
    cache_dir,
    check_exercise,
    measure_time,
    peak_bytes,
    plot_style,
)


def test_atomic_path_keeps_the_old_file_when_the_block_raises(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), atomic_path(path) as tmp:
        tmp.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a.txt"]


def test_atomic_path_shows_nothing_under_the_final_name_before_the_block_ends(tmp_path):
    with atomic_path(tmp_path / "deep/folder") as tmp:
        tmp.mkdir()
        (tmp / "x").write_text("1")
        assert not (tmp_path / "deep/folder").exists()
    assert (tmp_path / "deep/folder/x").read_text() == "1" and os.listdir(tmp_path / "deep") == ["folder"]


def test_atomic_path_does_not_replace_a_folder(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError), atomic_path(tmp_path / "run") as tmp:
        tmp.mkdir()
    assert os.listdir(tmp_path) == ["run"]


def test_cache_dir_is_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("TINYGPT_CACHE")
    assert cache_dir().name == "tinygpt"


def test_measure_time_counts_only_the_repeats_and_orders_its_figures():
    calls = []
    timing = measure_time(lambda: (calls.append(1), time.sleep(0.002)), repeats=4, warmup=3)
    assert len(calls) == 7 and 0.002 <= timing.min <= timing.median <= timing.max


def test_the_figure_to_quote_is_the_median_which_one_slow_run_does_not_move(monkeypatch):
    clock = iter([0, 2, 10, 13, 20, 90])  # runs of 2, 3 and 70 seconds
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert measure_time(lambda: None, repeats=3) == Timing(median=3, min=2, max=70)


@pytest.mark.parametrize("seconds, text", [(2.0, "2 s"), (0.0125, "12.5 ms"), (3e-6, "3 µs")])
def test_a_timing_prints_in_a_unit_that_reads_well(seconds, text):
    assert str(Timing(seconds, seconds, seconds)).startswith(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts CPU tensors where there is no GPU")
def test_peak_bytes_is_the_highest_point_not_the_sum_or_the_end():
    x = torch.zeros(1000, 250)  # 1 MB

    def three_one_after_the_other():
        for _ in range(3):
            y = x + 1
            del y

    def two_at_once():
        y = x + 1
        z = y * 2
        del y
        return z

    assert peak_bytes(three_one_after_the_other) == pytest.approx(1e6, rel=1e-3)
    assert peak_bytes(two_at_once) == pytest.approx(2e6, rel=1e-3)


def test_a_stub_is_reported_and_a_wrong_solution_raises(capsys):
    def stub(x): ...

    def wrong(x):
        return 5

    def check(f):
        assert f(1) == 2, "f(1) should be 2"

    check_exercise(stub)(check)
    assert "not solved yet" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="f\\(1\\) should be 2"):
        check_exercise(wrong)(check)
    check_exercise(lambda x: x + 1)(check)
    assert "solved" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the profiler's count on the CPU")
def test_garbage_of_an_earlier_call_is_not_counted_as_memory_given_back():
    def leave_garbage():
        ring = [torch.ones(1_000_000)]
        ring.append(ring)  # a cycle: only the collector frees it

    def work():
        gc.collect()
        torch.ones(500_000).sum()

    peak_bytes(work)
    gc.disable()
    try:
        peak_bytes(leave_garbage)
        assert peak_bytes(work) == pytest.approx(2_000_000, rel=0.01)
    finally:
        gc.enable()


def test_plot_style_sets_the_palette_and_titles_that_state_the_finding():
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context():
        plot_style()
        colors = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
        assert (
            colors == PALETTE
            and len(set(colors)) == 8
            and matplotlib.rcParams["axes.titlelocation"] == "left"
        )
