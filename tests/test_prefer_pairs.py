"""Files of pairs in TRL's forms, their ids, answers drawn and ranked; what cannot work is one sentence."""

import json

import pytest
import torch

from tinygpt.finetune.tasks import make_examples
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.model import GPT, GPTConfig
from tinygpt.prefer.pairs import (
    Pair,
    as_pair,
    draw_answers,
    encode_preference,
    judge_of,
    rank_answers,
    read_pairs,
    task_pairs,
)
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

BASE = ByteTokenizer()
CHAT = chat_tokenizer(BASE)


def user(text: str) -> dict:
    return dict(role="user", content=text)


def assistant(text: str) -> dict:
    return dict(role="assistant", content=text)


STANDARD = {"prompt": "Sky?", "chosen": "Blue", "rejected": "Green"}
TALK = {"prompt": [user("Sky?")], "chosen": [assistant("Blue")], "rejected": [assistant("Green")]}
IMPLICIT = {"chosen": [user("Sky?"), assistant("Blue")], "rejected": [user("Sky?"), assistant("Green")]}


def test_trls_three_forms_are_the_same_pair(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, (STANDARD, TALK, IMPLICIT))) + "\n\n", encoding="utf-8-sig")
    standard, talk, implicit = read_pairs(path)
    assert standard == Pair("Sky?", "Blue", "Green")
    assert talk == implicit == Pair([user("Sky?")], "Blue", "Green")
    assert encode_preference(CHAT, standard) == encode_preference(CHAT, talk)


