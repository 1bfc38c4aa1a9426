import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.data.__main__ import main as prepare_command
from tinygpt.data.documents import Documents, find_documents, is_held_out
from tinygpt.data.open import make_loader, open_data
from tinygpt.data.stream import Prefetch, StreamLoader, merge_states, open_stream
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

EOT = 256


def texts(n, longest=30, seed=0):
    "Documents that can be told apart; of long ones a pair of tokens is at home in one place only."
    rng = np.random.default_rng(seed)
    letters = [rng.integers(0, 90, size=rng.integers(1, longest)) for _ in range(n)]
    return ["".join(chr(33 + i) for i in some) for some in letters]


def stream(documents, batch_size=4, block_size=8, chunk_rows=5, **kwargs):
    kwargs = {"prefetch": 0, **kwargs}
    return StreamLoader(
        Documents([], texts=documents, chunk_rows=chunk_rows),
        ByteTokenizer(),
        batch_size,
        block_size,
        **kwargs,
    )


def epochs_of(batches, row):
    "The tokens of each finished epoch that one row of the global batch was trained on, from its pairs."
    epochs, tokens = [], []
    for x, y in batches:
        x, y = x[row].tolist(), y[row].tolist()
        n = sum(t >= 0 for t in y)  # pairs; the rest is padding
        if n < len(y):
            assert y == x[1 : n + 1] + [-100] * (len(y) - n)
        else:
            assert y[:-1] == x[1:]
        # An epoch that ended with a full row; otherwise the last target comes back as an input.
        if tokens and tokens[-1] != x[0]:
            epochs, tokens = [*epochs, tokens], []
        tokens = (tokens or [x[0]]) + y[:n]
        if n < len(y):
            epochs, tokens = [*epochs, tokens], []
    return epochs


def documents_in(tokens):
    "The documents of a stream of tokens; each must have its eot in front."
    assert tokens[0] == EOT
    return "".join(chr(t) if t != EOT else "\0" for t in tokens).split("\0")[1:]


def dealt(loader, documents, epochs, chunk_rows):
    """Which documents each row gets in each epoch, by the rule in other words:

    to the row with the fewest bytes, the first of equals.
    """
    size = [0] * loader.maker.batch_size
    out = [[[] for _ in range(epochs)] for _ in size]
    for epoch in range(epochs):
        for chunk, start in enumerate(range(0, len(documents), chunk_rows)):
            part = documents[start : start + chunk_rows]
            for i in loader.maker.order(len(part), epoch, 0, chunk):
                row = size.index(min(size))
                size[row] += len(part[i])
                out[row][epoch].append(part[i])
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 9),
    st.booleans(),
    st.integers(0, 9),
)
def test_in_an_epoch_each_document_is_with_one_row_and_every_pair_of_a_row_is_trained_on_once(
    n, longest, B, T, chunk_rows, shuffle, seed
):
    documents = texts(n, longest + 1, seed)
    loader = stream(documents, B, T, chunk_rows, shuffle=shuffle, seed=seed)
    in_an_epoch = sum(len(d) + 1 for d in documents) // (B * T) + 2 * (longest // T + 2)
    batches = [next(loader) for _ in range(3 * in_an_epoch)]
    most = len(batches) * B * (T + 1) // (2 * n) + B + 2  # no more epochs than that
    rows = dealt(loader, documents, most, chunk_rows)
    for row in range(B):
        seen = [documents_in(tokens) for tokens in epochs_of(batches, row)]
        # all of them, in order, each once: none lost at the edge of a batch
        assert seen == [e for e in rows[row] if e][: len(seen)]
        assert seen or B > 1
    for epoch in range(3):
        assert Counter(d for row in rows for d in row[epoch]) == Counter(documents)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(["concat", "bos"]),
    st.integers(0, 9),
)
def test_the_global_batch_is_the_same_for_one_to_five_ranks(n, T, chunk_rows, packing, seed):
    documents = texts(n, 30, seed)
    whole = stream(documents, 60, T, chunk_rows, seed=seed, packing=packing)
    batches = [next(whole) for _ in range(3)]
    for world_size in (2, 3, 4, 5):
        ranks = [
            stream(documents, 60, T, chunk_rows, seed=seed, packing=packing, rank=r, world_size=world_size)
            for r in range(world_size)
        ]
        for x, y in batches:
            parts = [next(r) for r in ranks]
            assert torch.equal(torch.cat([p[0] for p in parts]), x) and torch.equal(
                torch.cat([p[1] for p in parts]), y
            )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(3, 30),
    st.integers(2, 9),
    st.integers(1, 9),
    st.sampled_from(["concat", "bos"]),
    st.integers(0, 9),
    st.data(),
)
def test_resuming_at_every_batch_of_two_epochs_on_any_number_of_ranks_equals_not_stopping(
    n, T, chunk_rows, packing, seed, data
):
    documents, B = texts(n, 30, seed), 6

    def make(rank, world_size):
        place = dict(rank=rank, world_size=world_size)
        return stream(documents, B, T, chunk_rows, seed=seed, packing=packing, **place)

    world_before, world_after = data.draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2), (6, 3)]))
    ranks, straight, states = [make(r, world_before) for r in range(world_before)], [], []
    while not states or states[-1]["at"][0] < 2 and len(states) < 120:
        states.append(merge_states([r.state_dict() for r in ranks]))
        parts = [next(r) for r in ranks]
        straight.append((torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))
    for i, state in enumerate(states):
        resumed = [make(r, world_after) for r in range(world_after)]
        for r in resumed:
            r.load_state_dict(json.loads(json.dumps(state)))
        for x, y in straight[i : i + 3]:
            parts = [next(r) for r in resumed]
            assert torch.equal(torch.cat([p[0] for p in parts]), x) and torch.equal(
                torch.cat([p[1] for p in parts]), y
            )


