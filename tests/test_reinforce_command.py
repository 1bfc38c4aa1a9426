"""`python -m tinygpt.reinforce`: a run, its resume, and what cannot work in one sentence."""

import json
import shlex
import shutil
import string
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bad_input import assert_refused

from tinygpt.checkpoint import save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.finetune.template import chat_tokenizer
from tinygpt.model import GPT, GPTConfig
from tinygpt.reinforce.__main__ import main, parse_arguments, reinforce_config
from tinygpt.reinforce.rollout import Recipe
from tinygpt.run.report import read_metrics
from tinygpt.support import UserError
from tinygpt.tokenizer import CharTokenizer

QUICK = (
    "--source words.txt --tasks count --group 2 --batch-size 4 --max-new-tokens 6 --max-steps 2 --questions 2"
)
QUICK += " --eval-every 0 --save-every 1 --eval-tokens 80 --final-eval-tokens 80 --device cpu --name next"


@pytest.fixture
def folder(tmp_path, words, monkeypatch):
    "A folder to work in: a chat model, a base model, a text."
    torch.manual_seed(0)
    base = CharTokenizer.train(string.printable)
    for name, tokenizer in (("chat", chat_tokenizer(base)), ("base", base)):
        config = GPTConfig.llama(vocab_size=tokenizer.n_vocab, block_size=80, n_layer=1, n_head=2, n_embd=16)
        save_checkpoint(tmp_path / name, GPT(config), tokenizer)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_and_its_resume_with_the_recipe_that_it_had(folder, capsys):
    words = shlex.split(f"chat {QUICK} --reuse 2 --scale --out runs --judge contains")
    assert main(words) == 0
    run = Path("runs/next")
    recipe = Recipe(("count",), "contains", 2, 6, scale=True, reuse=2)
    assert parse_arguments(["--resume", str(run)]).recipe == recipe
    assert {"reward", "pass@1", "pass@8"} <= read_metrics(run)[-1].keys()
    assert "python -m tinygpt.reinforce --resume" in (run / "report.md").read_text()
    before = open_model(run)[0].state_dict()
    shutil.rmtree(run / "checkpoints/step_000002")
    assert main(["--resume", "runs/next"]) == 0
    after = open_model(run)[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_settings_come_from_the_run_that_made_the_model_and_from_the_flags(folder):
    options = parse_arguments(shlex.split(f"chat {QUICK} --learning-rate 0.002"))
    o = options.train.optim
    assert (o.optimizer, o.learning_rate, o.weight_decay, o.max_steps) == ("adamw", 0.002, 0.0, 2)
    assert options.train.run.init_from == "chat" and options.train.model.block_size == 80
    assert options.recipe == Recipe(("count",), group=2, max_new_tokens=6)
    assert o.warmup_steps < 2  # it fits the run
    config = reinforce_config("chat")
    assert config.run.name == "chat-reinforce" and config.data.batch_size == 128
    assert (Recipe().group, Recipe().baseline) == (1, "none")


def test_the_policy_that_is_trained_has_no_dropout_because_the_one_that_draws_has_none(folder):
    model, tokenizer, _ = open_model("chat")
    model.config.dropout = 0.3
    save_checkpoint(folder / "drops", model, tokenizer)
    assert open_model("drops")[0].config.dropout == 0.3
    assert reinforce_config("drops").model.dropout == 0


BAD = [
    ("no run", "", "RUN is missing"),
    ("a base model", f"base {QUICK}", "base is a base model, which has no turns"),
    ("a run that is not there", "nowhere", "nowhere"),
    ("an unknown task", f"chat {QUICK} --tasks chess", "chess"),
    ("a group of one", f"chat {QUICK} --group 1 --baseline group", "group = 1"),
    ("a group that does not divide the rows", f"chat {QUICK} --group 3", "not a multiple of group = 3"),
    ("an unknown judge", f"chat {QUICK} --judge kind", "judge = 'kind'"),
    ("answers longer than the context", f"chat {QUICK} --max-new-tokens 70", "max_new_tokens = 70"),
    ("more micro-rows than rows", f"chat {QUICK} --micro-batch-size 99", "micro_batch_size = 99"),
    ("questions below zero", f"chat {QUICK} --questions -1", "questions = -1"),
    ("a flag that is none", f"chat {QUICK} --grup 4", "--grup"),
    ("two places to start from", "chat --resume runs/next", "two places"),
    ("nothing to go on with", "--resume runs/nothing", "nothing"),
]


@pytest.mark.parametrize("argv, word", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_what_cannot_work_is_one_sentence_before_work_starts(folder, argv, word, capsys):
    assert_refused(main, shlex.split(argv), word, folder, capsys)


def test_a_run_of_another_kind_is_not_gone_on_with(folder):
    run = Path("runs/other")
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(asdict(reinforce_config("chat"))))
    (run / "objective.json").write_text(json.dumps(dict(command="tinygpt.finetune")))
    with pytest.raises(UserError, match="was made by python -m tinygpt.finetune"):
        parse_arguments(["--resume", str(run)])
