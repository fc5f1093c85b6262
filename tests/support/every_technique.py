"""One small model and a plan for each technique, for tests of loops that differentiate in unusual ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memscale import Config, Plan
from memscale.execution_plan import (
    Checkpointing,
    LayerPlan,
    LossTiling,
    Offloading,
    OptimizerPlan,
    Precision,
    Tiling,
)
from memscale.executor import Executor
from memscale.testing import executing

WIDTH = 16
VOCABULARY = 24


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def build(device: Any = "cpu", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)).to(device, dtype)


def batch(device: Any = "cpu", dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, 2 * 7 * WIDTH, dtype=dtype).reshape(2, 7, WIDTH).to(device)


def _plan(*techniques: str, chained: bool = False, keep: tuple[str, ...] = (), **fields: Any) -> Plan:
    def layer(name: str) -> LayerPlan:
        checkpointing = Checkpointing(keep, chained=chained and name != "0")
        extra = {**fields, "checkpointing": checkpointing} if "checkpointing" in techniques else fields
        return LayerPlan(name, (name,), techniques, "-", "-", **extra)

    return Plan(tuple(map(layer, "012")))


HOST, DISK = Offloading("host"), Offloading("disk")
PLANS = {
    "checkpointing": _plan("checkpointing"),
    "kept products": _plan("checkpointing", keep=("aten.addmm.default",)),
    "chained": _plan("checkpointing", chained=True),
    "host": _plan("offloading", offloading=HOST),
    "host, recomputed": _plan("offloading", "checkpointing", offloading=HOST),
    "disk": _plan("offloading", offloading=DISK),
    "disk, recomputed": _plan("offloading", "checkpointing", offloading=DISK),
    "activations": _plan("offloading", offloading=Offloading("device", activations=True)),
    "8-bit": Plan((), optimizer=OptimizerPlan(eight_bit=True)),
}
TILED = {
    "tiled": _plan("tiling", tiling=Tiling(5)),
    "tiled, recomputed": _plan("tiling", "checkpointing", tiling=Tiling(5)),
    "tiled, host": _plan("tiling", "offloading", tiling=Tiling(5), offloading=HOST),
    "tiled loss": Plan((), loss=LossTiling(5)),
}
BF16 = Plan(PLANS["checkpointing"].layers, precision=Precision("bfloat16"))


@contextmanager
def on(model: nn.Module, plan: Plan, *, asynchronous: bool = False) -> Iterator[Executor]:
    """Put a plan on a model for the length of a block."""
    executor = Executor(
        model, plan, Config(enable_logging=False, async_offload=asynchronous, fused_host_step=False)
    )
    executor.attach()
    try:
        yield executor
    finally:
        executor.detach()


@contextmanager
def device_of(name: str) -> Iterator[torch.device]:
    """The CPU, or a virtual GPU."""
    if name == "cpu":
        yield torch.device("cpu")
        return
    with executing("1GiB") as gpu:
        yield gpu.device


def off_by(ours: list[Tensor], plain: list[Tensor]) -> float:
    """The largest difference, in parts of the largest number of each tensor."""
    pairs = zip(ours, plain, strict=True)
    return max(float((a.cpu() - b.cpu()).abs().max() / b.cpu().abs().max()) for a, b in pairs)
