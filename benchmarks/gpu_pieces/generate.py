"""How fast does GPT-2 write? Steps with the cache, for 1 row and for 64, against reading the weights.

Random weights: the speed does not depend on them. Steps are made around the middle of the context: the cache
holds half of it. The bound is the time in which the memory gives the bytes of the weights and of that cache
once. The host's time counts where the GPU waits for it: so it does for whoever writes. The last rows are
whole texts with sampling, ours and transformers', after a first one that is not counted.
"""

import copy
from functools import partial

import torch
from decoding import Decoding, size_of, with_int8

from gpu_pieces.alone import alone
from gpu_pieces.clock import ms, take_turns
from gpu_pieces.record import told
from gpu_pieces.training import gpt2_config
from tinygpt.generate.sample import generate_batch
from tinygpt.measure.speed import measure_bandwidth
from tinygpt.model import GPT


def transformers_model(config):
    "GPT-2 of the same size by transformers, in bfloat16."
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    sizes |= dict(vocab_size=config.vocab_size, n_positions=config.block_size)
    ends = dict(bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends)).eval().bfloat16()


def around(middle: int) -> tuple[int, int]:
    "The lengths of the cache between which steps go to and fro."
    return middle - middle // 8, middle + middle // 8


class Around:
    "Steps of a model of ours behind a cache that stays half full."

    def __init__(self, model: GPT, run=None, rows: int = 1):
        self.low, self.high = around(model.config.block_size // 2)
        self.decoding = Decoding(model, run, rows, behind=self.low)

    def __call__(self):
        if self.decoding.cache.length >= self.high:
            self.decoding.cache.length = self.low
        self.decoding.advance()

    def once_around(self):
        "A step at each length: cuDNN and the compiler prepare themselves for one when they see it first."
        for _ in range(self.low, self.high):
            self()


class TheirsAround:
    "The same for transformers' model."

    def __init__(self, model, rows: int):
        self.model, self.rows = model, rows
        self.low, self.high = around(model.config.n_positions // 2)
        self.cache = model(self.ids(self.low), use_cache=True).past_key_values

    def ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros(self.rows, tokens, dtype=torch.int64, device=self.model.device)

    def __call__(self):
        if self.cache.get_seq_length() >= self.high:
            self.cache.crop(self.low - self.high)  # a negative number: so many go
        self.model(self.ids(1), past_key_values=self.cache, use_cache=True)

    once_around = Around.once_around


def ways(setup, rows: int) -> dict:
    "name -> (bytes that a step reads, what makes one)."
    config = gpt2_config(setup)
    torch.manual_seed(0)
    model = GPT(config).to(setup.device).eval()
    half = copy.deepcopy(model).bfloat16()
    int8 = with_int8(half)
    kernel = with_int8(half, kernel=True)

    def compiled(which):
        return torch.compile(which, backend=setup.backend)

    torch._dynamo.reset()
    return {
        "float32": (size_of(model), lambda: Around(model, rows=rows)),
        "bfloat16": (size_of(half), lambda: Around(half, rows=rows)),
        "bfloat16, compiled": (size_of(half), lambda: Around(half, compiled(half), rows)),
        "int8": (size_of(int8), lambda: Around(int8, rows=rows)),
        "int8, torch's kernel": (size_of(kernel), lambda: Around(kernel, rows=rows)),
        "int8, compiled": (size_of(int8), lambda: Around(int8, compiled(int8), rows)),
        "transformers, bfloat16": (
            size_of(half),
            lambda: TheirsAround(transformers_model(config).to(setup.device), rows),
        ),
    }


@torch.no_grad()
def decode_steps(setup, rows: int) -> list[dict]:
    "A row for each way to make a step; they take turns."
    found = ways(setup, rows)
    made, errors = {}, {}
    for name, (_, make) in found.items():
        try:
            way = make()
            way.once_around()
            made[name] = way
        except Exception as error:
            errors[name] = told(error)
    how = setup.pick(dict(warmup=5, turns=15), dict(warmup=1, turns=2, at_least=0))
    timings, failed = take_turns(made, setup.device, **how)
    with alone():
        bandwidth = measure_bandwidth(setup.device, setup.pick(1024, 16))
    config = gpt2_config(setup)
    out = []
    for name, (size, _) in found.items():
        number = 4 if name == "float32" else 2
        # keys and values of all that stands before: half of a full context
        cache = 2 * config.n_layer * rows * config.n_embd * number * config.block_size // 2
        bound = (size + cache) / bandwidth
        row = dict(what="decode step", way=name, rows=rows, bound_ms=round(1e3 * bound, 4))
        if name in timings:
            seconds = timings[name].median
            row |= ms(timings[name]) | dict(tokens_per_second=round(rows / seconds, 1))
            row |= dict(of_bound=round(bound / seconds, 4))
        else:
            row |= dict(error=(errors | failed)[name])
        out.append(row)
    return out


@torch.no_grad()
def whole_texts(setup, rows: int) -> list[dict]:
    "Tokens a second from the prompt to the last token, with sampling: ours and transformers'."
    config = gpt2_config(setup)
    new = setup.pick(200 if rows == 1 else 50, 4)
    prompt = list(range(1, 1 + setup.pick(64, 4)))
    ours = GPT(config).to(setup.device).eval().bfloat16()

    def by_us():
        generate_batch(ours, [prompt] * rows, new, top_k=50, seed=0)

    def by_them():
        theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)

    how = dict(max_new_tokens=new, do_sample=True, top_k=50, pad_token_id=0)
    ids = torch.tensor([prompt] * rows, device=setup.device)
    works, errors = {"ours": by_us}, {}
    try:
        theirs = transformers_model(config).to(setup.device)
        works["transformers"] = by_them
    except Exception as error:
        errors["transformers"] = told(error)
    timings, failed = take_turns(works, setup.device, turns=setup.pick(3, 1), warmup=1, at_least=0)
    out = []
    for name in ("ours", "transformers"):
        row = dict(what="whole texts", way=name, rows=rows, new_tokens=new)
        if name in timings:
            out.append(row | dict(tokens_per_second=round(rows * new / timings[name].median, 1)))
        else:
            out.append(row | dict(error=(errors | failed)[name]))
    return out


def cases(setup) -> list:
    "One row and many; the texts first, as they need no compiler."
    counts = setup.pick((1, 64), (1, 2))
    found = [(f"texts, {rows} rows", partial(whole_texts, setup, rows)) for rows in counts]
    return found + [(f"steps, {rows} rows", partial(decode_steps, setup, rows)) for rows in counts]
