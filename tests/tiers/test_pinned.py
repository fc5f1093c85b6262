"""The pool of page-locked memory, with pages that are locked in name only."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.tiers.pinned import PinnedPool, size_class

KIB = 1024


class Pages:
    """Counts what is locked."""

    def __init__(self, most=None):
        self.locked = {}
        self.calls = 0
        self.most = most

    def lock(self, memory):
        self.calls += 1
        if self.most is not None and self.calls > self.most:
            return False
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        assert start % 4096 == 0
        assert memory.nbytes % 4096 == 0
        assert all(stop <= other or other + size <= start for other, size in self.locked.items())
        self.locked[start] = memory.nbytes
        return True

    def unlock(self, memory):
        assert self.locked.pop(memory.data_ptr()) == memory.nbytes


def pool_of(limit, most=None):
    pages = Pages(most)
    return PinnedPool(limit, lock=pages.lock, unlock=pages.unlock), pages


@given(st.integers(1, 2**40))
def test_classes_of_size_waste_at_most_a_quarter(nbytes):
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, nbytes * 1.25) or size - nbytes < 4096
    assert size % 4096 == 0
    assert size_class(size) == size


def test_a_second_step_allocates_nothing():
    pool, pages = pool_of(100 * KIB)
    for _ in range(3):
        blocks = [pool.take(size) for size in (5000, 8000, 30000)]
        assert all(block is not None for block in blocks)
        for block in blocks:
            pool.give(block)
    assert pages.calls == 3
    assert pool.bytes_in_use == 0


def test_idle_blocks_make_way_for_other_sizes():
    pool, pages = pool_of(64 * KIB)
    first = [pool.take(16 * KIB) for _ in range(4)]
    assert pool.take(4 * KIB) is None
    for block in first:
        pool.give(block)
    assert pool.take(40 * KIB) is not None
    assert pool.bytes_locked <= 64 * KIB
    assert sum(pages.locked.values()) == pool.bytes_locked


def test_where_pages_cannot_be_locked_there_are_no_blocks():
    pool, _ = pool_of(2**20, most=1)
    assert pool.take(4096) is not None
    assert pool.take(4096) is None
    assert not pool.works
    assert pool.bytes_locked == 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * KIB)), max_size=40))
def test_the_limit_holds(steps):
    pool, pages = pool_of(100 * KIB)
    held = []
    for take, size in steps:
        if take:
            block = pool.take(size)
            if block is not None:
                assert block.size >= size
                block.memory.fill_(len(held))
                held.append(block)
        elif held:
            pool.give(held.pop(size % len(held)))
        assert pool.bytes_in_use == sum(block.size for block in held)
        assert pool.bytes_in_use <= pool.bytes_locked <= 100 * KIB
        assert sum(pages.locked.values()) == pool.bytes_locked
    pool.close()
    for block in held:
        pool.give(block)
    assert not pages.locked
    assert isinstance(pool.take(1), type(None))


def test_a_lower_limit_for_one_block():
    pool, _ = pool_of(100 * KIB)
    assert pool.take(50 * KIB, limit=40 * KIB) is None
    assert pool.take(50 * KIB, limit=60 * KIB).memory.dtype is torch.uint8
