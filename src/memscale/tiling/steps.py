"""What is done to lazy logits token by token: other types, scaling, capping, a constant bias, softmax.

It is noted, and done to each tile of logits when that is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memscale._torch import parse_to
from memscale.tiling.follow import vocabulary_is_last
from memscale.tiling.head import Step
from memscale.tiling.lazy import LazyLogits
from memscale.tiling.lazy_tensor import Function, follows

__all__: list[str] = []


def _with_step(logits: LazyLogits, step: Step, *asked: Any, **kwargs: Any) -> LazyLogits:
    """Lazy logits with one step more; `asked` is what the function was called with, if it is not what is noted."""
    recipe = replace(logits.recipe, steps=(*logits.recipe.steps, step))
    return logits.derive(step.function, asked or step.args, kwargs or step.kwargs, recipe=recipe)


# Types -------------------------------------------------------------------------------------------


def _follow_conversion(function: Function, dtype: torch.dtype) -> None:
    @follows(LazyLogits, function)
    def convert(logits: LazyLogits, *, memory_format: Any = torch.preserve_format) -> Any:
        return _in_type(logits, dtype) if memory_format is torch.preserve_format else NotImplemented


_follow_conversion(Tensor.float, torch.float32)
_follow_conversion(Tensor.double, torch.float64)
_follow_conversion(Tensor.half, torch.float16)
_follow_conversion(Tensor.bfloat16, torch.bfloat16)


@follows(LazyLogits, Tensor.type)
def _type(logits: LazyLogits, dtype: Any = None, **kwargs: Any) -> Any:
    return _in_type(logits, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@follows(LazyLogits, Tensor.type_as)
def _type_as(logits: LazyLogits, other: Tensor) -> Any:
    return _in_type(logits, other.dtype) if other.device == logits.device else NotImplemented


@follows(LazyLogits, Tensor.to)
def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if len(args) > 3 or kwargs.keys() - {"device", "dtype", "non_blocking"}:
        return NotImplemented
    device, dtype = parse_to(*args, **kwargs)
    if device is not None and not _is_on(logits, device):
        return NotImplemented
    return _in_type(logits, dtype or logits.dtype)


def _is_on(logits: LazyLogits, device: torch.device) -> bool:
    return device.type == logits.device.type and device.index in (None, logits.device.index)


def _in_type(logits: LazyLogits, dtype: torch.dtype) -> Any:
    if dtype is logits.dtype:
        return logits
    return (
        _with_step(logits, Step(Tensor.to, (dtype,), {}, dtype))
        if dtype.is_floating_point
        else NotImplemented
    )


# Numbers -----------------------------------------------------------------------------------------


def _follow_elementwise(function: Function, *names: Function) -> None:
    @follows(LazyLogits, function, *names)
    def each(logits: LazyLogits) -> Any:
        return _with_step(logits, Step(function, (), {}, logits.dtype))


_follow_elementwise(torch.neg, Tensor.neg, Tensor.__neg__)
_follow_elementwise(torch.tanh, Tensor.tanh)


def _follow_operation(function: Function, *names: Function) -> None:
    """Follow an operation with a number, or with one constant for each word of the vocabulary."""

    @follows(LazyLogits, function, *names)
    def each(logits: LazyLogits, other: Any, **kwargs: Any) -> Any:
        if kwargs:
            return NotImplemented
        if type(other) in (int, float):
            return _with_step(logits, Step(function, (other,), {}, logits.dtype))
        if not isinstance(other, Tensor) or not _is_constant_of_the_vocabulary(logits, other):
            return NotImplemented
        if other.dim() == 0:
            return _with_step(logits, Step(function, (other,), {}, logits.dtype))
        dtype = torch.promote_types(logits.dtype, other.dtype)
        return _with_step(logits, Step(function, (other.reshape(-1),), {}, dtype), other)


def _is_constant_of_the_vocabulary(logits: LazyLogits, other: Tensor) -> bool:
    if type(other) is LazyLogits or other.requires_grad or other.is_complex() or other.dim() > logits.dim():
        return False
    if other.dim() == 0:
        return other.device in (logits.device, torch.device("cpu")) and other.dtype is not torch.float64
    is_row = other.numel() == other.shape[-1] == logits.recipe.head.vocabulary
    return is_row and vocabulary_is_last(logits) and other.device == logits.device


_follow_operation(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.multiply, Tensor.multiply)
_follow_operation(torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide)
_follow_operation(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_follow_operation(torch.sub, Tensor.sub, Tensor.__sub__, torch.subtract, Tensor.subtract)


# Over the vocabulary -----------------------------------------------------------------------------


def _follow_softmax(function: Function, *names: Function) -> None:
    @follows(LazyLogits, function, *names)
    def each(logits: LazyLogits, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None)
        kwargs.pop("_stacklevel", None)
        if rest or kwargs or dim not in (-1, logits.dim() - 1) or not vocabulary_is_last(logits):
            return NotImplemented
        if dtype is None:  # autocast may have its own idea
            dtype = function(torch.empty(0, 1, dtype=logits.dtype, device=logits.device), -1).dtype
        return _with_step(logits, Step(function, (-1,), {"dtype": dtype}, dtype))


_follow_softmax(torch.log_softmax, Tensor.log_softmax, nn.functional.log_softmax)
_follow_softmax(torch.softmax, Tensor.softmax, nn.functional.softmax)
