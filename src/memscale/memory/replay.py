"""What a training step asks of a device's memory, and the same asked again.

Note [Steps again and again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A caching allocator gives a tensor a block that may be up to a MiB larger than it, depending on which blocks are free:
so the second step of training, which finds those of the first, may need more than the first, or less, though its
tensors are the same. A step need not be run twice to know it: what it asked for and gave back is written down, and
asked for once more.
"""

from __future__ import annotations

from collections.abc import Iterable

from memscale.memory.allocator import Allocator, Block
from memscale.memory.record import Allocation

__all__ = ["Replay", "StepLog"]


class StepLog:
    """Pieces of one device's memory that came and went, in that order.

    Attributes:
        device: its name.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._events: list[tuple[Allocation, int | None]] = []

    def __len__(self) -> int:
        return len(self._events)

    def born(self, piece: Allocation, nbytes: int) -> None:
        """A piece of so many bytes was asked for."""
        if piece.device == self.device:
            self._events.append((piece, nbytes))

    def died(self, piece: Allocation) -> None:
        """A piece was given back."""
        if piece.device == self.device:
            self._events.append((piece, None))

    def replay(self, allocator: Allocator, marks: Iterable[int] = ()) -> Replay:
        """Ask for the same again: for what was given back in between, as the rest is there to stay.

        Args:
            allocator: whom; it has in use afterwards what it has now.
            marks: numbers of events before which to look at what is in use.
        """
        gone = {id(piece) for piece, size in self._events if size is None}
        looked, start = set(marks), allocator.allocated
        peak, seen = start, {}
        blocks: dict[int, Block] = {}
        for number, (piece, size) in enumerate(self._events):
            if number in looked:
                seen[number] = allocator.allocated - start
            key = id(piece)
            if size is None:
                block = blocks.pop(key, None)  # else it is older than the log
                if block is not None:
                    allocator.free(block)
            elif key in gone and size:
                blocks[key] = allocator.allocate(size)
                peak = max(peak, allocator.allocated)
        return Replay(peak, seen)


class Replay:
    """What was seen while a step was replayed.

    Attributes:
        peak_bytes: the most in use at once.
        above_start: at each mark, what was in use above what was at the start.
    """

    def __init__(self, peak_bytes: int, above_start: dict[int, int]) -> None:
        self.peak_bytes = peak_bytes
        self.above_start = above_start
