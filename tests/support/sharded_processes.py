"""What each of two processes does in the test of FSDP2 (`fully_shard`), started by `torchrun`."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import memscale
from memscale import Plan, api
from memscale.errors import WrapError
from memscale.execution_plan import Checkpointing, LayerPlan, Precision, Tiling
from memscale.executor import Executor
from memscale.memory.tracker import MemoryTracker
from memscale.planner import replan
from support.steps import AGGRESSIVE, counted_regions

WIDTH, STEPS = 32, 4
ORDERS = [
    f"{order}, {'sample' if sample else 'first batch'}, {reshard}"
    for order in ("shard, wrap", "wrap, shard")
    for sample in (True, False)
    for reshard in ("reshard", "keep", "default")
]
RESHARD = {"reshard": True, "keep": False, "default": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {},
    "on host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}
TECHNIQUES = {
    "kept products": (("checkpointing",), {"checkpointing": Checkpointing(("aten.addmm.default",))}, None),
    "tiled": (("tiling", "checkpointing"), {"tiling": Tiling(3)}, None),
    "autocast": (("checkpointing",), {}, Precision("bfloat16")),
}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.LayerNorm(WIDTH), Mlp(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).clone()


def build(*, dropout: float = 0.1, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype)
    for layer in model.layers:
        layer.dropout.p = dropout
    return model


def ids_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(1 + rank))


def shard(model: Model, **options: Any) -> Model:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, rank: int, *, accumulated: bool = False) -> dict[str, Any]:
    """Losses and weights, and the most memory in use in one of the last two steps.

    The lesser of both: the threads of the collectives may release a buffer late.
    """
    ids = ids_of(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses, peaks = [], []
    with counted_regions() as regions:
        for step in range(STEPS):
            if step == STEPS - 2:
                gc.collect()
                tracker = MemoryTracker(model, optimizer, ids)
                tracker.__enter__()
            for part in range(2 if accumulated else 1):
                if accumulated:
                    model.set_requires_gradient_sync(part == 1)
                loss = model(ids).float().pow(2).mean()
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if step >= STEPS - 2:
                peaks.append(tracker.peak_bytes())
                tracker.reset_peak()
    tracker.__exit__(None, None, None)
    weights = [each.detach().full_tensor() for each in model.parameters()]
    return {"losses": losses, "weights": weights, "peak": min(peaks), "regions": regions[0]}


@contextmanager
def counted_plans() -> Iterator[list[int]]:
    """How many plans this process makes, structure alone left out."""
    count = [0]
    make = api.make_plan

    def counted(model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Plan:
        count[0] += sample is not None
        return make(model, sample, *args, **kwargs)

    with mock.patch.object(api, "make_plan", counted), mock.patch.object(replan, "make_plan", counted):
        yield count


def wrapped(order: str, rank: int) -> dict[str, Any]:
    *first, sample, reshard = order.split(", ")
    model = build()
    with counted_plans() as plans:
        for act in first:
            if act == "shard":
                shard(model, reshard_after_forward=RESHARD[reshard])
            else:
                memscale.wrap(model, AGGRESSIVE, ids_of(rank) if sample == "sample" else None)
        result = train(model, rank)
    executor: Executor = model._memscale_executor
    result |= {
        "plan": executor.plan.to_json(),
        "plans": plans[0],
        "predicted": (executor.plan.baseline_peak_bytes, executor.plan.predicted_peak_bytes),
        "techniques": sorted({name for layer in executor.plan.layers for name in layer.techniques}),
    }
    memscale.detach(model)
    model(ids_of(rank)).sum().backward()  # still FSDP2's
    return result


def plain(reshard: str, rank: int) -> dict[str, Any]:
    model = build()
    shard(model, reshard_after_forward=RESHARD[reshard])
    return train(model, rank)


def with_option(option: str, rank: int, *, wrap: bool) -> dict[str, Any]:
    model = build()
    shard(model, **OPTIONS[option])
    if wrap:
        memscale.wrap(model, AGGRESSIVE)
    return train(model, rank, accumulated=option == "accumulated")


def with_technique(name: str, rank: int, *, attach: bool) -> dict[str, Any]:
    techniques, fields, precision = TECHNIQUES[name]
    model = build(dtype=torch.float32 if precision else torch.float64)
    shard(model)
    names = [f"layers.{index}" for index in range(4)]
    layers = tuple(LayerPlan(each, (each,), techniques, "", "", **fields) for each in names)
    if attach:
        Executor(model, Plan(layers, precision=precision)).attach()
        return train(model, rank)
    context = torch.autocast("cpu", torch.bfloat16, enabled=precision is not None, cache_enabled=False)
    with context:
        return train(model, rank)


def gathered_in_parts(rank: int) -> list[str]:
    """The reasons of a plan for layers that FSDP2 gathers in parts."""
    model = build()
    for layer in model.layers:
        fully_shard(layer.mlp)
    shard(model)
    memscale.wrap(model, AGGRESSIVE, ids_of(rank))
    train(model, rank)
    return [layer.reason for layer in model._memscale_executor.plan.layers if layer.name.startswith("layers")]


def whole_batch() -> list[torch.Tensor]:
    """Losses of one process with the batches of both."""
    model = build(dropout=0.0, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.cat([ids_of(0), ids_of(1)])).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def two_halves(rank: int, distribute: Callable[[Model], nn.Module] = shard) -> list[torch.Tensor]:
    """The same in two processes, wrapped: the mean of their losses."""
    model = distribute(build(dropout=0.0, dtype=torch.float64))
    memscale.wrap(model, AGGRESSIVE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(ids_of(rank)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / 2)
    return losses


def flattened(rank: int) -> list[str]:
    """What `wrap` and the first batch say of a model under FSDP1."""
    found = []
    for wraps_first in (False, True):
        for keeps_names in (False, True):
            model = build()
            inside = memscale.wrap(model, AGGRESSIVE) if wraps_first else model
            policy = ModuleWrapPolicy({Block})
            model = FullyShardedDataParallel(
                inside, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=keeps_names
            )
            try:
                model(ids_of(rank)) if wraps_first else memscale.wrap(model, AGGRESSIVE)
            except WrapError as error:
                found.append(str(error))
    return found


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results: dict[str, Any] = {}

    def attempt(name: str, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            results[name] = function(*args, **kwargs)
        except Exception:
            results[name] = traceback.format_exc()

    for reshard in RESHARD:
        attempt(f"plain, {reshard}", plain, reshard, rank)
    for order in ORDERS:
        attempt(order, wrapped, order, rank)
    for option in OPTIONS:
        attempt(f"plain, {option}", with_option, option, rank, wrap=False)
        attempt(option, with_option, option, rank, wrap=True)
    for name in TECHNIQUES:
        attempt(f"plain, {name}", with_technique, name, rank, attach=False)
        attempt(name, with_technique, name, rank, attach=True)
    attempt("in parts", gathered_in_parts, rank)
    attempt("flattened", flattened, rank)
    attempt("whole batch", whole_batch)
    attempt("two halves", two_halves, rank)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
