"""One large parameter, a slice at a time, its moments in 8 bits: see Note [Slices] in ``offload``.

Slices begin where blocks do, so that each is taken down and brought up by itself, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memscale.optimizer.eight_bit.kinds import MOMENTS
from memscale.optimizer.eight_bit.moments import EightBitMoments, Moment
from memscale.optimizer.eight_bit.quantizer import BLOCK
from memscale.optimizer.slices import SlicedParameter

__all__ = ["EightBitSlices"]


class EightBitSlices(SlicedParameter):
    """Steps one parameter slice by slice.

    Args:
        optimizer: Whose step it is.
        parameter: The parameter.
        moments: Takes its moments up and down.
        length: Elements of a slice.
    """

    def __init__(
        self, optimizer: Optimizer, parameter: Tensor, moments: EightBitMoments, length: int
    ) -> None:
        super().__init__(optimizer, parameter, moments, max(BLOCK, length // BLOCK * BLOCK))
        self._moments = moments
        self._new: dict[str, Moment] = {}

    def _up(self, value: Any, part: slice, piece: Tensor) -> Any:
        if isinstance(value, Moment):
            return self._moments.part_up(value, part, piece)
        return super()._up(value, part, piece)

    def _down(self, values: dict[str, Any], part: slice, piece: Tensor) -> Iterator[tuple[str, Any]]:
        rest: dict[str, Any] = {}
        for name, value in values.items():
            if name in MOMENTS and isinstance(value, Tensor) and value.dtype is torch.float32 and value.dim():
                self._moments.part_down(value, part, self._moment(name))
            else:
                rest[name] = value
        yield from super()._down(rest, part, piece)
        if part.stop >= self._parameter.numel():
            yield from self._new.items()

    def _moment(self, name: str) -> Moment:
        """Where the slices of a moment go: what is there already, if it is in 8 bits."""
        before = self._before.get(name)
        if isinstance(before, Moment):
            return before
        if name not in self._new:
            self._new[name] = Moment.like(self._parameter, signed=MOMENTS[name])
        return self._new[name]
