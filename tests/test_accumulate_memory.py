import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tinygpt.accumulate import accumulate_gradients
from tinygpt.accumulate_memory import ChunkedLossGPT, _chunk, checkpoint_blocks, chunked_cross_entropy
from tinygpt.measure.memory import activation_bytes
from tinygpt.model import GPT, GPTConfig, KVCache
from tinygpt.support import UserError, peak_bytes

VARIANTS = [GPTConfig.gpt2, GPTConfig.llama, GPTConfig.modern]
SMALL = dict(vocab_size=50, block_size=16, n_layer=3, n_head=2, n_embd=16)


def make(variant=GPTConfig.gpt2, seed=0, attn_impl="fused", **kw):
    torch.manual_seed(seed)
    model = GPT(variant(**SMALL | kw), attn_impl)
    if variant is GPTConfig.modern:  # its projections start at zero, where wrong gradients would hide
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
    return model


def batch(rows=5, T=16, ragged=True):
    g = torch.Generator().manual_seed(1)
    x = torch.randint(50, (rows, T), generator=g)
    y = torch.randint(50, (rows, T), generator=g)
    if ragged:
        y[0, 3:] = -100
        y[1] = -100
    return x, y


def gradients(model, trained=None, micro=2):
    model.zero_grad()
    torch.manual_seed(7)  # of the dropout
    loss = accumulate_gradients(model if trained is None else trained, *batch(), micro)
    return loss, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_gradients_are_the_same_bit_for_bit_with_dropout_too(variant, dropout):
    model = make(variant, dropout=dropout)
    loss, before = gradients(model)
    again, after = gradients(checkpoint_blocks(model))
    assert loss == again and all(torch.equal(a, b) for a, b in zip(before, after))


def test_other_random_numbers_in_the_second_run_would_be_seen():
    "The bug that the test above is for: its symptom, made here."
    model = make(dropout=0.3)
    _, before = gradients(model)
    for block in model.h:
        block.forward = functools.partial(
            checkpoint,
            functools.partial(type(block).forward, block),
            use_reentrant=False,
            preserve_rng_state=False,
        )
    _, after = gradients(model)
    assert not all(torch.equal(a, b) for a, b in zip(before, after))


def test_the_random_numbers_after_a_step_are_where_they_would_have_been():
    model = make(dropout=0.3)
    gradients(model)
    plain = torch.rand(1)
    gradients(checkpoint_blocks(model))
    assert torch.equal(torch.rand(1), plain)


def test_checkpointing_keeps_one_input_per_block_and_so_saves_what_was_predicted():
    config = GPTConfig.gpt2(vocab_size=50, block_size=64, n_layer=6, n_head=4, n_embd=64)
    model = GPT(config)
    x, y = torch.randint(50, (2, 8, 64))

    def step():
        accumulate_gradients(model, x, y)
        model.zero_grad(set_to_none=True)

    step()
    plain = peak_bytes(step)
    checkpoint_blocks(model)
    saved = plain - peak_bytes(step)
    kept = activation_bytes(config, 8)
    block = kept["attention"] + kept["mlp"]
    stream = 8 * 64 * 64 * 4
    # the block that runs again is there once
    assert saved == pytest.approx(6 * (block - stream) - block, rel=0.25)


def test_the_second_run_is_a_forward_of_the_blocks_and_not_of_the_head():
    model = make(attn_impl="naive")
    x, y = batch()

    def flops():
        with FlopCounterMode(display=False) as counter:
            accumulate_gradients(model, x, y)
        return counter.get_total_flops()

    plain = flops()
    checkpoint_blocks(model)
    again = flops()
    C, tokens = 16, x.numel()
    # qkv, projection, first half of the MLP; scores and values
    products = 2 * (3 * C * C + C * C + 4 * C * C) + 4 * C * 16
    assert again - plain == 3 * tokens * products  # the MLP's second product is not needed again


def test_checkpointing_comes_off_again_and_leaves_names_and_weights_alone():
    model = make()
    names = list(model.state_dict())
    weights = copy.deepcopy(model.state_dict())
    checkpoint_blocks(checkpoint_blocks(model))  # twice is once
    assert list(model.state_dict()) == names
    checkpoint_blocks(model, enabled=False)
    assert not any("forward" in vars(block) for block in model.h)
    assert all(torch.equal(weights[n], w) for n, w in model.state_dict().items())


