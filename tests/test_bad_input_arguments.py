"""Numbers with which a function cannot work end in one sentence at once, not in a wait or an empty result."""

from functools import partial

import pytest

from tinygpt.chat.serve import Engine
from tinygpt.data.documents import Documents
from tinygpt.data.stream import StreamLoader
from tinygpt.evaluate.tasks import Item, few_shot, load_items, wilson_interval
from tinygpt.finetune.template import chat_tokenizer
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.report import smooth
from tinygpt.support import UserError, interval, measure_time, t_quantile
from tinygpt.tokenizer import ByteTokenizer

TEXTS = ["one", "two"]


def stream(**settings):
    return StreamLoader(Documents([], texts=TEXTS), ByteTokenizer(), 1, 4, **settings)


def engine(**settings):
    tokenizer = chat_tokenizer(ByteTokenizer())
    shape = dict(vocab_size=tokenizer.n_vocab, block_size=8, n_layer=1, n_head=1, n_embd=8)
    return Engine(GPT(GPTConfig.gpt2(**shape)), tokenizer, **settings)


ITEMS = [Item("question", [" a", " b"], 0)] * 3

CASES = [
    ("prefetch = -1", partial(stream, prefetch=-1)),
    ("num_threads = 0", partial(stream, num_threads=0)),
    ("-1 examples", partial(few_shot, ITEMS, -1)),
    ("limit = 0", partial(load_items, "hellaswag", "nowhere.jsonl", limit=0)),
    ("limit = -1", partial(load_items, "hellaswag", "nowhere.jsonl", limit=-1)),
    ("5 right of 3", partial(wilson_interval, 5, 3)),
    ("0 right of 0", partial(wilson_interval, 0, 0)),
    ("level 95", partial(wilson_interval, 1, 3, level=95)),
    ("from 1 values", partial(interval, [1.0])),
    ("level 95", partial(interval, [1.0, 2.0], level=95)),  # once a search without an end
    ("p = 0.4", partial(t_quantile, 0.4, 3)),
    ("p = 1.0", partial(t_quantile, 1.0, 3)),
    ("repeats = 0", partial(measure_time, lambda: None, repeats=0)),
    ("weight = 1.0", partial(smooth, [1.0, 2.0], weight=1.0)),
    ("chunk_rows = 0", partial(Documents, [], texts=TEXTS, chunk_rows=0)),
    ("chunk_rows = -1", partial(Documents, [], texts=TEXTS, chunk_rows=-1)),
    ("batch_size = 0", partial(engine, batch_size=0)),
    ("max_waiting = 0", partial(engine, max_waiting=0)),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("told, call", CASES)
def test_a_number_that_cannot_be_is_told_in_a_sentence(told, call):
    with pytest.raises(UserError, match=f"{told}.*give|{told}.*and") as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_smallest_numbers_that_work_do():
    loader = stream(prefetch=0, num_threads=1)
    assert next(loader)[0].shape == (1, 4)
    loader.close()
    assert few_shot(ITEMS, 0) == ITEMS and smooth([1.0, 2.0], weight=0.0) == [1.0, 2.0]
    assert wilson_interval(0, 1)[0] == 0 and len(list(Documents([], texts=TEXTS, chunk_rows=1).walk())) == 2
    engine(batch_size=1, max_waiting=1).close()
