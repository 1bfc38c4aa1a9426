"""The house itself: the ladder of imports, the sync check, the pages that belong together."""

import ast
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
CHAPTERS = sorted((ROOT / "nbs").glob("[0-9]*.ipynb"))


def exports_of(path):
    "The module that a notebook exports, or None."
    for cell in nbformat.read(path, as_version=4).cells:
        if m := re.search(r"^#\| *default_exp +(\w+)", cell.source, re.M):
            return m[1]


def imports_in(source):
    "Modules of the package that a piece of Python imports."
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").split(".")[0] == "tinygpt"
        ):
            module = (node.module or "").removeprefix("tinygpt").strip(".")
            found |= {module} if module else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tinygpt.")}
    return found


NUMBER = {exports_of(p): int(p.name[:2]) for p in CHAPTERS}


def test_every_chapter_exports_a_module_named_after_it():
    for path in CHAPTERS:
        assert exports_of(path) == path.stem[3:], path.name
        assert (ROOT / f"tinygpt/{path.stem[3:]}.py").exists()


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_imports_only_from_chapters_with_a_lower_number(path):
    own, number = exports_of(path), int(path.name[:2])
    code = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    for module in imports_in(code) - {own}:
        assert module in NUMBER, f"{path.name} imports tinygpt.{module}, which no chapter exports"
        # a chapter may have a helper module of the same number, as 06_model_hf is to 06_model
        assert NUMBER[module] <= number, f"{path.name} imports from chapter {NUMBER[module]:02d} ({module})"


@pytest.mark.parametrize("module", sorted(NUMBER))
def test_an_exported_module_imports_only_from_lower_ones(module):
    source = (ROOT / f"tinygpt/{module}.py").read_text(encoding="utf-8")
    for other in imports_in(source) - {module}:
        assert NUMBER[other] <= NUMBER[module], (
            f"tinygpt.{module} (chapter {NUMBER[module]:02d}) imports {other} (chapter {NUMBER[other]:02d})"
        )


@pytest.mark.parametrize("module", sorted(NUMBER))
def test_a_module_holds_one_idea_that_fits_in_about_300_lines(module):
    assert len((ROOT / f"tinygpt/{module}.py").read_text(encoding="utf-8").splitlines()) <= 320


def test_every_module_is_tested():
    tests = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").glob("test_*.py"))
    for module in NUMBER:
        assert re.search(rf"tinygpt(\.| import ){module}\b", tests), f"no test imports tinygpt.{module}"


def test_importing_the_trainer_loads_nothing_heavy_besides_torch():
    heavy = "matplotlib pandas transformers tyro IPython sklearn datasets"
    code = f"import sys, tinygpt.train; print([m for m in '{heavy}'.split() if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


@pytest.fixture
def copy(tmp_path):
    "A copy of what the sync check looks at; the tool in it checks the copy."
    for name in ("nbs", "tinygpt", "tools"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name in ("settings.ini", "pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for path in (tmp_path / "nbs").glob("[0-9]*.ipynb"):  # two chapters are enough, and quick
        if path.name not in ("00_support.ipynb", "11_schedule.ipynb"):
            path.unlink()
            (tmp_path / f"tinygpt/{path.stem[3:]}.py").unlink()
    sync(tmp_path, "nbdev_export")
    sync(tmp_path, "python", "tools/book.py", "readme")
    assert check(tmp_path) == (0, "package and notebooks: in sync and clean\n")
    return tmp_path


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


def test_the_sync_check_sees_what_is_out_of_step(copy):
    nb, module = copy / "nbs/11_schedule.ipynb", copy / "tinygpt/schedule.py"
    good_nb, good_module = nb.read_bytes(), module.read_bytes()

    module.write_text(module.read_text() + "\n# edited by hand\n")
    status, out = check(copy)
    assert status == 1 and "tinygpt/schedule.py" in out
    module.write_bytes(good_module)

    (copy / "tinygpt/orphan.py").write_text("# AUTOGENERATED! its notebook was deleted\n")
    status, out = check(copy)
    assert status == 1 and "tinygpt/orphan.py" in out
    (copy / "tinygpt/orphan.py").unlink()

    module.unlink()  # a new chapter that was not exported
    status, out = check(copy)
    assert status == 1 and "tinygpt/schedule.py" in out
    module.write_bytes(good_module)

    edit(nb, lambda n: next(c for c in n["cells"] if c["cell_type"] == "code").update(execution_count=7))
    status, out = check(copy)
    assert status == 1 and "nbs/11_schedule.ipynb: not clean" in out
    nb.write_bytes(good_nb)

    edit(nb, lambda n: [c.update(outputs=[]) for c in n["cells"] if c["cell_type"] == "code"])
    status, out = check(copy)
    assert status == 1 and "no stored picture" in out
    nb.write_bytes(good_nb)

    (copy / "README.md").write_text("something else\n")
    status, out = check(copy)
    assert status == 1 and "README.md" in out


def test_constraints_pin_what_settings_ask_for():
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini")
    wanted = {
        re.split(r"[<>=]", r)[0]
        for key in ("requirements", "dev_requirements")
        for r in parser["DEFAULT"][key].split()
    }
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert wanted <= pinned, wanted - pinned


def test_links_between_pages_lead_somewhere():
    pages = {
        p: "\n".join(c.source for c in nbformat.read(p, as_version=4).cells if c.cell_type == "markdown")
        for p in (ROOT / "nbs").glob("*.ipynb")
    }
    if (ROOT / "README.md").exists():
        pages[ROOT / "README.md"] = (ROOT / "README.md").read_text(encoding="utf-8")
    for page, text in pages.items():
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if not link.startswith(("http", "attachment:", "data:")):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