def test_the_state_is_small_and_the_same_for_any_number_of_ranks():
    documents = texts(500, 200)
    one, four = stream(documents, 8, 16), [stream(documents, 8, 16, rank=r, world_size=4) for r in range(4)]
    for loader in [one, *four]:
        for _ in range(50):
            next(loader)
    assert merge_states([r.state_dict() for r in four]) == one.state_dict()
    numbers = json.dumps({k: v for k, v in one.state_dict().items() if k != "settings"}).count(",") + 1
    assert numbers <= 5 * 8 + 5  # five numbers a row and a few more
    assert len(json.dumps(one.state_dict())) < 1000


def test_the_tokens_that_cropping_drops_are_counted_by_rank_and_over_a_resume():
    documents = texts(40, 60)
    whole = stream(documents, 4, 8, packing="bos")
    ranks = [stream(documents, 4, 8, packing="bos", rank=r, world_size=2) for r in range(2)]
    states, counts = [], []
    while not states or states[-1]["at"][0] < 3:
        states.append(whole.state_dict())
        counts.append(whole.dropped_tokens)
        assert sum(r.dropped_tokens for r in ranks) == counts[-1]
        for loader in (whole, *ranks):
            next(loader)
    assert counts[0] == 0 and counts == sorted(counts) and len(set(counts)) > 3
    for i in range(0, len(states) - 1, 3):  # resumed anywhere, also between the rows of a group
        resumed = stream(documents, 4, 8, packing="bos")
        resumed.load_state_dict(states[i])
        assert resumed.dropped_tokens == counts[i]
        next(resumed)
        assert resumed.dropped_tokens == counts[i + 1]


def test_what_is_dropped_in_an_epoch_is_what_is_there_less_what_the_rows_hold():
    documents = ["x" * 100, "y" * 30, "z" * 5]  # 138 tokens with the eots, in rows of 9
    loader = stream(documents, 1, 8, packing="bos", shuffle=False)
    for epoch in (1, 2):
        kept = 0
        for _ in range(2):  # a row for the 6 tokens of z and 3 of y, a row for 9 tokens of x
            _, y = next(loader)
            kept += 1 + int((y >= 0).sum())
        assert kept == 18 and loader.dropped_tokens == epoch * (138 - 18)


def test_odd_rows_are_counted_once_and_not_in_every_epoch():
    loader = stream(["a text", "", "another", ""], 2, 8)
    for _ in range(30):
        next(loader)
    assert loader.state_dict()["at"][0] > 3
    assert loader.report.lines() == ["2 x empty, left out: document 1, document 3"]


def test_one_text_is_streamed_with_its_last_tenth_held_out(tmp_path, cache):
    text = "".join(f"Sentence {i} of a longer text. " for i in range(200))
    (tmp_path / "one.txt").write_text(text)
    data = open_stream(str(tmp_path / "one.txt"), "byte")
    assert data.train.texts[0] + data.tokenizer.decode(data.val[1:].tolist()) == text
    loader = make_loader("stream", data, 2, 16)
    x, _ = next(loader)
    loader.close()
    assert data.tokenizer.decode(x[0].tolist()) in text


