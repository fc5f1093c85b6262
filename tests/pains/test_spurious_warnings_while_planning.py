"""Planning without a sample does not make a regression model warn of labels that we made up."""

from __future__ import annotations

import warnings

import pytest
import torch

import memscale
from memscale.profiler import hinted_sample
from wrapping import QUIET


def test_a_regression_model_does_not_warn_of_broadcasting() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=1,
    )
    model = transformers.BertForSequenceClassification(config)
    ids = torch.zeros(4, 16, dtype=torch.long)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memscale.wrap(model, QUIET)
        model(input_ids=ids, labels=torch.zeros(4)).loss.backward()
    assert [str(each.message) for each in caught if "target size" in str(each.message)] == []
    assert "labels" in hinted_sample(transformers.BertForMaskedLM(config)).kwargs
    assert "labels" not in hinted_sample(model).kwargs
