"""Before the first step: weights to begin with, scores without training, presets on stand-ins."""

import bz2
import copy
import json
import math
import os
import re
import shlex
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lion import Lion

import tinygpt.run.setup as run_setup
from tinygpt.adamw import make_adamw
from tinygpt.checkpoint import checkpoints, load_model, save_checkpoint
from tinygpt.data.__main__ import main as prepare_main
from tinygpt.data.tokens import Corpus, write_token_data
from tinygpt.ddp.world import World
from tinygpt.evaluate.export import export_model
from tinygpt.finetune.lora import add_lora
from tinygpt.model import GPT, GPTConfig
from tinygpt.model_hf import export_hf
from tinygpt.muon import Muon
from tinygpt.precision import Policy
from tinygpt.run.command import parse_arguments
from tinygpt.run.config import load_config
from tinygpt.run.loop import Judge, Log, Stepper
from tinygpt.run.parallel import optimizer_groups
from tinygpt.run.presets import PRESETS, preset
from tinygpt.run.report import read_metrics
from tinygpt.run.setup import (
    Objective,
    begin_run,
    choose_prompt,
    initial_model,
    judge_of,
    kept_settings,
    last_words,
    next_token_loader,
    open_run,
    score_run,
    validation_rows,
)
from tinygpt.schedule import make_schedule
from tinygpt.support import UserError, peak_bytes
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from tinygpt.train import main, train

