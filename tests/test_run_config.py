import dataclasses
import json
from dataclasses import asdict, replace
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.measure.memory import machine_memory, param_counts, predict_memory
from tinygpt.run.config import (
    OptimConfig,
    TrainConfig,
    check_memory,
    config_from_dict,
    find_tokenizer,
    least_memory,
    load_config,
    read_toml,
)
from tinygpt.run.presets import preset
from tinygpt.schedule import SCHEDULES, make_schedule
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

GROUPS = [f.default_factory for f in dataclasses.fields(TrainConfig)]
FIELDS = [f.name for g in GROUPS for f in dataclasses.fields(g)]


def test_names_are_unique_over_all_groups_so_that_flags_can_be_flat():
    assert len(FIELDS) == len(set(FIELDS))


@given(
    st.builds(
        TrainConfig,
        run=st.builds(GROUPS[0]),
        optim=st.builds(GROUPS[3], betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99))),
    )
)
def test_a_config_survives_json(config):
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is not JSON"),
        ("[]", "a list where a dict"),
        ('{"optim": {"lr": 1}}', "optim.lr"),
        ('{"typo": {}}', "typo"),
        ('{"optim": 3}', "optim"),
    ],
)
def test_a_broken_config_file_is_one_sentence(tmp_path, text, words):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(UserError, match=words):
        load_config(tmp_path / "c.json")


BAD = [
    ("model", "n_head", 5, "n_head"),
    ("model", "block_size", 0, "block_size"),
    ("optim", "max_steps", 0, "max_steps = 0"),
    ("optim", "max_steps", -3, "max_steps = -3"),
    ("optim", "learning_rate", -1.0, "learning_rate"),
    ("optim", "betas", (0.9, 1.0), "betas"),
    ("optim", "schedule", "linear", "schedule = 'linear'"),
    ("data", "batch_size", 0, "batch_size"),
    ("data", "micro_batch_size", 99, "micro_batch_size"),
    ("data", "source", "nowhere.txt", "here: give its path from this folder with --source"),
    ("data", "source", "~nobody-here/book.txt", "nor a path that exists"),
    ("data", "source", "x" * 300, "nor a path that exists"),
    ("data", "tokenizer", "nope", "tokenizer = nope"),
    ("data", "tokenizer", "x" * 300, "tokenizer = x"),
    ("optim", "learning_rate", 10**400, "learning_rate"),
    ("run", "name", "a/b", "a/b"),
    ("run", "name", "", "name"),
    ("system", "device", "cuda:77", "cuda:77"),
    ("system", "dtype", "float16", "float16"),
    ("system", "threads", -1, "threads"),
    ("optim", "learning_rate", "fast", "learning_rate = 'fast'"),
    ("optim", "max_steps", 1.5, "max_steps = 1.5"),
    ("data", "batch_size", True, "batch_size = True"),
    ("optim", "eps", float("nan"), "eps = nan"),
    ("eval", "keep", 0, "keep"),
    ("eval", "log_every", 0, "log_every"),
]


@pytest.mark.parametrize("group, name, value, words", BAD)
def test_a_bad_value_is_named(group, name, value, words):
    config = preset("laptop")
    config.system.device = "cpu"
    setattr(getattr(config, group), name, value)
    problems = config.problems()
    assert len(problems) == 1 and words in problems[0], problems


def test_all_problems_are_reported_together():
    config = preset("laptop")
    config.model.n_head, config.optim.max_steps, config.data.source, config.system.device = (
        5,
        0,
        "nowhere",
        "tpu",
    )
    with pytest.raises(UserError) as error:
        config.check()
    assert all(word in str(error.value) for word in ("n_head", "max_steps = 0", "nowhere", "tpu"))


@pytest.mark.parametrize("name, value", [("tensorboard", True), ("wandb", "lessons")])
def test_a_package_that_is_asked_for_and_missing_is_named_before_work_starts(monkeypatch, name, value):
    config = preset("laptop")
    setattr(config.run, name, value)
    monkeypatch.setattr("tinygpt.run.config.find_spec", lambda package: None)
    assert [p for p in config.problems() if f"pip install {name}" in p]


