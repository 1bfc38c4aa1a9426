"""Several GPUs of one machine: how steps of GPT-2 scale with DDP, ZeRO and FSDP2, and which messages hide.

torchrun starts this file once for each GPU. A row says tokens a second against one GPU, and from a trace of
rank 0 how much of the time of NCCL's kernels other kernels ran too: that part costs nothing.
"""

import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # started by torchrun
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

import torch

from gpu_pieces.alone import alone
from gpu_pieces.record import Later, Setup, run_until
from gpu_pieces.training import Step, clocked, covered, kernel_spans, rows_that_fit, speed
from tinygpt.ddp.world import close_world, init_world

WAYS = ("ddp", "zero", "fsdp")


def overlap(spans: dict[str, list]) -> dict:
    "How long messages were on their way, and the share of it in which something was computed."
    messages = [span for name, each in spans.items() if "nccl" in name.lower() for span in each]
    others = [span for name, each in spans.items() if "nccl" not in name.lower() for span in each]
    if not messages:
        return dict(messages_ms=None, hidden=None)
    alone = covered(messages + others) - covered(others)
    return dict(messages_ms=round(1e3 * covered(messages), 3), hidden=round(1 - alone / covered(messages), 4))


def worker(way: str, out: str, device: str, reduced: str, rows: str):
    "One rank: the median of its steps, a trace; rank 0 writes both down."
    setup = Setup(device, bool(int(reduced)), 0.0, Path(out), Path(out))
    world = init_world(setup.device)
    step = Step(setup, int(rows), compile=setup.pick("on", "off"), world=world, parallel=way)
    # every rank makes the same number of steps: they wait for each other
    for _ in range(setup.pick(5, 1)):
        step()
    seconds = [clocked(step) for _ in range(setup.pick(20, 2))]
    spans = kernel_spans(step, setup.device)
    if world.is_main:
        tokens = world.world_size * step.rows * step.config.block_size
        median = statistics.median(seconds)
        found = dict(ms=round(1e3 * median, 3), **speed(setup, step.config, tokens, median), **overlap(spans))
        for name in ("mfu", "of_measured_peak"):  # of all GPUs together
            found[name] = round(found[name] / world.world_size, 4)
        if setup.device == "cuda":
            found["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        (Path(out) / "found.json").write_text(json.dumps(found))
    close_world()


def launch(setup, way: str, count: int, rows: int) -> dict:
    "A row: torchrun with so many processes."
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(count),
        ]
        command += [__file__, way, folder, setup.device, str(int(setup.reduced)), str(rows)]
        env = os.environ | dict(OMP_NUM_THREADS="1")
        limit = max(setup.seconds_left, 60)
        with alone():
            said, status = run_until(command, limit, env)
        row = dict(way=way, gpus=count, rows_each=rows)
        if status is None:
            raise Later([row | dict(error=f"not at its end after {limit:.0f} s: give more with --minutes")])
        found = Path(folder) / "found.json"
        if status or not found.exists():
            told = [line for line in said.splitlines() if "Error" in line] or ["it failed"]
            raise RuntimeError(told[-1].strip())
        return row | json.loads(found.read_text())


def cases(setup) -> list:
    "One GPU, then two, four ... and all, in each of the three ways."
    gpus = torch.cuda.device_count() if setup.device == "cuda" else 2
    if gpus == 1:
        return [("several GPUs", lambda: dict(way="one GPU", error="nothing to measure"))]
    counts = sorted({2**n for n in range(1, 10) if 2**n < gpus} | {gpus})
    rows = rows_that_fit(setup)
    found = [] if setup.reduced else [("one GPU", partial(launch, setup, "auto", 1, rows))]
    for count in counts:
        for way in setup.pick(WAYS, WAYS[:1]):
            found.append((f"{way} on {count}", partial(launch, setup, way, count, rows)))
    return found


if __name__ == "__main__":
    worker(*sys.argv[1:])
