"""What is each part of a Llama worth? One exchanged at a time, in a model that has learned to read.

    python benchmarks/exchange.py           # prints; about two hours of one core
    python benchmarks/exchange.py --save    # and adds its runs to benchmarks/results/exchange.json
    python benchmarks/exchange.py --show    # the table of what the record holds

`ablation.py` exchanges parts of GPT-2 for 600 steps. Those models end near 2.4 nats per byte, where the table
of pairs is (2.381): they say how fast a part helps such a model start. Here the reference has Llama's parts
(RoPE, RMSNorm, SwiGLU, no biases, a head of its own; GPT-2's start), and 2,400 steps bring it to about 1.63.
Data, batches, optimizer and schedule are those of `ablation.py`.

Each row has its own rate: 0.00125, 0.0025 and 0.005, and on by factors of two until the best has a worse one
on either side. Three seeds choose it, as `ablation.py --sure` does: fewest stuck runs first (0.2 above the
row's best tuning run), then the lowest mean. Ten other seeds compare, paired by seed. Intervals are 95 %, by
Student's t.

Written before the first run. Known: what `ablation.py` found, among it that after 2,400 steps, with GPT-2's
parts, RoPE gains 0.23, SwiGLU 0.01 to 0.03 where it is not stuck, and a start at zero costs 0.21.

1. Learned positions cost 0.1 or more.
2. No positions cost more than learned ones.
3. Of the exchanges that leave the positions alone and do not start at zero, none costs 0.05 or more.
4. SwiGLU is worth something: GELU, with equal parameters, ends higher.
5. LayerNorm for RMSNorm makes no difference of 0.02.
6. Biases make no difference of 0.02.
7. QK-norm gains something.
8. A start at zero costs 0.1 or more.
9. Half the heads of keys and values (GQA) cost less than 0.02.
10. Positions are more than half of the way from GPT-2's parts to Llama's: learned positions alone cost more
    than half of what all of GPT-2's parts cost together.

Confirmed if the whole interval is on the claim's side of its bound, refuted if it is on the other, else
undecided. (Claim 3: refuted if one row's interval lies above 0.05, confirmed if all lie below. 5 and 6:
confirmed inside -0.02 to 0.02, refuted outside.)

The ten seeds left claims 3, 5, 6, 7 and 9 undecided: +0.050 ± 0.032 for GELU, +0.009 ± 0.022 for LayerNorm,
+0.001 ± 0.026 for biases, +0.004 ± 0.014 for QK-norm, -0.005 ± 0.026 for GQA. So they are asked again on
thirty fresh seeds, which alone decide, by the same rules; no more are added, whatever they show:

    python benchmarks/exchange.py --save --rows llama gelu layernorm bias qknorm gqa --seeds 40

And claim 8 was refuted, though with GPT-2's parts (and a head of its own, which a start at zero needs)
`ablation.py` found a cost of 0.21. Which part makes the difference? Written before the first run of these
rows; they are tuned and compared as the first ones were, each with its counterpart that starts as GPT-2 does:

11. With all of GPT-2's parts but the shared embedding, a start at zero costs 0.1 or more here, too.
12. So it does with learned positions among Llama's other parts.
13. With LayerNorm, GELU and biases, but RoPE, it costs less than 0.05.

13 was refuted: +0.13. Written before the first run of three more rows, one for each of these parts:

14. With GELU alone, a start at zero costs 0.05 or more.
15. With LayerNorm alone, it costs less than 0.05.
16. With biases alone, it costs less than 0.05.

With GELU it costs 0.16 (ten seeds). Is that GELU, or any MLP without a gate? Written before the first run:

17. With ReLU² in place of SwiGLU, a start at zero costs 0.05 or more.

Why GELU? A look at two tuning seeds, at one rate: with GELU the activations of the MLP, and more so after a
start at zero, spread over few directions. The suspect: all first weights have GPT-2's deviation of 0.02,
whatever the width. At 64 inputs the inputs of GELU then have a deviation of 0.16, where it is nearly linear,
and AdamW's first steps, which all point the same few ways, soon outweigh such small random weights. With
`c_fc` drawn by its fan-in instead (1/√64 = 0.125), these two seeds ended 0.12 lower with GELU. So parts may
have been compared at first weights that suit one and not the other. Written before any other run of these
rows, which are tuned and compared as the first ones, with thirty seeds (10 to 39):

    python benchmarks/exchange.py --save --rows gelu_fan llama_fan gelu_fan_zero --seeds 30

18. With `c_fc` by its fan-in, GELU ends 0.05 or more lower than with it at 0.02.
19. SwiGLU, with `c_fc` and `c_gate` by their fan-in, gains less than 0.05.
20. With both by their fan-in, SwiGLU is less than 0.02 ahead of GELU.
21. With `c_fc` by its fan-in, a start at zero costs less than half of what it costs GELU at 0.02: 0.079.
"""

