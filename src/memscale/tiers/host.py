"""The tier below an accelerator: host memory.

On CUDA the bytes go to page-locked blocks that are reused (`pinned.py`), and to ordinary memory where no more
pages can be locked. From every other device, the simulated and the executing one included, they go to
ordinary CPU tensors by ordinary operations, so that whoever follows memory sees them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memscale.errors import ConfigError, TierFullError, shown
from memscale.hardware.host import read_host
from memscale.tiers.engine import Engine, Lane
from memscale.tiers.piece import Piece
from memscale.tiers.pinned import Block, PinnedPool
from memscale.tiers.tier import Tier
from memscale.units import format_bytes

__all__ = ["HostTier"]

_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Place:
    """Where a piece is on the host: in a block of the pool, or in memory of its own."""

    nbytes: int
    block: Block | None = None
    memory: torch.Tensor | None = None


class HostTier(Tier[_Place]):
    """Keeps tensors in host memory.

    Args:
        capacity: The most bytes it may take, a hard cap (`max_cpu_offload_gb`); None for what the host has
            free now.
        engine: Who runs the transfers; None for everything at once, in the caller's thread.
        pool: Page-locked memory for CUDA; None for a pool of its own, as large as the engine allows.

    Raises:
        ConfigError: The capacity is negative.

    Example:
        >>> tier = HostTier(capacity=1000)
        >>> ticket = tier.store(torch.arange(4.0))
        >>> tier.load(ticket), tier.bytes_used
        (tensor([0., 1., 2., 3.]), 16)
        >>> tier.free(ticket)
        >>> tier.bytes_used
        0
    """

    name = "host tier"

    def __init__(
        self, capacity: int | None = None, *, engine: Engine | None = None, pool: PinnedPool | None = None
    ) -> None:
        super().__init__(engine)
        if capacity is not None and capacity < 0:
            raise ConfigError(
                f"capacity={shown(capacity)} is not allowed: give a number of bytes, 0 or more."
            )
        self._capacity = read_host().available_ram_bytes if capacity is None else capacity
        pinned = self._engine.pinned_pool_bytes
        self._owns_pool = pool is None
        self._pool = pool or PinnedPool(self._capacity if pinned is None else min(pinned, self._capacity))
        self._unpinned = 0  # bytes outside the pool

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def bytes_used(self) -> int:
        return self._unpinned + self._pool.bytes_in_use

    @property
    def bytes_reserved(self) -> int:
        """Bytes it has of the host: in use, and idle in the pool. Never above the capacity either."""
        return self._unpinned + self._pool.bytes_locked

    def close(self) -> None:
        super().close()
        if self._owns_pool:
            self._pool.close()

    def _claim(self, piece: Piece[_Place]) -> _Place:
        if piece.device.type == "cuda" and not piece.fake:
            block = self._pool.take(piece.nbytes, limit=self._capacity - self._unpinned)
            if block is not None:
                return _Place(piece.nbytes, block)
        # Idle blocks make way for what is stored.
        self._pool.trim(max(0, self._capacity - self._unpinned - piece.nbytes))
        if self.bytes_reserved + piece.nbytes > self._capacity:
            raise TierFullError(
                f"The host tier is full: {format_bytes(piece.nbytes)} more would exceed its cap of "
                f"{format_bytes(self._capacity)}, of which {format_bytes(self.bytes_used)} is used. The "
                "tensor stays where it is. Raise Config(max_cpu_offload_gb=...), or use a smaller batch."
            )
        self._unpinned += piece.nbytes
        return _Place(piece.nbytes)

    def _give_up(self, place: _Place) -> None:
        place.memory = None
        if place.block is not None:
            self._pool.give(place.block)
        else:
            self._unpinned -= place.nbytes

    def _write(self, piece: Piece[_Place], source: torch.Tensor) -> None:
        block = piece.place.block
        if block is None:
            piece.place.memory = source.to(_CPU, copy=True)
            return
        memory = block.memory[: piece.nbytes].view(piece.dtype)
        memory.copy_(source, non_blocking=self._engine.is_async)
        piece.place.memory = memory

    def _read(self, piece: Piece[_Place], device: torch.device) -> torch.Tensor:
        memory = piece.place.memory
        assert memory is not None, "a piece is read only after it was written"
        if piece.place.block is None or device.type != "cuda":
            return memory.to(device, copy=True)
        return memory.to(device, non_blocking=self._engine.is_async)

    def _lane(self, piece: Piece[_Place], device: torch.device, *, up: bool) -> Lane:
        if piece.fake or device.type not in ("cpu", "cuda"):
            return Lane.HERE
        if device.type == "cuda":
            return Lane.UP if up else Lane.DOWN
        return Lane.READ if up else Lane.WRITE
