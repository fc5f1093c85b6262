"""The batch to plan for, given by the user or derived from the model, and the batches that plans cover.

Note [Covered batches]
A batch is covered if it has the same tensors as one that was planned for, and none is larger: neither in its number of
elements nor, since attention grows with the square of the length, in that number times the longest dimension but the
first. Before each forward in training this is looked up by the shapes of the call.

A batch that is not covered is planned for once, rounded up, so that the next few that grow are covered too: each
dimension in which it differs from what was planned for is rounded up to the next power of two, where that does not run
or does not fit to the next sixteenth of that power, and then not at all. After `MOST_PLANS` plans no more are made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._torch import pytree
from memscale._util.trees import any_on_accelerator, copied
from memscale.errors import ProfileError

HINT_LENGTH = 512
HINT_BATCH = 1


@dataclass(frozen=True)
class Sample:
    """How the model is called in training."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    beside: tuple[Any, ...] = ()  # the rest of the batch, such as targets

    def describe(self) -> str:
        """Return the shapes in words.

        >>> Sample((torch.zeros(2, 3),), {"labels": torch.zeros(2, dtype=torch.long)}).describe()
        'float32[2, 3], labels=int64[2]'
        """
        parts = [_shape(value) for value in self.args]
        parts += [f"{name}={_shape(value)}" for name, value in self.kwargs.items() if _has_tensor(value)]
        return ", ".join(part for part in parts if part)

    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def on(self, device: torch.device) -> Sample:
        """Return the call with its tensors on a device. See Note [Inputs on the host]."""
        keeps_host = device.type != "cpu" and any_on_accelerator(self.tensors())

        def moved(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor) or (keeps_host and leaf.device.type == "cpu"):
                return leaf
            return leaf.to(device)

        return self.mapped(lambda tree: pytree.tree_map(moved, tree))

    def copy(self) -> Sample:
        """Return the call with copies of all that a forward may change: tensors, containers and objects."""
        return self.mapped(lambda tree: copied(tree, lambda tensor: tensor.detach().clone()))

    def again(self) -> Sample:
        """Return the call with the same memory, for another forward: nothing of an earlier one is in its graph."""

        def unchanged(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()

        return self.mapped(lambda tree: copied(tree, unchanged))

    def mapped(self, change: Callable[[Any], Any]) -> Sample:
        """Return the call with all parts changed by a function of a tree."""
        return Sample(*change((self.args, self.kwargs, self.beside)))

    def positions_and_tokens(self) -> tuple[int, int]:
        """Return the positions of one sequence and those of all, by token ids or labels, else by features.

        >>> Sample((), {"input_ids": torch.zeros(4, 512, dtype=torch.long)}).positions_and_tokens()
        (512, 2048)
        """
        tensors = [tensor for tensor in self.tensors() if tensor.dim() >= 1]
        words = [tensor for tensor in tensors if not tensor.is_floating_point() and tensor.dim() == 2]
        features = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() == 3]
        if words or features:
            longest = max(words or features, key=lambda tensor: tensor.numel())
            return longest.shape[1], longest.shape[0] * longest.shape[1]
        return 1, max((tensor.shape[0] for tensor in tensors), default=1)


def sample_of(sample_input: Any, model: nn.Module | None = None) -> Sample:
    """Convert what a user passes as `sample_input` to a call.

    A tensor is the one argument, a tuple or list are positional arguments, a mapping (a dict, Hugging Face's
    `BatchEncoding`), a dataclass or an object with tensors as attributes keyword arguments. Of a loader's
    `(inputs, targets)` only as many are passed as the model's forward accepts.
    """
    if isinstance(sample_input, Sample):
        return sample_input
    if isinstance(sample_input, torch.Tensor):
        return Sample((sample_input,), {})
    if isinstance(sample_input, Mapping):
        wrong = [key for key in sample_input if not isinstance(key, str)]
        if wrong:
            raise ProfileError(
                f"sample_input is a dict with the key {wrong[0]!r}; keys are the names of the model's arguments."
            )
        return Sample((), dict(sample_input))
    if hasattr(sample_input, "_asdict"):
        return Sample(tuple(sample_input), {})
    if isinstance(sample_input, (tuple, list)):
        args = tuple(sample_input)
        if model is None:
            return Sample(args, {})
        kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return Sample(args, {})
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        accepted = sum(kind in positional for kind in kinds)
        return Sample(args[:accepted], {}, args[accepted:])
    if is_dataclass(sample_input) and not isinstance(sample_input, type):
        values = {field.name: getattr(sample_input, field.name) for field in fields(sample_input)}
    else:
        attributes = getattr(sample_input, "__dict__", {})
        values = {name: value for name, value in attributes.items() if name[:1] != "_"}
    if any(map(_has_tensor, values.values())):
        return Sample((), values)
    raise ProfileError(
        f"sample_input is a {type(sample_input).__name__} without tensors. Pass what you pass to the model: "
        "a tensor, a tuple of positional arguments, a dict of keyword arguments, or the batch object itself."
    )


def hinted_sample(model: nn.Module) -> Sample | None:
    """Return a batch of one derived from the model's config, on the meta device; None if that says too little."""
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
        head = getattr(model, "get_output_embeddings", None)
        if "labels" in accepted and callable(head) and head() is not None:
            kwargs["labels"] = ids  # without a head over the vocabulary, labels may have another shape
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


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _shape(value: Any) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    texts = [f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in tensors]
    return texts[0] if len(texts) == 1 else "(" + ", ".join(texts) + ")" if texts else ""


