"""Completion tasks.

The losses against one at a time, the readers against the files of the field, the intervals against
their definition.
"""

import gzip
import itertools
import json
import math
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from tinygpt.evaluate.tasks import (
    TASKS,
    Item,
    centered_accuracy,
    continuation_losses,
    encode_pair,
    evaluate_task,
    exact_match,
    few_shot,
    hellaswag_item,
    lambada_item,
    load_items,
    mean_centered_accuracy,
    pair_windows,
    pass_at_k,
    read_rows,
    score_completions,
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
    assert tuple(result["acc_95"]) == wilson_interval(1, 3) and result["n"] == 3


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
            if 1e-12 < p < 1 - 1e-12:
                assert abs(right / n - p) / math.sqrt(p * (1 - p) / n) == pytest.approx(1.96, abs=1e-3)
        assert 0 <= low <= right / n + 1e-12 and right / n - 1e-12 <= high <= 1
    ends = wilson_interval(0, 20)[0], wilson_interval(20, 20)[1]
    assert ends == pytest.approx((0, 1), abs=1e-12)


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
    path.write_bytes(gzip.compress(text.encode()) if path.suffix.lower() == ".gz" else text.encode())
    return str(path)


SENTENCES = "InputSentence1,InputSentence2,InputSentence3,InputSentence4"
HEADER = f"InputStoryid,{SENTENCES},RandomFifthSentenceQuiz1,RandomFifthSentenceQuiz2,AnswerRightEnding\n"


def test_storycloze_is_read_from_its_csv(tmp_path):
    row = '1,"Ann, 9, ran.",She fell.,It hurt.,She cried.,She laughed.,Mum came.,2\n'
    path = write(tmp_path / "s.csv", "\ufeff" + HEADER + row)
    [item] = load_items("storycloze", path)
    assert [item] == load_items("storycloze", str(shutil.copy(path, tmp_path / "CAPITALS.CSV")))
    assert item == Item("Ann, 9, ran. She fell. It hurt. She cried.", [" She laughed.", " Mum came."], 1)


@pytest.mark.parametrize("name", ["l.jsonl", "l.jsonl.gz", "L.JSONL.GZ"])
def test_lambada_is_read_from_its_jsonl(tmp_path, name):
    path = write(tmp_path / name, '\ufeff{"text": "he said \\"no\\" to the king"}\n\n{"text": "a b"}\n')
    assert load_items("lambada", path) == [Item('he said "no" to the', [" king"], 0), Item("a", [" b"], 0)]
    assert len(load_items("lambada", path, limit=1)) == 1


@pytest.mark.parametrize("name", ["h.parquet", "H.PARQUET"])
def test_parquet_and_remote_files_are_read(tmp_path, name):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    fsspec = pytest.importorskip("fsspec")
    pq.write_table(pa.Table.from_pylist([SWAG] * 3), tmp_path / name)
    assert load_items("hellaswag", str(tmp_path / name)) == [hellaswag_item(SWAG)] * 3
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
        "row 1 cannot be read as lambada (",
    ),
    ("lambada", "a.jsonl", '{"text": 5}\n', "text is 5, not text"),
    ("lambada", "a.jsonl", '["a b"]\n', "row 1 cannot be read"),
    ("lambada", "a.jsonl", "", "a.jsonl has no rows"),
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
    ("storycloze", "s.csv", "", "s.csv has no rows"),
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


def test_the_second_half_of_a_context_is_capitalized_as_the_harness_does_it():
    row = SWAG | dict(ctx_a="A man waits.", ctx_b="he sees Tom", activity_label="Waiting")
    assert hellaswag_item(row).context == "Waiting: A man waits. He sees tom"  # str.capitalize


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
    for key, value in asked.items():
        assert result[key] == value, key
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


QUESTIONS = [Item(f"{i} and {i}", [f" {i}", f" {2 * i}", " none"], 1) for i in range(12)]


def test_solved_examples_stand_before_the_question_and_it_is_never_among_them():
    for k in (0, 1, 4, 11):
        shown = few_shot(QUESTIONS, k)
        for item, asked in zip(QUESTIONS, shown, strict=True):
            *examples, question = asked.context.split("\n\n")
            assert question == item.context and (asked.options, asked.label) == (item.options, item.label)
            others = {q.context + q.options[q.label] for q in QUESTIONS if q != item}
            assert len(examples) == k and set(examples) <= others and len(set(examples)) == k


