"""Tools for the tests of tiling: the largest tensor of a step, plans without an engine, runs to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memscale._torch import LightDispatchMode
from memscale.execution_plan import LossTiling, Plan
from memscale.executor import Executor

CLOSE = 1e-6
# Softmax does not change with a bias of the keys: its gradient is 0, and what there is of it is rounding.
KEY_BIASES = ("key.bias", "k_proj.bias")
ROUNDING = 1e-8  # of the largest gradient


class Tensors(LightDispatchMode):
    """Notes every operation inside its block, and the shape of every tensor with memory of its own that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append(func._schema.name.removeprefix("aten::"))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in given:
                self.shapes.append(tuple(tensor.shape))
        return result

    def largest(self, *, but: tuple[tuple[int, ...], ...] = ()) -> int:
        """Elements of the largest one that has none of the shapes `but`."""
        return max(torch.Size(shape).numel() for shape in self.shapes if shape not in but)


def tile_loss(model: nn.Module, rows: int = 5, **settings: Any) -> Executor:
    executor = Executor(model, Plan((), loss=LossTiling(rows)), **settings)
    executor.attach()
    return executor


def gradients(model: nn.Module, call: Callable[[], Tensor]) -> list[tuple[str, Tensor]]:
    """The loss, and its gradients for the parameters, from one seed."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = call()
    loss.backward()
    found = [(name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None]
    return [("loss", loss.detach()), *found]


def assert_close(
    ours: list[tuple[str, Tensor]], plain: list[tuple[str, Tensor]], tolerance: float = CLOSE
) -> None:
    assert [name for name, _ in ours] == [name for name, _ in plain]
    largest = max(float(other.double().norm()) for _, other in plain)
    for (name, one), (_, other) in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype, name
        assert one.shape == other.shape, name
        difference = (one.double() - other.double()).norm()
        allowed = tolerance * float(other.double().norm())
        if tolerance and name.endswith(KEY_BIASES):
            allowed = ROUNDING * largest
        assert difference <= allowed, name
