import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.data.tokens import Shards
from tinygpt.data.windows import RandomLoader, ShardLoader, permute, read_windows, to_batch
from tinygpt.support import UserError

TOKENS = np.arange(1000, dtype=np.uint16)


def cut(tokens, size):
    "The tokens as shards of `size`, the last one shorter."
    return Shards([tokens[i : i + size] for i in range(0, len(tokens), size)])


def pairs(batches):
    "Every (input, target) that was trained on, and how often."
    return Counter(
        (a, b) for x, y in batches for a, b in zip(x.flatten().tolist(), y.flatten().tolist()) if b != -100
    )


# windows at random places


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**12), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(seed, step, world_size):
    whole = RandomLoader(TOKENS, 12, 7, seed)
    whole.load_state_dict({"step": step})
    parts = [RandomLoader(TOKENS, 12, 7, seed, rank, world_size) for rank in range(world_size)]
    for part in parts:
        part.load_state_dict({"step": step})
    x, y = next(whole)
    assert torch.equal(torch.cat([next(p)[0] for p in parts]), x)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_resuming_at_every_step_equals_not_stopping():
    loader = RandomLoader(TOKENS, 4, 8, seed=5)
    straight, states = [], []
    for _ in range(20):
        states.append(loader.state_dict())
        straight.append(next(loader))
    for state, (x, y) in zip(states, straight):
        resumed = RandomLoader(TOKENS, 4, 8, seed=5, device="cpu")
        resumed.load_state_dict(json.loads(json.dumps(state)))
        x2, y2 = next(resumed)
        assert torch.equal(x, x2) and torch.equal(y, y2)


def test_steps_and_seeds_give_different_windows():
    a, b = RandomLoader(TOKENS, 8, 8, seed=1), RandomLoader(TOKENS, 8, 8, seed=2)
    assert len({tuple(a.starts(s)) for s in range(100)} | {tuple(b.starts(s)) for s in range(100)}) == 200


def test_windows_reach_both_ends_of_the_tokens_and_no_further():
    loader = RandomLoader(np.arange(12), 64, 8)
    starts = np.concatenate([loader.starts(s) for s in range(20)])
    assert set(starts) == {0, 1, 2, 3}  # the last target of window 3 is token 11


def test_windows_are_uniform():
    loader = RandomLoader(np.arange(108), 1000, 8)
    counts = np.bincount(np.concatenate([loader.starts(s) for s in range(50)]), minlength=100)
    chi2 = ((counts - 500) ** 2 / 500).sum()  # 99 degrees of freedom: mean 99, standard deviation 14
    assert 50 < chi2 < 160


def test_a_corpus_shorter_than_a_block_and_a_batch_that_does_not_divide_are_refused():
    with pytest.raises(UserError, match="block"):
        RandomLoader(np.arange(8), 4, 8)
    # a stream that goes on keeps its batch_size, so the ranks have to change
    with pytest.raises(UserError, match="by 3 ranks: choose a multiple of 3, or ranks that divide 4"):
        RandomLoader(TOKENS, 4, 8, world_size=3)


@pytest.mark.parametrize("rank, world_size", [(1, 1), (2, 2), (-1, 2), (0, 0)])
@pytest.mark.parametrize("make", [RandomLoader, ShardLoader])
def test_a_rank_that_is_none_of_the_ranks_is_refused(make, rank, world_size):
    with pytest.raises(UserError, match=f"rank = {rank} with world_size = {world_size}.*give both"):
        make(TOKENS, 4, 8, rank=rank, world_size=world_size)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_batches_arrive_on_the_gpu_unchanged():
    a, b = RandomLoader(TOKENS, 4, 8), RandomLoader(TOKENS, 4, 8, device="cuda")
    for _ in range(5):
        assert torch.equal(next(a)[0], next(b)[0].cpu())


def test_a_random_window_may_cross_from_shard_to_shard():
    a, b = RandomLoader(np.arange(100), 32, 7), RandomLoader(cut(np.arange(100), 9), 32, 7)
    for _ in range(10):
        assert torch.equal(next(a)[1], next(b)[1])


def test_behind_the_last_token_there_is_padding_that_is_no_id_and_no_target():
    rows = read_windows(np.arange(10, 20), np.array([0, 7]), 5)
    assert rows.tolist() == [[10, 11, 12, 13, 14], [17, 18, 19, -100, -100]]
    x, y = to_batch(rows, torch.device("cpu"))
    assert x.tolist() == [[10, 11, 12, 13], [17, 18, 19, 0]]
    assert y.tolist() == [[11, 12, 13, 14], [18, 19, -100, -100]]
    assert rows.tolist() == [[10, 11, 12, 13, 14], [17, 18, 19, -100, -100]]  # as it was given


