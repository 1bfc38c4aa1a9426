"""Formulas become MathML while the site is built: no script, and nothing to load from elsewhere."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

LOG = logging.getLogger(__name__)

# what TeX has, and docutils or an EPUB has not; a size may be lost
SYNONYMS = {r"\dots": r"\ldots", r"\Big": "", r"\tfrac": r"\frac"}


def to_mathml(tex: str, as_block: bool = False) -> str:
    "MathML of a formula; MathError where docutils cannot read it."
    for name, known in SYNONYMS.items():
        tex = re.sub(re.escape(name) + r"(?![a-zA-Z])", lambda _: known, tex)
    # a name that HTML knows and an EPUB, which is XML, does not
    return tex2mathml(tex, as_block=as_block).replace("&ApplyFunction;", "&#8289;")


def visit(translator, node, as_block: bool):
    tex = node.astext()
    try:
        formula = to_mathml(tex, as_block)
    except MathError as error:
        LOG.warning("no MathML of %r: %s", tex, error, location=node)
        formula = f"<code>{translator.encode(tex)}</code>"
    tag = "div" if as_block else "span"
    translator.body.append(f'<{tag} class="math">{formula}</{tag}>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer(
        "mathml",
        (lambda translator, node: visit(translator, node, as_block=False), None),
        (lambda translator, node: visit(translator, node, as_block=True), None),
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}
