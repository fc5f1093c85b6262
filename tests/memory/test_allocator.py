"""The model of CUDA's caching allocator: known sequences, and what must hold for any."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale.memory.allocator import (
    LARGE_REQUEST,
    LARGE_SEGMENT,
    MIB,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    CachingAllocator,
    ExactAllocator,
    OutOfDeviceMemory,
)

KIB = 1024


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, SMALL_SEGMENT),
        (512, 512, SMALL_SEGMENT),
        (513, 1024, SMALL_SEGMENT),
        (SMALL_LIMIT, SMALL_LIMIT, SMALL_SEGMENT),
        (SMALL_LIMIT + 1, SMALL_LIMIT + 512, LARGE_SEGMENT),
        (LARGE_REQUEST - 512, LARGE_REQUEST - 512, LARGE_SEGMENT),
        # From 10 MiB on a segment of its own; a rest of up to 1 MiB is not split off.
        (LARGE_REQUEST, LARGE_REQUEST, LARGE_REQUEST),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (100 * MIB + 1, 102 * MIB - (2 * MIB - 512), 102 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(request_bytes, block, segment):
    memory = CachingAllocator()
    got = memory.allocate(request_bytes)
    assert (got.size, memory.allocated, memory.reserved) == (block, block, segment)
    memory.free(got)
    assert (memory.allocated, memory.reserved) == (0, segment)
    memory.empty_cache()
    assert memory.reserved == 0


def test_a_freed_block_is_used_again():
    memory = CachingAllocator()
    first = memory.allocate(3 * MIB)
    memory.free(first)
    memory.allocate(3 * MIB)
    assert memory.reserved == LARGE_SEGMENT


def test_the_smallest_block_that_fits_is_taken():
    memory = CachingAllocator()
    blocks = [memory.allocate(size * MIB) for size in (12, 16, 14)]
    for block in blocks:
        memory.free(block)
    assert memory.allocate(13 * MIB).size == 14 * MIB  # a rest of 1 MiB stays with it
    assert memory.allocate(13 * MIB).size == 13 * MIB  # cut from 16 MiB
    assert memory.reserved == 42 * MIB


def test_neighbours_that_are_free_become_one():
    memory = CachingAllocator()
    blocks = [memory.allocate(5 * MIB) for _ in range(4)]  # one segment, cut in four
    assert memory.reserved == LARGE_SEGMENT
    for index in (1, 3, 2):
        memory.free(blocks[index])
    assert memory.allocate(15 * MIB).size == 15 * MIB
    assert memory.reserved == LARGE_SEGMENT


def test_small_and_large_requests_never_share_a_segment():
    memory = CachingAllocator()
    large = memory.allocate(2 * MIB)
    memory.free(large)
    memory.allocate(512)
    assert memory.reserved == LARGE_SEGMENT + SMALL_SEGMENT


def test_a_full_device_gives_back_its_cache_before_it_gives_up():
    memory = CachingAllocator(capacity=40 * MIB)
    memory.free(memory.allocate(30 * MIB))
    assert memory.reserved == 30 * MIB
    memory.allocate(32 * MIB)
    assert memory.reserved == 32 * MIB
    with pytest.raises(OutOfDeviceMemory) as error:
        memory.allocate(12 * MIB)
    assert error.value.requested == 12 * MIB
    assert (memory.allocated, memory.reserved) == (32 * MIB, 32 * MIB)


def test_fragments_can_fill_a_device_that_has_room():
    """As on CUDA: 20 MiB are free, in pieces that no request of 12 MiB fits."""
    memory = CachingAllocator(capacity=40 * MIB)
    blocks = [memory.allocate(5 * MIB) for _ in range(8)]
    for block in blocks[::2]:
        memory.free(block)
    assert (memory.allocated, memory.reserved) == (20 * MIB, 40 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        memory.allocate(12 * MIB)


def test_only_whole_segments_are_given_back():
    memory = CachingAllocator()
    keep, drop = memory.allocate(5 * MIB), memory.allocate(5 * MIB)
    memory.free(drop)
    memory.empty_cache()
    assert memory.reserved == LARGE_SEGMENT
    memory.free(keep)
    memory.empty_cache()
    assert memory.reserved == 0


def test_the_exact_allocator_counts_bytes():
    memory = ExactAllocator(capacity=100)
    block = memory.allocate(60)
    with pytest.raises(OutOfDeviceMemory):
        memory.allocate(41)
    memory.allocate(40)
    assert (memory.allocated, memory.reserved) == (100, 100)
    memory.free(block)
    assert (memory.allocated, memory.reserved) == (40, 40)


# ------------------------------------------------------------------ any sequence

SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(1, 64 * MIB))
# Either a size to allocate, or which of the live blocks to free.
ACTIONS = st.lists(st.one_of(st.tuples(st.just("take"), SIZES), st.tuples(st.just("free"), st.integers(0))))


def check(memory, live):
    """Nothing overlaps: walk every segment and find each byte once, in use or free."""
    sizes = [block.size for block in live]
    assert memory.allocated == sum(sizes) <= memory.reserved
    assert memory.capacity is None or memory.reserved <= memory.capacity
    free = [block for pool in memory._free.values() for _, _, block in pool]
    spans = sorted((block.address, block.address + block.size) for block in [*live, *free])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert memory.reserved == memory.allocated + sum(block.size for block in free)
    for block in free:
        assert block.free
        assert not any(each is not None and each.free for each in (block.before, block.after)), "not merged"
    for pool in memory._free.values():
        assert [entry[:2] for entry in pool] == sorted((block.size, block.address) for *_, block in pool)


@given(ACTIONS, st.one_of(st.none(), st.integers(1, 256).map(lambda size: size * MIB)))
def test_books_balance_after_every_action(actions, capacity):
    memory = CachingAllocator(capacity=capacity)
    live = []
    for action, number in actions:
        if action == "take":
            try:
                block = memory.allocate(number)
            except OutOfDeviceMemory:
                pass
            else:
                assert block.size >= number
                live.append(block)
        elif live:
            memory.free(live.pop(number % len(live)))
        check(memory, live)
    for block in live:
        memory.free(block)
    check(memory, [])
    assert memory.allocated == 0
    memory.empty_cache()
    assert memory.reserved == 0


@given(st.lists(SIZES, max_size=30))
def test_without_frees_a_block_wastes_less_than_its_rounding(sizes):
    memory = CachingAllocator()
    for size in sizes:
        block = memory.allocate(size)
        assert size <= block.size < size + 512 + (MIB if size > SMALL_LIMIT else 0)
