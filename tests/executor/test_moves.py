"""A wrapped model is moved: offloaded parameters stay on their tier, and another device gets another plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.testing import executing
from support.wrapping import Stack

CONFIG = Config(mode="aggressive", enable_logging=False, use_mixed_precision=False, use_8bit_optimizer=False)
X = torch.ones(64, 8)


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


def places(model: nn.Module) -> dict[str, str]:
    return {name: parameter.device.type for name, parameter in model.named_parameters()}


def test_a_move_to_the_same_device_leaves_offloaded_parameters_on_the_host() -> None:
    with executing("1GiB") as gpu:
        model = Stack().to(gpu.device)
        memscale.wrap(model, CONFIG, X.to(gpu.device))
        before, peak = places(model), gpu.peak_bytes
        assert "cpu" in before.values()
        nn.Sequential(model).to(gpu.device)  # as part of another model
        assert places(model) == before
        assert gpu.peak_bytes == peak
        step(model, X.to(gpu.device))
        memscale.detach(model)
        assert set(places(model).values()) == {gpu.device.type}
        assert "_apply" not in vars(model)


def test_a_move_changes_the_type_of_offloaded_parameters_too() -> None:
    with executing("1GiB") as gpu:
        model = Stack().to(gpu.device)
        memscale.wrap(model, CONFIG, X.to(gpu.device))
        before = places(model)
        model.to(gpu.device, torch.float64)
        assert places(model) == before
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
        step(model, X.to(gpu.device, torch.float64))


@pytest.mark.parametrize("sample", [None, X], ids=["no-sample", "sample"])
def test_a_move_to_another_device_takes_all_along_and_plans_anew(sample: torch.Tensor | None) -> None:
    with executing("1GiB") as gpu:
        model = memscale.wrap(Stack(), CONFIG, sample)
        executor = model._memscale_executor
        model.to(gpu.device)
        assert set(places(model).values()) == {gpu.device.type}
        if sample is not None:
            assert not any(layer.techniques for layer in executor.plan.layers)
        step(model, X.to(gpu.device))
        assert executor.device == gpu.device
        assert "executing virtual GPU" in executor.plan.device
        assert any(layer.techniques for layer in executor.plan.layers)
        model.to("cpu")
        step(model, X)
        assert executor.device.type == "cpu"
        assert set(places(model).values()) == {"cpu"}
        memscale.detach(model)
