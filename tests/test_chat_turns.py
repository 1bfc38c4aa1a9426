"""A conversation: ten turns with a cache equal ten without, a full context is a rule, a turn always ends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.chat.turns import Conversation, exchanges_to_forget
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

TOK = chat_tokenizer(ByteTokenizer())
SYSTEM, USER, ASSISTANT, END = TOK.special.values()


def make_model(kind="llama", **kw):
    torch.manual_seed(0)
    sizes = dict(vocab_size=TOK.n_vocab, block_size=64, n_layer=2, n_head=2, n_embd=32)
    model = GPT(getattr(GPTConfig, kind)(**sizes | kw))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    return model


class Scripted(GPT):
    "Writes given ids after each <|assistant|>, one after the other; counts the tokens that run through it."

    def __init__(self, *answers):
        super().__init__(
            GPTConfig.llama(vocab_size=TOK.n_vocab, block_size=64, n_layer=1, n_head=1, n_embd=8)
        )
        self.answers, self.ran, self.seen = [list(a) for a in answers], 0, []

    def forward(self, idx, targets=None, cache=None, reduction="mean"):
        super().forward(idx, targets, cache)
        self.ran += idx.numel()
        held = (
            [] if cache is None or cache.length == idx.shape[1] else self.seen[: cache.length - idx.shape[1]]
        )
        self.seen = held + idx[0].tolist()
        turn = self.seen.count(ASSISTANT) - 1
        written = len(self.seen) - len(self.seen[: len(self.seen) - self.seen[::-1].index(ASSISTANT)])
        answer = [*self.answers[turn], END]
        logits = torch.zeros(1, idx.shape[1], TOK.n_vocab)
        logits[0, -1, answer[min(written, len(answer) - 1)]] = 9.0
        return logits, None


def said(conversation, text):
    return "".join(conversation.ask(text))


@pytest.mark.parametrize("kind, kw", [("llama", {}), ("gpt2", {}), ("modern", {"ngram_rows": 32})])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ten_turns_with_the_cache_equal_ten_without(kind, kw, temperature):
    model = make_model(kind, **kw)
    runs = []
    for use_cache in (True, False):
        c = Conversation(model, TOK, "Be brief", 8, temperature=temperature, seed=3, use_cache=use_cache)
        texts = [said(c, f"What is {turn}?") for turn in range(10)]
        runs.append((texts, c.exchanges, c.forgotten, c.finish))
    assert runs[0] == runs[1]
    assert runs[0][2] > 0  # the context was full on the way


def test_each_token_is_read_once_until_something_is_forgotten():
    model = Scripted(b"yes", b"no", b"so")
    c = Conversation(model, TOK, temperature=0, max_new_tokens=8)
    assert [said(c, "A?"), said(c, "B?"), said(c, "C?")] == ["yes", "no", "so"]
    whole = [*c.first, *(i for ids in c.exchanges for i in ids)]
    assert model.ran == len(whole) - 1  # all but the last <|end|>
    assert model.seen == whole[:-1]


def test_what_the_model_reads_is_what_the_template_renders():
    model = Scripted(b"yes", b"no")
    c = Conversation(model, TOK, "sys", temperature=0)
    said(c, "A<|end|>?"), said(c, "B?")
    messages = [{"role": "system", "content": "sys"}]
    for q, a in (("A<|end|>?", "yes"), ("B?", "no")):
        messages += [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    assert [*c.first, *(i for ids in c.exchanges for i in ids)] == render(TOK, messages)[0]


def test_a_turn_ends_at_the_end_at_eot_at_a_role_and_at_its_longest():
    for last, finish in ((END, "eot"), (TOK.eot, "eot"), (USER, "eot"), (ASSISTANT, "eot")):
        c = Conversation(Scripted([*b"ab", last], b"x"), TOK, temperature=0)
        assert said(c, "Q") == "ab" and c.finish == finish
        assert c.exchanges[-1] == [USER, *b"Q", END, ASSISTANT, *b"ab", END]
    c = Conversation(Scripted(b"abcdef"), TOK, temperature=0, max_new_tokens=4)
    assert said(c, "Q") == "abcd" and c.finish == "length" and c.exchanges[-1][-1] == END


def test_who_leaves_in_the_middle_leaves_a_closed_turn():
    c = Conversation(Scripted(b"abcdef", b"next"), TOK, temperature=0)
    pieces = c.ask("Q")
    assert [next(pieces), next(pieces)] == ["a", "b"]
    pieces.close()
    assert c.finish == "left" and c.exchanges == [[USER, *b"Q", END, ASSISTANT, *b"ab", END]]
    assert said(c, "R") == "next"
    c.ask("never begun").close()
    assert len(c.exchanges) == 2


def test_only_whole_characters_are_shown():
    c = Conversation(Scripted("é😀".encode(), b"\xf0\x9f"), TOK, temperature=0)
    assert list(c.ask("Q")) == ["é", "😀"]
    assert list(c.ask("Q")) == ["\ufffd"]  # half of one, at the end


def test_ids_stay_as_they_were_drawn():
    from tinygpt.tokenizer import BPETokenizer

    tok = chat_tokenizer(BPETokenizer.train("abab " * 9, 258))
    ab = tok.encode("ab")
    assert len(ab) == 1
    c = Conversation(make_model(vocab_size=tok.n_vocab), tok, temperature=0, max_new_tokens=2)
    row = []
    c.steps = lambda r, n: iter(row.append(r) or [])
    list(c.ask("Q"))
    row[0].new, row[0].finish = [97, 98], "eot"
    c.exchanges.clear()
    c.steps = lambda r, n: (r.new.extend([97, 98]), setattr(r, "finish", "length"), iter([r]))[2]
    assert list(c.ask("Q")) == ["b"]  # show_rows is told of the last one
    assert c.exchanges[0][-3:] == [97, 98, c.token["<|end|>"]] != [*ab, c.token["<|end|>"]]


@given(st.lists(st.integers(1, 60), max_size=9), st.integers(1, 100), st.integers(10, 120))
def test_the_rule_of_a_full_context(sizes, fixed, room):
    forget = exchanges_to_forget(sizes, fixed, room)
    if fixed + sum(sizes) <= room:
        assert forget == 0
    elif fixed <= room // 2:
        assert fixed + sum(sizes[forget:]) <= room // 2
        assert fixed + sum(sizes[forget - 1 :]) > room // 2  # and no more than that
    else:
        assert forget == len(sizes)


def test_the_system_message_is_never_forgotten_and_an_answer_has_a_quarter():
    model = make_model()
    c = Conversation(model, TOK, "stay", 100, seed=0)
    assert c.room == 48
    for turn in range(6):
        said(c, f"question {turn}")
        prompt = [*c.first, *(i for ids in c.exchanges[:-1] for i in ids)]
        assert c.first == [TOK.eot, SYSTEM, *b"stay", END] and len(prompt) <= 48
        assert len(prompt) + len(c.exchanges[-1]) <= 64 + 1
    assert c.forgotten == 6 - len(c.exchanges) > 0


def test_bad_input_is_one_sentence_before_anything_is_computed():
    model = make_model()
    for bad, told in (
        (dict(temperature=-1), "temperature"),
        (dict(max_new_tokens=0), "max_new_tokens = 0"),
        (dict(max_new_tokens=1.5), "max_new_tokens = 1.5"),
        (dict(system="long " * 20), "leaves room for"),
        (dict(seed=2**70), "seed"),
    ):
        with pytest.raises(UserError, match=told):
            Conversation(model, TOK, **bad)
    with pytest.raises(UserError, match="base model"):
        Conversation(model, ByteTokenizer())
    c = Conversation(model, TOK)
    for text, told in (("long " * 20, "shorten the message"), (5, "of type int")):
        with pytest.raises(UserError, match=told):
            c.ask(text)  # at once, not with the first piece
    assert c.exchanges == []
