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


def test_by_hand_an_answer_keeps_its_end():
    for tokens, finish in (([4, END], "end"), ([4, 5, 3], "length"), ([4, 5, END], "end")):
        answer = Answer([0])
        for token in tokens:
            assert not answer.finish, f"of {tokens}, at most 3, it is finished before {token}"
            answer.take(token, {END}, 3)
        assert answer.new == tokens, f"given {tokens}, where {END} is an end, it kept {answer.new}"
        why = f"after {tokens}, at most 3, the finish is {answer.finish!r}, not {finish!r}"
        assert answer.finish == finish, why


def test_answers_come_group_by_group_each_with_its_log_probabilities(model):
    answers = draw(model, group=3)
    prompts = [answer.prompt for answer in answers]
    assert prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, f"two prompts, groups of 3: {prompts}"
    for answer in answers:
        assert answer.finish, "an answer has no finish: does anything go through what decode_rows yields?"
        assert END not in answer.new[:-1], f"{END} ends an answer, but one is {answer.new}: give `ends`"
        n, logprobs = len(answer.new), len(answer.logprobs)
        assert n == logprobs, f"an answer has {n} tokens and {logprobs} log-probabilities"


@pytest.mark.parametrize("seeds", [5, 7])
def test_six_answers_have_six_seeds_or_there_is_a_value_error(model, seeds):
    with pytest.raises(ValueError):
        draw_answers(model, PROMPTS, 3, 4, {END}, range(seeds))


def test_an_answer_depends_on_its_seed_alone(model):
    together = draw(model)
    different = {tuple(answer.new) for answer in together}
    assert len(different) > 3, f"12 answers with 12 seeds, but only {len(different)} different ones"
    for i, answer in enumerate(together):
        (alone,) = draw_answers(model, [answer.prompt], 1, 4, {END}, [i])
        assert alone.new == answer.new, f"with seed {i} alone {alone.new}, with others {answer.new}"
        assert alone.logprobs == pytest.approx(answer.logprobs, abs=1e-5)


def test_by_hand_advantages_compare_an_answer_with_its_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    want = torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75], [0.0] * 4])
    got = advantages(rewards)
    why = ". The sign is wrong: a better answer has the larger one" if got.equal(-want) else ""
    assert got.equal(want), f"of {rewards.tolist()} the advantages are {got.tolist()}{why}"
    assert advantages(rewards, "none").equal(rewards), "without a baseline they are the rewards"
    got = advantages(rewards, "batch")
    torch.testing.assert_close(
        got, rewards - 0.75, msg=f"the batch's mean is 0.75, but they are {got.tolist()}"
    )

    # [1, 0, 0, 1] differs from its mean by 1/2: four squares of 1/4, and the sum divided by 3 is 1/3
    got = advantages(rewards, scale=True)[0].tolist()
    size = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    slips = {
        0.5 / (0.5 + 1e-4): ": the deviation is divided by n, torch's std by n - 1",
        0.5 / math.sqrt(1 / 3): ": 1e-4 is missing",
    }
    said = [text for value, text in slips.items() if math.isclose(got[0], value, rel_tol=1e-5)]
    want = [size, -size, -size, size]
    assert got == pytest.approx(want, rel=1e-5), f"scaled they are {got}, not {want}{''.join(said)}"
    assert not advantages(rewards, scale=True)[2].any(), "where all rewards are equal there is no advantage"


def test_by_hand_the_table_counts_the_answer_with_its_end_and_no_token_of_the_prompt():
    answers = [Answer([1, 2, 3], new=[4, END], logprobs=[-0.5, -0.7]), Answer([5], new=[0], logprobs=[-0.1])]
    x, y = answer_table(answers, torch.tensor([2.0, -1.0]), 6, [0.5, 0.25], start=[[-1.0, -2.0], [-3.0]])
    want = [[1, 2, 3, 4, 0, 0], [5, 0, 0, 0, 0, 0]]
    assert x.tolist() == want, f"prompts [1, 2, 3] and [5], answers [4, {END}] and [0]: x is {x.tolist()}"
    want = [[-100, -100, 4, END, -100, -100], [0, *[-100] * 5]]
    got = y[..., 0].tolist()
    late = ": one place too late, the token before an answer predicts its first" if got[1][1] == 0 else ""
    assert got == want, f"for x = {x.tolist()} the targets are {got}, not {want}{late}"
    numbers = {(0, 2): [0.5, 2, -0.5, -1], (0, 3): [0.5, 2, -0.7, -2], (1, 0): [0.25, -1, -0.1, -3]}
    for place, want in numbers.items():
        got = [round(number, 4) for number in y[place][1:].tolist()]
        assert got == want, f"weight, advantage, when drawn, at the start: at {place} {got}, not {want}"
    assert not y[y[..., 0] == -100][:, 1:].any(), "where the target is -100, the other numbers are 0"
    _, y = answer_table(answers, torch.tensor([2.0, -1.0]), 6, [0.5, 0.25])
    assert not y[..., 4].any(), "without `start` the last number is 0"


