import copy
import io
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_runs import fifty_steps_of_muon

from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.checkpoint import load_training_state, save_checkpoint
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import (
    QUINTIC,
    CombinedOptimizer,
    Muon,
    make_optimizer,
    matrix_owners,
    muon_groups,
    muon_update,
    newton_schulz,
    newton_schulz_dtype,
    polar_express,
    update_scale,
)
from tinygpt.precision import LossScaler
from tinygpt.support import UserError, peak_bytes
from tinygpt.tokenizer import ByteTokenizer

SMALL = dict(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=1),
    "llama tied": GPTConfig.llama(**{**SMALL, "tie_weights": True}),
    "modern": GPTConfig.modern(**SMALL),
}
EXACT = dict(atol=1e-10, rtol=0)


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_singular_values(sigma, rows, cols, seed=0):
    "A float64 matrix (rows, cols) with these singular values, and its U and V^T."
    n = len(sigma)
    U = torch.linalg.qr(rand(rows, n, seed=seed, dtype=torch.float64))[0]
    V = torch.linalg.qr(rand(cols, n, seed=seed + 1, dtype=torch.float64))[0]
    return U @ torch.diag(sigma) @ V.mT, U, V.mT


def scalar_map(x, coefficients):
    for a, b, c in coefficients:
        x = a * x + b * x**3 + c * x**5
    return x


def groups_of(model, lr=0.02, adamw_lr=5e-3, **settings):
    "Muon for the matrices of the blocks, AdamW for the rest."
    return muon_groups(model, adamw_groups(model, adamw_lr), lr, **settings)


def make(model, *args, **settings):
    return make_optimizer(groups_of(model, *args, **settings))


def split(groups):
    "(Muon's, AdamW's)."
    return [[g for g in groups if g["kind"] == kind] for kind in ("muon", "adamw")]


