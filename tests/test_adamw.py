import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_runs import STEPS, change_over, fifty_steps, many_steps, with_gradients

from tinygpt.adamw import (
    DEFAULTS,
    IMPLEMENTATIONS,
    ROLES,
    AdamW,
    adamw_groups,
    adamw_update,
    implementation_of,
    make_adamw,
    parameter_roles,
    time_implementations,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError

SMALL = dict(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "gpt2 without biases": GPTConfig.gpt2(**SMALL, bias=False),
    "gpt2 untied": GPTConfig.gpt2(**SMALL, tie_weights=False),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=1),
    "llama tied": GPTConfig.llama(**SMALL, tie_weights=True),
    "modern": GPTConfig.modern(**SMALL),
    "all at once": GPTConfig.modern(
        **SMALL, position="learned", norm="layernorm", mlp="swiglu", bias=True, n_kv_head=1
    ),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


class Operations(TorchDispatchMode):
    "The names of the operations sent off inside it."

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


# ---- the rule: first what shows one mistake alone, for learn mode reports the first test that fails


def test_the_weights_and_both_means_are_changed_in_place_and_the_gradient_is_not():
    p, g, m, v = (torch.full((1,), x) for x in (1.0, 2.0, 0.0, 0.0))
    adamw_update(p, g, m, v, 1, lr=0.1)
    assert (m.item(), v.item()) == pytest.approx((0.1 * 2, 0.05 * 2**2))
    assert p.item() != 1 and g.item() == 2


def test_the_first_step_has_the_size_of_the_learning_rate_whatever_the_gradient():
    for g in (1e-7, 1.0, 1e5):
        p = torch.zeros(1)
        adamw_update(p, torch.tensor([g]), torch.zeros(1), torch.zeros(1), 1, lr=0.1, eps=0.0)
        assert p.item() == pytest.approx(-0.1, rel=1e-5)


@pytest.mark.parametrize("eps", [1e-3, 1.0, 1e-10])
def test_a_constant_gradient_gives_steps_of_a_constant_size_at_any_eps(eps):
    "With eps before the bias correction it does not."
    g = torch.full((1,), 0.01, dtype=torch.float64)
    p, m, v = torch.zeros(3, 1, dtype=torch.float64)
    sizes = []
    for t in range(1, 30):
        before = p.item()
        adamw_update(p, g, m, v, t, lr=0.1, eps=eps)
        sizes.append(before - p.item())
    assert sizes == pytest.approx([0.1 * 0.01 / (0.01 + eps)] * 29, rel=1e-9)


def test_decay_is_decoupled_from_the_gradients_size():
    for g in (1e-3, 1e3):
        with_decay, without = torch.ones(1), torch.ones(1)
        for p, decay in ((with_decay, 0.5), (without, 0.0)):
            adamw_update(p, torch.tensor([g]), torch.zeros(1), torch.zeros(1), 1, lr=0.1, weight_decay=decay)
        assert (without - with_decay).item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("eps", [10.0**-k for k in range(3, 11)])
def test_three_hundred_steps_equal_torchs(eps, weight_decay, dtype):
    "In any order of operations; test_bits.py has the package's, which gives the same bits."
    close = STEPS * torch.finfo(dtype).eps  # a rounding in each step
    for p, q in many_steps(AdamW, eps, weight_decay, dtype):
        torch.testing.assert_close(p, q, rtol=close, atol=close)


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999), (0.0, 0.95), (0.9, 0.0)], ids=str)
def test_other_betas_equal_torchs_too(betas):
    p, q = fifty_steps(AdamW, betas, torch.float32)
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def textbook(p, gradients, lr, beta1, beta2, eps, decay):
    "Algorithm 2 of Loshchilov and Hutter, on one number in Python."
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat = m / (1 - beta1**t)
        v_hat = v / (1 - beta2**t)
        p = p - lr * (m_hat / (math.sqrt(v_hat) + eps) + decay * p)
    return p


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.floats(-2, 2),
    st.floats(0, 0.5),
    st.floats(0, 0.99),
    st.floats(0, 0.999),
    st.sampled_from([1e-3, 1e-8, 1e-10]),
    st.floats(0, 1),
)
def test_the_rule_is_the_papers(gradients, start, lr, beta1, beta2, eps, decay):
    p = torch.tensor([start], dtype=torch.float64)
    m, v = torch.zeros(2, 1, dtype=torch.float64)
    for t, g in enumerate(gradients, 1):
        adamw_update(p, torch.tensor([g], dtype=torch.float64), m, v, t, lr, (beta1, beta2), eps, decay)
    expected = textbook(start, gradients, lr, beta1, beta2, eps, decay)
    assert p.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.integers(-20, 20))
