"""Build the web site of the book from the stored outputs of its notebooks; no notebook is run.

python site/build.py          HTML into build/site/html; fails on any warning and on any dead link
python site/build.py --epub   the same as one EPUB file, build/site/epub/tinygpt.epub

Needs Python 3.11 and `pip install -e ".[docs]"` (or only what docs_requirements in settings.ini lists:
torch is not needed).
"""

import argparse
import base64
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]
if find_spec("sphinx") is None:
    sys.exit("Sphinx is not installed: `make site` installs it (Python 3.11 or later is needed)")

import cells  # noqa: E402
import check  # noqa: E402
import jinja2  # noqa: E402
import navigation  # noqa: E402
import nbformat  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402
from links import docname  # noqa: E402

BUILD = pages.ROOT / "build/site"
SOURCE = BUILD / "source"
TEXTS = ("CONTRIBUTING.md", "CHANGELOG.md", "EXPERIMENTS.md")

FILES = pages.settings()["files_url"]


# ---- sources for Sphinx, in the folders of the repository, so that all links in them keep their meaning


def write_sources():
    shutil.rmtree(SOURCE, ignore_errors=True)
    side = navigation.side_pages()
    for path in [pages.ROOT / "nbs/index.ipynb", *pages.reading_order()]:
        nb = nbformat.read(path, as_version=4)
        dressed = cells.dress(nb, path, page_links(path, pages.module_in(nb)), side.get(docname(path), ()))
        if docname(path) == navigation.START:
            dressed.cells[0].source = dressed.cells[0].source.replace("# tinygpt", "# A GPT in one minute", 1)
        write(f"{docname(path)}.ipynb", nbformat.writes(dressed))
    shutil.copytree(pages.ROOT / "nbs/images", SOURCE / "nbs/images")
    for name in TEXTS:
        write(name, cells.own_links((pages.ROOT / name).read_text(encoding="utf-8")))
    for module in reference.modules().values():
        write(f"reference/{module.name}.md", reference.module_page(module, module_links(module)))
    write("reference/index.md", reference_index())
    write("index.md", front_page())


def write(name: str, text: str):
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def page_links(path: Path, module: str | None) -> str:
    "Where a page's module is described, and where its notebook lies."
    links = [f"[Notebook on GitHub]({FILES}/{path.relative_to(pages.ROOT).as_posix()})"]
    if module:
        links.insert(0, f"Module [`tinygpt.{module}`](/reference/{module}.md)")
    return " · ".join(links)


def module_links(module: reference.Module) -> str:
    "Where a module comes from: its page, its source, its tests."
    tests = f"tests/test_{module.name.replace('__main__', 'command').replace('.', '_')}.py"
    source = module.path.relative_to(pages.ROOT).as_posix()
    name = f"{module.row.number} {module.row.name}".strip()
    links = [f"Made in [{name}](/{docname(module.row.path)}.ipynb)", f"[source]({FILES}/{source})"]
    links += [f"[tests]({FILES}/{tests})"] if (pages.ROOT / tests).exists() else []
    return " · ".join(links)


def reference_index() -> str:
    rows = [
        f"| [`tinygpt.{m.name}`](/reference/{m.name}.md) | {reference.escaped(m.doc)} |" for m in modules()
    ]
    tree = ["```{toctree}", ":hidden:", "", *(f"{m.name} <{m.name}>" for m in modules()), "```"]
    lead = "All modules, in the order of the book. Each page is made from the module's source."
    return "\n".join(
        ["# Reference", "", lead, "", "| module | what it holds |", "|---|---|", *rows, "", *tree]
    )


def modules() -> list[reference.Module]:
    return list(reference.modules().values())


# ---- the front page, with what the notebooks and the records show


def front_page() -> str:
    template = jinja2.Template(
        (HERE / "front.md").read_text(encoding="utf-8"), undefined=jinja2.StrictUndefined
    )
    core = [row for row in pages.contents() if row.label == "core"]
    return template.render(chapters=len(core), toctrees=toctrees(), **one_minute(), **ladder())


def one_minute() -> dict:
    "What the first page's training run printed, and its picture."
    nb = nbformat.read(pages.ROOT / "nbs/index.ipynb", as_version=4)
    outputs = [output for cell in nb.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    (picture,) = (o.data["image/png"] for o in outputs if "image/png" in o.get("data", {}))
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", printed).groups()
    path = SOURCE / "_static/curve.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base64.b64decode(picture))
    bits = re.search(r"([\d.]+) bits per byte", printed)[1]
    sample = " ".join(re.search(r"My fellow Americans,(.*)", printed, re.S)[1].split()[:35])
    return dict(bits=bits, loss_first=first, loss_last=last, curve="_static/curve.png", sample=sample)


PICTURE = re.compile(
    r"!\[([\d.]+) times less .*?seconds .*?: (.*)\. Within the noise: (.*)\.\]\(images/ladder\.png\)"
)


def ladder() -> dict:
    "The bars of the picture at the top of the index, whose words tools/picture.py takes from the record."
    nb = nbformat.read(pages.ROOT / "nbs/index.ipynb", as_version=4)
    times, bars, noise = PICTURE.search(nb.cells[0].source).groups()
    rungs = [bar.rsplit(" ", 1) for bar in bars.split(", ")]
    longest = int(rungs[0][1])
    in_noise = noise.split(", ")
    rows = [
        dict(name=name, seconds=s, part=round(int(s) / longest, 3), noise=name in in_noise)
        for name, s in rungs
    ]
    return dict(ladder=rows, times=times)


def toctrees() -> str:
    "The sidebar: the parts of the book, then the reference and the texts about the project."
    trees = [f"```{{toctree}}\n:hidden:\n\n{navigation.START_TITLE} <{navigation.START}>\n```"]
    trees += [
        cells.toctree([top for top, _ in chapters], pages.ROOT, caption=title)
        for title, chapters in navigation.parts()
    ]
    about = [
        "Reference of the modules <reference/index>",
        *(f"{n.split('.')[0].capitalize()} <{n}>" for n in TEXTS),
    ]
    trees.append("\n".join(["```{toctree}", ":hidden:", ":caption: The package", "", *about, "```"]))
    return "\n\n".join(trees)


# ---- Sphinx


def sphinx(builder: str) -> int:
    "Run Sphinx; every warning is an error. A fresh environment: warnings of unchanged pages count too."
    options = [
        "-b",
        builder,
        "-c",
        HERE,
        "-d",
        BUILD / f"doctrees-{builder}",
        "-E",
        "-W",
        "--keep-going",
        "-q",
    ]
    command = [sys.executable, "-m", "sphinx", *options, SOURCE, BUILD / builder]
    return subprocess.run([str(part) for part in command], cwd=pages.ROOT).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epub", action="store_true", help="one EPUB file instead of the site")
    args = parser.parse_args()
    write_sources()
    builder = "epub" if args.epub else "html"
    shutil.rmtree(BUILD / builder, ignore_errors=True)
    if status := sphinx(builder):
        return status
    if args.epub:
        return 0
    problems = check.problems(BUILD / "html")
    print(*problems, sep="\n", end="\n" if problems else "")
    count = len(list((BUILD / "html").rglob("*.html")))
    print(f"{count} pages in {os.path.relpath(BUILD / 'html')}: {len(problems) or 'no'} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
