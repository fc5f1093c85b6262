"""The tier at the bottom: a file on disk.

Bytes are written and read as they are, with sizes known from memory: nothing in the file is ever interpreted.
Reads and writes go through the system's page cache, which uses memory that nobody else needs, and gives it
back.
"""

from __future__ import annotations

import ctypes
import errno
import os

import torch

from memscale.tiers.engine import Engine, Lane
from memscale.tiers.piece import Piece
from memscale.tiers.space import DiskSpace, Extent
from memscale.tiers.tier import Tier

__all__ = ["DiskTier", "read_into", "write_from"]

_CPU = torch.device("cpu")

# Bytes of one write. The page cache takes memory in blocks as large as the write, and large ones are hard to come
# by: on a virtual machine 6 GB were written at 0.3 GB/s by 40 MiB, and at 0.5 to 1.0 by 256 KiB (Linux 6.18, ext4).
AT_ONCE = 2**18


class DiskTier(Tier[Extent]):
    """Keeps tensors in a file.

    Args:
        directory: Where the file is (`offload_dir`); None for what `find_disk` chooses.
        capacity: The most bytes it may take, a hard cap (`max_disk_offload_gb`); None for what is free now.
        engine: Who runs the transfers; None for everything at once, in the caller's thread.
        space: A file and a cap to share with others, such as a `MappedArena`, instead of the first two.

    Raises:
        HardwareError: The directory is a file, or no parent of it exists.
        ConfigError: The capacity is negative.

    Example:
        >>> with DiskTier(capacity=10**6) as tier:
        ...     ticket = tier.store(torch.arange(4.0))
        ...     tier.load(ticket), tier.bytes_used  # whole pages
        (tensor([0., 1., 2., 3.]), 4096)
    """

    name = "disk tier"

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        capacity: int | None = None,
        *,
        engine: Engine | None = None,
        space: DiskSpace | None = None,
    ) -> None:
        super().__init__(engine)
        self._owns_space = space is None
        self.space = DiskSpace(directory, capacity) if space is None else space

    @property
    def capacity(self) -> int:
        return self.space.capacity

    @property
    def bytes_used(self) -> int:
        return self.space.bytes_used

    def close(self) -> None:
        super().close()
        if self._owns_space:
            self.space.close()

    def _claim(self, piece: Piece[Extent]) -> Extent:
        return self.space.allocate(piece.nbytes, counted_only=piece.fake)

    def _give_up(self, place: Extent) -> None:
        self.space.free(place)

    def _write(self, piece: Piece[Extent], source: torch.Tensor) -> None:
        host = source.to(_CPU)  # the same tensor, on a CPU
        if not piece.fake:
            write_from(self.space.fd, host, piece.place.offset)

    def _read(self, piece: Piece[Extent], device: torch.device) -> torch.Tensor:
        host = torch.empty(piece.numel, dtype=piece.dtype, device=_CPU)
        if not piece.fake:
            read_into(self.space.fd, host, piece.place.offset)
        return host.to(device)

    def _lane(self, piece: Piece[Extent], device: torch.device, *, up: bool) -> Lane:
        if piece.fake or device.type not in ("cpu", "cuda"):
            return Lane.HERE  # fake modes and wrapped tensors belong to the thread that has them
        return Lane.READ if up else Lane.WRITE


def write_from(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Write the memory of a dense CPU tensor to a file."""
    memory = _memory_of(tensor)
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done : done + AT_ONCE], offset + done)


def read_into(fd: int, tensor: torch.Tensor, offset: int) -> None:
    """Fill the memory of a dense CPU tensor from a file."""
    memory = _memory_of(tensor)
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends {len(memory) - done} bytes early: someone has cut it")
        done += count


def _memory_of(tensor: torch.Tensor) -> memoryview:
    # Not by numpy, which is no dependency and lacks bfloat16 and float8.
    kind = ctypes.c_char * tensor.nbytes
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")
