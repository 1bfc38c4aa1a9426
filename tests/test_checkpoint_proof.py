"""A resumed run is the same run, bit for bit, and a killed save harms nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tinygpt.checkpoint import checkpoints, load_training_state, prune, verify_checkpoint, what_differs
from tinygpt.checkpoint_proof import (
    SmallRun,
    killed_saves,
    load_run,
    prove_resume,
    same_state,
    save_run,
    small_tokens,
    train_run,
)
from tinygpt.ddp.world import World, run_processes

# an epoch of the shard loader is 6 steps; the gradients of step 3 are infinite, so that step is skipped
STOPS = {
    0: "nothing done",
    1: "first step",
    4: "after a skipped step",
    5: "mid-epoch",
    6: "epoch edge",
    7: "second epoch",
    12: "second edge",
}
LOADERS = ("random", "shard", "stream")


def assert_exact(cases, results):
    for case, result in zip(cases, results):
        assert len(result["straight"]) == 14 and result["straight"] == result["resumed"], case
        assert result["same"], case


# the test after this one tries all pairs
@pytest.mark.parametrize(
    "optimizer, loader", [("adamw", "shard"), ("adamw", "stream"), ("muon", "random"), ("muon", "stream")]
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, optimizer, loader):
    cases = [dict(optimizer=optimizer, loader=loader, stop=stop, steps=14, bad_step=3) for stop in STOPS]
    assert_exact(cases, prove_resume(World(), tmp_path, cases))


@pytest.mark.parametrize("world_size", [2, 3])
def test_so_it_does_in_several_processes_and_without_settled_buckets_it_does_not(tmp_path, world_size):
    cases = []
    for optimizer, stop in (("adamw", 4), ("muon", 6)):
        for loader in LOADERS:
            cases.append(dict(optimizer=optimizer, loader=loader, stop=stop, steps=14, bad_step=3))
    unsettled = dict(stop=6, steps=14, settle=False)
    ranks = run_processes(prove_resume, world_size, tmp_path, [*cases, unsettled], timeout=240)
    for results in ranks:
        assert_exact(cases, results[:-1])
        assert results[0]["straight"] == ranks[0][0]["straight"]  # all ranks report the same mean
    unsettled = ranks[0][-1]
    assert unsettled["same"] == (world_size == 2)  # two addends have one order only
    assert max(abs(a - b) for a, b in zip(unsettled["straight"], unsettled["resumed"])) < 1e-5


def test_on_another_number_of_processes_the_data_and_the_losses_go_on(tmp_path):
    cases = [dict(loader=l, stop=6, steps=14, dropout=0.0) for l in LOADERS]
    two = run_processes(prove_resume, 2, tmp_path, cases, timeout=240)[0]
    for number, case in enumerate(cases):
        alone = SmallRun(loader=case["loader"], steps=14, dropout=0.0)
        straight = train_run(alone, 14)
        resumed = load_run(SmallRun(loader=case["loader"], steps=14, dropout=0.0), tmp_path / f"case{number}")
        state = json.loads((tmp_path / f"case{number}/state.json").read_text())
        assert len(state["rng"]) == 2 and state["rng"][0] != state["rng"][1]
        assert "processes: 2 before, 1 now" in " ".join(what_differs(state))
        on = train_run(resumed, 14)
        assert on == pytest.approx(straight[6:], abs=1e-5)
        assert two[number]["straight"] == pytest.approx(straight, abs=1e-5)
        for a, b in zip(resumed.plain.parameters(), alone.plain.parameters()):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("part", ["optimizer", "rng", "loader", "schedule", "scaler"])
def test_the_proof_notices_each_part_that_is_forgotten(tmp_path, part):
    (result,) = prove_resume(World(), tmp_path, [dict(stop=6, steps=14, bad_step=3, forget=(part,))])
    assert result["straight"][:6] == result["resumed"][:6] and not result["same"]
    assert part == "scaler" or result["straight"] != result["resumed"]


def test_a_weight_off_by_the_last_bit_is_noticed(tmp_path):
    run = SmallRun()
    a = {"w": run.plain.wte.weight.detach().clone(), "n": [1, (2.0,)]}
    b = {"w": a["w"].clone(), "n": [1, (2.0,)]}
    assert same_state(a, b)
    b["w"][0, 0] = torch.nextafter(b["w"][0, 0], torch.tensor(1.0))
    assert not same_state(a, b)
    assert not same_state({"n": [1]}, {"n": [1, 2]})
    assert not same_state({"n": 1}, {"m": 1})


def test_the_same_numbers_in_other_bits_are_noticed():
    ones, zero = torch.ones(2), torch.zeros(())
    assert same_state(ones, ones.clone()) and same_state(zero, zero.clone())
    assert not same_state(ones, ones.double())
    assert not same_state(zero, -zero)
    assert not same_state(ones, torch.ones(1, 2))
    nan = torch.tensor([torch.nan])
    assert same_state(nan, nan.clone())
    for other in (1, None, {}, []):  # a part of another kind
        assert not same_state(ones, other) and not same_state(other, ones)


def test_saving_does_not_disturb_the_run_it_saves(tmp_path):
    straight = train_run(SmallRun(loader="stream"), 10)
    run = SmallRun(loader="stream")
    losses = train_run(run, 3)
    save_run(run, tmp_path / "a")
    losses += train_run(run, 7)
    save_run(run, tmp_path / "b")
    assert losses + train_run(run, 10) == straight


def test_the_epoch_of_the_small_run_is_six_steps():
    run = SmallRun(loader="shard")
    assert len(small_tokens()) == 577 and run.loader.n_windows == 36 and run.loader.batch_size == 6


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system has not")
def test_a_hundred_kills_during_saves_leave_each_time_a_checkpoint_that_loads(tmp_path):
    found = killed_saves(tmp_path / "run", 100)
    assert len(found) == 100 and all(kill["loads"] for kill in found)
    assert len({kill["files"] for kill in found}) > 2  # the kills struck at different places of a save
    assert all(verify_checkpoint(c) == "" for c in checkpoints(tmp_path / "run"))
    run = SmallRun(n_embd=64)
    load_training_state(checkpoints(tmp_path / "run")[-1], run.plain, run.optimizer)
    # nothing piles up: one save that is let finish, with its pruning, clears away what all victims left
    run.step = 10**6
    newest = save_run(run, tmp_path / "run/checkpoints/step_1000000")
    kept = prune(tmp_path / "run", 2)
    assert (
        newest in kept and sorted((tmp_path / "run/checkpoints").iterdir()) == sorted(kept) and len(kept) == 2
    )


FULL_DISK = """
import sys, time
from pathlib import Path
import tinygpt.checkpoint_proof as proof

saves, once = [], proof._save_once


def save(run, folder, in_place):
    if saves and disk_is_full:  # in a forked process
        raise OSError("the disk is full")
    if saves:
        time.sleep(60)  # the kill comes first
    saves.append(once(run, folder, in_place))
    (folder / "checkpoints/.step_000000.removed").mkdir()
    (folder / "checkpoints/.step_000000.removed/model.json").write_text("{}")


proof._save_once = save
for disk_is_full in (False, True):
    saves.clear()
    try:
        folder = Path(sys.argv[1], str(disk_is_full))
        print([kill["files"] for kill in proof._kill_savers(folder, 2, 0, False, 1.0)], flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    except OSError:
        print("a victim came back", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system has not")
def test_a_save_that_fails_by_itself_is_told_and_a_removal_is_no_unfinished_save(tmp_path):
    script = [sys.executable, "-c", FULL_DISK, str(tmp_path / "run")]
    said = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    killed, failed = said.stdout.splitlines()
    assert killed == "[0, 0]" and failed.startswith("a save failed by itself")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this system has not")
def test_the_kills_do_break_a_file_that_is_written_in_place(tmp_path):
    assert not all(kill["loads"] for kill in killed_saves(tmp_path / "run", 20, in_place=True))
