import dataclasses
import json
from dataclasses import asdict

import pytest

from tinygpt.model_hf import config_to_hf
from tinygpt.run.command import parse_arguments
from tinygpt.run.config import TrainConfig
from tinygpt.run.presets import PRESETS, preset
from tinygpt.support import UserError

FIELDS = [f.name for g in dataclasses.fields(TrainConfig) for f in dataclasses.fields(g.default_factory)]


def test_every_setting_is_a_flag_with_help(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_arguments(["--help"])
    assert exit.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in FIELDS + ["config", "resume", "overwrite"]:
        assert f"--{name.replace('_', '-')}" in text, name
    assert "or mup (its first weights alone, not its learning rates)" in text


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_fresh_and_named_after_themselves(name, words):
    config = preset(name)
    config.data.source = str(words)
    assert config.problems() == [] and config.run.name == name
    config.model.n_layer = 99
    assert preset(name).model.n_layer != 99


@pytest.mark.parametrize("name, form", [("laptop", "qwen3"), ("gpt2", "gpt2"), ("tinystories", "llama")])
def test_other_programs_know_the_form_of_these_presets(name, form):
    assert config_to_hf(preset(name).model)["model_type"] == form


def test_nanogpts_cpu_run_has_its_published_settings():
    "From the README and config/train_shakespeare_char.py of github.com/karpathy/nanoGPT."
    c = preset("shakespeare-char-cpu")
    m, o = c.model, c.optim
    assert (m.n_layer, m.n_head, m.n_embd, m.block_size, m.dropout, m.bias, c.data.batch_size) == (
        4,
        4,
        128,
        64,
        0.0,
        False,
        12,
    )
    assert (o.max_steps, o.learning_rate, o.final_lr, o.warmup_steps, o.betas) == (
        2000,
        1e-3,
        0.1,
        100,
        (0.9, 0.99),
    )
    assert (o.weight_decay, o.clip) == (0.1, 1.0)


def test_flags_change_the_preset_and_nothing_else():
    args = parse_arguments(
        [
            "shakespeare-char-cpu",
            "--n-layer",
            "2",
            "--betas",
            "0.8",
            "0.9",
            "--no-tie-weights",
            "--device=cpu",
            "--n_head",
            "2",
        ]
    )
    expected = preset("shakespeare-char-cpu")
    expected.model.n_layer, expected.model.n_head, expected.model.tie_weights = 2, 2, False
    expected.optim.betas, expected.system.device = (0.8, 0.9), "cpu"
    assert args.train == expected


def test_without_arguments_it_is_the_laptop_preset():
    args = parse_arguments([])
    assert args.train == preset("laptop") and (args.resume, args.config, args.overwrite) == (
        None,
        None,
        False,
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["laptob"], "laptob"),
        (["--lerning-rate", "1"], "did you mean --learning-rate"),
        (["--zzz", "1"], "--help"),
        (["laptop", "--config", "x.json"], "two places"),
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--resume", "runs/none"], "runs/none"),
    ],
)
def test_arguments_that_cannot_be_are_one_sentence(argv, words):
    with pytest.raises(UserError, match=words):
        parse_arguments(argv)


def test_a_value_of_the_wrong_type_exits_with_2(capsys):
    with pytest.raises(SystemExit) as exit:
        parse_arguments(["--n-layer", "many"])
    assert exit.value.code == 2 and "--n-layer" in "".join(capsys.readouterr())


def test_flags_go_on_top_of_a_config_file(tmp_path):
    config = preset("laptop")
    config.optim.learning_rate, config.model.n_layer = 0.5, 3
    path = tmp_path / "config.json"
    path.write_text(json.dumps(asdict(config)))
    args = parse_arguments(["--config", str(path), "--n-layer", "4"])
    assert (args.train.optim.learning_rate, args.train.model.n_layer) == (0.5, 4)


@pytest.mark.parametrize("flag", ["--resume", "--config"])
def test_an_empty_place_to_start_from_is_not_taken_for_the_default(flag):
    for argv in ([flag, ""], [f"{flag}="]):
        with pytest.raises(UserError, match=f"{flag} is empty"):
            parse_arguments(argv)


