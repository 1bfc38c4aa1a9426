"""`python -m tinygpt.export`: a run, or a task for the harness."""

import importlib
import json

import pytest
import torch

from tinygpt.checkpoint import save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.export.__main__ import main
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def run(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2(vocab_size=257, block_size=24, n_layer=2, n_head=4, n_embd=32))
    save_checkpoint(tmp_path / "run/checkpoints/step_3", model, ByteTokenizer())
    return tmp_path / "run"


def call(*words):
    return main([str(word) for word in words])


def test_the_command_exports_a_run(run, tmp_path, capsys):
    assert call(run, tmp_path / "out") == 0
    assert "GPT2LMHeadModel" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == FILES
    assert call(run, tmp_path / "out") == 2
    assert "exists" in capsys.readouterr().err
    assert call(tmp_path / "no", tmp_path / "out2") == 2
    assert "does not exist" in capsys.readouterr().err
    assert call(run) == 2
    assert "run is missing" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "words",
    ["export a b", "data prepare a b", "chat a", "generate a", "measure a", "whole --data a", "learn reset"],
)
def test_of_several_processes_all_are_told_that_it_is_the_work_of_one(words, rank, monkeypatch):
    name, *argv = words.split()
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    main = importlib.import_module(f"tinygpt.{name}.__main__").main.__wrapped__
    for run_id, speaks in ((None, True), ("1", None)):  # under torchrun rank 0 speaks for all
        if run_id:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        told = f"tinygpt.{name} is the work of one process: give .* without torchrun, and without RANK"
        with pytest.raises(UserError, match=told) as refused:
            main(argv)
        assert refused.value.speaks is speaks
    for name in ("RANK", "WORLD_SIZE"):  # the remedy
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="a |does not exist|is not a setting|name one chapter"):
        main(argv)


def test_what_the_command_wrote_is_opened_here_again(tmp_path, capsys):
    torch.manual_seed(0)
    shape = dict(vocab_size=257, block_size=24, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, mlp_hidden=96)
    model = GPT(GPTConfig.llama(**shape, qk_norm=True))
    save_checkpoint(tmp_path / "run/checkpoints/step_3", model, ByteTokenizer())
    assert call(tmp_path / "run", tmp_path / "out") == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    again, tokenizer, _ = open_model(tmp_path / "out")
    assert again.config == model.config and tokenizer.n_vocab == 257
    for (name, p), (_, q) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        rows = 257 if p.shape[0] == 384 else len(p)  # the rows of padding stay here
        assert torch.equal(p[:rows], q[:rows]), name


def test_the_command_defines_a_task_for_the_harness(tmp_path, capsys):
    task = ["--harness-task", "lambada", "--data"]
    assert call(*task, tmp_path / "no.jsonl", tmp_path / "tasks") == 2
    assert "is not a file of the kinds" in capsys.readouterr().err
    (tmp_path / "words.jsonl").write_text(json.dumps({"text": "the end is near"}))
    assert call(*task, tmp_path / "words.jsonl", tmp_path / "tasks") == 0
    told = capsys.readouterr().out
    assert f"--include_path {tmp_path / 'tasks'} --tasks local_lambada" in told
    assert "add_bos_token=False" in told  # else the harness scores with our eot in front, and we without
    assert (tmp_path / "tasks/local_lambada.yaml").exists()
