"""The validation score: one number whatever the batches, order and processes; its units, its intervals."""

import bz2
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.ddp.world import World, run_processes
from tinygpt.evaluate.score import (
    Score,
    compressor_bits,
    eval_batch,
    eval_rows,
    eval_windows,
    evaluate,
    evaluate_world,
    ratio_interval,
    row_documents,
    score_rows,
    total_score,
)
from tinygpt.evaluate.tasks import continuation_losses
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

TEXT = "Validation text with some ünïcödé in it, 日本語 too. " * 20


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.3))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.train()


@pytest.fixture
def tokens():
    return np.array([256, *ByteTokenizer().encode(TEXT)], dtype=np.uint16)


@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 7))
def test_every_target_comes_once_whatever_the_sizes(n, block_size, batch_size):
    tokens = np.arange(n, dtype=np.uint16)
    n_rows = eval_windows(tokens, block_size)
    assert n_rows == math.ceil((n - 1) / block_size), "n ids have n - 1 targets, and each row has one"
    seen = []
    for start in range(0, n_rows, batch_size):
        x, y = eval_batch(tokens, np.arange(start, min(start + batch_size, n_rows)), block_size)
        seen += list(zip(x[y != -100].tolist(), y[y != -100].tolist()))
    assert seen == [(i, i + 1) for i in range(n - 1)]


def test_the_score_equals_a_slow_sum_over_rows(model, tokens):
    score = evaluate(model, tokens, ByteTokenizer().token_bytes(), batch_size=5)
    model.eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, 16):
        row = torch.from_numpy(tokens[start : start + 17].astype(np.int64))
        logits = model(row[None, :-1])[0][0].double()
        nats += F.cross_entropy(logits, row[1:], reduction="sum").item()
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.tokens == len(tokens) - 1
    assert score.bytes == len(TEXT.encode())  # from the vocabulary, not through strings
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)


def test_the_batch_size_does_not_matter_and_two_calls_agree(model, tokens):
    sizes = ByteTokenizer().token_bytes()
    scores = [evaluate(model, tokens, sizes, batch_size=b).nats for b in (1, 3, 16, 1000)]
    assert max(scores) - min(scores) < 1e-5 * scores[0]
    assert evaluate(model, tokens, sizes).nats == evaluate(model, tokens, sizes).nats


def test_a_part_is_the_same_rows_each_time_and_reaches_the_end(model, tokens):
    sizes = ByteTokenizer().token_bytes()
    part = evaluate(model, tokens, sizes, max_tokens=80)
    assert part == evaluate(model, tokens, sizes, max_tokens=80, batch_size=2) or part.tokens <= 80
    assert 64 < part.tokens <= 80
    assert evaluate(model, tokens, sizes, max_tokens=1).tokens == 16  # never nothing


def test_the_model_comes_back_in_the_mode_it_was_in(model, tokens):
    evaluate(model, tokens, ByteTokenizer().token_bytes())
    assert model.training
    evaluate(model.eval(), tokens, ByteTokenizer().token_bytes())
    assert not model.training


def test_scores_add_as_sums():
    total = Score(10.0, 4, 8) + Score(2.0, 2, 4)
    assert (total.nats, total.tokens, total.bytes) == (12.0, 6, 12)
    assert total.loss == 2.0
    assert total.perplexity == pytest.approx(math.e**2)
    assert total.bits_per_byte == pytest.approx(1 / math.log(2))


def test_compressors_need_less_when_they_have_read_the_text():
    val = TEXT.encode()
    bits = compressor_bits(val, val)
    assert bits["bzip2 -9"] == pytest.approx(8 * len(bz2.compress(val, 9)) / len(val))
    assert bits["xz -9 primed with the training text"] < 0.5 * bits["xz -9"]
    assert "xz -9 primed with the training text" not in compressor_bits(b"", val)


def test_any_order_of_the_rows_gives_the_same_sum_to_the_last_bit(model, tokens):
    table = score_rows(model, tokens, ByteTokenizer().token_bytes(), eval_rows(tokens, 16))
    # sizes for which the order of a plain sum matters
    table = np.concatenate([table, table * 1e-9, table * 1e9])
    shuffled = [np.random.default_rng(seed).permutation(table) for seed in range(20)]
    assert len({total_score(t).nats for t in shuffled}) == 1
    assert len({sum(t[:, 0]) for t in shuffled}) > 1


