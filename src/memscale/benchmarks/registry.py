"""The models of the suite, by name: built from their configuration with random weights, nothing downloaded.

To add one: a line in `_ALL`; a new family: a builder in `_BUILDERS` and its modules in `_MODULES`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from memscale.benchmarks.choices import unknown_name
from memscale.errors import ConfigError, MemScaleError, shown

__all__ = [
    "DEFAULT_MODELS",
    "MODELS",
    "PUBLISHED_ON",
    "BenchmarkModel",
    "MissingPackageError",
    "Published",
    "find_model",
    "quiet_transformers",
]

Family: TypeAlias = Literal["gpt2", "bert"]

PUBLISHED_ON = "NVIDIA GeForce RTX 3090"
"""The device of every published figure."""


class MissingPackageError(MemScaleError, ImportError):
    """Something was asked for that needs a package which is not installed."""


@dataclass(frozen=True)
class Published:
    """Peak device memory of training as others published it, in GiB: theirs, not measured by this suite.

    From the documentation of memscale 1.1, an unrelated proprietary package: RTX 3090, fp32 AdamW.

    Attributes:
        baseline_gib: Without any optimization; None if it does not fit the card.
        peak_gib: With theirs.
    """

    baseline_gib: float | None
    peak_gib: float


@dataclass(frozen=True)
class BenchmarkModel:
    """A model of the suite and the batch it is trained with.

    Attributes:
        name: Key in `MODELS`.
        layers: Transformer blocks.
        width: Hidden size; the MLP is four times as wide.
        heads: Attention heads.
        batch: Samples in a batch, by default.
        seq: Tokens in a sample, by default.
        family: "gpt2" (causal language model) or "bert" (masked language model).
        vocabulary: Different tokens.
        positions: Tokens in a sample, at most.
        published: What others published for it with the default batch, if anything.
    """

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    family: Family
    vocabulary: int
    positions: int
    published: Published | None = None

    @property
    def modules(self) -> tuple[str, ...]:
        """What has to be imported to build it."""
        return ("transformers", _MODULES[self.family])

    def build(self) -> nn.Module:
        """The model with random weights, on the CPU (or what `torch.device` says), in training mode.

        Raises:
            MissingPackageError: transformers is not installed.
        """
        with quiet_transformers():
            return _BUILDERS[self.family](self).train()

    def check_length(self, seq: int) -> None:
        """Raise a ConfigError if samples of `seq` tokens are too long for the model."""
        if seq > self.positions:
            raise ConfigError(
                f"seq={seq} is too long for {self.name}: it has {self.positions} positions, so give at most "
                "that."
            )

    def inputs(self, batch: int, seq: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Random tokens, with themselves as labels: every token counts in the loss.

        Example:
            >>> {name: tuple(t.shape) for name, t in MODELS["gpt2-tiny"].inputs(2, 8).items()}
            {'input_ids': (2, 8), 'labels': (2, 8)}
        """
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


def _gpt2(model: BenchmarkModel) -> nn.Module:
    transformers = _transformers()
    config = transformers.GPT2Config(
        vocab_size=model.vocabulary,
        n_positions=model.positions,
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        bos_token_id=model.vocabulary - 1,
        eos_token_id=model.vocabulary - 1,
    )
    built: nn.Module = transformers.GPT2LMHeadModel(config)
    return built


def _bert(model: BenchmarkModel) -> nn.Module:
    transformers = _transformers()
    config = transformers.BertConfig(
        vocab_size=model.vocabulary,
        max_position_embeddings=model.positions,
        hidden_size=model.width,
        intermediate_size=4 * model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
    )
    built: nn.Module = transformers.BertForMaskedLM(config)
    return built


_BUILDERS: dict[Family, Callable[[BenchmarkModel], nn.Module]] = {"gpt2": _gpt2, "bert": _bert}
# transformers imports these when a model is first asked for, which takes some 100 MiB of its own.
_MODULES: dict[Family, str] = {
    "gpt2": "transformers.models.gpt2.modeling_gpt2",
    "bert": "transformers.models.bert.modeling_bert",
}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only in the block: a model made from a configuration gets advice that is for others."""
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
    """The model of that name.

    Raises:
        ConfigError: There is none; the message lists those there are.

    Example:
        >>> find_model("gpt2-medium").layers
        24
    """
    if not isinstance(name, str):
        raise ConfigError(f"A model is found by its name, such as 'gpt2-medium'; got {shown(name)}.")
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    return MODELS[name]
