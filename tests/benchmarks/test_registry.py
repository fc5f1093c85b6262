"""The models of the suite: their names, sizes, batches and published figures."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from memscale.benchmarks import MODELS, find_model
from memscale.benchmarks.models import DEFAULT_MODELS, MissingPackageError, quiet_transformers
from memscale.errors import ConfigError, MemScaleError

# name, layers, width, heads, vocabulary, batch, seq, parameters, published baseline, published peak
EXPECTED = [
    ("bert-base", 12, 768, 12, 30522, 16, 128, 109_514_298, 3.14, 0.84),
    ("bert-large", 24, 1024, 16, 30522, 16, 128, 335_174_458, 7.60, 2.02),
    ("gpt2-medium", 24, 1024, 16, 50257, 4, 512, 354_823_168, 10.87, 2.61),
    ("gpt2-large", 36, 1280, 20, 50257, 2, 512, 774_030_080, 14.87, 4.68),
    ("gpt2-xl", 48, 1600, 25, 50257, 1, 512, 1_557_611_200, None, 9.25),
]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: expected[0])
def test_published_models(expected):
    name, layers, width, heads, vocabulary, batch, seq, parameters, baseline, peak = expected
    model = find_model(name)
    assert (model.layers, model.width, model.heads) == (layers, width, heads)
    assert (model.vocabulary, model.batch, model.seq) == (vocabulary, batch, seq)
    assert model.published is not None
    assert (model.published.baseline_gib, model.published.peak_gib) == (baseline, peak)
    with torch.device("meta"):
        built = model.build()
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
    assert built.training


def test_the_suite_runs_the_published_ones_by_default():
    assert [expected[0] for expected in EXPECTED] == list(DEFAULT_MODELS)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "vocabulary", "batch", "seq"),
    [
        ("gpt2-small", 12, 512, 8, 50257, 4, 512),
        ("gpt2-tiny", 2, 64, 2, 1000, 2, 64),
        ("bert-tiny", 2, 64, 2, 1000, 2, 64),
    ],
)
def test_small_twins(name, layers, width, heads, vocabulary, batch, seq):
    model = MODELS[name]
    assert (model.layers, model.width, model.heads) == (layers, width, heads)
    assert (model.vocabulary, model.batch, model.seq) == (vocabulary, batch, seq)
    assert model.published is None


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny"])
def test_a_built_model_has_a_loss_to_train_on(name):
    model = MODELS[name]
    loss = model.build()(**model.inputs(model.batch, model.seq)).loss
    loss.backward()
    # Random weights guess at random: every token counts, none is masked out.
    assert loss.item() == pytest.approx(torch.tensor(float(model.vocabulary)).log().item(), rel=0.02)


def test_unknown_names():
    with pytest.raises(
        ConfigError, match=r"'gpt2-xll'; did you mean gpt2-xl\? Allowed: bert-base, .*bert-tiny"
    ):
        find_model("gpt2-xll")
    with pytest.raises(ConfigError, match="found by its name"):
        find_model(7)  # type: ignore[arg-type]


def test_samples_that_are_too_long():
    with pytest.raises(ConfigError, match="seq=513 is too long for bert-base: it has 512 positions"):
        MODELS["bert-base"].inputs(1, 513)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"pip install open-memscale\[hf\]") as caught:
        MODELS["gpt2-tiny"].build()
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, MemScaleError)


def test_transformers_is_as_talkative_as_before():
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        with contextlib.suppress(ZeroDivisionError), quiet_transformers():
            assert logging.get_verbosity() == logging.ERROR
            raise ZeroDivisionError
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)