def bandit_loss(probs, rows, **how):
    "The loss of a bandit, and its gradient; rows: (target, weight, advantage, old, start) of each token."
    bandit = Bandit([math.log(p) for p in probs])
    y = torch.tensor(rows, dtype=torch.float64)
    loss = policy_loss(bandit, torch.zeros(y.shape[:2], dtype=torch.int64), y, **how)
    assert loss.dim() == 0, f"the loss is one number, not of shape {tuple(loss.shape)}"
    assert loss.requires_grad, "the loss has no gradient: is there a detach too many?"
    (gradient,) = torch.autograd.grad(loss, bandit.scores, allow_unused=True)
    return loss.item(), gradient


def test_by_hand_the_loss_is_minus_the_sum_of_weight_advantage_and_log_probability():
    # log π in units of ln 2: token 0 has -1, tokens 1 and 2 have -2
    rows = [
        [[0, 1 / 2, 1, 0, 0], [-100, 0, 0, 0, 0]],  # 1/2 · 1 · (-1) = -1/2
        [[1, 1 / 4, -1, 0, 0], [2, 1 / 4, -1, 0, 0]],  # twice 1/4 · (-1) · (-2) = 1/2, so 1
    ]
    loss, _ = bandit_loss([1 / 2, 1 / 4, 1 / 4], rows)
    slips = {
        0.5: "the sign: a loss goes down where the gain goes up",
        0: "each answer is divided by its own length: GRPO's bias",
        -1 / 4: "a mean over the answers; the weights have that already",
        -1 / 6: "a mean over the tokens; the weights have that already",
        -1 / 8: "a mean over the places; the weights have that already",
        -3: "the weights are missing",
        -1.5: "the advantages' sign is lost",
    }
    loss = round(loss / math.log(2), 3)
    said = "".join(f": {text}" for value, text in slips.items() if abs(value - loss) < 1e-3)
    assert loss == -0.5, f"the gains are -1/2 and 1, in units of ln 2; the loss is {loss}, not -0.5{said}"


@pytest.mark.parametrize("advantage, gains", [(1, [0.5, 1.0, 1.2]), (-1, [-0.8, -1.0, -1.5])])
def test_by_hand_the_clip_is_the_table_of_the_chapter(advantage, gains):
    for ratio, want in zip((0.5, 1.0, 1.5), gains):
        rows = [[[0, 1, advantage, math.log(0.5 / ratio), 0]]]
        loss, gradient = bandit_loss([0.5, 0.5], rows, clip=0.2)
        case = f"A = {advantage}, ratio {ratio}, clip 0.2"
        assert -loss == pytest.approx(want), f"{case}: the gain is {-loss:.3g}, not {want}"
        moves = want in (0.5, 1.0, -1.0, -1.5)
        got = gradient is not None and bool(gradient.any())
        why = " (the ratio keeps its gradient, so no detach)" if moves else ""
        assert got == moves, f"{case}: {'a' if moves else 'no'} gradient is expected{why}"


def test_by_hand_the_distance_from_the_initial_model():
    "log π = ln 1/4, and in the initial model ln 1/2, so d = ln 2: beta (2 - ln 2 - 1)."
    rows = [[[0, 1, 0, math.log(1 / 4), math.log(1 / 2)]]]
    loss, gradient = bandit_loss([1 / 4, 3 / 4], rows, beta=2.0)
    d = math.log(2)
    slips = {
        -(1 - d): "the sign: the distance raises the loss",
        d - 0.5: "d is the other way around",
        d: "d alone, an estimate that may be negative",
        -d: "d alone, an estimate that may be negative",
        d * d / 2: "another estimate: half of d squared",
        0: "is it from the log-probability when drawn?",
    }
    said = "".join(f": {text}" for value, text in slips.items() if abs(value - loss / 2) < 1e-3)
    assert loss / 2 == pytest.approx(1 - d), f"1 - ln 2 = {1 - d:.3f}, times beta; not {loss / 2:.3f}{said}"
    # beta (1 - 2) by log π, and log π by the two scores: 3/4, -3/4
    want = [-1.5, 1.5]
    assert gradient.tolist() == pytest.approx(want), f"its gradient is {gradient.tolist()}, not {want}"
    loss, _ = bandit_loss([1 / 4, 3 / 4], [[[0, 0.5, 0, 0, math.log(1 / 2)]]], beta=2.0)
    assert loss == pytest.approx(1 - d), "the weight counts for the distance too"


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


def test_answers_are_drawn_from_the_policy_itself(model):
    first = [answer.new[0] for answer in draw_answers(model, [[0, 1]], 4000, 1, {END}, range(4000))]
    with torch.no_grad():
        probs = model(torch.tensor([[0, 1]]))[0][0, -1].softmax(-1)
    for token, p in enumerate(probs.tolist()):
        assert first.count(token) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000) + 1e-9)


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
