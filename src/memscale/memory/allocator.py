"""Models of allocators: exact bytes, or the blocks of CUDA's caching allocator.

`CachingAllocator` has the sizes and rules of torch's CUDA caching allocator with default settings:
`torch.cuda.max_memory_allocated()` counts whole blocks, which are a few per cent larger than tensors.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, field

MIB = 1 << 20
ROUNDING = 512
SMALL_LIMIT = MIB  # requests up to this size come from the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB  # from this size on a request gets its own segment, rounded up to 2 MiB
LARGE_ROUNDING = 2 * MIB


class OutOfDeviceMemory(Exception):
    """An allocator is full; the tracker raises `torch.OutOfMemoryError` with the details."""

    def __init__(self, requested: int) -> None:
        super().__init__(f"no room for {requested} bytes")
        self.requested = requested


@dataclass(eq=False)
class AllocatedBlock:
    """An allocated piece of device memory."""

    size: int


@dataclass
class ExactAllocator:
    """Count every tensor at its own size, as for host memory."""

    capacity: int | None = None
    allocated: int = 0
    reserved: int = 0

    def allocate(self, nbytes: int) -> AllocatedBlock:
        if self.capacity is not None and self.allocated + nbytes > self.capacity:
            raise OutOfDeviceMemory(nbytes)
        self.allocated += nbytes
        self.reserved = self.allocated
        return AllocatedBlock(nbytes)

    def free(self, block: AllocatedBlock) -> None:
        self.allocated -= block.size
        self.reserved = self.allocated

    def empty_cache(self) -> None:
        pass


@dataclass(eq=False)
class CachedBlock(AllocatedBlock):
    """A piece of a segment, linked to its neighbours so that free ones can merge."""

    address: int
    pool: tuple[bool, int]  # of small requests or of large ones, and the stream
    free: bool = False
    before: CachedBlock | None = None
    after: CachedBlock | None = None


@dataclass
class CachingAllocator(ExactAllocator):
    """Model CUDA's caching allocator.

    >>> memory = CachingAllocator(capacity=64 * MIB)
    >>> block = memory.allocate(3 * MIB)
    >>> memory.allocated // MIB, memory.reserved // MIB
    (3, 20)
    """

    _next_address: int = 0
    # Free blocks by pool, sorted by size, then address: the first that is large enough is the best fit.
    _free: dict[tuple[bool, int], list[tuple[int, int, CachedBlock]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def allocate(self, nbytes: int, stream: int = 0) -> AllocatedBlock:
        """Allocate a block for a stream, which may not have those of others, free as they are."""
        size = max(ROUNDING, -(-nbytes // ROUNDING) * ROUNDING)
        small = size <= SMALL_LIMIT
        pool = small, stream
        block = self._best_fit(size, pool) or self._new_segment(size, pool)
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL_LIMIT:
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: AllocatedBlock) -> None:
        assert isinstance(block, CachedBlock)
        self.allocated -= block.size
        before, after = block.before, block.after
        if before is not None and before.free:
            self._remove_free(before)
            self._merge(before, block)
            block = before
        if after is not None and after.free:
            self._remove_free(after)
            self._merge(block, after)
        self._add_free(block)

    def empty_cache(self) -> None:
        """Release every segment that is wholly free, as CUDA does before it reports that it is full."""
        for blocks in self._free.values():
            for size, _, block in [entry for entry in blocks if not (entry[2].before or entry[2].after)]:
                self._remove_free(block)
                self.reserved -= size

    def _best_fit(self, size: int, pool: tuple[bool, int]) -> CachedBlock | None:
        blocks = self._free[pool]
        position = bisect.bisect_left(blocks, (size,))
        return blocks.pop(position)[2] if position < len(blocks) else None

    def _new_segment(self, size: int, pool: tuple[bool, int]) -> CachedBlock:
        if pool[0]:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if self.capacity is not None and self.reserved + segment > self.capacity:
            self.empty_cache()
            if self.reserved + segment > self.capacity:
                raise OutOfDeviceMemory(size)
        self.reserved += segment
        self._next_address += 1 << 44  # segments are never adjacent: only pieces of one segment merge
        return CachedBlock(segment, self._next_address, pool)

    def _split(self, block: CachedBlock, size: int) -> None:
        rest = CachedBlock(
            block.size - size, block.address + size, block.pool, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._add_free(rest)

    def _merge(self, block: CachedBlock, after: CachedBlock) -> None:
        block.size += after.size
        block.after = after.after
        if block.after is not None:
            block.after.before = block

    def _add_free(self, block: CachedBlock) -> None:
        block.free = True
        bisect.insort(self._free[block.pool], (block.size, block.address, block))

    def _remove_free(self, block: CachedBlock) -> None:
        blocks = self._free[block.pool]
        blocks.pop(bisect.bisect_left(blocks, (block.size, block.address)))
