"""Pairs and a model to learn from them, for the tests of chapter 23."""

import numpy as np
import torch

from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import ByteTokenizer

BYTE = ByteTokenizer()


def pairs_of(n: int, seed: int = 0) -> list:
    "Pairs of random bytes: prompts of 2 to 4 tokens, answers of 1 to 6."
    rng = np.random.default_rng(seed)

    def ids(low, high):
        return rng.integers(0, 256, rng.integers(low, high + 1)).tolist()

    return [(ids(2, 4), [*ids(1, 5), BYTE.eot], [*ids(1, 5), 0, BYTE.eot]) for _ in range(n)]


def random_model(seed: int = 0, **kw) -> GPT:
    "A model with opinions: its weights are not those that a scheme begins with."
    torch.manual_seed(seed)
    shape = dict(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=32) | kw
    model = GPT(GPTConfig.llama(**shape))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return model.eval()