def test_a_copy_of_a_checkpointed_model_runs_its_own_blocks():
    model = checkpoint_blocks(make())
    twin = copy.deepcopy(model)
    for p in twin.parameters():
        p.data.zero_()
    assert twin(batch()[0])[0].abs().max() == 0
    gradients(twin)
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_checkpointed_where_nothing_is_trained(monkeypatch):
    import tinygpt.accumulate_memory as module

    model = checkpoint_blocks(make())
    x, y = batch()
    calls = []
    monkeypatch.setattr(module, "checkpoint", lambda *a, **k: calls.append(1) or checkpoint(*a, **k))
    model.eval()(x, y)
    with torch.no_grad():
        model.train()(x, y)
        cached = model.eval()(x[:, :4], cache=KVCache(model.config, len(x)))[0]
    assert not calls
    torch.testing.assert_close(cached, model(x[:, :4])[0])
    model.train()(x, y)
    assert len(calls) == 3  # one for each block


def test_a_checkpointed_model_is_freed_at_once_when_nobody_holds_it():
    model = checkpoint_blocks(make())
    gradients(model)
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(model.h[0])
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_a_checkpointed_model_survives_pickling():
    model = checkpoint_blocks(make())
    twin = pickle.loads(pickle.dumps(model))
    loss, before = gradients(model)
    again, after = gradients(twin)
    assert loss == again and all(torch.equal(a, b) for a, b in zip(before, after))
    assert twin.h[0].forward.block() is twin.h[0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_and_chunks_are_captured_by_compile_and_train_the_same(variant):
    model = make(variant, n_layer=2)
    lean = ChunkedLossGPT(checkpoint_blocks(model), chunk=50)  # the last of two is shorter
    loss, before = gradients(model, lean, micro=5)
    torch.compiler.reset()
    again, after = gradients(model, torch.compile(lean, backend="aot_eager"), micro=5)
    assert loss.item() == pytest.approx(again.item(), rel=1e-5)
    assert max((a - b).abs().max() for a, b in zip(before, after)) < 1e-5


def capped(z, cap):
    return cap * torch.tanh(z / cap) if cap else z


def apart(a, b):
    "Relative distance of two lists of gradients."
    a, b = (torch.cat([t.flatten() for t in tensors]) for tensors in (a, b))
    return (a - b).norm() / b.norm()


def oracle(x, weight, targets, V, cap, reduction):
    "torch's own cross-entropy on whole logits."
    z = capped(x.flatten(0, -2) @ weight[:V].mT, cap)
    loss = F.cross_entropy(z, targets.flatten(), ignore_index=-100, reduction="sum")
    return loss / max(1, int((targets != -100).sum())) if reduction == "mean" else loss


def inputs(N=11, C=5, V=20, padded=24, ignore=0.3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, C, generator=g, dtype=torch.float64).mul(2).requires_grad_() for n in (N, padded))
    targets = torch.randint(V, (N,), generator=g)
    targets[torch.rand(N, generator=g) < ignore] = -100
    return x, w, targets


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(1, 12),
    chunk=st.integers(1, 14),
    cap=st.sampled_from([0.0, 2.0, 15.0]),
    reduction=st.sampled_from(["mean", "sum"]),
    ignore=st.sampled_from([0.0, 0.4, 1.0]),
    padded=st.sampled_from([20, 24]),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_equal_torchs_on_whole_logits(N, chunk, cap, reduction, ignore, padded, seed):
    x, w, t = inputs(N, padded=padded, ignore=ignore, seed=seed)
    ours = chunked_cross_entropy(x, w, t, 20, cap, reduction, chunk)
    theirs = oracle(x, w, t, 20, cap, reduction)
    assert abs(ours - theirs) < 1e-12 * max(1, abs(theirs))
    for a, b in zip(torch.autograd.grad(3 * ours, (x, w)), torch.autograd.grad(3 * theirs, (x, w))):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_gradcheck_agrees(cap):
    x, w, t = inputs()
    assert torch.autograd.gradcheck(lambda x, w: chunked_cross_entropy(x, w, t, 20, cap, "mean", 4), (x, w))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (2, 1, 3)], ids=str)
def test_targets_may_have_any_shape_from_a_single_token_on(shape):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, 5, generator=g, dtype=torch.float64).requires_grad_()
    w = torch.randn(20, 5, generator=g, dtype=torch.float64).requires_grad_()
    t = torch.randint(20, shape, generator=g)
    ours = chunked_cross_entropy(x, w, t, reduction="sum", chunk=2)
    theirs = F.cross_entropy((x @ w.mT).reshape(-1, 20), t.reshape(-1), reduction="sum")
    assert abs(ours - theirs) < 1e-12
    for a, b in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w))):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_the_losses_of_single_tokens_equal_torchs_and_have_no_graph(cap, chunk):
    x, w, t = inputs(N=12)
    ours = chunked_cross_entropy(x.view(3, 4, 5), w, t.view(3, 4), 20, cap, "none", chunk)
    theirs = F.cross_entropy(capped(x @ w[:20].mT, cap), t, reduction="none")
    assert ours.shape == (3, 4) and not ours.requires_grad
    assert (ours.flatten() - theirs).abs().max() < 1e-12


