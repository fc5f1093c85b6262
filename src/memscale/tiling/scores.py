"""Attention that is written out: its scores are lazy, and what they weigh is computed some queries at a time.

Note [Lazy scores]
~~~~~~~~~~~~~~~~~~
Attention by hand is a product of queries and keys, a few steps on the scores (scale, mask, softmax, dropout), and a
product with the values. Inside `TiledAttention` the first product returns a tensor without data. The steps are
noted: each gives, for a query, something of that query's scores alone. The second product then runs it all for one
tile of queries after the other; backward does the same again, tile by tile. So scores exist for one tile at a time.

Any other use of the scores gets the true ones, as of lazy logits. If dropout is among the steps, those have a mask of
their own, of the same distribution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from memscale._torch import without_torch_function
from memscale.tiling.first_order import first_order_only
from memscale.tiling.lazy_tensor import Function, LazyTensor, follows
from memscale.tiling.query_tiles import run_in_query_tiles

__all__ = ["LazyScores", "TiledAttention"]

_PRODUCTS: tuple[Function, ...] = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


class TiledAttention(TorchFunctionMode):
    """Inside the block, scores of more queries than a tile has are lazy. See Note [Lazy scores].

    Attributes:
        products: How many products of two batches of matrices were seen, of any size.

    Example:
        >>> q = k = v = torch.ones(1, 2, 8, 2, requires_grad=True)
        >>> with TiledAttention(rows=3):
        ...     scores = q @ k.transpose(-1, -2) / 2
        ...     out = scores.softmax(-1) @ v
        >>> type(scores).__name__, out.shape
        ('LazyScores', torch.Size([1, 2, 8, 2]))
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.products = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            with without_torch_function(of_modes=True):
                is_batch = all(_is_batch_of_matrices(each) for each in args)
                self.products += is_batch
                is_large = is_batch and _is_larger_than_its_factors(args[0], args[1], self._rows)
            if is_large:
                return _make(args[0], args[1], (), self._rows)
        return func(*args, **(kwargs or {}))


def _is_batch_of_matrices(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and not isinstance(value, (LazyTensor, nn.Parameter))
    return is_plain and value.dim() >= 3 and value.is_floating_point()


def _is_larger_than_its_factors(query: Tensor, key: Tensor, rows: int) -> bool:
    if query.dim() != key.dim() or query.shape[:-2] != key.shape[:-2] or query.shape[-1] != key.shape[-2]:
        return False
    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad):
        return False
    queries, keys = query.shape[-2], key.shape[-1]
    return queries > rows and queries * keys > query.shape[-1] * (queries + keys)


@dataclass(frozen=True)
class ScoreStep:
    """An operation on scores that gives the same for each query, whatever the others are.

    Attributes:
        function: What is called with the scores, and then the operands.
        operands: Tensors that broadcast to the scores: masks, biases.
    """

    function: Callable[..., Tensor]
    operands: tuple[Tensor, ...] = ()


class LazyScores(LazyTensor):
    """Stands in for the scores of attention. See Note [Lazy scores]."""

    followed: ClassVar[dict[Function, tuple[Function, inspect.Signature]]] = {}

    query: Tensor
    key: Tensor
    steps: tuple[ScoreStep, ...]
    rows: int

    def compute(self) -> Tensor:
        return cook(self.query, self.key, self.steps)

    def then(self, step: ScoreStep, dtype: torch.dtype | None = None) -> LazyScores:
        """These with one step more; what type it gives is found out, unless it is told."""
        return _make(self.query, self.key, (*self.steps, step), self.rows, dtype or _type_after(self, step))

    def takes(self, operand: Any) -> bool:
        """Whether a tensor can be an operand of a step: it broadcasts to the scores, and does not make them larger."""
        if not isinstance(operand, Tensor) or isinstance(operand, LazyTensor) or operand.dim() > self.dim():
            return False
        fits = all(
            size in (1, whole)
            for size, whole in zip(reversed(operand.shape), reversed(self.shape), strict=False)
        )
        return fits and (operand.device == self.device or operand.dim() == 0)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["query", "key"], (self.steps, self.rows)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], how: Any, size: Any, stride: Any) -> LazyScores:
        return _make(inner["query"], inner["key"], *how)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The one function that takes the scores in second place.
        if func in (torch.where, Tensor.where) and len(args) == 3 and isinstance(args[1], LazyScores):
            scores, (mask, other) = args[1], (args[0], args[2])
            if (
                not scores.is_whole
                and scores.takes(mask)
                and (scores.takes(other) or type(other) in (int, float))
            ):
                return _where(scores, mask, other)
        return super().__torch_function__(func, types, args, kwargs)


def cook(query: Tensor, key: Tensor, steps: Sequence[ScoreStep]) -> Tensor:
    """Scores, as the functions that lazy ones stand for make them."""
    scores = torch.matmul(query, key)
    for step in steps:
        scores = step.function(scores, *step.operands)
    return scores


def _make(
    query: Tensor, key: Tensor, steps: tuple[ScoreStep, ...], rows: int, dtype: torch.dtype | None = None
) -> LazyScores:
    operands = [operand for step in steps for operand in step.operands]
    dtype = dtype or torch.matmul(query.new_empty(1, 1), key.new_empty(1, 1)).dtype  # autocast has a say
    # What it saves is what the lazy scores hold anyway.
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        made: LazyScores = _Made.apply(query, key, steps, dtype, *operands)  # type: ignore[no-untyped-call]
    made.query, made.key, made.steps, made.rows, made._true = query, key, steps, rows, None
    return made


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _type_after(scores: LazyScores, step: ScoreStep) -> torch.dtype:
    """The type that a step gives here and now, by an example of one score."""
    ones = [1] * scores.dim()
    operands = [torch.empty([1] * each.dim(), dtype=each.dtype, device=each.device) for each in step.operands]
    return step.function(torch.empty(ones, dtype=scores.dtype, device=scores.device), *operands).dtype


