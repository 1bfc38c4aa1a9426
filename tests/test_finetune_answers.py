"""Fine-tuning: which tokens count, each conversation once an epoch, exact resume, answers that end."""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tinygpt.checkpoint import save_checkpoint
from tinygpt.ddp.world import run_processes
from tinygpt.finetune.answers import (
    AnswerLoader,
    ExactMatch,
    ReplayLoader,
    answers_objective,
    ask,
    count_answers,
    document_loss,
    encode_conversations,
    exact_match,
    fill_rows,
    finetune,
    lay_out,
    replay_rows,
    write_rows,
)
from tinygpt.finetune.tasks import Example, make_conversations, make_examples
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.generate.sample import Row
from tinygpt.model import GPT, GPTConfig
from tinygpt.run.setup import open_run
from tinygpt.support import UserError
from tinygpt.tokenizer import ByteTokenizer

TOKENIZER = chat_tokenizer(ByteTokenizer())
T = 48


def said(question, answer):
    return [dict(role="user", content=question), dict(role="assistant", content=answer)]


TALK = [said("a" * (1 + i % 7), "b" * (1 + i % 5)) for i in range(23)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPTConfig.llama(vocab_size=TOKENIZER.n_vocab, block_size=T, n_layer=2, n_head=2, n_embd=32)
    model = GPT(config)
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def loader(conversations=TALK, **how):
    how = dict(batch_size=4, block_size=T) | how
    return AnswerLoader(encode_conversations(TOKENIZER, conversations, T), **how)


def conversations_in(x, y):
    "Each conversation's ids that a batch holds, cut at the eots, without padding."
    found = []
    for ids, targets in zip(x.tolist(), y.tolist()):
        ids = ids + targets[-1:] if targets[-1] != -100 else ids  # the last token of a full row
        pieces, current = [], None
        for i in ids:
            if i == TOKENIZER.eot:
                current = []
                pieces.append(current)
            elif current is not None:
                current.append(i)
        end = TOKENIZER.special["<|end|>"]
        for piece in pieces:
            last = len(piece) - 1 - piece[::-1].index(end)
            found.append(tuple(piece[: last + 1]))
    return found


def test_rows_are_filled_in_order_and_never_beyond_their_length():
    encoded = [([1] * n, [True] * n) for n in (5, 3, 4, 8, 1, 7)]
    assert fill_rows(encoded, [0, 1, 2, 3, 4, 5], 9, packed=True) == [[0, 1], [2], [3, 4], [5]]
    assert fill_rows(encoded, [5, 4, 3], 9, packed=True) == [[5, 4], [3]]
    assert fill_rows(encoded, [0, 1], 9, packed=False) == [[0], [1]]
    tokens, targets, document = lay_out([([1, 2], [False, True]), ([3], [True])], [[0, 1], [1]], 4)
    assert tokens.tolist() == [[1, 2, 3, -100], [3, -100, -100, -100]]
    assert targets.tolist() == [[-100, 2, 3, -100], [3, -100, -100, -100]]
    assert document.tolist() == [[0, 0, 1, -100], [0, -100, -100, -100]]


def test_every_batch_is_full_and_no_row_is_left_out_at_the_end_of_an_epoch():
    fours, ones = loader(), loader(batch_size=1)
    rows = len(fours.rows)
    assert rows % 4  # an epoch's last rows do not fill a batch
    for _ in range(rows // 4 + 2):
        x, y = next(fours)
        told = "the last rows of an epoch are followed by the first of the next"
        assert x.shape == y.shape == (4, T), told
        assert torch.equal(x, torch.cat([next(ones)[0] for _ in range(4)])), told


def test_targets_are_the_answers_with_their_end_and_nothing_else():
    [(ids, mask)] = encode_conversations(TOKENIZER, [said("Hi", "Yes")], T)
    special = TOKENIZER.special
    user, assistant, end = (special[f"<|{name}|>"] for name in ("user", "assistant", "end"))
    assert ids == [256, user, *b"Hi", end, assistant, *b"Yes", end]
    x, y = next(AnswerLoader([(ids, mask)], 1, T, packed=False))
    assert [y[0, i].item() for i in range(len(ids) - 1)] == [-100] * 5 + [*b"Yes", end]
    assert x[0, 5] == assistant  # the first letter of the answer is predicted from there
    assert (y[0, len(ids) - 1 :] == -100).all()
    [(_, everything)] = encode_conversations(TOKENIZER, [said("Hi", "Yes")], T, train_on="all")
    assert everything == [False] + [True] * (len(ids) - 1)


def test_the_loss_is_cross_entropy_of_the_answers_tokens_computed_one_by_one(model):
    x, y = next(loader(packed=False))
    with torch.no_grad():
        loss = model(x, y)[1].item()
    wanted = []
    for messages_ids in conversations_in(x, y):  # each alone, without padding
        ids = [TOKENIZER.eot, *messages_ids]
        answer = ids.index(TOKENIZER.special["<|assistant|>"]) + 1
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0][0].double()
        wanted += [-logits[i - 1].log_softmax(-1)[ids[i]].item() for i in range(answer, len(ids))]
    assert loss == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)


