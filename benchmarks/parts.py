"""From a table to a block: what each part of a small GPT adds, one more a row (chapters 04 and 06).

    python benchmarks/parts.py               # prints; about 10 minutes on one core
    python benchmarks/parts.py --save        # and adds its runs to benchmarks/results/parts.json
    python benchmarks/parts.py --show        # the table of what the record holds
    # the longer run of chapter 04: positions without learned weights, one head, four heads
    python benchmarks/parts.py --save --rows mean_place place heads --steps 3000 --seeds 3
    # is it the byte before? After 600 steps with five seeds, and the longer run with three
    python benchmarks/parts.py --save --rows before head_before hidden
    python benchmarks/parts.py --save --rows before head_before hidden --steps 3000 --seeds 3
    # claim 3 again, with ten more seeds
    python benchmarks/parts.py --save --rows place heads --steps 1500 --seeds 13

Written down before the rows `mean_place`, and before those of 1500 steps, were run. "Below" means that
the 95 % interval of the differences, seed by seed, lies below 0; one that reaches 0 refutes it.
1. Positions alone do nothing for a mean of learned values: the interval of `mean_place` minus `values`
   reaches 0 or lies above it. One that lies below 0 refutes this.
2. Learned weights need positions, and use them: `place` is below `mean_place`.
3. What 600 steps hide: after 1500 steps `heads` is below `place`.
4. The same after 3000 steps; written, and those runs begun, before the runs of 1500 steps had ended.
(A trial of three seeds, 600 steps, and one of two seeds, 3000 steps, had pointed this way.)

3 came out at -0.019 +- 0.020 with three seeds. By the rule above that refutes it; but an interval that holds
0 refutes nothing, and all three seeds agree with the claim. So it is asked again on ten seeds that nobody has
seen, 3 to 12, at the rates that were chosen before. They alone decide: confirmed if the interval of `heads`
minus `place` lies below 0, refuted if it lies above, else undecided. No more are added. Written before the
first of these runs.

Why the pair? The explanation: with both, a head can ask for the byte before. Written before any run of the
rows `before`, `head_before` and `hidden`, when all others were known: at 600 steps the pair takes the loss
from 2.389 (`values`) to 2.259 (`place`), by 0.130. The bounds are about a quarter and three quarters of that.
5. That byte is enough: `before`, a fixed shift by one, ends less than 0.03 above `place`. Confirmed if the
   whole interval of the difference lies below 0.03, refuted if it lies above, else undecided.
6. It is what the head without positions lacks: `head_before` ends less than 0.03 above `place`. The same.
7. It is needed: `hidden`, the head with positions that sees every byte but the one before, ends more than
   0.10 above `place`. Confirmed if the whole interval lies above 0.10, refuted if below, else undecided.
Each is asked after 600 steps (five seeds) and after 3000 (three): six claims.

Data, steps, optimizer and the tuning of each row's rate are those of `ablation.py`; the model is the
throw-away one of the two chapters, with every part to be left out.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from ablation import study
from torch import nn

RECORD = Path(__file__).parent / "results" / "parts.json"
C, T, V = 64, 64, 256
BLOCK = dict(look="attention", n_head=4, place=True, mlp=True)

# name: (the row it is compared with, what the model has, what the pages call it)
ROWS = {
    "table": (None, {}, "table: a token sees itself"),
    "mean": ("table", dict(look="mean"), "+ mean of the past"),
    "values": ("mean", dict(look="values"), "mean of learned values"),
    "head": ("values", dict(look="attention"), "(learned weights, no positions)"),
    "mean_place": ("values", dict(look="values", place=True), "+ positions"),
    "place": ("mean_place", dict(look="attention", place=True), "learned weights: one head"),
    "before": ("place", dict(look="before"), "value of the byte before, fixed"),
    "head_before": ("place", dict(look="attention", before=True), "(no positions) + the byte before"),
    "hidden": ("place", dict(look="attention", place=True, hide=True), "one head, byte before hidden"),
    "heads": ("place", dict(look="attention", place=True, n_head=4), "four heads"),
    "mlp": ("heads", BLOCK, "+ MLP"),
    "norm": ("mlp", BLOCK | dict(norm=True), "+ norms"),
    "two": ("norm", BLOCK | dict(norm=True, layers=2), "two blocks"),
}


class Layer(nn.Module):
    "What one block may have: a look back, and an MLP."

    def __init__(self, look, n_head=1, mlp=False, norm=False, before=False, hide=False):
        super().__init__()
        self.look, self.n_head, self.hide = look, n_head, hide
        learned = look in ("values", "before", "attention")
        self.qkv = nn.Linear(C, 3 * C if look == "attention" else C, bias=False) if learned else None
        self.out = nn.Linear(C, C, bias=False) if learned else None
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) if mlp else None
        self.norms = nn.ModuleList(nn.LayerNorm(C) if norm else nn.Identity() for _ in range(2))
        self.beside = Layer("before") if before else None  # with matrices of its own

    def look_back(self, x):  # (B, T, C)
        past = torch.ones(T, T).tril()
        mean = past / past.sum(dim=1, keepdim=True)
        if self.look == "mean":
            return mean @ x
        if self.look == "values":
            return self.out(mean @ self.qkv(x))
        if self.look == "before":  # each position gets the value of the one before, the first gets zeros
            return self.out(F.pad(self.qkv(x), (0, 0, 1, -1)))
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=2))
        seen = (past - torch.ones(T - 1).diag(-1)).bool() if self.hide else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=not self.hide)
        y = self.out(y.transpose(1, 2).flatten(2))
        return y if self.beside is None else y + self.beside.look_back(x)

    def forward(self, x):
        branches = [b for b in (self.look and self.look_back, self.mlp) if b is not None]
        for norm, branch in zip(self.norms, branches):
            x = x + branch(norm(x))
        return x


class Toy(nn.Module):
    "Bytes in, a score for every next byte out."

    def __init__(self, look=None, n_head=1, place=False, mlp=False, norm=False, layers=1, **more):
        super().__init__()
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(T, C) if place else None
        self.layers = nn.Sequential(*(Layer(look, n_head, mlp, norm, **more) for _ in range(layers)))
        self.norm = nn.LayerNorm(C) if norm else nn.Identity()
        self.head = nn.Linear(C, V)

    def forward(self, ids, targets):
        x = self.wte(ids)
        x = x if self.wpe is None else x + self.wpe.weight
        logits = self.head(self.norm(self.layers(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(row: str, seed: int) -> Toy:
    torch.manual_seed(seed)
    return Toy(**ROWS[row][1])


if __name__ == "__main__":
    shape = dict(n_embd=C, block_size=T, vocab_size=V)
    # no row's best rate was below 0.005, so the grid begins at half of that
    study(__doc__, RECORD, ROWS, make, shape, steps=600, rates=(0.0025, 0.005, 0.01))
