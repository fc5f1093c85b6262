"""An optimizer's groups, a bucket at a time.

Note [One step, several calls]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The step of a class of torch.optim is called once for each bucket, with its groups cut down to the bucket's
parameters, and without the groups that have none there. These classes keep nothing but the state of single
parameters: no counters of a group or of the optimizer, which several calls would change several times
(Note [Whose arithmetic is split] in ``optimizer_kinds.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

import torch
from torch.optim import Optimizer

__all__ = ["Member", "SplitStep", "members_of"]

# The lists of a group that are about its parameters, one entry for each.
_PARALLEL = ("params", "param_names")


class Member(NamedTuple):
    """A parameter and its place in the optimizer."""

    group: int
    position: int
    parameter: torch.Tensor


def members_of(optimizer: Optimizer) -> list[Member]:
    """All parameters of an optimizer, in its order."""
    return [
        Member(index, position, parameter)
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    ]


class SplitStep:
    """One step of an optimizer, in several calls; whole again when the block ends, also by an error.

    Example:
        >>> first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
        >>> optimizer = torch.optim.SGD([first, second], lr=0.1)
        >>> with SplitStep(optimizer) as split:
        ...     for member in members_of(optimizer):
        ...         split.show([member])
        ...         print(len(optimizer.param_groups[0]["params"]))
        1
        1
        >>> len(optimizer.param_groups[0]["params"])
        2
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._lists = [
            {key: group[key] for key in _PARALLEL if isinstance(group.get(key), list)}
            for group in self._groups
        ]

    def __enter__(self) -> SplitStep:
        return self

    def show(self, bucket: Iterable[Member]) -> None:
        """Cut the groups down to these parameters, for the next call."""
        positions: dict[int, list[int]] = defaultdict(list)
        for member in bucket:
            positions[member.group].append(member.position)
        shown = sorted(positions)
        self.optimizer.param_groups[:] = [self._groups[index] for index in shown]
        for index in shown:
            for key, values in self._lists[index].items():
                self._groups[index][key] = [values[position] for position in sorted(positions[index])]

    def show_instead(self, member: Member, stand_in: torch.Tensor) -> None:
        """Cut the groups down to one parameter, with another tensor in its place."""
        self.show([member])
        group = self._groups[member.group]
        group["params"] = [stand_in]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for group, lists in zip(self._groups, self._lists, strict=True):
            group.update(lists)
        self.optimizer.param_groups[:] = self._groups
