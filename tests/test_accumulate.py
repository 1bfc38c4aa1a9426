import contextlib
import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tinygpt.accumulate import (
    NoiseScale,
    accumulate_gradients,
    clip_gradients,
    gradient_noise_scale,
    measure_noise_scale,
    train_step,
    trained_weights,
)
from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.measure.speed import host_reads
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import Muon, make_optimizer, muon_groups
from tinygpt.precision import LossScaler
from tinygpt.support import UserError


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig.gpt2(vocab_size=50, block_size=16, n_layer=2, n_head=2, n_embd=16)).double()


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(1)
    x = torch.randint(50, (7, 16), generator=g)
    y = torch.randint(50, (7, 16), generator=g)
    for row, counted in enumerate([16, 1, 0, 9, 16, 3, 12]):  # ragged, one row without any
        y[row, counted:] = -100
    return x, y


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_gradients(model, expected, atol=1e-12):
    off = (gradients(model) - expected).abs().max().item()
    assert off < atol, f"a gradient is off by {off:.1e}"


class Losses(nn.Module):
    "One weight, whose gradient is the losses' sum: those of x where y counts. At 1 its loss is the same."

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y, reduction):
        counted = x[y != -100]
        return None, self.w * (counted.sum() if reduction == "sum" else counted.float().mean())


def test_by_hand_six_losses_in_two_micro_steps_of_five_and_one():
    x = torch.tensor([[1, 2, 3, 4, 5], [6, 0, 0, 0, 0]])
    y = torch.where(x > 0, 0, -100)
    for micro, last in ((1, 6), (None, 21)):
        model = Losses()
        loss = accumulate_gradients(model, x, y, micro)
        assert model.w.grad is not None, "no gradient: is there a backward for each micro-step?"
        grad = model.w.grad.item()
        said = {4.5: ": the mean of the micro-steps' means", last / 6: ": the last micro-step's alone"}
        off = f"for losses of 1 to 6 the gradient is {grad:g}{said.get(grad, '')}; their mean is 3.5"
        assert grad == pytest.approx(3.5), off
        off = f"the loss is {loss:g}{said.get(float(loss), '')}; it is 3.5"
        assert float(loss) == pytest.approx(3.5), off


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_a_total_below_one_divides_too(make):
    "One target that counts, and two ranks: each divides by a half. (Only 0 is no divisor.)"
    model, one = Losses(), torch.ones(1, 1, dtype=torch.int64)
    accumulate_gradients(model, 6 * one, 0 * one, total=make(0.5))
    assert model.w.grad == 12, f"6 / 0.5 is not {model.w.grad:g}"
    model.w.grad = None
    assert accumulate_gradients(model, 6 * one, -100 * one, total=make(0.0)) == 0 == model.w.grad


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 7, 100, None])
def test_micro_steps_equal_the_one_big_batch_with_ragged_rows(model, batch, micro):
    x, y = batch
    logits, _ = model(x)
    # torch's mean over counted targets
    oracle = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)
    oracle.backward()
    expected = gradients(model)
    model.zero_grad()
    loss = accumulate_gradients(model, x, y, micro)
    assert_gradients(model, expected)
    # the mean over all micro-steps, not the last one's
    assert loss.item() == pytest.approx(oracle.item(), rel=1e-6)


def test_parts_of_a_batch_add_up_when_told_the_total(model, batch):
    "What ranks do: each has its rows, all divide by the count of the whole batch."
    x, y = batch
    accumulate_gradients(model, x, y)
    expected = gradients(model)
    model.zero_grad()
    total = int((y != -100).sum())
    losses = [accumulate_gradients(model, x[part], y[part], 1, total) for part in (slice(0, 3), slice(3, 7))]
    assert_gradients(model, expected)
    model.zero_grad()
    assert sum(losses).item() == pytest.approx(accumulate_gradients(model, x, y).item(), rel=1e-6)


