"""Tools for the tests of `wrap`: samples as users give them, work and memory of one training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memscale import Config, MemoryTracker
from memscale.profiler.recorder import backward_targets
from support.families import Batch, Family

QUIET = Config(enable_logging=False, fused_host_step=False)  # to the bit
aten = torch.ops.aten


def lossless(mode: str, **fields: Any) -> Config:
    """A mode without the techniques that change numbers, and without a log."""
    off = {"use_mixed_precision": False, "use_8bit_optimizer": False, "enable_tiling": False}
    return Config(mode=mode, enable_logging=False, **{**off, "fused_host_step": False, **fields})


def call(model: nn.Module, batch: Batch) -> Any:
    """Calls a family's model as its loss does."""
    return model(**batch) if isinstance(batch, dict) else model(batch[0])


def tensors(batch: Batch) -> list[torch.Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


class Work(TorchDispatchMode):
    """Counts kernels that compute, and the floating-point operations of those that compute much."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kernels += not func.is_view and func not in (aten.detach.default, aten.alias.default)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def work_of(family: Family, model: nn.Module) -> Work:
    """What one training step computes."""
    with Work() as work:
        family.loss(model, family.batch()).backward()
    model.zero_grad()
    return work


@dataclass(frozen=True)
class Memory:
    """Of one training step with Adam's state there, as measured.

    Attributes:
        saved_bytes: What the model's forward left in use, of all that it made.
        peak_bytes: The most in use at once.
    """

    saved_bytes: int
    peak_bytes: int


def memory_of(
    family: Family, model: nn.Module, batch: Batch, tracker: MemoryTracker, device: str | torch.device = "cpu"
) -> Memory:
    """Trains two steps under a tracker that is active, and measures the second."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        family.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker.reset_peak()
    step()
    peak = tracker.peak_bytes(device)
    before = tracker.live_bytes(device)
    targets = backward_targets(call(model, batch))
    saved = tracker.live_bytes(device) - before
    del targets
    return Memory(saved, peak)


@contextmanager
def seeded(seed: int = 5) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Layer(nn.Module):
    """A small residual layer with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """A plain model of three equal layers and a head; it takes a second argument that it does not need."""

    def __init__(self, layers: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out = self.head(x) * self.scale
        return out if bias is None else out + bias
