"""Sphinx's settings. `python site/build.py` prepares the sources and calls Sphinx."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]

import pages  # noqa: E402
from myst_nb.sphinx_ import HideCodeCellNode  # noqa: E402
from reference import places  # noqa: E402

facts = pages.settings()

project, author, language = facts["title"], facts["author"], "en"
version = release = facts["version"]
copyright = facts["copyright"]
extensions = [
    "myst_nb",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    "sphinx_sitemap",
    "ebook",
    "formulas",
    "links",
    "navigation",
]

# the notebooks: their stored outputs are shown, nothing is run
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4

myst_heading_slug_func = "cells.anchor"

html_theme = "furo"
html_title = project
html_baseurl = facts["doc_host"] + facts["doc_baseurl"] + "/"
html_static_path = [str(HERE / "style.css")]
html_favicon = str(HERE / "icon.svg")
html_css_files = ["style.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_permalinks_icon = "#"
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
add_module_names = False
toc_object_entries_show_parents = "hide"

ogp_site_url, ogp_social_cards = html_baseurl, {"enable": False}
ogp_image, ogp_image_alt = "_images/curve.png", "The loss of a GPT that trains for a minute on a laptop"
sitemap_url_scheme = "{link}"
sitemap_show_lastmod = False
repository_files = facts["files_url"]

epub_title, epub_show_urls, epub_tocdepth = f"{project}: {facts['description']}", "no", 2
epub_tocscope = "includehidden"
epub_use_index = html_domain_indices = False  # the reference has both
epub_css_files = ["style.css"]
epub_uid = epub_identifier = project  # the two have to be equal
epub_description, epub_contributor = facts["description"], author
source_links = places()


def linkcode_resolve(domain, info):
    "Where the source of an object stands in the repository."
    place = source_links.get((info["module"], info["fullname"]))
    return place and f"{repository_files}/{place}"


def visit_fold(translator, node):
    "A folded cell; the words of its summary say what is in it."
    translator.body.append(f'<details class="fold"><summary>{node["prompt_show"]}</summary>\n')


def depart_fold(translator, node):
    translator.body.append("</details>\n")


def setup(app):
    app.add_node(HideCodeCellNode, override=True, html=(visit_fold, depart_fold))
