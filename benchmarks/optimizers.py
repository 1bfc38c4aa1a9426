"""Optimizers, weight decay and schedules on small GPTs: grids that chapter 10 draws, and the log names.

    python benchmarks/optimizers.py --threads 1                 # prints; about an hour on one core
    python benchmarks/optimizers.py --threads 1 --save          # and writes results/optimizers.json
    python benchmarks/optimizers.py --threads 1 --save decay    # one part; the others stay as they are
    python benchmarks/optimizers.py --steps 4 --seeds 1         # a trial of the script itself

The models are those of chapters 10 and 11, on characters of the State of the Union addresses. Within a part
all sides have the same rates, the same warm-up, the same clipping and the same seeds. A seed chooses the
initial weights and the batches. The loss is that of held-out text, the same rows for every run.

Three seeds choose the rates. Eight others, which chose nothing, compare: `compare-optimizers`,
`compare-pieces` (of Adam), `compare`, `compare-short` and `compare-longer` (schedules), each way at its best
rate; `which` (weights decay), at the best rate; `compare-kinds` (the usual rule, and decay on all weights),
each at its best rate and decay; `high` (a warm-up), above the best rate.

Written before `kinds` was run: "which weights decay is a convention" is refuted if, on the model with biases
or the one without, decay on all weights ends higher than the usual rule, and the interval leaves 0 out.
(The first grid had 1 to 30. Decay on all weights was best at 1, the edge, so 0.3 took the place of 30.)
`near-kinds` was added after `compare-kinds` had been read: the same seeds, between two points of the grid.

Written before `pieces` was run: "Adam beats SGD because the steps of all weights are about equally long" is
refuted if the sign of the momentum, whose steps are of one length, keeps less than half of Adam's gain. And
Adam's own momentum counts if RMSProp, which is Adam without it, ends higher and the interval leaves 0 out.

`near-pieces` and `compare-near-pieces` ask both again, after the second was left undecided: rates a factor of
the root of 3 apart, beside the best of the coarser grid, for SGD, Adam and the two; three seeds choose, forty
others compare, 20 to 59. Written before they were run: the first claim is refuted if the sign ends above half
of the gain, confirmed if below, where the interval leaves 0 out. Momentum counts if RMSProp ends higher and
the interval leaves 0 out; it hurts if RMSProp ends lower and the interval leaves 0 out.

Written before `longer` was run: 1,200 steps, four times `long`, whose trends were cut off. All ways have a
warm-up of a tenth: a constant rate, and cosines and trapezoids, each down to 0.1 and down to 0. Each way
starts with three rates, a factor of the square root of 2 apart; while its best one is at an edge of what it
has tried, the next one beyond is tried too. Three seeds choose rates, and which of two is "better"; eight
others compare. (A constant rate and the trapezoids are the same until the way down: they share these steps.)

1. The better trapezoid ends lower than the better cosine.
2. A way down to 0 ends lower than the same way down to 0.1: it must hold for the trapezoid and the cosine.
3. The better cosine ends lower than the constant rate.

Each is refuted if the interval of the eight differences is above 0, and undecided if it contains 0. (Of the
second, both intervals below 0: confirmed; one above 0: refuted; else undecided.)

All three came out undecided. The rate chosen for the better cosine, 0.0226, stands beside a cliff: of the
eight fresh seeds, three end more than 0.2 above the mean of the other five. `compare-longer-again` asks once
more, with eight other seeds, 20 to 27, and careful rates: of those whose mean is within 0.01 of the best
one's, the lowest. Which cosine and which trapezoid is the better is that of these rates, by the three seeds.
Written before it was run: the three claims and the rule of before.

`longer-plain`: the constant rate and the trapezoid down to 0.1 once more, without a warm-up.
`compare-longer-plain` takes the seeds and the rule of `compare-longer-again`, and is put beside it.
Known before: in 300 steps the trapezoid at its best rate, with a warm-up and without, is undecided; at
two and four times that rate a warm-up gains. Written before the first run:

4. In 1,200 steps a warm-up gains: the trapezoid down to 0.1 ends lower with one than without.
5. The same for the constant rate.
6. Without a warm-up, the careful rate is lower than with one, for the trapezoid and for the constant rate.

4 and 5 are confirmed if the interval leaves 0 out on that side, refuted if on the other, else undecided. 6 is
confirmed if it holds for both, refuted if for none, else undecided.
"""

import argparse
import copy
import itertools
import json
import statistics
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from data_machine import machine, tune
from torch import nn

from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.data.tokens import prepare
from tinygpt.model import GPT, GPTConfig
from tinygpt.schedule import make_schedule

