"""The head: the linear map from hidden states to logits, computed for as many tokens as are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memscale.checkpointing.inputs import version_of
from memscale.errors import RecomputeError

__all__ = ["Borrow", "Head", "Step", "without_autocast"]

Borrow = Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[None]]
"""Surrounds every use of a head's parameters, where more must be done for it than to copy them to the device."""


def _freely(parameters: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Step:
    """An operation on logits that gives the same for each token, whatever the others are.

    Attributes:
        function: What is called with the logits as its first argument.
        args: Its other arguments.
        kwargs: Its keyword arguments.
        dtype: What it gave when it was called; autocast may be another when it is run.
    """

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    def run(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values, *self.args, **self.kwargs).to(self.dtype)


@dataclass(frozen=True)
class Head:
    """A linear layer's parameters at one moment, wherever they are at home.

    Attributes:
        weight: Its weight, vocabulary × width.
        bias: Its bias, if it has one.
        dtype: What it computes in: that of its weight, or what autocast says.
        rows: How many tokens make a tile.
        borrow: Surrounds every use of the parameters.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    rows: int
    borrow: Borrow = _freely
    _versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._versions_now())

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def check(self) -> None:
        """To be called before the parameters are read.

        Raises:
            RecomputeError: They have changed since the model was called.
        """
        if self._versions_now() != self._versions:
            raise RecomputeError(
                f"The logits of a model whose head is tiled ({self.vocabulary} × {self.weight.shape[1]}) were asked "
                "for after the head's weight had changed: they would not be those of the call. Read the logits, and "
                "compute the loss, before optimizer.step(); or switch tiling off (enable_tiling=False)."
            )

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(version_of(parameter) for parameter in self.parameters)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight and bias as they compute: on the device, in the head's type, without history."""
        with self.borrow(self.parameters):
            yield self._working(self.weight, device), self._working(self.bias, device)

    def _working(self, parameter: Any, device: torch.device) -> Any:
        return None if parameter is None else parameter.detach().to(device=device, dtype=self.dtype)

    def linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Logits in the head's type, as autocast would have made them."""
        with without_autocast(hidden.device):
            return nn.functional.linear(
                hidden.to(self.dtype),
                weight.to(hidden.device, self.dtype),
                None if bias is None else bias.to(hidden.device, self.dtype),
            )

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """All logits, differentiably."""
        self.check()
        with self.borrow(self.parameters):
            return self.linear(hidden, self.weight, self.bias)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The types are chosen already: autocast would choose those of another moment."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
