"""Blocks whose saved activations are offloaded, as they are: the planner takes that where computing again is slower."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale.hardware import Rates, detect, find_gpu, virtual_hardware
from memscale.memory.tracker import MemoryTracker
from memscale.testing import executing
from support.offloaded import activations_of, attached
from support.wrapping import Layer

WIDTH = 64
LAYERS = 12
# Computing takes so long there that transfers are hidden behind it.
SLOW = replace(find_gpu("RTX 3090"), fp32_tflops=0.01, tf32_tflops=None)
HARDWARE = virtual_hardware(SLOW)
CONFIG = Config(enable_logging=False, fused_host_step=False)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return WithLoss().train()


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4096, WIDTH)


@functools.cache
def plain_peak_bytes() -> int:
    return memscale.plan(model_of(), batch(), CONFIG, HARDWARE).baseline_peak_bytes


@functools.cache
def planned(share: float, config: Config = CONFIG) -> Plan:
    """Return the plan for a share of the plain peak."""
    budget = int(share * plain_peak_bytes())
    return memscale.plan(model_of(), batch(), config.replace(memory_budget=budget), HARDWARE)


def saved_offloaded(plan: Plan) -> list[str]:
    return [
        layer.name
        for layer in plan.layers
        if layer.offloading is not None and layer.offloading.activations and layer.checkpointing is None
    ]


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return [each.detach().cpu() for each in model.parameters()]


@pytest.mark.parametrize("prefetch", [False, True], ids=["waiting", "prefetching"])
@pytest.mark.parametrize("share", [0.6, 0.45], ids=["parameters resident", "some parameters offloaded"])
@pytest.mark.matrix(2)
def test_a_planned_model_trains_bit_equal_within_its_prediction(share: float, prefetch: bool) -> None:
    plan = planned(share, CONFIG.replace(async_offload=prefetch))
    assert len(saved_offloaded(plan)) > LAYERS // 4
    assert plan.async_offload == prefetch
    expected = trained(model_of(), batch())
    with executing(SLOW.memory_bytes) as gpu:
        model, x = model_of().to(gpu.device), batch().to(gpu.device)
        with attached(model, plan, CONFIG) as executor:
            gpu.tracker.reset_peak()
            got = trained(model, x)
            peak = gpu.peak_bytes
            activations = activations_of(executor)
            assert activations.bytes_sent > 0
            assert activations.memory.bytes_used == 0, "freed with the graph"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert plan.predicted_peak_bytes == pytest.approx(peak, rel=0.01)


def test_the_plan_says_what_is_on_the_host_and_counts_it() -> None:
    plan = planned(0.6)
    name = saved_offloaded(plan)[0]
    assert "on the host is what it saves for backward" in plan.layer(name).reason
    assert plan.host_bytes >= sum(plan.layer(name).saved_bytes for name in saved_offloaded(plan)) > 0


def test_no_more_is_offloaded_than_the_host_has_room_for() -> None:
    much = planned(0.6)
    cap = 40e6
    assert much.host_bytes > cap
    little = planned(0.6, CONFIG.replace(max_cpu_offload_gb=cap / 1e9))
    assert 0 < little.host_bytes <= cap
    assert 0 < len(saved_offloaded(little)) < len(saved_offloaded(much))
    assert not any("fits" in note for note in little.notes), "the rest is recomputed"


def test_where_computing_again_is_faster_nothing_saved_is_offloaded() -> None:
    plain = memscale.plan(model_of(), batch(), CONFIG, "RTX 3090")
    config = CONFIG.replace(memory_budget=int(0.6 * plain.baseline_peak_bytes))
    plan = memscale.plan(model_of(), batch(), config, "RTX 3090")
    assert any(layer.checkpointing for layer in plan.layers)
    assert not saved_offloaded(plan)


@pytest.mark.cpu_only
@pytest.mark.parametrize("share", [0.7, 0.45], ids=["parameters resident", "parameters offloaded"])
def test_on_a_cpu_it_goes_to_disk(share: float, tmp_path: Path) -> None:
    """A CPU's computing is slow against its disk: nothing but what is read back has to be computed again."""
    here = detect("cpu", offload_dir=tmp_path)
    slow = replace(here, device=replace(here.device, rates=Rates(fp32=1e9, fp16=None, bf16=None)))
    config = CONFIG.replace(offload_dir=tmp_path, force_optimize=True)
    plain = memscale.plan(model_of(), batch(), config, slow).baseline_peak_bytes
    plan = memscale.plan(model_of(), batch(), config.replace(memory_budget=int(share * plain)), slow)
    assert len(saved_offloaded(plan)) > LAYERS // 4
    expected = trained(model_of(), batch())
    with MemoryTracker() as tracker:
        model, x = model_of(), batch()
        with attached(model, plan, config) as executor:
            tracker.reset_peak()
            got = trained(model, x)
            peak = tracker.peak_bytes("cpu")
            activations = activations_of(executor)
            assert activations.tier == "disk"
            assert activations.bytes_sent > 0
            assert executor.report().bytes_read > 0
    assert all(map(torch.equal, got, expected))
    assert plan.predicted_peak_bytes == pytest.approx(peak, rel=0.01)
