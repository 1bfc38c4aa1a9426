import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygpt.checkpoint import save_checkpoint
from tinygpt.generate import check_sampling, context_start, generate_tokens, main, sampling_probs, stream_text
from tinygpt.model import GPT, GPTConfig
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer, CharTokenizer

SMALL = dict(vocab_size=257, block_size=16, n_layer=2, n_head=4, n_embd=32)
VARIANTS = {"gpt2": GPTConfig.gpt2(**SMALL), "llama": GPTConfig.llama(**SMALL, n_kv_head=2), "modern": GPTConfig.modern(**SMALL)}


def opinionated(config):
    torch.manual_seed(0)
    model = GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


@pytest.fixture(scope="module")
def model():
    return opinionated(VARIANTS["gpt2"])


@settings(deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=30), st.floats(0.05, 5), st.integers(0, 40), st.floats(0.01, 1))
def test_sampling_probabilities_sum_to_one_and_keep_the_order(logits, temperature, top_k, top_p):
    logits = torch.tensor(logits)
    probs = sampling_probs(logits, temperature, top_k, top_p)
    assert probs.sum().item() == pytest.approx(1, abs=1e-5) and (probs >= 0).all()
    assert probs[logits.argmax()] == probs.max()
    if top_k:
        assert (probs > 0).sum() <= top_k
    kept, plain = probs > 0, (logits / temperature).softmax(-1)
    if kept.any() and not kept.all():
        assert plain[kept].min() >= plain[~kept].max() - 1e-7  # the likeliest are kept


def test_top_p_keeps_the_smallest_set_that_holds_p():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    for top_p, kept in [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.96, 4), (1.0, 4)]:
        got = sampling_probs(probs.log(), top_p=top_p)
        assert (got > 0).sum() == kept, top_p
        torch.testing.assert_close(got[:kept], probs[:kept] / probs[:kept].sum())


def test_draws_follow_the_probabilities_and_top_k_is_not_discarded():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    probs = sampling_probs(logits, temperature=0.7, top_k=3)
    draws = torch.multinomial(probs, 100_000, replacement=True, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(draws, minlength=4) / 100_000
    expected = (logits[:3] / 0.7).softmax(-1)
    assert counts[3] == 0 and (counts[:3] - expected).abs().max() < 0.01


def test_temperature_zero_is_greedy_and_ties_take_the_first():
    assert sampling_probs(torch.tensor([[0.0, 2.0], [3.0, 3.0]]), temperature=0).tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 23])
def test_the_cache_changes_nothing_also_over_the_edge_of_the_context(name, prompt_length):
    model = opinionated(VARIANTS[name])
    prompt = torch.randint(257, (3, prompt_length), generator=torch.Generator().manual_seed(1))
    out = [
        torch.stack(list(generate_tokens(model, prompt, 40, generator=torch.Generator().manual_seed(2), use_cache=use_cache)))
        for use_cache in (True, False)
    ]
    assert torch.equal(*out) and out[0].shape == (40, 3)


@given(st.integers(1, 500), st.integers(1, 40))
def test_what_the_model_sees_is_never_empty_nor_too_long_and_only_moves_on(n, block_size):
    assert 0 < n - context_start(n, block_size) <= block_size
    assert context_start(n + 1, block_size) >= context_start(n, block_size)
    if n <= block_size:
        assert context_start(n, block_size) == 0


def test_a_seed_repeats_the_text_and_rows_differ(model):
    prompt = torch.zeros(8, 1, dtype=torch.long)
    draw = lambda seed: torch.stack(list(generate_tokens(model, prompt, 5, generator=torch.Generator().manual_seed(seed))))
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert len(set(draw(1)[0].tolist())) > 1  # also the first token


def test_greedy_equals_the_argmax_of_the_model(model):
    ids = torch.tensor([[5, 6, 7]])
    for token in generate_tokens(model, ids, 8, temperature=0):
        assert token.item() == model.eval()(ids)[0][0, -1].argmax().item()
        ids = torch.cat([ids, token[:, None]], dim=1)


def test_ids_of_the_padding_are_never_drawn(model):
    tokens = torch.stack(list(generate_tokens(model, torch.zeros(64, 1, dtype=torch.long), 15, temperature=50.0)))
    assert model.wte.num_embeddings > 257 > tokens.max() >= 200


def test_the_model_comes_back_in_the_mode_it_was_in(model):
    model.train()
    tokens = generate_tokens(model, torch.tensor([[1]]), 3)
    next(tokens)
    tokens.close()  # the reader stopped early
    assert model.training


class Scripted(torch.nn.Module):
    "Says given ids one after the other."

    def __init__(self, ids):
        super().__init__()
        self.config, self.ids, self.at = GPTConfig.gpt2(**SMALL), ids, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, idx, cache=None):
        logits = torch.zeros(1, idx.shape[1], 257)
        logits[0, -1, self.ids[self.at]] = 100.0
        self.at += 1
        return logits, None


def test_streaming_gives_whole_characters_and_stops_at_eot():
    ids = [*"né日".encode(), 256, *b"never said"]
    pieces = list(stream_text(Scripted(ids), ByteTokenizer(), "", 20))
    assert pieces == ["n", "é", "日"]


def test_streaming_a_half_character_at_the_end_does_not_crash():
    assert "".join(stream_text(Scripted(list("é".encode()[:1])), ByteTokenizer(), "", 1)) == "\ufffd"


def test_an_empty_prompt_and_one_longer_than_the_context_work(model):
    assert isinstance("".join(stream_text(model, ByteTokenizer(), "", 5, seed=0)), str)
    assert isinstance("".join(stream_text(model, ByteTokenizer(), "long " * 50, 5, seed=0)), str)
    with pytest.raises(UserError, match="empty"):
        next(generate_tokens(model, torch.zeros(1, 0, dtype=torch.long), 1))


@pytest.mark.parametrize("bad, name", [(dict(temperature=-1.0), "temperature"), (dict(top_k=-1), "top_k"), (dict(top_p=0.0), "top_p"), (dict(top_p=1.5), "top_p")])
def test_sampling_settings_that_mean_nothing_are_refused(bad, name):
    with pytest.raises(UserError, match=name):
        check_sampling(**{**dict(temperature=1.0, top_k=0, top_p=1.0), **bad})


def test_the_command_writes_text_and_answers_mistakes_with_2(model, tmp_path, capsys):
    save_checkpoint(tmp_path / "run/checkpoints/step_000001", copy.deepcopy(model), ByteTokenizer())
    run = str(tmp_path / "run")
    assert main([run, "--prompt", "Hello", "--max-new-tokens", "8", "--seed", "1", "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("Hello")
    main([run, "--prompt", "Hello", "--max-new-tokens", "8", "--seed", "1", "--device", "cpu"])
    assert capsys.readouterr().out == first
    for wrong in (["nowhere"], [run, "--top-p", "7"], [run, "--device", "tpu"]):
        assert main(wrong) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1


def test_a_prompt_with_characters_the_tokenizer_does_not_know_is_one_sentence(tmp_path, capsys):
    tokenizer = CharTokenizer.train("abc")
    save_checkpoint(tmp_path / "c", GPT(GPTConfig.gpt2(**{**SMALL, "vocab_size": tokenizer.n_vocab})), tokenizer)
    assert main([str(tmp_path / "c"), "--prompt", "abx", "--device", "cpu"]) == 2
    assert "x" in capsys.readouterr().err
