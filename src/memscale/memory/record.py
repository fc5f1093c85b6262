"""What the tracker writes down: one record per piece of memory, and the pictures made from the records."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


class Category(str, enum.Enum):
    """What a piece of memory is for."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"  # made in forward, still there when backward begins
    INPUTS = "inputs"
    TEMPORARY = (
        "temporary"  # everything else: scratch of a forward, a backward or a step, results that are kept
    )
    WORKSPACE = "workspace"  # a library's scratch memory (cuBLAS)

    def __str__(self) -> str:
        return self.value


class Phase(str, enum.Enum):
    """Where in a training step something happened."""

    SETUP = "setup"
    FORWARD = "forward"
    EVALUATION = "evaluation"  # a forward without gradients: nothing is kept for a backward
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    def __str__(self) -> str:
        return self.value


class Allocation:
    """One piece of memory from birth to death; times are ticks of the tracker's clock.

    ``category`` is set once it is known (a tensor is known to be a gradient only when it has become one), at
    death at the latest, and then holds for the whole life of the piece.
    """

    # ``op`` and ``dtype`` become text only when somebody reads it: about most pieces nobody asks. Without an
    # ``op`` the piece was there before.
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

    def known_as(self) -> Category:
        """What the piece is, as far as it is known now: what forward made may yet be an activation."""
        if self.category is not None:
            return self.category
        return Category.ACTIVATIONS if self.phase is Phase.FORWARD else Category.TEMPORARY

    def describe(self) -> str:
        """One line for a person.

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
    """A phase began at this tick."""

    tick: int
    phase: Phase


@dataclass(frozen=True)
class TopTensor:
    """A tensor that was alive at the peak."""

    nbytes: int
    category: Category
    description: str
    module: str


@dataclass(frozen=True)
class Snapshot:
    """Everything alive on a device at one tick."""

    device: str
    tick: int
    phase: Phase
    total: int
    by_category: tuple[tuple[Category, int], ...]
    top: tuple[TopTensor, ...]

    def of(self, category: Category) -> int:
        """Bytes of one category."""
        return dict(self.by_category).get(category, 0)


@dataclass(frozen=True)
class Timeline:
    """Bytes alive over time, by category; ``ticks[i]`` is the time of every series' i-th value."""

    device: str
    ticks: tuple[int, ...]
    series: tuple[tuple[Category, tuple[int, ...]], ...]
    marks: tuple[Mark, ...]

    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(values for _, values in self.series), strict=True)))


def snapshot(pieces: Iterable[Allocation], device: str, tick: int, phase: Phase, top: int) -> Snapshot:
    """What was alive on ``device`` at ``tick``, the ``top`` largest pieces by name."""
    alive = [piece for piece in pieces if piece.device == device and piece.alive_at(tick)]
    sums: dict[Category, int] = {}
    for piece in alive:
        category = piece.known_as()
        sums[category] = sums.get(category, 0) + piece.nbytes
    largest = sorted(alive, key=lambda piece: (-piece.nbytes, piece.born))[:top]
    return Snapshot(
        device=device,
        tick=tick,
        phase=phase,
        total=sum(sums.values()),
        by_category=tuple((category, sums[category]) for category in Category if category in sums),
        top=tuple(
            TopTensor(piece.nbytes, piece.known_as(), piece.describe(), piece.module) for piece in largest
        ),
    )


def timeline(pieces: Iterable[Allocation], marks: Sequence[Mark], device: str, since: int) -> Timeline:
    """Bytes by category at ``since`` and after every change on ``device`` from then on."""
    changes: list[tuple[int, Category, int]] = []
    now: dict[Category, int] = {}
    for piece in pieces:
        if piece.device != device or not piece.nbytes or (piece.died is not None and piece.died <= since):
            continue
        category = piece.known_as()
        now.setdefault(category, 0)
        if piece.born <= since:
            now[category] += piece.nbytes
        else:
            changes.append((piece.born, category, piece.nbytes))
        if piece.died is not None:
            changes.append((piece.died, category, -piece.nbytes))
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
