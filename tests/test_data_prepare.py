import errno
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import tinygpt.data.prepare as prepare_module
from tinygpt.data.documents import find_documents, is_held_out
from tinygpt.data.prepare import ShardWriter, prepare_shards, tokenize_chunk, verify
from tinygpt.data.tokens import open_token_data, prepare
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer


def corpus(folder, n=120, files=3):
    "A folder of jsonl files with documents of different length."
    rng = np.random.default_rng(0)
    folder.mkdir()
    texts = [f"document {i} " + "words " * int(rng.integers(0, 30)) for i in range(n)]
    for k in range(files):
        part = texts[k * n // files : (k + 1) * n // files]
        (folder / f"{k}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    return texts


def content(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


def small(folder, out, **kwargs):
    "prepare_shards with many chunks, shards and commits."
    settings = dict(tokenizer="byte", val_fraction=0.2, shard_tokens=1000, workers=0, commit_seconds=0)
    return prepare_shards(str(folder), out, **{**settings, **kwargs})


@pytest.fixture
def chunky(monkeypatch):
    "Chunks of 7 documents, so that a small corpus has many."
    monkeypatch.setattr(
        prepare_module, "find_documents", lambda *args, **named: find_documents(*args, **named, chunk_rows=7)
    )


def test_shards_hold_every_document_once_in_order_and_validation_the_others(tmp_path, chunky):
    texts = corpus(tmp_path / "in")
    small(tmp_path / "in", tmp_path / "out")
    data = open_token_data(tmp_path / "out")
    for split, held_out in (("train", False), ("val", True)):
        wanted = [t for t in texts if is_held_out(t, 0.2) == held_out]
        tokens = getattr(data, split)[:].tolist()
        assert tokens == [token for t in wanted for token in (256, *t.encode())]
        meta = data.meta["splits"][split]
        assert meta["documents"] == len(wanted) and meta["bytes"] == sum(len(t.encode()) for t in wanted)
        sizes = [s["tokens"] for s in meta["shards"]]
        assert all(n == 1000 for n in sizes[:-1]) and 0 < sizes[-1] <= 1000 and sum(sizes) == len(tokens)
    assert len(data.meta["splits"]["train"]["shards"]) > 5
    assert verify(open_token_data(tmp_path / "out")) == len(data.train) + len(data.val)
    shards = [s["file"] for part in data.meta["splits"].values() for s in part["shards"]]
    assert sorted(content(tmp_path / "out")) == sorted(["meta.json", "tokenizer.json", *shards])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]  # nothing is left lying about


def test_one_shard_is_nanogpts_train_bin(tmp_path):
    corpus(tmp_path / "in")
    small(tmp_path / "in", tmp_path / "out", shard_tokens=10**8)
    assert sorted(content(tmp_path / "out")) == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]
    tokens = np.memmap(tmp_path / "out/train.bin", dtype=np.uint16, mode="r")  # as nanoGPT opens it
    assert tokens[0] == 256 and len(tokens) == len(prepare(str(tmp_path / "out")).train)


def test_worker_processes_change_nothing(tmp_path, chunky):
    corpus(tmp_path / "in")
    small(tmp_path / "in", tmp_path / "one")
    small(tmp_path / "in", tmp_path / "two", workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")


class Killed(BaseException):
    "Stands for a kill: nothing catches it."


def test_interrupted_at_any_point_it_goes_on_and_the_result_is_the_same_to_the_byte(
    tmp_path, chunky, monkeypatch
):
    corpus(tmp_path / "in", n=60)
    small(tmp_path / "in", tmp_path / "whole")
    whole = content(tmp_path / "whole")
    calls = {"n": 0, "at": None}

    def fragile(fn, before):
        def call(*args, **kwargs):
            if not before:
                result = fn(*args, **kwargs)
            calls["n"] += 1
            if calls["n"] == calls["at"]:
                raise Killed
            return fn(*args, **kwargs) if before else result

        return call

    for before in (True, False):
        for owner, name in (
            (ShardWriter, "append"),
            (ShardWriter, "sync"),
            (ShardWriter, "close_shard"),
            (os, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
        ):
            monkeypatch.setattr(owner, name, fragile(getattr(owner, name), before))
        calls.update(n=0, at=None)
        small(tmp_path / "in", tmp_path / f"out {before}")
        points = calls["n"]
        assert points > 60
        for point in range(2 if before else 1, points + 1, 5):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
            calls.update(n=0, at=point)
            try:
                small(tmp_path / "in", tmp_path / "out", commit_seconds=0.0 if point % 2 else 1e9)
            except Killed:
                pass
            calls.update(n=0, at=point // 2 + 3)
            for _ in range(3):  # the second try may be interrupted too
                try:
                    if not (tmp_path / "out").exists() or (tmp_path / "out/progress.json").exists():
                        small(tmp_path / "in", tmp_path / "out")
                except Killed:
                    calls["at"] = None
            assert content(tmp_path / "out") == whole, f"interrupted at call {point}"
        monkeypatch.undo()
        monkeypatch.setattr(
            prepare_module,
            "find_documents",
            lambda *args, **named: find_documents(*args, **named, chunk_rows=7),
        )


def stop_after(writes, monkeypatch, folder, out):
    "Begin to prepare, and be killed after so many writes."
    append, count = ShardWriter.append, Counter()

    def stop(self, *args):
        count["writes"] += 1
        if count["writes"] > writes:
            raise Killed
        append(self, *args)

    with monkeypatch.context() as m, pytest.raises(Killed):
        m.setattr(ShardWriter, "append", stop)
        small(folder, out)


def test_a_folder_that_is_no_complete_one_of_the_same_recipe_keeps_its_progress_json(
    tmp_path, chunky, monkeypatch
):
    corpus(tmp_path / "in")
    stop_after(4, monkeypatch, tmp_path / "in", tmp_path / "out")
    (tmp_path / "learn").mkdir()
    (tmp_path / "learn/progress.json").write_text('{"solved": 40}')
    small(tmp_path / "in", tmp_path / "other", val_fraction=0.3)
    (tmp_path / "other/progress.json").write_text("{}")  # as a kill leaves it after the renaming
    for name, told in (
        ("out.partial", "give .*out, and it continues"),
        ("learn", "exists"),
        ("other", "exists"),
    ):
        before = content(tmp_path / name)
        with pytest.raises(UserError, match=told):
            small(tmp_path / "in", tmp_path / name)
        assert content(tmp_path / name) == before
    small(tmp_path / "in", tmp_path / "out")  # and the work that was interrupted goes on


def test_a_full_shard_that_is_gone_or_short_is_noticed_when_the_work_goes_on(tmp_path):
    writer = ShardWriter(tmp_path, "train", "<u2", shard_tokens=10)
    writer.append(np.arange(20), documents=1, size=20)
    state = writer.state_dict()
    assert len(state["shards"]) == 2 and state["tokens"] == 0  # nothing is half written
    for harm in (lambda path: os.truncate(path, 18), Path.unlink):
        harm(tmp_path / "train.bin")
        with pytest.raises(UserError, match="train.bin is shorter than its progress.json says"):
            ShardWriter(tmp_path, "train", "<u2", shard_tokens=10).load_state_dict(state)


def test_going_on_with_other_settings_or_other_files_is_refused_and_named(tmp_path, chunky, monkeypatch):
    corpus(tmp_path / "in")
    stop_after(4, monkeypatch, tmp_path / "in", tmp_path / "out")
    with pytest.raises(UserError, match="another val_fraction"):
        small(tmp_path / "in", tmp_path / "out", val_fraction=0.3)
    with open(tmp_path / "in/0.jsonl", "a") as f:
        f.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match="another documents"):
        small(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out.partial").exists()  # what was done is not thrown away by a refusal


def test_a_failure_before_the_first_record_of_work_leaves_nothing_and_binds_nobody(
    tmp_path, chunky, monkeypatch
):
    corpus(tmp_path / "in")
    stop_after(0, monkeypatch, tmp_path / "in", tmp_path / "new/folder/out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    small(tmp_path / "in", tmp_path / "new/folder/out", val_fraction=0.3)


def test_a_record_without_work_as_a_kill_leaves_it_binds_nobody(tmp_path, chunky, monkeypatch):
    corpus(tmp_path / "in")
    with monkeypatch.context() as m:
        m.setattr(
            prepare_module.shutil, "rmtree", lambda *args, **kwargs: None
        )  # nobody clears up after a kill
        stop_after(0, monkeypatch, tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out.partial/progress.json").exists()
    small(tmp_path / "in", tmp_path / "out", val_fraction=0.3)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_the_advice_on_another_fraction_works_when_it_is_followed(tmp_path, fraction):
    corpus(tmp_path / "in", n=12)
    with pytest.raises(UserError, match="--val-fraction") as refusal:
        small(tmp_path / "in", tmp_path / "out", val_fraction=fraction)
    advised = float(str(refusal.value).rsplit("--val-fraction ", 1)[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    small(tmp_path / "in", tmp_path / "out", val_fraction=advised)
    assert min(part["documents"] for part in open_token_data(tmp_path / "out").meta["splits"].values()) > 0


def test_half_a_record_that_a_kill_left_is_not_in_the_result(tmp_path, chunky, monkeypatch):
    corpus(tmp_path / "in")
    stop_after(4, monkeypatch, tmp_path / "in", tmp_path / "out")
    (tmp_path / "out.partial/.progress.json.abc.tmp").mkdir()
    small(tmp_path / "in", tmp_path / "out")
    assert not [p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_a_folder_that_is_somebody_elses_is_not_taken_for_an_unfinished_one(tmp_path):
    corpus(tmp_path / "in")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").write_text("three years")
    with pytest.raises(UserError, match="is in the way"):
        small(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out.partial/thesis.tex").read_text() == "three years"


def test_one_text_is_divided_by_its_place_and_at_a_separator_if_there_is_one(tmp_path):
    stories = [f"Story {i} begins here.\nAnd ends." for i in range(40)]
    text = "\n<|endoftext|>\n".join(stories)
    (tmp_path / "one.txt").write_text(text)
    report = prepare_shards(str(tmp_path / "one.txt"), tmp_path / "whole", "byte", workers=0)
    data = open_token_data(tmp_path / "whole")
    train, val = (data.tokenizer.decode(tokens[1:].tolist()) for tokens in (data.train, data.val))
    assert train + val == text and len(train) == int(0.9 * len(text))
    assert "(39 times)" in report.lines()[0]
    small(tmp_path / "one.txt", tmp_path / "parts", separator="<|endoftext|>")
    data = open_token_data(tmp_path / "parts")
    found = [bytes(part).decode() for tokens in (data.train, data.val) for part in documents_of(tokens)]
    assert sorted(found) == sorted(stories)


def documents_of(tokens):
    "The documents between the eots of byte tokens."
    places = np.flatnonzero(np.asarray(tokens) == 256)
    return [part[1:].astype(np.uint8) for part in np.split(np.asarray(tokens), places)[1:]]


def test_a_file_that_grows_while_it_is_read_is_told_and_the_whole_is_made_afterwards(tmp_path, monkeypatch):
    (tmp_path / "d.txt").write_text("".join(f"document {i}|" for i in range(40)))

    def grow(*args):  # as a download does, between the list of files and their end
        with open(tmp_path / "d.txt", "a") as file:
            file.write("one more|")
        return 1

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "check_space", grow)
        with pytest.raises(UserError, match="d.txt changed while it was read: begin again"):
            small(tmp_path / "d.txt", tmp_path / "out", separator="|")
    assert [path.name for path in tmp_path.iterdir()] == ["d.txt"]
    small(tmp_path / "d.txt", tmp_path / "out", separator="|")
    assert (
        sum(split["documents"] for split in open_token_data(tmp_path / "out").meta["splits"].values()) == 41
    )


def test_two_at_once_in_one_place_are_refused(tmp_path, monkeypatch):
    corpus(tmp_path / "in")

    def second(*args, **kwargs):
        with pytest.raises(UserError, match="another process"):
            small(tmp_path / "in", tmp_path / "out")
        raise Killed

    monkeypatch.setattr(prepare_module, "_write_shards", second)
    with pytest.raises(Killed):
        small(tmp_path / "in", tmp_path / "out")


def test_a_folder_that_another_process_finished_a_moment_ago_is_kept(tmp_path, monkeypatch):
    corpus(tmp_path / "in")
    (tmp_path / "one.txt").write_text("the quick brown fox\n" * 100)
    lock, build = prepare_module._only_one, prepare_module.build_tokenizer
    for source, late, function in (("in", "_only_one", lock), ("one.txt", "build_tokenizer", build)):
        out = tmp_path / f"out-{source}"

        def faster(*args, out=out, function=function):  # the checks before the work have passed
            out.mkdir()
            (out / "theirs").touch()
            return function(*args)

        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, late, faster)
            with pytest.raises(UserError, match="exists: choose another name"):
                small(tmp_path / source, out)
        assert content(out) == {"theirs": b""}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "one.txt", "out-in", "out-one.txt"]


def test_a_folder_made_again_in_one_process_has_the_ids_of_its_own_tokenizer(tmp_path):
    texts = corpus(tmp_path / "in")
    for tokenizer, vocab_size in (("byte", 257), ("bpe", 270), ("bpe", 275)):
        small(tmp_path / "in", tmp_path / "out", tokenizer=tokenizer, vocab_size=vocab_size)
        data = open_token_data(tmp_path / "out")
        assert data.tokenizer.n_vocab == vocab_size
        assert data.tokenizer.decode(data.train[:]) == "".join(t for t in texts if not is_held_out(t, 0.2))
        shutil.rmtree(tmp_path / "out")


def test_a_lock_file_that_a_killed_process_left_blocks_nobody(tmp_path):
    corpus(tmp_path / "in")
    (tmp_path / "out.partial.lock").touch()
    small(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out/meta.json").exists() and not (tmp_path / "out.partial.lock").exists()


def test_a_disk_without_room_is_noticed_before_any_work(tmp_path, monkeypatch):
    corpus(tmp_path / "in")
    monkeypatch.setattr(
        prepare_module.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10**9, 10**9, 10_000)
    )
    with pytest.raises(UserError, match="need about 0.00 GB, and the disk of"):
        small(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list((tmp_path / "out.partial").glob("*.bin"))


def test_a_disk_that_fills_up_ends_in_one_sentence_and_the_work_goes_on_after_it(
    tmp_path, chunky, monkeypatch
):
    corpus(tmp_path / "in")
    append, count = ShardWriter.append, Counter()

    def full(self, *args):
        count["n"] += 1
        if count["n"] == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, *args)

    with monkeypatch.context() as m, pytest.raises(UserError, match="No space left on device.*continues"):
        m.setattr(ShardWriter, "append", full)
        small(tmp_path / "in", tmp_path / "out")
    small(tmp_path / "in", tmp_path / "out")
    small(tmp_path / "in", tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_rows_that_are_no_text_are_reported_and_recorded(tmp_path):
    corpus(tmp_path / "in")
    (tmp_path / "in/9.jsonl").write_text('{"text": "fine"}\n{"text": null}\n{"text": "<|endoftext|>"}\n')
    report = small(tmp_path / "in", tmp_path / "out")
    assert "9.jsonl line 2" in report.lines()[1] and "9.jsonl line 3" in report.lines()[0]
    meta = open_token_data(tmp_path / "out").meta
    assert sum(meta["odd_rows"]["counts"].values()) == 2 and meta["source"].endswith("in")
    train = open_token_data(tmp_path / "out").train[:]
    documents = meta["splits"]["train"]["documents"]
    assert (train == 256).sum() == documents  # the text of the special token is no special token


def test_a_shard_shorter_than_meta_says_is_named_and_a_flipped_byte_is_found(tmp_path, chunky):
    corpus(tmp_path / "in")
    small(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out/train_000002.bin"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="train_000002.bin is damaged"):
        verify(open_token_data(tmp_path / "out"))
    path.write_bytes(raw[:-2])
    with pytest.raises(UserError, match="train_000002.bin has 1998 bytes where meta.json says 1000 tokens"):
        open_token_data(tmp_path / "out")


def test_a_bpe_tokenizer_is_trained_on_training_documents_of_all_files_and_kept(tmp_path):
    corpus(tmp_path / "in")
    small(tmp_path / "in", tmp_path / "out", tokenizer="bpe", vocab_size=270)
    data = open_token_data(tmp_path / "out")
    assert data.tokenizer.n_vocab == 270 and "document" in data.tokenizer.decode(data.train[:20].tolist())


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"tokenizer": "char"}, "char needs"),
        ({"val_fraction": 0.0}, "val_fraction"),
        ({"shard_tokens": 0}, "shard_tokens"),
        ({"tokenizer": "wordpiece"}, "wordpiece"),
        ({"val_fraction": 1e-9}, "no document fell into val"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path, kwargs, words):
    corpus(tmp_path / "in")
    with pytest.raises(UserError, match=words):
        small(tmp_path / "in", tmp_path / "out", **kwargs)
    assert not (tmp_path / "out").exists()


def test_a_chunk_gives_tokens_documents_and_bytes_of_text_for_each_part(tmp_path):
    ByteTokenizer().save(tmp_path / "t.json")
    texts = [f"wörld {i} 😀" for i in range(40)]
    found = tokenize_chunk(str(tmp_path / "t.json"), texts, 0.3)
    for part, held_out in (("train", False), ("val", True)):
        mine = [text for text in texts if is_held_out(text, 0.3) == held_out]
        tokens, documents, size = found[part]
        assert documents == len(mine) > 0 and size == len("".join(mine).encode())
        assert tokens.tolist() == [i for text in mine for i in (256, *text.encode())]