# windows of a grid, each once


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 200),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 99),
)
def test_in_each_epoch_every_pair_of_adjacent_tokens_is_trained_on_once(
    n, shard, rows, T, world_size, shuffle, seed
):
    tokens = np.arange(n, dtype=np.uint16)  # every token another id: a pair says where it is from
    B = rows * world_size
    ranks = [
        ShardLoader(cut(tokens, shard), B, T, seed, r, world_size, shuffle=shuffle) for r in range(world_size)
    ]
    windows = -(-(n - 1) // T)
    batches, epochs = [], 3
    for _ in range(-(-epochs * windows // B)):
        parts = [next(r) for r in ranks]
        batches += [(x[i : i + 1], y[i : i + 1]) for x, y in parts for i in range(len(x))]
    for epoch in range(epochs):
        assert pairs(batches[epoch * windows : (epoch + 1) * windows]) == Counter(
            (i, i + 1) for i in range(n - 1)
        )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 200), st.integers(1, 70), st.integers(1, 20), st.integers(0, 99))
def test_the_global_batch_is_the_same_for_one_to_five_ranks_and_for_any_cut_into_shards(n, shard, T, seed):
    tokens = np.arange(n, dtype=np.uint16)
    whole = ShardLoader(tokens, 60, T, seed)
    x, y = next(whole)
    for world_size in range(1, 6):
        parts = [next(ShardLoader(cut(tokens, shard), 60, T, seed, r, world_size)) for r in range(world_size)]
        assert torch.equal(torch.cat([p[0] for p in parts]), x) and torch.equal(
            torch.cat([p[1] for p in parts]), y
        )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 100),
    st.integers(1, 12),
    st.integers(0, 99),
    st.sampled_from([(1, 2), (2, 1), (2, 3), (3, 6)]),
)
def test_resuming_at_every_batch_of_two_epochs_on_another_number_of_ranks_equals_not_stopping(
    n, T, seed, worlds
):
    tokens = np.arange(n, dtype=np.uint16)
    before, after = worlds
    ranks = [ShardLoader(tokens, 6, T, seed, r, before) for r in range(before)]
    straight, states = [], []
    while ranks[0].epoch <= 2:
        assert all(r.state_dict() == ranks[0].state_dict() for r in ranks)
        states.append(ranks[0].state_dict())
        parts = [next(r) for r in ranks]
        straight.append(torch.cat([p[1] for p in parts]))
    for state, y in zip(states, straight):
        resumed = [ShardLoader(tokens, 6, T, seed, r, after) for r in range(after)]
        for r in resumed:
            r.load_state_dict(json.loads(json.dumps(state)))
        assert torch.equal(torch.cat([next(r)[1] for r in resumed]), y)


def test_a_run_may_go_on_with_another_batch_size():
    tokens = np.arange(100, dtype=np.uint16)
    small, large = ShardLoader(tokens, 2, 3), ShardLoader(tokens, 8, 3)
    first = [next(small) for _ in range(4)]
    large.load_state_dict(small.state_dict())
    rest = [next(large) for _ in range(3)]
    assert small.n_windows == 33 and sum(pairs(first + rest).values()) > 90
    one_epoch = first + rest[:2] + [(x[:1], y[:1]) for x, y in rest[2:]]  # 8 + 24 + 1 windows
    assert max(pairs(one_epoch).values()) == 1


def test_epochs_are_counted_in_parts():
    loader = ShardLoader(np.arange(81), 2, 10)  # eight windows
    seen = [loader.epoch]
    for _ in range(5):
        next(loader)
        seen.append(loader.epoch)
    assert seen == [0, 0.25, 0.5, 0.75, 1, 1.25]


def test_epochs_and_seeds_differ_in_order_where_shuffled_and_not_where_not():
    tokens = np.arange(1001, dtype=np.uint16)

    def orders(**kw):
        loader = ShardLoader(tokens, 1, 10, **kw)
        return [tuple(loader.starts(100 * epoch, 100)) for epoch in range(3)]

    assert len({*orders(seed=0), *orders(seed=1)}) == 6
    assert set(orders(shuffle=False)) == {tuple(range(0, 1000, 10))}


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 100))
def test_permute_is_a_permutation(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, (seed, epoch)).tolist()) == list(range(n))


