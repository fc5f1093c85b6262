"""Plans that put a model on disk, training loops to compare, and a look at which pages are in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, OptimizerPlan, Plan, Tier
from memscale.executor import Executor
from memscale.profiler.blocks import find_blocks
from support.families import Family

QUIET = Config(enable_logging=False, fused_host_step=False)  # to the bit


def disk_plan(
    model: nn.Module,
    *,
    to: Tier = "disk",
    activations: bool = True,
    checkpointing: bool = True,
    state: Tier | None = "disk",
    bucket_bytes: int = 2**17,
) -> Plan:
    """Every block at home on disk, the repeated ones recomputed."""
    layers = []
    for block in find_blocks(model):
        recomputed = checkpointing and block.role == "repeated"
        layers.append(
            LayerPlan(
                name=block.name,
                members=block.members,
                techniques=("offloading", "checkpointing") if recomputed else ("offloading",),
                rule="test",
                reason="everything",
                offloading=Offloading(to=to, activations=activations),
                checkpointing=Checkpointing() if recomputed else None,
            )
        )
    optimizer = None if state is None else OptimizerPlan(state=state, bucket_bytes=bucket_bytes)
    return Plan(tuple(layers), optimizer=optimizer)


@contextlib.contextmanager
def on_disk(model: nn.Module, config: Config = QUIET, **settings: Any) -> Iterator[Executor]:
    executor = Executor(model, disk_plan(model, **settings), config)
    executor.attach()
    try:
        yield executor
    finally:
        executor.detach()


@dataclass
class Run:
    """What a training loop came to."""

    losses: list[float]
    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor]
    state: dict[str, Any]


Loop = Callable[[Family, nn.Module], Run]


def result(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> Run:
    gradients = [None if p.grad is None else p.grad.detach().clone().cpu() for p in model.parameters()]
    weights = [p.detach().clone().cpu() for p in model.parameters()]
    return Run(losses, gradients, weights, optimizer.state_dict())


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, **settings)


def train(family: Family, model: nn.Module, steps: int = 3) -> Run:
    """Three steps of AdamW, with dropout; the gradients of the last are left."""
    torch.manual_seed(11)
    optimizer = adamw(model)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = family.loss(model, family.batch())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return result(model, optimizer, losses)


def assert_same(one: Run, other: Run) -> None:
    """The same to the bit."""
    assert one.losses == other.losses
    for a, b in zip((*one.gradients, *one.weights), (*other.gradients, *other.weights), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert_same_state(one.state, other.state)


def assert_same_state(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.cpu(), other.cpu())
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same_state(a, b)
    else:
        assert one == other


def resident_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the pages of tensors that are in this process now, by the mappings that hold them."""
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors]
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = any(low < stop and start < high for start, stop in spans)
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total
