import urllib.error

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinygpt.data.tokens as corpus_module
from tinygpt.data.tokens import Corpus, build_tokenizer, hold_out, load_corpus, shakespeare
from tinygpt.support import UserError


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

    monkeypatch.setattr(corpus_module.urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match="tinyshakespeare.txt"):
        shakespeare()


def test_shakespeare_that_is_not_shakespeare_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path))
    (tmp_path / "tinyshakespeare.txt").write_text("To be or not")
    with pytest.raises(UserError, match="sha256"):
        shakespeare()


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