def train_steps(model, optimizer, seeds, vocab=64):
    for seed in seeds:
        x = torch.randint(vocab, (4, 8), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(x, x.roll(-1, 1))[1].backward()
        optimizer.step()


# --- Newton-Schulz


@pytest.mark.parametrize("shape", [(24, 24), (40, 10), (10, 40), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("coefficients", [[QUINTIC] * 5, polar_express()], ids=["quintic", "polar express"])
def test_it_moves_the_singular_values_and_leaves_the_vectors(shape, coefficients):
    G = rand(*shape, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    expected = U @ torch.diag(scalar_map(S / G.norm(), coefficients)) @ Vh
    got = newton_schulz(G, coefficients=coefficients)
    assert got.isfinite().all(), "not finite: was each matrix divided by its length first?"
    torch.testing.assert_close(got, expected, **EXACT)


@pytest.mark.parametrize("rows, cols", [(64, 64), (160, 48), (48, 160)])
@pytest.mark.parametrize("spread", [1.0, 2.0, 2.6])  # powers of ten between the largest and the smallest
def test_five_steps_bring_every_direction_that_matters_between_068_and_121(rows, cols, spread):
    sigma = torch.logspace(0, -spread, 48, dtype=torch.float64)
    G, U, Vh = with_singular_values(sigma, rows, cols)
    # the singular value of each direction of G
    got = (U.mT @ newton_schulz(G.float()).double() @ Vh.mT).diag()
    matters = sigma / sigma.norm() >= 0.002
    assert matters.sum() > 24
    assert 0.68 <= got[matters].min() and got[matters].max() <= 1.21
    assert torch.linalg.svdvals(newton_schulz(G.float())).max() <= 1.21


def test_the_last_polynomial_of_a_list_is_repeated():
    first, last = polar_express()[:2]
    G = rand(12, 8, dtype=torch.float64)
    U, S, Vh = torch.linalg.svd(G, full_matrices=False)
    expected = U @ torch.diag(scalar_map(S / G.norm(), [first, last, last, last])) @ Vh
    torch.testing.assert_close(newton_schulz(G, steps=4, coefficients=[first, last]), expected, **EXACT)


def test_small_directions_grow_by_485_and_no_more():
    sigma = torch.tensor([1.0, 1e-3, 1e-4, 1e-5], dtype=torch.float64)
    G, U, Vh = with_singular_values(sigma, 8, 6)
    got = (U.mT @ newton_schulz(G) @ Vh.mT).diag()
    assert (got[1:] / sigma[1:]).max() <= 3.4445**5 and got[1] < 0.68
    assert got[3] == pytest.approx(3.4445**5 * 1e-5, rel=1e-3)


def test_more_steps_do_not_converge_but_stay_in_the_band():
    G = rand(32, 32, dtype=torch.float64)
    for steps in (10, 11, 30, 31):
        sigma = torch.linalg.svdvals(newton_schulz(G, steps))
        assert 0.68 < sigma.min() and sigma.max() < 1.21 and sigma.max() - sigma.min() > 0.2


def test_the_result_does_not_depend_on_the_scale_of_the_gradient():
    G = rand(16, 24)
    for scale in (1e-4, 1e4):
        torch.testing.assert_close(newton_schulz(G * scale), newton_schulz(G), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_a_stack_equals_its_matrices_one_by_one(dtype, atol):
    G = rand(2, 3, 12, 40, dtype=dtype)
    one_by_one = torch.stack([newton_schulz(g) for g in G.reshape(-1, 12, 40)]).reshape(G.shape)
    torch.testing.assert_close(newton_schulz(G), one_by_one, atol=atol, rtol=0)
    torch.testing.assert_close(newton_schulz(G.mT), one_by_one.mT, atol=atol, rtol=0)


def test_zeros_stay_zeros_and_a_nan_stays_in_its_matrix():
    G = rand(3, 4, 6)
    G[0] = 0
    G[1, 2, 2] = torch.nan
    out = newton_schulz(G)
    assert (out[0] == 0).all() and out[1].isnan().any()
    torch.testing.assert_close(out[2], newton_schulz(G[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_input_is_left_as_it_was_and_the_dtype_comes_back(dtype):
    G = rand(8, 8).to(dtype)
    before = G.clone()
    assert newton_schulz(G, dtype=dtype).dtype == dtype
    assert torch.equal(G, before)


class Operations(TorchDispatchMode):
    "Writes down what runs: the name, and what came out."

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ran.append((func.overloadpacket.__name__, out))
        return out


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_a_cpu_the_products_are_float32_whatever_the_gradients_are(grad):
    with Operations() as operations:
        newton_schulz(rand(8, 8).to(grad))
    of_products = {out.dtype for name, out in operations.ran if "mm" in name or "matmul" in name}
    assert of_products == {torch.float64 if grad == torch.float64 else torch.float32}


@pytest.mark.parametrize("hardware", [True, False])
def test_a_gpu_computes_in_bfloat16_only_if_it_has_it_in_hardware(hardware, monkeypatch):
    def supported(including_emulation=True):
        return hardware or including_emulation  # as torch answers: emulation counts unless one says otherwise

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    expected = torch.bfloat16 if hardware else torch.float32
    told = "is_bf16_supported() says yes for emulation too: ask it with including_emulation=False"
    assert newton_schulz_dtype(torch.device("cuda"), torch.float32) == expected, told
    assert newton_schulz_dtype(torch.device("mps"), torch.float32) == torch.float32


# --- the optimizer


@pytest.mark.parametrize("nesterov", [True, False])
def test_one_step_does_what_the_rule_says(nesterov):
    "By hand, with the exact SVD; each line of the rule has a message of its own."
    p, grad, buf = (rand(16, 4, seed=seed, dtype=torch.float64) for seed in range(3))
    mean = 0.9 * buf + 0.1 * grad
    U, S, Vh = torch.linalg.svd(0.9 * mean + 0.1 * grad if nesterov else mean, full_matrices=False)
    update = U @ torch.diag(scalar_map(S / S.norm(), [QUINTIC] * 5)) @ Vh

    def step(**settings):
        "How far the matrix moves, in units of the rate; and the momentum after it."
        weights, given, momentum = p.clone(), grad.clone(), buf.clone()
        muon_update([weights], [given], [momentum], lr=0.5, momentum=0.9, nesterov=nesterov, **settings)
        assert torch.equal(given, grad), "the gradient was changed"
        return (p - weights) / 0.5, momentum

    moved, momentum = step()
    close = partial(torch.testing.assert_close, **EXACT)
    close(momentum, mean, msg="the momentum is not 0.9 of the old one and 0.1 of the gradient")
    mixed = "0.9 of the new momentum and 0.1 of the gradient" if nesterov else "the new momentum"
    told = f"the step is not along Newton-Schulz of {mixed}"
    close(moved / moved.norm(), update / update.norm(), msg=told)
    scale = (moved.norm() / update.norm()).item()
    assert scale == pytest.approx(2), f"a step of a (16, 4) matrix is scaled by 2, not by {scale:.3g}"
    decayed, _ = step(weight_decay=0.2)
    close(decayed - moved, 0.2 * p, msg="a decay of 0.2 takes lr * 0.2 of the old matrix off, and no more")


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale, theirs", [("shape", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_are_nearly_torchs_muon(nesterov, scale, theirs, weight_decay):
    "In any order of operations; test_bits.py has the package's, which rounds as torch's does."
    for p, q, t in fifty_steps_of_muon(Muon, nesterov, scale, theirs, weight_decay):
        assert (p - q).norm() < 0.04 * (q - t).norm()  # bfloat16 has eight bits


def test_float32_products_make_nearly_the_same_step_as_torchs_bfloat16():
    p, q = nn.Parameter(torch.zeros(48, 48)), nn.Parameter(torch.zeros(48, 48))
    p.grad = rand(48, 48)
    q.grad = p.grad.clone()
    Muon([p], lr=1.0).step()
    torch.optim.Muon([q], lr=1.0).step()
    assert 0 < (p - q).norm() / q.norm() < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_nesterov_the_momentum_is_still_the_running_mean(dtype):
    p, mean = nn.Parameter(torch.zeros(8, 8, dtype=dtype)), torch.zeros(8, 8)
    opt = Muon([p], lr=0.1, momentum=0.5, nesterov=False, dtype=dtype)
    for step in range(5):
        p.grad = rand(8, 8, seed=step).to(dtype)
        mean.lerp_(p.grad.float(), 0.5)
        opt.step()
    torch.testing.assert_close(opt.state[p]["momentum_buffer"].float(), mean, atol=0.03, rtol=0)


def test_matrices_of_one_size_but_different_shapes_train_as_they_do_alone():
    shapes = [(6, 4), (4, 6), (3, 8), (6, 4)]  # 24 numbers each
    together, alone = ([nn.Parameter(rand(*s, seed=i)) for i, s in enumerate(shapes)] for _ in range(2))
    optimizers = [Muon(together)] + [Muon([p]) for p in alone]
    for step in range(5):
        for i, (p, q) in enumerate(zip(together, alone)):
            p.grad = rand(*p.shape, seed=10 * step + i)
            q.grad = p.grad.clone()
        for opt in optimizers:
            opt.step()
    for p, q in zip(together, alone):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)


def test_the_class_and_the_rule_on_tensors_are_the_same():
    p, w, buf = nn.Parameter(rand(5, 3)), rand(5, 3), torch.zeros(5, 3)
    opt = Muon([p], lr=0.1, weight_decay=0.2)
    for step in range(4):
        p.grad = rand(5, 3, seed=step)
        muon_update([w], [p.grad.clone()], [buf], lr=0.1, weight_decay=0.2)
        opt.step()
    assert torch.equal(p.detach(), w)


def test_decay_uses_the_rate_without_the_scale_of_the_shape():
    p = nn.Parameter(torch.ones(64, 4))
    p.grad = torch.zeros(64, 4)
    Muon([p], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((64, 4), 0.95))


def test_the_scales_do_what_they_promise():
    for shape in [(256, 64), (64, 64), (64, 256)]:
        O = newton_schulz(rand(*shape), steps=12, coefficients=polar_express(12))
        out = O @ rand(shape[1], 500) * update_scale(*shape, "shape")
        assert out.square().mean().sqrt() == pytest.approx(1, abs=0.03)  # unit inputs, unit outputs
        assert (O * update_scale(*shape, "rms")).square().mean().sqrt() == pytest.approx(0.2, abs=0.004)


def test_it_keeps_one_buffer_a_matrix():
    p = nn.Parameter(rand(6, 6))
    p.grad = rand(6, 6)
    opt = Muon([p])
    opt.step()
    assert [t.shape for t in opt.state[p].values()] == [p.shape]


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_that_must_not_count_changes_nothing_and_others_change_as_without_the_question(nesterov):
    weights, bufs = [rand(6, 4), rand(6, 4, seed=1)], [rand(6, 4, seed=2), rand(6, 4, seed=3)]
    before = copy.deepcopy((weights, bufs))
    bad = [rand(6, 4, seed=4), torch.full((6, 4), torch.nan)]
    settings = dict(lr=0.1, weight_decay=0.5, nesterov=nesterov)
    muon_update(weights, bad, bufs, **settings, found_inf=torch.ones(()))
    assert all(torch.equal(t, old) for t, old in zip(weights + bufs, before[0] + before[1]))
    good = [rand(6, 4, seed=4), rand(6, 4, seed=5)]
    muon_update(weights, good, bufs, **settings, found_inf=torch.zeros(()))
    muon_update(before[0], good, before[1], **settings)
    assert all(torch.equal(t, other) for t, other in zip(weights + bufs, before[0] + before[1]))


def test_only_a_step_that_may_be_left_out_makes_copies():
    "For a small matrix on a GPU each operation takes as long as its launch, and ZeRO's step always counts."
    counts = []
    for found_inf in (None, torch.zeros(())):
        weights, grads, bufs = ([rand(6, 4, seed=2 * i), rand(6, 4, seed=2 * i + 1)] for i in range(3))
        with Operations() as operations:
            muon_update(weights, grads, bufs, lr=0.1, found_inf=found_inf)
        counts.append(Counter(name for name, _ in operations.ran))
    sure, unsure = counts
    assert not sure.keys() & {"clone", "copy_", "where"}
    # of each momentum and of each matrix
    assert unsure - sure == {"clone": 4, "where": 4, "ne": 4}


@pytest.mark.parametrize("count", [1, 8])
def test_a_step_that_may_be_left_out_takes_no_more_memory(count):
    weights = [nn.Parameter(rand(64, 64, seed=i)) for i in range(count)]
    for p in weights:
        p.grad = rand(64, 64)
    opt = Muon(weights)
    opt.step()
    found_inf = torch.zeros(())
    guarded = peak_bytes(lambda: opt.step(found_inf=found_inf))
    assert guarded == peak_bytes(opt.step)


def test_parameters_without_gradient_are_left_alone_and_a_closure_is_called():
    p, q = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    opt = Muon([p, q], weight_decay=0.1)

    def closure():
        loss = p.square().sum()
        loss.backward()
        return loss

    assert opt.step(closure) == 9
    assert torch.equal(q.detach(), torch.ones(3, 3)) and not torch.equal(p.detach(), torch.ones(3, 3))


@pytest.mark.parametrize(
    "bad", [dict(lr=-1), dict(momentum=1.0), dict(weight_decay=-0.1), dict(steps=0), dict(scale="big")]
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        Muon([nn.Parameter(torch.ones(2, 2))], **bad)


@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)], ids=str)
def test_what_is_not_a_matrix_is_refused(shape):
    with pytest.raises(UserError, match="not a matrix"):
        Muon([nn.Parameter(torch.ones(shape))])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_five_steps_land_in_the_band_and_the_optimizer_equals_torchs():
    G, U, Vh = with_singular_values(torch.logspace(0, -2, 48, dtype=torch.float64), 64, 48)
    got = (U.mT @ newton_schulz(G.float().cuda()).cpu().double() @ Vh.mT).diag()
    assert 0.6 < got.min() and got.max() < 1.3  # bfloat16 rounds the edges of the band
    p, q = (nn.Parameter(rand(64, 64).cuda()) for _ in range(2))
    ours, torchs = Muon([p], lr=0.02, dtype=torch.bfloat16), torch.optim.Muon([q], lr=0.02, weight_decay=0.0)
    for step in range(50):
        p.grad = rand(64, 64, seed=step).cuda()
        q.grad = p.grad.clone()
        ours.step()
        torchs.step()
    torch.testing.assert_close(p, q, atol=5e-3, rtol=0)


# --- a model's parameters


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("split_qkv", [True, False])
def test_every_parameter_of_every_variant_is_in_exactly_one_group(name, split_qkv):
    model = GPT(VARIANTS[name])
    muon, adamw = split(groups_of(model, split_qkv=split_qkv))
    grouped = [id(p) for g in muon + adamw for p in g["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    in_muon = {names[id(p)] for g in muon for p in g["params"]}
    assert in_muon == {n for n, p in model.named_parameters() if n.startswith("h.") and p.dim() == 2}
    for group in adamw:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0)


def test_frozen_parameters_are_in_no_group_and_no_group_is_empty():
    model = GPT(VARIANTS["llama"])
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" in name or "norm" in name or "ln_" in name)
    muon, adamw = split(groups_of(model))
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    assert len(muon) == 1 and len(muon[0]["params"]) == 6
    assert len(adamw) == 1 and len(adamw[0]["params"]) == len(vectors) > 0


def test_the_groups_say_everything_and_those_of_adamw_are_left_as_they_were():
    model = GPT(VARIANTS["llama"])
    rest = adamw_groups(model, 0.004, (0.8, 0.9), 1e-6, 0.3)
    before = [dict(group) for group in rest]
    groups = muon_groups(model, rest, 0.03, weight_decay=0.2, momentum=0.5)
    assert rest == before
    muon, adamw = split(groups)
    assert groups == muon + adamw
    assert all((g["lr"], g["weight_decay"], g["momentum"]) == (0.03, 0.2, 0.5) for g in muon)
    assert all((g["lr"], g["betas"], g["eps"]) == (0.004, (0.8, 0.9), 1e-6) for g in adamw)
    assert [g["weight_decay"] for g in adamw] == [0.3, 0.0]


def test_groups_of_an_unknown_kind_are_refused():
    with pytest.raises(UserError, match="sgd"):
        make_optimizer([dict(kind="sgd", params=[nn.Parameter(torch.ones(2))])])


def test_groups_of_adamw_alone_make_adamw():
    model = GPT(VARIANTS["llama"])
    optimizer, line = make_optimizer(adamw_groups(model, 0.01), "own")
    assert type(optimizer).__name__ == line.split()[0] == "AdamW" and "(own)" in line


def test_a_fused_matrix_trains_as_its_parts_would_alone():
    config = GPTConfig.llama(**{**SMALL, "n_head": 4}, n_kv_head=2)
    model = GPT(config)
    group = next(g for g in groups_of(model) if "split" in g)
    assert tuple(group["split"]) == (16, 8, 8) and len(group["params"]) == 2
    fused = group["params"][0]
    parts = [nn.Parameter(t.clone()) for t in fused.detach().split(group["split"])]
    a, b = Muon([group]), Muon(parts)
    for step in range(5):
        fused.grad = rand(*fused.shape, seed=step)
        for part, grad in zip(parts, fused.grad.split(group["split"])):
            part.grad = grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts]), atol=1e-5, rtol=0)


def test_the_combined_optimizer_steps_as_its_parts_would():
    a = GPT(VARIANTS["modern"])
    b = copy.deepcopy(a)
    both, line = make(a, 0.01, 0.003)
    muon, adamw = split(groups_of(b, 0.01, 0.003))
    parts = [Muon(muon), make_adamw(adamw)[0]]
    for seed in range(3):
        train_steps(a, both, [seed])
        x = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(seed))
        b.zero_grad()
        b(x, x.roll(-1, 1))[1].backward()
        for opt in parts:
            opt.step()
    for p, q in zip(a.parameters(), b.parameters()):
        assert torch.equal(p, q)
    assert "float32" in line and "8" in line and "fused" in line


def test_a_schedule_reaches_both_optimizers_through_the_groups():
    model = GPT(VARIANTS["llama"])
    opt, _ = make(model, 0.02, 0.004)
    assert isinstance(opt, torch.optim.Optimizer)
    assert {g["lr"] for g in opt.param_groups} == {0.02, 0.004}
    before = [p.detach().clone() for p in model.parameters()]
    for group in opt.param_groups:
        group["lr"] *= 0.0
    train_steps(model, opt, [0])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_been():
    model = GPT(VARIANTS["modern"])
    opt, _ = make(model)
    train_steps(model, opt, range(3))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(model)
    again, _ = make(other, 0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    for m, o in ((model, opt), (other, again)):
        for group in o.param_groups:  # after loading, too, a change of a group must reach the optimizers
            group["lr"] *= 0.5
        train_steps(m, o, range(3, 6))
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


def test_a_checkpoint_holds_it(tmp_path):
    config = GPTConfig.llama(vocab_size=257, block_size=8, n_layer=1, n_head=2, n_embd=16)
    model = GPT(config)
    opt, _ = make(model)
    train_steps(model, opt, range(2))
    save_checkpoint(tmp_path / "step_2", model, ByteTokenizer(), opt, dict(step=2))
    other = GPT(config)
    again, _ = make(other)
    assert load_training_state(tmp_path / "step_2", other, again)["step"] == 2
    train_steps(model, opt, range(2, 4))
    train_steps(other, again, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


def test_another_models_state_is_refused_before_anything_changes():
    opt, _ = make(GPT(VARIANTS["llama"]))
    other, _ = make(GPT(VARIANTS["gpt2"]))
    with pytest.raises(ValueError):
        opt.load_state_dict(other.state_dict())


@pytest.mark.parametrize("Scaler", [torch.amp.GradScaler, LossScaler])
def test_a_loss_scaler_unscales_it_once_and_skips_its_step_on_overflow(Scaler):
    model = GPT(VARIANTS["modern"])
    opt, _ = make(model)
    scaler = Scaler("cpu", init_scale=1024.0)
    x = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
    loss = model(x, x)[1]
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    for p, g in zip(model.parameters(), grads):
        torch.testing.assert_close(p.grad, g, atol=1e-6, rtol=1e-5)
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(opt)
    scaler.update()
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
    before = [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    scaler.scale(model(x, x)[1]).backward()
    next(model.h[0].mlp.parameters()).grad[0, 0] = torch.inf
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize("kind", ["muon", "combined"])
def test_a_step_that_must_not_count_leaves_weights_and_state_and_another_counts_in_full(kind):
    model = GPT(VARIANTS["llama"])
    opt = Muon(split(groups_of(model))[0]) if kind == "muon" else make(model)[0]
    train_steps(model, opt, [0])
    numbers = [*model.parameters(), *(t for state in opt.state.values() for t in state.values())]
    before = [t.detach().clone() for t in numbers]
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))[1].backward()
    good = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.fill_(torch.inf)
    opt.step(found_inf=torch.ones(()))
    assert all(torch.equal(t, old) for t, old in zip(numbers, before))
    twin, twins_opt = copy.deepcopy((model, opt))
    for p, q, grad in zip(model.parameters(), twin.parameters(), good):
        p.grad, q.grad = grad, grad.clone()
    opt.step(found_inf=torch.zeros(()))
    twins_opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    assert not all(torch.equal(t, old) for t, old in zip(numbers, before))


def test_the_combined_optimizer_asks_a_closure_once():
    model = GPT(VARIANTS["modern"])
    asked = []
    assert make(model)[0].step(lambda: asked.append(1) or 7) == 7 and asked == [1]


def test_the_callers_groups_are_left_as_they_were():
    groups = groups_of(GPT(VARIANTS["modern"]))
    before = [dict(group) for group in groups]
    make_optimizer(groups)
    assert [group.keys() for group in groups] == [group.keys() for group in before]


def test_a_group_added_later_is_refused_because_nobody_would_train_it():
    muon = Muon([nn.Parameter(torch.ones(2, 2))])
    opt = CombinedOptimizer(muon, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(UserError):
        opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))]))


