"""What is computed from lazy logits tile by tile: losses, and other numbers of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memscale.tiling.follow import vocabulary_is_last
from memscale.tiling.lazy import LazyLogits
from memscale.tiling.lazy_tensor import follows
from memscale.tiling.tiles import rows_of, total_of

__all__: list[str] = []

F = nn.functional


@follows(LazyLogits, F.cross_entropy)
def _cross_entropy(
    logits: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        return NotImplemented  # names of old, which torch translates
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return _loss(F.cross_entropy, logits, target, reduction, options)


@follows(LazyLogits, F.nll_loss)
def _nll_loss(
    logits: LazyLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or target.is_floating_point():
        return NotImplemented
    options = {"weight": weight, "ignore_index": ignore_index}
    return _loss(F.nll_loss, logits, target, reduction, options)


def _loss(
    function: Callable[..., Tensor], logits: LazyLogits, target: Any, reduction: str, options: dict[str, Any]
) -> Any:
    weight = options["weight"]
    if not _can_be_tiled(logits, target, weight) or reduction not in ("mean", "sum", "none"):
        return NotImplemented  # also what is an error: torch says it best
    shape = target.shape
    if target.is_floating_point():
        divisor = logits.hidden.numel() // logits.hidden.shape[-1]
    else:
        target = target.reshape(-1)

    def of_tile(values: Tensor, tile: slice) -> Tensor:
        kind = "none" if reduction == "none" else "sum"
        return function(values, target[tile], reduction=kind, **options)

    if reduction == "none":
        return rows_of(logits, of_tile).reshape(shape[:-1] if target.is_floating_point() else shape)
    if reduction == "sum":
        return total_of(logits, of_tile)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if target.is_floating_point():
        counted = torch.full((), divisor, dtype=dtype, device=logits.device)
    else:
        counted = _counted(target, weight, options["ignore_index"], dtype)
    return total_of(logits, of_tile, counted)


def _can_be_tiled(logits: LazyLogits, target: Any, weight: Any) -> bool:
    if not isinstance(target, Tensor) or type(target) is LazyLogits or target.requires_grad:
        return False
    if target.device != logits.device or (
        weight is not None and (weight.requires_grad or weight.device != logits.device)
    ):
        return False
    if logits.numel() == 0 or logits.dim() < 2 or logits.recipe.vocabulary_dim % logits.dim() != 1:
        return False
    if target.is_floating_point():  # probabilities
        return logits.dim() == 2 and target.shape == logits.shape
    return target.shape == logits.hidden.shape[:-1]


def _counted(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """What torch divides by in a mean: the tokens that are not ignored, each by the weight of its class."""
    is_counted = target != ignore_index
    if weight is None:
        return is_counted.sum().to(dtype)
    return torch.where(is_counted, weight[torch.where(is_counted, target, 0)], 0).sum().to(dtype)


# Numbers of each token ---------------------------------------------------------------------------


@follows(LazyLogits, torch.logsumexp, Tensor.logsumexp)
def _logsumexp(logits: LazyLogits, dim: Any, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or not _is_over_the_vocabulary(logits, dim):
        return NotImplemented
    return _shaped(logits, rows_of(logits, lambda values, _: torch.logsumexp(values, -1)), keepdim)


@follows(LazyLogits, torch.gather, Tensor.gather)
def _gather(logits: LazyLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    is_tensor = isinstance(index, Tensor) and type(index) is not LazyLogits
    if kwargs or not _is_over_the_vocabulary(logits, dim) or not is_tensor:
        return NotImplemented
    if index.shape[:-1] != logits.shape[:-1] or index.device != logits.device:
        return NotImplemented
    flat = index.reshape(-1, index.shape[-1])
    rows = rows_of(logits, lambda values, tile: values.gather(-1, flat[tile]))
    return rows.reshape(index.shape)


def _follow_reduction(name: str) -> None:
    @follows(LazyLogits, getattr(torch, name), getattr(Tensor, name))
    def reduce(logits: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None)
        if kwargs or logits.numel() == 0:
            return NotImplemented
        if dim is None and not keepdim:
            total = total_of(logits, lambda values, _: values.sum(dtype=dtype))
            return total / logits.numel() if name == "mean" else total
        if not _is_over_the_vocabulary(logits, dim):
            return NotImplemented
        rows = rows_of(logits, lambda values, _: getattr(values, name)(-1, dtype=dtype))
        return _shaped(logits, rows, keepdim)


_follow_reduction("sum")
_follow_reduction("mean")


@follows(LazyLogits, torch.argmax, Tensor.argmax)
def _argmax(logits: LazyLogits, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or dim is None or not _is_over_the_vocabulary(logits, dim):
        return NotImplemented
    with torch.no_grad():
        rows = rows_of(logits, lambda values, _: values.argmax(-1))
    return _shaped(logits, rows, keepdim)


def _is_over_the_vocabulary(logits: LazyLogits, dim: Any) -> bool:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    is_last = isinstance(dim, int) and dim in (-1, logits.dim() - 1)
    return is_last and vocabulary_is_last(logits) and logits.numel() > 0


def _shaped(logits: LazyLogits, rows: Tensor, keepdim: bool) -> Tensor:
    tokens = logits.shape[:-1]
    return rows.reshape(*tokens, 1) if keepdim else rows.reshape(tokens)
