import json
import urllib.error

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tinygpt.corpus as corpus_module
from tinygpt.data import Corpus, RandomLoader, hold_out, load_corpus, open_token_data, prepare, shakespeare, token_dtype, write_token_data
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer


@pytest.fixture
def folder(tmp_path):
    write_token_data(tmp_path / "t", Corpus("t", ["hello", "wörld"], ["held out"], "a test"), ByteTokenizer())
    return tmp_path / "t"


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


def test_a_train_bin_is_nanogpts_format(folder):
    raw = np.fromfile(folder / "train.bin", dtype=np.uint16)  # as nanoGPT reads it: no header
    expected = [256, *b"hello", 256, *"wörld".encode()]
    assert raw.tolist() == expected
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["splits"]["train"] == {"documents": 2, "bytes": 11, "shards": [{"file": "train.bin", "tokens": 13}]}


def test_opening_reads_back_what_was_written(folder):
    data = open_token_data(folder)
    assert data.tokenizer.decode(data.val.tolist()) == "held out"
    assert isinstance(data.train, np.memmap) and not data.train.flags.writeable


@pytest.mark.parametrize("vocab_size, dtype", [(66, "<u2"), (65_536, "<u2"), (65_537, "<u4"), (128_256, "<u4")])
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
    [("truncated", "train.bin"), ("missing", "val.bin"), ("longer", "train.bin"), ("another tokenizer", "tokenizer.json"),
     ("another vocabulary", "vocab_size 300"), ("ids too large", "60000"), ("no json", "meta.json"), ("no splits", "meta.json")],
)  # fmt: skip
def test_a_broken_token_folder_is_refused_and_the_fault_named(folder, how, named):
    damage(folder, how)
    with pytest.raises(UserError, match=named):
        open_token_data(folder)


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

    monkeypatch.setattr(corpus_module.urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match="tinyshakespeare.txt"):
        shakespeare()


def test_shakespeare_that_is_not_shakespeare_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text("To be or not")
    with pytest.raises(UserError, match="sha256"):
        shakespeare()


def test_prepare_builds_once_and_again_when_the_text_changes(words, cache):
    first = prepare(str(words), "byte")
    before = first.folder.stat().st_mtime_ns
    assert prepare(str(words), "byte").folder == first.folder and first.folder.stat().st_mtime_ns == before
    words.write_text(words.read_text() + "one more line\n")
    assert prepare(str(words), "byte").folder != first.folder
    assert prepare(str(words), "char").folder not in (first.folder, prepare(str(words), "byte").folder)


def test_prepare_opens_a_token_folder_as_it_is(folder):
    assert prepare(str(folder), "gpt2").tokenizer.fingerprint == ByteTokenizer().fingerprint


def test_a_tokenizer_file_can_be_used_on_other_text(words, tmp_path):
    ByteTokenizer().save(tmp_path / "my.json")
    assert prepare(str(words), str(tmp_path / "my.json")).tokenizer.n_vocab == 257
    with pytest.raises(UserError, match="tokenizer"):
        prepare(str(words), "wordpiece")


# the loader


TOKENS = np.arange(1000, dtype=np.uint16)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**12), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(seed, step, world_size):
    whole = RandomLoader(TOKENS, 12, 7, seed)
    whole.load_state_dict({"step": step})
    parts = [RandomLoader(TOKENS, 12, 7, seed, rank, world_size) for rank in range(world_size)]
    for part in parts:
        part.load_state_dict({"step": step})
    x, y = next(whole)
    assert torch.equal(torch.cat([next(p)[0] for p in parts]), x)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_resuming_at_every_step_equals_not_stopping():
    loader = RandomLoader(TOKENS, 4, 8, seed=5)
    straight, states = [], []
    for _ in range(20):
        states.append(loader.state_dict())
        straight.append(next(loader))
    for state, (x, y) in zip(states, straight):
        resumed = RandomLoader(TOKENS, 4, 8, seed=5, device="cpu")
        resumed.load_state_dict(json.loads(json.dumps(state)))
        x2, y2 = next(resumed)
        assert torch.equal(x, x2) and torch.equal(y, y2)


def test_steps_and_seeds_give_different_windows():
    a, b = RandomLoader(TOKENS, 8, 8, seed=1), RandomLoader(TOKENS, 8, 8, seed=2)
    assert len({tuple(a.starts(s)) for s in range(100)} | {tuple(b.starts(s)) for s in range(100)}) == 200


def test_windows_reach_both_ends_of_the_tokens_and_no_further():
    loader = RandomLoader(np.arange(12), 64, 8)
    starts = np.concatenate([loader.starts(s) for s in range(20)])
    assert set(starts) == {0, 1, 2, 3}  # the last target of window 3 is token 11


def test_windows_are_uniform():
    loader = RandomLoader(np.arange(108), 1000, 8)
    counts = np.bincount(np.concatenate([loader.starts(s) for s in range(50)]), minlength=100)
    chi2 = ((counts - 500) ** 2 / 500).sum()  # 99 degrees of freedom: mean 99, standard deviation 14
    assert 50 < chi2 < 160


def test_a_corpus_shorter_than_a_block_and_a_batch_that_does_not_divide_are_refused():
    with pytest.raises(UserError, match="block"):
        RandomLoader(np.arange(8), 4, 8)
    with pytest.raises(UserError, match="3 ranks"):
        RandomLoader(TOKENS, 4, 8, world_size=3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_batches_arrive_on_the_gpu_unchanged():
    a, b = RandomLoader(TOKENS, 4, 8), RandomLoader(TOKENS, 4, 8, device="cuda")
    for _ in range(5):
        assert torch.equal(next(a)[0], next(b)[0].cpu())
