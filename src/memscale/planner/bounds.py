"""How fast the rest of a row can be at best, if memory has a price.

Note [Priced memory]
~~~~~~~~~~~~~~~~~~~~
Where forward ends, and in the optimizer step, a plan that fits has no more bytes in use than there is room for. So for
any price of a byte its time is no less than its time plus the price of what is in use then, minus the price of all the
room; and the least of that over all plans, fitting or not, takes a programme without memory (a Lagrangian relaxation).
The price that gives the highest bound is looked for. For deep rows the bound is close: partial plans, and whole rows,
that cannot be faster than a plan that is known already need not be looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

from memscale.planner.trades import Option, Row, State, following

__all__ = ["Bound", "least"]

What = TypeVar("What")
Number = TypeVar("Number", int, float)

# As parts of the slowest plan's time for all the room: eight between a power of two and the next.
PRICES = range(-120, 97)


class Bound(Generic[What]):
    """The least seconds of plans that have no more bytes in use at a moment than there is room for.

    See Note [Priced memory].

    Args:
        row: the model.
        room: for what options have in use then.
        in_use: by an option.

    Attributes:
        price: seconds for a byte.
        seconds: no plan that fits is faster.
    """

    def __init__(self, row: Row[What], room: int, in_use: Callable[[Option[What]], int]) -> None:
        self._row = row
        self._room = room
        self._in_use = in_use
        slowest = row.seconds - least(row, lambda option: -option.seconds)[0, 0]
        self._unit = slowest / max(1, abs(room))
        self._seconds: dict[int, float] = {}
        low, high = PRICES[0], PRICES[-1]
        while low < high:  # the bound rises with the price, and falls from the best one on
            middle = (low + high) // 2
            if self._at(middle) < self._at(middle + 1):
                low = middle + 1
            else:
                high = middle
        self.price = self._price(low)
        self._rest = self._least(self.price)
        self.seconds = self._at(low)

    def beyond(self, state: State, seconds: float) -> float:
        """What seconds and the price of what is in use must stay below, for a partial plan to end below `seconds`."""
        return seconds + self.price * self._room - self._rest[state]

    def _price(self, number: int) -> float:
        return self._unit * math.ldexp(8 + number % 8, number // 8)

    def _at(self, number: int) -> float:
        if number not in self._seconds:
            price = self._price(number)
            self._seconds[number] = self._row.seconds + self._least(price)[0, 0] - price * self._room
        return self._seconds[number]

    def _least(self, price: float) -> dict[State, float]:
        return least(self._row, lambda option: option.seconds + price * self._in_use(option))


def least(row: Row[What], cost: Callable[[Option[What]], Number]) -> dict[State, Number]:
    """From each state on that leads to the end of the row, the least that the rest of it costs."""
    count = len(row.options)
    found: dict[State, Number] = {(count, phase): 0 for phase in row.phases}
    known: dict[tuple[int, int], dict[State, Number]] = {}  # of equal positions: by span and phase
    for position in reversed(range(count)):
        for phase in row.phases:
            key = (id(row.options[position]), phase)
            if key not in known:
                known[key] = {}
                for _, option, (_, then) in following(row, (position, phase)):
                    way, costs = (option.span, then), cost(option)
                    known[key][way] = min(costs, known[key].get(way, costs))
            ways = [
                costs + found[position + span, then]
                for (span, then), costs in known[key].items()
                if (position + span, then) in found
            ]
            if ways:
                found[position, phase] = min(ways)
    return found
