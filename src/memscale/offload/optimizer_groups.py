"""An optimizer's groups, a bucket at a time.

Note [One step, several calls]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An optimizer's own step is called once for each bucket, with its groups cut down to the bucket's parameters,
and without the groups that have none there: not every optimizer can take an empty one. What is not a
parameter's must change as in one step:

- A group may count its steps (``group["step"] += 1``), and so may the optimizer (``self.steps``,
  ``defaults``, an entry of ``state`` that is no parameter's). Each call begins with what the first one began
  with, so that what remains is what a single call makes of it.
- A class that overrides a step and calls it goes through torch's wrapper a second time, for each bucket;
  the hooks of this optimizer are put away meanwhile, they have run.

What is looked at is in ``optimizer_counters.py``; counters inside an object of its own are beyond it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from memscale.offload.optimizer_counters import Counters

__all__ = ["Member", "SplitStep", "members_of"]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Attributes of an optimizer that are looked after by name; `step` is a scheduler's.
_KNOWN = frozenset({"defaults", "state", "param_groups", "step", "__reduce_ex__", *_HOOKS})
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
        self._hooks = {name: vars(optimizer)[name] for name in _HOOKS if name in vars(optimizer)}
        self._of_groups = [Counters(group, _beside_parameters) for group in self._groups]
        self._of_all = (
            Counters(optimizer.defaults, _any),
            Counters(optimizer.state, _no_parameter),
            Counters(vars(optimizer), _own),
        )

    def __enter__(self) -> SplitStep:
        for name in self._hooks:
            setattr(self.optimizer, name, OrderedDict())
        return self

    def show(self, bucket: Iterable[Member]) -> None:
        """Cut the groups down to these parameters, for the next call."""
        positions: dict[int, list[int]] = defaultdict(list)
        for member in bucket:
            positions[member.group].append(member.position)
        shown = sorted(positions)
        for counters in (*self._of_all, *(self._of_groups[index] for index in shown)):
            counters.put_back()
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
        for name, hooks in self._hooks.items():
            setattr(self.optimizer, name, hooks)


def _any(key: Any) -> bool:
    return True


def _beside_parameters(key: Any) -> bool:
    return key not in _PARALLEL


def _no_parameter(key: Any) -> bool:
    return not isinstance(key, torch.Tensor)


def _own(key: Any) -> bool:
    return key not in _KNOWN
