"""Which pages would run as they did before: tools/ran.json has a hash of what each last ran well with.

`book.py run` writes it; `book.py run --changed` leaves out the pages whose hash is still the same.
"""

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from pages import ROOT, code_of, imports_in, module_of, read

RECORD = ROOT / "tools/ran.json"
WHOLE_BOOK = "learn_"  # such pages read all others: they always run


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def bare_code(text: str) -> bytes:
    "A file's code without comments, docstrings and layout: what a test can see of it."
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [line for line in body if not is_text(line)]
    return ast.unparse(tree).encode()


def is_text(line: ast.stmt) -> bool:
    "Whether a statement is a string alone, as a docstring is."
    return isinstance(line, ast.Expr) and isinstance(getattr(line.value, "value", None), str)


@cache
def package() -> dict[str, tuple[bytes, set[str]]]:
    "Each module of the package: its bare code, and the modules it names, in strings and functions too."
    folder, found = ROOT / "tinygpt", {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        found[module] = bare_code(text), imports_in(text, module) | named_in(text)
    return found


def named_in(text: str) -> set[str]:
    "Modules that a text names, as in `-m tinygpt.train` or `from tinygpt import muon`."
    found = set(re.findall(r"\btinygpt\.([a-z_]+(?:\.[a-z_]+)*)", text))
    for names in re.findall(r"from tinygpt import ([\w, ]+)", text):
        found |= set(names.replace(" ", "").split(","))
    return found


def modules_behind(names: set[str]) -> set[str]:
    "These modules, and all that they lead to."
    known, found, waiting = package(), set(), set(names)
    while waiting:
        name = waiting.pop()
        if name in known and name not in found:
            found.add(name)
            waiting |= known[name][1]
        elif name not in known and "." in name:  # a function of a module
            waiting.add(name.rpartition(".")[0])
    return found


def records_in(text: str) -> list[Path]:
    "Records of benchmarks that a page may show: those whose first word it says."
    records = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return [path for path in records if re.search(rf"\b{path.stem.split('_')[0]}", text)]


def judged_in(text: str) -> list[bytes]:
    "What a page in learn mode judges with: the pages that it names, and the tests of their modules."
    parts = []
    for name in sorted(set(re.findall(r'"(\d\d_\w+)"', text))):
        for path in (ROOT / "nbs").rglob(f"{name}.ipynb"):
            tests = ROOT / f"tests/test_{str(module_of(path)).replace('.', '_')}.py"
            parts += [
                code_of(path).encode(),
                *(bare_code(p.read_text(encoding="utf-8")) for p in with_helpers(tests)),
            ]
    return parts


def with_helpers(tests: Path) -> list[Path]:
    "A file of tests, and the files beside it that it needs."
    found, waiting = [], [tests, tests.with_name("conftest.py")]
    while waiting:
        path = waiting.pop()
        if path.exists() and path not in found:
            found.append(path)
            text = path.read_text(encoding="utf-8")
            waiting += [
                tests.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", text, re.M)
            ]
    return sorted(found)


def state_of(path: Path) -> str:
    "A hash of what decides how a page runs: its code, the modules and records behind it, all versions."
    cells = read(path).cells
    text = "\n".join(c.source for c in cells if c.cell_type == "code" or "<summary>Solution" in c.source)
    modules = modules_behind(imports_in(code_of(path)) | named_in(text))
    code = [module.encode() + package()[module][0] for module in sorted(modules)]
    code += judged_in(text) if "learn.judge" in modules else []
    records = [record.read_bytes() for record in records_in(text)]
    return digest(text.encode(), *code, *records, (ROOT / "constraints.txt").read_bytes())


def recorded() -> dict[str, str]:
    "Page -> the hash with which it last ran well."
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def has_changed(path: Path) -> bool:
    return path.stem.startswith(WHOLE_BOOK) or recorded().get(path.stem) != state_of(path)


def remember(states: dict[Path, str]) -> None:
    "Write down what these pages of the book ran well with."
    new = {path.stem: state for path, state in states.items() if ROOT / "nbs" in path.parents}
    if not new:
        return
    RECORD.write_text(json.dumps(recorded() | new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
