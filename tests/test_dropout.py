"""Dropout with cheap random numbers: law and gradient are torch's, and without it nothing is drawn."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tinygpt.dropout import drop


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.9, 0.99, 2**-16])
def test_as_many_fall_as_should_in_each_of_the_four_places_of_a_word(p):
    torch.manual_seed(1)
    n = 2**22
    fell = (drop(torch.ones(n), p) == 0).view(-1, 4).double()
    rounded = round(p * 2**16) / 2**16
    error = math.sqrt(p * (1 - p) / n)
    assert abs(fell.mean() - rounded) < 4 * error
    assert ((fell.mean(0) - rounded).abs() < 5 * 2 * error).all()


def test_one_number_says_nothing_about_the_next_ones():
    torch.manual_seed(2)
    n, p = 2**22, 0.3
    fell = (drop(torch.ones(n), p) == 0).double() - p
    for apart in range(1, 10):
        correlation = (fell[apart:] * fell[:-apart]).mean() / (p * (1 - p))
        assert abs(correlation) < 5 / math.sqrt(n), apart


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (0, 4), ()], ids=str)
def test_what_stays_is_scaled_as_torch_scales_it_and_the_gradient_goes_there(dtype, shape):
    p = 0.25
    torch.manual_seed(3)
    x = torch.randn(shape, dtype=dtype)
    x = torch.where(x == 0, 1, x).requires_grad_()  # a 0 in y is to mean that it was dropped
    y = drop(x, p)
    assert y.shape == x.shape and y.dtype == dtype
    y.sum().backward()
    keep = (y != 0).to(dtype)
    # the same decisions, by torch's own arithmetic
    theirs = x.detach() * (keep / (1 - p))
    torch.testing.assert_close(y, theirs)
    torch.testing.assert_close(x.grad, keep / (1 - p))


def test_rows_fall_independently_of_each_other():
    torch.manual_seed(6)
    p, shape = 0.3, (64, 2**14)
    fell = (drop(torch.ones(shape), p) == 0).double() - p
    correlation = fell @ fell.T / shape[1] / (p * (1 - p))
    assert (correlation - torch.eye(64)).abs().max() < 6 / math.sqrt(shape[1]) + 0.02


@pytest.mark.parametrize("p", [1 / 3, 2 / 3])
def test_the_mean_is_kept_for_a_probability_that_is_no_whole_number_of_parts(p):
    y = drop(torch.ones(2**20, dtype=torch.float64), p)
    stays = y[y != 0].unique()
    assert len(stays) == 1
    rounded = 1 - 1 / stays.item()  # the probability that it was made for
    assert rounded * 2**16 == pytest.approx(round(p * 2**16))  # the nearest part


def test_rows_that_do_not_lie_one_after_the_other_are_dropped_as_well():
    x = torch.ones(64, 32).T
    torch.manual_seed(4)
    y = drop(x, 0.5)
    assert y.shape == (32, 64) and 0.4 < (y == 0).float().mean() < 0.6


def test_a_seed_repeats_it_and_nothing_is_drawn_where_nothing_falls():
    x = torch.ones(1000)
    torch.manual_seed(5)
    first = drop(x, 0.5)
    assert not drop(x, 0.5).equal(first)
    torch.manual_seed(5)
    assert drop(x, 0.5).equal(first)
    state = torch.get_rng_state()
    assert drop(x, 0.0) is x and drop(x, 0.5, training=False) is x
    assert torch.get_rng_state().equal(state)


def test_elsewhere_and_where_no_part_is_near_enough_it_is_torchs_own(monkeypatch):
    x = torch.ones(1000)
    assert drop(x, 1.0).eq(0).all() and drop(x, 1 - 1e-6).shape == x.shape
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match="probability"):
            drop(x, p)
    assert drop(torch.empty(3, device="meta"), 0.5).device.type == "meta"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.manual_seed(7)
    compiled = drop(x, 0.25)
    torch.manual_seed(7)
    assert compiled.equal(F.dropout(x, 0.25))


def test_another_default_device_does_not_disturb_it():
    x = torch.ones(8)
    with torch.device("meta"):
        assert drop(x, 0.5).device.type == "cpu"


def test_a_pass_that_is_computed_again_drops_the_same_numbers():
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64)

    def gradient(again: bool):
        torch.manual_seed(8)
        layer.weight.grad = None

        def part(x):
            return drop(layer(x), 0.5).square()

        y = checkpoint(part, x, use_reentrant=False) if again else part(x)
        y.sum().backward()
        return layer.weight.grad

    assert gradient(True).equal(gradient(False))