class _Made(torch.autograd.Function):
    """The history of lazy scores, for a gradient that comes from below Python."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        steps: tuple[ScoreStep, ...],
        dtype: torch.dtype,
        *operands: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.functions = _functions(steps)
        ctx.save_for_backward(query, key, *operands)
        shape = [*query.shape[:-1], key.shape[-1]]
        return Tensor._make_wrapper_subclass(LazyScores, shape, dtype=dtype, device=query.device)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[4:]]
        with torch.enable_grad():
            leaves = [
                each.detach().requires_grad_(is_wanted)
                for each, is_wanted in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            scores = cook(leaves[0], leaves[1], with_operands(ctx.functions, leaves[2:]))
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(scores, trained, gradient))
        query, key, *operands = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return query, key, None, None, *operands


def with_operands(functions: Sequence[tuple[Function, int]], operands: Sequence[Tensor]) -> list[ScoreStep]:
    """Steps from their functions, each with the number of its operands, and all operands in order."""
    remaining = iter(operands)
    return [
        ScoreStep(function, tuple(next(remaining) for _ in range(count))) for function, count in functions
    ]


def _functions(steps: Sequence[ScoreStep]) -> list[tuple[Function, int]]:
    """The steps without their operands, to be held for as long as a graph lives."""
    return [(step.function, len(step.operands)) for step in steps]


# What scores stay lazy under -----------------------------------------------------------------------


@follows(LazyScores, *_PRODUCTS)
def _weigh(scores: LazyScores, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, LazyTensor) or value.dim() != scores.dim():
        return NotImplemented
    if value.shape[:-2] != scores.shape[:-2] or value.shape[-2] != scores.shape[-1]:
        return NotImplemented
    operands = [operand for step in scores.steps for operand in step.operands]
    functions = _functions(scores.steps)

    def weigh(query: Tensor, key: Tensor, value: Tensor, *operands: Tensor) -> Tensor:
        return torch.matmul(cook(query, key, with_operands(functions, operands)), value)

    return run_in_query_tiles(weigh, scores.query, scores.key, value, operands, scores.rows)


def _follow_operation(function: Function, *names: Function) -> None:
    @follows(LazyScores, function, *names)
    def each(scores: LazyScores, other: Any) -> Any:
        if type(other) in (int, float):
            return scores.then(ScoreStep(lambda values: function(values, other)))
        return scores.then(ScoreStep(function, (other,))) if scores.takes(other) else NotImplemented


_follow_operation(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
_follow_operation(torch.div, Tensor.div, Tensor.__truediv__)
_follow_operation(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_follow_operation(torch.sub, Tensor.sub, Tensor.__sub__)


@follows(LazyScores, torch.tanh, Tensor.tanh)
def _tanh(scores: LazyScores) -> Any:
    return scores.then(ScoreStep(torch.tanh))


@follows(LazyScores, torch.masked_fill, Tensor.masked_fill)
def _masked_fill(scores: LazyScores, mask: Any, value: Any) -> Any:
    if not scores.takes(mask) or type(value) not in (int, float):
        return NotImplemented
    return scores.then(ScoreStep(lambda values, mask: values.masked_fill(mask, value), (mask,)), scores.dtype)


def _where(scores: LazyScores, mask: Tensor, other: Any) -> LazyScores:
    if isinstance(other, Tensor):
        step = ScoreStep(lambda values, mask, other: torch.where(mask, values, other), (mask, other))
    else:
        step = ScoreStep(lambda values, mask: torch.where(mask, values, other), (mask,))
    return scores.then(step)


@follows(LazyScores, torch.softmax, Tensor.softmax, nn.functional.softmax)
def _softmax(scores: LazyScores, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    if dim not in (-1, scores.dim() - 1):
        return NotImplemented
    return scores.then(ScoreStep(lambda values: torch.softmax(values, -1, dtype=dtype)))


@follows(LazyScores, nn.functional.dropout, torch.dropout)
def _dropout(scores: LazyScores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace:
        return NotImplemented
    if not training or p == 0:
        return scores
    # Told its type, or finding that out would draw a random number.
    return scores.then(ScoreStep(lambda values: nn.functional.dropout(values, p)), scores.dtype)


def _follow_conversion(function: Function, dtype: torch.dtype) -> None:
    @follows(LazyScores, function)
    def convert(scores: LazyScores) -> Any:
        return _in_type(scores, dtype)


_follow_conversion(Tensor.float, torch.float32)
_follow_conversion(Tensor.half, torch.float16)
_follow_conversion(Tensor.bfloat16, torch.bfloat16)


@follows(LazyScores, Tensor.to, Tensor.type)
def _to(scores: LazyScores, dtype: Any) -> Any:
    return _in_type(scores, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@follows(LazyScores, Tensor.type_as)
def _type_as(scores: LazyScores, other: Tensor) -> Any:
    return _in_type(scores, other.dtype) if other.device == scores.device else NotImplemented


@follows(LazyScores, Tensor.contiguous)
def _contiguous(scores: LazyScores) -> Any:
    return scores


def _in_type(scores: LazyScores, dtype: torch.dtype) -> Any:
    if dtype is scores.dtype:
        return scores
    if not dtype.is_floating_point:
        return NotImplemented
    return scores.then(ScoreStep(lambda values: values.to(dtype)), dtype)