def test_gradients_add_to_what_is_there_and_scale_reaches_them(model, batch):
    x, y = batch
    accumulate_gradients(model, x, y)
    once = gradients(model)
    accumulate_gradients(model, x, y, 2)
    assert_gradients(model, 2 * once)
    model.zero_grad()
    loss = accumulate_gradients(model, x, y, 2, scale=lambda l: 1024 * l)
    assert_gradients(model, 1024 * once, 1e-9)
    assert loss < 100, "the returned loss is scaled: only the backward's is"


def test_a_batch_without_targets_gives_no_gradient_and_no_nan(model, batch):
    x, y = batch
    loss = accumulate_gradients(model, x, torch.full_like(y, -100), 3)
    assert loss == 0 and gradients(model).abs().max() == 0


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


def test_a_float_total_divides_as_ranks_that_average_need_it(model, batch):
    "DDP takes the mean over ranks: each divides by the whole count over their number, which may be below 1."
    x, y = batch
    y = y.clone()
    y[1:] = -100
    y[0, 2:] = -100  # two counted targets for four ranks
    whole = accumulate_gradients(model, x, y)
    expected = gradients(model)
    model.zero_grad()
    total = int((y != -100).sum()) / 4  # a half: the same in float32
    losses = [accumulate_gradients(model, x[rank::4], y[rank::4], 1, total) for rank in range(4)]
    assert_gradients(model, 4 * expected)
    # the mean over ranks is the loss of the batch
    assert (sum(losses) / 4).item() == pytest.approx(whole.item(), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    micro=st.integers(1, 9),
    world=st.sampled_from([1, 2, 4]),  # a share is the same in float32
)
def test_any_ragged_counts_micro_batches_and_ranks_give_the_big_batch(counts, micro, world):
    g = torch.Generator().manual_seed(sum(counts))
    weight = torch.randn(9, 9, generator=g, dtype=torch.float64)
    table = nn.Embedding(9, 9, dtype=torch.float64, _weight=weight).requires_grad_()

    class Bigram(nn.Module):
        def forward(self, x, y, reduction):
            logits = table(x)
            return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction=reduction)

    x = torch.randint(9, (len(counts), 6), generator=g)
    y = torch.randint(9, (len(counts), 6), generator=g)
    for row, counted in enumerate(counts):
        y[row, counted:] = -100
    total = int((y != -100).sum())
    share = total / world
    losses = [accumulate_gradients(Bigram(), x[r::world], y[r::world], micro, share) for r in range(world)]
    if total == 0:
        assert sum(losses) == 0 and not table.weight.grad.any()
        return
    logits = table(x)
    oracle = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    (expected,) = torch.autograd.grad(oracle, table.weight)
    off = (table.weight.grad / world - expected).abs().max().item()
    assert off < 1e-12, f"a gradient is off by {off:.1e}"
    assert (sum(losses) / world).item() == pytest.approx(oracle.item(), rel=1e-5)


def test_the_logged_loss_is_the_mean_and_not_the_last_micro_steps(model, batch):
    x, y = batch
    parts = [model(x[i : i + 2], y[i : i + 2])[1].item() for i in range(0, 7, 2)]
    loss = accumulate_gradients(model, x, y, 2).item()
    assert loss == pytest.approx(model(x, y)[1].item(), rel=1e-6)
    # neither the last nor the mean of means
    assert abs(loss - parts[-1]) > 1e-3 and abs(loss - sum(parts) / len(parts)) > 1e-4


class Recorder(nn.Module):
    "Notes what happens in which order; `loss.backward()` through a hook."

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.log = []

    @contextlib.contextmanager
    def no_sync(self):
        self.log.append("[")
        yield
        self.log.append("]")

    def forward(self, *args, **kw):
        self.log.append("f")
        logits, loss = self.model(*args, **kw)
        loss.register_hook(lambda _: self.log.append("b"))
        return logits, loss


@pytest.mark.parametrize("micro, order", [(3, "[fb][fb]fb"), (4, "[fb]fb"), (7, "fb"), (None, "fb")])
def test_no_sync_is_around_forward_and_backward_of_all_micro_steps_but_the_last(model, batch, micro, order):
    recorder = Recorder(model)
    accumulate_gradients(recorder, *batch, micro, no_sync=recorder.no_sync)
    log = "".join(recorder.log)
    assert log == order, f"{log} instead of {order} (f: forward, b: backward, []: the context)"


