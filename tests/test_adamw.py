import copy

import pytest
import torch
from torch import nn

from tinygpt.adamw import AdamW, adamw_update, make_adamw, param_groups
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError

SMALL = dict(vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
VARIANTS = {
    "gpt2": GPTConfig.gpt2(**SMALL),
    "llama": GPTConfig.llama(**SMALL, n_kv_head=1),
    "llama tied": GPTConfig.llama(**{**SMALL, "tie_weights": True}),
    "modern": GPTConfig.modern(**SMALL),
}


@pytest.mark.parametrize("eps", [1e-3, 1e-8, 1e-10])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thousand_steps_equal_torchs_bit_for_bit(eps, weight_decay, dtype):
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=g, dtype=dtype) for shape in [(3, 4), (5,), (1,)]]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    settings = dict(lr=0.01, betas=(0.9, 0.95), eps=eps, weight_decay=weight_decay)
    a, b = AdamW(ours, **settings), torch.optim.AdamW(theirs, **settings, foreach=False)
    for step in range(1000):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=g, dtype=dtype) * 10.0 ** (step % 7 - 5)  # from tiny to large
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        assert torch.equal(p, q)


def test_the_first_step_has_the_size_of_the_learning_rate_whatever_the_gradient():
    for g in (1e-7, 1.0, 1e5):
        p = torch.zeros(1)
        adamw_update(p, torch.tensor([g]), torch.zeros(1), torch.zeros(1), 1, lr=0.1, eps=0.0)
        assert p.item() == pytest.approx(-0.1, rel=1e-5)


def test_decay_is_decoupled_from_the_gradients_size():
    for g in (1e-3, 1e3):
        with_decay, without = torch.ones(1), torch.ones(1)
        for p, decay in ((with_decay, 0.5), (without, 0.0)):
            adamw_update(p, torch.tensor([g]), torch.zeros(1), torch.zeros(1), 1, lr=0.1, weight_decay=decay)
        assert (without - with_decay).item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_of_every_variant_is_in_exactly_one_group(name):
    model = GPT(VARIANTS[name])
    groups = param_groups(model, 0.1)
    grouped = [id(p) for g in groups for p in g["params"]]
    assert len(grouped) == len(set(grouped)) and set(grouped) == {id(p) for p in model.parameters()}
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() >= 2 else 0.0)


def test_a_tied_weight_is_grouped_once_and_a_frozen_one_not_at_all():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    groups = param_groups(model)
    assert len(groups) == 1 and len(groups[0]["params"]) == 1


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "own"])
def test_all_implementations_take_the_same_steps_and_say_which_runs(implementation):
    torch.manual_seed(0)
    model = GPT(VARIANTS["gpt2"])
    reference = copy.deepcopy(model)
    opt, name = make_adamw(param_groups(model), 1e-2, implementation=implementation)
    assert name == ("fused" if implementation == "auto" else implementation)
    if name != "own":
        assert opt.defaults[name] is True
    oracle = torch.optim.AdamW(param_groups(reference), lr=1e-2, betas=(0.9, 0.95), foreach=False)
    for _ in range(50):
        for p, q in zip(model.parameters(), reference.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        opt.step()
        oracle.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q)


def test_parameters_without_gradient_are_left_alone():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = AdamW([p, q], lr=0.1)
    p.grad = torch.ones(2)
    opt.step()
    assert torch.equal(q.detach(), torch.ones(2)) and not torch.equal(p.detach(), torch.ones(2))


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


@pytest.mark.parametrize("bad", [dict(lr=-1), dict(betas=(1.0, 0.9)), dict(eps=-1e-8), dict(weight_decay=-0.1)])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(UserError):
        AdamW([nn.Parameter(torch.ones(1))], **bad)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(UserError, match="quick"):
        make_adamw([dict(params=[nn.Parameter(torch.ones(1))])], 0.1, implementation="quick")
