"""What the first weights are worth: the same small model from nine starts, rates tuned for each.

    python benchmarks/first_weights.py            # prints; about 5 minutes on one core
    python benchmarks/first_weights.py --save     # and adds its runs to benchmarks/results/first_weights.json
    python benchmarks/first_weights.py --show     # the table of what the record holds

Rates and seeds are chosen as in `ablation.py`. The model has a head of its own and is 32 wide.
"""

from pathlib import Path

import torch
from ablation import study

from tinygpt.init import init_weights
from tinygpt.model import GPT, GPTConfig

RECORD = Path(__file__).parent / "results" / "first_weights.json"
SHAPE = dict(vocab_size=256, block_size=64, n_head=1, n_embd=32, tie_weights=False)

# name: (the row it is compared with, blocks, scheme, base deviation, what c_proj is multiplied by)
ROWS = {
    "gpt2": (None, 8, "gpt2", 0.02, 1),
    "normal": ("gpt2", 8, "normal", 0.02, 1),
    "zero": ("gpt2", 8, "zero", 0.02, 1),
    "torch": ("gpt2", 8, "torch", 0.02, 1),
    "mup": ("gpt2", 8, "mup", 0.02, 1),
    "fifty_larger": ("gpt2", 8, "gpt2", 1.0, 1),
    "fifty_smaller": ("gpt2", 8, "gpt2", 0.0004, 1),
    "gpt2_16": (None, 16, "gpt2", 0.02, 1),
    "normal_16": ("gpt2_16", 16, "normal", 0.02, 1),
    # 0.02 / 32 instead of 0.02 / √32: the number of additions, and not its root
    "by_n_16": ("gpt2_16", 16, "gpt2", 0.02, 32**-0.5),
}


def make(row: str, seed: int) -> GPT:
    _, n_layer, scheme, std, times = ROWS[row]
    model = GPT(GPTConfig.gpt2(**SHAPE, n_layer=n_layer))
    init_weights(model, n_layer, scheme, std=std, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("c_proj.weight"):
                p *= times
    return model


if __name__ == "__main__":
    study(__doc__, RECORD, ROWS, make, SHAPE, steps=150)
