"""A head and what follows it, computed tile by tile, with the gradients of its inputs.

Note [Gradients now or later]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A loss that is one number has one gradient, up to the factor that arrives in backward. So it is computed at once,
while a tile's logits are there: the three matrix products of a plain head, none of them twice. Backward multiplies.
What waits in between is the gradient of the hidden states and that of the weight, which the plain head would make a
moment later.

Where there are many numbers (`reduction="none"`, a log-sum-exp of each token), backward brings a factor for each,
and the logits are computed again then. So they are in float16, where gradients are only right after the loss was
scaled: the scale is known in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import backward_keeps_graph
from memscale.checkpointing.conditions import Conditions, ModuleFlags
from memscale.tiling.first_order import first_order_only
from memscale.tiling.head import Head, Step, without_autocast
from memscale.tiling.lazy import LazyLogits
from memscale.tiling.ranges import tiles_of

__all__ = ["Job", "Value", "rows_of", "total_of"]

Value = Callable[[torch.Tensor, slice], torch.Tensor]
"""From a tile of logits, tokens × vocabulary, and the tokens that it is of: a number for each, or one for all."""


@dataclass(frozen=True)
class Job:
    """What is computed of lazy logits.

    Attributes:
        head: The linear map.
        steps: What is done to its output, token by token.
        value: What is made of each tile in the end.
        divisor: What a total is divided by, if it is a mean.
    """

    head: Head
    steps: tuple[Step, ...]
    value: Value
    divisor: torch.Tensor | None = None

    @property
    def factor(self) -> torch.Tensor | None:
        """The gradient of a total for the number of a tile. Of a mean over nothing it is 0, though that is NaN."""
        if self.divisor is None:
            return None
        return torch.where(self.divisor == 0, torch.zeros_like(self.divisor), 1 / self.divisor)

    def tiles(self, hidden: torch.Tensor) -> Iterator[slice]:
        return tiles_of(hidden, 0, self.head.rows)

    def of_tile(self, logits: torch.Tensor, tile: slice) -> torch.Tensor:
        for step in self.steps:
            logits = step.run(logits)
        return self.value(logits, tile)


def total_of(logits: LazyLogits, value: Value, divisor: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of one number for each tile, or that divided."""
    logits.check()
    recipe = logits.recipe
    job = Job(recipe.head, recipe.steps, value, divisor)
    hidden, weight, bias = _flat(logits), recipe.head.weight, recipe.head.bias
    # See Note [Gradients now or later].
    function = (
        _Later if recipe.head.dtype is torch.float16 or not _needs_gradient(hidden, weight, bias) else _Now
    )
    total: torch.Tensor = function.apply(hidden, weight, bias, job, True)  # type: ignore[no-untyped-call]
    return total


def rows_of(logits: LazyLogits, value: Value) -> torch.Tensor:
    """A number, or some, for each token; the tokens are in one dimension."""
    logits.check()
    recipe = logits.recipe
    job = Job(recipe.head, recipe.steps, value)
    rows: torch.Tensor = _Later.apply(_flat(logits), recipe.head.weight, recipe.head.bias, job, False)  # type: ignore[no-untyped-call]
    return rows


def _flat(logits: LazyLogits) -> torch.Tensor:
    return logits.hidden.reshape(-1, logits.hidden.shape[-1])


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


