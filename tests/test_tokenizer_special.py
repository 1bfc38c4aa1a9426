"""Marks behind a trained vocabulary: old ids stay, no text spells a new one, the library agrees."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tinygpt.checkpoint import load_model, save_checkpoint
from tinygpt.checkpoint_open import NanoChars
from tinygpt.data.tokens import build_tokenizer, prepare
from tinygpt.generate.text import prompt_ids
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from tinygpt.tokenizer_special import SpecialTokenizer

NAMES = ["<|user|>", "<|end|>", "<|end|>>"]
ODD = "In 1790, don't <|user|>\n café 日本語 😀<|end|><|endoftext|></s>"
TEXT = "The state of the Union, and the Congress of 1790; <|user|> the people's thanks.\n" * 20 + ODD


def hf_base(folder):
    tokenizers = pytest.importorskip("tokenizers")
    from foreign import save_folder, smollm_tokenizer

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    assert tokenizers
    return read_hf_tokenizer(save_folder(folder, smollm_tokenizer(), eos_token="<|endoftext|>"), 310)


MAKERS = {
    "bpe": lambda folder: BPETokenizer.train(TEXT, 300),
    "char": lambda folder: CharTokenizer.train(TEXT),
    "byte": lambda folder: ByteTokenizer(),
    "nanogpt": lambda folder: NanoChars("".join(sorted(set(TEXT)))),
    "hf": hf_base,
}


@pytest.fixture(params=MAKERS)
def base(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("base"))


def test_old_ids_stay_and_the_new_ones_follow_them(base):
    tok = SpecialTokenizer(base, NAMES, ["<|end|>"])
    n = base.n_vocab
    assert tok.special == {"<|user|>": n, "<|end|>": n + 1, "<|end|>>": n + 2}
    assert tok.n_vocab == len(tok) == len(tok.vocab) == n + 3 and tok.vocab[:n] == base.vocab
    assert (tok.eot, tok.start, tok.ends) == (base.eot, base.start, base.ends | {n + 1})
    for text in (ODD, TEXT, "", "<|end|>"):
        assert tok.encode(text) == base.encode(text) and tok.decode(tok.encode(text)) == text
    assert tok.encode_batch([ODD, "", TEXT], 2) == [base.encode(text) for text in (ODD, "", TEXT)]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"ab<|>/ s\n", "<|user|>", "<|end|>", "日"])).map("".join))
@example("<|end|>>")
def test_no_text_spells_a_new_id(text):
    tok = SpecialTokenizer(ByteTokenizer(), NAMES, ["<|end|>"])
    ids = tok.encode(text)
    assert max(ids, default=0) < 256 and tok.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_a_template_has_the_ids_that_the_library_tokenizers_gives(kind, tmp_path):
    "Its oracle: the library with the same names as added tokens."
    tokenizers = pytest.importorskip("tokenizers")
    from tinygpt.evaluate.export import tokenizer_json

    base = MAKERS[kind](tmp_path)
    tok = SpecialTokenizer(base, NAMES, [])
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(base)))
    theirs.add_special_tokens(NAMES)
    for text in ("", ODD, "<|user|>the people<|end|>", "<|end|>>1790<|end|>", " <|user|> the \n<|end|>"):
        assert tok.encode_template(text) == theirs.encode(text, add_special_tokens=False).ids
    assert tok.n_vocab == len(tok) == theirs.get_vocab_size()
    assert tok.eot in tok.encode_template("a<|endoftext|>T" if kind != "char" else "t<|endoftext|>t")


def test_a_base_from_elsewhere_keeps_its_own_names_in_a_template(tmp_path):
    base = hf_base(tmp_path)
    tok = SpecialTokenizer(base, NAMES, [])
    ids = tok.encode_template("<|im_start|>the<|end|>")
    assert ids == [1, *base.encode("the"), base.n_vocab + 1]
    assert tok.encode_template("<|endoftext|>") == [0]


def test_special_tokens_are_no_text_and_no_bytes(base):
    tok = SpecialTokenizer(base, NAMES, [])
    user, end, _ = tok.special.values()
    ids = [user, *base.encode("the people"), end]
    assert tok.decode(ids) == "the people" and tok.decode(np.array(ids)) == "the people"
    sizes = tok.token_bytes()
    assert sizes.shape == (tok.n_vocab,) and sizes.dtype == np.int64
    assert (sizes[:-3] == base.token_bytes()).all() and not sizes[-3:].any()
    with pytest.raises(UserError, match=f"vocabulary of {tok.n_vocab}"):
        tok.decode([tok.n_vocab])


def test_a_base_that_puts_a_space_before_a_text_takes_it_away_again(tmp_path):
    pytest.importorskip("tokenizers")
    from foreign import llama_tokenizer, save_folder

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    base = read_hf_tokenizer(save_folder(tmp_path, llama_tokenizer(), eos_token="</s>"))
    tok = SpecialTokenizer(base, NAMES, [])
    assert tok.decode(tok.encode("the people")) == base.decode(base.encode("the people")) == "the people"
    assert tok.token_bytes()[tok.eot] == -1


def test_saved_loaded_and_sent_to_a_process_it_is_the_same(base, tmp_path):
    tok = SpecialTokenizer(base, NAMES, ["<|end|>"], "{{ messages }}")
    tok.save(tmp_path / "tok.json")
    for again in (Tokenizer.load(tmp_path / "tok.json"), pickle.loads(pickle.dumps(tok))):
        assert isinstance(again, SpecialTokenizer) and again.fingerprint == tok.fingerprint
        assert again.encode_template(ODD) == tok.encode_template(ODD)
        assert (again.special, again.ends) == (tok.special, tok.ends)
        assert again.chat_template == "{{ messages }}" and type(again.base) is type(base)
    others = [(NAMES, [], "{{ messages }}"), (NAMES[:2], ["<|end|>"], "{{ messages }}"), (NAMES, ["<|end|>"])]
    assert tok.fingerprint not in {SpecialTokenizer(base, *other).fingerprint for other in others}
    assert build_tokenizer(str(tmp_path / "tok.json"), None).fingerprint == tok.fingerprint


def test_a_program_that_imports_no_more_than_the_tokenizer_loads_each_kind(tmp_path):
    base = hf_base(tmp_path / "hf")
    program = "import sys; from tinygpt.tokenizer import Tokenizer; print(Tokenizer.load(sys.argv[1]).kind)"
    for tok in (base, SpecialTokenizer(base, ["<|user|>"], ends=[])):
        tok.save(tmp_path / "tok.json")
        run = [sys.executable, "-c", program, str(tmp_path / "tok.json")]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.stdout.strip() == tok.kind, done.stderr


def test_a_text_is_prepared_with_it_as_with_its_base(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    base = ByteTokenizer()
    tok = SpecialTokenizer(base, NAMES, [])
    tok.save(tmp_path / "tok.json")
    made = [prepare(str(tmp_path / "text.txt"), which) for which in ("byte", str(tmp_path / "tok.json"))]
    assert (made[0].train[:] == made[1].train[:]).all() and made[1].tokenizer.n_vocab == 260


def test_a_checkpoint_brings_it_back(tmp_path):
    tok = SpecialTokenizer(ByteTokenizer(), NAMES, ["<|end|>"])
    sizes = dict(block_size=8, n_layer=1, n_head=1, n_embd=8)
    model = GPT(GPTConfig.llama(vocab_size=tok.n_vocab, **sizes))
    save_checkpoint(tmp_path / "step", model, tok)
    assert load_model(tmp_path / "step")[1].fingerprint == tok.fingerprint


def test_a_prompt_reads_the_names_as_text_unless_it_is_asked_to():
    tok = SpecialTokenizer(ByteTokenizer(), NAMES, [])
    assert prompt_ids(tok, "<|end|>") == [256, *b"<|end|>"]
    assert prompt_ids(tok, "a<|end|>", special=True) == [256, 97, 258]
    assert prompt_ids(tok, "<|endoftext|>a", special=True) == [256, 97]


@pytest.mark.parametrize(
    "special, ends, told",
    [
        ([], [], "one name or more"),
        ("ab", [], "a list of names"),
        (["<|a|>", ""], [], "none of them empty"),
        (["<|a|>", "<|a|>"], [], "'<|a|>' twice"),
        (["<|a|>"], ["<|end|>"], "not among the special tokens"),
        (["<|endoftext|>"], [], "end of text"),
    ],
)
def test_names_that_cannot_work_are_one_sentence(special, ends, told):
    with pytest.raises(UserError) as caught:
        SpecialTokenizer(ByteTokenizer(), special, ends)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_tokens_are_added_once():
    once = SpecialTokenizer(ByteTokenizer(), ["<|a|>"], [])
    with pytest.raises(UserError, match="give its own base, and all names at once"):
        SpecialTokenizer(once, ["<|b|>"], [])
