"""The order of the pages on the site: the sidebar, and previous and next. The index is their source."""

import re
from html import escape
from itertools import groupby

import cells
import pages
from links import docname

START, START_TITLE = "nbs/index", "00 A GPT in one minute"


def chapters_of(rows) -> list[tuple[pages.Row, list[pages.Row]]]:
    "The pages of a part: each chapter with its side pages; a page without a chapter stands alone."
    cores = {row.number: row for row in rows if row.label == "core"}
    side = [row for row in rows if row.label != "core" and row.number in cores]
    tops = [row for row in rows if row not in side]
    return [(top, [row for row in side if row.number == top.number]) for top in tops]


def parts() -> list[tuple[str, list[tuple[pages.Row, list[pages.Row]]]]]:
    """The parts as the index has them, but for the pages outside of them.

    The index lists the tools first, because other pages import them; a reader needs them last. And the page
    with the exercises comes before the pages about the program that judges them.
    """
    rows = pages.contents()
    chapters = [row for row in rows if row.part.startswith("Part ")]
    others = [row for row in rows if row not in chapters]
    others.sort(key=lambda row: (not row.part.startswith("Appendix"), row.label == "reference"))
    return [
        (part, chapters_of(list(found))) for part, found in groupby(chapters + others, lambda row: row.part)
    ]


def side_pages() -> dict[str, list[pages.Row]]:
    "Chapter -> its side pages."
    return {docname(top.path): rows for _, chapters in parts() for top, rows in chapters if rows}


def neighbors() -> dict[str, tuple[str | None, str | None]]:
    """Page -> (previous, next). Chapters follow each other.

    A side page leads back to its chapter and on to the next side page, the last to the next chapter.
    """
    tops = [(docname(top.path), [docname(row.path) for row in rows]) for _, cs in parts() for top, rows in cs]
    spine = ["index", START, *(top for top, _ in tops)]
    found = {page: (before, after) for before, page, after in zip([None, *spine], spine, [*spine[1:], None])}
    for top, side in tops:
        for page, after in zip(side, [*side[1:], found[top][1]]):
            found[page] = (top, after)
    return found


def titles() -> dict[str, str]:
    "Page -> what the sidebar calls it."
    named = {docname(row.path): cells.title_of(row) for row in pages.contents()}
    return {"index": "tinygpt", START: START_TITLE, **named}


def with_labels(html: str) -> str:
    "The sidebar with the label of a side page as a mark of its own."
    return re.sub(r" \((deeper|reference)\)</a>", r' <span class="label">\1</span></a>', html)


def on_page(app, pagename, templatename, context, doctree):
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = with_labels(context["furo_navigation_tree"])
    order, names = app.book_order
    for place, other in zip(("prev", "next"), order.get(pagename, ())):
        context[place] = other and {
            "link": app.builder.get_relative_uri(pagename, other),
            "title": escape(names[other]),
        }


def setup(app):
    app.book_order = neighbors(), titles()
    app.connect("html-page-context", on_page, priority=900)  # after Furo, which makes the tree
    return {"parallel_read_safe": True, "parallel_write_safe": True}
