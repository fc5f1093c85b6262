"""Page-locked host memory in blocks that are used again and again.

Only from and to page-locked memory does a GPU copy by itself while everything else goes on. Locking pages
takes milliseconds, so a block is locked once and reused: blocks come in classes of size, four to each power
of two, and in a training loop every step after the first finds the blocks that the step before has left.
torch's own `pin_memory` rounds up to powers of two, up to twice what is needed, and keeps it all; a cap on it
would mean half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from memscale._util.locks import LateLock
from memscale.tiers import _libc

__all__ = ["Block", "PinnedPool", "size_class"]

_SMALLEST = _libc.PAGE


def lock_pages(memory: torch.Tensor) -> bool:
    """Lock a tensor's pages for the GPU; False where that is not possible."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def unlock_pages(memory: torch.Tensor) -> None:
    """Undo :func:`lock_pages`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Block:
    """Page-locked memory of one class of size, as bytes."""

    memory: torch.Tensor

    @property
    def size(self) -> int:
        return self.memory.numel()


class PinnedPool:
    """Blocks of page-locked memory, up to a limit.

    Args:
        limit: The most bytes to lock, in use and idle together.
        lock: How pages are locked; says whether it was possible.
        unlock: How they are unlocked.

    Example:
        >>> pool = PinnedPool(2**20, lock=lambda memory: True, unlock=lambda memory: None)
        >>> block = pool.take(5000)
        >>> block.size, pool.bytes_in_use
        (8192, 8192)
        >>> pool.give(block)
        >>> pool.bytes_in_use, pool.bytes_locked, pool.take(5000) is block
        (0, 8192, True)
    """

    def __init__(
        self,
        limit: int,
        *,
        lock: Callable[[torch.Tensor], bool] = lock_pages,
        unlock: Callable[[torch.Tensor], None] = unlock_pages,
    ) -> None:
        self.limit = limit
        self.bytes_locked = 0
        self.bytes_in_use = 0
        self.works = True  # until locking fails
        self._lock_pages, self._unlock_pages = lock, unlock
        self._idle: dict[int, list[Block]] = {}
        self._lock: LateLock[Block] = LateLock(self._put_back)

    def take(self, nbytes: int, limit: int | None = None) -> Block | None:
        """A block of at least so many bytes; None where the limit, or the system, does not allow it.

        Args:
            nbytes: What it is to hold.
            limit: A lower limit than the pool's own, for this time.
        """
        size = size_class(nbytes)
        limit = self.limit if limit is None else min(limit, self.limit)
        with self._lock:
            idle = self._idle.get(size)
            block = idle.pop() if idle else self._make(size, limit)
            if block is not None:
                self.bytes_in_use += size
            return block

    def give(self, block: Block) -> None:
        """Put a block back that no copy uses any more. Safe in finalizers, see Note [Finalizers]."""
        self._lock.leave(block)

    def trim(self, limit: int = 0) -> None:
        """Unlock idle blocks until no more than `limit` bytes are locked, or none is idle."""
        with self._lock:
            self._trim(limit)

    def close(self) -> None:
        """Unlock what is idle now, and what is given back later."""
        with self._lock:
            self.limit = 0
            self._trim(0)

    def _make(self, size: int, limit: int) -> Block | None:
        if not self.works or size > limit:
            return None
        self._trim(limit - size)
        if self.bytes_locked + size > limit:
            return None
        # Whole pages of its own: to lock pages that another block has is an error.
        memory = torch.empty(size + _libc.PAGE, dtype=torch.uint8)
        start = -memory.data_ptr() % _libc.PAGE
        memory = memory[start : start + size]
        self.works = self._lock_pages(memory)
        if not self.works:
            return None
        self.bytes_locked += size
        return Block(memory)

    def _put_back(self, block: Block) -> None:
        self.bytes_in_use -= block.size
        self._idle.setdefault(block.size, []).append(block)
        if not self.limit:  # closed
            self._trim(0)

    def _trim(self, limit: int) -> None:
        # The largest first: the fewest to unlock.
        for size in sorted(self._idle, reverse=True):
            blocks = self._idle[size]
            while blocks and self.bytes_locked > limit:
                self._unlock_pages(blocks.pop().memory)
                self.bytes_locked -= size


def size_class(nbytes: int) -> int:
    """The size of the blocks that hold so many bytes: at most a quarter more.

    Example:
        >>> [size_class(n) for n in (1, 5000, 2**20, 2**20 + 1)]
        [4096, 8192, 1048576, 1310720]
    """
    size = max(nbytes, _SMALLEST)
    step = max(1 << (size.bit_length() - 3), _SMALLEST)
    return -(-size // step) * step
