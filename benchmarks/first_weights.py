"""What the first weights are worth: the same small model from several starts, rates tuned for each.

    python benchmarks/first_weights.py            # prints; about a quarter of an hour on one core
    python benchmarks/first_weights.py --save     # and adds its runs to benchmarks/results/first_weights.json
    python benchmarks/first_weights.py --show     # the table of what the record holds

Rates and seeds are chosen as in `ablation.py`. The model has a head of its own. There are two shapes. What
undivided blocks add is one and a half times the embeddings in the small one, twelve times in the large one.
With `--rates 0.000884` the large shape was run between its best rates too: how much does the grid decide?

Five seeds did not decide the small shape: +0.013 ± 0.025 undivided. So `--rows gpt2 normal zero torch mup
--seeds 20` has fifteen more, and mup, whose tuning had stopped after six runs. Written before these runs; a
claim is undecided if the interval contains 0:

1. In the small shape, too, undivided residual weights cost something. Refuted if they gain.
2. mup's first weights, at one rate for all, end below GPT-2's, as torch's do. Refuted if above.

2 was refuted. 1 came out at +0.010 ± 0.009 with all twenty, and at +0.009 ± 0.010 with the fifteen new ones,
which is no decision. So claim 1 is asked again, of sixty seeds that nobody has seen, 20 to 79 (`--rows gpt2
normal --seeds 80`), by the same rule, and that answer counts.
"""

from pathlib import Path

import torch
from ablation import study

from tinygpt.init import init_weights
from tinygpt.model import GPT, GPTConfig

RECORD = Path(__file__).parent / "results" / "first_weights.json"
SHAPE = dict(vocab_size=256, block_size=64, n_head=1, n_layer=8, n_embd=32, tie_weights=False)
LARGE = dict(n_head=4, n_layer=24, n_embd=128)

# name: (the row it is compared with, what differs from SHAPE, scheme)
ROWS = {
    "gpt2": (None, {}, "gpt2"),
    "normal": ("gpt2", {}, "normal"),
    "zero": ("gpt2", {}, "zero"),
    "torch": ("gpt2", {}, "torch"),
    "mup": ("gpt2", {}, "mup"),
    "gpt2_large": (None, LARGE, "gpt2"),
    "normal_large": ("gpt2_large", LARGE, "normal"),
}


def make(row: str, seed: int) -> GPT:
    _, shape, scheme = ROWS[row]
    model = GPT(GPTConfig.gpt2(**SHAPE | shape))
    generator = torch.Generator().manual_seed(seed)
    return init_weights(model, model.config.n_layer, scheme, generator=generator)


if __name__ == "__main__":
    study(__doc__, RECORD, ROWS, make, SHAPE, steps=150)