RESULT = Path(__file__).parent / "results" / "optimizers.json"
T, BATCH_SIZE = 64, 4
FRESH = 10_000_000  # characters of training text: a run sees a hundredth of them
REPEATED = 4096  # a text that a run of 300 steps of 256 characters sees 19 times
DECAYS = (0.0, 0.1, 1.0, 3.0)
# what decays -> role -> factor; adamw_groups lets the vectors alone unless told otherwise
KINDS = {
    "matrices": dict(embedding=0, head=0),
    "embedding and head": dict(matrix=0),
    "vectors": dict(matrix=0, embedding=0, head=0, vector=1),
}
RULE = "matrices, embedding and head"  # the usual one
ALL_KINDS = KINDS | {
    RULE: {},
    "all": dict(vector=1),
}


def settings(part: str) -> list[dict]:
    "What a part of the grid runs: one dictionary a run, without its seed."
    small = dict(model="chapter 10", warmup=0.1, schedule="cosine")
    if part in ("optimizers", "pieces"):
        rates = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
        names = ("SGD with momentum", "Adam", "AdamW")
        if part == "pieces":
            names = ("sign of the momentum", "RMSProp")
        return [small | dict(optimizer=name, lr=lr) for name in names for lr in rates]
    if part == "near-pieces":  # half a step of the coarser grid beside what was best there
        best = {"SGD with momentum": 0.3, "Adam": 0.003, "sign of the momentum": 0.001, "RMSProp": 0.003}
        steps = (3**-0.5, 1.0, 3**0.5)
        return [small | dict(optimizer=n, lr=float(f"{lr * f:.3g}")) for n, lr in best.items() for f in steps]
    if part == "decay":
        grid = itertools.product((FRESH, REPEATED), DECAYS, (0.001, 0.003, 0.01))
        return [small | dict(optimizer="AdamW", text=n, decay=decay, lr=lr) for n, decay, lr in grid]
    if part == "kinds":  # each way with rates and decays of its own, on a model without biases and one with
        grid = list(itertools.product((0.3, 1.0, 3.0, 10.0), (0.001, 0.003, 0.01)))
        found = []
        for model in ("chapter 10", "chapter 10, GPT-2"):
            same = small | dict(model=model, optimizer="AdamW", text=REPEATED)
            found += [same | dict(kind="nothing", decay=0.0, lr=lr) for lr in (0.001, 0.003, 0.01)]
            found += [same | dict(kind=kind, decay=d, lr=lr) for kind in (RULE, "all") for d, lr in grid]
        return found
    if part == "near-kinds":  # half a step of the grid of `kinds` away from what it chose, where there is one
        near = [("chapter 10", RULE, 2.0, 0.003), ("chapter 10", "all", 0.6, 0.003)]
        near += [("chapter 10, GPT-2", "nothing", 0.0, 0.002)]
        near += [("chapter 10, GPT-2", kind, 1.0, 0.002) for kind in (RULE, "all")]
        same = dict(optimizer="AdamW", text=REPEATED)
        return [small | same | dict(model=m, kind=k, decay=d, lr=lr) for m, k, d, lr in near]
    if part == "which":  # at the best rate, where a decay of 1 lowers the held-out loss
        same = small | dict(optimizer="AdamW", lr=0.003, text=REPEATED)
        return [same | dict(decay=0.0)] + [same | dict(decay=1.0, kind=kind) for kind in ALL_KINDS]
    if part == "high":  # a warm-up above the rate that is best without one
        same = dict(model="chapter 11", optimizer="AdamW", schedule="trapezoid", part_of_run=1)
        return [same | dict(warmup=w, lr=lr) for lr in (0.004, 0.008) for w in (0.0, 0.1)]
    deep = dict(model="chapter 11", optimizer="AdamW")
    if part in OUTWARD:
        ways = [dict(schedule="constant")] + [dict(schedule="trapezoid", final=f) for f in (0.1, 0.0)]
        ways += [dict(schedule="cosine", final=f) for f in (0.1, 0.0)]
        if part == "longer-plain":
            ways = ways[:2]
        same = deep | dict(part_of_run=4, warmup=0.0 if part == "longer-plain" else 0.1)
        return [same | way | dict(lr=lr) for lr, way in itertools.product(LADDER, ways)]
    rates = (0.001, 0.002, 0.004, 0.008, 0.016)
    part_of_run = {"long": 1, "short": 70 / 300}[part]
    ways = [("constant", 0.0), ("constant", 0.1), ("constant", 0.3)]
    ways += [("cosine", 0.0), ("cosine", 0.1), ("trapezoid", 0.0), ("trapezoid", 0.1)]
    if part == "long":  # the one that matters least takes minutes
        ways.remove(("constant", 0.3))
    return [
        deep | dict(schedule=kind, warmup=w, lr=lr, part_of_run=part_of_run)
        for (kind, w), lr in itertools.product(ways, rates)
    ]


