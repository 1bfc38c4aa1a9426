"""`python -m tinygpt.prefer`: pairs from a file or the tasks, a run that goes on, bad input."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from bad_input import assert_refused
from events import LAST_RESORT

from tinygpt.checkpoint import save_checkpoint
from tinygpt.ddp.world import run_processes
from tinygpt.finetune.template import chat_tokenizer
from tinygpt.model import GPT, GPTConfig
from tinygpt.prefer import __main__ as prefer_command
from tinygpt.prefer.__main__ import (
    check_start,
    main,
    open_preferences,
    parse_arguments,
    prefer_config,
    run_options,
)
from tinygpt.prefer.pairs import Pair, encode_preference, read_pairs
from tinygpt.prefer.train import Preferences
from tinygpt.run.report import read_metrics
from tinygpt.tokenizer import ByteTokenizer

TINY = ["--dtype", "float32", "--compile", "off", "--threads", "1", "--eval-tokens", "200"]
TINY += ["--final-eval-tokens", "200", "--batch-size", "4", "--max-steps", "4", "--warmup-steps", "1"]


def model_folder(folder, tokenizer):
    torch.manual_seed(0)
    config = GPTConfig.llama(vocab_size=tokenizer.n_vocab, block_size=64, n_layer=1, n_head=1, n_embd=16)
    return save_checkpoint(folder, GPT(config), tokenizer)


@pytest.fixture
def place(tmp_path, words, monkeypatch):
    "A folder with a chat model and a file of pairs; the command is called in it."
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "chat", chat_tokenizer(ByteTokenizer()))
    model_folder(tmp_path / "base", ByteTokenizer())
    talk = [{"role": "user", "content": "Sky?"}]
    lines = [
        dict(
            prompt=talk,
            chosen=[dict(role="assistant", content=f"Blue {i}")],
            rejected=[dict(role="assistant", content="Green")],
        )
        for i in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "one.jsonl").write_text(json.dumps(lines[0]))
    (tmp_path / "equal.jsonl").write_text(json.dumps(lines[0] | {"chosen": "Green"}))
    TINY_HERE = [*TINY, "--source", str(words), "--data", "pairs.jsonl"]
    return tmp_path, TINY_HERE


def losses(folder) -> list[float]:
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def test_a_run_on_a_file_of_pairs_goes_on_from_its_folder_alone(place, capsys):
    folder, tiny = place
    assert main(["chat", *tiny, "--schedule", "constant"]) == 0
    assert main(["chat", *tiny, "--schedule", "constant", "--name", "again", "--max-steps", "2"]) == 0
    (folder / "pairs.jsonl").unlink()
    for flag, value in (("--beta", "0.9"), ("--kind", "reward"), ("--data", "one.jsonl")):
        assert main(["--resume", "runs/again", "--max-steps", "4", flag, value]) == 2
        assert f"leave {flag} out" in capsys.readouterr().err
    assert main(["--resume", "runs/again", "--max-steps", "4"]) == 0
    whole, again = losses(folder / "runs/chat-prefer"), losses(folder / "runs/again")
    assert whole == again and len(whole) == 4 and whole[0] == pytest.approx(0.6931, abs=1e-3)
    assert json.loads((folder / "runs/again/objective.json").read_text())["settings"]["kind"] == "dpo"
    told = "pairs of pairs.jsonl: 10 to train on, 2 held out; 4 steps of 2 are 0.8 epochs"
    assert told in (folder / "runs/chat-prefer/log.txt").read_text()


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_begun_again(place):
    folder, tiny = place
    assert main(["chat", *tiny]) == 0
    shutil.rmtree(folder / "runs/chat-prefer/checkpoints")
    assert main(["chat", *tiny, "--overwrite"]) == 0


def test_a_reward_model_is_one_flag_away(place):
    folder, tiny = place
    assert main(["chat", *tiny, "--kind", "reward", "--name", "judge"]) == 0
    kept = json.loads((folder / "runs/judge/pairs.json").read_text())
    assert kept["kind"] == "reward" and kept["score_token"] == ByteTokenizer().eot
    assert any("rewards/accuracies" in line for line in read_metrics(folder / "runs/judge"))
    assert not any("logps/chosen" in line for line in read_metrics(folder / "runs/judge"))


def test_the_tasks_give_pairs_of_the_models_own_answers_and_questions_to_the_judge(place, monkeypatch):
    folder, tiny = place
    asked = []

    def pairs(model, tokenizer, n, seed, draws, place):
        asked.append((n, draws, place))
        return [Pair("2 + 2 =", "4", str(i)) for i in range(5, 17)]

    monkeypatch.setattr(prefer_command, "task_pairs", pairs)
    flags = ["--data", "tasks", "--prompts", "9", "--draws", "3", "--questions", "8"]
    assert main(["chat", *tiny, *flags]) == 0
    assert asked == [(9, 3, "chat")]
    [last] = [line for line in read_metrics(folder / "runs/chat-prefer") if "right_all" in line][-1:]
    assert last["rewards/accuracies"] >= 0 and last["right_copy"] == 0


def test_a_tenth_of_the_pairs_is_held_out(place):
    options = parse_arguments(["chat", *place[1], "--beta", "0.4"])
    preferences = open_preferences(options)
    assert len(preferences.pairs) == 10 and len(preferences.held_out) == 2 and preferences.beta == 0.4
    assert not any(pair in preferences.pairs for pair in preferences.held_out)


def test_the_pairs_of_a_sorted_file_are_held_out_at_random_but_the_same_ones_each_time(place):
    options = parse_arguments(["chat", *place[1]])
    found = open_preferences(options)
    first = [encode_preference(chat_tokenizer(ByteTokenizer()), pair) for pair in read_pairs("pairs.jsonl")]
    assert found == open_preferences(options) and found.held_out != first[:2]
    assert sorted(found.held_out + found.pairs) == sorted(first)


@pytest.mark.parametrize("long", [1, 5, 12])
def test_a_pair_that_does_not_fit_is_named_by_its_number_in_the_file(place, capsys, long):
    folder, tiny = place
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    lines[long - 1] = json.dumps(json.loads(lines[long - 1]) | {"chosen": "Blue " * 40})
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    assert_refused(main, ["chat", *tiny], f"pairs.jsonl: pair {long} has 2", folder, capsys)


def test_answers_are_drawn_where_the_run_computes(place, monkeypatch):
    asked, open_model = [], prefer_command.open_model
    monkeypatch.setattr(
        prefer_command, "open_model", lambda *given: asked.append(given) or open_model(*given)
    )
    assert main(["chat", *place[1], "--device", "cpu"]) == 0
    assert asked == [("chat", torch.device("cpu"))]


def limits_of_a_run(world, options):
    "How long this rank waits for the others, by torch: while rank 0 draws, and when the run begins."
    limits, first = [], prefer_command.on_first

    def note(*args, **how):
        limits.append(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    def noted(*args):
        note()
        return first(*args)

    prefer_command.on_first, prefer_command.train = noted, note
    prefer_command.open_preferences = lambda *args: Preferences([([1], [2], [3])], [([1], [2], [3])])
    run_options(options)
    return limits


def test_ranks_wait_for_the_one_that_draws_and_only_there(place):
    options = parse_arguments([str(place[0] / "chat"), *place[1], "--device", "cpu"])
    assert run_processes(limits_of_a_run, 2, options, timeout=LAST_RESORT) == [[86400, 1800]] * 2


def test_spread_weights_are_refused_before_an_answer_is_drawn_and_only_where_questions_are_asked(
    place, monkeypatch, capsys
):
    folder, tiny = place
    monkeypatch.setattr(prefer_command, "task_pairs", lambda *_, **__: pytest.fail("answers were drawn"))
    argv = ["chat", *tiny, "--data", "tasks", "--parallel", "fsdp"]
    assert_refused(main, argv, "take zero or ddp, or --questions 0", folder, capsys)
    for remedy in (["--questions", "0"], ["--parallel", "zero"], ["--kind", "reward"]):
        check_start(parse_arguments([*argv, *remedy]), 1)


def test_the_recipe_takes_the_runs_own_settings_and_few_careful_steps(place):
    config = prefer_config("chat")
    assert config.run.init_from == "chat" and config.run.name == "chat-prefer"
    assert config.model.block_size == 64 and config.optim.optimizer == "adamw"
    assert config.data.batch_size % 2 == 0 and config.optim.learning_rate <= 3e-4


@pytest.mark.parametrize(
    "argv, word",
    [
        ([], "RUN is missing"),
        (["chat", "--resume", "runs/x"], "two places to start from"),
        (["base"], "base is a base model"),
        (["./nowhere/x"], "does not exist"),
        (["chat", "--data", "one.jsonl"], "1 pairs are too few"),
        (["chat", "--data", "equal.jsonl"], "equal answers"),
        (["chat", "--data", "missing.jsonl"], "cannot read missing.jsonl"),
        (["chat", "--batch-size", "5"], "batch_size = 5 splits a pair"),
        (["chat", "--micro-batch-size", "3"], "micro_batch_size = 3 splits a pair"),
        (["chat", "--beta", "0"], "beta = 0.0"),
        (["chat", "--beta", "inf"], "beta = inf"),
        (["chat", "--draws", "1"], "draws = 1"),
        (["chat", "--block-size", "4"], "the context 4"),
        (
            ["chat", "--prompts", "5"],
            "prompts = 5 has no effect with --data pairs.jsonl",
        ),
        (["chat", "--draws", "5"], "draws = 5 has no effect"),
        (["chat", "--questions", "5"], "questions = 5 has no effect"),
        (["chat", "--kind", "reward", "--beta", "0.4"], "beta = 0.4 has no effect with --kind reward"),
        (["chat", "--data", "tasks", "--kind", "reward", "--questions", "5"], "with --kind reward"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_nothing_is_left(place, argv, word, capsys):
    folder, tiny = place
    known = argv[:1] in (["chat"], ["base"]) and "--resume" not in argv
    assert_refused(main, [argv[0], *tiny, *argv[1:]] if known else argv, word, folder, capsys)


def test_a_file_of_too_few_pairs_is_told_nothing_of_questions(place, capsys):
    folder, tiny = place
    said = assert_refused(main, ["chat", *tiny, "--data", "one.jsonl"], "bring more", folder, capsys)
    assert "--prompts" not in said


def test_a_base_model_has_no_tasks_to_answer(place, capsys):
    folder, tiny = place
    argv = ["base", *tiny, "--data", "tasks"]
    assert "python -m tinygpt.finetune base" in assert_refused(main, argv, "base model", folder, capsys)
