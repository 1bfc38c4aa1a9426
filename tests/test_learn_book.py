import ast
import functools
import json
import re
from pathlib import Path

import nbformat
import pytest

import tinygpt.learn.book as book
from tinygpt.learn.book import (
    exercises_of,
    exports_in,
    find_chapters,
    find_project,
    functions_in,
    gives_away,
    hints_for,
    is_exercise,
    is_exported,
    is_hole,
    make_hole,
    make_notebook,
    read_notebook,
    telling_lines,
    was_worked_on,
)
from tinygpt.support import UserError

ROOT = find_project()
CHAPTERS = sorted(p.stem for p in (ROOT / "nbs").glob("[0-9]*.ipynb") if exercises_of(ROOT, p.stem))
exercises_of = functools.lru_cache(exercises_of)
squeeze = lambda text: re.sub(r"\s+", " ", text)


def test_every_chapter_with_code_has_exercises():
    assert len(CHAPTERS) > 40 and {c[:2] for c in CHAPTERS} >= {f"{n:02d}" for n in range(20)}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_learners_notebook_is_valid_and_holds_no_solution(chapter):
    exercises = exercises_of(ROOT, chapter)
    nb = make_notebook(ROOT, chapter)
    nbformat.validate(nbformat.from_dict(nb))
    exported = [c["source"] for c in nb["cells"] if is_exported(c)]
    for source in exported:
        compile(source, chapter, "exec")
    assert sum(source.count('raise NotImplementedError("hole: ') for source in exported) == len(exercises)
    visible = [c for c in nb["cells"] if not c["metadata"].get("jupyter")]
    text = "\n".join(squeeze(c["source"]) for c in visible)
    for d in exercises:
        body = squeeze("\n".join(ast.unparse(s) for s in d.body))
        written = squeeze("\n".join(d.text.splitlines()[book.body_span(d)[0] - 1 :]))
        assert len(body) < 30 or (body not in text and written not in text), d.name
        assert not any(
            gives_away(c["source"], d) for c in visible if c["cell_type"] == "code" and not is_exported(c)
        ), d.name
    for page in re.findall(
        r"\]\(([^)#\s]+)", "\n".join(c["source"] for c in nb["cells"] if c["cell_type"] == "markdown")
    ):
        assert (
            page.startswith(("http", "attachment:", "data:")) or (ROOT / "learn" / page).resolve().exists()
        ), page


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_hole_keeps_header_docstring_and_the_comment_behind_each_parameter(chapter):
    for d in exercises_of(ROOT, chapter):
        [hole] = functions_in(make_hole(d))
        assert is_hole(hole) and not is_hole(d), d.name
        for part in ("args", "decorator_list", "returns"):
            ours, theirs = getattr(hole.node, part), getattr(d.node, part)
            assert (
                [ast.dump(x) for x in ours] == [ast.dump(x) for x in theirs]
                if isinstance(ours, list)
                else ast.dump(ours or ast.Pass()) == ast.dump(theirs or ast.Pass())
            )
        assert ast.get_docstring(hole.node) == ast.get_docstring(d.node)
        header = d.text.splitlines()[: d.body[0].lineno - 1]
        assert all(line in hole.text for line in header if "#" in line)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_there_are_three_hints_and_none_of_the_first_two_is_the_solution(chapter):
    for d in exercises_of(ROOT, chapter):
        first, skeleton, half = hints_for(d)
        if len(telling_lines(d.text)) > 6:
            assert not gives_away(first, d) and not set(
                telling_lines("\n".join(ast.unparse(s) for s in d.body))
            ) <= set(telling_lines(skeleton)), d.name
        assert (
            d.text.splitlines()[-1].strip() not in half
            or len(d.body) == 1
            or book.body_span(d)[1] - book.body_span(d)[0] < 2
            or d.text.count(d.text.splitlines()[-1].strip()) > 1
        ), d.name


def test_what_is_an_exercise():
    source = """
def documented(x):
    "Returns x."
    return x

def two(x):
    x += 1
    return x

def one(x): return x

def _private(x):
    "Documented, but nobody's."
    return x

def main():
    "The command line."
    return two(1)

class Public:
    def __init__(self, x):
        self.x = x
        self.y = x

    def __next__(self):
        self.x += 1
        return self.x

    def abstract(self):
        "What a subclass does."

    def abstract_too(self):
        "What a subclass does."
        raise NotImplementedError

    @property
    def documented(self):
        "x."
        return self.x

class _Private:
    def method(self):
        "Not exported."
        return 1
"""
    assert [d.name for d in functions_in(source) if is_exercise(d)] == [
        "documented",
        "two",
        "Public.__next__",
        "Public.documented",
    ]


