"""Records of the tracker: one per allocation, the module it belongs to, and summaries made of them.

Note [Module names in backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd numbers its nodes in the order of forward, so the number of the node that runs in backward tells which module
was running in forward. Each thread has its own numbers: what the device's thread creates during backward (a reentrant
recomputation) can't be ordered with the rest and gets no name.
"""

from __future__ import annotations

import enum
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memscale._torch import next_sequence_number, running_sequence_number


class Category(str, enum.Enum):
    """What memory is used for."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"  # allocated in forward, still in use when backward begins
    INPUTS = "inputs"
    TEMPORARY = "temporary"  # everything else
    WORKSPACE = "workspace"  # a library's scratch memory (cuBLAS)

    def __str__(self) -> str:
        return self.value


class Phase(str, enum.Enum):
    """The phase of a training step."""

    SETUP = "setup"
    FORWARD = "forward"
    EVALUATION = "evaluation"  # a forward without gradients: nothing is saved for backward
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __str__(self) -> str:
        return self.value


class Allocation:
    """One allocation from birth to death; times are ticks of the tracker's clock.

    `category` is set once it is known (a tensor is known to be a gradient only when it has become one), at death at the
    latest, and then holds for the whole life of the allocation. Without an `op` it existed before the tracker.
    """

    __slots__ = ("born", "category", "device", "died", "dtype", "module", "nbytes", "op", "phase", "shape")

    def __init__(
        self,
        nbytes: int,
        device: str,
        born: int,
        phase: Phase,
        op: object,
        module: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self.born = born
        self.died: int | None = None
        self.phase = phase
        self.op = op
        self.module = module
        self.shape = shape
        self.dtype = dtype
        self.category: Category | None = None

    def alive_at(self, tick: int) -> bool:
        return self.born <= tick and (self.died is None or self.died > tick)

    def current_category(self) -> Category:
        """Return the category as far as it is known: what forward allocated may yet become an activation."""
        if self.category is not None:
            return self.category
        return Category.ACTIVATIONS if self.phase is Phase.FORWARD else Category.TEMPORARY

    def describe(self) -> str:
        """Return one line for a person.

        >>> Allocation(nbytes=8, device="cpu", born=0, phase=Phase.FORWARD, op="aten.mul.Tensor",
        ...            module="h.0.mlp", shape=(2,), dtype=torch.float32).describe()
        'float32[2] by aten.mul.Tensor in h.0.mlp (forward)'
        """
        dtype = str(self.dtype).removeprefix("torch.")
        shape = ", ".join(map(str, self.shape))
        by = "from before" if self.op is None else f"by {self.op}"
        where = f" in {self.module}" if self.module else ""
        return f"{dtype}[{shape}] {by}{where} ({self.phase})"


@dataclass(frozen=True)
class Mark:
    """The beginning of a phase."""

    tick: int
    phase: Phase


@dataclass(frozen=True)
class TopTensor:
    """One of the largest tensors of a snapshot."""

    nbytes: int
    category: Category
    description: str
    module: str


@dataclass(frozen=True)
class Snapshot:
    """The memory of a device at one tick, by category."""

    device: str
    tick: int
    phase: Phase
    total: int
    by_category: tuple[tuple[Category, int], ...]
    top: tuple[TopTensor, ...]

    def of(self, category: Category) -> int:
        """Return the bytes of one category."""
        return dict(self.by_category).get(category, 0)


@dataclass(frozen=True)
class Timeline:
    """Bytes in use over time, by category; `ticks[i]` is the time of every series' i-th value."""

    device: str
    ticks: tuple[int, ...]
    series: tuple[tuple[Category, tuple[int, ...]], ...]
    marks: tuple[Mark, ...]

    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(values for _, values in self.series), strict=True)))


