"""A loader that samples: judged groups, exact resume also between two uses, two processes as one."""

import itertools
import shutil
import string
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tinygpt.reinforce.rollout as rollout
from tinygpt.checkpoint import save_checkpoint
from tinygpt.ddp.world import run_processes
from tinygpt.finetune.tasks import Example, make_examples
from tinygpt.finetune.template import chat_tokenizer, render
from tinygpt.model import GPT, GPTConfig
from tinygpt.precision import choose_policy
from tinygpt.reinforce.policy import Answer
from tinygpt.reinforce.rollout import (
    Recipe,
    RolloutLoader,
    answer_logprobs,
    ask_and_judge,
    check_recipe,
    contains_answer,
    divided_already,
    draw_seed,
    measure_pass,
    reinforce_objective,
)
from tinygpt.run.setup import open_run
from tinygpt.support import UserError
from tinygpt.tokenizer import CharTokenizer
from tinygpt.train import train

TOKENIZER = chat_tokenizer(CharTokenizer.train(string.printable))
RECIPE = Recipe(tasks=("count",), judge="even", group=3, max_new_tokens=24, baseline="group")


def even(example, text):  # a model that knows nothing passes it now and then
    return len(text) % 2 == 0


@pytest.fixture(autouse=True)
def easy_judge(monkeypatch):
    monkeypatch.setitem(rollout.JUDGES, "even", even)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = GPTConfig.llama(vocab_size=TOKENIZER.n_vocab, block_size=80, n_layer=1, n_head=2, n_embd=16)
    return GPT(config)


@pytest.fixture
def practice(config, model, tmp_path):
    "A run of a few steps, from a chat model that knows nothing."
    save_checkpoint(tmp_path / "chat", model, TOKENIZER)
    config.run.init_from = str(tmp_path / "chat")
    config.data = replace(config.data, tokenizer="bpe", batch_size=12)
    config.model = replace(model.config)
    o = dict(optimizer="adamw", learning_rate=0.01, schedule="constant", max_steps=4, warmup_steps=1)
    config.optim = replace(config.optim, **o)
    config.eval = replace(config.eval, save_every=2, eval_tokens=80, final_eval_tokens=80, compressors=False)
    config.system = replace(config.system, compile="off")
    return config


def run_of(config, recipe=RECIPE):
    return open_run(config, objective=reinforce_objective(recipe, questions=0))


def trained(config, recipe=RECIPE, resume=False):
    objective = reinforce_objective(recipe, questions=0)
    result = train(config, resume=resume, progress="none", objective=objective)
    return [p.detach().clone() for p in result.model.parameters()], result.figures


@pytest.mark.parametrize("reuse", [1, 3])
def test_a_resumed_run_draws_and_learns_what_an_uninterrupted_one_does(practice, reuse):
    recipe = replace(RECIPE, reuse=reuse, beta=0.1 * (reuse > 1))
    whole, figures = trained(practice, recipe)
    assert figures["reward"] > 0
    shutil.rmtree(practice.folder / "checkpoints/step_000004")
    again, same = trained(practice, recipe, resume=True)
    assert all(map(torch.equal, whole, again)) and same == figures


def with_even(world, config):
    rollout.JUDGES["even"] = even  # this is another process
    return trained(config)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(practice):
    practice.optim.max_steps, practice.eval.save_every = 2, 0
    practice.run.name = "one"
    alone, figures = trained(practice)
    practice.run.name = "two"
    for weights, same in run_processes(with_even, 2, practice):
        assert same == pytest.approx(figures)
        for a, b in zip(alone, weights):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def interrupted(world, config):
    "The weights of a run, and of one that was stopped between two uses of its answers."
    rollout.JUDGES["even"] = even
    recipe = replace(RECIPE, reuse=2)
    whole, _ = trained(config, recipe)
    if world.rank == 0:
        shutil.rmtree(config.folder / "checkpoints/step_000002")
    dist.barrier()
    return whole, trained(config, recipe, resume=True)[0]


def test_two_processes_go_on_exactly_between_two_uses_of_their_answers(practice):
    practice.optim.max_steps, practice.eval.save_every = 2, 1
    for whole, again in run_processes(interrupted, 2, practice):
        assert all(map(torch.equal, whole, again))


