"""The pages of the book: their order, which the index writes down, and the line under each title.

The line says what a page is, how long it takes, what it needs and what needs it. All but the
seconds follows from the index and from the imports.
"""

import ast
import math
import os
import re
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
LABELS = ("core", "deeper", "reference")


@cache
def settings() -> dict[str, str]:
    "The package's facts and addresses, written down once in settings.ini."
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def colab_link(path: Path) -> str:
    "Where Colab opens a page, with a first cell that installs the book."
    return f"{settings()['colab_url']}/{path.relative_to(ROOT).as_posix()}"


@cache
def _read(path: Path, changed: int):
    return nbformat.read(path, as_version=4)


def read(path: Path):
    "A notebook, to look at. It is read again only if its file has changed."
    return _read(path, path.stat().st_mtime_ns)


# ---- the reading order: written down once, in the index


@dataclass(frozen=True)
class Row:
    "A page, as the index lists it."

    part: str  # the heading above the table
    number: str  # of its chapter: "10", or nothing
    name: str  # what the index calls it
    path: Path
    label: str  # core, deeper or reference
    question: str


LIST = "\n## All pages, in their order\n"  # the heading of that list in the index
ROW = re.compile(r"^\| *(\d*) *\| \[(.+?)\]\(([\w/]+\.ipynb)\) \| (.*?) \| (.*?) *\|$")


def contents() -> list[Row]:
    "All pages but the index, in the order in which the index lists them."
    nb = read(ROOT / "nbs/index.ipynb")
    text = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    part, rows = "", []
    for line in text.partition(LIST)[2].splitlines():
        if line.startswith("### "):
            part = line.removeprefix("### ").strip()
        elif found := ROW.match(line):
            number, name, link, label, question = found.groups()
            rows.append(Row(part, number, name, ROOT / "nbs" / link, label, question))
    return rows


def reading_order() -> list[Path]:
    "All pages but the index, in the order in which the index lists them."
    return [row.path for row in contents()]


def labels() -> dict[str, str]:
    "Page -> core, deeper or reference, as the index says."
    return {row.path.stem: row.label for row in contents()}


def index_problems():
    "Pages that the index does not list, or lists without a label."
    pages = {p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts}
    listed = set(reading_order())
    for page in sorted(pages - listed - {ROOT / "nbs/index.ipynb"}):
        yield f"{page.relative_to(ROOT)}: the index does not list it"
    for page in sorted(listed - pages):
        yield f"nbs/index.ipynb lists {page.relative_to(ROOT)}, which is not there"
    label = labels()
    for page in sorted(listed & pages):
        if label.get(page.stem) not in LABELS:
            yield f"nbs/index.ipynb: {page.name} needs a label: {', '.join(LABELS)}"
    cells = read(ROOT / "nbs/index.ipynb").cells
    if doors_line() not in cells[0].source:
        yield "nbs/index.ipynb: the line under its title is not up to date (run `make export`)"
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source != with_written_parts(cell.source):
            yield f"nbs/index.ipynb: {cell.id}: chapters or citation are not up to date (run `make export`)"


def module_of(path: Path) -> str | None:
    "The module that a notebook exports, such as data.stream; None where it exports nothing."
    return module_in(read(path))


def module_in(nb) -> str | None:
    for cell in nb.cells:
        if cell.cell_type == "code" and (found := re.search(r"^#\| *default_exp +(\S+)", cell.source, re.M)):
            return found[1]
    return None


def imports_in(source: str, module: str = "") -> set[str]:
    """Modules of the package that Python code imports, at the top or inside a function: {'data.stream'}.

    `module` is the one that the source is of, where it has relative imports.
    """
    package = ".".join(["tinygpt", *module.split(".")[:-1]])
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            place = resolve_name("." * node.level + (node.module or ""), package)
            names = [alias.name for alias in node.names]
            if place == "tinygpt":
                found |= set(names)
            elif place.startswith("tinygpt."):
                found |= modules_named(place.removeprefix("tinygpt."), names)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("tinygpt.") for a in node.names if a.name.startswith("tinygpt.")}
    return found


def modules_named(place: str, names: list[str]) -> set[str]:
    "What `from tinygpt.<place> import <names>` imports: the module there, or modules of the folder there."
    is_folder = (ROOT / "tinygpt" / place.replace(".", "/")).is_dir()
    return {f"{place}.{name}" for name in names} if is_folder else {place}


