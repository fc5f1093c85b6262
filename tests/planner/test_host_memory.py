"""Plans go by what is free of the host's memory; what a model has there itself is no reason to plan with less."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, OptimizationMode
from memscale.errors import TierFullError
from memscale.execution_plan import OptimizerPlan
from memscale.executor import Executor, executor_of, hardware_of
from memscale.hardware import Hardware, HostSpec, detect, virtual_hardware
from memscale.planner.cache import plan_key, plans_made
from memscale.planner.decide import decide
from memscale.profiler import Sample
from memscale.testing import executing
from support.offloaded import QUIET, plan_of
from support.profiles import LARGE, MIB, config_of, stack
from support.wrapping import Layer, Stack

GIB = 2**30
WIDTH, LAYERS = 128, 6


def with_free(hardware: Hardware, available: int) -> Hardware:
    return replace(hardware, host=replace(hardware.host, available_ram_bytes=available))


def heavy():
    """Eight layers with 15.6 GiB of parameters, gradients and Adam state."""
    return stack(8, parameter_bytes=500 * MIB)


@pytest.mark.parametrize("room_on_device", [None, 4000 * MIB], ids=["device has room", "device has none"])
def test_with_less_free_there_is_less_on_the_host_or_the_disk_is_used(room_on_device: int | None) -> None:
    mode = OptimizationMode.AGGRESSIVE if room_on_device is None else OptimizationMode.BALANCED
    config = config_of(mode, enable_offloading=True, memory_budget=room_on_device)
    free, used = (decide(heavy(), with_free(LARGE, size), config) for size in (64 * GIB, 12 * GIB))
    assert free == decide(heavy(), LARGE, config)
    assert free.disk_bytes == 0
    assert free.host_bytes > 8 * GIB
    if room_on_device is None:
        assert 0 < used.host_bytes <= 8 * GIB
    else:
        assert (used.host_bytes, used.disk_bytes) == (0, free.host_bytes)
        assert "with 8.0 GiB of host memory for them nothing fits" in used.notes[-1]


def test_a_plan_does_not_waver_with_what_is_free() -> None:
    config = config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True)
    model, sample = nn.Linear(4, 4), Sample((torch.ones(2, 4),), {})

    def planned(available: int) -> tuple[object, object]:
        hardware = with_free(LARGE, available)
        return decide(heavy(), hardware, config), plan_key(
            model, sample, config, hardware, None, suggest=True
        )

    (plan, key), (same_plan, same_key), (less, other_key) = map(planned, (14 * GIB, 13 * GIB, 9 * GIB))
    assert (plan, key) == (same_plan, same_key)
    assert plan != less
    assert key != other_key


def test_plans_for_a_cpu_do_not_depend_on_it() -> None:
    model, sample = nn.Linear(4, 4), Sample((torch.ones(2, 4),), {})
    cpu = replace(LARGE, device=replace(LARGE.device, kind="cpu", name="a CPU"))
    hardware = [with_free(cpu, available) for available in (60 * GIB, GIB)]
    keys = [plan_key(model, sample, QUIET, each, None, suggest=True) for each in hardware]
    assert keys[0] == keys[1] is not None
    config = config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True)
    first, second = (decide(heavy(), each, config) for each in hardware)
    assert first == second


# A model that is wrapped --------------------------------------------------------------------------


class Host:
    """A host of which a model's tensors in it take some, as on a real one; `free` is without them."""

    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free
        self.tensors: list[torch.Tensor] = []

    def read(self) -> HostSpec:
        return HostSpec(self.total, max(0, self.free - self.taken), cores=2)

    @property
    def taken(self) -> int:
        return sum(each.nbytes for each in self.tensors if each.device.type == "cpu")

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.tensors = [*model.parameters(), *gradients, *(each for each in states if each.dim())]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    here = Host(0, 0)
    for module in ("hardware.detect", "offload.placement", "tiers.engine"):
        monkeypatch.setattr(importlib.import_module(f"memscale.{module}"), "read_host", here.read)
    return here


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH) for _ in range(LAYERS)))


def bytes_of(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def test_a_model_that_is_planned_anew_has_the_room_that_it_takes_already(host: Host) -> None:
    size = 4 * bytes_of(build())  # with gradients and Adam's state
    host.total, host.free = 4 * size, size + size // 2
    config = Config(
        mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False, enable_logging=False
    )
    with executing("1GiB") as gpu:
        model = build().to(gpu.device)
        before = hardware_of(model).host
        memscale.wrap(model, config, torch.ones(4, WIDTH, device=gpu.device))
        executor = executor_of(model)
        assert executor.plan.host_bytes >= size
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(4, WIDTH, device=gpu.device)).sum().backward()
            optimizer.step()
        host.watch(model, optimizer)
        assert host.taken == size
        assert detect(gpu.device).host.offload_bytes < size
        assert hardware_of(model).host == before
        first = executor.plan
        model(torch.ones(64, WIDTH, device=gpu.device)).sum().backward()
        assert executor.plan is not first
        assert (executor.plan.host_bytes >= size, executor.plan.disk_bytes) == (True, 0)
        memscale.detach(model)
        host.watch(model, optimizer)
        assert hardware_of(model).host == before


def test_parameters_that_are_on_the_host_before_wrap_are_not_taken_by_others(host: Host) -> None:
    host.total, host.free = GIB, 512 * MIB
    with executing("1GiB") as gpu:
        model = build()
        model[0].to(gpu.device)
        host.tensors = list(model.parameters())
        assert host.taken > 0
        assert hardware_of(model).host.available_ram_bytes == 512 * MIB
    with torch.device("meta"):
        assert hardware_of(build()).host.available_ram_bytes == host.read().available_ram_bytes


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "state alone"])
def test_a_step_whose_state_has_no_room_is_refused_before_it_changes_anything(
    masters: bool, host: Host
) -> None:
    for short in (0, 1):
        with executing("256MiB") as gpu:
            torch.manual_seed(0)
            model = Stack(3, 16).to(gpu.device)
            host.total, host.free = GIB, GIB
            plan = plan_of(model, to="host" if masters else "device", activations=False)
            if not masters:
                plan = replace(plan, optimizer=OptimizerPlan("host"))
            executor = Executor(model, plan, QUIET)
            executor.attach()
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(4, 16, device=gpu.device)).square().mean().backward()
            # Beside parameters and gradients; small state of parameters on the device stays there.
            with_state = [each for each in model.parameters() if masters or each.nbytes >= 4096]
            host.free = 2 * sum(each.nbytes for each in with_state) - short
            before = [each.detach().clone() for each in model.parameters()]
            if short:
                with pytest.raises(TierFullError, match="max_cpu_offload_gb"):
                    optimizer.step()
                assert all(map(torch.equal, before, model.parameters()))
            else:
                optimizer.step()
                assert not any(map(torch.equal, before, model.parameters()))
            executor.detach()


def test_a_plan_for_a_gpu_that_is_not_here_does_not_depend_on_this_host(host: Host) -> None:
    """Where the host of an RTX 3090 has 64 GiB, activations go there in the simulation, whatever this one has free."""
    hardware = virtual_hardware("RTX 3090")
    config = QUIET.replace(mode="aggressive", enable_checkpointing=False)
    plans = []
    for free in (2**40, 0):
        host.total, host.free = 2**40, free
        plans_made.clear()
        plans.append(memscale.plan(build(), torch.ones(4096, WIDTH), config, hardware))
    assert any(layer.offloading and layer.offloading.activations for layer in plans[0].layers)
    assert plans[0] == plans[1]