def test_without_eps_the_scale_of_the_loss_does_not_matter(k):
    ends = []
    for scale in (1.0, 2.0**k):
        p, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
        generator = torch.Generator().manual_seed(0)
        for t in range(1, 20):
            adamw_update(p, scale * torch.randn(4, generator=generator), m, v, t, lr=0.1, eps=0.0)
        ends.append(p)
    assert torch.equal(*ends)  # powers of two are exact


def test_no_weight_stays_beyond_one_over_the_decay():
    p, m, v = torch.tensor([5.0, -0.5]), torch.zeros(2), torch.zeros(2)
    for t in range(1, 2000):
        adamw_update(p, torch.tensor([-1.0, -1.0]), m, v, t, lr=0.01, weight_decay=0.5)
    torch.testing.assert_close(p, torch.tensor([2.0, 2.0]), atol=1e-3, rtol=0)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([(), (1,), (7,), (3, 5), (2, 3, 4)]), st.lists(st.floats(0, 1), max_size=4))
def test_shards_of_a_tensor_end_where_the_whole_ends(shape, cuts):
    torch.manual_seed(0)
    whole = torch.randn(shape)
    shards = whole.clone()
    n = whole.numel()
    m, v, ms, vs = (torch.zeros(shape) for _ in range(4))
    edges = [0, *sorted(round(c * n) for c in cuts), n]  # some shards are empty
    for t in range(1, 6):
        g = torch.randn(shape)
        adamw_update(whole, g, m, v, t, 0.01, weight_decay=0.1)
        for a, b in zip(edges, edges[1:]):
            adamw_update(*(x.view(-1)[a:b] for x in (shards, g, ms, vs)), t, 0.01, weight_decay=0.1)
    # vector instructions round otherwise at the edges of some CPUs
    torch.testing.assert_close(shards, whole, rtol=1e-6, atol=1e-7)


# ---- groups


@pytest.mark.parametrize(
    "frozen",
    [(), ("wte",), ("norm", "ln_"), ("c_attn", "lm_head")],
    ids=lambda f: f"{' '.join(f) or 'nothing'} frozen",
)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_of_every_variant_is_in_exactly_one_group(name, frozen):
    model = GPT(VARIANTS[name])
    for n, p in model.named_parameters():
        p.requires_grad_(not any(part in n for part in frozen))
    trained = [p for p in model.parameters() if p.requires_grad]
    for multipliers in ({}, dict(lr_multipliers={"matrix": 2.0}, decay_multipliers={"matrix": 0.5})):
        groups = adamw_groups(model, 1e-3, weight_decay=0.1, **multipliers)
        grouped = [id(p) for g in groups for p in g["params"]]
        assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in trained}
    for group in adamw_groups(model, 1e-3, weight_decay=0.1):
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0)


def test_a_tied_weight_is_grouped_once_and_a_frozen_one_not_at_all():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    groups = adamw_groups(model, 1e-3)
    assert len(groups) == 1 and len(groups[0]["params"]) == 1


def test_a_tied_weight_takes_one_step():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    optimizer, _ = make_adamw(adamw_groups(model, 0.1, eps=0.0, weight_decay=0.0))
    model[0].weight.grad = torch.ones(5, 4)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.1)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_role_is_what_its_name_says(name):
    model = GPT(VARIANTS[name])
    roles = parameter_roles(model)
    assert set(roles) == {n for n, _ in model.named_parameters()} and set(roles.values()) <= set(ROLES)
    embeddings = {"wte.weight"} if model.wpe is None else {"wte.weight", "wpe.weight"}
    heads = set() if model.lm_head is None else {"lm_head.weight"}
    assert {n for n, role in roles.items() if role == "embedding"} == embeddings
    assert {n for n, role in roles.items() if role == "head"} == heads
    for n, p in model.named_parameters():
        assert (roles[n] == "vector") == (p.dim() < 2)


