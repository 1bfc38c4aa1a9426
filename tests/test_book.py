"""The house itself: the reading order, the laws of style, the sync check, the pages that belong together."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import nbformat
import pytest
import torch

from tinygpt.support import check_exercise

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import book  # noqa: E402
import pages  # noqa: E402
import picture  # noqa: E402
import ran  # noqa: E402

ORDER = pages.reading_order()
PLACE = {path: place for place, path in enumerate(ORDER)}
HOME = {module: path for path in ORDER if (module := pages.module_of(path))}  # module -> its page
SPINE = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))


def source_file(module: str) -> Path:
    return ROOT / f"tinygpt/{module.replace('.', '/')}.py"


@cache
def imports_of(module: str) -> set[str]:
    "What an exported module imports, in dotted form."
    return pages.imports_in(source_file(module).read_text(encoding="utf-8"), module)


def is_later(module: str, page: Path) -> bool:
    return module in HOME and PLACE[HOME[module]] > PLACE[page]


def test_the_index_lists_every_page_once_with_a_label():
    assert list(pages.index_problems()) == []
    assert len(ORDER) == len(set(ORDER))


def test_the_spine_holds_the_index_and_the_chapters_in_order_and_nothing_else():
    assert [int(path.name[:2]) for path in SPINE] == list(range(1, len(SPINE) + 1))
    assert {p.name for p in (ROOT / "nbs").glob("*.ipynb")} == {p.name for p in SPINE} | {"index.ipynb"}
    assert [path for path in ORDER if path.parent.name == "nbs"] == SPINE
    labels = pages.labels()
    assert {path.stem for path in ORDER if labels[path.stem] == "core"} == {path.stem for path in SPINE}


def test_the_short_table_of_the_index_has_the_chapters_with_their_questions():
    table = pages.chapters_table()
    assert len(ORDER) == len(set(ORDER))  # its rows are not those of the list of all pages
    assert table.count("](") == len(SPINE) and "(10_adamw.ipynb) | What is in an AdamW step" in table
    index = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in index.cells if cell.cell_type == "markdown")
    assert table in text and pages.citation() in text


def test_the_way_of_a_training_step_names_what_is_there_and_each_module_is_imported_by_one_above_it():
    index = nbformat.read(ROOT / "nbs/index.ipynb", as_version=4)
    assert any(pages.step_table() in cell.source for cell in index.cells)
    known = {"train"}
    for module, look_for in pages.STEP_PATH.items():
        assert module in known, f"nothing above imports {module}"
        source = pages.module_file(module).read_text(encoding="utf-8")
        known |= pages.imports_in(source, module)
        for name in re.findall(r"`(\w+)`", look_for):
            assert re.search(rf"\b(?:def|class) {name}\b", source), f"{module} has no {name}"


def test_the_picture_at_the_top_shows_the_record_and_its_words_say_it():
    rows = picture.shown_rungs()
    assert rows[0]["name"] == "nanoGPT's settings" and len(rows) > 2
    assert all(row["kept"] for row in rows) and any(row["noise"] for row in rows)
    told = picture.words(rows)
    assert picture.drawn_words() == told, "run `make export`"
    title = pages.read(ROOT / "nbs/index.ipynb").cells[0].source
    assert picture.LINE.search(title)[0] == f"![{told}](images/ladder.png)", "run `make export`"


def test_the_map_names_each_chapter_once_and_its_words_say_it():
    named = re.findall(r"\d\d \w+", picture.overview.words())
    assert sorted(named) == [path.stem.replace("_", " ") for path in SPINE]
    told = picture.overview.words()
    assert picture.drawn_words(picture.MAP) == told, "run `make export`"
    cells = pages.read(ROOT / "nbs/index.ipynb").cells
    assert any(f"![{told}](images/map.png)" in cell.source for cell in cells), "run `make export`"


def test_the_map_colors_the_first_path_of_the_index():
    index = "\n".join(c.source for c in pages.read(ROOT / "nbs/index.ipynb").cells)
    table = index.partition("\n| read | then your GPT |\n")[2].partition("\n\n")[0]
    path = re.findall(r"\]\((\d\d)_\w+\.ipynb\)", table)
    assert path and tuple(path) == picture.overview.PATH
    for *_, chapters, color in picture.overview.BOXES.values():
        on_path = [set(re.findall(r"\d\d", line)) <= set(path) for line in chapters.split("\n")]
        assert any(on_path) == (color != picture.overview.OFF), chapters
        for line, on in zip(chapters.split("\n"), on_path):  # a line has one ink
            assert on or not set(re.findall(r"\d\d", line)) & set(path), line


def test_the_index_counts_the_refuted_claims_as_the_log_does():
    log = (ROOT / "EXPERIMENTS.md").read_text(encoding="utf-8")
    together = re.search(r"^Together: .*", log, re.M)[0]
    entries, claims, *verdicts = map(int, re.findall(r"\d+", together))
    assert sum(verdicts) == claims and log.count("\n### ") == entries
    rows = re.findall(r"^\| \[.*\]\(#.*?\) \| (\d+) \| (.*?) \|", log, re.M)
    counted = [[int(n) for n in re.findall(r"\d+", numbers)] for _, numbers in rows if numbers != "none"]
    assert sum(int(n) for n, _ in rows) == entries and [sum(column) for column in zip(*counted)] == verdicts
    index = pages.read(ROOT / "nbs/index.ipynb").cells[0].source
    assert f"So far {verdicts[1]} of {claims} were refuted" in index


def test_the_readme_leaves_out_what_only_the_index_has_and_links_to_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = {cell.id: cell.source for cell in pages.read(ROOT / "nbs/index.ipynb").cells}
    for name in book.INDEX_ONLY:
        heading = index[name].splitlines()[0].removeprefix("## ")
        assert f"\n## {heading}\n" not in readme
        assert f"](nbs/index.ipynb#{heading.replace(' ', '-')})" in readme, f"no link to {heading}"


def test_a_badge_is_that_of_a_workflow():
    names = re.findall(r"workflows/(\w+\.yml)/badge\.svg", (ROOT / "README.md").read_text(encoding="utf-8"))
    folder = ROOT / ".github/workflows"
    if not folder.exists():
        pytest.skip("the source archive has no workflows")
    assert names and all((folder / name).exists() for name in names)


@pytest.mark.parametrize("path", ORDER, ids=lambda p: p.stem)
def test_a_page_imports_only_from_pages_before_it(path):
    own = pages.module_of(path)
    imported = pages.imports_in(pages.code_of(path)) - {own}
    unknown = {m for m in imported if m not in HOME and not m.startswith("__")}
    assert not unknown, f"{path.name} imports {unknown}, which no page exports"
    later = {m for m in imported if is_later(m, path)}
    assert not later, f"{path.name} imports from later pages: {', '.join(sorted(later))}"


@pytest.mark.parametrize("module", sorted(HOME))
def test_an_exported_module_imports_only_from_modules_of_earlier_pages(module):
    later = {m for m in imports_of(module) - {module} if is_later(m, HOME[module])}
    assert not later, f"tinygpt.{module} imports from later pages: {', '.join(sorted(later))}"


def test_the_rule_sees_a_lazy_import_from_a_later_page():
    "Inside a function, in a notebook and in a module."
    lazy = "def f():\n    from tinygpt.train import train\n\n    return train"
    assert pages.imports_in(lazy) == {"train"}
    assert is_later("train", HOME["schedule"]) and not is_later("schedule", HOME["train"])
    near = "def f():\n    from ..train import train\n    from . import tokens\n    from .pack import Lane\n"
    assert pages.imports_in(near, "data.x") == {"train", "data.tokens", "data.pack"}


@pytest.mark.parametrize("path", ORDER, ids=lambda p: p.stem)
def test_notebook_module_and_tests_have_one_name(path):
    module = pages.module_of(path)
    if module is None:  # a page of experiments
        return
    stem = re.sub(r"^\d\d_", "", path.stem)
    dotted = stem.replace("_", ".")
    same = module.replace("_", ".") == dotted
    core_of_folder = module.startswith(f"{stem}.") and not module.endswith("__main__")
    a_command = stem.endswith("_command") and module == f"{stem.removesuffix('_command')}.__main__"
    assert same or core_of_folder or a_command, f"{path.name} exports {module}"
    assert source_file(module).exists()


def test_every_module_is_tested():
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    for module in HOME:
        head, _, tail = f"tinygpt.{module}".rpartition(".")
        named = rf"{re.escape(f'tinygpt.{module}')}\b|from {re.escape(head)} import .*\b{tail}\b"
        assert re.search(named, tests), f"no test imports tinygpt.{module}"


def test_no_module_that_teaches_holds_a_command():
    for module in HOME:
        source = source_file(module).read_text(encoding="utf-8")
        if module != "train" and not module.endswith("__main__"):
            assert "def main(" not in source and "argparse" not in source, module


def test_code_keeps_the_laws_of_style():
    assert book.style_problems() == []


def test_the_laws_of_style_bite():
    long = "def f():\n" + "    x = 1\n" * 60
    assert book.long_functions(long) == ["f has 61 lines: split it"]
    assert book.long_functions(long.replace("    x = 1\n", "", 1)) == []


def test_the_line_under_each_title_is_up_to_date():
    facts = pages.page_facts()
    assert [problem for path in facts for problem in pages.header_problems(path, facts)] == []


def test_a_side_page_that_follows_its_chapter_asks_for_it_and_one_that_comes_before_does_not():
    facts = pages.page_facts()
    lines = {path.stem: pages.header_line(path, fact, 5) for path, fact in facts.items()}
    before = {page: re.search("read before: (.+?) ·", line)[1] for page, line in lines.items()}
    assert before["24_reinforce_kl"] == "[24](../24_reinforce.ipynb)"  # it imports no chapter
    assert before["20_speedrun_long"] == "[20](../20_speedrun.ipynb)"
    assert before["04_dropout"] == before["14_muon_polar"] == before["01_floats"] == "no chapter"


def test_a_header_is_written_once_and_keeps_its_seconds():
    line = "*Core · 5 minutes to read, 0 seconds to run · needs nothing · needed by nothing*"
    title = pages.with_header("# Title\n\n> one line\n\nThe question.", line)
    assert title == f"# Title\n\n> one line\n\n{line}\n\nThe question."
    timed = pages.with_seconds(title, 31.0)
    assert "30 seconds to run" in timed and pages.seconds_in(timed) == 30
    assert pages.with_seconds(timed, 40.0) == timed  # about right: machines differ
    assert "60 seconds" in pages.with_seconds(timed, 61.0)
    assert pages.with_header(timed, line).count("minutes to read") == 1


def test_the_outputs_that_answer_a_question_are_hidden_and_no_others():
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    out = [nbformat.v4.new_output("stream", text="7\n")]
    cells = [
        code("seen", outputs=out, metadata={"jupyter": {"outputs_hidden": True}}),
        text("**Before you run it:** how many?"),
        code("prepares"),
        text("More words."),
        code("answers", outputs=out),
        code("draws", outputs=out),
        text("Seven."),
        code("later", outputs=out),
        text("**Before you look:** and now?"),
        code("answers", outputs=out, metadata={"jupyter": {}}),
    ]
    nb = pages.with_answers_hidden(nbformat.v4.new_notebook(cells=cells))
    hidden = [cell.metadata == {"jupyter": {"outputs_hidden": True}} for cell in nb.cells]
    assert hidden == [place in (4, 5, 9) for place in range(10)]
    assert all(hide or cell.metadata == {} for hide, cell in zip(hidden, nb.cells))
    chapters_that_ask = [path for path in SPINE if pages.answers(pages.read(path))]
    assert len(chapters_that_ask) > 15
    assert [problem for path in ORDER for problem in pages.answer_problems(path)] == []


@pytest.mark.parametrize(
    "path, after", list(zip(SPINE, [*SPINE[1:], ROOT / "nbs/index.ipynb"])), ids=lambda p: p.stem
)
def test_go_on_leads_along_the_spine(path, after):
    text = "\n".join(c.source for c in pages.read(path).cells if c.cell_type == "markdown")
    end = text[text.rindex("**Next") :]
    assert f"]({after.name})" in end, f"{path.name} does not lead to {after.name}"


def test_importing_the_trainer_loads_nothing_heavy_besides_torch():
    heavy = "matplotlib pandas transformers tyro IPython sklearn datasets"
    code = f"import sys, tinygpt.train; print([m for m in '{heavy}'.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.mark.parametrize("module", sorted(m for m in HOME if not m.endswith("__main__")))
def test_each_module_can_be_imported_alone_without_a_circle(module):
    "The order of imports is the reading order: a module's imports never lead back to it."
    seen, todo = set(), [module]
    while todo:
        for other in imports_of(todo.pop()) & set(HOME):
            assert other != module, f"tinygpt.{module} is part of a circle"
            if other not in seen:
                seen.add(other)
                todo.append(other)


# in one process: each imports for longer than it works
SYNC = """
import sys
sys.path.insert(0, "tools")
import book
book.write_headers()
book.write_readme(book.ROOT)
sys.exit(book.check())
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    "A folder with what the sync check looks at; the tool in it checks this folder."
    folder = tmp_path_factory.mktemp("book")
    for name in ("nbs", "tinygpt", "tools"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name in ("settings.ini", "pyproject.toml", "setup.py", "README.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    shutil.rmtree(folder / "tinygpt")  # two pages are enough, and quick
    (folder / "tinygpt").mkdir()
    shutil.copy(ROOT / "tinygpt/__init__.py", folder / "tinygpt")
    kept = ("00_support.ipynb", "11_schedule.ipynb", "index.ipynb")
    for path in (folder / "nbs").rglob("*.ipynb"):
        if path.name not in kept:
            path.unlink()

    def shorten(nb):
        text = "".join(nb["cells"][-1]["source"]).splitlines()
        rows = [line for line in text if "](" not in line or any(name in line for name in kept)]
        nb["cells"][-1]["source"] = "\n".join(rows)

    edit(folder / "nbs/index.ipynb", shorten)
    sync(folder, "nbdev_export")
    sync(folder, "python", "-c", SYNC)
    return folder


@pytest.fixture
def copy(original, tmp_path):
    "A copy of it."
    return shutil.copytree(original, tmp_path / "copy")


def sync(folder, *command):
    subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def check(folder):
    done = subprocess.run(
        [sys.executable, "tools/book.py", "check"], cwd=folder, capture_output=True, text=True
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode > 1 else "")


def edit(path, change):
    nb = json.loads(path.read_text(encoding="utf-8"))
    change(nb)
    path.write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_export_brings_package_headers_and_readme_back_in_step(copy):
    (copy / "tools/picture.py").write_text("")  # its record is not in the copy
    page = copy / "nbs/11_schedule.ipynb"
    nb = nbformat.read(page, as_version=4)
    exported = [cell for cell in nb.cells if cell.source.startswith("#| export")]
    exported[-1].source += "\n# one line more" * 30
    nbformat.write(nb, page)
    (copy / "README.md").write_text("old")
    sync(copy, "python", "tools/book.py", "export")
    assert check(copy) == (0, "package and notebooks: in sync and clean\n")
    assert (copy / "tinygpt/schedule.py").read_text().count("# one line more") == 30


def test_the_sync_check_sees_what_is_out_of_step(copy):
    # all mistakes at once, because a check takes seconds
    edited, deleted = copy / "tinygpt/schedule.py", copy / "tinygpt/support.py"
    first, second = copy / "nbs/more/00_support.ipynb", copy / "nbs/11_schedule.ipynb"

    edited.write_text(edited.read_text() + "\n# edited by hand\n")
    deleted.unlink()  # as that of a new chapter that was not exported
    (copy / "tinygpt/orphan.py").write_text("# AUTOGENERATED! its notebook was deleted\n")
    (copy / "README.md").write_text("something else\n")
    unlisted = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# A page that nobody reads")])
    nbformat.write(unlisted, copy / "nbs/more/99_new.ipynb")

    def run_and_moved(nb):
        next(c for c in nb["cells"] if c["cell_type"] == "code")["execution_count"] = 7
        header = nb["cells"][0]["source"]
        nb["cells"][0]["source"] = [line.replace("*Reference", "*Deeper") for line in header]

    edit(first, run_and_moved)

    def another_version(nb):
        (cell,) = [cell for cell in nb["cells"] if cell["id"] == "cite-md"]
        cell["source"] = "".join(cell["source"]).replace("version = {", "version = {9.")

    edit(copy / "nbs/index.ipynb", another_version)

    def without_pictures_and_lines(nb):
        for cell in nb["cells"]:
            cell["source"] = "".join(cell["source"])
            if cell["cell_type"] == "code":
                cell["outputs"] = []

    edit(second, without_pictures_and_lines)

    status, out = check(copy)
    assert status == 1
    for problem in (
        "tinygpt/schedule.py",
        "tinygpt/support.py",
        "tinygpt/orphan.py",
        "README.md",
        "99_new.ipynb: the index does not list it",
        "nbs/more/00_support.ipynb: not clean",
        "cite-md: chapters or citation are not up to date",
        "00_support.ipynb: the line under its title is not up to date",
        "11_schedule.ipynb: not in the form that Jupyter writes",
        "no stored picture",
        "11_schedule.ipynb: hides other outputs than the answers to its questions",
    ):
        assert problem in out, out


@pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")
def test_forked_kernels_share_nothing_but_what_was_imported(tmp_path, capfd):
    cells = [
        "import os, signal, subprocess, sys\nassert 'torch' in sys.modules and not hasattr(sys, 'left')",
        "import importlib.util as u\nassert ('torch._dynamo' in sys.modules) != bool(u.find_spec('triton'))",
        "sys.left = 1  # the next kernel must not see it",
        "assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL",
        "assert subprocess.run([sys.executable, '-c', 'exit(3)']).returncode == 3",
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()",
        f"open('pids', 'a').write(f'{{os.getpid()}} ')\nassert os.getcwd() == {str(tmp_path)!r}",
    ]
    page, dies = tmp_path / "page.ipynb", tmp_path / "dies.ipynb"
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(nb, page)
    nb.cells[-1].source = "os._exit(1)"
    nbformat.write(nb, dies)
    assert book.run([page, page, dies], write=False, jobs=2)
    said = capfd.readouterr()
    assert said.out.endswith("; failed: dies.ipynb\n")  # a kernel that dies is one that fails
    pids = (tmp_path / "pids").read_text().split()
    assert len(set(pids)) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # they end with their pages
    assert said.err == ""


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_pages_leave_in_the_temporary_folder_goes_with_them(tmp_path, jobs):
    code = "import os, tempfile; open('left', 'a').write(f'{tempfile.mkdtemp()}\\n')"
    cells = [
        code,
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code + '; os._exit(1)'!r}])",
    ]
    page = tmp_path / "page.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells))), page)
    assert book.run([page], write=False, jobs=jobs) == 0
    left = (tmp_path / "left").read_text().split()
    assert len(left) == 2 and not any(map(os.path.exists, left))


