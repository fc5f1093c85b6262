"""What each of two processes does in the tests of jobs started by `torchrun`: DDP, and a rank that fails."""

from __future__ import annotations

import datetime
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import memscale
from memscale import MemoryTracker
from memscale.planner import ranks
from support.sharded_processes import Block, build, counted_plans, ids_of, shard, two_halves, whole_batch
from support.steps import AGGRESSIVE, counted_regions

ORDERS = ["wrap, parallel, sample", "wrap, parallel", "parallel, wrap, sample", "parallel, wrap"]


class Gathering(nn.Module):
    """Gathers the outputs of all processes, as a contrastive loss does, and reads values: it takes a real run."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = build()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids.numpy()
        own = self.inside(ids)
        outputs = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(outputs, own.detach())
        outputs[dist.get_rank()] = own
        return torch.cat(outputs)


def train(model: nn.Module, rank: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    with counted_regions() as regions, MemoryTracker(model, optimizer) as tracker:
        for _ in range(3):
            with model.no_sync():  # as accumulation does it
                model(ids_of(rank)).pow(2).mean().backward()
            loss = model(ids_of(rank)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return {
        "losses": losses,
        "weights": [each.detach() for each in model.parameters()],
        "regions": regions[0],
        "peak": tracker.peak_bytes(),
    }


def parallel(order: str, rank: int, build: Callable[[], nn.Module] = build) -> dict[str, Any]:
    model = build()
    wrapped = model
    with counted_plans() as plans:
        for act in order.split(", "):
            if act == "parallel":
                model = DistributedDataParallel(model)
            elif act == "wrap":
                config = AGGRESSIVE.replace(gradient_accumulation_steps=2)  # each rank would plan anew for it
                wrapped = memscale.wrap(model, config, ids_of(rank) if "sample" in order else None)
        result = train(model, rank)
    if "wrap" in order:
        plan = wrapped._memscale_executor.plan
        techniques = sorted({name for layer in plan.layers for name in layer.techniques})
        result |= {"plan": plan.to_json(), "plans": plans[0], "techniques": techniques}
    return result


def other_model_on_rank_1(rank: int) -> dict[str, Any]:
    """As in a pipeline: a plan of its own for each."""
    model = nn.Sequential(nn.Embedding(50, 32), *(Block() for _ in range(3 + rank)))
    with counted_plans() as plans:
        memscale.wrap(model, AGGRESSIVE, ids_of(rank))
    layers = len(model._memscale_executor.plan.layers)
    model(ids_of(rank)).sum().backward()
    return {"plans": plans[0], "layers": layers}


def longer_batch_on_rank_1(rank: int) -> dict[str, Any]:
    """The first plan is that of rank 0, which is too small for what rank 1 has."""
    wrapped = memscale.wrap(build(), AGGRESSIVE)
    model = DistributedDataParallel(wrapped)
    ids = torch.randint(0, 50, (4, 64 * (1 + 3 * rank)))
    batches = []
    for _ in range(2):
        model(ids).sum().backward()
        batches.append(wrapped._memscale_executor.plan.batch)
    return {"batches": batches, "regions": wrapped._memscale_executor.report().recomputations}


def resume(case: str, rank: int, folder: Path) -> None:
    """Train, save, and train on; or train on from what an earlier job has saved."""
    model = build(dropout=0.0)
    memscale.wrap(model, AGGRESSIVE, ids_of(rank))
    model = shard(model) if "sharded" in case else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train_on() -> list[torch.Tensor]:
        losses = []
        for _ in range(3):
            loss = model(ids_of(rank)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    is_first = not (folder / "saved").exists()
    dist.barrier()
    if is_first:
        train_on()
        checkpoint.save(state_of(model, optimizer), checkpoint_id=folder / "saved")
    else:
        state = state_of(model, optimizer)
        checkpoint.load(state, checkpoint_id=folder / "saved")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    losses = train_on()
    techniques = {name for layer in inside._memscale_executor.plan.layers for name in layer.techniques}
    torch.save((losses, sorted(techniques)), folder / f"{'first' if is_first else 'second'} {rank}.pt")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def main(case: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    if case == "train":
        results: dict[str, Any] = {order: parallel(order, rank) for order in ["parallel", *ORDERS]}
        results |= {
            f"gathering, {order}": parallel(order, rank, Gathering) for order in ["parallel", *ORDERS]
        }
        results["other model"] = other_model_on_rank_1(rank)
        results["longer batch"] = longer_batch_on_rank_1(rank)
        results |= {"whole batch": whole_batch(), "two halves": two_halves(rank, DistributedDataParallel)}
        torch.save(results, folder / f"{rank}.pt")
        model = memscale.wrap(build(), AGGRESSIVE.replace(enable_logging=True), ids_of(rank))
        memscale.detach(model)
        dist.barrier()
        dist.destroy_process_group()
        return
    if case.startswith("resumes"):
        resume(case, rank, folder)
        dist.barrier()
        dist.destroy_process_group()
        return
    if case.startswith("raises"):
        wrapped = memscale.wrap(build(), AGGRESSIVE)
        model = shard(wrapped) if case.endswith("sharded") else DistributedDataParallel(wrapped)
        for step in range(3):
            if rank == 1 and step == 2:
                raise ValueError("a mistake on this rank")
            model(ids_of(rank)).sum().backward()
    model = build()
    inside = model.layers[2].mlp
    model = DistributedDataParallel(model) if case.endswith("parallel") else shard(model)
    if case == "fails to plan" and rank == 0:
        ranks.Plan.to_json = fail  # type: ignore[method-assign, assignment]
    memscale.wrap(model, AGGRESSIVE)
    for step in range(3):
        if case.startswith("runs out of memory") and rank == 1 and step == 1:
            if "backward" in case:
                inside.register_full_backward_hook(fail)
            else:
                inside.register_forward_pre_hook(fail)
        model(ids_of(rank)).sum().backward()


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory left on this rank")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
