"""Adding a technique takes one package and one line in the registry, costs included.

The technique of this file saves wide activations of a block in 16 bits. Nothing else in the library knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.execution_plan import StepTime
from memscale.executor.registry import LAYER_TECHNIQUES
from memscale.profiler.profile import BlockProfile
from memscale.techniques.base import LayerSite
from memscale.techniques.cost import BlockOption, CostTerms
from memscale.techniques.forward import ForwardStage, Stage
from memscale.techniques.undo_log import UndoLog

NAME = "narrow_saves"
LAUNCH_SECONDS = 1e-6  # of the conversions of one block: more than they are worth in a small one
CONFIG = Config(enable_logging=False, enable_offloading=False, enable_checkpointing=False)


class NarrowSavesStage(ForwardStage):
    order = Stage.OFFLOAD_ACTIVATIONS

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        size = args[0].numel()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.bfloat16() if tensor.numel() > size else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
            return call_next(*args, **kwargs)


class NarrowSaves:
    name = NAME

    def options(self, block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
        if block.saved_bytes:
            half = block.saved_bytes // 2
            conversions = terms.rates.seconds(0, 0, 2 * block.saved_bytes + 2 * half)
            yield BlockOption(
                NAME,
                StepTime(transfers=conversions, overhead=LAUNCH_SECONDS),
                held_bytes=half,
                returned_bytes=half,
                reason="saved in 16 bits",
            )

    def unsupported_reason(self, site: LayerSite) -> str | None:
        return None

    def attach(self, site: LayerSite, log: UndoLog) -> None:
        (module,) = site.modules
        log.add_stage(module, NarrowSavesStage(), name=site.layer.name)


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(hidden, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(Layer(512) for _ in range(4))
        self.slim = nn.ModuleList(Layer(8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.wide, *self.slim):
            x = layer(x)
        return x


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_TECHNIQUES, NAME, NarrowSaves())


def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.usefixtures("registered")
def test_the_planner_picks_it_where_it_pays() -> None:
    plan = memscale.plan(Net(), torch.ones(4096, 16), CONFIG, hardware="RTX 3090")
    got = {layer.name for layer in plan.layers if NAME in layer.techniques}
    assert got
    assert got <= {f"wide.{index}" for index in range(4)}, "in slim layers it takes longer than it is worth"
    layer = plan.layer(min(got))
    assert layer.reason == "saved in 16 bits"
    assert layer.saved_bytes > 0
    assert layer.extra_seconds >= LAUNCH_SECONDS
    assert plan.prediction_source == "simulated"
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert any(NAME in point.label for point in plan.frontier)


@pytest.mark.usefixtures("registered")
def test_the_executor_attaches_it_and_detach_removes_it() -> None:
    model, batch = Net(), torch.randn(4096, 16)
    before = [dict(vars(module)) for module in model.modules()]
    plain = gradients(model, batch)
    memscale.wrap(model, CONFIG, batch)
    attached = gradients(model, batch)
    assert any(not torch.equal(one, other) for one, other in zip(plain, attached, strict=True))
    for one, other in zip(plain, attached, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-3)
    memscale.detach(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    for one, other in zip(plain, gradients(model, batch), strict=True):
        assert torch.equal(one, other)


def test_without_its_line_in_the_registry_nothing_has_it() -> None:
    plan = memscale.plan(Net(), torch.ones(4096, 16), CONFIG, hardware="RTX 3090")
    assert not any(layer.techniques for layer in plan.layers)
