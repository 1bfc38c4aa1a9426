"""From losses and a clock to a gain: crossings, seconds, intervals, and what each rung is compared with."""

import math
import statistics

import pytest
import torch

from tinygpt.speedrun_gain import (
    COLORS,
    GOAL,
    climb,
    clock_error,
    gain,
    ladder_table,
    plot_ladder,
    rung_gain,
    seconds_to_goal,
    steps_to_goal,
)
from tinygpt.support import UserError


def runs_of(curve, lengths=(80, 100), seeds=(1, 2, 3)):
    return [dict(seed=seed, steps=steps, loss=curve(steps, seed)) for steps in lengths for seed in seeds]


def test_steps_to_the_goal_are_found_where_the_loss_is_a_line_over_the_logarithm():
    def curve(steps, seed):
        return 2.5 - 0.14 * math.log(steps) + 0.003 * seed

    runs = runs_of(curve, (60, 80, 100))
    assert {s: round(curve(steps, s), 9) for s, steps in steps_to_goal(runs).items()} == dict.fromkeys(
        (1, 2, 3), GOAL
    )
    with pytest.raises(UserError, match=r"\[60, 80\] steps end on one side of 1.88: add a length"):
        steps_to_goal(runs_of(curve, (60, 80)))


def test_only_the_two_lengths_beside_the_goal_count():
    runs = runs_of(lambda steps, seed: {50: 9.0, 80: 1.9, 100: 1.86, 200: -5.0}[steps], (50, 80, 100, 200))
    assert all(steps == pytest.approx(math.sqrt(80 * 100)) for steps in steps_to_goal(runs).values())


def test_what_a_seed_has_too_much_at_one_length_and_too_little_at_the_other_evens_out():
    runs = runs_of(lambda steps, seed: {80: 1.9 + 0.01 * (seed - 2), 100: 1.86 - 0.01 * (seed - 2)}[steps])
    assert list(steps_to_goal(runs).values()) == pytest.approx([math.sqrt(80 * 100)] * 3)


def rung_of(name, kept, wins=0.0, a_step=0.1):
    "A rung whose losses are lower by `wins`, and whose commands take 3 seconds and `a_step` for each step."
    runs = runs_of(lambda steps, seed: 1.93 - 0.09 * (steps == 100) - wins * (steps == 100) + 0.001 * seed)
    clock = dict(command_s=[2.9 + a_step, 3.1 + a_step], step_s=[0.99 * a_step, a_step, 1.01 * a_step])
    return dict(name=name, kept=kept, runs=runs, clock=clock)


def test_seconds_are_what_every_run_costs_and_what_its_steps_cost():
    rung = rung_of("one layer", True)
    steps = steps_to_goal(rung["runs"])
    assert seconds_to_goal(rung) == {seed: pytest.approx(3 + 0.1 * n) for seed, n in steps.items()}


def test_the_clocks_error_is_that_of_command_and_steps_together():
    rung = rung_of("one layer", True, a_step=0.2)
    steps = sorted(steps_to_goal(rung["runs"]).values())[1]
    rng = torch.Generator().manual_seed(0)
    draws = torch.randn(2, 100_000, generator=rng, dtype=torch.float64)
    # of two readings 0.1 above and below, and of three, 0.002 apart: deviation / sqrt(readings)
    command, step = 3.2 + 0.1 * draws[0], 0.2 + 0.002 / 3**0.5 * draws[1]
    seconds = command + (steps - 1) * step
    assert clock_error(rung) == pytest.approx((seconds.std() / seconds.median()).item(), rel=0.02)


def test_the_gain_is_students_interval_of_the_logarithms_of_paired_ratios():
    below, here = {1: 10.0, 2: 12.0, 3: 9.0}, {3: 6.0, 1: 5.0, 2: 5.5}
    logs = torch.tensor([10 / 5, 12 / 5.5, 9 / 6], dtype=torch.float64).log()
    half = 4.302652729696142 * logs.std() / 3**0.5  # Student's point for two degrees of freedom
    expected = torch.stack([logs.mean(), logs.mean() - half, logs.mean() + half]).exp()
    assert gain(below, here) == pytest.approx(expected.tolist(), rel=1e-3)
    mean, low, high = gain(below, here, clock=0.3)
    assert mean == pytest.approx(expected[0].item(), rel=1e-3)
    assert math.log(high / mean) == pytest.approx(math.hypot(half.item(), 0.6), rel=1e-3) and low < mean