def test_a_copy_of_model_and_optimizer_trains_on_as_the_original():
    model = GPT(VARIANTS["modern"])
    opt, _ = make(model)
    opt.optimizers[0].dtype = torch.float64
    train_steps(model, opt, range(2))
    other, again = copy.deepcopy((model, opt))
    assert again.optimizers[0].dtype == torch.float64
    for m, o in ((model, opt), (other, again)):
        train_steps(m, o, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)


def test_a_model_with_frozen_blocks_is_refused_with_a_remedy():
    model = GPT(VARIANTS["gpt2"])
    model.h.requires_grad_(False)
    with pytest.raises(UserError, match="AdamW"):
        make(model)
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    model.wte.requires_grad_(False)
    model.wpe.requires_grad_(False)
    with pytest.raises(UserError, match="AdamW"):  # nothing is left for AdamW
        make(model)


# --- who updates which matrix


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 8, 9, 16, 31])
def test_each_matrix_has_one_owner_nothing_is_padded_and_no_rank_has_much_more_than_its_share(
    count, world_size
):
    for sizes in ([5] * count, [1 + (7 * i) % 11 for i in range(count)]):
        owner = matrix_owners(sizes, world_size)
        assert len(owner) == count and set(owner) <= set(range(world_size))
        load = [sum(s for s, o in zip(sizes, owner) if o == rank) for rank in range(world_size)]
        assert sum(load) == sum(sizes)
        assert max(load) <= sum(sizes) / world_size + max(sizes, default=0)
        if len(set(sizes)) == 1:
            assert max(load) == -(-count // world_size) * sizes[0]  # a whole multiple needs no extra round


def test_large_matrices_are_placed_first_so_that_small_ones_fill_the_gaps():
    assert matrix_owners([1, 1, 2], 2) == [1, 1, 0]


def test_gpt2_smalls_matrices_are_shared_evenly():
    sizes = [768 * n for _ in range(12) for n in (2304, 768, 3072, 3072)]
    for world_size in (2, 3, 4):
        owner = matrix_owners(sizes, world_size)
        load = [sum(s for s, o in zip(sizes, owner) if o == rank) for rank in range(world_size)]
        assert max(load) <= 1.02 * sum(sizes) / world_size


def test_a_loaded_state_does_not_change_which_adamw_runs():
    model = GPT(GPTConfig.gpt2(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=16))
    saved, _ = make_optimizer(groups_of(model), "fused")
    loaded, _ = make_optimizer(groups_of(model), "foreach")
    loaded.load_state_dict(saved.state_dict())
    adamw = loaded.optimizers[1].param_groups
    assert adamw and all(group["foreach"] and not group["fused"] for group in adamw)


def test_a_run_goes_on_with_any_other_implementation_of_adamw():
    model = GPT(GPTConfig.gpt2(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=16))
    x = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))

    def losses(implementations):
        "A step with each, which takes over the state of the one before."
        mine, found, state = copy.deepcopy(model), [], None
        for implementation in implementations:
            opt, _ = make_optimizer(groups_of(mine), implementation)
            if state is not None:
                opt.load_state_dict(state)
            loss = mine(x, x)[1]
            loss.backward()
            opt.step()
            opt.zero_grad()
            found.append(loss.item())
            state = copy.deepcopy(opt.state_dict())
        return found

    wanted = losses(["for-loop"] * 5)
    for order in (["own", "fused", "own", "foreach", "own"], ["fused", "own", "for-loop", "own", "fused"]):
        assert losses(order) == pytest.approx(wanted, rel=1e-5)
