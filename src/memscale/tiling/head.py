"""A linear head and what follows it, computed tile by tile together with the gradients of its inputs.

Note [Gradients in forward or in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A scalar loss has one gradient, up to the factor that arrives in backward. So it is computed in forward, while a tile's
logits exist: the three matrix products of a plain head, none of them twice. Backward multiplies. In between, the
gradients of the hidden states and of the weight are kept, which a plain head would compute a moment later.

A result per token (`reduction="none"`, log-sum-exp) gets a factor per token in backward, and the logits are recomputed
there. So they are in float16, whose gradients are only representable after the loss was scaled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memscale._torch import backward_keeps_graph, version_of
from memscale.checkpointing.state import Conditions, ModuleFlags
from memscale.errors import RecomputeError
from memscale.tiling.layers import first_order_only, sum_dtype, tiles_of, without_saved_tensor_hooks

Borrow = Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class LogitsStep:
    """An operation on logits, its first argument, that treats every token by itself."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype  # of its result when it was recorded; autocast may be another when it runs


@dataclass(frozen=True)
class Head:
    """The parameters of a linear layer at the time of a call, on whichever device they are, and what follows it."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype  # that it computes in: that of its weight, or autocast's
    rows: int  # tokens per tile
    borrow: Borrow = contextlib.nullcontext  # a context around every use of the parameters
    steps: tuple[LogitsStep, ...] = ()  # recorded operations on its output
    vocabulary_dim: int = -1  # after these
    _versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", tuple(map(version_of, self.parameters)))

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def check(self) -> None:
        """Raise a `RecomputeError` if the parameters have changed since the call."""
        if tuple(map(version_of, self.parameters)) != self._versions:
            raise RecomputeError(
                f"The logits of a model whose head is tiled ({self.vocabulary} × {self.weight.shape[1]}) were asked "
                "for after the head's weight had changed: they would not be those of the call. Read the logits, and "
                "compute the loss, before optimizer.step(); or switch tiling off (enable_tiling=False)."
            )

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[list[torch.Tensor]]:
        """Yield weight and bias on the device, in the head's type and without history."""
        with self.borrow(self.parameters):
            yield [each.detach().to(device=device, dtype=self.dtype) for each in self.parameters]

    def linear(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits in the head's type, as autocast would have made them."""
        with _without_autocast(hidden.device):
            return nn.functional.linear(
                hidden.to(self.dtype),
                weight.to(hidden.device, self.dtype),
                None if bias is None else bias.to(hidden.device, self.dtype),
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all logits, differentiable, as the plain layer would; without steps."""
        self.check()
        with self.borrow(self.parameters):
            return self.linear(hidden, *self.parameters)

    @property
    def final_dtype(self) -> torch.dtype:
        return self.steps[-1].dtype if self.steps else self.dtype

    def after_steps(self, logits: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            logits = step.function(logits, *step.args, **step.kwargs).to(step.dtype)
        return logits


def compute_tiled(
    head: Head,
    hidden: torch.Tensor,
    of_tile: Callable[[torch.Tensor, slice], torch.Tensor],
    *,
    is_total: bool = False,
    divisor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce the logits of flat hidden states (tokens × width), one tile at a time.

    `of_tile` maps a tile of logits (tokens × vocabulary) and the slice of tokens that it covers to one result per
    token, or, if `is_total`, to a scalar: these are added up, and the sum is divided by `divisor`.
    """
    tensors = (hidden, *head.parameters)
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    # See Note [Gradients in forward or in backward].
    in_forward = is_total and needs_gradient and head.dtype is not torch.float16
    call = _TiledCall(head, of_tile, is_total, divisor, in_forward)
    result: torch.Tensor = _TiledReduction.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _TiledCall:
    head: Head
    of_tile: Callable[[torch.Tensor, slice], torch.Tensor]
    is_total: bool
    divisor: torch.Tensor | None
    gradients_in_forward: bool

    def run(
        self, hidden: torch.Tensor, gradients: _Gradients | None = None, incoming: torch.Tensor | None = None
    ) -> Any:
        """Reduce all tiles; add up `gradients`, if there are any to add to, given the gradient of the result."""
        head = self.head
        if self.divisor is not None and gradients is not None:
            # 0 for a mean over nothing, though that is NaN.
            factor = torch.where(self.divisor == 0, torch.zeros_like(self.divisor), 1 / self.divisor)
            incoming = factor if incoming is None else incoming * factor
        result: Any = None
        with head.on(hidden.device) as parameters:
            for tile in tiles_of(hidden, 0, head.rows):
                if gradients is None:
                    part = self.of_tile(self.head.after_steps(head.linear(hidden[tile], *parameters)), tile)
                else:
                    arrived = incoming if incoming is None or self.is_total else incoming[tile]
                    part, slope = self._differentiated(head.linear(hidden[tile], *parameters), tile, arrived)
                    gradients.add(tile, slope, parameters[0])
                    del slope
                if self.is_total:
                    result = part if result is None else result + part
                elif gradients is None:
                    if result is None:
                        result = part.new_empty(hidden.shape[0], *part.shape[1:])
                    result[tile] = part
        return result if self.divisor is None else result / self.divisor

    def _differentiated(
        self, logits: torch.Tensor, tile: slice, incoming: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tile's result and the gradient of its logits."""
        logits.requires_grad_()
        with torch.enable_grad(), without_saved_tensor_hooks():
            part = self.of_tile(self.head.after_steps(logits), tile)
            incoming = None if incoming is None else incoming.to(part.dtype)
            (slope,) = torch.autograd.grad(part, logits, incoming)
        return part.detach(), slope


class _TiledReduction(torch.autograd.Function):
    """See Note [Gradients in forward or in backward]."""

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, hidden: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.devices = [each.device for each in (hidden, *parameters)]
        if call.gradients_in_forward:
            gradients = _Gradients(call.head, hidden, ctx.needs_input_grad[1:])
            result: torch.Tensor = call.run(hidden, gradients)
            ctx.save_for_backward(*gradients.finish())
        else:
            ctx.conditions = Conditions(ModuleFlags(()), [hidden.device])
            ctx.save_for_backward(hidden, *parameters)
            result = call.run(hidden)
        return result

    @staticmethod
    @first_order_only
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _TiledCall = ctx.call
        if call.gradients_in_forward:
            # Only the last pass over the graph may overwrite what it has saved.
            multiply = torch.Tensor.mul if backward_keeps_graph() else torch.Tensor.mul_
            found = [
                None if each is None else multiply(each, gradient.to(each.dtype))
                for each in ctx.saved_tensors
            ]
        else:
            hidden = ctx.saved_tensors[0]
            gradients = _Gradients(call.head, hidden, ctx.needs_input_grad[1:])
            with ctx.conditions.replay(), torch.no_grad():
                call.run(hidden, gradients, gradient)
            found = gradients.finish()
        on_devices = zip(found, ctx.devices, strict=True)
        return None, *(None if each is None else each.to(device) for each, device in on_devices)


class _Gradients:
    """The gradients of hidden states, weight and bias, added up tile by tile in float32 at least."""

    def __init__(self, head: Head, hidden: torch.Tensor, wanted: Sequence[bool]) -> None:
        self._hidden = hidden
        self._parameters = head.parameters
        self._wanted = wanted
        self._of_hidden = torch.empty_like(hidden) if wanted[0] else None
        self._of_weight: torch.Tensor | None = None
        self._of_bias: torch.Tensor | None = None

    def add(self, tile: slice, slope: torch.Tensor, weight: torch.Tensor) -> None:
        """Add a tile, given the gradient of its logits and the weight that they were made with."""
        with _without_autocast(slope.device):
            if self._of_hidden is not None:
                self._of_hidden[tile] = slope @ weight
            if self._wanted[1]:
                self._add_to_weight(slope, self._hidden[tile].to(slope.dtype))
            if len(self._wanted) > 2 and self._wanted[2]:
                part = slope.sum(0, dtype=sum_dtype(slope.dtype))
                self._of_bias = part if self._of_bias is None else self._of_bias.add_(part)

    def _add_to_weight(self, slope: torch.Tensor, hidden: torch.Tensor) -> None:
        wide = sum_dtype(slope.dtype)
        if wide is slope.dtype:
            if self._of_weight is None:
                self._of_weight = slope.t() @ hidden
            else:
                self._of_weight.addmm_(slope.t(), hidden)  # without a second tensor of the weight's size
            return
        if self._of_weight is None:
            self._of_weight = torch.zeros(self._parameters[0].shape, dtype=wide, device=slope.device)
        # In pieces no larger than the tile: each is made in 16 bits and then added.
        step = max(1, slope.numel() // hidden.shape[1])
        for start in range(0, slope.shape[1], step):
            words = slice(start, start + step)
            self._of_weight[words] += slope[:, words].t() @ hidden

    def finish(self) -> list[torch.Tensor | None]:
        """Return the gradients of the hidden states and of each parameter, in their types."""
        sums = zip((self._of_weight, self._of_bias), self._parameters, strict=False)
        return [self._of_hidden, *(None if each is None else each.to(of.dtype) for each, of in sums)]


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a block without autocast: types are chosen already, and it would choose those of another moment."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
