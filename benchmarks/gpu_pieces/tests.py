"""Do the tests hold on this GPU? Those marked cuda, and all that compile, run Triton, or wrap many processes.

Several GPUs, where there are, are found by the tests themselves. What fails stands in the record by its name.
"""

import importlib.util
import os
import sys
import tempfile
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path

from gpu_pieces.alone import alone
from gpu_pieces.record import ROOT, Later, run_until

# to collect the other files would take longer than these tests
MARKED = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.cuda" in path.read_text()]
GROUPS = {  # name -> arguments of pytest
    "marked cuda": ["-m", "cuda", *(f"tests/{path.name}" for path in MARKED)],
    "Triton": ["tests/test_attention_triton.py"],
    "compiling": ["tests/test_compile.py"],
    "memory and speed": ["tests/test_measure_memory.py", "tests/test_measure_speed.py"],
    "NCCL, DDP, FSDP2": ["tests/test_ddp_world.py", "tests/test_ddp_wrap.py", "tests/test_ddp_command.py"],
    "ZeRO and the trainer's ways": ["tests/test_zero.py", "tests/test_run_parallel.py"],
}
REDUCED = {"a few": ["tests/test_schedule.py"]}  # needs no command line, no tokenizer


def summary(report: Path) -> dict:
    "What pytest's junit file says: counts, seconds, and the failed tests with the first line of each."
    found = dict(passed=0, failed=0, skipped=0, seconds=0.0, failures=[])
    for case in ET.parse(report).iter("testcase"):
        if not case.get("name"):  # the one in which pytest was stopped
            continue
        found["seconds"] += float(case.get("time") or 0)
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            found["failed"] += 1
            name = f"{case.get('classname')}.{case.get('name')}"
            lines = (wrong[0].text or "").splitlines()  # pytest marks with E what says most
            told = [line[1:].strip() for line in lines if line.startswith("E ")]
            why = told or (wrong[0].get("message") or "").strip().splitlines() or [""]
            found["failures"].append(dict(test=name, why=why[0][:200]))
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    return found | dict(seconds=round(found["seconds"], 1))


def side_by_side() -> list[str]:
    "Arguments by which pytest runs tests in several processes, where it can: much of a test is waiting."
    processes = min(4, (os.cpu_count() or 2) // 2)
    there = importlib.util.find_spec("xdist") is not None
    return ["-n", str(processes), "--dist", "worksteal"] if there and processes > 1 else []


def run_group(setup, arguments: list[str]) -> dict:
    "One call of pytest, in a process of its own, until it ends or the time is over."
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command.append("--continue-on-collection-errors")  # a test file that needs what is not installed
        limit = max(setup.seconds_left, 60)
        with alone():
            said, status = run_until([*command, *setup.pick(side_by_side(), []), *arguments], limit)
        row = dict(tests=" ".join(arguments), status=status)
        row |= summary(report) if report.exists() else {}
        if status is None:
            why = f"not at their end after {limit:.0f} s: give more with --minutes"
            raise Later([row | dict(error=why)])
        if not report.exists():
            lines = said.strip().splitlines() or ["no output"]
            raise RuntimeError(f"pytest wrote no report: {lines[-1]}")
        return row


def cases(setup) -> list:
    "A case for each group of tests."
    groups = setup.pick(GROUPS, REDUCED)
    return [(name, partial(run_group, setup, arguments)) for name, arguments in groups.items()]
