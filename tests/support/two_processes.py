"""What each of two processes does in the test of `DistributedDataParallel`."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import memscale
from support.families import FAMILIES, Family
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions

PROCESSES = 2
STEPS = 3  # the reducer makes its buckets anew after the first

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}
CASES = [
    ("gpt2", "plain"),
    ("gpt2", "unused"),
    ("gpt2", "static"),
    ("tied", "plain"),
    ("tied", "unused"),
    ("tied", "views"),
    ("shared_block", "plain"),
    ("shared_block", "unused"),
    ("lora", "plain"),
    ("lora", "unused"),
    ("frozen_embeddings", "plain"),
]


def train(family: Family, options: dict[str, Any], rank: int, wrapped: str) -> dict[str, Any]:
    """Losses, last gradients and weights; `wrapped` is "", "inside" (before DDP) or "around" (after it)."""
    model = family.build()
    batch = family.batch(batch_size=2 + rank)
    if wrapped == "inside":
        memscale.wrap(model, AGGRESSIVE, family.batch())
    parallel: nn.Module = DistributedDataParallel(model, **options)
    if wrapped == "around":
        memscale.wrap(parallel, AGGRESSIVE, family.batch()[:1])
    if wrapped:
        assert_has_techniques(model if wrapped == "inside" else parallel, "checkpointing")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(rank)
    losses = []
    with counted_regions() as regions:
        for _ in range(STEPS):
            optimizer.zero_grad()
            # A pass whose gradients stay here, then one that is averaged: as accumulation does it.
            with parallel.no_sync() if not options.get("static_graph") else nullcontext():
                if not options.get("static_graph"):
                    family.loss(parallel, batch).backward()
            loss = family.loss(parallel, batch)
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
    return {
        "losses": losses,
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "regions": regions[0],
    }


def reentrant(family: Family) -> None:
    """What others do, and what fails: each call of a block checkpointed the reentrant way."""
    model = family.build()
    for block in model.layers:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=True)
    parallel = DistributedDataParallel(model, **OPTIONS["unused"])
    family.loss(parallel, family.batch()).backward()


def main(folder: Path, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=PROCESSES,
        timeout=datetime.timedelta(seconds=60),
    )
    results: dict[str, Any] = {}

    def attempt(name: str, function: Any, *args: Any) -> None:
        try:
            results[name] = function(*args)
        except Exception:
            results[name] = traceback.format_exc()

    for name, option in CASES:
        for wrapped in ("", "inside"):
            attempt(f"{name} {option} {wrapped}", train, FAMILIES[name], OPTIONS[option], rank, wrapped)
    attempt("tied plain around", train, FAMILIES["tied"], OPTIONS["plain"], rank, "around")
    attempt("reentrant", reentrant, FAMILIES["shared_block"])
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
