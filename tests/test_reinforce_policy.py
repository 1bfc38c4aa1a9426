"""From verdicts to a gradient: closed forms, GRPO's formula written again, all choices of k."""

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tinygpt.model import GPT, GPTConfig
from tinygpt.reinforce.policy import (
    Answer,
    advantages,
    answer_table,
    draw_answers,
    policy_loss,
)

END = 6
PROMPTS = [[0, 1], [2, 3, 4]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig.llama(vocab_size=7, block_size=16, n_layer=2, n_head=2, n_embd=16))
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.3)
    return model.eval()


def draw(model, prompts=PROMPTS, group=6, seed=0):
    return draw_answers(model, prompts, group, 4, {END}, range(seed, seed + len(prompts) * group))


@torch.no_grad()
def in_one_pass(model, prompt, new):
    logs = model(torch.tensor([prompt + new[:-1]]))[0][0, len(prompt) - 1 :].log_softmax(-1)
    return [logs[i, token].item() for i, token in enumerate(new)]


class Bandit(nn.Module):
    "Scores of the next token that do not look at the text."

    def __init__(self, scores):
        super().__init__()
        self.scores = nn.Parameter(torch.tensor(scores, dtype=torch.float64))

    def forward(self, x):
        return self.scores.expand(*x.shape, len(self.scores)), None


def test_the_expected_gradient_of_a_bandit_is_the_closed_form():
    bandit, rewards = Bandit([0.0, 0.5, -0.5, 1.0]), torch.tensor([0.1, 0.2, 0.9, 0.3], dtype=torch.float64)
    probs = bandit.scores.softmax(0).detach()
    for baseline in (0.0, 0.7):  # it changes nothing in the mean
        arms = [Answer([0], new=[arm], logprobs=[0.0]) for arm in range(4)]
        x, y = answer_table(arms, torch.zeros(4), 1, [1.0] * 4)
        y = y.double()
        y[:, 0, 1], y[:, 0, 2] = probs, rewards - baseline
        (gradient,) = torch.autograd.grad(policy_loss(bandit, x, y), bandit.scores)
        torch.testing.assert_close(-gradient, probs * (rewards - probs @ rewards))


def test_log_probabilities_of_an_answer_are_those_of_one_pass_its_end_too(model):
    answers = draw(model)
    assert {answer.finish for answer in answers} == {"end", "length"}
    for answer in answers:
        assert (answer.new[-1] == END) == (answer.finish == "end") and END not in answer.new[:-1]
        assert answer.logprobs == pytest.approx(in_one_pass(model, answer.prompt, answer.new), abs=1e-5)


def test_the_probabilities_of_all_answers_add_up_to_one(model):
    others = [token for token in range(7) if token != END]
    answers = [[END], *([i, END] for i in others), *map(list, itertools.product(others, repeat=2))]
    assert sum(math.exp(sum(in_one_pass(model, [0, 1], new))) for new in answers) == pytest.approx(
        1, abs=1e-5
    )


def test_an_answer_depends_on_its_seed_alone(model):
    together = draw(model)
    assert len({tuple(answer.new) for answer in together}) > 3
    for i, answer in enumerate(together):
        (alone,) = draw_answers(model, [answer.prompt], 1, 4, {END}, [i])
        assert alone.new == answer.new
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-5)


def test_answers_come_group_by_group(model):
    assert [answer.prompt for answer in draw(model, group=3)] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    with pytest.raises(ValueError):  # fewer seeds than answers: a slip
        draw_answers(model, PROMPTS, 3, 4, {END}, range(5))


def test_answers_are_drawn_from_the_policy_itself(model):
    first = [answer.new[0] for answer in draw_answers(model, [[0, 1]], 4000, 1, {END}, range(4000))]
    with torch.no_grad():
        probs = model(torch.tensor([[0, 1]]))[0][0, -1].softmax(-1)
    for token, p in enumerate(probs.tolist()):
        assert first.count(token) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000) + 1e-9)


def test_the_table_counts_the_answer_with_its_end_and_no_token_of_the_prompt():
    answers = [Answer([1, 2, 3], new=[4, END], logprobs=[-0.5, -0.7]), Answer([5], new=[0], logprobs=[-0.1])]
    x, y = answer_table(answers, torch.tensor([2.0, -1.0]), 6, [0.5, 0.25], start=[[-1.0, -2.0], [-3.0]])
    assert x.tolist() == [[1, 2, 3, 4, 0, 0], [5, 0, 0, 0, 0, 0]]
    assert y[..., 0].tolist() == [[-100, -100, 4, END, -100, -100], [0, *[-100] * 5]]
    assert y[0, 2:4, 1:].tolist() == [pytest.approx([0.5, 2, -0.5, -1]), pytest.approx([0.5, 2, -0.7, -2])]
    assert y[1, 0, 1:].tolist() == pytest.approx([0.25, -1, -0.1, -3])
    assert not y[y[..., 0] == -100][:, 1:].any()


def some_numbers(model):
    "(answers, rewards, log-probabilities when drawn, at the start), all but the first made up."
    answers, generator = draw(model), torch.Generator().manual_seed(3)
    rewards = torch.randint(2, (2, 6), generator=generator).double()
    moved = []
    for _ in range(2):
        for answer in answers:
            noise = 0.4 * torch.randn(len(answer.new), generator=generator, dtype=torch.float64)
            moved.append([p + d for p, d in zip(answer.logprobs, noise.tolist())])
    return answers, rewards, moved[:12], moved[12:]


