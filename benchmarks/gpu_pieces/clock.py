"Time on a GPU and on a CPU: medians over turns, in which the variants alternate."

import math
import statistics
import time
from collections.abc import Callable

import torch

from gpu_pieces.alone import alone, get_ready
from gpu_pieces.record import told
from tinygpt.support import Timing, synchronize

SLOW = 1.0  # seconds: what takes longer is timed fewer times
LONG = 0.005  # seconds that the host needs for a call: more does not fit in the GPU's queue


def timed(
    fn: Callable,  # called without arguments
    device: str,
    calls: int = 1,
    ahead: float = 0.0,  # seconds for which the GPU is kept busy before, while the host fills its queue
) -> float:
    """Seconds of one call.

    On a GPU between two events in its queue: what the host does while the GPU computes is no part of it, what
    the GPU waits for is. With `ahead` it waits for nothing: the kernels' own time.
    """
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - begin) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead:
        torch.cuda._sleep(int(2e9 * ahead))  # cycles, of which a GPU makes 2e9 a second at most
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def host_seconds(fn: Callable) -> float:
    "Seconds until the host is through with a call, whether the GPU is or not."
    synchronize()
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def take_turns(
    variants: dict[str, Callable],  # name -> called without arguments
    device: str,
    turns: int = 7,
    warmup: int = 3,
    at_least: float = 0.02,  # seconds of a turn: short work is called several times in one
    kernels_only: bool = False,  # on a GPU: without the time in which it waits for the host
) -> tuple[dict[str, Timing], dict[str, str]]:
    "(seconds of a call of each variant, the error of each that failed). The turns alternate."
    errors = {}
    for name, fn in variants.items():
        try:
            get_ready(fn)
        except Exception as error:  # no kernel for it, no memory
            errors[name] = told(error)
    with alone():
        there = {name: fn for name, fn in variants.items() if name not in errors}
        timings, failed = _take_turns(there, device, turns, warmup, at_least, kernels_only)
    return timings, errors | failed


def _take_turns(variants, device, turns, warmup, at_least, kernels_only):
    once, how, seconds, errors = {}, {}, {}, {}
    for name, fn in variants.items():
        try:
            once[name] = [timed(fn, device) for _ in range(warmup)][-1]
            calls = max(1, min(200, math.ceil(at_least / max(once[name], 1e-9))))
            host = host_seconds(fn) if kernels_only and device == "cuda" else LONG
            how[name] = calls, 1.5 * host * calls if host < LONG else 0.0
            seconds[name] = []
        except Exception as error:
            errors[name] = told(error)
    slowest = max((once[name] for name in seconds), default=0)
    for _ in range(turns if slowest < SLOW else 3):
        for name in list(seconds):
            try:
                seconds[name].append(timed(variants[name], device, *how[name]))
            except Exception as error:
                errors[name] = told(error)
                del seconds[name]
    return {n: Timing(statistics.median(v), min(v), max(v)) for n, v in seconds.items()}, errors


def ms(
    timing: Timing,
) -> dict:
    "A timing as entries of a row: the median, and the spread."
    digits = {key: float(f"{1e3 * getattr(timing, key):.4g}") for key in ("median", "min", "max")}
    return dict(ms=digits["median"], ms_min=digits["min"], ms_max=digits["max"])
