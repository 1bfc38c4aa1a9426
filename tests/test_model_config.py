"What is wrong with a model's config is told at once, with field, value and remedy."

import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from tinygpt.model import GPT, GPTConfig
from tinygpt.model_config import model_problems
from tinygpt.support import UserError

BAD = [
    ("vocab_size", 0),
    ("block_size", -1),
    ("n_layer", 0),
    ("n_layer", 2.0),
    ("n_layer", "2"),
    ("n_layer", True),
    ("n_head", None),
    ("n_embd", 30),
    ("n_kv_head", 3),
    ("n_kv_head", 0),
    ("position", "alibi"),
    ("norm", None),
    ("mlp", "ReLU"),
    ("mlp_hidden", 0),
    ("bias", "yes"),
    ("tie_weights", 1),
    ("qk_norm", None),
    ("ngram_rows", 0),
    ("logit_softcap", -1.0),
    ("logit_softcap", math.nan),
    ("dropout", 1.0),
    ("dropout", -0.1),
    ("dropout", "0.1"),
    ("rope_theta", 0.0),
    ("norm_eps", math.inf),
    ("norm_eps", None),
    ("init", "xavier"),
    ("init", "zero"),
]


@pytest.mark.parametrize("field, value", BAD)
def test_a_bad_value_is_told_once_with_field_value_and_remedy(field, value):
    problems = GPTConfig(**{"n_embd": 32, "n_head": 4, field: value}).problems()
    assert len(problems) == 1, problems
    for words in (field, str(value), "choose"):
        assert words in problems[0]


@pytest.mark.parametrize("value", [np.int64(100), torch.tensor(100), np.array([100, 100])])
@pytest.mark.parametrize("field", ["vocab_size", "dropout", "mlp", "bias"])
def test_numbers_of_numpy_and_torch_are_told_to_become_pythons(field, value):
    problems = GPTConfig(**{field: value}).problems()
    assert len(problems) == 1 and "choose a plain Python value, such as value.item()" in problems[0]


def test_every_field_of_the_config_has_a_bad_value_above():
    assert {f.name for f in fields(GPTConfig)} == {field for field, _ in BAD}


def test_all_problems_are_told_together_before_anything_is_made():
    config = GPTConfig(n_layer=0, n_head=5, n_kv_head=2, position="x", dropout=1.5, bias=None, init="mup")
    assert list(model_problems(config)) == config.problems()
    with pytest.raises(UserError) as error:
        GPT(config)
    for word in (
        "n_layer = 0",
        "n_embd = 768",
        "n_kv_head = 2",
        "position = 'x'",
        "dropout = 1.5",
        "bias = None",
        "init = 'mup'",
    ):
        assert word in str(error.value)
    assert "odd" in str(GPTConfig.llama(n_embd=36, n_head=12).problems())
