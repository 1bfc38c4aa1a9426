"""Initialization: what each scheme sets, first losses by closed form, growth with depth and width, meters."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.init import ActivationStats, init_weights, weight_std
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError

SCHEMES = ["torch", "normal", "gpt2", "zero", "mup"]


class Branch(nn.Module):
    "A residual branch as a transformer has it."

    def __init__(self, width):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.c_proj(F.relu(self.c_fc(self.ln(x))))


class Stack(nn.Module):
    def __init__(self, width=128, n_layer=4, vocab=100):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        # two additions a layer, as attention and MLP
        self.h = nn.ModuleList(Branch(width) for _ in range(2 * n_layer))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.norm(x))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_has_the_deviation_of_its_role_and_every_bias_and_norm_its_constant(scheme):
    model = init_weights(Stack(256, 6, 500), n_layer=6, scheme=scheme, generator=seeded())
    closed_forms = {
        "torch": (1, (3 * 256) ** -0.5, (3 * 1024) ** -0.5, (3 * 256) ** -0.5),
        "normal": (0.02, 0.02, 0.02, 0.02),
        "gpt2": (0.02, 0.02, 0.02 / math.sqrt(12), 0.02),
        "zero": (0.02, 0.02, 0, 0),
        "mup": (1, 1 / 16, 1 / 32 / math.sqrt(12), 1 / 256),
    }
    want = dict(zip(("wte", "c_fc", "c_proj", "lm_head"), closed_forms[scheme]))
    for name, p in model.named_parameters():
        role = name.split(".")[-2]
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(want[role], rel=0.02), name
            assert abs(p.mean().item()) < 0.02 * want[role] + 1e-12
        elif role in ("ln", "norm"):
            assert torch.equal(p, torch.full_like(p, 1.0 if name.endswith("weight") else 0.0)), name
        elif scheme == "torch":
            assert p.abs().max() <= (256 if role == "c_fc" else 1024) ** -0.5 and p.std() > 0
        else:
            assert not p.any(), name


def test_torchs_scheme_is_the_distribution_that_a_fresh_linear_has():
    ours = nn.Linear(300, 400)
    theirs = nn.Linear(300, 400)
    init_weights(nn.ModuleDict({"a": ours}), 1, "torch", generator=seeded())
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=0.02)
        assert a.std().item() == pytest.approx(b.std().item(), rel=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_number_that_was_there_before_survives(scheme):
    model = Stack()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    init_weights(model, 4, scheme)
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_generator_alone_decides_and_the_global_one_is_left_alone():
    before = torch.get_rng_state()
    a, b = (init_weights(Stack(), 4, generator=seeded(1)) for _ in range(2))
    torch.set_rng_state(before)
    Stack(), Stack()  # what the constructors drew
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))
    c = init_weights(Stack(), 4, generator=seeded(2))
    assert not torch.equal(a.wte.weight, c.wte.weight)
    state = torch.get_rng_state()
    init_weights(a, 4, generator=seeded(3))
    assert torch.equal(state, torch.get_rng_state())


def test_half_precision_weights_are_the_rounded_float32_ones():
    a = init_weights(Stack(), 4, generator=seeded())
    b = init_weights(Stack().bfloat16(), 4, generator=seeded())
    assert all(torch.equal(p.bfloat16(), q) for p, q in zip(a.parameters(), b.parameters()))


def test_a_layer_that_it_does_not_know_is_an_error_and_not_left_as_it_was():
    with pytest.raises(TypeError, match="conv.*Conv1d"):
        init_weights(nn.ModuleDict({"conv": nn.Conv1d(2, 2, 1)}), 1)


def test_unknown_schemes_and_empty_models_are_told_in_a_sentence():
    with pytest.raises(UserError, match="scheme = 'xavier'.*gpt2"):
        init_weights(Stack(), 4, scheme="xavier")
    with pytest.raises(UserError, match="n_layer = 0"):
        init_weights(Stack(), 0)


def test_a_role_or_a_scheme_that_is_not_known_gives_no_deviation():
    with pytest.raises(UserError, match="role = 'residuals' is not known.*residual"):
        weight_std("residuals", 64, 12)
    with pytest.raises(UserError, match="scheme = 'kaiming' is not known.*gpt2"):
        weight_std("hidden", 64, 12, "kaiming")


@given(n_layer=st.integers(1, 200), fan_in=st.integers(1, 20000))
def test_the_residual_scale_counts_two_additions_a_layer_and_no_width(n_layer, fan_in):
    assert weight_std("residual", fan_in, n_layer) == pytest.approx(0.02 / math.sqrt(2 * n_layer))
    assert weight_std("residual", fan_in, n_layer) == weight_std("residual", 1, n_layer)
    assert weight_std("hidden", fan_in, n_layer) == 0.02


@pytest.mark.parametrize("n_layer", [2, 8, 32])
def test_what_the_branches_add_to_the_stream_does_not_depend_on_the_depth(n_layer):
    added = {}
    for scheme in ("gpt2", "normal"):
        model = init_weights(Stack(128, n_layer), n_layer, scheme, generator=seeded())
        names = ["wte", f"h.{2 * n_layer - 1}"]
        with ActivationStats(model, names) as stats, torch.no_grad():
            model(torch.randint(100, (8, 32), generator=seeded(1)))
        first, last = stats.table(figure="std")[:, 0].tolist()
        added[scheme] = math.sqrt(last**2 - first**2)
    # a branch writes std 0.02·√(512·E[relu²]) with E[relu²] = 0.02²·128/2
    # and 2·n_layer of them add up like random steps
    one = 0.02 * math.sqrt(512 * 0.02**2 * 128 / 2)
    assert added["gpt2"] == pytest.approx(one, rel=0.15)
    assert added["normal"] == pytest.approx(one * math.sqrt(2 * n_layer), rel=0.15)


@pytest.mark.parametrize("variant", ["llama", "modern"])
def test_the_first_loss_of_a_zero_head_is_exactly_the_log_of_the_vocabulary(variant):
    for vocab in (65, 100, 128, 1000):  # padded and not
        sizes = dict(vocab_size=vocab, block_size=16, n_layer=2, n_head=2, n_embd=32)
        config = getattr(GPTConfig, variant)(**sizes, init="zero")
        model = GPT(config)
        idx = torch.randint(vocab, (4, 16))
        assert model(idx, idx)[1].item() == pytest.approx(math.log(vocab), abs=1e-6)


@pytest.mark.parametrize("std", [0.02, 0.05])
def test_the_first_loss_of_an_untied_head_is_log_v_plus_half_its_variance_times_the_width(std):
    width = 256
    vocab = 4096
    model = GPT(GPTConfig.llama(vocab_size=vocab, block_size=64, n_layer=2, n_head=4, n_embd=width))
    init_weights(model, 2, "gpt2", std=std, generator=seeded())
    idx, targets = (torch.randint(vocab, (16, 64), generator=seeded(s)) for s in (1, 2))
    want = math.log(vocab) + std**2 * width / 2
    with torch.no_grad():
        assert model(idx, targets)[1].item() == pytest.approx(want, rel=0.005)
    if std > 0.03:  # and the second term is really seen
        assert abs(want - math.log(vocab)) > 0.005 * want


def coordinate(scheme, width, lr_by_fan_in, steps=3):
    "RMS of the logits and of the stream after a few Adam steps."
    model = init_weights(Stack(width, 2, 64), 2, scheme, generator=seeded())
    groups = []
    for m in model.modules():
        if isinstance(m, nn.Linear) and lr_by_fan_in:
            groups.append({"params": [m.weight], "lr": 0.01 / (m.in_features / 64)})
        elif isinstance(m, nn.Linear | nn.Embedding):
            groups.append({"params": [m.weight], "lr": 0.01})
    opt = torch.optim.Adam(groups)
    idx = torch.randint(64, (8, 33), generator=seeded(1))
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten()).backward()
        opt.step()
    with ActivationStats(model, ["h.3", "lm_head"]) as stats, torch.no_grad():
        model(idx[:, :-1])
    return stats.table(figure="rms")[:, 0]


def test_coordinate_check_mup_keeps_its_activations_as_the_width_grows_and_gpt2_does_not():
    mup = coordinate("mup", 512, True) / coordinate("mup", 32, True)
    plain = coordinate("gpt2", 512, False) / coordinate("gpt2", 32, False)
    assert (mup < 2).all() and (mup > 0.4).all(), mup
    assert (plain > 4).any(), plain


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_meter_agrees_with_numbers_computed_by_hand(seed):
    model = init_weights(Stack(16, 1), 1, "torch", generator=seeded(seed))
    kept = []

    def keep(module, args, output):
        output.retain_grad()
        kept.append(output)

    with ActivationStats(model, ["h.0", "lm_head"]) as stats:
        handle = model.h[0].register_forward_hook(keep)
        model(torch.arange(10)[None]).square().sum().backward()
        handle.remove()
    out = kept[0].detach().double()
    grad = kept[0].grad.double()
    for row, x in ((stats.act["h.0"][0], out), (stats.grad["h.0"][0], grad)):
        assert row["mean"] == pytest.approx(x.mean().item(), rel=1e-4, abs=1e-6)
        assert row["std"] == pytest.approx(x.std(unbiased=False).item(), rel=1e-4)
        assert row["rms"] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-4)
        assert row["absmax"] == pytest.approx(x.abs().max().item(), rel=1e-5)


def test_the_meter_counts_every_call_lists_modules_in_order_and_leaves_no_hook():
    model = Stack(16, 1)
    with ActivationStats(model, ["lm_head", "h.0"]) as stats:
        for _ in range(3):
            model(torch.arange(10)[None]).sum().backward()
    assert stats.table("act").shape == stats.table("grad", "rms").shape == (2, 3)
    assert list(stats.act) == ["lm_head", "h.0"]
    assert not any(m._forward_hooks for m in model.modules())
    model(torch.arange(10)[None])
    assert stats.table().shape == (2, 3)


def test_the_meter_reads_half_precision_without_overflow_and_modules_that_return_tuples():
    class Two(nn.Module):
        def forward(self, x):
            return x, None

    model = nn.ModuleDict({"two": Two()})
    with ActivationStats(model, ["two"]) as stats:
        model["two"](torch.full((1000,), 300.0, dtype=torch.float16))
    assert stats.act["two"][0]["rms"] == pytest.approx(300)


def test_the_meter_lets_an_empty_batch_pass_and_has_no_figures_for_it():
    "As an expert sees it that no token was sent to."
    model = nn.Sequential(nn.Linear(3, 3))
    with ActivationStats(model, ["0"]) as stats:
        model(torch.zeros(0, 3)).sum().backward()
        model(torch.ones(2, 3))
    assert all(
        math.isnan(figure) for row in (stats.act["0"][0], stats.grad["0"][0]) for figure in row.values()
    )
    assert stats.table().isfinite().tolist() == [[False, True]]


def test_the_hooks_go_when_the_block_raises_and_an_unknown_name_is_told():
    model = Stack(16, 1)
    with pytest.raises(IndexError), ActivationStats(model, ["h.0"]):
        model(torch.tensor([[1000]]))
    assert not model.h[0]._forward_hooks
    with pytest.raises(UserError, match="h.9"):
        ActivationStats(model, ["h.9"])


def test_the_table_of_gradients_holds_gradients():
    layer = nn.Linear(3, 2)
    with ActivationStats(nn.ModuleDict({"layer": layer}), ["layer"]) as stats:
        (7 * layer(torch.randn(5, 3))).sum().backward()
    assert stats.table("grad", "mean").tolist() == [[7.0]]
