"""`python -m tinygpt.chat`: answers lines, survives Ctrl-C, serves, and says first what is wrong."""

import io
import socket
import sys

import pytest
import torch

import tinygpt.chat.__main__ as module
from tinygpt.chat.__main__ import main, talk
from tinygpt.chat.turns import Conversation
from tinygpt.checkpoint import save_checkpoint
from tinygpt.finetune.template import chat_tokenizer
from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import ByteTokenizer

TOK = chat_tokenizer(ByteTokenizer())
SMALL = dict(block_size=64, n_layer=1, n_head=2, n_embd=16)


def build(n_vocab=TOK.n_vocab):
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=n_vocab, **SMALL))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.2)
    return model


@pytest.fixture
def run(tmp_path):
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", build(), TOK)
    return tmp_path / "run"


def call(monkeypatch, *words, typed=""):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main([*map(str, words), "--device", "cpu"])


def test_each_line_gets_an_answer_and_a_seed_repeats_them(run, monkeypatch, capsys):
    flags = ("--seed", 1, "--max-new-tokens", 6)
    assert call(monkeypatch, run, *flags, typed="Hello\n\nSo?\n") == 0
    first = capsys.readouterr()
    model, expected = build(), []
    conversation = Conversation(model, TOK, max_new_tokens=6, seed=1)
    for text in ("Hello", "So?"):
        expected.append("".join(conversation.ask(text)))
    assert first.out == "".join(f"{text}\n" for text in expected)
    call(monkeypatch, run, *flags, typed="Hello\nSo?")  # a last line without an end
    assert capsys.readouterr().out == first.out


def test_a_line_that_is_no_text_is_a_note_and_the_chat_goes_on(run, monkeypatch, capsys):
    piped = io.TextIOWrapper(io.BytesIO(b"Hello\n\xff\xfe\nSo?\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert main([str(run), "--device", "cpu", "--seed", "1", "--max-new-tokens", "6"]) == 0
    said = capsys.readouterr()
    assert said.err.count("a byte that is not one") == 1
    call(monkeypatch, run, "--seed", 1, "--max-new-tokens", 6, typed="Hello\nSo?\n")
    assert capsys.readouterr().out == said.out


def test_without_a_standard_input_a_talk_is_one_sentence(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # as after <&- in a shell
    assert main([str(run), "--device", "cpu"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_and_not_the_chat(capsys):
    conversation = Conversation(build(), TOK, max_new_tokens=20, seed=0)
    conversation.ends = set()
    steps = conversation.steps

    def interrupted(row, n):
        for i, r in enumerate(steps(row, n)):
            yield r
            if i == 2 and not conversation.exchanges:
                raise KeyboardInterrupt

    conversation.steps = interrupted
    talk(conversation, ["one", "two"])
    assert capsys.readouterr().out.count("…") >= 1
    assert len(conversation.exchanges) == 2 and len(conversation.exchanges[0]) == 3 + 3 + 3 + 1


def test_what_is_forgotten_is_told(run, monkeypatch, capsys):
    call(
        monkeypatch,
        run,
        "--seed",
        0,
        "--max-new-tokens",
        16,
        typed="question one\n" * 5 + "long " * 20 + "\n",
    )
    err = capsys.readouterr().err
    assert "note: the context is full" in err and "forgotten" in err
    assert "shorten the message" in err  # and the chat goes on: the status was 0


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--top-p 7", "top_p = 7"),
        ("--max-new-tokens 0", "max_new_tokens = 0"),
        ("--serve --port 70000", "port = 70000"),
        ("--serve --batch-size 0", "batch_size = 0"),
        ("--serve --system Hi --top-k 3", "--serve does not follow --system, --top-k: leave that out"),
        ("--tmperature 1", "did you mean --temperature?"),
        ("--device tpu", "tpu"),
    ],
)
def test_a_mistake_is_one_sentence_and_2(run, monkeypatch, capsys, flags, named):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(module, "serve", lambda *_: pytest.fail("it was served"))
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert main([str(run), *flags.split(), *device]) == 2
    out, err = capsys.readouterr()
    assert out == "" and named in err and len(err.strip().split("\n")) == 1


def test_a_base_run_is_told_with_the_command_that_makes_a_chat_of_it(tmp_path, monkeypatch, capsys):
    save_checkpoint(tmp_path / "base", build(257), ByteTokenizer())
    for flags in ([], ["--serve"]):
        pytest.importorskip("starlette") if flags else None
        assert call(monkeypatch, tmp_path / "base", *flags, typed="Hello\n") == 2
        err = capsys.readouterr().err
        assert "base model" in err and f"python -m tinygpt.finetune {tmp_path / 'base'}" in err


def test_without_the_servers_libraries_the_extra_is_named(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert call(monkeypatch, run, "--serve") == 2
    assert 'pip install "tinygpt[chat]"' in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(run, monkeypatch, capsys):
    pytest.importorskip("uvicorn"), pytest.importorskip("starlette")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(module, "serve", lambda *_: pytest.fail("it was served"))
        assert call(monkeypatch, run, "--serve", "--port", taken.getsockname()[1]) == 2
    assert "another --host or --port" in capsys.readouterr().err


def test_serve_gets_the_model_under_the_runs_name(run, monkeypatch):
    pytest.importorskip("uvicorn"), pytest.importorskip("starlette")
    got = []
    monkeypatch.setattr(module, "serve", lambda *given: got.append((given, given[3].getsockname())))
    assert call(monkeypatch, run, "--serve", "--port", 0, "--batch-size", 3) == 0
    (model, tokenizer, name, _, batch_size), (host, port) = got[0]
    assert (name, batch_size, host) == ("run", 3, "127.0.0.1") and port > 0
    assert tokenizer.fingerprint == TOK.fingerprint and model.config.vocab_size == TOK.n_vocab
