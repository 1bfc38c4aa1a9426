"""What the norms are worth in a deep stack: twelve blocks with and without them, rates tuned for each.

    python benchmarks/norms.py               # prints; about 8 minutes on one core
    python benchmarks/norms.py --save        # and adds its runs to benchmarks/results/norms.json
    python benchmarks/norms.py --show        # the table of what the record holds

Data, optimizer and schedule are those of `ablation.py`, and the model is its first row with 12 blocks in
place of 2. Each row is tuned on two seeds at four rates or more, a factor of two apart, until the best has
a worse one on either side; three other seeds compare.

Written before the runs: **without its norms the model has the higher loss after 200 steps.** It is refuted
if the 95 % interval of the difference from the row with norms, seed by seed, reaches 0 or lies below.

Without norms the branches read a stream as small as the first weights make it, 0.03. So the loss could be
that of a bad start only. The third row has no norms either, but first weights that keep the size of what
passes, and a head of its own (16,384 parameters more). What it gives was not predicted. The fourth row, norms
with that start, was added when the first run of the third was no worse than the first row.
"""

from pathlib import Path

import torch
from ablation import SHAPE, study
from torch import nn

from tinygpt.model import GPT, GPTConfig

RECORD = Path(__file__).parent / "results" / "norms.json"
DEEP = SHAPE | dict(n_layer=12)

MUP = dict(init="mup", tie_weights=False)

# name: (the row it is compared with, what differs from GPT-2's parts, what the page calls it)
ROWS = {
    "norms": (None, {}, "with norms"),
    "bare": ("norms", {}, "without"),
    "norms_mup": (None, MUP, "with norms, a start that keeps sizes"),
    "bare_mup": ("norms_mup", MUP, "without, a start that keeps sizes"),
}


def make(row: str, seed: int) -> GPT:
    torch.manual_seed(seed)
    model = GPT(GPTConfig.gpt2(**DEEP | ROWS[row][1]))
    if row.startswith("bare"):
        for block in model.h:
            block.ln_1 = block.ln_2 = nn.Identity()
        model.ln_f = nn.Identity()
    return model


if __name__ == "__main__":
    rates = (0.000625, 0.00125, 0.0025, 0.005)
    study(__doc__, RECORD, ROWS, make, DEEP, steps=200, rates=rates, seeds=3)
