"""What a tier does with its pieces: claims room, moves them down and up, and gives the room back.

`Tier` is what others see of it; `HostTier` and `DiskTier` say where the bytes go.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, TypeVar

import torch

from memscale._util.locks import LateLock
from memscale.errors import TierFullError, TransferError
from memscale.tiers.ahead import Ahead
from memscale.tiers.engine import Engine, Lane, SyncEngine
from memscale.tiers.piece import Piece
from memscale.tiers.transfer import Done, InOrder, Transfer
from memscale.units import format_bytes

__all__ = ["Keeper"]

PlaceT = TypeVar("PlaceT")


class Keeper(ABC, Generic[PlaceT]):
    """The pieces of one tier, and their transfers.

    Args:
        engine: Who runs the transfers.
    """

    name: str
    """What messages call the tier."""

    def __init__(self, engine: Engine | None) -> None:
        self._engine: Engine = engine or SyncEngine()
        self._lock: LateLock[Piece[PlaceT]] = LateLock(self._drop)
        self._pieces: set[Piece[PlaceT]] = set()
        self._under_way: deque[list[Piece[PlaceT]]] = deque()  # groups on their way down, the oldest first
        self._leaving: list[Piece[PlaceT]] = []  # freed, and still read or written
        self._ahead: Ahead[Piece[PlaceT]] = Ahead(self._engine.prefetch_depth)
        self._failures: deque[TransferError] = deque()

    # ------------------------------------------------------------------ what a tier says of itself

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

        def done() -> None:
            torn = piece.forget_source()
            if torn is not None and piece.tickets:  # what is freed may change
                self._failures.append(torn)

        def failed(error: BaseException) -> None:
            failure = self._explain(error, piece, "stored")
            # A worker that dies takes everything in its queue with it, and one error says it.
            if not (self._failures and self._failures[-1].__cause__ is failure.__cause__):
                self._failures.append(failure)

        lane = self._lane(piece, piece.device, up=False)
        try:
            storing = self._engine.run(work, lane, piece.device)
        except OSError as error:  # it ran here
            raise self._explain(error, piece, "stored") from error
        piece.storing = InOrder(None) if lane is Lane.HERE and self._engine.is_async else storing
        piece.storing.then(done, failed)

    def _limit_under_way(self, pieces: list[Piece[PlaceT]]) -> None:
        """No more groups on their way down than the engine's depth: each still holds its memory above."""
        excess: list[list[Piece[PlaceT]]] = []
        with self._lock:
            latest = self._under_way[-1] if self._under_way else []
            if pieces and latest and latest[0].group is pieces[0].group:
                latest += pieces
            else:
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
        source = piece.intact_source()
        if piece.torn is not None:
            raise TransferError(str(piece.torn)) from piece.torn
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

    def _give_up_all(self) -> None:
        self._finish_all()
        with self._lock:
            self._under_way.clear()
            for piece in (*self._pieces, *self._leaving):
                piece.fetching = None
                piece.forget_source()
                self._give_up(piece.place)
            self._pieces.clear()
            self._leaving.clear()

    def _explain(self, error: BaseException, piece: Piece[PlaceT], verb: str) -> TransferError:
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
