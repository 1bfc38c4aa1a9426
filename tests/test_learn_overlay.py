import ast
import copy

import pytest

from tinygpt.learn import overlay
from tinygpt.learn.book import (
    exercises_of,
    exports_in,
    find_chapters,
    find_project,
    functions_in,
    make_notebook,
    module_file,
    module_of,
    page_path,
    read_notebook,
)
from tinygpt.learn.overlay import lay_over, read_work

ROOT = find_project()
CHAPTERS = find_chapters(ROOT)
DOUBLE = """def double(x):
    "Twice x."
    return 2 * x


def _help(x):
    return x"""
BOX = """class Box:
    def __init__(self, x):
        self.x = x

    def open(self):
        "What is in it."
        return self.x"""
SOURCES = {
    "module": "#| default_exp toys.box",
    "one": "#| export\nimport math\n\nLIMIT = 3",
    "two": f"#| export\n{DOUBLE}",
    "three": f"#| export\n{BOX}",
    "four": "assert double(2) == 4",
}
CHAPTER = {"cells": [{"cell_type": "code", "id": name, "source": source} for name, source in SOURCES.items()]}
MODULE = (
    f'"""Toy."""\n\nfrom __future__ import annotations\n\nimport math\n\nLIMIT = 3\n\n{DOUBLE}\n\n{BOX}\n'
)


def work_after(**cells):
    "What is read from the toy chapter when some of its cells have another source."
    nb = copy.deepcopy(CHAPTER)
    for cell in nb["cells"]:
        cell["source"] = cells.pop(cell["id"], cell["source"])
    nb["cells"] += [{"cell_type": "code", "id": name, "source": source} for name, source in cells.items()]
    return read_work(nb, CHAPTER, "05_toy")


def run(work, names=None):
    "The namespace of the toy module with the work laid over, and what ran."
    text = lay_over(MODULE, work, list(work.written) if names is None else names)
    namespace = {"__name__": "toy"}
    exec(compile(text.replace("from tinygpt_ran import RAN as _ran", "_ran = {}"), "toy", "exec"), namespace)
    return namespace


class Plain(ast.NodeTransformer):
    "Takes out the notes of `lay_over`, and writes every import from the package alike."

    def __init__(self, package):  # the package that the module is in: "tinygpt.data"
        self.package = package

    def visit_Assign(self, node):
        return None if ast.unparse(node).startswith("_ran[") else node

    def visit_ImportFrom(self, node):
        if node.module == "tinygpt_ran":
            return None
        if node.level:
            above = self.package.split(".")[: len(self.package.split(".")) + 1 - node.level]
            node.module, node.level = ".".join([*above, *filter(None, [node.module])]), 0
        return node


def parsed(source, module):
    package = f"tinygpt.{module}".rpartition(".")[0]
    return ast.dump(Plain(package).visit(ast.parse(source)))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_all_solutions_laid_over_are_the_package_but_for_the_notes(chapter):
    names = [d.name for d in exercises_of(ROOT, chapter)]
    nb = make_notebook(ROOT, chapter, only=[])
    nb["metadata"]["tinygpt"]["holes"] = names
    work = read_work(nb, read_notebook(page_path(ROOT, chapter)), chapter)
    assert work.module == module_of(ROOT, chapter)
    assert not (work.problems or work.helpers or work.imports or work.changed or work.holes or work.notes)
    source = (ROOT / module_file(work.module)).read_text(encoding="utf-8")
    laid = lay_over(source, work, list(work.written))
    assert laid.count(f'_ran["{work.module}:') == len(work.written) == len(names)
    assert parsed(laid, work.module) == parsed(source, work.module)


@pytest.mark.parametrize("chapter", ["10_adamw", "13_ddp_world", "06_model"])
def test_a_fresh_notebook_is_all_holes(chapter):
    work = read_work(make_notebook(ROOT, chapter), read_notebook(page_path(ROOT, chapter)), chapter)
    assert work.holes == [d.name for d in exercises_of(ROOT, chapter)]
    assert not (work.written or work.problems or work.changed)


def test_a_functions_note_says_that_it_ran_and_of_which_module_it_is():
    help_too = "\n\n\ndef _help(x):\n    return x"
    work = work_after(two='#| export\ndef double(x):\n    "Twice x."\n    return x + x' + help_too)
    space = run(work)
    assert not space["_ran"] and space["double"](4) == 8
    assert space["_ran"] == {"toys.box:double": True}
    assert space["Box"](3).open() == 3
    assert space["_ran"] == {"toys.box:double": True, "toys.box:Box.open": True}
    assert run(work, names=["Box.open"])["double"].__code__.co_consts[0] == "Twice x."
    assert "x + x" not in lay_over(MODULE, work, ["Box.open"])


def test_one_line_bodies_are_noted_too():
    work = work_after(two="#| export\ndef double(x): return x + x\n\n\ndef _help(x):\n    return x")
    space = run(work)
    assert space["double"](2) == 4 and "toys.box:double" in space["_ran"]


def test_helpers_constants_and_imports_of_the_learner_travel_with_the_solution():
    source = """#| export
import math
import statistics as st

FACTOR = 2


def mine(x):
    return FACTOR * x


def double(x):
    "Twice x."
    return st.mean([mine(x), mine(x)])


def _help(x):
    return x"""
    work = work_after(two=source)
    assert work.imports == ["import statistics as st"] and len(work.helpers) == 2
    assert run(work)["double"](3) == 6