SMALL = dict(vocab_size=257, block_size=32, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def config(config):
    config.model = GPTConfig.gpt2(**SMALL)
    config.optim = replace(config.optim, optimizer="adamw", learning_rate=1e-3, max_steps=10)
    config.eval = replace(config.eval, final_eval_tokens=1000)
    return config


def quiet(config, **kw):
    return train(config, progress="none", **kw)


@pytest.mark.parametrize("form", [GPTConfig.gpt2, GPTConfig.llama, GPTConfig.modern])
def test_a_run_that_begins_with_a_run_has_its_weights_and_its_tokenizer(config, form):
    config.model = form(**SMALL)
    first = quiet(config)
    config.run.name, config.run.init_from, config.data.tokenizer = "tuned", str(first.run), "bpe"
    config.model = GPTConfig.modern(
        **SMALL, dropout=0.1
    )  # all but the context and dropout comes from the weights
    begun = initial_model(config)
    assert all(torch.equal(a, b) for a, b in zip(begun.parameters(), first.model.parameters()))
    assert begun.config == replace(first.model.config, dropout=0.1)
    tuned = quiet(config)
    assert (
        tuned.losses[0] < first.losses[0] - 0.2
        and tuned.data.tokenizer.fingerprint == first.data.tokenizer.fingerprint
    )
    again = quiet(
        config, resume=True
    )  # a finished run: begins with its own weights, not with the first run's
    assert again.val == tuned.val


def test_weights_in_hugging_face_form_begin_a_run(config, tmp_path):
    torch.manual_seed(1)
    teacher = GPT(GPTConfig.llama(**SMALL)).eval()
    export_hf(teacher, tmp_path / "hf")
    config.run.init_from, config.model = str(tmp_path / "hf"), GPTConfig.llama(**SMALL)
    idx = torch.arange(32)[None]
    assert torch.allclose(initial_model(config).eval()(idx)[0], teacher(idx)[0], atol=1e-5)
    assert quiet(config).finished
    config.data.tokenizer = "bpe"
    with pytest.raises(UserError, match="name its tokenizer with --tokenizer"):
        initial_model(config)


@pytest.mark.parametrize("form", [GPTConfig.gpt2, GPTConfig.llama])
def test_a_shorter_context_keeps_what_the_model_says_within_it_and_a_longer_one_is_refused(
    config, tmp_path, form
):
    torch.manual_seed(1)
    teacher = GPT(form(**SMALL)).eval()
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", teacher, ByteTokenizer())
    config.run.init_from, config.model = str(tmp_path / "run"), replace(config.model, block_size=8)
    idx = torch.arange(8)[None]
    assert torch.allclose(initial_model(config).eval()(idx)[0], teacher(idx)[0], atol=1e-6)
    config.model = replace(config.model, block_size=64)
    with pytest.raises(UserError, match="block_size = 64, but .* was trained on 32"):
        initial_model(config)
    config.asked = frozenset({"block_size"})
    if teacher.config.position == "learned":  # there are 32 of them
        with pytest.raises(UserError, match="block_size = 64, but .* was trained on 32"):
            initial_model(config)
        return
    longer = initial_model(config).eval()
    assert longer.config.block_size == 64 and longer(torch.arange(64)[None])[0].shape[1] == 64
    idx = torch.arange(32)[None]
    assert torch.allclose(longer(idx)[0], teacher(idx)[0], atol=1e-6)


@pytest.mark.parametrize(
    "words, told",
    [
        (["--n-layer", "9"], "n_layer = 9, but .* leave --n-layer out"),
        (["--n-layer=9"], "n_layer = 9, but .* leave --n-layer out"),
        (["--rope-theta", "77"], "rope_theta = 77.0, but .* has 10000.0"),
        (["--n-layer", str(SMALL["n_layer"]), "--dropout", "0.1", "--block-size", "16"], None),
        (["--source", "n_layer"], None),
    ],
)
def test_a_flag_that_asks_weights_for_another_form_is_refused_and_a_true_one_is_not(tmp_path, words, told):
    teacher = GPT(GPTConfig.llama(**SMALL))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", teacher, ByteTokenizer())
    begin = ["laptop", "--init-from", str(tmp_path / "run"), "--block-size", "16"]
    config = parse_arguments([*begin, *words]).train
    if told is None:
        assert initial_model(config).config.n_layer == SMALL["n_layer"]
        return
    with pytest.raises(UserError, match=told):
        initial_model(config)


def test_another_vocabulary_or_a_missing_place_is_refused_before_anything_is_written(config, tmp_path):
    export_hf(GPT(GPTConfig.gpt2(**SMALL | dict(vocab_size=300))), tmp_path / "hf")
    config.run.init_from = str(tmp_path / "hf")
    with pytest.raises(UserError, match="a vocabulary of 300, the data one of 257"):
        quiet(config)
    (tmp_path / "empty").mkdir()
    config.run.init_from = str(tmp_path / "empty")
    with pytest.raises(UserError, match="config.json"):
        quiet(config)
    assert not config.folder.exists()


def test_a_tokenizer_that_is_not_the_weights_own_is_refused_with_the_one_that_is(config, tmp_path, words):
    bpe, other = (BPETokenizer.train([words.read_text()[:n]], 280) for n in (3000, 60))
    assert other.vocab != bpe.vocab
    other.save(tmp_path / "other.json")
    bpe.save(tmp_path / "same.json")
    form = GPTConfig.gpt2(**SMALL | dict(vocab_size=280))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", GPT(form), bpe)
    config.run.init_from = str(tmp_path / "run")
    for named in ("byte", "char", str(tmp_path / "other.json")):
        config.data.tokenizer = named
        with pytest.raises(UserError, match="tokenizer = .* was trained with another one") as error:
            quiet(config)
    assert not config.folder.exists()
    remedy = shlex.split(str(error.value).partition("give --tokenizer ")[2])[0]
    for named in (remedy, str(tmp_path / "same.json"), "bpe"):  # bpe is what nobody named
        config.data.tokenizer = named
        assert begin_run(config).data.tokenizer.fingerprint == bpe.fingerprint


def test_a_tokenizer_that_is_not_that_of_a_hugging_face_folder_is_refused(config, tmp_path, words):
    "As many ids, with other meanings: no size would tell."
    bpe, other = (BPETokenizer.train([words.read_text()[:n]], 280) for n in (3000, 60))
    other.save(tmp_path / "other.json")
    bpe.save(tmp_path / "same.json")
    export_model(GPT(GPTConfig.llama(**SMALL | dict(vocab_size=280))), bpe, tmp_path / "hf")
    config.run.init_from = str(tmp_path / "hf")
    config.data.tokenizer = str(tmp_path / "other.json")
    with pytest.raises(UserError, match="tokenizer = .* was trained with another one") as error:
        begin_run(config)
    remedy = shlex.split(str(error.value).partition("give --tokenizer ")[2])[0]
    for named in (remedy, str(tmp_path / "same.json"), "bpe"):
        config.data.tokenizer = named
        assert begin_run(config).data.tokenizer.vocab == bpe.vocab


def test_a_run_by_characters_is_gone_on_from_with_characters(config, tmp_path):
    letters = CharTokenizer.train("".join(map(chr, range(10, 128))))
    form = GPTConfig.gpt2(**SMALL | dict(vocab_size=letters.n_vocab))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", GPT(form), letters)
    config.run.init_from, config.data.tokenizer = str(tmp_path / "run"), "char"
    assert begin_run(config).data.tokenizer.fingerprint == letters.fingerprint


def test_tokens_whose_ids_mean_something_else_to_the_weights_are_refused(config, tmp_path):
    "As many ids as bytes have, and each is another letter."
    greek = CharTokenizer("".join(map(chr, range(0x370, 0x470))))
    text = greek.chars * 10
    write_token_data(tmp_path / "tokens", Corpus("t", [text], [text], "a test"), greek)
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", GPT(GPTConfig.gpt2(**SMALL)), ByteTokenizer())
    config.run.init_from, config.data.source = str(tmp_path / "run"), str(tmp_path / "tokens")
    with pytest.raises(UserError, match="has other ids than the data: prepare the text again, with") as error:
        quiet(config)
    remedy = shlex.split(str(error.value).partition("--tokenizer ")[2])[0]
    (tmp_path / "text.txt").write_text(text)
    assert (
        prepare_main(["prepare", str(tmp_path / "text.txt"), str(tmp_path / "new"), "--tokenizer", remedy])
        == 0
    )
    config.data.source = str(tmp_path / "new")
    assert begin_run(config).data.tokenizer.kind == "byte"


def test_a_run_goes_on_where_the_file_of_its_tokenizer_is_gone(config, tmp_path, words, monkeypatch):
    "The run that it began with is deleted, and the cache."
    monkeypatch.setenv("TINYGPT_CACHE", str(tmp_path / "cache"))
    bpe = BPETokenizer.train([words.read_text()[:3000]], 280)
    form = GPTConfig.gpt2(**SMALL | dict(vocab_size=280))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", GPT(form), bpe)
    config.run.init_from, config.data.tokenizer = str(tmp_path / "run"), "bpe"
    config.eval = replace(config.eval, save_every=5, compressors=False)
    whole = quiet(config)
    for old in (checkpoints(whole.run)[-1], tmp_path / "run", tmp_path / "cache"):
        shutil.rmtree(old)
    assert quiet(config, resume=True).losses == whole.losses[5:]  # with the config of the caller
    shutil.rmtree(checkpoints(whole.run)[-1])
    moved = whole.run.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "cache")
    assert main(["--resume", str(moved)]) == 0
    tuned, tokenizer, _ = load_model(moved)
    assert all(torch.equal(a, b) for a, b in zip(tuned.parameters(), whole.model.parameters()))
    shutil.rmtree(moved / "checkpoints")  # nothing was saved: the weights that it began with bring it again
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", GPT(form), bpe)
    anew = load_config(moved / "config.json")
    assert anew.data.tokenizer == "bpe"
    assert begin_run(anew).data.tokenizer.fingerprint == tokenizer.fingerprint == bpe.fingerprint


