"""Speculative decoding has the large model's distribution, whatever the draft is; greedy stays greedy."""

from collections import Counter

import pytest
import torch

from tinygpt.generate.sample import NextLogits, Row, generate_batch, seeded_rows
from tinygpt.generate.speculative import (
    Reader,
    draft_reader,
    speculative_rows,
    speculative_tokens,
    verify,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError

SMALL = dict(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=2),
    "tables": GPTConfig.modern(**SMALL, ngram_rows=64),
}
# a chi-square statistic is above these in one case of 100,000, by its number of degrees of freedom
RARE = {4: 28.5, 15: 50.5, 20: 59.0, 24: 65.4}


def opinionated(config, noise=0.0):
    "A model with opinions; with noise, one that often agrees with it."
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            # norms that favor a direction would repeat one token for ever
            if p.dim() > 1 or ("bias" in name and name != "ln_f.bias"):
                p.normal_(std=0.4)
        for p in model.parameters():
            p.add_(noise * torch.randn(p.shape))
    return model


def chi_square(counts, probs):
    expected = counts.sum() * probs
    return ((counts - expected) ** 2 / expected).sum().item()


def tables(seed=1, V=5):
    "Two rows of distributions (V, V): the large model's and the draft's, for each token before."
    generator = torch.Generator().manual_seed(seed)
    both = torch.rand(2, V, V, generator=generator).pow(2) + 0.02
    return both / both.sum(-1, keepdim=True)


def one_round(P, Q, n, verify=verify):
    "n rounds of two proposals after token 0: (tokens (n, 3), -1 where there is none yet; how many are kept)."
    generator = torch.Generator().manual_seed(2)
    first = torch.multinomial(Q[0], n, replacement=True, generator=generator)
    second = torch.multinomial(Q[first], 1, generator=generator)[:, 0]
    p = torch.stack((P[0].expand(n, -1), P[first], P[second]), dim=1)
    q = torch.stack((Q[0].expand(n, -1), Q[first]), dim=1)
    proposed = torch.stack((first, second), dim=1)
    kept, token = verify(p, q, proposed, generator)
    text = torch.cat((proposed, torch.zeros(n, 1, dtype=torch.int64)), dim=1)
    place = torch.arange(3)
    text = torch.where(place == kept[:, None], token[:, None], text)
    return text.masked_fill(place > kept[:, None], -1), kept


def statistics(P, text):
    "Chi-square of the first token, of the second given the first, and of the third given the second."
    found = [chi_square(torch.bincount(text[:, 0], minlength=5), P[0])]
    for place in (1, 2):
        known = text[text[:, place] >= 0]
        pairs = torch.bincount(5 * known[:, place - 1] + known[:, place], minlength=25)
        before = torch.bincount(known[:, place - 1], minlength=5) / len(known)
        found.append(chi_square(pairs, (before[:, None] * P).flatten()))
    return found


def test_what_comes_out_is_distributed_as_the_large_models_draws_at_every_place():
    P, Q = tables()
    text, kept = one_round(P, Q, 200_000)
    first, second, third = statistics(P, text)
    assert first < RARE[4] and second < RARE[20] and third < RARE[20]
    alpha = torch.minimum(P[0], Q[0]).sum()
    assert (kept >= 1).double().mean().item() == pytest.approx(alpha.item(), abs=0.006)


def keep_all(p, q, proposed, generator):
    last = torch.multinomial(p[:, -1], 1, generator=generator)[:, 0]
    return torch.full((len(p),), proposed.shape[1]), last


def refill_from_p(p, q, proposed, generator):
    kept, _ = verify(p, q, proposed, generator)
    return kept, torch.multinomial(p[torch.arange(len(p)), kept], 1, generator=generator)[:, 0]


def never_a_token_more(p, q, proposed, generator):
    "The draft's distribution in place of the large one's behind the last proposal."
    return verify(torch.cat((p[:, :-1], q[:, -1:]), dim=1), q, proposed, generator)


@pytest.mark.parametrize("wrong", [keep_all, refill_from_p, never_a_token_more])
def test_the_statistics_see_wrong_rules(wrong):
    P, Q = tables()
    text, _ = one_round(P, Q, 200_000, wrong)
    assert max(statistics(P, text)) > 10 * RARE[20]


