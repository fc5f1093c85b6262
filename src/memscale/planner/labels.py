"""Partial plans, as columns of numbers: which of them can still win. See Note [The programme] in frontier.py."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from memscale.planner.trades import Option, Row, State, following

__all__ = ["LIVE", "STEPPING", "Labels", "Moves", "Rest", "Span"]

What = TypeVar("What")

LIVE, STEPPING = 0, 3  # columns of `Labels.bytes`
CROWD = 4  # times as many as wanted are thinned out by a grid before they are compared, which would take long
DENSE = 2**15  # cells of a grid that are all written down; of more, those that are not empty
KEPT_IN_CELL = 1.3  # on average: in many the fastest is the smallest, or alone
CHUNK = 512  # partial plans that are compared with the others at a time


class Span(NamedTuple):
    """From the least to the most of something."""

    least: int
    most: int


@dataclass(frozen=True)
class Rest:
    """What the rest of a row adds in the end, according to the options that are taken there.

    Attributes:
        forward: to what was needed in forward: what is resident.
        backward: to what was needed in backward: that and gradients.
        stepping: to what is needed in the optimizer step.
        to_come: what it needs itself above what is live now, at the least, counted without what it adds to backward.
    """

    forward: Span
    backward: Span
    stepping: Span
    to_come: int

    @property
    def is_known(self) -> bool:
        return all(span.least == span.most for span in (self.forward, self.backward, self.stepping))


class Moves:
    """The options that may come next, as columns.

    Attributes:
        groups: which of them cover so many positions and lead to a phase.
        numbers: theirs, among the options of their position.
        seconds: of each; and so are its bytes, `live` being what is resident or held.
    """

    def __init__(self, row: Row[What], state: State) -> None:
        found: dict[State, list[tuple[int, Option[What]]]] = {}
        for number, option, (_, phase) in following(row, state):
            found.setdefault((option.span, phase), []).append((number, option))
        self.groups: dict[State, slice] = {}
        options: list[Option[What]] = []
        numbers: list[int] = []
        for key, group in found.items():
            self.groups[key] = slice(len(options), len(options) + len(group))
            numbers += [number for number, _ in group]
            options += [option for _, option in group]
        self.numbers = torch.tensor(numbers)
        self.seconds = torch.tensor([option.seconds for option in options], dtype=torch.float64)
        self.resident = torch.tensor([option.resident for option in options])
        self.live = torch.tensor([option.resident + option.held for option in options])
        self.forward = torch.tensor([option.forward for option in options])
        self.backward = torch.tensor([option.backward for option in options])
        self.gradient = torch.tensor([option.gradient for option in options])
        self.stepping = torch.tensor([option.resident + option.stepping for option in options])


class Labels:
    """Partial plans that end at one position.

    Attributes:
        bytes: a row each: what is live; the most in forward, in backward, in the optimizer step.
        seconds: time so far.
        trail: a row each: position, phase and number of the label before, and the number of the option since.
    """

    def __init__(self, bytes_: Tensor, seconds: Tensor, trail: Tensor) -> None:
        self.bytes = bytes_
        self.seconds = seconds
        self.trail = trail

    @classmethod
    def first(cls, seconds: float) -> Labels:
        return cls(
            torch.zeros(1, 4, dtype=torch.int64),
            torch.tensor([seconds], dtype=torch.float64),
            torch.full((1, 4), -1, dtype=torch.int64),
        )

    @classmethod
    def together(cls, parts: Sequence[Labels]) -> Labels:
        if not parts:
            return cls(
                torch.zeros(0, 4, dtype=torch.int64),
                torch.zeros(0, dtype=torch.float64),
                torch.zeros(0, 4, dtype=torch.int64),
            )
        return cls(
            torch.cat([part.bytes for part in parts]),
            torch.cat([part.seconds for part in parts]),
            torch.cat([part.trail for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def followed_by(self, moves: Moves, state: State, dropped: int) -> Iterator[tuple[State, Labels]]:
        """Every label with each option that may come next, by where that leads."""
        live, forward, backward, stepping = (column.unsqueeze(1) for column in self.bytes.unbind(1))
        after = (
            live + moves.live,
            torch.maximum(forward, live + (moves.forward + dropped)) + moves.resident,
            torch.maximum(backward + moves.gradient, live + moves.backward) + moves.resident,
            stepping + moves.stepping,
        )
        bytes_ = torch.stack(after, dim=2)
        seconds = self.seconds.unsqueeze(1) + moves.seconds
        trail = torch.empty((*seconds.shape, 4), dtype=torch.int64)
        trail[..., 0], trail[..., 1] = state
        trail[..., 2] = torch.arange(len(self)).unsqueeze(1)
        trail[..., 3] = moves.numbers
        for (span, phase), where in moves.groups.items():
            those = Labels(
                bytes_[:, where].reshape(-1, 4), seconds[:, where].reshape(-1), trail[:, where].reshape(-1, 4)
            )
            yield (state[0] + span, phase), those

    def lifted(self, rest: Rest) -> Labels:
        """With no less in backward than what is still to come will make of it, whatever is taken then.

        And with nothing in forward, where that is no more: it never counts, because backward's will grow more.
        """
        live, forward, backward, stepping = self.bytes.unbind(1)
        backward = torch.maximum(backward, live + rest.to_come)
        return self._with(live, forward * (forward > backward), backward, stepping)

    def within(self, limit: int, rest: Rest, least_live: int) -> Labels:
        """Those that may still end below a limit; with no less than what will not exceed it, whatever is taken."""
        live, forward, backward, stepping = self.bytes.unbind(1)
        ends = (
            live + least_live,
            forward + rest.forward.least,
            backward + rest.backward.least,
            stepping + rest.stepping.least,
        )
        those = self._those(torch.nonzero(torch.stack(ends).amax(dim=0) <= limit).squeeze(1))
        live, forward, backward, stepping = those.bytes.unbind(1)
        return those._with(
            live,
            forward.clamp(min=limit - rest.forward.most),
            backward.clamp(min=limit - rest.backward.most),
            stepping.clamp(min=limit - rest.stepping.most),
        )

    def _with(self, *columns: Tensor) -> Labels:
        return Labels(torch.stack(columns, dim=1), self.seconds, self.trail)

    def below(self, seconds: float, price: float, column: int) -> Labels:
        """Those whose seconds, with the price of the bytes of a column, are less."""
        costs = self.seconds + price * self.bytes[:, column]
        return self._those(torch.nonzero(costs < seconds).squeeze(1))

    def thinned(self, most: int, rest: Rest) -> Labels:
        """Without those that cannot win; about `most` of them, if need be by a grid."""
        if len(self) < 2:
            return self
        labels = self._those(torch.sort(self.seconds, stable=True).indices)
        if len(labels) > CROWD * most:
            labels = labels._on_grid(labels._compared(rest), most // 2)
        labels = labels._undominated(labels._compared(rest))
        return labels if len(labels) <= most else labels._on_grid(labels._compared(rest), most // 2, most)

    def _compared(self, rest: Rest) -> Tensor:
        """What decides which label is better, besides time: as few numbers as will do."""
        live, forward, backward, stepping = self.bytes.unbind(1)
        others = [forward, backward, stepping]
        if rest.is_known:
            end = torch.maximum(forward + rest.forward.most, backward + rest.backward.most)
            others = [torch.maximum(end, stepping + rest.stepping.most)]
        return torch.stack([live, *(each for each in others if (each != each[0]).any())], dim=1)

    def _on_grid(self, compared: Tensor, side: int, most: int | None = None) -> Labels:
        """Two of each cell of a grid: the fastest and the smallest, or the ends would be lost.

        Where bytes are few, less of them cost the most time: there the cells are narrow, and wide at the other end.

        Args:
            compared: what decides, a row for each label.
            side: how many cells there are along each side.
            most: how many labels are wanted; the grid is as coarse as it must be.
        """
        above = (compared - compared.amin(dim=0)).double()
        share = (above / torch.clamp(above.amax(dim=0), min=1)).sqrt()
        cells = _cells(share, side)
        while most is not None and len(set(cells.tolist())) * KEPT_IN_CELL > most and side > 2:
            side = side * 4 // 5
            cells = _cells(share, side)
        if side ** compared.shape[1] > DENSE:
            cells = torch.unique(cells, return_inverse=True)[1]
        count = len(self)
        numbers = torch.arange(count)
        size = compared.sum(dim=1)
        kept = torch.zeros(count, dtype=torch.bool)
        kept[_least_in_each(cells, numbers)] = True
        # Of equal sizes the first; the product is below 2**63 for any memory there is.
        kept[_least_in_each(cells, (size - size.amin()) * count + numbers) % count] = True
        kept[compared.argmin(dim=0)] = True
        return self._those(torch.nonzero(kept).squeeze(1))

    def _undominated(self, compared: Tensor) -> Labels:
        """Those that no other beats; they are sorted by time, so only one that stands before can."""
        if compared.shape[1] == 1:
            return self._those(_falling(compared[:, 0]))
        if compared.shape[1] == 2:
            firsts, seconds = compared[:, 0].tolist(), compared[:, 1].tolist()
            return self._those(torch.tensor(_below_the_stairs(firsts, seconds), dtype=torch.int64))
        kept = torch.zeros(0, dtype=torch.int64)
        for start in range(0, len(self), CHUNK):
            chunk = torch.arange(start, min(start + CHUNK, len(self)))
            before = torch.cat((kept, chunk))
            worse = before.unsqueeze(0) < chunk.unsqueeze(1)
            for column in compared.unbind(1):
                worse &= column[chunk].unsqueeze(1) >= column[before].unsqueeze(0)
            kept = torch.cat((kept, chunk[~worse.any(dim=1)]))
        return self._those(kept)

    def _those(self, indices: Tensor) -> Labels:
        return Labels(self.bytes[indices], self.seconds[indices], self.trail[indices])


def _falling(numbers: Tensor) -> Tensor:
    """Where a number is smaller than all before it."""
    before = torch.cummin(numbers, 0).values[:-1]
    smaller = torch.ones(len(numbers), dtype=torch.bool)
    smaller[1:] = numbers[1:] < before
    return torch.nonzero(smaller).squeeze(1)


def _cells(share: Tensor, side: int) -> Tensor:
    """The number of the cell that each row is in; a grid has at least two along each side."""
    first, *others = (share * (max(2, side) - 1)).long().unbind(1)
    for place in others:
        first = first * max(2, side) + place
    return first


def _least_in_each(cells: Tensor, numbers: Tensor) -> Tensor:
    """The least number of each cell that has one."""
    most = torch.iinfo(torch.int64).max
    least = torch.full((int(cells.max()) + 1,), most).scatter_reduce_(0, cells, numbers, "amin")
    return least[least < most]


def _below_the_stairs(ones: Sequence[int], others: Sequence[int]) -> list[int]:
    """Which pairs have no pair before them that is as small in both numbers.

    The smallest pairs so far are stairs: the larger the one number, the smaller the other.
    """
    kept: list[int] = []
    width: list[int] = []
    height: list[int] = []
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        place = bisect.bisect_right(width, one)
        if place and height[place - 1] <= other:
            continue
        kept.append(index)
        end = place
        while end < len(height) and height[end] >= other:
            end += 1
        if place and width[place - 1] == one:
            place -= 1
        width[place:end] = [one]
        height[place:end] = [other]
    return kept
