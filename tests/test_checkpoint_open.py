"""A model from anywhere on every command line, with the logits and the tokens of the library that made it."""

import json
import math
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from bad_input import tree
from foreign import TEXT, llama_tokenizer, save_folder, smollm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tinygpt.checkpoint import checkpoints, save_checkpoint
from tinygpt.checkpoint_open import NanoChars, find_model, keep_tokenizer, load_nanogpt, open_model
from tinygpt.evaluate.__main__ import main as evaluate_main
from tinygpt.export.__main__ import main as export_main
from tinygpt.generate.__main__ import main as generate_main
from tinygpt.generate.sample import generate_batch
from tinygpt.generate.text import prompt_ids
from tinygpt.model import GPT, GPTConfig
from tinygpt.model_hf import export_hf
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from tinygpt.train import main as train_main

PROMPT = "The state of"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    return tmp_path / "text.txt"


def call(main, *words):
    return main([str(word) for word in words])


def train(text, place, *more):
    "Four steps from the model at `place`; the run folder."
    out = text.parent / "runs"
    sizes = "--block-size 32 --batch-size 4 --max-steps 4 --warmup-steps 1 --sample-tokens 4".split()
    where = ["--init-from", place, "--source", text, "--out", out, "--name", "tuned", "--device", "cpu"]
    assert call(train_main, *where, *sizes, "--no-compressors", "--dtype", "float32", *more) == 0
    return out / "tuned"


def greedy(place, capsys):
    "What the command writes after the prompt at temperature 0."
    capsys.readouterr()
    how = ["--prompt", PROMPT, "--max-new-tokens", 12, "--temperature", 0, "--device", "cpu"]
    assert call(generate_main, place, *how) == 0
    return capsys.readouterr().out.removeprefix(PROMPT).removesuffix("\n")