def test_constraints_pin_what_settings_ask_for():
    settings = pages.settings()
    wanted = {
        re.split(r"[<>=]", r)[0]
        for key in ("requirements", "dev_requirements", "docs_requirements")
        for r in settings[key].split()
    }
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert wanted <= pinned, wanted - pinned


def test_links_between_pages_lead_somewhere():
    texts = {
        ROOT / name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
    }
    for page in [ROOT / "nbs/index.ipynb", *ORDER]:
        cells = pages.read(page).cells
        texts[page] = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    for page, text in texts.items():
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if not link.startswith(("http", "attachment:", "data:")):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_behind_a_module_is_all_that_python_imports_for_it():
    program = "import sys, tinygpt.train; print(*(m for m in sys.modules if m.startswith('tinygpt.')))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = {module.removeprefix("tinygpt.") for module in said.split()}
    loaded = {module for module in loaded if source_file(module).exists()}  # the others are folders
    assert len(loaded) > 20 and loaded <= ran.modules_behind({"train"})
    assert ran.modules_behind({"floats"}) < {"floats", "support", "__init__"}
    assert "muon" in ran.modules_behind(ran.named_in("python -m tinygpt.train --optimizer muon"))
    assert ran.modules_behind(ran.named_in("import tinygpt.floats.rounded")) == ran.modules_behind({"floats"})


