import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.schedule import make_schedule
from tinygpt.support import UserError

runs = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
kinds = st.sampled_from(["cosine", "trapezoid", "constant"])


@settings(deadline=None)
@given(kinds, runs, st.floats(0, 1), st.floats(0, 1))
def test_every_schedule_keeps_to_its_corners(kind, run, final, cooldown):
    max_steps, warmup = run
    schedule = make_schedule(kind, max_steps, warmup, final, cooldown)
    rates = [schedule(s) for s in range(max_steps)]
    assert rates[0] > 0 and all(0 <= r <= 1 for r in rates)  # the first step learns
    assert rates[:warmup] == pytest.approx([(s + 1) / (warmup + 1) for s in range(warmup)])
    after = rates[warmup:]
    assert after[0] == 1
    assert all(a >= b - 1e-12 for a, b in zip(after, after[1:]))  # down, never up again
    way_down = {
        "cosine": max_steps - warmup - 1,
        "trapezoid": min(round(cooldown * max_steps), max_steps - warmup - 1),
        "constant": 0,
    }[kind]
    assert rates[-1] == pytest.approx(final if way_down else 1)  # the last step has the last rate
    assert schedule(max_steps) == schedule(max_steps + 10_000) == rates[-1]  # past the end nothing moves


@settings(deadline=None)
@given(runs, st.floats(0, 1))
def test_the_cosine_is_its_closed_form(run, final):  # cos² of half the angle, from 0 to 90 degrees
    n, warmup = run
    schedule = make_schedule("cosine", n, warmup, final)
    for step in range(warmup, n):
        angle = (step - warmup) / (n - 1 - warmup) * math.pi / 2 if n - 1 > warmup else 0.0
        assert schedule(step) == pytest.approx(final + (1 - final) * math.cos(angle) ** 2, abs=1e-12)


@settings(deadline=None)
@given(runs, st.floats(0, 1), st.floats(0, 1))
def test_the_trapezoid_is_the_lowest_of_three_straight_lines(run, final, cooldown):
    n, warmup = run
    schedule, last = make_schedule("trapezoid", n, warmup, final, cooldown), n - 1
    length = min(round(cooldown * n), last - warmup)
    for step in range(n):
        up = (step + 1) / (warmup + 1)
        down = final + (1 - final) * (last - step) / length if length else math.inf
        assert schedule(step) == pytest.approx(min(up, 1.0, down) if step >= warmup else up, abs=1e-12)


def test_trapezoids_of_different_length_are_one_until_they_come_down():
    short, long = (make_schedule("trapezoid", n, 20, cooldown=0.25) for n in (400, 1000))
    assert all(short(s) == long(s) for s in range(300)) and short(300) < long(300)


def test_a_run_of_one_step_has_a_rate():
    for kind in ("cosine", "trapezoid", "constant"):
        assert make_schedule(kind, 1, 0)(0) == 1.0


def torchs(make_scheduler, steps):
    "The rates of a run under one of torch's schedulers."
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR warns of its own way to call its parts
        scheduler = make_scheduler(opt)
        for _ in range(steps):
            seen.append(opt.param_groups[0]["lr"])
            opt.step()
            scheduler.step()
    return seen


lrs = torch.optim.lr_scheduler


@settings(deadline=None, max_examples=25)
@given(st.integers(3, 80).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 2))), st.floats(0, 0.9))
def test_warm_up_and_cosine_equal_torchs_sequence_of_the_two(run, final):
    steps, warmup = run
    ours = make_schedule("cosine", steps, warmup, final)

    def up_and_down(optimizer):
        up = lrs.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        down = lrs.CosineAnnealingLR(optimizer, T_max=steps - 1 - warmup, eta_min=final)
        return lrs.SequentialLR(optimizer, [up, down], milestones=[warmup])

    theirs = torchs(up_and_down, steps)
    assert [ours(s) for s in range(steps)] == pytest.approx(theirs, abs=1e-6)


