"""Can the loaders feed the GPU? Tokens a second of each, and a compiled step of GPT-2 fed by each of them.

A fed step against the same step on a batch that lies ready: what it loses is waiting.
"""

from functools import partial

import data_speed

from gpu_pieces.alone import alone
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.training import Step, rows_that_fit, small_text, text_problem
from tinygpt.data.open import make_loader, open_data

KINDS = {"random": "concat", "shard": "concat", "stream": "concat", "stream bos": "bos"}


def loaders_alone(setup) -> list[dict]:
    "A row for each loader by itself, on the CPU."
    sizes = setup.pick((32, 1024, 20), (2, 32, 2))
    small = setup.pick({}, dict(size=100_000, tokenized=200, rounds=1))
    with alone():
        found = data_speed.loaders(*sizes, **small)
    return [dict(what="alone", loader=name, tokens_per_second=round(rate)) for name, rate in found.items()]


def open_loader(setup, kind: str, rows: int):
    "A loader of the text at hand, by the tokenizer of GPT-2."
    how = kind.split()[0]
    source, spec = setup.pick(("sotu", "gpt2"), (None, "byte"))
    data = open_data(source or small_text(setup), spec, loader=how)
    T = setup.pick(1024, 32)
    return make_loader(how, data, rows, T, packing=KINDS[kind], device=setup.device)


def fed(setup) -> list[dict]:
    "A row for each way to feed the step; they take turns."
    rows = rows_that_fit(setup)
    step = Step(setup, rows, compile=setup.pick("on", "off"))
    ready = step.x, step.y
    loaders = {kind: open_loader(setup, kind, rows) for kind in KINDS}

    def on_ready():
        step.x, step.y = ready
        step()

    def on_next(loader):
        step.x, step.y = next(loader)
        step()

    variants = {"a batch that lies ready": on_ready}
    variants |= {kind: partial(on_next, loader) for kind, loader in loaders.items()}
    # many steps in a turn: a loader that reads ahead must not live on what it has in store
    how = setup.pick(dict(turns=5, at_least=1.0), dict(turns=2, warmup=1, at_least=0))
    timings, errors = take_turns(variants, setup.device, **how)
    for loader in loaders.values():
        loader.close()
    if "a batch that lies ready" in errors:
        raise RuntimeError(errors["a batch that lies ready"])
    tokens = rows * step.config.block_size
    base = timings["a batch that lies ready"].median
    out = []
    for name in variants:
        row = dict(what="step fed by", loader=name, rows=rows)
        if name in errors:
            out.append(row | dict(error=errors[name]))
            continue
        seconds = timings[name].median
        waiting = round(max(0.0, 1 - base / seconds), 4)
        out.append(row | ms(timings[name]) | dict(tokens_per_second=round(tokens / seconds), waiting=waiting))
    return out


def cases(setup) -> list:
    "The loaders alone, and behind them the step."
    if not setup.reduced and (problem := text_problem()):
        return [("the text", lambda: dict(error=problem))]
    return [("loaders alone", partial(loaders_alone, setup)), ("step fed by a loader", partial(fed, setup))]
