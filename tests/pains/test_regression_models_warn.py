"""Planning for a regression model warns of nothing: the batch that is made up for it has no token ids for labels."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.profiler import hinted_sample
from support.steps import plan_of

transformers = pytest.importorskip("transformers")

AGGRESSIVE = Config(mode="aggressive", enable_logging=False)


def bert(**settings: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **settings,
    )
    return transformers.BertForSequenceClassification(config)


def warnings_of_training(model: nn.Module, sample: Any, batch: dict[str, torch.Tensor]) -> list[str]:
    """The warnings of wrap and of one step, from the first plan to the one for the batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memscale.wrap(model, AGGRESSIVE, sample)
        model(**batch).loss.backward()
    plan = plan_of(model)
    assert sample is not None or (plan.prediction_source == "simulated" and plan.layers), plan.notes
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("given", [True, False], ids=["with a sample", "without"])
@pytest.mark.parametrize(
    "settings", [{"num_labels": 1}, {"num_labels": 2, "problem_type": "regression"}], ids=["one", "two"]
)
def test_wrap_of_a_regression_model_is_silent(settings: dict[str, Any], given: bool) -> None:
    model = bert(**settings)
    labels = torch.rand(4, settings["num_labels"]).squeeze(-1)
    batch = {"input_ids": torch.randint(100, (4, 16)), "labels": labels}
    assert warnings_of_training(model, batch if given else None, batch) == []


def test_planning_does_not_decide_what_kind_of_problem_it_is() -> None:
    model = bert(num_labels=3)
    memscale.wrap(model, AGGRESSIVE)
    assert model.config.problem_type is None
    memscale.detach(model)


def test_language_models_are_still_planned_with_labels() -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100)
    assert set(hinted_sample(transformers.GPT2LMHeadModel(config)).kwargs) == {"input_ids", "labels"}
    assert set(hinted_sample(transformers.GPT2ForSequenceClassification(config)).kwargs) == {"input_ids"}


def test_wrap_of_a_plain_regression_model_is_silent() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)), nn.Linear(16, 1))
    x, y = torch.randn(8, 16), torch.randn(8, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memscale.wrap(model, AGGRESSIVE, (x, y))
        nn.functional.mse_loss(model(x), y).backward()
    assert plan_of(model).prediction_source == "simulated"
