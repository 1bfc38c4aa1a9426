"""What each number format gives: big matrix products against the data sheet, and steps of GPT-2.

fp8 is measured as a product only (torch._scaled_mm, one scale for each matrix): tinygpt does not train in it.
"""

from functools import partial

import torch

from gpu_pieces.alone import alone
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.record import told
from gpu_pieces.training import Step, rows_that_fit, speed
from tinygpt.measure.speed import datasheet, measure_bandwidth

# TFLOP/s of dense products in TF32 and in fp8 (sums in float32); the other formats are in
# tinygpt.measure.speed.PEAKS, from the same pages and whitepapers. None: the chip has no such products
FURTHER = {
    "T4": (None, None),
    "V100": (None, None),
    "RTX 3090": (35.6, None),
    "A10": (62.5, None),
    "A100": (156, None),
    "A100 40GB": (156, None),
    "A100 80GB PCIe": (156, None),
    "RTX 4090": (82.6, 330.3),
    "RTX 5090": (104.8, 419),
    "L4": (60, 242.5),
    "L40S": (183, 733),
    "H100": (494.5, 1979),
    "H100 PCIe": (378, 1513),
    "H100 NVL": (417, 1671),
    "H200": (494.5, 1979),
}
FORMATS = ("float32", "tf32", "float16", "bfloat16", "fp8")


def promised(name: str) -> dict[str, float | None]:
    "TFLOP/s by the data sheet of a GPU, by format; of an unknown one None throughout."
    sheet = datasheet(name)
    if sheet is None:
        return dict.fromkeys(FORMATS)
    same = [key for key in FURTHER if datasheet(key) is sheet]
    tf32, fp8 = FURTHER[same[0]] if same else (None, None)
    return dict(float32=sheet.single, tf32=tf32, float16=sheet.half, bfloat16=sheet.half, fp8=fp8)


def product(kind: str, n: int, device: str):
    "A function that multiplies two random n x n matrices in a format."
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    if kind == "fp8":
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()  # the second by columns
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if kind in ("float16", "bfloat16"):
        a, b = a.to(getattr(torch, kind)), b.to(getattr(torch, kind))
        return lambda: a @ b

    def multiply():
        torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
        return a @ b

    return multiply


def products(setup, n: int) -> list[dict]:
    "A row for each format: TFLOP/s of n x n products."
    how = setup.pick({}, dict(turns=2, at_least=0))
    makers, errors, work = {}, {}, {}
    for kind in FORMATS:
        try:
            makers[kind] = product(kind, n, setup.device)
        except Exception as error:
            errors[kind] = told(error)
    timings, failed = take_turns(makers, setup.device, **how)
    sheet = promised(torch.cuda.get_device_name() if setup.device == "cuda" else "")
    for kind in FORMATS:
        work[kind] = dict(what="product", format=kind, n=n, sheet_tflops=sheet[kind])
        if kind in timings:
            rate = 2 * n**3 / timings[kind].median / 1e12
            work[kind] |= ms(timings[kind]) | dict(tflops=float(f"{rate:.4g}"))
            work[kind] |= dict(of_sheet=round(rate / sheet[kind], 4) if sheet[kind] else None)
        else:
            work[kind] |= dict(error=(errors | failed)[kind])
    return list(work.values())


def bandwidth(setup) -> dict:
    "A product in place, in the GPU's memory, against the data sheet. (In November 2026 it was a copy.)"
    with alone():
        found = measure_bandwidth(setup.device, setup.pick(4096, 16)) / 1e9
    sheet = datasheet(torch.cuda.get_device_name()) if setup.device == "cuda" else None
    of_sheet = round(found / sheet.bandwidth, 4) if sheet else None
    sheet_gbs = sheet.bandwidth if sheet else None
    return dict(
        what="memory", gb_per_second=round(found, 1), sheet_gb_per_second=sheet_gbs, of_sheet=of_sheet
    )


def steps(setup, compile: str) -> list[dict]:
    "A row for each format: training steps of GPT-2, the formats in turn."
    rows = rows_that_fit(setup, most=8, share=0.4)
    ways = {
        "float32": dict(dtype="float32", tf32=False),
        "tf32": dict(dtype="float32", tf32=True),
        "float16 with scaler": dict(dtype="float16"),
        "bfloat16": dict(dtype="bfloat16"),
    }
    made, errors = {}, {}
    for name, settings in ways.items():
        try:
            made[name] = Step(setup, rows, compile=compile, **settings)
        except Exception as error:
            errors[name] = told(error)
    # several steps in a turn: a run does not wait after each of them either
    how = setup.pick(dict(at_least=0.3), dict(turns=2, warmup=1, at_least=0))
    timings, failed = take_turns(made, setup.device, **how)
    out = []
    for name in ways:
        row = dict(what="step", format=name, compile=compile, rows=rows)
        if name in timings:
            tokens = rows * made[name].config.block_size
            row |= ms(timings[name]) | speed(setup, made[name].config, tokens, timings[name].median)
        else:
            row |= dict(error=(errors | failed)[name])
        out.append(row)
    return out


def cases(setup) -> list:
    "Products of three sizes, the memory, steps eager and compiled."
    found = [
        (f"products of {n}", partial(products, setup, n)) for n in setup.pick((4096, 8192, 16384), (64,))
    ]
    found.append(("memory", partial(bandwidth, setup)))
    found += [
        (f"steps, compile {how}", partial(steps, setup, how)) for how in setup.pick(("off", "on"), ("off",))
    ]
    return found
