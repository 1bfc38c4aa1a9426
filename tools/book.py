"""Look after the book: `check` that it agrees, `run` its pages, `export` them, write `headers` and `readme`.

python tools/book.py check                    package, notebooks, headers, README.md, style; changes nothing
python tools/book.py run [NAME ...]           execute copies of the pages (all, or those that start so)
python tools/book.py run --changed            those that would not run as they last ran well (tools/ran.json)
python tools/book.py run --write [NAME ...]   execute the pages themselves, store outputs, clean them
python tools/book.py export                   pages -> package, cleaned; headers, picture and README.md
python tools/book.py headers                  write the line under each title: label, minutes, needs
python tools/book.py readme                   write README.md from nbs/index.ipynb
"""

import argparse
import ast
import filecmp
import getpass
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import nbformat
from kernels import forked_kernels
from pages import (
    ROOT,
    answer_problems,
    header_problems,
    index_problems,
    notebook_text,
    page_facts,
    reading_order,
    seconds_in,
    settings,
    with_seconds,
    write_headers,
)
from ran import has_changed, remember, state_of

BIN = Path(sys.executable).parent
LONGEST_FUNCTION = 60
LONGEST_CELL = 600  # seconds, on a machine that may be busy
UNSAID = 60  # seconds of a page that does not say its own: the index
IMAGES = "nbs/images"  # where README.md finds its pictures
# cells of the index that README.md leaves out: a newcomer has two minutes, and can follow a link
INDEX_ONLY = {"more-commands-md", "trainer-md", "others-md", "cite-md", "pages-md"}