def code_of(path: Path) -> str:
    "All code of a notebook, without magics."
    cells = read(path).cells
    source = "\n".join(c.source for c in cells if c.cell_type == "code")
    return re.sub(r"^([ \t]*)[%!].*$", r"\1pass", source, flags=re.M)


# ---- the header of a page: what it is, how long it takes, what it needs, what needs it


def page_facts() -> dict[Path, dict]:
    """For each page of the reading order: label, minutes to read, pages it needs, pages that need it.

    `chapter` is the chapter whose side page it is, if that comes before it.
    """
    order, label = reading_order(), labels()
    home = {module_of(path): path for path in order}
    facts = {}
    for path in order:
        needs = {home[m] for m in imports_in(code_of(path)) if m in home} - {path}
        facts[path] = dict(label=label[path.stem], minutes=minutes_to_read(path), needs=needs, needed_by=[])
    chapters = {}  # number -> page, of those that came
    for path in order:
        facts[path]["chapter"] = chapters.get(path.stem[:2])
        if label[path.stem] == "core":
            chapters[path.stem[:2]] = path
        for other in facts[path]["needs"]:
            facts[other]["needed_by"].append(path)
    for fact in facts.values():
        fact["needs"] = [path for path in order if path in fact["needs"]]
    return facts


def minutes_to_read(path: Path) -> int:
    "200 words or 15 lines of code a minute, rounded up to five. The header itself does not count."
    nb = read(path)
    words = sum(len(HEADER.sub("", c.source).split()) for c in nb.cells if c.cell_type == "markdown")
    lines = sum(len(c.source.splitlines()) for c in nb.cells if c.cell_type == "code")
    return max(5, 5 * math.ceil((words / 200 + lines / 15) / 5))


def header_line(path: Path, fact: dict, seconds: int) -> str:
    "The line under a page's title."

    def links(pages):
        names = [f"[{p.stem[:2]}]({os.path.relpath(p, path.parent)})" for p in pages]
        return ", ".join(name.replace(os.sep, "/") for name in names)

    # what its code imports: chapters are worth reading before, side pages may wait; and its own chapter
    chapters = [p for p in fact["needs"] if p.parent == ROOT / "nbs"]
    if fact["chapter"] not in (None, *chapters):
        chapters.append(fact["chapter"])  # the last: what it imports is of chapters before
    side = [p for p in fact["needs"] if p.parent != ROOT / "nbs" and p.stem != "00_support"]
    users = [p for p in fact["needed_by"] if p.parent == ROOT / "nbs"]
    parts = [
        fact["label"].capitalize(),
        f"{fact['minutes']} minutes to read, {seconds} seconds to run",
        f"read before: {links(chapters) or 'no chapter'}",
    ]
    if side:
        parts.append(f"its code uses {len(side)} side page{'s' * (len(side) > 1)} too, which can wait")
    if users:
        parts.append(f"used in {links(users) if len(users) <= 6 else f'{len(users)} chapters'}")
    parts.append(f"[open in Colab]({colab_link(path)})")
    return f"*{' · '.join(parts)}*"


HEADER = re.compile(r"^\*(?:Core|Deeper|Reference) · \d+ minutes to read, (\d+) seconds to run · .*\*$", re.M)
DOORS = re.compile(r"^\*Run this page .*\*$", re.M)


def doors_line() -> str:
    "The line under the title of the index: where to run, ask and cite the book."
    url = settings()
    places = f"[in Colab]({colab_link(ROOT / 'nbs/index.ipynb')}), [in Binder]({url['binder_url']})"
    others = f"[ask a question]({url['git_url']}/discussions) · [cite](../CITATION.cff)"
    return f"*Run this page {places} or [in a codespace]({url['codespaces_url']}) · {others}*"


# ---- parts of the index that follow from elsewhere: chapters, the way of a step, the citation