@pytest.mark.parametrize("impl", ["fused", "naive"])
def test_with_the_mask_packed_conversations_train_as_if_each_were_alone(model, impl):
    module = GPT(model.config).double().set_attention(impl)
    module.load_state_dict(model.state_dict())
    each = loader(document_mask=True)
    for _ in range(3):
        x, y = next(each)
        assert y.shape == (4, T, 2) and (y[..., 1].amax(1) >= 2).all()  # three to a row, or more
        loss = document_loss(module, x, y)
        got = torch.autograd.grad(loss, list(module.parameters()))
        alone, counted = 0, 0
        for messages_ids in conversations_in(x, y[..., 0]):
            ids = [TOKENIZER.eot, *messages_ids]
            answer = ids.index(TOKENIZER.special["<|assistant|>"]) + 1
            targets = torch.tensor([[-100] * (answer - 1) + ids[answer:]])
            logits = module(torch.tensor([ids[:-1]]))[0]
            alone = alone + F.cross_entropy(logits[0], targets[0], ignore_index=-100, reduction="sum")
            counted += len(ids) - answer
        assert count_answers(y) == counted
        assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
        want = torch.autograd.grad(alone, list(module.parameters()))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)  # RoPE's table is in float32
        assert abs(module(x, y[..., 0], reduction="sum")[1].item() - alone.item()) > 0.01  # without it


def test_each_token_of_a_packed_row_has_the_number_of_its_conversation():
    x, y = next(loader(document_mask=True))
    for ids, numbers in zip(x, y[..., 1]):
        held = ids != 0  # padding; no text here has that byte
        starts = (ids[held] == TOKENIZER.eot).cumsum(0) - 1  # an eot stands where a conversation begins
        assert torch.equal(numbers[held], starts)


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_holds_each_conversation_once_and_the_next_one_has_another_order(packed):
    each = loader(packed=packed, batch_size=1)
    rows = len(each.rows)
    epochs = []
    for _ in range(2):
        epochs.append(
            [c for _ in range(len(each.rows_of(len(epochs)))) for c in conversations_in(*next(each))]
        )
    wanted = sorted(tuple(render(TOKENIZER, m)[0][1:]) for m in TALK)
    assert sorted(epochs[0]) == sorted(epochs[1]) == wanted
    assert epochs[0] != epochs[1]
    assert rows == len(TALK) if not packed else rows < len(TALK) / 2


@pytest.mark.parametrize("packed, masked", [(True, False), (False, False), (True, True)])
def test_ranks_share_the_batch_and_any_batch_can_be_gone_on_from(packed, masked):
    how = dict(packed=packed, document_mask=masked)
    alone = loader(**how)
    ranks = [loader(**how, rank=r, world_size=2) for r in range(2)]
    states, batches = [], []
    for _ in range(14):  # over the edge of an epoch
        states.append(alone.state_dict())
        assert all(rank.state_dict() == states[-1] for rank in ranks)
        batches.append(next(alone))
        parts = [next(rank) for rank in ranks]
        for whole, *pieces in zip(batches[-1], *parts):
            assert torch.equal(whole, torch.cat(pieces))
    assert alone.epoch > 0
    for state, batch in zip(states, batches):
        again = loader(**how)
        again.load_state_dict(state)
        assert all(map(torch.equal, next(again), batch))