def test_a_page_has_changed_when_what_it_runs_has_and_not_for_a_comment(monkeypatch, tmp_path):
    page, before = ROOT / "nbs/10_adamw.ipynb", dict(ran.package())
    state = ran.state_of(page)

    def with_code(module, code):
        monkeypatch.setattr(ran, "package", lambda: before | {module: (code, before[module][1])})
        return ran.state_of(page)

    assert with_code("support", b"other") != state and with_code("model", b"other") != state
    assert with_code("chat.serve", b"other") == state  # nothing that this page leads to
    assert ran.bare_code('def f():\n    "Doc."\n    return 1  # why') == ran.bare_code("def f(): return 1")
    assert ran.bare_code("def f(): return 1") != ran.bare_code("def f(): return 2")
    monkeypatch.undo()

    monkeypatch.setattr(ran, "RECORD", tmp_path / "ran.json")
    assert ran.has_changed(page)
    learn = ROOT / "nbs/more/learn_book.ipynb"
    ran.remember({page: state, learn: ran.state_of(learn), tmp_path / "elsewhere.ipynb": "not of the book"})
    ran.remember({ROOT / "nbs/11_schedule.ipynb": "another"})
    assert list(ran.recorded()) == ["10_adamw", "11_schedule", "learn_book"]
    assert not ran.has_changed(page) and ran.has_changed(ROOT / "nbs/11_schedule.ipynb")
    assert ran.has_changed(learn)  # it reads the whole book


