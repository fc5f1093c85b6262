"""The models and devices of the suite, by name. Models are built with random weights; nothing is downloaded.

To add a model: a line in `_ALL`; a new family: its classes in `_CLASSES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from memscale.errors import ConfigError, ConfigTypeError, MemScaleError, shown
from memscale.hardware import GpuSpec, find_gpu
from memscale.units import format_bytes, parse_bytes

Family: TypeAlias = Literal["gpt2", "bert"]  # a causal and a masked language model

PUBLISHED_ON = "NVIDIA GeForce RTX 3090"  # the device of every published figure


class MissingPackageError(MemScaleError, ImportError):
    """Something was asked for that needs a package which is not installed."""


@dataclass(frozen=True)
class Published:
    """Peak device memory in GiB by the documentation of memscale 1.1, another package: RTX 3090, fp32 AdamW."""

    baseline_gib: float | None  # without any optimization; None if it does not fit the card
    peak_gib: float  # with theirs


@dataclass(frozen=True)
class BenchmarkModel:
    name: str
    layers: int
    width: int  # the hidden size; the MLP is four times as wide
    heads: int
    batch: int  # samples, by default
    seq: int  # tokens in a sample, by default
    family: Family
    vocabulary: int
    positions: int  # tokens in a sample, at most
    published: Published | None = None  # with the default batch

    @property
    def modules(self) -> tuple[str, ...]:
        """Return what building it imports: transformers leaves some 100 MiB of a model's own to its first use."""
        return ("transformers", f"transformers.models.{self.family}.modeling_{self.family}")

    def build(self) -> nn.Module:
        """Return the model with random weights, on the CPU (or what `torch.device` says), in training mode."""
        config, model = (getattr(_transformers(), name) for name in _CLASSES[self.family])
        with quiet_transformers():
            built: nn.Module = model(
                config(
                    vocab_size=self.vocabulary,
                    max_position_embeddings=self.positions,
                    hidden_size=self.width,
                    intermediate_size=4 * self.width,
                    num_hidden_layers=self.layers,
                    num_attention_heads=self.heads,
                    bos_token_id=self.vocabulary - 1,
                    eos_token_id=self.vocabulary - 1,
                )
            )
        return built.train()

    def check_length(self, seq: int) -> None:
        """Raise a ConfigError if samples of `seq` tokens are too long for the model."""
        if seq > self.positions:
            raise ConfigError(f"seq={seq} is too long for {self.name}: it has {self.positions} positions.")

    def inputs(self, batch: int, seq: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return random tokens, with themselves as labels: every token counts in the loss."""
        self.check_length(seq)
        ids = torch.randint(0, self.vocabulary, (batch, seq), device=device)
        return {"input_ids": ids, "labels": ids}


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingPackageError(
            "The benchmark models are built with transformers, which is not installed: "
            "`pip install open-memscale[hf]`.",
            name="transformers",
        ) from None


_CLASSES: dict[Family, tuple[str, str]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "bert": ("BertConfig", "BertForMaskedLM"),
}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence warnings of transformers in the block, such as those of a model that has no trained weights."""
    logging = _transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


_gpt2_model = functools.partial(BenchmarkModel, family="gpt2", vocabulary=50257, positions=1024)
_bert_model = functools.partial(BenchmarkModel, family="bert", vocabulary=30522, positions=512)

# name, layers, width, heads, batch, seq
_ALL = (
    _bert_model("bert-base", 12, 768, 12, 16, 128, published=Published(3.14, 0.84)),
    _bert_model("bert-large", 24, 1024, 16, 16, 128, published=Published(7.60, 2.02)),
    _gpt2_model("gpt2-medium", 24, 1024, 16, 4, 512, published=Published(10.87, 2.61)),
    _gpt2_model("gpt2-large", 36, 1280, 20, 2, 512, published=Published(14.87, 4.68)),
    _gpt2_model("gpt2-xl", 48, 1600, 25, 1, 512, published=Published(None, 9.25)),
    # Small enough to be trained on a CPU in seconds.
    _gpt2_model("gpt2-small", 12, 512, 8, 4, 512),
    _gpt2_model("gpt2-tiny", 2, 64, 2, 2, 64, vocabulary=1000, positions=128),
    _bert_model("bert-tiny", 2, 64, 2, 2, 64, vocabulary=1000, positions=128),
)

MODELS: dict[str, BenchmarkModel] = {model.name: model for model in _ALL}
"""Every model of the suite by its name."""

DEFAULT_MODELS: tuple[str, ...] = tuple(model.name for model in _ALL if model.published is not None)
"""What the suite runs unless told otherwise: the models with published figures."""


def find_model(name: str) -> BenchmarkModel:
    """Return the model of that name; raise a ConfigError that lists the names there are if it is none of them."""
    if not isinstance(name, str):
        raise ConfigError(f"A model is found by its name, such as 'gpt2-medium'; got {shown(name)}.")
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]


Device: TypeAlias = GpuSpec | int | None
"""What a case runs on: a GPU of the table or so many bytes (simulated), or None for the CPU (measured)."""

# With a unit, or too large a number to be the name of a GPU ("3090").
_SIZE = re.compile(r"[-+]?(\d[\d_.]*\s*[a-z]*b|\d{7,})", re.IGNORECASE)


def find_device(on: str) -> Device:
    """Return the device that `on` names: a GPU ("RTX 3090", "a100-80gb"), a size ("24GiB"), or "cpu"."""
    if not isinstance(on, str):
        raise ConfigTypeError(
            f"on={shown(on)} is a {type(on).__name__}: give the name of a GPU, a size as text, or 'cpu'."
        )
    text = on.strip()
    if text.lower() == "cpu":
        return None
    return parse_bytes(text, field="on") if _SIZE.fullmatch(text) else find_gpu(text)


def device_name(on: str) -> str:
    """Return the device in full: its name, and its memory unless the name says that.

    Example:
        >>> device_name("rtx3090"), device_name("24GiB"), device_name("cpu")
        ('NVIDIA GeForce RTX 3090, 24.0 GiB', 'a GPU of 24.0 GiB', 'the CPU')
    """
    device = find_device(on)
    if device is None:
        return "the CPU"
    if isinstance(device, GpuSpec):
        return f"{device.name}, {format_bytes(device.memory_bytes)}"
    return f"a GPU of {format_bytes(device)}"


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ConfigError:
    names = list(allowed)
    near = get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(f"There is no {kind} {shown(name)}{guess} Allowed: {', '.join(names)}.")
