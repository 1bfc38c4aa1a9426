"""A run that begins with another's weights: what it inherits, its own flags, and the way back to both."""

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from importlib import import_module

import pytest

from tinygpt.checkpoint import save_checkpoint
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.command import nothing_left
from tinygpt.run.setup import Objective, initial_model, open_run_data
from tinygpt.run.stage import (
    StageOptions,
    base_folder,
    check_effect,
    config_after,
    own_settings,
    stage_options,
)
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer
from tinygpt.train import train


@dataclass(frozen=True)
class Recipe:
    "What is drawn."

    tasks: tuple[str, ...] = ("add",)
    """which"""
    beta: float = 0.5
    """how much"""


@dataclass
class Options(StageOptions):
    "A stage for these tests."

    recipe: Recipe = field(default_factory=Recipe)
    draws: int = 8
    """how many"""


def make(place):
    config = config_after(place, "next", batch_size=4)
    config.optim = replace(config.optim, max_steps=4)
    return config


def options_of(*argv, kept=()):
    return stage_options(list(map(str, argv)), Options, make, "tests.stage", kept)


@pytest.fixture
def base(config):
    config.optim.max_steps, config.eval.profile = 3, "1:2"  # a trace of this run, not of the stage
    return train(config, progress="none").run


def test_settings_are_those_of_the_run_before_but_for_what_a_stage_decides(base, config):
    options = options_of(base, "--learning-rate", 5e-4, "--draws", 3, "--tasks", "sort", "copy")
    own = options.train
    assert own.run.init_from == str(base) and own.folder == base.with_name("test-next")
    assert own.model == replace(config.model, vocab_size=257) and own.data.source == config.data.source
    assert own.optim == replace(config.optim, max_steps=4, learning_rate=5e-4, warmup_steps=2)
    assert own.eval.profile == ""
    assert own_settings(options) == dict(recipe=dict(tasks=("sort", "copy"), beta=0.5), draws=3)


def test_a_run_that_is_the_current_folder_gives_its_own_name_to_the_next_one(base, monkeypatch):
    for place, here in ((".", base), ("..", base / "checkpoints"), (str(base), base)):
        monkeypatch.chdir(here)
        config = config_after(place, "chat", 8)
        assert config.folder == base.with_name(f"{base.name}-chat") and config.problems() == []
        assert config.run.init_from == str(base)  # the same model from any folder


