"""One run of bytes in a tier, from the store to the last ticket that is freed; and the tickets."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from memscale.errors import TransferError
from memscale.tiers.layout import Flat, View, flat_behind, is_fake, rebuild
from memscale.tiers.transfer import Transfer

__all__ = ["Piece", "Ticket"]

PlaceT = TypeVar("PlaceT")


class Ticket:
    """Stands for one stored tensor, whose bytes are freed by `Tier.free`, or when the ticket is dropped."""

    __slots__ = ("__weakref__", "_leave", "nbytes", "piece", "view")

    def __init__(self, view: View, piece: Piece[Any] | None, leave: Callable[[Piece[Any]], None]) -> None:
        self.view = view
        self.piece = piece
        """What it stands for; None if that has no bytes, or was freed."""
        self.nbytes = piece.nbytes if piece is not None else 0
        """Bytes of its piece, which other tickets may stand for as well."""
        self._leave = leave
        if piece is not None:
            piece.tickets += 1

    def __del__(self) -> None:
        self.free()

    def free(self) -> None:
        piece, self.piece = self.piece, None
        if piece is not None:
            self._leave(piece)


@dataclass(frozen=True)
class _Handed:
    """The last tensor that was made of a piece, and for which tickets there has been one since."""

    tensor: weakref.ref[torch.Tensor]
    view: View
    device: torch.device
    tickets: set[int] = field(default_factory=set)


class Piece(Generic[PlaceT]):
    """A run of elements, where it is stored, and what is under way with it.

    Attributes:
        group: What it was stored together with; the same object for all of them.
        place: Where the tier keeps it; set once the room for it is claimed.
        source: The elements themselves, until their bytes are safe below; kept if storing them failed.
        storing: The transfer down.
        target: Where it is to be fetched to, ahead of its use.
        fetching: The transfer that does it.
        tickets: How many stand for it.
    """

    place: PlaceT

    def __init__(self, flat: Flat, group: object) -> None:
        run = flat.run
        self.group = group
        self.dtype = run.dtype
        self.numel = run.numel()
        self.nbytes = run.numel() * run.element_size()
        self.device = run.device
        self.fake = is_fake(run)
        self.source: torch.Tensor | None = run
        self.storing: Transfer[None] | None = None
        self.target = run.device
        self.fetching: Transfer[torch.Tensor] | None = None
        self.tickets = 0
        self.torn: TransferError | None = None
        self._version = None if flat.own else _version(run)
        self._reads: list[Transfer[torch.Tensor]] = []
        self._handed: _Handed | None = None

    @property
    def busy(self) -> bool:
        """Whether a transfer still reads or writes its place."""
        self._reads = [read for read in self._reads if not read.done()]
        return bool(self._reads) or (self.storing is not None and self.storing.busy())

    def finish(self) -> None:
        """Block until nothing is under way with it."""
        for transfer in (self.storing, *self._reads):
            if transfer is not None:
                transfer.finish()

    def forget_source(self) -> TransferError | None:
        """Its bytes are safe, unless they may be half old and half new: then that is returned.

        See Note [Sources must not change].
        """
        self._look(self.source)
        self.source = None
        return self.torn

    def intact_source(self) -> torch.Tensor | None:
        """The elements themselves, if they are still here and as they were."""
        source = self.source
        self._look(source)
        return source if self.torn is None else None

    def _look(self, source: torch.Tensor | None) -> None:
        if source is not None and self._version is not None and _version(source) != self._version:
            self.torn = TransferError(
                f"A tensor of {self.numel} {str(self.dtype).removeprefix('torch.')} was changed in place "
                "while it was being stored. Change it after flush(), or store a clone of it."
            )

    def began_read(self, read: Transfer[torch.Tensor]) -> None:
        if not read.done():
            self._reads.append(read)

    def hand_out(self, ticket: Ticket, flat: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The ticket's tensor over a run that was loaded for it."""
        tensor = rebuild(flat, ticket.view)
        self._handed = _Handed(weakref.ref(tensor), ticket.view, device, {id(ticket)})
        return tensor

    def share(self, ticket: Ticket, device: torch.device) -> torch.Tensor | None:
        """The ticket's tensor over the memory of its last sibling that was loaded, if that is still alive.

        A ticket that has had its tensor gets a new one, as it was stored.
        """
        handed = self._handed
        if handed is None or handed.device != device or id(ticket) in handed.tickets:
            return None
        sibling = handed.tensor()
        if sibling is None:
            return None
        if handed.view == ticket.view:
            handed.tickets.add(id(ticket))
            return sibling.detach()
        flat = flat_behind(sibling, handed.view, self.dtype, self.nbytes)
        if flat is None:
            return None
        handed.tickets.add(id(ticket))
        return rebuild(flat, ticket.view)


def _version(tensor: torch.Tensor) -> int | None:
    with contextlib.suppress(RuntimeError):  # inference tensors have none
        return tensor._version
    return None
