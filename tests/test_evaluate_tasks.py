"""Completion tasks.

The losses against one at a time, the readers against the files of the field, the intervals against
their definition.
"""

import gzip
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from tinygpt.evaluate.tasks import (
    TASKS,
    Item,
    continuation_losses,
    encode_pair,
    evaluate_task,
    hellaswag_item,
    lambada_item,
    load_items,
    pair_windows,
    read_rows,
    score_items,
    task_line,
    wilson_interval,
)
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import BPETokenizer, ByteTokenizer

T = 12  # context of the test models


def make_model(kind="llama", seed=0, scale=0.3):
    torch.manual_seed(seed)
    model = GPT(getattr(GPTConfig, kind)(vocab_size=257, block_size=T, n_layer=2, n_head=2, n_embd=16))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=scale)
    return model.eval()


def random_pairs(n, longest, seed=0):
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(n):
        before = rng.integers(0, 256, rng.integers(1, longest)).tolist()
        after = rng.integers(0, 256, rng.integers(1, longest)).tolist()
        pairs.append((before, after))
    return pairs


@torch.no_grad()
def slow_loss(model, before, after):
    "One token at a time, each with a forward of its own: (nats, whether each token was the likeliest)."
    nats = 0.0
    greedy = True
    for i, token in enumerate(after):
        if len(after) <= T:  # one window, which ends with the last target
            context = (before + after)[-(T + 1) :][: -(len(after) - i)]
        else:  # windows of T targets, the last one moved back so that it is full
            end = min(len(after), (i // T + 1) * T)
            context = (before[-1:] + after)[end - T : i + 1]
        logits = model(torch.tensor([context]))[0][0, -1].double()
        nats += F.cross_entropy(logits, torch.tensor(token)).item()
        greedy &= logits.argmax().item() == token
    return nats, greedy


@pytest.mark.parametrize("kind", ["gpt2", "llama", "modern"])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_padded_batches_equal_one_token_at_a_time(kind, batch_size):
    model = make_model(kind)
    pairs = random_pairs(15, 10) + random_pairs(5, 40, seed=1)  # the later ones do not fit into the context
    nats, greedy = continuation_losses(model, pairs, batch_size)
    for (before, after), n, g in zip(pairs, nats, greedy, strict=True):
        want, want_greedy = slow_loss(model, before, after)
        assert n == pytest.approx(want, rel=1e-5, abs=1e-5)
        assert g == want_greedy


def test_the_order_of_the_questions_changes_nothing():
    model, pairs = make_model(), random_pairs(20, 30)
    nats, _ = continuation_losses(model, pairs, 4)
    order = np.random.default_rng(0).permutation(20)
    shuffled, _ = continuation_losses(model, [pairs[i] for i in order], 4)
    np.testing.assert_allclose(shuffled, nats[order], rtol=1e-5)


def test_a_continuation_that_greedy_decoding_writes_is_seen():
    model, ids = make_model(), [5, 6]
    for _ in range(4):
        ids.append(model(torch.tensor([ids]))[0][0, -1].argmax().item())
    _, greedy = continuation_losses(model, [(ids[:2], ids[2:]), (ids[:2], [*ids[2:5], (ids[5] + 1) % 256])])
    assert greedy.tolist() == [True, False]


def test_the_model_comes_back_in_the_mode_it_was_in():
    model = make_model().train()
    continuation_losses(model, random_pairs(2, 5))
    assert model.training


@given(st.integers(1, 30), st.integers(1, 60), st.integers(1, 20))
def test_windows_score_each_id_once_and_fit(n_before, n_after, block_size):
    before, after = list(range(n_before)), list(range(1000, 1000 + n_after))
    windows = list(pair_windows(before, after, block_size))
    assert sum([ids[-k:] for ids, k in windows], []) == after
    whole = before + after
    for ids, k in windows:
        assert k < len(ids) <= block_size + 1
        start = whole.index(ids[0])
        assert whole[start : start + len(ids)] == ids  # a piece of the text as it stands
    if n_before + n_after <= block_size + 1:
        assert windows == [(whole, n_after)]


def harness_split(tok, context, continuation):
    "What lm-evaluation-harness documents: spaces at the end of the context move, then whole minus context."
    n = len(context) - len(context.rstrip())
    if n:
        continuation, context = context[-n:] + continuation, context[:-n]
    whole = tok.encode(context + continuation)
    return tok.encode(context), whole[len(tok.encode(context)) :]


BPE = BPETokenizer.train(["the cat sat on the mat, and the union of the states " * 40], 280)


@given(
    st.text(alphabet="the cats, un.", min_size=1, max_size=30).filter(str.strip),
    st.sampled_from([" the", " state", " on the mat", "  the", "e cat", "s of", "t, and"]),
)
@example("the sta", "tes of the union")
def test_pairs_are_split_as_the_harness_splits_them(context, continuation):
    want = harness_split(BPE, context, continuation)
    if want[1]:  # nothing at all is left where one token swallows the border: the harness stops there
        assert encode_pair(BPE, context, continuation) == want


def test_the_space_belongs_to_the_continuation_wherever_it_was_typed():
    split = (BPE.encode("on the"), BPE.encode(" mat"))
    assert encode_pair(BPE, "on the ", "mat") == encode_pair(BPE, "on the", " mat") == split
    assert encode_pair(BPE, "", "the mat") == ([BPE.eot], BPE.encode("the mat"))
    before, after = encode_pair(BPE, "th", "e")  # one token over the border: something is left to score
    assert len(after) >= 1


def test_sums_prefer_short_options_and_lengths_make_up_for_it():
    # all 257 ids equally likely: a loss of ln 257 for each byte, the space included
    model = make_model(scale=0.0)
    items = [
        Item("x", [" a", " bbbb", " cc", " dd"], 1),
        Item("x", [" a", " bb", " c", " d"], 1),
        Item("x", [" a", " bb", " c", " d"], 0),
    ]
    result = score_items(model, ByteTokenizer(), items)
    assert result["acc"] == 1 / 3  # the sums take option 0 each time
    assert result["acc_norm"] == 2 / 3  # per character of the option 2/1, 5/4, 3/2: option 1 each time
    assert result["acc_95"] == list(wilson_interval(1, 3)) and result["n"] == 3


def test_the_last_word_counts_where_all_its_tokens_are_the_likeliest():
    model, items = make_model(), [Item("abc", [" de"], 0), Item("abd", [" f"], 0), Item("b", [" g"], 0)]
    result = score_items(model, ByteTokenizer(), items)
    losses = [slow_loss(model, *encode_pair(ByteTokenizer(), i.context, i.options[0])) for i in items]
    assert result["acc"] == sum(g for _, g in losses) / 3
    assert result["perplexity"] == pytest.approx(math.exp(sum(n for n, _ in losses) / 3), rel=1e-4)
    assert result["sampled"] == pytest.approx(sum(math.exp(-n) for n, _ in losses) / 3, rel=1e-4)
    assert result["perplexity_95"][0] < result["perplexity"] < result["perplexity_95"][1]


def test_wilson_intervals_end_where_the_count_is_just_surprising():
    for right, n in ((0, 20), (3, 20), (310, 1000), (20, 20)):
        low, high = wilson_interval(right, n)
        for p in (low, high):
            if 0 < p < 1:
                assert abs(right / n - p) / math.sqrt(p * (1 - p) / n) == pytest.approx(1.96, abs=1e-3)
        assert 0 <= low <= right / n <= high <= 1
    assert wilson_interval(0, 20)[0] == 0 and wilson_interval(20, 20)[1] == 1


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_about_95_of_100_wilson_intervals_hold_the_truth(p):
    counts = np.random.default_rng(0).binomial(200, p, size=3000)
    hits = [low < p < high for low, high in (wilson_interval(int(c), 200) for c in counts)]
    assert 0.93 < np.mean(hits) < 0.97


SWAG = {
    "ind": 1,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is on a roof.",
    "ctx_b": "he",
    "ctx": "A man is on a roof. he",
    "endings": ["uses [substeps] wrap.", "is [title] ripping.", "holds  it.", "starts."],
    "label": "3",
}


def test_hellaswag_is_read_as_the_harness_reads_it():
    item = hellaswag_item(SWAG)
    assert item.context == "Roof shingle removal: A man is on a roof. He"
    assert item.options == [" uses wrap.", " is. ripping.", " holds it.", " starts."] and item.label == 3
    plain = {k: SWAG[k] for k in ("ctx", "endings", "label")}
    assert hellaswag_item(plain).context == "A man is on a roof. he"


def test_the_harness_itself_agrees_on_hellaswag():
    missing = "lm-evaluation-harness is not installed"
    utils = pytest.importorskip("lm_eval.tasks.hellaswag.utils", reason=missing)
    import datasets

    marked = {
        "ctx_b": "[header] THE next [step] Step  two",
        "endings": [" a [x] b", "[title] c", "d  e", "f"],
    }
    rows = [SWAG, SWAG | marked]
    for doc, row in zip(utils.process_docs(datasets.Dataset.from_list(rows)), rows):
        item = hellaswag_item(row)
        assert item.context == doc["query"]
        assert item.options == [" " + c for c in doc["choices"]]
        assert item.label == doc["gold"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


SENTENCES = "InputSentence1,InputSentence2,InputSentence3,InputSentence4"
HEADER = f"InputStoryid,{SENTENCES},RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"


def test_storycloze_is_read_from_its_csv(tmp_path):
    row = '1,"Ann, 9, ran.",She fell.,It hurt.,She cried.,She laughed.,Mum came.,2\n'
    path = write(tmp_path / "s.csv", "\ufeff" + HEADER + row)
    [item] = load_items("storycloze", path)
    assert item == Item("Ann, 9, ran. She fell. It hurt. She cried.", [" She laughed.", " Mum came."], 1)


@pytest.mark.parametrize("name", ["l.jsonl", "l.jsonl.gz"])
def test_lambada_is_read_from_its_jsonl(tmp_path, name):
    path = write(tmp_path / name, '{"text": "he said \\"no\\" to the king"}\n\n{"text": "a b"}\n')
    assert load_items("lambada", path) == [Item('he said "no" to the', [" king"], 0), Item("a", [" b"], 0)]
    assert len(load_items("lambada", path, limit=1)) == 1


def test_parquet_and_remote_files_are_read(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    fsspec = pytest.importorskip("fsspec")
    pq.write_table(pa.Table.from_pylist([SWAG] * 3), tmp_path / "h.parquet")
    assert load_items("hellaswag", str(tmp_path / "h.parquet")) == [hellaswag_item(SWAG)] * 3
    with fsspec.open("memory://tinygpt-test/words.jsonl", "w") as file:
        file.write('{"text": "far away"}\n')
    assert load_items("lambada", "memory://tinygpt-test/words.jsonl") == [Item("far", [" away"], 0)]


def test_the_hub_is_asked_where_no_file_is_given(monkeypatch):
    asked = []

    def read(data):
        asked.append(data)
        return iter([("x row 1", {"text": "a b"})])

    monkeypatch.setattr("tinygpt.evaluate.tasks.read_rows", read)
    load_items("lambada")
    assert asked == [TASKS["lambada"].hub] and asked[0].startswith("hf://datasets/")


BAD_ROWS = [
    # task, file, text, what is said
    ("lambada", "a.jsonl", '{"txt": "x"}\n', "a.jsonl row 1 has no column text (it has txt)"),
    ("lambada", "a.jsonl", '{"text": "a b"}\n{"text": "x"\n', "a.jsonl line 2 is not json"),
    (
        "lambada",
        "a.jsonl",
        '{"text": "word"}\n',
        "row 1 cannot be read as lambada (text has no word before its last one",
    ),
    ("lambada", "a.jsonl", '{"text": 5}\n', "text is 5, not text"),
    ("lambada", "a.jsonl", '["a b"]\n', "row 1 cannot be read"),
    ("lambada", "a.jsonl", "", "is empty"),
    ("storycloze", "s.csv", HEADER, "has no rows"),
    ("storycloze", "s.csv", HEADER + "1,a,b,c,d,e,f,3\n", "row 1 has 2 options, label 2"),
    ("storycloze", "s.csv", HEADER + "1,a,b,c,d,e,f,0\n", "row 1 has 2 options, label -1"),
    (
        "storycloze",
        "s.csv",
        HEADER + "1,a,b,c,d,e,f,x\n",
        "row 1 cannot be read as storycloze (AnswerRightEnding is",
    ),
    (
        "storycloze",
        "s.csv",
        HEADER + "1,a,b\n",
        "row 1 cannot be read as storycloze (InputSentence3 is None",
    ),
    ("storycloze", "s.csv", "a,b\n1,2\n", "row 1 has no column InputSentence1 (it has a, b)"),
    ("hellaswag", "h.jsonl", json.dumps(SWAG | {"label": 4}) + "\n", "row 1 has 4 options, label 4"),
    # the test split has no labels
    ("hellaswag", "h.jsonl", json.dumps(SWAG | {"label": ""}) + "\n", "row 1 cannot be read as hellaswag"),
    ("hellaswag", "h.jsonl", json.dumps(SWAG | {"endings": ["a"]}) + "\n", "row 1 has 1 options"),
    (
        "hellaswag",
        "h.jsonl",
        json.dumps(SWAG | {"endings": ["a", "[x]", "b", "c"]}) + "\n",
        "an empty option",
    ),
    ("hellaswag", "h.docx", "x", "holds no file of the kinds"),
    ("piqa", "a.jsonl", "", "task = piqa is not known"),
]


@pytest.mark.parametrize("task, name, text, sentence", BAD_ROWS)
def test_what_cannot_be_read_is_named_with_file_and_row(tmp_path, task, name, text, sentence):
    with pytest.raises(UserError) as error:
        load_items(task, write(tmp_path / name, text))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["l.jsonl.gz", "l.csv", "l.parquet"])
def test_a_damaged_file_is_named_in_a_sentence(tmp_path, name):
    whole = gzip.compress(b'{"text": "a b"}\n' * 1000)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2] if name.endswith(".gz") else b"text\n\xff\xfe\n")
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        load_items("lambada", str(tmp_path / name))


def test_a_file_that_does_not_exist_is_named(tmp_path):
    for name in ("no.csv", "no.jsonl"):
        with pytest.raises(UserError, match=f"{name} does not exist"):
            list(read_rows(str(tmp_path / name)))


def test_the_last_word_is_what_follows_the_last_space():
    assert lambada_item({"text": "it is well-known"}) == Item("it is", [" well-known"], 0)
    with pytest.raises(ValueError):
        lambada_item({"text": "ends in a space "})


def test_published_numbers_are_those_of_the_papers():
    published = {name: task.published["GPT-3 Small (Brown et al. 2020)"] for name, task in TASKS.items()}
    assert published == {"hellaswag": 33.7, "storycloze": 63.3, "lambada": 42.7}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_the_losses_of_the_cpu():
    model, pairs = make_model(), random_pairs(20, 30)
    want, _ = continuation_losses(model, pairs)
    got, _ = continuation_losses(model.to("cuda"), pairs)
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_a_task_is_asked_as_told_and_stands_beside_what_was_published(tmp_path):
    model, tok = make_model(), ByteTokenizer()
    path = tmp_path / "l.jsonl"
    path.write_text("".join(json.dumps({"text": f"a {c} b {c}"}) + "\n" for c in "xyzuvw"))
    result = evaluate_task(model, tok, "lambada", str(path), limit=4, batch_size=3)
    scores = score_items(model, tok, load_items("lambada", str(path), 4), 6)
    assert result["n"] == 4 and result["perplexity"] == pytest.approx(scores["perplexity"], rel=1e-5)
    asked = dict(task="lambada", data=str(path), limit=4, published=TASKS["lambada"].published)
    assert asked.items() <= result.items()
    assert set(scores) <= set(result)


def test_the_line_of_a_task_shows_its_metric_first_with_intervals_and_the_published_ones():
    result = dict(task="hellaswag", n=20, options=4, published={"GPT-2": 29.4})
    result |= dict(acc=0.25, acc_95=[0.1, 0.5], acc_norm=0.3, acc_norm_95=[0.15, 0.55])
    line = "acc_norm 30.0 % [15.0, 55.0], acc 25.0 % [10.0, 50.0]; n = 20 | GPT-2 29.4 %"
    assert task_line(result) == f"hellaswag: {line}"
    result = dict(task="lambada", n=7, options=1, published={}, acc=1.0, acc_95=[0.6, 1.0])
    result |= dict(sampled=0.125, perplexity=8.0, perplexity_95=[4.0, 16.0])
    line = "acc 100.0 % [60.0, 100.0], sampled 12.5 %, perplexity 8.00 [4.00, 16.00]; n = 7 | "
    assert task_line(result) == f"lambada: {line}"
