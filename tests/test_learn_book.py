import ast
import copy
import functools
import json
import re
from pathlib import Path

import nbformat
import pytest

import tinygpt.learn.book as book
from tinygpt.learn.book import (
    IDEAS,
    all_pages,
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
    module_file,
    module_of,
    own_test_file,
    page_path,
    read_notebook,
    telling_lines,
    was_worked_on,
)
from tinygpt.support import UserError

ROOT = find_project()
CHAPTERS = find_chapters(ROOT)
exercises_of = functools.lru_cache(exercises_of)  # the book's files stay as they are
notebook_of = functools.lru_cache(make_notebook)


@pytest.fixture
def read_once(monkeypatch):
    "Who looks for a chapter reads all pages, each time."
    monkeypatch.setattr(book, "exercises_of", exercises_of)
    monkeypatch.setattr(book, "module_of", functools.lru_cache(module_of))


def squeeze(text):
    return re.sub(r"\s+", " ", text)


def test_every_chapter_with_code_has_exercises():
    assert len(CHAPTERS) > 40 and {c[:2] for c in CHAPTERS} >= {f"{n:02d}" for n in range(21)}


def test_a_page_has_a_module_a_file_and_tests_wherever_it_lies():
    assert page_path(ROOT, "10_adamw") == ROOT / "nbs/10_adamw.ipynb"
    assert page_path(ROOT, "03_data_stream") == ROOT / "nbs/more/03_data_stream.ipynb"
    assert module_of(ROOT, "10_adamw") == "adamw" and module_of(ROOT, "03_data_stream") == "data.stream"
    assert (
        module_file("adamw") == "tinygpt/adamw.py" and module_file("data.stream") == "tinygpt/data/stream.py"
    )
    assert own_test_file("data.stream") == "tests/test_data_stream.py"
    for page in all_pages(ROOT):
        module = module_of(ROOT, page)
        assert module is None or (ROOT / module_file(module)).exists(), page


def test_what_exports_nothing_reads_the_command_line_or_is_learn_mode_has_no_exercises():
    assert module_of(ROOT, "06_ngram") is None and module_of(ROOT, "03_data_command") == "data.__main__"
    for page in ("06_ngram", "index", "03_data_command", "17_export_command", "learn", "learn_book"):
        assert page_path(ROOT, page).exists() and not exercises_of(ROOT, page) and page not in CHAPTERS


def test_no_exercise_is_there_twice():
    for chapter in CHAPTERS:
        names = [d.name for d in exercises_of(ROOT, chapter)]
        assert len(names) == len(set(names)), chapter


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_learners_notebook_is_valid_and_holds_no_solution(chapter):
    exercises = exercises_of(ROOT, chapter)
    nb = notebook_of(ROOT, chapter)
    nbformat.validate(nbformat.from_dict(nb))
    exported = [c["source"] for c in nb["cells"] if is_exported(c)]
    for source in exported:
        compile(source, chapter, "exec")
    assert sum(source.count('raise NotImplementedError("hole: ') for source in exported) == len(exercises)
    visible = [c for c in nb["cells"] if not c["metadata"].get("jupyter")]
    text = "\n".join(squeeze(c["source"]) for c in visible)
    others = [c["source"] for c in visible if c["cell_type"] == "code" and not is_exported(c)]
    for d in exercises:
        body = squeeze("\n".join(ast.unparse(s) for s in d.body))
        written = squeeze("\n".join(d.text.splitlines()[book.body_span(d)[0] - 1 :]))
        assert len(body) < 30 or (body not in text and written not in text), d.name
        assert not any(gives_away(source, d) for source in others), d.name


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_links_of_a_learners_notebook_lead_to_what_is_there(chapter):
    cells = [c["source"] for c in notebook_of(ROOT, chapter)["cells"] if c["cell_type"] == "markdown"]
    for link in re.findall(r"\]\(([^)#\s]+)", "\n".join(cells)):
        if not link.startswith(("http", "attachment:", "data:")):
            assert (ROOT / "learn" / link).resolve().exists(), link