def test_only_the_gradients_asked_for_are_made():
    x, w, t = inputs()
    (dx,) = torch.autograd.grad(chunked_cross_entropy(x, w.detach(), t, 20), x)
    (dw,) = torch.autograd.grad(chunked_cross_entropy(x.detach(), w, t, 20), w)
    for a, b in zip((dx, dw), torch.autograd.grad(oracle(x, w, t, 20, 0.0, "mean"), (x, w))):
        assert (a - b).abs().max() < 1e-12
    assert not chunked_cross_entropy(x.detach(), w.detach(), t, 20).requires_grad
    with torch.no_grad():
        assert not chunked_cross_entropy(x, w, t, 20).requires_grad


def test_a_gradient_that_nobody_needs_costs_no_product():
    x, w, t = inputs(N=8, padded=20)

    def flops(x, w):
        with FlopCounterMode(display=False) as counter:
            chunked_cross_entropy(x, w, t, 20, chunk=4).backward()
        return counter.get_total_flops()

    one = 2 * x.numel() * 20  # a product of inputs and head
    assert flops(x, w) == 3 * one
    assert flops(x, w.detach()) == flops(x.detach(), w) == 2 * one


def test_a_second_backward_is_allowed_and_gives_the_same_gradients():
    x, w = torch.randn(7, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = 3 * chunked_cross_entropy(x, w, torch.tensor([0, 1, 2, 3, 4, -100, 1]), chunk=2)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    kept = [g.clone() for g in first]
    for a, b, c in zip(first, torch.autograd.grad(loss, (x, w)), kept):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_huge_logits_and_uncounted_rows_with_nan_do_not_spread():
    x, w, t = inputs(ignore=0.0)
    big = chunked_cross_entropy(x * 1e4, w, t, 20, chunk=3)
    assert torch.isfinite(big) and abs(big - oracle(x * 1e4, w, t, 20, 0.0, "mean")) < 1e-8 * big
    x, t = x.detach().clone(), t.clone()
    x[2], t[2] = float("nan"), -100
    assert torch.isfinite(chunked_cross_entropy(x, w, t, 20, chunk=3))


def test_equal_to_torchs_own_fused_loss_where_it_has_one():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    x, w, t = inputs(padded=20)
    ours = chunked_cross_entropy(x, w, t, chunk=4)
    theirs = F.linear_cross_entropy(x, w, t, ignore_index=-100)
    assert (ours - theirs).abs() < 1e-12
    for a, b in zip(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w))):
        assert (a - b).abs().max() < 1e-12


def test_the_logits_of_no_more_than_a_chunk_exist():
    N, C, V, chunk = 1024, 32, 2048, 64
    x = torch.randn(N, C, requires_grad=True)
    w = torch.randn(V, C, requires_grad=True)
    t = torch.randint(V, (N,))

    def step(f):
        def run():
            f().backward()
            x.grad = w.grad = None

        run()
        return peak_bytes(run)

    whole = step(lambda: oracle(x, w, t, V, 0.0, "sum"))
    chunked = step(lambda: chunked_cross_entropy(x, w, t, reduction="sum", chunk=chunk))
    assert whole >= 3 * N * V * 4
    assert chunked <= 2 * chunk * V * 4 + 3 * (N + V) * C * 4


