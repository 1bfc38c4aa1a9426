"""Verdicts on a project of one chapter, so small that a check takes a second; and one on the real project."""

import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from tinygpt.learn.book import find_project, make_notebook, read_notebook
from tinygpt.learn.judge import RAN, copy_project, find_tests, judge, run_tests
from tinygpt.learn.overlay import read_work

MODULE = """def add(a, b):
    "The sum."
    return a + b


def total(items):
    "The sum of all."
    result = 0
    for item in items:
        result = add(result, item)
    return result


def scale(x):
    "Ten times x."
    return 10 * x


def elsewhere(x):
    "x plus one, computed in another process."
    import subprocess, sys
    return int(subprocess.run([sys.executable, "-c", f"import tinygpt.toy; print(tinygpt.toy.add({x}, 1))"], capture_output=True, text=True).stdout)


def unused(x):
    "Nobody calls it."
    return x
"""
TESTS = """import pytest
from tinygpt import toy


def test_adding_is_what_python_does():
    assert toy.add(2, 3) == 5


def test_the_total_of_three():
    try:
        assert toy.total([1, 2, 3]) == 6
    except Exception as error:
        raise AssertionError(f"wrong total: {error}")


@pytest.fixture(scope="module")
def scaled():
    return toy.scale(2)


def test_ten_times(scaled):
    assert scaled == 20


def test_scaling_goes_with_adding():
    assert toy.scale(toy.add(1, 1)) == toy.add(toy.scale(1), toy.scale(1))


def test_another_process_has_the_same_functions():
    assert toy.elsewhere(4) == 5
"""


@pytest.fixture
def project(tmp_path):
    for folder in ("tinygpt", "tests", "nbs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tinygpt/__init__.py").touch()
    (tmp_path / "tinygpt/toy.py").write_text(MODULE)
    (tmp_path / "tests/test_toy.py").write_text(TESTS)
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": f"#| export\n{source}"}
        for i, source in enumerate(MODULE.split("\n\n\n"))
    ]
    (tmp_path / "nbs/05_toy.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    return tmp_path


def verdicts(project, seconds=10.0, names=None, holes=("unused",), **bodies):
    "name -> verdict, for a learner who wrote these bodies; the other functions are as the chapter has them, or holes."
    nb, chapter = read_notebook(project / "nbs/05_toy.ipynb"), read_notebook(project / "nbs/05_toy.ipynb")
    for cell in nb["cells"]:
        name = cell["source"].split("def ")[1].split("(")[0]
        head, doc, _ = cell["source"].split('"', 2)
        if body := bodies.get(name) or (name in holes and f'raise NotImplementedError("hole: {name}")'):
            cell["source"] = f'{head}"{doc}"\n    {body}'
    told = []
    result = {
        v.name: v for v in judge(project, read_work(nb, chapter, "05_toy"), names, seconds, told.append)
    }
    return result, told


def states(result):
    return {name: v.state for name, v in result.items()}


def test_right_solutions_pass_holes_are_holes_and_what_no_test_runs_is_not_called_right(project):
    result, told = verdicts(project, holes=("scale",), total="return sum(items)")
    assert states(result) == dict(
        add="passes", total="passes", scale="hole", elsewhere="passes", unused="not run"
    )
    assert len(told) == 1 and result["unused"].why == "no test on this machine runs it"


def test_two_wrong_functions_each_have_their_own_reason_and_nothing_of_the_project_is_changed(project):
    look = lambda: {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in project.rglob("*") if p.is_file()
    }
    copies = lambda: {p.parent for p in Path(tempfile.gettempdir()).glob("*/tinygpt/toy.py")}
    before = look(), copies()
    result, _ = verdicts(project, add="return a - b", scale="open('new', 'w').close(); return 11 * x")
    assert states(result) == dict(
        add="fails", total="passes", scale="fails", elsewhere="passes", unused="hole"
    )
    assert "assert -1 == 5" in result["add"].why and result["scale"].why.startswith(
        "ten times: assert 22 == 20"
    )
    assert (look(), copies()) == before


def test_a_function_that_is_wrong_only_in_another_process_fails(project):
    result, _ = verdicts(
        project, add="import __main__, os; return a + b + (not hasattr(__main__, '__file__'))"
    )
    assert (
        states(result)["add"] == "fails"
        and "another process" in result["add"].why
        and states(result)["elsewhere"] == "passes"
    )


def test_functions_that_fail_only_together_are_told_so(project):
    project.joinpath("tests/test_toy.py").write_text(
        "from tinygpt import toy\n\n\ndef test_units():\n    assert toy.scale(1) * toy.add(1, 1) != 22 * 3\n"
    )
    result, _ = verdicts(project, add="return (a + b) * 3", scale="return 11 * x")
    assert states(result)["add"] == states(result)["scale"] == "fails"
    assert result["add"].why.startswith("only together with your other functions: units: ")


def test_a_function_that_passes_only_with_the_help_of_a_wrong_one_fails(project):
    result, told = verdicts(
        project,
        add="return a + b + 1",
        total="result = 0\n    for item in items:\n        result = add(result, item)\n    return result - len(items)",
    )
    assert states(result) == dict(
        add="fails", total="fails", scale="passes", elsewhere="passes", unused="hole"
    )
    assert "6" in result["total"].why and any(
        "test_the_total_of_three with your 3 functions" in line for line in told
    )


def test_an_endless_loop_is_named_and_the_others_are_still_judged(project):
    result, _ = verdicts(project, seconds=2.0, total="while True: pass", scale="return 11 * x")
    assert states(result) == dict(
        add="passes", total="fails", scale="fails", elsewhere="passes", unused="hole"
    )
    assert (
        result["total"].why
        == "endless loop? A test was stopped after 2 s: the total of three (it was in total)"
    )


def test_a_loop_that_catches_everything_is_stopped_too(project):
    result, _ = verdicts(
        project,
        seconds=1.5,
        scale="\n    while True:\n        try:\n            while True:\n                pass\n        except BaseException:\n            pass",
    )
    assert (
        states(result)["scale"] == "fails"
        and "endless loop" in result["scale"].why
        and states(result)["add"] == "passes"
    )


def test_a_function_that_ends_the_process_fails(project):
    result, _ = verdicts(project, scale="import os; os._exit(0)")
    assert states(result)["scale"] == "fails" and "ended" in result["scale"].why


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return (
        Path(f"/proc/{pid}/stat").exists() is False
        or Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    )


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
@pytest.mark.parametrize("hangs", [False, True])
def test_processes_that_a_test_leaves_behind_are_ended_also_when_pytest_hangs(
    project, tmp_path_factory, hangs
):
    note = tmp_path_factory.mktemp("note") / "pid"
    wait = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30)); ctypes.PyDLL(None).pause()"
        if hangs
        else "pass"
    )  # holds the interpreter's lock: no thread of Python can end it
    project.joinpath("tests/test_toy.py").write_text(
        "import ctypes, signal, subprocess, sys\n\ndef test_it():\n    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"    open({str(note)!r}, 'w').write(str(child.pid))\n    {wait}\n"
    )
    folder = tmp_path_factory.mktemp("copy")
    copy_project(project, folder)
    [result] = run_tests(folder, ["tests/test_toy.py"], seconds=1.0, total=8.0 if hangs else 60.0)
    assert result["outcome"] == ("failed" if hangs else "passed") and (not hangs or result["late"])
    for _ in range(50):
        if not alive(int(note.read_text())):
            break
        time.sleep(0.1)
    assert not alive(int(note.read_text()))


