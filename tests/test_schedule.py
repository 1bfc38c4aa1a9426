import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.schedule import make_schedule
from tinygpt.support import UserError

runs = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
kinds = st.sampled_from(["cosine", "trapezoid", "constant"])


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
    way_down = {"cosine": max_steps - warmup - 1, "trapezoid": min(round(cooldown * max_steps), max_steps - warmup - 1), "constant": 0}[kind]
    assert rates[-1] == pytest.approx(final if way_down else 1)  # the last step has the last rate
    assert schedule(max_steps) == schedule(max_steps + 10_000) == rates[-1]  # past the end nothing moves


def test_cosine_equals_torchs():
    steps, warmup, final = 50, 7, 0.1
    ours = make_schedule("cosine", steps, warmup, final)
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps - 1 - warmup, eta_min=final)
    for step in range(warmup, steps):
        assert ours(step) == pytest.approx(opt.param_groups[0]["lr"], abs=1e-9)
        opt.step()
        theirs.step()


def test_trapezoid_stays_then_falls_on_a_straight_line():
    schedule = make_schedule("trapezoid", 101, 0, final=0.0, cooldown=0.5)
    assert [schedule(s) for s in range(51)] == [1.0] * 51
    drops = [schedule(s) - schedule(s + 1) for s in range(50, 100)]
    assert max(drops) - min(drops) < 1e-9 and math.isclose(schedule(100), 0.0, abs_tol=1e-12)


@pytest.mark.parametrize("bad, words", [
    (dict(kind="linear"), "schedule = linear"), (dict(max_steps=0), "max_steps = 0"), (dict(max_steps=-5), "max_steps = -5"),
    (dict(max_steps=10, warmup_steps=10), "warmup_steps = 10"), (dict(warmup_steps=-1), "warmup_steps = -1"),
    (dict(final=1.5), "final_lr = 1.5"), (dict(cooldown=2), "cooldown = 2"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(bad, words):
    with pytest.raises(UserError, match=words):
        make_schedule(**bad)


def test_all_problems_are_reported_together():
    with pytest.raises(UserError) as error:
        make_schedule("linear", 0, 3, final=-1, cooldown=9)
    assert all(word in str(error.value) for word in ("linear", "max_steps", "final_lr", "cooldown"))
