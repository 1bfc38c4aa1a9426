"""What makes a training step of GPT-2 faster: each change on top of the one before, and the peers beside it.

124 M parameters, rows of 1024 tokens, 32 of them or what the memory holds. A row of the record: tokens a
second, MFU against the data sheet's bfloat16, memory beside `tinygpt.measure.memory`'s prediction where it
makes one, the host's waits, the share of time in which the GPU had nothing to do, and its longest kernels.
The loss of the first step is that of the same weights and tokens in all of our rows: it differs by rounding.
"""

from functools import partial

import torch

from gpu_pieces.alone import alone, free_memory, get_ready, with_others
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.peers import build_nanogpt_step, nanogpt_step
from gpu_pieces.record import told
from gpu_pieces.training import (
    Step,
    clocked,
    count_syncs,
    gpt2_config,
    peak_memory,
    rows_that_fit,
    speed,
    trace,
)
from tinygpt.measure.memory import largest_batch, predict_memory
from tinygpt.measure.speed import host_reads
from tinygpt.support import quiet_stderr

SLOWEST = dict(dtype="float32", tf32=False, adamw="for-loop", padded=False)
LADDER = [  # (name, what it changes in the step before it)
    ("eager float32", {}),
    ("TF32 products", dict(tf32=True)),
    ("bfloat16", dict(dtype="bfloat16")),
    ("foreach AdamW", dict(adamw="foreach")),
    ("fused AdamW", dict(adamw="fused")),
    ("padded vocabulary", dict(padded=True)),
    ("compiled", dict(compile="on")),
]
# what is tried on top of the last, each by itself
BRANCHES = [
    ("Muon", dict(optimizer="muon")),
    ("loss of cut rows", dict(cut_loss=True)),
    ("loss in chunks", dict(loss_chunk=8192)),
    ("no biases, as nanoGPT", dict(bias=False)),
    ("stream in bfloat16", dict(narrow=True)),
    ("all that helps", dict(loss_chunk=8192, bias=False, narrow=True)),
    ("activations computed again", dict(checkpoint=True)),
    ("both, for memory", dict(loss_chunk=8192, checkpoint=True)),
    ("CUDA graphs", dict(compile="reduce-overhead")),
    ("max-autotune", dict(compile="max-autotune")),  # the last: it compiles for minutes
]


def predicted(setup, settings: dict, rows: int) -> int | None:
    "Bytes that `measure.memory` predicts; None for what it does not know."
    unknown = settings.get("compile", "off") != "off" or settings.get("loss_chunk")
    if unknown or settings.get("checkpoint") or not settings.get("padded", True):
        return None
    if settings["adamw"] != "fused":
        return None
    dtype = getattr(torch, settings["dtype"])
    return predict_memory(gpt2_config(setup), rows, dtype=dtype, device=setup.device).total


def look(setup, step, tokens: int, compiled: bool) -> dict:
    "Everything that a record says of a step."
    losses = []

    def first_step():
        losses.append(step())

    if compiled and with_others():  # others compile, too: it says nothing of how long that takes
        get_ready(first_step)
    with alone():
        first = None if losses else round(clocked(first_step), 2)
        return dict(first_step_s=first, loss=round(float(losses[0]), 4)) | measured(setup, step, tokens)


def measured(setup, step, tokens: int) -> dict:
    "What is seen of a step that is ready."
    # several steps in a turn: a run does not wait after each of them either
    how = setup.pick(dict(turns=9, at_least=0.25), dict(turns=2, at_least=0))
    timings, errors = take_turns({"step": step}, setup.device, **how)
    if errors:
        raise RuntimeError(errors["step"])
    timing = timings["step"]
    memory = peak_memory(step, setup.device)

    row = speed(setup, gpt2_config(setup), tokens, timing.median) | ms(timing)
    return row | dict(memory_gb=None if memory is None else round(memory / 1e9, 2)) | seen_within(setup, step)


def seen_within(setup, step) -> dict:
    "What profiler and warnings tell. Where they cannot, the step's time stands nevertheless."

    times = setup.pick(3, 1)

    def several():
        for _ in range(times):
            step()

    try:
        syncs = count_syncs(step, setup.device)
        with quiet_stderr():
            return dict(syncs=syncs, host_reads=host_reads(step)) | trace(several, setup.device, times)
    except Exception as error:
        return dict(not_seen=told(error))


def forget():
    "Let go of what was compiled in the case before, and of its memory."
    torch._dynamo.reset()
    free_memory()


def rung(setup, rows: int, settings: dict, after: str | None) -> dict:
    "One row: a step with these settings."
    forget()
    step = Step(setup, rows, **settings)
    found = look(setup, step, rows * step.config.block_size, step.compiled)
    guess = predicted(setup, settings, rows)
    if settings.get("loss_chunk") or settings.get("optimizer") == "muon":
        found.pop("kinds", None)  # the names of their kernels do not tell
    memory = dict(predicted_gb=None if guess is None else round(guess / 1e9, 2))
    return dict(after=after, rows=rows, **found, **memory)


def peer(setup, make, rows: int, compiled: bool) -> dict:
    "One row: a peer's own model, optimizer and step, loaded from its folder."
    forget()
    setup.measure_peak()
    step, tokens = make(setup, rows, compiled), rows * gpt2_config(setup).block_size
    return dict(after=None, rows=rows, **look(setup, step, tokens, compiled))


def more_rows(setup, settings: dict, rows: int, after: str) -> list[tuple[str, object]]:
    "The best settings with twice the rows, where the memory might hold them."
    if setup.reduced:
        return []
    config = gpt2_config(setup)
    whole = torch.cuda.get_device_properties(0).total_memory
    most = largest_batch(config, 1.3 * whole, dtype=torch.bfloat16, device="cuda")  # compiled takes less
    counts = [2 * rows] if 2 * rows <= most else []
    return [(f"{n} rows", partial(rung, setup, n, settings, after)) for n in counts]


def cases(setup) -> list:
    "The ladder, the peers, the ladder's top again, with more rows, and what is tried on top of it."
    rows = rows_that_fit(setup)
    settings, found, after = dict(SLOWEST), [], None
    for name, change in LADDER:
        settings = settings | change
        found.append((name, partial(rung, setup, rows, dict(settings), after)))
        after = name
    for folder, name, make in (
        (setup.nanogpt, "nanoGPT", nanogpt_step),
        (setup.build_nanogpt, "build-nanogpt", build_nanogpt_step),
    ):
        for compiled in (True, False) if folder else ():
            title = f"{name}, {'compiled' if compiled else 'eager'}"
            found.append((title, partial(peer, setup, make, rows, compiled)))
    # the same thing before and after the peers: does the GPU run as fast when it is warm?
    found.append((f"{after}, again", partial(rung, setup, rows, dict(settings), after)))
    found += more_rows(setup, settings, rows, after)
    for name, change in BRANCHES:
        if setup.reduced and "compile" in change:
            continue  # a mode of the compiler, which a reduced run does without
        found.append((name, partial(rung, setup, rows, settings | change, after)))
    return found
