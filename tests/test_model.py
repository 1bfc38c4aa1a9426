"""The model against torch layers and float64, what holds for every variant, and the hashed n-gram tables."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.attention import same_document
from tinygpt.data.tokens import load_corpus
from tinygpt.init import init_weights
from tinygpt.model import (
    GPT,
    MLP,
    Attention,
    Block,
    GPTConfig,
    KVCache,
    TokenEmbedding,
    _hide_padding,
    apply_rope,
    make_norm,
    ngram_rows,
    rope_table,
    token_loss,
)
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, CharTokenizer

TINY = dict(vocab_size=100, block_size=24, n_layer=2, n_head=4, n_embd=32)
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**TINY),
    "gpt2-untied": GPTConfig.gpt2(**TINY, tie_weights=False, bias=False),
    "llama": GPTConfig.llama(**TINY),
    "llama-gqa": GPTConfig.llama(**TINY, n_kv_head=2, tie_weights=True),
    "modern": GPTConfig.modern(**TINY, n_kv_head=1),
    "modern-ngrams": GPTConfig.modern(**TINY, ngram_rows=37),
}
every_config = pytest.mark.parametrize("name", CONFIGS)


def make(config, scale=5.0, dtype=torch.float32, seed=0, attn_impl="fused"):
    "A model with weights so large that every part of it matters; no weight is zero."
    gen = torch.Generator().manual_seed(seed)
    model = GPT(config, attn_impl)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=gen)
            p.copy_(noise * 0.02 * scale if p.dim() > 1 else 1 + 0.2 * noise)
    return model.to(dtype).eval()


def tokens(B=3, T=24, V=100, seed=0):
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(seed))


# ---- size and shape


@pytest.mark.parametrize(
    "layers, heads, width, published",
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_the_four_gpt2_sizes_have_the_published_number_of_parameters(layers, heads, width, published):
    with torch.device("meta"):
        model = GPT(GPTConfig.gpt2(n_layer=layers, n_head=heads, n_embd=width))
    assert model.num_params() == published
    assert model.wte.weight.shape == (50304, width)  # the padding is there, and not counted
    assert model.num_params(embeddings=False) == published - (50257 + 1024) * width


@every_config
def test_the_count_is_that_of_the_tensors_without_padding(name):
    config = CONFIGS[name]
    model = GPT(config)
    padding = 28 * 32 * (1 if config.tie_weights else 2)
    assert model.num_params() == sum(p.numel() for p in model.parameters()) - padding
    blocks = sum(p.numel() for p in [*model.h.parameters(), *model.ln_f.parameters()])
    assert model.num_params(embeddings=False) == blocks


@every_config
def test_logits_have_the_shape_of_the_vocabulary_and_the_loss_comes_with_targets_only(name):
    model, idx = make(CONFIGS[name]), tokens()
    logits, loss = model(idx)
    assert logits.shape == (3, 24, 100) and loss is None
    assert model(idx, idx)[1].shape == ()


@every_config
def test_a_term_of_the_logits_beside_the_loss_has_its_gradient(name):
    "As z-loss has, for instance."
    model, idx = make(CONFIGS[name]), tokens()

    def gradients(forward):
        model.zero_grad()
        logits, loss = forward()
        (loss + logits.float().logsumexp(-1).square().mean()).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    both = gradients(lambda: model(idx, idx))
    apart = gradients(lambda: (model(idx)[0], model(idx, idx)[1]))
    torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-6)


def test_llamas_hidden_size_is_two_thirds_of_four_rounded_up():
    assert GPTConfig.llama(n_embd=288).hidden == 768
    assert GPTConfig.llama(n_embd=100, n_head=2).hidden == 320  # 266.7 up to a multiple of 64
    assert GPTConfig.llama(n_embd=4096, n_head=32, mlp_hidden=11008).hidden == 11008
    assert GPTConfig.modern(n_embd=100, n_head=2).hidden == 400


def test_importing_the_model_imports_neither_transformers_nor_matplotlib():
    heavy = {"transformers", "matplotlib", "pandas", "huggingface_hub"}
    code = f"import sys, tinygpt.model, tinygpt.model_hf; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- the parts, against torch's own layers and closed forms


def passing_on(name):
    "Attention whose values are its input and whose scores are all 0."
    attn, C = Attention(CONFIGS[name], layer=0).eval(), TINY["n_embd"]
    with torch.no_grad():
        attn.c_attn.weight.zero_()[2 * C :] = torch.eye(C)
        attn.c_proj.weight.copy_(torch.eye(C))
    return attn


# each shows one mistake alone; learn mode reports the first test that fails
def test_a_single_token_reads_its_own_values_which_are_the_last_part_of_c_attn():
    x = torch.linspace(-1, 1, 2 * 32).view(2, 1, 32)
    torch.testing.assert_close(passing_on("gpt2-untied")(x), x)


@pytest.mark.parametrize("name", ["gpt2-untied", "llama"])
def test_equal_scores_give_the_mean_of_the_values_so_far_and_rope_turns_no_value(name):
    x = torch.linspace(-1, 1, 2 * 5 * 32).square().view(2, 5, 32)
    mean = x.cumsum(dim=1) / torch.arange(1, 6)[:, None]
    rope = rope_table(5, 8) if name == "llama" else None
    torch.testing.assert_close(passing_on(name)(x, rope), mean)


def test_attention_equals_torchs_multihead_attention():
    config = CONFIGS["gpt2"]
    ours = Attention(config, 0).double()
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
        theirs.in_proj_weight.copy_(ours.c_attn.weight)
        theirs.in_proj_bias.copy_(ours.c_attn.bias)
        theirs.out_proj.weight.copy_(ours.c_proj.weight)
        theirs.out_proj.bias.copy_(ours.c_proj.bias)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    torch.testing.assert_close(
        ours(x), theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    )


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def test_a_block_whose_branches_give_nothing_passes_its_input_on():
    block, x = Block(CONFIGS["gpt2-untied"], layer=0), torch.randn(2, 5, 32)
    with torch.no_grad():
        for branch in (block.attn, block.mlp):
            branch.c_proj.weight.zero_()
    torch.testing.assert_close(block(x), x)


def test_a_gpt2_block_equals_torchs_transformer_layer():
    ours = Block(CONFIGS["gpt2"], 0).double()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 128, 0.0, tanh_gelu, 1e-5, batch_first=True, norm_first=True, dtype=torch.float64
    )
    names = {
        "self_attn.in_proj_": "attn.c_attn.",
        "self_attn.out_proj.": "attn.c_proj.",
        "linear1.": "mlp.c_fc.",
        "linear2.": "mlp.c_proj.",
        "norm1.": "ln_1.",
        "norm2.": "ln_2.",
    }
    own = ours.state_dict()
    with torch.no_grad():
        for p in own.values():
            p.normal_()
        for name, p in theirs.named_parameters():
            stem = next(k for k in names if name.startswith(k))
            p.copy_(own[names[stem] + name.removeprefix(stem)])
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, mask, is_causal=True))


@pytest.mark.parametrize("kind", ["gelu", "gelu_exact", "swiglu", "relu2"])
def test_the_mlps_compute_their_formulas(kind):
    mlp = MLP(replace(CONFIGS["gpt2"], mlp=kind)).double()
    x = torch.randn(5, 32, dtype=torch.float64) * 3
    up = x @ mlp.c_fc.weight.T + mlp.c_fc.bias
    if kind == "gelu_exact":
        h = up * (1 + torch.erf(up / 2**0.5)) / 2
    elif kind == "gelu":  # Hendrycks and Gimpel's tanh form
        h = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    elif kind == "swiglu":
        gate = x @ mlp.c_gate.weight.T + mlp.c_gate.bias
        h = gate / (1 + torch.exp(-gate)) * up
    else:
        h = torch.where(up > 0, up * up, 0)
    torch.testing.assert_close(mlp(x), h @ mlp.c_proj.weight.T + mlp.c_proj.bias)


def test_rope_is_a_complex_rotation_of_the_pairs_i_and_i_plus_half():
    x = torch.randn(2, 3, 24, 16, dtype=torch.float64)
    z = torch.complex(x[..., :8], x[..., 8:])
    speed = 500.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turn = torch.outer(torch.arange(24.0, dtype=torch.float64), speed)
    z = z * torch.polar(torch.ones_like(turn), turn)
    want = torch.cat((z.real, z.imag), -1)
    torch.testing.assert_close(apply_rope(x, rope_table(24, 16, 500.0)), want, rtol=0, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    m=st.integers(0, 400),
    n=st.integers(0, 400),
    shift=st.integers(0, 600),
    half=st.integers(1, 32),
    seed=st.integers(0, 1000),
)
def test_rope_scores_depend_on_the_distance_alone(m, n, shift, half, seed):
    q, k = torch.randn(2, 1, 2 * half, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    table = rope_table(1001, 2 * half).double()

    def at(x, position):
        return apply_rope(x, table[:, position : position + 1])

    near, far = (at(q, m) * at(k, n)).sum(), (at(q, m + shift) * at(k, n + shift)).sum()
    assert near.item() == pytest.approx(far.item(), abs=1e-5)
    assert at(q, m).norm().item() == pytest.approx(q.norm().item(), rel=1e-6)


def test_rope_tables_stay_exact_at_far_positions():
    angle = 100_000 * 10000.0 ** (-2 / 128)  # radians, with Python's floats
    table = rope_table(100_001, 128)
    assert table[0, -1, 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert table[1, -1, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_qk_norm_makes_attention_blind_to_the_scale_of_queries_and_keys():
    config = CONFIGS["modern"]
    attn = Attention(config, 0).double()
    x, rope = torch.randn(2, 24, 32, dtype=torch.float64), rope_table(24, 8)
    before = attn(x, rope)
    with torch.no_grad():
        attn.c_attn.weight[: 32 + 8] *= 7  # queries and keys, not values
    torch.testing.assert_close(attn(x, rope), before, rtol=1e-4, atol=1e-4)  # eps is all that differs


@pytest.mark.parametrize("cap", [1.0, 15.0])
def test_capped_logits_stay_within_the_cap_and_small_ones_pass(cap):
    config = replace(CONFIGS["modern"], logit_softcap=cap)
    model, idx = make(config, scale=50), tokens()
    capped, free = model(idx)[0], GPT(replace(config, logit_softcap=0.0))
    free.load_state_dict(model.state_dict())
    raw = free(idx)[0]
    assert capped.abs().max() <= cap < raw.abs().max()
    torch.testing.assert_close(capped, cap * torch.tanh(raw / cap))


# ---- what holds for every variant


@every_config
@pytest.mark.parametrize("impl", ["fused", "tiled", "naive"])
def test_changing_a_token_changes_nothing_before_it(name, impl):
    model, idx = make(CONFIGS[name], attn_impl=impl), tokens()
    with torch.no_grad():
        base = model(idx)[0]
        for t in (0, 1, 12, 23):
            other = idx.clone()
            other[:, t] = (other[:, t] + 1) % 100
            moved = (model(other)[0] - base).abs().amax(dim=(0, 2))
            assert moved[:t].max().item() < 1e-6 if t else True
            assert (moved[t:] > 1e-4).all()  # and every later place sees it


@every_config
def test_attention_implementations_give_the_same_logits_and_gradients(name):
    results = []
    for impl in ("fused", "tiled", "naive"):
        model = make(CONFIGS[name], dtype=torch.float64, attn_impl=impl)
        logits, loss = model(tokens(), tokens(seed=1))
        loss.backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-10)


def test_another_implementation_of_attention_can_be_chosen_at_any_time_and_no_config_remembers_it():
    model, idx = make(CONFIGS["llama"], attn_impl="naive"), tokens()
    assert "attn_impl" not in asdict(model.config)
    assert {block.attn.impl for block in model.h} == {"naive"}
    naive = model(idx)[0]
    assert model.set_attention("tiled") is model
    assert {block.attn.impl for block in model.h} == {"tiled"}
    torch.testing.assert_close(model(idx)[0], naive, rtol=1e-5, atol=1e-5)
    assert {block.attn.impl for block in GPT(CONFIGS["llama"]).h} == {"fused"}


def test_an_unknown_implementation_of_attention_is_refused_with_the_choices():
    sentence = "attn_impl = 'flash' does not work: choose one of fused, tiled, naive, triton"
    with pytest.raises(UserError, match=sentence):
        GPT(CONFIGS["gpt2"], attn_impl="flash")
    model = GPT(CONFIGS["gpt2"], "tiled")
    with pytest.raises(UserError, match=sentence):
        model.set_attention("flash")
    assert {block.attn.impl for block in model.h} == {"tiled"}


def test_triton_where_it_cannot_run_is_refused_with_a_sentence(monkeypatch):
    import tinygpt.attention_triton

    monkeypatch.setattr(tinygpt.attention_triton, "triton", None)
    model = GPT(CONFIGS["gpt2"], attn_impl="triton")  # it may still be moved to a machine that can
    with pytest.raises(UserError, match="needs the package triton"):
        model(tokens())
    assert model.set_attention("fused")(tokens())[0].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(CONFIGS)),
    cuts=st.sets(st.integers(1, 23)),
    impl=st.sampled_from(["fused", "tiled", "naive"]),
)
def test_with_a_cache_the_logits_are_those_without_whatever_the_pieces(name, cuts, impl):
    model, idx = make(CONFIGS[name], dtype=torch.float64, attn_impl=impl), tokens()
    cache, edges = KVCache(model.config, 3, dtype=torch.float64), [0, *sorted(cuts), 24]
    with torch.no_grad():
        pieces = [model(idx[:, a:b], cache=cache)[0] for a, b in zip(edges, edges[1:])]
        torch.testing.assert_close(torch.cat(pieces, 1), model(idx)[0], rtol=1e-9, atol=1e-9)
    assert cache.length == 24


def test_with_a_mask_a_document_in_a_row_has_the_logits_that_it_has_alone():
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=50, block_size=16, n_layer=3, n_head=4, n_kv_head=2, n_embd=32))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)  # far from the small first weights: attention has a say
    documents = [torch.randint(50, (1, n)) for n in (5, 4, 7)]  # RoPE: a document's place does not count
    number = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7])
    alone = torch.cat([model(document)[0] for document in documents], dim=1)
    row = torch.cat(documents, dim=1)
    torch.testing.assert_close(model(row, mask=same_document(number))[0], alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(row)[0][:, 5:], alone[:, 5:], atol=0.1)


def test_the_cache_holds_key_heads_not_query_heads_and_says_when_it_is_full():
    config = CONFIGS["llama-gqa"]
    cache = KVCache(config, 3)
    assert [t.shape for t in (*cache.k, *cache.v)] == 4 * [(3, 2, 24, 8)]
    model = make(config)
    with torch.no_grad():
        model(tokens(T=20), cache=cache)
        with pytest.raises(UserError, match="25 tokens.*block_size = 24.*at most 4"):
            model(tokens(T=5), cache=cache)
        assert cache.length == 20  # and it can still be used
        model(tokens(T=4), cache=cache)
    with pytest.raises(UserError, match="block_size = 24"):
        model(tokens(T=25))


@every_config
def test_the_padding_of_the_vocabulary_is_never_seen(name):
    model, idx, targets = make(CONFIGS[name]), tokens(), tokens(seed=1)
    logits, loss = model(idx, targets)
    loss.backward()
    heads = [w for w in (model.wte.weight, getattr(model.lm_head, "weight", None)) if w is not None]
    for w in heads:
        assert w.shape[0] == 128 and w.grad[:100].any() and not w.grad[100:].any()
        with torch.no_grad():
            w[100:] = 1e4  # a loss or a sample that saw these rows would be another one
    after, loss_after = model(idx, targets)
    assert torch.equal(logits, after) and torch.equal(loss, loss_after)


def test_hidden_padding_changes_neither_loss_nor_gradient():
    "What a GPU does, where the product has columns of padding."
    logits = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 8, -100], [3, 3, 1]])
    want = F.cross_entropy(logits[..., :9].flatten(0, 1), targets.flatten())
    found = token_loss(_hide_padding(logits, 9), targets)
    assert torch.equal(_hide_padding(logits, 12), logits) and abs(found - want) < 1e-12
    both = [torch.autograd.grad(loss, logits)[0] for loss in (want, found)]
    assert torch.allclose(*both, rtol=0, atol=1e-12) and not both[1][..., 9:].any()


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU: there the padded rows are multiplied and cut off after",
)
@every_config
def test_the_padding_is_never_seen_on_a_gpu_either(name):
    model, idx = make(CONFIGS[name]), tokens()
    want = model(idx, idx)
    model.cuda()
    with torch.no_grad():
        model.wte.weight[100:] = 1e4
    got = tuple(t.cpu() for t in model(idx.cuda(), idx.cuda()))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_dropout_acts_in_training_only_and_everywhere_it_should():
    model, idx = make(replace(CONFIGS["gpt2"], dropout=0.5)), tokens()
    still = make(CONFIGS["gpt2"])
    assert torch.equal(model(idx)[0], still(idx)[0])
    model.train()
    assert not torch.equal(model(idx)[0], model(idx)[0])
    x = torch.ones(1, 24, 32)
    for part in (model.h[0].attn, model.h[0].mlp):
        assert 0.3 < (part(x) == 0).float().mean() < 0.7  # the last thing a branch does


@every_config
def test_gradients_are_those_of_finite_differences(name):
    model, idx, targets = make(CONFIGS[name], dtype=torch.float64), tokens(1, 6), tokens(1, 6, seed=1)
    model(idx, targets)[1].backward()
    gen = torch.Generator().manual_seed(3)
    for p in model.parameters():
        d = torch.randn(p.shape, generator=gen, dtype=torch.float64)
        with torch.no_grad():
            p += 1e-6 * d
            up = model(idx, targets)[1].item()
            p -= 2e-6 * d
            down = model(idx, targets)[1].item()
            p += 1e-6 * d
        assert (up - down) / 2e-6 == pytest.approx((p.grad * d).sum().item(), rel=1e-4, abs=1e-7)


@every_config
def test_a_handful_of_steps_learns_a_sentence_by_heart(name):
    torch.manual_seed(0)
    model, idx = GPT(CONFIGS[name]), tokens(2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = last = model(idx[:, :-1], idx[:, 1:])[1]
    assert first.item() == pytest.approx(math.log(100), rel=0.03)
    for _ in range(60):
        opt.zero_grad()
        last = model(idx[:, :-1], idx[:, 1:])[1]
        last.backward()
        opt.step()
    assert last.item() < 0.2


# ---- loss


def test_the_loss_counts_what_is_not_minus_100_and_equals_torchs():
    logits, targets = torch.randn(3, 7, 50, dtype=torch.float64), tokens(3, 7, 50)
    targets[0, :4] = -100
    flat = F.cross_entropy(logits.view(-1, 50), targets.view(-1), reduction="none").view(3, 7)
    torch.testing.assert_close(token_loss(logits, targets, "none"), flat)
    torch.testing.assert_close(token_loss(logits, targets, "sum"), flat.sum())
    torch.testing.assert_close(token_loss(logits, targets), flat.sum() / 17)
    torch.testing.assert_close(token_loss(logits, targets), F.cross_entropy(logits.mT, targets))
    assert not token_loss(logits, targets, "none")[0, :4].any()


def test_a_batch_without_targets_costs_nothing_and_moves_nothing():
    model = make(CONFIGS["gpt2"])
    loss = model(tokens(), torch.full((3, 24), -100))[1]
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@every_config
def test_a_batch_without_rows_costs_nothing_and_moves_nothing(name):
    model = make(CONFIGS[name])
    idx = torch.zeros(0, 24, dtype=torch.int64)  # of a rank that got no rows of a last, short batch
    logits, loss = model(idx, idx, reduction="sum")
    loss.backward()
    assert logits.shape == (0, 24, 100) and loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_computed_in_float32_or_better(dtype, expected, reduction):
    logits = torch.randn(2, 5, 300).to(dtype)
    targets = tokens(2, 5, 300)
    loss = token_loss(logits, targets, reduction)
    assert loss.dtype == expected
    torch.testing.assert_close(
        loss.double(), token_loss(logits.double(), targets, reduction), rtol=1e-5, atol=1e-5
    )


def test_under_autocast_the_loss_and_the_capped_logits_are_float32():
    model, idx = make(CONFIGS["modern"]), tokens(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, idx)
    assert loss.dtype == logits.dtype == torch.float32


@pytest.mark.parametrize("name", ["gpt2", "modern"])
def test_the_model_compiles_as_one_graph_with_the_same_loss(name):
    model, idx = make(CONFIGS[name]), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)  # needs no C++ compiler
    torch.testing.assert_close(compiled(idx, idx)[1], model(idx, idx)[1])


def test_targets_of_another_shape_and_padded_ids_are_refused():
    model, idx = make(CONFIGS["gpt2"]), tokens(2, 12)
    with pytest.raises(UserError, match=r"\(12, 2\).*\(2, 12\)"):
        model(idx, idx.T)
    with pytest.raises(IndexError):
        model(idx, torch.full((2, 12), 100))  # a row of padding is no target
    with pytest.raises(ValueError, match="median"):
        model(idx, idx, reduction="median")


# ---- first weights


@every_config
def test_made_on_meta_and_emptied_nothing_stays_uninitialized(name):
    config = CONFIGS[name]
    with torch.device("meta"):
        model = GPT(config)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            t.fill_(math.nan)  # what to_empty may hold
    model.init_weights(torch.Generator().manual_seed(7))
    twin = GPT(config).init_weights(torch.Generator().manual_seed(7))
    ours, theirs = (dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, twin))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert torch.equal(model(tokens())[0], twin(tokens())[0])


def test_nothing_else_lives_in_plain_attributes_where_to_empty_cannot_reach_it():
    for config in CONFIGS.values():
        for module in GPT(config).modules():
            assert not any(isinstance(v, torch.Tensor) for v in vars(module).values())


@pytest.mark.parametrize("n_layer", [1, 3, 12])
def test_residual_projections_start_smaller_with_depth(n_layer):
    torch.manual_seed(0)  # the smallest matrix has 8192 numbers: their deviation is right within 0.8 %
    model = GPT(GPTConfig.gpt2(vocab_size=256, block_size=64, n_layer=n_layer, n_head=4, n_embd=128))
    for name, p in model.named_parameters():
        if name.endswith("c_proj.weight"):
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(2 * n_layer), rel=0.05), name
        elif p.dim() == 2:
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name


def test_the_modern_variant_starts_as_the_identity():
    model, idx = GPT(CONFIGS["modern"]), tokens()
    x = model.wte(idx)
    for block in model.h:
        assert torch.equal(block(x, model.rope), x)
    assert not model(idx)[0].any()


def test_a_tied_model_has_one_matrix_and_both_its_uses_teach_it():
    model = make(CONFIGS["gpt2"])
    assert model.lm_head is None and "lm_head.weight" not in model.state_dict()
    idx = torch.zeros(1, 4, dtype=torch.long)  # only id 0 is read
    model(idx, idx + 1)[1].backward()
    # every id is an answer that was not given
    assert (model.wte.weight.grad[:100].abs().sum(dim=1) > 0).all()
    assert "rope" not in GPT(CONFIGS["llama"]).state_dict()


# ---- bad configs


@every_config
def test_the_configs_of_the_book_have_no_problems_and_survive_json(name):
    config = CONFIGS[name]
    assert config.problems() == []
    values = json.loads(json.dumps(asdict(config)))
    assert GPTConfig(**values) == GPTConfig.from_dict(values) == config


def test_settings_that_nobody_knows_are_refused_with_their_names_and_their_source():
    values = asdict(CONFIGS["gpt2"]) | {"n_experts": 8, "gate": "top2"}
    with pytest.raises(UserError, match=r"model's config has settings .* know \(gate, n_experts\): use the"):
        GPTConfig.from_dict(values)
    with pytest.raises(UserError, match=r"^run/model.json has settings that this version"):
        GPTConfig.from_dict(values, "run/model.json")


def test_every_field_is_a_flag_with_its_help(capsys):
    import tyro

    flags = ["--n-layer", "3", "--position", "rope", "--n-kv-head", "2", "--no-bias"]
    config = tyro.cli(GPTConfig, args=flags)
    assert config == GPTConfig(n_layer=3, position="rope", n_kv_head=2, bias=False)
    with pytest.raises(SystemExit):
        tyro.cli(GPTConfig, args=["--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in ("Longest context in tokens", "Width of the residual stream"):
        assert words in shown


# ---- what otherwise only another library's weights would show


@pytest.mark.parametrize("name", ["llama", "modern"])
def test_attention_with_rope_knows_distances_and_not_places(name):
    config = CONFIGS[name]
    attn = Attention(config, 0).double().eval()
    with torch.no_grad():
        for p in attn.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) / 2)
    x = torch.randn(2, 8, config.n_embd, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    table = rope_table(100, config.head_dim).double()
    near, far = attn(x, table[:, :8]), attn(x, table[:, 50:58])
    torch.testing.assert_close(near, far, atol=1e-5, rtol=0)
    stretched = attn(x, table[:, :64:8])  # other distances
    assert (near - stretched).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_the_norm_adds_the_eps_of_the_config_under_the_root(kind):
    norm = make_norm(replace(CONFIGS["llama"], norm=kind, norm_eps=1e-3)).double()
    x = 0.01 * torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centered = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    torch.testing.assert_close(
        norm(x), centered / ((centered * centered).sum(-1, keepdim=True) / 32 + 1e-3) ** 0.5
    )


# ---- n-grams


V, WIDTH, ROWS = 100, 8, 1009
few = settings(max_examples=60, deadline=None)


def make_embedding(rows=ROWS, seed=0):
    "A token embedding and ids to look up."
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


# ---- rows of the n-gram tables


@few
@given(data=st.data(), n=st.integers(1, 5), rows=st.integers(1, 2**31))
def test_rows_are_those_of_whole_numbers_that_never_overflow(data, n, rows):
    ids = data.draw(st.lists(st.integers(0, 2**31 - 2), min_size=n - 1, max_size=12))
    got = ngram_rows(torch.tensor([ids, ids], dtype=torch.int64), n, rows)
    want = by_hand(ids, n, rows)
    assert got.dtype == torch.int64 and got.shape == (2, len(ids) - n + 1)
    assert got.tolist() == [want, want] and all(0 <= row < rows for row in want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_ids_in_fewer_bits_have_the_same_rows(dtype):
    ids = torch.randint(V, (3, 12), generator=torch.Generator().manual_seed(0))
    for n in (2, 3):
        assert torch.equal(ngram_rows(ids.to(dtype), n, ROWS), ngram_rows(ids, n, ROWS))


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
    tokenizers = {"bpe": BPETokenizer.train(texts, 1024), "char": CharTokenizer.train("".join(texts))}
    for name, tokenizer in tokenizers.items():
        ids = np.array([i for text in texts for i in tokenizer.encode(text)])
        for n in (2, 3):
            # n ids in one number, ten bits each; unique numbers are unique n-grams
            packed = np.unique(sum(ids[k : len(ids) - n + 1 + k] << 10 * (n - 1 - k) for k in range(n)))
            columns = [packed >> 10 * (n - 1 - k) & 1023 for k in range(n)]
            found[name, n] = torch.from_numpy(np.stack(columns, axis=1))
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


# ---- the token embedding


def test_it_adds_the_vectors_of_the_id_the_pair_and_the_triple():
    wte, idx = make_embedding()
    ids = [[0, 0, *row] for row in idx.tolist()]
    pairs = torch.tensor([by_hand(row[1:], 2, ROWS) for row in ids])
    triples = torch.tensor([by_hand(row, 3, ROWS) for row in ids])
    want = wte.weight[idx] + wte.ngrams[0].weight[pairs] + wte.ngrams[1].weight[triples]
    assert torch.equal(wte(idx), want) and want.shape == (3, 12, WIDTH)


def test_without_tables_a_model_has_an_embedding_and_nothing_else():
    model = GPT(GPTConfig.gpt2(**TINY)).eval()
    assert type(model.wte) is nn.Embedding
    assert [name for name in model.state_dict() if name.startswith("wte.")] == ["wte.weight"]
    cache = KVCache(model.config, 1)
    model(torch.tensor([[3, 4, 5]]), cache=cache)
    assert cache.length == 3 and not cache.last.any()  # nobody asks for the last tokens


def test_the_names_in_a_state_dict_stay():
    state = make_embedding()[0].state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "weight": (V, WIDTH),
        "ngrams.0.weight": (ROWS, WIDTH),
        "ngrams.1.weight": (ROWS, WIDTH),
    }
    other = make_embedding(seed=1)[0]
    other.load_state_dict(state)
    wte, idx = make_embedding()
    assert torch.equal(other(idx), wte(idx))


@few
@given(row=st.integers(0, 2), place=st.integers(0, 11), by=st.integers(1, V - 1))
def test_a_changed_token_is_seen_at_its_place_and_the_two_after_it(row, place, by):
    wte, idx = make_embedding()
    other = idx.clone()
    other[row, place] = (other[row, place] + by) % V
    changed = (wte(other) != wte(idx)).any(dim=-1)
    assert changed.nonzero().tolist() == [[row, at] for at in range(place, min(place + 3, 12))]


def test_rows_of_a_batch_do_not_see_each_other():
    wte, idx = make_embedding()
    assert torch.equal(wte(idx), torch.cat([wte(row[None]) for row in idx]))


@few
@given(cuts=st.lists(st.integers(0, 12), max_size=6), rows=st.sampled_from([1, 7, ROWS]))
def test_with_a_cache_any_pieces_give_exactly_the_whole(cuts, rows):
    wte, idx = make_embedding(rows)
    cache = KVCache(GPTConfig.modern(n_layer=1, n_embd=WIDTH, n_head=1, block_size=12), 3)
    edges = [0, *sorted(cuts), 12]
    pieces = [wte(idx[:, a:b], cache) for a, b in zip(edges, edges[1:])]
    assert torch.equal(torch.cat(pieces, dim=1), wte(idx))


def test_a_window_that_begins_later_sees_id_0_before_it():
    wte, idx = make_embedding()
    padded = torch.cat((torch.zeros(3, 2, dtype=torch.int64), idx[:, 4:]), dim=1)
    assert torch.equal(wte(idx[:, 4:]), wte(padded)[:, 2:])
    assert torch.equal(wte(idx[:, 4:])[:, 2:], wte(idx)[:, 6:])
    assert not torch.equal(wte(idx[:, 4:])[:, 1], wte(idx)[:, 5])


def hidden_by_hand(see, n, rows, ids):
    "The rows that each token of one row reads, with id 0 for every one before it that it may not see."
    grams = []
    for t in range(len(ids)):
        before = [ids[t - b] if t >= b and see[t][t - b] else 0 for b in range(n - 1, 0, -1)]
        grams += by_hand([*before, ids[t]], n, rows)
    return torch.tensor(grams)


@few
@given(draw=st.integers(0, 2**31), heads=st.integers(1, 2), cut=st.integers(0, 12), kind=st.booleans())
def test_an_id_that_the_mask_hides_from_a_token_counts_as_0_in_its_pair_and_triple(draw, heads, cut, kind):
    wte, idx = make_embedding()
    see = torch.rand(3, heads, 12, 12, generator=torch.Generator().manual_seed(draw)) < 0.5
    see = see | torch.eye(12, dtype=torch.bool)
    mask = see if kind else torch.zeros(see.shape).masked_fill(~see, -math.inf)
    got = wte(idx, mask=mask)
    for row, seen, x in zip(idx, see.any(dim=1).tolist(), got):
        pairs, triples = (hidden_by_hand(seen, n, ROWS, row.tolist()) for n in (2, 3))
        assert torch.equal(x, wte.weight[row] + wte.ngrams[0].weight[pairs] + wte.ngrams[1].weight[triples])
    # in two pieces, with a cache
    model = GPT(GPTConfig.modern(n_layer=1, n_embd=WIDTH, n_head=2, block_size=12, vocab_size=V))
    model.wte, cache = wte, KVCache(model.config, 3)
    pieces = []
    for part, rows in ((idx[:, :cut], mask[:, :, :cut, :cut]), (idx[:, cut:], mask[:, :, cut:])):
        pieces.append(wte(part, cache, rows))
        cache.length += part.shape[1]
    assert torch.equal(torch.cat(pieces, dim=1), got)


def test_a_mask_of_fewer_dimensions_spreads_to_the_tables_and_a_wrong_one_is_one_sentence():
    wte, idx = make_embedding()
    alone = wte(idx, mask=torch.eye(12, dtype=torch.bool))
    assert torch.equal(alone, torch.cat([wte(column[:, None]) for column in idx.T], dim=1))
    keys = torch.ones(3, 1, 1, 12, dtype=torch.bool)
    keys[:, :, :, 4] = False
    other = idx.clone()
    other[:, 4] = (other[:, 4] + 1) % V
    assert torch.equal(wte(other, mask=keys)[:, 5:], wte(idx, mask=keys)[:, 5:])
    assert torch.equal(wte(idx, mask=keys)[:, 7:], wte(idx)[:, 7:])
    model = GPT(GPTConfig.modern(**TINY, ngram_rows=37))
    row = torch.zeros(1, 5, dtype=torch.int64)
    for wrong in (torch.ones(4, 5, dtype=torch.bool), [[True] * 5] * 5, torch.ones(5, 5).long()):
        with pytest.raises(UserError, match="mask"):
            model(row, mask=wrong)


def test_only_the_rows_that_were_read_have_a_gradient_and_each_as_often_as_it_was_read():
    wte, idx = make_embedding(37)
    wte(idx).sum().backward()
    for n, table in enumerate(wte.ngrams, start=2):
        rows = torch.tensor([by_hand([0] * (n - 1) + row, n, 37) for row in idx.tolist()])
        times_read = torch.bincount(rows.flatten(), minlength=37)
        assert torch.equal(table.weight.grad, times_read[:, None].expand(-1, WIDTH).float())
    assert torch.equal(wte.weight.grad[:, 0], torch.bincount(idx.flatten(), minlength=V).float())


def test_made_on_meta_emptied_and_set_it_is_the_one_made_here():
    with torch.device("meta"):
        wte = TokenEmbedding(V, WIDTH, ROWS)
        assert wte(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, WIDTH)
        assert all(p.is_meta for p in wte.parameters())
    here, idx = make_embedding()
    for one in (wte.to_empty(device="cpu"), here):
        init_weights(one, 1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(wte(idx), here(idx))
    assert abs(wte.ngrams[1].weight.std().item() - 0.02) < 0.002


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_it_compiles_to_one_graph_that_gives_the_same(cached):
    wte, idx = make_embedding()
    caches = [KVCache(GPTConfig.modern(n_layer=1, block_size=12), 3) if cached else None for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(wte, backend="aot_eager", fullgraph=True)  # needs no C++ compiler
    assert torch.equal(compiled(idx, caches[0]), wte(idx, caches[1]))
    assert not cached or torch.equal(caches[0].last, idx[:, -2:])
    torch._dynamo.reset()


def test_in_a_model_no_logit_moves_before_a_changed_token():
    torch.manual_seed(0)
    shape = dict(vocab_size=V, block_size=12, n_layer=1, n_head=2, n_embd=16)
    model = GPT(GPTConfig.llama(**shape, ngram_rows=50)).eval()
    idx = torch.randint(V, (1, 12))
    want = model(idx)[0]
    for place in range(12):
        other = idx.clone()
        other[0, place] = (other[0, place] + 1) % V
        moved = (model(other)[0] != want).any(dim=-1)[0]
        assert moved.nonzero()[0].item() == place


# the parts as a library ----------------------------------------------------------------------------------


def test_parts_refuse_at_once_what_they_cannot_do():
    with pytest.raises(UserError, match="n_embd = 10 does not divide by n_head = 3"):
        Attention(GPTConfig(n_embd=10, n_head=3), 0)
    with pytest.raises(UserError, match="n_kv_head = 3 does not divide n_head = 4"):
        Block(GPTConfig(n_embd=32, n_head=4, n_kv_head=3), 0)
    x, config = torch.randn(1, 5, 32), CONFIGS["llama"]
    with pytest.raises(UserError) as error:
        Block(config, 0)(x)
    assert "rope_table(block_size, head_dim, rope_theta)[:, :T]" in str(error.value)
    rope = rope_table(config.block_size, config.head_dim, config.rope_theta)[:, :5]  # as it says
    assert Block(config, 0)(x, rope).shape == x.shape


def test_logits_of_two_dimensions_are_refused_and_what_is_advised_works():
    logits, targets = torch.randn(5, 100), torch.randint(100, (5,))
    with pytest.raises(UserError, match=r"logits are \(5, 100\): they need three dimensions, \(B, T, V\)"):
        token_loss(logits, targets)
    loss = token_loss(logits[None], targets[None])
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_ids_without_a_batch_are_refused_and_what_is_advised_works(name):
    model, ids = GPT(CONFIGS[name]), torch.randint(100, (5,))
    with pytest.raises(UserError, match=r"ids are \(5,\): give \(B, T\); ids\[None\] makes a batch"):
        model(ids)
    assert model(ids[None])[0].shape[:2] == (1, 5)


def test_the_exact_gelu_is_a_choice_and_gpt2s_stays_the_default():
    assert GPTConfig().mlp == "gelu"
    tanh, exact = (MLP(replace(CONFIGS["gpt2"], mlp=kind)) for kind in ("gelu", "gelu_exact"))
    exact.load_state_dict(tanh.state_dict())
    x = 3 * torch.randn(50, 32)
    torch.testing.assert_close(exact(x), exact.c_proj(nn.GELU()(exact.c_fc(x))))
    torch.testing.assert_close(tanh(x), tanh.c_proj(nn.GELU("tanh")(tanh.c_fc(x))))
    assert (exact(x) - tanh(x)).abs().max() > 1e-6


def test_no_gradient_flows_through_the_cache():
    cache = KVCache(GPTConfig.llama(vocab_size=9, block_size=8, n_layer=1, n_head=2, n_embd=8), 1)
    k = torch.randn(1, 2, 3, 4, requires_grad=True)
    for _ in range(2):
        held = cache.extend(0, k, 2 * k)
        assert not any(t.requires_grad for t in (*held, *cache.k, *cache.v))
        cache.length += 3
