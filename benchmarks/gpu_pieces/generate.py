"""How fast does GPT-2 write? Steps with the cache, for 1 row and for 64, against reading the weights.

Random weights: the speed does not depend on them. The bound is the time in which the memory gives the bytes
of the weights and of the cache once. The last rows are whole texts with sampling, ours and transformers'.
"""

import copy
from dataclasses import replace
from functools import partial

import torch
from decoding import BEHIND, Decoding, size_of, with_int8

from gpu_pieces.clock import ms, take_turns
from gpu_pieces.training import clocked, gpt2_config
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


class TransformersDecoding:
    "Its model behind a filled cache: `advance` as in `Decoding`."

    def __init__(self, model, rows: int, room: int):
        self.model, self.rows, self.room = model, rows, room
        self.device = next(model.parameters()).device
        self.begin()

    def ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros(self.rows, tokens, dtype=torch.int64, device=self.device)

    def begin(self):
        self.cache = self.model(self.ids(BEHIND), use_cache=True).past_key_values

    def advance(self):
        if self.cache.get_seq_length() + 1 > self.room:
            self.begin()
        self.model(self.ids(1), past_key_values=self.cache, use_cache=True)


def ways(setup, rows: int) -> dict:
    "name -> (bytes that a step reads, what makes one)."
    config = replace(gpt2_config(setup), block_size=setup.pick(1024, BEHIND + 8))
    torch.manual_seed(0)
    model = GPT(config).to(setup.device).eval()
    half = copy.deepcopy(model).bfloat16()
    int8 = with_int8(half)
    kernel = with_int8(half, kernel=True)

    def compiled(which):
        torch._dynamo.reset()
        return torch.compile(which, backend=setup.backend)

    def peer():
        theirs = transformers_model(config).to(setup.device)
        return TransformersDecoding(theirs, rows, config.block_size)

    return {
        "float32": (size_of(model), lambda: Decoding(model, rows=rows)),
        "bfloat16": (size_of(half), lambda: Decoding(half, rows=rows)),
        "bfloat16, compiled": (size_of(half), lambda: Decoding(half, compiled(half), rows)),
        "int8": (size_of(int8), lambda: Decoding(int8, rows=rows)),
        "int8, torch's kernel": (size_of(kernel), lambda: Decoding(kernel, rows=rows)),
        "int8, compiled": (size_of(int8), lambda: Decoding(int8, compiled(int8), rows)),
        "transformers, bfloat16": (size_of(half), peer),
    }


@torch.no_grad()
def decode_steps(setup, rows: int) -> list[dict]:
    "A row for each way to make a step; they take turns."
    bandwidth = measure_bandwidth(setup.device, setup.pick(1024, 16))
    found = ways(setup, rows)
    made, errors = {}, {}
    for name, (_, make) in found.items():
        try:
            made[name] = make().advance
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    how = setup.pick(dict(warmup=5, turns=15), dict(warmup=1, turns=2, at_least=0))
    timings, failed = take_turns(made, setup.device, **how)
    config = gpt2_config(setup)
    out = []
    for name, (size, _) in found.items():
        number = 4 if name == "float32" else 2
        # keys and values of all that stands before: half of a full context, on average
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
    new = setup.pick(200, 4)
    prompt = list(range(1, 1 + setup.pick(64, 4)))
    ours = GPT(config).to(setup.device).eval().bfloat16()

    def by_us():
        generate_batch(ours, [prompt] * rows, new, top_k=50, seed=0)

    def by_them():
        theirs.generate(ids, attention_mask=torch.ones_like(ids), **how)

    how = dict(max_new_tokens=new, do_sample=True, top_k=50, pad_token_id=0)
    out = []
    for name in ("ours", "transformers"):
        row = dict(what="whole texts", way=name, rows=rows, new_tokens=new)
        try:
            if name == "transformers":
                theirs = transformers_model(config).to(setup.device)
                ids = torch.tensor([prompt] * rows, device=setup.device)
            work = by_us if name == "ours" else by_them
            work()
            seconds = sorted(clocked(work) for _ in range(setup.pick(3, 1)))
            rate = rows * new / seconds[len(seconds) // 2]
            out.append(row | dict(tokens_per_second=round(rate, 1)))
        except Exception as error:
            out.append(row | dict(error=f"{type(error).__name__}: {error}"[:200]))
    return out


def cases(setup) -> list:
    "One row and many."
    found = []
    for rows in setup.pick((1, 64), (1, 2)):
        found.append((f"steps, {rows} rows", partial(decode_steps, setup, rows)))
        found.append((f"texts, {rows} rows", partial(whole_texts, setup, rows)))
    return found