def test_decorators_comments_and_one_line_bodies_survive():
    [d] = functions_in(
        '@cache\n@other(1)\ndef f(\n    x,  # of shape (B, T)\n):\n    "Doc."\n    # first\n    y = "a\\nb"\n    return y  # last'
    )
    assert make_hole(d).startswith(
        '@cache\n@other(1)\ndef f(\n    x,  # of shape (B, T)\n):\n    "Doc."\n'
    ) and "return y" not in make_hole(d)
    [d] = functions_in("def f(x): return x + 1")
    assert is_hole(functions_in(make_hole(d))[0]) and "x + 1" not in make_hole(d)
    [d] = functions_in("def f(x):\n    @wraps(x)\n    def g(): return 1\n    return g")
    assert "wraps" not in make_hole(d)


def test_a_body_of_dots_or_pass_is_a_hole_too_and_another_error_is_not():
    assert all(
        is_hole(functions_in(f"def f():\n    'doc'\n    {body}")[0])
        for body in ("...", "pass", "raise NotImplementedError('hole: f')")
    )
    assert not is_hole(functions_in("def f():\n    raise ValueError('no')")[0]) and not is_hole(
        functions_in("def f():\n    return None")[0]
    )


def test_only_leaves_the_rest_filled_in():
    nb = make_notebook(ROOT, "10_adamw", only=["AdamW.step"])
    assert {d.name for d in exports_in(nb) if is_hole(d)} == {"AdamW.step"} and nb["metadata"]["tinygpt"][
        "holes"
    ] == ["AdamW.step"]
    with pytest.raises(
        UserError, match="only = adam_update is no exercise of 10_adamw: choose among adamw_update"
    ):
        make_notebook(ROOT, "10_adamw", only=["adam_update"])


def test_pictures_and_checks_stay():
    nb, chapter = make_notebook(ROOT, "10_adamw"), read_notebook(ROOT / "nbs/10_adamw.ipynb")
    count = lambda nb, what: sum(
        what in json.dumps(c) for c in nb["cells"] if c["cell_type"] == "code" and not is_exported(c)
    )
    assert (
        count(nb, "image/png") == count(chapter, "image/png") > 0
        and count(nb, "assert ") == count(chapter, "assert ") > 20
    )


def test_notes_and_answers_are_work_and_outputs_are_not():
    nb = make_notebook(ROOT, "11_schedule")
    nb["cells"][5]["outputs"] = []
    assert not was_worked_on(nb)
    nb["cells"][5]["source"] += " "
    assert was_worked_on(nb)


def test_chapters_are_found_by_number_name_and_module():
    assert {"06_model", "06_model_hf"} <= set(find_chapters(ROOT, "6")) and find_chapters(
        ROOT, "6"
    ) == find_chapters(ROOT, "06")
    assert find_chapters(ROOT, "06_model") == find_chapters(ROOT, "model") == ["06_model"]
    for which in ("99", "21", "adam", "²"):
        with pytest.raises(
            UserError, match=f"chapter = {which} is not one of those with exercises: 00_support"
        ):
            find_chapters(ROOT, which)


def test_a_file_that_is_no_notebook_and_a_missing_one_are_told_in_a_sentence(tmp_path):
    for text in ("not json", "[]", '{"cells": [1]}', '{"cells": [{"source": "x"}]}'):
        (tmp_path / "10_adamw.ipynb").write_text(text)
        with pytest.raises(UserError, match="is not a notebook any more .*reset 10_adamw"):
            read_notebook(tmp_path / "10_adamw.ipynb")
    with pytest.raises(UserError, match="begin with python -m tinygpt.learn start 11_schedule"):
        read_notebook(tmp_path / "11_schedule.ipynb")


def test_without_a_checkout_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(book.tinygpt, "__file__", str(tmp_path / "site-packages/tinygpt/__init__.py"))
    with pytest.raises(UserError, match="learn mode needs the chapters and the tests.*clone the project"):
        find_project()
    assert Path(book.tinygpt.__file__).name == "__init__.py"