def test_equal_distributions_keep_everything_and_disjoint_ones_nothing():
    P, _ = tables()
    p = P[0].expand(1000, 3, 5)
    proposed = torch.multinomial(P[0], 2000, replacement=True).view(1000, 2)
    assert (verify(p, p[:, :2], proposed)[0] == 2).all()
    only = torch.eye(5)
    kept, token = verify(only[[3, 4, 1]], only[[0, 0]], torch.tensor([0, 0]))
    assert (kept.item(), token.item()) == (0, 3)
    kept, token = verify(only[[3, 4, 1]], only[[3, 0]], torch.tensor([3, 0]))
    assert (kept.item(), token.item()) == (1, 4)


def test_a_proposal_that_the_large_model_cannot_draw_is_never_kept_and_no_proposal_is_a_plain_draw():
    p = torch.tensor([[[0.0, 1.0]]]).expand(500, 2, 2)
    q = torch.tensor([[[0.9, 0.1]]]).expand(500, 1, 2)
    kept, token = verify(p, q, torch.zeros(500, 1, dtype=torch.int64))
    assert kept.sum() == 0 and (token == 1).all()
    kept, token = verify(p[:, :1], q[:, :0], torch.zeros(500, 0, dtype=torch.int64))
    assert kept.sum() == 0 and (token == 1).all()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_greedy_speculative_text_is_the_greedy_text(name, k):
    "Over the edge of the context, with a draft that often agrees and with one that seldom does."
    model = opinionated(VARIANTS[name])
    for noise, prompt in ((0.03, [1, 2, 3]), (0.3, [7] * 30)):
        want = generate_batch(model, [prompt], 45, temperature=0)[0]
        draft = opinionated(VARIANTS[name], noise)
        parts = list(speculative_tokens(model, draft, torch.tensor([prompt]), 45, k, temperature=0))
        assert sum(parts, []) == want and all(1 <= len(part) <= k + 1 for part in parts)
    assert len(set(want)) > 5  # not one token over and over


def test_a_draft_like_the_model_needs_a_pass_for_k_plus_1_tokens():
    "But for the places where the context slides."
    model = opinionated(GPTConfig.llama(**SMALL | dict(block_size=64)))
    drafted = opinionated(GPTConfig.llama(**SMALL | dict(block_size=64)))
    g = torch.Generator().manual_seed(0)
    parts = list(speculative_tokens(model, drafted, torch.tensor([[1, 2]]), 40, 4, generator=g))
    assert [len(part) for part in parts] == [5] * 8


class Markov(torch.nn.Module):
    "A model whose next token depends on the last one only."

    def __init__(self, probs):
        super().__init__()
        shape = dict(vocab_size=len(probs), block_size=16, n_layer=1, n_head=1, n_embd=2)
        self.config = GPTConfig.gpt2(**shape)
        self.logits = torch.nn.Parameter(probs.log())

    def forward(self, ids, cache=None):
        cache.length += ids.shape[1]
        return self.logits[ids], None


def test_whole_texts_have_the_models_distribution_with_any_draft():
    P, Q = tables(seed=3, V=4)
    model, generator = Markov(P), torch.Generator().manual_seed(0)
    texts = Counter()
    for _ in range(1200):
        draft = lambda ids: Q[ids[:, -1]].log()  # noqa: E731
        parts = speculative_tokens(model, draft, torch.tensor([[0]]), 2, 2, generator=generator)
        texts[tuple(sum(parts, []))] += 1
    seen = torch.tensor([[texts[a, b] for b in range(4)] for a in range(4)])
    assert seen.sum() == 1200
    assert chi_square(seen.flatten(), (P[0][:, None] * P).flatten()) < RARE[15]
    assert chi_square(seen.flatten(), (Q[0][:, None] * Q).flatten()) > 2 * RARE[15]