@pytest.mark.parametrize(
    "row, sentence",
    [
        (7, "is an int: give an object"),
        ({"prompt": "a", "rejected": "b"}, "has no 'chosen'"),
        ({"prompt": "a", "chosen": "b"}, "has no 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "has no 'prompt'"),
        (STANDARD | {"rejected": "Blue"}, "a pair of equal answers teaches nothing"),
        (STANDARD | {"chosen": " "}, "chosen is an empty answer"),
        (STANDARD | {"chosen": 5}, "chosen is an int"),
        (STANDARD | {"prompt": 5}, "prompt is an int"),
        (STANDARD | {"prompt": "\ud83d"}, "prompt holds '\\ud83d', which is half of a character"),
        (STANDARD | {"rejected": "a\ude00"}, "rejected holds '\\ude00', which is half of a character"),
        (
            TALK | {"prompt": [user("\ud83d")]},
            "prompt: message 1 holds '\\ud83d', which is half of a character",
        ),
        (TALK | {"prompt": [assistant("Hi")]}, "a user's message comes last"),
        (TALK | {"prompt": [{"content": "Hi"}]}, "message 1 has no role"),
        (TALK | {"chosen": [user("Blue")]}, "chosen is not one message of the assistant"),
        (IMPLICIT | {"rejected": [user("Sea?"), assistant("Green")]}, "differ before their last message"),
    ],
)
def test_a_line_that_is_no_pair_is_one_sentence_with_its_place(tmp_path, row, sentence):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(STANDARD) + "\n" + json.dumps(row))
    with pytest.raises(UserError) as refused:
        read_pairs(path)
    assert sentence in str(refused.value) and f"{path}, line 2" in str(refused.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_pairs(tmp_path / "nothing.jsonl")
    for text, sentence in (
        (b"", "holds no pair"),
        (b"{", "line 1 is not JSON"),
        (b"\xff\xfe\xff", "not UTF-8"),
    ):
        (tmp_path / "bad.jsonl").write_bytes(text)
        with pytest.raises(UserError, match=sentence):
            read_pairs(tmp_path / "bad.jsonl")


def test_prompt_and_answer_together_are_the_rendered_conversation():
    prompt, chosen, rejected = encode_preference(CHAT, as_pair(TALK))
    for answer, text in ((chosen, "Blue"), (rejected, "Green")):
        whole, mask = render(CHAT, [user("Sky?"), assistant(text)])
        assert prompt + answer == whole and mask == [False] * len(prompt) + [True] * len(answer)


def test_a_base_model_takes_texts_with_an_end_and_no_conversations():
    prompt, chosen, _ = encode_preference(BASE, as_pair(STANDARD))
    assert prompt == [BASE.eot, *b"Sky?"] and chosen == [*b"Blue", BASE.eot]
    with pytest.raises(UserError, match="runs/base is a base model.*python -m tinygpt.finetune runs/base"):
        encode_preference(BASE, as_pair(TALK), "runs/base")


def noisy_model(n_vocab: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=n_vocab, block_size=64, n_layer=1, n_head=1, n_embd=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.eval()


def test_answers_are_those_of_their_seed_whatever_stands_beside_them():
    model, prompts = noisy_model(5), [[1, 2], [3], [1, 2, 3]]
    together = draw_answers(model, prompts, 4, {4}, seed=3, max_new_tokens=6)
    assert together == draw_answers(model, prompts, 4, {4}, seed=3, max_new_tokens=6, batch_size=5)
    assert together != draw_answers(model, prompts, 4, {4}, seed=4, max_new_tokens=6)
    assert [len(answers) for answers in together] == [4, 4, 4]
    flat = [ids for answers in together for ids in answers]
    assert None in flat and all(len(ids) < 6 and 4 not in ids for ids in flat if ids is not None)
    assert len(draw_answers(model, prompts, 4, {4}, seed=2**62, max_new_tokens=6)) == 3


def test_ranking_pairs_different_scores_only_and_each_text_once():
    generator = torch.Generator().manual_seed(0)
    pairs = rank_answers("q", ["aaa", "b", "b", "cc", "dd", " "], len, generator, most=99)
    assert {(p.chosen, p.rejected) for p in pairs} == {
        ("aaa", "b"), ("aaa", "cc"), ("aaa", "dd"), ("cc", "b"), ("dd", "b")
    }  # fmt: skip
    assert len(pairs) == 5 and len(rank_answers("q", ["aaa", "b", "cc"], len, generator, most=2)) == 2
    assert rank_answers("q", ["aa", "bb"], len, generator) == []


def test_pairs_of_the_tasks_have_a_right_and_a_wrong_answer(monkeypatch):
    examples = make_examples(6, 5, "train")
    answers = [[[*e.answer.encode()], [*b"wrong"], None, [*b"bad"]] for e in examples]
    monkeypatch.setattr("tinygpt.prefer.pairs.draw_answers", lambda *_: answers)
    pairs = task_pairs(None, CHAT, 6, seed=5, most=2)
    assert [p.chosen for p in pairs] == [e.answer for e in examples for _ in range(2)]
    assert {p.rejected for p in pairs} == {"wrong", "bad"}
    assert judge_of(examples[0])(examples[0].answer) == 1 and judge_of(examples[0])("no") == 0


def test_tasks_need_a_chat_model():
    with pytest.raises(UserError, match="runs/base is a base model"):
        task_pairs(None, BASE, 6, seed=0, place="runs/base")


def test_an_answer_with_a_special_token_inside_is_no_pair(monkeypatch):
    "It has no text of its own: the pair would hold an answer that the model never wrote."
    [example] = make_examples(1, 5, "train")
    right, user_token = [*example.answer.encode()], CHAT.special["<|user|>"]
    drawn = [[*right[:1], user_token, *right[1:]], [*b"wrong"], [*b"wro", BASE.eot, *b"se"]]
    monkeypatch.setattr("tinygpt.prefer.pairs.draw_answers", lambda *_: [drawn])
    assert task_pairs(None, CHAT, 1, seed=5) == []
    monkeypatch.setattr("tinygpt.prefer.pairs.draw_answers", lambda *_: [[right, *drawn]])
    assert [(p.chosen, p.rejected) for p in task_pairs(None, CHAT, 1, seed=5, most=9)] == [
        (example.answer, "wrong")
    ]