class _Now(torch.autograd.Function):
    """A total whose gradients are computed with it. See Note [Gradients now or later]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        job: Job,
        is_total: bool,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        total: Any = None
        gradients = Gradients(job.head, hidden, ctx.needs_input_grad)
        factor = job.factor
        with job.head.on(hidden.device) as working:
            for tile in job.tiles(hidden):
                part = _add_tile(gradients, job, hidden, tile, working, factor)
                total = part if total is None else total + part
        ctx.homes = [None if each is None else each.device for each in (hidden, weight, bias)]
        ctx.save_for_backward(*gradients.finish())
        result: torch.Tensor = total if job.divisor is None else total / job.divisor
        return result

    @staticmethod
    @first_order_only
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Only the last pass over the graph may spoil what it has saved.
        multiply = torch.Tensor.mul if backward_keeps_graph() else torch.Tensor.mul_
        return (
            *(
                None if each is None else multiply(each, factor.to(each.dtype)).to(home)
                for each, home in zip(ctx.saved_tensors, ctx.homes, strict=True)
            ),
            None,
            None,
        )


class _Later(torch.autograd.Function):
    """Numbers whose gradients are computed in backward. See Note [Gradients now or later]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        job: Job,
        is_total: bool,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.job, ctx.is_total = job, is_total
        ctx.conditions = Conditions(ModuleFlags(()), [hidden.device.type])
        ctx.save_for_backward(hidden, weight, bias)
        result: Any = None
        with job.head.on(hidden.device) as (working_weight, working_bias):
            for tile in job.tiles(hidden):
                logits = job.head.linear(hidden[tile], working_weight, working_bias)
                part = job.of_tile(logits, tile)
                del logits
                if is_total:
                    result = part if result is None else result + part
                    continue
                if result is None:
                    result = part.new_empty(hidden.shape[0], *part.shape[1:])
                result[tile] = part
        numbers: torch.Tensor = result / job.divisor if is_total and job.divisor is not None else result
        return numbers

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job, (hidden, weight, bias) = ctx.job, ctx.saved_tensors
        gradients = Gradients(job.head, hidden, ctx.needs_input_grad)
        factor = job.factor
        if ctx.is_total and factor is not None:
            gradient = gradient * factor
        with ctx.conditions.replay(), torch.no_grad(), job.head.on(hidden.device) as working:
            for tile in job.tiles(hidden):
                arrived = gradient if ctx.is_total else gradient[tile]
                _add_tile(gradients, job, hidden, tile, working, arrived)
        return (
            *(
                None if each is None else each.to(home.device)
                for each, home in zip(gradients.finish(), (hidden, weight, bias), strict=True)
            ),
            None,
            None,
        )


def _add_tile(
    gradients: Gradients,
    job: Job,
    hidden: torch.Tensor,
    tile: slice,
    working: tuple[torch.Tensor, torch.Tensor | None],
    arrived: torch.Tensor | None,
) -> torch.Tensor:
    """Add the gradients of a tile, given that of what is made of it; returns what is made of it."""
    logits = job.head.linear(hidden[tile], *working).requires_grad_()
    # What this small graph saves is used at once: it is not for hooks that recompute or move tensors.
    with torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        part = job.of_tile(logits, tile)
        (slope,) = torch.autograd.grad(part, logits, None if arrived is None else arrived.to(part.dtype))
    del logits
    gradients.add(tile, slope, working[0])
    return part.detach()


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Gradients:
    """The gradients of hidden states, weight and bias, added up tile by tile.

    Sums are kept in float32 at least: a plain head adds up all tokens inside one matrix product, which does so too.

    Args:
        head: The linear map.
        hidden: Its input, tokens × width.
        wanted: Which of the three are wanted.
    """

    def __init__(self, head: Head, hidden: torch.Tensor, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self._hidden = hidden
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self._wants_weight = wanted[1]
        self._wants_bias = head.bias is not None and wanted[2]
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def add(self, tile: slice, slope: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a tile: the gradient of its logits, and the weight that they were made with."""
        with without_autocast(slope.device):
            if self._of_hidden is not None:
                self._of_hidden[tile] = slope @ weight
            if self._wants_weight:
                self._add_to_weight(slope, self._hidden[tile].to(slope.dtype))
            if self._wants_bias:
                part = slope.sum(0, dtype=_sum_type(slope.dtype))
                self._of_bias = part if self._of_bias is None else self._of_bias.add_(part)

    def _add_to_weight(self, slope: torch.Tensor, hidden: torch.Tensor) -> None:
        wide = _sum_type(slope.dtype)
        if wide is slope.dtype:
            if self._of_weight is None:
                self._of_weight = slope.t() @ hidden
            else:
                self._of_weight.addmm_(slope.t(), hidden)  # without a second tensor of the weight's size
            return
        if self._of_weight is None:
            self._of_weight = torch.zeros(self._head.weight.shape, dtype=wide, device=slope.device)
        # In pieces no larger than the tile: each is made in 16 bits and then added.
        step = max(1, slope.numel() // hidden.shape[1])
        for start in range(0, slope.shape[1], step):
            words = slice(start, start + step)
            self._of_weight[words] += slope[:, words].t() @ hidden

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The gradients, each in the type of what it is of, on the device."""
        of_weight, of_bias = self._of_weight, self._of_bias
        bias = self._head.bias
        return (
            self._of_hidden,
            None if of_weight is None else of_weight.to(self._head.weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
