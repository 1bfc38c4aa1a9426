import ast
import copy

import pytest

from tinygpt.learn.book import (
    exercises_of,
    exports_in,
    find_project,
    functions_in,
    make_notebook,
    read_notebook,
)
from tinygpt.learn.overlay import lay_over, read_work

ROOT = find_project()
CHAPTERS = sorted(p.stem for p in (ROOT / "nbs").glob("[0-9]*.ipynb") if exercises_of(ROOT, p.stem))
CHAPTER = {
    "cells": [
        {"cell_type": "code", "id": "one", "source": "#| export\nimport math\n\nLIMIT = 3"},
        {
            "cell_type": "code",
            "id": "two",
            "source": '#| export\ndef double(x):\n    "Twice x."\n    return 2 * x\n\n\ndef _help(x):\n    return x',
        },
        {
            "cell_type": "code",
            "id": "three",
            "source": '#| export\nclass Box:\n    def __init__(self, x):\n        self.x = x\n\n    def open(self):\n        "What is in it."\n        return self.x',
        },
        {"cell_type": "code", "id": "four", "source": "assert double(2) == 4"},
    ]
}
MODULE = '"""Toy."""\n\nfrom __future__ import annotations\n\nimport math\n\nLIMIT = 3\n\ndef double(x):\n    "Twice x."\n    return 2 * x\n\n\ndef _help(x):\n    return x\n\nclass Box:\n    def __init__(self, x):\n        self.x = x\n\n    def open(self):\n        "What is in it."\n        return self.x\n'


def work_after(**cells):
    "What is read from the toy chapter when some of its cells have another source."
    nb = copy.deepcopy(CHAPTER)
    for cell in nb["cells"]:
        cell["source"] = cells.pop(cell["id"], cell["source"])
    nb["cells"] += [{"cell_type": "code", "id": name, "source": source} for name, source in cells.items()]
    return read_work(nb, CHAPTER, "05_toy")


def run(work, names=None, **more):
    "The namespace of the toy module with the work laid over, and what ran."
    text = lay_over(MODULE, work, list(work.written) if names is None else names)
    namespace = {"__name__": "toy"} | more
    exec(compile(text.replace("from tinygpt_ran import RAN as _ran", "_ran = {}"), "toy", "exec"), namespace)
    return namespace


def parsed(source):
    "A module without the notes of `lay_over`, its imports from the package all written alike."
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "body", None), list):
            node.body = [
                s for s in node.body if not ast.unparse(s).startswith(("_ran[", "from tinygpt_ran import"))
            ]
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tinygpt."):
            node.module, node.level = node.module.removeprefix("tinygpt."), 1
    return ast.dump(tree)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_all_solutions_laid_over_are_the_package_but_for_the_notes(chapter):
    nb = make_notebook(ROOT, chapter, only=[])
    nb["metadata"]["tinygpt"]["holes"] = [d.name for d in exercises_of(ROOT, chapter)]
    work = read_work(nb, read_notebook(ROOT / f"nbs/{chapter}.ipynb"), chapter)
    assert not (work.problems or work.helpers or work.imports or work.changed or work.holes)
    source = (ROOT / f"tinygpt/{work.module}.py").read_text(encoding="utf-8")
    laid = lay_over(source, work, list(work.written))
    assert laid.count(f'_ran["{work.module}:') == len(work.written) == len(exercises_of(ROOT, chapter))
    assert parsed(laid) == parsed(source)


@pytest.mark.parametrize("chapter", ["10_adamw", "13_ddp_launch", "06_model"])
def test_a_fresh_notebook_is_all_holes(chapter):
    work = read_work(make_notebook(ROOT, chapter), read_notebook(ROOT / f"nbs/{chapter}.ipynb"), chapter)
    assert work.holes == [d.name for d in exercises_of(ROOT, chapter)] and not (
        work.written or work.problems or work.changed
    )


def test_a_functions_note_says_that_it_ran():
    work = work_after(
        two='#| export\ndef double(x):\n    "Twice x."\n    return x + x\n\n\ndef _help(x):\n    return x'
    )
    space = run(work)
    assert not space["_ran"] and space["double"](4) == 8 and space["_ran"] == {"toy:double": True}
    assert space["Box"](3).open() == 3 and space["_ran"] == {"toy:double": True, "toy:Box.open": True}
    assert run(work, names=["Box.open"])["double"].__code__.co_consts[
        0
    ] == "Twice x." and "x + x" not in lay_over(MODULE, work, ["Box.open"])


