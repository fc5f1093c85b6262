"""Freed memory goes back to the system while a plan is on a model that trains on the CPU, and not afterwards."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from memscale.execution_plan import LayerPlan, Plan
from memscale.executor import Executor
from memscale.memory.process import measure_in_fresh_process, rss_bytes
from memscale.offload import technique as freed_memory
from memscale.simulator import simulate
from support.checkpointed import checkpoint_plan
from support.wrapping import Stack

pytestmark = pytest.mark.cpu_only

MIB = 2**20


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the threshold was set to, in order; 0 for glibc's own."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    gc.collect()
    seen: list[int] = []
    monkeypatch.setattr(
        freed_memory, "fix_malloc_threshold", lambda threshold: seen.append(threshold) or True
    )
    monkeypatch.setattr(freed_memory, "restore_malloc_threshold", lambda: seen.append(0) or True)
    monkeypatch.setattr(freed_memory, "_holders", 0)
    return seen


def attached(model: nn.Module | None = None) -> Executor:
    model = model or Stack()
    executor = Executor(model, checkpoint_plan(model))
    executor.attach()
    vars(executor)["kept"] = model  # the executor alone does not keep it
    return executor


def test_while_one_model_has_a_plan(thresholds: list[int]) -> None:
    first, second = attached(), attached()
    assert thresholds == [freed_memory.THRESHOLD]
    first.detach()
    assert thresholds == [freed_memory.THRESHOLD]
    second.detach()
    assert thresholds == [freed_memory.THRESHOLD, 0]
    second.detach()
    attached().detach()
    assert thresholds == [freed_memory.THRESHOLD, 0] * 2


def test_a_model_that_is_dropped_lets_go(thresholds: list[int]) -> None:
    executor = attached()
    del executor
    gc.collect()
    assert thresholds == [freed_memory.THRESHOLD, 0]


def test_a_copy_has_a_wish_of_its_own(thresholds: list[int]) -> None:
    model = Stack()
    executor = Executor(model, checkpoint_plan(model))
    executor.attach()
    twin = copy.deepcopy(model)
    executor.detach()
    assert thresholds == [freed_memory.THRESHOLD]
    twin._memscale_executor.detach()
    assert thresholds == [freed_memory.THRESHOLD, 0]


def test_not_for_a_plan_that_does_nothing(thresholds: list[int]) -> None:
    model = Stack()
    executor = Executor(model, Plan((LayerPlan("head", ("head",), (), "none", "none"),)))
    executor.attach()
    executor.detach()
    assert thresholds == []


def test_not_in_a_simulation(thresholds: list[int]) -> None:
    with simulate("RTX 3090", device="cpu") as simulation:
        model = simulation.copy_of(Stack())
        Executor(model, checkpoint_plan(model)).attach()
    assert thresholds == []


@pytest.mark.parametrize("variable", ["MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_not_against_the_user(thresholds: list[int], monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "glibc.malloc.mmap_threshold=65536")
    attached().detach()
    assert thresholds == []


def freed_bytes(wrapped: bool) -> int:
    """How much of what a process had is left when tensors of 4 MiB are freed that smaller ones lie between."""
    import os

    from memscale.memory.process import restore_malloc_threshold

    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    restore_malloc_threshold()
    model = Stack()
    if wrapped:
        Executor(model, checkpoint_plan(model)).attach()
    else:
        from memscale.memory.process import fix_malloc_threshold

        fix_malloc_threshold(32 * MIB)  # what glibc's own threshold grows to
    before = rss_bytes()
    tensors = []
    for _ in range(16):
        tensors.append(torch.ones(MIB))
        tensors.append(torch.ones(MIB // 4))  # too large for a hole that the heap had before
    del tensors[::2]
    return rss_bytes() - before - 16 * MIB  # the smaller ones are still there


@pytest.mark.slow
def test_tensors_that_are_freed_leave_the_process() -> None:
    plain = measure_in_fresh_process(freed_bytes, False).result
    wrapped = measure_in_fresh_process(freed_bytes, True).result
    if plain < 40 * MIB:
        pytest.skip(
            "this system's allocator gives all of it back by itself, so that there is nothing to show"
        )
    assert wrapped < 8 * MIB
