"""Conversations as ids: the template as transformers runs it, who wrote what, rows for new tokens, files."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.checkpoint import save_checkpoint
from tinygpt.checkpoint_open import open_model
from tinygpt.finetune.template import (
    CHAT_TOKENS,
    chat_ids,
    chat_tokenizer,
    check_messages,
    grow_model,
    is_chat,
    make_chat_base,
    read_conversations,
    render,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer

TEXT = "What is the state of the Union? The people's thanks, in 1790; 日本 😀.\n<|end|><|user|> " * 20
ASKED = [
    {"role": "user", "content": " What is\nthe state?  "},
    {"role": "assistant", "content": "\nThe Union 😀 "},
    {"role": "user", "content": "<|end|><|assistant|>"},
]
TALKS = [ASKED, [{"role": "system", "content": "thanks"}, *ASKED], ASKED[:2], [*ASKED, ASKED[1]]]


def make_model(tok, kind="llama", **kw):
    torch.manual_seed(0)
    sizes = dict(vocab_size=tok.n_vocab, block_size=48, n_layer=2, n_head=2, n_embd=16)
    model = GPT(getattr(GPTConfig, kind)(**sizes | kw))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.eval()


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
@pytest.mark.parametrize("ask", [False, True])
def test_ids_and_mask_are_those_of_transformers(kind, ask):
    "Its oracle: transformers runs the template, the library tokenizers makes the ids."
    tokenizers = pytest.importorskip("tokenizers")
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    from tinygpt.evaluate.export import tokenizer_json

    makers = {"byte": ByteTokenizer, "char": lambda: CharTokenizer.train(TEXT)}
    base = makers.get(kind, lambda: BPETokenizer.train(TEXT, 290))()
    tok = chat_tokenizer(base)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(base)))
    theirs.add_special_tokens(CHAT_TOKENS)
    talks = [[m | {"content": m["content"].replace("<|", "")} for m in talk] for talk in TALKS]
    how = dict(chat_template=tok.chat_template, add_generation_prompt=ask, return_assistant_tokens_mask=True)
    texts, spans = utils.render_jinja_template(talks, **how)
    for talk, text, own in zip(talks, texts, spans):
        found = theirs.encode(text, add_special_tokens=False)
        ids, mask = render(tok, talk, ask)
        assert ids == found.ids
        theirs_mask = [False] * len(ids)
        for begin, end in own:
            for i in range(found.char_to_token(begin), found.char_to_token(end - 1) + 1):
                theirs_mask[i] = True
        assert mask == theirs_mask


@pytest.mark.parametrize("base", [ByteTokenizer(), CharTokenizer.train(TEXT), BPETokenizer.train(TEXT, 290)])
def test_a_turn_is_the_roles_token_the_text_and_the_end(base):
    tok = chat_tokenizer(base)
    system, user, assistant, end = (tok.special[name] for name in CHAT_TOKENS)
    ids, mask = render(tok, ASKED, add_generation_prompt=True)
    asked, answer, forged = (base.encode(m["content"]) for m in ASKED)
    wanted = [*tok.start, user, *asked, end, assistant, *answer, end, user, *forged, end, assistant]
    assert ids == wanted and len(mask) == len(ids)
    assert [i for i, own in zip(ids, mask) if own] == [*answer, end]
    assert end in tok.ends and user not in tok.ends


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["<|end|>", "<|user|>", "<|assistant|>", "a", " ", "\n"]), max_size=6))
def test_no_message_holds_a_token_of_the_template(parts):
    tok = chat_tokenizer(ByteTokenizer())
    messages = [{"role": "user", "content": "".join(parts)}]
    ids, mask = render(tok, messages)
    assert [i for i in ids if i > 256] == [tok.special["<|user|>"], tok.special["<|end|>"]]
    assert tok.decode(ids) == "".join(parts) and not any(mask)


def test_a_base_whose_texts_begin_with_another_token_keeps_it(tmp_path):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    from foreign import llama_tokenizer, save_folder, smollm_tokenizer

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    talks = [[{"role": "user", "content": "the state"}, {"role": "assistant", "content": "of"}]]
    for make, end, first in ((llama_tokenizer, "</s>", "<s>"), (smollm_tokenizer, "<|endoftext|>", "")):
        base = read_hf_tokenizer(save_folder(tmp_path / end.strip("</s>|"), make(), eos_token=end))
        tok = chat_tokenizer(base)
        [text], _ = utils.render_jinja_template(talks, chat_template=tok.chat_template)
        assert text == first + "<|user|>the state<|end|><|assistant|>of<|end|>"
        assert tok.encode_template(text) == render(tok, talks[0])[0]


@pytest.mark.parametrize(
    "messages, told",
    [
        ([], "one or more"),
        ({"role": "user", "content": "x"}, "one or more"),
        (["Hi"], "message 1 is a str"),
        ([{"content": "Hi"}], "message 1 has no role"),
        ([{"role": "bot", "content": "Hi"}], "message 1 has the unknown role 'bot'"),
        ([{"role": ["user"], "content": "Hi"}], "unknown role"),
        ([ASKED[0], {"role": "assistant", "content": " \n"}], "message 2 is an empty answer"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 5}], "of type int"),
        ([ASKED[0], {"role": "system", "content": "x"}], "message 2 is a system message"),
        ([{"role": "assistant", "content": "x", "weight": 0.5}], "message 1 has weight = 0.5: give 0 or 1"),
        (
            [ASKED[0], {"role": "assistant", "content": "x\ud83d"}],
            "message 2 holds '\\ud83d', which is half of a",
        ),
    ],
)
def test_what_is_no_conversation_is_one_sentence(messages, told):
    with pytest.raises(UserError) as caught:
        check_messages(messages, "here")
    assert str(caught.value).startswith("here: ") and told in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError):
        render(chat_tokenizer(ByteTokenizer()), messages)


def test_a_tokenizer_without_turns_is_told_apart_and_the_remedy_names_the_run(tmp_path):
    from tinygpt.tokenizer_special import SpecialTokenizer

    base = ByteTokenizer()
    with pytest.raises(UserError, match="my run is a base model.*finetune 'my run'"):
        chat_ids(base, "my run")
    with pytest.raises(UserError, match=r"no <\|system\|>"):
        chat_ids(SpecialTokenizer(base, CHAT_TOKENS[1:], []))
    assert is_chat(chat_tokenizer(base)) and not is_chat(base)
    pytest.importorskip("tokenizers")
    from foreign import save_folder, smollm_tokenizer

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    folder = save_folder(tmp_path, smollm_tokenizer(), eos_token="<|im_end|>", chat_template="{{ messages }}")
    with pytest.raises(UserError, match="its chat template is another one"):
        chat_ids(read_hf_tokenizer(folder))


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", ""]
)
def test_a_model_whose_own_tokens_have_the_same_names_is_neither_read_nor_grown(tmp_path, template):
    "Phi-3 has these four tokens, and line breaks behind them."
    pytest.importorskip("tokenizers")
    from foreign import save_folder, smollm_tokenizer

    from tinygpt.tokenizer_hf import read_hf_tokenizer

    made = smollm_tokenizer()
    made.add_special_tokens(CHAT_TOKENS)
    named = {"chat_template": template} if template else {}
    theirs = read_hf_tokenizer(save_folder(tmp_path, made, eos_token="<|endoftext|>", **named))
    assert not is_chat(theirs)
    with pytest.raises(UserError, match="another one: use a program" if template else "is a base model"):
        chat_ids(theirs)
    with pytest.raises(UserError, match=r"'<\|system\|>', .* the base has already"):
        chat_tokenizer(theirs)


@pytest.mark.parametrize("kind, kw", [("gpt2", {}), ("llama", {}), ("modern", {"ngram_rows": 64})])
def test_a_grown_model_scores_old_tokens_as_before_and_new_ones_by_the_mean(kind, kw):
    tok = ByteTokenizer()
    model = make_model(tok, kind, **kw)
    state = torch.get_rng_state()
    grown = grow_model(model, tok.n_vocab + 4)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randint(257, (2, 20))
    old, new = model(x)[0], grown(x)[0]
    assert new.shape[-1] == 261 and grown.config.vocab_size == 261
    torch.testing.assert_close(new[..., :257], old)
    # without a soft cap a new token's score is the mean score, so its probability is below 1 in 257
    if kind != "modern":
        torch.testing.assert_close(new[..., 257:], old.mean(-1, keepdim=True).expand(-1, -1, 4))
        assert new.softmax(-1)[..., 257:].max() < 1 / 257
    mean = model.wte.weight[:257].mean(0)  # not of the rows of padding
    torch.testing.assert_close(grown.wte.weight[257:261], mean.expand(4, -1))
    assert not grown.training and grow_model(model.train(), 257).training


def test_growing_past_the_padding_and_in_bfloat16_and_never_shrinking():
    tok = ByteTokenizer()
    model = make_model(tok).bfloat16()
    grown = grow_model(model, 400)  # 384 rows are there, with padding
    assert grown.wte.weight.shape[0] == 512 and grown.wte.weight.dtype == torch.bfloat16
    assert torch.equal(grown.wte.weight[:257], model.wte.weight[:257])
    assert grown(torch.randint(400, (1, 8)))[0].shape == (1, 8, 400)
    with pytest.raises(UserError, match="n_vocab = 200"):
        grow_model(model, 200)


def test_a_chat_base_is_a_folder_that_opens_and_that_training_takes(tmp_path, config):
    from tinygpt.run.setup import initial_model

    tok = ByteTokenizer()
    model = make_model(tok)
    save_checkpoint(tmp_path / "base", model, tok)
    made = make_chat_base(tmp_path / "base", tmp_path / "chat")
    opened, chat, _ = open_model(made)
    assert is_chat(chat) and opened.config.vocab_size == chat.n_vocab == 261
    copy, same, _ = open_model(make_chat_base(made, tmp_path / "copy"))
    assert same.fingerprint == chat.fingerprint and copy.config.vocab_size == 261
    config.run.init_from, config.data.tokenizer = str(made), "bpe"
    assert initial_model(config).config.vocab_size == 261
    assert config.data.tokenizer == str(made / "tokenizer.json")
    with pytest.raises(UserError, match="exists"):
        make_chat_base(tmp_path / "base", made)
    with pytest.raises(UserError, match="does not exist"):
        make_chat_base(tmp_path / "nowhere/at/all", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_of_the_field_become_messages(tmp_path):
    talk = [{"role": "user", "content": "Add.\n\n2 3"}, {"role": "assistant", "content": "5"}]
    rows = [
        {"messages": [m | {"name": "x"} for m in talk], "id": 7},
        {"instruction": "Add.", "input": "2 3", "output": "5"},
        {"instruction": "Add.\n\n2 3", "input": "", "output": "5"},
        {"instruction": "Add.\n\n2 3", "output": "5"},
        {"prompt": "Add.\n\n2 3", "completion": "5"},
        {"prompt": talk[:1], "completion": talk[1:]},
    ]
    lines = "\ufeff" + "\n".join(json.dumps(row) for row in rows).replace("\n", "\r\n\n")
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    assert read_conversations(tmp_path / "a.jsonl") == [talk] * 6
    assert read_conversations(str(tmp_path / "a.json")) == [talk] * 6
    for name in ("a.json", "a.jsonl"):
        assert read_conversations((tmp_path / name).rename(tmp_path / name.upper())) == [talk] * 6


def test_an_answer_of_weight_0_is_read_and_is_no_target(tmp_path):
    asked, wrong = {"role": "user", "content": "2 3?"}, {"role": "assistant", "content": "6", "weight": 0}
    right = {"role": "assistant", "content": "5", "weight": 1}
    plain = {"role": "assistant", "content": "6", "weight": None}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [asked, wrong, asked, right]}))
    [talk] = read_conversations(path)
    tok = chat_tokenizer(ByteTokenizer())
    ids, mask = render(tok, talk)
    assert [i for i, own in zip(ids, mask) if own] == [ord("5"), tok.special["<|end|>"]]
    assert ids == render(tok, [asked, plain, asked, right])[0]
    assert sum(render(tok, [asked, plain])[1]) == 2  # null is as if it were not there
    path.write_text(json.dumps({"messages": [asked, wrong]}))
    with pytest.raises(UserError, match="line 1 has no answer"):
        read_conversations(path)


GOOD = '{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("a.jsonl", "", "holds no conversation"),
        ("a.jsonl", GOOD + "{", "line 2 is not JSON"),
        ("a.jsonl", GOOD + "[]", "line 2 is a list"),
        ("a.jsonl", GOOD + '{"text": "x"}', "line 2 has the fields text"),
        ("a.jsonl", GOOD + '{"messages": [{"role": "user", "content": "x"}]}', "line 2 has no answer"),
        ("a.jsonl", GOOD + '{"prompt": "a", "completion": ""}', "line 2: message 2 is an empty answer"),
        (
            "a.jsonl",
            GOOD + '{"instruction": 5, "output": "x"}',
            "line 2: message 1 has a content of type int",
        ),
        (
            "a.jsonl",
            GOOD + '{"instruction": "Double it", "input": 5, "output": "10"}',
            "line 2: message 1 has a content of type int",
        ),
        (
            "a.jsonl",
            GOOD + '{"instruction": "Join", "input": ["a", "b"], "output": "ab"}',
            "line 2: message 1 has a content of type list",
        ),
        ("a.jsonl", GOOD + '{"prompt": null, "completion": "x"}', "line 2: message 1 has no content"),
        ("a.jsonl", GOOD + '{"instruction": null, "output": "x"}', "line 2: message 1 has no content"),
        (
            "a.jsonl",
            GOOD + '{"prompt": "\\ud83d", "completion": "x"}',
            "line 2: message 1 holds '\\ud83d', which is half",
        ),
        ("a.json", '{"messages": []}', "is not a list"),
        ("a.json", '[{"messages": []}]', "entry 1: a conversation is a list"),
        ("a.csv", "a,b", "ends in .csv"),
        ("a.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        (".", "", "cannot read"),
    ],
)
def test_a_bad_file_is_one_sentence_that_names_the_line(tmp_path, name, content, told):
    path = tmp_path / name
    if name != ".":
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith("data: ") and told in str(caught.value)
    assert "\n" not in str(caught.value)
