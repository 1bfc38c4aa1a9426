"""Models, checkpoints and folders of others that cannot be: one sentence, status 2, nothing changed.

A checkpoint is made once; each case gets a copy with one file changed. Its hash is made to agree.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_input import assert_refused
from safetensors.torch import load_file, save_file
from test_checkpoint import Trap, hash_again

from tinygpt.checkpoint import save_checkpoint
from tinygpt.evaluate.__main__ import main as evaluate
from tinygpt.export.__main__ import main as export
from tinygpt.generate.__main__ import main as generate
from tinygpt.model import GPT, GPTConfig
from tinygpt.tokenizer import ByteTokenizer
from tinygpt.train import main as train

TEXT = "The people's government thanks the people, and the people it. " * 40
SIZES = (
    "--n-layer 1 --n-head 2 --n-embd 16 --block-size 16 --batch-size 2 --max-steps 2 --warmup-steps 1".split()
)
QUICK = "--tokenizer byte --device cpu --dtype float32 --sample-tokens 0 --no-compressors".split()
LLAMA = "--position rope --norm rmsnorm --mlp swiglu --no-qk-norm --logit-softcap 0 --no-bias".split()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A run of two steps, with one checkpoint; its export; nanoGPT's file; a text."
    place = tmp_path_factory.mktemp("made")
    (place / "text.txt").write_text(TEXT)
    where = ["--source", str(place / "text.txt"), "--out", str(place), "--name", "run", "--save-every", "0"]
    assert (
        train(
            [*where, *SIZES, *QUICK, *LLAMA, "--optimizer", "adamw", "--init", "gpt2", "--ngram-rows", "None"]
        )
        == 0
    )
    assert export([str(place / "run"), str(place / "hf")]) == 0
    nano = GPT(GPTConfig.gpt2(vocab_size=4, block_size=8, n_layer=1, n_head=2, n_embd=8))
    state = {f"transformer.{name}": t for name, t in nano.state_dict().items()}
    state["transformer.wte.weight"] = state["transformer.wte.weight"][:4].clone()
    (place / "nano").mkdir()
    args = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=True, vocab_size=4, dropout=0.0)
    torch.save({"model": state, "model_args": args}, place / "nano/ckpt.pt")
    (place / "nano/meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate("\nabc"))}))
    return place


def text_of(content):
    "What is written: bytes as they are, text as UTF-8, anything else as JSON."
    if isinstance(content, bytes):
        return content
    return content.encode() if isinstance(content, str) else json.dumps(content).encode()


def having(**more):
    "A change of a JSON file: these keys have these values."
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | more))


def lacking(*names):
    def change(path):
        held = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in held.items() if k not in names}))

    return change


def tensors(change):
    "A change of a safetensors file: `change(dict)` in place."

    def rewrite(path):
        held = load_file(path)
        change(held)
        save_file({name: t.contiguous() for name, t in held.items()}, path)

    return rewrite


def pickled(value):
    "A torch file that holds `value(what it held)`."

    def rewrite(path):
        held = torch.load(path, weights_only=True) if path.exists() else None
        torch.save(value(held), path)

    return rewrite


def damage(path: Path, how):
    if how is None:
        path.unlink()
    elif callable(how):
        how(path)
    else:
        path.write_bytes(text_of(how))


def nan(held):
    held["ln_f.weight"][0] = torch.nan


def renamed(held):
    held["somebody.else"] = held.pop("ln_f.weight")


def reshaped(held):
    held["ln_f.weight"] = torch.ones(17)


def whole_numbers(held):
    held["ln_f.weight"] = torch.ones(16, dtype=torch.int64)


def other_entry(name, value):
    "The optimizer's state with another tensor in its first entry."

    def change(held):
        held["state"][0][name] = value
        return held

    return change


HEADER = (10**15).to_bytes(8, "little")
# file of a checkpoint, what becomes of it, the word: read by all that use a model
READ = [
    ("model.json", "[]", "holds a list where a dict should be"),
    ("model.json", "", "is not JSON"),
    ("model.json", "{", "is not JSON"),
    ("model.json", b"\xff\xfe", "is not JSON"),
    ("model.json", "[" * 100_000, "is not JSON"),
    ("model.json", "null", "holds a NoneType"),
    ("model.json", {}, "does not say block_size"),
    ("model.json", lacking("n_head"), "does not say n_head"),
    ("model.json", lacking("vocab_size"), "does not say vocab_size"),
    ("model.json", having(n_layer="1"), "n_layer = '1' does not work"),
    ("model.json", having(n_layer=0), "n_layer = 0 does not work"),
    ("model.json", having(n_layer=-1), "n_layer = -1 does not work"),
    ("model.json", having(n_layer=2), "h.1.ln_1.weight is missing"),
    ("model.json", having(n_layer=10**9), "describes a model of"),
    ("model.json", having(n_embd=32), "weights of another model"),
    ("model.json", having(n_embd=15), "does not divide by n_head"),
    ("model.json", having(n_embd=10**7), "describes a model of"),
    ("model.json", having(n_head=0), "n_head = 0 does not work"),
    ("model.json", having(vocab_size=10**12), "describes a model of"),
    ("model.json", having(vocab_size=256), "says vocab_size = 256"),
    ("model.json", having(block_size=10**10), "the angles of 10,000,000,000 positions"),
    ("model.json", having(block_size=1.5), "block_size = 1.5 does not work"),
    ("model.json", having(rope_theta="x"), "rope_theta = 'x' does not work"),
    ("model.json", having(norm="batch"), "norm = 'batch' does not work"),
    ("model.json", having(bias=None), "bias = None does not work"),
    ("model.json", having(experts=8), "experts"),
    ("model.safetensors", b"", "cannot be read"),
    ("model.safetensors", b"garbage" * 9, "cannot be read"),
    ("model.safetensors", HEADER + b"{}", "cannot be read"),
    ("model.safetensors", (2).to_bytes(8, "little") + b"{}", "weights beside it hold 0"),
    ("model.safetensors", tensors(lambda held: held.clear()), "weights beside it hold 0"),
    ("model.safetensors", tensors(nan), "ln_f.weight holds numbers that are not finite"),
    ("model.safetensors", tensors(renamed), "ln_f.weight is missing; somebody.else is not part of the model"),
    ("model.safetensors", tensors(reshaped), "ln_f.weight is (17,)"),
    ("model.safetensors", tensors(whole_numbers), "ln_f.weight is (16,) torch.int64"),
    ("model.safetensors", pickled(lambda _: {"w": torch.ones(3)}), "cannot be read"),
    ("tokenizer.json", "[]", "is not a tokenizer"),
    ("tokenizer.json", "", "is not a tokenizer"),
    ("tokenizer.json", {"kind": "elvish"}, "is not a tokenizer"),
    ("tokenizer.json", {"kind": "hf", "json": "{}"}, "is not a tokenizer"),
    ("tokenizer.json", {"kind": "byte"}, "is not a tokenizer"),
    ("tokenizer.json", {"kind": "byte", "fingerprint": "0"}, "has changed since it was saved"),
    ("tokenizer.json", {"kind": "bpe", "vocab": 5, "pattern": "("}, "is not a tokenizer"),
    ("manifest.json", "[]", "has no readable manifest.json"),
    ("manifest.json", b"\xff", "has no readable manifest.json"),
    ("manifest.json", {}, "does not list model.safetensors"),
    ("manifest.json", lacking("state.json"), "does not list state.json"),
    ("manifest.json", having(**{"../x": "0"}), "lists '../x', which is not a file beside it"),
    ("manifest.json", having(**{"/etc/passwd": "0"}), "lists '/etc/passwd'"),
    ("manifest.json", having(**{"..": "0"}), ".. is missing"),
    ("manifest.json", having(**{"": "0"}), "lists ''"),
    ("manifest.json", having(**{"more": 5}), "more is missing"),
    ("manifest.json", having(**{"state.json": 5}), "state.json is damaged"),
]
COMMANDS = {
    "generate": lambda place, folder: (generate, [place, "--prompt", "a", "--device", "cpu"]),
    "evaluate": lambda place, folder: (evaluate, [place, "--data", folder / "text.txt", "--device", "cpu"]),
    "export": lambda place, folder: (export, [place, folder / "out"]),
}


def refuse(command, place, folder, word, capsys):
    main, argv = COMMANDS[command](place, folder)
    return assert_refused(main, [str(each) for each in argv], word, folder, capsys)


def label(value):
    return str(value)[:40] if isinstance(value, (str, bytes, dict)) else None


@pytest.mark.parametrize("number", range(len(READ)), ids=lambda n: f"{READ[n][0]}-{READ[n][2][:40]}")
def test_a_file_of_a_checkpoint_that_cannot_be(made, tmp_path, capsys, number):
    name, how, word = READ[number]
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.copy(made / "text.txt", tmp_path)
    [folder] = (tmp_path / "run/checkpoints").iterdir()
    damage(folder / name, how)
    if name != "manifest.json":
        hash_again(folder, name)
    for command in COMMANDS:
        refuse(command, tmp_path / "run", tmp_path, word, capsys)


RESUMED = [
    ("model.json", "[]", "holds a list"),
    ("model.json", having(n_layer=2), "n_layer = 2 there, 1 here"),
    ("model.json", having(n_layer=10**9), "n_layer = 1000000000 there, 1 here"),
    ("model.safetensors", b"", "cannot be read"),
    ("model.safetensors", b"garbage" * 9, "cannot be read"),
    ("model.safetensors", tensors(nan), "holds numbers that are not finite"),
    ("model.safetensors", tensors(renamed), "ln_f.weight is missing"),
    ("model.safetensors", tensors(reshaped), "ln_f.weight is (17,)"),
    ("model.safetensors", tensors(lambda held: held.clear()), "is missing"),
    ("optimizer.pt", None, "optimizer.pt is missing"),
    ("optimizer.pt", b"", "is damaged, or not a file that torch.save wrote"),
    ("optimizer.pt", b"garbage" * 9, "optimizer.pt"),
    ("optimizer.pt", b"PK\x03\x04" + b"0" * 50, "is damaged, or not a file that torch.save wrote"),
    ("optimizer.pt", pickled(lambda _: [1, 2]), "holds a list where a dictionary should be"),
    ("optimizer.pt", pickled(lambda _: {}), "holds no state of an optimizer"),
    ("optimizer.pt", pickled(lambda _: {"state": [], "param_groups": []}), "holds no state of an optimizer"),
    ("optimizer.pt", pickled(lambda h: h | {"state": {0: 5}}), "holds no state of an optimizer"),
    ("optimizer.pt", pickled(lambda h: h | {"param_groups": []}), "does not fit"),
    ("optimizer.pt", pickled(other_entry("exp_avg", torch.ones(3, 3))), "exp_avg of shape (3, 3)"),
    ("optimizer.pt", pickled(lambda _: Trap(Path("/nowhere"))), "holds more than tensors and numbers"),
    ("state.json", "[]", "holds a list"),
    ("state.json", "{", "is not JSON"),
    ("state.json", having(step="3"), "step is a str, not an int"),
    ("state.json", having(step=-1), "step is below 0"),
    ("state.json", having(step=None), "step is a NoneType"),
    ("state.json", having(step=True), "step is a bool"),
    ("state.json", having(step=1.5), "step is a float"),
    ("state.json", lacking("step"), "has no step"),
    ("state.json", lacking("rng"), "has no rng"),
    ("state.json", having(rng=[]), "rng is empty"),
    ("state.json", having(rng=5), "rng is an int"),
    ("state.json", having(rng=[5]), "holds no random state"),
    ("state.json", having(rng=[{}]), "holds no random state"),
    ("state.json", having(rng=[{"cpu": "!"}]), "holds no random state"),
    ("state.json", lacking("loader"), "has no loader"),
    ("state.json", having(loader=[1]), "loader is a list"),
    ("state.json", lacking("scaler"), "has no scaler"),
    ("state.json", having(scaler=2), "scaler is an int"),
    ("state.json", having(versions=[]), "versions is a list"),
]


@pytest.mark.parametrize("number", range(len(RESUMED)), ids=lambda n: f"{RESUMED[n][0]}-{RESUMED[n][2][:40]}")
def test_a_run_is_not_resumed_from_what_cannot_be(made, tmp_path, capsys, number):
    name, how, word = RESUMED[number]
    shutil.copytree(made / "run", tmp_path / "run")
    [folder] = (tmp_path / "run/checkpoints").iterdir()
    damage(folder / name, how)
    if how is not None:
        hash_again(folder, name)
    said = assert_refused(train, ["--resume", str(tmp_path / "run")], word, tmp_path, capsys)
    assert "weights_only" not in said


def index(**shards):
    return {"weight_map": shards}


CONFIG, WEIGHTS, TOKENS = "config.json", "model.safetensors", "tokenizer.json"
HF = [
    (CONFIG, None, "no config.json"),
    (CONFIG, "[]", "holds a list"),
    (CONFIG, b"\xff\xfe\x00", "is not JSON"),
    (CONFIG, having(model_type="bert"), "model_type = 'bert'"),
    (CONFIG, having(model_type=["llama"]), "is not known here"),
    (CONFIG, having(hidden_size="16"), "config.json"),
    (CONFIG, having(hidden_size=None), "holds a value that cannot be"),
    (CONFIG, having(hidden_size=[16]), "holds a value that cannot be"),
    (CONFIG, having(num_attention_heads=0), "holds a value that cannot be"),
    (CONFIG, having(num_attention_heads=-2), "n_head = -2 does not work"),
    (CONFIG, having(num_key_value_heads=0), "n_kv_head = 0 does not work"),
    (CONFIG, having(num_hidden_layers=10**9), "describes a model of"),
    (CONFIG, having(num_hidden_layers="one"), "n_layer = 'one' does not work"),
    (CONFIG, having(vocab_size=10**12), "describes a model of 128,000,000,"),
    (CONFIG, having(vocab_size=0), "vocab_size = 0 does not work"),
    (CONFIG, having(max_position_embeddings=10**12), "the angles of 1,000,000,000,000 positions"),
    (CONFIG, having(max_position_embeddings=None), "block_size = None does not work"),
    (CONFIG, having(intermediate_size=10**9), "describes a model of"),
    (CONFIG, having(rope_parameters=[5]), "holds a value that cannot be"),
    (CONFIG, having(rope_parameters={"rope_theta": "x"}), "holds a value that cannot be"),
    (CONFIG, having(rms_norm_eps="small"), "norm_eps = 'small' does not work"),
    (CONFIG, having(tie_word_embeddings="yes"), "tie_weights = 'yes' does not work"),
    (CONFIG, having(eos_token_id=10**9), "not all below 257"),
    (WEIGHTS, None, "holds no model.safetensors"),
    (WEIGHTS, b"", "cannot be read"),
    (WEIGHTS, b"garbage" * 9, "cannot be read"),
    (WEIGHTS, tensors(lambda held: held.clear()), "weights beside it hold 0"),
    (WEIGHTS, tensors(lambda h: h["model.norm.weight"].fill_(torch.inf)), "numbers that are not finite"),
    (WEIGHTS, tensors(lambda h: h.update(extra=torch.ones(2))), "extra left over"),
    (WEIGHTS, tensors(lambda h: h.update({"model.norm.weight": torch.ones(9)})), "of shape (9,)"),
    (
        WEIGHTS,
        tensors(lambda h: h.update({"model.norm.weight": torch.ones(16).int()})),
        "not a tensor of floats",
    ),
    ("model.safetensors.index.json", "[]", "holds a list"),
    ("model.safetensors.index.json", {}, "has no weight_map"),
    ("model.safetensors.index.json", {"weight_map": ["a"]}, "has no weight_map"),
    ("model.safetensors.index.json", index(a=5), "has no weight_map"),
    ("model.safetensors.index.json", index(a="../x.safetensors"), "which is not beside it"),
    ("model.safetensors.index.json", index(a="/etc/passwd"), "which is not beside it"),
    ("model.safetensors.index.json", index(a=".."), "has no weight_map"),
    ("model.safetensors.index.json", index(a="gone.safetensors"), "cannot be read"),
    ("pytorch_model.bin", b"", "is damaged, or not a file that torch.save wrote"),
    ("pytorch_model.bin", b"garbage" * 9, "pytorch_model.bin"),
    ("pytorch_model.bin", pickled(lambda _: [torch.ones(2)]), "holds a list where a dictionary should be"),
    ("pytorch_model.bin", pickled(lambda _: {"a": 5}), "a is not a tensor of floats but int"),
    ("pytorch_model.bin", pickled(lambda _: {}), "weights beside it hold 0"),
    ("pytorch_model.bin", pickled(lambda _: {"a": Trap(Path("/nowhere"))}), "more than tensors and numbers"),
    (TOKENS, None, "holds no tokenizer.json"),
    (TOKENS, "[]", "holds a list"),
    (TOKENS, "{}", "tokenizer.json cannot be read"),
    (TOKENS, having(model={"type": "Elvish"}), "tokenizer.json cannot be read"),
    (TOKENS, having(decoder=None, added_tokens=[{"id": 1}]), "tokenizer.json cannot be read"),
    ("tokenizer_config.json", "[]", "holds a list"),
    ("generation_config.json", "{", "is not JSON"),
    ("generation_config.json", having(eos_token_id=[-1]), "not all below 257"),
]


@pytest.mark.parametrize("number", range(len(HF)), ids=lambda n: f"{HF[n][0]}-{HF[n][2][:40]}")
def test_a_folder_of_others_that_cannot_be(made, tmp_path, capsys, number):
    pytest.importorskip("tokenizers")
    name, how, word = HF[number]
    shutil.copytree(made / "hf", tmp_path / "hf")
    shutil.copy(made / "text.txt", tmp_path)
    if name.endswith((".index.json", ".bin")):
        (tmp_path / "hf/model.safetensors").unlink()
    damage(tmp_path / "hf" / name, how)
    for command in COMMANDS:
        said = refuse(command, tmp_path / "hf", tmp_path, word, capsys)
        assert "weights_only" not in said
    argv = [
        "--init-from",
        tmp_path / "hf",
        "--source",
        tmp_path / "text.txt",
        "--out",
        tmp_path,
        "--name",
        "x",
    ]
    word = "name its tokenizer with --tokenizer" if "no tokenizer.json" in word else word
    assert_refused(train, [*map(str, argv), *SIZES, "--device", "cpu"], word, tmp_path, capsys)


def other(**more):
    return pickled(lambda held: held | more)


def args(**more):
    return pickled(lambda held: held | {"model_args": held["model_args"] | more})


NANO = [
    ("ckpt.pt", b"", "is damaged, or not a file that torch.save wrote"),
    ("ckpt.pt", pickled(lambda _: []), "holds a list"),
    ("ckpt.pt", pickled(lambda _: {}), "has no model and model_args"),
    ("ckpt.pt", pickled(lambda _: Trap(Path("/nowhere"))), "more than tensors and numbers"),
    ("ckpt.pt", other(model=[1]), "has no model and model_args"),
    ("ckpt.pt", other(model={"a": 1}), "not a tensor of floats"),
    ("ckpt.pt", other(model={"a": torch.ones(9999)}), "transformer.wte.weight missing"),
    ("ckpt.pt", args(n_layer="1"), "n_layer = '1' does not work"),
    ("ckpt.pt", args(n_layer=10**8), "describes a model of"),
    ("ckpt.pt", args(n_head=0), "n_head = 0 does not work"),
    ("ckpt.pt", args(vocab_size=3), "has 3 ids, the tokenizer 4"),
    ("meta.pkl", b"garbage", "is not nanoGPT's"),
    ("meta.pkl", None, "put the meta.pkl of its data beside it"),
    ("meta.pkl", pickle.dumps([]), "is not nanoGPT's"),
    ("meta.pkl", pickle.dumps({"itos": {0: Path("a")}}), "is not nanoGPT's"),
]


@pytest.mark.parametrize("number", range(len(NANO)), ids=lambda n: f"{NANO[n][0]}-{NANO[n][2][:40]}")
def test_a_file_of_nanogpts_that_cannot_be(made, tmp_path, capsys, number):
    name, how, word = NANO[number]
    shutil.copytree(made / "nano", tmp_path / "nano")
    damage(tmp_path / "nano" / name, how)
    refuse("generate", tmp_path / "nano", tmp_path, word, capsys)
    refuse("export", tmp_path / "nano/ckpt.pt", tmp_path, word, capsys)


# what is asked of a sound model

GENERATE = [
    ("--prompt \ud800", "half of a surrogate pair"),
    ("--temperature nan", "temperature = nan"),
    ("--temperature inf", "temperature = inf"),
    ("--top-k -1", "top_k = -1"),
    ("--top-p 0", "top_p = 0"),
    ("--top-p nan", "top_p = nan"),
    ("--max-new-tokens 0", "max_new_tokens = 0"),
    ("--num-samples -1", "num_samples = -1"),
    ("--stop ", "stop = ''"),
    ("--stop . --stop ", "stop = ''"),
    ("--stop", "--stop"),
    ("--forced \ud800", "half of a surrogate pair"),
    ("--forced 22222 --max-new-tokens 4", "forced has 5 tokens, max_new_tokens = 4"),
    ("--draft nowhere/at/all", "nowhere/at/all does not exist"),
    ("--draft-tokens 0", "draft_tokens = 0"),
    ("--draft-tokens many", "--draft-tokens"),
    ("--special yes", "yes"),
    ("--seed x", "seed"),
    ("--seed -99999999999999999999", "seed = -99999999999999999999"),
    ("--seed 99999999999999999999", "seed = 99999999999999999999"),
    ("--device tpu", "tpu"),
    ("--best True", "True"),
]


@pytest.mark.parametrize("flags, word", GENERATE)
def test_generate(made, capsys, flags, word):
    assert_refused(generate, [str(made / "run"), *flags.split(" ")], word, made, capsys)


def test_generate_with_a_draft_of_another_tokenizer(made, capsys):
    argv = [str(made / "run"), "--draft", str(made / "nano"), "--device", "cpu"]
    assert_refused(generate, argv, "has another tokenizer than", made, capsys)


SWAG = {"activity_label": "a", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e", "f", "g"], "label": 1}
CLOZE = {f"InputSentence{i}": "a" for i in range(1, 5)} | {"AnswerRightEnding": 1}
CLOZE |= {"RandomFifthSentenceQuiz1": "b", "RandomFifthSentenceQuiz2": "c"}
TASKS = [
    ("hellaswag", SWAG | {"endings": [1, 2, 3, 4]}, "not a list of texts"),
    ("hellaswag", SWAG | {"endings": "[1, 2]"}, "not a list of texts"),
    ("hellaswag", SWAG | {"endings": 5}, "not a list of texts"),
    ("hellaswag", SWAG | {"endings": "{"}, "row 1 cannot be read"),
    ("hellaswag", SWAG | {"endings": None}, "not a list of texts"),
    ("hellaswag", SWAG | {"endings": ["a", "b"]}, "2 options"),
    ("hellaswag", SWAG | {"endings": ["a", "", "c", "d"]}, "an empty option"),
    ("hellaswag", SWAG | {"ctx_a": None}, "ctx_a is None, not text"),
    ("hellaswag", SWAG | {"ctx_b": 5}, "ctx_b is 5, not text"),
    ("hellaswag", SWAG | {"activity_label": ["a"]}, "activity_label is ['a'], not text"),
    ("hellaswag", {"ctx": None, "endings": ["a"] * 4, "label": 0}, "ctx is None, not text"),
    ("hellaswag", SWAG | {"label": None}, "label is None, not a whole number"),
    ("hellaswag", SWAG | {"label": 1.7}, "label is 1.7, not a whole number"),
    ("hellaswag", SWAG | {"label": True}, "label is True, not a whole number"),
    ("hellaswag", SWAG | {"label": float("inf")}, "label is inf, not a whole number"),
    ("hellaswag", SWAG | {"label": ""}, "label is '', not a whole number"),
    ("hellaswag", SWAG | {"label": 4}, "label 4"),
    ("hellaswag", [1, 2], "row 1 cannot be read"),
    ("hellaswag", 5, "row 1 cannot be read"),
    ("hellaswag", None, "row 1 cannot be read"),
    ("hellaswag", "text", "cannot be read"),
    ("storycloze", CLOZE | {"InputSentence2": None}, "InputSentence2 is None, not text"),
    ("storycloze", CLOZE | {"AnswerRightEnding": 3}, "label 2"),
    ("storycloze", CLOZE | {"AnswerRightEnding": "one"}, "not a whole number"),
    ("lambada", {"text": None}, "text is None, not text"),
    ("lambada", {"text": "word"}, "no word before its last one"),
    ("lambada", {"words": "a b"}, "has no column text"),
]


@pytest.mark.parametrize("task, row, word", TASKS)
def test_a_row_of_a_task(made, tmp_path, capsys, task, row, word):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    argv = [made / "run", "--task", task, "--data", path, "--device", "cpu"]
    assert_refused(evaluate, [*map(str, argv)], word, tmp_path, capsys)


FILES = [
    ("rows.jsonl", b"", "has no rows"),
    ("rows.jsonl", b"{", "is not json"),
    ("rows.jsonl", b"\xff\xfe{\x00", "cannot be read"),
    ("rows.csv", b"", "has no rows"),
    ("rows.csv", b"a,b\n1,2\n", "has no column text"),
    ("rows.csv", b"\xff\xfe\n", "cannot be read"),
    ("rows.csv", b"text\n" + b"x" * 200_000 + b"\n", "cannot be read"),
    ("rows.jsonl.gz", b"no gzip", "cannot be read"),
    ("rows.jsonl.gz", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff", "cannot be read"),
    ("rows.jsonl.zst", b"no zst", "cannot be read"),
    ("rows.parquet", b"PAR1 no parquet PAR1", "cannot be read"),
    ("rows.xlsx", b"PK", "rows.xlsx"),
]


@pytest.mark.parametrize("name, content, word", FILES)
def test_a_file_of_a_task(made, tmp_path, capsys, name, content, word):
    (tmp_path / name).write_bytes(content)
    argv = [made / "run", "--task", "lambada", "--data", tmp_path / name, "--device", "cpu"]
    assert_refused(evaluate, [*map(str, argv)], word, tmp_path, capsys)


TEXTS = [
    ("empty.txt", b"", "empty"),
    ("latin.txt", "caf\u00e9".encode("latin-1"), "is not UTF-8"),
    ("rows.parquet", b"PAR1", "cannot be read"),
    ("rows.jsonl", b'{"a": 1}', "has no field 'text' but a: name"),
    ("rows.jsonl", b"{}", "has no field 'text': name"),
    ("folder", None, "holds no .txt file"),
    ("nothing", None, "neither a corpus"),
]


@pytest.mark.parametrize("name, content, word", TEXTS)
def test_a_text_to_score(made, tmp_path, capsys, name, content, word):
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    argv = [str(made / "run"), "--data", str(tmp_path / name), "--device", "cpu"]
    assert_refused(evaluate, argv, word, tmp_path, capsys)


def nanogpt_folder(folder, val, meta=None):
    folder.mkdir()
    (folder / "train.bin").write_bytes(val)
    (folder / "val.bin").write_bytes(val)
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


NANO_DATA = [
    (b"", None, "not a file of 16-bit ids"),
    (b"abc" * 5, None, "not a file of 16-bit ids"),
    (np.full(50, 257, "<u2").tobytes(), None, "holds id 257, beyond the vocabulary of 257"),
    (np.zeros(50, "<u2").tobytes(), {"itos": {0: "a"}}, "are not the model's"),
    (np.zeros(50, "<u2").tobytes(), [], "is not nanoGPT's"),
]


@pytest.mark.parametrize("number", range(len(NANO_DATA)))
def test_nanogpts_data(made, tmp_path, capsys, number):
    val, meta, word = NANO_DATA[number]
    nanogpt_folder(tmp_path / "data", val, meta)
    (tmp_path / "data/input.txt").write_text(TEXT)
    argv = [str(made / "run"), "--data", str(tmp_path / "data"), "--device", "cpu"]
    assert_refused(evaluate, argv, word, tmp_path, capsys)


def test_nanogpts_folder_is_scored_by_its_val_file(made, tmp_path, capsys):
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype("<u2")
    nanogpt_folder(tmp_path / "data", ids[:500].tobytes())
    (tmp_path / "data/input.txt").write_text("something else " * 50)
    shutil.copytree(made / "run", tmp_path / "run")
    assert evaluate([str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--device", "cpu"]) == 0
    assert "499 tokens" in capsys.readouterr().out


RESULTS = [
    ("[5]", "is not a list of results"),
    ("{}", "is not a list of results"),
    ("7", "is not a list of results"),
    ("{", "is not a list of results"),
    (b"\xff", "is not a list of results"),
    ("folder", "is not a list of results"),
]


@pytest.mark.parametrize("content, word", RESULTS)
def test_results_that_cannot_be_added_to(made, tmp_path, capsys, content, word):
    shutil.copytree(made / "run", tmp_path / "run")
    path = tmp_path / "run/eval.json"
    path.mkdir() if content == "folder" else path.write_bytes(text_of(content))
    argv = [str(tmp_path / "run"), "--data", str(made / "text.txt"), "--device", "cpu"]
    assert_refused(evaluate, argv, word, tmp_path, capsys)


def test_results_on_a_full_disk_are_shown_and_the_sentence_says_why_they_are_not_kept(
    made, tmp_path, capsys, monkeypatch
):
    import tinygpt.support as support

    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "run/eval.json"))

    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.setattr(support, "_to_disk", full)
    argv = [str(tmp_path / "run"), "--data", str(made / "text.txt"), "--device", "cpu"]
    assert evaluate(argv) == 2
    out, err = capsys.readouterr()
    assert "bits per byte" in out and "No space left on device: make room there" in err
    assert not (tmp_path / "run/eval.json").exists()


def test_an_export_on_a_full_disk_leaves_nothing(made, tmp_path, capsys, monkeypatch):
    import tinygpt.support as support

    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "out"))

    monkeypatch.setattr(support, "_to_disk", full)
    assert_refused(export, [str(made / "run"), str(tmp_path / "out")], "make room there", tmp_path, capsys)


EXPORT = [
    ("{folder}/file", "exists"),
    ("{folder}/file/out", "File exists"),
    ("{folder}", "exists"),
    ("/dev/null", "exists"),
    ("/dev/null/out", "File exists"),
    ("{folder}/" + "x" * 300, "choose a shorter name"),
    ("", "run is missing"),
    ("/proc/nothing", "check the path"),
    ("{folder}/dangling", "exists"),
]


@pytest.mark.skipif(os.name != "posix", reason="paths of posix")
@pytest.mark.parametrize("out, word", EXPORT)
def test_a_place_that_an_export_cannot_have(made, tmp_path, capsys, out, word):
    (tmp_path / "file").write_text("keep me")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    argv = [str(made / "run"), out.format(folder=tmp_path)]
    assert_refused(export, argv, word, tmp_path, capsys)


PLACES = [
    ("", "holds no checkpoint"),
    (".", "holds no checkpoint"),
    ("/dev/null", "/dev/null"),
    ("{folder}/text", "text"),
    ("{folder}/" + "x" * 300, "x"),
    ("{folder}/empty", "holds no checkpoint"),
    ("{folder}/loop", "loop"),
    ("a\nb", "does not exist"),
]


@pytest.mark.skipif(os.name != "posix", reason="paths of posix")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place, word", PLACES)
def test_a_place_without_a_model(tmp_path, capsys, monkeypatch, place, word, command):
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path / "empty")
    refuse(command, place.format(folder=tmp_path), tmp_path, word, capsys)


def test_a_pattern_that_goes_back_for_ever(made, tmp_path, capsys):
    shutil.copytree(made / "hf", tmp_path / "hf")
    path = tmp_path / "hf/tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    having(pre_tokenizer=split)(path)
    argv = [str(tmp_path / "hf"), "--prompt", "a" * 40 + "!", "--device", "cpu"]
    assert_refused(generate, argv, "the tokenizer failed on a text", tmp_path, capsys)


@pytest.mark.parametrize("number", range(2))
def test_weights_that_are_finite_and_lead_to_logits_that_are_not(made, tmp_path, capsys, number):
    model = GPT(
        GPTConfig.gpt2(vocab_size=257, block_size=16, n_layer=1, n_head=2, n_embd=16, tie_weights=False)
    )
    torch.nn.init.constant_(model.ln_f.weight, 1e38)
    torch.nn.init.constant_(model.lm_head.weight, 1e38)
    save_checkpoint(tmp_path / "run/checkpoints/step_1", model, ByteTokenizer())
    shutil.copy(made / "text.txt", tmp_path)
    command = ["generate", "evaluate"][number]
    refuse(command, tmp_path / "run", tmp_path, "not finite", capsys)
