"""Do the rungs of chapter 20 carry over? Another text, other tokens, models 192 wide, at equal time.

    OMP_NUM_THREADS=1 python benchmarks/carry_over.py              # writes results/carry_over.json
    OMP_NUM_THREADS=1 python benchmarks/carry_over.py --form NAME  # one form, into the record that is there
    OMP_NUM_THREADS=1 python benchmarks/carry_over.py --longer     # runs of six minutes, into the same file
    OMP_NUM_THREADS=1 python benchmarks/carry_over.py --rates      # the first form at other rates of AdamW

The text is the State of the Union addresses in tokens of a BPE of 4096; three and a half minutes a form. A
training step of every form is timed first, in turn, on one thread; then each form gets as many steps as fit
in the time of 320 steps of the modern form. The longer runs, of small models, have their lengths written
down. Bits per byte are those of the held-out addresses, all of them.

AdamW's rate of 4e-3 came from the ladder. So the first form runs with other rates too, as many steps as it
had, for the losses alone: results/carry_over_rates.json.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from data_machine import load, save

from tinygpt.accumulate import accumulate_gradients, clip_gradients
from tinygpt.ddp.world import World
from tinygpt.model import GPT
from tinygpt.precision import choose_policy
from tinygpt.run.command import parse_arguments
from tinygpt.run.parallel import Single
from tinygpt.speedrun import run_command

GPT2 = "--position learned --norm layernorm --mlp gelu --init gpt2 --tie-weights --no-qk-norm"
GPT2 += " --logit-softcap 0"
RESULTS = Path(__file__).parent / "results"
FORMS = {  # each is a change to the one that its comment names
    "GPT-2's form, AdamW": f"{GPT2} --optimizer adamw --learning-rate 4e-3",  # the third rung of the ladder
    "Muon": GPT2,  # to the first
    "modern form": "",  # to the second: RoPE, RMSNorm, QK-norm, ReLU², start at zero, own head, soft cap
    "n-gram tables": "--ngram-rows 32768",
    "three layers of six": "--n-layer 3 --ngram-rows 32768",
    "bfloat16": "--n-layer 3 --ngram-rows 32768 --dtype auto",  # where the CPU multiplies it
}
RATES = "2e-3", "1e-3", "4e-3"  # of AdamW, in the first form; the last is its own, as a control
LONGER = {
    "three layers, tables": "--n-layer 3 --ngram-rows 32768 --max-steps 1000",
    "two layers, tables": "--n-layer 2 --ngram-rows 32768 --max-steps 1250",
    "two layers": "--n-layer 2 --max-steps 1400",
    "one layer, tables": "--n-layer 1 --ngram-rows 32768 --max-steps 1700",
}
FIXED = """laptop --n-layer 6 --n-head 6 --n-embd 192 --mlp relu2 --logit-softcap 15 --batch-size 8
           --muon-lr 0.025 --attention fused --threads 1 --compile off --eval-every 0 --save-every 0
           --sample-tokens 0 --no-compressors --dtype float32""".split()


def step_seconds(names: list[str], rounds: int) -> dict[str, float]:
    "Seconds of a training step of each form, medians over rounds in which each has its turn."
    torch.set_num_threads(1)
    steps = {}
    times = {name: [] for name in names}
    for name in names:
        config = parse_arguments([*FIXED, *FORMS[name].split()]).train
        model = GPT(config.model)
        policy = choose_policy("cpu", config.system.dtype)
        way = Single(model, World(), dtype=policy.dtype)
        way.make_optimizer(config)
        opt = way.optimizer
        x = torch.randint(config.model.vocab_size, (config.data.batch_size, config.model.block_size))
        steps[name] = (model, opt, x, policy.autocast)
    for i in range(rounds + 2):
        for name, (model, opt, x, autocast) in steps.items():
            start = time.perf_counter()
            accumulate_gradients(model, x, x, autocast=autocast)
            clip_gradients(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            if i >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = "of the modern form; the other forms get as many as take the same time"
    parser.add_argument("--steps", type=int, default=320, help=steps)
    parser.add_argument("--form", choices=FORMS)
    parser.add_argument("--longer", action="store_true")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--rounds", type=int, default=30, help="of timing a step")
    args = parser.parse_args()
    known = load("carry_over")
    if args.longer:
        known["longer"] = []
        for name, flags in LONGER.items():
            known["longer"].append(dict(name=name, flags=flags, run=trained(flags.split())))
        return save("carry_over", known)
    forms = {form["name"]: form for form in known["forms"]}
    if args.rates:
        return other_rates(forms["GPT-2's form, AdamW"])
    wanted = [args.form] if args.form else list(FORMS)
    seconds = step_seconds(list(dict.fromkeys(["modern form", *wanted])), args.rounds)
    for name in wanted:
        steps = round(args.steps * seconds["modern form"] / seconds[name])
        run = trained(FORMS[name].split() + ["--max-steps", str(steps)])
        step_ms = round(1e3 * seconds[name], 1)
        forms[name] = dict(name=name, flags=FORMS[name], step_ms=step_ms, steps=steps, run=run)
        print(forms[name], flush=True)
        save("carry_over", known | dict(forms=[forms[n] for n in FORMS if n in forms]))


def other_rates(form: dict):
    "The first form as long as it ran, with other rates of AdamW. Goes on where the record ends."
    name = "carry_over_rates"
    runs = load(name)["runs"] if (RESULTS / f"{name}.json").exists() else []
    for rate in RATES:
        if rate in [run["learning_rate"] for run in runs]:
            continue
        length = ["--max-steps", str(form["steps"])]
        run = trained([*form["flags"].split(), "--learning-rate", rate, *length])
        del run["wall_s"], run["cpu_s"]  # the steps are given, so other programs may run beside it
        runs.append(dict(learning_rate=rate, **run))
        print(runs[-1], flush=True)
        save(name, dict(command="OMP_NUM_THREADS=1 python benchmarks/carry_over.py --rates", runs=runs))


def trained(flags: list[str]) -> dict:
    "What `run_command` says of a run."
    with tempfile.TemporaryDirectory() as tmp:
        return run_command([*FIXED, *flags], Path(tmp), seed=1)


if __name__ == "__main__":
    main()
