"""`python -m tinygpt.generate`: streams one text, writes several in a batch, and says what is wrong."""

import pytest
import torch

import tinygpt.generate.__main__ as module
from tinygpt.checkpoint import save_checkpoint
from tinygpt.generate.__main__ import main
from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer
from tinygpt.tokenizer_special import SpecialTokenizer

SMALL = dict(block_size=16, n_layer=2, n_head=4, n_embd=32)


def build(vocab_size=257):
    torch.manual_seed(0)
    model = GPT(GPTConfig.gpt2(vocab_size=vocab_size, **SMALL))
    for name, p in model.named_parameters():
        # norms that favor a direction would repeat one token for ever
        if p.dim() > 1 or ("bias" in name and name != "ln_f.bias"):
            torch.nn.init.normal_(p, std=0.4)
    return model


@pytest.fixture
def run(tmp_path):
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", build(), ByteTokenizer())
    return tmp_path / "run"


def call(*words):
    return main([*map(str, words), "--device", "cpu"])


def test_the_command_writes_text_and_a_seed_repeats_it(run, capsys):
    assert call(run, "--prompt", "Hello", "--max-new-tokens", 8, "--seed", 1) == 0
    first = capsys.readouterr().out
    assert first.startswith("Hello")
    call(run, "--prompt", "Hello", "--max-new-tokens", 8, "--seed", 1)
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--top-p 7", "top_p = 7"),
        ("--temperature -1", "temperature = -1"),
        ("--device tpu", "tpu"),
        ("--num-samples 0", "num_samples = 0"),
        ("--draft-tokens 0", "draft_tokens = 0"),
        ("--forced four --max-new-tokens 3", "forced has 4 tokens, max_new_tokens = 3"),
        ("--max-new-tokens -3", "max_new_tokens = -3"),
        ("--best", "validation loss"),
        ("--tmperature 1", "--tmperature is not a setting: did you mean --temperature?"),
    ],
)
def test_a_mistake_is_one_sentence_and_2(run, capsys, flags, named):
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert main([str(run), *flags.split(), *device]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err and out == ""


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("words, named", [([], "RUN"), (["run", "--top-k", "many"], "--top-k")])
def test_a_lacking_run_and_a_value_of_the_wrong_type_exit_with_2(capsys, words, named):
    with pytest.raises(SystemExit) as ended:
        main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and named in out + err


def test_several_prompts_and_samples_are_written_in_one_batch_as_they_would_be_alone(run, capsys):
    how = [run, "--max-new-tokens", 8]
    prompts = ["--prompt", "Hello", "--prompt", "A longer one"]
    assert call(*how, *prompts, "--num-samples", 2, "--seed", 3) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split("\n" + "-" * 40 + "\n")
    assert len(texts) == 4 and texts[0] != texts[1]
    for i, (prompt, text) in enumerate(zip(["Hello", "Hello", "A longer one", "A longer one"], texts)):
        call(*how, "--prompt", prompt, "--seed", 3 + i)
        assert capsys.readouterr().out == text + "\n"


def test_without_a_prompt_and_with_an_empty_one_the_model_begins_on_its_own(run, capsys):
    call(run, "--max-new-tokens", 8, "--seed", 1)
    text = capsys.readouterr().out
    call(run, "--prompt", "", "--max-new-tokens", 8, "--seed", 1)
    assert capsys.readouterr().out == text != "\n"


def test_a_prompt_longer_than_the_context_says_what_the_model_sees(run, capsys):
    assert call(run, "--prompt", "x" * 30, "--max-new-tokens", 4) == 0
    out, err = capsys.readouterr()
    assert out.startswith("x" * 30)
    assert err == "note: the prompt has 31 tokens, the context 16: the model sees its last 15\n"


def test_best_takes_the_checkpoint_with_the_lowest_validation_loss(run, capsys):
    folder = run / "checkpoints/step_000002"
    save_checkpoint(folder, build(), ByteTokenizer(), state={"val_loss": 1.0})
    save_checkpoint(run / "checkpoints/step_000003", build(), ByteTokenizer(), state={"val_loss": 2.0})
    assert module.open_model(run, "cpu", best=True)[2] == folder
    assert call(run, "--best", "--max-new-tokens", 4) == 0
    for path in run.glob("checkpoints/step_000002/model.*"):
        path.write_bytes(b"damaged")
    call(run, "--best", "--max-new-tokens", 4)
    assert "step_000002" in capsys.readouterr().out  # named, and passed over


def test_a_prompt_with_characters_the_tokenizer_does_not_know_is_one_sentence(tmp_path, capsys):
    tokenizer = CharTokenizer.train("abc")
    save_checkpoint(tmp_path / "c", build(tokenizer.n_vocab), tokenizer)
    assert call(tmp_path / "c", "--prompt", "abx") == 2
    assert "x" in capsys.readouterr().err


@pytest.mark.parametrize("chat", [False, True])
def test_a_stop_string_may_hold_characters_that_the_tokenizer_does_not_know(tmp_path, capsys, chat):
    tokenizer = CharTokenizer.train("abc")
    if chat:
        tokenizer = SpecialTokenizer(tokenizer, ["<|mark|>"], ends=["<|mark|>"])
    save_checkpoint(tmp_path / "c", build(tokenizer.n_vocab), tokenizer)
    how = [tmp_path / "c", "--prompt", "ab", "--max-new-tokens", 4, "--seed", 1, "--stop", "###"]
    assert call(*how) == 0 == call(*how, "--special")
    first, again = capsys.readouterr().out.splitlines()
    assert first == again and first.startswith("ab")
    for name in ["<|endoftext|>", *["<|mark|>"] * chat]:  # not a character of it is known
        assert call(*how, "--stop", name) == 0
        assert "special tokens in prompt or stop are read as text" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_130(run, capsys, monkeypatch):
    def interrupted(*_):
        yield None, "piece"
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "show_rows", interrupted)
    assert call(run, "--prompt", "Hello") == 130
    assert capsys.readouterr().out.startswith("Hellopiece")


