"""What does torch.compile cost on this GPU, and from how much work on does it pay?

By benchmarks/compile.py, in processes of its own: the first with an empty cache (cold), the second with what
the first left there (warm). `auto` compiles a run from `tinygpt.compile.COMPILE_FROM` FLOPs on; a row says
which number this machine would put there.
"""

import argparse
from functools import partial

import compile as benchmark

from gpu_pieces.alone import alone
from tinygpt.compile import COMPILE_FROM

PRESETS = {
    "shakespeare-char": 12,
    "tinystories": 12,
    "gpt2": 6,
}  # name -> pairs of steps; gpt2's take seconds


def one(setup, name: str) -> dict:
    "A preset's step: the first one cold and warm, later ones, and the step from which on compiling has paid."
    args = argparse.Namespace(
        preset=name,
        rounds=1,
        steps=setup.pick(PRESETS.get(name), 3),
        threads=setup.pick(0, 1),
        device=setup.device,
        dtype="auto",
        backend=setup.backend,
    )
    try:
        with alone():
            rounds, found = benchmark.measure(args)
    except SystemExit as error:  # what the process that failed said
        lines = str(error).strip().splitlines()
        raise RuntimeError(lines[-1] if lines else "the process failed") from None
    wall = benchmark.medians(rounds, 0)
    row = dict(preset=name, parameters=found["parameters"], tokens_per_step=found["tokens"])
    row |= {f"{kind}_s": round(wall[kind], 4) for kind in ("eager", "compiled", "cold_first", "warm_first")}
    row |= dict(speedup=round(wall["speedup"], 3), auto_from_flops=COMPILE_FROM[setup.device])
    for kind in ("cold", "warm"):
        steps = wall[f"break_even_{kind}"]
        flops = None if steps is None else float(f"{6 * found['parameters'] * found['tokens'] * steps:.3g}")
        row |= {f"break_even_steps_{kind}": steps, f"break_even_flops_{kind}": flops}
    return row


def cases(setup) -> list:
    "A case for each preset that is meant for GPUs."
    return [(name, partial(one, setup, name)) for name in setup.pick(PRESETS, ("speedrun",))]