def snapshot(allocations: Iterable[Allocation], device: str, tick: int, phase: Phase, top: int) -> Snapshot:
    """Summarise what was alive on `device` at `tick`, with the `top` largest allocations."""
    alive = [
        allocation for allocation in allocations if allocation.device == device and allocation.alive_at(tick)
    ]
    sums: dict[Category, int] = {}
    for allocation in alive:
        category = allocation.current_category()
        sums[category] = sums.get(category, 0) + allocation.nbytes
    largest = sorted(alive, key=lambda allocation: (-allocation.nbytes, allocation.born))[:top]
    return Snapshot(
        device=device,
        tick=tick,
        phase=phase,
        total=sum(sums.values()),
        by_category=tuple((category, sums[category]) for category in Category if category in sums),
        top=tuple(
            TopTensor(
                allocation.nbytes, allocation.current_category(), allocation.describe(), allocation.module
            )
            for allocation in largest
        ),
    )


def timeline(allocations: Iterable[Allocation], marks: Sequence[Mark], device: str, since: int) -> Timeline:
    """Return the bytes by category at `since` and after every later change on `device`."""
    changes: list[tuple[int, Category, int]] = []
    now: dict[Category, int] = {}
    for allocation in allocations:
        if (
            allocation.device != device
            or not allocation.nbytes
            or (allocation.died is not None and allocation.died <= since)
        ):
            continue
        category = allocation.current_category()
        now.setdefault(category, 0)
        if allocation.born <= since:
            now[category] += allocation.nbytes
        else:
            changes.append((allocation.born, category, allocation.nbytes))
        if allocation.died is not None:
            changes.append((allocation.died, category, -allocation.nbytes))
    changes.sort(key=lambda change: change[0])
    present = [category for category in Category if category in now]
    ticks = [since] if present else []
    values = {category: [now[category]] for category in present}
    for tick, category, nbytes in changes:
        now[category] += nbytes
        ticks.append(tick)
        for each in present:
            values[each].append(now[each])
    return Timeline(
        device=device,
        ticks=tuple(ticks),
        series=tuple((category, tuple(values[category])) for category in present),
        marks=tuple(marks),
    )


MAX_SPANS = 50_000  # module calls whose backward can be named; the oldest are dropped


class RunningModules:
    """The stack of modules whose forward is running, and the names of all that have run."""

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._stack: list[tuple[nn.Module, str]] = []
        self._numbers: list[int] = []  # autograd's sequence number at each change of the running module,
        self._from_then: list[str] = []  # and the module that ran from then on

    def __bool__(self) -> bool:
        """Return whether any module is running."""
        return bool(self._stack)

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, "")

    def add_root(self, root: nn.Module) -> None:
        """Read the names of a model's modules."""
        self.roots.add(root)
        if self._names.get(root, type(root).__name__) != type(root).__name__:
            return  # part of a known model, whose names tell where it is
        for name, module in root.named_modules():
            if name or module not in self._names:
                self._names[module] = name or type(root).__name__

    def enter(self, module: nn.Module) -> None:
        self._stack.append((module, self._names.get(module) or type(module).__name__))
        self._mark()

    def leave(self, module: nn.Module) -> bool:
        """Return False for a module that was never entered because its call failed before."""
        if not self._stack or self._stack[-1][0] is not module:
            return False
        self._stack.pop()
        self._mark()
        return True

    def clear(self) -> None:
        self._stack.clear()

    def current(self, in_backward: bool) -> str:
        """Return the name of the module that an operation belongs to; empty if unknown."""
        if self._stack:
            return self._stack[-1][1]
        number = running_sequence_number() if in_backward else None
        if number is None:
            return ""
        position = bisect_right(self._numbers, number)
        return self._from_then[position - 1] if position else ""

    def _mark(self) -> None:
        """See Note [Module names in backward]."""
        number = next_sequence_number()
        if self._numbers and self._numbers[-1] > number:
            return
        self._numbers.append(number)
        self._from_then.append(self._stack[-1][1] if self._stack else "")
        if len(self._numbers) > MAX_SPANS:
            del self._numbers[: MAX_SPANS // 2], self._from_then[: MAX_SPANS // 2]
