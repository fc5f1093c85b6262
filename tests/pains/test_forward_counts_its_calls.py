"""A module that counts its calls, or draws from a generator of its own, in a layer that is recomputed.

With `torch.utils.checkpoint` the count goes up twice a step, and what is computed with it is another in backward.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale.execution_plan import LayerPlan, Tiling
from memscale.executor import Executor
from memscale.techniques.forward import override_of
from memscale.testing import executing
from support.wrapping import lossless


class Dice(random.Random):
    """A generator of the user's own class."""


class Layer(nn.Module):
    """Multiplies by something that its own Python state says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.calls = 0
        self.factor: float | None = None
        self.unrelated = random.SystemRandom()  # has no state to read
        if kind == "torch":
            self.source = torch.Generator().manual_seed(3)
        elif kind == "python":
            self.source = random.Random(3)
        elif kind == "numpy":
            self.source = np.random.default_rng(3)
        elif kind == "numpy_legacy":
            self.source = np.random.RandomState(3)
        elif kind == "subclass":
            self.source = Dice(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "count":
            factor = 1.0 / self.calls
        elif self.kind == "first":
            factor = 0.5 if self.factor is None else 2.0
            self.factor = factor
        elif self.kind == "new":
            factor = 2.0 if hasattr(self, "was_called") else 0.5
            self.was_called = True
        elif self.kind == "torch":
            factor = float(torch.rand((), generator=self.source))
        else:
            factor = float(self.source.random())
        return x + torch.tanh(self.linear(x) * factor)


KINDS = ("count", "first", "new", "torch", "python", "numpy", "numpy_legacy", "subclass")
CHECKPOINTING = lossless("aggressive", enable_offloading=False, force_optimize=True)


def train(
    kind: str, config: Config | None, sample: bool = True, device: torch.device | str = "cpu"
) -> list[torch.Tensor | int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(kind) for _ in range(4)), nn.Linear(8, 2)).to(device)
    batch = torch.randn(6, 8).to(device)
    if config is not None:
        memscale.wrap(model, config, batch if sample else None)
        if sample:
            executor: Executor = model._memscale_executor
            assert any("checkpointing" in layer.techniques for layer in executor.plan.layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor | int] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        seen += [
            loss.detach().cpu(),
            *(each.grad.cpu() for each in model.parameters() if each.grad is not None),
        ]
        seen += [layer.calls for layer in model if isinstance(layer, Layer)]
    if config is not None:
        memscale.detach(model)
    seen += [len(vars(module)) for module in model.modules()]
    return seen


def assert_same(got: list[torch.Tensor | int], expected: list[torch.Tensor | int]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_layer_finds_its_attributes_as_forward_did(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING), train(kind, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_by_a_real_run_leaves_attributes_as_they_were(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING.replace(use_static_profiling=False)), train(kind, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_the_first_batch_leaves_attributes_as_they_were(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING, sample=False), train(kind, None))


def test_a_generator_made_on_a_simulated_gpu_is_found_as_forward_did() -> None:
    """There `torch.Generator` is another class."""
    with executing("1GiB", seed=0) as gpu:
        assert_same(train("torch", CHECKPOINTING, device=gpu.device), train("torch", None, device=gpu.device))


@pytest.mark.slow
def test_a_first_plan_on_a_simulated_gpu_leaves_later_ones_on_cpu_alone() -> None:
    """Most of MemScale is imported in the first `wrap`, where `torch.Generator` was another class."""
    script = """if True:
        from memscale.testing import executing
        with executing("1GiB", seed=0) as gpu:
            from pains.test_forward_counts_its_calls import CHECKPOINTING, assert_same, train
            train("count", CHECKPOINTING, device=gpu.device)
        assert_same(train("torch", CHECKPOINTING, sample=False), train("torch", None))
    """
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


class Wide(nn.Module):
    """A layer that computes each position for itself, but for its own state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)
        self.kind = kind
        self.calls = 0
        self.list: list[int] = []
        self.source = random.Random(3)
        self.state = torch.ones(())
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor: float | torch.Tensor = 1.0
        if self.kind == "count":
            self.calls += 1
            factor = 1.0 / self.calls
        elif self.kind == "list":
            self.list.append(1)
            factor = 1.0 / len(self.list)
        elif self.kind == "generator":
            factor = self.source.random()
        elif self.kind == "tensor":
            factor = self.state.to(x.device)
            self.state = self.state * 0.5
        elif self.kind == "buffer":
            factor = self.seen
            self.seen = self.seen * 0.5
        return self.down(torch.tanh(self.up(x)) * factor)


@pytest.mark.parametrize("kind", ["nothing", "count", "list", "generator", "tensor", "buffer"])
def test_a_layer_with_state_is_not_run_in_tiles(kind: str) -> None:
    """Each tile would be a call; and to find out, the layer is called once more."""
    seen = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), Wide(kind)) for _ in range(2))).double()
        if tiled:
            layers = (LayerPlan(n, (n,), ("tiling",), "", "", tiling=Tiling(16)) for n in "01")
            Executor(model, Plan(tuple(layers))).attach()
            assert (override_of(model[0][1]) is not None) == (kind == "nothing")
        x = torch.linspace(-1, 1, 2 * 32 * 32).reshape(2, 32, 32).double()
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            seen += [loss.item(), model[0][1].up.weight.grad.norm().item()]
    assert seen[:4] == pytest.approx(seen[4:], rel=1e-12)
