"""nanoGPT's published CPU run, Tiny Shakespeare by characters: does the preset reach its loss of 1.88?

    python benchmarks/shakespeare_cpu.py                               three seeds
    python benchmarks/shakespeare_cpu.py --seeds 1 --max-steps 100     a trial; writes nothing

A seed takes about a minute and a half on two cores; the result goes to results/shakespeare_cpu.json.

The run has 2000 steps. nanoGPT estimates its loss from 20 random batches of 12 x 64 tokens; ours is over the
whole validation part, the last tenth of the text. So each trained model is also judged as nanoGPT does it, 30
times over, to see how much that estimate scatters.
"""

import argparse
import tempfile
import time

import torch
from data_machine import save

from tinygpt.data.windows import RandomLoader
from tinygpt.run.presets import preset
from tinygpt.train import train


def as_nanogpt(result, seed: int) -> float:
    "The loss over 20 random batches of 12 x 64 validation tokens."
    loader = RandomLoader(result.data.val, 12, 64, seed)
    with torch.no_grad():
        return sum(result.model(*next(loader))[1].item() for _ in range(20)) / 20


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=None)
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1337, 1337 + args.seeds):
            config = preset("shakespeare-char-cpu")
            config.run.out = folder
            config.run.name = f"seed{seed}"
            config.run.seed = seed
            config.system.dtype = "float32"  # as nanoGPT's
            config.optim.max_steps = args.max_steps or config.optim.max_steps
            config.eval.sample_tokens = 0
            config.eval.save_every = 0
            start = time.perf_counter()
            result = train(config, progress="none")
            seconds = round(time.perf_counter() - start, 1)
            result.model.eval()
            run = dict(
                seed=seed,
                val_loss=round(result.val.loss, 4),
                val_tokens=result.val.tokens,
                seconds=seconds,
                random_estimates=[round(as_nanogpt(result, s), 4) for s in range(30)],
            )
            runs.append(run)
            print(run, flush=True)
    if args.max_steps is None:
        save("shakespeare_cpu", dict(preset="shakespeare-char-cpu", published=1.88, steps=2000, runs=runs))


if __name__ == "__main__":
    main()
