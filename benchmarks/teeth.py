"""Do the tests have teeth? A hole in a function turns its tests red, the solution green; slips are caught.

    python benchmarks/teeth.py            # all pages with exercises: green, holes and slips; prints
    python benchmarks/teeth.py --save     # writes benchmarks/results/teeth.json too, and goes on from it
    python benchmarks/teeth.py 10_adamw data.stream --parts holes slips
    python benchmarks/teeth.py --save 03 & python benchmarks/teeth.py --save 06     # side by side

Solutions, holes and slips (tests/slips.py) go through the machinery of `python -m tinygpt.learn check`:
a learner's notebook, laid over a copy of the project. The tests that name a function are tried first,
the fastest of them before the others, and its whole file only if they stay green.
Linux and macOS (it forks).
"""

import argparse
import ast
import importlib.util
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import hypothesis  # noqa: F401  what is imported here need not be imported again by each forked run
import numpy as np  # noqa: F401
import pytest
import torch
import torch.utils.flop_counter  # noqa: F401
from filelock import FileLock

from tinygpt.learn.book import (
    Definition,
    all_pages,
    exercises_of,
    exports_in,
    find_project,
    make_hole,
    make_notebook,
    module_file,
    module_of,
    page_path,
    read_notebook,
)
from tinygpt.learn.judge import copy_project, environment, find_tests
from tinygpt.learn.overlay import Work, lay_over, read_work
from tinygpt.support import atomic_path, cache_dir

ROOT = find_project()
sys.path.append(str(ROOT / "tools"))
from ran import bare_code, digest  # noqa: E402

RESULTS = ROOT / "benchmarks/results/teeth.json"
PARTS = ("green", "holes", "slips")


def _run_in_child(folder: Path, tests: list[str], stop: bool, seconds: float) -> None:
    "The forked process: pytest on the copy in `folder`, with none of this process's package left."
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment(folder) | {"TINYGPT_SECONDS": str(seconds)})
    for name in list(sys.modules):
        if name.split(".")[0] in ("tinygpt", "tinygpt_ran", "conftest") or name.startswith("test_"):
            del sys.modules[name]
    own = (ROOT, ROOT / "benchmarks")
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in own)]
    log = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    options = ["-q", "-p", "tinygpt_probe", "-p", "no:cacheprovider", *(["-x"] if stop else [])]
    status = pytest.main([*tests, *options])
    sys.stdout.flush()
    os._exit(int(status))


def forked(
    folder: Path,  # a project made by `copy_project`
    tests: list[str],  # files or single tests
    stop: bool = True,  # at the first failure
    seconds: float = 120.0,  # of computing for one test
    total: float = 900.0,  # for all of them
) -> list[dict]:
    "Like `judge.run_tests`, in a fork of this process, which has imported torch and pytest already."
    outcome = folder / "outcome.jsonl"
    outcome.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _run_in_child(folder, tests, stop, seconds)
    end = time.time() + total
    late = False
    while not late and os.waitpid(pid, os.WNOHANG)[0] == 0:
        time.sleep(0.02)
        late = time.time() > end
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if late:
        os.waitpid(pid, 0)

    lines = [json.loads(line) for line in outcome.read_text().splitlines()] if outcome.exists() else []
    results = [line for line in lines if "test" in line]
    if late:
        nothing = dict(ran=[], fixtures=[], frames=[])
        error = "all tests together ran too long"
        results.append(dict(test=tests[0], outcome="failed", seconds=total, error=error, **nothing))
    if not results:
        raise RuntimeError(f"pytest did not run {tests}: {(folder / 'pytest.log').read_text()[-2000:]}")
    return results


def is_red(results: list[dict]) -> str | None:
    "The first test that failed."
    return next((r["test"].split("/")[-1] for r in results if r["outcome"] == "failed"), None)


def _tests_naming(word: str, root: Path, files: list[str]) -> list[str]:
    "Tests with a word in their source; short ones first, those that start processes last."
    found = []
    for file in files:
        source = (root / file).read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test"):
                continue
            text = ast.get_source_segment(source, node)
            if re.search(rf"\b{word}\b", text):
                slow = bool(re.search(r"run_processes|subprocess|Popen|torchrun|\btrain\(", text))
                found.append((slow, len(text), f"{file}::{node.name}"))
    return [test for *_, test in sorted(found)]


