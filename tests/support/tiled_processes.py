"""What each of two processes does in the test of a tiled head under `DistributedDataParallel`."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale.tiling import LazyLogits
from support.wrapping import Layer, lossless

WORDS, STEPS = 9000, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Layer(16) for _ in range(2))
        self.head = nn.Linear(16, WORDS)
        self.lazy = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        self.lazy += isinstance(logits, LazyLogits)
        return logits


def train(rank: int, *, wrapped: str, static: bool) -> tuple[list[torch.Tensor], int, list[str]]:
    """The weights after some steps with a loss outside of the model, how often the logits were lazy, and the log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memscale").addHandler(handler)
    torch.manual_seed(0)
    model = Net()
    ids = torch.randint(0, WORDS, (2, 512), generator=torch.Generator().manual_seed(rank))
    config = lossless("aggressive", enable_tiling=True)
    if wrapped == "inside":
        memscale.wrap(model, config.replace(enable_offloading=False, enable_logging=True), ids)
    parallel: nn.Module = DistributedDataParallel(model, static_graph=static)
    if wrapped == "around":
        memscale.wrap(parallel, config, ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.lazy = 0
    torch.manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(parallel(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    logging.getLogger("memscale").removeHandler(handler)
    return [parameter.detach().clone() for parameter in model.parameters()], model.lazy, lines


def main(folder: Path, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
    found = {
        f"{wrapped} {static}": train(rank, wrapped=wrapped, static=static)
        for wrapped, static in (
            ("", True),
            ("inside", True),
            ("inside", False),
            ("around", True),
            ("around", False),
        )
    }
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
