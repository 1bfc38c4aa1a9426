"""`python -m tinygpt.evaluate`: a text or a task, its line, its record, its complaints."""

import json
import math
import os
import re
import shlex
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from events import LAST_RESORT, first_of_two

import tinygpt.accumulate_memory as chunks
from tinygpt.checkpoint import save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.data.__main__ import main as prepare
from tinygpt.data.tokens import Corpus, write_token_data
from tinygpt.ddp.world import run_processes
from tinygpt.evaluate.__main__ import (
    Options,
    evaluate_options,
    evaluate_text,
    held_out_text,
    main,
    save_result,
    text_line,
    text_tokens,
)
from tinygpt.evaluate.score import evaluate
from tinygpt.evaluate.tasks import evaluate_task, task_line
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.setup import score_run
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer
from tinygpt.train import train

TEXT = "Validation text with some ünïcödé in it, 日本語 too. " * 20
SWAG = {
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "endings": ["uses [substeps] wrap.", "is [title] ripping.", "holds  it.", "starts."],
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=257, block_size=16, n_layer=2, n_head=2, n_embd=16, dropout=0.3))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.train()


@pytest.fixture
def run(tmp_path, model):
    save_checkpoint(tmp_path / "run/checkpoints/step_7", model, ByteTokenizer())
    (tmp_path / "val.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "run"


def call(*words):
    return main([*map(str, words), "--device", "cpu"])


def test_the_command_prints_a_line_and_keeps_each_result_once(run, model, capsys):
    val = run.parent / "val.txt"
    for batch in (4, 9):
        assert call(run, "--data", val, "--batch-size", batch) == 0
    assert call(run / "checkpoints/step_7", "--data", val, "--max-tokens", 64) == 0
    out = capsys.readouterr().out
    tokens = np.array([256, *ByteTokenizer().encode(TEXT)], dtype=np.uint16)
    want = evaluate(model, tokens, ByteTokenizer().token_bytes())
    assert f"loss {want.loss:.4f} [" in out
    assert f"{want.bits_per_byte:.4f} [" in out
    assert f"perplexity {want.perplexity:.2f} [" in out
    results = json.loads((run / "eval.json").read_text())
    assert [r["max_tokens"] for r in results] == [None, 64] and results[0]["checkpoint"] == "step_7"
    assert results[0]["loss"] == pytest.approx(want.loss, rel=1e-6)
    assert results[0]["loss_95"][0] < want.loss < results[0]["loss_95"][1]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--task piqa --data val.txt", "task = piqa is not known: choose hellaswag, storycloze, lambada"),
        ("--data no/such/file", "no/such/file is neither a corpus"),
        ("--batch-size 0", "batch_size = 0"),
        ("--limit 0", "limit = 0: choose a number from 1 on"),
        ("--task lambada --few-shot -1", "few_shot = -1: choose a number from 0 on"),
        ("--few-shot 2 --data val.txt", "few_shot = 2: choose a number from 0 on, with a --task"),
        ("--task lambada --examples val.txt", "examples = val.txt: give --task and --few-shot N with it"),
        ("--data val.txt --limit 3", "limit is not for a text: leave it out, or give --max-tokens"),
        ("--task lambada --max-tokens 3", "max_tokens is not for a task: leave it out, or give --limit"),
        ("--task storycloze", "storycloze is given out by its authors on request"),
        ("--device tpu", "device = tpu is not known"),
        ("--tasks lambada", "--tasks is not a setting: did you mean --task?"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_and_nothing_is_written(run, capsys, flags, sentence):
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert main([str(run), *flags.split(), *device]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (run / "eval.json").exists()


def test_in_a_folder_for_all_results_two_runs_do_not_replace_each_other(run, model, tmp_path, capsys):
    other = tmp_path / "other"
    save_checkpoint(other / "checkpoints/step_7", model, ByteTokenizer())
    for place in (run, other, f"{run}/"):
        assert call(place, "--data", tmp_path / "val.txt", "--out", tmp_path / "all") == 0
    results = json.loads((tmp_path / "all/eval.json").read_text())
    assert [(r["run"], r["checkpoint"]) for r in results] == [(str(other), "step_7"), (str(run), "step_7")]


def test_out_may_name_the_folder_where_the_results_go_anyway(run, tmp_path, capsys):
    for out in ([], ["--out", f"{run}/"], ["--out", run / "checkpoints/step_7"]):
        assert call(run, "--data", tmp_path / "val.txt", *out) == 0
    assert len(json.loads((run / "eval.json").read_text())) == 1


def test_a_run_that_is_none_and_a_broken_eval_json_are_named(run, tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
    (run / "eval.json").write_text("{broken")
    assert call(run, "--data", tmp_path / "val.txt") == 2
    assert "eval.json is not a list of results" in capsys.readouterr().err
    assert (run / "eval.json").read_text() == "{broken"


def test_the_command_scores_a_task_and_writes_it_beside_the_published_numbers(run, model, tmp_path, capsys):
    data = tmp_path / "h.jsonl"
    data.write_text("".join(json.dumps(SWAG | {"label": i % 4}) + "\n" for i in range(8)))
    assert call(run, "--task", "hellaswag", "--data", data, "--limit", 6, "--batch-size", 3) == 0
    out = capsys.readouterr().out
    assert "hellaswag: acc_norm " in out and "n = 6" in out
    assert "GPT-3 Small (Brown et al. 2020) 33.7 %" in out and "chance 25.0 %" in out
    [saved] = json.loads((run / "eval.json").read_text())
    again = evaluate_task(model, ByteTokenizer(), "hellaswag", str(data), limit=6)
    assert saved["acc_norm"] == again["acc_norm"] and saved["acc_norm_95"] == again["acc_norm_95"]
    assert saved["n"] == 6
    assert task_line(again) in out


def test_results_with_and_without_examples_stand_side_by_side(run, tmp_path, capsys):
    data = tmp_path / "h.jsonl"
    rows = [SWAG | {"label": i % 4, "ctx_a": f"A man is on roof {i}."} for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for flags in ([], ["--few-shot", 2], ["--few-shot", 2]):
        assert call(run, "--task", "hellaswag", "--data", data, *flags) == 0
    assert "n = 5, 2-shot" in capsys.readouterr().out
    assert [r.get("few_shot") for r in json.loads((run / "eval.json").read_text())] == [None, 2]
    assert call(run, "--task", "hellaswag", "--data", data, "--few-shot", 5) == 2
    assert "few-shot examples: 6 questions are needed" in capsys.readouterr().err


@pytest.mark.parametrize("how", [dict(tokenizer="char"), dict(tokenizer="bpe"), dict(loader="stream")])
def test_a_run_is_scored_on_what_it_held_out_of_its_own_text(config, how, capsys):
    config.data = replace(config.data, **how)
    config.model.vocab_size, config.eval.final_eval_tokens = 280, 10**6
    trained = train(config, progress="none").run
    assert call(trained) == 0
    (result,) = json.loads((trained / "eval.json").read_text())
    _, val = score_run(config, resume=True)  # the trainer's way to its text
    assert result["data"] == config.data.source and result["loss"] == pytest.approx(val.loss, rel=1e-5)
    assert (result["tokens"], result["bytes"]) == (val.tokens, val.bytes)


def test_a_run_that_was_tuned_to_fit_is_scored_in_its_rows_and_chunks(config, monkeypatch, capsys):
    config.data.micro_batch_size, config.system.loss_chunk = 2, 8
    trained = train(config, progress="none").run
    rows, logits = set(), []
    seen = GPT.features, chunks._chunk
    monkeypatch.setattr(GPT, "features", lambda *a, **kw: rows.add(len(a[1])) or seen[0](*a, **kw))
    monkeypatch.setattr(chunks, "_chunk", lambda *a, **kw: logits.append(len(a[0])) or seen[1](*a, **kw))
    assert call(trained) == 0 and rows == {2} and set(logits) == {8}
    assert call(trained, "--batch-size", 5) == 0 and max(rows) == 5
    small, whole = json.loads((trained / "eval.json").read_text())[0], open_model(str(trained))
    want = evaluate_text(*whole[:2], tokens=held_out_text(whole[2], whole[1])[1])
    assert small["loss"] == pytest.approx(want["loss"], rel=1e-6) and small["bytes"] == want["bytes"]


def test_where_the_text_of_a_run_is_gone_or_another_one_it_is_told(config, words, capsys):
    trained = train(config, progress="none").run
    words.write_text("Quite another text. " * 500)
    assert call(trained) == 2 and "no longer the text" in capsys.readouterr().err
    words.unlink()
    assert call(trained) == 2 and "or name another text with --data" in capsys.readouterr().err
    assert not (trained / "eval.json").exists()
    (trained / "config.json").write_text("{}")
    assert call(trained) == 2 and "name one with --data" in capsys.readouterr().err


@pytest.mark.parametrize(
    "part, value",
    [("data", []), ("data", {"micro_batch_size": "4"}), ("system", 3), ("system", {"loss_chunk": -3})],
)
def test_a_run_whose_settings_are_damaged_is_told_also_where_the_text_is_named(tmp_path, capsys, part, value):
    model = GPT(GPTConfig.gpt2(vocab_size=257, block_size=16, n_layer=1, n_head=1, n_embd=8))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", model, ByteTokenizer())
    (tmp_path / "text.txt").write_text("words " * 50)
    (tmp_path / "run/config.json").write_text(json.dumps({part: value}))
    assert call(tmp_path / "run", "--data", tmp_path / "text.txt") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'run/config.json'}: {part}.") and said.count("\n") == 1


def test_texts_come_from_files_whole_and_from_folders_held_out(tmp_path):
    tok = ByteTokenizer()
    (tmp_path / "a.txt").write_text("The whole file.", encoding="utf-8")
    assert text_tokens(str(tmp_path / "a.txt"), tok).tolist() == [256, *b"The whole file."]
    (tmp_path / "b.txt").write_text("Second.", encoding="utf-8")
    assert text_tokens(str(tmp_path), tok).tolist() == [256, *b"Second."]


@pytest.mark.parametrize("name", ["x.jsonl", "X.JSONL"])
def test_a_file_of_documents_is_scored_whole_with_an_eot_before_each(run, name, capsys):
    place = run.parent / name
    place.write_text('{"body": "First."}\n{"body": "Second."}\n')
    assert text_tokens(str(place), ByteTokenizer(), "body").tolist() == [256, *b"First.", 256, *b"Second."]
    assert call(run, "--data", place) == 2  # and the remedy is a flag of this command
    assert "has no field 'text' but body: name the field that holds the text by --text-key" in (
        capsys.readouterr().err
    )
    assert call(run, "--data", place, "--text-key", "body") == 0


def test_what_is_said_about_token_files_and_folders_of_documents_leads_to_a_score(run, capsys):
    "The command in each message, as a user would give it."
    folder, tokens = run.parent / "docs", run.parent / "tokens"
    folder.mkdir()
    lines = [json.dumps({"text": f"Document {i}, of several."}) for i in range(300)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    assert call(run, "--data", folder) == 2
    said = re.search(r"python -m tinygpt.data (prepare .*) FOLDER, and give FOLDER", capsys.readouterr().err)
    alone = ["--workers", "0"]  # worker processes would take seconds to start
    small = ["--tokenizer", "bpe", "--vocab-size", "260", *alone]
    assert prepare([*shlex.split(said[1]), str(tokens), *small]) == 0
    assert call(run, "--data", tokens) == 2
    said = re.search(r"python -m tinygpt.data prepare TEXT FOLDER (.*)", capsys.readouterr().err)
    again = ["prepare", str(folder), str(run.parent / "again"), *shlex.split(said[1]), *alone]
    assert prepare(again) == 0 and call(run, "--data", run.parent / "again") == 0


def test_token_files_of_another_tokenizer_are_refused(tmp_path):
    corpus = Corpus("x", ["abc" * 20], ["cab"], "test")
    write_token_data(tmp_path / "tokens", corpus, CharTokenizer.train("abc"))
    assert text_tokens(str(tmp_path / "tokens"), CharTokenizer.train("abc")).tolist() == [3, 2, 0, 1]
    with pytest.raises(UserError, match="of tokenizer .* the model knows"):
        text_tokens(str(tmp_path / "tokens"), ByteTokenizer())


def test_the_score_of_a_text_is_torchs_cross_entropy_with_an_interval_around_it(tmp_path, model):
    tok = ByteTokenizer()
    for i in range(249):  # of a folder the last files are held out
        (tmp_path / f"{i:03d}.txt").write_text(f"Number {i}: {'ab' * (i % 3)}", encoding="utf-8")
    tokens = torch.tensor(text_tokens(str(tmp_path), tok).astype(np.int64))
    model.eval()
    nats = []
    for at in range(0, len(tokens) - 1, 16):
        x, y = tokens[at : at + 16], tokens[at + 1 : at + 17]
        logits = model(x[None, : len(y)])[0][0, :, :257].double()
        nats.append(F.cross_entropy(logits, y, reduction="none"))
    nats = torch.cat(nats)
    counted = (tokens[1:] != tok.eot).sum().item()
    result = evaluate_text(model, tok, str(tmp_path), batch_size=3)
    assert result["tokens"] == len(nats) and result["bytes"] == counted
    assert result["loss"] == pytest.approx(nats.mean().item(), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats.mean().item()), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats.sum().item() / counted / math.log(2), rel=1e-5)
    assert result["over"] == "documents" and result["groups"] >= 5
    for name in ("loss", "perplexity", "bits_per_byte"):
        low, high = result[f"{name}_95"]
        assert low < result[name] < high
    short = evaluate_text(model, tok, str(tmp_path), max_tokens=48)
    assert 32 < short["tokens"] <= 48 and short["over"] == "runs of rows"  # three rows, the last one shorter


def test_a_result_replaces_the_earlier_answer_to_the_same_question_and_no_other(tmp_path):
    first, second = (tmp_path / "run/checkpoints" / f"step_{n}" for n in (1, 2))
    for folder in (first, second):
        folder.mkdir(parents=True)
    path = save_result(first, dict(task="text", data="a", loss=float("nan")))
    assert json.loads(path.read_text())[0]["loss"] is None  # other readers know no NaN
    save_result(first, dict(task="text", data="a", loss=3.0))
    save_result(first, dict(task="text", data="b", loss=4.0))
    save_result(second, dict(task="text", data="a", loss=2.0))
    save_result(first, dict(task="text", data="a", loss=1.0))
    assert path == tmp_path / "run/eval.json"
    found = [(r["checkpoint"], r["data"], r["loss"]) for r in json.loads(path.read_text())]
    assert found == [("step_1", "b", 4.0), ("step_2", "a", 2.0), ("step_1", "a", 1.0)]
    alone = tmp_path / "copied"
    alone.mkdir()
    assert save_result(alone, dict(task="text", data="a", loss=1.0)) == alone / "eval.json"


def test_the_line_of_a_result_shows_figures_and_intervals():
    result = dict(data="x", loss=1.23456, bits_per_byte=0.5, perplexity=3.437, tokens=12345)
    result |= dict(groups=7, over="documents", loss_95=[1.2, 1.3])
    assert text_line(result) == (
        "x: loss 1.2346 [1.2000, 1.3000], 0.5000 bits per byte, perplexity 3.44; "
        "12,345 tokens, 95 % over 7 documents"
    )
    del result["loss_95"]  # of a single row
    assert text_line(result | dict(groups=1)).endswith("; 12,345 tokens, no interval")


def test_a_model_whose_training_diverged_gets_no_score_on_a_text(tmp_path, model):
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite: its training diverged"):
        evaluate_text(model, ByteTokenizer(), str(tmp_path / "a.txt"))


def asked_of_two(world, folder):
    "What this rank is told where rank 1 was started differently; None where it is not."
    told = {}

    def ask(what, first, second=None):
        options = Options(**{"run": f"{folder}/run", "data": f"{folder}/val.txt"} | first)
        if world.rank and second:
            options = replace(options, **second)
        try:
            told[what] = evaluate_options(options, world)
        except UserError as error:
            told[what] = error.agreed, str(error)

    ask("nothing", {})
    ask("settings", {}, dict(max_tokens=64, batch_size=3))
    ask("model", {}, dict(run=f"{folder}/other"))
    ask("text", {}, dict(data=f"{folder}/other.txt"))
    ask("lacks it", {}, dict(data=f"{folder}/lacking.txt"))
    ask("diverged", dict(run=f"{folder}/nan"))
    swag = dict(task="hellaswag", data=f"{folder}/h.jsonl")
    ask("task", swag)
    ask("questions", swag, dict(data=f"{folder}/g.jsonl"))
    return told


def test_two_processes_score_as_one_and_refuse_what_is_not_the_same_on_both(run, model, tmp_path):
    for name, change in (("other", 1.5), ("nan", 3e38)):
        torch.nn.init.constant_(model.ln_f.weight, change)
        save_checkpoint(tmp_path / name / "checkpoints/step_7", model, ByteTokenizer())
    (tmp_path / "other.txt").write_text(TEXT.upper(), encoding="utf-8")
    for name, n in (("h", 8), ("g", 7)):
        rows = [json.dumps(SWAG | {"label": i % 4}) + "\n" for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    first, second = run_processes(asked_of_two, 2, str(tmp_path), timeout=LAST_RESORT)
    assert first == second and first.pop("nothing") is first.pop("task") is None
    for what, sentence in {
        "settings": "not the same on all ranks: batch_size = 3 on rank 1, None on rank 0; max_tokens = 64",
        "model": "not the same on all ranks: weights = ",
        "text": "not the same on all ranks: data = ",
        "lacks it": f"data: {tmp_path}/lacking.txt is neither",
        "diverged": "the model's loss is not finite",
        "questions": "not the same on all ranks: data = ",
    }.items():
        agreed, told = first.pop(what)
        assert agreed and told.startswith(sentence)
    assert not first
    names = ("loss", "bits_per_byte", "tokens", "acc", "acc_norm", "n")

    def results():
        return [{k: r[k] for k in names if k in r} for r in json.loads((run / "eval.json").read_text())]

    two = results()
    assert call(run, "--data", tmp_path / "val.txt") == 0
    assert call(run, "--task", "hellaswag", "--data", tmp_path / "h.jsonl") == 0
    for ours, alone in zip(two, results(), strict=True):
        assert len(ours) == 3 and ours == pytest.approx(alone, rel=1e-6)


ONE_DIES = """
import os
import signal
import sys
import tinygpt.evaluate.__main__ as command

read = command.open_asked

def killed(*args):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP if sys.argv[-1] == "stops" else signal.SIGKILL)
    return read(*args)

watchdog = command.Watchdog
command.Watchdog = lambda world, patience: watchdog(world, patience=3)
command.open_asked = killed
sys.exit(command.main(sys.argv[1:-1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("how", ["dies", "stops"])
def test_a_rank_that_is_gone_ends_the_other_which_names_it(run, tmp_path, how):
    "In a collective it would wait for ten minutes."
    argv = [sys.executable, "-c", ONE_DIES, run, "--data", tmp_path / "val.txt", "--device", "cpu"]
    status, said = first_of_two([*argv, how])
    assert said.strip().startswith("rank 1 (") and " is gone: " in said and said.count("\n") == 2, said
    assert status == 1
