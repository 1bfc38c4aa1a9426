"""A reward model that is a GPT, against transformers' classifier; the best of n against all choices of n."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from preferences import BYTE, random_model

from tinygpt.checkpoint import save_checkpoint
from tinygpt.prefer.dpo import bradley_terry_loss, pair_rows
from tinygpt.prefer.reward import (
    RewardJudge,
    answer_rewards,
    best_of_kl,
    expected_best,
    reward_objective,
    reward_rows,
    row_rewards,
)
from tinygpt.prefer.train import Preferences, dpo_objective
from tinygpt.run.setup import open_run
from tinygpt.support import UserError
from tinygpt.train import train

EOT = BYTE.eot


def digits_over_letters(n: int, seed: int) -> list:
    "Pairs whose better answer is a digit."
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(10, (n, 3), generator=generator).tolist()
    return [([97 + a], [48 + b, EOT], [97 + c, EOT]) for a, b, c in draws]


def test_a_reward_is_that_of_transformers_classifier_with_the_same_row_as_head():
    transformers = pytest.importorskip("transformers")
    from tinygpt.model_hf import config_to_hf, state_to_hf

    model, token = random_model(), 7
    config = transformers.LlamaConfig(**config_to_hf(model.config), num_labels=1, pad_token_id=0)
    theirs = transformers.LlamaForSequenceClassification(config).eval()
    theirs.load_state_dict(state_to_hf(model), strict=False)
    theirs.score.weight.data = model.lm_head.weight[token : token + 1].detach()
    answers = [([1, 2], [3, 4, EOT]), ([5], [6, EOT]), ([1, 2, 3, 4], [9, 9, 9, 9, EOT])]
    ours = answer_rewards(model, answers, token)
    for reward, (prompt, answer) in zip(ours, answers):
        wanted = theirs(torch.tensor([prompt + answer[:-1]])).logits[0, 0]  # before the end token
        torch.testing.assert_close(reward, wanted, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_sum_over_pairs_and_padding_plays_no_part():
    model = random_model()
    x, targets = pair_rows([([1, 2], [3, 4, 5], [6]), ([7], [8], [9, 10])])
    y = torch.stack([targets.float(), torch.zeros_like(targets, dtype=torch.float32)], -1)
    rewards = row_rewards(model, x, targets, 11)
    wanted = bradley_terry_loss(rewards[[0, 2]], rewards[[1, 3]]).sum()
    torch.testing.assert_close(reward_rows(model, x, y, 11), wanted)
    wider, more = F.pad(x, (0, 5)), F.pad(targets, (0, 5), value=-100)
    torch.testing.assert_close(row_rewards(model, wider, more, 11), rewards)


def test_rewards_are_computed_without_dropout_and_leave_the_mode_as_it_was():
    model = random_model(dropout=0.5)
    answers = [([1], [2, 3]), ([4], [5])]
    wanted = answer_rewards(model, answers, 3)
    torch.testing.assert_close(answer_rewards(model.train(), answers, 3), wanted)
    assert model.training


def test_a_reward_model_learns_what_the_pairs_have_in_common(config, tmp_path):
    save_checkpoint(tmp_path / "start", random_model(), BYTE)
    config.run.init_from, config.model = str(tmp_path / "start"), random_model().config
    steps = dict(optimizer="adamw", learning_rate=3e-3, max_steps=40, warmup_steps=0, schedule="constant")
    config.optim = replace(config.optim, **steps)
    config.data.batch_size, config.system.compile = 16, "off"
    learn = Preferences(
        digits_over_letters(60, 0), digits_over_letters(40, 1), kind="reward", score_token=EOT
    )
    result = train(config, progress="none", objective=reward_objective(learn))
    assert result.figures["rewards/accuracies"] > 0.9 and result.figures["rewards/margins"] > 1
    high, low = answer_rewards(result.model, [([97], [53, EOT]), ([97], [100, EOT])], EOT)
    assert high > low


def test_a_judge_counts_pairs_that_are_ranked_right(config, tmp_path):
    model = random_model(dropout=0.5)  # which a judge turns off
    save_checkpoint(tmp_path / "start", model, BYTE)
    config.run.init_from, config.model = str(tmp_path / "start"), model.config
    pairs = digits_over_letters(9, 0)
    rewards = answer_rewards(model, [(prompt, answer) for prompt, *both in pairs for answer in both], EOT)
    won, lost = rewards[0::2], rewards[1::2]
    run = open_run(config)
    figures = RewardJudge(Preferences([], pairs, kind="reward", score_token=EOT))(run)
    run.close()
    assert figures["rewards/accuracies"] == pytest.approx((won > lost).float().mean().item())
    assert figures["rewards/margins"] == pytest.approx((won - lost).mean().item(), abs=1e-6)
    assert figures["pairs/loss"] == pytest.approx(-F.logsigmoid(won - lost).mean().item(), abs=1e-6)


def test_a_reward_model_has_no_use_for_the_references_pass(config, tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "start", random_model(), BYTE)
    config.run.init_from, config.model = str(tmp_path / "start"), random_model().config
    monkeypatch.setattr("tinygpt.prefer.train.reference_logps", None)
    pairs = digits_over_letters(9, 0)
    learn = Preferences(pairs, pairs, kind="reward", score_token=EOT)
    config.optim = replace(config.optim, max_steps=1, warmup_steps=0)
    config.data.batch_size, config.system.compile = 6, "off"
    train(config, progress="none", objective=reward_objective(learn))
    config.run.name = "dpo"
    with pytest.raises(TypeError):
        train(config, progress="none", objective=dpo_objective(replace(learn, kind="dpo")))


def test_preferences_of_another_kind_are_refused():
    with pytest.raises(UserError, match="kind = 'dpo'"):
        reward_objective(Preferences([], []))


def test_the_best_of_n_is_the_mean_over_all_choices_with_ties_shared():
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        scores = torch.randint(4, (7,), generator=generator)
        values = torch.randn(7, generator=generator)
        for n in range(1, 8):
            picked = []
            for choice in itertools.combinations(range(7), n):
                top = max(scores[list(choice)])
                best = [values[i].item() for i in choice if scores[i] == top]
                picked.append(sum(best) / len(best))
            assert expected_best(scores, values, n) == pytest.approx(sum(picked) / len(picked), abs=1e-6)


def test_more_draws_than_there_are_cannot_be_picked_from():
    for n in (0, 4):
        with pytest.raises(UserError, match=f"n = {n}.*3"):
            expected_best(torch.zeros(3), torch.zeros(3), n)


def test_the_kl_of_the_best_of_n_is_reached_where_no_two_answers_are_alike():
    "Uniform on a fine grid: the density of the best is n u^(n-1)."
    u = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    for n in (1, 2, 8):
        density = n * u ** (n - 1)
        assert (density * density.log()).mean().item() == pytest.approx(best_of_kl(n), abs=1e-4)
