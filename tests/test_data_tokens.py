import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.data.tokens import Corpus, Shards, open_token_data, prepare, token_dtype, write_token_data
from tinygpt.data.windows import RandomLoader, read_windows, to_batch
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer


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


def nanogpt_batch(path, batch_size, block_size):
    "Open and cut as nanoGPT's get_batch does, in other words."
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).tolist()
    cut = lambda shift: torch.stack(
        [torch.tensor(tokens[i + shift : i + shift + block_size].astype(np.int64)) for i in starts]
    )
    return cut(0), cut(1)


def test_our_files_train_in_nanogpt_and_its_files_train_here(tmp_path, words):
    ours = prepare(str(words), "byte")
    x, y = nanogpt_batch(ours.folder / "train.bin", 4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1]) and int(x.max()) < ours.tokenizer.n_vocab
    # by characters, with the meta.pkl that its prepare.py writes
    text = words.read_text()
    chars = sorted(set(text))
    stoi, itos = {c: i for i, c in enumerate(chars)}, dict(enumerate(chars))
    cut = int(len(text) * 0.9)
    for name, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(chars), "itos": itos, "stoi": stoi}))
    theirs = prepare(str(tmp_path), "bpe")
    assert (
        theirs.tokenizer.decode(theirs.val[:].tolist()) == text[cut:]
        and theirs.tokenizer.n_vocab == len(chars) + 1
    )
    assert theirs.meta["splits"]["train"]["bytes"] == cut
    x, y = next(RandomLoader(theirs.train, 4, 16))
    assert theirs.tokenizer.decode(x[0]) in text


def test_nanogpts_gpt2_files_open_with_the_gpt2_vocabulary_and_need_to_be_told_so(tmp_path):
    for name in ("train", "val"):
        np.array([31373, 995, 50256] * 5, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    with pytest.raises(UserError, match="--tokenizer gpt2"):
        prepare(str(tmp_path), "bpe")
    data = prepare(str(tmp_path), "gpt2")
    assert data.tokenizer.decode(data.train[:3].tolist()) == "hello world"
    with pytest.raises(UserError, match="50256.*another tokenizer"):
        prepare(str(tmp_path), "byte")
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match="val.bin is missing"):
        prepare(str(tmp_path), "gpt2")


def test_a_meta_pkl_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0\0" * 10)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": print}))
    with pytest.raises(UserError, match="builtins.print"):
        prepare(str(tmp_path), "gpt2")


def test_other_kinds_of_files_are_led_to_the_command_that_prepares_them(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="python -m tinygpt.data prepare"):
        prepare(str(tmp_path / "x.parquet"), "byte")


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
    [("truncated", "train.bin"), ("missing", "val.bin"), ("longer", "train.bin"), ("another tokenizer", "tokenizer.json"),
     ("another vocabulary", "vocab_size 300"), ("ids too large", "60000"), ("no json", "meta.json"), ("no splits", "meta.json")],
)  # fmt: skip
def test_a_broken_token_folder_is_refused_and_the_fault_named(folder, how, named):
    damage(folder, how)
    with pytest.raises(UserError, match=named):
        open_token_data(folder)


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.slices(40), st.lists(st.integers(-40, 39), max_size=10))
def test_token_files_one_after_the_other_read_as_one_array(cuts, part, places):
    whole = np.arange(1000, 1040, dtype=np.uint16)
    shards = Shards(np.split(whole, sorted(cuts)))
    assert len(shards) == 40 and shards.dtype == whole.dtype
    assert shards[part].tolist() == whole[part].tolist()
    assert shards[np.array(places, dtype=int)].tolist() == whole[np.array(places, dtype=int)].tolist()


def test_behind_the_last_token_there_is_padding_that_is_no_id_and_no_target():
    rows = read_windows(np.arange(10, 20), np.array([0, 7]), 5)
    assert rows.tolist() == [[10, 11, 12, 13, 14], [17, 18, 19, -100, -100]]
    x, y = to_batch(rows, torch.device("cpu"))
    assert x.tolist() == [[10, 11, 12, 13], [17, 18, 19, 0]] and y.tolist() == [
        [11, 12, 13, 14],
        [18, 19, -100, -100],
    ]


def test_the_last_id_of_the_vocabulary_is_taken_and_the_next_one_refused(folder):
    np.full(13, 256, dtype="<u2").tofile(folder / "train.bin")
    assert open_token_data(folder).train.tolist() == [256] * 13
    np.full(13, 257, dtype="<u2").tofile(folder / "train.bin")
    with pytest.raises(UserError, match="257"):
        open_token_data(folder)
