import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from tinygpt.adamw import AdamW, adamw_groups, make_adamw
from tinygpt.data.windows import RandomLoader
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import make_optimizer, muon_groups
from tinygpt.schedule_finder import find_lr
from tinygpt.support import UserError

SMALL = dict(vocab_size=32, block_size=16, n_layer=2, n_head=2, n_embd=32)
TOKENS = np.tile(np.arange(32, dtype=np.uint16), 200)  # each token tells the next


def batches(seed=0):
    return RandomLoader(TOKENS, batch_size=4, block_size=16, seed=seed)


def gpt(**kw):
    torch.manual_seed(0)
    return GPT(GPTConfig.llama(**SMALL, **kw))


class Bowl(nn.Module):
    "loss = curvature / 2 · w²: SGD shrinks w by (1 - rate · curvature), so every rate's fate is known."

    def __init__(self, curvature=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.curvature = curvature

    def forward(self, x, y):
        return None, (self.curvature / 2 * self.w**2).sum()


def multiplied(model):
    return make_adamw(adamw_groups(model, 1e-3, lr_multipliers={"embedding": 4.0}))[0]


OPTIMIZERS = {
    "adamw": lambda m: make_adamw(adamw_groups(m, 1e-3))[0],
    "own adamw": lambda m: AdamW(adamw_groups(m, 1e-3)),
    "adamw with multipliers": multiplied,
    "muon": lambda m: make_optimizer(muon_groups(m, adamw_groups(m, 0.005), 0.02))[0],
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
}


def everything(model, optimizer):
    "All that the search might change, copied."
    state = optimizer.state_dict()
    tensors = [
        *model.state_dict().values(),
        *(t for s in state["state"].values() for t in s.values()),
        torch.get_rng_state(),
    ]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return (
        [torch.as_tensor(t).clone() for t in tensors],
        grads,
        copy.deepcopy(state["param_groups"]),
        model.training,
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_model_optimizer_and_generator_are_as_before(name):
    model = gpt(dropout=0.1).eval()  # dropout draws from the generator; eval must stay eval
    optimizer = OPTIMIZERS[name](model)
    x, y = next(batches())
    model(x, y)[1].backward()
    optimizer.step()  # in the middle of a run, with state and gradients
    before = everything(model, optimizer)
    search = find_lr(model, optimizer, batches(), steps=30)
    assert len(search.rates) > 10
    after = everything(model, optimizer)
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    assert after[2:] == before[2:]
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_by_whatever_optimizer_it_is_given_and_can_be_repeated(name):
    model = gpt(dropout=0.1)
    optimizer = OPTIMIZERS[name](model)
    once, again = (find_lr(model, optimizer, batches(), steps=60) for _ in range(2))
    assert once == again
    assert min(once.losses) < once.losses[0] - 0.2  # it learned something on the way


def test_every_group_keeps_its_ratio_to_the_first():
    seen = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([g["lr"] for g in self.param_groups])

    model = gpt()
    a, *rest = model.parameters()
    spy = Spy([dict(params=[a], lr=0.02), dict(params=rest, lr=0.005)], lr=1.0)
    with pytest.raises(UserError, match="never fell.*a highest above 0.1"):  # it does not move
        find_lr(model, spy, [next(batches())] * 20, lowest=1e-4, highest=1e-1, steps=20)
    assert len(seen) == 20
    assert [s[0] for s in seen] == pytest.approx([1e-4 * 1000 ** (i / 19) for i in range(20)])
    assert all(s[1] == pytest.approx(s[0] / 4) for s in seen)


def test_the_losses_are_those_of_a_run_by_hand():
    model = Bowl()
    search = find_lr(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        [(0, 0)] * 20,
        lowest=0.01,
        highest=1.0,
        steps=20,
        smooth=0.8,
        clip=0.0,
    )
    rates = [0.01 * 100 ** (i / 19) for i in range(20)]
    w = 1.0
    raw = []
    for rate in rates:
        raw.append(w * w / 2)
        w *= 1 - rate
    # a weighted mean is the bias-corrected running one
    weights = [[0.8 ** (i - j) for j in range(i + 1)] for i in range(20)]
    smooth = [sum(a * b for a, b in zip(ws, raw)) / sum(ws) for ws in weights]
    assert search.rates == pytest.approx(rates)
    assert search.raw == pytest.approx(raw, rel=1e-4)
    assert search.losses == pytest.approx(smooth, rel=1e-4)
    assert not search.turned
    enough = smooth[0] - 2 / 3 * (smooth[0] - min(smooth))
    i = search.rates.index(search.suggestion)
    assert smooth[i] <= enough * (1 + 1e-4) and smooth[i - 1] > enough * (1 - 1e-4)
    assert search.factor == search.suggestion


@pytest.mark.parametrize("curvature", [0.1, 1.0, 10.0])
def test_on_a_bowl_it_stops_past_the_edge_and_suggests_a_stable_rate(curvature):
    "The edge of SGD is 2 / curvature."
    model = Bowl(curvature)
    search = find_lr(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        [(0, 0)] * 300,
        lowest=1e-4,
        highest=1e4,
        steps=300,
        clip=0.0,
    )
    assert search.turned and search.rates[-1] > 2 / curvature
    assert search.rates[-1] < 100 / curvature  # and not much later
    assert search.suggestion < 2 / curvature


def test_a_loss_that_becomes_nan_ends_the_search():
    class Breaks(Bowl):
        calls = 0

        def forward(self, x, y):
            Breaks.calls += 1
            return None, (self.w**2).sum() * (math.nan if Breaks.calls > 15 else 1.0)

    model = Breaks()
    search = find_lr(
        model, torch.optim.SGD(model.parameters(), lr=1.0), [(0, 0)] * 50, lowest=0.01, highest=0.1, steps=50
    )
    assert search.turned and len(search.rates) == 15 and all(map(math.isfinite, search.losses))


def test_a_loss_that_cannot_explode_does_not_keep_it_from_stopping():  # capped logits make such losses
    class Bounded(Bowl):
        def forward(self, x, y):
            return None, (3 + self.w**2 / (1 + self.w**2)).sum()  # from 3.5 down to 3, and never above 4

    model = Bounded()
    search = find_lr(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        [(0, 0)] * 100,
        lowest=1e-2,
        highest=1e4,
        steps=100,
        clip=0.0,
    )
    assert search.turned and len(search.rates) < 100 and max(search.losses) < 4
    assert 0.01 < search.suggestion < 1  # a rate of 1 is SGD's edge at the bottom


def test_the_suggestion_trains_better_than_a_tenth_and_thirty_times_of_it():
    def train(lr):
        model = gpt()
        losses = []
        optimizer = make_adamw(adamw_groups(model, lr))[0]
        for _, (x, y) in zip(range(60), batches(seed=1)):
            optimizer.zero_grad()
            loss = model(x, y)[1]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-10:])

    model = gpt()
    lr = find_lr(model, OPTIMIZERS["adamw"](model), batches()).suggestion
    assert train(lr) < train(lr / 10) and train(lr) < train(30 * lr)


