"""The source archive and the wheel: do they install, and is everything in them?"""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_the_wheel_works_in_an_empty_folder(built, tmp_path):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    script = "import sys; sys.path.insert(0, sys.argv[1]); from tinygpt import train; print(train.__file__)"
    command = [sys.executable, "-c", script, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path / "empty", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")
    assert (tmp_path / "site/tinygpt/py.typed").exists()


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
    }
    assert "example" not in f"{facts['Author']} {facts['Author-email']}"
    links = re.findall(r"\]\(([^)]*)\)", facts.get_payload())
    assert len(links) > 50 and all(link.startswith(("https://", "#")) for link in links)
