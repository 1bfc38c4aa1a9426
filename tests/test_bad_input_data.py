"""Bad input for the data: the files of a corpus, folders of tokens, places to write to. One line a case."""

import gzip
import json
import os
import pickle
import shutil
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from bad_input import assert_refused

import tinygpt.data.chunks as chunks_module
from tinygpt.data.__main__ import main as data
from tinygpt.data.tokens import Corpus, write_token_data
from tinygpt.tokenizer import ByteTokenizer
from tinygpt.train import main as train

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 8
TEXT = "It is a truth universally acknowledged.\n" * 40
LINES = "".join(json.dumps({"text": f"document {i}, " * 8}) + "\n" for i in range(60))


def make_corpora(folder):
    "Files as people have them, and as they should not be."
    (folder / "good.jsonl").write_text(LINES)
    (folder / "good.txt").write_text(TEXT)
    (folder / "empty.txt").touch()
    (folder / "empty.jsonl").touch()
    (folder / "tiny.txt").write_text("twenty bytes of text")
    (folder / "utf16.txt").write_text(TEXT, encoding="utf-16")
    (folder / "utf16-unmarked.txt").write_text(TEXT, encoding="utf-16-le")
    (folder / "utf16be.txt").write_text(TEXT, encoding="utf-16-be")
    (folder / "utf32.txt").write_text(TEXT, encoding="utf-32")
    (folder / "latin1.txt").write_bytes(TEXT.replace("u", "ü").encode("latin-1"))
    (folder / "utf16.jsonl").write_text(LINES, encoding="utf-16")
    (folder / "utf16-unmarked.jsonl").write_text(LINES, encoding="utf-16-le")
    (folder / "utf16.jsonl.gz").write_bytes(gzip.compress(LINES.encode("utf-16")))
    (folder / "nuls.txt").write_bytes(bytes(4000))
    for name in ("png.txt", "png.jsonl", "png.parquet", "png.jsonl.gz", "png.jsonl.zst", "picture.png"):
        (folder / name).write_bytes(PNG)
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(LINES.encode())[:-30])
    (folder / "cut.jsonl.zst").write_bytes(zstandard.compress(LINES.encode())[:-30])
    (folder / "cut.jsonl").write_text(LINES + '{"text": "no en')
    (folder / "lists.jsonl").write_text("[1, 2]\n" * 9)
    (folder / "late-list.jsonl").write_text(LINES + "[1, 2]\n")
    (folder / "numbers.jsonl").write_text("7\n" * 9)
    (folder / "strings.jsonl").write_text('"text"\n' * 9)
    (folder / "keys.jsonl").write_text('{"body": "a text"}\n' * 9)
    (folder / "nulls.jsonl").write_text('{"text": null}\n' * 9)
    (folder / "values.jsonl").write_text('{"text": {"text": 7}}\n' * 9)
    (folder / "deep.jsonl").write_text('{"text": ' + "[" * 50_000 + "\n")
    (folder / "same.jsonl").write_text('{"text": "one and the same"}\n' * 9)
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"a" * 200_000 + b'"}'))
    (folder / "bomb.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "' + b"a" * 200_000 + b'"}'))
    (folder / "bomb.jsonl").write_bytes(b'{"text": "' + b"a" * 200_000 + b'"}')
    pq.write_table(pa.table({"text": [1, 2, 3]}), folder / "ints.parquet")
    pq.write_table(pa.table({"body": ["a", "b"]}), folder / "keys.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "none.parquet")
    (folder / "cut.parquet").write_bytes((folder / "keys.parquet").read_bytes()[:-20])
    for name in ("no-files", "empties", "hidden", "others", "exists"):
        (folder / name).mkdir()
    (folder / "empties/a.txt").touch()
    (folder / "empties/b.jsonl").touch()
    (folder / "hidden/.a.txt").write_text(TEXT)
    (folder / "others/a.csv").write_text(TEXT)
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "pipe.txt")
    os.symlink("nowhere", folder / "dangling")
    (folder / "list.json").write_text("[]")


def make_places(folder):
    "What may be in the way of a new folder."
    for name in ("foreign", "no-json", "list", "keys", "negative"):
        (folder / f"{name}.partial").mkdir()
    (folder / "taken.partial").write_text("a file")
    (folder / "foreign.partial/thesis.tex").write_text("three years")
    (folder / "no-json.partial/progress.json").write_text("{")
    (folder / "list.partial/progress.json").write_text("[]")
    (folder / "keys.partial/progress.json").write_text('{"at": [0, 1]}')
    split = dict(shards=[], tokens=-5, documents=1, bytes=1)
    record = dict(recipe={}, at=[0, 1], report=dict(counts={}, places={}), train=split, val=split)
    (folder / "negative.partial/progress.json").write_text(json.dumps(record))


METAS = {  # name of the folder -> what is written over the values of a good meta.json
    "format": {"format": 99},
    "format-text": {"format": "1"},
    "floats": {"dtype": "f4"},
    "long": {"dtype": "i8"},
    "dtype-list": {"dtype": ["<u2"]},
    "no-type": {"dtype": None},
    "vocab-zero": {"vocab_size": 0},
    "vocab-text": {"vocab_size": "257"},
    "vocab-other": {"vocab_size": 300},
    "tokenizer-none": {"tokenizer": None},
    "tokenizer-other": {"tokenizer": "0" * 16},
    "source-none": {"source": None},
    "splits-list": {"splits": []},
    "splits-none": {"splits": None},
}
SPLITS = {  # name of the folder -> what is written over the values of its train split
    "no-bytes": {"bytes": None},
    "bytes-text": {"bytes": "7"},
    "bytes-less": {"bytes": -7},
    "no-documents": {"documents": "many"},
    "no-shards": {"shards": []},
    "shards-text": {"shards": "train.bin"},
    "shards-number": {"shards": [7]},
    "shard-up": {"shards": [{"file": "../x.bin", "tokens": 5}]},
    "shard-dots": {"shards": [{"file": "..", "tokens": 5}]},
    "shard-root": {"shards": [{"file": "/dev/zero", "tokens": 5}]},
    "shard-number": {"shards": [{"file": 7, "tokens": 5}]},
    "shard-folder": {"shards": [{"file": "sub", "tokens": 5}]},
    "shard-away": {"shards": [{"file": "away.bin", "tokens": 5}]},
    "tokens-less": {"shards": [{"file": "train.bin", "tokens": -5}]},
    "tokens-text": {"shards": [{"file": "train.bin", "tokens": "5"}]},
    "tokens-wrong": {"shards": [{"file": "train.bin", "tokens": 5}]},
    "twice": {"shards": [{"file": "train.bin", "tokens": 1608}] * 2},
    "hash": {"shards": [{"file": "train.bin", "tokens": 1601, "sha256": "0" * 64}]},
}


def make_tokens(folder):
    "Token folders with one thing wrong in each."
    write_token_data(folder / "tokens", Corpus("t", [TEXT], [TEXT[:200]], "a test"), ByteTokenizer())
    good = json.loads((folder / "tokens/meta.json").read_text())
    for name, change in METAS.items():
        shutil.copytree(folder / "tokens", folder / f"meta-{name}")
        (folder / f"meta-{name}/meta.json").write_text(json.dumps({**good, **change}))
    for name, change in SPLITS.items():
        shutil.copytree(folder / "tokens", folder / f"split-{name}")
        splits = {**good["splits"], "train": {**good["splits"]["train"], **change}}
        (folder / f"split-{name}/meta.json").write_text(json.dumps({**good, "splits": splits}))
    (folder / "split-shard-folder/sub").mkdir()
    whole = ("json-list", "json-half", "json-binary", "json-empty", "no-tokenizer", "tokenizer-png", "ids")
    for name in (*whole, "val-only", "middle"):
        shutil.copytree(folder / "tokens", folder / f"whole-{name}")
    (folder / "whole-json-list/meta.json").write_text("[]")
    (folder / "whole-json-half/meta.json").write_text('{"format": 1,')
    (folder / "whole-json-binary/meta.json").write_bytes(PNG)
    (folder / "whole-json-empty/meta.json").write_text("")
    (folder / "whole-no-tokenizer/tokenizer.json").unlink()
    (folder / "whole-tokenizer-png/tokenizer.json").write_bytes(PNG)
    tokens = good["splits"]["train"]["shards"][0]["tokens"]
    np.full(tokens, 60_000, dtype="<u2").tofile(folder / "whole-ids/train.bin")
    (folder / "whole-val-only/train.bin").unlink()
    (folder / "meta-folder/meta.json").mkdir(parents=True)
    (folder / "meta-pipe").mkdir()
    os.mkfifo(folder / "meta-pipe/meta.json")


def make_nanogpt(folder):
    "nanoGPT's folders with one thing wrong in each."
    metas = {
        "twice": {"itos": {0: "a", 1: "a"}},
        "long": {"itos": {0: "ab", 1: "c"}},
        "holes": {"itos": {0: "a", 5: "c"}},
        "numbers": {"itos": {0: 1, 1: 2}},
        "none": {"itos": {}},
        "list": ["a", "b"],
        "code": {"itos": print},
        "small": {"itos": {0: "a"}},
        "empty": {"itos": {0: "a", 1: "b"}},
        "odd": {"itos": {0: "a", 1: "b"}},
        "no-val": {"itos": {0: "a", 1: "b"}},
        "folder": {"itos": {0: "a", 1: "b"}},
        "text": None,
    }
    for name, meta in metas.items():
        place = folder / f"nano-{name}"
        place.mkdir()
        for split in ("train", "val"):
            np.array([0, 1, 2] * 50, dtype="<u2").tofile(place / f"{split}.bin")
        (place / "meta.pkl").write_bytes(b"no pickle" if meta is None else pickle.dumps(meta))
    (folder / "nano-empty/train.bin").write_bytes(b"")
    (folder / "nano-odd/train.bin").write_bytes(b"abc")
    (folder / "nano-no-val/val.bin").unlink()
    (folder / "nano-folder/train.bin").unlink()
    (folder / "nano-folder/train.bin").mkdir()
    shutil.copytree(folder / "nano-odd", folder / "nano-gpt2")
    (folder / "nano-gpt2/meta.pkl").unlink()
    np.array([50_257] * 50, dtype="<u2").tofile(folder / "nano-gpt2/train.bin")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo")
    for make in (make_corpora, make_places, make_tokens, make_nanogpt):
        make(folder)
    return folder


# what is wrong, the words of the command, a word that the sentence holds; flags are separated by blanks

FILES = [  # python -m tinygpt.data prepare FILE out
    ("", "empty"),
    ("nowhere", "does not exist"),
    ("no-files", "holds no file of the kinds"),
    ("empties", "is empty"),
    ("hidden", "holds no file of the kinds"),
    ("others", "holds no file of the kinds"),
    ("picture.png", "holds no file of the kinds"),
    ("pipe", "not a regular file"),
    ("pipe.txt", "not a regular file"),
    ("/dev/zero", "not a regular file"),
    ("/dev/null", "not a regular file"),
    ("dangling", "does not exist"),
    # Python 3.14 no longer tells a name that no disk takes from one that is not there
    ("n" * 300, "shorter name" if sys.version_info < (3, 14) else "does not exist"),
    (os.fsdecode(b"caf\xe9.txt"), "not UTF-8: rename it"),
    ("nothing://there", "cannot be reached"),
    ("empty.txt", "is empty"),
    ("empty.jsonl", "is empty"),
    ("tiny.txt", "holds 18 characters"),
    ("utf16.txt", "iconv -f utf-16"),
    ("utf16-unmarked.txt", "iconv -f utf-16le"),
    ("utf16be.txt", "iconv -f utf-16be"),
    ("utf32.txt", "iconv -f utf-32"),
    ("latin1.txt", "iconv -f latin1"),
    ("utf16.jsonl", "iconv -f utf-16"),
    ("utf16-unmarked.jsonl", "iconv -f utf-16le"),
    ("utf16.jsonl.gz", "zcat"),
    ("nuls.txt", "is not text"),
    ("png.txt", "not UTF-8"),
    ("png.jsonl", "not json"),
    ("png.parquet", "damaged"),
    ("png.jsonl.gz", "damaged"),
    ("png.jsonl.zst", "damaged"),
    ("cut.jsonl.gz", "cut short"),
    ("cut.jsonl.zst", "cut short"),
    ("cut.parquet", "cut short"),
    ("cut.jsonl", "is the file complete?"),
    ("lists.jsonl", "holds a list"),
    ("late-list.jsonl", "line 61 holds a list"),
    ("numbers.jsonl", "holds an int"),
    ("strings.jsonl", "holds a str"),
    ("keys.jsonl", "--text-key"),
    ("nulls.jsonl", "holds no text"),
    ("values.jsonl", "holds no text"),
    # too deep for Python's parser; since 3.14 it gets to the end, which is missing
    ("deep.jsonl", "damaged" if sys.version_info < (3, 14) else "is not json"),
    ("same.jsonl", "holds one document"),
    ("bomb.jsonl.gz", "more than 100,000 bytes"),
    ("bomb.jsonl.zst", "more than 100,000 bytes"),
    ("bomb.jsonl", "more than 100,000 bytes"),
    ("ints.parquet", "int64, not text"),
    ("keys.parquet", "--text-key"),
    ("none.parquet", "holds no text"),
]


@pytest.mark.parametrize("file, word", FILES, ids=[file[:30] or "no name" for file, _ in FILES])
def test_a_corpus_that_cannot_be_used(file, word, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    monkeypatch.setattr(chunks_module, "LONGEST_DOCUMENT", 100_000)
    argv = ["prepare", file, "out", "--tokenizer", "byte", "--workers", "0"]
    assert_refused(data, argv, word, zoo, capsys)


OUTS = [  # python -m tinygpt.data prepare good.jsonl OUT
    ("", "not a name for a new folder"),
    (".", "not a name for a new folder"),
    ("..", "not a name for a new folder"),
    ("/", "not a name for a new folder"),
    ("~", "exists"),
    ("/dev/null", "is not a folder"),
    ("/dev/null/out", "/dev/null is not a folder"),
    ("good.txt", "exists and is not a folder"),
    ("good.txt/out", "good.txt is not a folder"),
    ("pipe", "is not a folder"),
    ("dangling", "is not a folder"),
    ("exists", "exists"),
    ("two\nlines", "does not print"),
    ("tab\tstop", "does not print"),
    ("n" * 300, "too long"),
    ("n" * 240, "too long"),
    (os.fsdecode(b"caf\xe9"), "does not print"),
    ("taken", "taken.partial is in the way"),
    ("foreign", "foreign.partial is in the way"),
    ("no-json", "is not JSON"),
    ("list", "holds a list"),
    ("keys", "damaged"),
    ("negative", "damaged"),
]


@pytest.mark.parametrize("out, word", OUTS, ids=[out[:30] or "no name" for out, _ in OUTS])
@pytest.mark.parametrize("corpus", ["good.jsonl", "good.txt"])
def test_a_place_that_cannot_be_written_to(corpus, out, word, zoo, monkeypatch, capsys):
    if corpus == "good.txt" and os.path.exists(zoo / f"{out}.partial"):
        return  # one text is written at once, and never partial
    monkeypatch.chdir(zoo)
    assert_refused(data, ["prepare", corpus, out, "--tokenizer", "byte", "--workers", "0"], word, zoo, capsys)


FLAGS = [  # python -m tinygpt.data prepare good.jsonl out FLAGS
    ("--val-fraction 0", "val_fraction = 0.0"),
    ("--val-fraction 1", "val_fraction = 1.0"),
    ("--val-fraction -1", "val_fraction = -1"),
    ("--val-fraction nan", "val_fraction = nan"),
    ("--val-fraction inf", "val_fraction = inf"),
    ("--val-fraction half", "val-fraction"),
    ("--val-fraction 1e-12", "or --val-fraction 0.0"),
    ("--shard-tokens 0", "shard_tokens = 0"),
    ("--shard-tokens -5", "shard_tokens = -5"),
    ("--shard-tokens many", "shard-tokens"),
    ("--workers -1", "workers = -1"),
    ("--workers 100000", "workers = 100000"),
    ("--workers two", "workers"),
    ("--tokenizer char", "char needs"),
    ("--tokenizer nowhere.json", "none of bpe, char"),
    ("--tokenizer exists", "none of bpe, char"),
    ("--tokenizer pipe", "none of bpe, char"),
    ("--tokenizer /dev/zero", "none of bpe, char"),
    ("--tokenizer picture.png", "give the file of a tokenizer"),
    ("--tokenizer list.json", "give the file of a tokenizer"),
    ("--tokenizer empty.txt", "give the file of a tokenizer"),
    ("--tokenizer bpe --vocab-size 0", "vocab_size = 0"),
    ("--tokenizer bpe --vocab-size -5", "vocab_size = -5"),
    ("--tokenizer bpe --vocab-size 9999", "vocab_size = 9999 is too large"),
    ("--tokenizer bpe --vocab-size 9999999999999", "too large"),
    ("--text-key body", "--text-key"),
    ("--separator X", "is for .txt files"),
    ("--seperator X", "did you mean --separator?"),
]


@pytest.mark.parametrize("flags, word", FLAGS, ids=[flags for flags, _ in FLAGS])
def test_a_setting_that_cannot_work(flags, word, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    argv = ["prepare", "good.jsonl", "new/out", "--tokenizer", "byte", "--workers", "0", *flags.split()]
    assert_refused(data, argv, word, zoo, capsys)


FOLDERS = [  # python -m tinygpt.data verify FOLDER
    ("", "meta.json is missing"),
    ("nowhere", "meta.json is missing"),
    ("good.txt", "meta.json is missing"),
    ("pipe", "meta.json is missing"),
    ("exists", "meta.json is missing"),
    ("meta-folder", "meta.json is missing"),
    ("meta-pipe", "meta.json is missing"),
    ("meta-format", "format = 99"),
    ("meta-format-text", "format = '1'"),
    ("meta-floats", "dtype = 'f4'"),
    ("meta-long", "dtype = 'i8'"),
    ("meta-dtype-list", "dtype = ['<u2']"),
    ("meta-no-type", "dtype = None"),
    ("meta-vocab-zero", "vocab_size = 0"),
    ("meta-vocab-text", "vocab_size = '257'"),
    ("meta-vocab-other", "vocab_size 300"),
    ("meta-tokenizer-none", "tokenizer = None"),
    ("meta-tokenizer-other", "0000000000000000"),
    ("meta-source-none", "source = None"),
    ("meta-splits-list", "splits = []"),
    ("meta-splits-none", "splits = None"),
    ("split-no-bytes", "bytes = None"),
    ("split-bytes-text", "bytes = '7'"),
    ("split-bytes-less", "bytes = -7"),
    ("split-no-documents", "documents = 'many'"),
    ("split-no-shards", "shards = []"),
    ("split-shards-text", "shards = 'train.bin'"),
    ("split-shards-number", "without slashes"),
    ("split-shard-up", "without slashes"),
    ("split-shard-dots", "without slashes"),
    ("split-shard-root", "without slashes"),
    ("split-shard-number", "without slashes"),
    ("split-shard-folder", "missing, or not a file"),
    ("split-shard-away", "missing, or not a file"),
    ("split-tokens-less", "tokens = -5"),
    ("split-tokens-text", "tokens = '5'"),
    ("split-tokens-wrong", "says 5 tokens"),
    ("split-twice", "named twice"),
    ("split-hash", "damaged"),
    ("whole-json-list", "holds a list"),
    ("whole-json-half", "not JSON"),
    ("whole-json-binary", "not JSON"),
    ("whole-json-empty", "not JSON"),
    ("whole-no-tokenizer", "tokenizer.json is missing"),
    ("whole-tokenizer-png", "is not a tokenizer"),
    ("whole-ids", "holds id 60000"),
    ("whole-val-only", "missing, or not a file"),
    ("nano-twice", "each of them once"),
    ("nano-long", "each of them once"),
    ("nano-holes", "meta.pkl is not nanoGPT's"),
    ("nano-numbers", "each of them once"),
    ("nano-none", "each of them once"),
    ("nano-list", "meta.pkl is not nanoGPT's"),
    ("nano-code", "builtins.print"),
    ("nano-text", "meta.pkl is not nanoGPT's"),
    ("nano-small", "beyond the vocabulary"),
    ("nano-empty", "0 bytes"),
    ("nano-odd", "3 bytes"),
    ("nano-no-val", "val.bin is missing"),
    ("nano-folder", "train.bin is missing"),
    ("nano-gpt2", "holds id 50257"),
]


@pytest.mark.parametrize("folder, word", FOLDERS, ids=[folder or "no name" for folder, _ in FOLDERS])
def test_a_folder_of_tokens_that_is_not_what_it_says(folder, word, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    assert_refused(data, ["verify", folder], word, zoo, capsys)


TRAINED = [  # python -m tinygpt.train --data ...: the same checks, before there is a run folder
    ("empty.txt", "is empty"),
    ("empties", "is empty"),
    ("tiny.txt", "holds 18 characters"),
    ("no-files", "holds no .txt file"),
    ("pipe", "not a regular file"),
    ("/dev/zero", "not a regular file"),
    ("utf16.txt", "iconv -f utf-16"),
    ("utf16-unmarked.txt", "iconv -f utf-16le"),
    ("png.txt", "not UTF-8"),
    ("nuls.txt", "is not text"),
    ("good.jsonl", "python -m tinygpt.data prepare"),
    ("utf16.jsonl --loader stream", "iconv -f utf-16"),
    ("lists.jsonl --loader stream", "holds a list"),
    ("keys.jsonl --loader stream", "'text'"),
    ("same.jsonl --loader stream", "holds one document, and validation needs another"),
    ("tiny.txt --loader stream", "holds 18 characters"),
    ("good.txt --loader stream --block-size 2000", "fewer than one block"),
    ("good.txt --separator X", "divides nothing"),
    ("sotu --separator X", "texts of your own"),
    ("tokens --separator X", "holds tokens"),
    ("meta-format", "format = 99"),
    ("split-no-bytes", "bytes = None"),
    ("whole-json-list", "holds a list"),
    ("nano-twice", "each of them once"),
    ("nano-long", "each of them once"),
    ("nano-empty", "0 bytes"),
    ("nano-odd", "3 bytes"),
]


@pytest.mark.parametrize("words, word", TRAINED, ids=[words for words, _ in TRAINED])
def test_training_on_it_is_refused_before_there_is_a_run(words, word, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    small = "--tokenizer byte --n-layer 1 --n-embd 16 --n-head 2 --block-size 8 --batch-size 2 --max-steps 60"
    assert_refused(train, [*small.split(), "--data", *words.split()], word, zoo, capsys)


CACHES = [  # TINYGPT_CACHE
    ("good.txt", "set TINYGPT_CACHE"),
    ("/dev/null", "set TINYGPT_CACHE"),
    ("/proc/nowhere", "set TINYGPT_CACHE"),
]


@pytest.mark.parametrize("cache, word", CACHES, ids=[cache for cache, _ in CACHES])
def test_a_cache_that_cannot_be_written_to(cache, word, zoo, monkeypatch, capsys):
    monkeypatch.chdir(zoo)
    monkeypatch.setenv("TINYGPT_CACHE", cache)
    argv = "--tokenizer byte --n-layer 1 --n-embd 16 --n-head 2 --block-size 8 --data good.txt".split()
    assert_refused(train, argv, word, zoo, capsys)


# the remedies, followed


@pytest.mark.skipif(not shutil.which("iconv"), reason="iconv is not installed")
@pytest.mark.parametrize(
    "name", ["utf16.txt", "utf16-unmarked.txt", "utf16be.txt", "utf32.txt", "utf16.jsonl.gz"]
)
def test_the_command_that_converts_a_file_makes_one_that_can_be_used(
    name, zoo, tmp_path, monkeypatch, capsys
):
    source = tmp_path / "my own; $(files)"
    source.mkdir()
    shutil.copy(zoo / name, source)
    monkeypatch.chdir(source)
    flags = ["--tokenizer", "byte", "--workers", "0", "--val-fraction", "0.2"]
    assert data(["prepare", str(source / name), "out", *flags]) == 2
    convert = capsys.readouterr().err.strip().split("convert it with ")[1]
    assert os.system(convert) == 0
    new = convert.rsplit("> ", 1)[1]
    assert data(["prepare", new, "out", *flags]) == 0
    assert data(["verify", "out"]) == 0