Shapes: TypeAlias = dict[str, tuple[int, ...]]  # of a call's tensors, by path

MOST_KEYS = 4096
MOST_PLANS = 5  # in one run
STEPS_OF_A_POWER = 16


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*kwargs, *(getattr(leaf, "shape", None) for leaf in pytree.tree_leaves((args, kwargs))))


def named_shapes(model: nn.Module, sample: Sample) -> Shapes:
    """Return the shapes of a call by the names of forward's arguments, passed by position or by name."""
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model, sample)}


def named_tensors(model: nn.Module, sample: Sample) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        arguments = inspect.signature(model.forward).bind(*sample.args, **sample.kwargs).arguments
    except (TypeError, ValueError):  # forward has no signature, or will refuse this call by itself
        arguments = {"args": sample.args, "kwargs": sample.kwargs}
    for path, leaf in pytree.tree_flatten_with_path(dict(arguments))[0]:
        if isinstance(leaf, torch.Tensor):
            yield pytree.keystr(path), leaf


class PlannedBatches:
    """The batches that a model's plans were made for. See Note [Covered batches].

    Example:
        >>> batches = PlannedBatches()
        >>> batches.add({"x": (8, 128)})
        >>> batches.covers({"x": (8, 100)}), batches.covers({"x": (2, 129)})
        (True, True)
        >>> batches.covers({"x": (1, 512)})  # half the elements, and attention of twice as many scores
        False
    """

    def __init__(self) -> None:
        self.ceiling: int | None = None  # bytes that plans may need: one of more ran out of memory
        self.said_full = False  # the user was told that no more plans are made
        self._planned: list[Shapes] = []
        self._given_up: set[frozenset[tuple[str, int]]] = set()
        self._keys: set[tuple[Any, ...]] = set()

    def __bool__(self) -> bool:
        return bool(self._planned or self._given_up)

    def knows(self, key: tuple[Any, ...]) -> bool:
        """Return whether a call with this key is known to be covered."""
        return key in self._keys

    def note(self, key: tuple[Any, ...]) -> None:
        """Record that a call with this key is covered."""
        if len(self._keys) >= MOST_KEYS:
            self._keys.clear()
        self._keys.add(key)

    def add(self, shapes: Shapes) -> None:
        """Record that a plan was made for this batch."""
        self._planned.append(shapes)

    def give_up(self, shapes: Shapes) -> None:
        """Record that batches with such tensors cannot be planned for."""
        self._given_up.add(_structure(shapes))

    @property
    def is_full(self) -> bool:
        """Whether as many plans were made as a run may have."""
        return len(self._planned) >= MOST_PLANS

    def covers(self, shapes: Shapes) -> bool:
        if _structure(shapes) in self._given_up:
            return True
        return any(_is_within(shapes, planned) for planned in self._alike(shapes))

    def largest_like(self, shapes: Shapes) -> Shapes | None:
        """Return the batch with the most elements, of such tensors, that was planned for."""
        return max(self._alike(shapes), key=lambda each: sum(map(math.prod, each.values())), default=None)

    def varying(self, shapes: Shapes) -> dict[str, list[int]]:
        """Return the dimensions in which a batch differs from one that was planned for."""
        alike = self._alike(shapes)
        return {
            name: [
                index for index, size in enumerate(shape) if any(each[name][index] != size for each in alike)
            ]
            for name, shape in shapes.items()
        }

    def _alike(self, shapes: Shapes) -> list[Shapes]:
        structure = _structure(shapes)
        return [planned for planned in self._planned if _structure(planned) == structure]


def _structure(shapes: Shapes) -> frozenset[tuple[str, int]]:
    return frozenset((name, len(shape)) for name, shape in shapes.items())


def _is_within(shapes: Shapes, planned: Shapes) -> bool:
    return all(
        size <= limit
        for name, shape in shapes.items()
        for size, limit in zip(_sizes(shape), _sizes(planned[name]), strict=True)
    )


def _sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the elements of a tensor, and those times its longest dimension, as attention grows."""
    elements = math.prod(shape)
    return elements, elements * max(shape[1:], default=1)


def roundings(shapes: Shapes, varying: dict[str, list[int]]) -> list[Shapes]:
    """Return what to plan for instead of a batch, the largest first, the batch itself last.

    >>> roundings({"x": (8, 600)}, {"x": [1]})
    [{'x': (8, 1024)}, {'x': (8, 640)}, {'x': (8, 600)}]
    """
    found: list[Shapes] = []
    for steps in (1, STEPS_OF_A_POWER):
        rounded = {
            name: tuple(
                _up(size, steps) if index in varying[name] else size for index, size in enumerate(shape)
            )
            for name, shape in shapes.items()
        }
        if rounded not in found:
            found.append(rounded)
    return found if shapes in found else [*found, shapes]


def _up(size: int, steps: int) -> int:
    power = 1 << max(0, size - 1).bit_length()
    step = max(1, power // steps)
    return -(-size // step) * step


def resized(model: nn.Module, sample: Sample, shapes: Shapes) -> Sample:
    """Return the call with tensors of other shapes, which have no values."""
    wanted = {id(tensor): shapes[name] for name, tensor in named_tensors(model, sample)}

    def change(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or wanted.get(id(leaf), tuple(leaf.shape)) == tuple(leaf.shape):
            return leaf
        empty = torch.empty(wanted[id(leaf)], dtype=leaf.dtype, device="meta")
        empty.requires_grad_(leaf.requires_grad)
        return empty if leaf.is_leaf else empty.clone()

    return Sample(pytree.tree_map(change, sample.args), pytree.tree_map(change, sample.kwargs))
