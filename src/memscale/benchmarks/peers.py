"""Other ways to train in less memory, each as its own documentation shows it, to be compared with MemScale."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.optim import AdamW, Optimizer

from memscale._torch import COMPILER_MODULES, set_activation_memory_budget
from memscale.benchmarks.models import Inputs

LEARNING_RATE = 1e-4

Step: TypeAlias = Callable[[Inputs], Tensor]
"""Trains one step on a batch and returns the loss."""


@dataclass(frozen=True)
class Peer:
    name: str
    title: str  # what the table calls it
    prepare: Callable[[nn.Module], Step]
    package: str | None = None  # what must be installed beside torch and transformers
    modules: tuple[str, ...] = ()  # what its first use imports, so that the measured peak is without
    not_simulated: str | None = None  # why the virtual GPU does not run it; None if it does
    remark: str | None = None


def loop(
    model: Callable[..., Any],
    optimizer: Optimizer,
    around_forward: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Step:
    """Return the step of the tutorials with that model and optimizer."""

    def step(inputs: Inputs) -> Tensor:
        with around_forward():
            loss: Tensor = model(**inputs).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=LEARNING_RATE)


def _plain(model: nn.Module) -> Step:
    return loop(model, _adamw(model))


def _checkpointing(model: nn.Module, **settings: bool) -> Step:
    # Called gradient_checkpointing_enable until transformers 5.23.
    enable: Any = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )
    enable(**settings)
    return loop(model, _adamw(model))


def _saving_on_cpu(model: nn.Module) -> Step:
    return loop(model, _adamw(model), save_on_cpu)


def _with_optimizer(model: nn.Module, module: str, name: str) -> Step:
    kind = getattr(importlib.import_module(module), name)
    return loop(model, kind(model.parameters(), lr=LEARNING_RATE))


def _torchao_offload(model: nn.Module) -> Step:
    kind: Any = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    return loop(model, kind(model.parameters(), AdamW, lr=LEARNING_RATE))


def _compiled(model: nn.Module, budget: float) -> Step:
    set_activation_memory_budget(budget)
    return loop(torch.compile(model), _adamw(model))


def _fsdp(model: nn.Module) -> Step:
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist: Any = torch.distributed  # the store is public, and not exported by name
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    policy = CPUOffloadPolicy(pin_memory=False)
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return loop(model, _adamw(model))


def _deepspeed(model: nn.Module) -> Step:
    # One process of its own is the whole world; it opens a port of the loopback device.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29531")
    deepspeed: Any = importlib.import_module("deepspeed")
    adam: Any = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    # Compiling its Adam flushes stdout, which a measured process has not.
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=adam(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
        )

    def step(inputs: Inputs) -> Tensor:
        loss: Tensor = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


_COMPILES = "it compiles code for the device"
_OTHER_DROPOUT = "compiled code draws other random numbers for dropout"

_ALL = (
    Peer("plain", "plain PyTorch", _plain),
    Peer("hf-checkpointing", "transformers gradient checkpointing", _checkpointing),
    Peer(
        "hf-checkpointing-offload",
        "transformers gradient checkpointing, offload=True",
        functools.partial(_checkpointing, offload=True),
    ),
    Peer("save-on-cpu", "torch.autograd.graph.save_on_cpu", _saving_on_cpu),
    Peer(
        "bnb-adamw8bit",
        "bitsandbytes AdamW8bit",
        functools.partial(_with_optimizer, module="bitsandbytes.optim", name="AdamW8bit"),
        package="bitsandbytes",
        modules=("bitsandbytes",),
        not_simulated="its kernels do not run on fake tensors",
    ),
    *(
        Peer(
            f"torchao-{name.lower()}",
            f"torchao {name}",
            functools.partial(_with_optimizer, module="torchao.optim", name=name),
            package="torchao",
            modules=("torchao.optim", *COMPILER_MODULES),
            not_simulated=_COMPILES,
        )
        for name in ("AdamW8bit", "AdamW4bit")
    ),
    Peer(
        "torchao-cpu-offload",
        "torchao CPUOffloadOptimizer",
        _torchao_offload,
        package="torchao",
        modules=("torchao.optim",),
        not_simulated="it asks for a CUDA or XPU device",
    ),
    *(
        Peer(
            f"compile-budget-{budget}",
            f"torch.compile, activation_memory_budget={budget}",
            functools.partial(_compiled, budget=budget),
            modules=COMPILER_MODULES,
            not_simulated=_COMPILES,
            remark=_OTHER_DROPOUT,
        )
        for budget in (0.5, 0.1)
    ),
    Peer(
        "fsdp2-cpu-offload",
        "FSDP2 CPUOffloadPolicy, one process",
        _fsdp,
        modules=("torch.distributed.fsdp",),
        not_simulated="it needs a process group on the device",
    ),
    Peer(
        "deepspeed-zero-offload",
        "DeepSpeed ZeRO-2 with the optimizer on the CPU",
        _deepspeed,
        package="deepspeed",
        modules=("deepspeed",),
        not_simulated="it needs a process group on the device",
    ),
)

PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}
"""Every way to train that is compared with MemScale's modes, by name; the first is the plain one."""

PLAIN = "plain"