def evaluate_here(world, model, tokens, pairs):
    "In each process: its score and continuation losses, with batches that leave some ranks nothing to do."
    place = dict(rank=world.rank, world_size=world.world_size)
    sizes = ByteTokenizer().token_bytes()
    scores = [evaluate(model, tokens, sizes, batch_size=b, **place) for b in (1, 7, 100)]
    part = evaluate(model, tokens, sizes, batch_size=2, max_tokens=80, **place)
    return [*scores, part], [continuation_losses(model, pairs, batch_size=b, **place) for b in (1, 3, 100)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_get_the_number_that_one_process_gets(model, tokens, world_size):
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(10):
        before = rng.integers(0, 256, rng.integers(1, 20)).tolist()
        after = rng.integers(0, 256, rng.integers(1, 40)).tolist()
        pairs.append((before, after))
    alone_scores, alone_losses = evaluate_here(World(), model, tokens, pairs)
    for scores, losses in run_processes(evaluate_here, world_size, model, tokens, pairs, timeout=600):
        for got, want in zip(scores, alone_scores, strict=True):
            assert (got.tokens, got.bytes) == (want.tokens, want.bytes)
            assert got.nats == pytest.approx(want.nats, rel=1e-6)
        for (nats, greedy), (want, want_greedy) in zip(losses, alone_losses, strict=True):
            np.testing.assert_allclose(nats, want, rtol=1e-5)
            assert (greedy == want_greedy).all()


def test_the_interval_of_equal_parts_is_the_textbook_one():
    x = np.random.default_rng(0).normal(5, 2, size=31)
    value, low, high = ratio_interval(x, np.ones(31))
    assert value == pytest.approx(x.mean())
    assert high - value == pytest.approx(2.042 * x.std(ddof=1) / 31**0.5, rel=1e-3)
    assert value - low == pytest.approx(high - value)


def test_95_of_100_intervals_hold_the_truth_if_the_groups_are_the_independent_ones():
    rng = np.random.default_rng(1)
    hits = np.zeros(3)
    for _ in range(1500):
        group = np.repeat(np.arange(15), rng.integers(3, 30, size=15))
        count = rng.integers(10, 65, size=len(group)).astype(float)
        total = count * (4 + 0.3 * rng.normal(size=15)[group] + 0.5 * rng.normal(size=len(group)))
        alone = count * (4 + 0.5 * rng.normal(size=len(group)))
        for i, (t, g) in enumerate([(total, group), (alone, None), (total, None)]):
            _, low, high = ratio_interval(t, count, g)
            hits[i] += low < 4 < high
    grouped, independent, wrong = hits / 1500
    assert 0.91 < grouped < 0.98 and 0.93 < independent < 0.97
    assert wrong < 0.85  # rows of a document taken for independent: too narrow


def test_a_wider_level_gives_a_wider_interval_and_one_group_gives_none():
    x, ones = np.arange(10.0), np.ones(10)
    assert ratio_interval(x, ones, level=0.99)[2] > ratio_interval(x, ones, level=0.9)[2]
    with pytest.raises(UserError, match=r"\b(1|one)\b"):
        ratio_interval(x, ones, groups=np.zeros(10))


def test_each_row_is_given_to_the_document_it_begins_in():
    tokens = np.array([9, 1, 1, 9, 1, 1, 1, 1, 1, 9, 1], dtype=np.uint16)  # eot 9: documents at 0, 3 and 9
    assert row_documents(tokens, np.arange(4), 3, eot=9).tolist() == [0, 1, 1, 2]
    piece = row_documents(np.array([1, 1, 9, 1]), np.arange(2), 2, eot=9).tolist()
    assert piece == [0, 0], "a piece before the first eot has the number of the document after it"


def test_the_rows_of_a_short_evaluation_are_spread_evenly_from_the_first_to_the_last():
    rows = eval_rows(np.zeros(10_001), 10, 500)
    assert len(rows) == 50 and rows[0] == 0 and rows[-1] == 999 and set(np.diff(rows)) == {20, 21}
    assert eval_rows(np.zeros(10_001), 10).tolist() == list(range(1000))
    assert len(eval_rows(np.zeros(10_001), 10, 1)) == 1


def test_two_processes_score_as_one_does(model, tokens):
    sizes = ByteTokenizer().token_bytes()
    alone = evaluate(model, tokens, sizes, batch_size=3)
    for score in run_processes(evaluate_world, 2, model, tokens, sizes, timeout=600):
        assert score.nats == pytest.approx(alone.nats, rel=1e-6)
        assert (score.tokens, score.bytes) == (alone.tokens, alone.bytes)


def test_a_world_says_which_process_evaluates_and_where(model, tokens, monkeypatch):
    sizes = ByteTokenizer().token_bytes()
    assert evaluate_world(World(), model, tokens, sizes, 3) == evaluate(model, tokens, sizes, 3)
    places, added = [], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda table, *_, **__: added.append(table.clone()))
    for rank in (0, 1):  # each process's own part of the table
        evaluate_world(World(rank=rank, world_size=2), model, tokens, sizes)
        places.append(added[-1][:, 1] > 0)
    assert places[0].sum() > 0 and torch.equal(places[0], ~places[1])


def test_a_text_with_nothing_to_predict_is_no_perfect_score(model):
    sizes = ByteTokenizer().token_bytes()
    for tokens in (np.array([], dtype=np.uint16), np.array([256])):
        with pytest.raises(UserError, match="predict|tokens?|text"):
            evaluate(model, tokens, sizes)
    assert evaluate(model, np.array([256, 65]), sizes).tokens == 1
    with pytest.raises(UserError, match="text|val"):
        compressor_bits(b"abc", b"")


def test_a_batch_of_no_rows_is_refused_and_does_not_score_nothing(model, tokens):
    for batch_size in (0, -1):
        with pytest.raises(UserError, match="batch_size"):
            evaluate(model, tokens, ByteTokenizer().token_bytes(), batch_size=batch_size)


def test_an_interval_of_lists_or_of_half_precision_is_that_of_its_float64_numbers():
    total, count = np.array([1000.0, 2000.0, 4000.0] * 20), np.full(60, 1000.0)
    right = ratio_interval(total, count)
    assert ratio_interval(total.astype(np.float16), count.astype(np.float16)) == right
    assert ratio_interval(total.tolist(), count.tolist()) == right
