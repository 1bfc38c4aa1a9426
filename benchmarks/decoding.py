"""What makes a decode step faster on this CPU? Fewer bytes, compiled code, several tokens in one pass.

    python benchmarks/decoding.py             # prints; about six minutes on one core
    python benchmarks/decoding.py --save      # and writes results/decoding.json, which chapter 18 shows

A GPT of 6 layers and 768 wide (random weights: speed does not depend on their values), one thread, CPU time.
The ways take turns, and a ratio is the median over the turns of a decode step's time against float32's.

- bfloat16: a copy of the model in bfloat16
- int8: the linear layers of the blocks hold bytes and a scale for each output, made float32 in each call
- int8, torch's kernel: the same bytes through torch._weight_int8pack_mm, in bfloat16
- compiled: torch.compile of the model, with the cache, in float32 and with the int8 layers
- compiled, one tensor: the same with a cache that holds all blocks' keys in one tensor, and all values in one

Then the cost of one pass over 1 to 9 tokens: what speculative decoding pays for checking proposals. And the
cost of a step of smaller models, as drafts. And what a compiled step costs as the room in the cache grows,
for both forms of the cache.
"""

import argparse
import copy
import os
import statistics
import time

import torch
import torch.nn.functional as F
from data_machine import save, spread

from tinygpt.compile import watch_compiles
from tinygpt.model import GPT, GPTConfig, KVCache

SHAPE = dict(vocab_size=4096, block_size=256, n_layer=6, n_head=12, n_embd=768)
BEHIND = 64  # tokens in the cache when a step is timed


class Int8Linear(torch.nn.Module):
    "A linear layer whose weight is int8, with a scale for each output channel."

    def __init__(self, linear: torch.nn.Linear, kernel: bool):
        super().__init__()
        w = linear.weight.detach()
        scale = w.abs().amax(dim=1) / 127
        self.register_buffer("q", (w / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.bfloat16() if kernel else scale)
        self.bias = linear.bias
        self.kernel = kernel

    def forward(self, x):
        if self.kernel:
            flat = x.reshape(-1, x.shape[-1])
            y = torch.ops.aten._weight_int8pack_mm(flat, self.q, self.scale).view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.q.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def with_int8(model: GPT, kernel: bool = False) -> GPT:
    "A copy whose blocks have int8 weights."
    model = copy.deepcopy(model)
    for block in model.h:
        for part, names in ((block.attn, ("c_attn", "c_proj")), (block.mlp, ("c_fc", "c_proj"))):
            for name in names:
                setattr(part, name, Int8Linear(getattr(part, name), kernel))
    return model


def size_of(model: GPT) -> int:
    "Bytes of parameters and buffers."
    return sum(t.nbytes for t in model.state_dict().values())


class OneTensor(KVCache):
    "A cache as it is often written: the keys of all blocks are one tensor, and the values another one."

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v = torch.stack(self.k), torch.stack(self.v)


class Decoding:
    "A model behind a filled cache, of which single passes can be timed."

    def __init__(self, model: GPT, run=None, rows: int = 1, behind: int = BEHIND, Cache=KVCache):
        self.run = model if run is None else run
        weight = model.wte.weight
        self.cache = Cache(model.config, rows, weight.device, weight.dtype)
        self.rows = rows
        self.behind = behind
        self.seconds = []
        model(self.ids(behind), cache=self.cache)

    def ids(self, tokens: int) -> torch.Tensor:
        "So many tokens for each row."
        return torch.zeros(self.rows, tokens, dtype=torch.int64, device=self.cache.last.device)

    def advance(self, tokens: int = 1):
        "One pass; the cache goes on, and begins again at its end."
        if self.cache.length + tokens > self.cache.k[0].shape[2]:
            self.cache.length = self.behind
        self.run(self.ids(tokens), cache=self.cache)

    def step(self, tokens: int = 1) -> float:
        "CPU seconds of one pass."
        begin = time.process_time()
        self.advance(tokens)
        return time.process_time() - begin


def against_float32(model: GPT, rows: int, turns: int) -> dict:
    "Each way's step: milliseconds, and its time against float32's in the same turn."
    int8 = with_int8(model)
    ways = {
        "float32": Decoding(model, rows=rows),
        "bfloat16": Decoding(copy.deepcopy(model).bfloat16(), rows=rows),
        "int8": Decoding(int8, rows=rows),
        "int8, torch's kernel": Decoding(with_int8(copy.deepcopy(model).bfloat16(), kernel=True), rows=rows),
        "compiled": Decoding(model, torch.compile(model), rows),
        "compiled, one tensor": Decoding(model, torch.compile(model), rows, Cache=OneTensor),
        "int8, compiled": Decoding(int8, torch.compile(int8), rows),
    }
    compiling = {}
    for name, way in ways.items():
        begin = sum(os.times()[:4])  # with the compiler's processes
        with watch_compiles() as seen:
            for _ in range(4):
                way.step()
        compiling[name] = dict(graphs=len(seen), cpu_s=round(sum(os.times()[:4]) - begin, 1))
    seconds = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            seconds[name].append(statistics.median(way.step() for _ in range(3)))
    out = {}
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["float32"])]
        out[name] = dict(ms=spread(1e3 * v for v in values), time_against_float32=spread(ratios))
        if "compiled" in name:
            out[name]["compiling"] = compiling[name]
        print(rows, name, out[name], flush=True)
    return out


