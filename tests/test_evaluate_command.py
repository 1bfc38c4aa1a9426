"""`python -m tinygpt.evaluate`: a text or a task, its line, its record, its complaints."""

import json

import numpy as np
import pytest
import torch

from tinygpt.checkpoint import save_checkpoint
from tinygpt.evaluate.__main__ import main
from tinygpt.evaluate.score import evaluate
from tinygpt.evaluate.tasks import evaluate_task, task_line
from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import ByteTokenizer

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