def test_a_text_that_is_split_at_a_separator_streams_its_documents(tmp_path, cache):
    stories = [f"Story {i}.\nThe end." for i in range(300)]
    (tmp_path / "s.txt").write_text("\n<|endoftext|>\n".join(stories))
    data = open_stream(str(tmp_path / "s.txt"), "byte", val_fraction=0.1, separator="<|endoftext|>")
    loader = StreamLoader(data.train, data.tokenizer, 1, 16, val_fraction=0.1, prefetch=0)
    found = documents_in(epochs_of([next(loader) for _ in range(700)], 0)[0])
    held_out = data.tokenizer.decode(data.val.tolist())
    assert sorted(found) == sorted(s for s in stories if not is_held_out(s, 0.1))
    assert held_out == "".join(s for s in stories if is_held_out(s, 0.1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_document_is_tokenized_by_one_rank_only_and_once_an_epoch(world_size):
    documents, seen = [f"document {i}" for i in range(97)], [Counter(), Counter()]  # 97 is prime

    class PassCounting(Documents):
        passes = 0

        def chunks(self, *args, **kwargs):
            self.passes += 1
            return super().chunks(*args, **kwargs)

    class Recording(ByteTokenizer):
        def encode(self, text):
            if source.passes <= 2:
                seen[source.passes - 1][text] += 1
            return super().encode(text)

    for rank in range(world_size):
        source = PassCounting([], texts=documents, chunk_rows=10)
        loader = StreamLoader(source, Recording(), 30, 4, rank=rank, world_size=world_size, prefetch=0)
        while source.passes < 3:
            next(loader)
    assert seen == [Counter(documents)] * 2  # over all ranks together


@pytest.mark.parametrize("packing", ["concat", "bos"])
def test_the_thread_ahead_changes_nothing_and_stops_when_closed(packing):
    documents = texts(100)
    plain, ahead = stream(documents, packing=packing), stream(documents, packing=packing, prefetch=3)
    for i in range(40):
        assert torch.equal(next(plain)[1], next(ahead)[1])
        assert plain.state_dict() == ahead.state_dict()  # of what was given, not of what lies ready
        if i == 20:
            ahead.close()  # and goes on
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]


def test_a_forgotten_loader_takes_its_thread_with_it():
    loader = stream(texts(100), prefetch=2)
    next(loader)
    [thread] = [t for t in threading.enumerate() if t.name == "prefetch"]
    del loader
    thread.join(timeout=120)
    assert not thread.is_alive()


def test_an_error_in_the_thread_reaches_the_training_loop_and_stays():
    loader = stream(["", ""], prefetch=2)
    for _ in range(2):
        with pytest.raises(UserError, match="no document"):
            next(loader)
    assert "2 x empty" in loader.report.lines()[0]
    loader.close()


def test_an_iterator_that_ends_ends_the_thread_ahead_and_nobody_waits_for_more():
    ahead = Prefetch(iter([1, 2]), size=1)
    assert [next(ahead), next(ahead)] == [1, 2]
    for _ in range(2):  # and again for whoever asks again
        with pytest.raises(StopIteration):
            next(ahead)
    ahead.close()


def test_epochs_differ_in_order_where_shuffled_and_not_where_not():
    documents = texts(60, 20)
    for shuffle in (True, False):
        loader = stream(documents, 1, 16, chunk_rows=20, shuffle=shuffle)
        first, second = epochs_of([next(loader) for _ in range(200)], 0)[:2]
        assert (first == second) != shuffle and sorted(documents_in(first)) == sorted(
            documents_in(second)
        ) == sorted(documents)


def parquet(folder, n_files=3, n=40, row_group_size=9):
    "Parquet files with several row groups, the last of each shorter."
    documents = texts(n_files * n, 30)
    for k in range(n_files):
        pq.write_table(
            pa.table({"text": documents[k * n : (k + 1) * n]}),
            folder / f"{k}.parquet",
            row_group_size=row_group_size,
        )
    return documents


@pytest.mark.parametrize("packing", ["concat", "bos"])
def test_with_shuffled_row_groups_too_resuming_at_every_batch_of_two_epochs_equals_not_stopping(
    tmp_path, packing
):
    parquet(tmp_path)

    def make(rank=0, world_size=1):
        documents = find_documents(str(tmp_path), chunk_rows=4)
        place = dict(rank=rank, world_size=world_size)
        return StreamLoader(documents, ByteTokenizer(), 4, 12, packing=packing, prefetch=0, **place)

    one, states, straight = make(), [], []
    while one.state["at"][0] < 2:
        states.append(json.loads(json.dumps(one.state_dict())))
        straight.append(next(one)[1])
    for i, state in enumerate(states):
        ranks = [make(r, 1 + i % 2) for r in range(1 + i % 2)]
        for rank in ranks:
            rank.load_state_dict(state)
        for y in straight[i : i + 2]:
            assert torch.equal(torch.cat([next(rank)[1] for rank in ranks]), y)


def test_row_groups_come_in_another_order_each_epoch_and_every_document_once(tmp_path):
    documents = parquet(tmp_path, n_files=1, n=90)
    group = {text: i // 9 for i, text in enumerate(documents)}
    for shuffle in (True, False):
        loader = StreamLoader(
            find_documents(str(tmp_path)), ByteTokenizer(), 1, 12, shuffle=shuffle, prefetch=0
        )
        epochs = [documents_in(tokens) for tokens in epochs_of([next(loader) for _ in range(300)], 0)[:2]]
        assert all(Counter(epoch) == Counter(documents) for epoch in epochs)
        orders = [list(dict.fromkeys(group[text] for text in epoch)) for epoch in epochs]
        assert (orders[0] != orders[1] and orders[0] != sorted(orders[0])) == shuffle


def test_a_loader_says_how_many_tokens_cropping_has_dropped():
    documents = texts(400, 60)
    for packing in ("concat", "bos"):
        loader = stream(documents, 2, 32, chunk_rows=50, packing=packing)
        given = 0
        while loader.state["at"][0] < 2:
            given += int((next(loader)[1] >= 0).sum())
        assert (loader.dropped_tokens > 0.02 * given) if packing == "bos" else not loader.dropped_tokens


def test_a_state_of_other_data_or_of_one_rank_only_is_refused():
    loader = stream(texts(50), rank=0, world_size=2)
    next(loader)
    with pytest.raises(UserError, match="one rank only"):
        stream(texts(50)).load_state_dict(loader.state_dict())
    whole = stream(texts(50)).state_dict()
    for other, word in [
        (stream(texts(51)), "documents"),
        (stream(texts(50), block_size=9), "block_size"),
        (stream(texts(50), seed=1), "seed"),
    ]:
        with pytest.raises(UserError, match=word):
            other.load_state_dict(whole)
    ahead = stream(texts(50), rank=1, world_size=2)
    with pytest.raises(UserError, match="same one"):
        merge_states([loader.state_dict(), ahead.state_dict()])


def test_numpy_integers_are_plain_ones_and_sizes_that_cannot_be_are_refused():
    "As in the other loaders."
    documents = texts(30)
    numbers = dict(batch_size=2, block_size=8, seed=3)
    plain, other = (stream(documents, **{k: kind(v) for k, v in numbers.items()}) for kind in (int, np.int32))
    assert torch.equal(next(plain)[0], next(other)[0])
    assert json.loads(json.dumps(other.state_dict())) == plain.state_dict()
    for packing in ("concat", "bos"):
        for block_size in (0, -3):
            with pytest.raises(UserError, match=f"block_size = {block_size}"):
                stream(documents, block_size=block_size, packing=packing)
    for name, value in numbers.items():
        with pytest.raises(TypeError, match="integer"):
            stream(documents, **numbers | {name: value + 0.5})


def test_a_document_with_the_special_token_in_its_text_stays_text():
    loader = stream(["one<|endoftext|>two"], 1, 30)
    x, _ = next(loader)
    assert (x == EOT).sum() == 1 and bytes(x[0, 1:20].tolist()).decode() == "one<|endoftext|>two"
    assert "document 0" in loader.report.lines()[0]


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))