@pytest.mark.parametrize(
    "group, name, value",
    [
        ("data", "micro_batch_size", 0),
        ("data", "micro_batch_size", -1),
        ("optim", "learning_rate", True),
        ("optim", "betas", (0.9, False)),
    ],
)
def test_no_rows_at_all_and_true_in_place_of_a_number_are_refused(group, name, value):
    config = preset("laptop")
    config.system.device = "cpu"
    setattr(getattr(config, group), name, value)
    assert [p for p in config.problems() if p.startswith(name)]


def test_a_config_made_from_another_leaves_that_one_as_it_was():
    base = preset("laptop")
    made = config_from_dict({"optim": {"max_steps": 7}}, base)
    assert (
        made.optim.max_steps == 7
        and base == preset("laptop")
        and made.data == base.data
        and made.data is not base.data
    )


def test_the_runs_folder_is_its_name_in_the_place_for_runs(monkeypatch, tmp_path):
    config = preset("laptop")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    config.run.out, config.run.name = "~/models", "mine"
    assert config.folder == tmp_path / "models" / "mine"


def test_triton_that_cannot_run_is_told_before_anything_is_written():
    config = preset("shakespeare-char-cpu")
    config.system.device, config.system.attention, config.model.dropout = "cpu", "triton", 0.2
    problems = [problem for problem in config.problems() if "triton" in problem]
    assert "dropout" in problems[0]