def test_any_place_of_a_huge_permutation_can_be_asked_for_alone():
    n = 10**12 + 7
    places = np.array([0, 1, 5, n - 1])
    out = permute(places, n, (0, 0))
    assert len(set(out.tolist())) == 4 and (out < n).all() and (out >= 0).all()
    assert out[2] == permute(np.array([5]), n, (0, 0))[0]


def test_permutations_of_a_few_things_are_all_about_equally_frequent():
    counts = Counter(tuple(permute(np.arange(4), 4, (0, key)).tolist()) for key in range(4800))
    # 24 orders, 23 degrees of freedom: mean 23, standard deviation 7
    chi2 = sum((counts[p] - 200) ** 2 / 200 for p in counts)
    assert len(counts) == 24 and chi2 < 60


def test_neighbors_end_up_as_far_from_each_other_as_in_a_true_shuffle():
    n = 10_000
    steps = np.abs(np.diff(permute(np.arange(n), n, (1, 2))))
    true = np.abs(np.diff(np.random.default_rng(0).permutation(n)))
    assert abs(steps.mean() - n / 3) < 0.03 * n / 3  # n / 3 for random pairs
    assert abs(np.median(steps) - np.median(true)) < 0.05 * n


def test_a_state_of_other_data_or_another_order_is_refused_and_the_difference_named():
    state = ShardLoader(np.arange(100), 2, 4).state_dict()
    for other, word in [
        (ShardLoader(np.arange(101), 2, 4), "tokens"),
        (ShardLoader(np.arange(100), 2, 5), "block_size"),
        (ShardLoader(np.arange(100), 2, 4, seed=1), "seed"),
        (ShardLoader(np.arange(100), 2, 4, shuffle=False), "shuffle"),
    ]:
        with pytest.raises(UserError, match=f"with {word} ="):
            other.load_state_dict(state)


def test_a_corpus_of_one_token_and_a_batch_that_does_not_divide_are_refused():
    with pytest.raises(UserError, match="no pair"):
        ShardLoader(np.arange(1), 1, 4)
    with pytest.raises(UserError, match="3 ranks"):
        ShardLoader(np.arange(9), 4, 4, world_size=3)


def test_build_nanogpts_arithmetic_loses_the_tails_and_ours_does_not():
    B, T, n, shard = 4, 8, 1000, 300
    seen = set()
    for start in range(0, n, shard):  # its rule: next shard as soon as no whole batch is left in this one
        size, at = min(shard, n - start), 0
        while at + B * T + 1 <= size:
            seen |= set(range(start + at, start + at + B * T))
            at += B * T
    assert n - 1 - len(seen) == 39
    loader = ShardLoader(cut(np.arange(n, dtype=np.uint16), shard), B, T)
    ours = pairs(next(loader) for _ in range(-(-loader.n_windows // B)))
    assert len(ours) == n - 1


def test_numpy_integers_give_the_order_of_plain_ones_and_a_state_that_json_holds():
    t = np.arange(1000)
    for kind in (RandomLoader, ShardLoader):
        plain = kind(t, 4, 8, seed=1)
        other = kind(t, np.int64(4), np.int32(8), seed=np.int64(1))
        for _ in range(3):
            assert torch.equal(next(plain)[0], next(other)[0])
        assert json.loads(json.dumps(other.state_dict())) == plain.state_dict()
    places = np.arange(50)
    assert (permute(places, 50, (0, 1)) == permute(places, np.int64(50), (np.int64(0), np.uint8(1)))).all()


def test_a_row_without_tokens_and_a_size_that_is_no_integer_are_refused():
    for kind in (RandomLoader, ShardLoader):
        for block_size in (0, -3):
            with pytest.raises(UserError, match=f"block_size = {block_size}"):
                kind(np.arange(99), 4, block_size)
        for wrong in (dict(block_size=4.0), dict(batch_size=2.0), dict(seed=1.5)):
            with pytest.raises(TypeError, match="integer"):
                kind(np.arange(99), **(dict(batch_size=2, block_size=4) | wrong))


@pytest.mark.parametrize("place, n", [(100, 10), (10, 10), (-1, 10), (0, 0)])
def test_a_place_that_is_none_of_the_n_is_refused_and_not_walked_for_ever(place, n):
    with pytest.raises(UserError, match=f"places {place} to {place}"):
        permute(np.array([place]), n, (0, 0))
    assert permute(np.array([], dtype=np.int64), n, (0, 0)).size == 0


def test_the_state_of_another_loader_is_refused_by_the_shard_loader():
    with pytest.raises(UserError, match="tokens = None"):
        ShardLoader(np.arange(100), 2, 4).load_state_dict({"step": 3})