def likely_tests(root: Path, files: list[str], name: str) -> list[list[str]]:
    "Tests that name a function, then those that name its class."
    *owner, own = name.split(".")
    words = owner if own.startswith("__") else [own, *owner]
    return [_tests_naming(word, root, files) for word in words]


class Chapter:
    "A page's tests on a copy of the project in which functions are replaced."

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.module = module_of(ROOT, name)
        self.path = folder / module_file(self.module)
        self.source = self.path.read_text(encoding="utf-8")
        self.files = find_tests(folder, self.module)
        self.names = [d.name for d in exercises_of(ROOT, name)]
        nb = make_notebook(ROOT, name, only=[])
        nb["metadata"]["tinygpt"]["holes"] = self.names  # as if a learner had written all of it
        self.work = read_work(nb, read_notebook(page_path(ROOT, name)), name)
        assert list(self.work.written) == self.names, (name, self.work.problems)
        self.fastest = {}  # function -> tests that ran it, the fastest first

    def lay(self, definitions: dict[str, Definition]):
        work = Work(self.name, self.module, written=definitions)
        self.path.write_text(lay_over(self.source, work, list(definitions)), encoding="utf-8")

    def restore(self):
        self.path.write_text(self.source, encoding="utf-8")

    def green(self) -> dict:
        "All solutions, from a notebook: no test fails. Also learns which tests run a function."
        self.lay(self.work.written)
        results = forked(self.folder, self.files, stop=False)
        for r in sorted(results, key=lambda r: r["seconds"]):
            for key in r["ran"] if r["outcome"] == "passed" else []:
                self.fastest.setdefault(key.split(":")[1], []).append(r["test"])
        counts = {o: sum(r["outcome"] == o for r in results) for o in ("passed", "failed", "skipped")}
        if counts["failed"]:
            failed = next(r for r in results if r["outcome"] == "failed")
            counts["first"] = f"{is_red(results)}: {failed.get('error', '')[:300]}"
        return counts

    def red(self, name: str, text: str) -> str | None:
        "The test that fails with this text in place of a function, or None."
        d = self.work.written[name]
        self.lay({name: Definition(name, text, d.first, d.last, d.cell)})
        if name in self.fastest:
            groups = [self.fastest[name][:1], self.fastest[name]]
        else:
            groups = [group for group in likely_tests(self.folder, self.files, name) if group]
        if groups and len(groups[0]) > 3:
            groups.insert(0, groups[0][:2])
        tried = []
        for tests in [*groups, self.files]:
            if tests in tried:
                continue
            tried.append(tests)
            if test := is_red(forked(self.folder, tests)):
                return test
        return None


