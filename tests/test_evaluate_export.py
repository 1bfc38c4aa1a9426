"""Exported folders in transformers, exported tokenizers in tokenizers, the harness's scores against ours."""

import importlib.util
import json
import logging
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tinygpt.checkpoint_open import NanoChars, open_model
from tinygpt.data.tokens import load_corpus
from tinygpt.evaluate.export import (
    EOT,
    _with_tokens,
    export_model,
    harness_model,
    merge_pairs,
    run_harness,
    spell_bytes,
    tokenizer_json,
    write_harness_task,
    write_until,
)
from tinygpt.evaluate.tasks import continuation_losses, load_items, score_items
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.generate.sample import generate_batch
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import GPT2_PATTERN, BPETokenizer, ByteTokenizer, CharTokenizer
from tinygpt.tokenizer_hf import read_hf_tokenizer

tokenizers = pytest.importorskip("tokenizers")
from foreign import save_folder, smollm_tokenizer

harness = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("lm_eval", "accelerate")),
    reason='lm-evaluation-harness is not installed (pip install "tinygpt[eval]")',
)

ODD = (
    "In 1790, don't  \n\n\n café naïve 日本語 😀👩‍👩‍👧\u3000x\u00a0y\x00z\u0085 "
    "e\u0301\r\n\t<b> ﬁ ΑΩ 'twas he'll   "
)
TEXT = "The state of the Union, and the Congress of 1790; the people's government thanks them. " * 30 + ODD
BPE = BPETokenizer.train([TEXT], 360)
GPT2 = BPETokenizer.gpt2()
THEIRS = {
    tok: tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tok)))
    for tok in (BPE, GPT2, ByteTokenizer(), CharTokenizer.train(ODD))
}


def make_model(tok, kind="llama", seed=0, **kw):
    torch.manual_seed(seed)
    sizes = {"vocab_size": tok.n_vocab, "block_size": 24, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(getattr(GPTConfig, kind)(**sizes | kw))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    return model.eval()


@pytest.mark.parametrize("ours", THEIRS, ids=lambda t: f"{t.kind}{t.n_vocab}")
def test_exported_tokenizers_give_the_same_ids_and_text_back(ours):
    theirs = THEIRS[ours]
    for text in ("", "a" if ours.kind != "char" else "n", ODD, ODD[::-1], "  ", "\n\n"):
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text)
        assert theirs.decode(ids) == text
    assert theirs.token_to_id(EOT) == ours.eot and theirs.get_vocab_size() == ours.n_vocab
    assert theirs.decode([ours.eot]) == ""  # special tokens are not text


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40).filter(lambda text: EOT not in text))  # there it is the special token
@example("1\u00b2\u0661\u2167x")  # digits of several kinds
@example("'ll'LL 's\u2019s")
@example("\u0085\u2028\u200b \u1680x")  # blanks of several kinds
def test_any_text_has_the_same_ids(text):
    for ours in (BPE, GPT2):
        assert THEIRS[ours].encode(text).ids == ours.encode(text)


def test_every_character_of_the_basic_plane_has_the_same_ids_between_letters():
    characters = [chr(c) for c in range(0x10000) if not 0xD800 <= c < 0xE000]
    text = "".join(f"a{c}b" for c in characters)
    differ = [c for c in characters if THEIRS[BPE].encode(f"a {c}1").ids != BPE.encode(f"a {c}1")]
    assert differ == []
    assert THEIRS[BPE].decode(THEIRS[BPE].encode(text).ids) == text


def test_real_text_has_the_same_ids_with_gpt2s_vocabulary():
    for text in load_corpus("sotu").val[:4]:
        assert THEIRS[GPT2].encode(text).ids == GPT2.encode(text)


def test_the_pattern_travels_with_the_tokenizer():
    tok = BPETokenizer.train(["1790 1790 1790 1790 and 1790 " * 20], 262, GPT2_PATTERN)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tok)))
    assert theirs.encode("1790 in 1790").ids == tok.encode("1790 in 1790")
    assert len(tok.encode("1790")) < 4  # digits were merged, which our own pattern does not allow


def test_an_unknown_character_is_an_error_there_as_here():
    theirs = THEIRS[next(t for t in THEIRS if t.kind == "char")]
    with pytest.raises(Exception, match="UNK"):
        theirs.encode("\u4444")