def test_padded_rows_are_as_long_as_the_longest_rounded_up():
    x, _ = next(loader(packed=False))
    assert x.shape == (4, 32)  # 22 tokens at most
    x, _ = next(loader([*TALK, said("a" * 40, "b")], packed=False, batch_size=24))
    assert x.shape == (24, T)
    x, _ = next(loader())
    assert x.shape == (4, T)


def test_a_checkpoint_of_other_conversations_or_another_order_is_refused():
    state = loader().state_dict()
    others = (loader(TALK[:-1]), loader(seed=1), loader(packed=False), loader(document_mask=True))
    for other in others:
        with pytest.raises(UserError, match="(?=.*resume)(?=.*conversations)"):
            other.load_state_dict(state)


def test_what_cannot_be_trained_on_is_told_with_its_number():
    with pytest.raises(UserError, match="conversation 2 has 72 tokens, .* holds 49: .* --block-size 71"):
        encode_conversations(TOKENIZER, [TALK[0], said("a" * 60, "b" * 7)], T)
    with pytest.raises(UserError, match="conversation 1 has no answer"):
        encode_conversations(TOKENIZER, [[dict(role="user", content="Hi")]], T)


def test_no_conversations_at_all_are_refused():
    with pytest.raises(UserError, match="no conversation"):
        encode_conversations(TOKENIZER, [], T)
    with pytest.raises(UserError, match="no conversation"):  # rows of nothing would be looked for without end
        AnswerLoader([], 4, T)


def by_hand(model, ids, n):
    "Greedy answer, each token from a whole forward pass; a softmax's largest, to the end of the turn."
    new = []
    model.eval()
    while len(new) < n:
        with torch.no_grad():
            token = model(torch.tensor([[*ids, *new]]))[0][0, -1].argmax().item()
        if token in (TOKENIZER.eot, TOKENIZER.special["<|end|>"]):
            break
        new.append(token)
    return TOKENIZER.decode(new)


def test_answers_are_those_of_greedy_decoding_in_the_order_of_the_questions(model):
    asked = [[dict(role="user", content="x" * n)] for n in (9, 1, 4, 2, 12)]
    wanted = [by_hand(model, render(TOKENIZER, m, True)[0], 6) for m in asked]
    assert ask(model, TOKENIZER, asked, max_new_tokens=6, batch_size=2) == wanted
    assert ask(model, TOKENIZER, [], max_new_tokens=6) == []


def test_an_answer_ends_where_the_model_ends_its_turn(model):
    end = TOKENIZER.special["<|end|>"]
    asked = [[dict(role="user", content="x")]]
    silent = GPT(model.config)
    silent.load_state_dict(model.state_dict())
    with torch.no_grad():
        silent.lm_head.weight[end] = 0
        silent.lm_head.weight[end] += (
            100 * silent.features(torch.tensor([render(TOKENIZER, asked[0], True)[0]]))[0, -1]
        )
    assert ask(silent, TOKENIZER, asked) == [""]


def test_exact_match_counts_by_task_and_has_wilsons_interval(model):
    examples = make_examples(12, 0, "test", ["add", "copy"])
    right = [
        replace(e, answer=a.strip())
        for e, a in zip(examples, ask(model, TOKENIZER, [e.messages for e in examples], 5))
    ]
    found = exact_match(model, TOKENIZER, [*right[:5], *examples[5:]], max_new_tokens=5)
    assert found["all"].n == 12 and found["all"].right == 5
    assert found["add"].n + found["copy"].n == 12 and set(found) == {"all", "add", "copy"}
    # Newcombe 1998, table I: 81 of 263, and 15 of 148
    assert ExactMatch(81, 263).interval == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert ExactMatch(15, 148).interval == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert str(ExactMatch(81, 263)) == "30.8% (25.5% to 36.6%) of 263"


def matches_of_rank(world, model, several):
    "What `exact_match` finds for each list of questions where each process asks a part of them."
    place = world.rank, world.world_size
    return [exact_match(model, TOKENIZER, examples, *place, max_new_tokens=5) for examples in several]


def test_two_processes_ask_a_part_each_and_both_know_the_whole(model):
    examples = make_examples(9, 0, "test", ["add", "copy", "count"])
    said = ask(model, TOKENIZER, [e.messages for e in examples], 5)
    examples = [
        replace(e, answer=a.strip() if i % 3 else "no") for i, (e, a) in enumerate(zip(examples, said))
    ]
    alone = exact_match(model, TOKENIZER, examples, max_new_tokens=5)
    assert alone["all"] == ExactMatch(6, 9)
    one = exact_match(model, TOKENIZER, examples[:1], max_new_tokens=5)  # nothing is left for the other
    ranks = run_processes(matches_of_rank, 2, model, [examples, examples[:1]], timeout=600)
    assert ranks == [[alone, one], [alone, one]]


