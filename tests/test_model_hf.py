"""Both ways between Hugging Face's models and ours: logits, losses and gradients; and what is refused."""

import http.server
import json
import os
import subprocess
import sys
import threading
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tinygpt.model import GPT, GPTConfig
from tinygpt.model_hf import (
    config_from_hf,
    config_to_hf,
    export_hf,
    hf_names,
    load_hf,
    state_from_hf,
    state_to_hf,
)
from tinygpt.support import UserError

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

SIZE = dict(
    vocab_size=101,
    n_positions=32,
    n_embd=48,
    n_layer=3,
    n_head=4,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    embd_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
LSIZE = dict(
    vocab_size=101,
    max_position_embeddings=32,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=4,
)
THEIRS = {
    "gpt2": GPT2Config(**SIZE),
    "gpt2-untied": GPT2Config(**SIZE, tie_word_embeddings=False, n_inner=100, layer_norm_epsilon=1e-3),
    "gpt2-exact-gelu": GPT2Config(**SIZE, activation_function="gelu"),
    "llama": LlamaConfig(**LSIZE),
    "llama-gqa": LlamaConfig(**LSIZE, num_key_value_heads=2, rms_norm_eps=1e-3),
    "llama-tied": LlamaConfig(
        **LSIZE,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
    ),
    "llama-bias": LlamaConfig(**LSIZE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**LSIZE, num_key_value_heads=4, head_dim=12),
    "qwen3-gqa-tied": Qwen3Config(
        **LSIZE,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-2,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 77.0},
    ),
}
every = pytest.mark.parametrize("name", THEIRS)
QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")  # of Qwen3; ours have no weights