def test_streams_leave_out_what_is_held_out_and_validate_on_it(tmp_path, cache):
    documents = [f"document {i} " * 3 for i in range(300)]
    write_jsonl(tmp_path / "d.jsonl", documents)
    data = open_stream(str(tmp_path / "d.jsonl"), "byte", val_fraction=0.1)
    held_out = [d for d in documents if is_held_out(d, 0.1)]
    assert data.tokenizer.decode(data.val.tolist()) == "".join(held_out) and 10 < len(held_out) < 60
    loader = make_loader("stream", data, 1, 64)
    batches = [next(loader) for _ in range(300)]
    loader.close()
    assert sorted(documents_in(epochs_of(batches, 0)[0])) == sorted(set(documents) - set(held_out))


@pytest.mark.parametrize("key, end", [("text", "jsonl"), ("body", "jsonl"), ("text", "txt")])
def test_too_few_documents_to_hold_one_out_are_refused_with_a_command_that_works(
    tmp_path, cache, monkeypatch, key, end
):
    monkeypatch.chdir(tmp_path)
    documents = [d for i in range(40) if not is_held_out(d := f"document {i} " * 9, 0.2)][:3]
    lines = documents if end == "txt" else [json.dumps({key: d}) for d in documents]
    (tmp_path / f"d.{end}").write_text("\n".join(lines))
    how = dict(text_key=key, separator="\\n" if end == "txt" else "")
    with pytest.raises(UserError, match="none fell into validation") as told:
        open_stream(f"d.{end}", "bpe", 260, **how)
    words = re.search(r"python -m tinygpt.data (.*), and train with", str(told.value))[1]
    assert prepare_command([*shlex.split(words), "--workers", "0"]) == 0
    data = open_data("FOLDER", loader="shard")
    assert data.tokenizer.n_vocab == 260 and len(data.val) > 0