def test_the_draws_are_those_of_the_harness_as_its_sampler_is_written():
    """One generator for all questions. From the task's own questions one more is drawn than is needed.

    Then the question is struck out.
    """
    for pool in (None, [Item(f"{i} plus 0", [f" {i}"], 0) for i in range(30)]):
        rng = random.Random(1234)
        for item, asked in zip(QUESTIONS, few_shot(QUESTIONS, 3, pool), strict=True):
            source = QUESTIONS if pool is None else pool
            drawn = [e for e in rng.sample(source, 3 if pool else 4) if e != item][:3]
            lines = [e.context + e.options[e.label] for e in drawn]
            assert asked.context == "\n\n".join([*lines, item.context])
    assert few_shot(QUESTIONS, 2, seed=1) == few_shot(QUESTIONS, 2, seed=1) != few_shot(QUESTIONS, 2, seed=2)


@pytest.mark.parametrize("own", [True, False])
def test_the_harness_itself_builds_the_same_prompts(tmp_path, own):
    missing = "lm-evaluation-harness is not installed"
    task = pytest.importorskip("lm_eval.api.task", reason=missing)
    rows = [dict(q=f"{i} and {i}", choices=[str(i), str(2 * i), "none"], gold=1) for i in range(12)]
    more = [dict(q=f"{i} plus 0", choices=[str(i), "x", "y"], gold=0) for i in range(20)]
    files = {}
    for split, content in (("test", rows), ("train", more)):
        files[split] = str(tmp_path / f"{split}.jsonl")
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    config = dict(task="sums", dataset_path="json", dataset_kwargs=dict(data_files=files), test_split="test")
    config |= dict(output_type="multiple_choice", doc_to_text="{{q}}", doc_to_target="gold")
    config |= dict(doc_to_choice="choices", fewshot_split="test" if own else "train")
    theirs = task.ConfigurableTask(config=config)
    theirs.set_fewshot_seed(1234)
    pool = None if own else [Item(r["q"], [" " + c for c in r["choices"]], r["gold"]) for r in more]
    ours = few_shot(QUESTIONS, 3, pool)
    for doc, asked in zip(theirs.test_docs(), ours, strict=True):
        assert theirs.fewshot_context(doc, num_fewshot=3) == asked.context


def test_a_question_that_is_in_the_pool_is_replaced_there():
    pool = [*QUESTIONS[:4], *QUESTIONS[:4]]
    for item, asked in zip(QUESTIONS[:4], few_shot(QUESTIONS[:4], 2, pool)):
        assert asked.context.count(item.context) == 1 and asked.context.count("\n\n") == 2


def test_too_few_examples_are_told_in_a_sentence():
    for pool, k in ((None, 12), (QUESTIONS[:2], 3), ([QUESTIONS[0]] * 5, 2)):
        with pytest.raises(UserError, match="few-shot examples: .* questions are needed"):
            few_shot(QUESTIONS, k, pool)


def test_a_task_is_asked_with_examples_from_the_whole_file_or_from_another(tmp_path):
    model, tok = make_model(), ByteTokenizer()
    path, other = tmp_path / "l.jsonl", tmp_path / "o.jsonl"
    path.write_text("".join(json.dumps({"text": f"{c} {c}"}) + "\n" for c in "xyzuvw"))
    other.write_text("".join(json.dumps({"text": f"{c} {c}"}) + "\n" for c in "abcde"))
    result = evaluate_task(model, tok, "lambada", str(path), limit=4, shots=2)
    items = few_shot(load_items("lambada", str(path)), 2)[:4]
    assert result["perplexity"] == pytest.approx(score_items(model, tok, items)["perplexity"], rel=1e-6)
    assert result["n"] == 4 and result["few_shot"] == 2 and "n = 4, 2-shot" in task_line(result)
    result = evaluate_task(model, tok, "lambada", str(path), shots=1, examples=str(other))
    items = few_shot(load_items("lambada", str(path)), 1, load_items("lambada", str(other)))
    assert result["perplexity"] == pytest.approx(score_items(model, tok, items)["perplexity"], rel=1e-6)
    assert result["examples"] == str(other)
    assert "few_shot" not in evaluate_task(model, tok, "lambada", str(path))


def test_questions_that_do_not_fit_are_counted():
    model, tok = make_model(), ByteTokenizer()  # a context of 12 bytes
    items = [Item("a" * n, [" b", " cc"], 0) for n in (9, 10, 11)]  # 12, 13 and 14 ids with " cc"
    result = score_items(model, tok, items)
    assert result["cut"] == 1
    assert "1 cut to fit" in task_line(result | dict(task="storycloze", published={}))
    assert score_items(model, tok, items[:2])["cut"] == 0