def test_a_trapezoid_to_zero_equals_torchs_linear_parts():
    steps, warmup, length = 60, 9, 15
    ours = make_schedule("trapezoid", steps, warmup, final=0.0, cooldown=0.25)

    def three_lines(optimizer):
        up = lrs.LinearLR(optimizer, start_factor=0.1, total_iters=9)
        flat = lrs.ConstantLR(optimizer, factor=1.0)
        down = lrs.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=length)
        return lrs.SequentialLR(optimizer, [up, flat, down], milestones=[warmup, steps - 1 - length])

    theirs = torchs(three_lines, steps)
    assert [ours(s) for s in range(steps)] == pytest.approx(theirs, abs=1e-9)


def test_a_schedule_fits_into_torchs_lambda_scheduler():
    schedule = make_schedule("cosine", 30, 5)
    assert torchs(lambda o: lrs.LambdaLR(o, schedule), 35) == [schedule(s) for s in range(35)]


@pytest.mark.parametrize("kind", ["cosine", "trapezoid", "constant"])
def test_a_loop_over_the_schedule_learns_in_its_first_step_and_makes_exactly_max_steps(kind):
    schedule = make_schedule(kind, 20, 4)
    p = torch.zeros(1, requires_grad=True)
    moved = []
    opt = torch.optim.SGD([p], lr=1.0)
    for step in range(20):
        opt.param_groups[0]["lr"] = schedule(step)
        p.grad = torch.ones(1)
        before = p.item()
        opt.step()
        moved.append(before - p.item())
    assert len(moved) == 20 and all(m > 0 for m in moved)
    assert moved[0] == pytest.approx(1 / 5) and moved[4] == pytest.approx(1, abs=1e-5)


def test_the_published_runs_in_steps_of_half_a_million_tokens():
    assert (375_000_000 // 2**19, 10_000_000_000 // 2**19) == (715, 19_073)
    schedule = make_schedule("cosine", 19_073, 715, final=0.1)
    assert (
        schedule(0) == pytest.approx(1 / 716, rel=1e-12)
        and schedule(714) == pytest.approx(715 / 716, rel=1e-12)
        and schedule(715) == 1 > schedule(716)
        and schedule(19_072) == pytest.approx(0.1)
    )


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(kind="linear"), "schedule = '?linear"),
        (dict(max_steps=0), "max_steps = 0"),
        (dict(max_steps=-5), "max_steps = -5"),
        (dict(max_steps=10, warmup_steps=10), "warmup_steps = 10"),
        (dict(max_steps=10, warmup_steps=5000), "warmup_steps = 5000"),
        (dict(warmup_steps=-1), "warmup_steps = -1"),
        (dict(final=1.5), "final_lr = 1.5"),
        (dict(final=math.nan), "final_lr = nan"),
        (dict(cooldown=2), "cooldown = 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(bad, words):
    with pytest.raises(UserError, match=words):
        make_schedule(**bad)


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as error:
        make_schedule("linear", 0, 3, final=-1, cooldown=9)
    assert all(word in str(error.value) for word in ("linear", "max_steps", "final_lr", "cooldown"))


# ---- in tokens


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 10**5), min_size=1, max_size=20), kinds, st.integers(10, 10**6), st.floats(0, 0.9)
)
def test_a_schedule_in_tokens_keeps_its_corners_however_the_batch_grows(batches, kind, budget, warm):
    "The trainer's loop, with the schedule asked at the last token of each batch."
    budget += sum(batches)  # more than ten: two steps are left after the warmup, the peak and the end
    schedule = make_schedule(kind, budget, int(warm * budget), final=0.25)
    seen, rates = 0, []
    for batch in [*batches, budget - sum(batches)]:
        seen += batch
        rates.append(schedule(seen - 1))
    assert rates[0] > 0 and max(rates) <= 1
    assert rates[-1] == pytest.approx(1 if kind == "constant" else 0.25)