def test_the_tour_of_learn_mode_has_changed_when_the_page_or_the_tests_that_it_runs_have(monkeypatch):
    tour, page, tests = (
        ROOT / "nbs/more/learn.ipynb",
        ROOT / "nbs/06_model.ipynb",
        ROOT / "tests/test_model.py",
    )
    state = ran.state_of(tour)
    assert {tests, tests.with_name("conftest.py")} <= set(ran.with_helpers(tests))
    assert tests.with_name("events.py") in ran.with_helpers(tests.with_name("test_run_command.py"))
    for changed, other in ((page, ROOT / "nbs/10_adamw.ipynb"), (tests, ROOT / "tests/test_adamw.py")):
        for path, same in ((changed, False), (other, True)):
            with monkeypatch.context() as patch:
                code, bare = ran.code_of, ran.with_helpers
                if path.suffix == ".ipynb":
                    patch.setattr(ran, "code_of", lambda p: code(p) + ("\npass" if p == path else ""))
                else:
                    patch.setattr(ran, "with_helpers", lambda p: bare(p) + [path] * (p == path))
                assert (ran.state_of(tour) == state) == same, path


def test_the_records_that_a_page_shows_are_among_those_that_change_it():
    for page in ORDER:
        text = pages.code_of(page)
        shown = {f"{name}.json" for name in re.findall(r"benchmarks/results/(\w+)\.json", text)}
        assert {name for name in shown if (ROOT / "benchmarks/results" / name).exists()} <= {
            p.name for p in ran.records_in(text)
        }


