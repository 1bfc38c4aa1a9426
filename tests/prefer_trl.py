"""TRL's DPOTrainer beside ours, on the same weights and pairs: what a test and a benchmark compare.

python tests/prefer_trl.py FOLDER      # prints name -> [TRL's mean over the pairs, ours], as JSON
"""

import json
import sys
from pathlib import Path

import torch

from tinygpt.evaluate.export import export_model
from tinygpt.model import GPT, GPTConfig
from tinygpt.prefer.dpo import dpo_loss, implicit_rewards, pair_rows
from tinygpt.prefer.train import pair_logps
from tinygpt.tokenizer import BPETokenizer

TEXTS = [
    {"prompt": "One fish,", "chosen": " two fish.", "rejected": " Red fish blue"},
    {"prompt": "Red", "chosen": " fish", "rejected": " two two two"},
    {"prompt": "blue fish.", "chosen": " One", "rejected": " Red fish"},
]
BETA = 0.3


def models(tokenizer) -> tuple[GPT, GPT]:
    "A policy and a reference with random weights."
    torch.manual_seed(0)
    config = GPTConfig.llama(
        vocab_size=tokenizer.n_vocab, block_size=64, n_layer=2, n_head=2, n_embd=32, qk_norm=True
    )
    both = GPT(config), GPT(config)
    for model in both:
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.1)
    return both


def compare(folder: Path) -> dict[str, tuple[float, float]]:
    "Name -> (TRL's mean over the pairs, ours). TRL reads text, ours the ids that TRL made of it."
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = BPETokenizer.train("One fish, two fish. Red fish blue fish. " * 30, 270)
    policy, reference = models(tokenizer)
    export_model(policy, tokenizer, folder / "policy")
    export_model(reference, tokenizer, folder / "reference")
    theirs = AutoTokenizer.from_pretrained(folder / "policy")
    theirs.pad_token = theirs.pad_token or theirs.eos_token
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(folder / "reference", dtype=torch.float32),
        args=DPOConfig(output_dir=str(folder / "out"), beta=BETA, report_to=[], use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list(TEXTS),
        processing_class=theirs,
    )
    examples = list(trainer.train_dataset)
    trainer.model.eval()
    with torch.no_grad():
        loss = trainer._compute_loss(trainer.model, trainer.data_collator(examples), False)
    metrics = {name: values[-1] for name, values in trainer._metrics["eval"].items()}

    pairs = [(e["prompt_ids"], e["chosen_ids"], e["rejected_ids"]) for e in examples]
    x, targets = pair_rows(pairs)
    with torch.no_grad():
        refs = -reference(x, targets, reduction="none")[1]
        sides = pair_logps(policy, x, torch.stack([targets.float(), refs], -1))
    chosen, rejected, ref_chosen, ref_rejected = sides
    ours = {
        "loss": dpo_loss(*sides, BETA),
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "rewards/chosen": implicit_rewards(chosen, ref_chosen, BETA),
        "rewards/rejected": implicit_rewards(rejected, ref_rejected, BETA),
    }
    metrics["loss"] = loss.item()
    return {name: (metrics[name], values.mean().item()) for name, values in ours.items()}


if __name__ == "__main__":
    print(json.dumps(compare(Path(sys.argv[1]))))
