import copy
import errno
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pytest
import torch
import tyro
from filelock import FileLock

from tinygpt.support import (
    PALETTE,
    Timing,
    TorchAdamW,
    Undrawn,
    UserError,
    atomic_path,
    cache_dir,
    changed_flags,
    check_alone,
    check_exercise,
    command,
    eval_mode,
    file_problem,
    gpu_record,
    hold_lock,
    interval,
    is_count,
    measure_time,
    parse_options,
    peak_bytes,
    plot_style,
    read_json,
    t_quantile,
    t_share,
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


def test_a_disk_without_room_is_told_with_the_path_that_was_asked_for(tmp_path):
    with pytest.raises(OSError) as told, atomic_path(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as `write` raises it
    assert file_problem(told.value) == f"{tmp_path / 'a.txt'}: {os.strerror(errno.ENOSPC)}: make room there"


def test_of_the_fields_asked_about_the_flags_of_changed_ones_are_named():
    @dataclass
    class Settings:
        top_k: int = 0
        seed: int | None = None
        name: str = "a"

    assert changed_flags(Settings(top_k=3, seed=0, name="b"), ("name", "top_k")) == ["--name", "--top-k"]
    assert changed_flags(Settings(), ("name", "top_k", "seed")) == []


@pytest.mark.parametrize("value", [0, 7, np.uint16(7), torch.tensor(7)])
def test_whole_numbers_count(value):
    assert is_count(value) and is_count(value, least=0) and not is_count(value, least=8)


@pytest.mark.parametrize("value", [-1, 2.0, float("nan"), True, "3", None, [3], torch.tensor(1.0)])
def test_nothing_else_counts(value):
    assert not is_count(value)


def test_a_lock_is_held_by_one_until_its_block_ends_however_it_does(tmp_path):
    path, said = tmp_path / "lock", []
    with pytest.raises(ZeroDivisionError), hold_lock(path, lambda: "never said"):
        with pytest.raises(UserError, match="^somebody is at work$"):
            with hold_lock(path, lambda: said.append(1) or "somebody is at work"):
                raise AssertionError("two at a time")
        1 / 0
    assert said == [1] and not path.exists()
    with hold_lock(path, lambda: "never said"):
        assert path.exists()


def test_the_file_of_a_lock_is_gone_before_another_process_can_have_it(tmp_path, monkeypatch):
    seen, release = [], FileLock.release

    def watched(lock):
        seen.append(os.path.exists(lock.lock_file))
        release(lock)

    monkeypatch.setattr(FileLock, "release", watched)
    with hold_lock(tmp_path / "lock", lambda: "never said"):
        pass
    assert seen[0] is False


def test_atomic_path_does_not_replace_a_folder(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(FileExistsError), atomic_path(tmp_path / "run") as tmp:
        tmp.mkdir()
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_that_another_process_makes_at_the_last_moment_is_kept(tmp_path, monkeypatch):
    place, replace = tmp_path / "run", os.replace

    def late(source, target):
        place.mkdir()
        (place / "theirs").touch()
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    with pytest.raises(FileExistsError), atomic_path(place) as tmp:
        tmp.mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["run"] and (place / "theirs").exists()


def test_a_model_is_in_eval_mode_for_the_while_and_then_in_the_mode_it_had():
    for training in (True, False):
        layer = torch.nn.Dropout().train(training)
        with pytest.raises(KeyError), eval_mode(layer):
            assert not layer.training
            raise KeyError
        assert layer.training is training


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

    def same(x):
        return x

    def told(x):
        "What it does."
        ...

    def check(f):
        assert f(1) == 2, "f(1) should be 2"

    check_exercise(stub)(check)
    assert "not solved yet" in capsys.readouterr().out
    check_exercise(told)(check)
    assert "not solved yet" in capsys.readouterr().out
    for solution in (wrong, same):
        with pytest.raises(AssertionError, match="f\\(1\\) should be 2"):
            check_exercise(solution)(check)
    check_exercise(lambda x: x + 1)(check)
    assert "solved" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_machine_with_a_gpu_both_its_memory_and_the_cpus_are_counted():
    for device in ("cuda", "cpu"):
        assert peak_bytes(lambda: torch.ones(1_000_000, device=device) + 1) == pytest.approx(8e6, rel=0.01)


@pytest.mark.slow
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
        assert colors == PALETTE and len(set(colors)) == 8
        assert matplotlib.rcParams["axes.titlelocation"] == "left"


@command
def finish(argv):
    "A command that ends as its first word says."
    if argv[0] == "mistake":
        raise UserError("lr = -1: choose a rate above 0")
    if argv[0] == "stopped":
        raise KeyboardInterrupt
    if argv[0] == "crash":
        raise ValueError("a bug")
    return int(argv[0]) if argv[0].isdigit() else None


@pytest.fixture
def alone(monkeypatch):
    "Not under torchrun, where a command ends its process."
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    "word, status, said",
    [
        ("done", 0, ""),
        ("1", 1, ""),
        ("mistake", 2, "error: lr = -1: choose a rate above 0\n"),
        ("stopped", 130, "interrupted\n"),
    ],
)
def test_a_command_ends_with_a_status_and_at_most_one_sentence(alone, capsys, word, status, said):
    assert finish([word]) == status
    output = capsys.readouterr()
    assert output.err == said and output.out == ""


def test_a_bug_in_a_command_keeps_its_traceback(alone):
    with pytest.raises(ValueError, match="a bug"):
        finish(["crash"])


def test_a_command_without_arguments_takes_those_of_the_process(alone, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program", "mistake"])
    assert finish() == 2
    assert finish([str(3)]) == 3  # arguments that are given win
    assert finish.__name__ == "finish" and "first word" in finish.__doc__


PROGRAM = """
import sys
from dataclasses import dataclass
from tinygpt.support import UserError, command, parse_options

@dataclass
class Options:
    lr: float = 0.1

@command
def main(argv):
    options = parse_options(Options, argv, prog="program")
    print("not lost")
    if options.lr == 0:
        raise KeyboardInterrupt
    if options.lr < 0:
        raise UserError("lr is below 0")

sys.exit(main())
"""

# imports torch once; a fork for each run is then as a process that has just begun
RUNS = """
import json, os, sys
import tyro
import tinygpt.support

program, runs = json.loads(sys.argv[1])
for number, (arguments, env) in enumerate(runs):
    if child := os.fork():
        with open(f"{number}.status", "w") as file:
            file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        continue
    os.environ.update(env)
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
    sys.argv[1:] = arguments
    exec(program)
"""


def ends_of(program, runs, folder):
    "For each of the runs, (arguments, variables) of a program: its exit status, what it printed, its errors."
    if not hasattr(os, "fork"):
        how = dict(capture_output=True, text=True)
        start = [[sys.executable, "-c", program, *arguments] for arguments, _ in runs]
        ended = [subprocess.run(words, env=os.environ | env, **how) for words, (_, env) in zip(start, runs)]
        return [(done.returncode, done.stdout, done.stderr) for done in ended]
    subprocess.run([sys.executable, "-c", RUNS, json.dumps([program, runs])], cwd=folder, check=True)
    found = [
        [(folder / f"{i}.{end}").read_text() for end in ("status", "out", "err")] for i in range(len(runs))
    ]
    return [(int(status), out, err) for status, out, err in found]


@pytest.mark.slow
def test_of_several_ranks_only_the_first_speaks_and_all_end_alike(tmp_path):
    expected = [
        (["--lr", "-1"], 2, "error: lr is below 0"),
        (["--lr", "0"], 130, "interrupted"),
        (["--lrr", "1"], 2, "did you mean --lr?"),
        (["--lr", "much"], 2, "much"),
    ]
    runs = [
        (words, dict(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"))
        for words, _, _ in expected
        for rank in ("0", "1")
    ]
    for i, (status, out, err) in enumerate(ends_of(PROGRAM, runs, tmp_path)):
        words, due, said = expected[i // 2]
        assert status == due, words
        assert said in err if i % 2 == 0 else err == "", words
        if words[1] in ("-1", "0"):
            assert out == "not lost\n"  # what was printed before the end has arrived


@pytest.mark.parametrize("arguments", [["mistake"], ["--shape.n-layer", "many"]])
def test_a_silent_rank_ends_after_rank_0_and_speaks_if_rank_0_did_not(monkeypatch, capsys, arguments):
    "torchrun ends all ranks once one has ended: rank 0 may not have come to its line yet."
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    run = finish if arguments == ["mistake"] else command(lambda argv: parse_options(Build, argv, "build"))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for rank, torchrun, expected in (("0", True, []), ("1", True, [10]), ("1", False, [])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1") if torchrun else monkeypatch.delenv(
            "TORCHELASTIC_RUN_ID"
        )
        with suppress(SystemExit):
            assert run(arguments) == 2
        assert waits == expected, rank
        waits.clear()
        said = capsys.readouterr().err
        if run is finish:
            assert said == ("error: lr = -1: choose a rate above 0\n" if torchrun else "")
        else:
            assert bool(said) == (rank == "0")


@pytest.mark.parametrize("arguments", [["mistake"], ["--shape.n-layer", "many"]])
def test_a_rank_that_was_left_in_the_environment_silences_nobody(monkeypatch, capsys, arguments):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "")):
        monkeypatch.setenv(name, value)
    run = finish if arguments == ["mistake"] else command(lambda argv: parse_options(Build, argv, "build"))
    with suppress(SystemExit):
        assert run(arguments) == 2
    assert arguments[-1].replace("mistake", "lr = -1: choose a rate") in capsys.readouterr().err


def test_only_a_command_that_is_the_program_ends_the_process_of_a_rank(monkeypatch):
    "A notebook that calls it keeps its kernel, also where RANK is left over."
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["finish", "mistake"])
    assert finish() == 2 and ended == []  # no rank
    monkeypatch.setenv("RANK", "0")
    assert finish(["mistake"]) == 2 and ended == []
    assert finish() == 2 and ended == [2]


@pytest.mark.parametrize("arguments, frozen", [("", True), ("['1']", False)], ids=["program", "function"])
def test_a_program_does_not_look_through_all_objects_as_it_exits(arguments, frozen):
    program = f"""
import atexit, gc
from tinygpt.support import command
assert gc.get_freeze_count() < 1000  # Python's own
atexit.register(lambda: print(gc.get_freeze_count() > 100_000))
command(lambda argv: 0)({arguments})
assert gc.get_freeze_count() < 1000  # whoever goes on is not touched
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{frozen}\n", "")


WRITER = """
import sys, time
from dataclasses import dataclass
from pathlib import Path
from tinygpt.support import command, parse_options

@dataclass
class Options:
    text: str = "line"
    times: int = 1
    touch: str = ""
    wait_for: str = ""

@command
def main(argv):
    options = parse_options(Options, argv, prog="program")
    for _ in range(options.times):
        print(options.text)
    if options.touch:
        Path(options.touch).write_text("said")
    while options.wait_for and not Path(options.wait_for).exists():
        time.sleep(0.01)

sys.exit(main())
"""


def start_writer(*arguments, **how):
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONUNBUFFERED")}
    environ |= how.pop("env", {})
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], env=environ, **how)


@pytest.mark.slow
def test_a_line_is_in_the_file_before_the_command_ends(alone, tmp_path):
    out, said, go = (tmp_path / name for name in ("out", "said", "go"))
    with open(out, "w") as f:
        process = start_writer("--touch", str(said), "--wait-for", str(go), stdout=f)
        while not said.exists():
            assert process.poll() is None
            time.sleep(0.01)
    assert out.read_text() == "line\n"
    go.write_text("")
    assert process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("encoding, said", [("latin-1", "café ?"), ("utf-8", "café 中")])
def test_a_character_that_the_output_cannot_write_becomes_a_question_mark(alone, encoding, said):
    env = {"PYTHONIOENCODING": encoding}
    process = start_writer("--text", "café 中", env=env, stdout=subprocess.PIPE)
    out, _ = process.communicate()
    assert process.returncode == 0 and out.decode(encoding).strip() == said


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--times", "100000"], ["--help"]])
def test_a_reader_that_has_gone_is_no_mistake(alone, arguments):
    process = start_writer(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
def test_an_output_without_room_is_one_sentence(alone):
    with open("/dev/full", "w") as full:
        process = start_writer(stdout=full, stderr=subprocess.PIPE)
    assert process.stderr.read().decode() == "error: the output: No space left on device: make room there\n"
    assert process.wait() == 2


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOSPC, "make room"),
        (errno.EACCES, "that you may use"),
        (errno.ENAMETOOLONG, "a shorter name"),
        (errno.EISDIR, "a folder where a file should be"),
        (errno.EIO, "check the path"),
    ],
)
def test_what_the_system_refuses_is_a_sentence_with_the_file_and_a_remedy(alone, capsys, number, remedy):
    @command
    def main(argv):
        raise OSError(number, os.strerror(number), "some/file")

    assert main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: some/file: {os.strerror(number)}: ") and remedy in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "content, kind, said",
    [
        (b'{"a": 1', dict, "is not JSON"),
        (b"", dict, "is not JSON"),
        (b"\xff\xfe{", dict, "is not JSON"),
        (b"[" * 100_000, list, "is not JSON"),
        (b"[1]", dict, "holds a list where a dict should be"),
        (b"null", dict, "holds a NoneType where a dict should be"),
        (b'{"a": 1}', list, "holds a dict where a list should be"),
    ],
)
def test_json_that_cannot_be_read_is_one_sentence(tmp_path, content, kind, said):
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_json(path, kind, "make it again")
    assert said in str(error.value) and str(path) in str(error.value)
    assert str(error.value).endswith("make it again") and len(str(error.value)) < 400


def test_json_is_read_and_a_file_that_is_not_there_is_a_sentence(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"word": "中", "list": [1, 2.5, null]}', encoding="utf-8")
    assert read_json(path) == {"word": "中", "list": [1, 2.5, None]}
    places = [tmp_path, tmp_path / "none.json", path / "below"]
    if hasattr(os, "mkfifo"):  # would never end
        os.mkfifo(tmp_path / "pipe")
        places.append(tmp_path / "pipe")
    for place in places:
        with pytest.raises(UserError, match="cannot be read"):
            read_json(place)


@dataclass
class Shape:
    n_layer: int = 2
    """How many blocks."""


@dataclass
class Build:
    "Make a model."

    out: Annotated[str, tyro.conf.Positional] = "here"
    """Where to put it."""
    shape: Shape = field(default_factory=Shape)
    dry_run: bool = False
    """Only say what would be done."""


@dataclass
class Remove:
    "Delete a model."

    force: bool = False


def test_options_are_the_fields_of_a_dataclass_and_of_those_in_it():
    assert parse_options(Build, [], "build") == Build()
    given = parse_options(Build, ["there", "--shape.n-layer", "4", "--dry_run"], "build")
    assert given == Build(out="there", shape=Shape(n_layer=4), dry_run=True)


@pytest.mark.parametrize(
    "options, arguments, hint",
    [
        (Build, ["--dry-runn"], "--dry-runn is not a setting: did you mean --dry-run?"),
        (Build, ["--dry_rum=1"], "--dry_rum is not a setting: did you mean --dry-run?"),
        (Build, ["--shape.n-lay", "4"], "did you mean --shape.n-layer?"),
        (Build, ["--n-layer", "4"], "did you mean --shape.n-layer?"),
        (Build, ["--out", "there"], "--out is not a setting: see --help for all of them"),
        (Build, ["--color"], "--color is not a setting: see --help for all of them"),
        (Build | Remove, ["remove", "--forse"], "did you mean --force?"),
        (Build | Remove, ["build", "--shape.n-layr", "4"], "did you mean --shape.n-layer?"),
    ],
)
def test_an_unknown_flag_is_a_mistake_with_a_hint_at_the_nearest_one(options, arguments, hint):
    with pytest.raises(UserError) as error:
        parse_options(options, arguments, "build")
    assert hint in str(error.value)


def test_the_hint_for_an_unknown_flag_leaves_out_a_prefix_that_the_flags_do_not_have():
    omit = (tyro.conf.OmitArgPrefixes,)
    assert parse_options(Build, ["--n-layer", "4"], "build", config=omit).shape.n_layer == 4
    with pytest.raises(UserError, match="did you mean --n-layer?"):
        parse_options(Build, ["--n-layr", "4"], "build", config=omit)


def test_help_tells_the_fields_and_ends_with_0_a_wrong_value_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(Build, ["--help"], "python -m build")
    said = capsys.readouterr().out
    assert ended.value.code == 0
    for words in ("python -m build", "Make a model.", "--shape.n-layer", "How many blocks."):
        assert words in said

    with pytest.raises(SystemExit) as ended:
        parse_options(Build, ["--shape.n-layer", "many"], "build")
    assert ended.value.code == 2 and "many" in capsys.readouterr().err


def test_t_quantiles_are_those_of_the_tables():
    "The 97.5 % points as printed in any table of Student's distribution."
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 30: 2.042}
    for freedom, want in table.items():
        assert t_quantile(0.975, freedom) == pytest.approx(want, abs=6e-4)
    # 99.5 %, far out where an expansion about the normal one fails; and where it is the normal one
    assert t_quantile(0.995, 3) == pytest.approx(5.841, abs=6e-4)
    for freedom in (9_000, 10**9):
        assert t_quantile(0.995, freedom) == pytest.approx(2.5758, abs=1e-3)


def test_t_share_is_the_area_under_students_density():
    for freedom in (1, 2, 3, 6, 7):
        x = torch.linspace(-1.7, 1.7, 20_001, dtype=torch.float64)
        density = torch.distributions.StudentT(float(freedom)).log_prob(x).exp()
        assert t_share(1.7, freedom) == pytest.approx(torch.trapezoid(density, x).item(), abs=1e-6)


def test_an_interval_is_students():
    mean, half = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5 and half == pytest.approx(3.182 * (5 / 3) ** 0.5 / 2, rel=1e-3)
    wider = interval([1.0, 2.0, 3.0, 4.0], level=0.99)
    assert wider[0] == 2.5 and wider[1] == pytest.approx(5.841 * (5 / 3) ** 0.5 / 2, rel=1e-3)


def test_where_nothing_was_measured_on_a_gpu_one_line_says_so(tmp_path, capsys):
    assert gpu_record(tmp_path / "gpu_step.json", {"step": "case"}) == []
    told = "On a GPU: not measured yet; `make gpu` writes benchmarks/results/gpu_step.json\n"
    assert capsys.readouterr().out == told


def test_a_gpu_record_is_a_table_under_its_machine_with_the_errors_of_what_failed(tmp_path, capsys):
    rows = [
        dict(case="eager", what="step", ms=41.512345, rows=[32, 1.0]),
        dict(case="fast", what="step", ms=212751.6, rows=[2e16]),
        dict(case="memory", what="memory", ms=1.0),
        dict(case="more rows", error="OutOfMemoryError: 90 GiB"),
    ]
    about = dict(machine="H100, driver 580", command="python benchmarks/gpu.py step", date="2026-11-23")
    (tmp_path / "gpu_step.json").write_text(json.dumps(about | dict(rows=rows)))
    shown = gpu_record(tmp_path / "gpu_step.json", {"": "case", "ms": "ms", "rows": "rows"}, {"what": "step"})
    assert shown == rows
    assert capsys.readouterr().out.splitlines() == [
        "H100, driver 580",
        "python benchmarks/gpu.py step, 2026-11-23",
        "                ms   rows",
        "eager        41.51  32, 1",
        "fast       212,752  2e+16",
        "more rows        -      -  OutOfMemoryError: 90 GiB",
    ]
    gpu_record(tmp_path / "gpu_step.json", {"": "case"}, {"what": ("memory", "step"), "ms": 1.0})
    assert capsys.readouterr().out.splitlines()[3:] == ["memory", "more rows  OutOfMemoryError: 90 GiB"]


def test_a_gpu_record_marks_the_rows_that_an_earlier_command_measured(tmp_path, capsys):
    rows = [dict(case="new", ms=1.0), dict(code="1a7d5f9341a0", case="old", ms=2.0)]
    about = dict(machine="H100", command="python benchmarks/gpu.py step", date="2026-11-23", rows=rows)
    (tmp_path / "gpu_step.json").write_text(json.dumps(about))
    gpu_record(tmp_path / "gpu_step.json", {"": "case", "ms": "ms"})
    kept = "* measured earlier, with the code of then"
    assert capsys.readouterr().out.splitlines()[2:] == ["       ms", "new     1", "old *   2", kept]
    gpu_record(tmp_path / "gpu_step.json", {"": "case", "ms": "ms"}, {"case": "new"})
    assert kept not in capsys.readouterr().out


TRAINS = """
import sys
from tinygpt.run.command import parse_arguments
from tinygpt.train import train

for optimizer in ("adamw", "muon"):
    for steps, resume in (("2", False), ("3", True)):
        flags = f"{sys.argv[1]} --optimizer {optimizer} --name {optimizer} --max-steps {steps}"
        train(parse_arguments(flags.split()).train, resume=resume, progress="none")
        print(optimizer, steps, "torch._dynamo" in sys.modules)
"""


def test_a_run_that_does_not_compile_never_imports_the_compiler(tmp_path, words):
    flags = f"speedrun --data {words} --tokenizer byte --vocab-size 257 --batch-size 2 --out {tmp_path}"
    run = [sys.executable, "-c", TRAINS, flags]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = [f"{optimizer} {steps} False" for optimizer in ("adamw", "muon") for steps in (2, 3)]
    assert done.stdout.splitlines()[-4:] == said


@pytest.mark.parametrize("loop", [dict(foreach=False), dict(foreach=True), dict(fused=True)])
def test_torchs_adamw_steps_as_it_always_did_without_its_marks(loop):
    def weights(kind):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimizer = kind(layer.parameters(), lr=0.1, weight_decay=0.1, **loop)
        for _ in range(4):
            optimizer.zero_grad()
            layer(torch.randn(2, 5)).square().sum().backward()
            optimizer.step()
            again = kind(layer.parameters(), **loop)
            again.load_state_dict(optimizer.state_dict())
            optimizer = again
        return torch.cat([p.detach().flatten() for p in layer.parameters()])

    assert weights(TorchAdamW).equal(weights(torch.optim.AdamW))


def test_an_optimizers_step_leaves_gradients_as_they_were_and_records_nothing():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = TorchAdamW([p], lr=0.1)

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert p.grad.tolist() == [2.0, 2.0] and p.grad_fn is None and torch.is_grad_enabled()
    optimizer.add_param_group(dict(params=[torch.nn.Parameter(torch.zeros(1))]))
    assert len(optimizer.param_groups) == 2
    again = copy.deepcopy(optimizer)
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    with pytest.raises(UserError, match="differentiable = True is for torch.optim.AdamW"):
        TorchAdamW([p], differentiable=True)


def test_what_one_process_does_alone_is_refused_to_each_of_several(monkeypatch):
    for rank, size, refused in ((None, None, False), ("0", "1", False), ("0", "2", True), ("1", "2", True)):
        for name, value in (("RANK", rank), ("WORLD_SIZE", size)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        if refused:
            with pytest.raises(UserError, match="tinygpt.some is the work of one process: .* without"):
                check_alone("tinygpt.some")
        else:
            check_alone("tinygpt.some")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_in_an_undrawn_block_a_new_layer_draws_nothing_and_after_it_everything(device):
    state = torch.get_rng_state()
    with Undrawn(), torch.device(device):
        linear, table, norm = torch.nn.Linear(4, 3), torch.nn.Embedding(5, 4), torch.nn.LayerNorm(4)
        own = torch.ones(2).normal_().mul_(3).uniform_(1, 2)
        assert torch.equal(torch.get_rng_state(), state)
        assert [t.device.type for t in (linear.weight, linear.bias, table.weight, own)] == [device] * 4
        assert norm.bias.shape == (4,) and linear.weight.requires_grad
    if device == "cpu":
        assert own.tolist() == [3, 3] and norm.weight.tolist() == [1] * 4  # what is not random is done
    torch.nn.Linear(4, 3)
    assert not torch.equal(torch.get_rng_state(), state)
