"""`wrap` on every family: not a bit of training changes, work is done twice, and memory is what was predicted."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, MemoryTracker, Plan
from memscale.executor import Executor
from memscale.recovery import StepGuard
from memscale.testing import executing
from support.checkpointed import assert_same, train
from support.families import FAMILIES, Family
from support.wrapping import Memory, Work, lossless, memory_of, tensors, work_of

# Forced, as tiny models have little to gain.
CHECKPOINTING = lossless("aggressive", force_optimize=True, enable_offloading=False)
CONFIGS = {
    "aggressive": CHECKPOINTING,
    "balanced": lossless("balanced", force_optimize=True, enable_offloading=False),
}

ROOM = 64 * 1024
SHARE = 0.01


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys(), scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


@functools.lru_cache(maxsize=1)
def plain_training(family: Family) -> list[tuple[str, torch.Tensor]]:
    return train(family)


@functools.lru_cache(maxsize=1)
def plain_work(family: Family) -> Work:
    return work_of(family, family.build())


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, str, int, int, int, int]]]:
    """Predicted against measured, printed when all families are through (``pytest -s``)."""
    rows: list[tuple[str, str, int, int, int, int]] = []
    yield rows
    heads = ("family", "device", "predicted peak", "error", "predicted saved", "error")
    print("\n" + "".join(f"{head:>21}" for head in heads))
    for row in rows:
        print("".join(f"{cell:>21,}" if isinstance(cell, int) else f"{cell:>21}" for cell in row))


def compare(table: list, family: Family, device: str, plan: Plan, seen: Memory) -> None:
    off = seen.peak_bytes - plan.predicted_peak_bytes
    saved_off = seen.saved_bytes - plan.predicted_saved_bytes
    table.append((family.name, device, plan.predicted_peak_bytes, off, plan.predicted_saved_bytes, saved_off))
    assert seen.saved_bytes == plan.predicted_saved_bytes
    assert abs(off) <= max(ROOM, SHARE * plan.predicted_peak_bytes)


@pytest.mark.cpu_only
@pytest.mark.matrix(5)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_training_is_exact_work_is_done_twice_and_memory_is_as_predicted(
    family: Family, config: Config, table: list
) -> None:
    wrapped: list[nn.Module] = []

    def prepare(model: nn.Module) -> nn.Module:
        wrapped.append(memscale.wrap(model, config, family.batch()))
        return model

    assert_same(train(family, prepare), plain_training(family))

    (model,) = wrapped
    plan = model._memscale_executor.plan
    assert any(layer.techniques for layer in plan.layers)
    assert plan.predicted_saved_bytes < plan.baseline_saved_bytes
    work, plain = work_of(family, model), plain_work(family)
    assert work.kernels > plain.kernels
    if plan.mode == "aggressive" and family.name != "lstm":  # of a fused LSTM no FLOPs are known
        assert work.flops > plain.flops
    batch = family.batch()
    with MemoryTracker(model, *tensors(batch)) as tracker:
        compare(table, family, "cpu", plan, memory_of(family, model, batch, tracker))


@pytest.mark.virtual_only
@pytest.mark.matrix(4)
def test_memory_on_a_gpu_is_as_predicted(family: Family, table: list) -> None:
    if family.data_dependent:
        pytest.skip("shapes depend on data: there is no simulation of it to compare with")
    plan = memscale.plan(family.build(), family.batch(), CHECKPOINTING, hardware="RTX 3090")
    assert plan.prediction_source == "simulated"
    assert any(layer.techniques for layer in plan.layers)
    with executing() as gpu:
        model = family.build().to(gpu.device)
        Executor(model, plan, CHECKPOINTING, guard=StepGuard()).attach()
        seen = memory_of(family, model, family.batch(gpu.device), gpu.tracker, gpu.device)
    compare(table, family, "vgpu", plan, seen)
    if isinstance(family.batch(), dict):  # the loss is the model's own, and nothing about it is assumed
        assert seen.peak_bytes == plan.predicted_peak_bytes
