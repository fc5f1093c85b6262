"""Free ranges in order: what a file, or a slab of it, has left."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Gaps"]


class Gaps:
    """Ranges that are free; neighbours are joined.

    Example:
        >>> gaps = Gaps()
        >>> gaps.add(0, 64); gaps.add(64, 64)
        >>> gaps.take(96), gaps.take(96), gaps.total
        (0, None, 32)
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # (offset, length), in order
        self.total = 0

    def add(self, offset: int, length: int) -> None:
        """A range has become free."""
        self.total += length
        index = bisect_left(self._ranges, (offset, 0))
        if index < len(self._ranges) and self._ranges[index][0] == offset + length:
            length += self._ranges.pop(index)[1]
        if index and sum(self._ranges[index - 1]) == offset:
            offset, before = self._ranges.pop(index - 1)
            length += before
        insort(self._ranges, (offset, length))

    def find(self, length: int) -> int | None:
        """Where the first range that is long enough starts."""
        return next((offset for offset, size in self._ranges if size >= length), None)

    def take(self, length: int) -> int | None:
        """Cut a range of this length off the first that has it; returns its offset, None if there is none."""
        offset = self.find(length)
        if offset is None:
            return None
        _, size = self._ranges.pop(bisect_left(self._ranges, (offset, 0)))
        if size > length:
            insort(self._ranges, (offset + length, size - length))
        self.total -= length
        return offset

    def pop(self) -> tuple[int, int]:
        """Take the last range, whole: its offset and length."""
        offset, length = self._ranges.pop()
        self.total -= length
        return offset, length
