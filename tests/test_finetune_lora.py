"""LoRA: nothing changes before the first step, only A and B train, merged equals unmerged, peft agrees."""

import copy
import sys

import pytest
import torch

from tinygpt.finetune.lora import LowRank, NewRows, add_lora, merge_lora
from tinygpt.model import GPT, GPTConfig, KVCache
from tinygpt.support import UserError

SMALL = dict(vocab_size=40, block_size=16, n_layer=2, n_head=2, n_embd=16)


def make(preset=GPTConfig.llama, **more):
    torch.manual_seed(0)
    model = GPT(preset(**SMALL, **more))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture
def model():
    return make()


X = torch.randint(40, (3, 10), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(X)[0]


def some_training(model, params, steps=3):
    optimizer = torch.optim.SGD(params, lr=0.5)
    for _ in range(steps):
        model(X, X.roll(-1, 1))[1].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("preset", [GPTConfig.llama, GPTConfig.gpt2, GPTConfig.modern])
def test_nothing_changes_at_first_and_merged_equals_unmerged_afterwards(preset):
    model = make(preset)
    before = logits(model)
    names = set(model.state_dict())
    params = add_lora(model, rank=3, alpha=6.0, new_tokens=[38, 39])
    assert torch.equal(logits(model), before)
    some_training(model, params)
    after = logits(model)
    assert (after - before).abs().max() > 0.05
    merge_lora(model)
    torch.testing.assert_close(logits(model), after)
    assert set(model.state_dict()) == names and type(model.h[0].attn.c_attn) is torch.nn.Linear
    assert all(p.requires_grad for p in model.parameters())
    plain = GPT(model.config)  # a checkpoint that any command opens
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(plain), logits(model))


def test_only_what_was_added_trains(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params = add_lora(model, rank=2, targets=("c_attn", "c_proj"), new_tokens=[39])
    added = {id(p) for p in params}
    assert {id(p) for p in model.parameters() if p.requires_grad} == added
    # two layers of c_attn, attention's and the MLP's c_proj; two tables of one row
    matrices = [m for n, m in make().named_modules() if n.split(".")[-1] in ("c_attn", "c_proj")]
    assert sum(p.numel() for p in params) == sum(2 * sum(m.weight.shape) for m in matrices) + 2 * 16
    some_training(model, params)
    for name, p in model.named_parameters():
        if name.endswith("original"):
            assert torch.equal(p, before[name.replace("parametrizations.weight.original", "weight")])
        elif id(p) not in added:
            assert torch.equal(p, before[name])
    with torch.no_grad():
        rows = model.wte.weight - before["wte.weight"]
    assert (rows[:39] == 0).all() and (rows[40:] == 0).all() and (rows[39] != 0).any()


def test_the_gradients_are_those_of_the_papers_formula():
    torch.manual_seed(0)
    W, x = torch.randn(5, 7, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64)
    added = LowRank((5, 7), 3, alpha=6.0).double()
    torch.nn.init.normal_(added.B)
    (x @ added(W).T).pow(2).sum().backward()
    A, B = (p.detach().clone().requires_grad_() for p in (added.A, added.B))
    (x @ W.T + 2.0 * (x @ A.T) @ B.T).pow(2).sum().backward()  # h = W x + (alpha / r) B A x
    torch.testing.assert_close(added.A.grad, A.grad)
    torch.testing.assert_close(added.B.grad, B.grad)


def test_a_cache_reads_the_additions_too(model):
    params = add_lora(model, rank=2)
    some_training(model, params)
    cache = KVCache(model.config, len(X))
    with torch.no_grad():
        parts = [model(part, cache=cache)[0] for part in X.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model))


def test_a_seed_gives_the_same_first_numbers_and_leaves_torchs_generator_alone():
    models = [make() for _ in range(3)]
    state = torch.get_rng_state()
    found = [add_lora(m, rank=2, seed=s) for m, s in zip(models, (1, 1, 2))]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, found[0], found[1])) and not torch.equal(found[0][0], found[2][0])


def test_new_rows_count_in_a_tied_head_once():
    model = make(GPTConfig.gpt2)
    params = add_lora(model, rank=1, targets=("c_attn",), new_tokens=[3, 5])
    assert [p.shape for p in params if p.shape[0] == 2 and p.shape[1] == 16] == [torch.Size([2, 16])]
    weight = torch.zeros(6, 16)
    rows = NewRows([3, 5], 16)
    torch.nn.init.ones_(rows.add)
    assert rows(weight).sum(1).tolist() == [0, 0, 0, 16, 0, 16]


def test_what_cannot_be_is_told(model):
    with pytest.raises(UserError, match="targets has c_atn: no matrix.*; rank = 0: choose 1"):
        add_lora(model, rank=0, targets=("c_atn",))
    for token in (-1, 40):  # 40 is a row of padding
        with pytest.raises(UserError, match=f"new_tokens has {token}: choose ids from 0 to 39"):
            add_lora(model, new_tokens=[3, token])
    with pytest.raises(UserError, match="targets has c_atn: no matrix is called so"):
        add_lora(model, targets=("c_atn", "c_proj"))  # one of them is there
    with pytest.raises(UserError, match="targets is empty"):
        add_lora(model, targets=())
    for alpha in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=f"alpha = {alpha}: a finite number above 0"):
            add_lora(model, alpha=alpha)
    assert all(p.requires_grad for p in model.parameters())  # what is refused changes nothing
    add_lora(model)
    with pytest.raises(UserError, match="additions already: merge_lora"):
        add_lora(model)


def test_peft_adds_the_same_on_the_same_numbers(model):
    peft = pytest.importorskip("peft")
    theirs = copy.deepcopy(model)
    params = add_lora(model, rank=4, alpha=12.0, targets=("c_attn", "c_proj"))
    some_training(model, params)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["c_attn", "c_proj"], lora_dropout=0.0)
    theirs = peft.inject_adapter_in_model(config, theirs)
    for name, module in theirs.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            added = model.get_submodule(name).parametrizations.weight[0]
            with torch.no_grad():
                module.lora_A["default"].weight.copy_(added.A)
                module.lora_B["default"].weight.copy_(added.B)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-5, atol=1e-5)
    trained = {n.split(".lora_")[0] for n, p in theirs.named_parameters() if p.requires_grad}
    ours = {n.split(".parametrizations")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == ours
    assert "peft" in sys.modules
