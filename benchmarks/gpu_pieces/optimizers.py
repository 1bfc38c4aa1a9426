"""AdamW's implementations, what Muon costs, and how many tokens each needs to a loss, at 124 M parameters.

The runs are on the embedded corpus: 400 steps of 16,384 tokens, less than three times through it. AdamW and
Muon get the same tuning: four rates each with one seed, then three other seeds at the best of them. Muon's
matrices have a rate of their own; the rest of its weights keep AdamW's best. All of it goes on over several
commands.
"""

import statistics
from functools import partial

import torch

from gpu_pieces.clock import ms, take_turns
from gpu_pieces.training import Step, curve, gpt2_config, rows_that_fit, run_config, train_case
from tinygpt.adamw import time_implementations
from tinygpt.measure.speed import measure_bandwidth
from tinygpt.model import GPT
from tinygpt.support import UserError

RATES = {"adamw": (3e-4, 6e-4, 1.2e-3, 2.4e-3), "muon": (0.01, 0.02, 0.04, 0.08)}
SEEDS = (1, 2, 3)  # at the best rate; the rates themselves were tried with the preset's


def implementations(setup) -> list[dict]:
    "A row for each way to make AdamW's step, beside what its bytes alone would take."
    params = list(GPT(gpt2_config(setup)).to(setup.device).parameters())
    count = sum(p.numel() for p in params)
    # weight, gradient, two moments are read, and all but the gradient written: 7 numbers of 4 bytes
    bound = 28 * count / measure_bandwidth(setup.device, setup.pick(1024, 16))
    found = time_implementations(params, repeats=setup.pick(15, 2))
    return [
        dict(what="AdamW", implementation=name, **ms(timing), bound_ms=round(1e3 * bound, 3))
        for name, timing in found.items()
    ]


def shares(setup) -> list[dict]:
    "The optimizer's part of a compiled step: AdamW, Muon with its products in bfloat16, and in float32."
    rows, compile = rows_that_fit(setup, most=16, share=0.25), setup.pick("on", "off")
    adamw, muon = (Step(setup, rows, compile=compile, optimizer=name) for name in ("adamw", "muon"))
    exact = Step(setup, rows, compile=compile, optimizer="muon")
    exact.optimizer.optimizers[0].dtype = torch.float32
    steps = {"AdamW": adamw, "Muon": muon, "Muon, products in float32": exact}
    variants = {}
    for name, step in steps.items():
        step()  # the gradients stay
        variants |= {name: step, f"{name}: the optimizer alone": step.optimizer.step}
    how = setup.pick({}, dict(turns=2, warmup=1, at_least=0))
    timings, errors = take_turns(variants, setup.device, **how)
    out = []
    for name in steps:
        row = dict(what="share", optimizer=name, rows=rows)
        alone = timings.get(f"{name}: the optimizer alone")
        if name in timings and alone:
            whole = timings[name]
            row |= ms(whole) | dict(optimizer_ms=ms(alone)["ms"], share=round(alone.median / whole.median, 4))
        else:
            row |= dict(error=" ".join(v for k, v in errors.items() if k.startswith(name)))
        out.append(row)
    return out


def config_of(setup, optimizer: str, rate: float, seed: int = 1337):
    "A run of one optimizer with one rate."
    name = f"{optimizer}-{rate:g}-{seed}"
    settings = dict(optimizer=optimizer, weight_decay=0.1)
    if optimizer == "adamw":
        settings["learning_rate"] = rate
    else:
        settings |= dict(muon_lr=rate, learning_rate=best_rate(setup, "adamw"))
    config = run_config(setup, name, steps=400, rows=16, **settings)
    config.run.seed = seed
    return config


def best_rate(setup, optimizer: str) -> float:
    "Of the rates whose runs are finished, the one that ends lowest. UserError where one is not."
    losses = {}
    for rate in setup.pick(RATES[optimizer], RATES[optimizer][:1]):
        config = config_of(setup, optimizer, rate)
        points = curve(config)
        if not points or points[-1]["step"] < config.optim.max_steps:
            raise UserError(f"{config.folder} is not finished: run the piece again with --again")
        losses[rate] = points[-1]["loss"]
    return min(losses, key=losses.get)


def tuning(setup, optimizer: str, rate: float) -> dict:
    "One run of the tuning."
    config = config_of(setup, optimizer, rate)
    return train_case(setup, config, what="rate", optimizer=optimizer, rate=rate)


def comparing(setup, optimizer: str, seed: int) -> dict:
    "One run at the best rate, with a seed that chose no rate."
    rate = best_rate(setup, optimizer)
    config = config_of(setup, optimizer, rate, seed)
    return train_case(setup, config, what="seed", optimizer=optimizer, rate=rate, seed=seed)


def tokens_to(points: list[dict], goal: float) -> float | None:
    "Tokens at which a curve comes down to a loss, on the line between two looks; None where it does not."
    before = None
    for point in points:
        if point["loss"] <= goal:
            if before is None:
                return point["tokens"]
            part = (before["loss"] - goal) / (before["loss"] - point["loss"])
            return before["tokens"] + part * (point["tokens"] - before["tokens"])
        before = point
    return None


def verdict(setup) -> dict:
    "Tokens to the median loss at which AdamW ends, of each seed."
    seeds = setup.pick(SEEDS, SEEDS[:1])
    curves = {
        name: [curve(config_of(setup, name, best_rate(setup, name), seed)) for seed in seeds]
        for name in RATES
    }
    goal = statistics.median(points[-1]["loss"] for points in curves["adamw"])
    found = {name: [tokens_to(points, goal) for points in curves[name]] for name in RATES}
    return dict(what="tokens to a loss", goal=goal, seeds=list(seeds), **found)


def cases(setup) -> list:
    "Times first, then the runs."
    found = [("implementations", partial(implementations, setup)), ("shares", partial(shares, setup))]
    for name, rates in RATES.items():
        for rate in setup.pick(rates, rates[:1]):
            found.append((f"{name}, rate {rate:g}", partial(tuning, setup, name, rate)))
    for seed in setup.pick(SEEDS, SEEDS[:1]):
        for name in RATES:
            found.append((f"{name}, seed {seed}", partial(comparing, setup, name, seed)))
    return [*found, ("tokens to a loss", partial(verdict, setup))]
