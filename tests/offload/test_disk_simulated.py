"""ModelPlacement on disk in a simulation: what is on disk is not in memory, and what a layer uses is while it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale.executor import Executor
from memscale.memory.tracker import MemoryTracker
from memscale.simulator import simulate
from memscale.tiers.disk import PAGE
from support.disk import QUIET, disk_plan, on_disk
from support.wrapping import Stack

pytestmark = pytest.mark.cpu_only

BATCH = 256


def build() -> Stack:
    torch.manual_seed(0)
    return Stack(6, 128).train()


def in_memory(model: nn.Module) -> int:
    """Bytes that stay in memory: what is smaller than a page, and buffers."""
    small = sum(parameter.nbytes for parameter in model.parameters() if parameter.nbytes < PAGE)
    return small + sum(buffer.nbytes for buffer in model.buffers())


@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_what_is_on_disk_counts_nowhere(device: str) -> None:
    with simulate("RTX 3090", device=device) as simulation:
        model = simulation.copy_of(build()).train()
        tracker = simulation.tracker
        before = tracker.live_bytes("cpu") if device == "cpu" else 0
        executor = Executor(model, disk_plan(model, activations=False), QUIET)
        executor.attach()
        large = sum(parameter.nbytes for parameter in executor.placement.on_disk)
        small = sum(parameter.nbytes for parameter in model.parameters() if parameter.nbytes < PAGE)
        assert large > 0
        assert executor.placement.store.bytes_used >= large
        if device == "cpu":
            assert before - tracker.live_bytes("cpu") == large
        else:
            assert tracker.live_bytes("cpu") == small  # which are at home on the host
        x = torch.randn(BATCH, 128, device=simulation.device)
        with_input = tracker.live_bytes("cpu")
        model(x).sum().backward()
        # Gradients of the large ones are on disk as well, those of the small ones are not.
        assert tracker.live_bytes("cpu") - with_input == small
        assert executor.placement.store.bytes_used >= 2 * large


def test_the_peak_has_the_pages_of_one_layer() -> None:
    peaks = {}
    for layers in (6, 12):
        torch.manual_seed(0)
        with simulate("RTX 3090", device="cpu") as simulation:
            model = simulation.copy_of(Stack(layers, 128)).train()
            Executor(model, disk_plan(model, activations=True), QUIET).attach()
            x = torch.randn(4, 128, device=simulation.device)
            simulation.tracker.reset_peak()
            start = simulation.tracker.live_bytes("cpu")
            model(x).sum().backward()
            peaks[layers] = simulation.tracker.peak_bytes("cpu") - start
    layer = sum(parameter.nbytes for parameter in Stack(1, 128).layers.parameters())
    small = sum(each.nbytes for each in Stack(1, 128).layers.parameters() if each.nbytes < PAGE)
    assert layer < peaks[6] < 3 * layer
    assert peaks[12] - peaks[6] < 12 * (small + 4 * 128 * 4)  # small gradients and boundaries, no parameters


def test_activations_on_disk_are_not_in_memory() -> None:
    saved = {}
    for activations in (False, True):
        with simulate("RTX 3090", device="cpu") as simulation:
            model = simulation.copy_of(build()).train()
            Executor(model, disk_plan(model, activations=activations), QUIET).attach()
            x = torch.randn(BATCH, 128, device=simulation.device)
            before = simulation.tracker.live_bytes("cpu")
            output = model(x)
            saved[activations] = simulation.tracker.live_bytes("cpu") - before
            output.sum().backward()
    boundary = BATCH * 128 * 4
    assert saved[False] - saved[True] >= 5 * boundary


def test_a_tracker_of_real_tensors_leaves_them_out_too() -> None:
    model = build()
    with on_disk(model, activations=False) as executor:
        with MemoryTracker(model) as tracker:
            kept = in_memory(model)
            assert tracker.live_bytes("cpu") == kept
            model(torch.randn(4, 128)).sum().backward()
            assert tracker.live_bytes("cpu") < kept + 2 * in_memory(model) + 2**16
        assert all(executor.placement.store.holds(parameter.grad) for parameter in executor.placement.on_disk)
