"""Text in, text out: streams and batches agree, stop strings hold, special tokens in a prompt are text."""

import pytest
import torch

from tinygpt.generate.sample import generate_batch
from tinygpt.generate.text import (
    check_stop,
    generate_rows,
    generate_texts,
    prompt_ids,
    stream_text,
    text_rows,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer

SMALL = dict(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2(**SMALL))
    for name, p in model.named_parameters():
        # norms that favor a direction would repeat one token for ever
        if p.dim() > 1 or ("bias" in name and name != "ln_f.bias"):
            torch.nn.init.normal_(p, std=0.4)
    return model


class Scripted(torch.nn.Module):
    "Says given ids one after the other."

    def __init__(self, ids):
        super().__init__()
        self.config = GPTConfig.gpt2(**SMALL)
        self.ids = ids
        self.at = 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, idx, cache=None):
        logits = torch.zeros(1, idx.shape[1], 257)
        logits[0, -1, self.ids[self.at]] = 100.0
        self.at += 1
        return logits, None


def test_streaming_gives_whole_characters_and_stops_at_eot():
    ids = [*"né日".encode(), 256, *b"never said"]
    pieces = list(stream_text(Scripted(ids), ByteTokenizer(), "", 20))
    assert pieces == ["n", "é", "日"]


def test_streaming_a_half_character_at_the_end_does_not_crash():
    assert "".join(stream_text(Scripted(list("é".encode()[:1])), ByteTokenizer(), "", 1)) == "\ufffd"


def test_an_empty_prompt_and_one_longer_than_the_context_work(model):
    assert isinstance("".join(stream_text(model, ByteTokenizer(), "", 5, seed=0)), str)
    assert isinstance("".join(stream_text(model, ByteTokenizer(), "long " * 50, 5, seed=0)), str)


def test_texts_of_a_batch_are_those_of_the_stream(model):
    prompts = ["", "Hello", "n" * 40]
    texts = generate_texts(model, ByteTokenizer(), prompts, 20, seed=7)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text == "".join(stream_text(model, ByteTokenizer(), prompt, 20, seed=7 + i))


def test_a_text_begins_as_documents_do():
    assert prompt_ids(ByteTokenizer(), "") == [256] and prompt_ids(ByteTokenizer(), "ab") == [256, 97, 98]


def streamed(ids, **how):
    return list(stream_text(Scripted([*ids, 256]), ByteTokenizer(), "", 40, **how))


def test_a_stop_string_ends_a_stream_and_nothing_of_it_is_shown():
    assert streamed(b"so it is. Q: why", stop="Q:") == list("so it is. ")
    assert streamed(b"so it is. Q", stop=["Q:", "\n"]) == [*"so it is. ", "Q"]  # held back, then the end came
    assert streamed("é日!".encode(), stop="日") == ["é"]


def test_rows_say_what_came_and_why_they_ended(model):
    rows = generate_rows(model, ByteTokenizer(), ["Hello", "You"], 12, seed=2, n=3, logprobs=2)
    assert len(rows) == 6 and [row.prompt[1:] for row in rows] == [[*b"Hello"]] * 3 + [[*b"You"]] * 3
    for i, row in enumerate(rows):
        ids = generate_batch(model, [row.prompt], 12, 0.8, 0, 0.95, seed=2 + i, eot=256)[0]
        assert row.new == ids and row.text == bytes(ids).decode(errors="replace")
        assert len(row.logprobs) == len(ids) and {len(top) for top in row.top} <= {2}
        assert row.finish == ("length" if len(ids) == 12 else "eot")
    plain = rows[0].text
    stop = plain[4:6]
    [cut] = generate_rows(model, ByteTokenizer(), ["Hello"], 12, seed=2, stop=stop)
    assert cut.finish == "stop" and cut.text == plain.split(stop)[0] and cut.logprobs == []
    with_no_tokens = generate_rows(model, ByteTokenizer(), ["Hello"], 0, n=2)
    assert [row.text for row in with_no_tokens] == ["", ""]


