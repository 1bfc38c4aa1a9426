"""Scaling laws: known laws come back from their data, closed forms agree with search, intervals hold."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.measure.speed import flops_per_token
from tinygpt.run.config import TrainConfig
from tinygpt.run.presets import preset
from tinygpt.scaling import (
    Law,
    bootstrap_laws,
    compare_sizes,
    fit_law,
    isoflop_minimum,
    matched_run,
    power_law,
    predict_loss,
)
from tinygpt.schedule import schedule_problems
from tinygpt.support import UserError

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
TRUTH = Law(E=1.7, A=40.0, B=200.0, alpha=0.3, beta=0.35)
BUDGETS = (2.5e11, 5e11, 1e12)
N, D = np.array([(n, flops / 6 / (n + 1e5)) for flops in BUDGETS for n in (1.6e4, 1e5, 3.3e5, 8.5e5)]).T
L = TRUTH.loss(N, D)


def numbers(law):
    return np.array(list(asdict(law).values()))


def test_the_loss_is_the_sum_of_its_three_terms():
    law = Law(E=1.0, A=8.0, B=9.0, alpha=0.5, beta=2.0)
    assert law.loss(16, 3) == 1 + 2 + 1
    assert law.loss(np.array([16, 64]), 3).tolist() == [4, 3]


def test_chinchilla_s_published_law_gives_the_optimum_that_a_search_finds():
    law = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)
    for per in (6.0, 7.5):
        params, tokens = law.optimum(5.76e23, per)
        assert math.isclose(per * params * tokens, 5.76e23)
        sizes = np.geomspace(1e9, 1e12, 100_001)
        assert math.isclose(params, sizes[law.loss(sizes, 5.76e23 / per / sizes).argmin()], rel_tol=1e-3)


# exponents that the chapter's fits and the papers' lie between
@settings(max_examples=10, deadline=None)
@given(st.floats(0.2, 0.7), st.floats(0.2, 0.7), st.floats(1.0, 3.0))
def test_a_known_law_comes_back_from_losses_without_noise(alpha, beta, E):
    # terms of the size that they have in real runs: each a visible part of the loss
    law = Law(E, 2.0 * 1e5**alpha, 2.0 * 1e6**beta, alpha, beta)
    found = fit_law(N, D, law.loss(N, D))
    np.testing.assert_allclose(found.loss(N, D), law.loss(N, D), rtol=1e-6)
    np.testing.assert_allclose(numbers(found)[[0, 3, 4]], [E, alpha, beta], rtol=1e-2)


@pytest.mark.parametrize("alpha, beta", [(0.3, 1.1), (0.6, 0.2)])
def test_a_walk_that_ends_in_the_wrong_place_is_not_the_fit(alpha, beta):
    truth = Law(E=0.5, A=40.0, B=200.0, alpha=alpha, beta=beta)  # the first of the starts goes astray here
    found = fit_law(N, D, truth.loss(N, D))
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta), rel=1e-4)


def test_one_failed_run_hardly_moves_the_law():
    failed = L.copy()
    failed[5] += 1.0
    far = 1e6, 1e7
    assert abs(fit_law(N, D, failed).loss(*far) - TRUTH.loss(*far)) < 0.005


def huber_of(theta, target):
    x, y = (torch.tensor(np.log(values)) for values in (N, D))
    e, a, b, alpha, beta = theta
    said = torch.logsumexp(torch.stack([e.expand_as(x), a - alpha * x, b - beta * y]), 0)
    return F.huber_loss(said, target, delta=1e-3, reduction="sum")


def test_torch_s_lbfgs_finds_nothing_lower_on_noisy_runs():
    noisy = L * np.exp(0.004 * np.random.default_rng(3).normal(size=len(L)))
    law, target = fit_law(N, D, noisy), torch.tensor(np.log(noisy))
    start = [*np.log([law.E, law.A, law.B]), law.alpha, law.beta]
    ours = huber_of(torch.tensor(start), target).item()
    others = []
    for begin in (start, [*np.log([1.7, 40, 200]), 0.3, 0.35]):
        theta = torch.tensor(begin, dtype=torch.float64, requires_grad=True)
        tight = dict(tolerance_grad=1e-12, tolerance_change=1e-16, max_iter=1000)
        optimizer = torch.optim.LBFGS([theta], line_search_fn="strong_wolfe", **tight)

        def closure():
            optimizer.zero_grad()
            loss = huber_of(theta, target) * 1e6  # beside the tolerances
            loss.backward()
            return loss

        optimizer.step(closure)
        others.append(huber_of(theta.detach(), target).item())
    assert ours <= min(others) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d, losses: (n[:5], d[:5], losses[:5]), "5 runs"),
        (lambda n, d, losses: (np.full_like(n, 1e5), d, losses), "1 sizes"),
        (lambda n, d, losses: (n, d, np.where(n > 5e5, np.nan, losses)), "finite"),
        (lambda n, d, losses: (n, d, losses - 10), "above 0"),
    ],
)
def test_runs_that_fix_no_law_are_refused_in_a_sentence(change, words):
    with pytest.raises(UserError, match=words):
        fit_law(*change(N, D, L))
    with pytest.raises(UserError, match=words):
        bootstrap_laws(*change(N, D, L), draws=2)


@pytest.mark.parametrize("delta", [0, -1e-3, math.nan])
def test_a_bend_that_is_not_above_zero_is_refused_for_no_walk_would_leave_its_start(delta):
    for fit in (fit_law, bootstrap_laws):
        with pytest.raises(UserError, match=f"delta = {delta}"):
            fit(N, D, L, delta=delta)


def test_a_bootstrap_of_so_few_runs_that_every_draw_is_the_same_is_refused():
    some = [0, 1, 2, 4, 5, 6, 7, 8]  # three sizes and lengths, and eight runs
    noisy = L[some] * np.exp(0.004 * np.random.default_rng(0).normal(size=8))
    for few in (6, 7):
        with pytest.raises(UserError, match=str(few)):
            bootstrap_laws(N[some][:few], D[some][:few], noisy[:few], draws=10)
    low, _, high = predict_loss(bootstrap_laws(N[some], D[some], noisy, draws=40), 3.3e5, 1e6)
    assert low < high


def test_draws_from_exact_runs_all_give_the_law():
    laws = bootstrap_laws(N, D, L, draws=10)
    for law in laws:
        np.testing.assert_allclose(law.loss(N, D), L, rtol=1e-6)


def test_a_bootstrap_repeats_with_its_seed_and_scatters_as_the_runs_do():
    rng = np.random.default_rng(0)
    wide = []
    for noise in (0.002, 0.008):
        noisy = L * np.exp(noise * rng.normal(size=len(L)))
        laws = bootstrap_laws(N, D, noisy, draws=40)
        assert laws == bootstrap_laws(N, D, noisy, draws=40)
        assert laws != bootstrap_laws(N, D, noisy, draws=40, seed=1)
        low, _, high = predict_loss(laws, 3.3e5, 1e6)
        wide.append(high - low)
    assert wide[1] > 2 * wide[0] > 0


def test_runs_of_a_group_are_drawn_together():
    noisy = L * np.exp(0.004 * np.random.default_rng(0).normal(size=len(L)))
    single = bootstrap_laws(N, D, noisy, draws=10)
    # each run three times: drawn as one, the three weigh as the one did
    thrice = [np.tile(values, 3) for values in (N, D, noisy)]
    grouped = bootstrap_laws(*thrice, draws=10, groups=np.tile(np.arange(len(L)), 3))
    for one, other in zip(single, grouped, strict=True):
        np.testing.assert_allclose(one.loss(N, D), other.loss(N, D), rtol=1e-6)
    with pytest.raises(UserError, match="6 groups"):
        bootstrap_laws(*thrice, groups=np.tile(np.arange(6), 6))
    with pytest.raises(UserError, match="12 groups for 36 runs"):
        bootstrap_laws(*thrice, groups=np.arange(12))


@pytest.mark.slow
def test_most_intervals_of_90_percent_hold_the_truth():
    right = 0
    for seed in range(12):
        noisy = L * np.exp(0.004 * np.random.default_rng(seed).normal(size=len(L)))
        low, _, high = predict_loss(bootstrap_laws(N, D, noisy, draws=40, seed=seed), 3.3e5, 1e6)
        right += low <= TRUTH.loss(3.3e5, 1e6) <= high
    assert right >= 8


def test_a_prediction_of_one_law_is_a_normal_one_around_it():
    low, middle, high = predict_loss([TRUTH] * 3, 1e5, 1e6, noise=0.01, level=0.9)
    assert math.isclose(middle, TRUTH.loss(1e5, 1e6), rel_tol=1e-9)
    # 1.645 deviations; the grid is as fine as a hundredth
    assert math.isclose(high - middle, middle - low, rel_tol=1e-6)
    assert math.isclose((high - middle) / middle, 0.01645, rel_tol=0.03)
    assert predict_loss([TRUTH], 1e5, 1e6) == (TRUTH.loss(1e5, 1e6),) * 3
    narrow, wide = (predict_loss([TRUTH], 1e5, 1e6, 0.01, level) for level in (0.5, 0.9))
    assert narrow[2] < wide[2]


def test_the_bottom_of_a_parabola_is_found_to_the_last_digits():
    sizes = np.array([2e4, 1e5, 3e5, 9e5])
    size, loss = isoflop_minimum(sizes, 4.2 + 0.3 * np.log(sizes / 1.5e5) ** 2)
    assert math.isclose(size, 1.5e5) and math.isclose(loss, 4.2)


@pytest.mark.parametrize(
    ("sizes", "losses", "words"),
    [
        ([1e5, 1e6], [3, 3], "2 sizes"),
        ([1e5, 1e5, 1e6], [3, 3, 3.1], "2 sizes"),
        ([1e5, 1e6, 1e7], [3, 3.5, 3], None),
        ([1e5, 1e6, 1e7], [3.5, 3.1, 2.9], "larger"),
        ([1e5, 1e6, 1e7], [2.9, 3.1, 3.5], "smaller"),
        ([1e5, 1e6, 1e7], [3, 2.9, math.nan], None),
        ([1e5, 1e6, 1e7], [math.inf, 2.9, 3], None),
        ([0, 1e6, 1e7], [3, 2.9, 3], None),
    ],
)
def test_runs_that_enclose_no_minimum_are_refused_in_a_sentence(sizes, losses, words):
    with pytest.raises(UserError, match=words):
        isoflop_minimum(sizes, losses)


def test_a_power_law_is_a_line_in_logarithms():
    x = np.array([1.0, 3.0, 20.0])
    factor, exponent = power_law(x, 0.3 * x**0.5)
    assert math.isclose(factor, 0.3) and math.isclose(exponent, 0.5)


def test_sizes_are_compared_at_equal_flops_the_best_first():
    law = Law(E=1.0, A=1.0, B=1.0, alpha=1.0, beta=1.0)
    # blocks of 2 parameters see 10 tokens, those of 10 see 2: the one between is best
    rows = compare_sizes(law, {"small": (2, 6), "large": (10, 30), "middle": (4, 15)}, 60)
    assert next(iter(rows)) == "middle" and rows["middle"] == (4.0, 1.5)
    assert rows["small"] == (10.0, pytest.approx(1.6)) and rows["large"] == (2.0, pytest.approx(1.6))


def test_a_matched_run_spends_its_budget_on_a_schedule_of_its_own_length():
    config = preset("laptop")
    before = asdict(config)
    run = matched_run(config, 1e12)
    assert asdict(config) == before  # a copy was changed
    a_step = config.data.batch_size * config.model.block_size * flops_per_token(config.model)
    assert abs(run.optim.max_steps * a_step - 1e12) <= a_step / 2
    o = run.optim
    assert o.warmup_steps == max(1, round(0.02 * o.max_steps)) < config.optim.warmup_steps
    assert schedule_problems(o.schedule, o.max_steps, o.warmup_steps, o.final_lr, o.cooldown) == []
    assert run.eval.eval_every == run.eval.save_every == run.eval.sample_tokens == 0
    assert isinstance(run, TrainConfig) and run.problems() == []


def test_a_budget_for_too_few_steps_is_refused_in_a_sentence():
    with pytest.raises(UserError, match=r"\b5 steps.*\b20\b"):
        matched_run(preset("laptop"), 1e11)


@pytest.mark.parametrize(
    "bad", [dict(flops=math.nan), dict(flops=math.inf), dict(warmup=2), dict(warmup=-0.1)]
)
def test_a_budget_without_end_and_a_warm_up_beyond_the_run_are_refused_in_a_sentence(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(UserError, match=f"{name} = {value}"):
        matched_run(preset("laptop"), **dict(flops=1e13) | bad)


RECORD = RESULTS / "scaling.json"
recorded = pytest.mark.skipif(not RECORD.exists(), reason="no record of benchmarks/scaling.py")


def budget_of(run, record):
    return min(record["budgets"], key=lambda flops: abs(math.log(run["flops"] / flops)))


@recorded
def test_the_record_has_five_sizes_at_three_budgets_with_three_seeds_and_all_were_whole():
    record = json.loads(RECORD.read_text())
    groups = {}
    for run in record["runs"]:
        assert math.isclose(run["flops"], budget_of(run, record), rel_tol=0.01)
        groups.setdefault((budget_of(run, record), run["matrices"]), []).append(run["seed"])
    assert [sum(place[0] == budget for place in groups) for budget in record["budgets"]] == [5, 5, 5]
    assert all(sorted(seeds) == [1, 2, 3] for seeds in groups.values())
    made = [run for part in ("runs", "large", "around", "slower") for run in record[part]]
    # the same validation characters, so every run went to its end; one shape, so a size is its width
    assert len({run["val_tokens"] for run in made}) == 1
    assert {run["matrices"] / run["width"] ** 2 for run in made} == {24}


@recorded
def test_all_recorded_runs_have_the_rates_with_the_lowest_sum_of_losses_and_no_rate_is_at_an_edge():
    record = json.loads(RECORD.read_text())
    for part, key in (("muon_rates", "muon_lr"), ("adamw_rates", "learning_rate")):
        losses = {}
        for run in record[part]:
            losses.setdefault(run[key], []).append(run["loss"])
            assert run["seed"] == 0
        *_, best = sorted(losses, key=lambda rate: -sum(losses[rate]))
        assert min(losses) < best < max(losses)
        assert {run[key] for run in record["runs"] + record["large"] + record["around"]} == {best}


@recorded
def test_the_recorded_prediction_follows_from_the_recorded_runs_and_the_large_runs_are_those_foretold():
    record = json.loads(RECORD.read_text())
    foretold = json.loads((RESULTS / "scaling_prediction.json").read_text())
    stars = []
    for budget in record["budgets"]:
        here = [run for run in record["runs"] if budget_of(run, record) == budget]
        # least squares on all runs is the parabola through the means, since each size has as many seeds
        curve = np.polynomial.Polynomial.fit(
            np.log([r["matrices"] for r in here]), [r["loss"] for r in here], 2
        )
        stars.append(curve.deriv().roots().item())
    slope, height = np.polyfit(np.log(record["budgets"]), stars, 1)
    best = math.exp(height + slope * math.log(foretold["budget"]))
    assert math.isclose(best, foretold["best_size"], rel_tol=1e-6)
    assert math.isclose(foretold["budget"], 4 * max(record["budgets"]))
    sizes, tokens, losses = (
        np.array([run[key] for run in record["runs"]], float) for key in ("matrices", "tokens", "loss")
    )
    law, laws = fit_law(sizes, tokens, losses), bootstrap_laws(sizes, tokens, losses)
    noise = foretold["noise"] / 3**0.5
    for part, row in zip((1 / 2, 1, 2), foretold["members"], strict=True):
        assert abs(math.log(row["matrices"] / (part * best))) < 0.1
        low, _, high = predict_loss(laws, row["matrices"], row["tokens"], noise)
        said = [law.loss(row["matrices"], row["tokens"]), low, high]
        assert np.allclose(said, [row["loss"], row["low"], row["high"]], rtol=1e-4)
        runs = [run for run in record["large"] if run["width"] == row["width"]]
        assert [run["tokens"] for run in runs] == [row["tokens"]] * 3


PRESET_RECORD = RESULTS / "scaling_preset.json"


@pytest.mark.skipif(not PRESET_RECORD.exists(), reason="no record of benchmarks/scaling.py preset")
def test_the_other_sizes_at_the_presets_budget_spent_its_arithmetic_with_its_rates():
    laptop = preset("laptop")
    tokens = laptop.optim.max_steps * laptop.data.batch_size * laptop.model.block_size
    made = json.loads(PRESET_RECORD.read_text())["runs"]
    assert sorted(run["layers"] for run in made) == [2, 3, 5]
    for run in made:
        # one text for all: as many nats a token for a bit a byte
        assert math.isclose(
            run["loss"] / run["bits_per_byte"], made[0]["loss"] / made[0]["bits_per_byte"], rel_tol=1e-4
        )
        assert math.isclose(run["flops"], tokens * flops_per_token(laptop.model), rel_tol=1e-3)
        assert (run["muon_lr"], run["learning_rate"]) == (laptop.optim.muon_lr, laptop.optim.learning_rate)
        assert run["tokens"] == run["steps"] * laptop.data.batch_size * laptop.model.block_size