@pytest.mark.slow
def test_eval_only_scores_both_parts_and_writes_nothing(config, capsys):
    result = quiet(config)
    files = {p: p.stat().st_mtime_ns for p in config.folder.rglob("*")}
    _, val = score_run(config, resume=True)
    said = capsys.readouterr().out
    assert val == result.val and re.search(r"training loss [\d.]+, .*\nvalidation loss [\d.]+", said)
    assert {p: p.stat().st_mtime_ns for p in config.folder.rglob("*")} == files
    assert main(["--resume", str(config.folder), "--eval-only"]) == 0
    assert f"validation loss {result.val.loss:.4f}" in capsys.readouterr().out


def test_eval_only_without_a_run_or_weights_is_refused(config):
    "Fresh random weights have a score too, and it would be taken for that of a run."
    with pytest.raises(UserError, match="eval_only: there are no weights to score: name a run with --resume"):
        score_run(config)


def test_to_score_a_model_takes_no_memory_for_training(config, monkeypatch):
    save_checkpoint(Path(config.run.out) / "m", GPT(config.model), ByteTokenizer())
    config.run.init_from = str(Path(config.run.out) / "m")
    weights = 4 * sum(p.numel() for p in GPT(config.model).parameters())
    monkeypatch.setattr("tinygpt.run.config.machine_memory", lambda device: 2 * weights)
    assert score_run(config)[1].tokens
    with pytest.raises(UserError, match="memory: model and training step"):
        quiet(config)


@pytest.mark.parametrize("form", [GPTConfig.gpt2, GPTConfig.llama, GPTConfig.modern])
@pytest.mark.parametrize(
    "micro, system",
    [
        (None, {}),
        (1, dict(loss_chunk=64)),
        (None, dict(loss_chunk=64, checkpoint_activations=True)),
    ],
)
def test_a_validation_holds_no_more_memory_than_a_training_step(config, form, micro, system):
    config.model = form(**SMALL | dict(block_size=512, n_layer=3))
    config.data = replace(config.data, batch_size=2, micro_batch_size=micro)
    config.system = replace(config.system, **system)
    run = open_run(config)
    with Log(run) as log:
        step, judge = Stepper(run, print), Judge(run, log)
        batch = next(run.loader)

        def train_and_validate():
            step(*batch)
            judge.validate(20_000)

        train_and_validate()
        training = peak_bytes(lambda: step(*batch))
        run.parallel.optimizer.zero_grad()
        both = peak_bytes(train_and_validate)
    run.close()
    assert both <= training


