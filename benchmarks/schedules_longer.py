"""Should the learning rate come down early or late in a longer run? Each way at its own best rate.

    python benchmarks/schedules_longer.py            # prints; about 40 minutes of one core that is idle
    python benchmarks/schedules_longer.py --save     # and adds its runs to results/schedules_longer.json
    python benchmarks/schedules_longer.py --show     # what the record holds

The GPT, the text, the batches and the ways are those of `schedules.py`, with 4,800 steps. There four seeds
compared at two rates that nobody had tuned for this length: "line 5 to 0" ended 0.020 ± 0.008 above
"line 80 to 0" at 0.0014 and level at 0.0028 (-0.001 ± 0.005), so nothing was decided. Here each way is tuned
alone: three rates a factor of the square root of 2 apart, and the next one beyond while the best is at an
edge; seeds 100 to 102. At the rate with the lowest mean eight others compare, 204 to 211, paired
(the first four had compared in 1,200 steps, too); intervals are 95 %, by Student's t.

Written before the first run:

1. Late is better in 4,800 steps: "line 5 to 0" ends above "line 80 to 0".
2. The usual cosine costs in 4,800 steps, too: "cosine 5 to 0.1" ends above "line 80 to 0".

Confirmed if the interval lies above 0, refuted if below, else undecided. The lines are run first; the cosine
if there is time.
"""

from pathlib import Path

import torch
from ablation import parser_of, worth
from schedules import Runs, Schedules

from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "schedules_longer.json"
STEPS, SEEDS = 4800, range(204, 212)
LATE, OTHERS = "line 80 to 0", ("line 5 to 0", "cosine 5 to 0.1")


class Longer(Schedules):
    def summary(self) -> dict:
        "Way: its rate; the means that chose it, by rate; the losses by compared seed."
        found = {}
        for way in (LATE, *OTHERS):
            if tried := self.tuning(way, STEPS):
                rate = self.best(way, STEPS)
                losses = self.losses(way, rate, STEPS)
                found[way] = dict(
                    rate=rate,
                    tried={str(rate): round(worth(by), 4) for rate, by in tried.items()},
                    fresh={str(seed): losses[seed] for seed in SEEDS if seed in losses},
                )
        return found


def main():
    args = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    record = Longer(
        RECORD, None if args.show else Runs(), args.save, rates=(0.001, 0.0014, 0.002), steps=STEPS
    )
    if not args.show:
        for ways in ((LATE, OTHERS[0]), OTHERS[1:]):
            record.grid(ways, STEPS)
            for seed in SEEDS:
                for way in ways:
                    record.ensure(way, record.best(way, STEPS), [seed], STEPS)
    found = record.summary()
    for way, of in found.items():
        print(f"{way:16} best at {of['rate']:g}; by rate {of['tried']}")
    for way in OTHERS:
        both = found[way]["fresh"].keys() & found[LATE]["fresh"].keys() if way in found else ()
        if len(both) > 1:
            mean, half = interval(found[way]["fresh"][s] - found[LATE]["fresh"][s] for s in sorted(both))
            print(f"{way} minus {LATE}: {mean:+.4f} ± {half:.4f}, {len(both)} seeds")


if __name__ == "__main__":
    main()