@pytest.mark.parametrize("chapter", ["10_adamw", "03_data_pack"])
def test_a_learners_notebook_finds_the_records_from_any_folder(chapter):
    code = [c["source"] for c in make_notebook(ROOT, chapter)["cells"] if c["cell_type"] == "code"]
    records = re.findall(r'Path\("(.*/benchmarks/results/[\w.]+)"\)', "\n".join(code))
    assert records and all(Path(record).is_absolute() and Path(record).exists() for record in records)


def test_links_to_chapters_and_side_pages_are_told_apart():
    def links(page):
        sources = "".join(c["source"] for c in make_notebook(ROOT, page)["cells"])
        return set(re.findall(r"\]\((?!https:)([^)#\s]+\.ipynb)", sources))

    of_chapter, of_side_page = links("03_data"), links("03_data_stream")
    assert all(link.startswith("../nbs/") for link in of_chapter | of_side_page)
    assert any(link.startswith("../nbs/more/") for link in of_chapter)
    assert any(re.match(r"\.\./nbs/\d", link) for link in of_side_page)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_hole_keeps_header_docstring_and_the_comment_behind_each_parameter(chapter):
    for d in exercises_of(ROOT, chapter):
        [hole] = functions_in(make_hole(d))
        assert is_hole(hole) and not is_hole(d), d.name
        header, original = copy.copy(hole.node), copy.copy(d.node)
        header.body = original.body = [ast.Pass()]
        assert ast.dump(header) == ast.dump(original)
        assert ast.get_docstring(hole.node) == ast.get_docstring(d.node)
        lines = d.text.splitlines()[: d.body[0].lineno - 1]
        assert all(line in hole.text for line in lines if "#" in line)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_there_are_three_hints_and_none_of_the_first_two_is_the_solution(chapter):
    for d in exercises_of(ROOT, chapter):
        first, skeleton, half = hints_for(d)
        if len(telling_lines(d.text)) > 6:
            wanted = set(telling_lines("\n".join(ast.unparse(s) for s in d.body)))
            assert not gives_away(first, d) and not wanted <= set(telling_lines(skeleton)), d.name
        begin, end = book.body_span(d)
        last = d.text.splitlines()[-1].strip()
        if len(d.body) > 1 and end - begin >= 2 and d.text.count(last) == 1:
            assert last not in half, d.name


def test_the_functions_of_the_first_hour_have_an_idea_in_their_first_hint():
    cells = {c.get("id"): c["source"] for c in read_notebook(ROOT / "nbs/more/learn.ipynb")["cells"]}
    begin = re.search(r"start (\d\d) --only (\S+)", cells["tour-md"])
    rest = cells["next-md"].split("Where to go next")[1].split("By default")[0]
    path = [
        begin.groups()[::-1],
        *((n, c) for n, c in re.findall(r"`([\w.]+)` \((?:chapter )?(\d\d)\)", rest)),
    ]
    assert [name for name, _ in path] == list(IDEAS)
    assert begin[1] == min(chapter for _, chapter in path)  # one begins with the earliest chapter
    for name, chapter in path:
        [d] = [d for page in find_chapters(ROOT, chapter) for d in exercises_of(ROOT, page) if d.name == name]
        assert hints_for(d)[0].startswith(IDEAS[name])
        assert not any(hint.startswith(IDEAS[name]) for hint in hints_for(d)[1:])


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

    def __setstate__(self, state):
        "What copy and pickle call."
        self.x = state

    def close(self):
        "Nothing to learn."
        self.x = None

    def runs(self):
        "For this chapter's lesson: what a picture shows."
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
    header = '@cache\n@other(1)\ndef f(\n    x,  # of shape (B, T)\n):\n    "Doc."\n'
    [d] = functions_in(header + '    # first\n    y = "a\\nb"\n    return y  # last')
    assert make_hole(d).startswith(header) and "return y" not in make_hole(d)
    [d] = functions_in("def f(x): return x + 1")
    assert is_hole(functions_in(make_hole(d))[0]) and "x + 1" not in make_hole(d)
    [d] = functions_in("def f(x):\n    @wraps(x)\n    def g(): return 1\n    return g")
    assert "wraps" not in make_hole(d)


