"""How much do two trainings of one recipe differ, where nothing but the seed differs?

    python benchmarks/seeds.py               # prints; about two minutes on one core
    python benchmarks/seeds.py --save        # and writes results/seeds.json, which chapter 17 reads
    python benchmarks/seeds.py --steps 10    # a trial; writes nothing

The recipe is chapter 17's model on the State of the Union addresses, 120 steps, with a schedule. It is
trained with eight seeds; with four seeds for the weights alone, and four for the order of the data alone;
once more with the first seed; and, as a second recipe, with eight seeds and QK-norm. Each trained model is
judged on the same rows, a quarter of the held-out addresses. What is kept of it is the sum of the losses and
the number of targets in each address.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from data_machine import save

from tinygpt.adamw import adamw_groups
from tinygpt.data.tokens import prepare
from tinygpt.data.windows import RandomLoader
from tinygpt.evaluate.score import eval_rows, row_documents, score_rows
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import make_optimizer, muon_groups
from tinygpt.schedule import make_schedule

BLOCK = 64
EVAL_TOKENS = 64_000


def trained(data, weights_seed: int, data_seed: int, steps: int, qk_norm: bool) -> GPT:
    "One training of the recipe."
    torch.manual_seed(weights_seed)
    model = GPT(
        GPTConfig.llama(vocab_size=1024, block_size=BLOCK, n_layer=2, n_head=4, n_embd=64, qk_norm=qk_norm)
    )
    optimizer, _ = make_optimizer(muon_groups(model, adamw_groups(model, lr=6e-3), lr=0.02))
    tops = [group["lr"] for group in optimizer.param_groups]
    schedule = make_schedule("trapezoid", steps, warmup_steps=max(1, steps // 16), final=0.05, cooldown=0.5)
    loader = RandomLoader(data.train, batch_size=16, block_size=BLOCK, seed=data_seed)
    for step in range(steps):
        for group, top in zip(optimizer.param_groups, tops):
            group["lr"] = top * schedule(step)
        optimizer.zero_grad()
        model(*next(loader))[1].backward()
        optimizer.step()
    return model


def judged(data, model: GPT) -> dict:
    "Its loss, and nats and targets of each held-out address."
    rows = eval_rows(data.val, BLOCK, EVAL_TOKENS)
    table = score_rows(model, data.val, data.tokenizer.token_bytes(), rows, batch_size=64)
    document = row_documents(data.val, rows, BLOCK, data.tokenizer.eot)
    nats, targets = (np.bincount(document, weights=column) for column in table.T[:2])
    return dict(
        loss=round(nats.sum() / targets.sum(), 5),
        nats=[round(value, 2) for value in nats],
        targets=[int(value) for value in targets],
    )


def plan(steps: int) -> dict:
    "What is trained: group -> (seed of the weights, seed of the data, steps, QK-norm) of each run."
    return {
        "the recipe": [(seed, seed, steps, False) for seed in range(8)],
        "the recipe, seed 0 again": [(0, 0, steps, False)],
        "other weights, same data": [(seed, 0, steps, False) for seed in range(4)],
        "same weights, other data": [(0, seed, steps, False) for seed in range(4)],
        "with QK-norm": [(seed, seed, steps, True) for seed in range(8)],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = prepare("sotu", vocab_size=1024)
    groups, done = {}, {}
    for name, wanted in plan(args.steps).items():
        runs = []
        for setting in wanted:
            start = time.process_time()
            if setting not in done or "again" in name:  # the first run is in three groups
                done[setting] = judged(data, trained(data, *setting))
            weights_seed, data_seed, steps, _ = setting
            runs.append(dict(weights_seed=weights_seed, data_seed=data_seed, **done[setting]))
            print(f"{name} {setting}: {runs[-1]['loss']:.4f}", end=" ", flush=True)
            print(f"{time.process_time() - start:.1f} s", flush=True)
        groups[name] = runs
        if len(runs) > 1:
            losses = [run["loss"] for run in runs]
            print(f"    mean {statistics.mean(losses):.4f}, deviation {statistics.stdev(losses):.4f}")
    if args.save:
        save("seeds", dict(steps=args.steps, eval_tokens=EVAL_TOKENS, groups=groups))


if __name__ == "__main__":
    main()
