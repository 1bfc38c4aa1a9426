"""Loss against minutes: GPT-2 on the text at hand, and Tiny Shakespeare by characters to nanoGPT's 1.4697.

`--data` and `--steps` choose another text and length for GPT-2; the embedded corpus is small, and the model
knows it by heart after a few passes. Tiny Shakespeare comes from the cache (TINYGPT_CACHE), or from its
address; nanoGPT's README gives about three minutes on an A100 for its run. All of it goes on over several
commands.
"""

from functools import partial

from gpu_pieces.training import run_config, train_case
from tinygpt.data.tokens import load_corpus
from tinygpt.measure.speed import flops_per_token
from tinygpt.run.config import config_from_dict
from tinygpt.run.presets import preset

GOAL = 1.4697  # of nanoGPT's config/train_shakespeare_char.py, as its README has it
# what chapter 20's longer race on a CPU ended with: its model and its optimizer, in nanoGPT's sizes
MODERN = dict(
    position="rope",
    norm="rmsnorm",
    qk_norm=True,
    mlp="relu2",
    init="zero",
    tie_weights=False,
    logit_softcap=15.0,
)
MUON = dict(
    optimizer="muon",
    muon_lr=0.02,
    learning_rate=0.006,
    schedule="trapezoid",
    cooldown=0.8,
    final_lr=0.0,
    warmup_steps=10,
    max_steps=1500,
)
VARIANTS = {
    "the preset": {},
    "the preset, compiled": dict(system=dict(compile="on")),
    "modern, Muon, compiled": dict(  # with the rates of the CPU's race: not tuned here
        model=MODERN, optim=MUON, system=dict(compile="on")
    ),
}


def gpt2(setup) -> dict:
    "GPT-2 on the text at hand."
    steps, rows = setup.steps or 250, 64 if setup.data == "sotu" else 512
    name = f"gpt2-{setup.data.replace('/', '-').strip('-.')}-{steps}"
    config = run_config(setup, name, steps, rows, setup.data, learning_rate=6e-4)
    config.system.compile = setup.pick("on", "off")
    speed = dict(
        flops_per_step=flops_per_token(config.model) * config.data.batch_size * config.model.block_size
    )
    return train_case(setup, config, what="gpt2", data=config.data.source, **speed)


def shakespeare(setup, variant: str, seed: int) -> dict:
    "A run of the preset shakespeare-char, changed; the seconds to the goal."
    if not setup.reduced:
        load_corpus("shakespeare")  # UserError that says where to put it
    config = preset("shakespeare-char")
    changes = VARIANTS[variant]
    if setup.reduced:
        config = run_config(setup, f"char-{seed}", 4, 2)
        changes = {}
    config = config_from_dict(changes, config)
    config.run.name, config.run.out = f"char-{list(VARIANTS).index(variant)}-{seed}", str(setup.runs)
    config.run.seed, config.system.device = seed, setup.device
    config.eval.eval_every = max(1, config.optim.max_steps // 40)
    config.eval.sample_tokens, config.eval.save_every, config.eval.compressors = 0, 0, False
    row = train_case(setup, config, what="shakespeare-char", variant=variant, seed=seed, goal=GOAL)
    reached = next((point for point in row.get("curve", []) if point["loss"] <= GOAL), None)
    # seconds of training, the compiler's included; validations and saving are not
    return row | dict(seconds=reached and reached["seconds"], step=reached and reached["step"])


def cases(setup) -> list:
    "GPT-2, then the small runs."
    found = [("GPT-2 on the text at hand", partial(gpt2, setup))]
    for seed in setup.pick((1, 2, 3), (1,)):
        for variant in setup.pick(VARIANTS, list(VARIANTS)[:1]):
            found.append(
                (f"shakespeare-char, {variant}, seed {seed}", partial(shakespeare, setup, variant, seed))
            )
    return found
