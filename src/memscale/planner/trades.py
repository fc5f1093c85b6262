"""A model as a row of options, and what a plan for it costs in bytes and seconds.

Note [The memory of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model is a row of positions. An *option* covers one position, or a few neighbours (a segment that is recomputed
as one), and says what that costs. With the options o₁ … oₙ in the order of forward, in bytes above the constants::

    in forward at k        Σ resident + Σ_{j<k} held_j + forward_k
    from the loss on       Σ resident + Σ held + the loss's own peak
    in backward at k       Σ resident + Σ_{j<k} held_j + Σ_{j>k} gradient_j + backward_k
    in the optimizer step  Σ resident + Σ stepping

and the peak is the most of these.

Options may have *phases*: an option never follows one of a later phase. So layers whose parameters live elsewhere are
the last ones of the row, which is where they serve best: their gradients are the first that come, and would be there
the longest. There is one row for all numbers of them, and little to compare.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Option", "Row", "State", "Trade", "following", "trade_of"]

What = TypeVar("What")

State = tuple[int, int]
"""A position in the row, and the phase."""


@dataclass(frozen=True)
class Option(Generic[What]):
    """What can be done with one position, or with `span` neighbours. See Note [The memory of a step].

    Attributes:
        what: what it stands for.
        seconds: the time of a step that falls on these positions.
        resident: bytes there all the time.
        held: bytes that forward leaves for backward.
        forward: the most in use in its forward, above what is live before it.
        backward: the most in use in its backward, above what is live before its forward.
        gradient: bytes of the gradients that its backward leaves.
        stepping: bytes in use in the optimizer step.
        span: positions that it covers.
        phase: an option does not follow one of a later phase; None fits everywhere.
    """

    what: What
    seconds: float
    resident: int = 0
    held: int = 0
    forward: int = 0
    backward: int = 0
    gradient: int = 0
    stepping: int = 0
    span: int = 1
    phase: int | None = None


@dataclass(frozen=True)
class Row(Generic[What]):
    """A model as the programme sees it.

    Attributes:
        options: at each position the options that begin there.
        dropped: at each position bytes that are made there and live on until forward ends.
        constant: bytes that are there whatever is chosen.
        seconds: time of a step that falls on no position.
        loss: the most in use at the end of forward above what is live then; `dropped` is live there.
        tail: the most in use from there to the first backward, above what is live then.
        stepping: bytes in use in the optimizer step whatever is chosen.
    """

    options: Sequence[Sequence[Option[What]]]
    dropped: Sequence[int] = ()
    constant: int = 0
    seconds: float = 0.0
    loss: int = 0
    tail: int = 0
    stepping: int = 0

    @functools.cached_property
    def phases(self) -> range:
        """Those that options have."""
        return range(1 + max((option.phase or 0 for here in self.options for option in here), default=0))

    def dropped_before(self, position: int) -> int:
        """What the positions before this one have made that lives until forward ends."""
        return sum(self.dropped[:position])


@dataclass(frozen=True)
class Trade(Generic[What]):
    """One plan for the whole row."""

    peak: int
    seconds: float
    options: tuple[Option[What], ...]

    @property
    def held(self) -> int:
        return sum(option.held for option in self.options)


def trade_of(row: Row[What], options: Sequence[Option[What]]) -> Trade[What]:
    """What a given plan costs, by the same count."""
    live = forward = backward = stepping = position = 0
    seconds = row.seconds
    for option in options:
        forward = max(forward, live + option.forward + row.dropped_before(position)) + option.resident
        backward = max(backward + option.gradient, live + option.backward) + option.resident
        live += option.resident + option.held
        stepping += option.resident + option.stepping
        seconds += option.seconds
        position += option.span
    peak = max(
        forward,
        backward,
        live + row.loss + row.dropped_before(position),
        live + row.tail,
        stepping + row.stepping,
    )
    return Trade(row.constant + peak, seconds, tuple(options))


def following(row: Row[What], state: State) -> Iterator[tuple[int, Option[What], State]]:
    """The options that may come next, with their numbers and where they lead."""
    position, phase = state
    for number, option in enumerate(row.options[position]):
        if option.phase is None or option.phase >= phase:
            yield number, option, (position + option.span, phase if option.phase is None else option.phase)
