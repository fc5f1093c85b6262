"""What every tier offers: store tensors, fetch them ahead, load them, free them, under a hard cap.

A tier below the device keeps the bytes of tensors until they are needed again. What they are made of is in
`layout.py`, who moves them in `engine.py`; a tier itself (`host.py`, `disk.py`) says only where bytes go.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from memscale.errors import TierError, TierFullError, TransferError
from memscale.offload.ahead import Ahead
from memscale.offload.engine import Engine, Lane, SyncEngine
from memscale.offload.layout import View, is_fake, pack
from memscale.offload.locks import LateLock
from memscale.offload.piece import Piece, Ticket
from memscale.offload.transfer import Done, Transfer
from memscale.units import format_bytes

__all__ = ["Ticket", "Tier"]

PlaceT = TypeVar("PlaceT")


class Tier(ABC, Generic[PlaceT]):
    """Memory below the device.

    Safe to use from several threads: autograd loads in threads of its own. An error of a transfer that ran
    beside the training is raised by the next call of `store`, `prefetch`, `load` or `flush`; the tensor
    concerned can still be loaded, as it is kept until its bytes are safe.

    Args:
        engine: Who runs the transfers; None for everything at once, in the caller's thread. It is not closed
            with the tier.
    """

    name: str
    """What messages call it."""

    def __init__(self, engine: Engine | None = None) -> None:
        self._engine: Engine = engine or SyncEngine()
        self._lock: LateLock[Piece[PlaceT]] = LateLock(self._drop)
        self._pieces: set[Piece[PlaceT]] = set()
        self._under_way: deque[list[Piece[PlaceT]]] = deque()  # groups on their way down, the oldest first
        self._leaving: list[Piece[PlaceT]] = []  # freed, and still read or written
        self._ahead: Ahead[Piece[PlaceT]] = Ahead(self._engine.prefetch_depth)
        self._failures: deque[TransferError] = deque()
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

    def store(self, tensor: torch.Tensor) -> Ticket:
        """Copy a tensor down; with an asynchronous engine this returns before that is done.

        Until it is, the tensor must not be changed in place; it may be dropped at once.

        Raises:
            TierFullError: It would exceed the capacity. Nothing was stored, and nothing that was is lost.
            TierError: It can't be stored.
            TransferError: An earlier transfer has failed.
        """
        return self.store_many([tensor])[0]

    def store_many(self, tensors: Sequence[torch.Tensor]) -> list[Ticket]:
        """Copy tensors down as one group: all or none, memory that they share once.

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
        group = object()
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
        self._finish_all()
        with self._lock:
            self._under_way.clear()
            for piece in (*self._pieces, *self._leaving):
                piece.fetching = None
                piece.forget_source()
                self._give_up(piece.place)
            self._pieces.clear()
            self._leaving.clear()

    # ------------------------------------------------------------------ what a tier answers

    @abstractmethod
    def _claim(self, piece: Piece[PlaceT]) -> PlaceT:
        """Room for a piece, counted from here on; under the lock.

        Raises:
            TierFullError: There is none.
        """

    @abstractmethod
    def _write(self, piece: Piece[PlaceT], source: torch.Tensor) -> None:
        """Copy the elements of a piece to its place; in any thread."""

    @abstractmethod
    def _read(self, piece: Piece[PlaceT], device: torch.device) -> torch.Tensor:
        """The elements of a piece in new memory; in any thread."""

    @abstractmethod
    def _give_up(self, place: PlaceT) -> None:
        """Give the room back; under the lock, perhaps in a finalizer."""

    @abstractmethod
    def _lane(self, piece: Piece[PlaceT], device: torch.device, *, up: bool) -> Lane:
        """Where transfers between a device and this tier run."""

    # ------------------------------------------------------------------ storing

    def _claim_all(self, pieces: list[Piece[PlaceT]]) -> None:
        """Room for all of them, or for none."""
        try:
            self._try_claim(pieces)
        except TierFullError:
            if not self._leaving:
                raise
            for piece in list(self._leaving):
                piece.finish()
            self._tidy()
            self._try_claim(pieces)

    def _try_claim(self, pieces: list[Piece[PlaceT]]) -> None:
        with self._lock:
            claimed: list[Piece[PlaceT]] = []
            try:
                for piece in pieces:
                    piece.place = self._claim(piece)
                    claimed.append(piece)
            except BaseException:
                for piece in claimed:
                    self._give_up(piece.place)
                raise
            self._pieces.update(claimed)

    def _start_store(self, piece: Piece[PlaceT]) -> None:
        def work() -> None:
            source = piece.source
            if source is None or not piece.tickets:
                return  # freed before its turn came
            with torch.no_grad():
                self._write(piece, source)
            piece.check_unchanged(source)

        def failed(error: BaseException) -> None:
            failure = self._explain(error, piece, "stored")
            # A worker that dies takes everything in its queue with it, and one error says it.
            if not (self._failures and self._failures[-1].__cause__ is failure.__cause__):
                self._failures.append(failure)

        try:
            piece.storing = self._engine.run(work, self._lane(piece, piece.device, up=False), piece.device)
        except OSError as error:  # it ran here
            raise self._explain(error, piece, "stored") from error
        piece.storing.then(piece.forget_source, failed)

    def _limit_under_way(self, pieces: list[Piece[PlaceT]]) -> None:
        """No more groups on their way down than the engine's depth: each still holds its memory above."""
        excess: list[list[Piece[PlaceT]]] = []
        with self._lock:
            self._under_way.append(pieces)
            while len(self._under_way) > self._engine.prefetch_depth:
                excess.append(self._under_way.popleft())
        for group in excess:
            _settle(group)

    # ------------------------------------------------------------------ loading

    def _start_fetches(self) -> None:
        """Begin what `Ahead` says it is time for; under the lock."""
        for piece in self._ahead.next():
            if piece.torn is None:  # else `load` says so
                piece.fetching = self._fetch(piece, piece.target, ahead=True)

    def _take_fetch(self, piece: Piece[PlaceT], target: torch.device) -> Transfer[torch.Tensor]:
        """What was fetched ahead, or else a transfer that begins now."""
        with self._lock:
            fetching, piece.fetching = piece.fetching, None
            for other in self._ahead.used(piece.group, piece):
                other.fetching = None
            if fetching is not None and piece.target == target:
                return fetching
        return self._fetch(piece, target, ahead=False)

    def _fetch(self, piece: Piece[PlaceT], target: torch.device, *, ahead: bool) -> Transfer[torch.Tensor]:
        if piece.torn is not None:
            raise TransferError(str(piece.torn)) from piece.torn
        source = piece.source
        if source is not None:
            return Done(source.to(target, copy=True))  # its bytes are here still, and perhaps nowhere else
        lane = self._lane(piece, target, up=True)
        if lane is Lane.READ and not ahead:
            lane = Lane.HERE  # who would wait for a worker can as well do it
        if target.type == "cpu" and piece.storing is not None:
            piece.storing.finish()

        def work() -> torch.Tensor:
            try:
                with torch.no_grad():
                    return self._read(piece, target)
            except OSError as error:
                raise self._explain(error, piece, "loaded") from error

        transfer = self._engine.run(work, lane, target, after=piece.storing)
        piece.began_read(transfer)
        return transfer

    # ------------------------------------------------------------------ keeping order

    def _begin(self) -> None:
        """What every call begins with."""
        if self._closed:
            raise TierError(f"The {self.name} is closed: make a new one to offload again.")
        self._tidy()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failures:
            raise self._failures.popleft()

    def _tidy(self) -> None:
        """Let go of what is over."""
        if not self._under_way and not self._leaving:
            return
        with self._lock:
            while self._under_way and all(p.storing is None or p.storing.done() for p in self._under_way[0]):
                _settle(self._under_way.popleft())
            over = [piece for piece in self._leaving if not piece.busy]
            self._leaving = [piece for piece in self._leaving if piece not in over]
            for piece in over:
                piece.forget_source()
                self._give_up(piece.place)

    def _finish_all(self) -> None:
        with self._lock:
            pieces = [*self._pieces, *self._leaving]
        for piece in pieces:
            piece.finish()

    def _drop(self, piece: Piece[PlaceT]) -> None:
        """One ticket less; under the lock, perhaps in a finalizer."""
        piece.tickets -= 1
        if piece.tickets or piece not in self._pieces:
            return
        self._pieces.discard(piece)
        self._ahead.forget(piece.group, piece)
        piece.fetching = None
        if piece.busy:
            self._leaving.append(piece)
        else:
            piece.forget_source()
            self._give_up(piece.place)

    def _piece_of(self, ticket: Ticket) -> Piece[PlaceT] | None:
        piece = ticket.piece
        if piece is not None and piece not in self._pieces:
            raise TierError(f"This ticket is not one of this {self.name}.")
        if piece is None and ticket.view.piece >= 0:
            raise TierError("This ticket was freed: keep it until its tensor is loaded for the last time.")
        return piece

    def _explain(self, error: BaseException, piece: Piece[PlaceT], verb: str) -> TransferError:
        if error is piece.torn:
            return piece.torn
        kept = " It is still in memory, and can be loaded." if verb == "stored" else ""
        failure = TransferError(
            f"{format_bytes(piece.nbytes)} could not be {verb} by the {self.name}: {error}.{kept} See the "
            "cause above, and save your model before you go on."
        )
        failure.__cause__ = error
        return failure


def _settle(group: list[Piece[PlaceT]]) -> None:
    """Wait until a group is stored, without raising an error, which was noted when it happened."""
    for piece in group:
        if piece.storing is not None:
            with contextlib.suppress(TransferError):
                piece.storing.wait()


def _resolve(device: torch.device | str | None, view: View) -> torch.device:
    if device is None:
        return view.device
    device = torch.device(device)
    return view.device if device.index is None and device.type == view.device.type else device
