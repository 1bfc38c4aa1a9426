"""Others' tokenizers behind our interface: the ids of transformers, the bytes of the text."""

import json
import pickle
import sys
import warnings

import pytest

pytest.importorskip("tokenizers")
from foreign import ODD, TEXT, llama_tokenizer, save_folder, smollm_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Theirs

from tinygpt import tokenizer_hf
from tinygpt.data.tokens import Corpus, build_tokenizer, open_token_data, write_token_data
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer, byte_spelling
from tinygpt.tokenizer_hf import HFTokenizer, _library, read_hf_tokenizer, read_tokenizer, token_speller

MAKERS = {"smollm": (smollm_tokenizer, "<|endoftext|>"), "llama": (llama_tokenizer, "</s>")}
every = pytest.mark.parametrize("name", MAKERS)


def opened(folder, name, n_vocab=None):
    make, end = MAKERS[name]
    return read_hf_tokenizer(save_folder(folder, make(), eos_token=end), n_vocab)


@every
def test_ids_and_text_are_those_of_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    ours = opened(tmp_path, name)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "a", ODD, ODD[::-1], "  two", "\n\n", "1790", TEXT):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert [*ours.start, *ids] == theirs(text)["input_ids"]
        assert ours.decode(ids) == text
    assert ours.encode_batch([ODD, "", TEXT], 4) == [ours.encode(text) for text in (ODD, "", TEXT)]


@every
def test_a_token_is_written_as_the_file_writes_it(tmp_path, name):
    ours = opened(tmp_path, name)
    written = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert all(ours.token(i) == token for token, i in written.items())
    assert ours.token(ours.n_vocab + 5) is None


@every
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_documents(tmp_path, name):
    ours = opened(tmp_path, name, 700)
    sizes = ours.token_bytes()
    assert sizes.shape == (700,) and len(ours.vocab) == ours.n_vocab == 700
    documents = [ODD, TEXT, "x", "日本"]
    ids = [i for text in documents for i in (ours.eot, *ours.encode(text))]
    assert sizes[ids].sum() == sum(len(text.encode()) for text in documents)


@every
def test_special_tokens_in_a_text_are_text_unless_asked(tmp_path, name):
    ours, end = opened(tmp_path, name), MAKERS[name][1]
    text = f"a{end}b<|im_start|><s>"
    ids = ours.encode(text)
    assert ours.ends.isdisjoint(ids) and ours.decode(ids) == text
    assert ours.ends & set(ours.encode_template(text))
    assert ours.decode_bytes([ours.eot]) == b""