def test_a_text_begins_with_what_is_forced(model):
    for forced in ("yes: ", [*b"yes: "]):
        [text] = generate_texts(model, ByteTokenizer(), ["Is it?"], 12, seed=1, forced=forced)
        assert text.startswith("yes: ")
        assert text == "".join(stream_text(model, ByteTokenizer(), "Is it?", 12, seed=1, forced=forced))


BPE = BPETokenizer.train("One. Two. One. Two. " * 20, 262)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["byte", "bpe"])
def test_special_tokens_in_a_prompt_are_text_unless_they_are_asked_for(tokenizer):
    eot, one, two = tokenizer.eot, tokenizer.encode("One."), tokenizer.encode("Two.")
    text = "One.<|endoftext|>Two."
    as_text = prompt_ids(tokenizer, text)
    assert as_text == [eot, *tokenizer.encode(text)] and eot not in as_text[1:]
    assert tokenizer.decode(as_text) == text
    assert prompt_ids(tokenizer, text, special=True) == [eot, *one, eot, *two]
    assert prompt_ids(tokenizer, "One.", special=True) == [eot, *one] == prompt_ids(tokenizer, "One.")
    assert prompt_ids(tokenizer, "<|endoftext|>One.", special=True) == [eot, *one]  # not twice
    assert prompt_ids(tokenizer, "", special=True) == [eot]
    if isinstance(tokenizer, BPETokenizer):  # tiktoken reads the same
        theirs = tokenizer.encoding.encode(text, allowed_special="all")
        assert prompt_ids(tokenizer, text, special=True) == [eot, *theirs]


def test_the_samples_and_the_stream_read_special_tokens_where_they_are_asked_to(model):
    how = dict(seed=1, special=True)
    [row] = generate_rows(model, ByteTokenizer(), ["a<|endoftext|>b"], 6, **how)
    assert row.prompt == [256, 97, 256, 98]
    assert row.text == "".join(stream_text(model, ByteTokenizer(), "a<|endoftext|>b", 6, **how))


def test_a_tokenizer_from_elsewhere_reads_its_own_special_tokens(tmp_path):
    from foreign import save_folder, smollm_tokenizer

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    tokenizer = read_hf_tokenizer(save_folder(tmp_path, smollm_tokenizer(), eos_token="<|im_end|>"))
    text = "<|im_start|>The people<|im_end|>"
    assert tokenizer.ends & set(prompt_ids(tokenizer, text, special=True))
    assert not tokenizer.ends & set(prompt_ids(tokenizer, text)[len(tokenizer.start) :])


def test_a_tokenizer_without_special_tokens_says_so():
    from tinygpt.checkpoint_open import NanoChars

    with pytest.raises(UserError, match="has no special tokens"):
        prompt_ids(NanoChars("\nab"), "ab", special=True)


@pytest.mark.parametrize(
    "bad, named",
    [
        (dict(stop=""), "stop"),
        (dict(stop=["a", ""]), "stop"),
        (dict(n=0), "n = 0"),
        (dict(forced=[5, 257]), "257 is no token"),
        (dict(forced=[-1]), "-1 is no token"),
        (dict(forced="nine bytes"), "forced has 10 tokens"),
        (dict(logprobs=-1), "logprobs = -1"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(model, bad, named):
    with pytest.raises(UserError, match=named):
        generate_rows(model, ByteTokenizer(), ["Hi"], 6, **bad)
    if not bad.keys() & {"n", "logprobs"}:
        with pytest.raises(UserError, match=named):
            list(stream_text(model, ByteTokenizer(), "Hi", 6, **bad))


def test_a_forced_text_with_an_unknown_character_is_named():
    with pytest.raises(UserError, match="'x'"):
        text_rows(CharTokenizer.train("abc"), ["a"], forced="ax")


def test_one_stop_string_is_a_list_of_one():
    assert check_stop("ab") == check_stop(["ab"]) == ["ab"] and check_stop(()) == []


def test_one_string_in_place_of_a_list_of_prompts_is_refused_and_not_read_letter_by_letter(model):
    with pytest.raises(UserError, match="give a list of prompts"):
        generate_texts(model, ByteTokenizer(), "Hi", 5)