def test_centered_accuracy_is_0_for_guessing_and_1_for_knowing():
    assert centered_accuracy(0.25, 0.25) == 0 and centered_accuracy(1.0, 0.25) == 1
    assert centered_accuracy(0.4, 0.25) == pytest.approx(0.2) and centered_accuracy(0.4, 0.5) < 0
    # GPT-2 on HellaSwag, as nanochat's table of its CORE metric gives it: accuracy and centered
    assert centered_accuracy(0.308504, 0.25) == pytest.approx(0.078006, abs=1e-6)


def test_the_mean_weighs_tasks_alike_whatever_their_size():
    mean, _, _ = mean_centered_accuracy([(10, 10, 0.5), (250, 1000, 0.25)])
    assert mean == 0.5
    [low, high] = wilson_interval(31, 100)
    assert mean_centered_accuracy([(31, 100, 0.0)]) == pytest.approx((0.31, low, high))
    quarter = mean_centered_accuracy([(31, 100, 0.25)])
    assert quarter == pytest.approx([(p - 0.25) / 0.75 for p in (0.31, low, high)])


@pytest.mark.parametrize("shares", [(0.3, 0.55, 0.02), (0.26, 0.9, 0.5)], ids=str)
def test_about_95_of_100_intervals_hold_the_true_mean(shares):
    sizes, chances = (300, 80, 150), (0.25, 0.5, 0.0)
    truth = np.mean([(p - c) / (1 - c) for p, c in zip(shares, chances)])
    counts = np.random.default_rng(0).binomial(sizes, shares, size=(2000, 3)).tolist()
    ends = [mean_centered_accuracy(list(zip(row, sizes, chances)))[1:] for row in counts]
    assert 0.93 < np.mean([low < truth < high for low, high in ends]) < 0.97


def test_exact_match_ends_at_the_first_stop_string():
    assert exact_match("42", "42") and exact_match("  42 \n43", "42")
    assert not exact_match("42.", "42") and not exact_match("\n42", "42")
    assert exact_match("yes; no\nmaybe", "yes", until=("\n", ";"))
    assert not exact_match("42\nNext", "42", until=())


def test_the_harness_itself_agrees_on_exact_matches():
    metrics = pytest.importorskip("lm_eval.api.metrics", reason="lm-evaluation-harness is not installed")
    for written, answer in (("42", "42"), ("42.", "42"), ("The king", "the king"), ("", "a")):
        theirs = metrics.exact_match_fn(references=[answer], predictions=[written])["exact_match"]
        assert exact_match(written, answer) == theirs


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_text(numbers):
    n, c, k = numbers
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_right_in_the_mean_where_1_minus_a_power_is_not():
    p, n, k = 0.1, 10, 5
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k)
    plugged = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert plugged < mean - 0.02


@pytest.mark.parametrize("n, c, k", [(5, 1, 6), (5, 6, 1), (5, -1, 1), (5, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(UserError, match=f"(?=.*{k})(?=.*{c})(?=.*{n})"):
        pass_at_k(n, c, k)


def test_completions_are_drawn_cut_compared_and_counted():
    asked = []

    def complete(prompt):
        asked.append(prompt)
        right = prompt == "1+1=" or (prompt == "2+2=" and len(asked) % 2)
        return {"1+1=": " 2", "2+2=": " 4"}.get(prompt, "?") + "\nmore" if right else "no"

    questions = [("1+1=", "2"), ("2+2=", "4"), ("3+3=", "6")]
    result = score_completions(questions, complete, n=4, ks=(1, 2))
    assert asked == ["1+1="] * 4 + ["2+2="] * 4 + ["3+3="] * 4 and result["right"] == [4, 2, 0]
    assert result["pass@1"] == pytest.approx(0.5) and result["pass@2"] == pytest.approx((1 + 5 / 6) / 3)
    low, high = result["pass@1_95"]
    assert low < 0.5 < high
    once = score_completions(questions, lambda prompt: "2\n", n=1)
    assert once["pass@1"] == pytest.approx(1 / 3) and tuple(once["pass@1_95"]) == wilson_interval(1, 3)


def test_a_model_whose_training_diverged_gets_no_score():
    model = make_model()
    model.lm_head.weight.data.fill_(math.nan)
    with pytest.raises(UserError, match="not finite|nan"):
        score_items(model, ByteTokenizer(), [Item("a", [" b", " c"], 0)])
