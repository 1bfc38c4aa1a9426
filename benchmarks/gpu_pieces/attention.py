"""Which attention is fastest, on which length: ours, torch's kernels, flex; forward and backward.

12 heads of 64 in bfloat16, always 16,384 tokens: at T = 128 that is 128 rows, at T = 16,384 a single one. A
causal pass needs half of the products, and counts so. The backward of the fused kernels makes five products
where the forward makes two; for all of them 2.5 times the forward's FLOPs are counted. Times are those of the
kernels, without waiting for the host; only `tiled` starts more of them than the GPU's queue holds. `off` is
how far values and gradients are from those in float32.
"""

import math
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gpu_pieces.alone import alone, get_ready
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.record import told
from tinygpt.attention import naive_attention, tiled_attention
from tinygpt.attention_triton import triton_attention
from tinygpt.support import peak_bytes

LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA math": SDPBackend.MATH,
}
LONGEST = {"tiled": 4096}  # beyond it a Python loop over tiles takes minutes and tells nothing new


def by_backend(backend, causal: bool):
    "torch's attention by one kernel only; a RuntimeError where that cannot do it."

    def attend(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def by_flex(setup, T: int, causal: bool):
    "flex_attention, compiled for this shape."
    torch._dynamo.reset()
    run = torch.compile(flex_attention, dynamic=False, backend=setup.backend)

    def see(b, h, i, j):
        return i >= j

    @cache  # at the first call, where an error is that of this way alone
    def mask():
        return create_block_mask(see, None, None, T, T, device=setup.device) if causal else None

    return lambda q, k, v: run(q, k, v, block_mask=mask())


def ways(setup, T: int, causal: bool) -> dict:
    "name -> function of q, k and v."
    found = {
        "naive": partial(naive_attention, causal=causal),
        "tiled": partial(tiled_attention, causal=causal),
        "our Triton kernel": partial(triton_attention, causal=causal),
        "SDPA's choice": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        **{name: by_backend(backend, causal) for name, backend in BACKENDS.items()},
        "flex, compiled": by_flex(setup, T, causal),
    }
    return {name: attend for name, attend in found.items() if T <= LONGEST.get(name, T)}


def flops(rows: int, heads: int, T: int, width: int, causal: bool) -> int:
    "Of a forward: two products of T x T x width for each head, half of them where it is causal."
    return rows * heads * 4 * T * T * width // (2 if causal else 1)


def passes(attend, inputs: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
    "Values, and the gradients of q, k and v."
    y = attend(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def apart(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    "The largest distance of a tensor from what it should be, as a part of that one's length."
    parts = [(a.float() - b).norm() / b.norm() for a, b in zip(found, exact)]
    return torch.stack(parts).amax().item()  # not Python's max, which passes over what is no number


def case(setup, T: int, causal: bool) -> list[dict]:
    "All ways on one length: a row each, with forward and backward."
    tokens, heads, width = setup.pick((16384, 12, 64), (64, 2, 16))
    rows = tokens // T
    dtype = setup.pick(torch.bfloat16, torch.float32)
    shape = (rows, heads, T, width)
    q, k, v, dy = (torch.randn(shape, device=setup.device, dtype=dtype) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]

    def forward(attend):
        with torch.no_grad():
            attend(*inputs)

    def both(attend):
        passes(attend, inputs, dy)

    found = ways(setup, T, causal)
    wide = [t.detach().float().requires_grad_() for t in inputs]
    # the second where the first has no kernel; it holds the whole T x T matrix
    plain = by_backend([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], causal)
    exact = passes(plain, wide, dy.float())
    how = dict(device=setup.device, kernels_only=True)
    how |= setup.pick({}, dict(turns=1, warmup=1, at_least=0))
    for attend in found.values():
        try:
            get_ready(partial(forward, attend))
            get_ready(partial(both, attend))
        except Exception as error:  # it stands in the row when it is timed
            told(error)
    with alone():
        there, no_forward = take_turns({n: partial(forward, a) for n, a in found.items()}, **how)
        back, no_backward = take_turns({n: partial(both, found[n]) for n in there}, **how)

    work = flops(rows, heads, T, width, causal)
    out = []
    for name, attend in found.items():
        row = dict(what=name, causal=causal, T=T, rows=rows)
        if name in there:
            row |= dict(forward_ms=ms(there[name])["ms"])
            row |= dict(forward_of_peak=round(work / there[name].median / setup.peak, 4))
        if name in back:
            row |= dict(both_ms=ms(back[name])["ms"])
            row |= dict(both_of_peak=round(3.5 * work / back[name].median / setup.peak, 4))
            row |= after_all(attend, inputs, dy, exact)
        error = no_forward.get(name) or no_backward.get(name)
        out.append(row | (dict(error=error) if error else {}))
    return out


def after_all(attend, inputs, dy, exact) -> dict:
    "Megabytes that both passes take beside their inputs, and how far they are from those in float32."
    try:
        megabytes = peak_bytes(lambda: passes(attend, inputs, dy)) / 1e6
        off = apart(passes(attend, inputs, dy), exact)
        wrong = {} if math.isfinite(off) else dict(error="values or gradients are no numbers")
        return dict(memory_mb=round(megabytes, 2), off=float(f"{off:.2g}")) | wrong
    except Exception as error:
        return dict(error=told(error))


def cases(setup) -> list:
    "Each length, causal and not."
    found = []
    for causal in (True, False):
        for T in setup.pick(LENGTHS, (32, 64)):
            name = f"T = {T}, {'causal' if causal else 'not causal'}"
            found.append((name, partial(case, setup, T, causal)))
    return found