def best_settings(part: str, slack: float = 0.0) -> list[dict]:
    """Of a recorded part: the settings of each way with the lowest mean loss.

    A way is all but rate and decay. With a slack: the lowest rate whose mean is within it of the lowest mean.
    """
    runs = json.loads(RESULT.read_text())[part]["runs"]
    tried = {}  # way -> (mean loss, settings), in the order of the rates
    for s in settings(part):
        losses = [run["loss"] for run in runs if s.items() <= run.items()]
        if not losses:  # a rate that was not tried
            continue
        mean = statistics.mean(losses)
        way = tuple(value for name, value in s.items() if name not in ("lr", "decay"))
        tried.setdefault(way, []).append((mean, s))
    best = []
    for of_way in tried.values():
        lowest = min(mean for mean, _ in of_way)
        best.append(next(s for mean, s in of_way if mean <= lowest + slack))
    return best


def with_seeds(part: str, seeds: int) -> list[dict]:
    "What a part runs, seed by seed."
    if part in COMPARED:  # on seeds that chose no rate
        of = COMPARED[part]
        compared = best_settings(of, SLACK.get(part, 0.0)) if of else settings(part)
        if part == "compare-near-pieces":  # seed by seed, so that a run that is cut short compares all
            return [s | dict(seed=20 + i) for i in range(MANY_SEEDS) for s in compared]
        first = 20 if part in SLACK else 10
        return [s | dict(seed=first + i) for s in compared for i in range(seeds + MORE_SEEDS)]
    return [s | dict(seed=seed) for s in settings(part) for seed in range(seeds)]


MORE_SEEDS = 5  # than the parts that choose have
MANY_SEEDS = 40  # of `compare-near-pieces`
# part -> the part whose best rates it takes, or None: its own settings
COMPARED = {
    "compare-optimizers": "optimizers",
    "compare-pieces": "pieces",
    "compare-near-pieces": "near-pieces",
    "compare-kinds": "kinds",
    "near-kinds": None,
    "which": None,
    "compare": "long",
    "compare-short": "short",
    "compare-longer": "longer",
    "compare-longer-again": "longer",
    "compare-longer-plain": "longer-plain",
    "high": None,
}
SLACK = {"compare-longer-again": 0.01, "compare-longer-plain": 0.01}  # nats within which rates count as equal
OUTWARD = ("longer", "longer-plain")  # they try rates of LADDER, from the middle on
LADDER = (0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0057, 0.008, 0.0113, 0.016, 0.0226, 0.032)
PARTS = ("optimizers", "pieces", "near-pieces", "decay", "kinds", "short", "long", *OUTWARD, *COMPARED)


def make_model(name: str, vocab_size: int) -> GPT:
    "The small GPT of a page."
    shape = dict(vocab_size=vocab_size, block_size=T, n_head=4)
    if name == "chapter 11":
        return GPT(GPTConfig.gpt2(**shape, n_layer=6, n_embd=48))
    if name == "chapter 10, GPT-2":  # with biases and learned positions
        return GPT(GPTConfig.gpt2(**shape, n_layer=2, n_embd=64))
    return GPT(GPTConfig.llama(**shape, n_layer=2, n_embd=64))


class SignMomentum(torch.optim.Optimizer):
    "Every weight moves by lr, against the sign of the running mean of its gradients."

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "mean" not in self.state[p]:
                    self.state[p]["mean"] = torch.zeros_like(p)
                mean = self.state[p]["mean"].lerp_(p.grad, 0.1)
                p.add_(mean.sign(), alpha=-group["lr"])


def make_optimizer(model: GPT, s: dict) -> torch.optim.Optimizer:
    "The optimizer of one run."
    if s["optimizer"] == "sign of the momentum":
        return SignMomentum(model.parameters(), dict(lr=s["lr"]))
    if s["optimizer"] == "SGD with momentum":
        return torch.optim.SGD(model.parameters(), lr=s["lr"], momentum=0.9)
    decay = 0.0 if s["optimizer"] in ("Adam", "RMSProp") else s.get("decay", 0.1)
    groups = adamw_groups(
        model,
        s["lr"],
        betas=(0.0 if s["optimizer"] == "RMSProp" else 0.9, 0.95),  # with its bias correction
        weight_decay=decay,
        decay_multipliers=ALL_KINDS.get(s.get("kind"), {}),
    )
    return make_adamw(groups)[0]


