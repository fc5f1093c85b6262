"""Tools for the recomputation tests: run a model plainly and in regions, compare to the bit, count bytes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from memscale.checkpointing import region as region_module
from memscale.checkpointing import run_region

Forward = Callable[..., Any]


class Mlp(nn.Module):
    """Two linear layers with dropout between, which counts how often it runs."""

    def __init__(self, width: int = 8, hidden: int = 16, dropout: float = 0.5) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)
        self._runs = SimpleNamespace(count=0)  # an object: a number would be put back for a recomputation

    @property
    def calls(self) -> int:
        return self._runs.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._runs.count += 1
        return self.down(self.dropout(torch.tanh(self.up(x))))


def in_region(module: nn.Module, **options: Any) -> Forward:
    """The module's call, as a region."""
    return lambda *args, **kwargs: run_region(module, args, kwargs, modules=[module], **options)


def train(
    build: Callable[[], nn.Module],
    forward: Callable[[nn.Module], torch.Tensor],
    steps: int = 3,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> list[torch.Tensor]:
    """What a training run leaves behind: losses, gradients, buffers, weights, random states."""
    torch.manual_seed(7)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[torch.Tensor] = []
    for _ in range(steps):
        loss = forward(model)
        backward(loss)
        seen += [loss.detach()]
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        seen += [buffer.clone() for buffer in model.buffers()]
        seen += [torch.get_rng_state()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [parameter.detach() for parameter in model.parameters()]


def assert_same(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    for index, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), f"tensor {index} differs by up to {(a.double() - b.double()).abs().max()}"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages made inside its block that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._refs and id(storage) not in given:
                    self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: Any) -> None:
            del self._refs[key]
            self.now -= size

        self._refs[key] = weakref.ref(storage, gone)
        self.now += size


@contextmanager
def flops() -> Iterator[Callable[[], int]]:
    with FlopCounterMode(display=False) as counter:
        yield counter.get_total_flops


@contextmanager
def regions_alive() -> Iterator[Callable[[], int]]:
    """How many of the regions made inside the block are alive."""
    alive: list[weakref.ref[region_module.Region]] = []
    init = region_module.Region.__init__

    def noted(self: region_module.Region, *args: Any, **kwargs: Any) -> None:
        alive.append(weakref.ref(self))
        init(self, *args, **kwargs)

    region_module.Region.__init__ = noted  # type: ignore[method-assign]
    try:
        yield lambda: sum(ref() is not None for ref in alive)
    finally:
        region_module.Region.__init__ = init  # type: ignore[method-assign]
