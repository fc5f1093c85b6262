"""The models of the suite: their names, sizes, batches and published figures."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys

import pytest
import torch

from memscale.benchmarks import MODELS, find_model, run_suite
from memscale.benchmarks.models import DEFAULT_MODELS, MissingPackageError, quiet_transformers
from memscale.benchmarks.unet import DiffusionUNet
from memscale.errors import ConfigError, MemScaleError

# name, layers, width, heads, vocabulary, batch, seq, parameters, published baseline, published peak
EXPECTED = [
    ("bert-base", 12, 768, 12, 30522, 16, 128, 109_514_298, 3.14, 0.84),
    ("bert-large", 24, 1024, 16, 30522, 16, 128, 335_174_458, 7.60, 2.02),
    ("gpt2-medium", 24, 1024, 16, 50257, 4, 512, 354_823_168, 10.87, 2.61),
    ("gpt2-large", 36, 1280, 20, 50257, 2, 512, 774_030_080, 14.87, 4.68),
    ("gpt2-xl", 48, 1600, 25, 50257, 1, 512, 1_557_611_200, None, 9.25),
]

# name, samples, tokens, parameters of the published checkpoint
OTHERS = [
    ("gpt2", 4, 512, 124_439_808),
    ("llama-3.2-1b", 1, 2048, 1_235_814_400),
    ("llama-3.2-3b", 1, 2048, 3_212_749_824),
    ("qwen3-0.6b", 1, 2048, 596_049_920),
    ("t5-large", 4, 512, 737_668_096),
    ("vit-large", 32, None, 304_326_632),
    ("whisper-medium", 4, 448, 763_857_920),
    ("resnet-50", 64, None, 25_557_032),
    ("diffusion-unet", 4, None, 859_520_964),
]


def on_meta(model):
    with torch.device("meta"):
        return model.build()


def shape(config):
    return config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.vocab_size


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda expected: expected[0])
def test_published_models(expected):
    name, layers, width, heads, vocabulary, batch, seq, parameters, baseline, peak = expected
    model = find_model(name)
    assert (model.batch, model.seq) == (batch, seq)
    assert model.published is not None
    assert (model.published.baseline_gib, model.published.peak_gib) == (baseline, peak)
    built = on_meta(model)
    assert shape(built.config) == (layers, width, heads, vocabulary)
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
    assert built.training


@pytest.mark.parametrize("expected", OTHERS, ids=lambda expected: expected[0])
def test_other_models_have_the_parameters_of_their_checkpoints(expected):
    name, batch, seq, parameters = expected
    model = MODELS[name]
    assert (model.batch, model.seq, model.published) == (batch, seq, None)
    built = on_meta(model)
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters
    assert built.training
    assert pickle.dumps(model)  # a case goes to a process of its own


@pytest.mark.parametrize(
    "name",
    [
        "resnet-50",
        *(pytest.param(each[0], marks=pytest.mark.slow) for each in OTHERS if each[0] != "resnet-50"),
    ],
)
def test_a_plain_step_is_simulated(name):
    (row,) = run_suite([name], on="H200", batch=1)
    # Weights, gradients and two moments are there at the peak, whatever else is.
    assert row.peak_bytes > 4 * 4 * row.params
    assert row.step_time.compute > 0


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
    assert shape(on_meta(model).config) == (layers, width, heads, vocabulary)
    assert (model.batch, model.seq, model.published) == (batch, seq, None)


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny"])
def test_a_built_model_has_a_loss_to_train_on(name):
    model = MODELS[name]
    built = model.build()
    loss = built(**model.inputs(model.batch, model.seq)).loss
    loss.backward()
    # Random weights guess at random: every token counts, none is masked out.
    assert loss.item() == pytest.approx(math.log(built.config.vocab_size), rel=0.02)


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


def test_samples_of_one_size_have_no_length():
    with pytest.raises(ConfigError, match=r"seq=128 is not allowed for resnet-50: .* leave seq out"):
        run_suite(["resnet-50"], seq=128)
    with pytest.raises(ConfigError, match="seq=None is not allowed for bert-tiny: give a number"):
        MODELS["bert-tiny"].inputs(1)
    assert set(MODELS["resnet-50"].inputs(1)) == {"pixel_values", "labels"}


def test_a_small_u_net_learns():
    torch.manual_seed(0)
    model = DiffusionUNet(widths=(32, 64), text=16, heads=2, depth=1)
    inputs = {
        "noisy": torch.randn(2, 4, 8, 8),
        "timesteps": torch.tensor([3, 700]),
        "text": torch.randn(2, 5, 16),
        "labels": torch.randn(2, 4, 8, 8),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        out = model(**inputs)
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert out.noise.shape == inputs["labels"].shape
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1] < 0.8 * losses[0]


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackageError, match="pip install transformers") as caught:
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
