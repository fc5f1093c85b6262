"""The batch to plan for: what the user gave, or what the model itself hints at."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import pytree
from memscale.errors import ProfileError

HINT_LENGTH = 512
HINT_BATCH = 1


@dataclass(frozen=True)
class Sample:
    """How the model is called in training.

    Attributes:
        args: what it is called with.
        kwargs: the same, by name.
        beside: what else of a batch is there meanwhile, such as targets.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: tuple[Any, ...] = ()

    def describe(self) -> str:
        """The shapes, in words.

        >>> Sample((torch.zeros(2, 3),), {"labels": torch.zeros(2, dtype=torch.long)}).describe()
        'float32[2, 3], labels=int64[2]'
        """
        parts = [_shape(value) for value in self.args]
        parts += [f"{name}={_shape(value)}" for name, value in self.kwargs.items() if _has_tensor(value)]
        return ", ".join(part for part in parts if part)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def on(self, device: torch.device) -> Sample:
        """The same batch on a device, as the training loop will have it."""

        def moved(leaf: object) -> object:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return self.mapped(lambda tree: pytree.tree_map(moved, tree))

    def mapped(self, change: Callable[[Any], Any]) -> Sample:
        """The same call with other tensors."""
        return Sample(change(self.args), change(self.kwargs), change(self.beside))

    def positions_and_tokens(self) -> tuple[int, int]:
        """The positions of one sequence, and those of all: by token ids or labels, else by what is called with.

        >>> Sample((), {"input_ids": torch.zeros(4, 512, dtype=torch.long)}).positions_and_tokens()
        (512, 2048)
        """
        tensors = [tensor for tensor in self.tensors() if tensor.dim() >= 1]
        words = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
        if words:
            longest = max(words, key=lambda tensor: tensor.numel())
            return longest.shape[1], longest.numel()
        features = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() == 3]
        if features:
            longest = max(features, key=lambda tensor: tensor.numel())
            return longest.shape[1], longest.shape[0] * longest.shape[1]
        return 1, max((tensor.shape[0] for tensor in tensors), default=1)

    def shapes(self) -> tuple[Any, ...]:
        """What two batches must share to be planned alike."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return tuple(
            (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else None
            for leaf in leaves
        )


def sample_of(sample_input: Any, model: nn.Module | None = None) -> Sample:
    """Turn what a user passes as ``sample_input`` into a call.

    A tensor is the one argument, a tuple or list the positional ones, a mapping (a dict, Hugging Face's
    ``BatchEncoding``) the keyword ones; a dataclass or an object with tensors as attributes is taken as keywords.
    Of a loader's ``(inputs, targets)`` as many are taken as the model's forward has room for.
    """
    if isinstance(sample_input, Sample):
        return sample_input
    if isinstance(sample_input, torch.Tensor):
        return Sample((sample_input,), {})
    if isinstance(sample_input, Mapping):
        return Sample((), _keywords(dict(sample_input)))
    if hasattr(sample_input, "_asdict"):
        return Sample(tuple(sample_input), {})
    if isinstance(sample_input, (tuple, list)):
        room = _room(model)
        args = tuple(sample_input)
        return Sample(args[:room], {}, () if room is None else args[room:])
    attributes = _attributes(sample_input)
    if attributes:
        return Sample((), attributes)
    raise ProfileError(
        f"sample_input is a {type(sample_input).__name__} without tensors. Pass what you pass to the model: "
        "a tensor, a tuple of positional arguments, a dict of keyword arguments, or the batch object itself."
    )


def hinted_sample(model: nn.Module) -> Sample | None:
    """A batch of one from what the model says of itself, on the meta device; None if it says too little."""
    config = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    if config is None or not isinstance(main_input, str):
        return None
    accepted = inspect.signature(type(model).forward).parameters
    text = getattr(config, "text_config", config)
    kwargs: dict[str, Any] = {}
    if main_input == "input_ids" and hasattr(text, "vocab_size"):
        length = min(HINT_LENGTH, int(getattr(text, "max_position_embeddings", HINT_LENGTH) or HINT_LENGTH))
        ids = torch.zeros(HINT_BATCH, length, dtype=torch.long, device="meta")
        kwargs["input_ids"] = ids
        if "labels" in accepted and _predicts_tokens(model):
            kwargs["labels"] = ids  # others have labels of another shape, for all that is known
        if "labels" not in accepted and getattr(config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = ids
    elif main_input == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        channels = int(getattr(config, "num_channels", 3))
        kwargs["pixel_values"] = torch.zeros(HINT_BATCH, channels, height, width, device="meta")
    else:
        return None
    return Sample((), kwargs)


def _predicts_tokens(model: nn.Module) -> bool:
    """Whether a Hugging Face model has a head over its vocabulary, and so a label for each token."""
    embeddings = getattr(model, "get_output_embeddings", None)
    return callable(embeddings) and embeddings() is not None


def _room(model: nn.Module | None) -> int | None:
    """How many positional arguments the model's forward takes; None if any number."""
    if model is None:
        return None
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(kind in positional for kind in kinds)


def _keywords(values: dict[Any, Any]) -> dict[str, Any]:
    wrong = [key for key in values if not isinstance(key, str)]
    if wrong:
        raise ProfileError(
            f"sample_input is a dict with the key {wrong[0]!r}; keys are the names of the model's arguments."
        )
    return values


def _attributes(batch: Any) -> dict[str, Any]:
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    else:
        values = {name: value for name, value in getattr(batch, "__dict__", {}).items() if name[:1] != "_"}
    return values if any(_has_tensor(value) for value in values.values()) else {}


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _shape(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    texts = [f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in tensors]
    return texts[0] if len(texts) == 1 else "(" + ", ".join(texts) + ")" if texts else ""