def load_slips() -> list:
    path = ROOT / "tests/slips.py"
    if not path.exists():
        return []
    spec = importlib.util.spec_from_file_location("slips", path)
    sys.modules["slips"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SLIPS


def slips_of(module: str) -> list:
    "The slips of a module."
    return [slip for slip in load_slips() if slip.module == module]


def slipped(d: Definition, slip) -> str:
    "The function with the slip in it. ValueError if the text to replace is not there exactly once."
    return slip.put_into(d.text)


def all_definitions(chapter: str) -> dict[str, Definition]:
    "Every function of a page, helpers and commands too, by name."
    return {d.name: d for d in exports_in(read_notebook(page_path(ROOT, chapter)))}


def examine_slip(chapter: Chapter, slip, definitions: dict[str, Definition]) -> tuple[str | None, str]:
    "(the test that catches a slip or None, what to say about it)."
    if slip.function not in definitions:
        return None, f"there is no function {slip.function}"
    try:
        text = slipped(definitions[slip.function], slip)
    except ValueError as error:
        return None, str(error)
    chapter.work.written.setdefault(slip.function, definitions[slip.function])
    test = chapter.red(slip.function, text)
    return test, f"caught by {test}" if test else "NOT CAUGHT"


def state_of(folder: Path, module: str) -> dict[str, str]:
    "What a record was made from: hashes of the module's code with its tests', and of its slips."
    files = [module_file(module), *find_tests(folder, module)]
    sources = digest(*(bare_code((folder / file).read_text(encoding="utf-8")) for file in files))
    return {"sources": sources, "slip_sources": digest(*(repr(s).encode() for s in slips_of(module)))}


def examine(name: str, parts: list[str], folder: Path, before: dict, note) -> dict:
    "The record of one page; what `before` has, made from the same sources, is not done again."
    chapter = Chapter(name, folder)
    state = state_of(folder, chapter.module)
    record = dict(before) if before.get("sources") == state["sources"] else {}
    if record.get("slip_sources") != state["slip_sources"]:
        record.pop("slips", None)
    record |= {"exercises": len(chapter.names), **state}
    if not chapter.files:
        return record | {"untested": chapter.names}

    if "green" in parts and record.get("green", {}).get("failed", 1):
        record["green"] = chapter.green()
        note(f"{name}: all {len(chapter.names)} solutions laid over: {record['green']}")
    if "holes" in parts:
        red = record.setdefault("red", {})
        for function in chapter.names:
            if not red.get(function):
                red[function] = chapter.red(function, make_hole(chapter.work.written[function]))
                note(f"{name}: hole in {function}: {red[function] or 'NO TEST FAILS'}")
    if "slips" in parts:
        caught = record.setdefault("slips", {})
        definitions = all_definitions(name)
        for slip in slips_of(chapter.module):
            label = f"{slip.function}: {slip.why}"
            if not caught.get(label):
                caught[label], said = examine_slip(chapter, slip, definitions)
                note(f"{name}: slip {label}: {said}")
    chapter.restore()
    return record


def table(chapters: dict) -> str:
    "One line a page: holes seen red, solutions green, slips caught."
    lines = [f"{'page':26s} {'holes red':>10s} {'green':>8s} {'slips caught':>13s}"]
    sums = [0, 0, 0, 0]
    for name, record in sorted(chapters.items()):
        red, slips = record.get("red", {}), record.get("slips", {})
        numbers = [sum(map(bool, red.values())), record.get("exercises", 0)]
        numbers += [sum(map(bool, slips.values())), len(slips)]
        sums = [a + b for a, b in zip(sums, numbers)]
        green = "-"
        if "green" in record:
            green = "no" if record["green"]["failed"] else "yes"
        lines.append(
            "{:26s} {:4d} of {:2d} {:>8s} {:6d} of {:3d}".format(name, *numbers[:2], green, *numbers[2:])
        )
    total = "{:26s} {:3d} of {:3d} {:8s} {:6d} of {:3d}".format("all", *sums[:2], "", *sums[2:])
    return "\n".join([*lines, total])


def pages_with_work() -> dict[str, str]:
    "page -> module, for every page with exercises or slips."
    with_slips = {slip.module for slip in load_slips()}
    modules = {page: module_of(ROOT, page) for page in all_pages(ROOT)}
    return {page: m for page, m in modules.items() if m in with_slips or exercises_of(ROOT, page)}


def choose(pages: dict[str, str], wanted: list[str]) -> list[str]:
    "The pages that are meant: by number, name or module; all, if none is named."
    chosen = []
    for page, module in pages.items():
        called = {page, page[:2], page[:2].lstrip("0"), module}
        if not wanted or called & set(wanted):
            chosen.append(page)
    if not chosen:
        sys.exit(f"no page is called {' or '.join(wanted)}; there are {', '.join(pages)}")
    return chosen


def saved_records() -> dict:
    return json.loads(RESULTS.read_text())["chapters"] if RESULTS.exists() else {}


def save(name: str, record: dict, pages: dict[str, str]) -> None:
    "Put the record of one page into the file, which other processes may be changing too."
    cache_dir().mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir() / "teeth.lock"):
        chapters = saved_records() | {name: record}
        known = {page: chapters[page] for page in sorted(chapters) if page in pages}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        result = dict(
            command="python benchmarks/teeth.py --save",
            date=str(date.today()),
            python=platform.python_version(),
            torch=torch.__version__,
            machine=f"{platform.machine()}, {os.cpu_count()} cores, {device}",
            chapters=known,
        )
        with atomic_path(RESULTS) as tmp:
            tmp.write_text(json.dumps(result, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "chapters", nargs="*", help="numbers, pages or modules: 10, 03_data_stream, data.stream"
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--save", action="store_true", help="write each page's record when it is done")
    parser.add_argument("--again", action="store_true", help="do not go on from the saved results")
    args = parser.parse_args()

    def note(line):
        print(f"{time.strftime('%X')} {line}", flush=True)

    pages = pages_with_work()
    records = {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp).resolve()
        copy_project(ROOT, folder)
        for name in choose(pages, args.chapters):
            # another process may have saved this page meanwhile
            before = {} if args.again else saved_records().get(name, {})
            records[name] = examine(name, args.parts, folder, before, note)
            if args.save:
                save(name, records[name], pages)
    print(table(saved_records() if args.save else records))


if __name__ == "__main__":
    main()