def test_merges_are_all_pairs_whose_union_is_a_token():
    assert merge_pairs([b"a", b"b", b"c", b"ab", b"bc", b"abc"]) == [
        (b"a", b"b"),
        (b"b", b"c"),
        (b"a", b"bc"),
        (b"ab", b"c"),
    ]
    assert spell_bytes(b" a\n") == "ĠaĊ"


@pytest.mark.parametrize(
    "kind, kw",
    [
        ("gpt2", {}),
        ("gpt2", {"bias": False}),
        ("llama", {}),
        ("llama", {"n_kv_head": 2, "tie_weights": True}),
        ("llama", {"qk_norm": True}),  # Qwen3
        ("llama", {"qk_norm": True, "n_kv_head": 2, "tie_weights": True}),
    ],
)
def test_transformers_opens_the_folder_and_computes_the_same_logits(tmp_path, kind, kw):
    model = make_model(BPE, kind, **kw)
    export_model(model, BPE, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tok = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tok("The people's government of 1790", return_tensors="pt", add_special_tokens=False)
    assert batch["input_ids"][0].tolist() == BPE.encode("The people's government of 1790")
    assert tok.eos_token_id == tok.bos_token_id == tok.pad_token_id == BPE.eot and len(tok) == BPE.n_vocab
    assert tok(ODD)["input_ids"] == [BPE.eot, *BPE.encode(ODD)]  # as `generate` begins
    assert tok.decode(tok(ODD)["input_ids"], skip_special_tokens=True) == ODD
    with torch.no_grad():
        torch.testing.assert_close(theirs(**batch).logits, model(batch["input_ids"])[0], rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id == BPE.eot
    written = theirs.generate(**batch, max_new_tokens=8, do_sample=False)
    new = written[0, batch["input_ids"].shape[1] :].tolist()
    want = tok.decode(new, skip_special_tokens=True)
    assert write_until(model, BPE, "The people's government of 1790", [], 8) == want


CHATS = {
    "bpe": lambda folder: BPE,
    "byte": lambda folder: ByteTokenizer(),
    "char": lambda folder: CharTokenizer.train(TEXT),
    "nanogpt": lambda folder: NanoChars("".join(sorted(set(TEXT)))),
    "hf": lambda folder: read_hf_tokenizer(
        save_folder(folder, smollm_tokenizer(), eos_token="<|im_end|>"), 310
    ),
}
TALK = [
    {"role": "user", "content": " The state of\nthe café;  "},
    {"role": "assistant", "content": "\nthe 日本 people "},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize("kind", CHATS)
def test_a_chat_has_our_ids_our_mask_and_our_greedy_answer_in_transformers(tmp_path, kind):
    tok = chat_tokenizer(CHATS[kind](tmp_path / "base"))
    model = make_model(tok, block_size=128)
    export_model(model, tok, tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for talk, ask in ((TALK, True), (TALK[:2], False)):
        how = dict(add_generation_prompt=ask, return_dict=True, return_assistant_tokens_mask=True)
        found = theirs.apply_chat_template(talk, tokenize=True, **how)
        ids, mask = render(tok, talk, ask)
        assert found["input_ids"] == ids and found["assistant_masks"] == list(map(int, mask))
    writer = pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    answer = writer(TALK, max_new_tokens=6, do_sample=False)[0]["generated_text"][-1]
    [new] = generate_batch(model, [render(tok, TALK, True)[0]], 6, temperature=0, eot=tok.ends)
    assert answer == {"role": "assistant", "content": theirs.decode(new, skip_special_tokens=True)}


def test_the_pipeline_stops_at_the_end_of_the_turn(tmp_path):
    tok = chat_tokenizer(ByteTokenizer())
    model = make_model(tok, block_size=64)
    with torch.no_grad():
        for block in model.h:  # nothing but the last token counts
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
        model.ln_f.weight.fill_(1)
        model.wte.weight.zero_()
        model.lm_head.weight.zero_()
        model.wte.weight[tok.special["<|assistant|>"], 0] = 1
        model.lm_head.weight[[ord("y"), tok.special["<|end|>"]], [0, 1]] = 1.0
        model.wte.weight[ord("y"), 1] = 1
    export_model(model, tok, tmp_path / "out")
    writer = pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    made = writer(TALK[2:], max_new_tokens=9, do_sample=False, return_full_text=False)
    assert made[0]["generated_text"] == "y"  # with <|end|> unknown to it, it would go on


def test_an_exported_chat_opens_again_as_the_same_chat(tmp_path):
    tok = chat_tokenizer(BPE)
    export_model(make_model(tok), tok, tmp_path / "out")
    model, again, _ = open_model(tmp_path / "out")
    assert again.ends_in_order == [tok.special["<|end|>"], tok.eot] and again.start == tok.start
    assert render(again, TALK, True) == render(tok, TALK, True)
    export_model(model, again, tmp_path / "twice")
    first, second = (
        json.loads((tmp_path / x / "tokenizer_config.json").read_text()) for x in ("out", "twice")
    )
    assert first["chat_template"] == second["chat_template"] and second["eos_token"] == "<|end|>"


def test_a_list_of_tokens_takes_new_ones_only_behind_its_last():
    made = {"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}
    theirs = _with_tokens(made, {"<|x|>": 2})
    assert theirs["model"]["vocab"] == made["model"]["vocab"] and theirs["added_tokens"][0]["id"] == 2
    with pytest.raises(UserError, match="ids without tokens"):
        _with_tokens(made, {"<|x|>": 3})


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="logit_softcap = 15.0.*adapter"):
        export_model(make_model(BPE, "modern"), BPE, tmp_path / "out")
    with pytest.raises(UserError, match="the tokenizer has 257 ids, the model 360"):
        export_model(make_model(BPE), ByteTokenizer(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists"):
        export_model(make_model(BPE), BPE, tmp_path / "out")


def test_writing_stops_at_the_string_at_eot_and_at_the_limit():
    model = make_model(ByteTokenizer())
    free = write_until(model, ByteTokenizer(), "ab", [], 30)
    stop = free[2:4]
    assert write_until(model, ByteTokenizer(), "ab", [stop, "never"], 30) == free[: free.index(stop)]
    assert len(write_until(model, ByteTokenizer(), "", [], 5).encode()) <= 15
    model.config.dropout = 0.9
    assert write_until(model.train(), ByteTokenizer(), "ab", [], 30) == free and model.training
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    model.lm_head.weight.data[256] = 0  # all alike: argmax takes id 0
    assert write_until(model, ByteTokenizer(), "x", [], 3) == "\0\0\0"


def test_without_the_harness_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"tinygpt\[eval\]"):
        harness_model(make_model(BPE), BPE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tinygpt\[eval\]"):
        run_harness("folder", ["x"], "tasks")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    "A file for each task, of words from the corpus, and the tasks' definitions."
    folder = tmp_path_factory.mktemp("questions")
    rng = np.random.default_rng(0)
    words = load_corpus("sotu").val[0].split()

    def some(n):
        i = int(rng.integers(len(words) - n))
        return " ".join(words[i : i + n]).replace('"', "'")

    swag = []
    for i in range(24):
        row = {"activity_label": some(2), "ctx_a": some(int(rng.integers(3, 25))), "ctx_b": some(3) + " [x]"}
        row["endings"] = [some(int(rng.integers(1, 5))) for _ in range(4)]
        row["label"] = str(i % 4)
        swag.append(row)
    texts = [{"text": some(12)} for _ in range(24)]
    for name, rows in (("h.jsonl", swag), ("l.jsonl", texts)):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    columns = [
        *(f"InputSentence{i}" for i in range(1, 5)),
        "RandomFifthSentenceQuiz1",
        "RandomFifthSentenceQuiz2",
        "AnswerRightEnding",
    ]
    rows = [[f'"{some(4)}"' for _ in range(6)] + [str(1 + i % 2)] for i in range(24)]
    (folder / "s.csv").write_text("\n".join(",".join(r) for r in [columns, *rows]) + "\n", encoding="utf-8")
    files = {"hellaswag": folder / "h.jsonl", "lambada": folder / "l.jsonl", "storycloze": folder / "s.csv"}
    names = {task: write_harness_task(task, path, folder / "tasks") for task, path in files.items()}
    assert names == {task: f"local_{task}" for task in files}
    return folder, files, names


def test_a_task_on_a_local_file_is_told_to_the_harness_as_its_format_wants(tmp_path):
    "What lm-eval reads, seen without it."
    import yaml

    class Loader(yaml.SafeLoader):
        "Knows the harness's own tag for a function."

    Loader.add_constructor("!function", lambda loader, node: f"function {node.value}")
    data = tmp_path / "QUESTIONS.JSONL"
    data.write_text("{}\n")
    wanted = {
        "hellaswag": ("multiple_choice", {"acc", "acc_norm"}),
        "storycloze": ("multiple_choice", {"acc", "acc_norm"}),
        "lambada": ("loglikelihood", {"acc", "perplexity"}),
    }
    for task, (output, metrics) in wanted.items():
        out = tmp_path / f"tasks_{task}"
        name = write_harness_task(task, data, out)
        told = yaml.load((out / f"{name}.yaml").read_text(), Loader)
        assert told["task"] == name == f"local_{task}" and told["output_type"] == output
        assert told["dataset_path"] == "json"
        assert told["dataset_kwargs"]["data_files"][told["test_split"]] == data.resolve().as_posix()
        assert {m["metric"] for m in told["metric_list"]} == metrics
        for m in told["metric_list"]:
            better = (m["metric"] != "perplexity", "perplexity" if m["metric"] == "perplexity" else "mean")
            assert (m["higher_is_better"], m["aggregation"]) == better
        assert (out / "prepare.py").exists() == (task == "hellaswag")
    with pytest.raises(UserError, match="task = quiz is not known"):
        write_harness_task("quiz", data, tmp_path / "other")
    with pytest.raises(UserError, match="is not a file of the kinds"):
        write_harness_task("lambada", tmp_path / "none.jsonl", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@harness
@pytest.mark.parametrize(
    "kind, way", [("gpt2", "export"), ("llama", "export"), ("llama", "adapter"), ("modern", "adapter")]
)
def test_the_harness_gives_our_score_on_local_files(tmp_path, questions, kind, way):
    logging.disable(logging.WARNING)
    folder, files, names = questions
    # the harness refuses continuations that are longer than the context
    model = make_model(BPE, kind, block_size=48)
    if way == "export":
        subject = export_model(model, BPE, tmp_path / "out")
    else:
        subject = harness_model(model, BPE, batch_size=5)
    theirs = run_harness(subject, list(names.values()), folder / "tasks", batch_size=7)
    for task, path in files.items():
        ours = score_items(model, BPE, load_items(task, str(path)), batch_size=6)
        for metric, value in theirs[names[task]].items():
            assert ours[metric] == pytest.approx(value, rel=1e-4), f"{task} {metric}"
        assert {"acc"} <= set(theirs[names[task]])
    logging.disable(logging.NOTSET)


@harness
def test_the_harness_own_model_agrees_request_by_request(tmp_path):
    logging.disable(logging.WARNING)
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = make_model(BPE)
    folder = str(export_model(model, BPE, tmp_path / "out"))
    # without the flag the tokenizer's eot would stand before each question, since version 0.4.9.2
    theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=3, add_bos_token=False)
    ours = harness_model(model, BPE, batch_size=4)
    pairs = [
        ("The state of ", "the Union"),
        ("", "The people"),
        ("a" * 40, " Congress of 1790"),
        ("x", " y"),
        ("The state", " of"),
    ]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for a, b in zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert a[0] == pytest.approx(b[0], rel=1e-5) and a[1] == b[1]
    whole = ("The Union", TEXT[:400], "a")
    texts = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(whole)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), rel=1e-5)
    write = [Instance("generate_until", {}, ("The state", {"until": ["e"], "max_gen_toks": 6}), 0)]
    assert ours.generate_until(write) == theirs.generate_until(write)
    logging.disable(logging.NOTSET)


def test_a_whole_text_is_scored_token_for_token(tmp_path):
    model, ids = make_model(BPE), BPE.encode(TEXT[:300])
    [nats], _ = continuation_losses(model, [([BPE.eot], ids)])
    want, done = 0.0, 0
    while done < len(ids):  # windows of 24, the last one moved back so that it is full
        step = min(24, len(ids) - done)
        done += step
        window = torch.tensor([BPE.eot, *ids][max(0, done - 24) : done + 1])
        logp = model(window[None, :-1])[0][0].double().log_softmax(-1)
        want -= logp[torch.arange(len(window) - 1), window[1:]][-step:].sum().item()
    assert nats == pytest.approx(want, rel=1e-5)


def test_what_is_written_after_a_long_prompt_depends_on_its_end_alone():
    tok = CharTokenizer.train("".join(map(chr, range(32, 127))))
    model, end = make_model(tok), "the last words of the prompt"  # a context of 24 characters
    one = write_until(model, tok, "x" + end, [], 12)
    other = write_until(model, tok, "Something else altogether. " + end, [], 12)
    assert one == other and len(set(one)) > 1
    assert one != write_until(model, tok, end + "?", [], 12)