def test_a_helper_in_a_cell_of_its_own_and_one_that_is_a_base_class_travel():
    source = """#| export
class Base:
    def value(self):
        return self.x


class Box(Base):
    def __init__(self, x):
        self.x = x

    def open(self):
        "What is in it."
        return later(self.x)"""
    work = work_after(three=source, five="#| export\ndef later(x):\n    return x + 1")
    space = run(work)
    assert space["Box"](1).open() == 2 and "Base" in space


def test_new_methods_and_changed_constructors_travel():
    source = """#| export
class Box:
    def __init__(self, x):
        self.y = x

    def open(self):
        "What is in it."
        return self.look()

    def look(self):
        return self.y + 1"""
    work = work_after(three=source)
    assert set(work.changed) == {"Box.__init__", "Box.look"} and run(work)["Box"](1).open() == 2


def test_a_renamed_function_and_a_deleted_cell_are_told():
    work = work_after(two='#| export\ndef doubled(x):\n    "Twice x."\n    return 2 * x', three="")
    gone = "there is no double in the cells that begin with #| export: it was renamed, moved or deleted"
    assert work.problems["double"] == gone and "Box.open" in work.problems


def test_a_changed_signature_is_told_and_annotations_and_defaults_do_not_count():
    work = work_after(two="#| export\ndef double(x, y):\n    return 2 * x")
    assert work.problems["double"] == "its arguments are (x, y), and should be (x)"
    assert "double" in work_after(two="#| export\ndef double(x: int = 0):\n    return 2 * x").written


@pytest.mark.parametrize("arguments", ["a, b, /, c, *rest, d, **more", "a, *, b", "**more", "*rest", ""])
def test_every_kind_of_argument_counts(arguments):
    [d] = functions_in(f"def f({arguments}): pass")
    assert overlay._arguments(d) == arguments.replace("/, ", "")


def test_a_cell_that_is_not_python_is_named_with_its_line_and_spoils_no_other():
    work = work_after(two='#| export\ndef double(x):\n    "Twice x."\n    return 2 * (x\n')
    said = "cell 3 (id two) is not Python: '(' was never closed, line 4: return 2 * (x"
    assert work.problems == {"double": said}
    assert list(work.written) == ["Box.open"]


def test_of_two_versions_the_later_counts_unless_it_is_a_hole():
    later = '#| export\ndef double(x):\n    "Twice x."\n    return x * 2'
    assert "x * 2" in work_after(five=later).written["double"].text
    hole = later.replace("return x * 2", 'raise NotImplementedError("hole: double")')
    assert "2 * x" in work_after(five=hole).written["double"].text


def test_what_only_left_filled_in_is_given_until_it_is_changed():
    nb = copy.deepcopy(CHAPTER) | {"metadata": {"tinygpt": {"holes": ["double"]}}}
    work = read_work(nb, CHAPTER, "05_toy")
    assert work.given == ["Box.open"] and list(work.written) == ["double"]
    cell = nb["cells"][3]
    cell["source"] = cell["source"].replace("return self.x", "return 0")
    assert set(read_work(nb, CHAPTER, "05_toy").written) == {"double", "Box.open"}


def test_the_text_of_the_module_stays_parseable_for_every_single_function():
    chapter = read_notebook(ROOT / "nbs/06_model.ipynb")
    work = read_work(chapter, chapter, "06_model")
    source = (ROOT / "tinygpt/model.py").read_text(encoding="utf-8")
    for name in work.written:
        laid = lay_over(source, work, [name])
        assert [d.name for d in functions_in(laid)] == [d.name for d in functions_in(source)]
    assert {d.name for d in exports_in(chapter)} >= set(work.written)


@pytest.mark.parametrize(
    "header",
    [
        "from functools import cache\n\n\n@cache\ndef double(x): return x + x",
        "def double(\n    x,\n): return x + x",
    ],
)
def test_a_body_on_the_headers_last_line_is_noted_also_below_a_decorator(header):
    space = run(work_after(two=f"#| export\n{header}\n\n\ndef _help(x):\n    return x"))
    assert space["double"](2) == 4 and "toys.box:double" in space["_ran"]


def test_a_method_may_hold_a_text_and_a_comment_that_begin_in_the_first_column():
    source = BOX.replace(
        "        return self.x", '# mine\n        t = """\n  hello\nyou"""\n        return t'
    )
    work = work_after(three=f"#| export\n{source}")
    assert list(work.written) == ["double", "Box.open"]
    assert run(work)["Box"](1).open() == "\n  hello\nyou"


def test_a_helper_in_a_cell_before_a_function_may_be_used_in_its_header():
    nb = copy.deepcopy(CHAPTER)
    helper = {"cell_type": "code", "id": "mine", "source": "#| export\nFACTOR = 5"}
    nb["cells"].insert(2, helper)
    nb["cells"][3]["source"] = f"#| export\n{DOUBLE}".replace("(x)", "(x, k=FACTOR)", 1)
    chapter = copy.deepcopy(CHAPTER)
    chapter["cells"][2]["source"] = f"#| export\n{DOUBLE}".replace("(x)", "(x, k=2)", 1)
    work = read_work(nb, chapter, "05_toy")
    assert run(work)["double"].__defaults__ == (5,)
    nb["cells"].append(helper)  # it was run again by itself
    assert run(read_work(nb, chapter, "05_toy"))["double"].__defaults__ == (5,)


def test_what_is_not_carried_over_is_told():
    tried = "try:\n    import numpy as np\nexcept ImportError:\n    np = None"
    work = work_after(one="#| export\nimport math\n\nLIMIT = 4", five=f"#| export\n{tried}")
    said = [note.removeprefix("not carried over, the package's stays: ") for note in work.notes]
    assert said == ["LIMIT = 4", "try:"]
    assert work_after(five="#| export\nfrom __future__ import annotations").imports == []
    assert not work_after().notes
