import bz2
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.evaluate import Score, compressor_bits, eval_batch, eval_windows, evaluate
from tinygpt.model import GPT, GPTConfig
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
    seen = []
    for start in range(0, eval_windows(tokens, block_size), batch_size):
        x, y = eval_batch(tokens, np.arange(start, min(start + batch_size, eval_windows(tokens, block_size))), block_size)
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
    scores = [evaluate(model, tokens, ByteTokenizer().token_bytes(), batch_size=b).nats for b in (1, 3, 16, 1000)]
    assert max(scores) - min(scores) < 1e-5 * scores[0]
    assert evaluate(model, tokens, ByteTokenizer().token_bytes()).nats == evaluate(model, tokens, ByteTokenizer().token_bytes()).nats


def test_a_part_is_the_same_rows_each_time_and_reaches_the_end(model, tokens):
    part = evaluate(model, tokens, ByteTokenizer().token_bytes(), max_tokens=80)
    assert part == evaluate(model, tokens, ByteTokenizer().token_bytes(), max_tokens=80, batch_size=2) or part.tokens <= 80
    assert 64 < part.tokens <= 80
    assert evaluate(model, tokens, ByteTokenizer().token_bytes(), max_tokens=1).tokens == 16  # never nothing


def test_the_model_comes_back_in_the_mode_it_was_in(model, tokens):
    evaluate(model, tokens, ByteTokenizer().token_bytes())
    assert model.training
    evaluate(model.eval(), tokens, ByteTokenizer().token_bytes())
    assert not model.training


def test_scores_add_as_sums():
    total = Score(10.0, 4, 8) + Score(2.0, 2, 4)
    assert (total.nats, total.tokens, total.bytes) == (12.0, 6, 12)
    assert total.loss == 2.0 and total.perplexity == pytest.approx(math.e**2) and total.bits_per_byte == pytest.approx(1 / math.log(2))


def test_compressors_need_less_when_they_have_read_the_text():
    val = TEXT.encode()
    bits = compressor_bits(val, val)
    assert bits["bzip2 -9"] == pytest.approx(8 * len(bz2.compress(val, 9)) / len(val))
    assert bits["xz -9 primed with the training text"] < 0.5 * bits["xz -9"]
    assert "xz -9 primed with the training text" not in compressor_bits(b"", val)
