import copy
import errno
import gzip
import json
import os
import sys

import fsspec.registry  # noqa: F401
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.data import documents as data_documents
from tinygpt.data.chunks import Report
from tinygpt.data.documents import HUB, choose_tokenizer, dividing_fraction, find_documents, is_held_out
from tinygpt.data.tokens import load_corpus
from tinygpt.support import UserError

KINDS = ["d.parquet", "d.jsonl", "d.jsonl.gz", "d.jsonl.zst", "d.ndjson", "d.ndjson.gz"]


def write(path, values, key="text", row_group_size=7):
    "A file of the kind that its name says."
    lines = "".join(json.dumps({"id": i, key: v}) + "\n" for i, v in enumerate(values)).encode()
    if path.suffix == ".parquet":
        pq.write_table(
            pa.table({"id": range(len(values)), key: pa.array(values, pa.string())}),
            path,
            row_group_size=row_group_size,
        )
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":  # two frames, as parallel compressors write them
        half = len(lines) // 2
        path.write_bytes(b"".join(zstandard.compress(part) for part in (lines[:half], lines[half:])))
    else:
        path.write_bytes(lines)
    return path


def read(documents, report=None):
    texts = []
    for file in range(len(documents)):
        for chunk in documents.chunks(file):
            texts += chunk.texts
            if report is not None:
                report.add(chunk.notes)
    return texts


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_gives_its_documents_in_order(tmp_path, name):
    texts = [f"document {i} wörld 😀\nsecond line" for i in range(50)]
    documents = find_documents(str(write(tmp_path / name, texts)), chunk_rows=4)
    assert read(documents) == texts and read(documents) == texts  # any number of times
    assert (
        sum(len(t.encode()) for t in texts) * 0.5
        < documents.text_bytes()
        < sum(len(t.encode()) for t in texts) * 10
    )
    documents.open = None  # what is guessed opens no file
    assert documents.text_bytes(look=False) > 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.sampled_from(KINDS))
def test_reading_from_any_chunk_on_gives_the_same_chunks(
    tmp_path_factory, n, chunk_rows, row_group_size, name
):
    path = write(
        tmp_path_factory.mktemp("d") / name,
        [f"document {i}" for i in range(n)],
        row_group_size=row_group_size,
    )
    documents = find_documents(str(path), chunk_rows=chunk_rows)
    chunks = list(documents.chunks(0))
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert all(0 < len(c.texts) <= chunk_rows for c in chunks)
    for skip in range(len(chunks) + 2):
        assert list(documents.chunks(0, skip)) == chunks[skip:]