def test_validation_in_chunks_gives_the_score_of_whole_logits_in_the_rows_that_presets_have(config):
    run = begin_run(config)
    whole = judge_of(run)(run.model, run.data.val)
    run.config.system.loss_chunk = 5
    chunked = judge_of(run)(run.model, run.data.val)
    assert abs(whole.nats - chunked.nats) < 1e-6 * whole.nats and run.model.training
    assert (whole.tokens, whole.bytes) == (chunked.tokens, chunked.bytes)
    for make in PRESETS.values():  # recorded figures keep their last digits
        assert validation_rows(make()) == max(16, 4096 // make().model.block_size)
    assert validation_rows(make(), world_size=10**6) >= 1


def test_last_words_name_the_newest_checkpoint_and_the_way_on(config):
    assert last_words(config) == "no checkpoint had been saved yet"
    quiet(config)
    assert str(checkpoints(config.folder)[-1]) in last_words(
        config
    ) and f"--resume {config.folder}" in last_words(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_makes_a_few_steps_on_a_small_stand_in_for_its_data(name, tmp_path, words, monkeypatch):
    """The preset's own model form, loader, optimizer and schedule; smaller numbers, for a CPU and a test."""
    config = preset(name)
    documents = tmp_path / "documents.jsonl"
    texts = words.read_text().split("\n")
    documents.write_text(
        "".join(json.dumps({"text": " ".join(texts[i : i + 5])}) + "\n" for i in range(0, 995, 5))
    )
    stand_in = documents if config.data.loader == "stream" else words
    config.run.out, config.system.device = str(tmp_path), "cpu"
    config.data = replace(
        config.data, source=str(stand_in), batch_size=4, micro_batch_size=config.data.micro_batch_size and 2
    )
    config.model = replace(
        config.model,
        n_layer=2,
        block_size=16,
        n_embd=8 * config.model.n_head,
        vocab_size=min(config.model.vocab_size, 290),
    )
    config.optim = replace(config.optim, max_steps=4, warmup_steps=min(config.optim.warmup_steps, 2))
    config.eval = replace(config.eval, eval_tokens=200, final_eval_tokens=200, sample_tokens=4)
    result = quiet(config)
    assert (
        result.finished
        and len(result.losses) == 4
        and result.losses[0] == pytest.approx(math.log(result.data.tokenizer.n_vocab), rel=0.15)
    )
    assert quiet(config, resume=True).steps == 4


@pytest.mark.parametrize(
    "dtype, asked, impl",
    [("float32", "auto", "fused"), ("bfloat16", "auto", "naive"), ("bfloat16", "fused", "fused")],
)
def test_auto_takes_the_attention_that_was_measured_to_be_the_fastest(
    config, monkeypatch, dtype, asked, impl
):
    monkeypatch.setattr(run_setup, "machine_peak", lambda *_: (1e12, ""))  # slow where bfloat16 is
    config.system = replace(config.system, dtype=dtype, attention=asked)
    assert {block.attn.impl for block in begin_run(config).model.h} == {impl}


GOLDEN_FILE = Path(__file__).parent / "golden_losses.json"
GOLDEN = json.loads(GOLDEN_FILE.read_text())


def test_attention_is_a_setting_of_the_machine_and_not_of_the_model(config):
    "Trained with one implementation, resumed and sampled with another; they agree to rounding."
    fused = quiet(config)
    config.run.name, config.system.attention = "naive", "naive"
    naive = quiet(config)
    assert naive.losses == pytest.approx(fused.losses, abs=1e-4)
    assert [block.attn.impl for block in fused.model.h] == ["fused", "fused"]
    assert [block.attn.impl for block in naive.model.h] == ["naive", "naive"]
    assert "naive" not in (checkpoints(naive.run)[-1] / "model.json").read_text()
    config.system.attention, config.optim.max_steps = "tiled", 12
    assert quiet(config, resume=True).finished


@pytest.mark.parametrize("name", GOLDEN)
def test_twenty_steps_have_the_losses_they_had_when_they_were_last_looked_at(name, config):
    """Not an oracle, a tripwire: whoever changes these losses shall know it.

    With GOLDEN=write in the environment the file is written anew.
    """
    losses = golden_losses(name, config)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN_FILE.write_text(json.dumps(GOLDEN | {name: losses}, indent=1) + "\n")
        GOLDEN[name] = losses
    assert losses == pytest.approx(GOLDEN[name], abs=2e-3)


def golden_losses(name, config):
    form, optimizer = name.split("-")
    config.model = getattr(GPTConfig, form)(**SMALL)
    config.optim = replace(config.optim, optimizer=optimizer, muon_lr=0.025, max_steps=20)
    return [round(loss, 5) for loss in quiet(config).losses]


def test_the_callers_config_stays_as_it_was(config):
    config.model = replace(config.model, vocab_size=300)
    before = copy.deepcopy(config)
    run = begin_run(config)
    assert config == before and run.config != config  # the run's has the vocabulary of its data
    assert run.config.model.vocab_size == run.data.tokenizer.n_vocab


@pytest.mark.parametrize(
    ("tf32", "before", "during"), [(True, "highest", "high"), (False, "high", "highest")]
)
def test_every_beginning_sets_the_switch_for_float32_products_before_it_computes(
    config, monkeypatch, switch, tf32, before, during
):
    "A run on a GPU is played by a policy on the CPU that wants what a GPU's would."
    said = []

    def note(real):
        def noting(*args, **kw):
            said.append(switch())
            return real(*args, **kw)

        return noting

    policy = Policy(torch.device("cpu"), torch.float32, "for the test", tf32=tf32)
    monkeypatch.setattr(run_setup, "choose_policy", lambda *a: policy)
    monkeypatch.setattr(run_setup, "machine_peak", note(run_setup.machine_peak))  # the first products
    monkeypatch.setattr(GPT, "forward", note(GPT.forward))
    config.optim = replace(config.optim, max_steps=3)
    longer = copy.deepcopy(config)
    longer.optim = replace(config.optim, max_steps=5)
    own = Objective(loss_fn=lambda module, x, y: module(x, y, reduction="sum")[1])
    beginnings = [
        lambda: quiet(config),
        lambda: quiet(longer, resume=True),
        lambda: quiet(config, objective=own, overwrite=True),  # as the later stages train
        lambda: score_run(config, resume=True),
    ]
    for begin in beginnings:
        torch.set_float32_matmul_precision(before)
        said.clear()
        begin()
        assert len(said) > 1 and set(said) == {during}


def test_a_resumed_run_has_the_state_of_the_one_that_stopped(config, monkeypatch):
    "Weights, step, place in the data, and the scaler's state: the losses go on as if nothing had happened."
    config.eval = replace(config.eval, save_every=4, keep=10)
    config.model = replace(config.model, vocab_size=300)
    whole = quiet(config)
    for folder in checkpoints(whole.run)[1:]:
        shutil.rmtree(folder)
    seen, real = [], run_setup.LossScaler.load_state_dict

    def noting(scaler, state):
        seen.append(state)
        real(scaler, state)

    monkeypatch.setattr(run_setup.LossScaler, "load_state_dict", noting)
    resumed = quiet(config, resume=True)
    assert resumed.losses == whole.losses[4:] and resumed.steps == whole.steps
    assert seen == [json.loads((checkpoints(whole.run)[0] / "state.json").read_text())["scaler"]]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_follows_the_settings_of_its_optimizer(config, optimizer):
    "Not those that the checkpoint was saved with: config.json and the report say the new ones."
    config.optim = replace(config.optim, optimizer=optimizer)
    quiet(config)
    new = dict(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.5, muon_weight_decay=0.25, muon_momentum=0.6)
    config.optim = replace(config.optim, **new, max_steps=20)
    run = open_run(config, resume=True)
    run.close()
    for group in run.parallel.optimizer.param_groups:
        if group["kind"] == "muon":
            assert (group["weight_decay"], group["momentum"]) == (0.25, 0.6)
            continue
        decay = 0.0 if group["params"][0].dim() == 1 else 0.5
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.6), 1e-3, decay)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rate_of_embeddings_and_a_momentum_do_what_they_do_in_a_loop_by_hand(config, optimizer):
    config.model = replace(config.model, tie_weights=False)
    o = config.optim = replace(config.optim, optimizer=optimizer, clip=0.0, max_steps=8)
    usual = quiet(config).losses
    o.embedding_lr_multiplier, o.muon_momentum = 3.0, 0.7
    losses = quiet(config, overwrite=True).losses
    assert losses[0] == usual[0] and losses[-1] != pytest.approx(usual[-1], rel=1e-3)

    run = open_run(config, overwrite=True)
    named = dict(run.model.named_parameters())
    embeddings, head = [named["wte.weight"], named["wpe.weight"]], named["lm_head.weight"]
    blocks = {name: p for name, p in named.items() if p.dim() == 2 and name.startswith("h.")}
    vectors = dict(params=[p for p in named.values() if p.dim() == 1], weight_decay=0.0)
    rest = [dict(params=embeddings, lr=3 * o.learning_rate), dict(params=[head]), vectors]
    if optimizer == "adamw":
        rest.append(dict(params=list(blocks.values())))
    shared = dict(betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
    optimizers = [torch.optim.AdamW(rest, o.learning_rate, **shared)]
    if optimizer == "muon":
        fused = [p for name, p in blocks.items() if name.endswith("attn.c_attn.weight")]
        plain = [p for name, p in blocks.items() if not name.endswith("attn.c_attn.weight")]
        width = config.model.n_embd  # of queries, of keys and of values
        groups = [dict(params=plain), dict(params=fused, split=(width, width, width))]
        optimizers.append(Muon(groups, o.muon_lr, momentum=0.7, weight_decay=o.muon_weight_decay))
    groups = [group for one in optimizers for group in one.param_groups]
    tops, by_hand = [group["lr"] for group in groups], []
    for step in range(o.max_steps):
        loss = run.model(*next(run.loader))[1]
        loss.backward()
        for group, top in zip(groups, tops):
            group["lr"] = top * run.schedule(step)
        for one in optimizers:
            one.step()
            one.zero_grad()
        by_hand.append(loss.item())
    run.close()
    assert losses == pytest.approx(by_hand, rel=1e-4)


def test_a_run_is_finished_after_exactly_its_steps(config):
    config.optim = replace(config.optim, max_steps=3, warmup_steps=1)
    assert len(quiet(config).losses) == 3


def test_the_memory_that_a_run_asks_for_is_that_of_one_of_its_processes(config, monkeypatch):
    asked = []
    monkeypatch.setattr(run_setup, "check_memory", lambda *given: asked.append(given[2:]))
    monkeypatch.setattr(run_setup, "on_all", lambda world, fn: fn())
    monkeypatch.setattr(run_setup, "check_alike", lambda *given: None)
    for training in (True, False):
        begin_run(config, world=World(world_size=4), training=training)
    # before the data is read, and once the vocabulary is known
    assert asked == [(4, True), (4, True), (4, False), (4, False)]


def stopped_half_way(config):
    "A run with checkpoints after 5 and 10 steps, of which the later one is gone."
    config.eval = replace(config.eval, save_every=5)
    run = quiet(config).run
    shutil.rmtree(checkpoints(run)[-1])
    return run


def test_a_run_does_not_go_on_to_a_step_that_is_behind_it(config):
    run = stopped_half_way(config)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    done = checkpoints(run)[-1].name.removeprefix("step_").lstrip("0")
    config.optim.max_steps = int(done) - 1
    with pytest.raises(UserError, match=f"the run has made {done} steps already: give more"):
        quiet(config, resume=True)
    assert score_run(config, resume=True)[0].step == int(done)  # it makes no step
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("loader", ["random", "shard", "stream"])
@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_a_run_does_not_go_on_with_a_text_that_was_edited(config, words, tmp_path, loader, tokenizer, capsys):
    "One letter more: with characters the ids change their meaning, with bytes only the text is another."
    source = words
    config.data.loader, config.data.tokenizer = loader, tokenizer
    config.model = replace(config.model, vocab_size=300)
    if loader == "stream":
        if tokenizer == "char":
            pytest.skip("streams have no tokenizer by characters")
        source = tmp_path / "documents.jsonl"
        lines = words.read_text().splitlines()
        source.write_text(
            "".join(json.dumps({"text": f"{line} It is day {i}."}) + "\n" for i, line in enumerate(lines))
        )
        config.data.source = str(source)
    run = stopped_half_way(config)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    whole = source.read_text()
    source.write_text(whole.replace("is a good day", "is a gold day").replace("number 5.", "number €."))
    what = "tokenizer" if tokenizer == "char" else "text"
    with pytest.raises(
        UserError, match=f"resume: the {what} of the data was .* bring the old text back"
    ) as error:
        quiet(config, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    if tokenizer == "byte":  # one remedy; by characters the new text has letters that the weights never saw
        anew = shlex.split(str(error.value).partition("weights have seen): ")[2])
        assert main(anew[3:]) == 0 and run.with_name("test-2").is_dir(), capsys.readouterr().err
    source.write_text(whole)  # the other one
    if loader == "stream":
        os.utime(source, (1, 1))
    assert quiet(config, resume=True).finished


@pytest.mark.parametrize("name", ["laptop", "tinystories"])  # a president's prompt, and one of another text
def test_a_presets_prompt_that_the_text_lacks_gives_way_to_the_texts_first_words(config, tmp_path, name):
    (tmp_path / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω\n" * 300, encoding="utf-8")
    config.data.source, config.data.tokenizer = str(tmp_path / "greek.txt"), "char"
    config.eval.prompt = preset(name).eval.prompt
    config.eval = replace(config.eval, eval_every=5, sample_tokens=5, save_every=5)
    result = quiet(config)
    samples = (result.run / "samples.txt").read_text(encoding="utf-8")
    chosen = json.loads((result.run / "config.json").read_text())["eval"]["prompt"]
    assert len(chosen.split()) == 3 and chosen in "μῆνιν ἄειδε θεὰ Πηληϊάδεω\n" * 2
    assert samples.count(f"\n{chosen}") == samples.count("--- step") == 2
    config.run.name, config.eval.prompt = "given", "sing"
    with pytest.raises(UserError, match="prompt = 'sing' cannot be encoded.*such as '(.*)'") as error:
        quiet(config)
    assert not config.folder.exists()
    config.eval.prompt = re.search("such as '(.*)'", str(error.value))[1]  # the remedy
    assert quiet(config).finished


def test_a_run_on_a_text_with_nul_in_its_held_out_first_words_can_be_resumed(config, words):
    text = words.read_text()
    at = int(len(text) * 0.9)
    words.write_text(text[:at] + "a\0b c\0d " * 9 + text[at:])
    config.eval.prompt = preset("laptop").eval.prompt
    first = quiet(config)
    kept = load_config(first.run / "config.json")  # as --resume reads it
    assert kept.eval.prompt and kept.problems() == []


def test_a_prompt_that_can_be_encoded_stays_as_it_was_given(config):
    run = begin_run(config)
    for prompt in ("", "sing", "Once upon a time", "My fellow citizens", "漢字"):
        config.eval.prompt = prompt
        assert choose_prompt(config, run.data) == prompt


def test_samples_begin_as_a_presidents_speech_does_for_the_presidents_addresses_only(config, tmp_path):
    config.eval.prompt = preset("laptop").eval.prompt
    run = begin_run(config)
    chosen = run.config.eval.prompt
    assert len(chosen.split()) == 3 and chosen in run.data.tokenizer.decode(run.data.val[:64])
    config.data.source = "sotu"
    assert begin_run(config).config.eval.prompt == "My fellow Americans"
    folder = tmp_path / "prepared"
    assert prepare_main(["prepare", "sotu", str(folder), "--tokenizer", "byte"]) == 0
    config.data.source = str(folder)
    assert begin_run(config).config.eval.prompt == "My fellow Americans"


def test_the_last_words_do_not_name_a_damaged_checkpoint(config):
    config.eval = replace(config.eval, save_every=5)
    first, second = checkpoints(quiet(config).run)
    (second / "model.safetensors").write_bytes(b"")
    assert str(first) in last_words(config) and str(second) not in last_words(config)
    config.run.name = "my run; $(x)"
    shutil.copytree(first.parent.parent, config.folder)
    command = last_words(config).partition("continue with: ")[2]
    assert shlex.split(command)[3:] == ["--resume", str(config.folder)]


def test_compressors_are_computed_again_where_their_cache_is_damaged_or_cannot_be_written(
    config, cache, monkeypatch
):
    data = quiet(config).data
    bits = run_setup.compare_with_compressors(data)
    for file in (cache / "compressors").iterdir():
        file.write_text("{")
    assert run_setup.compare_with_compressors(data) == bits
    monkeypatch.setenv("TINYGPT_CACHE", os.devnull)
    assert run_setup.compare_with_compressors(data) == bits


def test_compressors_are_computed_for_each_place_where_a_text_is_split():
    text = np.frombuffer(b"It was the best of times, it was the worst of times. " * 40, np.uint8)
    for cut in (1900, 1000):
        parts = dict(train=text[:cut], val=text[cut:])
        splits = {name: {"bytes": len(part)} for name, part in parts.items()}
        data = SimpleNamespace(meta=dict(splits=splits), tokenizer=ByteTokenizer(), **parts)
        val = parts["val"].tobytes()
        expected = 8 * len(bz2.compress(val, 9)) / len(val)
        assert run_setup.compare_with_compressors(data)["bzip2 -9"] == expected


def test_a_text_with_nothing_to_predict_in_its_held_out_part_is_refused_before_the_first_step(
    config, tmp_path
):
    folder = tmp_path / "nano"
    folder.mkdir()
    np.zeros(1000, "<u2").tofile(folder / "train.bin")
    np.zeros(1, "<u2").tofile(folder / "val.bin")
    config.data.source = str(folder)
    with pytest.raises(UserError, match=r"data: the held-out text has 1 token\(s\), and the first one has"):
        open_run(config)
    assert not config.folder.exists()


def test_a_run_that_is_opened_holds_its_folder_until_it_is_closed(config):
    run = run_setup.open_run(config)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        run_setup.open_run(config, overwrite=True)
    run.close()
    run_setup.open_run(config, overwrite=True).close()
    config.optim.max_steps = 30
    with pytest.raises(UserError, match="holds no checkpoint"):
        run_setup.open_run(config, resume=True)
    quiet(config, overwrite=True)  # a refusal does not keep it


def test_a_run_goes_on_with_its_own_command_only(config):
    answers = Objective(command="tinygpt.finetune", settings=dict(weight=2))
    for objective in (Objective(), answers):
        config.run.name = objective.command
        quiet(config, objective=objective)
        assert kept_settings(config.folder, objective.command) == objective.settings
        other = "tinygpt.finetune" if objective is not answers else "tinygpt.train"
        with pytest.raises(UserError, match=f"python -m {objective.command} --resume"):
            kept_settings(config.folder, other)


def plain_loss(module, x, y):
    return module(x, y, reduction="sum")[1]


def scaled_loss(module, x, y, factor=2):
    return factor * plain_loss(module, x, y)


OWN = {
    "loss_fn": plain_loss,
    "loader": next_token_loader,
    "count": lambda y: (y != -100).sum(),
    "judge": lambda run: {"steps made": float(run.step)},
}


@pytest.mark.parametrize("part", OWN)
def test_only_the_program_that_began_a_run_with_an_objective_of_its_own_resumes_it(config, part, capsys):
    own = Objective(**{part: OWN[part]})
    quiet(config, objective=own)
    before = {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()}
    config.optim.max_steps = 22
    way_on = (
        "with an objective of its own: continue with train(config, resume=True, objective=...) in the program"
    )
    for resume in (True, "auto"):
        with pytest.raises(UserError, match=re.escape(way_on)):
            quiet(config, resume=resume)
    same = f"--config {config.folder / 'config.json'} --out {config.run.out} --name test"
    for flags in (f"--resume {config.folder} --max-steps 22", f"{same} --resume auto"):
        assert main(shlex.split(flags)) == 2
        assert way_on in capsys.readouterr().err
    for command in ("tinygpt.finetune", "tinygpt.prefer", "tinygpt.reinforce"):
        with pytest.raises(UserError, match=re.escape(way_on)):
            kept_settings(config.folder, command)
    assert {path: path.read_bytes() for path in config.folder.rglob("*") if path.is_file()} == before
    with pytest.raises(
        UserError, match="continue it with resume=True in the program that started it, or start"
    ):
        quiet(config, objective=own)
    assert quiet(config, resume=True, objective=own).finished


def test_a_run_that_was_begun_before_programs_were_marked_is_not_taken_for_the_trainers(config):
    "Its objective.json names the trainer, or a command without its settings; the trainer itself wrote none."
    own = Objective(plain_loss)
    quiet(config, objective=own)
    config.optim.max_steps = 22
    for command in ("tinygpt.train", "tinygpt.finetune"):
        (config.folder / "objective.json").write_text(json.dumps(dict(command=command, settings={})))
        with pytest.raises(UserError, match="with an objective of its own"):
            quiet(config, resume=True)
        with pytest.raises(UserError, match="with an objective of its own"):
            kept_settings(config.folder, command)
    assert quiet(config, resume=True, objective=own).finished


def test_a_program_resumes_its_run_with_the_same_functions_and_settings_only(config):
    own = Objective(scaled_loss, settings=dict(factor=2, words=("a", "b")))
    quiet(config, objective=own)
    config.optim.max_steps = 22
    for other, told in (
        (
            Objective(plain_loss, settings=own.settings),
            "loss_fn = plain_loss, but .* started with scaled_loss",
        ),
        (
            replace(own, loss_fn=None, count=OWN["count"]),
            "count = <lambda>, but the run was started with None",
        ),
        (replace(own, settings=dict(factor=3, words=("a", "b"))), "factor = 3, but .* started with 2"),
        (Objective(scaled_loss), "factor = None, but .* started with 2"),
    ):
        with pytest.raises(
            UserError, match=f"resume: {told}: give the same, or start a new run with init_from"
        ):
            quiet(config, resume=True, objective=other)
    assert quiet(config, resume=True, objective=replace(own, loss_fn=partial(scaled_loss, factor=2))).finished


@pytest.mark.parametrize("setting", [torch.tensor(0.1), Path("words.txt"), {1, 2}])
def test_a_setting_that_json_cannot_hold_is_refused_before_there_is_a_folder(config, setting):
    with pytest.raises(UserError, match="settings: the run's folder keeps them as JSON .*: give numbers"):
        open_run(config, objective=Objective(loss_fn=lambda *_: None, settings={"it": setting})).close()
    assert not config.folder.exists()


def test_a_run_for_the_next_token_does_not_go_on_with_another_objective(config):
    quiet(config)
    config.optim.max_steps = 22
    told = f"was made by python -m tinygpt.train: .*, or start a new run with init_from = {config.folder}"
    for own in (Objective(plain_loss), replace(run_setup.NEXT_TOKEN, loss_fn=plain_loss)):
        with pytest.raises(UserError, match=told):
            quiet(config, resume=True, objective=own)
    assert quiet(config, resume=True, objective=Objective()).finished  # nothing of its own
    assert not (config.folder / "objective.json").exists()


def test_an_objective_that_a_program_took_from_a_command_is_not_resumed_by_that_command(config):
    "What the command would make it from are its settings, and there are none."
    theirs = Objective(plain_loss, command="tinygpt.finetune")
    quiet(config, objective=theirs)
    assert last_words(config, theirs.resumed_by).endswith("in the program that started the run")
    with pytest.raises(UserError, match="with an objective of its own"):
        kept_settings(config.folder, "tinygpt.finetune")


def test_any_run_may_be_scored(config, capsys):
    quiet(config, objective=Objective(plain_loss))
    assert main(["--resume", str(config.folder), "--eval-only"]) == 0
    assert "validation loss" in capsys.readouterr().out


@pytest.mark.parametrize("loader", ["random", "shard", "stream"])
def test_a_run_does_not_go_on_with_another_seed(config, loader):
    "Its rows would come in another order, and no two runs with that seed would be the same."
    config.data.loader, config.run.seed = loader, 1
    quiet(config)
    config.run.seed, config.optim.max_steps = 2, 30
    with pytest.raises(UserError, match="resume: seed = 2, but the run was started with 1: give that one"):
        quiet(config, resume=True)


def test_a_run_with_an_objective_of_its_own_is_not_sent_to_the_trainer_when_its_text_changed(config, words):
    own = Objective(plain_loss)
    quiet(config, objective=own)
    words.write_text(words.read_text().replace("good", "bad"))
    config.optim.max_steps = 22
    with pytest.raises(UserError, match=r"\(was the text changed\?\): bring the old text back$"):
        quiet(config, resume=True, objective=own)


def test_a_run_with_an_objective_of_its_own_that_saved_nothing_is_begun_again_by_its_program(config):
    run_setup.open_run(config, objective=Objective(plain_loss)).close()
    told = "holds no checkpoint yet: start it again with overwrite=True in the program that started it"
    with pytest.raises(UserError, match=told):
        quiet(config, resume=True, objective=Objective(plain_loss))


@pytest.mark.parametrize("began, now", [("random", "shard"), ("shard", "stream")])
def test_a_run_does_not_go_on_with_another_loader(config, began, now):
    config.data = replace(config.data, loader=began, tokenizer="byte")
    quiet(config)
    config.data.loader, config.optim.max_steps = now, 22
    told = f"resume: loader = {now}, but the run was started with {began}: give that one"
    with pytest.raises(UserError, match=told):
        quiet(config, resume=True)


@pytest.mark.parametrize("began, now", [("adamw", "muon"), ("muon", "adamw")])
def test_a_run_does_not_go_on_with_another_optimizer(config, began, now, capsys):
    config.optim.optimizer = began
    quiet(config)
    config.optim = replace(config.optim, max_steps=22, optimizer=now)
    told = (
        f"resume: optimizer = {now}, but the run was started with {began}: give that one, or start a new run"
    )
    with pytest.raises(UserError, match=told):
        quiet(config, resume=True)
    assert main(["--resume", str(config.folder), "--optimizer", now]) == 2
    assert told in capsys.readouterr().err


def test_what_came_into_the_folder_while_the_data_was_read_is_not_deleted(config, monkeypatch):
    quiet(config)
    real = run_setup.open_run_data

    def slow(*args):
        (config.folder / "thesis.tex").write_text("years of work")
        return real(*args)

    monkeypatch.setattr(run_setup, "open_run_data", slow)
    with pytest.raises(UserError, match="thesis.tex"):
        quiet(config, overwrite=True)
    assert (config.folder / "thesis.tex").exists() and checkpoints(config.folder)


def test_a_run_that_came_while_the_data_was_read_is_not_deleted_unasked(config, monkeypatch):
    done = quiet(config).run
    config.run.name = "other"
    real = run_setup.open_run_data

    def slow(*args):
        if not config.folder.exists():
            shutil.copytree(done, config.folder)
        return real(*args)

    monkeypatch.setattr(run_setup, "open_run_data", slow)
    with pytest.raises(UserError, match="exists: continue it with --resume"):
        quiet(config)
    assert checkpoints(config.folder)


def test_a_loss_that_reads_logits_is_refused_with_a_loss_in_pieces_before_anything_is_written(config):
    config.system.loss_chunk = 64
    own = Objective(loss_fn=lambda module, x, y: module(x, y, reduction="sum")[1], needs_logits=True)
    with pytest.raises(UserError, match="needs the logits, all at once: set loss_chunk = 0"):
        train(config, progress="none", objective=own)
    assert not config.folder.exists()


def lion(run):
    return Lion(optimizer_groups(run.config, run.model), {})


def falling(run):
    return lambda step: 1 / (1 + step)


def test_an_objective_makes_the_optimizer_and_the_schedule(config):
    config.optim = replace(config.optim, optimizer="adamw", warmup_steps=2)
    theirs = quiet(config)
    o = config.optim
    same = Objective(
        optimizer=lambda run: make_adamw(optimizer_groups(run.config, run.model))[0],
        schedule=lambda run: make_schedule(o.schedule, o.max_steps, 2, o.final_lr, o.cooldown),
    )
    assert quiet(config, objective=same, overwrite=True).losses == theirs.losses
    other = quiet(config, objective=Objective(optimizer=lion, schedule=falling), overwrite=True)
    assert other.losses[0] == theirs.losses[0] and other.losses[1] != theirs.losses[1]
    rates = [line["lr"] for line in read_metrics(other.run) if "lr" in line]
    assert rates == pytest.approx([o.learning_rate / (1 + step) for step in range(other.steps)])
    assert "; Lion; " in (other.run / "log.txt").read_text()


def test_an_objective_that_changes_which_weights_there_are_is_refused_before_anything_is_written(config):
    "The trainer would save a checkpoint that nothing can open again."
    adds = Objective(optimizer=lambda run: torch.optim.SGD(add_lora(run.model, rank=2), lr=0.1))
    with pytest.raises(UserError, match="h.0.attn.c_attn.parametrizations.*in a loop of your own"):
        quiet(config, objective=adds)
    assert not config.folder.exists()


def test_a_run_with_its_own_optimizer_and_schedule_resumes_exactly(config):
    config.optim = replace(config.optim, optimizer="adamw")
    config.eval = replace(config.eval, save_every=4, keep=10)
    objective = Objective(optimizer=lion, schedule=falling)
    whole = quiet(config, objective=objective)
    for folder in checkpoints(whole.run)[1:]:
        shutil.rmtree(folder)
    resumed = quiet(config, resume=True, objective=objective)
    assert resumed.losses == whole.losses[4:] and resumed.steps == whole.steps