CHAPTERS = re.compile(r"^\| \| chapter \| its question \| you meet \|\n(?:\|.*(?:\n|$))+", re.M)
MEET = {  # what a chapter is about, in the words that people search for
    "01": "fp32, bf16, fp16, fp8, rounding",
    "02": "BPE, byte-level, bits per byte",
    "03": "shards, shuffling, epochs, resuming",
    "04": "queries, keys, causal mask, FlashAttention",
    "05": "initialization, residual scaling, µP",
    "06": "GPT-2, Llama, RoPE, RMSNorm, SwiGLU, GQA",
    "07": "profiling, MFU, FLOPs, memory",
    "08": "autocast, mixed precision, loss scaling",
    "09": "torch.compile, graph breaks, recompilation",
    "10": "SGD, momentum, Adam, weight decay",
    "11": "warm-up, cosine, trapezoid (WSD)",
    "12": "gradient accumulation, clipping, noise scale",
    "13": "DDP, all-reduce, FSDP2",
    "14": "Newton–Schulz, orthogonalization",
    "15": "ZeRO, sharded optimizer, DistMuon",
    "16": "atomic saves, exact resume",
    "17": "perplexity, confidence intervals, HellaSwag",
    "18": "sampling, KV cache, top-k, top-p",
    "19": "the trainer, its config and its loop",
    "20": "nanoGPT speedrun, ablations",
    "21": "scaling laws, Chinchilla",
    "22": "SFT, loss masks, LoRA",
    "23": "DPO, reward models",
    "24": "policy gradient, GRPO, rejection sampling",
    "25": "chat templates, stop tokens, serving",
}
CITATION = re.compile(r"^```bibtex\n.*?^```", re.M | re.S)


def chapters_table() -> str:
    "The core pages by part, as the visitor's table; the whole list, at the end of the index, is its source."
    lines, part = ["| | chapter | its question | you meet |", "|---|---|---|---|"], ""
    for row in contents():
        if row.label == "core":
            if row.part != part:
                lines.append(f"| | **{row.part}** | | |")
            part = row.part
            link = row.path.relative_to(ROOT / "nbs").as_posix()
            lines.append(f"| {row.number} | [{row.name}]({link}) | {row.question} | {MEET[row.number]} |")
    return "\n".join(lines) + "\n"


# the modules that a training step passes through, each imported by one above it; what to look for there
STEP_PATH = {
    "train": "`main` reads the command line, `train` is the loop",
    "run.command": "`parse_arguments`: preset and flags become a config",
    "run.config": "`TrainConfig`: every setting, and what `check` refuses",
    "run.setup": "`open_run`: `begin_run` makes data and model, `equip_run` all that trains them",
    "data.open": "`make_loader`: rows of tokens, and the tokens after them",
    "run.parallel": "`Single`: one process, and its optimizer; the others change what they must",
    "run.loop": "`Stepper` makes a step; `due` says what comes after it",
    "accumulate": "`train_step`: forward, backward, clip, step",
    "model": "`GPT`: from tokens to the loss",
    "muon": "`make_optimizer`, and `Muon` for the matrices",
    "adamw": "`adamw_update`, and `make_adamw` for the rest",
    "checkpoint": "`save_checkpoint`: all that the next step needs",
}
STEP_TABLE = re.compile(
    r"^\| module \| lines \| page \| look for \|\n(?:\|.*\n)+\nThese \d+ modules.*$", re.M
)


def module_file(module: str) -> Path:
    return ROOT / "tinygpt" / f"{module.replace('.', '/')}.py"


def lines_in(module: str) -> int:
    return len(module_file(module).read_text(encoding="utf-8").splitlines())


def imported_by(module: str) -> set[str]:
    "The module and all of the package that it imports, directly or not."
    found, left = set(), {module}
    while left:
        name = left.pop()
        if name not in found and module_file(name).exists():
            found.add(name)
            left |= imports_in(module_file(name).read_text(encoding="utf-8"), name)
    return found


def step_table() -> str:
    "In which order to open the modules of `python -m tinygpt.train`, with their pages; lines are rounded."
    home = {module_of(row.path): row for row in contents()}
    lines, own = ["| module | lines | page | look for |", "|---|---|---|---|"], []
    for module in [name for name in STEP_PATH if name in home]:
        row, file = home[module], module_file(module).relative_to(ROOT).as_posix()
        page = f"[{row.number} {row.name}]({row.path.relative_to(ROOT / 'nbs').as_posix()})"
        own.append(lines_in(module))
        lines.append(f"| [`{file}`](../{file}) | {round(own[-1], -1)} | {page} | {STEP_PATH[module]} |")
    behind = imported_by("train")
    few, many = round(sum(own), -2), round(sum(map(lines_in, behind)), -2)
    all_ = f"of about {many:,} in the {len(behind)} modules that a run may import"
    return "\n".join([*lines, "", f"These {len(own)} modules have about {few:,} lines, {all_}."])


