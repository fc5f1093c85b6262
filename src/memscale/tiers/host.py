"""Host memory as a tier: page-locked where CUDA copies to it, under hard caps."""

from __future__ import annotations

import weakref

import torch

from memscale._torch import is_fake
from memscale._util.locks import LateLock
from memscale.errors import TierFullError
from memscale.hardware.host import read_host
from memscale.units import format_bytes

__all__ = ["HostMemory", "PinnedMemory"]


class PinnedMemory:
    """Page-locked memory of torch's own allocator, up to a limit.

    The allocator keeps blocks that were freed for the next request, and does not reuse one before the copies that read
    or write it are over. It rounds sizes up to powers of two, and so they are counted here.

    Args:
        limit: The most bytes in use at once.

    Attributes:
        bytes_in_use: Bytes of the tensors that are alive.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes_in_use = 0
        self._works = True  # until an allocation fails
        self._lock: LateLock[int] = LateLock(self._release)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return so many page-locked bytes; None where the limit, or the system, does not allow it."""
        size = self.size_of(nbytes)
        with self._lock:
            if not self._works or self.bytes_in_use + size > self.limit:
                return None
            memory = _allocate_pinned(nbytes)
            self._works = memory is not None
            if memory is None:
                return None
            self.bytes_in_use += size
        weakref.finalize(memory.untyped_storage(), self._lock.leave, size).atexit = False
        return memory

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Return what an allocation takes."""
        return 1 << max(nbytes - 1, 0).bit_length()

    def _release(self, size: int) -> None:
        self.bytes_in_use -= size


def _allocate_pinned(nbytes: int) -> torch.Tensor | None:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no more pages can be locked, or there is no device to lock them for
        return None


class HostMemory:
    """Host memory for what leaves the device, under a hard cap.

    Args:
        capacity: The most bytes to take (`max_cpu_offload_gb`); None for what the host has free now.
        pinned_bytes: The most of it that is page-locked; None for all of it.

    Attributes:
        bytes_used: Bytes of the tensors that are alive.

    Example:
        >>> memory = HostMemory(capacity=1000)
        >>> values = memory.empty_like(torch.arange(4.0))
        >>> memory.bytes_used
        16
        >>> del values
        >>> memory.bytes_used
        0
    """

    def __init__(self, capacity: int | None = None, pinned_bytes: int | None = None) -> None:
        self.capacity = read_host().available_ram_bytes if capacity is None else capacity
        self.bytes_used = 0
        self._pinned = PinnedMemory(self.capacity if pinned_bytes is None else pinned_bytes)
        self._lock: LateLock[int] = LateLock(self._release)

    def empty_like(self, flat: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        """Return host memory for a flat tensor: page-locked where CUDA copies to it, and where pages can be locked.

        Args:
            flat: A tensor as large.
            source: A tensor on the device that is copied from; `flat` itself if it is not given.

        Raises:
            TierFullError: The cap would be exceeded.
        """
        memory, size = None, flat.nbytes
        source = flat if source is None else source
        if source.device.type == "cuda" and not is_fake(source):
            size = PinnedMemory.size_of(flat.nbytes)
            memory = self._pinned.allocate(flat.nbytes) if self.bytes_used + size <= self.capacity else None
            size = size if memory is not None else flat.nbytes
        with self._lock:
            if self.bytes_used + size > self.capacity:
                raise TierFullError(
                    f"The host tier is full: {format_bytes(flat.nbytes)} more would exceed its cap of "
                    f"{format_bytes(self.capacity)}, of which {format_bytes(self.bytes_used)} is used. The "
                    "tensor stays where it is. Raise Config(max_cpu_offload_gb=...), or use a smaller batch."
                )
            self.bytes_used += size
        if memory is None:
            memory = torch.empty(flat.numel(), dtype=flat.dtype, device="cpu")
        weakref.finalize(memory.untyped_storage(), self._lock.leave, size).atexit = False
        return memory if memory.dtype == flat.dtype else memory.view(flat.dtype)

    def _release(self, size: int) -> None:
        self.bytes_used -= size
