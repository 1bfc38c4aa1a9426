"""What a run looks like in which nothing goes wrong: the default preset, once, for chapter 19.

    python benchmarks/healthy_run.py   # three to five minutes on two quiet cores; goes on after a break

The run is `python -m tinygpt.train laptop` with the preset's own seed. Only what is looked at on the way
differs, which changes no number of the training: validations every 50 steps, checkpoints every 100. Each
sample is drawn with the same seed, prompt and temperature, at the start and from three checkpoints. At the
end the model is also scored on as much of the training text as there is validation text.
"""

import argparse
from contextlib import closing
from dataclasses import replace

from data_machine import save

from tinygpt.checkpoint import load_model
from tinygpt.generate.text import stream_text
from tinygpt.run.presets import preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import compare_with_compressors, judge_of, open_run
from tinygpt.train import train

PROMPT, TOKENS, SEED = "My fellow Americans,", 60, 1
SAMPLES = (100, 300, 1000)  # the steps, after the start


def written(model, tokenizer) -> str:
    "A sample."
    pieces = stream_text(model, tokenizer, PROMPT, TOKENS, temperature=0.5, seed=SEED)
    return PROMPT + "".join(pieces)


def the_run() -> dict:
    "The preset, trained; what was measured on the way and at the end."
    config = preset("laptop")
    config.run.name = "healthy"
    config.eval = replace(config.eval, eval_every=50, save_every=100, keep=100)

    start = preset("laptop")
    start.run.name = "healthy-start"
    with closing(open_run(start, overwrite=True)) as run:  # the same seed: the model that the run begins with
        first = judge_of(run)(run.model, run.data.val, max_tokens=config.eval.eval_tokens).loss
        samples = {0: written(run.model.eval(), run.data.tokenizer)}

    result = train(config, resume="auto", progress="lines")
    lines = read_metrics(result.run)
    steps = [line for line in lines if "loss" in line]
    vals = [line for line in lines if "val_loss" in line]
    for step in SAMPLES:
        model, tokenizer, _ = load_model(result.run / f"checkpoints/step_{step:06d}")
        samples[step] = written(model, tokenizer)
    with closing(open_run(config, resume=True)) as run:
        read = judge_of(run)(run.model, run.data.train, max_tokens=result.val.tokens)
    return dict(
        parameters=result.model.num_params(),
        tokens_per_step=config.data.batch_size * config.model.block_size,
        training_tokens=len(result.data.train),
        loss=[round(line["loss"], 4) for line in steps],
        grad_norm=[round(line["grad_norm"], 4) for line in steps],
        rate=[round(line["muon_lr"] / config.optim.muon_lr, 4) for line in steps],
        eval_tokens=config.eval.eval_tokens,
        val=[[0, round(first, 4)]] + [[line["step"], round(line["val_loss"], 4)] for line in vals[:-1]],
        end=dict(
            val_loss=round(result.val.loss, 4),
            bits_per_byte=round(result.val.bits_per_byte, 4),
            val_tokens=result.val.tokens,
            training_text_loss=round(read.loss, 4),
            training_text_bits_per_byte=round(read.bits_per_byte, 4),
        ),
        compressors=compare_with_compressors(result.data),
        prompt=PROMPT,
        samples=samples,
    )


def main():
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    save("healthy_run", the_run())


if __name__ == "__main__":
    main()