def test_a_folder_is_read_in_order_of_its_names_whatever_its_files_are(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl.gz"):
        write(tmp_path / name, [f"{name} {k}" for k in range(3)])
    (tmp_path / "z.txt").write_text("a text")
    (tmp_path / "y.txt").write_text("another")
    (tmp_path / "notes.md").write_text("not data")
    (tmp_path / ".hidden.txt").write_text("not data")
    (tmp_path / "sub/.cache").mkdir()
    (tmp_path / "sub/.cache/copy.txt").write_text("not data")
    texts = read(find_documents(str(tmp_path)))
    assert [t.split()[0] for t in texts[::3]] == ["a.parquet", "b.jsonl", "sub/c.jsonl.gz", "another"]
    assert texts[-1] == "a text"


@pytest.mark.parametrize("name", [*KINDS, "d.txt"])
def test_a_name_in_capitals_is_of_the_same_kind(tmp_path, name):
    "Also where it would otherwise be read as plain text."
    texts = ["the only text " * 9] if name == "d.txt" else [f"document {i} " * 20 for i in range(50)]
    path = write(tmp_path / name, texts)
    if name == "d.txt":
        path.write_text(texts[0])
    size = find_documents(str(path)).text_bytes()
    path = path.rename(tmp_path / name.upper())
    documents = find_documents(str(path))
    assert read(documents) == texts and documents.text_bytes() == size
    assert documents.is_one_text == (name == "d.txt")
    if name == "d.txt":
        assert read(find_documents(str(path), separator="only")) == ["the ", *[" text the "] * 8, " text "]
        assert load_corpus(str(tmp_path)).fingerprint() == load_corpus(str(path)).fingerprint()
    else:
        with pytest.raises(UserError, match="is not plain text: make token files of it"):
            load_corpus(str(path))


def test_a_folder_that_may_not_be_read_is_named_and_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a text")
    for name in ("closed", "lost+found", ".closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "b.txt").write_text("another text")
    scandir, closed = os.scandir, ["lost+found", ".closed"]

    def refuse(path):  # as the system does to all but root
        if os.path.basename(path) in closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert read(find_documents(str(tmp_path))) == ["a text", "another text"]
    assert load_corpus(str(tmp_path)).train + load_corpus(str(tmp_path)).val == ["a text", "another text"]
    closed.append("closed")
    for look in (find_documents, load_corpus):
        with pytest.raises(PermissionError) as told:
            look(str(tmp_path))
        assert told.value.filename == str(tmp_path / "closed")


def test_a_thousand_text_files_are_a_document_each(tmp_path):
    for i in range(600):
        (tmp_path / f"{i:03d}.txt").write_text(f"text {i}")
    documents = find_documents(str(tmp_path))
    assert len(documents) == 3 and read(documents) == [f"text {i}" for i in range(600)]


def test_rows_that_are_no_text_are_counted_and_named_and_the_others_are_read(tmp_path):
    rows = [
        '{"text": "good"}',
        '{"text": null}',
        '{"text": 7}',
        '{"text": ""}',
        '{"text": "\\ud800"}',
        '{"other": 1}',
        '{"text": "<|endoftext|> in it"}',
        "",
        '{"text": "last"}',
    ]
    (tmp_path / "d.jsonl").write_bytes("\n".join(rows).encode() + b'\n{"text": "\xff"}\n')
    report = Report()
    assert read(find_documents(str(tmp_path)), report) == ["good", "<|endoftext|> in it", "last"]
    text = "\n".join(report.lines())
    for words in (
        "2 x nothing in place of text",
        "line 2",
        "line 6",
        "1 x int in place",
        "1 x empty",
        "surrogate",
        "not UTF-8",
        "line 10",
        "ordinary text",
    ):
        assert words in text, words
    again = Report()
    again.load_state_dict(json.loads(json.dumps(report.state_dict())))
    assert again.lines() == report.lines()


def test_nulls_and_bytes_that_are_no_utf8_in_parquet_are_counted_and_named(tmp_path):
    write(tmp_path / "a.parquet", ["one", None, "three", ""])
    column = pa.array([b"four", b"\xff\xfe", b"six"], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "b.parquet")
    broken = pa.Array.from_buffers(pa.string(), 3, column.buffers())  # says it is text, and is not
    pq.write_table(pa.table({"text": broken}), tmp_path / "c.parquet")
    report = Report()
    assert read(find_documents(str(tmp_path)), report) == ["one", "three", "four", "six", "four", "six"]
    assert report.counts == {
        "nothing in place of text, left out": 1,
        "empty, left out": 1,
        "not UTF-8, left out": 2,
    }
    assert "b.parquet row 1" in " ".join(report.lines()) and "c.parquet row 1" in " ".join(report.lines())


def test_an_empty_row_group_is_named_and_passed_over(tmp_path):
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(tmp_path / "d.parquet", schema) as writer:
        for texts in (["one", "two"], [], ["three"], []):
            writer.write_table(pa.table({"text": pa.array(texts, pa.string())}, schema), row_group_size=10)
    empty = pq.ParquetFile(tmp_path / "d.parquet").num_row_groups - 2
    report = Report()
    documents = find_documents(str(tmp_path))
    assert read(documents, report) == ["one", "two", "three"] and report.counts["empty row group"] == empty
    assert empty == 0 or "row group 1" in report.lines()[0]
    chunks = list(documents.chunks(0))
    assert list(documents.chunks(0, 2)) == chunks[2:]


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("name", KINDS)
def test_a_truncated_file_is_named_and_where_it_ends(tmp_path, name, keep):
    texts = [f"document {i} " + "".join(chr(97 + (i * k) % 26) for k in range(200)) for i in range(400)]
    path = write(tmp_path / name, texts)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(UserError, match=f"{name} (cannot be read|line [0-9]+ is not json)"):
        read(find_documents(str(path), chunk_rows=16))


@pytest.mark.skipif(os.name != "posix", reason="permissions of a file are a system's own")
def test_a_file_that_the_system_refuses_is_named_and_not_called_damaged(tmp_path, monkeypatch):
    for name in ("a.txt", "b.txt"):  # read together
        (tmp_path / name).write_text("some words")

    def refused(name, *how):
        if name.endswith("b.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return open(name, *how)

    monkeypatch.setattr(data_documents, "open", refused, raising=False)
    with pytest.raises(UserError, match="b.txt: Permission denied: choose a place") as told:
        read(find_documents(str(tmp_path)))
    assert "a.txt" not in str(told.value) and "damaged" not in str(told.value)


@pytest.mark.parametrize("compression", ["NONE", "SNAPPY", "ZSTD"])
def test_a_page_of_a_parquet_file_that_is_damaged_is_noticed_and_the_place_named(tmp_path, compression):
    texts = [f"document {i} " * 20 for i in range(3000)]
    path = tmp_path / "d.parquet"
    pq.write_table(
        pa.table({"text": texts}),
        path,
        row_group_size=500,
        compression=compression,
        write_page_checksum=True,
        use_dictionary=False,
    )
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 255
    path.write_bytes(raw)
    with pytest.raises(UserError, match="d.parquet cannot be read .row group [1-9]"):
        read(find_documents(str(path)))


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path, name):
    path = write(tmp_path / name, ["a", "b"], key="content")
    with pytest.raises(UserError, match="'text' but id, content.*--text-key"):
        read(find_documents(str(path)))
    assert read(find_documents(str(path), text_key="content")) == ["a", "b"]


def test_a_column_that_holds_no_text_is_refused(tmp_path):
    path = write(tmp_path / "d.parquet", ["a"])
    with pytest.raises(UserError, match="'id' of .* holds int64"):
        read(find_documents(str(path), text_key="id"))


def test_a_place_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist; known data sets are fineweb-edu-10bt, tinystories"):
        find_documents(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no file of the kinds .parquet"):
        find_documents(str(tmp_path))
    (tmp_path / "d.jsonl").write_text("[1, 2]\n")
    with pytest.raises(UserError, match="line 1 holds a list, not an object with a field 'text'"):
        read(find_documents(str(tmp_path)))


def test_one_text_is_a_single_txt_file_that_nothing_divides(tmp_path):
    for name in ("a.txt", "b.txt", "d.jsonl"):
        (tmp_path / name).write_text('{"text": "some words"}\n')
    assert find_documents(str(tmp_path / "a.txt")).is_one_text
    assert not find_documents(str(tmp_path / "d.jsonl")).is_one_text
    assert not find_documents(str(tmp_path / "a.txt"), separator="|").is_one_text
    (tmp_path / "d.jsonl").unlink()
    assert not find_documents(str(tmp_path)).is_one_text  # two


def test_copies_of_a_document_are_on_one_side_and_the_share_held_out_is_right():
    texts = [f"document {i}" for i in range(20_000)]
    share = sum(is_held_out(t, 0.05) for t in texts) / len(texts)
    assert abs(share - 0.05) < 0.005
    assert all(
        is_held_out(t, 0.3) for t in texts if is_held_out(t, 0.05)
    )  # a larger share holds the smaller one


def test_a_document_stays_on_its_side_when_others_are_added():
    texts = [f"document {i}" for i in range(2000)]
    held = [t for t in texts if is_held_out(t, 0.1)]
    assert [t for t in ["another", *texts] if is_held_out(t, 0.1) and t != "another"] == held


def test_walking_from_any_place_on_gives_what_follows(tmp_path):
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz"):
        write(tmp_path / name, [f"{name} {i}" for i in range(10)])
    documents = find_documents(str(tmp_path), chunk_rows=4)
    whole = list(documents.walk())
    for i, (file, chunk) in enumerate(whole):
        assert list(documents.walk(file, chunk.index)) == whole[i:]


def test_a_tokenizer_is_trained_on_training_documents_from_the_beginning_of_every_file(tmp_path, monkeypatch):
    texts = {name: [f"{name} {i} " + "x" * 20 for i in range(100)] for name in ("a.jsonl", "b.jsonl")}
    for name, rows in texts.items():
        write(tmp_path / name, rows)
    seen = []
    monkeypatch.setattr(
        "tinygpt.data.documents.BPETokenizer.train", lambda some, vocab_size: seen.extend(some)
    )
    choose_tokenizer("bpe", find_documents(str(tmp_path)), 300, 0.2, train_bytes=1000)
    for name, rows in texts.items():
        mine = [t for t in seen if t.startswith(name)]
        assert (
            mine == [t for t in rows if not is_held_out(t, 0.2)][: len(mine)]
            and 500 <= sum(map(len, mine)) < 550
        )


def test_what_small_files_lack_for_the_tokenizers_training_the_larger_ones_give(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", [f"large {i} " + "é" * 20 for i in range(400)])
    for i in range(9):
        write(tmp_path / f"b{i}.jsonl", [f"small {i}"])
    seen = []
    monkeypatch.setattr(
        "tinygpt.data.documents.BPETokenizer.train", lambda some, vocab_size: seen.extend(some)
    )
    choose_tokenizer("bpe", find_documents(str(tmp_path)), 300, 0.001, train_bytes=5000)
    assert sum(text.startswith("small") for text in seen) == 9
    assert 5000 <= sum(len(text.encode()) for text in seen) < 5060


# remote files, on file systems that need no network


@pytest.fixture
def memory():
    fs = MemoryFileSystem()
    yield fs
    fs.store.clear()


def test_remote_files_are_read_through_fsspec(tmp_path, memory):
    local = write(tmp_path / "d.parquet", [f"document {i}" for i in range(30)])
    for name in ("x/a.parquet", "x/b.parquet", "x/readme.md"):
        memory.pipe(f"/{name}", local.read_bytes())
    assert len(find_documents("memory://x")) == len(find_documents("memory://x/*.parquet")) == 2
    assert read(find_documents("memory://x/a.parquet")) == [f"document {i}" for i in range(30)]


class Hub(MemoryFileSystem):
    "Stands for the hub: the same paths, in memory; breaks off as often as told."

    protocol, store, pseudo_dirs, cachable = "hf", {}, [""], False
    made_with, failures = {}, 0

    def __init__(self, *args, endpoint=None, **kwargs):
        super().__init__(*args, **kwargs)
        Hub.made_with = {"endpoint": endpoint}

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("hf://").strip("/")

    def open(self, path, mode="rb", **kwargs):
        if Hub.failures:
            Hub.failures -= 1
            raise TimeoutError("the hub does not answer")
        return super().open(path, mode, **kwargs)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", Hub)
    monkeypatch.setattr("tinygpt.data.documents.time.sleep", lambda s: None)
    Hub.store.clear()
    Hub.failures = 0
    local = write(tmp_path / "d.parquet", [f"story {i}" for i in range(10)])
    fs = Hub()
    for name in ("train-00000-of-00001-2d5a.parquet", "validation-00000-of-00001-869c.parquet"):
        fs.pipe(f"/datasets/roneneldan/TinyStories/data/{name}", local.read_bytes())
    for i in range(3):
        fs.pipe(f"/datasets/HuggingFaceFW/fineweb-edu/sample/10BT/{i:03d}_00000.parquet", local.read_bytes())
    return fs


def test_data_sets_of_the_hub_have_names_and_only_their_training_files_are_taken(hub):
    assert len(find_documents("fineweb-edu-10bt")) == 3
    assert read(find_documents("tinystories")) == [f"story {i}" for i in range(10)]
    assert all(url.startswith("hf://datasets/") for url in HUB.values())


def test_a_mirror_of_the_hub_is_used_where_one_is_set(hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    find_documents("tinystories")
    assert Hub.made_with == {"endpoint": "https://mirror.example"}


def test_a_connection_that_breaks_off_is_tried_again_and_nothing_is_read_twice(hub):
    documents = find_documents("tinystories", chunk_rows=3)
    Hub.failures = 4
    assert read(documents) == [f"story {i}" for i in range(10)]
    Hub.failures = 5
    with pytest.raises(UserError, match="does not answer.*check the network"):
        read(documents)


def test_a_network_that_is_away_for_half_a_minute_does_not_end_a_run(hub, monkeypatch):
    waited = []
    monkeypatch.setattr("tinygpt.data.documents.time.sleep", waited.append)
    Hub.failures = 4
    assert read(find_documents("tinystories")) == [f"story {i}" for i in range(10)]
    assert sum(waited) > 30 and waited == sorted(waited) and waited[0] < 1


def test_a_store_that_does_not_say_how_large_a_file_is_is_read(tmp_path, memory, monkeypatch):
    memory.pipe("/x/d.jsonl", write(tmp_path / "d.jsonl", ["one", "two"]).read_bytes())
    memory.pipe("/x/e.jsonl.gz", write(tmp_path / "e.jsonl.gz", ["three"]).read_bytes())
    monkeypatch.setattr(MemoryFileSystem, "size", lambda fs, path: None)
    documents = find_documents("memory://x")
    assert documents.text_bytes() == 0 and read(documents) == ["one", "two", "three"]


def test_a_connection_that_breaks_off_in_the_middle_is_read_on_from_the_chunk_it_had_reached(
    hub, monkeypatch
):
    real, failures = data_documents.read_parquet, iter([2, 1, 99])  # good chunks before each failure

    def breaking(*args):
        good = next(failures)
        for i, chunk in enumerate(real(*args)):
            if i == good:
                raise TimeoutError("the hub does not answer")
            yield chunk

    monkeypatch.setattr(data_documents, "read_parquet", breaking)
    assert read(find_documents("tinystories", chunk_rows=2)) == [f"story {i}" for i in range(10)]


def test_a_hub_that_cannot_be_reached_says_what_to_do():
    with pytest.raises(UserError, match="HF_ENDPOINT"):  # HF_HUB_OFFLINE is set for the tests
        find_documents("hf://datasets/nobody/nothing")


@pytest.mark.parametrize("package, name", [("pyarrow", "d.parquet"), ("zstandard", "d.jsonl.zst")])
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, package, name):
    path = write(tmp_path / name, ["a"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f'needs the package {package}: pip install "tinygpt.hub."'):
        read(find_documents(str(path)))


def test_a_document_is_held_out_by_a_hash_that_is_the_same_in_every_process():
    place = int.from_bytes(bytes.fromhex("d8bb14d833d59559"), "little") / 2**64  # printf abc | b2sum -l 64
    assert not is_held_out("abc", place - 1e-9) and is_held_out("abc", place + 1e-9)


def test_the_fingerprint_changes_with_the_files_their_sizes_and_the_chunks_and_with_nothing_else(tmp_path):
    write(tmp_path / "d.jsonl", ["one", "two"])
    before = find_documents(str(tmp_path), "text")
    assert (
        len(before.fingerprint) == 16
        and find_documents(str(tmp_path), "text").fingerprint == before.fingerprint
    )
    seen = {
        before.fingerprint,
        fingerprint_with(before, chunk_rows=before.chunk_rows + 1),
        fingerprint_with(before, text_key="other"),
    }
    write(tmp_path / "d.jsonl", ["one", "three"])
    seen.add(find_documents(str(tmp_path), "text").fingerprint)
    write(tmp_path / "e.jsonl", ["four"])
    seen.add(find_documents(str(tmp_path), "text").fingerprint)
    assert len(seen) == 5


def test_files_that_moved_together_keep_their_fingerprint_and_others_of_their_names_do_not(
    tmp_path, monkeypatch
):
    (tmp_path / "old/a").mkdir(parents=True)
    write(tmp_path / "old/a/d.jsonl", ["one", "two"])
    write(tmp_path / "old/e.jsonl", ["three"])
    before = find_documents(str(tmp_path / "old"), "text").fingerprint
    (tmp_path / "old").rename(tmp_path / "new")
    assert find_documents(str(tmp_path / "new"), "text").fingerprint == before
    monkeypatch.chdir(tmp_path)
    assert find_documents("new", "text").fingerprint == before
    write(tmp_path / "new/e.jsonl", ["seven"])  # as many bytes
    assert find_documents("new", "text").fingerprint != before
    write(tmp_path / "new/e.jsonl", ["three"])
    (tmp_path / "new/a").rename(tmp_path / "new/b")
    assert find_documents("new", "text").fingerprint != before


def fingerprint_with(documents, **settings):
    "The fingerprint with other settings."
    other = copy.copy(documents)
    vars(other).update(settings)
    vars(other).pop("fingerprint", None)  # which the copy has from the other
    return other.fingerprint


@pytest.mark.parametrize("count", [2, 3, 50])
def test_the_fraction_that_divides_holds_out_one_document_with_its_copies(tmp_path, count):
    texts = [f"document {i % count}" for i in range(2 * count)]  # each twice
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fraction = dividing_fraction(find_documents(str(path)))
    assert len({text for text in texts if is_held_out(text, fraction)}) == 1


def test_one_document_cannot_be_divided(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "alone"}) + "\n")
    with pytest.raises(UserError, match="holds one document"):
        dividing_fraction(find_documents(str(path)))