def test_a_role_is_what_a_parameter_is_and_not_what_its_name_sounds_like():
    parts = dict(table=nn.Embedding(3, 2), wte=nn.Linear(2, 2), old_lm_head=nn.Linear(2, 2))
    model = nn.ModuleDict(dict(**parts, part=nn.ModuleDict(dict(lm_head=nn.Linear(2, 3)))))
    roles = {"table.weight": "embedding", "wte.weight": "matrix", "old_lm_head.weight": "matrix"}
    roles |= {"part.lm_head.weight": "head"}
    roles |= dict.fromkeys(("wte.bias", "old_lm_head.bias", "part.lm_head.bias"), "vector")
    assert parameter_roles(model) == roles


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_multipliers_reach_the_steps_of_every_implementation(implementation):
    model = GPT(VARIANTS["modern"])
    before = copy.deepcopy(model)
    groups = adamw_groups(
        model,
        0.01,
        eps=0.0,
        weight_decay=0.5,
        lr_multipliers={"embedding": 4.0, "head": 0.5},
        decay_multipliers={"embedding": 0.0, "vector": 1.0},
    )
    optimizer, _ = make_adamw(groups, implementation)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    rate = {"embedding": 0.04, "head": 0.005, "matrix": 0.01, "vector": 0.01}
    decay = {"embedding": 0.0, "head": 0.5, "matrix": 0.5, "vector": 0.5}
    roles = parameter_roles(model)
    for (n, p), q in zip(model.named_parameters(), before.parameters()):
        lr = rate[roles[n]]
        # the first step has the size of the rate
        torch.testing.assert_close(p.detach(), q.detach() * (1 - lr * decay[roles[n]]) - lr)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_group_says_everything_and_wins_over_the_arguments(implementation):
    settings = dict(lr=0.7, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    model = nn.Linear(2, 2, bias=False)
    groups = adamw_groups(model, **settings)
    assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == [dict(kind="adamw", **settings)]
    other = dict(params=[nn.Parameter(torch.ones(1))], eps=1e-5)
    optimizer, _ = make_adamw([*groups, other], implementation, lr=0.1)
    got = [{k: g[k] for k in settings} for g in optimizer.param_groups]
    assert got == [settings, dict(lr=0.1, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)]


def test_groups_are_the_same_whatever_the_decay():
    "A checkpoint's groups must match those of a run that continues it."
    model = GPT(VARIANTS["gpt2"])
    without, with_decay = (adamw_groups(model, 1e-3, weight_decay=decay) for decay in (0.0, 0.1))
    assert [len(g["params"]) for g in without] == [len(g["params"]) for g in with_decay]


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(lr_multipliers={"head": 2.0}), "trains no head"),
        (dict(lr_multipliers={"bias": 2.0}), "trains no bias"),
        (dict(decay_multipliers={"matrix": -1.0}), "matrix = -1.0"),
        (dict(lr_multipliers={"matrix": math.nan}), "matrix = nan"),
    ],
)
def test_multipliers_that_cannot_work_are_refused(bad, words):
    with pytest.raises(UserError, match=words):
        adamw_groups(GPT(VARIANTS["gpt2"]), 1e-3, **bad)


# ---- implementations


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_all_implementations_take_the_same_steps_and_say_which_runs(implementation):
    torch.manual_seed(0)
    model = GPT(VARIANTS["gpt2"])
    reference = copy.deepcopy(model)
    opt, name = make_adamw(adamw_groups(model, 1e-2), implementation)
    assert name == implementation_of(opt) == ("fused" if implementation == "auto" else implementation)
    oracle = torch.optim.AdamW(adamw_groups(reference, 1e-2), foreach=False)
    for step in range(50):
        with_gradients(model, step)
        with_gradients(reference, step)
        opt.step()
        oracle.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, gpu])])
@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_the_implementation_that_is_reported_is_the_one_that_runs(implementation, device):
    model = GPT(VARIANTS["modern"]).to(torch.device(device))  # a torch.device, which equals no string
    optimizer, name = make_adamw(adamw_groups(model, 1e-3), implementation)
    assert name == (DEFAULTS[device] if implementation == "auto" else implementation)
    with_gradients(model)
    with Operations() as sent:
        optimizer.step()
    marks = {"fused": "_fused_adamw_", "foreach": "_foreach_addcdiv_", "for-loop": "addcdiv_"}
    found = {mark for mark in marks.values() if mark in sent.names}
    # our own may use any operations, but on one tensor at a time
    assert found - {"addcdiv_"} == set() if name == "own" else found == {marks[name]}


def test_the_groups_say_what_runs_also_where_the_optimizer_was_made_with_other_flags():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    saved = torch.optim.AdamW([nn.Parameter(torch.ones(2))], foreach=True).state_dict()
    optimizer.load_state_dict(saved)  # with nothing to keep its own flags
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    with Operations() as sent:
        optimizer.step()
    assert "_foreach_addcdiv_" in sent.names and implementation_of(optimizer) == "foreach"


def test_a_checkpoint_that_was_loaded_is_what_it_was():
    saved = torch.optim.AdamW([nn.Parameter(torch.ones(2))], foreach=True).state_dict()
    before = copy.deepcopy(saved)
    optimizer, _ = make_adamw([nn.Parameter(torch.ones(2))], "for-loop")
    optimizer.load_state_dict(saved)
    assert saved == before and implementation_of(optimizer) == "for-loop"


