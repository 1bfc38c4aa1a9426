"""Verdicts on a project of one chapter, so small that a check takes a second."""

import copy
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from events import wait_until

from tinygpt.learn import judge as judge_module
from tinygpt.learn.book import find_project, is_exported, page_path, read_notebook
from tinygpt.learn.judge import RAN, copy_project, find_tests, judge, run_tests
from tinygpt.learn.overlay import read_work
from tinygpt.support import UserError

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
    code = f"import tinygpt.toys.toy; print(tinygpt.toys.toy.add({x}, 1))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)


def unused(x):
    "Nobody calls it."
    return x
"""
TESTS = """import pytest
from tinygpt.toys import toy


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
    "A project with a module toys.toy, and another toy beside it that must not be taken for it."
    for folder in ("tinygpt/toys", "tests", "nbs/more"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tinygpt/__init__.py").touch()
    (tmp_path / "tinygpt/toys/__init__.py").touch()
    (tmp_path / "tinygpt/toys/toy.py").write_text(MODULE)
    (tmp_path / "tinygpt/toy.py").write_text(OTHER)
    (tmp_path / "tests/test_toys_toy.py").write_text(TESTS)
    cells = [{"cell_type": "code", "id": "module", "metadata": {}, "source": "#| default_exp toys.toy"}]
    for i, source in enumerate(MODULE.split("\n\n\n")):
        cell = {"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": f"#| export\n{source}"}
        cells.append(cell)
    (tmp_path / "nbs/more/05_toy.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}}))
    return tmp_path


# waits for ever, in a line at which toys/toy.py is in `total`
OTHER = "def wait():\n" + "\n" * 10 + "    while True: pass\n"


def verdicts(project, seconds=10.0, names=None, holes=("unused",), **bodies):
    "name -> verdict, for a learner who wrote these bodies; other functions are the chapter's, or holes."
    chapter = read_notebook(page_path(project, "05_toy"))
    nb = copy.deepcopy(chapter)
    for cell in filter(is_exported, nb["cells"]):
        name = cell["source"].split("def ")[1].split("(")[0]
        head, doc, _ = cell["source"].split('"', 2)
        hole = f'raise NotImplementedError("hole: {name}")' if name in holes else None
        if body := bodies.get(name, hole):
            cell["source"] = f'{head}"{doc}"\n    {body}'
    told = []
    work = read_work(nb, chapter, "05_toy")
    return {v.name: v for v in judge(project, work, names, seconds, told.append)}, told


def states(result):
    return {name: v.state for name, v in result.items()}


def test_where_the_tests_cannot_run_the_remedy_is_named_and_holes_alone_need_none(project, monkeypatch):
    monkeypatch.setattr(judge_module, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="the tests need pytest and hypothesis: pip install pytest hypothesis"
    ):
        verdicts(project)
    holes, _ = verdicts(project, holes=("add", "total", "scale", "elsewhere", "unused"))
    assert {verdict.state for verdict in holes.values()} == {"hole"}


def test_right_solutions_pass_holes_are_holes_and_what_no_test_runs_is_not_called_right(project):
    result, told = verdicts(project, holes=("scale",), total="return sum(items)")
    expected = dict(add="passes", total="passes", scale="hole", elsewhere="passes", unused="not run")
    assert states(result) == expected
    assert len(told) == 1 and result["unused"].why == "no test on this machine runs it"


def test_two_wrong_functions_each_have_their_own_reason_and_nothing_of_the_project_is_changed(project):
    def look():
        files = [p for p in project.rglob("*") if p.is_file()]
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    def copies():
        return {p.parent for p in Path(tempfile.gettempdir()).glob("*/tinygpt/toys/toy.py")}

    before = look(), copies()
    result, _ = verdicts(project, add="return a - b", scale="open('new', 'w').close(); return 11 * x")
    expected = dict(add="fails", total="passes", scale="fails", elsewhere="passes", unused="hole")
    assert states(result) == expected
    assert "assert -1 == 5" in result["add"].why
    assert result["scale"].why.startswith("ten times: assert 22 == 20")
    assert (look(), copies()) == before


def test_only_the_functions_that_are_asked_about_are_judged(project):
    result, told = verdicts(project, names=["scale", "unused"], add="return a - b")
    assert states(result) == dict(scale="passes", unused="hole") and len(told) == 1


def test_where_one_function_is_judged_the_first_failure_ends_it(project, monkeypatch):
    runs = []

    def watched(*args, **options):
        runs.append(run_tests(*args, **options))
        return runs[-1]

    monkeypatch.setattr(judge_module, "run_tests", watched)
    result, _ = verdicts(project, names=["add"], add="return a - b")
    assert result["add"].state == "fails" and len(runs[0]) == 1, (
        "the other tests take minutes in some chapters"
    )


def test_a_function_that_is_wrong_only_in_another_process_fails(project):
    body = "import __main__, os; return a + b + (not hasattr(__main__, '__file__'))"
    result, _ = verdicts(project, add=body)
    assert states(result)["add"] == "fails" and "another process" in result["add"].why
    assert states(result)["elsewhere"] == "passes"


def test_functions_that_fail_only_together_are_told_so(project):
    test = "def test_units():\n    assert toy.scale(1) * toy.add(1, 1) != 22 * 3\n"
    project.joinpath("tests/test_toys_toy.py").write_text(f"from tinygpt.toys import toy\n\n\n{test}")
    result, _ = verdicts(project, add="return (a + b) * 3", scale="return 11 * x")
    assert states(result)["add"] == states(result)["scale"] == "fails"
    assert result["add"].why.startswith("only together with your other functions: units: ")


def test_a_function_that_passes_only_with_the_help_of_a_wrong_one_fails(project):
    loop = "result = 0\n    for item in items:\n        result = add(result, item)\n    return result"
    result, told = verdicts(project, add="return a + b + 1", total=f"{loop} - len(items)")
    expected = dict(add="fails", total="fails", scale="passes", elsewhere="passes", unused="hole")
    assert states(result) == expected
    assert "6" in result["total"].why
    assert any("test_the_total_of_three with your 3 functions" in line for line in told)


def test_an_endless_loop_is_named_and_the_others_are_still_judged(project):
    result, _ = verdicts(project, seconds=2.0, total="while True: pass", scale="return 11 * x")
    expected = dict(add="passes", total="fails", scale="fails", elsewhere="passes", unused="hole")
    assert states(result) == expected
    said = "endless loop, or far too slow? A test was stopped after 2 s: the total of three (it was in total)"
    assert result["total"].why == said


def test_a_line_of_another_module_of_the_same_name_accuses_nobody(project):
    result, _ = verdicts(project, seconds=2.0, add="from tinygpt.toy import wait; return wait()")
    assert "(it was in add)" in result["add"].why and states(result)["total"] == "passes"


SLOW = """
    import time
    begun = time.process_time()
    while time.process_time() - begun < {seconds}:  # a tenth of the time, as on a busy machine
        until = time.process_time() + 0.005
        while time.process_time() < until:
            pass
        time.sleep(0.05)
    return 10 * x"""


def test_what_computes_slowly_on_a_busy_machine_is_not_taken_for_waiting(project):
    endless = SLOW.format(seconds="math.inf").replace("import time", "import math, time")
    result, _ = verdicts(project, seconds=0.4, scale=endless)
    assert result["scale"].why.startswith("endless loop, or far too slow? A test was stopped after 0.4 s")
    # one test calls it three times, which takes longer than five times 0.4 s
    result, _ = verdicts(project, seconds=0.4, scale=SLOW.format(seconds=0.1))
    assert states(result)["scale"] == "passes"


IN_A_CHILD = """
    import subprocess, sys
    code = {code!r}
    return int(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True).stdout)"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="another process's computing time is read from /proc")
def test_a_test_whose_child_process_computes_is_not_taken_for_waiting(project):
    slow = SLOW.replace("\n    ", "\n").replace("return 10 * x", "print({result})")
    # as `SLOW`, in a process of its own: the test itself computes nothing for twice five times 0.4 s
    child = slow.format(seconds=0.4, result=5)
    result, _ = verdicts(project, seconds=0.4, elsewhere=IN_A_CHILD.format(code=child))
    assert states(result)["elsewhere"] == "passes", result["elsewhere"].why


@pytest.mark.skipif(not Path("/proc").exists(), reason="another process's computing time is read from /proc")
def test_a_child_process_that_computes_for_ever_is_an_endless_loop_and_one_that_waits_is_not(project):
    result, _ = verdicts(project, seconds=0.4, elsewhere=IN_A_CHILD.format(code="while True: pass"))
    assert result["elsewhere"].why.startswith("endless loop, or far too slow? A test was stopped after 2 s")
    waits = "import time; time.sleep(1000)"
    result, _ = verdicts(project, seconds=0.4, elsewhere=IN_A_CHILD.format(code=waits))
    assert result["elsewhere"].why.startswith("waiting for what never comes? A test was stopped after 2 s")


def test_a_loop_that_catches_everything_is_stopped_too(project):
    stubborn = """
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass"""
    result, _ = verdicts(project, seconds=1.5, scale=stubborn)
    assert states(result)["scale"] == "fails" and "endless loop" in result["scale"].why
    assert states(result)["add"] == "passes"


def test_a_function_that_ends_the_process_fails(project):
    result, _ = verdicts(project, scale="import os; os._exit(0)")
    assert states(result)["scale"] == "fails" and "ended" in result["scale"].why


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


# holds the interpreter's lock: no thread of Python can end it
HANG = "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 30)); ctypes.PyDLL(None).pause()"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
@pytest.mark.parametrize("hangs", [False, True])
def test_processes_that_a_test_leaves_behind_are_ended_also_when_pytest_hangs(
    project, tmp_path_factory, hangs
):
    note = tmp_path_factory.mktemp("note") / "pid"
    test = f"""import ctypes, signal, subprocess, sys

def test_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open({str(note)!r}, "w").write(str(child.pid))
    {HANG if hangs else "pass"}
"""
    project.joinpath("tests/test_toys_toy.py").write_text(test)
    folder = tmp_path_factory.mktemp("copy")
    copy_project(project, folder)
    for total in (8.0, 40.0, 200.0) if hangs else (600.0,):  # until the child was there by then
        [result] = run_tests(folder, ["tests/test_toys_toy.py"], seconds=1.0, total=total)
        if note.exists():
            break
    assert result["outcome"] == ("failed" if hangs else "passed") and (not hangs or result["late"])
    wait_until(lambda: not alive(int(note.read_text())))


def test_a_project_is_copied_where_it_could_be_changed_and_linked_elsewhere(tmp_path):
    root = find_project()
    copy_project(root, tmp_path)
    for module in ("adamw.py", "data/stream.py", "data/__init__.py"):
        copied = tmp_path / "tinygpt" / module
        assert copied.read_bytes() == (root / "tinygpt" / module).read_bytes()
        assert copied.resolve() == tmp_path.resolve() / "tinygpt" / module
    assert not (tmp_path / "tests").is_symlink() and (tmp_path / "nbs").is_symlink()
    assert (tmp_path / "nbs/10_adamw.ipynb").exists() and (tmp_path / "settings.ini").exists()


def test_modules_without_a_test_file_of_their_own_are_tested_by_those_that_import_them(tmp_path):
    root = find_project()
    assert find_tests(root, "adamw") == ["tests/test_adamw.py"]
    assert find_tests(root, "data.stream") == ["tests/test_data_stream.py"]
    (tmp_path / "tests").mkdir()
    for name, source in {
        "a": "from tinygpt.data.stream import open_stream",
        "b": "from tinygpt.data import pack, stream",
        "c": "from tinygpt.data import (\n    pack,\n    stream as s,\n)",
        "d": "import tinygpt.data.stream as stream",
        "e": "from tinygpt import stream\nfrom tinygpt.data import pack",
        "f": "from tinygpt.data.streams import open_stream",
        "g": "from tinygpt import wire",
    }.items():
        (tmp_path / f"tests/test_{name}.py").write_text(source)
    assert find_tests(tmp_path, "data.stream") == [f"tests/test_{name}.py" for name in "abcd"]
    assert find_tests(tmp_path, "wire") == ["tests/test_g.py"]
    assert find_tests(tmp_path, "zero") == []


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


def test_a_test_that_fails_with_the_packages_functions_too_accuses_nobody(project):
    with open(project / "tests/test_toys_toy.py", "a") as f:
        f.write("\n\ndef test_of_this_machine():\n    assert toy.add(1, 1) == toy.scale(3)\n")
        f.write("\n\ndef test_of_this_machine_and_more():\n    assert toy.add(1, 1) == 2\n")
    result, told = verdicts(project, add="return b + a", scale="return 11 * x")
    expected = dict(add="passes", total="passes", scale="fails", elsewhere="passes", unused="hole")
    assert states(result) == expected and "assert 22 == 20" in result["scale"].why
    assert sum("left out" in line and "of this machine: assert 2 == 30" in line for line in told) == 1


def test_where_every_test_fails_with_the_packages_functions_nothing_is_judged(project):
    test = "def test_of_this_machine():\n    assert toy.add(1, 1) == 3\n"
    project.joinpath("tests/test_toys_toy.py").write_text(f"from tinygpt.toys import toy\n\n\n{test}")
    result, _ = verdicts(project)
    assert set(states(result).values()) == {"not run", "hole"}


def test_a_process_that_ends_hides_no_verdict_of_the_tests_after_it(project):
    text = (project / "tests/test_toys_toy.py").read_text()
    first = "def test_aa_ten():\n    assert toy.scale(1) == 10\n\n\ndef test_adding"
    (project / "tests/test_toys_toy.py").write_text(text.replace("def test_adding", first))
    result, _ = verdicts(project, scale="import os; os._exit(0)", total="return 1 + sum(items)")
    expected = dict(add="passes", total="fails", scale="fails", elsewhere="passes", unused="hole")
    assert states(result) == expected


@pytest.mark.parametrize("how", ["pytest.skip('later')", "raise pytest.xfail.Exception('known')"])
def test_a_test_that_was_skipped_or_expected_to_fail_is_no_verdict(project, how):
    test = f"import pytest\nfrom tinygpt.toys import toy\n\n\ndef test_it():\n    toy.add(2, 3)\n    {how}\n"
    project.joinpath("tests/test_toys_toy.py").write_text(test)
    result, _ = verdicts(project, add="return 'nonsense'")
    assert states(result)["add"] == "not run"


def test_a_test_that_only_waits_is_not_called_an_endless_loop(project):
    result, _ = verdicts(project, seconds=0.4, scale="import time; time.sleep(1000)")
    said = "waiting for what never comes? A test was stopped after 2 s: ten times (it was in scale)"
    assert result["scale"].why == said


@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX's")
def test_a_process_that_left_the_group_is_ended_too():
    code = "import subprocess, sys; sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']; "
    code += (
        "child = subprocess.Popen(sleep, start_new_session=True); print(child.pid, flush=True); child.wait()"
    )
    command = [sys.executable, "-S", "-c", code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    child = int(parent.stdout.readline())
    judge_module.end_group(parent)
    wait_until(lambda: not alive(child))


PICKY = """class UserError(ValueError): pass


def check(x):
    if x < 0:
        raise UserError(f"x = {x} is below 0: take another")


def root(x):
    "The root of x. UserError below 0."
    check(x)
    return x**0.5


def half(x):
    "Half of x. UserError for an odd number."
    if x % 2:
        raise UserError(f"x = {x} is odd: take an even one")
    return x // 2
"""
PICKY_TESTS = """import pytest
from tinygpt.toys import toy


def test_below_0_there_is_no_root():
    with pytest.raises(toy.UserError, match="x = -4 is below 0"):
        toy.root(-4)
    with pytest.raises(toy.UserError, match="x = -4 is below 0"):
        toy.check(-4)


def test_odd_numbers_have_no_half():
    with pytest.raises(toy.UserError, match="x = 3 is odd") as error:
        toy.half(3)
    assert "3" in str(error.value)
    with pytest.raises(ZeroDivisionError, match="division"):
        1 / 0
    assert toy.half(4) == 2
"""


@pytest.fixture
def picky(project):
    (project / "tinygpt/toys/toy.py").write_text(PICKY)
    (project / "tests/test_toys_toy.py").write_text(PICKY_TESTS)
    parts = [f"class {PICKY.split('class ')[1].split(chr(10))[0]}", *PICKY.split("\n\n\n")[1:]]
    cells = [{"cell_type": "code", "id": "module", "metadata": {}, "source": "#| default_exp toys.toy"}]
    for i, part in enumerate(parts):
        cells.append({"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": f"#| export\n{part}"})
    page = project / "nbs/more/05_toy.ipynb"
    page.write_text(json.dumps({"cells": cells, "metadata": {}}))

    def wrote(**bodies):
        chapter = read_notebook(page)
        nb = copy.deepcopy(chapter)
        for cell in nb["cells"]:
            for name, body in bodies.items():
                if f"def {name}(" in cell["source"]:
                    head, doc, _ = cell["source"].split('"', 2)
                    cell["source"] = f'{head}"{doc}"\n    {body}'
        return {v.name: v for v in judge(project, read_work(nb, chapter, "05_toy"), None, 10.0)}

    return wrote


def test_an_error_in_the_learners_own_words_passes_and_the_packages_are_told(picky):
    result = picky(
        half="assert_even(x)\n    return x // 2\n\n\ndef assert_even(x):\n    if x % 2:\n"
        "        raise UserError(f'{x} cannot be halved')"
    )
    assert states(result)["half"] == "passes"
    assert result["half"].why == judge_module.REWORDED + "odd numbers have no half: 'x = 3 is odd'"
    assert result["root"].why == ""


@pytest.mark.parametrize(
    "body, why",
    [
        ("return x // 2", "DID NOT RAISE a UserError such as 'x = 3 is odd'"),
        ("raise UserError('never')", "never"),
        (
            "if x % 2:\n        raise ValueError(f'x = {x} is odd')\n    return x // 2",
            "ValueError: x = 3 is odd",
        ),
        ("if x % 2:\n        raise UserError('odd')\n    return x // 2", "assert '3' in 'odd'"),
    ],
)
def test_an_error_that_is_missing_always_there_of_another_kind_or_says_too_little_fails(picky, body, why):
    result = picky(half=body)
    assert states(result)["half"] == "fails" and why in result["half"].why


def test_the_packages_own_sentence_about_a_wrong_value_is_no_rewording(picky):
    result = picky(root="check(2 * x)\n    return x**0.5")
    assert states(result)["root"] == "fails" and "x = -8 is below 0" in result["root"].why


def test_a_function_that_no_test_reached_because_another_is_wrong_is_judged_without_that(project):
    loop = "result = 0\n    for item in items:\n        result = add(result, item)\n    return result"
    tests = "from tinygpt.toys import toy\n\n\ndef test_it():\n    assert toy.scale(toy.add(1, 1)) == 20\n"
    tests += "    assert toy.total([toy.scale(1), 2]) == 12\n"
    (project / "tests/test_toys_toy.py").write_text(tests)
    result, _ = verdicts(project, add="return nothing", total=loop, holes=("unused", "elsewhere"))
    expected = dict(add="fails", total="passes", scale="passes", elsewhere="hole", unused="hole")
    assert states(result) == expected
    assert result["add"].why.endswith(judge_module.EXPORT)
    wrong, _ = verdicts(project, add="return nothing", total="return 7", holes=("unused", "elsewhere"))
    assert states(wrong) == expected | {"total": "fails"}


def test_an_endless_loop_is_not_blamed_on_a_right_function_that_it_calls(project):
    slow = "result = 0\n    while True:\n        result = add(result, 1)"
    add = "for _ in range(10**5): pass\n    return a + b"
    result, _ = verdicts(project, seconds=1.0, add=add, total=slow)
    assert states(result)["add"] == "passes" and "(it was in total)" in result["total"].why


def test_a_value_that_pytest_only_numbers_is_told(project):
    test = "@pytest.mark.parametrize('x, y', [({1}, 3), ({2}, 4)])\ndef test_it(x, y):\n"
    test += "    assert toy.add(*x, 2) == y\n"
    project.joinpath("tests/test_toys_toy.py").write_text(
        f"import pytest\nfrom tinygpt.toys import toy\n\n\n{test}"
    )
    result, _ = verdicts(project, add="return a + b - (a == 2)", holes=("total", "scale"))
    assert result["add"].why.startswith("it[x = {2}-4]: assert 3 == 4")


def test_of_several_failures_that_hypothesis_finds_the_first_is_told_with_an_example(project):
    test = "@settings(database=None)\n@given(x=st.integers(1, 9))\ndef test_it(x):\n"
    test += "    if x < 4:\n        assert toy.add(x, 1) == x + 1\n    assert toy.add(x, 2) == x + 2\n"
    imports = "from hypothesis import given, settings, strategies as st\nfrom tinygpt.toys import toy\n\n\n"
    project.joinpath("tests/test_toys_toy.py").write_text(imports + test)
    result, _ = verdicts(project, add="return a - b", holes=("total", "scale"))
    why = result["add"].why
    assert re.fullmatch(r"it: assert -?\d+ == .* \(an example: x=\d\)", why), why