def test_rows_that_are_written_stay_in_the_callers_order(model):
    rows = [Row([256, *b"x" * n]) for n in (9, 1, 4, 2, 12)]
    write_rows(model, rows, 2, 3, temperature=0)
    assert [len(row.prompt) for row in rows] == [10, 2, 5, 3, 13]
    assert all(len(row.new) == 3 and row.finish == "length" for row in rows)


@pytest.fixture
def chat_config(config, model, tmp_path):
    "A run that begins with the small chat model."
    base = save_checkpoint(tmp_path / "base", model, TOKENIZER)
    config.run.init_from, config.data.tokenizer = str(base), "bpe"
    config.model = replace(model.config)
    config.optim = replace(config.optim, max_steps=6)
    config.system = replace(config.system, compile="off")
    return config


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("masked", [True, False])
def test_a_run_begins_with_the_loss_of_the_answers_and_brings_it_down(chat_config, model, masked):
    chat_config.optim = replace(chat_config.optim, max_steps=25)
    result = finetune(chat_config, TALK, document_mask=masked, progress="none")
    x, y = next(loader(seed=chat_config.run.seed))
    mask = None
    if masked:
        document = (x == TOKENIZER.eot).cumsum(1)
        mask = (document[:, :, None] == document[:, None, :])[:, None]
    with torch.no_grad():
        logits = model(x, mask=mask)[0].double()
    first = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100).item()
    assert result.losses[0] == pytest.approx(first, rel=1e-5)
    assert result.losses[-1] < 0.5 * first


@pytest.mark.parametrize("packed", [True, False])
def test_a_loss_in_pieces_trains_the_same_with_and_without_a_mask(chat_config, packed):
    whole = finetune(chat_config, TALK, packed=packed, progress="none")
    chat_config.run.name, chat_config.system.loss_chunk = "pieces", 7
    pieces = finetune(chat_config, TALK, packed=packed, progress="none")
    assert pieces.losses == pytest.approx(whole.losses, rel=1e-5)
    torch.testing.assert_close(weights(pieces.model), weights(whole.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how, runs", [({}, False), (dict(document_mask=False), True), (dict(packed=False), True)]
)
def test_an_implementation_that_takes_no_mask_is_told_before_the_run(chat_config, how, runs):
    chat_config.system = replace(chat_config.system, attention="tiled")
    if runs:
        assert finetune(chat_config, TALK, **how, progress="none").steps == 6
    else:
        with pytest.raises(UserError, match="tiled.* takes no mask"):
            finetune(chat_config, TALK, **how, progress="none")
        assert not chat_config.folder.exists()


@pytest.mark.parametrize("packed", [True, False])
def test_a_stopped_run_goes_on_as_if_it_had_not_and_asks_at_each_validation(chat_config, packed):
    examples = [Example("say", TALK[0][:1], TALK[0][1]["content"])]
    chat_config.eval = replace(chat_config.eval, eval_every=2, save_every=2)
    whole = finetune(chat_config, TALK, examples, packed=packed, progress="none")
    assert set(whole.figures) == {"right_all", "right_say"}
    checkpoints = sorted((whole.run / "checkpoints").iterdir())
    for late in checkpoints[1:]:
        for file in late.iterdir():
            file.unlink()
        late.rmdir()
    again = finetune(chat_config, TALK, examples, packed=packed, resume=True, progress="none")
    assert torch.equal(weights(whole.model), weights(again.model))
    assert again.losses == whole.losses[-len(again.losses) :] and again.steps == 6


class Counting:
    "A loader of rows of text that count up, as long as the model's rows."

    def __init__(self):
        self.next, self.closed = 0, False

    def __next__(self):
        x = torch.arange(self.next, self.next + T).repeat(2, 1)
        self.next += 1
        return x, x + 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def close(self):
        self.closed = True


@pytest.mark.parametrize("packed", [True, False])
def test_old_text_stands_below_the_answers_and_all_of_it_counts(packed):
    both, alone = ReplayLoader(loader(packed=packed), Counting()), loader(packed=packed)
    for first in range(3):
        (x, y), (answers_x, answers_y) = next(both), next(alone)
        width = answers_x.shape[1]
        assert torch.equal(x[:4], answers_x) and torch.equal(y[:4], answers_y)
        assert x[4:].tolist() == [list(range(first, first + width))] * 2
        assert torch.equal(y[4:], x[4:] + 1)
    state = both.state_dict()
    expected = next(both)
    again = ReplayLoader(loader(packed=packed), Counting())
    again.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(next(again), expected))
    again.close()
    assert again.text.closed