@pytest.mark.parametrize("second", IMPLEMENTATIONS)
@pytest.mark.parametrize("first", IMPLEMENTATIONS)
def test_a_run_saved_under_one_implementation_goes_on_under_the_other(first, second):
    p, q, b, name, go_on = change_over(make_adamw, first, second)
    assert implementation_of(b) == name == second and b.param_groups[0]["lr"] == 0.01
    with Operations() as sent:
        go_on()
    assert ("_fused_adamw_" in sent.names) == (second == "fused")
    assert ("_foreach_addcdiv_" in sent.names) == (second == "foreach")
    for x, y in zip(p, q):
        torch.testing.assert_close(x, y)


def test_the_default_on_a_device_that_nobody_measured_is_the_plain_loop():
    p = nn.Parameter(torch.ones(2, device="meta"))
    assert make_adamw([p])[1] == "for-loop"


def test_timing_tries_every_implementation_and_leaves_the_tensors_alone():
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    timings = time_implementations(params, repeats=1)
    assert list(timings) == list(IMPLEMENTATIONS) and all(t.median > 0 for t in timings.values())
    assert all(p.grad is None and torch.equal(p, torch.ones_like(p)) for p in params)


@pytest.mark.cuda
@gpu
def test_on_a_gpu_all_four_implementations_can_be_timed():
    timings = time_implementations([torch.ones(256, 256, device="cuda") for _ in range(20)])
    print({name: timing.median / timings["for-loop"].median for name, timing in timings.items()})
    assert list(timings) == list(IMPLEMENTATIONS)


# ---- the class


def test_parameters_without_gradient_are_left_alone():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = AdamW([p, q], lr=0.1)
    p.grad = torch.ones(2)
    opt.step()
    assert torch.equal(q.detach(), torch.ones(2)) and q not in opt.state
    assert not torch.equal(p.detach(), torch.ones(2))


def test_a_parameter_that_skips_steps_counts_only_its_own():
    p = nn.Parameter(torch.zeros(1))
    opt = AdamW([p], lr=0.1, eps=0.0, weight_decay=0.0)
    for has_gradient in (False, False, True):
        p.grad = torch.ones(1) if has_gradient else None
        opt.step()
    assert p.item() == pytest.approx(-0.1)  # the bias correction of a first step


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned():
    p = nn.Parameter(torch.ones(1))
    opt = AdamW([p], lr=0.1)

    def closure():
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 1.0 and p.item() < 1


def test_state_survives_saving_and_loading():
    def steps(opt, p, n):
        for i in range(n):
            p.grad = torch.full((3,), float(i + 1))
            opt.step()

    p = nn.Parameter(torch.ones(3))
    opt = AdamW([p], lr=0.1)
    steps(opt, p, 3)
    q = nn.Parameter(p.detach().clone())
    other = AdamW([q], lr=0.5)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(opt, p, 3)
    steps(other, q, 3)
    assert torch.equal(p, q)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(lr=-1), "lr = -1"),
        (dict(lr=math.nan), "lr = nan"),
        (dict(betas=(1.0, 0.9)), "betas"),
        (dict(betas=(0.9, -0.1)), "betas"),
        (dict(betas=(0.9,)), "betas"),
        (dict(eps=-1e-8), "eps = -1e-08"),
        (dict(weight_decay=-0.1), "weight_decay = -0.1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_every_implementation(bad, words, implementation):
    with pytest.raises(UserError, match=words):
        make_adamw([nn.Parameter(torch.ones(1))], implementation, **bad)
    with pytest.raises(UserError, match=words):
        make_adamw(adamw_groups(nn.Linear(1, 1), **(dict(lr=0.1) | bad)), implementation)


def test_all_bad_settings_are_named_together():
    with pytest.raises(UserError) as error:
        AdamW([nn.Parameter(torch.ones(1))], lr=-1, betas=(0.9, 1.0), eps=-1, weight_decay=-0.1)
    for word in ("lr = -1", "betas = (0.9, 1.0)", "eps = -1", "weight_decay = -0.1"):
        assert word in str(error.value)


@pytest.mark.parametrize("implementation", ["auto", *IMPLEMENTATIONS])
def test_a_model_with_nothing_to_train_is_refused(implementation):
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UserError, match="no parameter to train"):
        make_adamw(adamw_groups(frozen, 0.1), implementation)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="quick"):
        make_adamw([nn.Parameter(torch.ones(1))], "quick")
