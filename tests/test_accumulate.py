import pytest
import torch
from torch import nn

from tinygpt.accumulate import accumulate_gradients, clip_gradients, count_targets
from tinygpt.model import GPT, GPTConfig


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig.gpt2(vocab_size=50, block_size=16, n_layer=2, n_head=2, n_embd=16)).double()


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randint(50, (7, 16), generator=g), torch.randint(50, (7, 16), generator=g)
    for row, counted in enumerate([16, 1, 0, 9, 16, 3, 12]):  # ragged, one row without any
        y[row, counted:] = -100
    return x, y


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 7, 100, None])
def test_micro_steps_equal_the_one_big_batch_with_ragged_rows(model, batch, micro):
    x, y = batch
    logits, _ = model(x)
    oracle = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)  # torch's mean over counted targets
    oracle.backward()
    expected = gradients(model)
    model.zero_grad()
    loss = accumulate_gradients(model, x, y, micro)
    assert (gradients(model) - expected).abs().max() < 1e-12
    assert loss.item() == pytest.approx(oracle.item(), rel=1e-6)  # the mean over all micro-steps, not the last one's


def test_parts_of_a_batch_add_up_when_told_the_total(model, batch):
    "What ranks do: each has its rows, all divide by the count of the whole batch."
    x, y = batch
    accumulate_gradients(model, x, y)
    expected = gradients(model)
    model.zero_grad()
    total = count_targets(y)
    losses = [accumulate_gradients(model, x[part], y[part], 1, total=total) for part in (slice(0, 3), slice(3, 7))]
    assert (gradients(model) - expected).abs().max() < 1e-12
    model.zero_grad()
    assert sum(losses).item() == pytest.approx(accumulate_gradients(model, x, y).item(), rel=1e-6)


def test_gradients_add_to_what_is_there_and_scale_reaches_them(model, batch):
    x, y = batch
    accumulate_gradients(model, x, y)
    once = gradients(model)
    accumulate_gradients(model, x, y, 2)
    assert (gradients(model) - 2 * once).abs().max() < 1e-12
    model.zero_grad()
    loss = accumulate_gradients(model, x, y, 2, scale=lambda l: 1024 * l)
    assert (gradients(model) - 1024 * once).abs().max() < 1e-9 and loss < 100  # the reported loss is not scaled


def test_a_batch_without_targets_gives_no_gradient_and_no_nan(model, batch):
    x, y = batch
    loss = accumulate_gradients(model, x, torch.full_like(y, -100), 3)
    assert loss == 0 and gradients(model).abs().max() == 0


def test_autocast_is_entered_for_each_micro_step(model, batch):
    seen = []

    class Context:
        def __enter__(self):
            seen.append(1)

        def __exit__(self, *_):
            seen.append(-1)

    accumulate_gradients(model, *batch, 3, autocast=Context)
    assert seen == [1, -1] * 3


def weights():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(3))]
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([[0.0, 4.0]])
    return params


def test_clipping_scales_all_gradients_by_one_factor():
    params = weights()
    assert clip_gradients(params, 1.0) == 5
    torch.testing.assert_close(params[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(params[1].grad, torch.tensor([[0.0, 0.8]]))
    assert params[2].grad is None


@pytest.mark.parametrize("max_norm", [0.0, -1.0, 5.1, 1e9])
def test_gradients_below_the_bound_stay_bit_for_bit(max_norm):
    params = weights()
    assert clip_gradients(params, max_norm) == 5
    assert params[0].grad.tolist() == [3.0, 0.0] and params[1].grad.tolist() == [[0.0, 4.0]]


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    params = weights()
    params[0].grad[1] = float("nan")
    assert not torch.isfinite(clip_gradients(params, 1.0))