def test_rows_hold_the_answers_of_the_model_as_it_is_with_their_groups_advantages(practice):
    practice.run.seed = 1  # one of whose four groups agrees, so that its rows are left out
    run = run_of(practice)
    x, y = next(run.loader)
    answers, advantage = zip(*run.loader.drawn)
    questions = make_examples(4, draw_seed(practice.run.seed, 0), "train", ["count"])
    prompts = [render(TOKENIZER, question.messages, True)[0] for question in questions]
    assert [a.prompt for a in answers] == [prompt for prompt in prompts for _ in range(3)]
    plain = [all(TOKENIZER.vocab[token] for token in a.new[:-1]) for a in answers]  # no special token inside
    ended = [a.finish == "end" and even(None, TOKENIZER.decode(a.new)) for a in answers]
    verdicts = [end and text for end, text in zip(ended, plain)]
    assert any(verdicts) and not all(verdicts)
    for first in range(0, 12, 3):
        group = verdicts[first : first + 3]
        expected = [v - sum(group) / 3 for v in group]
        assert advantage[first : first + 3] == pytest.approx(expected, abs=1e-6)
    kept = [(answer, A) for answer, A in zip(answers, advantage) if A]
    assert 0 < len(kept) == len(x) < 12 and x.shape[1] % 16 == 0
    for row, ids, (answer, A) in zip(y, x, kept):
        own = row[row[:, 0] >= 0]
        n, begin = len(answer.new), len(answer.prompt)
        assert own[:, 0].tolist() == answer.new and ids[:begin].tolist() == answer.prompt
        assert own[:, 1].tolist() == pytest.approx([1 / 24 / 12] * n)  # of all twelve, not of those kept
        assert own[:, 2].tolist() == pytest.approx([A] * n)
    for drawn, logprobs in zip(answers, answer_logprobs(run.model, list(answers))):
        assert drawn.logprobs == pytest.approx(logprobs, abs=1e-4)
    assert divided_already(y) == 1
    run.close()


def test_a_fresh_answer_has_the_ratio_1_and_the_distance_0_in_the_format_of_the_training(practice, tmp_path):
    torch.manual_seed(0)
    surer = GPT(practice.model)
    for p in surer.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)  # the logits differ, and a rounding shows
    save_checkpoint(tmp_path / "surer", surer, TOKENIZER)
    practice.run.init_from = str(tmp_path / "surer")
    practice.system.dtype = "bfloat16"
    run = run_of(practice, replace(RECIPE, reuse=2, beta=0.1))
    x, y = next(run.loader)
    with torch.no_grad(), run.policy.autocast():
        logs = run.model(x)[0].float().log_softmax(-1)
    counted = y[..., 0] >= 0
    now = logs.gather(-1, y[..., :1].long().clamp(min=0))[counted].squeeze(-1)
    old, start = y[counted][:, 3:].T
    ratio, distance = (now - old).exp(), (start - now).exp()
    # a batch of another size may round a few of them otherwise
    assert (ratio - 1).abs().mean() < 1e-3 and (distance - 1).abs().mean() < 1e-3
    run.close()


def test_the_next_step_asks_other_questions_and_another_seed_draws_other_answers(practice):
    run = run_of(practice)
    first, second = next(run.loader)[0], next(run.loader)[0]
    run.close()
    assert not any(a.tolist() in second.tolist() for a in first)
    practice.run.seed, practice.run.name = 7, "other"
    run = run_of(practice)
    assert next(run.loader)[0].tolist() != first.tolist()
    run.close()


def test_the_same_questions_are_answered_otherwise_in_the_next_step(practice, monkeypatch):
    real = rollout.make_examples
    monkeypatch.setattr(rollout, "make_examples", lambda n, seed, *rest: real(n, 0, *rest))
    run, drawn = run_of(practice), []
    for _ in range(2):
        next(run.loader)  # and the model does not learn in between
        drawn.append([(answer.prompt, answer.new) for answer, _ in run.loader.drawn])
    run.close()
    (first, one), (second, other) = (zip(*step) for step in drawn)
    assert first == second and one != other


def test_answers_serve_as_many_steps_as_they_are_used(practice):
    run = run_of(practice, replace(RECIPE, reuse=2))
    a, b, c = (next(run.loader)[0] for _ in range(3))
    assert torch.equal(a, b) and a.tolist() != c.tolist()
    run.close()


