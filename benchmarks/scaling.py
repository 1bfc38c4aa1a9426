"""How large, how long? Small runs of the laptop preset's recipe, and one run four times larger, foretold.

    python benchmarks/scaling.py rates      # Muon's rate over three widths
    python benchmarks/scaling.py adamw      # AdamW's, for all weights, over the same
    python benchmarks/scaling.py runs       # 14 runs at three budgets
    python benchmarks/scaling.py predict    # fits them, writes down what the next two parts will end at
    python benchmarks/scaling.py large      # the large run, three seeds
    python benchmarks/scaling.py shapes     # two models that are not of the family
    python benchmarks/scaling.py half       # made after the others: a smaller model at the second budget
    python benchmarks/scaling.py preset     # made last: other members with the preset's arithmetic
    python benchmarks/scaling.py            # all of it: more than half an hour of one core

It goes on where results/scaling.json ends. All runs go through `tinygpt.train.train`: the addresses, a
vocabulary of 4096, rows of 128 tokens, Qwen3's parts, Muon and AdamW, a trapezoid, all as in the preset
`laptop`. Cost is counted in FLOPs and tokens. A seed chooses the initial weights and the data's order.

Written down before the runs:

- The family: n layers, 32 n wide, two heads. The preset is the member with n = 4.
- Eight rows a step instead of the preset's 16, so that the shortest run has some 50 steps. The warm-up is 2 %
  of a run, the way down 60 %, of its own length.
- Muon's rate: the best of the sweep at the middle width, for all runs. AdamW's is the preset's.
- Three budgets, each twice the one before. The large run has four times the largest of them, and the size
  that the fit says is best there, of members 2 to 6: member 1 would see tokens twice, and no run does.
- Added after the first nine runs, when the smallest of them, member 2, was the best at every budget: half a
  member, one layer, 16 wide. A member 5 was planned for the third budget, and left out as far too large.
- The prediction is made from these runs, and committed, before the large run begins.
- It is refuted where the mean of three seeds lies outside its interval of 90 %.
- Within the family the embeddings are a power of the blocks, so a law fits as well with one count as with the
  other. Two models of other shapes tell them apart: eight layers, 32 wide, and one layer, 128 wide.
  "Embeddings are to be counted apart" is refuted where the law that counts them predicts these two better.

Written down later, before the part `preset`:

- The law fitted to all runs of the family says that with the preset's arithmetic members 2 and 3 end lower
  than member 4, the preset, and member 5 higher. Members 2 and 3 read the text 2.8 and 1.4 times for it.
- All settings but the size and the length are the preset's: 16 rows, its rates. One seed each; five of the
  preset are in results/laptop.json, with a deviation of 0.003 bits per byte. A difference of 0.01 counts.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from data_machine import load, save

from tinygpt.measure.memory import param_counts
from tinygpt.measure.speed import flops_per_token
from tinygpt.model import GPTConfig
from tinygpt.run.config import TrainConfig
from tinygpt.run.presets import preset
from tinygpt.scaling import bootstrap_laws, fit_law, matched_run, predict_loss
from tinygpt.train import train

RESULTS = Path(__file__).parent / "results"
ROWS, THREADS = 8, 1
WIDTHS, RATES = (32, 64, 128), (0.0025, 0.005, 0.01, 0.02)
ADAMW_RATES = (0.003, 0.006, 0.012, 0.024)
RATE_STEPS = 100
BUDGETS = {2.5e11: (0.5, 1, 2, 3), 5e11: (1, 2, 3, 4), 1e12: (1, 2, 3, 4)}  # FLOPs -> members
SHAPES = (8, 32), (1, 128)  # layers and width of models that are not of the family, at the second budget
LARGE = 4e12
REPEATED = 3, 5e11  # layers and budget of the run that is made with all seeds
SEEDS = (1, 2, 3)


def member(n: float) -> GPTConfig:
    "The family's model with n layers; half a member has one layer, and half the width."
    return shaped(max(1, int(n)), int(32 * n))


def shaped(layers: int, width: int) -> GPTConfig:
    "The preset's model with these layers and width."
    return replace(preset("laptop").model, n_layer=layers, n_embd=width, n_head=2)


def settings(
    model: GPTConfig,
    flops: float,
    muon_lr: float,  # 0: AdamW for all weights
    seed: int,
    learning_rate: float | None = None,  # AdamW's; None: the preset's
) -> TrainConfig:
    "The laptop preset for another model and budget, with nothing looked at on the way."
    config = preset("laptop")
    config.model, config.data.batch_size, config.optim.muon_lr = model, ROWS, muon_lr
    config.optim.optimizer = "muon" if muon_lr else "adamw"
    config.optim.learning_rate = learning_rate or config.optim.learning_rate
    config.eval = replace(config.eval, final_eval_tokens=60_000, compressors=False)
    config.system = replace(config.system, compile="off", threads=THREADS)
    config.run.seed = seed
    return matched_run(config, flops)


def run(config: TrainConfig) -> dict:
    "Train once; what came out, with parameters, tokens, FLOPs and CPU seconds."
    model, steps = config.model, config.optim.max_steps
    start = time.process_time()
    with tempfile.TemporaryDirectory() as tmp:
        config.run.out = tmp
        result = train(config, progress="none")
    if not result.finished:  # somebody stopped it: half a run is no result
        raise SystemExit(1)
    counts = param_counts(model)
    tokens = steps * config.data.batch_size * model.block_size
    return dict(
        layers=model.n_layer,
        width=model.n_embd,
        matrices=counts["matrices"],
        embeddings=counts["wte"] + counts["lm_head"],
        steps=steps,
        tokens=tokens,
        flops=tokens * flops_per_token(model),
        muon_lr=config.optim.muon_lr,
        learning_rate=config.optim.learning_rate,
        seed=config.run.seed,
        loss=round(result.val.loss, 5),
        bits_per_byte=round(result.val.bits_per_byte, 5),
        val_tokens=result.val.tokens,
        cpu_s=round(time.process_time() - start, 1),
    )


PARTS = "rates", "adamw", "runs", "large", "shapes", "half"


class Record:
    "The file of results: a run that is in it is not made again."

    def __init__(self, name: str):
        self.name = name
        there = (RESULTS / f"{name}.json").exists()
        self.parts = {part: load(name).get(part, []) if there else [] for part in PARTS}

    def get(self, part: str, *what) -> dict:
        "The run of `settings(*what)`."
        config = settings(*what)
        o, model = config.optim, config.model
        asked = dict(layers=model.n_layer, width=model.n_embd, steps=o.max_steps, muon_lr=o.muon_lr)
        asked |= dict(seed=config.run.seed, learning_rate=o.learning_rate)
        for row in self.parts[part]:
            if asked.items() <= row.items():
                return row
        row = run(config)
        self.parts[part].append(row)
        # made part by part; the command without a part makes all of them
        about = dict(command="python benchmarks/scaling.py", rows=ROWS, budgets=list(BUDGETS))
        save(self.name, about | self.parts, quiet=True)
        print(part, json.dumps(row), flush=True)
        return row


def sweep(record: Record, width: int) -> dict[float, float]:
    "Muon's rate -> loss, of models of two layers after equally many steps."
    model = shaped(2, width)
    flops = RATE_STEPS * ROWS * model.block_size * flops_per_token(model)
    return {rate: record.get("rates", model, flops, rate, SEEDS[0])["loss"] for rate in RATES}


def best_rate(record: Record) -> float:
    "Muon's rate with the lowest loss at the middle width."
    losses = sweep(record, WIDTHS[1])
    return min(losses, key=losses.get)


def rates(record: Record):
    for width in WIDTHS:
        sweep(record, width)


def adamw(record: Record):
    for width in WIDTHS:
        model = shaped(2, width)
        flops = RATE_STEPS * ROWS * model.block_size * flops_per_token(model)
        for rate in ADAMW_RATES:
            record.get("adamw", model, flops, 0.0, SEEDS[0], rate)


def runs(record: Record) -> list[dict]:
    rate = best_rate(record)
    # one size after the other, so that a few runs already span the budgets; the slowest per FLOP last
    for n in (2, 3, 4, 1, 0.5):
        for flops, members in BUDGETS.items():
            if n in members:
                record.get("runs", member(n), flops, rate, SEEDS[0])
        for seed in SEEDS[1:] if n == REPEATED[0] else ():  # how far seeds scatter
            record.get("runs", member(n), REPEATED[1], rate, seed)
    return record.parts["runs"]


def sizes_of(model: GPTConfig) -> dict[str, int]:
    "What a law may call N: the blocks' matrices, or everything."
    counts = param_counts(model)
    ends = counts["wte"] + counts["lm_head"]
    return {"blocks": counts["matrices"], "all": counts["matrices"] + ends}


def predict(record: Record):
    "Write down, once, what the large run and the other shapes will end at."
    place = RESULTS / f"{record.name}_prediction.json"
    if place.exists():
        return
    made = runs(record)
    tokens, losses, body, ends = (
        np.array([row[key] for row in made], float) for key in ("tokens", "loss", "matrices", "embeddings")
    )
    counted = {"blocks": body, "all": body + ends}
    laws = {count: fit_law(sizes, tokens, losses) for count, sizes in counted.items()}
    draws = {count: bootstrap_laws(sizes, tokens, losses) for count, sizes in counted.items()}
    again = next(row for row in made if row["seed"] != SEEDS[0])
    same = [row for row in made if (row["layers"], row["steps"]) == (again["layers"], again["steps"])]
    noise = statistics.stdev(math.log(row["loss"]) for row in same)

    def foretell(model, flops, seeds):
        config = settings(model, flops, best_rate(record), SEEDS[0])
        seen = config.optim.max_steps * ROWS * model.block_size
        row = dict(layers=model.n_layer, width=model.n_embd, tokens=seen)
        for count, size in sizes_of(model).items():
            # the mean of three seeds scatters less than one of them
            low, _, high = predict_loss(draws[count], size, seen, noise / seeds**0.5)
            row[count] = dict(loss=float(laws[count].loss(size, seen)), low=low, high=high)
        return row

    members = [foretell(member(n), LARGE, len(SEEDS)) for n in range(2, 7)]
    others = [foretell(shaped(*shape), REPEATED[1], 1) for shape in SHAPES]
    best = min(members, key=lambda row: row["blocks"]["loss"])["layers"]
    about = dict(made=time.strftime("%Y-%m-%d %H:%M"), runs=len(made), noise=noise, level=0.9)
    fitted = {count: asdict(law) for count, law in laws.items()}
    save(place.stem, about | dict(laws=fitted, budget=LARGE, layers=best, members=members, shapes=others))


def large(record: Record):
    foretold = load(f"{record.name}_prediction")
    for seed in SEEDS:
        record.get("large", member(foretold["layers"]), LARGE, best_rate(record), seed)


def shapes(record: Record):
    for layers, width in SHAPES:
        record.get("shapes", shaped(layers, width), REPEATED[1], best_rate(record), SEEDS[0])


def half(record: Record):
    # no law is fitted to it: the prediction was made without
    record.get("half", member(0.5), REPEATED[1], best_rate(record), SEEDS[0])


def at_preset(_: Record):
    "Members 3, 5 and 2 with the arithmetic and the recipe of the preset, into results/scaling_preset.json."
    name = "scaling_preset"
    made = load(name)["runs"] if (RESULTS / f"{name}.json").exists() else []
    laptop = preset("laptop")
    tokens = laptop.optim.max_steps * laptop.data.batch_size * laptop.model.block_size
    for n in (3, 5, 2):
        if any(row["layers"] == n for row in made):
            continue
        config = preset("laptop")
        config.model, config.run.seed = member(n), SEEDS[0]
        config.eval.compressors, config.system.threads = False, THREADS
        made.append(run(matched_run(config, tokens * flops_per_token(laptop.model))))
        save(name, dict(command="python benchmarks/scaling.py preset", runs=made), quiet=True)
        print(json.dumps(made[-1]), flush=True)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parts = dict(rates=rates, adamw=adamw, runs=runs, predict=predict, large=large, shapes=shapes, half=half)
    parts |= dict(preset=at_preset)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all where none is named")
    parser.add_argument("--name", default="scaling", help="of the record, for a trial")
    args = parser.parse_args()
    record = Record(args.name)
    for part in args.parts or parts:
        parts[part](record)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    main()