def test_a_row_of_old_text_is_read_as_the_base_read_it_whatever_documents_it_holds():
    both, alone = ReplayLoader(loader(document_mask=True), Counting()), loader(document_mask=True)
    (x, y), (_, answers_y) = next(both), next(alone)
    assert torch.equal(y[:4], answers_y) and torch.equal(y[4:, :, 0], x[4:] + 1)
    assert (y[4:, :, 1] == y[4:, :1, 1]).all()


def test_a_base_that_saw_documents_apart_goes_on_seeing_them_so(chat_config):
    x, y = next(ReplayLoader(loader(document_mask=True), Counting(), eot=5))
    assert y[4:, :, 1].tolist() == [[int(token >= 5) for token in row] for row in x[4:].tolist()]
    chat_config.data = replace(chat_config.data, separator="\n", mask_documents=True)
    run = open_run(chat_config, objective=answers_objective(TALK, replay=0.5))
    x, y = next(run.loader)
    old, numbers = x[2:].tolist(), y[2:, :, 1].tolist()
    run.close()
    borders = [[token == TOKENIZER.eot for token in row[1:]] for row in old]
    assert any(map(any, borders))
    assert borders == [[b > a for a, b in zip(row, row[1:])] for row in numbers]


@pytest.mark.parametrize(
    "replay, rows, world, old",
    [(0.0, 8, 2, 0), (0.25, 8, 2, 2), (0.25, 6, 2, 2), (0.125, 4, 1, 0), (0.125, 1, 1, 0), (0.5, 2, 2, 0)],
)
def test_every_process_gets_as_many_rows_of_old_text(replay, rows, world, old):
    assert replay_rows(replay, rows, world) == old


@pytest.mark.parametrize("replay", [1.0, -0.1, float("nan")])
def test_a_batch_without_answers_is_refused(replay):
    with pytest.raises(UserError, match="replay = "):
        replay_rows(replay, 8, 1)


def test_where_old_text_would_take_every_row_there_is_none():
    assert replay_rows(0.99, 8, 1) == replay_rows(0.75, 8, 8) == 0


def test_a_run_with_old_text_goes_on_exactly_and_forgets_less(chat_config):
    chat_config.optim = replace(chat_config.optim, max_steps=30, learning_rate=3e-3)
    chat_config.eval = replace(chat_config.eval, save_every=10)
    whole = finetune(chat_config, TALK, replay=0.5, progress="none")
    for late in sorted((whole.run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(late)
    again = finetune(chat_config, TALK, replay=0.5, resume=True, progress="none")
    assert torch.equal(weights(whole.model), weights(again.model))
    without = finetune(chat_config, TALK, overwrite=True, progress="none")
    assert whole.val.bits_per_byte < without.val.bits_per_byte - 0.5


def test_a_base_model_and_spread_weights_are_refused_before_anything_is_written(config, chat_config):
    base = replace(config.data, tokenizer="byte")
    config.run.init_from, config.data = "", base
    config.model = replace(config.model, vocab_size=257)
    with pytest.raises(UserError, match="base model"):
        finetune(config, TALK, progress="none")
    assert not config.folder.exists()
    run = type("Run", (), dict(config=chat_config, parallel=type("P", (), dict(name="fsdp"))))
    with pytest.raises(UserError, match="fsdp.*take zero or ddp"):
        answers_objective(TALK, [1]).loader(run)


def test_generated_conversations_fit_the_laptops_context():
    from tinygpt.data.tokens import prepare

    tokenizer = chat_tokenizer(prepare("sotu").tokenizer)
    encoded = encode_conversations(tokenizer, make_conversations(300, 0), 128)
    assert max(len(ids) for ids, _ in encoded) <= 129
