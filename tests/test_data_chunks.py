import gzip
import io
import json
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygpt.data.chunks as chunks_module
from tinygpt.data.chunks import (
    Report,
    as_text,
    parquet_text_bytes,
    read_jsonl,
    read_parquet,
    read_separated,
)
from tinygpt.support import UserError

# files that are broken, of every kind, are in test_data_documents.py


def parquet(texts, row_group_size, **columns):
    "A parquet file in memory."
    file = io.BytesIO()
    pq.write_table(
        pa.table({**columns, "text": texts}),
        file,
        row_group_size=row_group_size,
        compression="NONE",
        use_dictionary=False,
    )
    return file


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
    st.integers(0, 20),
)
def test_row_groups_may_be_read_in_any_order_and_from_any_chunk_on(
    n, row_group_size, chunk_rows, random, skip
):
    texts = [f"document {i}" for i in range(n)]
    groups = [texts[i : i + row_group_size] for i in range(0, n, row_group_size)]
    order = random.sample(range(len(groups)), len(groups))

    def read(skip):
        file = parquet(texts, row_group_size)
        return list(read_parquet(file, "d.parquet", "text", chunk_rows, skip, lambda size: order[:size]))

    chunks = read(0)
    assert [t for c in chunks for t in c.texts] == [t for g in order for t in groups[g]]
    assert [c.index for c in chunks] == list(range(len(chunks))) and read(skip) == chunks[skip:]


def test_a_note_names_the_row_in_the_file_whatever_the_order_of_reading():
    file = parquet(["a", "b", "c", None, "e", "f"], 2)
    notes = [
        note
        for chunk in read_parquet(file, "d.parquet", "text", 8, 0, lambda n: [2, 1, 0])
        for note in chunk.notes
    ]
    assert [place for _, place in notes] == ["d.parquet row 3"]


class Counting(io.BytesIO):
    touched = 0

    def read(self, n=-1):
        block = super().read(n)
        self.touched += len(block)
        return block


def test_row_groups_and_columns_that_are_not_wanted_are_not_read():
    words = [f"{i} " * 300 for i in range(4000)]
    file = Counting(parquet(words, 500, other=words).getvalue())
    late = list(read_parquet(file, "d.parquet", "text", 250, 14))
    assert [c.index for c in late] == [14, 15] and late[-1].texts[-1] == words[-1]
    assert file.touched < 0.1 * len(file.getvalue())


def test_what_pyarrows_allocator_keeps_is_given_back_after_every_batch(monkeypatch):
    calls, real = [], pa.default_memory_pool()

    class Pool:
        def release_unused(self):
            calls.append(real.bytes_allocated())

    monkeypatch.setattr(pa, "default_memory_pool", Pool)
    list(read_parquet(parquet(["text " * 100] * 2000, 1000), "d.parquet", "text", 250, 0))
    assert len(calls) == 8


def test_the_footer_says_how_much_text_there_is():
    texts = [f"{i} wörld " * 30 for i in range(500)]
    nested = pa.array([{"text": "x" * 1000, "b": [1, 2]}] * 500)
    found = parquet_text_bytes(parquet(texts, 100, id=list(range(500)), extra=nested), "d.parquet", "text")
    assert sum(len(t.encode()) for t in texts) < found < 1.1 * sum(len(t.encode()) for t in texts)


def test_the_footer_says_less_where_a_dictionary_holds_copies_once():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["x" * 2000] * 1000}), file)
    assert parquet_text_bytes(file, "d.parquet", "text") < 10_000


def test_lines_are_found_wherever_the_blocks_of_a_compressed_file_end():
    lines = "".join(json.dumps({"text": "x" * n}) + "\n" for n in range(0, 3000, 7)).encode()
    frames = b"".join(zstandard.compress(lines[i : i + 1001]) for i in range(0, len(lines), 1001))
    chunks = list(read_jsonl(io.BytesIO(frames), "d.jsonl.zst", "text", 50, 0))
    assert [len(t) for c in chunks for t in c.texts] == list(range(7, 3000, 7))  # the empty one is noted
    assert sum(len(c.notes) for c in chunks) == 1


@pytest.mark.parametrize("value", [None, 7, 1.5, b"\xff", "", "\ud83d", ["text"], {"a": 1}])
def test_what_is_no_text_gives_none_and_one_note_with_its_place(value):
    notes = []
    assert as_text(value, "row 3", notes) is None and [place for _, place in notes] == ["row 3"]