def test_questions_asked_once_have_their_verdicts_as_advantages_and_no_figure_of_groups(practice):
    run = run_of(practice, replace(RECIPE, group=1, baseline="none"))
    next(run.loader)
    answers, advantages = zip(*run.loader.drawn)
    assert len({tuple(answer.prompt) for answer in answers}) == len(answers) == 12
    verdicts = [float(a.finish == "end" and even(None, TOKENIZER.decode(a.new))) for a in answers]
    assert list(advantages) == verdicts and len(set(verdicts)) == 2
    figures = run.loader.figures()
    assert "alike" not in figures and figures["reward"] == pytest.approx(sum(verdicts) / 12)
    run.close()


def test_own_length_divides_each_answer_by_its_tokens(practice):
    run = run_of(practice, replace(RECIPE, length="own"))
    _, y = next(run.loader)
    assert y[..., 1].sum(1).tolist() == pytest.approx([1 / 12] * len(y))
    run.close()


def test_where_all_are_alike_a_step_still_has_a_row_and_no_gradient(practice):
    loader = loader_with(practice)
    loader.drawn = [(Answer([1, 2], new=[3], logprobs=[-1.0]), 0.0)] * 4
    loader.run.policy = SimpleNamespace(device="cpu")
    x, y = loader._table()
    assert len(x) == 1 and not y[..., 2].any()


def test_figures_are_means_since_the_last_look(practice):
    run = run_of(practice)
    assert run.loader.figures() == {}
    next(run.loader)
    answers, advantage = zip(*run.loader.drawn)
    verdicts = torch.tensor(
        [a.finish == "end" and even(None, TOKENIZER.decode(a.new)) for a in answers]
    ).float()
    groups = verdicts.view(4, 3).sum(1)
    figures = run.loader.figures()
    assert figures["reward"] == pytest.approx(verdicts.mean().item())
    assert figures["tokens"] == pytest.approx(sum(len(a.new) for a in answers) / 12)
    assert figures["alike"] == pytest.approx(sum(g in (0, 3) for g in groups.tolist()) / 4)
    assert run.loader.figures() == {}
    run.close()


def answers_that_say(texts, monkeypatch):
    "Whoever is asked, these are the answers; the last of them never ends."

    def draw(model, prompts, group, *more):
        made = [Answer(prompts[0], new=TOKENIZER.encode(text), logprobs=[]) for text in texts]
        for answer in made[:-1]:
            answer.finish = "end"
        return made

    monkeypatch.setattr(rollout, "draw_answers", draw)


def test_judges_and_the_end_that_a_reward_needs(monkeypatch, model):
    example = Example("add", [dict(role="user", content="3 + 4 =")], "7")
    answers_that_say(["7", "6 7 8", "8", "7"], monkeypatch)
    for judge, expected in (("right", [1, 0, 0, 0]), ("contains", [1, 1, 0, 0])):
        recipe = Recipe(judge=judge, group=4)
        _, verdicts = ask_and_judge(model, TOKENIZER, [example], [0] * 4, recipe)
        assert verdicts.tolist() == [expected]
    end, turn = (TOKENIZER.special[name] for name in ("<|end|>", "<|user|>"))
    seven = TOKENIZER.encode("7")
    for new, expected in (([*seven, end], 1), ([*seven, turn, end], 0), ([turn, *seven, end], 0)):
        said = Answer([1], new=new, finish="end")
        monkeypatch.setattr(rollout, "draw_answers", lambda *a, said=said: [said])
        _, verdicts = ask_and_judge(model, TOKENIZER, [example], [0], Recipe(group=1, baseline="none"))
        assert verdicts.item() == expected  # a special token inside has no text, and is no part of an answer
    assert contains_answer(example, "6 7 8") and not contains_answer(example, "8")


