"""Draws follow the probabilities, a cache changes nothing, and rows of a batch are what they are alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.generate.sample import (
    NextLogits,
    Row,
    check_rows,
    check_sampling,
    context_start,
    decode_rows,
    draw_tokens,
    generate_batch,
    likeliest,
    look_up,
    next_tokens,
    sampling_probs,
    seeded_rows,
    show_rows,
    split_at_stop,
)
from tinygpt.measure.speed import host_reads
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

SMALL = dict(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=2),
    "modern": GPTConfig.modern(**SMALL),
}


def opinionated(config):
    torch.manual_seed(0)
    model = GPT(config)
    for name, p in model.named_parameters():
        # norms that favor a direction would repeat one token for ever
        if p.dim() > 1 or ("bias" in name and name != "ln_f.bias"):
            torch.nn.init.normal_(p, std=0.4)
    return model


@pytest.fixture(scope="module")
def model():
    return opinionated(VARIANTS["gpt2"])


SIX = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.03, 0.01])


@pytest.mark.parametrize(
    "how, expected",
    [
        (dict(temperature=0.5), [0.705, 0.254, 0.028, 0.010, 0.003, 0]),  # the squares, and their shares
        (dict(top_k=2), [0.625, 0.375, 0, 0, 0, 0]),
        (dict(top_p=0.85), [0.556, 0.333, 0.111, 0, 0, 0]),
        (dict(temperature=0.5, top_p=0.85), [0.735, 0.265, 0, 0, 0, 0]),  # temperature first: two hold 0.959
        (dict(top_k=3, top_p=0.85), [0.625, 0.375, 0, 0, 0, 0]),  # top-k first: of 0.9, two hold 0.889
        (dict(temperature=0), [1, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_by_hand_the_probabilities_of_six_tokens_in_any_order_and_in_rows(how, expected):
    logits, expected = SIX.log(), torch.tensor(expected)
    places = torch.tensor([[3, 0, 5, 1, 4, 2], [0, 1, 2, 3, 4, 5]])  # the first row is not sorted
    given = logits[places]
    for scores, wanted in ((logits, expected), (given, expected[places])):
        before = scores.clone()
        got = sampling_probs(scores, **how)
        assert got.shape == scores.shape and got.is_floating_point(), f"{got.dtype} of {tuple(got.shape)}"
        assert torch.equal(scores, before), "the scores that were given have changed"
        said = [[round(x, 3) for x in both.flatten().tolist()] for both in (got, wanted)]
        assert (got - wanted).abs().max() < 1e-3, f"{said[0]} instead of {said[1]}"


def test_by_hand_where_a_context_of_eight_begins():
    found = [context_start(n, 8) for n in range(1, 18)]
    assert found == [0] * 8 + [4] * 4 + [8] * 4 + [12], f"after 1 to 17 tokens it begins at {found}"
    assert [context_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]


def test_of_equal_scores_the_first_is_the_likeliest_in_each_row():
    found = likeliest(torch.tensor([[[0.0, 2.0, 2.0], [1.0, 0.0, 0.0]]]))
    assert found.shape == (1, 2), (
        f"scores of shape (1, 2, 3) have a shape of {tuple(found.shape)}, not (1, 2)"
    )
    assert found.tolist() == [[1, 0]]


@settings(deadline=None)
@given(
    st.lists(st.floats(-20, 20), min_size=1, max_size=30),
    st.floats(0.05, 5),
    st.integers(0, 40),
    st.floats(0.01, 1),
)
def test_sampling_probabilities_sum_to_one_and_keep_the_order(logits, temperature, top_k, top_p):
    logits = torch.tensor(logits)
    probs = sampling_probs(logits, temperature, top_k, top_p)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and (probs >= 0).all()
    plain = (logits / temperature).softmax(-1)
    assert probs[plain >= plain.max() * (1 - 1e-6)].max() == probs.max()  # of equal ones any
    if top_k:
        assert (probs > 0).sum() <= top_k
    kept = probs > 0
    if kept.any() and not kept.all():
        assert plain[kept].min() >= plain[~kept].max() - 1e-7  # the likeliest are kept


def test_top_p_keeps_the_smallest_set_that_holds_p():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, kept in [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)]:
        got = sampling_probs(probs.log(), top_p=top_p)
        assert (got > 0).sum() == kept, top_p
        torch.testing.assert_close(got[:kept], probs[:kept] / probs[:kept].sum())


@pytest.mark.parametrize("top_k", [0, 4, 5, 1000])
def test_top_k_of_zero_or_of_all_keeps_all(top_k):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    torch.testing.assert_close(sampling_probs(logits, top_k=top_k), logits.softmax(-1))


def test_with_ties_top_k_keeps_k_and_no_more():
    assert (sampling_probs(torch.zeros(3, 10), top_k=4) > 0).sum(-1).tolist() == [4, 4, 4]


def cut_by_ranks(logits, temperature, top_k, top_p):
    "The same in numpy, one row at a time: sort, cut, and put back."
    p = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(p)), -logits))  # of equal ones the first
    ranked = p[order]
    if top_k:
        ranked[top_k:] = 0
    ranked /= ranked.sum()
    ranked[np.cumsum(ranked) - ranked >= top_p] = 0
    cut = np.zeros_like(p)
    cut[order] = ranked / ranked.sum()
    return cut


@pytest.mark.parametrize("top_k", [0, 1, 3, 50, 300, 1000])
@pytest.mark.parametrize("top_p", [0.3, 0.85, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_cuts_are_those_of_a_full_sort_also_with_many_ties(temperature, top_k, top_p):
    logits = 2 * torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(8))
    logits = (logits * 4).round() / 4  # about 50 values
    logits[0, 0, 450:] = -torch.inf
    got = sampling_probs(logits, temperature, top_k, top_p)
    rows = logits.double().view(6, 500).numpy()
    want = np.stack([cut_by_ranks(row, temperature, top_k, top_p) for row in rows])
    np.testing.assert_allclose(got.view(6, 500).numpy(), want, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("top_p", [1e-300, 1e-40, 1e-6])
def test_a_tiny_top_p_keeps_the_likeliest_alone(top_p):
    probs = sampling_probs(torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, -torch.inf]]), top_p=top_p)
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_never_nan(temperature):
    logits = torch.tensor([[3.0, 2.9, -5.0], [-4.0, -4.0, -9.0]])
    probs = sampling_probs(logits, temperature)
    torch.testing.assert_close(probs, torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0]]))


@pytest.mark.parametrize("temperature", [1e6, 1e39, 1e300])
def test_a_huge_temperature_makes_all_alike_but_brings_back_nothing_impossible(temperature):
    probs = sampling_probs(torch.tensor([3.0, -torch.inf, -5.0]), temperature)
    torch.testing.assert_close(probs, torch.tensor([0.5, 0.0, 0.5]), atol=1e-5, rtol=0)


# draws


def chi_square(counts, probs):
    "Sum of (observed - expected)² / expected, in standard deviations from its mean."
    expected = counts.sum() * probs
    found = ((counts - expected) ** 2 / expected).sum().item()
    return (found - (len(probs) - 1)) / (2 * (len(probs) - 1)) ** 0.5


def some_keys(n, seed=0):
    return torch.randint(2**32, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [2, 6, 100])
def test_tokens_come_as_often_as_their_probabilities_say(shape):
    probs = (2 * torch.randn(shape, generator=torch.Generator().manual_seed(shape))).softmax(-1)
    counts = torch.bincount(draw_tokens(probs.expand(200_000, -1), some_keys(200_000)), minlength=shape)
    assert chi_square(counts, probs) < 4
    assert chi_square(counts, probs.roll(1)) > 100
    # neighboring keys, as a poor generator would give them
    counts = torch.bincount(draw_tokens(probs.expand(200_000, -1), torch.arange(200_000)), minlength=shape)
    assert chi_square(counts, probs) < 4


def test_draws_of_two_keys_in_a_row_do_not_depend_on_each_other():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = draw_tokens(probs.expand(100_000, 2, 4), some_keys(200_000).view(-1, 2))
    pairs = torch.bincount(4 * drawn[:, 0] + drawn[:, 1], minlength=16)
    assert chi_square(pairs, (probs[:, None] * probs).flatten()) < 4


def test_draws_follow_the_probabilities_and_top_k_is_not_discarded():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    probs = sampling_probs(logits, temperature=0.7, top_k=3)
    counts = torch.bincount(draw_tokens(probs.expand(100_000, 4), some_keys(100_000)), minlength=4)
    expected = (logits[:3] / 0.7).softmax(-1)
    assert counts[3] == 0 and chi_square(counts[:3], expected) < 4


def scrambled(x):
    "Wellons' lowbias32 in Python's own whole numbers."
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ x >> shift) * factor) % 2**32
    return x ^ x >> 16


def unscrambled(x):
    "The number that `scrambled` turns into x."
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 2**32) % 2**32
    return x ^ x >> 16


def test_the_race_is_that_of_waiting_times_in_pythons_whole_numbers():
    probs = (2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(4))).softmax(-1)
    keys = some_keys(50)
    for row, key, token in zip(probs.tolist(), keys.tolist(), draw_tokens(probs, keys).tolist()):
        shares = [(scrambled(i * 0x9E3779B9 % 2**32 ^ key) + 0.5) / 2**32 for i in range(40)]
        times = [-np.log1p(-share) / p for share, p in zip(shares, row)]
        assert token == np.argmin(times)


@pytest.mark.parametrize("extreme", [0, 1, 2**32 - 1])
def test_a_token_without_probability_never_comes_even_if_the_key_is_extreme(extreme):
    assert scrambled(unscrambled(extreme)) == extreme
    for token in (0, 5, 9):
        others = [i for i in range(10) if i != token]
        for lucky in (token, others[0], others[-1]):
            key = torch.tensor(unscrambled(extreme) ^ lucky * 0x9E3779B9 % 2**32)  # the extreme is this one's
            assert draw_tokens(torch.eye(10)[token], key) == token
    probs = torch.rand(10, 50, generator=torch.Generator().manual_seed(1)) ** 8
    probs *= torch.rand(10, 50, generator=torch.Generator().manual_seed(2)) < 0.3
    for row in probs:
        assert (row[draw_tokens(row.expand(5000, 50), some_keys(5000))] > 0).all()


def test_a_rounding_of_the_scores_changes_no_draw_though_there_are_many_tokens():
    "Where a cumulative sum is searched, it changes one draw in a hundred."
    generator = torch.Generator().manual_seed(2)
    scores = 3 * torch.randn(20_000, generator=generator)
    nearly = scores + 1e-5 * torch.randn(20_000, generator=generator)
    both = [draw_tokens(s.softmax(-1).expand(1000, -1), some_keys(1000)) for s in (scores, nearly)]
    u = torch.rand(1000, dtype=torch.float64, generator=generator)
    ends = [s.double().softmax(-1).cumsum(-1) for s in (scores, nearly)]
    assert torch.equal(*both) and len(both[0].unique()) > 300
    assert not torch.equal(*[torch.searchsorted(e, u) for e in ends])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_seed_means_the_same_on_a_gpu():
    generator = torch.Generator().manual_seed(3)
    probs = torch.rand(64, 50257, generator=generator) ** 8
    probs *= torch.rand(64, 50257, generator=generator) < 0.3
    probs /= probs.sum(-1, keepdim=True)
    assert torch.equal(draw_tokens(probs.cuda(), some_keys(64)).cpu(), draw_tokens(probs, some_keys(64)))
    texts, logprobs, prompts = [], [], [[1, 2, 3], [9], [1, 2, 3], [4] * 20]
    for device in ("cpu", "cuda"):
        rows = seeded_rows(prompts, seed=5, forced=[11])
        model = opinionated(VARIANTS["llama"]).to(device)
        for _ in decode_rows(model, rows, 30, 0.9, top_k=40, top_p=0.95, logprobs=2):
            pass
        texts.append([row.new for row in rows])
        logprobs.append(torch.tensor([row.logprobs for row in rows]))
    assert texts[0] == texts[1]
    torch.testing.assert_close(*logprobs, atol=1e-3, rtol=0)


def test_by_hand_each_row_takes_its_key_from_its_own_generator_unless_its_token_is_forced():
    logits = SIX.log().expand(12, 6)

    def twelve():
        rows = seeded_rows([[0]] * 12, seed=3)
        rows[1].forced = [5]
        return rows

    assert next_tokens(logits, twelve(), 0, 0, 1.0) == [0, 5, *[0] * 10]
    own = [torch.Generator().manual_seed(3 + r) for r in range(12)]
    keys = torch.cat([torch.randint(2**32, (1,), generator=generator) for generator in own])
    for how in ((1.0, 0, 1.0), (3.0, 0, 1.0), (0.3, 0, 1.0), (3.0, 4, 1.0), (3.0, 0, 0.9)):
        wanted = draw_tokens(sampling_probs(logits, *how), keys).tolist()
        wanted[1] = 5  # is forced
        found = next_tokens(logits, twelve(), *how)
        said = f"temperature {how[0]}, top_k {how[1]}, top_p {how[2]}"
        assert found == wanted, f"at {said} the rows' keys draw {wanted}, not {found}"


def test_by_hand_the_log_probabilities_of_two_tokens():
    logits = torch.stack((SIX.log() + 7, SIX.flip(0).log()))  # the first row's do not add up to 1
    for r, (own, likely) in enumerate(look_up(logits, [1, 5], 2)):
        wanted = ([math.log(0.3), math.log(0.5)][r], [{0: 0.5, 1: 0.3}, {5: 0.5, 4: 0.3}][r])
        assert own == pytest.approx(wanted[0], abs=1e-5), f"row {r}: {own:.3f} instead of {wanted[0]:.3f}"
        shares = {token: math.exp(value) for token, value in likely.items()}
        assert shares == pytest.approx(wanted[1], abs=1e-5), f"row {r}: {shares} instead of {wanted[1]}"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_scores_that_are_not_finite_are_told_before_a_token_comes(temperature):
    model = opinionated(VARIANTS["gpt2"])
    with torch.no_grad():
        model.wte.weight[7] = torch.nan
    came = []
    with pytest.raises(UserError, match="logits are not finite"):
        for row in decode_rows(model, seeded_rows([[1], [2]], 0), 5, temperature):
            came.append(row)
    assert came == []


def test_temperature_zero_is_greedy_and_ties_take_the_first():
    assert sampling_probs(torch.tensor([[0.0, 2.0], [3.0, 3.0]]), temperature=0).tolist() == [[0, 1], [1, 0]]


def tokens_of(model, ids, n, seed=0, **how):
    "(n, B): the new tokens of these prompts."
    return torch.tensor(generate_batch(model, ids.tolist(), n, seed=seed, **how)).T


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 23])
def test_the_cache_changes_nothing_also_over_the_edge_of_the_context(name, prompt_length):
    model = opinionated(VARIANTS[name])
    prompt = torch.randint(257, (3, prompt_length), generator=torch.Generator().manual_seed(1))
    out = [tokens_of(model, prompt, 40, seed=2, use_cache=use_cache) for use_cache in (True, False)]
    assert torch.equal(*out) and out[0].shape == (40, 3)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_scores_with_a_cache_are_those_without_at_every_length(name):
    model = opinionated(VARIANTS[name]).eval()
    ids = torch.randint(257, (2, 60), generator=torch.Generator().manual_seed(3))
    cached = NextLogits(model)
    plain = NextLogits(model, use_cache=False)
    with torch.no_grad():
        for n in (1, 2, 5, *range(6, 61)):  # also several columns in one go
            torch.testing.assert_close(cached(ids[:, :n]), plain(ids[:, :n]), rtol=1e-4, atol=2e-4)


def test_past_the_edge_of_the_context_half_of_it_runs_once_and_then_only_what_is_new(model):
    ran, ids = [], torch.zeros(1, 26, dtype=torch.int64)
    hook = model.register_forward_hook(lambda module, args, output: ran.append(args[0].shape[1]))
    scores = NextLogits(model)
    with torch.no_grad():
        for n in range(10, 27):
            scores(ids[:, :n])
    hook.remove()
    wanted = [10] + 6 * [1] + [9] + 7 * [1] + [9, 1]  # the context is 16
    assert ran == wanted, f"with 10 to 26 tokens {ran} run, not {wanted}"


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_of_a_ragged_batch_are_what_they_are_alone(name, use_cache):
    model = opinionated(VARIANTS[name])
    g = torch.Generator().manual_seed(0)
    lengths = (3, 1, 16, 9, 30, 17)  # the context is 16
    prompts = [torch.randint(257, (n,), generator=g).tolist() for n in lengths]
    together = generate_batch(model, prompts, 40, temperature=0, use_cache=use_cache)
    for prompt, row in zip(prompts, together):
        reference = tokens_of(model, torch.tensor([prompt]), 40, temperature=0, use_cache=False)
        assert row == reference[:, 0].tolist() and len(set(row)) > 5  # not one token over and over


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 12))
def test_ragged_batches_of_any_lengths_are_what_they_are_alone(lengths, new):
    model = opinionated(VARIANTS["llama"])
    prompts = [[(7 * i + 13 * n) % 257 for i in range(n)] for n in lengths]
    together = generate_batch(model, prompts, new, temperature=0)
    assert together == [generate_batch(model, [p], new, temperature=0)[0] for p in prompts]


def test_each_row_draws_from_its_own_seed(model):
    prompts = [[1, 2, 3], [9], [1, 2, 3], [4] * 20]
    together = generate_batch(model, prompts, 12, seed=5)
    assert together == [generate_batch(model, [p], 12, seed=5 + r)[0] for r, p in enumerate(prompts)]
    assert together == generate_batch(model, prompts, 12, seed=5)
    assert together != generate_batch(model, prompts, 12, seed=6)
    assert together[0] != together[2]  # one prompt, two seeds
    assert generate_batch(model, prompts, 12) != generate_batch(model, prompts, 12)
    row = Row([9], torch.Generator().manual_seed(6))
    assert together[1] == [row.new[-1] for _ in decode_rows(model, [row], 12)]


def test_a_row_ends_at_eot_and_the_others_go_on(model):
    prompts = [[1, 2, 3], [9], [4] * 7]
    plain = generate_batch(model, prompts, 12, temperature=0)
    eot = next(token for token in plain[0] if token not in plain[1])
    ended = generate_batch(model, prompts, 12, temperature=0, eot=eot)
    for row, full in zip(ended, plain):
        assert row == (full[: full.index(eot)] if eot in full else full)
    assert len(ended[0]) < 12 == len(ended[1])


def test_columns_in_which_no_row_draws_are_read_in_one_go(model):
    calls = []
    hook = model.register_forward_hook(lambda module, args, output: calls.append(args[0].shape[1]))
    generate_batch(model, [[1, 2], [3] * 12], 3, temperature=0)
    hook.remove()
    assert calls == [2, 1, 1, 8, 1, 1]  # two given, three drawn; then on to the twelfth, and three drawn


def test_a_batch_without_rows_or_without_new_tokens_is_empty_and_an_empty_prompt_is_refused(model):
    assert generate_batch(model, [], 5) == [] and generate_batch(model, [[1], [2, 3]], 0) == [[], []]
    with pytest.raises(UserError, match="empty"):
        generate_batch(model, [[1], []], 5)


def test_prompts_seeds_and_ends_of_other_types_mean_the_same(model):
    whole = generate_batch(model, [[1, 2], [3]], 12, seed=4)
    assert generate_batch(model, [np.array([1, 2]), np.array([3])], 12, seed=np.int64(4)) == whole
    ends = {whole[0][5], whole[1][7]}
    cut = generate_batch(model, [[1, 2], [3]], 12, seed=4, eot=ends)
    assert cut != whole and generate_batch(model, [[1, 2], [3]], 12, seed=4, eot=frozenset(ends)) == cut
    ended = generate_batch(model, [[1, 2]], 12, seed=4, eot=whole[0][5])
    for eot in (torch.tensor(whole[0][5]), np.int64(whole[0][5])):
        assert generate_batch(model, [[1, 2]], 12, seed=4, eot=eot) == ended != [whole[0]]


def test_a_batch_leaves_the_model_in_its_mode_also_after_an_error(model, monkeypatch):
    model.train()
    generate_batch(model, [[1]], 2)
    assert model.training
    monkeypatch.setattr("tinygpt.generate.sample.next_tokens", lambda *how: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate_batch(model, [[1]], 2)
    assert model.training


@given(st.integers(1, 500), st.integers(1, 40))
def test_what_the_model_sees_is_never_empty_nor_too_long_and_only_moves_on(n, block_size):
    assert 0 < n - context_start(n, block_size) <= block_size
    assert context_start(n + 1, block_size) >= context_start(n, block_size)
    if n <= block_size:
        assert context_start(n, block_size) == 0


def test_a_seed_repeats_the_text_and_rows_differ(model):
    prompt = torch.zeros(8, 1, dtype=torch.long)
    one = tokens_of(model, prompt, 5, seed=1)
    assert torch.equal(one, tokens_of(model, prompt, 5, seed=1))
    assert not torch.equal(one, tokens_of(model, prompt, 5, seed=2))
    assert len(set(one[0].tolist())) > 1  # also the first token


def test_greedy_equals_the_argmax_of_the_model(model):
    ids = torch.tensor([[5, 6, 7]])
    for token in generate_batch(model, ids.tolist(), 8, temperature=0)[0]:
        assert token == model.eval()(ids)[0][0, -1].argmax().item()
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_ids_of_the_padding_are_never_drawn(model):
    tokens = tokens_of(model, torch.zeros(64, 1, dtype=torch.long), 15, temperature=50.0)
    assert model.wte.num_embeddings > 257 > tokens.max() >= 200


def test_the_model_comes_back_in_the_mode_it_was_in(model):
    model.train()
    steps = decode_rows(model, seeded_rows([[1]], 0), 3)
    next(steps)
    assert not model.training
    steps.close()  # the reader stopped early
    assert model.training


@pytest.mark.parametrize(
    "bad, name",
    [
        (dict(temperature=-1.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=float("inf")), "temperature"),
        (dict(top_k=-1), "top_k"),
        (dict(temperature="1"), "temperature"),
        (dict(top_k=2.5), "top_k"),
        (dict(top_k=None), "top_k"),
        (dict(top_p=None), "top_p"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
    ],
)
def test_sampling_settings_that_mean_nothing_are_refused(bad, name):
    with pytest.raises(UserError, match=name):
        check_sampling(**{**dict(temperature=1.0, top_k=0, top_p=1.0), **bad})


def test_the_cache_has_room_for_what_is_asked_for_and_not_for_the_whole_context(monkeypatch):
    "A context of 100,000 tokens would take gigabytes for a text of twenty."
    import tinygpt.generate.sample as module

    rooms, real = [], module.KVCache

    def noting(config, *args):
        rooms.append(config.block_size)
        return real(config, *args)

    monkeypatch.setattr(module, "KVCache", noting)
    model = GPT(GPTConfig.llama(vocab_size=31, block_size=4096, n_layer=1, n_head=2, n_embd=16))
    cached = generate_batch(model, [[0] * 5], 12, temperature=0)
    assert cached == generate_batch(model, [[0] * 5], 12, temperature=0, use_cache=False)
    assert len(generate_batch(model, [[1], [1, 2, 3]], 6)[0]) == 6
    assert rooms == [17, 9]


def test_any_of_several_tokens_ends_a_row():
    model = GPT(GPTConfig.gpt2(vocab_size=31, block_size=16, n_layer=1, n_head=2, n_embd=16))
    whole = generate_batch(model, [[1]], 12, seed=3)[0]
    ends = {whole[5], whole[8]}
    cut = generate_batch(model, [[1]], 12, seed=3, eot=ends)[0]
    first = next(i for i, token in enumerate(whole) if token in ends)
    assert cut == whole[:first]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_a_sentence(bad):
    with pytest.raises(UserError, match="logits are not finite"):
        sampling_probs(torch.tensor([0.0, bad]), temperature=0.8)
    assert sampling_probs(torch.tensor([0.0, -float("inf")])).tolist() == [1.0, 0.0]
    for temperature in (0, 0.8):  # a row without any finite score has no likeliest token
        with pytest.raises(UserError, match="logits are not finite"):
            sampling_probs(torch.full((2,), -float("inf")), temperature)


# one prefill for rows that begin alike, and rows that leave


def shapes_of(model, run):
    "(rows, columns) of each pass of the model while `run()` runs."
    shapes = []
    hook = model.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0].shape)))
    run()
    hook.remove()
    return shapes


def test_samples_of_one_prompt_share_its_prefill_and_not_their_draws(model):
    prompts = [[1, 2, 3, 4]] * 5
    shapes = shapes_of(model, lambda: generate_batch(model, prompts, 3, seed=0))
    assert shapes == [(1, 4), (5, 1), (5, 1)]
    assert len({tuple(row) for row in generate_batch(model, prompts, 3, seed=0)}) > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_alike_and_rows_that_are_not_read_what_they_would_alone(name):
    "Also where the n-gram tables remember the last two tokens of each row."
    config = VARIANTS[name]
    for rows in (None, 64):
        model = opinionated(replace(config, ngram_rows=rows)).eval()
        ids = torch.randint(257, (5, 12), generator=torch.Generator().manual_seed(4))
        ids[3], ids[1] = ids[0], ids[4]
        next_logits = NextLogits(model)
        with torch.no_grad():
            next_logits(ids[:, :7])
            ids[3, 7:] = ids[2, 7:]  # from here on they differ
            kept = torch.tensor([4, 0, 3])
            next_logits.keep(kept)
            for n in (8, 9, 12):
                got = next_logits(ids[kept][:, :n])
                want = model(ids[kept][:, :n])[0][:, -1]
                torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)


def test_the_last_columns_are_those_of_a_full_pass(model):
    ids = torch.randint(257, (2, 14), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = model.eval()(ids)[0]
        cached = NextLogits(model)
        torch.testing.assert_close(cached(ids[:, :9], last=4), want[:, 5:9], rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(cached(ids, last=3), want[:, 11:14], rtol=1e-4, atol=2e-4)
        plain = NextLogits(model, use_cache=False)
        torch.testing.assert_close(plain(ids, last=3), want[:, 11:14])


def test_a_row_that_is_done_leaves_the_batch_and_the_others_do_not_notice(model):
    prompts = [[1, 2, 3], [9], [4] * 7, [1, 2, 4]]
    plain = generate_batch(model, prompts, 12, temperature=0)
    rows = seeded_rows(prompts, seed=None)
    sizes = []
    hook = model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    for row in decode_rows(model, rows, 12, temperature=0):
        if row is rows[3] and len(row.new) == 2 or row is rows[0] and len(row.new) == 5:
            row.finish = "told to"
    hook.remove()
    assert [row.new for row in rows] == [plain[0][:5], plain[1], plain[2], plain[3][:2]]
    assert [row.finish for row in rows] == ["told to", "length", "length", "told to"]
    assert max(sizes) == 4 and sizes[-1] == 1 and sizes.count(4) < 6


# forced tokens and log-probabilities


@pytest.mark.parametrize("name", VARIANTS)
def test_log_probabilities_are_those_of_full_passes_whatever_the_draw_was(name):
    model = opinionated(VARIANTS[name]).eval()
    rows = seeded_rows([[1, 2, 3], [7] * 9], seed=3, forced=[11, 12])
    for _ in decode_rows(model, rows, 20, temperature=0.5, top_k=3, logprobs=4):
        pass
    for row in rows:
        assert row.new[:2] == [11, 12] and len(row.new) == len(row.logprobs) == len(row.top) == 20
        whole = torch.tensor([row.prompt + row.new])
        for i, token in enumerate(row.new):
            n = len(row.prompt) + i
            with torch.no_grad():
                logits = model(whole[:, context_start(n, 16) : n])[0][0, -1]
            want = torch.distributions.Categorical(logits=logits).logits
            assert row.logprobs[i] == pytest.approx(want[token].item(), abs=1e-3)
            values, ids = want.topk(4)
            assert sorted(row.top[i].values(), reverse=True) == pytest.approx(values.tolist(), abs=1e-3)
            assert row.top[i].keys() == set(ids.tolist()) or values.diff().abs().min() < 1e-3


def test_a_row_uses_one_number_for_each_token_it_draws_and_none_for_one_that_is_given(model):
    rows = seeded_rows([[1, 2, 3], [4] * 9], seed=7, forced=[5, 6])
    for _ in decode_rows(model, rows, 10, temperature=0.9, top_k=40):
        pass
    for i, row in enumerate(rows):
        generator = torch.Generator().manual_seed(7 + i)
        for _ in range(8):
            torch.randint(2**32, (1,), generator=generator)
        same = torch.equal(row.generator.get_state(), generator.get_state())
        assert same, f"row {i} drew 8 tokens, so 8 keys leave its generator, each by randint(2**32, (1,))"


@pytest.mark.parametrize("how", [dict(temperature=0), dict(top_k=5), dict(top_p=0.9), dict(logprobs=3)])
def test_a_step_makes_the_host_wait_no_more_often_for_more_rows(model, how):
    def write(rows):
        for _ in decode_rows(model, seeded_rows([[1, 2]] * rows, seed=0), 6, **how):
            pass

    assert host_reads(lambda: write(1)) == host_reads(lambda: write(9)) <= 6


def test_forced_tokens_use_no_draw_and_the_rest_is_as_after_a_prompt_that_has_them(model):
    [row] = seeded_rows([[5, 6]], seed=8, forced=[7, 8, 9])
    for _ in decode_rows(model, [row], 10):
        pass
    assert row.new == [7, 8, 9, *generate_batch(model, [[5, 6, 7, 8, 9]], 7, seed=8)[0]]
    assert row.logprobs == [] and row.finish == "length"


def test_a_forced_end_ends_and_too_many_forced_tokens_are_refused(model):
    [row] = seeded_rows([[5, 6]], seed=8, forced=[7, 256, 9])
    steps = [each.finish for each in decode_rows(model, [row], 10, ends={256}, logprobs=0)]
    assert row.new == [7] and steps == ["", "eot"] and len(row.logprobs) == 1 and row.top == [{}]
    with pytest.raises(UserError, match="(?=.*forced)(?=.*3)(?=.*max_new_tokens = 2)"):
        check_rows([Row([1], forced=[1, 2, 3])], 2, vocab_size=4)
    with pytest.raises(UserError, match="forced"):
        next(decode_rows(model, [Row([1], forced=[1, 2, 3])], 2))
    check_rows([Row([1], forced=[1, 2, 3])], 3, vocab_size=4)


@pytest.mark.parametrize(
    "bad, told",
    [
        (dict(max_new_tokens=-1), "^max_new_tokens = -1: "),
        (dict(max_new_tokens=2.5), "^max_new_tokens = 2.5: "),
        (dict(max_new_tokens=None), "^max_new_tokens = None: "),
        (dict(prompts=[[1], []]), "a prompt is empty"),
        (dict(prompts=[1, 2]), "a prompt is 1: give a list of prompts"),
        (dict(prompts=np.array([1, 2])), "a prompt is 1: give a list of prompts"),
        (dict(prompts=torch.tensor([1, 2])), "a prompt is 1: give a list of prompts"),
        (dict(prompts=[[1], [2, 257]]), "^257 is no token .* 0 to 256"),
        (dict(prompts=[[-1]]), "^-1 is no token"),
        (dict(prompts=[[1.5]]), "^1.5 is no token"),
        (dict(prompts=["text"]), "^'t' is no token"),
        (dict(seed=0.5), "^seed = 0.5: "),
        (dict(seed="x"), "^seed = 'x': "),
    ],
)
def test_prompts_and_numbers_that_mean_nothing_are_refused_in_a_sentence(model, bad, told):
    with pytest.raises(UserError, match=told):
        generate_batch(model, **dict(prompts=[[1]], max_new_tokens=2) | bad)


def test_a_row_that_has_tokens_already_or_is_there_twice_is_refused_and_stays_as_it_is(model):
    "Its columns would hold zeros in place of its tokens, and two places would write into one text."
    rows = seeded_rows([[1], [2, 3]], seed=0)
    for _ in decode_rows(model, rows, 3):
        pass
    written = [list(row.new) for row in rows]
    with pytest.raises(UserError, match="already"):
        next(decode_rows(model, rows, 8))
    assert [row.new for row in rows] == written
    [row] = seeded_rows([[1]], seed=0)
    with pytest.raises(UserError, match="twice"):
        next(decode_rows(model, [row, row], 8))
    assert row.new == []


def test_ids_and_counts_may_be_numpys_or_a_tensors(model):
    want = generate_batch(model, [[1, 256]], 2, seed=0)
    assert generate_batch(model, torch.tensor([[1, 256]]), np.int64(2), seed=np.int64(0)) == want
    assert generate_batch(model, [np.array([1, 256], dtype=np.uint16)], 2, seed=0) == want
    assert generate_batch(model, [[1]], 0) == [[]]


@pytest.mark.parametrize("logprobs", [-1, 1.5])
def test_log_probabilities_of_a_senseless_number_of_tokens_are_refused(model, logprobs):
    with pytest.raises(UserError, match=f"logprobs = {logprobs}"):
        next(decode_rows(model, [Row([1])], 2, logprobs=logprobs))


# stop strings


def stopped(text: str, stop: list[str]) -> str:
    "Letter by letter: the text before the first stop string that is complete; the longest of those."
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


LETTERS = st.text("ab\n", max_size=12)


@pytest.mark.parametrize(
    "text, stop, shown, waits",
    [
        ("nothing here", ["Q:"], "nothing here", ""),
        (" so. Q", ["Question:"], " so. ", "Q"),  # it may become one
        (" so. Question: and", ["Question:"], " so. ", None),
        ("x=aa", ["aab"], "x=", "aa"),  # the longest that may, not only the last letter
        ("abcde", ["bcd", "c"], "ab", None),  # "c" is complete first, though "bcd" begins first
        ("ends. \n", ["\n\n", "."], "ends", None),
        ("text", [], "text", ""),
        ("", ["Q:"], "", ""),
    ],
)
def test_by_hand_what_of_a_text_may_be_shown(text, stop, shown, waits):
    found = split_at_stop(text, stop)
    assert found == (shown, waits), f"of {text!r} with {stop} it is {found}, not {(shown, waits)}"


@settings(deadline=None, max_examples=300)
@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_is_found_however_the_text_is_cut_and_nothing_of_it_is_shown(pieces, stop):
    text, want = "".join(pieces), stopped("".join(pieces), stop)
    shown, waits = "", ""
    for i, piece in enumerate(pieces):
        show, waits = split_at_stop(waits + piece, stop)
        shown += show
        assert want.startswith(shown)  # nothing is taken back
        if waits is None:
            break
        so_far = "".join(pieces[: i + 1])
        assert shown + waits == so_far
        # and nothing waits that need not: some continuation would make a stop string of it
        assert not waits or any(s.startswith(waits) and s != waits for s in stop)
    assert shown + (waits or "") == want
    assert (waits is None) == (want != text)


class Scripted:
    "Rows that get given tokens: what `decode_rows` would yield."

    def __init__(self, *texts, ends=()):
        self.rows = [Row([0], None) for _ in texts]
        self.texts = texts
        self.ends = set(ends)

    def __iter__(self):
        for i in range(max(map(len, self.texts))):
            for row, tokens in zip(self.rows, self.texts):
                if i < len(tokens) and not row.finish:
                    row.take(tokens[i], self.ends, len(tokens))
                    yield row


def test_rows_in_turn_are_shown_as_each_alone_and_say_why_they_ended():
    texts = [list(t) for t in ("né日 stop not".encode(), b"some sto", "x日".encode()[:3])]
    script = Scripted(*texts, [*b"ab", 256, *b"cd"], ends={256})
    pieces = {row: [] for row in script.rows}
    for row, piece in show_rows(ByteTokenizer(), script, ["stop"]):
        pieces[row].append(piece)
    assert [row.text for row in script.rows] == ["né日 ", "some sto", "x\ufffd", "ab"]
    assert [row.finish for row in script.rows] == ["stop", "length", "length", "eot"]
    assert all("".join(pieces[row]) == row.text for row in script.rows)
    assert pieces[script.rows[1]] == ["", "so", "m", "e", " ", "", "", "sto"]
