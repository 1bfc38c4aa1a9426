"Time on a GPU and on a CPU: medians over turns, in which the variants alternate."

import math
import statistics
import time
from collections.abc import Callable

import torch

from gpu_pieces.record import one_line
from tinygpt.support import Timing

SLOW = 1.0  # seconds: what takes longer is timed fewer times


def timed(
    fn: Callable,  # called without arguments
    device: str,
    calls: int = 1,
) -> float:
    "Seconds of one call; on a GPU between two events in its queue, so that the host's part is left out."
    if device != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            fn()
        return (time.perf_counter() - begin) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def take_turns(
    variants: dict[str, Callable],  # name -> called without arguments
    device: str,
    turns: int = 7,
    warmup: int = 3,
    at_least: float = 0.02,  # seconds of a turn: short work is called several times in one
) -> tuple[dict[str, Timing], dict[str, str]]:
    "(seconds of a call of each variant, the error of each that failed). The turns alternate."
    calls, seconds, errors = {}, {}, {}
    for name, fn in variants.items():
        try:
            once = [timed(fn, device) for _ in range(warmup)][-1]
        except Exception as error:  # no kernel for it, no memory
            errors[name] = one_line(error)
            continue
        calls[name] = max(1, min(200, math.ceil(at_least / max(once, 1e-9))))
        seconds[name] = []
    slowest = max((timed(variants[name], device) for name in calls), default=0)
    for _ in range(turns if slowest < SLOW else 3):
        for name, values in seconds.items():
            values.append(timed(variants[name], device, calls[name]))
    return {n: Timing(statistics.median(v), min(v), max(v)) for n, v in seconds.items()}, errors


def ms(
    timing: Timing,
) -> dict:
    "A timing as entries of a row: the median, and the spread."
    digits = {key: float(f"{1e3 * getattr(timing, key):.4g}") for key in ("median", "min", "max")}
    return dict(ms=digits["median"], ms_min=digits["min"], ms_max=digits["max"])
