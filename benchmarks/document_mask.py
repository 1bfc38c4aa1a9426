"""Must documents packed into one row be masked from each other? A small GPT trained both ways.

    python benchmarks/document_mask.py --threads 1           # prints; about half an hour on one core
    python benchmarks/document_mask.py --threads 1 --save    # and writes results/document_mask.json
    python benchmarks/document_mask.py --threads 1 --longer --save   # adds runs of four times as many steps
    python benchmarks/document_mask.py --threads 1 --trainer --steps 150 --save  # adds the trainer's own
    python benchmarks/document_mask.py --steps 5 --seeds 2   # a trial of the script itself

Both models see the same rows and begin with the same weights. Documents are paragraphs of the State of the
Union addresses in random order, so that most rows hold several and neighbors have nothing to do with each
other. Both models are judged on held-out paragraphs, each alone in its row, and packed as in training with
and without the mask. Chapter 12 draws the result.

The optimizer and its rates are those of the preset `laptop`, times a factor that each way chooses by itself:
the one with the lowest loss on paragraphs alone, over two seeds that serve for nothing else. (With AdamW at a
single rate, as in an earlier form of this script, the gain by seed was 0.196, 0.005 and 0.062 nats: it
decided nothing.)

Written down before the first run in this form:

1. The masked model has the lower loss on paragraphs alone. Undecided if the interval of the difference over
   the seeds holds 0.
2. Each read as it was trained, the masked model has the lower loss on packed rows, too. Undecided likewise.
3. A model trained without the mask does not need it: masking its packed rows changes its loss by less than
   0.05 nats. Refuted if it changes more, on average.

Written down when the gain was known to be 0.24 nats, and before the first run of `--longer` (four times as
many steps, three seeds, the rates that were chosen before):

4. The gain on paragraphs alone is smaller then: refuted if the interval of (short less long) lies below 0,
   undecided if it holds 0. It is still above 0: undecided if its interval holds 0.

Written down before the first result of `--trainer`: the trainer itself, with `mask_documents` and without,
for 150 steps, three seeds, the rates that were chosen before. Its documents are once paragraphs, and once
three paragraphs that follow each other: more than 200 tokens, so that few rows of 256 hold more than two.
Judged on held-out documents, each alone in its row (the long ones cut at the row's end).

5. On paragraphs the masked runs have the lower loss: refuted if the interval of the gain lies below 0,
   undecided if it holds 0.
6. On documents of three paragraphs the gain is smaller: refuted if the interval of (paragraphs less threes),
   by seed, lies below 0, undecided if it holds 0. It is still above 0: refuted and undecided likewise.
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from data_machine import load, lowest, machine, save, tune
from little_text import documents

from tinygpt.accumulate import clip_gradients, train_step
from tinygpt.data.tokens import load_corpus
from tinygpt.document_masks import document_mask
from tinygpt.model import GPT, GPTConfig
from tinygpt.muon import make_optimizer
from tinygpt.run.parallel import optimizer_groups
from tinygpt.run.presets import preset
from tinygpt.schedule import make_schedule
from tinygpt.support import interval
from tinygpt.tokenizer import BPETokenizer
from tinygpt.train import train

EDGES = [0, 2, 8, 32, 128]  # places in a document, in tokens after its eot: where the difference is
RATES = (0.5, 1.0, 2.0)  # times those of the preset
MOST_RATES = len(RATES) + 3  # to try
TUNING_SEEDS = (101, 102)


def everything(idx: torch.Tensor) -> None:
    "No mask: what is not later, is seen."


def masked_step(model: GPT, optimizer, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None) -> None:
    "A training step with a mask for `GPT.forward`, or none."

    def forward(x, y, reduction):
        return model(x, y, reduction=reduction, mask=mask)

    def clip(norm):
        return clip_gradients(model.parameters(), norm)

    train_step(forward, optimizer, x, y, clip=1.0, clip_fn=clip)


def paragraphs(documents: list[str], tokenizer, least: int = 8, most: int = 127) -> list[list[int]]:
    "The token ids of each paragraph that is neither a headline nor long, so that several fit in a row."
    texts = [line.strip() for line in "\n".join(documents).split("\n")]
    batch = tokenizer.encode_batch([text for text in texts if text], 1)
    return [ids for ids in batch if least <= len(ids) <= most]


def pack(docs: list[list[int]], eot: int, T: int, generator: torch.Generator) -> torch.Tensor:
    "(rows, T + 1): all documents in random order, eot before each, cut into rows that share one token."
    order = torch.randperm(len(docs), generator=generator).tolist()
    stream = []
    for i in order:
        stream += [eot, *docs[i]]
    stream = torch.tensor(stream)
    return stream[: (len(stream) - 1) // T * T + 1].unfold(0, T + 1, T)


def pack_alone(docs: list[list[int]], eot: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    "Each document in a row of its own, what is missing filled up with eot and not counted."
    x = torch.full((len(docs), T), eot)
    y = torch.full((len(docs), T), -100)
    for i, doc in enumerate(docs):
        row = torch.tensor([eot, *doc])[: T + 1]
        x[i, : len(row) - 1] = row[:-1]
        y[i, : len(row) - 1] = row[1:]
    return x, y


@torch.no_grad()
def losses(model, x, y, see, rows: int = 64) -> torch.Tensor:
    "(rows, T) losses, 0 where not counted. `see`: idx -> mask, or None."
    model.eval()
    out = [model(xb, yb, reduction="none", mask=see(xb))[1] for xb, yb in zip(x.split(rows), y.split(rows))]
    model.train()
    return torch.cat(out)


def make_config(vocab_size: int, **shape):
    "The preset's settings, for a model of this shape."
    config = preset("laptop")
    config.model = GPTConfig.llama(vocab_size=vocab_size, qk_norm=True, init="zero", **shape)
    return config


def begin(config, rate: float, seed: int, steps: int):
    "(model, optimizer, what sets the rates of a step): the config's rates times `rate`."
    o = config.optim
    rates = dict(learning_rate=o.learning_rate * rate, muon_lr=o.muon_lr * rate)
    torch.manual_seed(seed)
    model = GPT(config.model)
    groups = optimizer_groups(replace(config, optim=replace(o, **rates)), model)
    optimizer, _ = make_optimizer(groups, dtype=torch.float32)
    top = [group["lr"] for group in optimizer.param_groups]
    schedule = make_schedule(o.schedule, steps, min(20, steps // 5), o.final_lr, o.cooldown)

    def set_rates(step):
        for group, lr in zip(optimizer.param_groups, top):
            group["lr"] = lr * schedule(step)

    return model, optimizer, set_rates


def train_model(config, see, rate: float, seed: int, docs, eot: int, args) -> tuple[GPT, float]:
    "A model trained with the mask `see`, and the seconds of CPU that it took."
    T = config.model.block_size
    model, optimizer, set_rates = begin(config, rate, seed, args.steps)
    rows = []
    generator = torch.Generator().manual_seed(seed)
    while len(rows) < args.steps * args.rows:  # new order in each epoch
        packed = pack(docs, eot, T, generator)
        rows += list(packed[torch.randperm(len(packed), generator=generator)])
    start = time.process_time()
    for step in range(args.steps):
        batch = torch.stack(rows[step * args.rows : (step + 1) * args.rows])
        set_rates(step)
        x, y = batch[:, :-1], batch[:, 1:].contiguous()
        masked_step(model, optimizer, x, y, see(x))
    return model, time.process_time() - start


def run(config, masked: bool, rate: float, seed: int, train, val, eot: int, args) -> dict:
    "Train one model, and judge it on the held-out paragraphs."
    T = config.model.block_size

    def apart(idx):
        return document_mask(idx, eot)

    model, seconds = train_model(config, apart if masked else everything, rate, seed, train, eot, args)
    x, y = pack_alone(val, eot, T)
    alone = losses(model, x, y, everything)
    counted = y != -100
    packed = pack(val, eot, T, torch.Generator().manual_seed(0))
    place = torch.arange(T).expand_as(x)
    spans = [counted & (place >= a) & (place < b) for a, b in zip(EDGES, EDGES[1:])]
    result = dict(
        masked=masked,
        rate=rate,
        seed=seed,
        alone=(alone.sum() / counted.sum()).item(),
        packed_causal=losses(model, packed[:, :-1], packed[:, 1:], everything).mean().item(),
        packed_masked=losses(model, packed[:, :-1], packed[:, 1:], apart).mean().item(),
        alone_by_place=[(alone[s].sum() / s.sum()).item() for s in spans],
        cpu_s=round(seconds, 1),
    )
    print({k: v if not isinstance(v, float) else round(v, 4) for k, v in result.items()}, flush=True)
    return result


def tuned(config, masked: bool, train, val, eot: int, args) -> dict:
    "The grid of rates, the best of it, and the runs of that one which are compared."

    def loss(rate):
        lines = [run(config, masked, rate, seed, train, val, eot, args) for seed in TUNING_SEEDS]
        return statistics.mean(line["alone"] for line in lines)

    grid = tune(loss, RATES, most=MOST_RATES)
    best = lowest(grid)
    seeds = range(1, args.seeds + 1)
    return dict(
        grid=grid, best=best, runs=[run(config, masked, best, seed, train, val, eot, args) for seed in seeds]
    )


def gain(plain: dict, masked: dict, key: str, masked_key: str) -> dict:
    "How much lower the masked models' loss is: by seed, the mean, half the 95 % interval."
    gaps = [a[key] - b[masked_key] for a, b in zip(plain["runs"], masked["runs"])]
    middle, half = interval(gaps)
    return dict(gaps=gaps, mean=middle, half=half)


def longer(config, train, val, eot: int, args) -> None:
    "Runs of four times as many steps, with the rates of the record."
    record = load("document_mask")
    args.steps, args.seeds = 4 * record["steps"], 3
    ways = {}
    for name, way in record["ways"].items():
        masked, rate = name == "masked", way["best"]
        runs = [run(config, masked, rate, 1 + i, train, val, eot, args) for i in range(args.seeds)]
        ways[name] = dict(runs=runs)
    found = dict(steps=args.steps, ways=ways, gain=gain(*ways.values(), "alone", "alone"), on=machine())
    print(found["gain"])
    if args.save:
        save("document_mask", record | dict(longer=found))


def trainer_run(path: Path, masked: bool, seed: int, args) -> dict:
    "One run of the trainer on the documents in a file, which an empty line divides."
    config = make_config(1024, block_size=256, n_layer=4, n_head=4, n_embd=96)
    config.run = replace(config.run, out=str(path.parent), name=f"{path.stem}-{masked}-{seed}", seed=seed)
    config.data = replace(config.data, source=str(path), separator="\n\n", batch_size=args.rows)
    config.data.mask_documents = masked
    config.optim = replace(config.optim, max_steps=args.steps, warmup_steps=min(20, args.steps // 5))
    config.eval = replace(config.eval, eval_every=0, save_every=0, sample_tokens=0, compressors=False)
    config.system = replace(config.system, device="cpu", dtype="float32", compile="off")
    start = time.process_time()
    result = train(config, progress="none")
    seconds = time.process_time() - start
    eot = result.data.tokenizer.eot
    held_out = [document[1:].tolist() for document in documents(result.data.val, eot)]  # without their eot
    x, y = pack_alone(held_out, eot, config.model.block_size)
    alone = losses(result.model, x, y, everything).sum() / (y != -100).sum()
    lengths = [len(document) + 1 for document in held_out]
    told = dict(masked=masked, seed=seed, alone=alone.item(), as_trained=result.val.loss)
    told |= dict(cpu_s=round(seconds, 1), median_tokens=statistics.median(lengths), documents=len(held_out))
    print(path.stem, told, flush=True)
    return told


def trainer(corpus, args) -> None:
    "The trainer's own runs, on documents of one paragraph and of three; added to the record."
    record, found, args.seeds = load("document_mask"), {}, 3
    lines = [line.strip() for document in corpus.train for line in document.split("\n")]
    lines = [line for line in lines if 40 < len(line) < 400]  # about 8 to 127 tokens
    with tempfile.TemporaryDirectory() as folder:
        for together in (1, 3):
            texts = ["\n".join(lines[i : i + together]) for i in range(0, len(lines), together)]
            random.Random(0).shuffle(texts)
            path = Path(folder) / f"of-{together}.txt"
            path.write_text("\n\n".join(texts), encoding="utf-8")
            ways = {"plain": dict(runs=[]), "masked": dict(runs=[])}
            for seed in range(1, args.seeds + 1):
                for name, way in ways.items():
                    way["runs"].append(trainer_run(path, name == "masked", seed, args))
            gains = {key: gain(*ways.values(), key, key) for key in ("alone", "as_trained")}
            found[str(together)] = dict(ways=ways, gains=gains)
            print(together, gains)
    if args.save:
        save("document_mask", record | dict(trainer=dict(steps=args.steps, of=found, on=machine())))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8, help="in a batch")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--longer", action="store_true", help="needs the record, and adds to it")
    parser.add_argument("--trainer", action="store_true", help="needs the record, and adds to it")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = load_corpus("sotu")
    if args.trainer:
        return trainer(corpus, args)
    tokenizer = BPETokenizer.train(corpus.train, 1024)
    eot = tokenizer.eot
    train, val = paragraphs(corpus.train, tokenizer), paragraphs(corpus.val, tokenizer)
    config = make_config(tokenizer.n_vocab, block_size=256, n_layer=4, n_head=4, n_embd=96)
    T = config.model.block_size
    packed = pack(train, eot, T, torch.Generator().manual_seed(0))[:, :-1]
    starts = (packed == eot).sum(1).float()
    lengths = sorted(len(d) + 1 for d in train)
    pairs = document_mask(packed[:500], eot).tril().float().sum((1, 2, 3)).mean().item()
    about = dict(
        documents=len(train),
        median_tokens=lengths[len(lengths) // 2],
        starts_per_row=round(starts.mean().item(), 2),
        pairs_kept=round(pairs / (T * (T + 1) / 2), 3),
        val_documents=len(val),
        edges=EDGES,
    )
    print(about, flush=True)
    if args.longer:
        return longer(config, train, val, eot, args)
    plain, masked = (tuned(config, way, train, val, eot, args) for way in (False, True))
    gains = dict(
        alone=gain(plain, masked, "alone", "alone"),
        packed=gain(plain, masked, "packed_causal", "packed_masked"),
    )
    print(gains)
    if args.save:
        result = dict(
            threads=torch.get_num_threads(),
            steps=args.steps,
            tokens=args.steps * args.rows * T,
            parameters=GPT(config.model).num_params(),
            rates=RATES,
            **about,
            gains=gains,
            ways=dict(plain=plain, masked=masked),
        )
        save("document_mask", result)


if __name__ == "__main__":
    main()
