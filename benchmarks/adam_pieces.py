"""Why Adam and not SGD? Momentum, its sign, RMSProp and Adam on a GPT that has learned to read.

    python benchmarks/adam_pieces.py            # prints; about 15 minutes of one core that is idle
    python benchmarks/adam_pieces.py --save     # and adds its runs to results/adam_pieces.json
    python benchmarks/adam_pieces.py --show     # the table of what the record holds

Model, text, batches, clipping and steps are those of `schedules.py`; every rate rises over 5 % of the run and
falls to 0 in a straight line. Each row is tuned alone: rates a factor of two apart, until the best has a
worse one on either side; seeds 100 to 102. At the rate with the lowest mean, eight other seeds compare, from
200 on, paired by seed; intervals are 95 %, by Student's t.

Written before the first run. Known: after 300 steps SGD with momentum ended where a table of pairs does
(2.38), Adam 0.16 below, the sign of the momentum half way between, and RMSProp with Adam.

1. Adam ends below SGD with momentum, by 0.1 or more.
2. Equal steps are most of it: the sign of the momentum keeps more than half of Adam's gain over SGD.
3. Momentum counts inside Adam: RMSProp (beta1 = 0) ends above Adam.
4. Decay does not count on new text: AdamW with 0.1 is within 0.01 of Adam.

Confirmed if the whole interval is on that side of the bound, refuted if it is on the other, else undecided.
"""

import statistics
import time
from pathlib import Path

import torch
from ablation import Record, parser_of
from optimizers import held_out_loss, make_model, make_optimizer
from schedules import FIRST, STEPS, Runs, rates_of

from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "adam_pieces.json"
RATES = {
    "SGD with momentum": (0.1, 0.2, 0.4),
    "sign of the momentum": (0.0005, 0.001, 0.002),
    "RMSProp": (0.002, 0.004, 0.008),
    "Adam": (0.002, 0.004, 0.008),
    "AdamW": (0.002, 0.004, 0.008),
}


class Pieces(Record):
    seeds = (100, 101, 102)


def show(record: Pieces):
    found = {row: record.compared(row, STEPS) for row in RATES}
    for row, losses in found.items():
        if losses:
            mean, rate = statistics.mean(losses.values()), record.tuned(row, STEPS)
            print(f"{row:21} rate {rate:<7g} {mean:.4f}, {len(losses)} seeds")
    seeds = sorted(set.intersection(*(set(losses) for losses in found.values())))
    if len(seeds) < 2:
        return
    sgd, sign, rmsprop, adam, adamw = ([losses[seed] for seed in seeds] for losses in found.values())
    half_way = [statistics.mean(both) for both in zip(adam, sgd)]
    pairs = {
        "1. Adam minus SGD with momentum": (adam, sgd),
        "2. sign minus half way": (sign, half_way),
        "3. RMSProp minus Adam": (rmsprop, adam),
        "4. AdamW minus Adam": (adamw, adam),
    }
    for name, sides in pairs.items():
        mean, half = interval(a - b for a, b in zip(*sides))
        print(f"{name}: {mean:+.4f} ± {half:.4f}, {len(seeds)} seeds")


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=RATES, default=list(RATES), help="in this order")
    parser.add_argument("--seeds", type=int, default=8, help="that compare")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = None if args.show else Runs()

    def one(row: str, rate: float, seed: int, steps: int) -> dict:
        start = time.process_time()
        torch.manual_seed(seed)
        model = make_model("chapter 10", runs.n_vocab)
        optimizer = make_optimizer(model, dict(optimizer=row, lr=rate))
        runs.go(model, optimizer, rates_of("line 5 to 0", rate, steps))
        loss, seconds = round(held_out_loss(model, runs.val), 4), round(time.process_time() - start, 1)
        print(f"{row:21} rate {rate:<7g} seed {seed}: {loss:.4f} ({seconds} s)", flush=True)
        return dict(row=row, rate=rate, seed=seed, steps=steps, loss=loss, cpu_s=seconds)

    record = Pieces(RECORD, one, args.save, rates=RATES, table_of_pairs=2.379)
    if not args.show:
        best = {row: record.tune(row, STEPS) for row in args.rows}
        for seed in range(FIRST, FIRST + args.seeds):
            for row, rate in best.items():
                record.ensure(row, rate, [seed], STEPS)
    show(record)


if __name__ == "__main__":
    main()