def assert_same_as_transformers(folder):
    "First ids, logits and greedy continuation of the folder in transformers and here."
    model, tokenizer, _ = open_model(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = their_tokenizer(PROMPT, return_tensors="pt")
    ids = prompt_ids(tokenizer, PROMPT)
    assert batch["input_ids"][0].tolist() == ids
    with torch.no_grad():
        torch.testing.assert_close(
            model(torch.tensor([ids]))[0], theirs(**batch).logits, rtol=1e-4, atol=1e-4
        )
    written = theirs.generate(**batch, max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    [mine] = generate_batch(model, [ids], 12, temperature=0, eot=tokenizer.ends)
    assert [i for i in written if i not in tokenizer.ends] == mine


def test_a_model_from_elsewhere_is_used_tuned_and_given_back_from_the_command_line_alone(
    tmp_path, text, capsys
):
    place, theirs = smollm(tmp_path / "smol")
    assert_same_as_transformers(place)

    # generated from
    batch = AutoTokenizer.from_pretrained(place)(PROMPT, return_tensors="pt")
    written = theirs.generate(**batch, max_new_tokens=12, do_sample=False, pad_token_id=0)
    new = written[0, batch["input_ids"].shape[1] :]
    assert greedy(place, capsys) == open_model(place)[1].decode(new)

    # scored: transformers' loss over the same rows, in bits of the bytes of the text
    before = tree(place)
    assert call(evaluate_main, place, "--data", text, "--device", "cpu") == 0
    assert tree(place) == before and "eval.json" not in capsys.readouterr().out
    assert call(evaluate_main, place, "--data", text, "--device", "cpu", "--out", tmp_path / "scores") == 0
    [result] = json.loads((tmp_path / "scores/eval.json").read_text())
    assert tree(place) == before and result["checkpoint"] == "smol"
    ids = torch.tensor([0, *AutoTokenizer.from_pretrained(place)(TEXT * 3)["input_ids"]])
    nats = 0.0
    for start in range(0, len(ids) - 1, 64):
        row = ids[start : start + 65]
        with torch.no_grad():
            logp = theirs(row[None, :-1]).logits[0].double().log_softmax(-1)
        nats -= logp[range(len(row) - 1), row[1:]].sum().item()
    assert result["tokens"] == len(ids) - 1 and result["bytes"] == len((TEXT * 3).encode())
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["bytes"], rel=1e-5)

    # tuned: the run stands alone, with the tokenizer in our format
    run = train(text, place)
    saved = Tokenizer.load(checkpoints(run)[-1] / "tokenizer.json")
    assert saved.kind == "hf" and saved.fingerprint == open_model(place)[1].fingerprint
    for path in place.iterdir():
        path.unlink()
    assert call(train_main, "--resume", run, "--max-steps", 6) == 0
    assert call(evaluate_main, run, "--data", text, "--device", "cpu") == 0
    assert json.loads((run / "eval.json").read_text())[0]["loss"] < result["loss"] - 0.3

    # given back
    assert call(export_main, run, tmp_path / "out") == 0
    assert_same_as_transformers(tmp_path / "out")
    assert greedy(tmp_path / "out", capsys) == greedy(run, capsys) != ""


def test_our_own_export_is_taken_wherever_a_run_is_and_transformers_begins_as_we_do(tmp_path, text, capsys):
    tokenizer = BPETokenizer.train([TEXT], 300)
    torch.manual_seed(0)
    sizes = dict(block_size=64, n_layer=2, n_head=4, n_embd=32)
    model = GPT(GPTConfig.llama(vocab_size=300, **sizes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    save_checkpoint(tmp_path / "run/checkpoints/step_1", model, tokenizer)
    assert call(export_main, tmp_path / "run", tmp_path / "out") == 0
    assert_same_as_transformers(tmp_path / "out")
    assert open_model(tmp_path / "out")[1].start == [299] == open_model(tmp_path / "run")[1].start
    assert greedy(tmp_path / "out", capsys) == greedy(tmp_path / "run", capsys)
    assert train(text, tmp_path / "out").is_dir()


def test_a_llama_begins_with_its_bos_and_ends_at_its_eos(tmp_path, capsys):
    tokenizer = llama_tokenizer()
    size = tokenizer.get_vocab_size()
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    names = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<s>", eos_token="</s>")
    folder = save_folder(tmp_path / "llama", tokenizer, LlamaForCausalLM(config), **names)
    assert_same_as_transformers(folder)
    assert prompt_ids(open_model(folder)[1], "") == [1]
    assert call(export_main, folder, tmp_path / "out") == 0
    assert_same_as_transformers(tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 1]


def test_a_chat_template_survives_tuning_and_export(tmp_path, text):
    place, _ = smollm(tmp_path / "smol")
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    (place / "chat_template.jinja").write_text(template)
    assert call(export_main, train(text, place), tmp_path / "out") == 0
    said = [{"role": "user", "content": "The people"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(said)["input_ids"]
    assert theirs == open_model(place)[1].encode_template("<|im_start|>The people<|im_end|>")


def test_a_run_whose_tokenizer_is_gone_from_the_cache_goes_on_and_is_used(
    tmp_path, text, capsys, monkeypatch
):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TINYGPT_CACHE", str(cache))
    run = train(text, smollm(tmp_path / "smol")[0])
    assert cache in Path(json.loads((run / "config.json").read_text())["data"]["tokenizer"]).parents
    shutil.rmtree(cache)
    written = greedy(run, capsys)
    assert call(evaluate_main, run, "--data", text, "--device", "cpu") == 0
    assert call(train_main, "--resume", run, "--max-steps", 5) == 0
    shutil.rmtree(cache)
    assert call(train_main, "--config", run / "config.json", "--name", "anew", "--max-steps", 4) == 0
    assert greedy(run.with_name("anew"), capsys) == written


# nanoGPT


def exact_gelu(**kw):
    "The model of nanoGPT's model.py, whose `nn.GELU()` is the exact one."
    return GPTConfig.gpt2(n_layer=2, n_head=2, n_embd=16, mlp="gelu_exact", **kw)


def nanogpt_file(folder, model, vocab_size, prefix="_orig_mod."):
    "A ckpt.pt as nanoGPT's train.py writes it: tied weights under both names, other rows of padding."
    folder.mkdir()
    rows = torch.zeros(vocab_size, model.config.n_embd)
    rows[: model.config.vocab_size] = model.wte.weight[: model.config.vocab_size]
    state = {f"transformer.{name}": t for name, t in model.state_dict().items()}
    state |= {"transformer.wte.weight": rows, "lm_head.weight": rows}
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()  # older versions hold the mask
    args = dict(vocab_size=vocab_size, dropout=0.0)
    args |= {
        name: getattr(model.config, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "bias")
    }
    held = {"model": {prefix + k: t for k, t in state.items()}, "model_args": args}
    held |= {"optimizer": {"state": {}}, "iter_num": 5, "best_val_loss": torch.tensor(1.5), "config": {}}
    torch.save(held, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_ckpt_with_gpt2s_tokens(tmp_path, prefix, bias):
    torch.manual_seed(1)
    model = GPT(exact_gelu(block_size=16, bias=bias)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    folder = nanogpt_file(tmp_path / "out", model, 50304, prefix)
    opened, tokenizer, where = open_model(folder)
    idx = torch.tensor([tokenizer.encode("The state of the Union")])
    assert torch.equal(opened(idx)[0], model(idx)[0]) and where == folder
    assert tokenizer.fingerprint == BPETokenizer.gpt2().fingerprint
    assert find_model(folder / "ckpt.pt") == ("nanogpt", folder / "ckpt.pt")


OPENS = """
import sys
from pathlib import Path
import torch
from tinygpt.checkpoint_open import load_nanogpt, open_model
from tinygpt.finetune.template import grow_model
from tinygpt.model_hf import export_hf, load_hf

place = Path(sys.argv[1])
if sys.argv[2] == "nan":
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, and imports the compiler
before = torch.get_rng_state()
model = open_model(place / "run")[0]
models = [load_nanogpt(place / "nano/ckpt.pt")[0], load_hf(export_hf(model, place / "hf"))]
assert grow_model(model, 300)(torch.tensor([[299]]))[0].isfinite().all()
assert torch.equal(torch.get_rng_state(), before)
for other in models:
    rows = model.config.vocab_size
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a[:rows], b[:rows]) if name == "wte.weight" else torch.equal(a, b), name
    assert other.wte.weight.isfinite().all()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


@pytest.mark.parametrize("memory", ["nan", "any"])
def test_no_model_that_is_opened_draws_weights_or_imports_torchs_compiler(tmp_path, memory):
    chars = [chr(64 + i) for i in range(200)]
    model = GPT(exact_gelu(vocab_size=200, block_size=16))
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", model, NanoChars(chars))
    folder = nanogpt_file(tmp_path / "nano", model, 200)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(chars)), "vocab_size": 200}))
    run = [sys.executable, "-c", OPENS, str(tmp_path), memory]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert memory == "nan" or done.stdout.split("\n")[-2] == "[]"


def test_nanogpts_model_of_characters_is_used_tuned_and_exported(tmp_path, text, capsys):
    chars = "".join(sorted(set(TEXT) | {"\n"}))
    torch.manual_seed(1)
    model = GPT(exact_gelu(vocab_size=len(chars), block_size=32)).eval()
    folder = nanogpt_file(tmp_path / "out-char", model, len(chars))
    with pytest.raises(UserError, match="put the meta.pkl of its data beside it"):
        open_model(folder)
    (folder / "meta.pkl").write_bytes(
        pickle.dumps({"itos": dict(enumerate(chars)), "vocab_size": len(chars)})
    )
    opened, tokenizer = load_nanogpt(folder / "ckpt.pt")
    idx = torch.tensor([tokenizer.encode("The state")])
    assert torch.equal(opened.eval()(idx)[0], model(idx)[0])
    assert tokenizer.n_vocab == len(chars) and prompt_ids(tokenizer, "") == [chars.index("\n")]
    greedy(folder, capsys)
    run = train(text, folder / "ckpt.pt", "--prompt", "The")
    assert open_model(run)[1].fingerprint == tokenizer.fingerprint
    assert call(export_main, run, tmp_path / "hf") == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "hf")("The state")["input_ids"]
    assert ids == tokenizer.encode("The state")
    for name, part in (("train", TEXT[:-500]), ("val", TEXT[-500:])):  # its own data folder, with its own ids
        np.array(tokenizer.encode(part), dtype=np.uint16).tofile(folder / f"{name}.bin")
    train(folder, folder / "ckpt.pt", "--prompt", "The", "--name", "own")
    assert open_model(tmp_path / "runs/own")[1].fingerprint == tokenizer.fingerprint


def test_a_tokenizer_is_kept_once_in_our_format(tmp_path):
    tokenizer = NanoChars("\nab")
    path = keep_tokenizer(tokenizer)
    assert keep_tokenizer(tokenizer) == path
    again = Tokenizer.load(path)
    assert (again.fingerprint, again.eot, again.ends, again.decode([1, 0])) == (
        tokenizer.fingerprint,
        0,
        set(),
        "a\n",
    )


def test_a_run_tuned_from_nanogpts_characters_opens_without_the_module_that_made_it(tmp_path):
    tokenizer = NanoChars("\nab")
    model = GPT(GPTConfig.gpt2(vocab_size=3, block_size=8, n_layer=1, n_head=2, n_embd=16))
    folder = save_checkpoint(tmp_path / "run/checkpoints/step_1", model, tokenizer)
    code = "import sys; from tinygpt.checkpoint import load_model;"
    code += "from tinygpt.data.tokens import build_tokenizer;"
    code += "print(load_model(sys.argv[1])[1].kind, build_tokenizer(sys.argv[2], None).kind);"
    code += "assert 'tinygpt.checkpoint_open' not in sys.modules"
    script = [sys.executable, "-c", code, str(tmp_path / "run"), str(folder / "tokenizer.json")]
    said = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert said.stdout == "nanogpt nanogpt\n", said.stderr


# what is there?


def test_runs_and_checkpoints_are_told_from_folders_of_others(tmp_path):
    model = GPT(GPTConfig.gpt2(vocab_size=257, block_size=8, n_layer=1, n_head=2, n_embd=16))
    folder = save_checkpoint(tmp_path / "run/checkpoints/step_1", model, ByteTokenizer())
    (tmp_path / "run/config.json").write_text("{}")  # of the trainer
    export_hf(model, tmp_path / "hf")
    (tmp_path / "empty").mkdir()
    (tmp_path / "young").mkdir()
    (tmp_path / "young/config.json").write_text('{"optim": {}}')  # a run that has saved nothing yet
    kinds = {tmp_path / "run": "run", folder: "run", tmp_path / "hf": "hf", tmp_path / "young": "run"}
    assert {place: find_model(place)[0] for place in kinds} == kinds
    with pytest.raises(UserError, match="holds no tokenizer.json"):
        open_model(tmp_path / "hf")
    for name in ("hf/model.safetensors", "hf/config.json", "run/checkpoints/step_1/model.safetensors"):
        with pytest.raises(UserError, match="is one file of a model: give the folder that holds it"):
            find_model(tmp_path / name)
    assert find_model((tmp_path / name).parent) == ("run", folder)  # the remedy works
    with pytest.raises(UserError, match="is not a run: leave it out"):
        open_model(tmp_path / "hf", best=True)
    for name in ("empty", "young"):
        with pytest.raises(UserError, match="holds no checkpoint"):
            open_model(tmp_path / name)


@pytest.mark.parametrize("name", ["no-such-model", "nobody/no-such-model"])
def test_a_name_that_nobody_knows_says_both_what_it_could_have_been(name):
    with pytest.raises(UserError, match="is not a folder here.*or give a run folder such as runs/laptop"):
        open_model(name)


@pytest.mark.parametrize("name", ["runs/laptp", "./laptop", "../laptop", "a/b/c", "~/laptop"])
def test_a_path_that_is_not_there_is_not_asked_for_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        open_model(name)


def test_a_name_of_the_hub_is_taken_from_its_cache(tmp_path, monkeypatch):
    import tinygpt.checkpoint_open as module

    place, _ = smollm(tmp_path / "smol")
    monkeypatch.setattr(module, "hf_folder", {"HuggingFaceTB/SmolLM2-135M": place}.get)
    model, tokenizer, folder = open_model("HuggingFaceTB/SmolLM2-135M")
    assert folder == place and model.config.vocab_size == tokenizer.n_vocab == 320
