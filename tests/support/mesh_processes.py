"""What each of four processes does in the test of HSDP and tensor parallelism, started by `torchrun`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import memscale
from support.sharded_processes import Model, build, ids_of, shard
from support.steps import AGGRESSIVE

MESHES = {
    "HSDP": (("replicate", 2), ("shard", 2)),
    "tensor parallel": (("tensor", 4),),
    "tensor parallel in FSDP2": (("shard", 2), ("tensor", 2)),
}


def distributed(case: str) -> Model:
    model = build()
    names, sizes = zip(*MESHES[case], strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tensor" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer.mlp, mesh["tensor"], plan)
    if case == "HSDP":
        shard(model, mesh=mesh)
    elif "shard" in names:
        shard(model, mesh=mesh["shard"])
    return model


def train(case: str, rank: int, *, wrap: bool) -> dict[str, Any]:
    model: nn.Module = distributed(case)
    ids = ids_of({"HSDP": rank, "tensor parallel": 0}.get(case, rank // 2))  # the same in a tensor's group
    if wrap:
        memscale.wrap(model, AGGRESSIVE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    for _ in range(3):
        loss = model(ids).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [
        (each.full_tensor() if isinstance(each, DTensor) else each).detach() for each in model.parameters()
    ]
    recomputations = model._memscale_executor.report().recomputations if wrap else 0
    return {"losses": losses, "weights": weights, "recomputations": recomputations}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {(case, wrap): train(case, rank, wrap=wrap) for case in MESHES for wrap in (False, True)}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