def command(name, *args, cwd):
    "Run one of nbdev's commands from the environment of this Python; stop with its output where it fails."
    exe = shutil.which(name, path=str(BIN))
    if exe is None:
        sys.exit(
            f'{name} is not installed beside {sys.executable}: pip install -c constraints.txt -e ".[dev]"'
        )
    done = subprocess.run([exe, *map(str, args)], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")


def differences(ours, fresh, patterns):
    "Names below `ours` and `fresh` that are missing on one side or differ."
    names = {
        p.relative_to(base).as_posix()
        for base in (ours, fresh)
        for pattern in patterns
        for p in base.glob(pattern)
    }
    for name in sorted(names):
        a, b = ours / name, fresh / name
        if not b.exists():
            yield f"{name}: no notebook exports it (delete it, or bring its notebook back)"
        elif not a.exists():
            yield f"{name}: missing, though a notebook exports it (run `python tools/book.py export`)"
        elif not filecmp.cmp(a, b, shallow=False):
            yield f"{name}: " + (
                "not clean (run `python tools/book.py export`)"
                if name.endswith(".ipynb")
                else "differs from its notebook (run `python tools/book.py export`)"
            )


def check() -> int:
    """Export and clean in a copy, and compare; look at style, headers and stored outputs.

    Catches changed, new and orphaned modules, notebooks that are not clean, pages the index lacks.
    """
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / ROOT.name
        fresh.mkdir()
        for name in ("settings.ini", "pyproject.toml", "setup.py", "README.md"):
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, fresh)
        shutil.copytree(ROOT / "nbs", fresh / "nbs", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        (fresh / "tinygpt").mkdir()
        shutil.copy(ROOT / "tinygpt/__init__.py", fresh / "tinygpt")
        command("nbdev_export", cwd=fresh)
        command("nbdev_clean", cwd=fresh)
        write_readme(fresh)
        patterns = ["tinygpt/**/*.py", "nbs/**/*.ipynb", "README.md", f"{IMAGES}/*"]
        problems = list(differences(ROOT, fresh, patterns))
    problems += [problem for path in chapters() for problem in output_problems(path)]
    problems += [problem for path in chapters() for problem in form_problems(path)]
    problems += list(index_problems())
    facts = page_facts()
    problems += [problem for path in facts for problem in header_problems(path, facts)]
    problems += [problem for path in facts for problem in answer_problems(path)]
    problems += style_problems()
    for problem in problems:
        print(problem)
    print(f"package and notebooks: {'in sync and clean' if not problems else f'{len(problems)} problems'}")
    return bool(problems)


def style_problems() -> list[str]:
    "What ruff finds in notebooks, tests, tools and benchmarks, and functions that do not fit on a screen."
    folders = [name for name in ("nbs", "tests", "tools", "site", "benchmarks") if (ROOT / name).exists()]
    ruff = [sys.executable, "-m", "ruff"]
    lint = subprocess.run(
        [*ruff, "check", "--output-format=concise", *folders], cwd=ROOT, capture_output=True, text=True
    )
    layout = subprocess.run([*ruff, "format", "--check", *folders], cwd=ROOT, capture_output=True, text=True)
    screen = [path for name in ("tinygpt", "tools", "site") for path in sorted((ROOT / name).rglob("*.py"))]
    problems = [line for line in lint.stdout.splitlines() if re.match(r"\S+:\d+", line)]
    problems += [
        f"{line} (run `make format`)" for line in layout.stdout.splitlines() if line.startswith("Would")
    ]
    for path in screen:
        found = long_functions(path.read_text(encoding="utf-8"))
        problems += [f"{path.relative_to(ROOT)}: {problem}" for problem in found]
    return problems


def long_functions(source: str) -> list[str]:
    "Functions of more than 60 lines."
    functions = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    sizes = {f.name: f.end_lineno - f.lineno + 1 for f in functions}
    return [f"{name} has {size} lines: split it" for name, size in sizes.items() if size > LONGEST_FUNCTION]


def chapters(names=()):
    """The index and the pages in reading order, or those that `names` name.

    A name is a page (`13_ddp`, or the path of its file), or the beginning of some (`13`).
    """
    files = [ROOT / "nbs/index.ipynb", *(path for path in reading_order() if path.exists())]
    chosen = []
    for name in names:
        stem = Path(name).stem if name.endswith(".ipynb") else name
        found = [p for p in files if p.stem == stem] or [p for p in files if p.stem.startswith(stem)]
        if not found:
            sys.exit(f"no page is called {name}; there are {', '.join(p.stem for p in files)}")
        chosen += found
    return [p for p in files if p in chosen] if names else files


def form_problems(path):
    "A notebook that a tool has written with all lines of a cell in one: no diff of it can be read."
    text = path.read_text(encoding="utf-8")
    if text != notebook_text(nbformat.reads(text, as_version=4)):
        yield f"{path.name}: not in the form that Jupyter writes (run `python tools/book.py export`)"


def output_problems(path):
    "Stored outputs that no reader should meet: a missing picture, errors, warnings, paths of a machine."
    private = [str(p) for p in (ROOT, Path.home(), Path(tempfile.gettempdir())) if len(str(p)) > 1]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "code":
            continue
        if cell.source.rstrip().endswith("plt.show()") and not any(
            "image/png" in o.get("data", {}) for o in cell.outputs
        ):
            yield f"{path.name}: cell {cell.id} has no stored picture (run `make notebooks`)"
        for output in cell.outputs:
            text = "".join(output.get("text", "")) + "".join(output.get("data", {}).get("text/plain", ""))
            if output.output_type == "error" or output.get("name") == "stderr":
                yield f"{path.name}: cell {cell.id} stores an error or a warning"
            if found := [p for p in private if p in text]:
                yield f"{path.name}: cell {cell.id} shows a path of this machine ({found[0]})"


def exercises(nb):
    "(its check, the code of its folded solution) of each exercise: the first solution after the check."
    check = None
    for cell in nb.cells:
        if cell.cell_type == "code" and "@check_exercise(" in cell.source:
            check = cell
        elif check and "<summary>Solution" in cell.source:
            yield check, re.search(r"```python\n(.*?)```", cell.source, re.S)[1]
            check = None


def with_solutions(nb):
    "A copy of the notebook with each exercise's folded solution, and its check again, as cells at the end."
    nb = nbformat.from_dict(nb)
    for check, solution in list(exercises(nb)):
        nb.cells.append(nbformat.v4.new_code_cell(solution, id=f"{check.id}-solved"))
        nb.cells.append(nbformat.v4.new_code_cell(check.source, id=f"{check.id}-solved-check"))
    return nb


def exercise_problems(nb):
    "Stubs that pass as solved, and solutions that do not."
    said = {c.id: "".join(o.get("text", "") for o in c.get("outputs", [])) for c in nb.cells}
    for name in [name for name in said if f"{name}-solved-check" in said]:
        if "not solved yet" not in said[name]:
            yield f"{name}: the untouched stub is not reported as unsolved"
        after = said[f"{name}-solved-check"]
        if "solved" not in after or "not solved" in after:
            yield f"{name}: the folded solution does not solve the exercise"


def execute(path, write: bool, kernel: str = "") -> tuple[list[str], str]:
    "Execute one chapter in a fresh kernel: (what is wrong with it, the line to print)."
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    nb, start = nbformat.read(path, as_version=4), time.time()
    if not write:
        nb = with_solutions(nb)
    try:
        # the kernel starts in nbs/, as it does in JupyterLab; the package is the installed one
        NotebookClient(
            nb,
            timeout=LONGEST_CELL,
            coalesce_streams=True,
            kernel_name=kernel,  # empty: the notebook's own
            extra_arguments=["--log-level=ERROR"],  # else each kernel warns of its own sockets
            resources={"metadata": {"path": str(path.parent)}},
        ).execute()
    except (CellControlSignal, DeadKernelError) as error:  # an error, a cell without end, a kernel that died
        return [str(error)], f"{path.name:28s} FAILED"
    seconds = time.time() - start
    line = f"{path.name:28s} {seconds:6.1f} s"
    if not write:
        return list(exercise_problems(nb)), line
    nb.cells[0].source = with_seconds(nb.cells[0].source, seconds)
    nbformat.write(nb, path)
    command("nbdev_clean", "--fname", path, cwd=ROOT)
    return [], line


def said_seconds(path) -> float:
    "How long a page takes, by what it says itself."
    return seconds_in(nbformat.read(path, as_version=4).cells[0].source) or UNSAID


@contextmanager
def own_temporary_folder():
    "What pages, and the processes that they start or kill, leave in the folder for temporary files goes too."
    with tempfile.TemporaryDirectory(prefix="pages-", ignore_cleanup_errors=True) as folder:
        # torch keeps there, too, what it has compiled: that stays where it is
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        with patch.dict(os.environ, TMPDIR=folder, TORCHINDUCTOR_CACHE_DIR=kept):
            yield


def run(paths, write: bool, jobs: int) -> int:
    """Execute the chapters in fresh kernels; `write` stores the outputs.

    Without `write` it is copies that run, and at the end of each the folded solutions of its exercises.
    """
    if jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each kernel
    failed, start = [], time.time()
    states, well = {path: state_of(path) for path in paths}, {}
    forks = jobs > 1 and not write and sys.platform == "linux"
    with (
        own_temporary_folder(),
        forked_kernels() if forks else nullcontext("") as kernel,
        ThreadPoolExecutor(1 if write else jobs) as pool,
    ):
        outcomes = pool.map(lambda path: execute(path, write, kernel), paths)
        for path, (problems, line) in zip(paths, outcomes):
            print(line, *problems, sep="\n    ", flush=True)
            failed += [path.name] if problems else []
            well |= {} if problems else {path: states[path]}
    remember(well)
    end = f"; failed: {', '.join(failed)}" if failed else ", all well"
    print(f"{len(paths)} pages in {time.time() - start:.0f} s{end}")
    return bool(failed)


def badges() -> str:
    "What GitHub knows about the last run of two workflows, and where they lead."
    url = settings()
    runs = f"{url['git_url']}/actions/workflows"
    book = f"{url['doc_host']}{url['doc_baseurl']}"
    return (
        f"[![tests]({runs}/test.yml/badge.svg)]({runs}/test.yml) "
        f"[![the book on the web]({runs}/site.yml/badge.svg)]({book})"
    )


def write_readme(root: Path):
    "README.md and its pictures from nbs/index.ipynb, without the cells that only the index has."
    from nbconvert import MarkdownExporter
    from traitlets.config import Config

    index = root / "nbs/index.ipynb"
    if not index.exists():
        return
    nb = nbformat.read(index, as_version=4)
    nb.cells = [cell for cell in nb.cells if cell.id not in INDEX_ONLY]
    nb.metadata["language_info"] = {"name": "python"}  # nbdev_clean takes it out; the code fences need it
    config = Config(
        {
            "TagRemovePreprocessor": {"enabled": True},
            "ExtractOutputPreprocessor": {
                "output_filename_template": "{unique_key}_{cell_index}_{index}{extension}"
            },
        }
    )
    body, resources = MarkdownExporter(config=config).from_notebook_node(
        nb, resources={"unique_key": "index", "output_files_dir": IMAGES}
    )
    body = re.sub(r"^#\| .*\n", "", body, flags=re.M)  # nbdev's directives mean nothing to a reader
    # links between chapters start in nbs/, those of the README at the root
    body = re.sub(
        r"\]\((?!https?:|#|nbs/|/)([^)]+)\)",
        lambda m: f"]({os.path.normpath('nbs/' + m[1]).replace(os.sep, '/')})",
        body,
    )
    body = re.sub(r"\n[ \n]*!\[png\]", "\n\n![a picture made by the cell above]", body)
    body = re.sub(r"\n\s*\n\s*\n+(?=\S)", "\n\n", body)  # nbconvert is generous with empty lines
    title, body = body.strip().split("\n", 1)
    body = f"{title}\n\n{badges()}\n{body}"
    (root / IMAGES).mkdir(parents=True, exist_ok=True)
    for old in (root / IMAGES).glob("index_*"):
        old.unlink()
    for name, data in resources["outputs"].items():
        (root / name).write_bytes(data)
    (root / "README.md").write_text(body.strip() + "\n", encoding="utf-8", newline="\n")


def export():
    "From the pages: the package, the headers, the picture and README.md, with the tools of this environment."
    command("nbdev_export", cwd=ROOT)
    write_headers()
    command("nbdev_clean", cwd=ROOT)
    subprocess.run([sys.executable, ROOT / "tools/picture.py"], check=True)
    write_readme(ROOT)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="what", required=True)
    sub.add_parser("check")
    sub.add_parser("export")
    sub.add_parser("headers")
    sub.add_parser("readme")
    runner = sub.add_parser("run")
    runner.add_argument("names", nargs="*", help="pages, or the beginnings of their names; none: all")
    runner.add_argument("--write", action="store_true")
    runner.add_argument("--jobs", type=int, default=1, help="chapters at a time (not with --write)")
    runner.add_argument(
        "--within", type=float, default=math.inf, help="only pages of at most so many seconds"
    )
    runner.add_argument(
        "--changed", action="store_true", help="only pages that may run otherwise than before"
    )
    args = parser.parse_args()
    if args.what == "check":
        return check()
    if args.what == "run":
        seconds = {path: said_seconds(path) for path in chapters(args.names)}
        paths = [path for path in seconds if seconds[path] <= args.within]
        if args.changed:
            paths = [path for path in paths if has_changed(path)]
        if args.jobs > 1:
            paths.sort(key=seconds.get, reverse=True)  # a long one begun last would run alone
        return run(paths, args.write, args.jobs)
    if args.what == "export":
        export()
    elif args.what == "headers":
        write_headers()
    else:
        write_readme(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
