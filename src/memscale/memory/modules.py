"""Which module is running: in forward by its hooks, in backward by autograd's numbers.

Note [Names in backward]
~~~~~~~~~~~~~~~~~~~~~~~~
Autograd numbers its nodes as forward makes them, so that the number of the node that runs in backward tells
which module was running in forward. Each thread counts for itself: what a device's own thread makes during
backward (a recomputation of the reentrant kind) can't be put in order with the rest and gets no name.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right

from torch import nn

from memscale._torch import next_sequence_number, running_sequence_number

MOST_SPANS = 50_000  # module calls whose backward can be named; the oldest are forgotten


class RunningModules:
    """The modules that are running, and the names of all that have run."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[nn.Module, str]] = []
        self._numbers: list[int] = []  # autograd's number at each change of the running module,
        self._from_then: list[str] = []  # and who ran from then on

    def __bool__(self) -> bool:
        """Is any module running?"""
        return bool(self._stack)

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, "")

    def add_root(self, root: nn.Module) -> None:
        """Learn the names of a model's modules."""
        self.roots.add(root)
        if self._names.get(root, type(root).__name__) != type(root).__name__:
            return  # a part of a model that is known: its names say where it is
        for name, module in root.named_modules():
            if name or module not in self._names:
                self._names[module] = name or type(root).__name__

    def enter(self, module: nn.Module) -> None:
        self._stack.append((module, self._names.get(module) or type(module).__name__))
        self._mark()

    def leave(self, module: nn.Module) -> bool:
        """Returns False for a module that was never entered, because its call failed before."""
        if not self._stack or self._stack[-1][0] is not module:
            return False
        self._stack.pop()
        self._mark()
        return True

    def clear(self) -> None:
        self._stack.clear()

    def current(self, in_backward: bool) -> str:
        """The module that an operation belongs to; empty if that is not known."""
        if self._stack:
            return self._stack[-1][1]
        number = running_sequence_number() if in_backward else None
        if number is None:
            return ""
        position = bisect_right(self._numbers, number)
        return self._from_then[position - 1] if position else ""

    def _mark(self) -> None:
        """See Note [Names in backward]."""
        number = next_sequence_number()
        if self._numbers and self._numbers[-1] > number:
            return
        self._numbers.append(number)
        self._from_then.append(self._stack[-1][1] if self._stack else "")
        if len(self._numbers) > MOST_SPANS:
            del self._numbers[: MOST_SPANS // 2], self._from_then[: MOST_SPANS // 2]