def test_a_stage_after_a_run_on_a_stream_validates_on_what_that_run_held_out(config, tmp_path):
    lines = [json.dumps({"text": f"document {i} is a good one " * 3}) for i in range(400)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    config.data = replace(config.data, source=str(tmp_path / "d.jsonl"), loader="stream")
    config.optim.max_steps = 3
    run = train(config, progress="none")
    after = open_run_data(config_after(str(run.run), "chat", 4))
    assert after.fingerprint == run.data.fingerprint and list(after.val) == list(run.data.val)


def test_a_model_from_elsewhere_has_no_run_to_inherit_from(tmp_path, base):
    model = GPT(GPTConfig.gpt2(vocab_size=257, block_size=8, n_layer=1, n_head=1, n_embd=8))
    place = save_checkpoint(tmp_path / "alone", model, ByteTokenizer())
    assert base_folder(str(place)) is None
    config = config_after(str(place), "chat", 4)
    assert config.folder.as_posix() == "runs/alone-chat" and config.model == model.config
    assert base_folder(str(base / "checkpoints/step_000003")) == base_folder(str(base)) == base


def test_a_resumed_run_finds_both_kinds_of_settings_and_flags_change_single_ones(base, monkeypatch):
    options = options_of(base, "--draws", 3, "--tasks", "sort", "copy", "--beta", 0.25)
    objective = Objective(command="tests.stage", settings=own_settings(options))
    run = train(options.train, progress="none", objective=objective).run
    again = options_of("--resume", run)
    assert own_settings(again) == own_settings(options) and again.recipe == options.recipe
    assert again.train.optim == options.train.optim and again.train.folder == run
    assert options_of("--resume", run, "--draws", 5, "--max-steps", 9).draws == 5
    monkeypatch.chdir(run.parent.parent)
    assert options_of("--resume", run, "--out", run.parent.name).train.folder.resolve() == run.resolve()
    with pytest.raises(UserError, match="draws = 5: the run began with 3: leave --draws out"):
        options_of("--resume", run, "--draws", 5, kept=("draws",))
    assert options_of("--resume", run, "--draws", 3, kept=("draws",)).draws == 3  # as it was
    assert options_of(base, "--draws", 5, kept=("draws",)).draws == 5  # a new run
    for flag, value in (("--name", "other"), ("--seed", 5), ("--init-from", "other")):
        with pytest.raises(UserError, match=f"leave {flag} out"):
            options_of("--resume", run, flag, value)
    with pytest.raises(UserError, match="--overwrite deletes it"):
        options_of("--resume", run, "--overwrite")


def test_what_cannot_be_meant_is_one_sentence(base, tmp_path):
    for argv, told in (
        ([], "RUN is missing"),
        ([base, "--resume", base], "two places to start from"),
        (["--resume", base], "was made by python -m tinygpt.train: continue with"),
        ([tmp_path / "none"], "none"),
        ([base, "--drawz", 3], "did you mean --draws"),
        ([base, "--compressors", "False"], "is a switch"),
        ([base, "--n-layer", 5], "n_layer = 5: the run began with 2: leave --n-layer out"),
        ([base, "--tie-weights"], "tie_weights = True: the run began with False: leave --tie-weights out"),
    ):
        with pytest.raises(UserError, match=told):
            options_of(*argv)
    may = options_of(base, "--n-layer", 2, "--block-size", 8, "--dropout", 0.1).train.model
    assert may.block_size == 8 and may.dropout == 0.1  # these two are no weights


def trained(options):
    objective = Objective(command="tests.stage", settings=own_settings(options))
    resume = options.resume is not None
    return train(options.train, resume, options.overwrite, progress="none", objective=objective)


def test_the_same_command_begins_a_stage_goes_on_with_it_and_ends_at_once(base, capsys):
    command = (base, "--draws", 3, "--keep", 9, "--save-every", 1, "--seed", 5, "--resume", "auto")
    options = options_of(*command, kept=("draws",))
    assert options.resume is None and not nothing_left(options)
    whole = trained(options)
    again = options_of(*command, kept=("draws",))
    assert (
        nothing_left(again) and "test-next is finished: it has made its 4 steps\n" in capsys.readouterr().out
    )
    shutil.rmtree(whole.run / "checkpoints/step_000004")  # as after a kill at step 4
    again = options_of(*command, kept=("draws",))
    assert (again.resume, again.draws, again.overwrite) == ("auto", 3, False) and not nothing_left(again)
    assert trained(again).losses == whole.losses[3:]
    shutil.rmtree(whole.run / "checkpoints")  # as after a kill before the first save
    assert trained(options_of(*command, kept=("draws",))).losses == whole.losses


def test_the_same_command_with_another_meaning_is_refused(base, config):
    run = trained(options_of(base, "--draws", 3)).run
    config.run.name = "other"
    other = train(config, progress="none").run
    for argv, told in (
        ([base, "--draws", 5], "draws = 5: the run began with 3: leave --draws out"),
        ([base, "--seed", 7], "seed = 7: the run began with"),
        ([base, "--overwrite"], "--overwrite deletes it"),
        (
            [other, "--name", run.name],
            f"began with {base}, not with {other}: give that one, or another --name",
        ),
    ):
        with pytest.raises(UserError, match=told):
            options_of(*argv, "--resume", "auto", kept=("draws",))
    with pytest.raises(UserError, match="RUN is missing"):
        options_of("--resume", "auto")


def test_a_file_changes_the_settings_of_the_run_before_and_flags_change_the_file(base, tmp_path):
    path = tmp_path / "MY.TOML"  # in capitals, too
    path.write_text("[optim]\nlearning_rate = 0.5\nmax_steps = 6\n[run]\nseed = 9\n")
    options = options_of(base, "--config", path, "--max-steps", 4)
    assert (options.train.optim.learning_rate, options.train.optim.max_steps) == (0.5, 4)
    assert options.train.run.seed == 9 and options.train.run.init_from == str(base)
    run = trained(options).run
    with pytest.raises(UserError, match="seed = 3: the run began with 9"):
        path.write_text("[run]\nseed = 3\n")
        options_of("--resume", run, "--config", path)
    path.write_text("[model]\nn_layer = 5\n")
    with pytest.raises(UserError, match="n_layer = 5: the run began with 2"):
        options_of(base, "--config", path)
    with pytest.raises(UserError, match="config.json: give a .toml file"):
        options_of(base, "--config", base / "config.json")
    with pytest.raises(UserError, match="config = : give a .toml file"):
        options_of(base, "--config", "")


def test_steps_in_a_file_shorten_the_warmup_as_the_flag_does(base, tmp_path):
    path = tmp_path / "my.toml"
    path.write_text("[optim]\nmax_steps = 50\n")
    for stage in ("finetune", "prefer"):
        module = import_module(f"tinygpt.{stage}.__main__")
        for steps in (1, 2, 10, 300):
            path.write_text(f"[optim]\nmax_steps = {steps}\n")
            by_flag = module.parse_arguments([str(base), "--max-steps", str(steps)]).train.optim
            assert module.parse_arguments([str(base), "--config", str(path)]).train.optim == by_flag
            assert by_flag.warmup_steps < by_flag.max_steps == steps


def test_a_longer_context_is_refused_at_once_and_given_where_positions_are_rotary(tmp_path):
    size = dict(vocab_size=257, block_size=32, n_layer=1, n_head=1, n_embd=8)
    learned = save_checkpoint(tmp_path / "learned", GPT(GPTConfig.gpt2(**size)), ByteTokenizer())
    rotary = save_checkpoint(tmp_path / "rotary", GPT(GPTConfig.llama(**size)), ByteTokenizer())
    path = tmp_path / "my.toml"
    path.write_text("[model]\nblock_size = 64\n")
    for words in (("--block-size", 64), ("--config", path)):
        with pytest.raises(UserError, match="block_size = 64, but .*learned was trained on 32 tokens"):
            options_of(learned, *words)
        assert initial_model(options_of(rotary, *words).train).config.block_size == 64


def test_an_option_without_effect_is_refused_where_it_is_named_and_asks_for_something(base):
    with pytest.raises(UserError, match="draws = 3 has no effect with --data x: leave --draws out"):
        check_effect(options_of(base, "--draws", 3), "with --data x", "draws")
    for words in ((), ("--draws", 0), ("--tasks", "sort")):
        check_effect(options_of(base, *words), "with --data x", "draws")


@pytest.mark.parametrize(
    "stage, suffix", [("finetune", "chat"), ("prefer", "prefer"), ("reinforce", "reinforce")]
)
def test_help_without_a_run_shows_the_defaults_of_the_stage(stage, suffix, capsys):
    module = import_module(f"tinygpt.{stage}.__main__")
    with pytest.raises(SystemExit):
        module.parse_arguments(["--help"])
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert re.search(r"\[OPTIONS\] (Fine-tune|Train) RUN, ", shown)
    assert f"(default: RUN-{suffix})" in shown and "(default: laptop)" not in shown
    assert f"Optimizer steps of the run. (default: {module.STEPS})" in shown
    if stage == "finetune":
        for field in ("messages", "instruction", "input", "output", "prompt", "completion"):
            assert field in shown.split("--data")[1].split("--epochs")[0]