def test_autocast_is_around_the_forward_of_each_micro_step_and_not_around_its_backward(model, batch):
    recorder = Recorder(model)
    accumulate_gradients(recorder, *batch, 3, autocast=recorder.no_sync)
    log, order = "".join(recorder.log), "[f]b[f]b[f]b"
    assert log == order, f"{log} instead of {order} (f: forward, b: backward, []: the context)"


def test_a_rank_without_counted_targets_still_runs_so_that_others_do_not_wait(model, batch):
    x, y = batch
    recorder = Recorder(model)
    assert accumulate_gradients(recorder, x[2:3], y[2:3], 1, total=40.0, no_sync=recorder.no_sync) == 0
    assert recorder.log == ["f", "b"] and all(p.grad is not None for p in model.parameters())


def test_scaled_gradients_are_clipped_by_their_true_norm_only_after_unscaling(model, batch):
    accumulate_gradients(model, *batch)
    true = gradients(model)
    model.zero_grad()
    accumulate_gradients(model, *batch, 2, scale=lambda loss: 1024 * loss)
    for p in model.parameters():
        p.grad /= 1024
    bound = 0.5 * true.norm().item()
    assert clip_gradients(model.parameters(), bound).item() == pytest.approx(2 * bound)
    assert (gradients(model) - true / 2).abs().max() < 1e-6 * true.norm()


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(micro_batch_size=0), "micro_batch_size = 0"),
        (dict(micro_batch_size=-2), "micro_batch_size = -2"),
        (dict(total=-1.0), "total = -1.0"),
        (dict(y=torch.zeros(3, 16, dtype=torch.long)), r"\(3, 16\)"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_before_any_gradient(model, batch, change, said):
    with pytest.raises(UserError, match=said):
        accumulate_gradients(model, **{"x": batch[0], "y": batch[1]} | change)
    assert all(p.grad is None for p in model.parameters())


def test_one_parameter_alone_is_clipped_as_a_list_of_it_is():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients(p, 1.0) == 5
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))


def test_clipping_equals_torchs_own():
    mine, theirs = weights(), weights()
    clip_gradients(mine, 2.0)
    nn.utils.clip_grad_norm_(theirs, 2.0)
    for a, b in zip(mine[:2], theirs[:2]):  # torch divides by the norm + 1e-6; test_bits.py has the bits
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_without_any_gradient_the_norm_is_zero():
    assert clip_gradients([nn.Parameter(torch.zeros(3))], 1.0) == 0


