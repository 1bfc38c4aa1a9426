"""nanoGPT's published CPU run, Tiny Shakespeare by characters, 2000 steps, validation loss 1.88: does the preset reach it?

    python benchmarks/shakespeare_cpu.py              three seeds, about a minute and a half each on two cores; prints, and writes results/shakespeare_cpu.json
    python benchmarks/shakespeare_cpu.py --seeds 1 --max-steps 100     a trial; writes nothing

nanoGPT estimates its loss from 20 random batches; ours is over the whole validation part, the last tenth of the text.
"""
import argparse
import tempfile
import time

from data_machine import save
from tinygpt.presets import preset
from tinygpt.train import train


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=None)
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1337, 1337 + args.seeds):
            config = preset("shakespeare-char-cpu")
            config.run.out, config.run.name, config.run.seed = folder, f"seed{seed}", seed
            config.optim.max_steps = args.max_steps or config.optim.max_steps
            config.eval.sample_tokens, config.eval.save_every = 0, 0
            start = time.perf_counter()
            result = train(config, progress="none")
            runs.append(dict(seed=seed, val_loss=round(result.val.loss, 4), val_tokens=result.val.tokens, seconds=round(time.perf_counter() - start, 1)))
            print(runs[-1], flush=True)
    if args.max_steps is None:
        save("shakespeare_cpu", dict(preset="shakespeare-char-cpu", published=1.88, steps=2000, runs=runs))


if __name__ == "__main__":
    main()