def rows(tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    "Inputs and targets, (B, T) each, of the rows that begin at `starts`."
    both = tokens[starts[:, None] + torch.arange(T + 1)]
    return both[:, :-1], both[:, 1:]


@torch.no_grad()
def held_out_loss(model: GPT, val: torch.Tensor, n: int = 256) -> float:
    "Mean loss over `n` rows of held-out text, evenly spread."
    starts = torch.arange(n) * ((len(val) - T - 1) // n)
    losses = [model(*rows(val, some))[1].item() for some in starts.split(64)]
    return statistics.mean(losses)


def steps_of(s: dict, steps: int) -> int:
    "Steps of a run, of which a short one takes a part."
    return max(2, round(steps * s.get("part_of_run", 1)))


def outward(part: str, seeds: int, one) -> list[dict]:
    "The runs of three rates of each way, and of further ones where the best is at the edge; `one` runs one."

    def best(found):
        return min(found, key=lambda lr: statistics.mean(run["loss"] for run in found[lr]))

    def beyond(lr, up):
        return LADDER[LADDER.index(lr) + (1 if up else -1)]

    runs = []
    for way in [s for s in settings(part) if s["lr"] == LADDER[0]]:

        def by_seeds(lr, way=way):
            return [one(way | dict(lr=lr, seed=seed)) for seed in range(seeds)]

        runs += itertools.chain(*tune(by_seeds, (0.002, 0.0028, 0.004), best, beyond).values())
    return runs


def run(s: dict, train: torch.Tensor, val: torch.Tensor, n_vocab: int, shared: dict) -> dict:
    """One training run: its settings, the loss on held-out text, and that of its last 20 batches.

    `shared`: settings of a run of `longer` but its way down -> all that it was where the way down begins.
    """
    torch.manual_seed(s["seed"])
    model = make_model(s["model"], n_vocab)
    optimizer = make_optimizer(model, s)
    tops = [group["lr"] for group in optimizer.param_groups]
    steps = s["steps"]
    schedule = make_schedule(s["schedule"], steps, round(s["warmup"] * steps), s.get("final", 0.1))
    text = train[: s.get("text", FRESH)]
    start, losses = time.process_time(), []
    branches = s.get("part_of_run") == 4 and s["schedule"] != "cosine"
    key = s["warmup"], s["lr"], s["seed"], steps
    if branches and key in shared:
        model, optimizer, losses = copy.deepcopy(shared[key][:3])
        torch.set_rng_state(shared[key][3])
    for step in range(len(losses), steps):
        if branches and step == steps - round(0.2 * steps):
            shared[key] = *copy.deepcopy((model, optimizer, losses)), torch.get_rng_state()
        for group, top in zip(optimizer.param_groups, tops):
            group["lr"] = top * schedule(step)
        x, y = rows(text, torch.randint(len(text) - T, (BATCH_SIZE,)))
        optimizer.zero_grad()
        loss = model(x, y)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    seconds = round(time.process_time() - start, 1)
    last = statistics.mean(losses[-20:])
    loss = held_out_loss(model, val)
    return s | dict(loss=round(loss, 4), last=round(last, 4), cpu_s=seconds)


def write(part: str, result: dict):
    "Put one part into the record; what other parts hold stays."
    record = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    record[part] = result
    record = {name: record[name] for name in PARTS if name in record}
    lines = json.dumps(record, indent=1)
    # a run is one line
    for name in record:
        runs = record[name]["runs"]
        long = json.dumps(runs, indent=1).replace("\n", "\n  ")
        short = "[\n   " + ",\n   ".join(json.dumps(r) for r in runs) + "\n  ]"
        lines = lines.replace(long, short)
    RESULT.write_text(lines + "\n")


def parse(argv=None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all where none is named")
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="of a run; the short ones take 70 / 300 of them, the longer ones four times as many",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--log", type=Path, help="a file of single results: those in it are not run again")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args(argv)


def main():
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    data = prepare("sotu", "char", progress=False)
    train, val = (torch.from_numpy(np.asarray(t[:FRESH]).astype(np.int64)) for t in (data.train, data.val))
    done, shared = [], {}
    if args.log and args.log.exists():
        done = [json.loads(line) for line in args.log.read_text().splitlines()]
    for part in args.parts or PARTS:

        def one(s):
            asked = s | dict(steps=steps_of(s, args.steps))
            result = next((r for r in done if asked.items() <= r.items()), None)
            if result is None:
                result = run(asked, train, val, data.tokenizer.n_vocab, shared)
                if args.log:
                    with args.log.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
            return result

        if part in OUTWARD:
            runs = outward(part, args.seeds, one)
        else:
            runs = [one(s) for s in with_seeds(part, args.seeds)]
        flags = [f"--threads {args.threads}"] if args.threads else []
        command = " ".join(["python benchmarks/optimizers.py", *flags, "--save", part])
        result = dict(command=command, machine=machine(), date=date.today().isoformat(), runs=runs)
        if args.save:
            write(part, result)
            print(f"written: {part} in {RESULT}")


if __name__ == "__main__":
    main()