def test_the_suggestion_does_not_depend_on_the_rate_the_optimizer_has():
    model = gpt()
    a, b = (find_lr(model, make_adamw(adamw_groups(model, lr))[0], batches(), steps=60) for lr in (1e-5, 0.3))
    assert a.suggestion == pytest.approx(b.suggestion) and a.factor * 1e-5 == pytest.approx(b.factor * 0.3)


def test_batches_that_end_before_the_loss_turned_give_no_suggestion():
    model = gpt()
    few = [next(batches()) for _ in range(12)]
    with pytest.raises(UserError, match="12 of 100 steps.*more batches, or fewer steps .10 at least"):
        find_lr(model, OPTIMIZERS["adamw"](model), few, lowest=1e-3, steps=100)
    assert 1e-3 < find_lr(model, OPTIMIZERS["adamw"](model), few, lowest=1e-3, steps=12).suggestion < 10


@pytest.mark.parametrize(
    "bad",
    [
        dict(lowest=0.0),
        dict(lowest=1.0, highest=0.1),
        dict(highest=math.inf),
        dict(steps=2),
        dict(smooth=1.0),
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    model = Bowl()
    with pytest.raises(UserError, match="find_lr: lowest"):
        find_lr(model, torch.optim.SGD(model.parameters(), lr=1.0), [(0, 0)] * 20, **bad)


def test_a_rate_of_zero_no_batches_and_a_ruinous_start_are_told():
    model = Bowl()
    with pytest.raises(UserError, match="lr = 0"):
        find_lr(model, torch.optim.SGD(model.parameters(), lr=0.0), [(0, 0)] * 20)
    with pytest.raises(UserError, match="more batches"):
        find_lr(model, torch.optim.SGD(model.parameters(), lr=1.0), [])
    with pytest.raises(UserError, match="lowest below 100"):
        find_lr(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            [(0, 0)] * 20,
            lowest=100.0,
            highest=1000.0,
            clip=0.0,
        )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_generator_of_a_gpu_is_as_before_too():
    model = gpt(dropout=0.1).cuda()
    optimizer = OPTIMIZERS["adamw"](model)
    before = torch.cuda.get_rng_state()
    find_lr(model, optimizer, RandomLoader(TOKENS, 4, 16, device="cuda"), steps=12)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_bound_below_zero_clips_nothing():
    "It turned the gradients round, and the loss could only rise."

    def losses(clip):
        bowl = Bowl()
        sgd = torch.optim.SGD(bowl.parameters(), lr=0.1)
        return find_lr(bowl, sgd, [(None, None)] * 20, 1e-3, 0.3, steps=20, clip=clip).raw

    assert losses(-1.0) == losses(0.0)