def test_one_line_bodies_are_noted_too():
    work = work_after(two="#| export\ndef double(x): return x + x\n\n\ndef _help(x):\n    return x")
    space = run(work)
    assert space["double"](2) == 4 and "toy:double" in space["_ran"]


def test_helpers_constants_and_imports_of_the_learner_travel_with_the_solution():
    source = "#| export\nimport math\nimport statistics as st\n\nFACTOR = 2\n\n\ndef mine(x):\n    return FACTOR * x\n\n\n"
    work = work_after(
        two=source
        + 'def double(x):\n    "Twice x."\n    return st.mean([mine(x), mine(x)])\n\n\ndef _help(x):\n    return x'
    )
    assert work.imports == ["import statistics as st"] and len(work.helpers) == 2
    assert run(work)["double"](3) == 6


def test_a_helper_in_a_cell_of_its_own_and_one_that_is_a_base_class_travel():
    work = work_after(
        three='#| export\nclass Base:\n    def value(self):\n        return self.x\n\n\nclass Box(Base):\n    def __init__(self, x):\n        self.x = x\n\n    def open(self):\n        "What is in it."\n        return later(self.x)',
        five="#| export\ndef later(x):\n    return x + 1",
    )
    space = run(work)
    assert space["Box"](1).open() == 2 and "Base" in space


def test_new_methods_and_changed_constructors_travel():
    work = work_after(
        three='#| export\nclass Box:\n    def __init__(self, x):\n        self.y = x\n\n    def open(self):\n        "What is in it."\n        return self.look()\n\n    def look(self):\n        return self.y + 1'
    )
    assert set(work.changed) == {"Box.__init__", "Box.look"} and run(work)["Box"](1).open() == 2


def test_a_renamed_function_and_a_deleted_cell_are_told():
    work = work_after(two='#| export\ndef doubled(x):\n    "Twice x."\n    return 2 * x', three="")
    assert (
        "there is no double in the cells that begin with #| export: it was renamed, moved or deleted"
        == work.problems["double"]
        and "Box.open" in work.problems
    )


def test_a_changed_signature_is_told_and_annotations_and_defaults_do_not_count():
    assert (
        work_after(two="#| export\ndef double(x, y):\n    return 2 * x").problems["double"]
        == "its arguments are (x, y), and should be (x)"
    )
    assert "double" in work_after(two="#| export\ndef double(x: int = 0):\n    return 2 * x").written


def test_a_cell_that_is_not_python_is_named_with_its_line_and_spoils_no_other():
    work = work_after(two='#| export\ndef double(x):\n    "Twice x."\n    return 2 * (x\n')
    assert work.problems == {
        "double": "cell 2 (id two) is not Python: '(' was never closed, line 4: return 2 * (x"
    }
    assert list(work.written) == ["Box.open"]


def test_of_two_versions_the_later_counts_unless_it_is_a_hole():
    later = '#| export\ndef double(x):\n    "Twice x."\n    return x * 2'
    assert "x * 2" in work_after(five=later).written["double"].text
    assert (
        "2 * x"
        in work_after(five=later.replace("return x * 2", 'raise NotImplementedError("hole: double")'))
        .written["double"]
        .text
    )


def test_what_only_left_filled_in_is_given_until_it_is_changed():
    nb = copy.deepcopy(CHAPTER) | {"metadata": {"tinygpt": {"holes": ["double"]}}}
    work = read_work(nb, CHAPTER, "05_toy")
    assert work.given == ["Box.open"] and list(work.written) == ["double"]
    nb["cells"][2]["source"] = nb["cells"][2]["source"].replace("return self.x", "return 0")
    assert set(read_work(nb, CHAPTER, "05_toy").written) == {"double", "Box.open"}


def test_the_text_of_the_module_stays_parseable_for_every_single_function():
    chapter = read_notebook(ROOT / "nbs/06_model.ipynb")
    work = read_work(chapter, chapter, "06_model")
    source = (ROOT / "tinygpt/model.py").read_text(encoding="utf-8")
    for name in work.written:
        laid = lay_over(source, work, [name])
        assert [d.name for d in functions_in(laid)] == [d.name for d in functions_in(source)]
    assert {d.name for d in exports_in(chapter)} >= set(work.written)