def test_a_rungs_gain_over_another_has_the_seeds_spread_and_both_clocks_errors():
    below, here = rung_of("start", True), rung_of("one layer", True, a_step=0.05)
    there, now = seconds_to_goal(below), seconds_to_goal(here)
    logs = torch.tensor([there[seed] / now[seed] for seed in there], dtype=torch.float64).log()
    half = 4.302652729696142 * logs.std() / len(logs) ** 0.5  # Student's point for two degrees of freedom
    errors = clock_error(below), clock_error(here)
    half = math.hypot(half, 2 * errors[0], 2 * errors[1])
    mean, low, high = rung_gain(below, here)
    assert mean == pytest.approx(logs.mean().exp().item(), rel=1e-3)
    for end in (low, high):
        assert abs(math.log(end / mean)) == pytest.approx(half, rel=1e-3)
    assert low < mean < high and min(errors) > 0


def test_each_rung_is_compared_with_the_kept_one_below_it():
    rungs = [
        rung_of("start", True),
        rung_of("wide", False, a_step=1.0),
        rung_of("one layer", True, a_step=0.05),
    ]
    rows = climb(rungs)
    assert [row["gain"][0] for row in rows] == [
        1,
        pytest.approx(12 / 93, rel=0.1),
        pytest.approx(12 / 7.5, rel=0.1),
    ]
    assert not any(row["noise"] for row in rows)  # the first one has nothing to be compared with
    table = ladder_table(rows).splitlines()
    assert table[2].lstrip().startswith("(wide)") and "inside" not in table[3] and "to" in table[3]
    rows[2]["seconds"] = {1: 5.0, 2: 7.0, 3: 30.0}
    assert f" {rows[2]['steps']:.0f} " in table[3] and " 7.0 " in ladder_table(rows).splitlines()[3]
    ax = plot_ladder(rows)
    small, large = ax.lines[0::2], ax.lines[1::2]
    assert [len(line.get_xdata()) for line in small] == [3] * 3
    assert [line.get_xdata()[0] for line in large] == [
        statistics.median(row["seconds"].values()) for row in rows
    ]


def test_the_picture_of_the_ladder_colors_by_the_verdict_and_brackets_what_was_rejected():
    same = rung_of("again", False)
    for run in same["runs"]:
        run["loss"] += 0.004 * (run["seed"] - 2)
    rungs = [rung_of("start", True), same, rung_of("wide", False, a_step=1.0)]
    rungs += [rung_of("one layer", True, a_step=0.05)]
    ax = plot_ladder(climb(rungs))
    wanted = [COLORS[verdict] for verdict in ("less", "noise", "more", "less")]
    assert len(set(COLORS.values())) == 3
    assert [line.get_color() for line in ax.lines[0::2]] == wanted
    assert [line.get_color() for line in ax.lines[1::2]] == wanted
    assert [label.get_text() for label in ax.get_yticklabels()] == ["start", "(again)", "(wide)", "one layer"]
    assert "(" not in ax.texts[0].get_text() and "1.00 (" in ax.texts[1].get_text()


def test_a_gain_whose_interval_holds_1_is_told_to_be_noise():
    same = rung_of("again", True)
    for run in same["runs"]:
        run["loss"] += 0.004 * (run["seed"] - 2)
    assert climb([rung_of("start", True), same])[1]["noise"] and "inside the noise" in ladder_table(
        climb([rung_of("start", True), same])
    )


@pytest.mark.parametrize(
    "losses, told",
    [
        ({90: [1.87] * 3, 110: [1.9] * 3}, "110 steps end above 1.88, and 90 steps do not: the seeds"),
        (
            {77: [1.9] * 3, 92: [1.87] * 3, 110: [1.89] * 3, 130: [1.85] * 3},
            "110 steps end above 1.88, and 92 steps do not",
        ),
        ({90: [1.9] * 3, 110: [1.86] * 2}, "runs of 90 and of 110 steps have different seeds"),
        ({90: [1.9] * 2, 110: [1.86] * 3}, "runs of 90 and of 110 steps have different seeds"),
    ],
)
def test_runs_that_give_no_crossing_are_told(losses, told):
    runs = [dict(seed=s, steps=n, loss=loss) for n in losses for s, loss in enumerate(losses[n])]
    with pytest.raises(UserError, match=told):
        steps_to_goal(runs)


@pytest.mark.parametrize("here", [{1: 5.0, 3: 4.0}, {1: 5.0}, {1: 5.0, 2: 4.0, 3: 3.0}, {}])
def test_rungs_with_other_seeds_make_no_pairs(here):
    with pytest.raises(UserError, match=r"the seeds \[1, 2\] and .* make no pairs"):
        gain({1: 10.0, 2: 9.0}, here)
