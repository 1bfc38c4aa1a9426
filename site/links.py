"""Links that the notebooks do not write: "chapter 12", `function` names, files of the repository."""

import posixpath
import re
from functools import cache

import cells
import nbformat
import pages
import reference
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

CHAPTERS = re.compile(r"\b[Cc]hapter \d\d\b|\b[Cc]hapters \d\d(?:(?:, | and |, and | or | to )\d\d)*\b")
NO_LINKS_IN = (nodes.reference, addnodes.pending_xref, nodes.title, nodes.literal, nodes.literal_block)


@cache
def chapters() -> dict[str, str]:
    "Number -> Sphinx's name of the chapter's page."
    rows = [row for row in pages.contents() if row.label == "core"]
    return {row.number: docname(row.path) for row in rows}


def docname(path) -> str:
    return path.relative_to(pages.ROOT).with_suffix("").as_posix()


def chapter_links(text: str, here: str) -> list[tuple[str, str | None]]:
    "The text in pieces, each with the page that it leads to, or None; a chapter does not link to itself."
    pieces, end = [], 0
    for found in CHAPTERS.finditer(text):
        several = len(re.findall(r"\d\d", found[0])) > 1
        for number in re.finditer(r"\d\d" if several else r".+", found[0]):
            target = chapters().get(number[0][-2:])
            if target and target != here:
                start = found.start() + number.start()
                pieces += [(text[end:start], None), (number[0], target)]
                end = found.start() + number.end()
    pieces.append((text[end:], None))
    return [piece for piece in pieces if piece[0]]


@cache
def exported() -> dict[str, list[str]]:
    "What a name in prose may mean: adamw_update, GPTConfig.llama, tinygpt.adamw -> full names."
    found = {}
    for module in reference.modules().values():
        full = f"tinygpt.{module.name}"
        found.setdefault(full, []).append(full)
        for item in module.items:
            for part in (item, *item.members):
                found.setdefault(part.name, []).append(f"{full}.{part.name}")
                found.setdefault(f"{full}.{part.name}", []).append(f"{full}.{part.name}")
    return found


def meant_by(name: str, module: str | None, local: set[str]) -> str | None:
    """The full name that `name` in a page's prose stands for, or None.

    `module` is the page's own; `local` are names that the page defines for itself, which win.
    A plain word, such as `train`, is a name only where it is written as a call.
    """
    is_call, name = name.endswith("()"), name.removesuffix("()")
    if name in local:
        return None
    candidates = exported().get(name, [])
    own = [full for full in candidates if full == f"tinygpt.{module}.{name}"]
    is_plain_word = name.islower() and "_" not in name and "." not in name
    if is_plain_word and not is_call and not own:
        return None
    chosen = own or candidates
    return chosen[0] if len(chosen) == 1 else None


def names_of(here: str) -> tuple[str | None, set[str]]:
    "The module of a page, and the names that it defines without exporting them."
    nb = nbformat.read(pages.ROOT / f"{here}.ipynb", as_version=4)
    code = [cell.source for cell in nb.cells if cell.cell_type == "code" and "#| export" not in cell.source]
    return pages.module_in(nb), {name for source in code for name in cells.defined_names(source)}


class BookLinks(SphinxTransform):
    default_priority = 500  # after the parser, before references are looked up

    def apply(self, **kwargs):
        here = self.env.docname
        if here.startswith("nbs/"):
            self.link_chapters(here)
            self.link_names(here)
        self.link_files(here)

    def link_chapters(self, here: str):
        for text in list(self.document.findall(nodes.Text)):
            if inside(text, (*NO_LINKS_IN, nodes.raw, nodes.math, nodes.math_block)):
                continue
            pieces = chapter_links(text.astext(), here)
            if len(pieces) > 1 or pieces[:1] and pieces[0][1]:
                new = [
                    self.to_page(words, target) if target else nodes.Text(words) for words, target in pieces
                ]
                text.parent.replace(text, new)

    def to_page(self, words: str, target: str) -> addnodes.pending_xref:
        return addnodes.pending_xref(
            "",
            nodes.inline("", words),
            refdomain="std",
            reftype="doc",
            reftarget=f"/{target}",
            refdoc=self.env.docname,
            refexplicit=True,
        )

    def link_names(self, here: str):
        module, local = names_of(here)
        for literal in list(self.document.findall(nodes.literal)):
            target = meant_by(literal.astext(), module, local)
            if target and not inside(literal.parent, NO_LINKS_IN):
                link = addnodes.pending_xref(
                    "", refdomain="py", reftype="obj", reftarget=target, refdoc=here, refexplicit=True
                )
                literal.replace_self(link)
                link += literal

    def link_files(self, here: str):
        "What is a file of the repository, but no page of the site, is read there."
        for link in list(self.document.findall(addnodes.pending_xref)):
            if link.get("reftype") != "myst" or link.get("refdomain"):
                continue
            path = posixpath.normpath(posixpath.join(posixpath.dirname(here), link["reftarget"]))
            if (pages.ROOT / path).exists():
                url = f"{self.config.repository_files}/{path}"
                link.replace_self(nodes.reference("", "", *link.children, refuri=url, internal=False))


def inside(node, kinds) -> bool:
    while node is not None:
        if isinstance(node, kinds):
            return True
        node = node.parent
    return False


def setup(app):
    app.add_config_value("repository_files", "", "env")
    app.add_transform(BookLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
