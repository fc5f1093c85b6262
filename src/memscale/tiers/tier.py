"""What every tier offers: store tensors, fetch them ahead, load them, free them, under a hard cap.

A tier below the device keeps the bytes of tensors until they are needed again. What they are made of is in
`layout.py`, who moves them in `engine.py`, how in `keeper.py`; `host.py` and `disk.py` say where bytes go.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch

from memscale.errors import TierError
from memscale.tiers.engine import Engine
from memscale.tiers.keeper import Keeper
from memscale.tiers.layout import View, is_fake, pack, rebuild
from memscale.tiers.piece import Piece, Ticket

__all__ = ["Ticket", "Tier"]

PlaceT = TypeVar("PlaceT")


class Tier(Keeper[PlaceT]):
    """Memory below the device.

    Safe to use from several threads: autograd loads in threads of its own. An error of a transfer that ran
    beside the training is raised by the next call of `store`, `prefetch`, `load` or `flush`; the tensor
    concerned can still be loaded, as it is kept until its bytes are safe.

    Args:
        engine: Who runs the transfers; None for everything at once, in the caller's thread. It is not closed
            with the tier.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        super().__init__(engine)
        self._closed = False

    def __enter__(self) -> Tier[PlaceT]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what a tier is asked

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The most bytes it may take: a hard cap."""

    @property
    @abstractmethod
    def bytes_used(self) -> int:
        """Bytes that count against the capacity now."""

    def store(self, tensor: torch.Tensor, group: object = None) -> Ticket:
        """Copy a tensor down; with an asynchronous engine this returns before that is done.

        Until it is, the tensor must not be changed in place; it may be dropped at once.

        Args:
            tensor: What to store.
            group: What it belongs to, as a layer: tensors that are given the same object one after the other
                are one group to the engine's depth. None for a group of its own.

        Raises:
            TierFullError: It would exceed the capacity. Nothing was stored, and nothing that was is lost.
            TierError: It can't be stored.
            TransferError: An earlier transfer has failed.
        """
        return self.store_many([tensor], group)[0]

    def store_many(self, tensors: Sequence[torch.Tensor], group: object = None) -> list[Ticket]:
        """Copy tensors down as one group: all or none, memory that they share once.

        Args:
            tensors: What to store.
            group: As for :meth:`store`.

        Returns:
            A ticket for each. Tensors of one group that shared memory share it again, if they are alive at
            once after loading. To `prefetch`, a group is one.

        Raises:
            As :meth:`store`.
        """
        self._begin()
        with torch.no_grad():
            flats, views = pack(tensors)
        if any(is_fake(flat.run) for flat in flats) and not all(is_fake(tensor) for tensor in tensors):
            raise TierError(
                "A tensor with data can't be stored inside a simulation: store it outside the block."
            )
        group = object() if group is None else group
        pieces: list[Piece[PlaceT]] = [Piece(flat, group) for flat in flats]
        del flats
        self._claim_all(pieces)
        # From here on the tickets own the room: if one of them can't be written, all go back with them.
        tickets = [
            Ticket(view, pieces[view.piece] if view.piece >= 0 else None, self._lock.leave) for view in views
        ]
        try:
            for piece in pieces:
                self._start_store(piece)
        except BaseException:
            for ticket in tickets:
                ticket.free()
            raise
        if self._engine.is_async:
            self._limit_under_way(pieces)
        return tickets

    def prefetch(self, ticket: Ticket, device: torch.device | str | None = None) -> None:
        """Begin to load, so that `load` need not wait; groups beyond the engine's depth wait their turn."""
        self._begin()
        piece = self._piece_of(ticket)
        if piece is None or not self._engine.is_async:
            return
        with self._lock:
            piece.target = _resolve(device, ticket.view)
            self._ahead.want(piece.group, piece)
            self._start_fetches()

    def forget_prefetched(self) -> None:
        """Give up what was fetched ahead and not loaded; it will be read when it is asked for."""
        with self._lock:
            for piece in self._ahead.clear():
                piece.fetching = None

    def load(self, ticket: Ticket, device: torch.device | str | None = None) -> torch.Tensor:
        """The tensor, on its own device or another: same values, shape, stride and dtype, without gradient.

        Its bytes stay stored until the ticket is freed: it may be loaded again.

        Raises:
            TierError: The ticket was freed, or its bytes can't be read.
            TransferError: A transfer has failed.
        """
        self._begin()
        piece = self._piece_of(ticket)
        target = _resolve(device, ticket.view)
        with torch.no_grad():
            if piece is None:
                view = ticket.view
                return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=target)
            with self._lock:
                shared = piece.share(ticket, target)
            if shared is not None:
                return shared
            flat = self._take_fetch(piece, target).wait()
            with self._lock:
                tensor = piece.hand_out(ticket, flat, target)
                self._start_fetches()
            return tensor

    def borrow(self, ticket: Ticket) -> torch.Tensor | None:
        """The tensor where it was stored from, if it is still there because it is on its way: nothing is copied.

        It must not be changed in place, as the transfer may still read it.
        """
        self._begin()
        piece = self._piece_of(ticket)
        source = None if piece is None else piece.intact_source()
        with torch.no_grad():
            return None if source is None else rebuild(source, ticket.view)

    def free(self, ticket: Ticket) -> None:
        """Give back what only this ticket stands for. Tensors that were loaded are not touched."""
        ticket.free()
        self._tidy()

    def flush(self) -> None:
        """Wait until everything is stored.

        Raises:
            TransferError: Something could not be.
        """
        self._finish_all()
        self._tidy()
        self._raise_failure()

    def close(self) -> None:
        """Finish what is under way and give everything back; tickets can't be loaded any more."""
        if self._closed:
            return
        self._closed = True
        self._give_up_all()

    def _begin(self) -> None:
        """What every call begins with."""
        if self._closed:
            raise TierError(f"The {self.name} is closed: make a new one to offload again.")
        self._tidy()
        self._raise_failure()

    def _piece_of(self, ticket: Ticket) -> Piece[PlaceT] | None:
        piece = ticket.piece
        if piece is not None and piece not in self._pieces:
            raise TierError(f"This ticket is not one of this {self.name}.")
        if piece is None and ticket.view.piece >= 0:
            raise TierError("This ticket was freed: keep it until its tensor is loaded for the last time.")
        return piece


def _resolve(device: torch.device | str | None, view: View) -> torch.device:
    if device is None:
        return view.device
    device = torch.device(device)
    return view.device if device.index is None and device.type == view.device.type else device
