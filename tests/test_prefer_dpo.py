"""DPO's loss and the log-probabilities of answers against closed forms, transformers and TRL."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from preferences import pairs_of, random_model

from tinygpt.prefer.dpo import answer_logps, bradley_terry_loss, dpo_loss, implicit_rewards, pair_rows


def test_the_loss_of_a_comparison_is_that_of_a_classifier_on_the_difference():
    won, lost = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(50, dtype=torch.float64)
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(won - lost, ones, reduction="none")
    torch.testing.assert_close(bradley_terry_loss(won, lost), wanted)


def test_a_hopeless_comparison_costs_its_distance_and_no_infinity():
    gap = torch.tensor([200.0, 1e4], requires_grad=True)  # the sigmoid of -200 is 0 in float32
    loss = bradley_terry_loss(torch.zeros(2), gap)
    loss.sum().backward()
    assert loss.tolist() == [200, 1e4] and gap.grad.tolist() == [1, 1]


def test_dpo_is_written_out_the_quotient_of_the_tilted_chances():
    "With probabilities instead of logarithms: w = (pi/ref)^beta, loss = -log(w_c / (w_c + w_r))."
    rng = np.random.default_rng(0)
    pi, ref = rng.uniform(0.01, 1, (2, 2, 30))
    weight = (pi / ref) ** 0.7
    wanted = -np.log(weight[0] / (weight[0] + weight[1]))
    args = (torch.tensor(np.log(side)) for side in (*pi, *ref))
    torch.testing.assert_close(dpo_loss(*args, beta=0.7), torch.tensor(wanted))


def test_the_first_loss_is_log_2_whatever_beta_and_its_gradient_is_half_of_beta():
    logps = torch.tensor([-5.0, -9.0], dtype=torch.float64, requires_grad=True)
    for beta in (0.05, 2.0):
        loss = dpo_loss(logps[:1], logps[1:], logps[:1].detach(), logps[1:].detach(), beta).sum()
        assert loss.item() == pytest.approx(math.log(2))
        [grad] = torch.autograd.grad(loss, logps)
        assert grad.tolist() == pytest.approx([-beta / 2, beta / 2])


def test_implicit_rewards_are_those_whose_closed_form_is_the_policy():
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    rewards = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    policy = reference * (rewards / 0.4).exp()
    policy /= policy.sum()
    found = implicit_rewards(policy.log(), reference.log(), 0.4)
    torch.testing.assert_close(found - found[0], rewards - rewards[0])


# rows ------------------------------------------------------------------------------------------------------


def test_rows_hold_prompt_and_answer_and_targets_only_the_answer():
    x, targets = pair_rows([([1, 2, 3], [4, 5], [6]), ([7, 8], [9], [10, 11])])
    assert x.tolist() == [[1, 2, 3, 4], [1, 2, 3, 0], [7, 8, 0, 0], [7, 8, 10, 0]]
    none = -100
    assert targets.tolist() == [
        [none, none, 4, 5],
        [none, none, 6, none],
        [none, 9, none, none],
        [none, 10, 11, none],
    ]


def test_log_probabilities_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    from tinygpt.model_hf import config_to_hf, state_to_hf

    model = random_model()
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_to_hf(model.config))).eval()
    theirs.load_state_dict(state_to_hf(model), strict=False)
    pairs = pairs_of(5)
    x, targets = pair_rows(pairs)
    ours = answer_logps(model, x, targets)
    wanted = []
    for prompt, *answers in pairs:
        for answer in answers:
            logits = theirs(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
            wanted.append(sum(logits[place, token] for place, token in zip(places, answer)))
    torch.testing.assert_close(ours, torch.stack(wanted).float(), rtol=1e-5, atol=1e-4)


def test_log_probabilities_losses_and_rewards_are_those_of_trl(tmp_path):
    "In a process of its own: it brings much along."
    if not find_spec("trl"):
        pytest.skip("TRL is not installed (pip install trl)")
    command = [sys.executable, str(Path(__file__).with_name("prefer_trl.py")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout.splitlines()[-1])
    assert len(values) == 5
    for name, (theirs, ours) in values.items():
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name


def test_rows_of_a_batch_do_not_touch_each_other():
    model, pairs = random_model(), pairs_of(6)
    x, targets = pair_rows(pairs)
    alone = torch.cat([answer_logps(model, *pair_rows([pair])) for pair in pairs])
    torch.testing.assert_close(answer_logps(model, x, targets), alone)
