"""Where the plan says that a layer is offloaded, bytes leave the device, however small the tensors are.

A suite is known whose threshold of 1,024 bytes stood above all of its 80-byte tensors: it passed for months,
and nothing had ever moved. So bytes are counted here: at home, off the device, and on the way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale
from memscale.testing import executing
from support.families import FAMILIES, Batch, Family, Scale
from support.steps import AGGRESSIVE, assert_has_techniques, plan_of

NAMES = ["gpt2", "bert", "t5", "tied", "lora", "transformer_encoder"]


def at_home(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the layers that are offloaded, each once."""
    found = {
        id(parameter): parameter
        for layer in plan_of(model).layers
        if "offloading" in layer.techniques
        for member in layer.members
        for parameter in model.get_submodule(member).parameters()
    }
    return list(found.values())


class Moved(TorchDispatchMode):
    """Bytes that went from the host to a device, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._count(args[0], result)
        elif func is torch.ops.aten.copy_.default:
            self._count(args[1], args[0])
        return result

    def _count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.device.type == target.device.type:
            return
        if source.device.type == "cpu":
            self.up += target.nbytes
        elif target.device.type == "cpu":
            self.down += target.nbytes


def assert_bytes_move(family: Family, model: nn.Module, batch: Batch, gpu: Any) -> None:
    before = gpu.tracker.live_bytes(gpu.device)
    memscale.wrap(model, AGGRESSIVE, batch)
    assert_has_techniques(model, "offloading")
    homes = at_home(model)
    size = sum(parameter.nbytes for parameter in homes)
    assert size > 0
    assert {parameter.device.type for parameter in homes} == {"cpu"}
    assert plan_of(model).host_bytes >= size
    assert before - gpu.tracker.live_bytes(gpu.device) >= size, "off the device for real"

    with Moved() as moved:
        family.loss(model, batch).backward()
    trained = [parameter for parameter in homes if parameter.requires_grad]
    assert moved.up >= size, "each went to the device for its use"
    assert moved.down >= sum(parameter.nbytes for parameter in trained), "its gradient came home"
    assert {parameter.grad.device.type for parameter in trained} == {"cpu"}
    assert all(parameter.grad.isfinite().all() for parameter in trained)


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_at_home_and_move(name: str) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    with executing() as gpu:
        assert_bytes_move(family, family.build().to(gpu.device), family.batch(gpu.device), gpu)


def test_tensors_of_a_few_bytes_move_too() -> None:
    def inputs(scale: Scale, generator: torch.Generator, batch: int, length: int) -> Batch:
        return (torch.randn(batch, 4, generator=generator), torch.zeros(batch, 4))

    family = Family(
        "few bytes",
        lambda scale: nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(6))
        ),
        inputs,
        6,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        transformers=False,
    )
    with executing() as gpu:
        model = family.build().to(gpu.device)
        assert max(parameter.nbytes for parameter in model.parameters()) == 80
        assert_bytes_move(family, model, family.batch(gpu.device), gpu)


def test_where_it_is_switched_off_nothing_moves() -> None:
    """The counting is able to fail."""
    family = FAMILIES["tied"]
    with executing() as gpu:
        model, batch = family.build().to(gpu.device), family.batch(gpu.device)
        memscale.wrap(model, AGGRESSIVE.replace(enable_offloading=False), batch)
        assert_has_techniques(model, "checkpointing")
        assert at_home(model) == []
        with Moved() as moved:
            family.loss(model, batch).backward()
        assert (moved.up, moved.down) == (0, 0)