def test_a_token_that_ends_a_text_is_text_in_one_also_where_the_file_does_not_call_it_special(tmp_path):
    made = smollm_tokenizer()
    made.add_tokens([AddedToken("<end_of_turn>", special=False, normalized=False)])
    folder = save_folder(tmp_path, made, eos_token="<|endoftext|>")
    end = made.token_to_id("<end_of_turn>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    ours = read_hf_tokenizer(folder)
    text = "a<end_of_turn>b"
    ids = ours.encode(text)
    assert ours.ends == {0, end} and ours.ends.isdisjoint(ids) and ours.decode(ids) == text
    assert ours.token_bytes()[ids].sum() == len(text.encode()) and ours.token_bytes()[end] == 0
    assert ours.encode_template(text) == [*ours.encode("a"), end, *ours.encode("b")]
    assert pickle.loads(pickle.dumps(ours)).encode(text) == ids


def test_eot_is_what_every_text_begins_with_or_else_what_ends_one(tmp_path):
    smollm = opened(tmp_path / "a", "smollm")
    assert (smollm.eot, smollm.start, smollm.ends) == (0, [], {0})
    llama = opened(tmp_path / "b", "llama")
    assert (llama.eot, llama.start, llama.ends) == (1, [1], {1, 2})
    assert (ByteTokenizer().start, ByteTokenizer().ends) == ([256], {256})


@pytest.mark.parametrize("unk", [None, "<unk>"])
def test_a_vocabulary_without_the_letter_a_keeps_what_every_text_begins_with(tmp_path, unk):
    "That of DNA, say."
    tokens = ["<s>", "</s>", "<unk>", "A", "C", "G", "T", "GA"]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = Theirs(models.BPE(vocab=vocab, merges=[("G", "A")], unk_token=unk))
    around = dict(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.post_processor = processors.TemplateProcessing(**around)
    made.add_special_tokens(tokens[:3])
    ours = read_hf_tokenizer(save_folder(tmp_path, made, eos_token="</s>"))
    assert ours.start == [0] and ours.eot == 0 and ours.ends == {0, 1}
    assert [*ours.start, *ours.encode("GATC"), 1] == made.encode("GATC").ids == [0, 7, 6, 4, 1]


def test_the_token_that_ends_a_text_is_found_in_any_of_the_files(tmp_path):
    folder = save_folder(tmp_path, smollm_tokenizer())
    assert read_hf_tokenizer(folder).eot == 0  # by its usual name
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5, "vocab_size": 310}))
    assert read_hf_tokenizer(folder).eot == 5 and read_hf_tokenizer(folder).n_vocab == 310
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    assert read_hf_tokenizer(folder).ends_in_order == [2, 4, 5]
    settings = {"eos_token": {"content": "<|im_start|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read_hf_tokenizer(folder).ends_in_order == [1, 2, 4, 5]


def test_without_such_a_token_the_remedy_works(tmp_path):
    made = Theirs(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    made.decoder = decoders.ByteLevel()
    folder = save_folder(tmp_path, made)
    with pytest.raises(UserError, match='write "eos_token" into its tokenizer_config.json'):
        read_hf_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert read_hf_tokenizer(folder).eot == 1


def test_bytes_that_have_no_token_are_left_out_with_a_warning_said_once(tmp_path):
    made = Theirs(models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "</s>": 3}, merges=[("a", "b")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ours = read_hf_tokenizer(save_folder(tmp_path, made))
    assert ours.encode("abba") == [2, 1, 0]
    with pytest.warns(UserWarning, match="3 of 5 bytes of a text have no token"):
        assert ours.encode("a日b") == made.encode("a日b").ids == [2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.encode("日") == []


def test_a_text_that_the_tokenizer_changes_is_warned_of_once(tmp_path):
    lower = smollm_tokenizer()
    lower.normalizer = normalizers.Lowercase()
    ours = read_hf_tokenizer(save_folder(tmp_path / "a", lower))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.decode(ours.encode("the union")) == "the union"
    with pytest.warns(UserWarning, match="1 of 2 texts are not what their ids decode to"):
        ours.encode_batch(["the union", "The Union"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours.decode(ours.encode("The Union")) == "the union"

    space = smollm_tokenizer()
    space.pre_tokenizer, space.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], show_progress=False)
    space.train_from_iterator([TEXT], trainer)
    ours = read_hf_tokenizer(save_folder(tmp_path / "b", space))
    assert ours.adds_space and ours.encode("the") == space.encode("the").ids
    with pytest.warns(UserWarning, match="this tokenizer changes text"):
        assert ours.encode(" the") == ours.encode("the")


def test_a_template_does_not_read_the_file_again_for_each_text(tmp_path, monkeypatch):
    ours, calls = opened(tmp_path, "smollm"), []
    monkeypatch.setattr(tokenizer_hf, "_library", lambda text: calls.append(1) or _library(text))
    assert ours.encode_template("a<|endoftext|>") == [*ours.encode("a"), ours.eot]
    assert ours.encode_template("b") == ours.encode("b") and len(calls) <= 1


@every
def test_saved_loaded_and_sent_to_a_process_it_is_the_same(tmp_path, name):
    ours = opened(tmp_path / "theirs", name, 700)
    ours.save(tmp_path / "ours.json")
    for again in (Tokenizer.load(tmp_path / "ours.json"), pickle.loads(pickle.dumps(ours))):
        assert isinstance(again, HFTokenizer) and again.fingerprint == ours.fingerprint
        assert again.encode(ODD + "<|endoftext|></s>") == ours.encode(ODD + "<|endoftext|></s>")
        assert (again.eot, again.start, again.ends) == (ours.eot, ours.start, ours.ends)
    assert opened(tmp_path / "theirs", name, 701).fingerprint != ours.fingerprint


def test_cropping_and_padding_that_the_file_asks_for_are_switched_off(tmp_path):
    made = smollm_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=50)
    ours = read_hf_tokenizer(save_folder(tmp_path, made, eos_token="<|endoftext|>"))
    assert ours.decode(ours.encode(TEXT)) == TEXT and len(ours.encode("a")) == 1


def test_token_files_are_made_with_it_and_either_kind_of_file_names_it(tmp_path):
    ours = opened(tmp_path / "theirs", "smollm")
    ours.save(tmp_path / "ours.json")
    for path in (tmp_path / "ours.json", tmp_path / "theirs/tokenizer.json"):
        made = build_tokenizer(str(path), None)
        assert made.fingerprint == ours.fingerprint == read_tokenizer(path).fingerprint
    write_token_data(tmp_path / "tokens", Corpus("t", [TEXT], [ODD], "here"), ours)
    data = open_token_data(tmp_path / "tokens")
    assert data.val.tolist() == [0, *ours.encode(ODD)] and data.tokenizer.decode(data.val[1:]) == ODD
    for plain in (ByteTokenizer(), CharTokenizer("ab")):
        plain.save(tmp_path / "plain.json")
        assert read_tokenizer(tmp_path / "plain.json").kind == plain.kind


def test_a_text_that_is_no_unicode_is_told(tmp_path):
    with pytest.raises(UserError, match="surrogate"):
        opened(tmp_path, "smollm").encode("a\ud800")


def test_the_spelling_of_bytes_is_gpt2s():
    spelled = byte_spelling()
    assert spelled[32] == "Ġ" and spelled[10] == "Ċ" and len(set(spelled.values())) == 256
    bytes_of = token_speller({"decoder": {"type": "ByteLevel"}})
    vocab = BPETokenizer.gpt2().vocab[:-1]
    assert all(bytes_of("".join(spelled[b] for b in token)) == token for token in vocab[::97])
    assert bytes_of("日 <think>") == "日 <think>".encode()  # added later, as it stands


def without(spec, *path):
    for key in path[:-1]:
        spec = spec[key]
    del spec[path[-1]]


BROKEN = [
    (lambda s: s["decoder"].update(type="WordPiece", prefix="##", cleanup=True), "decoder WordPiece"),
    (lambda s: without(s, "model"), "cannot be read"),
    (lambda s: s.update(model=5), "cannot be read"),
    (lambda s: s["model"].update(vocab=[]), "cannot be read"),
    (lambda s: s["model"]["vocab"].update({"far": 10**9}), "has id 1000000000"),
    (lambda s: s.update(added_tokens={}), "cannot be read"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"].insert(0, split("(")), "cannot be read"),
]


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_broken_file_is_a_sentence(tmp_path, number):
    change, words = BROKEN[number]
    spec = json.loads(smollm_tokenizer().to_str())
    change(spec)
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=words):
        read_hf_tokenizer(tmp_path, 400)


def test_a_pattern_that_goes_back_for_ever_ends_in_a_sentence(tmp_path):
    spec = json.loads(smollm_tokenizer().to_str())
    spec["pre_tokenizer"]["pretokenizers"].insert(0, split("(a+)+$"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    ours = read_hf_tokenizer(tmp_path, 300)
    with pytest.raises(UserError, match="the tokenizer failed on a text"):
        ours.encode("a" * 40 + "!")
    assert ours.decode(ours.encode("banana!")) == "banana!"


def test_a_model_with_fewer_ids_than_the_tokenizer_and_an_end_beyond_them_are_refused(tmp_path):
    folder = save_folder(tmp_path, smollm_tokenizer())
    with pytest.raises(UserError, match="has 300 tokens, the model 299 ids"):
        read_hf_tokenizer(folder, 299)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 300}))
    with pytest.raises(UserError, match="not all below 300"):
        read_hf_tokenizer(folder, 300)
    assert read_hf_tokenizer(folder, 301).eot == 300


def test_without_the_library_or_the_file_a_sentence_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="holds no tokenizer.json: put the model's own there"):
        read_hf_tokenizer(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/vocab.json").write_text("{}")  # from which transformers can make one
    with pytest.raises(UserError, match="holds no tokenizer.json: AutoTokenizer"):
        read_hf_tokenizer(tmp_path / "old")
    folder = save_folder(tmp_path, smollm_tokenizer())
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        read_hf_tokenizer(folder)
