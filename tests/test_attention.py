"""Each implementation of attention against a loop over single queries: values, gradients, memory, caches."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt import attention as module
from tinygpt.attention import (
    attention,
    fastest_attention,
    fused_attention,
    same_document,
    tiled_attention,
    tiled_forward,
)
from tinygpt.support import UserError, peak_bytes

IMPLS = ["naive", "tiled", "fused"]
#        T, S, n_head, n_kv_head, causal, window
SHAPES = [
    (6, 6, 2, 2, True, None),
    (6, 6, 2, 2, False, None),
    (7, 7, 4, 2, True, None),  # grouped queries
    (5, 11, 4, 1, True, None),  # one head of keys for all; earlier keys in a cache
    (5, 11, 2, 2, False, None),
    (1, 9, 4, 2, True, None),  # one step of decoding
    (9, 4, 4, 2, True, None),  # five queries stand before the first key
    (8, 8, 2, 1, True, 3),  # sliding window
    (4, 12, 2, 1, True, 3),
    (1, 12, 2, 2, True, 5),
    (9, 4, 2, 2, True, 2),
    (5, 5, 2, 2, True, 1),
    (1, 1, 1, 1, True, None),
]


def qkv(T, S, n_head=2, n_kv_head=2, dim=8, dtype=torch.float64, seed=0, B=2):
    g = torch.Generator().manual_seed(seed)
    sizes = [(B, n_head, T, dim), (B, n_kv_head, S, dim), (B, n_kv_head, S, dim)]
    return [torch.randn(size, generator=g, dtype=dtype).requires_grad_() for size in sizes]


def oracle(q, k, v, causal=True, window=None):
    "One query at a time, over the keys it may see by the definition; no mask, so no wrong mask."
    B, n_head, T, _ = q.shape
    S = k.size(2)
    rows = []
    for h in range(n_head):
        g = h * k.size(1) // n_head
        for i in range(T):
            at = i + S - T
            sees = [j for j in range(S) if not causal or (j <= at and (window is None or j > at - window))]
            if not sees:
                rows.append(torch.zeros_like(v[:, g, 0]))
                continue
            scores = (k[:, g, sees] @ q[:, h, i, :, None]).squeeze(-1) / math.sqrt(q.size(-1))
            rows.append((scores.softmax(-1)[..., None] * v[:, g, sees]).sum(1))
    return torch.stack(rows, dim=1).view(B, n_head, T, v.size(-1))


def with_grads(fn, inputs, seed=1):
    y = fn(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def assert_all_close(a, b, atol, rtol=0.0):
    for name, x, y in zip(("y", "dq", "dk", "dv"), a, b, strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=rtol, msg=lambda m: f"{name}: {m}")


def saved_tensors(fn):
    "What autograd keeps for the backward pass of fn()."
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = fn()
    return y, kept


# ---- the numbers


def test_a_query_sees_its_own_key_and_those_before_and_of_these_only_the_window():
    places = torch.arange(4)
    before = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    last_two = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert module.visible(places, places).int().tolist() == before
    assert module.visible(places, places, window=2).int().tolist() == last_two


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T, S, n_head, n_kv_head, causal, window", SHAPES)
def test_values_and_gradients_are_those_of_a_loop_over_single_queries(
    impl, T, S, n_head, n_kv_head, causal, window
):
    inputs = qkv(T, S, n_head, n_kv_head)
    ours = with_grads(lambda *t: attention(*t, causal=causal, window=window, impl=impl), inputs)
    assert_all_close(ours, with_grads(lambda *t: oracle(*t, causal, window), inputs), atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    T=st.integers(1, 20),
    S=st.integers(1, 20),
    n_kv_head=st.integers(1, 2),
    group=st.integers(1, 3),
    block=st.integers(1, 8),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 22),
)
def test_tiles_of_any_size_over_sequences_of_any_length_change_nothing(
    T, S, n_kv_head, group, block, causal, window
):
    window = window if causal else None
    inputs = qkv(T, S, n_kv_head * group, n_kv_head, dim=4, B=1)
    ours = with_grads(lambda *t: tiled_attention(*t, causal, window, block=block), inputs)
    assert_all_close(ours, with_grads(lambda *t: oracle(*t, causal, window), inputs), atol=1e-11)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_the_tiles_cover_what_may_be_seen_exactly_once_and_no_tile_is_in_vain(window, block):
    for T, S in itertools.product(range(1, 9), repeat=2):
        seen = torch.zeros(T, S, dtype=torch.int64)
        for rows, tiles in module._tiles(T, S, True, window, block):
            for cols, mask in tiles:
                seen[rows, cols] += 1 if mask is None else mask
                sensible = mask is None or (mask.any() and not mask.all())
                assert sensible, "a tile that is all hidden, or masked without need"
        for i in range(T):
            at = i + S - T
            may_see = [int(j <= at and (window is None or j > at - window)) for j in range(S)]
            assert seen[i].tolist() == may_see


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("T, S, n_head, n_kv_head, causal, window", SHAPES)
def test_the_tiled_backward_passes_gradcheck_in_float64(T, S, n_head, n_kv_head, causal, window, dropout):
    inputs = qkv(T, S, n_head, n_kv_head, dim=3, B=1)
    settings = (causal, window, dropout, 1234, 4)  # seed 1234, tiles of 4
    assert torch.autograd.gradcheck(lambda *t: module._Tiled.apply(*t, *settings), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_kv_head", [6, 2])
def test_tiled_equals_pytorch_in_float32_over_many_tiles(causal, n_kv_head):
    inputs = qkv(333, 333, 6, n_kv_head, dim=16, dtype=torch.float32, B=1)

    def pytorchs(*t):
        return F.scaled_dot_product_attention(*t, is_causal=causal, enable_gqa=True)

    ours = with_grads(lambda *t: attention(*t, causal=causal, impl="tiled"), inputs)
    assert_all_close(ours, with_grads(pytorchs, inputs), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("impl", ["naive", "tiled", "fused"])
def test_no_implementation_is_further_from_float64_than_the_formula_in_float32(impl):
    def formula(q, k, v):  # the chapter's may be more exact than it must
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(torch.ones(400, 400).triu(1) == 1, -math.inf)
        return scores.softmax(-1) @ v

    exact = qkv(400, 400, 4, 4, dim=32, B=1)
    single = [t.detach().float().requires_grad_() for t in exact]
    reference = with_grads(formula, [t.detach().double().requires_grad_() for t in single])

    def error(attend):
        ours = with_grads(attend, single)
        return [(a.double() - b).square().mean().sqrt() for a, b in zip(ours, reference)]

    for e, plain in zip(error(lambda *t: attention(*t, impl=impl)), error(formula)):
        assert e < 2 * plain, (e, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_of_ten_thousand_do_not_overflow(impl):
    q, k, v = qkv(9, 9, dtype=torch.float32)
    y = attention(q * 1e4, k, v, impl=impl)
    picked = oracle(q.double() * 1e4, k.double(), v.double())
    torch.testing.assert_close(y.double(), picked, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_change_at_one_position_changes_nothing_before_it_and_something_from_it_on(impl, window):
    q, k, v = (t.detach() for t in qkv(8, 8))
    before = attention(q, k, v, window=window, impl=impl)
    k[:, :, 5] += 1
    v[:, :, 5] += 1
    changed = (attention(q, k, v, window=window, impl=impl) - before).abs().amax(dim=(0, 1, 3)) > 0
    reach = 8 if window is None else 5 + window
    assert changed.tolist() == [5 <= i < reach for i in range(8)]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_window_of_one_returns_the_values_and_a_wide_window_is_none(impl):
    q, k, v = qkv(6, 6)
    torch.testing.assert_close(attention(q, k, v, window=1, impl=impl), v)
    torch.testing.assert_close(attention(q, k, v, window=6, impl=impl), attention(q, k, v, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_views_that_are_not_contiguous_give_the_same_numbers(impl):
    T, n_head, n_kv_head, dim = 7, 4, 2, 8
    size = (2, T, (n_head + 2 * n_kv_head) * dim)
    g = torch.Generator().manual_seed(0)
    packed = torch.randn(size, generator=g, dtype=torch.float64).requires_grad_()

    def split(x):  # what a model does: one projection, split and transposed
        parts = x.split([n_head * dim, n_kv_head * dim, n_kv_head * dim], dim=-1)
        return [p.unflatten(-1, (-1, dim)).transpose(1, 2) for p in parts]

    def gradient(fn):
        return torch.autograd.grad(fn(*split(packed)).square().sum(), packed)[0]

    ours = gradient(lambda *t: attention(*t, impl=impl))
    torch.testing.assert_close(ours, gradient(oracle), atol=1e-12, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_values_may_be_wider_than_keys(impl):
    q, k, _ = qkv(5, 5)
    v = torch.randn(2, 2, 5, 3, dtype=torch.float64).requires_grad_()
    ours = with_grads(lambda *t: attention(*t, impl=impl), [q, k, v])
    assert_all_close(ours, with_grads(oracle, [q, k, v]), atol=1e-12)


# ---- rows that see nothing


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 2])
def test_queries_that_see_nothing_give_zero_and_pass_no_gradient(impl, window):
    inputs = qkv(7, 3)
    with torch.autograd.detect_anomaly(check_nan=True):  # not even a NaN that a mask would hide again
        y, dq, dk, dv = with_grads(lambda *t: attention(*t, window=window, impl=impl), inputs)
    assert (y[:, :, :4] == 0).all() and (dq[:, :, :4] == 0).all()
    assert (y[:, :, 4:] != 0).all() and all(t.isfinite().all() for t in (y, dq, dk, dv))
    seen = with_grads(lambda q, k, v: attention(q[:, :, 4:], k, v, window=window, impl=impl), inputs)
    torch.testing.assert_close(y[:, :, 4:], seen[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_at_all_give_zero(impl, causal):
    y, dq, dk, dv = with_grads(lambda *t: attention(*t, causal=causal, impl=impl), qkv(3, 0))
    assert y.shape == (2, 2, 3, 8) and (y == 0).all() and (dq == 0).all() and dk.numel() == dv.numel() == 0


@pytest.mark.parametrize("impl", ["naive", "tiled"])  # PyTorch's CPU kernel gives 0 for a query of NaN
def test_a_nan_in_the_input_is_not_hidden(impl):
    q, k, v = (t.detach() for t in qkv(5, 5))
    q[0, 0, 2, 0] = math.nan
    y = attention(q, k, v, impl=impl)
    assert y[0, 0, 2].isnan().all() and y.isnan().sum() == 8


# ---- what is kept


@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, 50)])
def test_tiled_keeps_the_inputs_the_output_and_one_number_per_query_and_head(causal, window):
    B, n_head, n_kv_head, T = 2, 4, 2, 300
    q, k, v = qkv(T, T, n_head, n_kv_head, dtype=torch.float32)
    y, kept = saved_tensors(lambda: attention(q, k, v, causal=causal, window=window, impl="tiled"))
    ours = [t for t in kept if t.data_ptr() not in {x.data_ptr() for x in (q, k, v, y)}]
    assert len(kept) == 5 and [tuple(t.shape) for t in ours] == [(B, n_head, T)]
    seen = torch.ones(T, T, dtype=torch.bool)
    if causal:
        seen = module.visible(*module.last_positions(T, T), window)
    scores = q @ k.repeat_interleave(2, dim=1).mT / math.sqrt(8)
    torch.testing.assert_close(ours[0], scores.masked_fill(~seen, -math.inf).logsumexp(-1))


def test_naive_keeps_a_matrix_of_all_pairs_so_the_check_above_can_fail():
    q, k, v = qkv(300, 300, dtype=torch.float32)
    _, kept = saved_tensors(lambda: attention(q, k, v, impl="naive"))
    assert max(t.numel() for t in kept) >= 2 * 2 * 300 * 300


@pytest.mark.parametrize(
    "impl, lengths, growth",
    [
        ("naive", (256, 512), (3.7, 4.1)),
        ("tiled", (256, 512), (1.0, 2.1)),
        ("fused", (1024, 2048), (1.0, 2.1)),
    ],
)
def test_twice_the_length_costs_the_naive_way_four_times_the_memory_and_the_others_twice(
    impl, lengths, growth
):
    def step(T):
        q, k, v = qkv(T, T, dim=16, dtype=torch.float32, B=1)

        def run():
            attention(q, k, v, impl=impl).sum().backward()

        run()
        return peak_bytes(run)

    assert growth[0] <= step(lengths[1]) / step(lengths[0]) <= growth[1]


# ---- a cache, and PyTorch's is_causal


def test_pytorchs_is_causal_lets_a_cached_query_see_only_the_first_key():
    q, k, v = qkv(1, 6)
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # the mask is aligned top-left: this is why fused_attention avoids it
    torch.testing.assert_close(wrong, v[:, :, :1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 5], [7, 5]], ids=str)
def test_cached_equals_uncached(impl, window, chunks):
    q, k, v = qkv(12, 12, 4, 2)
    whole = attention(q, k, v, window=window, impl=impl)
    start, parts = 0, []
    for n in chunks:  # n new queries against all keys so far
        end = start + n
        new = q[:, :, start:end]
        parts.append(attention(new, k[:, :, :end], v[:, :, :end], window=window, impl=impl))
        start = end
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "T, S, causal, window, is_causal, has_mask, keys",
    [
        (8, 8, True, None, True, False, 8),
        (8, 8, True, 8, True, False, 8),  # the window reaches everything
        (8, 8, False, None, False, False, 8),
        (1, 8, True, None, False, False, 8),  # a single query may see everything
        (1, 8, True, 3, False, False, 3),  # and with a window, everything that is left
        (1, 1, True, None, False, False, 1),
        (4, 8, True, None, False, True, 8),
        (8, 8, True, 3, False, True, 8),
        (2, 20, True, 3, False, True, 4),
        (8, 4, True, None, True, False, 4),  # the four that see nothing are not even asked
    ],
)
def test_fused_asks_for_the_cheapest_kernel_that_is_right(
    monkeypatch, T, S, causal, window, is_causal, has_mask, keys
):
    calls, real = [], F.scaled_dot_product_attention

    def spy(q, k, v, **kw):
        calls.append((k, kw))
        return real(q, k, v, **kw)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    fused_attention(*qkv(T, S), causal, window)
    [(k, kw)] = calls
    asked = dict(is_causal=kw["is_causal"], mask=kw["attn_mask"] is not None, keys=k.size(2))
    assert asked == dict(is_causal=is_causal, mask=has_mask, keys=keys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks for the name of the CPU kernel")
@pytest.mark.parametrize("T, S, window", [(64, 64, None), (1, 64, None), (16, 64, None), (64, 64, 9)])
def test_fused_takes_the_flash_kernel_on_cpu_with_grouped_heads_too(T, S, window):
    inputs = qkv(T, S, 4, 2, dtype=torch.float32)
    with torch.profiler.profile() as prof:
        fused_attention(*inputs, window=window)
    assert any("flash_attention_for_cpu" in e.key for e in prof.key_averages())


# ---- precision, dropout, compile


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_float32(impl, dtype):
    inputs = [t.detach().to(dtype).requires_grad_() for t in qkv(17, 17, dtype=torch.float32)]
    reference = with_grads(oracle, [t.detach().double().requires_grad_() for t in inputs])
    ours = with_grads(lambda *t: attention(*t, impl=impl), inputs)
    assert all(t.dtype == dtype for t in ours)
    eps = torch.finfo(dtype).eps
    assert_all_close([t.double() for t in ours], reference, atol=8 * eps, rtol=4 * eps)


def test_running_sums_are_kept_in_float32_over_many_tiles():
    q, k = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 600, 4, dtype=torch.bfloat16)
    v = (torch.arange(600) >= 300).to(torch.bfloat16)[None, None, :, None]
    assert tiled_attention(q, k, v, block=1).item() == 0.5  # a bfloat16 sum of ones stops at 256


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_gives_bfloat16_outputs_and_float32_gradients_whatever_the_mix_of_inputs(impl):
    q, k, v = qkv(9, 9, dtype=torch.float32)
    for values in (v, v.bfloat16()):  # after RoPE q and k may be float32, v bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = attention(q, k, values, impl=impl)
            grads = torch.autograd.grad(y.float().sum(), [q, k, v])
        assert y.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in grads)
        torch.testing.assert_close(y.float(), oracle(q, k, v), atol=0.03, rtol=0.03)


def test_tiled_under_autocast_is_tiled_on_inputs_cast_by_hand_to_the_last_bit():
    inputs = qkv(9, 9, dtype=torch.float32)

    def tiled(q, k, v):
        return attention(q, k, v, impl="tiled")

    def cast_by_hand(q, k, v):
        return tiled(q.bfloat16(), k.bfloat16(), v.bfloat16())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_grads(tiled, inputs)  # the backward pass under autocast, too
    for a, b in zip(ours, with_grads(cast_by_hand, inputs), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("impl", IMPLS)
def test_dropout_drops_whole_weights_scales_the_rest_and_repeats_with_the_seed(impl):
    T, p = 150, 0.25  # two tiles a side
    q, k, _ = qkv(T, T, 2, 1, dtype=torch.float32)
    v = torch.eye(T).expand(2, 1, T, T)  # the output is the matrix of weights itself
    weights = attention(q, k, v, impl=impl)
    torch.manual_seed(3)
    y = attention(q, k, v, dropout=p, impl=impl)
    keep = (y / weights)[weights > 0]
    assert torch.isclose(keep, torch.tensor(1 / (1 - p)), atol=1e-3).logical_or(keep == 0).all()
    assert abs((keep == 0).float().mean() - p) < 0.01
    assert not y[0].equal(y[1])  # other examples drop others
    assert not (y[0, 0] == 0).equal(y[0, 1] == 0)  # and other heads
    assert not (y[0, 0, 128:150, :22] == 0).equal(y[0, 0, 128:150, 128:150] == 0)
    torch.manual_seed(3)
    assert attention(q, k, v, dropout=p, impl=impl).equal(y)
    assert not attention(q, k, v, dropout=p, impl=impl).equal(y)


def test_tiled_backward_drops_the_weights_that_forward_dropped():
    T, p, seed = 9, 0.4, 5
    q, k, v = qkv(T, T)
    eye = torch.eye(T, dtype=torch.float64).expand(2, 2, T, T)  # with it the output is the matrix of weights
    all_weights = tiled_forward(q, k, eye)[0]
    dropped = tiled_forward(q, k, eye, dropout=p, seed=seed, block=4)[0]
    keep = (dropped / all_weights).nan_to_num(0)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)

    def plain(q, k, v):
        weights = (q @ k.mT / math.sqrt(8)).masked_fill(hidden, -math.inf).softmax(-1)
        return (weights * keep) @ v

    ours = with_grads(lambda *t: module._Tiled.apply(*t, True, None, p, seed, 4), [q, k, v])
    assert_all_close(ours, with_grads(plain, [q, k, v]), atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_dropout_draws_no_random_numbers(impl):
    state = torch.get_rng_state()
    attention(*qkv(5, 5), impl=impl)
    assert torch.get_rng_state().equal(state)


@pytest.mark.slow
@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_to_one_graph_also_when_lengths_change(impl):
    torch._dynamo.reset()
    fn = torch.compile(lambda q, k, v: attention(q, k, v, impl=impl), backend="aot_eager", fullgraph=True)
    for T, S in [(5, 5), (6, 6), (2, 9), (3, 10), (1, 9)]:
        q, k, v = qkv(T, S, 4, 2)
        assert_all_close(with_grads(fn, [q, k, v]), with_grads(oracle, [q, k, v]), atol=1e-12)


# ---- bad input


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(impl="flash"), ["flash", "naive", "tiled", "fused"]),
        (dict(window=0), ["window = 0", "at least 1"]),
        (dict(window=3, causal=False), ["window = 3", "causal"]),
        (dict(dropout=1.0), ["dropout = 1.0"]),
        (dict(dropout=-0.1), ["dropout = -0.1"]),
    ],
)
def test_bad_settings_are_one_sentence_with_the_value(change, words):
    with pytest.raises(UserError) as error:
        attention(*qkv(4, 4), **change)
    assert all(w in str(error.value) for w in words) and "\n" not in str(error.value)


def test_shapes_that_do_not_fit_are_one_sentence():
    q, k, v = qkv(4, 4, 4, 4)
    with pytest.raises(UserError, match="n_kv_head = 3 does not divide n_head = 4"):
        attention(q, k[:, :3], v[:, :3])
    misfits = [
        (q[0], k, v),
        (q, k[:, :, :2], v),
        (q, k[..., :2], v),
        (q[:1], k, v),
        (q, k[:, :2], v),
        (q, k[:, :0], v[:, :0]),
    ]
    for bad in misfits:
        with pytest.raises(UserError):
            attention(*bad)


# ---- on a GPU


def with_grads_on(inputs, fn):
    y = fn(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [t.double().cpu() for t in (y.detach(), *torch.autograd.grad(y, inputs, dy))]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "T, window, dtype",
    [(4096, None, torch.bfloat16), (4096, 256, torch.bfloat16), (4096, None, torch.float32)],
)
def test_fused_with_grouped_heads_never_builds_the_matrix_on_cuda(T, window, dtype):
    inputs = qkv(T, T, 8, 2, dim=64, B=1, dtype=torch.float32)
    q, k, v = (t.detach().cuda().to(dtype).requires_grad_() for t in inputs)
    matrix = 8 * T * T * q.element_size()
    assert peak_bytes(lambda: attention(q, k, v, window=window).sum().backward()) < matrix / 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T, S, n_head, n_kv_head, causal, window", SHAPES)
def test_cuda_gives_the_numbers_of_the_loop(impl, T, S, n_head, n_kv_head, causal, window):
    inputs = qkv(T, S, n_head, n_kv_head)
    on_gpu = [t.detach().float().cuda().requires_grad_() for t in inputs]
    ours = with_grads_on(on_gpu, lambda *t: attention(*t, causal=causal, window=window, impl=impl))
    assert_all_close(ours, with_grads(lambda *t: oracle(*t, causal, window), inputs), atol=1e-4)


# a mask of one's own -------------------------------------------------------------------------------------


def masks_for(T, S, n_head):
    "Masks of each kind and shape that spreads; in one the second query sees nothing."
    g = torch.Generator().manual_seed(5)
    sees = torch.rand(2, n_head, T, S, generator=g) < 0.6
    blind = sees.clone()
    blind[:, :, min(1, T - 1)] = False
    numbers = torch.randn(T, S, generator=g, dtype=torch.float64)
    blind_numbers = numbers.masked_fill(~blind[0, 0], -math.inf)
    keys = sees[0, 0, 0]  # (S,): of the keys alone
    return [sees, blind, sees[0, 0], sees[:1, :, :1], keys, numbers, numbers[0], blind_numbers]


@pytest.mark.parametrize("impl", ["naive", "fused"])
@pytest.mark.parametrize("T, S, n_head, n_kv_head, causal, window", SHAPES)
def test_a_mask_hides_besides_what_causal_and_window_hide(impl, T, S, n_head, n_kv_head, causal, window):
    for mask in masks_for(T, S, n_head):
        q, k, v = qkv(T, S, n_head, n_kv_head)
        y = attention(q, k, v, causal, window, impl=impl, mask=mask)

        ago = torch.arange(S - T, S)[:, None] - torch.arange(S)
        hidden = (causal & (ago < 0)) | (causal & (ago >= (window or S + T)))
        numbers = mask
        if mask.dtype == torch.bool:
            numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
        added = numbers.expand(2, n_head, T, S).masked_fill(hidden, -math.inf)
        theirs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        group = n_head // n_kv_head
        wide = [theirs[0], *(t.repeat_interleave(group, dim=1) for t in theirs[1:])]
        want = F.scaled_dot_product_attention(*wide, attn_mask=added)
        want = want.masked_fill((added == -math.inf).all(-1, keepdim=True), 0)
        torch.testing.assert_close(y, want)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        (y * weights).sum().backward()
        (want * weights).sum().backward()
        for ours, other in zip((q, k, v), theirs):
            torch.testing.assert_close(ours.grad, other.grad.nan_to_num())


@pytest.mark.parametrize("impl", ["naive", "fused"])
def test_a_mask_of_all_true_or_of_zeros_changes_nothing(impl):
    q, k, v = qkv(5, 9, 4, 2)
    for mask in (torch.ones(5, 9, dtype=torch.bool), torch.zeros(9, dtype=torch.float64)):
        same = attention(q, k, v, window=4, impl=impl)
        torch.testing.assert_close(attention(q, k, v, window=4, impl=impl, mask=mask), same)


def test_the_mask_of_documents_is_true_where_two_tokens_have_one_number():
    document = torch.tensor([[0, 0, 1, 1, 0], [7, -1, -1, 7, 2]])
    mask = same_document(document)
    assert mask.shape == (2, 1, 5, 5) and mask.dtype == torch.bool
    for row, numbers in zip(mask[:, 0].tolist(), document.tolist()):
        assert row == [[a == b for b in numbers] for a in numbers]


@pytest.mark.parametrize(
    "mask, impl, words",
    [
        (torch.ones(5, 9).bool(), "tiled", "impl = 'tiled' takes no mask: choose naive or fused"),
        (torch.ones(5, 8).bool(), "fused", r"mask \(5, 8\) does not spread to .* \(2, 4, 5, 9\)"),
        (torch.ones(1, 1, 1, 5, 9), "naive", "does not spread"),
        (torch.ones(5, 9).long(), "naive", "mask is of torch.int64: give a tensor of bool"),
        ([[True]], "fused", "mask is of list: give a tensor"),
    ],
)
def test_a_mask_that_cannot_be_is_a_sentence(mask, impl, words):
    q, k, v = qkv(5, 9, 4, 2)
    with pytest.raises(UserError, match=words):
        attention(q, k, v, impl=impl, mask=mask)


def test_the_fastest_implementation_is_the_one_that_the_record_says():
    path = Path(__file__).parents[1] / "benchmarks/results/attention_cpu.json"
    for row in json.loads(path.read_text())["rows"]:
        dtype = getattr(torch, row["dtype"])
        chosen = fastest_attention(torch.device("cpu"), dtype, row["length"], row["dropout"])
        assert row["ms"][chosen] == min(row["ms"].values()), row
    for dropout in (0.0, 0.2):
        assert fastest_attention(torch.device("cuda"), torch.bfloat16, 128, dropout) == "fused"
