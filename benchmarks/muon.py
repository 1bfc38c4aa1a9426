"""Muon against AdamW on a preset's model: tokens and seconds to the same validation loss.

Both are tuned on one seed, then compared on others.

    python benchmarks/muon.py            # prints; about an hour on two cores
    python benchmarks/muon.py --save     # and writes benchmarks/results/muon.json, which chapter 14 draws

    # where the best rate of AdamW was the largest that was tried
    python benchmarks/muon.py --save --wider 0.012 0.02
    # a trial of the script itself: one setting each
    python benchmarks/muon.py --tokens 20000 --seeds 1 --quick

The loss to reach is the mean of AdamW's final losses. Muon's curve is read before the end of its own
cooldown, which is to its disadvantage.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch

from tinygpt.accumulate import accumulate_gradients, clip_gradients
from tinygpt.adamw import adamw_groups
from tinygpt.data.tokens import prepare
from tinygpt.data.windows import RandomLoader
from tinygpt.evaluate.score import evaluate
from tinygpt.model import GPT
from tinygpt.muon import make_optimizer, muon_groups
from tinygpt.precision import choose_policy
from tinygpt.run.command import parse_arguments
from tinygpt.run.report import cpu_name
from tinygpt.schedule import make_schedule

TUNING_SEED = 0  # the compared seeds are others
ADAMW_RATES = [dict(lr=lr) for lr in (2e-3, 5e-3, 8e-3, 0.012, 0.02)]
MUON_RATES = [dict(lr=lr, adamw_lr=adamw_lr) for lr in (0.01, 0.02, 0.04) for adamw_lr in (5e-3, 1e-2)]


def make(optimizer: str, rates: dict, model: GPT, o) -> torch.optim.Optimizer:
    if optimizer == "Muon":
        groups = muon_groups(model, adamw_groups(model, rates["adamw_lr"]), rates["lr"])
    else:
        groups = adamw_groups(model, rates["lr"], o.betas, o.eps, o.weight_decay)
    return make_optimizer(groups)[0]


def run(
    config,
    policy,
    data,
    optimizer: str,
    rates: dict,
    tokens: int,
    seed: int,
    final_eval: int = 64_000,
    evals: int = 25,
) -> dict:
    "One training run: its validation curve as (tokens, loss), wall-clock and CPU seconds of training."
    torch.manual_seed(seed)
    model, o, d = GPT(config.model).to(policy.device), config.optim, config.data
    opt = make(optimizer, rates, model, o)
    tops = [group["lr"] for group in opt.param_groups]
    per_step = d.batch_size * config.model.block_size
    steps = tokens // per_step
    schedule = make_schedule("trapezoid", steps, warmup_steps=max(1, steps // 20), final=0.02, cooldown=0.6)
    loader = RandomLoader(data.train, d.batch_size, config.model.block_size, seed, device=policy.device)
    token_bytes = data.tokenizer.token_bytes()
    curve = []
    wall = cpu = 0.0
    for step in range(steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        for group, top in zip(opt.param_groups, tops):
            group["lr"] = top * schedule(step)
        x, y = next(loader)
        opt.zero_grad(set_to_none=True)
        accumulate_gradients(model, x, y, autocast=policy.autocast)
        clip_gradients(model.parameters(), o.clip)
        opt.step()
        wall += time.perf_counter() - start
        cpu += time.process_time() - start_cpu
        last = step + 1 == steps
        if last or (step + 1) % max(1, steps // evals) == 0:
            count = final_eval if last else final_eval // 4
            score = evaluate(model, data.val, token_bytes, max_tokens=count, autocast=policy.autocast)
            curve.append((per_step * (step + 1), score.loss))
    trained, loss = curve[-1]
    print(f"{optimizer} {rates} seed {seed}:", end=" ")
    print(f"loss {loss:.4f} after {trained:,} tokens, {cpu:.0f} s of CPU time", flush=True)
    return dict(rates=rates, seed=seed, curve=curve, loss=loss, wall_s=round(wall, 1), cpu_s=round(cpu, 1))


def tokens_to(curve: list, loss: float) -> float | None:
    "Where the curve first falls to `loss`, between two readings by a straight line; None if it never does."
    for (t0, l0), (t1, l1) in zip(curve, curve[1:]):
        if l1 <= loss:
            return t0 + (t1 - t0) * min(1.0, (l0 - loss) / (l0 - l1))
    return None


def machine() -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cpu = f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{gpu}"
    return f"{cpu}, Python {platform.python_version()}, torch {torch.__version__}"


def compare(config, policy, data, grids: dict, args, saved: dict | None) -> dict:
    "What the record holds: the best rates of each optimizer, and what they come to on other seeds."
    tuning, best, curves, seconds = {}, {}, {}, {}
    for name, grid in grids.items():
        tuning[name] = saved["tuning"][name] if saved else []
        if len(grid) > 1 or saved:
            tried = [run(config, policy, data, name, rates, args.tokens, TUNING_SEED) for rates in grid]
            tuning[name] = tuning[name] + [(r["rates"], r["loss"]) for r in tried]
        best[name] = min(tuning[name], key=lambda t: t[1])[0] if tuning[name] else grid[0]
        if saved and best[name] == saved["best"][name]:
            curves[name] = saved["curves"][name]
            seconds[name] = saved["cpu_seconds_per_million_tokens"][name]
            continue
        final_eval = 4000 if args.quick else 64_000
        seeds = range(TUNING_SEED + 1, TUNING_SEED + 1 + args.seeds)
        runs = [run(config, policy, data, name, best[name], args.tokens, seed, final_eval) for seed in seeds]
        curves[name] = [r["curve"] for r in runs]
        seconds[name] = round(1e6 * statistics.median(r["cpu_s"] / r["curve"][-1][0] for r in runs))
    target = statistics.mean(c[-1][1] for c in curves["AdamW"])
    return dict(
        best=best,
        final_loss={name: [c[-1][1] for c in cs] for name, cs in curves.items()},
        target=target,
        tokens_to_loss={name: [tokens_to(c, target) for c in cs] for name, cs in curves.items()},
        cpu_seconds_per_million_tokens=seconds,
        tuning=tuning,
        curves=curves,
    )


def parse(argv=None) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--preset",
        default="laptop --n-layer 6 --ngram-rows None",
        help="a preset of tinygpt.train, with flags behind it; six layers are the record's",
    )
    parser.add_argument("--tokens", type=int, default=400_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="no tuning: one setting each")
    parser.add_argument(
        "--wider",
        type=float,
        nargs="+",
        help="more rates for AdamW, beside those of the saved result; the rest of it stays",
    )
    parser.add_argument("--save", action="store_true")
    return parser.parse_args(argv)


def main():
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    config, policy = parse_arguments(args.preset.split()).train, choose_policy("auto", "float32")
    data = prepare(config.data.source, config.data.tokenizer, config.model.vocab_size, progress=False)
    config.model.vocab_size = data.tokenizer.n_vocab
    grids = {"AdamW": ADAMW_RATES, "Muon": MUON_RATES}
    if args.quick:
        grids = {name: grid[2:3] for name, grid in grids.items()}
    path = Path(__file__).parent / "results" / "muon.json"
    saved = None
    if args.wider:
        saved = json.loads(path.read_text())
        args.tokens = saved.get("tokens", args.tokens)
        args.seeds = len(saved["final_loss"]["AdamW"])
        grids = {"AdamW": [dict(lr=lr) for lr in args.wider], "Muon": []}
    command = "python " + " ".join(["benchmarks/muon.py", *sys.argv[1:]])
    result = dict(
        command=f"{saved['command']} && {command}" if saved else command,
        machine=machine(),
        date=date.today().isoformat(),
        preset=args.preset,
        tokens=args.tokens,
        **compare(config, policy, data, grids, args, saved),
    )
    print(json.dumps({k: v for k, v in result.items() if k != "curves"}, indent=2))
    if args.save:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
