"""How large, how long? Small GPTs at equal budgets of arithmetic, and four times beyond, foretold.

    python benchmarks/scaling.py rates      # for each size: Muon's rate, then AdamW's
    python benchmarks/scaling.py runs       # the sizes at three budgets, three seeds
    python benchmarks/scaling.py predict    # writes down what the next part will end at
    python benchmarks/scaling.py large      # three sizes with four times the largest budget, three seeds
    python benchmarks/scaling.py around     # made afterwards: two more sizes around those
    python benchmarks/scaling.py slower     # made afterwards: the middle one with half of Muon's rate
    python benchmarks/scaling.py preset     # other sizes with the arithmetic of the preset `laptop`
    python benchmarks/scaling.py            # all of it: more than two hours of one core

It goes on where results/scaling.json ends. All runs go through `tinygpt.train.train`: the addresses by
characters, rows of 64, Qwen3's parts, Muon and AdamW, a trapezoid, all as in the preset `laptop`. Cost is
counted in FLOPs and tokens. A seed chooses the initial weights and the data's order.

Written down before the runs:

- The family: two layers, 12 to 144 wide, an MLP 8/3 times as wide. Only the width changes, so that a size is
  one number. Characters, so that the head costs little: what a token costs is what the blocks cost.
- Eight rows a step. The warm-up is 2 % of a run, the way down 60 %, of its own length.
- The rates: three widths at the smallest two budgets. Muon's at four rates a factor of two apart with the
  preset's for AdamW, then AdamW's at three with the chosen one of Muon's. Seed 0, which no other part uses.
  All sizes get the rate with the lowest sum of losses, unless the best ones differ by more than two.
- Three budgets, each four times the one before. At each: sizes about a factor of two apart, on both sides of
  the lowest. Where the lowest is at the edge, a size is added there, with all seeds.

Changed after a first set of runs: there the MLP's width was the model's default, rounded up to a multiple of
64. So shapes differed, and 24 wide did better than its neighbors. Runs 24, 48 and 96 wide are the same with
both rules and were kept; all others were made again, and the prediction after them. The claims stayed.

Claims, each refuted if the opposite is outside its interval of 95 % over seeds, undecided if it contains 0:

1. At each budget a best size is enclosed: the smallest and the largest model both end higher than the one
   with the lowest mean, paired by seed.
2. Size and text grow alike: the best sizes (a parabola through the five sizes, each seed by itself) grow as
   C^a with a near 0.5. Refuted if the interval of a over seeds excludes 0.5.
3. At four times the largest budget, the size that the line through the best sizes foretells ends lower than
   half of it, and lower than twice of it.
4. Its loss lies in the interval of 90 % that the law L = E + A/N^alpha + B/D^beta and the bootstrap foretell.
   Refuted if the mean of the seeds lies outside.
5. The law foretells that loss better than a line in logarithms through the lowest losses of the budgets.

Written down for the part `preset`, before it: with the preset's arithmetic members 2 and 3 of *its* family (n
layers, 32 n wide, a vocabulary of 4096) end lower than member 4, the preset, and member 5 higher. All
settings but the size and the length are the preset's. One seed each; 0.01 bits per byte count.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from data_machine import load, save

from tinygpt.data.tokens import prepare
from tinygpt.measure.memory import param_counts
from tinygpt.measure.speed import flops_per_token
from tinygpt.model import GPTConfig
from tinygpt.run.config import TrainConfig
from tinygpt.run.presets import preset
from tinygpt.scaling import bootstrap_laws, fit_law, isoflop_minimum, matched_run, power_law, predict_loss
from tinygpt.train import train

RESULTS = Path(__file__).parent / "results"
ROWS, LENGTH, LAYERS = 8, 64, 2
BUDGETS = {
    6.25e10: (12, 24, 36, 48, 72),
    2.5e11: (24, 36, 48, 72, 96),
    1e12: (36, 48, 72, 96, 144),
}
MUON_RATES = (0.005, 0.01, 0.02, 0.04)
ADAMW_RATES = (0.006, 0.012, 0.024)
SEEDS = (1, 2, 3)
LARGE = 4e12
AROUND = 48, 168


def shaped(width: int) -> GPTConfig:
    "The preset's model, two layers and of this width, for characters."
    size = dict(n_layer=LAYERS, n_head=2, n_embd=width, mlp_hidden=8 * width // 3, block_size=LENGTH)
    return replace(preset("laptop").model, vocab_size=prepare("sotu", "char").tokenizer.n_vocab, **size)


def settings(width: int, flops: float, muon_lr: float, learning_rate: float, seed: int) -> TrainConfig:
    "The laptop preset for another model and budget, with nothing looked at on the way."
    config = preset("laptop")
    config.model, config.run.seed = shaped(width), seed
    config.data = replace(config.data, tokenizer="char", batch_size=ROWS)
    config.optim = replace(config.optim, muon_lr=muon_lr, learning_rate=learning_rate)
    config.eval = replace(config.eval, final_eval_tokens=200_000, compressors=False)
    config.system = replace(config.system, compile="off", threads=1)
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


class Record:
    "The file of results: a run that is in it is not made again."

    PARTS = "muon_rates", "adamw_rates", "runs", "large", "around", "slower"

    def __init__(self, name: str, jobs: int):
        self.name, self.jobs = name, jobs
        there = (RESULTS / f"{name}.json").exists()
        self.parts = {part: load(name).get(part, []) if there else [] for part in self.PARTS}

    def find(self, part: str, config: TrainConfig) -> dict | None:
        o = config.optim
        asked = dict(width=config.model.n_embd, steps=o.max_steps, seed=config.run.seed)
        asked |= dict(muon_lr=o.muon_lr, learning_rate=o.learning_rate)
        return next((row for row in self.parts[part] if asked.items() <= row.items()), None)

    def get(self, part: str, configs: list[TrainConfig]) -> list[dict]:
        "The runs of these settings, in their order."
        missing = [config for config in configs if self.find(part, config) is None]
        with ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) as pool:
            for row in pool.map(run, missing):
                self.parts[part].append(row)
                about = dict(command="python benchmarks/scaling.py", rows=ROWS, budgets=list(BUDGETS))
                save(self.name, about | self.parts, quiet=True)
                print(part, json.dumps(row), flush=True)
        return [self.find(part, config) for config in configs]


# budget and width
SWEEPS = (6.25e10, 24), (6.25e10, 48), (2.5e11, 24), (2.5e11, 48), (2.5e11, 96)


def choose(losses: dict[tuple, dict]) -> float:
    "One rate for all, from (budget, width) -> rate -> loss, if the best are about the same."
    best = {place: min(found, key=found.get) for place, found in losses.items()}
    if max(best.values()) <= 2 * min(best.values()):
        rates = next(iter(losses.values()))
        total = {rate: sum(found[rate] for found in losses.values()) for rate in rates}
        return min(total, key=total.get)
    raise SystemExit(f"no rate serves all: {best}")


def best_rates(record: Record) -> tuple[float, float]:
    "Muon's rate and AdamW's, by seed 0 at the smallest two budgets."
    usual = preset("laptop").optim.learning_rate

    def sweep(part, rates, pair):
        tried = [(place, rate) for place in SWEEPS for rate in rates]
        made = [settings(width, flops, *pair(rate), 0) for (flops, width), rate in tried]
        losses = {}
        for (place, rate), row in zip(tried, record.get(part, made)):
            losses.setdefault(place, {})[rate] = row["loss"]
        return choose(losses)

    muon = sweep("muon_rates", MUON_RATES, lambda rate: (rate, usual))
    return muon, sweep("adamw_rates", ADAMW_RATES, lambda rate: (muon, rate))


def runs(record: Record) -> list[dict]:
    rates = best_rates(record)
    # one budget after the other; within it the seeds together
    places = [(flops, width, seed) for flops in BUDGETS for width in BUDGETS[flops] for seed in SEEDS]
    return record.get("runs", [settings(width, flops, *rates, seed) for flops, width, seed in places])


def at_budget(made: list[dict], flops: float, seed: int | None = None) -> dict[int, float]:
    "Width -> loss of the runs with a budget: of one seed, or the mean over all."
    near = [row for row in made if abs(math.log(row["flops"] / flops)) < 0.1]
    widths = sorted({row["width"] for row in near})
    return {
        width: statistics.mean(r["loss"] for r in near if r["width"] == width and seed in (None, r["seed"]))
        for width in widths
    }


def matrices(width: int) -> int:
    return param_counts(shaped(width))["matrices"]


def nearest(size: float) -> int:
    "The width, a multiple of 12, of the model whose blocks have about `size` parameters."
    return min(range(12, 513, 12), key=lambda width: abs(math.log(matrices(width) / size)))


def best_size(made: list[dict], flops: float, seed: int | None = None, near: int = 5) -> tuple[float, float]:
    "(size, loss) at the bottom of the parabola through so many sizes of a budget, around its lowest loss."
    losses = at_budget(made, flops, seed)
    widths = list(losses)
    first = min(widths.index(min(losses, key=losses.get)) - near // 2, len(widths) - near)
    chosen = widths[max(first, 0) :][:near]
    return isoflop_minimum([matrices(width) for width in chosen], [losses[width] for width in chosen])


def predict(record: Record):
    "Write down, once, what the large runs will end at."
    place = RESULTS / f"{record.name}_prediction.json"
    if place.exists():
        return
    made, rates = runs(record), best_rates(record)
    bests = {seed: [best_size(made, flops, seed) for flops in BUDGETS] for seed in (None, *SEEDS)}
    growth = {seed: power_law(list(BUDGETS), [size for size, _ in found])[1] for seed, found in bests.items()}
    factor, exponent = power_law(list(BUDGETS), [size for size, _ in bests[None]])
    size = factor * LARGE**exponent
    widths = [nearest(part * size) for part in (1 / 2, 1, 2)]

    sizes, tokens, losses = (
        np.array([row[k] for row in made], float) for k in ("matrices", "tokens", "loss")
    )
    law, laws = fit_law(sizes, tokens, losses), bootstrap_laws(sizes, tokens, losses)
    groups = {}
    for row in made:
        groups.setdefault((row["width"], row["steps"]), []).append(math.log(row["loss"]))
    noise = statistics.mean(statistics.variance(group) for group in groups.values()) ** 0.5
    line = power_law(list(BUDGETS), [loss for _, loss in bests[None]])
    members = []
    for width in widths:
        config = settings(width, LARGE, *rates, SEEDS[0])
        seen = config.optim.max_steps * ROWS * LENGTH
        low, _, high = predict_loss(laws, matrices(width), seen, noise / len(SEEDS) ** 0.5)
        loss = float(law.loss(matrices(width), seen))
        row = dict(width=width, matrices=matrices(width), tokens=seen, loss=loss, low=low, high=high)
        members.append(row)
    about = dict(made=time.strftime("%Y-%m-%d %H:%M"), runs=len(made), noise=noise, level=0.9, budget=LARGE)
    about |= dict(best_size=size, growth={str(seed): a for seed, a in growth.items()}, law=asdict(law))
    save(place.stem, about | dict(line=line[0] * LARGE ** line[1], members=members))


def large(record: Record):
    widths = [row["width"] for row in load(f"{record.name}_prediction")["members"]]
    rates = best_rates(record)
    record.get("large", [settings(width, LARGE, *rates, seed) for seed in SEEDS for width in widths])


def around(record: Record):
    # the valley is so flat that three sizes and three seeds do not show where its bottom is
    rates = best_rates(record)
    record.get("around", [settings(width, LARGE, *rates, seed) for seed in SEEDS for width in AROUND])


def slower(record: Record):
    # was the rate, found with a sixteenth of the arithmetic and less, too high for these?
    width = load(f"{record.name}_prediction")["members"][1]["width"]
    muon, adamw = best_rates(record)
    record.get("slower", [settings(width, LARGE, muon / 2, adamw, seed) for seed in SEEDS])


def member(n: int) -> GPTConfig:
    "The model of the preset's family with n layers; the preset has four."
    return replace(preset("laptop").model, n_layer=n, n_embd=32 * n, n_head=2)


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
        config.eval.compressors, config.system.threads = False, 1
        made.append(run(matched_run(config, tokens * flops_per_token(laptop.model))))
        save(name, dict(command="python benchmarks/scaling.py preset", runs=made), quiet=True)
        print(json.dumps(made[-1]), flush=True)


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parts = dict(rates=best_rates, runs=runs, predict=predict, large=large, around=around)
    parts |= dict(slower=slower, preset=at_preset)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; all where none is named")
    parser.add_argument("--name", default="scaling", help="of the record, for a trial")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = parser.parse_args()
    record = Record(args.name, args.jobs)
    for part in args.parts or parts:
        parts[part](record)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
