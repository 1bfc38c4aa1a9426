"""The source archive and the wheel: is everything in them, and do both work away from the checkout?"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import pages  # noqa: E402
import release  # noqa: E402

import tinygpt  # noqa: E402

PARTS = ("tinygpt", "nbs", "tests", "tools", "site", "benchmarks")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    "(source archive, unpacked; wheel built from what it holds, not from this checkout)."
    folder = tmp_path_factory.mktemp("package")
    here, out = folder / "here", folder / "out"
    here.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, here)
    for part in PARTS:
        shutil.copytree(ROOT / part, here / part, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    build(here, "sdist", out)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    build(unpacked, "wheel", out)
    (wheel,) = out.glob("*.whl")
    return unpacked, wheel


def build(folder: Path, kind: str, out: Path):
    "What pip does with a package, without its download of setuptools."
    out.mkdir(exist_ok=True)
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_source_archive_holds_all_that_is_needed_to_test_and_export_again(built):
    unpacked, _ = built
    for part in PARTS:
        ours = (
            p.relative_to(ROOT) for p in (ROOT / part).rglob("*") if p.suffix in (".py", ".ipynb", ".json")
        )
        missing = [
            p for p in ours if not (unpacked / p).exists() and not {".ipynb_checkpoints"} & set(p.parts)
        ]
        assert not missing
    for name in ("settings.ini", "constraints.txt", "LICENSE", "Makefile", "pyproject.toml"):
        assert (unpacked / name).exists()


@pytest.fixture(scope="module")
def site(built, tmp_path_factory):
    "The wheel as pip lays it out."
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, folder: Path, *arguments: str) -> str:
    "What a Python prints that works in `folder` and finds the package in `site` only."
    command = [sys.executable, *arguments]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_works_in_an_empty_folder(site, tmp_path):
    where = run(site, tmp_path, "-c", "from tinygpt import train; print(train.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    assert (site / "tinygpt/py.typed").exists()


def test_learn_mode_of_the_wheel_works_in_an_empty_folder(site, tmp_path):
    run(site, tmp_path, "-m", "tinygpt.learn", "start", "03_data_pack", "--only", "Lane.wants")
    nb = json.loads((tmp_path / "learn/03_data_pack.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in nb["cells"]]
    assert sum("hole: Lane.wants" in source for source in sources) == 1
    text = "\n".join(sources)
    for record in re.findall(r'Path\(f?"([^"]*benchmarks/results)', text):
        assert Path(record).is_relative_to(site.resolve()) and Path(record).is_dir()
    assert not re.search(r"\]\((?!https?:|#|attachment:)[^)\s]+\.ipynb", text)
    # the copy in which the tests run: the package without the book inside it
    (tmp_path / "copy").mkdir()
    script = "import pathlib; from tinygpt.learn import book, judge; "
    script += "judge.copy_project(book.find_project(), pathlib.Path('copy'))"
    run(site, tmp_path, "-c", script)
    assert (tmp_path / "copy/tinygpt/data/pack.py").exists()
    assert (tmp_path / "copy/tests/test_data_pack.py").exists()
    assert not (tmp_path / "copy/tinygpt/_book").exists()


def test_the_wheel_carries_every_numbered_page_without_outputs(site):
    carried = {path.name: path for path in (site / "tinygpt/_book/nbs").rglob("*.ipynb")}
    assert set(carried) == {path.name for path in (ROOT / "nbs").rglob("[0-9]*.ipynb")}
    for path in carried.values():
        assert not any(cell.get("outputs") for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])


def test_twine_finds_nothing_wrong(built):
    unpacked, wheel = built
    archives = [str(wheel), f"{wheel.parent / unpacked.name}.tar.gz"]
    command = [sys.executable, "-m", "twine", "check", "--strict", *archives]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_facts_of_the_package_are_whole(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        facts = Parser().parsestr(archive.read(name).decode())
    assert facts["Name"] == "tinygpt" and facts["License-Expression"] == "Apache-2.0"
    assert {url.split(", ")[0] for url in facts.get_all("Project-URL")} == {
        "Source",
        "Book",
        "Changes",
        "Issues",
        "Discussions",
    }
    assert "example" not in f"{facts['Author']} {facts['Author-email']}"
    links = re.findall(r"\]\(([^)]*)\)", facts.get_payload())
    assert len(links) > 50 and all(link.startswith(("https://", "#")) for link in links)


def test_the_address_of_the_repository_is_written_down_in_settings_only():
    "Files that need it as text are written by `make export` and tools/release.py, and agree."
    url, ours = pages.settings()["git_url"], []
    for path in [
        *ROOT.glob("*.*"),
        *ROOT.glob(".*/**/*.*"),
        *ROOT.glob("t*/*.py"),
        *ROOT.glob("nbs/**/*.ipynb"),
    ]:
        if (
            path.suffix in (".md", ".py", ".ipynb", ".yml", ".json", ".cff", ".toml")
            and ".venv" not in path.parts
        ):
            text = path.read_text(encoding="utf-8")
            ours += [
                (path.name, found) for found in re.findall(r"https://github\.com/[\w-]+/tinygpt\b", text)
            ]
    assert {found for _, found in ours} == {url}
    assert {name for name, _ in ours if not name.endswith(".ipynb")} == {
        "CITATION.cff",
        "README.md",
        "_modidx.py",
    }


def test_the_citation_names_this_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    day = re.search(r"^date-released: (.*)$", text, re.M)[1]
    assert text == release.cited(text, pages.settings()["version"], day)
    assert "url: " in text


def test_a_release_takes_what_was_unreleased_and_its_notes_say_it():
    before = "# Changes\n\n## Unreleased\n\nNew.\n\n## 0.1.0, 2026-01-02\n\nOld.\n"
    after = release.released(before, "0.1.1", "2026-03-04")
    assert release.notes(after, "0.1.1") == "New." and release.notes(after, "0.1.0") == "Old."
    assert release.notes(after, "0.1") == "" == release.notes(before, "0.1.1")
    assert release.notes(after, "Unreleased") == ""


def test_an_extra_that_an_error_message_tells_to_install_is_one():
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    extras = set(re.findall(r"^(\w+)_requirements", settings, re.M))
    for path in (ROOT / "tinygpt").rglob("*.py"):
        asked = re.findall(r"tinygpt\[([\w,]+)\]", path.read_text(encoding="utf-8"))
        assert {name for names in asked for name in names.split(",")} <= extras, path


LAZY = """
import sys
import tinygpt
assert {"GPT", "GPTConfig", "load_model", "open_model", "preset", "__version__"} <= set(dir(tinygpt))
heavy = [name for name in ("torch", "numpy", "tinygpt.model") if name in sys.modules]
from tinygpt import GPT, GPTConfig, load_model, open_model, preset
import tinygpt.checkpoint, tinygpt.checkpoint_open, tinygpt.model, tinygpt.run.presets
assert GPT is tinygpt.model.GPT and GPTConfig is tinygpt.model.GPTConfig
assert load_model is tinygpt.checkpoint.load_model and open_model is tinygpt.checkpoint_open.open_model
assert preset is tinygpt.run.presets.preset
from tinygpt import train  # a module, as it always was
assert callable(train.train) and not hasattr(tinygpt, "gpt")
print(heavy)
"""


def test_the_package_offers_its_main_names_and_imports_torch_only_for_them():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


LEAVES = """
import subprocess, sys, tempfile
from tinygpt.ddp.world import check_world, run_processes

def test_that_leaves_something():
    tempfile.mkdtemp()
    run_processes(check_world, 1, 0.01)
    killed = "import os, tempfile; tempfile.mkdtemp(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed])
"""


def test_what_tests_leave_in_the_temporary_folder_goes_with_their_session(tmp_path):
    there = Path(tempfile.gettempdir())
    if len(str(there)) > 47:
        pytest.skip("the path of a socket in pytest's folder there would be too long")
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(LEAVES)
    before = set(there.iterdir())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    sessions = set(there.glob("pytest-of-*/pytest-*"))  # of other tests
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert {path.name[:10] for path in set(there.iterdir()) - before} <= {"pytest-of-"}
    [session] = {path.resolve() for path in set(there.glob("pytest-of-*/pytest-*")) - sessions}
    assert list(session.glob("cache*")) and not (session / "t").exists()


def test_a_type_checker_sees_the_same_names_as_python():
    tree = ast.parse((ROOT / "tinygpt/__init__.py").read_text())
    [checked] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.asname: line.module for line in checked.body for name in line.names}
    assert seen == tinygpt._MODULES