@pytest.mark.parametrize("own_length", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_loss_is_grpos_formula_and_that_of_dr_grpo(model, own_length, beta):
    "Token by token in float64: Shao et al. (2024), equations 3 and 4; Liu et al. (2025), section 3.2."
    answers, rewards, old, start = some_numbers(model)
    for answer, logprobs in zip(answers, old):
        answer.logprobs = logprobs
    total, outside = 0.0, 0
    for i, answer in enumerate(answers):
        group = rewards[i // 6].tolist()
        A = group[i % 6] - sum(group) / 6
        if own_length:
            mean = sum(group) / 6
            A /= math.sqrt(sum((r - mean) ** 2 for r in group) / 5) + 1e-4
        terms = []
        for p, q, s in zip(in_one_pass(model.double(), answer.prompt, answer.new), old[i], start[i]):
            ratio = math.exp(p - q)
            outside += not 0.8 <= ratio <= 1.2
            gain = min(ratio * A, min(max(ratio, 0.8), 1.2) * A)
            terms.append(gain - beta * (math.exp(s - p) - (s - p) - 1))
        total -= sum(terms) / (len(terms) if own_length else 4) / len(answers)
    A = advantages(rewards, scale=own_length).flatten()
    weights = [1 / (len(a.new) if own_length else 4) / len(answers) for a in answers]
    x, y = answer_table(answers, A, 8, weights, start)
    ours = policy_loss(model.float(), x, y, clip=0.2, beta=beta).item()
    assert outside > 3 and ours == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("loss_type, scale", [("grpo", "group"), ("dr_grpo", "none")])
def test_the_loss_is_that_of_trl(model, loss_type, scale):
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    answers, rewards, old, start = some_numbers(model)
    for answer, logprobs in zip(answers, old):
        answer.logprobs = logprobs
    A = advantages(rewards, scale=scale == "group").flatten()
    weights = [1 / (len(a.new) if loss_type == "grpo" else 4) / len(answers) for a in answers]
    x, y = answer_table(answers, A, 8, weights, start)
    rows = [in_one_pass(model, a.prompt, a.new) for a in answers]
    theirs = trl_loss(trl, loss_type, A, rows, old, start)
    assert policy_loss(model, x, y, clip=0.2, beta=0.3).item() == pytest.approx(theirs, abs=1e-5)


def trl_loss(trl, loss_type, A, rows, old, start):
    "What GRPOTrainer computes of these log-probabilities."

    def padded(lists):
        return torch.tensor([[*row, *[0.0] * (4 - len(row))] for row in lists])

    class Settings(SimpleNamespace):
        def __getattr__(self, name):  # whatever else it asks for is off
            return None

    mask = padded([[1.0] * len(row) for row in rows])
    settings = Settings(loss_type=loss_type, beta=0.3, epsilon_low=0.2, epsilon_high=0.2)
    settings.top_entropy_quantile, settings.importance_sampling_level = 1.0, "token"
    settings.max_completion_length, settings.current_gradient_accumulation_steps = 4, 1
    settings.args, settings.model = Settings(), SimpleNamespace(training=True)
    settings.accelerator = SimpleNamespace(gather=lambda t: t, reduce=lambda t, reduction: t)
    settings._metrics = {"train": defaultdict(list)}
    settings._get_per_token_logps_and_entropies = lambda *a, **k: (padded(rows), torch.zeros(12, 4), None)
    inputs = dict(
        prompt_ids=mask, prompt_mask=mask, completion_ids=mask, completion_mask=mask, advantages=A.float()
    )
    inputs |= dict(old_per_token_logps=padded(old), ref_per_token_logps=padded(start))
    return trl.GRPOTrainer._compute_loss(settings, None, inputs).item()


def test_on_fresh_samples_the_ratio_changes_nothing(model):
    answers = draw(model)
    A = torch.linspace(-1, 1, 12)
    x, y = answer_table(answers, A, 8, [1 / 12] * 12)
    parameters = list(model.parameters())
    plain, clipped = (torch.autograd.grad(policy_loss(model, x, y, clip=c), parameters) for c in (None, 0.2))
    for a, b in zip(plain, clipped):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "old, advantage, moves", [(-1, 1, False), (-1, -1, True), (1, -1, False), (1, 1, True)]
)
def test_a_token_that_went_far_enough_gets_no_push_and_one_that_went_astray_does(old, advantage, moves):
    bandit = Bandit([0.0, 0.0])
    far = Answer([0], new=[1], logprobs=[math.log(0.5) + old])  # the ratio is e or 1 / e
    x, y = answer_table([far], torch.tensor([float(advantage)]), 1, [1.0])
    (gradient,) = torch.autograd.grad(policy_loss(bandit, x, y.double(), clip=0.2), bandit.scores)
    assert bool(gradient.any()) == moves


def test_advantages_compare_an_answer_with_its_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert advantages(rewards).tolist() == [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75], [0.0] * 4]
    assert advantages(rewards, "none").equal(rewards)
    torch.testing.assert_close(advantages(rewards, "batch"), rewards - 0.75)
    scaled = advantages(rewards, scale=True)
    assert scaled[0].tolist() == pytest.approx([c * 0.5 / (math.sqrt(1 / 3) + 1e-4) for c in (1, -1, -1, 1)])
    assert not scaled[2].any()  # 0 / 0 is 0 here
