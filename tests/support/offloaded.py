"""Tools for the tests of what leaves the device: plans made by hand, and training steps under them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, Plan, Tier
from memscale.executor import Executor
from memscale.offload.activations import Activations, OffloadActivationsStage
from memscale.offload.layer import OffloadedLayer
from memscale.offload.prefetch import Prefetcher
from memscale.profiler import find_blocks
from support.families import Batch, Family

QUIET = Config(enable_logging=False, fused_host_step=False)  # to the bit
STEPS = 2


class Tell(torch.autograd.Function):
    """The identity; tells when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, reached: threading.Event) -> torch.Tensor:
        reached.clear()
        ctx.reached = reached
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.reached.set()
        return gradient, None


def plan_of(
    model: nn.Module,
    *,
    to: Tier = "device",
    activations: bool = True,
    recomputed: bool = False,
    chained: bool = False,
    repeated_only: bool = False,
    **settings: Any,
) -> Plan:
    """The same for every block: where its parameters live, and whether what it saves goes down."""
    techniques = ("offloading", "checkpointing") if recomputed else ("offloading",)
    layers: list[LayerPlan] = []
    for block in find_blocks(model):
        if repeated_only and block.role != "repeated":
            continue
        layers.append(
            LayerPlan(
                block.name,
                tuple(block.members),
                techniques,
                "by hand",
                "for a test",
                checkpointing=Checkpointing((), chained and bool(layers)) if recomputed else None,
                offloading=Offloading(to, activations),
            )
        )
    return Plan(tuple(layers), **settings)


@contextlib.contextmanager
def attached(model: nn.Module, plan: Plan, config: Config = QUIET) -> Iterator[Executor]:
    executor = Executor(model, plan, config)
    executor.attach()
    try:
        yield executor
    finally:
        executor.detach()


def activations_of(executor: Executor) -> Activations:
    found = {
        id(stage._activations): stage._activations
        for _, stage in executor._techniques.stages()
        if isinstance(stage, OffloadActivationsStage)
    }
    (activations,) = found.values()
    return activations


def prefetcher_of(executor: Executor) -> Prefetcher:
    found = {
        id(stage.prefetcher): stage.prefetcher
        for _, stage in executor._techniques.stages()
        if isinstance(stage, OffloadedLayer)
    }
    (prefetcher,) = found.values()
    assert prefetcher is not None
    return prefetcher


def bytes_prefetched(prefetcher: Prefetcher) -> int:
    """Bytes on the device that wait for their use, where transfers run in the calling thread."""
    fetched = (transfer for layer in prefetcher._fetched.values() for _, transfer in layer.values())
    return sum(transfer.wait().nbytes for transfer in fetched)


@dataclass(frozen=True)
class Trained:
    """What some steps came to, on the CPU."""

    losses: list[float]
    gradients: list[torch.Tensor]
    parameters: list[torch.Tensor]

    def assert_equals(self, other: Trained) -> None:
        assert self.losses == other.losses
        for ours, theirs in zip(self.gradients, other.gradients, strict=True):
            assert torch.equal(ours, theirs)
        for ours, theirs in zip(self.parameters, other.parameters, strict=True):
            assert torch.equal(ours, theirs)


def train(family: Family, model: nn.Module, batch: Batch, steps: int = STEPS) -> Trained:
    """Some steps of plain SGD, with dropout where the family has it."""
    torch.manual_seed(7)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = family.loss(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    gradients = [each.grad.detach().cpu() for each in model.parameters() if each.grad is not None]
    return Trained(losses, gradients, [each.detach().cpu().clone() for each in model.parameters()])


def large_batch(family: Family, device: str | torch.device = "cpu") -> Batch:
    """Large enough that what the blocks of these tiny models save is worth a transfer."""
    return family.batch(
        device, batch_size=64 if family.name == "vit" else 16, length=_LENGTHS.get(family.name)
    )


_LENGTHS = {"gpt2": 48, "llama": 48, "bert": 48, "t5": 48}
