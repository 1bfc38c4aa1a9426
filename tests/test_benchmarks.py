"""What the benchmarks share."""

import ast
import statistics
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
from data_machine import load, lowest, tune  # noqa: E402


@pytest.mark.parametrize(
    "best_at, tried",
    [
        (2, [1, 2, 4]),  # within the first three
        (1, [1, 2, 4, 0.5]),
        (0.3, [1, 2, 4, 0.5, 0.25, 0.125]),
        (20, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_rates_move_outward_until_the_best_has_a_worse_one_on_either_side(best_at, tried):
    found = tune(lambda rate: max(rate / best_at, best_at / rate), (1, 2, 4))
    assert list(found) == tried and min(found) < lowest(found) < max(found)


def test_of_equal_rates_the_first_tried_is_the_best_and_no_more_are_tried_than_may_be():
    assert list(tune(lambda rate: 0.0 if rate >= 2 else 1.0, (1, 2, 4))) == [1, 2, 4]
    assert list(tune(lambda rate: 0.0 if rate <= 2 else 1.0, (1, 2, 4))) == [1, 2, 4, 0.5]
    assert list(tune(lambda rate: rate, (1, 2, 4), most=5)) == [1, 2, 4, 0.5, 0.25]


def test_a_benchmark_may_have_its_own_best_and_its_own_steps():
    def most_right(found):
        return max(found, key=lambda rate: sum(found[rate]))

    found = tune(lambda rate: [rate, -abs(rate - 9) * 9], (1, 3), most_right, lambda rate, up: rate + 3)
    assert list(found) == [1, 3, 6, 9, 12] and most_right(found) == 9


def recorded_choices():
    "(name, the losses by rate, the first rates, the most rates, the choice) of each record that has them."
    for name, kinds in (("packing", ("loaders", "packing")), ("document_mask", ("ways",))):
        record = load(name)
        for ways in map(record.get, kinds):
            for way, found in ways.items():
                grid = {float(rate): loss for rate, loss in found["grid"].items()}
                yield f"{name}, {way}", grid, record["rates"], 6, found["best"]
    for name in ("laptop_starts", "laptop_starts_full"):
        record = load(name)
        for init, best in record["best"].items():
            runs = [run for run in record["runs"] if run["init"] == init and run["seed"] > 100]
            rates = {run["muon_lr"] for run in runs}
            means = {lr: statistics.mean(r["loss"] for r in runs if r["muon_lr"] == lr) for lr in rates}
            yield f"{name}, {init}", means, (0.005, 0.01, 0.02), 9, best


@pytest.mark.parametrize("name, losses, rates, most, best", list(recorded_choices()))
def test_the_records_have_the_rates_that_are_tried_and_chosen(name, losses, rates, most, best):
    found = tune(losses.__getitem__, rates, most=most)
    assert found.keys() == losses.keys() and lowest(found) == best


def test_what_a_benchmark_imports_from_another_is_there():
    trees = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in BENCHMARKS.glob("*.py")}
    imports = [
        (name, node)
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in trees
    ]
    assert len(imports) > 20
    for name, node in imports:
        known = set()
        for line in trees[node.module].body:
            known |= {getattr(line, "name", None)}
            for target in getattr(line, "targets", []):
                known |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        missing = {part.name for part in node.names} - known
        assert not missing, f"{name} wants {missing} of {node.module}"
