"""The search for the largest size that fits, in few looks: each one is a profile and a plan."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["largest_fitting"]

EXACT_TO = 64  # sizes above are found to within a sixty-fourth
FEW = 6  # looks that go by the line alone


def largest_fitting(needs: Callable[[int], int | None], room: int, *, start: int, most: int) -> int:
    """The largest size from 1 to `most` that needs no more than `room`; 0 if not even 1 does.

    What is needed grows with the size, and nearly along a line: the next look is where the line through the last two
    meets the room. Where it does not, sizes are doubled or halved, so that the search ends in any case.

    Args:
        needs: the bytes that a size needs, None if it cannot be run.
        room: what there is.
        start: where to look first.
        most: where to stop.

    Example:
        >>> largest_fitting(lambda size: 100 + 7 * size, 1000, start=4, most=10_000)
        128
    """
    known: dict[int, int] = {}
    low, high = 0, most + 1  # the first fits, the second does not
    size, looks = min(max(1, start), most), 0
    while high - low > max(1, low // EXACT_TO):
        looks += 1
        needed = needs(size)
        if needed is not None:
            known[size] = needed
        if needed is not None and needed <= room:
            low = size
        else:
            high = size
        size = _next(known, room, low, high, most, by_line=looks % 2 == 1 or looks < FEW)
    return low


def _next(known: dict[int, int], room: int, low: int, high: int, most: int, *, by_line: bool) -> int:
    step = max(1, low // EXACT_TO)
    middle = 2 * low if high > most and low else (low + high) // 2
    wanted = _on_the_line(known, room) if by_line else None
    if wanted is None or wanted >= high:
        wanted = middle
    # A look just beyond what fits closes the search.
    return min(max(wanted, low + step), high - 1)


def _on_the_line(known: dict[int, int], room: int) -> int | None:
    """Where the line through the two sizes nearest to the room meets it."""
    nearest = sorted(known, key=lambda size: abs(known[size] - room))[:2]
    if len(nearest) < 2:
        return None
    one, other = nearest
    slope = (known[one] - known[other]) / (one - other)
    return int(one + (room - known[one]) / slope) if slope > 0 else None
