"""Small models for the tests of what is observed, and plans for them that are written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor

WIDTH, LAYERS, ROWS = 64, 3, 256
PAGE, STEPS = 4096, 3


class Block(nn.Module):
    """Its weights take whole pages, so that they can live on disk; its biases are too small for that."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def batch(device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, device=device)


def moved(executor: Executor) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes up and down by what was moved and where it waits, as the report has them."""
    return {(each.what, each.tier): (each.read_bytes, each.written_bytes) for each in executor.report().moved}


def nothing(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A callback that does nothing, so that forward passes are counted."""


def plan(
    *techniques: str,
    offloading: Offloading | None = None,
    checkpointing: Checkpointing | None = None,
    optimizer: OptimizerPlan | None = None,
    flops: int = 0,
) -> Plan:
    """The same for every block, and nothing for the head."""
    layers = tuple(
        LayerPlan(
            name=f"blocks.{index}",
            members=(f"blocks.{index}",),
            techniques=techniques,
            rule="test",
            reason="every block",
            offloading=offloading,
            checkpointing=checkpointing,
            recompute_flops=flops,
        )
        for index in range(LAYERS)
    )
    return Plan(layers, predicted_peak_bytes=1000, optimizer=optimizer)


def attached(model: nn.Module, wanted: Plan) -> Executor:
    executor = Executor(model, wanted, on_training_batch=nothing)
    executor.attach()
    return executor


def fresh(wanted: Plan) -> tuple[Stack, Executor]:
    model = Stack()
    return model, attached(model, wanted)


def train(model: nn.Module, steps: int, device: torch.device | str = "cpu") -> None:
    for _ in range(steps):
        model(batch(device)).backward()
        model.zero_grad()


def parameter_bytes(model: nn.Module, least: int = 0) -> int:
    """Of the blocks; of those that are large enough."""
    return sum(p.nbytes for p in model.blocks.parameters() if p.nbytes >= least)


def recomputed_layers(model: nn.Module) -> int:
    """How many layers its plan recomputes."""
    count = sum("checkpointing" in layer.techniques for layer in model._memscale_executor.plan.layers)
    assert count > 0
    return count