def test_a_run_remembers_the_pages_that_ran_well(monkeypatch, tmp_path):
    good, bad = ROOT / "nbs/10_adamw.ipynb", ROOT / "nbs/11_schedule.ipynb"
    monkeypatch.setattr(ran, "RECORD", tmp_path / "ran.json")
    monkeypatch.setattr(book, "execute", lambda path, *_: (["broken"] if path == bad else [], path.name))
    assert book.run([good, bad], write=False, jobs=1)
    assert ran.recorded() == {"10_adamw": ran.state_of(good)}

    asked = []
    monkeypatch.setattr(book, "run", lambda paths, *_: asked.extend(paths))
    monkeypatch.setattr(sys, "argv", ["book.py", "run", "--changed", good.name, bad.name])
    book.main()
    assert asked == [bad]


@pytest.mark.parametrize(
    "cell",
    ["import time; time.sleep(60)", "import os; os._exit(1)", "1 / 0"],
    ids=["endless", "dead", "wrong"],
)
def test_a_page_that_fails_in_any_way_is_named_and_ends_no_other(monkeypatch, tmp_path, cell):
    page = tmp_path / "page.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), page)
    monkeypatch.setattr(book, "LONGEST_CELL", 3)
    problems, line = book.execute(page, write=False)
    assert problems and "page.ipynb" in line and "FAILED" in line