def test_no_product_is_made_twice():
    x, w, t = inputs(padded=20)

    def flops(f):
        with FlopCounterMode(display=False) as counter:
            f().backward()
        return counter.get_total_flops()

    ours = flops(lambda: chunked_cross_entropy(x, w, t, chunk=4))
    assert ours == flops(lambda: oracle(x, w, t, 20, 0.0, "mean"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gpt_with_chunked_loss_and_checkpoints_trains_the_same(variant):
    model = make(variant, dropout=0.2).double()
    loss, before = gradients(model)
    lean = ChunkedLossGPT(checkpoint_blocks(model), chunk=7)
    again, after = gradients(model, lean)
    assert loss.item() == pytest.approx(again.item(), rel=1e-6)
    assert max((a - b).abs().max() for a, b in zip(before, after)) < 1e-12


def test_a_mask_reaches_attention_through_checkpoints_and_chunked_loss():
    model = make().double()
    x, y = batch()
    mask = torch.rand(len(x), 1, x.shape[1], x.shape[1]) < 0.5
    wanted = model(x, y, mask=mask)[1]
    want = torch.autograd.grad(wanted, list(model.parameters()))
    assert abs(wanted - model(x, y)[1]) > 1e-6
    loss = ChunkedLossGPT(checkpoint_blocks(model), chunk=7)(x, y, mask=mask)[1]
    got = torch.autograd.grad(loss, list(model.parameters()))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
    assert max((a - b).abs().max() for a, b in zip(got, want)) < 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_wrapper_follows_the_models_own_forward(variant):
    model = make(variant).double()
    x, y = batch()
    features = model.features(x)
    logits = features @ (model.lm_head or model.wte).weight[:50].mT
    cap = model.config.logit_softcap
    torch.testing.assert_close(capped(logits, cap), model(x)[0])
    for reduction in ("mean", "sum"):
        none, loss = ChunkedLossGPT(model, 9)(x, y, reduction)
        assert none is None and abs(loss - model(x, y, reduction=reduction)[1]) < 1e-12


def test_under_autocast_the_loss_is_float32_and_close_to_the_models():
    model = make(GPTConfig.llama)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = model(x, y)[1]
        ours = ChunkedLossGPT(model, 9)(x, y)[1]
    assert ours.dtype == torch.float32 and abs(ours - theirs) < 1e-4
    want = torch.autograd.grad(theirs, list(model.parameters()))
    got = torch.autograd.grad(ours, list(model.parameters()))
    assert all(a.dtype == b.dtype for a, b in zip(got, want))
    assert apart(got, want) < 0.02


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(targets=torch.zeros(3, dtype=torch.long)), "one target for each input"),
        (dict(vocab_size=25), "vocab_size = 25"),
        (dict(weight=torch.zeros(24, 6)), "width 5"),
        (dict(chunk=0), "chunk = 0"),
        (dict(reduction="sums"), "sums"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(change, said):
    x, w, t = inputs()
    with pytest.raises(UserError, match=said):
        chunked_cross_entropy(**{"x": x, "weight": w, "targets": t, "vocab_size": 20} | change)


def test_a_row_longer_than_the_context_is_refused():
    with pytest.raises(UserError, match="block_size = 16"):
        ChunkedLossGPT(make())(*batch(T=17))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_padded_head_gives_the_same(dtype):
    model = make(GPTConfig.modern).cuda()
    x, y = (t.cuda() for t in batch())
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        theirs = model(x, y)[1]
        ours = ChunkedLossGPT(checkpoint_blocks(model), 9)(x, y)[1]
    want = torch.autograd.grad(theirs, list(model.parameters()))
    got = torch.autograd.grad(ours, list(model.parameters()))
    bound = 1e-4 if dtype == torch.float32 else 0.03
    assert abs(ours - theirs) < bound and apart(got, want) < bound


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_padding_columns_get_no_gradient_where_the_product_has_them(cap):
    "On a GPU the padded head makes the product; here its chunk is given with padding."
    z = torch.randn(5, 12, dtype=torch.float64)
    real = z[:, :9].clone().requires_grad_()
    t = torch.tensor([0, 8, -100, 3, 3])
    oracle = F.cross_entropy(capped(real, cap), t, reduction="sum")
    losses, dz = _chunk(z, t, 9, cap, torch.float64, True)
    assert abs(losses.sum() - oracle) < 1e-12 and dz.shape == (5, 12) and not dz[:, 9:].any()
    assert (dz[:, :9] - torch.autograd.grad(oracle, real)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("target", [-1, -20, 20, 23])  # -1 is what nanoGPT does not count
def test_a_target_that_is_no_id_is_refused_as_torch_refuses_it(target):
    x, w, t = inputs()
    t[3] = target
    with pytest.raises(IndexError):
        oracle(x, w, t, 20, 0.0, "mean")
    for reduction in ("mean", "none"):
        with pytest.raises((IndexError, RuntimeError)):
            chunked_cross_entropy(x, w, t, 20, reduction=reduction, chunk=4)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_a_target_in_the_padding_has_no_finite_loss_where_the_product_has_it(cap):
    z = torch.randn(3, 12, dtype=torch.float64)
    t = torch.tensor([0, 10, 8])
    hidden = capped(z, cap).masked_fill(torch.arange(12) >= 9, -torch.inf)
    want = F.cross_entropy(hidden, t, reduction="none")
    assert want[1] == torch.inf
    losses, _ = _chunk(z, t, 9, cap, torch.float64, True)
    torch.testing.assert_close(losses, want)


@pytest.mark.parametrize("mode", [True, False])
def test_the_wrapper_is_in_the_models_mode_and_leaves_it_there(mode):
    model = make().train(mode)
    assert ChunkedLossGPT(model).training is mode and model.h[0].training is mode