def test_temperature_and_cuts_hold_for_both_models():
    "Top-k of 1 is greedy; and no token is drawn that the cut leaves out."
    model, draft = opinionated(VARIANTS["llama"]), opinionated(VARIANTS["llama"], 0.05)
    want = generate_batch(model, [[5]], 14, temperature=0)[0]
    ids = torch.tensor([[5]])
    assert sum(speculative_tokens(model, draft, ids, 14, 3, temperature=2.0, top_k=1), []) == want
    text = sum(speculative_tokens(model, draft, ids, 14, 3, temperature=2.0, top_k=3), [])
    whole = torch.tensor([[5, *text]])
    with torch.no_grad():
        likeliest = model(whole[:, :-1])[0][0].topk(3).indices
    assert all(token in row for token, row in zip(text, likeliest.tolist()))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_reader_that_goes_back_reads_what_a_fresh_one_reads(name):
    model = opinionated(VARIANTS[name])
    g = torch.Generator().manual_seed(6)
    text = torch.randint(257, (1, 40), generator=g)
    reader = Reader(model)
    for n in (3, 8, 7, 12, 12, 16, 20, 18, 14, 5, 30, 29):  # also back over the edge of the context
        text[0, n - 2 :] = torch.randint(257, (40 - n + 2,), generator=g)
        with torch.no_grad():
            want = NextLogits(model, use_cache=False)(text[:, :n])
            torch.testing.assert_close(reader(text[:, :n]), want, rtol=1e-4, atol=2e-4)


def test_a_reader_reads_only_what_is_new():
    model = opinionated(VARIANTS["gpt2"])
    ran = []
    model.register_forward_hook(lambda module, args, output: ran.append(args[0].shape[1]))
    reader = Reader(model)
    with torch.no_grad():
        for text in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2, 3, 9, 8, 7]):
            reader(torch.tensor([text]))
    assert ran == [4, 2, 1, 2]


def test_rows_are_forced_ended_and_seeded_as_other_rows_are():
    model, draft = opinionated(VARIANTS["gpt2"]), opinionated(VARIANTS["gpt2"], 0.03)
    rows = seeded_rows([[1, 2], [3]], seed=4, forced=[9, 8])
    steps = [
        (rows.index(row), row.new[-1]) for row in speculative_rows(model, draft, rows, 10, temperature=0)
    ]
    assert [i for i, _ in steps] == [0] * 10 + [1] * 10 and all(row.finish == "length" for row in rows)
    for row, prompt in zip(rows, ([1, 2, 9, 8], [3, 9, 8])):
        assert row.new == [9, 8, *generate_batch(model, [prompt], 8, temperature=0)[0]]
    end = rows[0].new[5]
    again = seeded_rows([[1, 2]], seed=4, forced=[9, 8])
    for _ in speculative_rows(model, draft, again, 10, temperature=0, ends={end}):
        pass
    assert again[0].finish == "eot" and again[0].new == rows[0].new[: rows[0].new.index(end)]
    texts = []
    for seed in (1, 1, 2):
        [row] = seeded_rows([[1, 2]], seed)
        for _ in speculative_rows(model, draft, [row], 10):
            pass
        texts.append(row.new)
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_work_is_one_sentence():
    model = opinionated(VARIANTS["gpt2"])
    other = GPT(GPTConfig.gpt2(**SMALL | dict(vocab_size=100)))
    with pytest.raises(UserError, match="(?=.*draft)(?=.*100)(?=.*257)"):
        next(speculative_tokens(model, other, torch.tensor([[1]]), 5))
    with pytest.raises(UserError, match="(?=.*draft)(?=.*100)"):
        draft_reader(model, other, 9)
    with pytest.raises(UserError, match="k = 0"):
        next(speculative_tokens(model, model, torch.tensor([[1]]), 5, k=0))
    with pytest.raises(UserError, match="temperature"):
        next(speculative_tokens(model, model, torch.tensor([[1]]), 5, temperature=-1))
    with pytest.raises(UserError, match="forced"):
        next(speculative_rows(model, model, [Row([1], forced=[1, 2, 3])], 2))
    for ids, n, told in (
        ([[1]], -1, "max_new_tokens = -1"),
        ([[]], 5, "empty"),
        ([[257]], 5, "257 is no token"),
    ):
        with pytest.raises(UserError, match=told):
            next(speculative_tokens(model, model, torch.tensor(ids, dtype=torch.int64), n))
        with pytest.raises(UserError, match=told):
            next(speculative_rows(model, model, [Row(ids[0])], n))
