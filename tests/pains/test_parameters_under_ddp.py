"""On a GPU no plan moves parameters away from under `DistributedDataParallel`, which averages their gradients there.

It hooks their gradient accumulators. Torch drops that of a parameter which changes its device, and a job whose layers
were all offloaded trained a model of its own on each rank, without an error (`tests/cuda/test_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import Plan
from memscale.planner.sharded import PARAMETERS_STAY
from support.one_process import batch, build, count_buckets, process_group, train
from support.steps import AGGRESSIVE

needs_gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with process_group():
        yield


def plan_of(model: nn.Module) -> Plan:
    return memscale.plan(model, batch(), AGGRESSIVE, hardware="RTX 3090")


def moved(plan: Plan) -> list[str]:
    return [layer.name for layer in plan.layers if layer.offloading and layer.offloading.to != "device"]


def test_without_a_process_group_parameters_are_moved() -> None:
    plan = plan_of(build())
    assert moved(plan)
    assert PARAMETERS_STAY not in plan.notes


@needs_gloo
@pytest.mark.parametrize("is_parallel", [False, True], ids=["to become parallel", "parallel"])
def test_in_a_process_group_parameters_stay(is_parallel: bool, group: None) -> None:
    plan = plan_of(DistributedDataParallel(build()) if is_parallel else build())
    assert not moved(plan)
    assert PARAMETERS_STAY in plan.notes
    assert not any("raised" in note for note in plan.notes)
    assert plan.predicted_peak_bytes < 0.7 * plan.baseline_peak_bytes
    assert plan.optimizer is not None
    assert plan.optimizer.state == "host", "what DDP does not hold is offloaded"


@needs_gloo
@pytest.mark.parametrize("views", [False, True], ids=["buckets beside gradients", "gradients in buckets"])
def test_buckets_are_part_of_the_peak(views: bool, group: None) -> None:
    nbytes = sum(each.nbytes for each in build().parameters())
    parallel = DistributedDataParallel(build(), gradient_as_bucket_view=views)
    beside = plan_of(parallel).baseline_peak_bytes - plan_of(build()).baseline_peak_bytes
    assert beside == pytest.approx(0 if views else nbytes, abs=0.1 * nbytes)


@needs_gloo
def test_on_the_cpu_a_parallel_model_is_offloaded_to_disk(group: None) -> None:
    plain = DistributedDataParallel(build())
    expected = count_buckets(plain), train(plain)
    parallel = DistributedDataParallel(build())
    buckets = count_buckets(parallel)
    memscale.wrap(parallel, AGGRESSIVE, batch())
    assert moved(parallel._memscale_executor.plan)
    assert (buckets, train(parallel)) == expected
    assert buckets[0] >= 3
    memscale.detach(parallel)
