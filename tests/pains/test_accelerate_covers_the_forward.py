"""accelerate puts mixed precision on a model by a forward of its own: before `wrap` or after it, both must work.

Over a wrapped model that forward goes on to ours. A profile that runs a copy of the model must run the copy and not,
by way of that forward, the original; a profile in which no layer is called is never taken without a word.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale
from memscale.techniques.forward import OVERRIDE
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions, plan_of

accelerate = pytest.importorskip("accelerate")

STEPS = 3


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x * scale


def build() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def batch(size: int = 64) -> torch.Tensor:
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(1))


def in_bfloat16(model: nn.Module) -> None:
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


def in_float16(model: nn.Module) -> None:
    """What accelerate does for `fp16` on a GPU, on the CPU."""
    model._original_forward = model.forward
    cast = torch.autocast("cpu", torch.float16)(model.forward.__func__)
    model.forward = MethodType(accelerate.utils.operations.convert_outputs_to_fp32(cast), model)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def train(model: nn.Module, sizes: tuple[int, ...] = (64, 64, 64)) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for size in sizes:
        output = model(batch(size))
        assert output.dtype is torch.float32
        loss = output.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("prepare", [in_bfloat16, in_float16])
@pytest.mark.parametrize("first", ["wrap", "prepare"])
def test_layers_are_planned_and_numbers_are_those_of_accelerate(first: str, prepare: Any) -> None:
    sizes = (64, 96, 32)  # the second is planned for anew
    plain = build()
    prepare(plain)
    expected = train(plain, sizes)
    assert not equal(train(build(), sizes), expected), "mixed precision shows"

    model = build()
    if first == "prepare":
        prepare(model)
    memscale.wrap(model, AGGRESSIVE.replace(use_mixed_precision=True))
    if first == "wrap":
        prepare(model)
    with counted_regions() as regions:
        assert equal(train(model, sizes), expected)
    assert regions[0] > 0
    assert_has_techniques(model, "checkpointing")
    assert "[128, 32]" in plan_of(model).batch

    before = list(model.parameters())
    memscale.detach(model)
    assert all(map(torch.equal, before, plain.parameters()))
    assert OVERRIDE not in vars(model)
    assert not any("forward" in vars(each) for each in model.blocks)
    assert torch.equal(model(batch()), plain(batch()))


def test_it_goes_quietly(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    memscale.wrap(model, AGGRESSIVE)
    in_bfloat16(model)
    with caplog.at_level(logging.WARNING, "memscale"):
        train(model)
        memscale.detach(model)
    assert not caplog.records


def test_a_copy_of_the_model_calls_itself() -> None:
    model = build()
    memscale.wrap(model, AGGRESSIVE, batch())
    in_bfloat16(model)
    expected = model(batch())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with counted_regions() as regions:
        assert torch.equal(twin(batch()), expected)
    assert regions[0] > 0


def test_unwrapping_by_accelerate_leaves_the_plan() -> None:
    plain, model = build(), build()
    expected = train(plain)
    memscale.wrap(model, AGGRESSIVE, batch())
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(model)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with counted_regions() as regions:
        assert equal(train(model), expected)
    assert regions[0] > 0
    memscale.detach(model)
    assert torch.equal(model(batch()), plain(batch()))


def test_a_sequential_with_slices_is_covered_too() -> None:
    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(32, 32), nn.GELU(), nn.Tanh())))

    sizes = (64, 96)
    plain, model = layers(), layers()
    in_bfloat16(plain)
    memscale.wrap(model, AGGRESSIVE, batch())
    assert any("checkpointing" in layer.techniques and layer.members[1:] for layer in plan_of(model).layers)
    accelerate.state.AcceleratorState._reset_state(True)
    in_bfloat16(model)
    with counted_regions() as regions:
        assert equal(train(model, sizes), train(plain, sizes))
    assert regions[0] > 0


def test_a_forward_that_refers_to_the_original_model_is_profiled_by_a_real_run() -> None:
    model = build()
    forward = model.forward
    model.forward = lambda x: forward(x)  # in a copy of the model this calls the original
    memscale.wrap(model, AGGRESSIVE)
    expected = train(build(), (64, 96))
    with counted_regions() as regions:
        assert equal(train(model, (64, 96)), expected)
    assert regions[0] > 0
    assert_has_techniques(model, "checkpointing")
    assert any("calls none of its layers" in note for note in plan_of(model).notes)


def test_a_step_that_calls_no_layer_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.linear(x, self.first.weight), self.second.weight)

    with caplog.at_level(logging.INFO, "memscale"):
        memscale.wrap(Functional(), AGGRESSIVE.replace(enable_logging=True), batch())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("calls none of the model's 2 layers" in text for text in warnings)
