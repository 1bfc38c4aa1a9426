"""The web site: what it makes of a notebook and of a source, and a small book built by Sphinx."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "site")]
import cells  # noqa: E402
import check  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402

MISSING = [name for name in ("sphinx", "myst_nb", "furo") if find_spec(name) is None]
needs_sphinx = pytest.mark.skipif(
    bool(MISSING), reason=f"needs the docs extra: {', '.join(MISSING)} not installed"
)
PICTURE = new_output("display_data", {"image/png": "aGVsbG8="})


def dressed(*others):
    facts = "*Core · 5 minutes to read, 5 seconds to run · needs nothing · needed by nothing*"
    title = f"# Title\n\n> one line\n\n{facts}"
    notebook = new_notebook(cells=[new_markdown_cell(title, id="title"), *others])
    return cells.dress(notebook, ROOT / "nbs/11_schedule.ipynb", "[links](x.md)")


# ---- what becomes of a notebook


def test_a_notebook_is_dressed_in_a_copy_and_an_exported_cell_gets_a_badge_that_names_what_it_defines():
    code = new_code_cell("#| export\ndef cosine(step):\n    return step", id="cosine")
    original = nbformat.from_dict(code)
    nb = dressed(
        new_code_cell("#| default_exp schedule", id="default-exp"), code, new_code_cell("1 + 1", id="sum")
    )
    assert code == original
    badge, exported, plain = nb.cells[1:]
    assert "{py:obj}`tinygpt.schedule <tinygpt.schedule.cosine>`" in badge.source
    assert exported.source == "def cosine(step):\n    return step"
    assert plain.source == "1 + 1" and "tags" not in plain.metadata


def test_an_anchor_is_jupyters_and_stands_between_quotes():
    assert cells.anchor('What people say: "no"') == "What-people-say:-no"


def test_a_texts_links_to_its_own_headings_are_githubs_and_become_the_sites():
    text = "[a](#text-and-data) [b](#answers-rewards) [c](x.md#text)\n## Text and data\n## Answers, rewards\n"
    linked = cells.own_links(text).splitlines()[0]
    assert linked == "[a](#Text-and-data) [b](#Answers,-rewards) [c](x.md#text)"


def test_imports_and_checks_are_folded_and_the_stub_and_the_code_are_not():
    nb = dressed(
        new_code_cell("import math\n\nimport torch\n\nplot_style()", id="nb-imports"),
        new_code_cell("import math\nimport os\n\n\ndef area(r):\n    return math.pi * r * r", id="area"),
        new_code_cell("def f(x): ...  # your code", id="ex2-stub"),
        new_code_cell("@check_exercise(f)\ndef _(f):\n    assert f(1)", id="ex2-check"),
    )
    folded = {c.id: c.metadata.get("tags") for c in nb.cells if c.cell_type == "code"}
    assert folded == {
        "nb-imports": ["hide-input"],
        "area": None,
        "ex2-stub": None,
        "ex2-check": ["hide-cell"],
    }
    assert nb.cells[-1].metadata["mystnb"]["code_prompt_show"] == "The check of exercise 2"


def test_code_that_only_draws_is_folded_and_code_that_counts_or_checks_is_not():
    lines = ["fig, ax = plt.subplots()", *[f"ax.plot([{i}])" for i in range(7)], "plt.show()"]
    drawing, counting = "\n".join(lines), "\n".join(["x = 1"] * 9 + lines)
    sources = {
        "drawing": drawing,
        "checking": drawing + "\nassert ax.lines",
        "printing": drawing + "\nprint(len(ax.lines))",
        "counting": counting,
        "short": "ax.plot([1])\nplt.show()",
        "asked": "#| code-fold: true\n" + counting,
        "quiet": drawing,
    }
    made = [new_code_cell(code, id=name, outputs=[PICTURE]) for name, code in sources.items()]
    made[-1].outputs = []  # no picture comes out
    nb = dressed(*made)
    folded = {c.id for c in nb.cells if "hide-input" in c.metadata.get("tags", [])}
    assert folded == {"drawing", "asked"}
    assert all("code-fold" not in c.source for c in nb.cells)


def test_the_head_of_a_page_has_its_facts_and_its_links():
    head = dressed().cells[0].source
    assert "{.page-facts}\nCore · 5 minutes to read" in head
    assert head.endswith("{.page-links}\n[links](x.md)")


def test_a_picture_is_told_by_its_titles_and_axes_or_by_its_section():
    source = 'ax.set(title="Loss", xlabel="step")\nfig.suptitle(f"{n} runs")\nax.set_ylabel("nats")'
    assert cells.alt_text(source, "above") == "Plot: … runs, Loss; x: step; y: nats"
    assert cells.alt_text("show(x)", "Depth") == "Picture in the section “Depth”"
    nb = dressed(
        new_markdown_cell("## Depth", id="depth"), new_code_cell("show(x)", id="show", outputs=[PICTURE])
    )
    assert nb.cells[-1].metadata["mystnb"]["image"]["alt"] == "Picture in the section “Depth”"


def test_every_stored_picture_of_the_book_gets_words():
    for path in pages.reading_order():
        nb = nbformat.read(path, as_version=4)
        for cell in cells.dress(nb, path).cells:
            if cell.cell_type == "code" and cells.has_picture(cell):
                assert len(cell.metadata["mystnb"]["image"]["alt"]) > 10, f"{path.name}: {cell.id}"


# ---- what becomes of a source

SOURCE = '''
"""About."""

__all__ = ["add", "Model", "LIMIT"]

LIMIT = 1e-8  # the least

# %% a cell
def add(
    a: int,  # the first
    # the second, which has
    # two lines
    b: float = 1e-3,
    *,
    c, d=None,  # the last
) -> int:
    "Add."

def hidden(): ...

@dataclass
class Model:
    "A model."

    width: int = 4
    """How wide."""
    depth: int = 2  # how deep

    @property
    def size(self) -> int:
        "Its size."

    def _private(self): ...
'''


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "thing.py"
    path.write_text(SOURCE)
    return reference.read_module("thing", path)


def test_a_source_is_read_without_importing_it(module):
    assert module.doc == "About." and [item.name for item in module.items] == ["LIMIT", "add", "Model"]
    limit, add, model = module.items
    assert (limit.signature, limit.doc) == ("1e-8", "the least")
    assert add.signature == "(a, b=1e-3, *, c, d=None) -> int" and add.doc == "Add."
    assert SOURCE.splitlines()[add.lines[0] - 1] == "def add("
    rows = [(p.name, p.type, p.default, p.meaning) for p in add.parameters]
    assert rows == [
        ("a", "int", "", "the first"),
        ("b", "float", "1e-3", "the second, which has two lines"),
        ("c", "", "", ""),
        ("d", "", "None", "the last"),
    ]
    assert [(p.name, p.meaning) for p in model.parameters] == [("width", "How wide."), ("depth", "how deep")]
    assert [(member.name, member.kind) for member in model.members] == [("Model.size", "property")]


def test_a_reference_page_has_a_row_for_each_parameter(module):
    page = reference.module_page(module, "links")
    assert "{py:function} add(a, b=1e-3, *, c, d=None) -> int" in page
    assert "| `b` | `float = 1e-3` | the second, which has two lines |" in page
    assert "{py:property} Model.size" in page and "hidden" not in page


def test_words_for_markdown_mean_themselves_but_code_stays_code():
    assert reference.escaped("a*b_c `x_y` <z>") == r"a\*b\_c `x_y` \<z\>"


def test_every_exported_name_of_the_package_is_in_the_reference():
    for name, module in reference.modules().items():
        tree = reference.ast.parse(module.path.read_text(encoding="utf-8"))
        assert {item.name for item in module.items} == set(reference.public_names(tree)), name


# ---- the look at the result


def test_the_check_sees_dead_links_pictures_without_words_and_other_hosts(tmp_path):
    (tmp_path / "a.html").write_text('<p id="here"></p><a href="b.html#there">b</a><a href="#here">a</a>')
    (tmp_path / "b.html").write_text('<p id="there"></p><img src="p.png" alt="words">')
    (tmp_path / "p.png").write_text("")
    assert check.problems(tmp_path) == []
    (tmp_path / "a.html").write_text('<a href="b.html#nowhere">b</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<img src="p.png"><script src="https://cdn.example.org/x.js"></script>')
    assert check.problems(tmp_path) == [
        "a.html: b.html#nowhere: no such place on the page",
        "a.html: c.html: no such file",
        "b.html: a picture without words: p.png",
        "b.html: loads https://cdn.example.org/x.js from another host",
    ]


# ---- with Sphinx


@needs_sphinx
def test_the_sidebar_and_previous_and_next_follow_the_index():
    import navigation

    order = navigation.neighbors()
    spine, page = ["index", navigation.START], navigation.START
    while page := order[page][1]:
        spine.append(page)
    cores = [row.path.stem for row in pages.contents() if row.label == "core"]
    assert [name.split("/")[-1] for name in spine if "/more/" not in name][2:] == cores
    assert all(order[page][0] == before for before, page in zip(spine, spine[1:]))
    assert set(order) == {"index", navigation.START} | {navigation.docname(p) for p in pages.reading_order()}
    assert order[navigation.START] == ("index", "nbs/01_floats")  # no tool comes between
    outside = [
        row.name for part, tops in navigation.parts() if not part.startswith("Part ") for row, _ in tops
    ]
    assert outside[0] == "learn" and outside[-1] == "support"
    before, after = order["nbs/more/10_adamw_more"]
    assert (before, after) == ("nbs/10_adamw", "nbs/11_schedule")
    tree = '<a class="reference internal" href="x.html">adamw: more (deeper)</a>'
    assert 'more <span class="label">deeper</span></a>' in navigation.with_labels(tree)


@needs_sphinx
def test_the_front_page_has_the_bars_of_the_picture():
    import build

    front = build.ladder()
    assert front["ladder"][0] == dict(
        name="nanoGPT's settings", seconds=front["ladder"][0]["seconds"], part=1, noise=False
    )
    paid = [rung["part"] for rung in front["ladder"] if not rung["noise"]]
    assert paid == sorted(paid, reverse=True) and len(paid) < len(front["ladder"])
    first, last = (int(front["ladder"][i]["seconds"]) for i in (0, -1))  # rounded to whole seconds
    times = float(front["times"])  # rounded to a tenth
    assert (first - 0.5) / (last + 0.5) - 0.05 < times < (first + 0.5) / (last - 0.5) + 0.05


@needs_sphinx
def test_a_page_with_formulas_says_so_in_the_manifest_of_the_ebook(tmp_path):
    from types import SimpleNamespace

    from ebook import PAGE, Ebook

    (tmp_path / "a.xhtml").write_text("<math></math>")
    (tmp_path / "b.xhtml").write_text("<p></p>")
    line = '<item id="x" href="{}.xhtml" media-type="application/xhtml+xml" />'
    here = SimpleNamespace(outdir=tmp_path)
    a, b = (PAGE.sub(lambda item: Ebook.with_properties(here, item), line.format(n)) for n in "ab")
    assert a == line.format("a").replace(" />", ' properties="mathml" />') and b == line.format("b")


@needs_sphinx
def test_a_number_of_a_chapter_is_a_link_but_not_in_the_chapter_itself():
    from links import chapter_links

    assert chapter_links("see chapter 10's step", "nbs/11_schedule") == [
        ("see ", None),
        ("chapter 10", "nbs/10_adamw"),
        ("'s step", None),
    ]
    assert chapter_links("chapters 10 and 11", "nbs/10_adamw") == [
        ("chapters 10 and ", None),
        ("11", "nbs/11_schedule"),
    ]
    assert chapter_links("chapter 99, 10 chapters", "nbs/11_schedule") == [("chapter 99, 10 chapters", None)]


@needs_sphinx
def test_a_name_in_prose_leads_to_what_it_means_there():
    from links import meant_by

    assert meant_by("adamw_update", None, set()) == "tinygpt.adamw.adamw_update"
    assert meant_by("adamw_update", None, {"adamw_update"}) is None  # the page has its own
    assert meant_by("prepare", "data.tokens", set()) == "tinygpt.data.tokens.prepare"
    assert meant_by("parse_arguments", None, set()) is None  # several commands have one
    assert meant_by("interval", None, set()) is None  # a plain word
    assert meant_by("interval()", None, set()) == "tinygpt.support.interval"


@needs_sphinx
def test_formulas_become_mathml():
    from formulas import to_mathml

    assert "<msqrt>" in to_mathml(r"\sqrt{v}") and "…" in to_mathml(r"1, \dots, n")
    ElementTree.fromstring(to_mathml(r"\log x"))  # an EPUB is XML


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    "The HTML of a small page that Sphinx has built with the site's settings, in a book of three pages."
    folder = tmp_path_factory.mktemp("book")
    nb = dressed(
        new_code_cell("#| default_exp schedule", id="default-exp"),
        new_markdown_cell("## Warm up\n\nAs in chapter 10, `adamw_update`: $x^2$.", id="text"),
        new_code_cell("#| export\ndef cosine(step):\n    return step", id="cosine"),
        new_code_cell("import math\nimport os", id="imports"),
        new_code_cell('plt.title("Up")', id="plot", outputs=[PICTURE]),
    )
    nb.cells[0].source = nb.cells[0].source.replace("[links](x.md)", "[up](#Warm-up)")
    sources = {
        "index.md": "# Book\n\n```{toctree}\nnbs/11_schedule\nnbs/10_adamw\n```\n",
        "nbs/10_adamw.ipynb": nbformat.writes(new_notebook(cells=[new_markdown_cell("# AdamW", id="a")])),
        "nbs/11_schedule.ipynb": nbformat.writes(nb),
        "reference/adamw.md": "# adamw\n\n```{py:function} adamw_update()\n:module: tinygpt.adamw\n```\n",
    }
    for name, text in sources.items():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "source" / name).write_text(text, encoding="utf-8")
    options = ["-b", "html", "-c", ROOT / "site", "-d", folder / "doctrees", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, folder / "source", folder / "html"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (folder / "html/nbs/11_schedule.html").read_text(encoding="utf-8")


@needs_sphinx
@pytest.mark.parametrize(
    "part",
    [
        '<a class="reference internal" href="10_adamw.html"><span class="doc">chapter 10</span></a>',
        'href="../reference/adamw.html#tinygpt.adamw.adamw_update"',
        "<msup>",
        '<p class="badge">',
        '<details class="fold"><summary>Imports</summary>',
        'alt="Plot: Up"',
        'href="#warm-up"',
        '<section id="warm-up">',
        '<p class="page-facts">Core',
    ],
)
def test_a_page_has_its_links_badges_folds_formulas_and_words_for_pictures(page, part):
    assert part in page


@needs_sphinx
def test_a_page_loads_nothing_from_another_host(page, tmp_path):
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert [problem for problem in check.problems(tmp_path) if "another host" in problem] == []
