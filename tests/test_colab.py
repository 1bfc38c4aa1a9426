"""Pages for Colab: the first cell, the links, and what a page needs beside the package."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import colab  # noqa: E402
import pages  # noqa: E402

MORE = ROOT / "nbs/more"


def test_a_page_begins_with_the_cell_that_installs_the_book_and_then_is_where_the_page_lies():
    nb = colab.for_colab(MORE / "03_data_stream.ipynb")
    first = nb.cells[0].source.splitlines()
    assert f"git clone -q --depth 1 {pages.settings()['git_url']} tinygpt" in nb.cells[0].source
    assert '%pip install -q -e ./tinygpt "pyarrow>=17"' in first and "constraints" not in nb.cells[0].source
    assert "%cd -q tinygpt/nbs/more" in first
    ast.parse("\n".join(line for line in first if not line.startswith(("%", "!"))))
    assert [c.id for c in nb.cells[1:]] == [
        c.id for c in pages.nbformat.read(MORE / "03_data_stream.ipynb", 4).cells
    ]


def test_what_a_page_needs_is_what_it_imports():
    assert colab.also_needed(ROOT / "nbs/10_adamw.ipynb") == []
    assert colab.also_needed(MORE / "03_data_chunks.ipynb") == ["pyarrow>=17", "zstandard>=0.22"]
    assert colab.also_needed(MORE / "learn.ipynb") == ["pytest>=8", "hypothesis>=6.100"]


def test_links_lead_to_pages_in_colab_and_to_files_in_the_repository():
    text = "[a](../10_adamw.ipynb#why) [b](https://arxiv.org) [c](../../EXPERIMENTS.md) [d](#here) "
    text += "![e](../images/ladder.png)"
    url = pages.settings()
    assert colab.with_links(text, MORE) == (
        f"[a]({url['colab_url']}/nbs/10_adamw.ipynb#why) [b](https://arxiv.org) "
        f"[c]({url['git_url']}/blob/main/EXPERIMENTS.md) [d](#here) "
        f"![e]({url['git_url']}/raw/main/nbs/images/ladder.png)"
    )


def test_a_page_is_written_where_its_link_leads_and_has_no_links_of_its_own_folder(tmp_path, monkeypatch):
    some = [ROOT / "nbs/index.ipynb", ROOT / "nbs/11_schedule.ipynb", MORE / "learn.ipynb"]
    monkeypatch.setattr(colab, "chapters", lambda: some)
    colab.write(tmp_path)
    for path in some:
        place = pages.colab_link(path).removeprefix(pages.settings()["colab_url"] + "/")
        first, *others = pages.nbformat.read(tmp_path / place, 4).cells
        assert "git clone" in first.source
        text = "\n".join(cell.source for cell in others if cell.cell_type == "markdown")
        assert not re.search(r"\]\((?!http|#|attachment:)", text)


@pytest.mark.skipif(os.name == "nt", reason="links need a right that Windows users often lack")
def test_a_fresh_python_has_the_requirements_and_nothing_else(tmp_path):
    python = colab.fresh_python(tmp_path / "env")
    code = "from importlib.util import find_spec as f; "
    code += "print([bool(f(n)) for n in 'torch tiktoken ipykernel pip hypothesis tinygpt'.split()])"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    said = subprocess.run([python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True).stdout
    assert said.strip() == "[True, True, True, True, False, False]"
