"""How fast the loaders are: against a plain copy, against a deque, and against what a training step eats.

    python benchmarks/data_speed.py     prints four tables, writes results/data_speed.json; seven minutes

Everything is a ratio of two figures of the same run, each the median of several rounds that take turns,
because other programs may be at work.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from data_machine import save

from tinygpt.accumulate import accumulate_gradients, clip_gradients
from tinygpt.data.documents import Documents
from tinygpt.data.open import make_loader
from tinygpt.data.stream import StreamLoader, open_stream
from tinygpt.data.tokens import load_corpus, prepare
from tinygpt.data.windows import RandomLoader, ShardLoader
from tinygpt.ddp.world import World
from tinygpt.model import GPT
from tinygpt.precision import choose_policy
from tinygpt.run.parallel import Single
from tinygpt.run.presets import PRESETS, preset
from tinygpt.tokenizer import BPETokenizer


def rates(work: dict, rounds: int = 5) -> dict[str, float]:
    "Units per second of each of the functions, which return how many units they did; they take turns."
    found = {name: [] for name in work}
    for fn in work.values():
        fn()  # warm
    for _ in range(rounds):
        for name, fn in work.items():
            start = time.perf_counter()
            units = fn()
            found[name].append(units / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in found.items()}


def pieces(n: int = 4000) -> list[str]:
    "Documents of about the length of web pages, cut from the addresses."
    text = "\n".join(load_corpus("sotu").train)
    return [text[i * 2500 : (i + 1) * 2500] for i in range(min(n, len(text) // 2500))]


def tokenizing(threads: int) -> dict:
    "Bytes per second: tiktoken alone, our encode_batch, and a stream loader that does all its work."
    texts = pieces()
    tokenizer = BPETokenizer.gpt2()
    size = sum(len(t.encode()) for t in texts)

    def alone():
        tokenizer.encoding.encode_ordinary_batch(texts, num_threads=threads)
        return size

    def batch():
        tokenizer.encode_batch(texts, num_threads=threads)
        return size

    def loader():
        stream = StreamLoader(Documents([], texts=texts), tokenizer, 8, 1024, num_threads=threads, prefetch=0)
        while stream.state["at"][0] == 0:
            next(stream)
        return size

    return rates({"tiktoken alone": alone, "encode_batch": batch, "StreamLoader": loader})


class DequeLoader:
    "Tokens one by one through a deque into a tensor, as nanochat's loader of October 2025 did it."

    def __init__(self, tokens: np.ndarray, B: int, T: int):
        self.tokens = tokens
        self.B = B
        self.T = T
        self.at = 0
        self.buffer = deque()

    def __next__(self):
        need = self.B * self.T + 1
        while len(self.buffer) < need:
            self.buffer.extend(self.tokens[self.at : self.at + 4096].tolist())
            self.at = (self.at + 4096) % (len(self.tokens) - 4096)
        flat = torch.empty(need, dtype=torch.int64)
        for i in range(need):
            flat[i] = self.buffer.popleft()
        return flat[:-1].view(self.B, self.T), flat[1:].view(self.B, self.T)


def loaders(
    B: int,
    T: int,
    batches: int,  # in a round
    size: int = 20_000_000,  # tokens in the file
    tokenized: int = 500_000,  # tokens that the stream makes in a round
    rounds: int = 5,
) -> dict:
    "Tokens per second of each loader, of a plain vectorized copy, and of a deque."
    tokens = np.random.default_rng(0).integers(0, 50_000, size=size).astype(np.uint16)
    path = Path(tempfile.mkdtemp()) / "tokens.bin"
    tokens.tofile(path)
    mapped = np.memmap(path, dtype=np.uint16, mode="r")
    at = 0

    def copy():
        nonlocal at
        for _ in range(batches):
            at = (at + B * T) % (len(tokens) - B * T - 1)
            flat = torch.from_numpy(tokens[at : at + B * T + 1].astype(np.int64))
            flat[:-1].view(B, T).clone(), flat[1:].view(B, T).clone()
        return batches * B * T

    def drain(loader, count):
        def go():
            for _ in range(count):
                next(loader)
            return count * B * T

        return go

    stream = StreamLoader(Documents([], texts=pieces()), BPETokenizer.gpt2(), B, T, num_threads=2, prefetch=0)
    work = {
        "plain copy": copy,
        "RandomLoader": drain(RandomLoader(mapped, B, T), batches),
        "ShardLoader": drain(ShardLoader(mapped, B, T), batches),
        "StreamLoader, tokenizing": drain(stream, tokenized // (B * T)),
        "deque": drain(DequeLoader(tokens, B, T), 4),
    }
    result = rates(work, rounds)
    path.unlink()
    return result


def rows_for(config, model) -> int:
    """Rows of a step that a CPU makes in seconds.

    The preset's batch, or fewer for the presets that are meant for GPUs. Time grows with the tokens, the
    waiting too.
    """
    params = sum(p.numel() for p in model.parameters())
    if params > 5e7:
        most = 1
    elif params > 5e6:
        most = 8
    else:
        most = 64
    return min(config.data.batch_size, most)


def waiting(name: str, kind: str, steps: int) -> dict:
    "Share of a preset's training step spent in next(loader), and the tokens per second that the step eats."
    config = preset(name)
    spec = config.data.tokenizer
    if kind.startswith("stream"):
        data = open_stream("sotu", spec)
    else:
        data = prepare("sotu", spec, config.model.vocab_size)
    config.model.vocab_size = data.tokenizer.n_vocab
    torch.manual_seed(0)
    model = GPT(config.model)
    T = config.model.block_size
    B = rows_for(config, model)
    way = Single(model, World(), dtype=choose_policy("cpu", config.system.dtype).dtype)
    way.make_optimizer(config)
    optimizer = way.optimizer
    packing = "bos" if "bos" in kind else "concat"
    loader = make_loader(kind.split()[0], data, B, T, packing=packing, num_threads=1)
    waits = []
    totals = []
    for _ in range(steps):
        start = time.perf_counter()
        x, y = next(loader)
        got = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        accumulate_gradients(model, x, y, None)
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        waits.append(got - start)
        totals.append(time.perf_counter() - start)
    loader.close()
    skip = max(2, steps // 10)  # the first steps are slow in themselves
    eats = B * T / statistics.median(totals[skip:])
    return dict(
        rows=B,
        share=sum(waits[skip:]) / sum(totals[skip:]),
        median_share=statistics.median(waits[skip:]) / statistics.median(totals[skip:]),
        tokens_per_second=eats,
    )


def eats(name: str) -> dict:
    "Tokens per second that a preset's passes eat here, and how many times as many a stream loader gives."
    config = preset(name)
    torch.manual_seed(0)
    model = GPT(config.model)
    T = config.model.block_size
    rows = rows_for(config, model)
    x = torch.randint(config.model.vocab_size, (rows, T))

    def step():
        model(x, x)[1].backward()
        model.zero_grad(set_to_none=True)
        return rows * T

    stream = StreamLoader(Documents([], texts=pieces()), BPETokenizer.gpt2(), 8, T, num_threads=1, prefetch=0)

    def give():
        # several chunks, so that what lies ready does not count
        return sum(next(stream)[0].numel() for _ in range(500_000 // (8 * T)))

    found = rates({"step": step, "stream": give}, rounds=3)
    return dict(tokens_per_second=found["step"], stream_gives=found["stream"] / found["step"])


WAITING_STEPS = {
    "laptop": 60,
    "shakespeare-char-cpu": 300,
    "shakespeare-char": 12,
    "tinystories": 12,
    "gpt2": 6,
}


def measure_waiting(names) -> dict:
    "For each preset and way of loading: what `waiting` says."
    found = {}
    for name in names:
        steps = WAITING_STEPS[name]
        kinds = ["shard", "stream", "stream bos"]
        if steps > 6:
            kinds = ["random", *kinds]
        found[name] = {kind: waiting(name, kind, steps) for kind in kinds}
        for kind, w in found[name].items():
            print(f"{name}, {kind}: {w['share']:.2%} of the time is waiting, ", end="")
            print(f"the median step {w['median_share']:.2%}; ", end="")
            print(f"the step eats {w['tokens_per_second']:,.0f} tokens/s", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    only = "only the shares of waiting of these presets; the rest of the stored result stays"
    parser.add_argument("--waiting", nargs="+", metavar="PRESET", help=only)
    args = parser.parse_args()
    if args.waiting:
        result = json.loads((Path(__file__).parent / "results/data_speed.json").read_text())
        result["waiting"] |= measure_waiting(args.waiting)
        command = " ".join(["python benchmarks/data_speed.py", *sys.argv[1:]])
        by = result.get("waiting_measured_by", {})
        result["waiting_measured_by"] = by | dict.fromkeys(args.waiting, command)
        kept = {k: result[k] for k in ("tokenizing", "loaders", "eats", "waiting", "waiting_measured_by")}
        save("data_speed", kept | {"rest_measured_by": result.get("rest_measured_by", result["command"])})
        return
    result = {"tokenizing": {}, "loaders": {}, "eats": {}, "waiting": {}}
    for threads in args.threads:
        result["tokenizing"][threads] = found = tokenizing(threads)
        alone = found["tiktoken alone"]
        ratios = [f"{k} {v / alone:.2f}" for k, v in found.items()]
        print(f"{threads} threads: {', '.join(ratios)} ({alone / 1e6:.1f} MB/s)")
    for B, T in ((16, 128), (32, 1024)):
        result["loaders"][f"{B} x {T}"] = found = loaders(B, T, max(20, 200_000 // (B * T)))
        plain = found["plain copy"]
        ratios = [f"{k} {v / plain:.4f}" for k, v in found.items()]
        print(f"{B} x {T}: {', '.join(ratios)} ({plain / 1e6:.0f} M tokens/s)")
    for name in PRESETS:
        result["eats"][name] = found = eats(name)
        print(f"{name}: a step eats {found['tokens_per_second']:,.0f} tokens/s here, ", end="")
        print(f"one tokenizing thread gives {found['stream_gives']:.1f} times as many")
    result["waiting"] = measure_waiting(WAITING_STEPS)
    save("data_speed", result)


if __name__ == "__main__":
    main()
