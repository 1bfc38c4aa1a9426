"""`python -m tinygpt.ddp`: alone, under torchrun, on two hosts."""

import os
import subprocess
import sys

import pytest
import torch
from events import LAST_RESORT
from two_hosts import TwoHosts, why_not

from tinygpt.ddp.__main__ import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@pytest.fixture(autouse=True)
def no_torchrun_around_us(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_the_check_program_runs_alone_and_refuses_a_half_set_environment(capsys, monkeypatch):
    assert main(["--mib", "0.1", "--device", "cpu"]) == 0
    assert "the sum is right" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([]) == 2
    assert "start with torchrun" in capsys.readouterr().err


def test_the_check_program_runs_under_torchrun():
    words = [*TORCHRUN, "2", "-m", "tinygpt.ddp", "--mib", "1", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=LAST_RESORT, env=env)
    assert done.returncode == 0, done.stderr
    ranks = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert ranks and "rank 1: " in done.stdout
    assert "1 MiB summed over 2 rank(s), the sum is right" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"no two hosts: {why_not()}")
def test_the_check_program_runs_on_two_hosts():
    with TwoHosts() as hosts:
        first, second = hosts.torchrun("tinygpt.ddp", "--mib", "1", "--device", "cpu")
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert "rank 0: host0, cpu" in first.stdout and "rank 1: host1, cpu" in first.stdout
    assert "1 MiB summed over 2 rank(s), the sum is right" in first.stdout


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_check_program_runs_with_nccl():
    n = str(torch.cuda.device_count())
    words = [*TORCHRUN, n, "-m", "tinygpt.ddp", "--device", "cuda"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LAST_RESORT)
    assert done.returncode == 0 and f"summed over {n} rank(s), the sum is right" in done.stdout, done.stderr