def pass_cost(model: GPT, turns: int) -> dict:
    "Time of a pass over so many tokens, against one over a single token."
    way, counts = Decoding(model), (1, 2, 3, 5, 9)
    seconds = {n: [] for n in counts}
    for _ in range(turns):
        for n in counts:
            seconds[n].append(statistics.median(way.step(n) for _ in range(3)))
    return {str(n): spread(a / b for a, b in zip(v, seconds[1])) for n, v in seconds.items()}


def draft_cost(model: GPT, turns: int) -> dict:
    "Time of a step of smaller models, against the model's."
    shapes = {"2 layers, 256 wide": (2, 4, 256), "1 layer, 128 wide": (1, 2, 128)}
    ways = {"model": Decoding(model)}
    for name, (n_layer, n_head, n_embd) in shapes.items():
        small = GPTConfig.gpt2(**SHAPE | dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd))
        ways[name] = Decoding(GPT(small).eval())
    seconds = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            seconds[name].append(statistics.median(way.step() for _ in range(3)))
    return {name: spread(a / b for a, b in zip(v, seconds["model"])) for name, v in seconds.items()}


def room_cost(turns: int) -> dict:
    "Steps by the room in the cache, eager and compiled: which cache is copied?"
    out = {}
    for room in (128, 512, 2048):
        torch._dynamo.reset()
        shape = SHAPE | dict(n_layer=2, n_head=4, n_embd=256, block_size=room)
        model = GPT(GPTConfig.gpt2(**shape)).eval()
        eager, compiled = Decoding(model, rows=4), Decoding(model, torch.compile(model), rows=4)
        one = Decoding(model, torch.compile(model), rows=4, Cache=OneTensor)
        ways = {"eager": eager, "compiled": compiled, "compiled, one tensor": one}
        for way in 4 * [compiled, one]:
            way.step()
        found = [[way.step() for way in ways.values()] for _ in range(3 * turns)]
        ms = {name: spread(1e3 * v for v in column) for name, column in zip(ways, zip(*found))}
        out[str(room)] = dict(cache_bytes=sum(t.nbytes for t in (*eager.cache.k, *eager.cache.v)), ms=ms)
        print("room", room, out[str(room)], flush=True)
    return out


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2(**SHAPE)).eval()
    sizes = {
        "float32": size_of(model),
        "bfloat16": size_of(copy.deepcopy(model).bfloat16()),
        "int8": size_of(with_int8(model)),
    }
    steps = {str(rows): against_float32(model, rows, args.turns) for rows in (1, 16)}
    cost, drafts = pass_cost(model, args.turns), draft_cost(model, args.turns)
    rooms = room_cost(args.turns)
    print("bytes", sizes, "passes", cost, "drafts", drafts, sep="\n")
    if args.save:
        result = dict(shape=SHAPE, turns=args.turns, bytes=sizes, steps=steps, passes=cost, drafts=drafts)
        result["rooms"] = rooms
        save("decoding", result)


if __name__ == "__main__":
    main()
