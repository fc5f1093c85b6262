"""What is done to the tokens of lazy logits: cutting, flattening and turning them.

It is done to the hidden states instead, whose last dimension stands for the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memscale.tiling.lazy import LazyLogits
from memscale.tiling.lazy_tensor import follows

__all__ = ["vocabulary_is_last"]


@follows(LazyLogits, Tensor.view, Tensor.reshape, torch.reshape)
def _view(logits: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not all(isinstance(size, int) for size in sizes):
        return NotImplemented  # as `view(torch.int32)`
    return _reshaped(logits, list(sizes))


@follows(LazyLogits, Tensor.flatten, torch.flatten)
def _flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = list(logits.shape)
    if not all(-len(shape) <= dim < len(shape) for dim in (start_dim, end_dim)):
        return NotImplemented
    start, end = start_dim % len(shape), end_dim % len(shape)
    if start > end:
        return NotImplemented
    return _reshaped(logits, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _reshaped(logits: LazyLogits, shape: list[int]) -> Any:
    if shape.count(-1) == 1:
        rest = -math.prod(shape)
        if rest <= 0 or logits.numel() % rest:
            return NotImplemented
        shape[shape.index(-1)] = logits.numel() // rest
    is_right = math.prod(shape) == logits.numel() > 0 and min(shape) > 0
    if not is_right or not vocabulary_is_last(logits) or shape[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits.hidden.reshape(*shape[:-1], logits.hidden.shape[-1])
    return logits.derive(Tensor.reshape, (shape,), hidden=hidden)


@follows(LazyLogits, Tensor.contiguous, Tensor.clone, torch.clone)
def _contiguous(logits: LazyLogits, *, memory_format: Any = torch.preserve_format) -> Any:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return logits.derive(Tensor.clone)


@follows(LazyLogits, Tensor.__getitem__)
def _getitem(logits: LazyLogits, index: Any) -> Any:
    parts = list(index) if isinstance(index, tuple) else [index]
    if not vocabulary_is_last(logits) or not all(map(_is_index, parts)):
        return NotImplemented
    used = sum(map(_dimensions_used, parts))
    if not any(part is Ellipsis for part in parts):
        if used > logits.dim():
            return NotImplemented
        touches_vocabulary = used == logits.dim()
    else:
        touches_vocabulary = _dimensions_used(parts[-1]) > 0
    last_is_all = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if (touches_vocabulary and not last_is_all) or parts[-1] is None:
        return NotImplemented
    return logits.derive(Tensor.__getitem__, (index,), hidden=logits.hidden[index])


def _is_index(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.dtype in (torch.bool, torch.int64)
    if isinstance(part, bool):
        return False
    return part is None or part is Ellipsis or isinstance(part, (int, slice))


def _dimensions_used(part: Any) -> int:
    if part is None or part is Ellipsis:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype is torch.bool else 1


@follows(LazyLogits, Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes)
def _transpose(logits: LazyLogits, dim0: int, dim1: int) -> Any:
    order = list(range(logits.dim()))
    if not all(isinstance(dim, int) and -len(order) <= dim < len(order) for dim in (dim0, dim1)):
        return NotImplemented
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(logits, order)


@follows(LazyLogits, Tensor.mT.__get__)  # type: ignore[attr-defined]  # a descriptor, seen from the class
def _matrix_transpose(logits: LazyLogits, *_: Any) -> Any:
    return _transpose(logits, -2, -1)


@follows(LazyLogits, Tensor.permute, torch.permute)
def _permute(logits: LazyLogits, *dims: Any) -> Any:
    wanted = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    if not all(isinstance(dim, int) for dim in wanted):
        return NotImplemented
    order = [dim % logits.dim() for dim in wanted]
    return _permuted(logits, order) if sorted(order) == list(range(logits.dim())) else NotImplemented


def _permuted(logits: LazyLogits, order: list[int]) -> LazyLogits:
    vocabulary = logits.recipe.vocabulary_dim % logits.dim()
    # Where each dimension of the tokens is among those of the hidden states: the vocabulary is not there.
    tokens = [dim - (dim > vocabulary) for dim in order if dim != vocabulary]
    hidden = logits.hidden.permute(*tokens, -1)
    recipe = replace(logits.recipe, vocabulary_dim=order.index(vocabulary))
    return logits.derive(Tensor.permute, (order,), hidden=hidden, recipe=recipe)


def vocabulary_is_last(logits: LazyLogits) -> bool:
    """Whether the dimensions are as the head made them: tokens, then the vocabulary."""
    return logits.recipe.vocabulary_dim % logits.dim() == logits.dim() - 1