def test_a_text_ends_before_a_stop_string_alone_and_in_a_batch(run, capsys):
    how = [run, "--max-new-tokens", 8, "--seed", 1, "--prompt", "Hello"]
    call(*how)
    text = capsys.readouterr().out.removeprefix("Hello").removesuffix("\n")
    stop = text[3]
    call(*how, "--stop", stop, "--stop", "never this")
    assert capsys.readouterr().out == f"Hello{text.split(stop)[0]}\n"
    call(*how, "--stop", stop, "--num-samples", 2)
    assert capsys.readouterr().out.startswith(f"Hello{text.split(stop)[0]}\n----")


def test_a_text_begins_with_what_is_forced(run, capsys):
    call(run, "--max-new-tokens", 8, "--prompt", "Is it? ", "--forced", "No", "--num-samples", 2)
    first, second = capsys.readouterr().out.removesuffix("\n").split("\n" + "-" * 40 + "\n")
    assert first.startswith("Is it? No") and second.startswith("Is it? No") and first != second


def test_special_tokens_in_a_prompt_are_text_with_a_note_and_tokens_with_a_flag(run, capsys, monkeypatch):
    begun, real = [], module.decode_rows

    def noting(model, rows, *how):
        begun.append(rows[0].prompt)
        return real(model, rows, *how)

    monkeypatch.setattr(module, "decode_rows", noting)
    how = [run, "--max-new-tokens", 2, "--prompt", "a<|endoftext|>"]
    call(*how)
    note = "note: special tokens in prompt or stop are read as text: --special reads them as such\n"
    assert capsys.readouterr().err == note and begun[0] == [256, *b"a<|endoftext|>"]
    call(*how, "--special")
    assert capsys.readouterr().err == "" and begun[1] == [256, 97, 256]
    call(run, "--max-new-tokens", 2, "--prompt", "a")
    assert capsys.readouterr().err == ""
    call(run, "--max-new-tokens", 2, "--prompt", "a", "--stop", "<|endoftext|>")
    assert capsys.readouterr().err == note


def test_a_special_token_as_a_stop_string_ends_a_text_though_it_has_no_bytes(tmp_path, capsys, monkeypatch):
    tokenizer = SpecialTokenizer(ByteTokenizer(), ["<|mark|>"], ends=[])
    model = build(tokenizer.n_vocab)
    with torch.no_grad():  # whatever comes before, the mark is the likeliest token
        model.ln_f.bias.copy_(10 * model.wte.weight[tokenizer.special["<|mark|>"]])
    save_checkpoint(tmp_path / "m", model, tokenizer)
    how = [tmp_path / "m", "--prompt", "a", "--special", "--temperature", 0, "--max-new-tokens", 4]
    finishes, real = [], module.decode_rows

    def noting(*args):
        for row in real(*args):
            finishes.append(row.finish)
            yield row

    monkeypatch.setattr(module, "decode_rows", noting)
    call(*how)
    assert finishes == ["", "", "", "length"]  # the mark is written again and again, and nobody sees it
    finishes.clear()
    call(*how, "--stop", "<|mark|>")
    assert finishes == ["eot"] and capsys.readouterr().out == "a\na\n"


def test_a_draft_changes_no_greedy_text_and_a_seed_repeats_the_drawn_one(run, tmp_path, capsys):
    save_checkpoint(tmp_path / "draft", build(), ByteTokenizer())
    how = [run, "--max-new-tokens", 12, "--prompt", "Hello"]
    call(*how, "--temperature", 0)
    plain = capsys.readouterr().out
    for more in ([], ["--draft-tokens", 1], ["--num-samples", 2]):
        call(*how, "--temperature", 0, "--draft", tmp_path / "draft", *more)
        assert capsys.readouterr().out.startswith(plain)
    call(*how, "--seed", 1, "--draft", tmp_path / "draft")
    drawn = capsys.readouterr().out
    call(*how, "--seed", 1, "--draft", tmp_path / "draft")
    assert capsys.readouterr().out == drawn


def test_a_draft_with_other_tokens_is_refused(run, tmp_path, capsys):
    "Also one with as many of them."
    tokenizer = CharTokenizer.train("".join(map(chr, range(32, 288))))
    save_checkpoint(tmp_path / "c", build(tokenizer.n_vocab), tokenizer)
    assert tokenizer.n_vocab == 257
    assert call(run, "--draft", tmp_path / "c") == 2
    out, err = capsys.readouterr()
    assert out == "" and "has another tokenizer than" in err and err.count("\n") == 1