def test_sharded_gradients_of_fsdp2_are_clipped_by_the_whole_norm(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = nn.Linear(3, 2)
        torch.manual_seed(0)
        sharded = fully_shard(nn.Linear(3, 2), mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        for layer in (plain, sharded):
            (100 * layer(torch.ones(4, 3)).square().sum()).backward()
        expected = clip_gradients(plain.parameters(), 1.0)
        norm = clip_gradients(sharded.parameters(), 1.0)
        assert type(norm) is torch.Tensor and torch.isclose(norm, expected) and norm > 1
        for p, q in zip(plain.parameters(), sharded.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
    finally:
        dist.barrier()
        dist.destroy_process_group()


class Linear(nn.Module):
    "Squared error of w·x, half: the closed form below is known for it. x (rows, 1, d), y (rows, 1)."

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x, y, reduction):
        return None, (x @ self.w - y).square().sum() / 2


def linear_data(rows, d, sigma, g):
    x = torch.randn(rows, 1, d, generator=g, dtype=torch.float64)
    return x, sigma * torch.randn(rows, 1, generator=g, dtype=torch.float64)  # the true weights are 0


def test_the_noise_scale_of_a_linear_model_is_the_closed_form():
    "Gradient (w·x - e) x with normal x: mean w, summed variance (d + 1)|w|² + d sigma²."
    d, sigma, g = 10, 2.0, torch.Generator().manual_seed(0)
    w = torch.full((d,), 0.5, dtype=torch.float64)
    batches = [linear_data(64, d, sigma, g) for _ in range(150)]
    found = measure_noise_scale(Linear(w), batches, 8)
    signal = w.square().sum().item()
    noise = (d + 1) * signal + d * sigma**2
    assert found.signal == pytest.approx(signal, rel=0.05) and found.noise == pytest.approx(noise, rel=0.05)
    assert found.batch == pytest.approx(noise / signal, rel=0.08)


def test_both_estimates_are_unbiased_where_the_naive_ones_are_not():
    d, g = 30, torch.Generator().manual_seed(1)
    mean, n = torch.full((d,), 0.1, dtype=torch.float64), 4000  # |G|² = 0.3, tr Σ = 30
    norms = {}
    for B in (2, 16):
        noise = torch.randn(n, d, generator=g, dtype=torch.float64) / B**0.5
        norms[B] = (mean + noise).norm(dim=1)
    found = gradient_noise_scale(norms[2], norms[16], 2, 16)
    assert found.signal == pytest.approx(0.3, abs=0.05) and found.noise == pytest.approx(30, rel=0.02)
    assert norms[16].square().mean() > 5 * 0.3  # the big batch's own norm is far off


def test_norms_of_one_steps_micro_batches_give_their_sample_variance(model, batch):
    x = batch[0][:6]
    y = torch.randint(50, (6, 16), generator=torch.Generator().manual_seed(3))
    rows = []
    for xb, yb in zip(x.split(2), y.split(2)):
        model.zero_grad()
        accumulate_gradients(model, xb, yb)
        rows.append(gradients(model))
    found = measure_noise_scale(model, [(x, y)], 2)
    rows = torch.stack(rows)
    assert found.noise == pytest.approx(2 * rows.var(0).sum().item(), rel=1e-9)
    assert found.signal == pytest.approx(rows.mean(0).square().sum().item() - found.noise / 6, rel=1e-9)
    assert all(p.grad is None for p in model.parameters())


def test_noise_scale_with_frozen_and_unused_parameters():
    g = torch.Generator().manual_seed(0)
    linear = Linear(torch.ones(3, dtype=torch.float64))
    linear.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    linear.unused = nn.Parameter(torch.ones(2))
    assert measure_noise_scale(linear, [linear_data(8, 3, 1.0, g)], 2).noise > 0


def test_by_chance_a_longer_big_gradient_means_no_batch_at_all_and_not_a_negative_one():
    found = gradient_noise_scale([1.0], [2.0], 1, 2)
    assert found.noise == -6 and found.signal == 7, "the estimates stay unbiased"
    assert found.batch == 0


def test_no_signal_means_an_infinite_batch():
    assert NoiseScale(3.0, 0.0).batch == float("inf") and NoiseScale(3.0, -1.0).batch == float("inf")
    assert NoiseScale(3.0, 1.5).batch == 2.0


def test_sizes_that_cannot_be_are_refused(model, batch):
    with pytest.raises(UserError, match="big batch must be the larger"):
        gradient_noise_scale([1.0], [1.0], 8, 8)
    with pytest.raises(UserError, match="at least one norm"):
        gradient_noise_scale([], [1.0], 1, 8)
    for micro in (0, 2, 7, 9):
        with pytest.raises(UserError, match="does not divide"):
            measure_noise_scale(model, [batch], micro)


def test_batches_of_two_sizes_have_no_noise_scale(model, batch):
    "The estimate has one size for all big batches; it once took that of the last, in silence."
    x, y = batch
    for sizes in ((6, 4), (4, 6)):
        with pytest.raises(UserError, match=f"batches of {sizes[0]} and of {sizes[1]} rows"):
            measure_noise_scale(model, [(x[:n], y[:n]) for n in sizes], 2)


@pytest.mark.parametrize("none", [[], iter(())])
def test_no_batches_have_no_noise_scale(model, none):
    with pytest.raises(UserError, match="there is no batch"):
        measure_noise_scale(model, none, 2)


def test_the_returned_loss_is_a_number_without_a_graph(model, batch):
    loss = accumulate_gradients(model, *batch, 3)
    assert not loss.requires_grad and loss.dtype == torch.float32 and loss.dim() == 0


@pytest.mark.parametrize("total", [None, torch.tensor(57), torch.tensor(19.0), 57, 19.0])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_accumulating_and_clipping_read_nothing_on_the_host(model, batch, total, max_norm):
    def work():
        for micro in (None, 2, 7):
            accumulate_gradients(model, *batch, micro, total)
            clip_gradients(model.parameters(), max_norm)

    reads = host_reads(work)
    assert reads == 0, f"{reads} numbers were read on the host (.item(), float(), if of a tensor)"


def adamw_case(implementation):
    def make(model):
        return make_adamw(adamw_groups(model, 1e-2), implementation)[0]

    return make


def muon_case(model):
    return make_optimizer(muon_groups(model, adamw_groups(model, 5e-3)))[0]


def own_muon_case(model):
    "Every matrix by Muon, and the vectors not at all."
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return Muon([p for p in model.parameters() if p.dim() == 2], weight_decay=0.1)


OPTIMIZERS = {
    "own": adamw_case("own"),
    "for-loop": adamw_case("for-loop"),
    "foreach": adamw_case("foreach"),
    "fused": adamw_case("fused"),
    "muon and adamw": muon_case,
    "muon": own_muon_case,
}


def small_gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig.llama(vocab_size=50, block_size=16, n_layer=2, n_head=2, n_embd=16))


def state_of(model, optimizer):
    "Copies of the weights and of all that the optimizer knows."
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def assert_same_state(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def poison(model, value):
    "One number of one gradient in the next backward becomes `value`."

    def change(grad):
        grad = grad.clone()
        grad[1, 2].fill_(value)  # as `grad[1, 2] = value` it is a copy from the CPU, and a GPU waits for it
        return grad

    return model.wte.weight.register_hook(change)


def test_trained_weights_are_the_optimizers_in_the_models_order():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    a, b, c, d = model.parameters()
    other = nn.Parameter(torch.zeros(1))  # of another model, trained beside this one
    optimizer = torch.optim.SGD([{"params": [d, other]}, {"params": [c, a]}])
    names = {id(p): name for name, p in zip("abcde", (a, b, c, d, other))}
    found = [names[id(p)] for p in trained_weights(model, optimizer)]
    assert found == ["a", "c", "d"], (
        f"the model has abcd, the optimizer d and e and then c and a: not {found}"
    )


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_accumulating_clipping_and_stepping_bit_for_bit(name, clip, batch):
    one, other = small_gpt(), small_gpt()
    optimizer, by_hand = OPTIMIZERS[name](one), OPTIMIZERS[name](other)
    for micro in (None, 2, 3, None):
        loss, norm = train_step(one, optimizer, *batch, micro_batch_size=micro, total=40, clip=clip)
        by_hand.zero_grad(set_to_none=True)
        expected = accumulate_gradients(other, *batch, micro, 40)
        expected_norm = clip_gradients(other.parameters(), clip)
        by_hand.step()
        assert torch.equal(loss, expected) and torch.equal(norm, expected_norm)
        assert_same_state(state_of(one, optimizer), state_of(other, by_hand))


def test_gradients_of_parameters_that_the_optimizer_does_not_have_do_not_pile_up_in_the_norm(batch):
    model = small_gpt()
    optimizer = torch.optim.SGD([model.ln_f.weight], lr=0.0)  # the rest needs a gradient all the same
    norms = [train_step(model, optimizer, *batch)[1] for _ in range(3)]
    model.zero_grad()
    model(*batch)[1].backward()
    for norm in norms:
        torch.testing.assert_close(norm, model.ln_f.weight.grad.norm())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_state(name, value, batch):
    model = small_gpt()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(3):
        train_step(model, optimizer, *batch, clip=0.5)
    before = state_of(model, optimizer)
    hook = poison(model, value)
    norm = train_step(model, optimizer, *batch, clip=0.5)[1]
    hook.remove()
    assert not norm.isfinite()
    assert_same_state(state_of(model, optimizer), before)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_a_bad_step_goes_on_as_if_it_had_not_been(name, batch):
    "Also where the bad step is the very first, before the optimizer has any state."
    ends = []
    for bad_steps in ((), (0, 3)):
        model = small_gpt()
        optimizer = OPTIMIZERS[name](model)
        good = 0
        for step in range(4 + len(bad_steps)):
            rows = slice(good, good + 3)
            hook = poison(model, math.nan) if step in bad_steps else None
            train_step(model, optimizer, batch[0][rows], batch[1][rows], clip=1.0)
            good += hook is None
            if hook is not None:
                hook.remove()
        ends.append(state_of(model, optimizer))
    assert_same_state(*ends)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("name", ["fused", "muon and adamw", "muon"])
def test_a_whole_step_reads_nothing_on_the_host(name, scaled, batch):
    model, scaler = small_gpt(), LossScaler(enabled=scaled)
    optimizer = OPTIMIZERS[name](model)
    total = int((batch[1] != -100).sum())

    def work():
        for _ in range(3):
            train_step(model, optimizer, *batch, micro_batch_size=3, total=total, clip=0.5, scaler=scaler)

    reads = host_reads(work)
    assert reads == 0, f"{reads} numbers were read on the host (.item(), float(), if of a tensor)"


def test_an_optimizer_that_counts_its_steps_on_the_host_is_asked_once_a_step(batch):
    model = small_gpt()
    optimizer = OPTIMIZERS["own"](model)
    assert host_reads(lambda: train_step(model, optimizer, *batch, clip=0.5)) == 1


def test_a_step_calls_the_clipping_it_is_given_and_returns_its_norm(batch):
    model = small_gpt()
    optimizer = OPTIMIZERS["fused"](model)
    before = state_of(model, optimizer)[0]
    asked = []

    def clip_fn(max_norm):
        asked.append(max_norm)
        return torch.tensor(math.inf)  # of another rank, say: it decides

    norm = train_step(model, optimizer, *batch, clip=0.7, clip_fn=clip_fn)[1]
    assert asked == [0.7] and norm == math.inf
    assert_same_state(model.state_dict(), before)


@pytest.mark.parametrize("make_scaler", [LossScaler, partial(torch.amp.GradScaler, "cpu")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_a_loss_scaler_it_is_the_scaler_that_skips(name, make_scaler, batch):
    model, plain = small_gpt(), small_gpt()
    optimizer, other = OPTIMIZERS[name](model), OPTIMIZERS[name](plain)
    scaler = make_scaler(init_scale=1024.0)
    _, norm = train_step(model, optimizer, *batch, clip=0.5, scaler=scaler)
    _, expected = train_step(plain, other, *batch, clip=0.5)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)  # clipped after unscaling
    before = state_of(model, optimizer)
    hook = poison(model, math.inf)
    norm = train_step(model, optimizer, *batch, clip=0.5, scaler=scaler)[1]
    hook.remove()
    assert not norm.isfinite() and scaler.get_scale() == 512
    assert_same_state(state_of(model, optimizer), before)


def test_a_scaler_that_is_off_leaves_the_guard_on(batch):
    model = small_gpt()
    optimizer = OPTIMIZERS["fused"](model)
    train_step(model, optimizer, *batch, scaler=LossScaler(enabled=False))
    before = state_of(model, optimizer)
    poison(model, math.nan)
    train_step(model, optimizer, *batch, scaler=LossScaler(enabled=False))
    assert_same_state(state_of(model, optimizer), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["fused", "muon and adamw", "muon"])
def test_on_a_gpu_nothing_in_a_step_waits_for_it(name, batch):
    model = small_gpt().cuda()
    optimizer = OPTIMIZERS[name](model)
    x, y = (t.cuda() for t in batch)
    total = (y != -100).sum()

    def steps():
        for bad in (False, True, False):
            hook = poison(model, math.nan) if bad else None
            train_step(model, optimizer, x, y, micro_batch_size=3, total=total, clip=0.5)
            if hook is not None:
                hook.remove()

    steps()  # the first of all makes handles and workspaces
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
def test_norms_that_cannot_be_are_refused(norm):
    with pytest.raises(UserError, match="a norm is finite"):
        gradient_noise_scale([norm], [1.0], 1, 8)
    with pytest.raises(UserError, match="a norm is finite"):
        gradient_noise_scale([1.0], [norm], 1, 8)