import statistics
from pathlib import Path

import torch
from ablation import LLAMA, SHAPE, Sure, as_bytes, parser_of, run

from tinygpt.data.tokens import load_corpus
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import interval

RECORD = Path(__file__).parent / "results" / "exchange.json"
STEPS = 2400
FIRST, FRESH = 10, 20  # of the compared seeds; from FRESH on they alone decide what was asked again
GPT2 = dict(position="learned", norm="layernorm", mlp="gelu", mlp_hidden=256, bias=True, tie_weights=True)
REST = dict(norm="layernorm", mlp="gelu", mlp_hidden=256, bias=True)
UNTIED = GPT2 | dict(tie_weights=False)

# name: (what differs from Llama's parts, what the picture calls it); _fan: see `by_fan_in`
ROWS = {
    "llama": ({}, "Llama's parts"),
    "again": ({}, "nothing: other first weights"),
    "learned": (dict(position="learned"), "learned positions for RoPE"),
    "none": (dict(position="learned"), "no positions at all"),
    "layernorm": (dict(norm="layernorm"), "LayerNorm for RMSNorm"),
    # 2 x 64 x 256 = 32,768 weights, for SwiGLU's 3 x 64 x 171 = 32,832
    "gelu": (dict(mlp="gelu", mlp_hidden=256), "GELU for SwiGLU, equal parameters"),
    "relu2": (dict(mlp="relu2", mlp_hidden=256), "ReLU² for SwiGLU, equal parameters"),
    "bias": (dict(bias=True), "biases"),
    "tied": (dict(tie_weights=True), "the embedding as the head"),
    "qknorm": (dict(qk_norm=True), "QK-norm"),
    "gqa": (dict(n_kv_head=2), "two heads of keys and values for four"),
    "zero": (dict(init="zero"), "a start at zero"),
    "gpt2": (GPT2, "all of GPT-2's parts"),
    "learned_zero": (dict(position="learned", init="zero"), "learned positions, a start at zero"),
    "gelu_zero": (dict(mlp="gelu", mlp_hidden=256, init="zero"), "GELU, a start at zero"),
    "relu2_zero": (dict(mlp="relu2", mlp_hidden=256, init="zero"), "ReLU², a start at zero"),
    "layernorm_zero": (dict(norm="layernorm", init="zero"), "LayerNorm, a start at zero"),
    "bias_zero": (dict(bias=True, init="zero"), "biases, a start at zero"),
    "rest": (REST, "LayerNorm, GELU and biases"),
    "rest_zero": (REST | dict(init="zero"), "LayerNorm, GELU and biases, a start at zero"),
    "untied": (UNTIED, "GPT-2's parts with a head of its own"),
    "untied_zero": (UNTIED | dict(init="zero"), "GPT-2's parts with a head of its own, a start at zero"),
    "llama_fan": ({}, "c_fc and c_gate by fan-in"),
    "gelu_fan": (dict(mlp="gelu", mlp_hidden=256), "GELU, c_fc by fan-in"),
    "gelu_fan_zero": (dict(mlp="gelu", mlp_hidden=256, init="zero"), "GELU, c_fc by fan-in, a start at zero"),
}
# what a row is compared with, where that is not Llama's parts
AGAINST = {row: row.rpartition("_")[0] for row in ROWS if row.endswith(("_zero", "_fan"))}
RATES = (0.00125, 0.0025, 0.005)


