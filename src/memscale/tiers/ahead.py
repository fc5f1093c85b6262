"""Which groups of tensors are fetched ahead of their use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Ahead"]

P = TypeVar("P", bound=Hashable)


class Ahead(Generic[P]):
    """What was asked for in advance: the first `depth` groups are fetched, the others wait for their turn.

    A group is what was stored together, mostly a layer. It makes room when all that was fetched of it is used
    or freed. If something that waits is used before what was fetched, then the order was guessed wrong: the
    oldest group that was fetched and not used is given up, or it would block the others for good.

    Example:
        >>> ahead = Ahead(depth=1)
        >>> ahead.want("layer 1", "a"); ahead.want("layer 2", "b")
        >>> ahead.next(), ahead.next()
        (['a'], [])
        >>> ahead.used("layer 1", "a"), ahead.next()
        ([], ['b'])
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._waiting: dict[Hashable, list[P]] = {}
        self._fetched: dict[Hashable, list[P]] = {}

    def want(self, group: Hashable, piece: P) -> None:
        """Put a piece of a group in line, unless it is there already."""
        if piece not in self._waiting.get(group, ()) and piece not in self._fetched.get(group, ()):
            self._waiting.setdefault(group, []).append(piece)

    def next(self) -> list[P]:
        """What to fetch now; counts as fetched from here on."""
        pieces: list[P] = []
        for group in list(self._waiting):
            if group not in self._fetched and len(self._fetched) >= self._depth:
                continue
            pieces += self._waiting[group]
            self._fetched.setdefault(group, []).extend(self._waiting.pop(group))
        return pieces

    def used(self, group: Hashable, piece: P) -> list[P]:
        """A piece was loaded; returns what was fetched for nothing and is to be dropped."""
        if _remove(self._fetched, group, piece):
            return []
        out_of_order = _remove(self._waiting, group, piece)
        if out_of_order and group not in self._fetched and len(self._fetched) >= self._depth:
            return self._fetched.pop(next(iter(self._fetched)))
        return []

    def forget(self, group: Hashable, piece: P) -> None:
        """A piece is gone."""
        _remove(self._fetched, group, piece)
        _remove(self._waiting, group, piece)

    def clear(self) -> list[P]:
        """Begin anew; returns what was fetched and is to be dropped."""
        pieces = [piece for group in self._fetched.values() for piece in group]
        self._waiting.clear()
        self._fetched.clear()
        return pieces


def _remove(groups: dict[Hashable, list[P]], group: Hashable, piece: P) -> bool:
    pieces = groups.get(group)
    if pieces is None or piece not in pieces:
        return False
    pieces.remove(piece)
    if not pieces:
        del groups[group]
    return True