@pytest.mark.parametrize("name", ["laptop", "shakespeare-char", "gpt2", "tinystories"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_least_memory_is_below_what_a_step_is_predicted_to_take(name, optimizer):
    "So nothing is refused that could run; and not so far below that nothing ever is."
    config = preset(name)
    config.optim.optimizer, config.model.dropout = optimizer, 0.0
    rows = config.data.micro_batch_size or config.data.batch_size
    least, predicted = least_memory(config), predict_memory(config.model, rows, optimizer=optimizer).total
    assert predicted / 10 < least < predicted


@pytest.mark.parametrize("adamw", ["own", "foreach", "for-loop", "fused"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_adamw_that_zero_would_not_use_is_refused_with_a_remedy(adamw, optimizer):
    config = preset("laptop")
    config.optim = replace(config.optim, adamw=adamw, optimizer=optimizer)
    assert config.problems() == []
    config.system.parallel = "zero"
    [problem] = config.problems()
    assert problem.startswith(f"adamw = {adamw} does not go with parallel = zero")
    assert problem.endswith("take --adamw auto, or --parallel ddp")
    assert replace(config, system=replace(config.system, parallel="ddp")).problems() == []
    assert replace(config, optim=replace(config.optim, adamw="auto")).problems() == []


def test_what_is_spread_over_processes_needs_less_of_each():
    config = preset("gpt2")
    one = least_memory(config)
    config.system.parallel = "zero"
    zero = least_memory(config, world_size=8)
    config.system.parallel = "fsdp"
    assert least_memory(config, world_size=8) < zero < one
    config.system.loss_chunk = 1024
    assert least_memory(config) < one - 4e9  # the logits of 32 rows


def test_a_model_that_is_spread_over_many_still_has_to_fit_as_a_whole_when_it_is_made():
    config = preset("gpt2")
    config.system.parallel, config.data.batch_size = "fsdp", 1024
    assert least_memory(config, world_size=1024) == least_memory(config, training=False)


def test_a_model_that_cannot_fit_is_refused_with_both_numbers():
    config, device = preset("laptop"), torch.device("cpu")
    there = machine_memory(device)
    if there is None:
        pytest.skip("the system does not tell its memory")
    check_memory(config, device)
    config.model = replace(config.model, n_embd=192 * 1000)
    with pytest.raises(
        UserError, match=f"take at least {least_memory(config):,} bytes, and cpu has {there:,}"
    ):
        check_memory(config, device)
    config.model = replace(config.model, n_embd=192)  # the remedy
    check_memory(config, device)


def test_to_score_a_model_only_its_weights_have_to_fit(monkeypatch):
    config, device = preset("gpt2"), torch.device("cpu")
    weights = least_memory(config, training=False)
    assert weights == 4 * sum(param_counts(config.model).values())
    monkeypatch.setattr("tinygpt.run.config.machine_memory", lambda device: 2 * weights)
    check_memory(config, device, training=False)
    with pytest.raises(UserError, match="model and training step"):
        check_memory(config, device)
    monkeypatch.setattr("tinygpt.run.config.machine_memory", lambda device: weights - 1)
    with pytest.raises(UserError, match="the weights take at least .* machine with more memory"):
        check_memory(config, device, training=False)


@pytest.mark.parametrize(
    "name", ["laptop", "2026-11-22", "a.b", "my run; $(x)", "Übung_3", ".hidden", "a~b", "x" * 200]
)
def test_names_of_all_kinds_are_names(name):
    config = preset("laptop")
    config.system.device, config.run.name = "cpu", name
    assert config.problems() == []


def test_a_run_that_goes_on_finds_its_tokenizer_in_its_newest_good_checkpoint(config, tmp_path):
    mine = tmp_path / "mine.json"
    ByteTokenizer().save(mine)
    saved = [tmp_path / f"checkpoints/step_{step}/tokenizer.json" for step in (2, 10, 30)]
    for path in saved:
        path.parent.mkdir(parents=True)
        ByteTokenizer().save(path)
    saved[-1].write_text("{")  # damaged

    def found(tokenizer, init_from="", run=tmp_path):
        config.data.tokenizer, config.run.init_from = tokenizer, init_from
        find_tokenizer(config, run)
        return config.data.tokenizer

    assert found(str(mine)) == str(mine) and found("byte") == "byte" and found("bpe") == "bpe"
    assert found(str(tmp_path / "gone.json")) == str(saved[1])  # the file of before is not there any more
    assert found("bpe", "runs/base") == str(saved[1])  # it came with the weights
    nothing = tmp_path / "nothing"  # a run that has saved nothing: the weights bring it again
    assert found(str(tmp_path / "gone.json"), "runs/base", nothing) == "bpe"
    assert found(str(tmp_path / "gone.json"), "", nothing) == str(tmp_path / "gone.json")


def test_a_toml_file_is_read_and_what_is_none_is_told(tmp_path):
    path = tmp_path / "my.toml"
    path.write_bytes(b'\xef\xbb\xbf[optim]\nlearning_rate = 1e-3\n[run]\nname = "a"\n')  # as Windows marks it
    assert read_toml(path) == {"optim": {"learning_rate": 1e-3}, "run": {"name": "a"}}
    for broken in (b"[optim\n", b"\xff\xfe\x00"):
        path.write_bytes(broken)
        with pytest.raises(UserError, match="my.toml is not TOML"):
            read_toml(path)
    with pytest.raises(UserError, match="cannot be read .*: check the path"):
        read_toml(tmp_path / "gone.toml")


def test_a_run_inside_the_folder_of_its_texts_is_refused_since_its_log_would_be_one_of_them(config, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text " * 100)
    config.data.source = str(texts)
    assert config.problems() == []  # its folder is beside that of the texts
    for out in (texts, texts / "runs", tmp_path / "x" / ".." / "texts"):
        config.run.out = str(out)
        (problem,) = config.problems()
        assert "is inside source" in problem and "name a place outside" in problem
    (texts / "meta.json").write_text("{}")  # token files are named one by one
    assert config.problems() == []
    (texts / "meta.json").unlink()
    config.data.source = str(texts / "a.txt")  # one file, whatever lies beside it
    assert config.problems() == []


def test_the_schedules_of_chapter_11_are_the_choices_of_the_config(monkeypatch):
    assert get_args(get_type_hints(OptimConfig)["schedule"]) == tuple(SCHEDULES)
    monkeypatch.setitem(SCHEDULES, "line", lambda step, top, last, cooldown: (last - step) / (last - top))
    assert [make_schedule("line", 6, 1, final=0.5)(step) for step in (0, 1, 3, 5, 9)] == [
        0.5,
        1,
        0.75,
        0.5,
        0.5,
    ]