def their_model(config, seed=0):
    """A Hugging Face model with weights five times as large as fresh ones, norms and biases not at 1 and 0.

    But for Qwen3's norms of queries and keys, which stay at 1.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith(QK_NORMS):
                p.mul_(5) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def our_model(model):
    "The same weights in our model, not through a file."
    hf = model.config.to_dict()
    return state_from_hf(GPT(config_from_hf(hf)), model.state_dict(), hf["model_type"]).eval()


def tokens(B=2, T=32, seed=0):
    return torch.randint(101, (B, T), generator=torch.Generator().manual_seed(seed))


def gradients_by_their_names(ours):
    twin = deepcopy(ours)
    for p, q in zip(twin.parameters(), ours.parameters()):
        p.data = q.grad
    return state_to_hf(twin)


@every
def test_logits_loss_and_gradients_are_hugging_faces_on_its_own_large_weights(name):
    theirs = their_model(THEIRS[name])
    ours, idx = our_model(theirs), tokens()
    targets = torch.cat([idx[:, 1:], torch.full((2, 1), -100)], dim=1)  # they shift inside
    want, (logits, loss) = theirs(idx, labels=idx), ours(idx, targets)
    assert want.logits.abs().max() > 1.5  # large enough that a wrong part shows
    torch.testing.assert_close(logits, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, want.loss, rtol=1e-5, atol=1e-5)
    want.loss.backward()
    loss.backward()
    grads = {n: g for n, g in gradients_by_their_names(ours).items() if not n.endswith(QK_NORMS)}
    ours_too = {n: p for n, p in theirs.named_parameters() if not n.endswith(QK_NORMS)}
    assert all(p.grad.abs().max() > 1e-4 for p in ours_too.values())
    for their_name, p in ours_too.items():
        torch.testing.assert_close(
            grads.pop(their_name), p.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{their_name}: {m}"
        )
    assert not grads


@every
def test_in_float64_nothing_but_rope_tables_differ(name):
    theirs = their_model(THEIRS[name])
    ours, theirs, idx = our_model(theirs).double(), theirs.double(), tokens()
    with torch.no_grad():
        difference = (ours(idx)[0] - theirs(idx).logits).abs().max().item()
    assert difference < (1e-12 if name.startswith("gpt2") else 1e-5)


@every
def test_the_parity_notices_a_wrong_gelu_a_wrong_theta_and_a_wrong_layout(name, monkeypatch):
    theirs = their_model(THEIRS[name])
    ours, idx = our_model(theirs), tokens()
    want = theirs(idx).logits
    if name.startswith("gpt2"):
        right = torch.nn.functional.gelu
        other = {"none": "tanh", "tanh": "none"}

        def the_other_form(x, approximate="none"):
            return right(x, approximate=other[approximate])

        monkeypatch.setattr("tinygpt.model.F.gelu", the_other_form)
    else:

        def interleaved(x, rope):
            cos, sin = rope
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

        monkeypatch.setattr("tinygpt.model.apply_rope", interleaved)
    assert (ours(idx)[0] - want).abs().max() > 1e-4


@every
def test_a_folder_that_transformers_wrote_is_read_and_one_that_we_wrote_is_read_by_transformers(
    name, tmp_path
):
    theirs, idx = their_model(THEIRS[name]), tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_hf(tmp_path / "theirs", dropout=0.1).eval()
    assert ours.config.dropout == 0.1
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)
    export_hf(ours, tmp_path / "ours")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(again) is type(theirs)
    torch.testing.assert_close(again.eval()(idx).logits, theirs(idx).logits, rtol=0, atol=0)
    back = load_hf(tmp_path / "ours")
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), ours.parameters()))
    assert replace(back.config, dropout=0.1) == ours.config


def test_what_was_exported_is_read_and_keywords_change_the_config_and_the_attention(tmp_path):
    config = GPTConfig.llama(vocab_size=100, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = GPT(replace(config, tie_weights=True)).eval()
    again = load_hf(str(export_hf(model, tmp_path / "out")), attn_impl="naive", dropout=0.25).eval()
    idx = torch.randint(100, (2, 16))
    assert again.config.dropout == 0.25 and {block.attn.impl for block in again.h} == {"naive"}
    assert torch.equal(again.set_attention("fused")(idx)[0], model(idx)[0])


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig.gpt2(
            vocab_size=101, block_size=16, n_layer=2, n_head=2, n_embd=32, bias=False, tie_weights=False
        ),
        GPTConfig.gpt2(vocab_size=101, block_size=16, n_layer=2, n_head=2, n_embd=32, bias=False),
        GPTConfig.gpt2(vocab_size=101, block_size=16, n_layer=2, n_head=2, n_embd=32, mlp="gelu_exact"),
        GPTConfig.llama(
            vocab_size=101,
            block_size=16,
            n_layer=2,
            n_head=4,
            n_kv_head=2,
            n_embd=32,
            rope_theta=500.0,
            norm_eps=1e-2,
        ),
        GPTConfig.llama(  # queries of RMS 0.1: a norm_eps of 1e-2 counts as much as they do
            vocab_size=101, block_size=16, n_layer=2, n_head=2, n_embd=32, qk_norm=True, norm_eps=1e-2
        ),
        GPTConfig.llama(
            vocab_size=101,
            block_size=16,
            n_layer=2,
            n_head=4,
            n_kv_head=2,
            n_embd=32,
            tie_weights=True,
            rope_theta=500.0,
            qk_norm=True,
        ),
    ],
)
def test_a_model_born_here_opens_in_transformers_with_the_same_logits(config, tmp_path):
    model, idx = GPT(config).eval(), tokens(T=16)
    theirs = AutoModelForCausalLM.from_pretrained(export_hf(model, tmp_path / "out")).eval()
    torch.testing.assert_close(theirs(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-5)
    assert theirs.config.eos_token_id == 100
    assert theirs.generate(idx[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] <= 7


def test_a_qwen3_of_ours_says_all_that_another_reader_could_take_for_something_else(tmp_path):
    shape = dict(vocab_size=101, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32)
    model = GPT(GPTConfig.llama(**shape, qk_norm=True, norm_eps=1e-3, rope_theta=500.0))
    folder = export_hf(model, tmp_path / "out")
    said = json.loads((folder / "config.json").read_text())
    assert said["model_type"] == "qwen3" and said["architectures"] == ["Qwen3ForCausalLM"]
    assert said["rope_theta"] == 500.0  # transformers 4 reads it here
    theirs = Qwen3Config.from_pretrained(folder)  # transformers 5
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    assert theirs.head_dim == 8 and theirs.num_key_value_heads == 2 and theirs.rms_norm_eps == 1e-3
    assert not theirs.attention_bias and not theirs.use_sliding_window and theirs.sliding_window is None
    assert set(theirs.layer_types) == {"full_attention"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        norms = [file.get_tensor(f"model.layers.{i}.{norm}") for i in range(2) for norm in QK_NORMS]
    assert all(torch.equal(weight, torch.ones(8)) for weight in norms)


def test_a_qwen3_whose_qk_norm_has_weights_or_none_at_all_is_refused(tmp_path):
    theirs = their_model(THEIRS["qwen3"])
    q_norm = theirs.model.layers[1].self_attn.q_norm.weight.data
    q_norm[3] += 1 / 256
    theirs.save_pretrained(tmp_path / "trained")
    with pytest.raises(UserError, match="weights in its QK-norm .model.layers.1.self_attn.q_norm.weight"):
        load_hf(tmp_path / "trained")
    q_norm.fill_(1)
    assert our_model(theirs).config.qk_norm
    config, state = config_from_hf(theirs.config.to_dict()), theirs.state_dict()
    wide = state | {"model.layers.0.self_attn.k_norm.weight": torch.ones(48)}  # over all heads, as others do
    with pytest.raises(UserError, match="layers.0.self_attn.k_norm.weight is not 12 ones"):
        state_from_hf(GPT(config), wide, "qwen3")
    del state["model.layers.2.self_attn.k_norm.weight"]
    with pytest.raises(UserError, match="layers.2.self_attn.k_norm.weight missing"):
        state_from_hf(GPT(config), state, "qwen3")
    with pytest.raises(UserError, match="q_norm.weight left over"):  # they would be forgotten
        state_from_hf(GPT(replace(config, qk_norm=False)), state, "qwen3")


def test_the_file_says_that_its_tensors_are_pytorchs_which_older_transformers_demands(tmp_path):
    folder = export_hf(
        GPT(GPTConfig.gpt2(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32)), tmp_path / "out"
    )
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # tied: stored once
        assert file.get_slice("transformer.wte.weight").get_shape() == [101, 32]  # without padding


def test_half_precision_weights_keep_their_dtype_in_the_file(tmp_path):
    model = GPT(GPTConfig.llama(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32)).bfloat16()
    theirs = AutoModelForCausalLM.from_pretrained(export_hf(model, tmp_path / "out"))
    assert theirs.dtype == torch.bfloat16 and torch.equal(theirs.lm_head.weight, model.lm_head.weight[:101])


def test_shards_old_pickles_bare_names_and_mask_buffers_are_read(tmp_path):
    theirs, idx = their_model(THEIRS["gpt2"]), tokens()
    want = theirs(idx).logits
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    torch.testing.assert_close(load_hf(tmp_path / "shards").eval()(idx)[0], want, rtol=1e-5, atol=1e-5)
    old = tmp_path / "old"  # as the first GPT-2 on the hub: no prefix, the causal masks among the weights
    old.mkdir()
    state = {
        k.removeprefix("transformer."): v for k, v in theirs.state_dict().items() if k != "lm_head.weight"
    }
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(3)}
    torch.save(state, old / "pytorch_model.bin")
    theirs.config.save_pretrained(old)
    torch.testing.assert_close(load_hf(old).eval()(idx)[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool], ids=["uint8", "bool"])
def test_masks_of_bytes_which_files_of_2020_to_2023_hold_are_no_weights(tmp_path, dtype):
    theirs, idx = their_model(THEIRS["gpt2"]), tokens()
    theirs.save_pretrained(tmp_path)
    state = theirs.state_dict()
    del state["lm_head.weight"]
    mask = torch.ones(1, 1, 32, 32, dtype=dtype).tril()
    state |= {f"transformer.h.{i}.attn.bias": mask.clone() for i in range(3)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(load_hf(tmp_path).eval()(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)


def test_a_head_that_the_config_ties_but_the_file_has_apart_is_refused_with_a_remedy(tmp_path):
    theirs, idx = their_model(THEIRS["gpt2-untied"]), tokens()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    untied = path.read_text()
    path.write_text(json.dumps(json.loads(untied) | {"tie_word_embeddings": True}))
    with pytest.raises(UserError, match="lm_head.*write .tie_word_embeddings.: false into config.json"):
        load_hf(tmp_path)
    path.write_text(untied)
    torch.testing.assert_close(load_hf(tmp_path).eval()(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)


def test_a_gpt2_without_biases_is_exported_with_zeros_whatever_its_first_weights(tmp_path):
    size = dict(vocab_size=101, block_size=32, n_layer=2, n_head=2, n_embd=32)
    model, idx = GPT(GPTConfig.gpt2(**size, bias=False, init="torch")).eval(), tokens()
    before = torch.get_rng_state()
    export_hf(model, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), before)  # a run may go on
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(back(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("theirs", [LlamaConfig(), Qwen3Config()], ids=["llama", "qwen3"])
def test_missing_defaults_in_config_json_are_those_of_transformers(theirs):
    assert config_from_hf({"model_type": "gpt2"}) == GPTConfig.gpt2()
    ours = config_from_hf({"model_type": theirs.model_type})
    assert ours.qk_norm == (theirs.model_type == "qwen3")
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    names = {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "hidden": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "block_size": "max_position_embeddings",
        "norm_eps": "rms_norm_eps",
        "tie_weights": "tie_word_embeddings",
    }
    for our_name, their_name in names.items():
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name
    old = {
        "model_type": theirs.model_type,
        "rope_theta": 500000.0,
        "rope_scaling": None,
    }  # as transformers 4 wrote it
    assert config_from_hf(old).rope_theta == 500000.0
    off = {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 1}
    assert config_from_hf(off | {"layer_types": ["full_attention"] * 32}).qk_norm


@pytest.mark.parametrize(
    "change, word",
    [
        ({"model_type": "bert"}, "bert"),
        ({"model_type": None}, "None"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "relu"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "inverse_layer"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "gelu"),
        ({"model_type": "llama", "attention_bias": True}, "bias"),
        ({"model_type": "llama", "head_dim": 64}, "head_dim = 64"),
        ({"model_type": "llama", "hidden_size": 100}, "head_dim = 3"),
        ({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16}, "head_dim = 128"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "sliding windows"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"model_type": "qwen3", "attention_bias": True}, "bias"),
        (
            {"model_type": "qwen3", "attention_bias": True, "mlp_bias": True},
            "bias",
        ),  # theirs reads no mlp_bias
        ({"model_type": "qwen3", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
    ],
)
def test_what_our_model_cannot_do_is_refused_not_ignored(change, word):
    with pytest.raises(UserError, match=word):
        config_from_hf(change)


@pytest.mark.parametrize(
    "added",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)
def test_a_rope_scaling_that_somebody_added_to_a_config_of_today_is_not_overlooked(added, tmp_path):
    LlamaConfig(**LSIZE).save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text()) | {"rope_scaling": added}
    assert hf["rope_parameters"]["rope_type"] == "default"
    told = added.get("rope_type", added.get("type"))
    assert LlamaConfig(**hf).rope_parameters["rope_type"] == told  # theirs goes by what was added
    with pytest.raises(UserError, match=told):
        config_from_hf(hf)


def test_of_two_thetas_the_one_that_transformers_takes_is_taken():
    hf = {"model_type": "llama", "rope_theta": 7.0, "rope_parameters": {"rope_theta": 8.0}}
    for scaling in (
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 9.0}},
    ):
        theirs = LlamaConfig(**hf | scaling).rope_parameters["rope_theta"]
        assert config_from_hf(hf | scaling).rope_theta == theirs


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_with_a_part_that_transformers_lacks_is_refused_by_the_tensors_name(kind, tmp_path):
    config = getattr(GPTConfig, kind)(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32)
    for place in ("h.0.mlp", "h.0", ""):
        model = GPT(config)
        model.get_submodule(place).router = torch.nn.Linear(32, 4, bias=False)
        name = f"{place}.router.weight".lstrip(".")
        with pytest.raises(UserError, match=rf"cannot be this model: they have no {name}\. Train with"):
            export_hf(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_no_exported_tensor_asks_for_a_gradient_so_each_has_its_numpy_array(kind):
    config = getattr(GPTConfig, kind)(vocab_size=101, block_size=32, n_layer=1, n_head=2, n_embd=16)
    for tensor in state_to_hf(GPT(config)).values():
        assert tensor.numpy().shape == tuple(tensor.shape)


def test_names_are_refused_for_parts_and_kinds_that_do_not_exist():
    with pytest.raises(UserError, match="they have no h.0.mlp.c_gate.weight"):
        hf_names("h.0.mlp.c_gate.weight", "gpt2")
    with pytest.raises(UserError, match="kind = 'bert' has no names here: choose gpt2, llama or qwen3"):
        hf_names("wte.weight", "bert")


def test_a_modern_model_is_refused_with_every_reason_and_nothing_is_written(tmp_path):
    model = GPT(GPTConfig.modern(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32))
    with pytest.raises(UserError, match="relu2.*logit_softcap = 15.0"):
        export_hf(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    for config, word in [
        (GPTConfig.gpt2(n_kv_head=4), "n_kv_head = 4"),
        (GPTConfig.gpt2(qk_norm=True), "GPT-2 with qk_norm = True"),
        (GPTConfig.llama(qk_norm=True, bias=True), "qk_norm with bias = True"),
        (GPTConfig.llama(qk_norm=True, logit_softcap=15.0), "logit_softcap = 15.0"),
        (GPTConfig.llama(qk_norm=True, ngram_rows=8), "ngram_rows = 8"),
    ]:
        with pytest.raises(UserError, match=f"{word}.*llama.qk_norm=True. to export"):
            config_to_hf(config)
    remedies = [GPTConfig.gpt2(), GPTConfig.llama(), GPTConfig.llama(qk_norm=True)]
    assert [config_to_hf(c)["model_type"] for c in remedies] == ["gpt2", "llama", "qwen3"]
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists"):
        export_hf(
            GPT(GPTConfig.llama(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32)),
            tmp_path / "there",
        )


def test_broken_folders_are_told_in_a_sentence(tmp_path):
    good = export_hf(
        GPT(GPTConfig.llama(vocab_size=101, block_size=16, n_layer=2, n_head=2, n_embd=32)), tmp_path / "good"
    )
    files = {p.name: p.read_bytes() for p in good.iterdir()}
    hf = json.loads(files["config.json"])

    def folder(name, **changed):
        (tmp_path / name).mkdir()
        for file, data in (files | changed).items():
            if data is not None:
                (tmp_path / name / file).write_bytes(data)
        return tmp_path / name

    cases = [
        (folder("a", **{"config.json": None}), "no config.json"),
        (folder("b", **{"config.json": b"{"}), "not JSON"),
        (folder("c", **{"model.safetensors": None}), "no model.safetensors"),
        (folder("d", **{"model.safetensors": files["model.safetensors"][:1000]}), "cannot be read"),
        (
            folder("e", **{"config.json": json.dumps(hf | {"num_hidden_layers": 3}).encode()}),
            "layers.2.*missing",
        ),
        (
            folder("f", **{"config.json": json.dumps(hf | {"num_hidden_layers": 1}).encode()}),
            "layers.1.*left over",
        ),
        (
            folder("g", **{"config.json": json.dumps(hf | {"vocab_size": 100}).encode()}),
            r"\(101, 32\).*\(100, 32\)",
        ),
        (folder("h", **{"config.json": json.dumps(hf | {"vocab_size": 0}).encode()}), "vocab_size = 0"),
    ]
    for path, words in cases:
        with pytest.raises(UserError, match=words):
            load_hf(path)


class Hub(http.server.BaseHTTPRequestHandler):
    "The few answers of the hub that a download needs."

    files: dict = {}  # of each repository

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.split("?")[0]
        repo = next((repo for repo in self.files if repo in path), "")
        files = self.files.get(repo, {})
        name = path.rpartition("/")[2]
        if repo and path.startswith("/api/models/"):
            info = {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": "a" * 40,
                "private": False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            if "/tree/" in path:
                listed = [
                    {"type": "file", "path": n, "size": len(d), "oid": "b" * 40} for n, d in files.items()
                ]
                data = json.dumps(listed).encode()
            else:
                data = json.dumps(info | {"siblings": [{"rfilename": n} for n in files]}).encode()
        elif "/resolve/" in path and name in files:
            data = files[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return
        self.send_response(200)
        headers = {
            "Content-Length": len(data),
            "ETag": f'"{len(data)}"',
            "X-Repo-Commit": "a" * 40,
            "Content-Type": "application/json",
        }
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.mark.slow
def test_a_name_is_downloaded_from_the_hub_and_without_network_comes_from_its_cache_or_a_clear_sentence(
    tmp_path,
):
    pytest.importorskip("huggingface_hub")
    folder = export_hf(
        GPT(GPTConfig.llama(vocab_size=101, block_size=16, n_layer=1, n_head=2, n_embd=32)), tmp_path / "made"
    )
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    # an old model has a pickle only, and where there is a safe file the pickle is not fetched
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    pickle = {"pytorch_model.bin": (tmp_path / "pytorch_model.bin").read_bytes()}
    Hub.files = {
        "you/tiny": files | {"README.md": b"not needed"},
        "you/both": files | pickle,
        "you/old": {name: data for name, data in files.items() if name != "model.safetensors"} | pickle,
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # the hub's address and cache are read when its package is imported, so this is another process
    code = (
        "import sys\nfrom tinygpt.model_hf import load_hf\nfrom tinygpt.support import UserError\n"
        "for name in sys.argv[1:]:\n"
        "    try: print('loaded', load_hf(name).config.n_embd)\n"
        "    except UserError as e: print('refused:', e)"
    )
    env = {
        k: v
        for k, v in os.environ.items()
        if "proxy" not in k.lower() and k not in ("HF_TOKEN", "HF_HUB_OFFLINE")
    }
    env |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }

    def run(*names):
        command = [sys.executable, "-W", "ignore", "-c", code, *names]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    try:
        tiny, unknown, both, old = run("you/tiny", "you/unknown", "you/both", "you/old")
    finally:
        server.shutdown()
        server.server_close()
    assert tiny == both == old == "loaded 32"
    assert unknown.startswith("refused: ") and "config.json and model.safetensors" in unknown
    fetched = {path.name for path in (tmp_path / "cache").rglob("*")}
    assert "README.md" not in fetched  # only what is needed
    pickles = list((tmp_path / "cache").rglob("*.bin"))
    assert pickles and all("you--old" in str(path) for path in pickles)
    # the network is gone, the cache is there
    tiny, old, other = run("you/tiny", "you/old", "you/other")
    assert tiny == old == "loaded 32" and "refused: 'you/other' is not a folder here" in other


def test_without_huggingface_hub_the_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub, or give a folder"):
        load_hf("gpt2")