def test_a_body_of_dots_or_pass_is_a_hole_too_and_another_error_is_not():
    for body in ("...", "pass", "raise NotImplementedError('hole: f')"):
        assert is_hole(functions_in(f"def f():\n    'doc'\n    {body}")[0])
    for body in ("raise ValueError('no')", "return None"):
        assert not is_hole(functions_in(f"def f():\n    {body}")[0])


def test_only_leaves_the_rest_filled_in():
    nb = make_notebook(ROOT, "10_adamw", only=["AdamW.step"])
    assert {d.name for d in exports_in(nb) if is_hole(d)} == {"AdamW.step"}
    assert nb["metadata"]["tinygpt"]["holes"] == ["AdamW.step"]
    said = "only = adam_update is not an exercise of 10_adamw: choose among adamw_update"
    with pytest.raises(UserError, match=said):
        make_notebook(ROOT, "10_adamw", only=["adam_update"])


def test_pictures_and_checks_stay():
    def count(nb, what):
        cells = [c for c in nb["cells"] if c["cell_type"] == "code" and not is_exported(c)]
        return sum(what in json.dumps(c) for c in cells)

    nb, chapter = make_notebook(ROOT, "10_adamw"), read_notebook(ROOT / "nbs/10_adamw.ipynb")
    assert count(nb, "image/png") == count(chapter, "image/png") > 0
    assert count(nb, "assert ") == count(chapter, "assert ") > 0


def test_notes_and_answers_are_work_and_outputs_are_not():
    nb = make_notebook(ROOT, "11_schedule")
    nb["cells"][5]["outputs"] = []
    assert not was_worked_on(nb)
    nb["cells"][5]["source"] += " "
    assert was_worked_on(nb)


def test_chapters_are_found_by_number_name_and_module():
    assert {"06_model", "06_model_hf"} <= set(find_chapters(ROOT, "6"))
    assert find_chapters(ROOT, "6") == find_chapters(ROOT, "06")
    assert find_chapters(ROOT, "06_model") == find_chapters(ROOT, "model") == ["06_model"]
    assert find_chapters(ROOT, "03_data_stream") == find_chapters(ROOT, "data.stream") == ["03_data_stream"]
    assert find_chapters(ROOT, "data.windows") == ["03_data"]
    assert {"03_data", "03_data_stream"} <= set(find_chapters(ROOT, "3"))


@pytest.mark.parametrize(
    "which", ["99", "26", "adam", "²", "06_ngram", "learn", "learn.book", "data.__main__"]
)
def test_what_has_no_exercises_is_no_chapter(read_once, which):
    said = re.escape(f"chapter = {which} is not one of those with exercises: 00_support")
    with pytest.raises(UserError, match=said):
        find_chapters(ROOT, which)


def test_a_file_that_is_no_notebook_and_a_missing_one_are_told_in_a_sentence(tmp_path):
    for text in ("not json", "[]", '{"cells": [1]}', '{"cells": [{"source": "x"}]}'):
        (tmp_path / "10_adamw.ipynb").write_text(text)
        with pytest.raises(UserError, match="10_adamw.ipynb (is not|holds).*reset 10_adamw keeps it aside"):
            read_notebook(tmp_path / "10_adamw.ipynb")
    with pytest.raises(UserError, match="begin with python -m tinygpt.learn start 11_schedule"):
        read_notebook(tmp_path / "11_schedule.ipynb")


def test_without_a_checkout_the_reason_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(book.tinygpt, "__file__", str(tmp_path / "site-packages/tinygpt/__init__.py"))
    with pytest.raises(UserError, match="learn mode needs the chapters and the tests.*clone the project"):
        find_project()
    assert Path(book.tinygpt.__file__).name == "__init__.py"