def test_a_report_counts_all_and_keeps_three_places_of_a_kind():
    report = Report()
    report.add([("odd", f"row {i}") for i in range(5)])
    report.add([("rare", "row 9")])
    assert report.lines() == ["5 x odd: row 0, row 1, row 2, ...", "1 x rare: row 9"]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize(
    "name, pack", [("d.jsonl", bytes), ("d.jsonl.gz", gzip.compress), ("d.jsonl.zst", zstandard.compress)]
)
def test_lines_are_read_from_any_chunk_on_whether_the_last_one_has_an_end_or_not(name, pack, end):
    lines = [json.dumps({"text": str(i)}) for i in range(10)]
    file = pack(("\n".join(lines) + end).encode())
    for skip in range(6):
        chunks = list(read_jsonl(io.BytesIO(file), name, "text", 3, skip))
        assert [c.index for c in chunks] == list(range(skip, 4))
        assert [t for c in chunks for t in c.texts] == [str(i) for i in range(3 * skip, 10)]


def test_a_report_goes_on_from_its_state_as_if_it_had_not_stopped():
    notes = [("empty", f"row {i}") for i in range(5)] + [("no text", "row 9")]
    whole, first = Report(), Report()
    whole.add(notes)
    first.add(notes[:2])
    rest = Report()
    rest.load_state_dict(first.state_dict())
    rest.add(notes[2:])
    assert rest.lines() == whole.lines() == ["5 x empty: row 0, row 1, row 2, ...", "1 x no text: row 9"]
    assert first.lines() == ["2 x empty: row 0, row 1"]  # the state is a copy


def lines_of(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def read_all(content, name="d.jsonl", key="text"):
    return list(read_jsonl(io.BytesIO(content), name, key, 256, 0))


def test_a_mark_of_utf8_at_the_beginning_is_no_part_of_the_first_line():
    [chunk] = read_all(lines_of(["one", "zwölf"]).encode("utf-8-sig"))
    assert chunk.texts == ["one", "zwölf"] and not chunk.notes


def test_a_file_that_was_compressed_with_a_long_window_is_read():
    "As by zstd --long=31."
    lines = lines_of(["one", "two"]).encode()
    long = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    work = zstandard.ZstdCompressor(compression_params=long).compressobj()  # of unknown length
    packed = work.compress(lines) + work.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 2**28
    assert [c.texts for c in read_all(packed * 2, "d.jsonl.zst")] == [["one", "two"] * 2]


def test_a_mark_of_utf8_on_a_line_of_its_own_is_an_empty_line():
    assert read_all(b"\xef\xbb\xbf")[0].texts == []
    assert read_all(b'\xef\xbb\xbf\r\n{"text": "one"}\r\n')[0].texts == ["one"]


def test_a_field_that_stands_twice_in_a_row_is_noted():
    rows = b'{"text": "a", "text": "b"}\n{"text": "c", "other": {"text": 1, "text": 2}}\n'
    rows += b'{"text": "\\"text\\""}\n'
    [chunk] = read_all(rows)
    assert chunk.texts == ["b", "c", '"text"']
    assert chunk.notes == [("field 'text' more than once, the last one taken", "d.jsonl line 1")]


@pytest.mark.parametrize("name, pack", [("d.jsonl.gz", gzip.compress), ("d.jsonl", bytes)])
def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(name, pack, monkeypatch):
    monkeypatch.setattr(chunks_module, "LONGEST_DOCUMENT", 1_000_000)
    packed = pack(lines_of(["a" * 40_000_000]).encode())
    tracemalloc.start()
    with pytest.raises(UserError, match="more than 1,000,000 bytes"):
        read_all(packed, name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab\n", max_size=6), max_size=12), st.integers(1, 5), st.integers(0, 4))
def test_a_separated_text_gives_its_documents_from_any_chunk_on(pieces, chunk_rows, skip):
    content = "<|endoftext|>".join(pieces).encode()
    chunks = list(read_separated(io.BytesIO(content), "s.txt", "<|endoftext|>", chunk_rows, 0))
    wanted = [piece.strip("\n") for piece in pieces]
    assert [t for chunk in chunks for t in chunk.texts] == [piece for piece in wanted if piece]
    late = list(read_separated(io.BytesIO(content), "s.txt", "<|endoftext|>", chunk_rows, skip))
    assert late == chunks[skip:]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary_view()])
def test_every_kind_of_column_that_arrow_has_for_text_is_read(kind):
    texts = ["one", None, "zwölf"]
    values = texts if "string" in str(kind) else [text and text.encode() for text in texts]
    file = parquet(pa.array(values, kind), 2)
    assert pq.read_schema(file).field("text").type == kind
    chunks = list(read_parquet(file, "d.parquet", "text", 2, 0))
    assert [text for chunk in chunks for text in chunk.texts] == ["one", "zwölf"]