def test_pass_is_counted_over_all_questions(monkeypatch, model):
    examples = make_examples(20, 0, "test", ["count"])
    calls = itertools.count()

    def ask(model, tokenizer, part, seeds, recipe):
        assert len(seeds) == len(set(seeds)) == len(part) * 4
        rows = [[float(next(calls) % 2 == 0), 0.0, 0.0, 0.0] for _ in part]  # every other one has one right
        return [SimpleNamespace(new=[1, 2])] * (4 * len(part)), torch.tensor(rows)

    monkeypatch.setattr(rollout, "ask_and_judge", ask)
    found = measure_pass(model, TOKENIZER, examples, RECIPE, n=4, ks=(1, 2, 4))
    assert found == pytest.approx({"pass@1": 1 / 8, "pass@2": 1 / 4, "pass@4": 1 / 2, "answer_tokens": 2})


def test_seeds_follow_from_run_step_and_row():
    seeds = {draw_seed(a, b, c) for a, b, c in itertools.product(range(6), repeat=3)}
    assert len(seeds) == 6**3 and all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(1, 23) != draw_seed(12, 3) and draw_seed(-1, 0) == draw_seed(-1, 0)


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(group=1), "group's mean; give 2 or more, or baseline none or batch"),
        (dict(group=1, baseline="none", scale=True), "leave scale out"),
        (dict(group=5), "not a multiple of group"),
        (dict(group=0), "group = 0"),
        (dict(tasks=("chess",)), "chess"),
        (dict(tasks=()), "choose among"),
        (dict(judge="kind"), "judge = 'kind'"),
        (dict(reuse=0), "reuse = 0"),
        (dict(epsilon=0.0), "epsilon"),
        (dict(beta=-1.0), "beta"),
        (dict(max_new_tokens=0), "max_new_tokens = 0"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused(practice, change, word):
    with pytest.raises(UserError, match=word):
        check_recipe(replace(RECIPE, **change), practice)


def test_a_group_of_one_needs_another_baseline(practice):
    check_recipe(replace(RECIPE, group=1, baseline="batch"), practice)


def loader_with(practice, recipe=RECIPE, name="single", world_size=1, **how):
    "A loader of a run that is none: only what it looks at before it draws."
    world = SimpleNamespace(rank=0, world_size=world_size)
    data = SimpleNamespace(tokenizer=TOKENIZER)
    parallel = SimpleNamespace(name=name)
    run = SimpleNamespace(config=practice, world=world, data=data, parallel=parallel, policy=None, model=None)
    return RolloutLoader(run, recipe, **how)


def test_what_cannot_be_drawn_is_refused_before_the_first_step(practice):
    with pytest.raises(UserError, match="fsdp"):
        loader_with(practice, name="fsdp")
    with pytest.raises(UserError, match="4 questions a step do not divide over 3 processes"):
        loader_with(practice, world_size=3)
    with pytest.raises(UserError, match="max_new_tokens = 60 is too large"):
        loader_with(practice, replace(RECIPE, max_new_tokens=60))
    # the questions that are practiced would leave room for it: 44 tokens of 80; held-out ones have 49
    with pytest.raises(UserError, match="max_new_tokens = 34 .*: questions have up to 49 tokens"):
        loader_with(practice, replace(RECIPE, max_new_tokens=34))
    loader_with(practice, replace(RECIPE, max_new_tokens=31))
    loader_with(practice, replace(RECIPE, max_new_tokens=34), questions=0)  # none is asked
    run_of(practice, replace(RECIPE, max_new_tokens=34)).close()


def test_a_question_longer_than_those_looked_at_is_one_sentence_and_one_that_just_fits_is_drawn(practice):
    "The longest of 600 questions to copy has 69 tokens; among 256 others is one of 71."
    recipe = Recipe(tasks=("copy",), judge="even", max_new_tokens=8, baseline="batch")
    practice.data.batch_size = 256

    def first_batch(block_size):
        practice.model = replace(practice.model, block_size=block_size)
        torch.manual_seed(0)
        loader = loader_with(practice, recipe)
        loader.run.model, loader.run.policy = GPT(practice.model), choose_policy("cpu", "float32")
        next(loader)
        return max(len(answer.prompt) for answer, _ in loader.drawn)

    assert first_batch(78) == 71  # 71 tokens and 8 more, of which the last one is not read
    with pytest.raises(UserError, match="max_new_tokens = 8 .*: questions have up to 71 tokens"):
        first_batch(77)


def test_a_resume_with_another_recipe_is_refused(practice):
    loader = loader_with(practice)
    other = loader_with(practice, replace(RECIPE, group=6))
    with pytest.raises(UserError, match="group"):
        other.load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