def test_a_run_shorter_than_a_warm_up_that_nobody_set_gets_one_in_proportion():
    steps = {
        flags: parse_arguments(flags.split()).train.optim.warmup_steps
        for flags in (
            "laptop",
            "laptop --max-steps 21",
            "laptop --max-steps 20",
            "laptop --max_steps 1",
            "gpt2 --max-steps 700",
            "laptop --max-steps 10 --warmup-steps 15",
            "laptop --max_steps 10 --warmup_steps=15",
        )
    }
    assert list(steps.values()) == [20, 20, 0, 0, 26, 15, 15]  # 26 of 700, as 715 of 19,073


def test_a_switch_with_a_value_is_answered_with_the_flag_that_is_meant():
    for words, right in (
        ("--compressors False", "--no-compressors"),
        ("--tensorboard=true", "--tensorboard"),
        ("--no_such 1 --checkpoint_activations off", "--no-checkpoint-activations"),
    ):
        with pytest.raises(UserError, match=f"say {right}$"):
            parse_arguments(words.split())
    for words in ("--no-compressors", "--tensorboard", "--name true", "--prompt False --overwrite"):
        parse_arguments(words.split())  # the remedy, and words that are no mistake


@pytest.mark.parametrize("place", [".", "./", "../run", "../../runs/run/../run/."])
def test_the_folder_one_stands_in_is_a_run_too(tmp_path, place, monkeypatch):
    folder = tmp_path / "runs/run"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(preset("laptop"))))
    monkeypatch.chdir(folder)
    config = parse_arguments(["--resume", place]).train
    assert config.folder.resolve() == folder.resolve() and not [p for p in config.problems() if "name" in p]


def test_settings_of_a_file_are_checked_before_flags_are_made_of_them(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"optim": {"betas": 0.9, "max_steps": "many"}}))
    with pytest.raises(UserError, match=r"c.json: betas = 0.9 .*; max_steps = 'many'"):
        parse_arguments(["--config", str(tmp_path / "c.json"), "--max-steps", "3"])


def test_of_a_place_to_start_from_that_is_given_twice_the_last_one_counts(tmp_path):
    for layers in (3, 5):
        config = preset("laptop")
        config.model.n_layer = layers
        (tmp_path / f"{layers}.json").write_text(json.dumps(asdict(config)))
    argv = ["--config", str(tmp_path / "3.json"), f"--config={tmp_path / '5.json'}"]
    assert parse_arguments(argv).train.model.n_layer == 5


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--name b", "name = b: the run began with a: leave --name out"),
        ("--out elsewhere", "out = elsewhere: the run is in .*: leave --out out"),
        ("--seed 7", "seed = 7: the run began with 1337: leave --seed out"),
        ("--init-from gpt2", "init_from = gpt2: the run began with none: leave --init-from out"),
        ("--overwrite", "--overwrite deletes it"),
    ],
)
def test_a_flag_that_a_resumed_run_would_not_follow_is_refused(tmp_path, flags, words):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text(json.dumps(asdict(preset("laptop"))))
    resume = ["--resume", str(tmp_path / "a")]
    with pytest.raises(UserError, match=words):
        parse_arguments([*resume, *flags.split()])
    same = ["--name", "a", "--out", str(tmp_path), "--seed", "1337", "--max-steps", "9"]
    assert parse_arguments([*resume, *same]).train.folder == tmp_path / "a"


@pytest.mark.parametrize("out", ["runs", "./runs", "runs/", "{}/runs"])
def test_the_place_of_a_resumed_run_may_be_given_in_any_spelling(tmp_path, monkeypatch, out):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/config.json").write_text(json.dumps(asdict(preset("laptop"))))
    monkeypatch.chdir(tmp_path)
    config = parse_arguments(["--resume", "runs/a", "--out", out.format(tmp_path)]).train
    assert config.folder.resolve() == (tmp_path / "runs/a").resolve()