def citation() -> str:
    "What CITATION.cff says, for BibTeX."
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    fact = {key: value.strip(' "') for key, value in re.findall(r"^[ -]*([\w-]+): (.*)$", text, re.M)}
    lines = [
        "```bibtex",
        "@software{tinygpt,",
        f"  author  = {{{{{fact['name']}}}}},",
        f"  title   = {{{fact['title']}}},",
        f"  version = {{{fact['version']}}},",
        f"  year    = {{{fact['date-released'][:4]}}},",
        f"  url     = {{{fact['url']}}},",
        "}",
        "```",
    ]
    return "\n".join(lines)


def with_written_parts(source: str) -> str:
    "A cell of the index with its table of chapters and its citation as they are today."
    source = CHAPTERS.sub(lambda _: chapters_table(), source)
    source = STEP_TABLE.sub(lambda _: step_table(), source)
    return CITATION.sub(lambda _: citation(), source)


def with_header(source: str, line: str, kind: re.Pattern = HEADER) -> str:
    "The title cell with this line of its kind, which comes after the `> ...` line."
    source = re.sub(r"\n{3,}", "\n\n", kind.sub("", source)).strip()
    lines = source.splitlines()
    quote = next(i for i, text in enumerate(lines) if text.startswith("> "))
    rest = "\n".join(lines[quote + 1 :]).strip()
    return "\n".join([*lines[: quote + 1], "", line, "", rest]).rstrip()


def seconds_in(source: str) -> int:
    found = HEADER.search(source)
    return int(found[1]) if found else 0


def header_problems(path: Path, facts: dict):
    "Whether the line under the title is the one that `write_headers` would write."
    title = read(path).cells[0].source
    line = header_line(path, facts[path], seconds_in(title))
    if not seconds_in(title) or line not in title:
        yield f"{path.name}: the line under its title is not up to date (run `make export`)"


def with_seconds(source: str, measured: float) -> str:
    "The title cell with the seconds of a run, unless those it has are about right: machines differ."
    before, after = seconds_in(source), max(5, 5 * round(measured / 5))
    if before and 2 / 3 <= measured / before <= 1.5:
        return source
    return re.sub(r"\b\d+ seconds to run", f"{after} seconds to run", source, count=1)


# ---- a page that asks for a guess does not show the answer: JupyterLab hides it until the cell is run

ASKS = re.compile(r"\*\*Before you (?:run it|look):\*\*")


def answers(nb) -> set[str]:
    "Ids of the cells whose outputs answer a *Before you run it*: from the question to the next text."
    found, asked, answered = set(), False, False
    for cell in nb.cells:
        if cell.cell_type == "code":
            if asked and cell.outputs:
                found.add(cell.id)
                answered = True
        elif ASKS.search(cell.source):
            asked, answered = True, False
        elif answered:
            asked = False
    return found


def with_answers_hidden(nb):
    "The notebook, with the outputs of these cells hidden, and of no others."
    hide = answers(nb)
    for cell in nb.cells:
        cell.metadata.pop("jupyter", None)
        if cell.id in hide:
            cell.metadata["jupyter"] = {"outputs_hidden": True}
    return nb


def answer_problems(path: Path):
    "Whether the outputs are hidden that `write_headers` would hide."
    nb = read(path)
    if with_answers_hidden(nbformat.from_dict(nb)) != nb:
        yield f"{path.name}: hides other outputs than the answers to its questions (run `make export`)"


def write_headers() -> None:
    """Write the line under the title of every page; the seconds stay (`run --write` measures them).

    In the index, the table of chapters, the way of a step and the citation too. Answers to questions are
    hidden. All come out as Jupyter writes them.
    """
    facts = page_facts()
    for path in [ROOT / "nbs/index.ipynb", *facts]:
        before = path.read_text(encoding="utf-8")
        nb = nbformat.reads(before, as_version=4)
        title = nb.cells[0].source
        if path in facts:
            nb.cells[0].source = with_header(title, header_line(path, facts[path], seconds_in(title)))
            with_answers_hidden(nb)
        else:
            nb.cells[0].source = with_header(title, doors_line(), DOORS)
            for cell in nb.cells:
                if cell.cell_type == "markdown":
                    cell.source = with_written_parts(cell.source)
        if notebook_text(nb) != before:
            path.write_text(notebook_text(nb), encoding="utf-8", newline="\n")


def notebook_text(nb) -> str:
    "The notebook as Jupyter writes it: a line of source, a line of the file, so that a diff can be read."
    return nbformat.writes(nb, version=4).rstrip("\n") + "\n"
