"""`python -m tinygpt.finetune`: a base becomes a chat model, on one process or two; bad input is told."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tinygpt.finetune.__main__ as module
from tinygpt.checkpoint import load_model, save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.ddp.world import run_processes
from tinygpt.finetune.__main__ import (
    ELSEWHERE_RATE,
    RATE_FACTOR,
    STEPS,
    Options,
    chat_start,
    finetune_config,
    hold_out_conversations,
    main,
    parse_arguments,
    run_options,
)
from tinygpt.finetune.template import is_chat, make_chat_base, read_conversations, render
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.config import TrainConfig, load_config
from tinygpt.run.report import read_metrics
from tinygpt.run.stage import base_folder
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer
from tinygpt.train import train

ASKED = (
    "--max-steps 6 --batch-size 4 --save-every 2 --eval-every 0 --compile off --dtype float32 --device cpu"
)


@pytest.fixture
def base(config):
    "The folder of a small run that reads bytes, after its first step."
    config.model = replace(config.model, block_size=64)
    config.run.name = "base"
    config.optim = replace(config.optim, max_steps=1, warmup_steps=0)
    config.system = replace(config.system, compile="off")
    return train(config, progress="none").run


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"prompt": f"Say {'ab'[i % 2] * (1 + i % 7)}", "completion": "ba"[i % 2] * 3} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def call(*words):
    return main([*map(str, words[:1]), *ASKED.split(), *map(str, words[1:])])  # of two, the later one counts


def weights(folder):
    return torch.cat([p.detach().flatten() for p in load_model(folder)[0].parameters()])


def drop_later(run, step):
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.split("_")[1]) > step:
            shutil.rmtree(folder)


def test_a_base_becomes_a_chat_model_and_a_stopped_run_goes_on_exactly(base, chats, capsys):
    assert call(base, "--data", chats, "--keep", 9) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    model, tokenizer, _ = open_model(run)
    assert is_chat(tokenizer) and model.config.vocab_size == 261
    held = json.loads((run / "objective.json").read_text())["settings"]
    assert held["data"] == str(chats) and held["packed"] is True
    whole = weights(run)
    drop_later(run, 2)
    capsys.readouterr()
    for flag, *value in (
        ("--replay", "0.5"),
        ("--train-on", "all"),
        ("--held-out", "3"),
        ("--no-document-mask",),
    ):
        assert main(["--resume", str(run), flag, *value]) == 2
        assert f"leave {flag.replace('no-', '')} out" in capsys.readouterr().err
    assert main(["--resume", str(run)]) == 0
    assert torch.equal(weights(run), whole)
    assert "python -m tinygpt.finetune --resume" in (run / "report.md").read_text()


def test_a_run_goes_on_from_another_folder_and_with_its_file_elsewhere(base, chats, monkeypatch, capsys):
    monkeypatch.chdir(chats.parent)
    assert call(base, "--data", chats.name, "--keep", 9) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    whole = weights(run)
    drop_later(run, 2)
    elsewhere = chats.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["--resume", str(run)]) == 0, capsys.readouterr().err
    assert torch.equal(weights(run), whole)
    drop_later(run, 2)
    moved = chats.rename(elsewhere / "moved.jsonl")
    assert main(["--resume", str(run)]) == 2 and "cannot read" in capsys.readouterr().err
    assert main(["--resume", str(run), "--data", moved.name]) == 0, capsys.readouterr().err
    assert torch.equal(weights(run), whole)
    assert json.loads((run / "objective.json").read_text())["settings"]["data"] == str(moved)
    drop_later(run, 2)
    moved.write_text(moved.read_text().replace("bbb", "bab"))
    assert main(["--resume", str(run)]) == 2 and "give the same again" in capsys.readouterr().err
    assert main(["--resume", str(run), "--data", "tasks"]) == 2


def loss_one_by_one(run, conversations):
    "The mean loss of the answers' tokens, each conversation alone, in float32 from the logits."
    model, tokenizer, _ = open_model(run)
    losses = []
    for messages in conversations:
        ids, counts = render(tokenizer, messages)
        with torch.no_grad():
            logps = model(torch.tensor([ids]))[0][0].double().log_softmax(-1)
        losses += [-logps[i - 1, ids[i]].item() for i in range(len(ids)) if counts[i]]
    return sum(losses) / len(losses)


def test_a_file_has_a_held_out_part_that_is_judged_and_never_trained_on(base, chats, monkeypatch):
    rows = [{"prompt": f"Say {i}", "completion": "ab"[i % 2] * (1 + i % 5)} for i in range(30)]
    chats.write_text("\n".join(map(json.dumps, rows)))
    seen = []
    keep = module.answers_objective
    monkeypatch.setattr(
        module, "answers_objective", lambda told, *rest, **how: seen.append(told) or keep(told, *rest, **how)
    )
    words = (base, "--data", chats, "--held-out", 6, "--eval-every", 3, "--batch-size", 8)
    assert call(*words) == 0
    run, every = base.with_name("base-chat"), read_conversations(chats)
    held = [messages for messages in every if messages not in seen[0]]
    figures = [line for line in read_metrics(run) if "val_answer_loss" in line]
    assert [line["step"] for line in figures] == [2, 3, 4, 6]  # and at each save
    assert figures[-1]["val_answer_loss"] == pytest.approx(loss_one_by_one(run, held), rel=1e-5)
    assert figures[-1]["answer_loss"] == pytest.approx(loss_one_by_one(run, seen[0]), rel=1e-5)
    assert len(seen[0]) == 24 and len(held) == 6
    log = (run / "log.txt").read_text()
    assert f"conversations of {chats}: 24 to train on, in " in log
    assert "; 6 held out; 6 steps of 7 rows are " in log and "; 1 more in each step: text of " in log
    assert (
        "val_answer_loss" in log and "epoch " in log and "val_answer_loss" in (run / "report.md").read_text()
    )


@pytest.mark.parametrize("n, held", [(1, 0), (49, 0), (50, 5), (300, 30), (5000, 128)])
def test_a_tenth_of_a_file_is_held_out_but_nothing_of_a_small_one(n, held):
    options = Options(TrainConfig(), data="chats.jsonl")
    learned, left = hold_out_conversations(options, list(range(n)))
    assert len(left) == held == options.held_out and sorted(learned + left) == list(range(n))
    assert hold_out_conversations(options, list(range(n))) == (learned, left)


def test_a_file_decides_how_long_the_run_is(base, chats, tmp_path, capsys):
    "Three epochs, or 60 steps if that is more; another number, or steps, if they are given."
    words = ["--device", "cpu", "--no-packed", "--replay", "0", "--held-out", "0"]

    def steps(*more, n=1000, rows=32):
        path = tmp_path / f"{n}.jsonl"
        path.write_text("\n".join(json.dumps({"prompt": f"Say {i}", "completion": "a"}) for i in range(n)))
        options = parse_arguments([str(base), "--data", str(path), *words, *map(str, more)])
        assert options.train.data.batch_size == rows
        if options.epochs is not None:
            options = chat_start(options, read_conversations(path), rows)
        o = options.train.optim
        return o.max_steps, o.warmup_steps, options.train.eval.eval_every

    assert steps() == (94, 2, 24)  # 3 * 1000 / 32
    assert steps(n=20) == (60, 1, 15)
    assert steps("--epochs", "auto", n=20) == steps(n=20)
    (tmp_path / "sixty.toml").write_text("[optim]\nmax_steps = 60")  # a number like any other
    assert steps("--epochs", 1, "--config", tmp_path / "sixty.toml", n=20)[0] == 1
    (tmp_path / "same.toml").write_text(f"[optim]\nmax_steps = {STEPS}\nwarmup_steps = 20")
    assert steps("--config", tmp_path / "same.toml") == (800, 20, 200)  # said, if only what it is anyway
    assert steps("--epochs", 1, "--warmup-steps", 20, "--eval-every", 200) == (32, 20, 200)
    assert steps("--epochs", 1, "--config", tmp_path / "same.toml") == (32, 20, 8)
    assert steps("--epochs", 1) == (32, 0, 8) and steps("--epochs", 0.5, n=65) == (2, 0, 1)
    assert steps("--max-steps", 800) == (800, 20, 200) and steps("--batch-size", 16, rows=16)[0] == 188
    for flags, told in (
        ("--epochs 2 --max-steps 9", "both say how long"),
        ("--epochs 0", "epochs = 0.0: give"),
    ):
        with pytest.raises(UserError, match=told):
            steps(*flags.split())
    assert parse_arguments([str(base)]).train.optim.max_steps == STEPS  # the tasks


def test_a_run_by_epochs_goes_on_exactly_and_can_be_made_longer(base, chats, capsys):
    words = [word for word in ASKED.split() if word not in ("--max-steps", "6")]
    command = [str(base), *words, "--data", str(chats), "--epochs", "4", "--keep", "9"]
    assert main(command) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    whole, steps = weights(run), load_config(run / "config.json").optim.max_steps
    drop_later(run, 2)
    assert main(["--resume", str(run)]) == 0
    assert torch.equal(weights(run), whole) and load_config(run / "config.json").optim.max_steps == steps
    assert main(["--resume", str(run), "--epochs", "8"]) == 0, capsys.readouterr().err
    assert load_config(run / "config.json").optim.max_steps in range(2 * steps - 1, 2 * steps + 1)


def test_the_same_command_with_more_epochs_goes_on_and_then_is_finished(base, chats, capsys):
    words = [word for word in ASKED.split() if word not in ("--max-steps", "6")]
    command = [str(base), *words, "--data", str(chats), "--resume", "auto", "--keep", "9", "--epochs"]
    assert main([*command, "2"]) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    steps = load_config(run / "config.json").optim.max_steps
    drop_later(run, 2)
    assert main([*command, "2"]) == 0 and "resumed from" in capsys.readouterr().out
    assert main([*command, "2"]) == 0 and f"{run} is finished" in capsys.readouterr().out
    assert main([*command, "4"]) == 0 and "resumed from" in capsys.readouterr().out
    config = load_config(run / "config.json")
    assert config.optim.max_steps in range(2 * steps - 1, 2 * steps + 1)
    assert (run / f"checkpoints/step_{config.optim.max_steps:06d}").is_dir()
    assert main([*command, "4"]) == 0 and f"{run} is finished" in capsys.readouterr().out


def test_the_same_command_begins_a_chat_run_goes_on_with_it_and_ends_at_once(base, chats, capsys):
    command = (base, "--data", chats, "--keep", 9, "--resume", "auto")
    assert call(*command) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    whole = weights(run)
    drop_later(run, 2)
    assert "resumed from" not in capsys.readouterr().out
    assert call(*command) == 0, capsys.readouterr().err  # the run began with base-chat-start, made of base
    assert "resumed from" in capsys.readouterr().out and torch.equal(weights(run), whole)
    assert call(*command) == 0 and capsys.readouterr().out == f"{run} is finished: it has made its 6 steps\n"


@pytest.mark.parametrize("rows", [1, 4])
def test_a_batch_too_small_for_old_text_is_told_and_goes_on_as_it_began(base, chats, capsys, rows):
    assert call(base, "--data", chats, "--keep", 9, "--batch-size", rows) == 0, capsys.readouterr().err
    told = f"note: replay = 0.125 gives no row of old text: batch_size = {rows}, processes = 1\n"
    assert capsys.readouterr().err.count(told) == 1
    run = base.with_name("base-chat")
    whole, kept = weights(run), json.loads((run / "objective.json").read_text())
    assert kept["settings"]["replay"] == 0.0
    drop_later(run, 2)
    assert main(["--resume", str(run)]) == 0
    assert torch.equal(weights(run), whole)
    # as if it had begun on processes that gave it such rows
    (run / "objective.json").write_text(
        json.dumps(kept | dict(settings=kept["settings"] | dict(replay=0.125)))
    )
    drop_later(run, 2)
    assert main(["--resume", str(run)]) == 2
    assert "continue with as many processes and rows" in capsys.readouterr().err


def test_the_same_command_goes_on_where_the_batch_is_too_small_for_the_old_text_that_it_names(
    base, chats, capsys
):
    command = (base, "--data", chats, "--keep", 9, "--batch-size", 4, "--resume", "auto", "--replay")
    assert call(*command, 0.1) == 0, capsys.readouterr().err
    run = base.with_name("base-chat")
    whole = weights(run)
    drop_later(run, 2)
    assert call(*command, 0.1) == 0, capsys.readouterr().err
    assert torch.equal(weights(run), whole)
    for words in (("--replay", "0.1"), ()):
        drop_later(run, 2)
        assert main(["--resume", str(run), *words]) == 0, capsys.readouterr().err
        assert torch.equal(weights(run), whole)
    for words in (("--replay", "0.5"), ("--replay", "0.1", "--batch-size", "40")):  # rows that it has not had
        assert main(["--resume", str(run), *words]) == 2
        assert "the run began with 0.0: leave --replay out" in capsys.readouterr().err


def test_the_new_rows_are_made_once_and_taken_again(base, chats, capsys):
    assert call(base, "--data", chats) == 0 == call(base, "--data", chats, "--name", "again")
    start = base.with_name("base-chat-start")
    assert is_chat(open_model(start)[1])
    shutil.rmtree(start)
    other = GPT(GPTConfig.gpt2(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16))
    make_chat_base(save_checkpoint(base.with_name("other"), other, ByteTokenizer()), start)
    assert call(base, "--data", chats, "--overwrite") == 2
    assert "from another base: remove it, or give another --name" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "short"])
def test_a_source_that_cannot_be_read_leaves_no_model_to_start_from(base, chats, tmp_path, text, capsys):
    source = tmp_path / "source.txt"
    if text:
        source.write_text(text)
    before = sorted(base.parent.rglob("*"))
    assert call(base, "--data", chats, "--source", source) == 2
    assert sorted(base.parent.rglob("*")) == before, capsys.readouterr().err
    start = make_chat_base(base, base.with_name("base-chat-start"))  # an earlier run's stays
    assert call(base, "--data", chats, "--source", source) == 2 and is_chat(open_model(start)[1])


def test_a_chat_model_is_trained_on_as_it_is(base, chats, words):
    start = make_chat_base(base, base.with_name("ready"))
    where = ("--name", "more", "--out", base.parent, "--source", words)
    assert call(start, "--data", chats, *where) == 0
    assert not base.with_name("more-start").exists()


def test_tasks_are_the_default_and_their_questions_are_asked(base, monkeypatch):
    short = [[dict(role="user", content="Hi"), dict(role="assistant", content="Ho")]] * 8
    monkeypatch.setattr(module, "make_conversations", lambda n, seed: short[:n])
    assert call(base, "--questions", 8, "--conversations", 6, "--eval-every", 3) == 0
    figures = [line for line in read_metrics(base.with_name("base-chat")) if "right_all" in line]
    assert len(figures) >= 1 and "right_president" in figures[-1]


def test_the_recipe_follows_the_base(base, tmp_path):
    config, before = finetune_config(str(base)), load_config(base / "config.json")
    assert config.optim.learning_rate == before.optim.learning_rate * RATE_FACTOR
    assert config.data.source == before.data.source and config.model.block_size == 64
    assert config.run.out == str(base.parent) and config.run.name == "base-chat"
    checkpoint = sorted((base / "checkpoints").iterdir())[-1]
    assert base_folder(str(checkpoint)) == base
    theirs = GPT(GPTConfig.gpt2(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16))
    alone = save_checkpoint(tmp_path / "theirs", theirs, ByteTokenizer())
    assert base_folder(str(alone)) is None
    config = finetune_config(str(alone))
    assert (config.optim.optimizer, config.optim.learning_rate) == ("adamw", ELSEWHERE_RATE)
    assert config.run.out == "runs" and config.run.name == "theirs-chat"


LONG = {"prompt": "a" * 60, "completion": "b" * 60}
EMPTY = {"prompt": "a", "completion": " "}
NO_ANSWER = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "lines, flags, named",
    [
        ([LONG], "", "conversation 1 has 125 tokens, and a row of this model holds 65: shorten it"),
        ([EMPTY], "", "is an empty answer"),
        ([NO_ANSWER], "", "has no answer"),
        ([], "", "holds no conversation"),
        (None, "", "cannot read"),
        ([{"prompt": "a", "completion": "b"}], "--questions -1", "questions = -1: choose 0 or more"),
        ([{"prompt": "a", "completion": "b"}], "--questions 8", "questions = 8 has no effect with --data"),
        ([{"prompt": "a", "completion": "b"}], "--conversations 5", "leave --conversations out"),
        (
            [{"prompt": "a", "completion": "b"}],
            "--held-out 1",
            "held_out = 1: ",
        ),
        ([{"prompt": "a", "completion": "b"}], "--learning_rte 1", "--learning_rte is not a setting"),
        ([{"prompt": "a", "completion": "b"}], "--batch-size 0", "batch_size"),
        ([{"prompt": "a", "completion": "b"}], "--replay 1", "replay = 1.0: give a part of the rows"),
        ([{"prompt": "a", "completion": "b"}], "--epochs 1 --warmup-steps 9", "warmup_steps = 9"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_written(base, tmp_path, capsys, lines, flags, named):
    path = tmp_path / "bad.jsonl"
    if lines is not None:
        path.write_text("\n".join(map(json.dumps, lines)))
    before = sorted(base.parent.iterdir())
    assert main([str(base), "--data", str(path), "--device", "cpu", *flags.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert named in error and "\n" not in error
    assert sorted(base.parent.iterdir()) == before


def test_places_to_start_from_that_do_not_work_are_told(base, tmp_path):
    for argv, named in (
        ([], "RUN is missing"),
        ([str(base), "--resume", "x"], "two places to start from"),
        (["--resume", str(base)], "was made by python -m tinygpt.train"),
        ([str(tmp_path / "nowhere")], "does not exist"),
    ):
        with pytest.raises(UserError, match=named):
            parse_arguments(argv)


def run_twice(world, argvs):
    "(losses, weights) of each command line, then of each run gone on with from its fourth step."
    found = [run_options(parse_arguments(argv)) for argv in argvs]
    dist.barrier()
    for result in found:
        if world.is_main:
            drop_later(result.run, 4)
    dist.barrier()
    found += [run_options(parse_arguments(["--resume", str(result.run)])) for result in found[:]]
    return [(r.losses, torch.cat([p.detach().flatten() for p in r.model.parameters()])) for r in found]


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_go_on_exactly(base, chats):
    ways = {"ddp": "muon", "zero": "adamw"}

    def words(parallel, name):
        flags = ["--optimizer", ways[parallel], "--parallel", parallel, "--keep", "9", "--replay", "0.5"]
        return [str(base), "--data", str(chats), "--name", name, *flags, *ASKED.split()]

    alone = [run_options(parse_arguments(words(way, f"{way}-alone"))) for way in ways]
    ranks = run_processes(run_twice, 2, [words(way, way) for way in ways])
    first, other = ranks
    for i, one in enumerate(alone):
        (losses, weights), (late, again) = first[i], first[i + 2]
        assert losses == pytest.approx(one.losses, rel=1e-4)
        assert torch.equal(weights, other[i][1])
        assert torch.equal(again, weights) and late == losses[4:]
