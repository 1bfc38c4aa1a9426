"""AdamW's implementations, what Muon costs, and how many tokens each needs to a loss, at 124 M parameters.

The runs are on the embedded corpus: 400 steps of 16,384 tokens, less than three times through it. AdamW and
Muon get the same tuning: four rates each with one seed, then three other seeds at the best of them. Muon's
matrices have a rate of their own; the rest of its weights keep AdamW's best. All of it goes on over several
commands. What a finished run found is taken from the record, so that this may be on another day's machine.
"""

import statistics
from functools import partial

import torch

from gpu_pieces.alone import alone
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.training import Step, gpt2_config, rows_that_fit, run_config, text_problem, train_case
from tinygpt.adamw import IMPLEMENTATIONS, make_adamw
from tinygpt.measure.speed import measure_bandwidth
from tinygpt.model import GPT
from tinygpt.support import UserError, read_json

RATES = {"adamw": (3e-4, 6e-4, 1.2e-3, 2.4e-3), "muon": (0.01, 0.02, 0.04, 0.08)}
SEEDS = (1, 2, 3)  # at the best rate; the rates themselves were tried with the preset's


def implementations(setup) -> list[dict]:
    "A row for each way to make AdamW's step, beside what its bytes alone would take."
    steps = {}
    for name in IMPLEMENTATIONS:
        params = list(GPT(gpt2_config(setup)).to(setup.device).parameters())
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        steps[name] = make_adamw(params, name, lr=1e-6)[0].step
    timings, errors = take_turns(steps, setup.device, **setup.pick(dict(turns=15), dict(turns=2, at_least=0)))
    with alone():
        bandwidth = measure_bandwidth(setup.device, setup.pick(1024, 16))
    # weight, gradient, two moments are read, and all but the gradient written: 7 numbers of 4 bytes
    bound = round(1e3 * 28 * sum(p.numel() for p in params) / bandwidth, 3)
    out = []
    for name in steps:
        row = dict(what="AdamW", implementation=name)
        out.append(row | (ms(timings[name]) if name in timings else dict(error=errors[name])))
        out[-1]["bound_ms"] = bound
    return out


def shares(setup) -> list[dict]:
    "The optimizer's part of a compiled step: AdamW, Muon with its products in bfloat16, and in float32."
    rows, compile = rows_that_fit(setup, most=16, share=0.3), setup.pick("on", "off")
    adamw, muon = (Step(setup, rows, compile=compile, optimizer=name) for name in ("adamw", "muon"))
    exact = Step(setup, rows, compile=compile, optimizer="muon", tf32=False)
    exact.optimizer.optimizers[0].dtype = torch.float32
    steps = {"AdamW": adamw, "Muon": muon, "Muon, products in float32": exact}
    variants = {}
    for name, step in steps.items():
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0  # after hundreds of updates by one gradient the weights were no numbers
        step()  # the gradients stay
        variants |= {name: step, f"{name}: the optimizer alone": step.update}
    # several steps in a turn: a run does not wait after each of them either
    how = setup.pick(dict(at_least=0.3), dict(turns=2, warmup=1, at_least=0))
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


def measured(setup, what: str, optimizer: str) -> list[dict]:
    "The record's rows of finished runs, also of those whose losses were no numbers any more."
    path = setup.folder / "gpu_optimizers.json"
    rows = read_json(path)["rows"] if path.exists() else []
    ours = [row for row in rows if row.get("what") == what and row["optimizer"] == optimizer]
    return [row for row in ours if "loss" in row or "error" in row]


def best_rate(setup, optimizer: str) -> float:
    "Of all rates the one that ends lowest. UserError where one was not tried yet."
    rows = measured(setup, "rate", optimizer)
    tried = {row["rate"] for row in rows}
    if missing := [rate for rate in setup.pick(RATES[optimizer], RATES[optimizer][:1]) if rate not in tried]:
        raise UserError(f"{optimizer} was not tried with {missing}: run the piece again with --mended")
    losses = {row["rate"]: row["loss"] for row in rows if row.get("loss") is not None}
    if not losses:
        raise UserError(f"{optimizer}: no rate of {sorted(tried)} came to its end")
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
        if point["loss"] is None:  # it was no number
            continue
        if point["loss"] <= goal:
            if before is None:
                return point["tokens"]
            part = (before["loss"] - goal) / (before["loss"] - point["loss"])
            return before["tokens"] + part * (point["tokens"] - before["tokens"])
        before = point
    return None


def verdict(setup) -> dict:
    "Tokens to the median loss at which AdamW ends, of each seed."
    ends = {name: [row for row in measured(setup, "seed", name) if "loss" in row] for name in RATES}
    if not all(ends.values()):
        raise UserError("no run at the best rate is finished: run the piece again with --mended")
    goal = statistics.median(row["loss"] for row in ends["adamw"])
    found = {name: [tokens_to(row["curve"], goal) for row in ends[name]] for name in RATES}
    seeds = {name: [row["seed"] for row in ends[name]] for name in RATES}
    return dict(what="tokens to a loss", goal=goal, seeds=seeds, **found)


def cases(setup) -> list:
    "Times first, then the runs."
    found = [("implementations", partial(implementations, setup)), ("shares", partial(shares, setup))]
    if not setup.reduced and (problem := text_problem()):
        return [*found, ("the runs", lambda: dict(error=problem))]
    for name, rates in RATES.items():
        for rate in setup.pick(rates, rates[:1]):
            found.append((f"{name}, rate {rate:g}", partial(tuning, setup, name, rate)))
    for seed in setup.pick(SEEDS, SEEDS[:1]):
        for name in RATES:
            found.append((f"{name}, seed {seed}", partial(comparing, setup, name, seed)))
    return [*found, ("tokens to a loss", partial(verdict, setup))]