def test_a_project_is_copied_where_it_could_be_changed_and_linked_elsewhere(tmp_path):
    root = find_project()
    copy_project(root, tmp_path)
    assert (tmp_path / "tinygpt/adamw.py").read_bytes() == (root / "tinygpt/adamw.py").read_bytes() and not (
        tmp_path / "tinygpt"
    ).is_symlink()
    assert (
        not (tmp_path / "tests").is_symlink()
        and (tmp_path / "nbs/10_adamw.ipynb").exists()
        and (tmp_path / "settings.ini").exists()
    )


def test_modules_without_a_test_file_of_their_own_are_tested_by_those_that_import_them():
    root = find_project()
    assert find_tests(root, "adamw") == ["tests/test_adamw.py"] and "tests/test_zero.py" in find_tests(
        root, "zero_wire"
    )


def test_a_solution_of_the_real_project_written_in_another_way_passes():
    root = find_project()
    nb = make_notebook(root, "03_data_pack", only=["Lane.wants"])
    for cell in nb["cells"]:
        cell["source"] = cell["source"].replace(
            'raise NotImplementedError("hole: Lane.wants")',
            "return tuple(self.cursor[:2]) <= (chunk, document)",
        )
    work = read_work(nb, read_notebook(root / "nbs/03_data_pack.ipynb"), "03_data_pack")
    assert {v.name: v.state for v in judge(root, work)} == {"Lane.wants": "passes"} | {
        n: "given" for n in work.given
    }


def test_a_note_breaks_no_graph_and_is_made_all_the_same():
    import torch

    space = {}
    exec(RAN, space)
    notes = space["RAN"]

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            notes["forward"] = True
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            notes["backward"] = True
            return grad * ctx.saved_tensors[0].cos()

    x = torch.randn(3, requires_grad=True)
    torch.compile(lambda x: Sine.apply(x), fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert dict(notes) == {"forward": True, "backward": True} and torch.allclose(x.grad, x.detach().cos())
