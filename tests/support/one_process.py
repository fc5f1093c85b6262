"""`DistributedDataParallel` in a group of one process: a model, its training, and a count of what is averaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 256, 1024, 3  # rows enough for a peak in backward, where recomputing lowers it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(6)))


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


@contextmanager
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_buckets(parallel: DistributedDataParallel) -> list[int]:
    """Count the buckets of gradients that are averaged."""
    count = [0]

    def average(_, bucket):  # torch would compare annotations with classes
        count[0] += 1
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    parallel.register_comm_hook(None, average)
    return count


def train(model: nn.Module) -> list[float]:
    """Return the losses."""
    device = next(model.parameters()).device
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        loss = model(batch(step).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
