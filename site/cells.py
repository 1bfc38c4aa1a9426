"""A notebook, dressed for the site: the one place where the site changes what a notebook holds.

It works on a copy, as nbformat reads it. Cells that are exported get a badge that leads to the
reference; imports and the checks of exercises are folded; pictures get words for those who cannot
see them; a chapter carries the list of its side pages.
"""

import ast
import os
import re
from functools import cache
from pathlib import Path

import nbformat
import pages
from nbformat.v4 import new_markdown_cell

DIRECTIVE = re.compile(r"^#\| .*\n?", re.M)  # nbdev's


def dress(nb, path: Path, links: str = "", side_pages=()):
    """A copy of the notebook at `path` as Sphinx is to read it.

    `links` is a line for the head of the page; `side_pages` are rows of the index.
    """
    nb = nbformat.from_dict(nb)
    nb.metadata["language_info"] = {"name": "python"}  # nbdev_clean takes it out; the colors need it
    module = pages.module_in(nb)
    cells, above = [], ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            above = last_heading(cell.source) or above
            cells.append(cell)
        elif not cell.source.startswith("#| default_exp"):
            cells += dress_code(cell, module, above)
    cells[0].source = dress_title(cells[0].source, links)
    if side_pages:
        cells.append(new_markdown_cell(toctree(side_pages, path.parent), id="side-pages"))
    nb.cells = cells
    return nb


def anchor(title: str) -> str:
    "The anchor of a heading as Jupyter makes it, so that the links in the notebooks work."
    return re.sub(r'["<>&]', "", title).replace(" ", "-")


def own_links(text: str) -> str:
    "Links of a text to its own headings: written as GitHub's anchors, which are lower case, made the site's."
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-").lower(): anchor(title) for title in titles}
    return re.sub(r"\]\(#([^)]+)\)", lambda link: f"](#{anchors.get(link[1], link[1])})", text)


def dress_title(source: str, links: str) -> str:
    "The title cell with names for its parts, which style.css looks for, and the line of links."
    source = re.sub(r"^> ", "{.lead}\n> ", source, count=1, flags=re.M)
    head = pages.HEADER.search(source)
    if not head:
        return source
    facts = head[0].strip("*")
    return source.replace(head[0], f"{{.page-facts}}\n{facts}\n\n{{.page-links}}\n{links}")


def toctree(rows, folder: Path, caption: str = "") -> str:
    "A list of pages for the sidebar, as MyST writes it; it does not show on the page."
    lines = [f"{title_of(row)} <{relative(row.path, folder)}>" for row in rows]
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["```{toctree}", *options, "", *lines, "```"])


@cache
def title_of(row: pages.Row) -> str:
    "What the sidebar calls a page: a chapter by its number and title, others with their label."
    if row.label != "core":
        return f"{row.name.replace('`', '')} ({row.label})"
    title = nbformat.read(row.path, as_version=4).cells[0].source.splitlines()[0]
    return f"{row.number} {title.removeprefix('# ').split(':')[0]}"


def relative(path: Path, folder: Path) -> str:
    return os.path.relpath(path.with_suffix(""), folder).replace(os.sep, "/")


def dress_code(cell, module: str | None, above: str) -> list:
    "The cells that stand for a code cell: itself, with a badge before it where it is exported."
    exported = "#| export" in cell.source
    drawing = "#| code-fold: true" in cell.source or (has_picture(cell) and only_draws(cell.source))
    cell.source = DIRECTIVE.sub("", cell.source).strip("\n")
    if has_picture(cell):
        cell.metadata["mystnb"] = {"image": {"alt": alt_text(cell.source, above)}}
    if is_imports(cell.source) and not cell.outputs:
        fold(cell, "Imports of the module" if exported else "Imports", "hide-input")
    elif found := re.fullmatch(r"ex(\d+)-check", cell.id):
        fold(cell, f"The check of exercise {found[1]}", "hide-cell")
    elif drawing:
        fold(cell, "Code of the picture", "hide-input")
    elif exported and (names := defined_names(cell.source)):
        target = f"tinygpt.{module}.{names[0]}"
        badge = f"{{.badge}}\n{{py:obj}}`tinygpt.{module} <{target}>`"
        return [new_markdown_cell(badge, id=f"{cell.id}-badge"[:64]), cell]
    return [cell]


def fold(cell, prompt: str, tag: str):
    cell.metadata["tags"] = [tag]
    cell.metadata.setdefault("mystnb", {}).update(code_prompt_show=prompt, code_prompt_hide=prompt)


def is_imports(source: str) -> bool:
    "Only imports, and perhaps settings after them, such as `plot_style()`."
    nodes = ast.parse(source).body
    kinds = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes]
    return sum(kinds) > len(nodes) / 2 and not defined_functions(nodes)


DRAWS = re.compile(r"\bax\b|\baxe?s\b|\bfig\b|\bplt\.|^\s*[\])}]")


def only_draws(source: str) -> bool:
    "Eight lines or more, most of them matplotlib's, and nothing printed or checked: its picture says it all."
    lines = source.splitlines()
    if len(lines) < 8 or re.search(r"\bprint\(|^\s*assert\b", source, re.M):
        return False
    return sum(bool(DRAWS.search(line)) for line in lines) >= 0.6 * len(lines)


def defined_functions(nodes) -> list:
    return [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def defined_names(source: str) -> list[str]:
    "Public names that a cell defines at its top: functions, classes, constants."
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.append(node.targets[0].id)
    return [name for name in names if not name.startswith("_")]


# ---- words for pictures


def has_picture(cell) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def last_heading(source: str) -> str:
    found = re.findall(r"^#+ +(.+)$", source, re.M)
    return found[-1] if found else ""


TITLES = ("suptitle", "title", "set_title")
AXES = {
    "xlabel": "x",
    "set_xlabel": "x",
    "supxlabel": "x",
    "ylabel": "y",
    "set_ylabel": "y",
    "supylabel": "y",
}


def alt_text(source: str, above: str) -> str:
    "What a picture shows, in the words of the code that draws it: its titles and its axes."
    said = list(what_is_set(ast.parse(source)))
    titles = [text for name in TITLES for called, text in said if called == name and text]
    axes = [f"{AXES[called]}: {text}" for called, text in said if called in AXES and text]
    if not titles:
        return f"Picture in the section “{above}”"
    return "; ".join(dict.fromkeys(["Plot: " + ", ".join(dict.fromkeys(titles)), *axes]))


def what_is_set(tree: ast.Module):
    "(name, text) for `ax.set_title(text)`, `plt.xlabel(text)`, `ax.set(title=text)`, from top to bottom."
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: call.lineno):
        if call_name(call) == "set":
            yield from ((keyword.arg, words(keyword.value)) for keyword in call.keywords)
        elif call.args:
            yield call_name(call), words(call.args[0])


def call_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def words(node: ast.expr) -> str:
    "A string of the source; … for what is filled in when it runs; nothing where it is no string."
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
        return " ".join("".join(parts).split())
    return ""
