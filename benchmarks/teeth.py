"""Do the tests have teeth? For every exercise of learn mode: a hole in it turns its chapter's tests red, the solution turns them green; wrong solutions are caught.

    python benchmarks/teeth.py                    # all chapters: green, holes and slips; prints
    python benchmarks/teeth.py --save             # and writes benchmarks/results/teeth.json, chapter by chapter; goes on where it was
    python benchmarks/teeth.py 10_adamw --parts holes slips

Solutions, holes and slips (tests/slips.py) go through the machinery of `python -m tinygpt.learn check`: a learner's notebook, laid over a copy of the project.
The tests that name a function are tried first, the fastest of them before the others, and its whole file only if they stay green. Linux and macOS (it forks).
"""

import argparse
import ast
import hashlib
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

from tinygpt.learn.book import Definition, exercises_of, find_project, make_hole, make_notebook, read_notebook
from tinygpt.learn.judge import copy_project, environment, find_tests
from tinygpt.learn.overlay import Work, lay_over, read_work

ROOT = find_project()
RESULTS = ROOT / "benchmarks/results/teeth.json"


def forked(
    folder: Path, tests: list[str], stop: bool = True, seconds: float = 120.0, total: float = 900.0
) -> list[dict]:
    "Like `learn_judge.run_tests`, in a fork of this process, which has imported torch and pytest already."
    outcome = folder / "outcome.jsonl"
    outcome.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        os.setsid()
        os.chdir(folder)
        os.environ.update(environment(folder) | {"TINYGPT_SECONDS": str(seconds)})
        for name in [
            n
            for n in sys.modules
            if n.split(".")[0] in ("tinygpt", "tinygpt_ran", "conftest") or n.startswith("test_")
        ]:
            del sys.modules[name]
        sys.path[:] = [str(folder)] + [
            p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks")
        ]
        log = os.open(folder / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = pytest.main(
            [*tests, "-q", "-p", "tinygpt_probe", "-p", "no:cacheprovider", *(["-x"] if stop else [])]
        )
        sys.stdout.flush()
        os._exit(int(status))
    end, late = time.time() + total, False
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if late := time.time() > end:
            break
        time.sleep(0.02)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if late:
        os.waitpid(pid, 0)
    results = [json.loads(line) for line in outcome.read_text().splitlines()] if outcome.exists() else []
    results = [r for r in results if "test" in r]
    if late:
        results.append(
            dict(
                test=tests[0],
                outcome="failed",
                seconds=total,
                ran=[],
                fixtures=[],
                error="all tests together ran too long",
                frames=[],
            )
        )
    if not results:
        raise RuntimeError(f"pytest did not run {tests}: {(folder / 'pytest.log').read_text()[-2000:]}")
    return results


def is_red(results: list[dict]) -> str | None:
    "The first test that failed."
    return next((r["test"].split("/")[-1] for r in results if r["outcome"] == "failed"), None)


def likely_tests(root: Path, files: list[str], name: str) -> list[list[str]]:
    "Tests that name a function, then those that name its class; within each those that start processes come last."
    *owner, own = name.split(".")
    words, groups = ([] if own.startswith("__") else [own]) + owner, []
    for word in words:
        found = []
        for file in files:
            source = (root / file).read_text(encoding="utf-8")
            for node in ast.parse(source).body:
                text = ast.get_source_segment(source, node) or ""
                if (
                    isinstance(node, ast.FunctionDef)
                    and node.name.startswith("test")
                    and re.search(rf"\b{word}\b", text)
                ):
                    slow = bool(re.search(r"run_processes|subprocess|Popen|torchrun|\btrain\(", text))
                    found.append((slow, len(text), f"{file}::{node.name}"))
        groups.append([test for *_, test in sorted(found)])
    return groups


class Chapter:
    "A chapter's tests on a copy of the project in which functions are replaced."

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.module = name, folder, name[3:]
        self.path = folder / f"tinygpt/{self.module}.py"
        self.source = self.path.read_text(encoding="utf-8")
        self.files = find_tests(folder, self.module)
        exercises = exercises_of(ROOT, name)
        nb = make_notebook(ROOT, name, only=[])
        nb["metadata"]["tinygpt"]["holes"] = [
            d.name for d in exercises
        ]  # as if a learner had written all of it
        self.work = read_work(nb, read_notebook(ROOT / f"nbs/{name}.ipynb"), name)
        self.names = [d.name for d in exercises]
        assert list(self.work.written) == self.names, (name, self.work.problems)
        self.fastest = {}  # function -> tests that ran it, the fastest first

    def lay(self, definitions: dict[str, Definition]):
        self.path.write_text(
            lay_over(self.source, Work(self.name, written=definitions), list(definitions)), encoding="utf-8"
        )

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
        return counts | (
            {
                "first": f"{is_red(results)}: {[r for r in results if r['outcome'] == 'failed'][0].get('error', '')[:300]}"
            }
            if counts["failed"]
            else {}
        )

    def red(self, name: str, text: str) -> str | None:
        "The test that fails with this text in place of a function, or None."
        d = self.work.written[name]
        self.lay({name: Definition(name, text, d.first, d.last, d.cell)})
        tries = (
            [self.fastest[name][:1], self.fastest[name]]
            if name in self.fastest
            else likely_tests(self.folder, self.files, name)
        )
        tries = [group for i, group in enumerate(tries) if group and group not in tries[:i]]
        if tries and len(tries[0]) > 3:
            tries.insert(0, tries[0][:2])
        for tests in [*tries, self.files]:
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


def slipped(d: Definition, slip) -> str:
    "The function with the slip in it; an error if its text is not there exactly once."
    if d.text.count(slip.old) != 1:
        raise ValueError(f"{slip.module}.{slip.function}: {slip.old!r} occurs {d.text.count(slip.old)} times")
    return d.text.replace(slip.old, slip.new)


def all_definitions(chapter: str) -> dict[str, Definition]:
    from tinygpt.learn.book import exports_in

    return {d.name: d for d in exports_in(read_notebook(ROOT / f"nbs/{chapter}.ipynb"))}


def examine(name: str, parts: list[str], folder: Path, before: dict, note) -> dict:
    "The record of one chapter; what `before` has is not done again."
    chapter, record = Chapter(name, folder), dict(before)
    record["exercises"] = len(chapter.names)
    if not chapter.files:
        return record | {"untested": chapter.names}
    if "green" in parts and record.get("green", {}).get("failed", 1):
        record["green"] = chapter.green()
        note(f"{name}: all {len(chapter.names)} solutions laid over: {record['green']}")
    if "holes" in parts:
        red = record["red"] = {n: test for n, test in record.get("red", {}).items() if n in chapter.names}
        for function in chapter.names:
            if not red.get(function):
                red[function] = chapter.red(function, make_hole(chapter.work.written[function]))
                note(
                    f"{name}: hole in {function}: {'red: ' + red[function] if red[function] else 'NO TEST FAILS'}"
                )
    if "slips" in parts:
        slips, caught = (
            [s for s in load_slips() if s.module == chapter.module],
            record.setdefault("slips", {}),
        )
        definitions = all_definitions(name)
        for slip in slips:
            label = f"{slip.function}: {slip.why}"
            if not caught.get(label):
                if slip.function not in definitions or definitions[slip.function].text.count(slip.old) != 1:
                    caught[label] = None
                    note(f"{name}: slip {label}: its text is not there exactly once")
                    continue
                chapter.work.written.setdefault(slip.function, definitions[slip.function])
                caught[label] = chapter.red(slip.function, slipped(definitions[slip.function], slip))
                note(
                    f"{name}: slip {label}: {'caught by ' + caught[label] if caught[label] else 'NOT CAUGHT'}"
                )
    chapter.restore()
    return record


def table(chapters: dict) -> str:
    "One line a chapter: holes seen red, solutions green, slips caught."
    lines, sums = [f"{'chapter':26s} {'holes red':>10s} {'green':>8s} {'slips caught':>13s}"], [0, 0, 0, 0]
    for name, r in sorted(chapters.items()):
        red, slips = r.get("red", {}), r.get("slips", {})
        numbers = (
            sum(map(bool, red.values())),
            r.get("exercises", 0),
            sum(map(bool, slips.values())),
            len(slips),
        )
        sums = [a + b for a, b in zip(sums, numbers)]
        green = r.get("green", {})
        lines.append(
            f"{name:26s} {numbers[0]:4d} of {numbers[1]:2d} {'-' if not green else 'no' if green['failed'] else 'yes':>8s} {numbers[2]:6d} of {numbers[3]:3d}"
        )
    return "\n".join(
        [*lines, f"{'all':26s} {sums[0]:3d} of {sums[1]:3d} {'':8s} {sums[2]:6d} of {sums[3]:3d}"]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", help="notebooks such as 10_adamw (default: all)")
    parser.add_argument(
        "--parts", nargs="+", default=["green", "holes", "slips"], choices=["green", "holes", "slips"]
    )
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--again", action="store_true", help="do not go on from the saved results")
    args = parser.parse_args()
    names = [p.stem for p in sorted((ROOT / "nbs").glob("[0-9]*.ipynb")) if exercises_of(ROOT, p.stem)]
    saved = json.loads(RESULTS.read_text())["chapters"] if RESULTS.exists() and not args.again else {}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp).resolve()
        copy_project(ROOT, folder)
        for name in [n for n in names if not args.chapters or any(n.startswith(c) for c in args.chapters)]:
            sources = [
                folder / f"tinygpt/{name[3:]}.py",
                *(folder / file for file in find_tests(folder, name[3:])),
            ]
            state = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
            before = saved.get(name, {}) if saved.get(name, {}).get("sources") == state else {}
            if not sources[0].exists():
                continue  # a chapter that is younger than the copy
            saved[name] = examine(
                name,
                args.parts,
                folder,
                before,
                lambda line: print(f"{time.strftime('%X')} {line}", flush=True),
            ) | {"sources": state}
            if args.save:
                saved = (json.loads(RESULTS.read_text())["chapters"] if RESULTS.exists() else {}) | {
                    name: saved[name]
                }  # another run may have written meanwhile
                saved = dict(sorted((n, r) for n, r in saved.items() if n in names))
                result = dict(
                    command="python benchmarks/teeth.py --save", date=str(date.today()), python=platform.python_version(), torch=torch.__version__,
                    machine=f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'}", chapters=saved,
                )  # fmt: skip
                RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(table(saved))


if __name__ == "__main__":
    main()