# in the solution of chapter 19's first exercise: a piece, what a learner may write, a word of what is said
LOOPS = [
    ("opt.zero_grad()", "pass", "zero_grad is missing"),
    ("loss = model(x_part", "opt.zero_grad(); loss = model(x_part", "only the last part counts"),
    ("[1] / parts", "[1]", "divide each part's loss"),
    ("x.chunk(parts), y.chunk(parts)", "x.split(parts), y.split(parts)", "10 forwards of one row"),
    ("total = total + loss.detach()", "total = loss.detach() * parts", "the last part's alone"),
    ("total = total + loss.detach()", "total = total + loss.detach() * parts", "the parts' sum"),
    ("loss.backward()", "loss.backward(); CLIP", "when all parts are added up"),
    ("if CLIP.isfinite():", "if CLIP > 0:", "step 4's norm is infinite"),
    ("if CLIP.isfinite():", "if torch.isfinite(loss):", "clip before opt.step"),
    ("CLIP.isfinite()", "all(EACH)", "by one norm"),
    ("opt.step()", "(opt.step(), opt.zero_grad())", "has step 5 a gradient of its own"),
    ("rate(step)", "rate(step + 1)", "one step ahead"),
    ("for group in opt.param_groups:", "for group in opt.param_groups[:1]:", "every group"),
    ("model.eval()", "pass", "in training mode"),
    ("model.train()", "pass", "in eval mode"),
    ("with torch.no_grad():", "if True:", "with gradients"),
    ("(step + 1) % every", "step % every", "after step 2"),
    ("torch.stack(losses).tolist()", "losses", "return floats"),
    (", scores  # read", "  # read", "two lists"),
]


@pytest.mark.parametrize("piece, instead, word", LOOPS)
def test_the_exercise_on_the_training_loop_names_what_is_wrong(piece, instead, word):
    page = ROOT / "nbs/19_train.ipynb"
    cells = {cell.id: cell.source for cell in nbformat.read(page, as_version=4).cells}
    loop = re.search(r"```python\n(.*?)```", cells["ex1-solution"], re.S)[1]
    clip = "torch.nn.utils.clip_grad_norm_({}, clip)"
    short = dict(CLIP=clip.format("model.parameters()"))
    short["EACH"] = f"{clip.format('p')}.isfinite() for p in model.parameters()"
    loop = loop.replace(short["CLIP"], "CLIP")
    assert loop.count(piece) == 1
    loop = loop.replace(piece, instead)
    if "opt.zero_grad())" in instead:
        loop = loop.replace("        opt.zero_grad()\n", "")
    for name, text in short.items():
        loop = loop.replace(name, text)
    names = dict(torch=torch, math=math, check_exercise=check_exercise)
    exec(loop, names)
    with pytest.raises(AssertionError, match=f"(?i){word}"):
        exec(cells["ex1-check"], names)