def test_a_stream_without_any_text_is_refused_as_what_it_is(tmp_path, cache):
    (tmp_path / "d.jsonl").write_text('{"text": ""}\n' * 9)
    with pytest.raises(UserError, match="holds no text"):
        open_stream(str(tmp_path / "d.jsonl"), "byte")


def test_a_start_opens_each_file_once(tmp_path, cache, monkeypatch):
    for name in "abc":
        pq.write_table(pa.table({"text": texts(300, seed=ord(name))}), tmp_path / f"{name}.parquet")
    open_stream(str(tmp_path), "byte", val_fraction=0.1)  # its validation tokens are in the cache now
    opened = []
    real = Documents.open
    monkeypatch.setattr(Documents, "open", lambda self, name: opened.append(name) or real(self, name))
    data = open_stream(str(tmp_path), "byte", val_fraction=0.1)
    make_loader("stream", data, 4, 8)
    assert sorted(opened) == [str(tmp_path / f"{name}.parquet") for name in "abc"]


def test_making_the_tokens_of_a_stream_is_told_where_it_is_asked_for(tmp_path, cache, capsys):
    write_jsonl(tmp_path / "d.jsonl", [f"text {i} " * 3 for i in range(300)])
    open_stream(str(tmp_path / "d.jsonl"), "byte", val_fraction=0.1, progress=True)
    assert "tokenizing, once" in capsys.readouterr().err


WORKER = """
import json, sys
import torch.distributed as dist
from tinygpt.data.documents import Documents
from tinygpt.data.stream import StreamLoader
from tinygpt.tokenizer import ByteTokenizer

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
texts = [f"document {i} " * (i % 5 + 1) for i in range(60)]
documents = Documents([], texts=texts, chunk_rows=7)
loader = StreamLoader(documents, ByteTokenizer(), 4, 16, rank=rank, world_size=2)
for _ in range(9):
    next(loader)
json.dump(loader.state_dict(), open(f"{folder}/{rank}.json", "w"))
loader.close()
dist.barrier()
dist.destroy_process_group()
"""


def test_real_processes_put_their_states_together(tmp_path):
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [w.wait(timeout=300) for w in workers] == [0, 0]
    one = stream([f"document {i} " * (i % 5 + 1) for i in range(60)], 4, 16, chunk_rows=7)
    for _ in range(9):
        next(one)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == one.state_dict()


def test_a_state_of_other_texts_in_memory_is_refused_also_where_they_are_as_long():
    def loader(texts):
        return StreamLoader(Documents([], texts=texts), ByteTokenizer(), 2, 8, prefetch=0)

    state = loader(["one text", "two text"]).state_dict()
    loader(["one text", "two text"]).load_state_dict(state)
    with pytest.raises(UserError, match="documents"):
        loader(["red text", "two text"]).load_state_dict(state)
