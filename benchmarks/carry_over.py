"""Do the rungs of chapter 20 carry over? The laptop preset (State of the Union addresses, BPE of 4096 tokens) in several forms, at equal time.

    python benchmarks/carry_over.py                    # a run half as long as the preset's; writes results/carry_over.json
    python benchmarks/carry_over.py --steps 640        # as long as the preset's

A training step of every form is timed first, in turn, on one thread; then each form gets as many steps as the preset's own form makes in that time.
Bits per byte are those of the held-out addresses, all of them.
"""
import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from data_machine import save, spread
from tinygpt.accumulate import clip_gradients
from tinygpt.model import GPT
from tinygpt.parallel import make_optimizer
from tinygpt.presets import parse_arguments
from tinygpt.report import read_metrics
from tinygpt.speedrun import run_command

GPT2 = "--position learned --norm layernorm --mlp gelu --init gpt2 --tie-weights --no-qk-norm --logit-softcap 0"
FORMS = {  # each is a change to the one that its comment names
    "GPT-2's form, AdamW": f"{GPT2} --optimizer adamw --learning-rate 4e-3",  # the third rung of the ladder
    "Muon": GPT2,  # to the first
    "the laptop preset": "",  # to the second: RoPE, RMSNorm, QK-norm, ReLU², start at zero, own head, soft cap
    "n-gram tables": "--ngram-rows 32768",  # to the preset
    "three layers of six": "--n-layer 3 --ngram-rows 32768",  # to the one above
}
FIXED = "laptop --threads 1 --compile off --eval-every 0 --save-every 0 --sample-tokens 0 --no-compressors".split()


def step_seconds(rounds: int) -> dict[str, float]:
    "Seconds of a training step of each form, medians over rounds in which each has its turn."
    torch.set_num_threads(1)
    steps, times = {}, {name: [] for name in FORMS}
    for name, flags in FORMS.items():
        config = parse_arguments([*FIXED, *flags.split()]).train
        model = GPT(config.model)
        opt = make_optimizer(config, model)[0]
        x = torch.randint(config.model.vocab_size, (config.data.batch_size, config.model.block_size))
        steps[name] = (model, opt, x)
    for i in range(rounds + 2):
        for name, (model, opt, x) in steps.items():
            start = time.perf_counter()
            model(x, x)[1].backward()
            clip_gradients(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="of the laptop preset; the other forms get as many as take the same time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=30, help="of timing a step")
    args = parser.parse_args()
    seconds = step_seconds(args.rounds)
    forms = [dict(name=name, flags=flags, step_ms=round(1e3 * seconds[name], 1), steps=round(args.steps * seconds["the laptop preset"] / seconds[name]), runs=[])
             for name, flags in FORMS.items()]  # fmt: skip
    for seed in args.seeds:
        for form in forms:
            with tempfile.TemporaryDirectory() as tmp:
                run = run_command([*FIXED, *form["flags"].split(), "--max-steps", str(form["steps"])], Path(tmp), seed)
                run["bits_per_byte"] = [line for line in read_metrics(Path(tmp) / f"seed{seed}") if "val_bits_per_byte" in line][-1]["val_bits_per_byte"]
            form["runs"].append(run)
            print(f"{form['name']:28s} {form['step_ms']:6.1f} ms, {form['steps']} steps, {run['cpu_s']:.0f} s of CPU, bits per byte", *(f"{r['bits_per_byte']:.4f}" for r in form["runs"]), flush=True)
        save("carry_over", dict(forms=[f | dict(bits_per_byte=spread(r["bits_per_byte"] for r in f["runs"])) for f in forms]))


if __name__ == "__main__":
    main()
