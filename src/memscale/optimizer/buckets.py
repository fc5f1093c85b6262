"""Which parameters are stepped together: as many as fit, in the optimizer's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from memscale.optimizer.groups import Member
from memscale.optimizer.state import MovingState

__all__ = ["Buckets", "bytes_of_gradient"]

_AS_FOR_ADAM = 4  # the parameter, its gradient and two moments


class Buckets:
    """Cuts one step's parameters into buckets while it runs.

    State that is not there yet is expected to be as large, for its parameter's size, as that of a parameter
    with as many dimensions in the same group: settings are a group's, and some optimizers (Adafactor) keep
    less for matrices. The first one of each such kind goes alone, to find out.
    """

    def __init__(
        self, optimizer: Optimizer, members: Iterable[Member], state: MovingState, limit: int
    ) -> None:
        self._optimizer = optimizer
        self._pending = deque(members)
        self._state = state
        self._limit = limit
        self._ratios: dict[tuple[int, int], float] = {}  # bytes of state for a byte of parameter
        self._new: list[Member] = []  # of the last bucket, those that had no state
        self.needed = 0  # bytes of the last bucket; as for Adam, where that is not known yet

    @property
    def is_last(self) -> bool:
        """Whether nothing is left after the bucket that was taken."""
        return not self._pending

    def take(self) -> list[Member]:
        """Return the next bucket; one parameter at least, if there is one."""
        self._learn()
        bucket: list[Member] = []
        total = 0
        while self._pending:
            needed = self._bytes_of(self._pending[0])
            if bucket and (needed is None or total + needed > self._limit):
                break
            bucket.append(self._pending.popleft())
            if needed is None:
                total = _AS_FOR_ADAM * bucket[0].parameter.nbytes
                break
            total += needed
        self.needed = total
        self._new = [member for member in bucket if not self._optimizer.state.get(member.parameter)]
        return bucket

    def _learn(self) -> None:
        for member in self._new:
            ratio = self._state_bytes(member) / max(1, member.parameter.nbytes)
            kind = _kind(member)
            self._ratios[kind] = max(ratio, self._ratios.get(kind, 0.0))

    def _bytes_of(self, member: Member) -> int | None:
        parameter = member.parameter
        if self._optimizer.state.get(parameter):
            state = self._state_bytes(member)
        else:
            ratio = self._ratios.get(_kind(member))
            if ratio is None:
                return None
            state = round(ratio * parameter.nbytes)
        return parameter.nbytes + bytes_of_gradient(parameter.grad) + state

    def _state_bytes(self, member: Member) -> int:
        return self._state.bytes_of(self._optimizer.state.get(member.parameter), member.parameter)


def _kind(member: Member) -> tuple[int, int]:
    return member.group, member.parameter.dim()


def bytes_of_gradient(gradient: Tensor | None) -> int:
    """Return what a gradient takes; of a sparse one, its indices and values."""
    if gradient is None:
        return 0
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().nbytes + gradient._values().nbytes
    return gradient.nbytes if gradient.layout is torch.strided else gradient.numel() * gradient.element_size()