def make(row: str, seed: int) -> GPT:
    "The row's model, with the first weights that belong to the seed."
    torch.manual_seed(seed + 1000 if row == "again" else seed)
    model = GPT(GPTConfig.gpt2(**SHAPE | LLAMA | ROWS[row][0]))
    if "_fan" in row:
        by_fan_in(model)
    if row == "none":
        model.wpe.weight.requires_grad_(False).zero_()
    return model


@torch.no_grad()
def by_fan_in(model: GPT):
    "Let what enters each MLP's nonlinearity begin with the deviation of its inputs, not with 0.02 √C of it."
    for name, weight in model.named_parameters():
        if name.endswith(("mlp.c_fc.weight", "mlp.c_gate.weight")):
            weight *= weight.shape[1] ** -0.5 / 0.02


class Exchange(Sure):
    seeds = (100, 101, 102)


def show(record: Exchange):
    found = {row: record.compared(row, STEPS) for row in ROWS}
    for row, losses in found.items():
        if not losses:
            continue
        mean, rate = statistics.mean(losses.values()), record.tuned(row, STEPS)
        print(f"{row:10} rate {rate:<8g} {mean:.4f}, highest {max(losses.values()):.3f}", end="")
        against = AGAINST.get(row, "llama")
        apart = {seed: losses[seed] - found[against][seed] for seed in losses if seed in found[against]}
        fresh = [apart[seed] for seed in apart if seed >= FRESH]
        for name, some in (f"against {against}", list(apart.values())), ("fresh", fresh):
            if row != "llama" and len(some) > 1:
                print(f"  {name}: {{:+.4f}} ± {{:.4f}}".format(*interval(some)), len(some), "seeds", end="")
        print()
    reference, learned, none, gpt2 = (found[row] for row in ("llama", "learned", "none", "gpt2"))
    if len(gpt2) > 1:
        half = [learned[s] - (gpt2[s] + reference[s]) / 2 for s in gpt2]
        print("2. none minus learned: {:+.4f} ± {:.4f}".format(*interval(none[s] - learned[s] for s in none)))
        print("10. learned minus half of the way to GPT-2: {:+.4f} ± {:.4f}".format(*interval(half)))
    gelu, swiglu = found["gelu_fan"], found["llama_fan"]
    if len(both := gelu.keys() & swiglu.keys()) > 1:
        ahead = interval(gelu[seed] - swiglu[seed] for seed in both)
        print("20. GELU minus SwiGLU, both by fan-in: {:+.4f} ± {:.4f}".format(*ahead))
        before = {seed: found["gelu"][seed] - reference[seed] for seed in both}
        lost = interval(before[seed] - (gelu[seed] - swiglu[seed]) for seed in both)
        print("    on these seeds it was {:+.4f} ± {:.4f}".format(*interval(before.values())), end="")
        print(", and falls by {:.4f} ± {:.4f}".format(*lost))


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=10, help="that compare")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = {}
    if not args.show:
        corpus = load_corpus("sotu")
        text = dict(train=as_bytes(corpus.train), val=as_bytes(corpus.val))

    def one(row: str, rate: float, seed: int, steps: int) -> dict:
        return run(make, row, rate, seed, steps, text)

    same = {"again": "llama"}
    record = Exchange(RECORD, one, args.save, same=same, rates=RATES, shape=SHAPE, rows=ROWS)
    if not args.show:
        for row in args.rows:
            rate = record.tune(row, STEPS)
            record.ensure(row, rate, range(FIRST, FIRST + args.seeds), STEPS)
    show(record)


if __name__ == "__main__":
    main()
