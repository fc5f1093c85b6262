"""A step that is replayed needs what it would need if it ran again."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from memscale.memory.allocator import CachingAllocator, ExactAllocator
from memscale.memory.tracker import MemoryTracker

MIB = 2**20
CPU = torch.device("cpu")


def step(sizes: list[int]) -> None:
    """Makes tensors; drops every other one at once, and the others when it ends."""
    made = []
    for number, size in enumerate(sizes):
        tensor = torch.empty(size, dtype=torch.uint8)
        if number % 2:
            made.append(tensor)
        del tensor


@given(st.lists(st.integers(1, 6 * MIB), min_size=2, max_size=12))
@pytest.mark.parametrize("allocator", [ExactAllocator, CachingAllocator])
def test_a_replay_needs_what_the_step_needs_when_it_runs_again(allocator: type, sizes: list[int]) -> None:
    peaks = []
    for replays in (False, True):
        again = []
        with MemoryTracker(allocators={"cpu": allocator}) as tracker:
            with tracker.logging(CPU) as log:
                step(sizes)
            for _ in range(2):
                tracker.reset_peak()
                if replays:
                    again.append(tracker.replay(log).peak_bytes)
                else:
                    step(sizes)
                    again.append(tracker.peak_bytes(CPU))
            assert tracker.live_bytes(CPU) == 0
        peaks.append(again)
    assert peaks[0] == peaks[1]


def test_the_second_step_of_a_caching_allocator_may_need_more_than_the_first() -> None:
    with MemoryTracker(allocators={"cpu": CachingAllocator}) as tracker:
        with tracker.logging(CPU) as log:
            first = torch.empty(3 * MIB, dtype=torch.uint8)
            second = torch.empty(3 * MIB, dtype=torch.uint8)
            middle = len(log)
            del first
            third = torch.empty(2 * MIB + MIB // 2, dtype=torch.uint8)  # gets all of what the first one had
            del second, third
        replay = tracker.replay(log, middle)
    assert replay.above_start == 6 * MIB
    assert replay.peak_bytes == tracker.peak_bytes(CPU) == 6 * MIB


def test_what_stays_is_not_asked_for_again() -> None:
    with MemoryTracker() as tracker:
        with tracker.logging(CPU) as log:
            stays = torch.empty(MIB, dtype=torch.uint8)
            goes = torch.empty(MIB, dtype=torch.uint8)
            tracker.reserve(MIB, CPU, "a workspace")
            del goes
        assert tracker.live_bytes(CPU) == 2 * MIB
        assert tracker.replay(log).peak_bytes == 3 * MIB
        assert tracker.live_bytes(CPU) == 2 * MIB
    assert stays.nbytes == MIB


def test_what_is_held_counts_until_it_is_let_go() -> None:
    with MemoryTracker() as tracker:
        let_go = tracker.hold(MIB, CPU, "pages")
        assert tracker.live_bytes(CPU) == MIB
        assert tracker.workspace_bytes(CPU) == 0
        let_go()
        assert tracker.live_bytes(CPU) == 0
        assert tracker.peak_bytes(CPU) == MIB
