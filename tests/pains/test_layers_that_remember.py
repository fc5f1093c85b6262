"""A layer that keeps tensors from call to call, or passes them to a later layer, outside of arguments and buffers.

A recomputation that finds the state as forward left it, and not as forward found it, has other gradients: the loss is
right and nothing is said. With `torch.utils.checkpoint` lists grow twice a step besides.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.testing import executing
from support.wrapping import lossless


class Layer(nn.Module):
    """Multiplies by something that an earlier call, or the layer before, has left."""

    def __init__(self, kind: str, board: dict[str, Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.kind = kind
        self.board = board
        self.state: Any = {
            "replaced": None,
            "in place": torch.zeros(8),
            "tuple": (None, 0),
            "list": [],
            "deque": deque(maxlen=2),
            "nested": {"states": [[]]},
            "element in place": [torch.zeros(8)],
        }.get(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.read()
        y = torch.tanh(self.linear(x))
        if before is not None:
            y = y * torch.sigmoid(before.to(x.device))
        self.write(y.mean(0))
        return x + y

    def read(self) -> torch.Tensor | None:
        if self.kind == "tuple":
            return None if self.state[0] is None else self.state[0].detach()
        if self.kind == "nested":
            return self.state["states"][-1][-1] if self.state["states"][-1] else None
        if self.kind in ("list", "deque", "element in place"):
            return self.state[-1] if self.state else None
        if self.kind.startswith("board"):
            return self.board.get("note")
        return self.state

    def write(self, value: torch.Tensor) -> None:
        if self.kind == "replaced":
            self.state = value.detach()
        elif self.kind == "in place":
            self.state = self.state.to(value.device)
            self.state.copy_(value.detach())
        elif self.kind == "tuple":
            self.state = (value, self.state[1] + 1)
        elif self.kind in ("list", "deque"):
            self.state.append(value.detach())
        elif self.kind == "nested":
            self.state["states"].append([value.detach()])
        elif self.kind == "element in place":
            self.state[0] = self.state[0].to(value.device)
            self.state[0].copy_(value.detach())
        else:
            self.board["note"] = value if self.kind == "board with history" else value.detach()


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.board: dict[str, Any] = {}
        self.layers = nn.ModuleList(Layer(kind, self.board) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        self.board.clear()
        return self.head(x)


KINDS = [
    "replaced",
    "in place",
    "tuple",
    "list",
    "deque",
    "nested",
    "element in place",
    "board",
    "board with history",
]
CHECKPOINTING = lossless("aggressive", enable_offloading=False, force_optimize=True)


def train(
    kind: str, config: Config | None, *, sample: bool = True, device: Any = "cpu"
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model(kind).to(device)
    batch = torch.randn(6, 8).to(device)
    if config is not None:
        memscale.wrap(model, config, batch if sample else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        seen += [loss, *(each.grad for each in model.parameters() if each.grad is not None)]
        seen += [leaf for layer in model.layers for leaf in leaves(layer.state)]
        seen = [each.detach().cpu().clone() for each in seen]
    if config is not None:
        plan = model._memscale_executor.plan
        assert sum("checkpointing" in layer.techniques for layer in plan.layers) >= 2
        memscale.detach(model)
    return seen


def leaves(state: Any) -> list[torch.Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(state) if isinstance(each, torch.Tensor)]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_layer_finds_what_forward_found(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING), train(kind, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_layer_on_an_accelerator_finds_what_forward_found(kind: str) -> None:
    with executing("1GiB", seed=0) as gpu:
        assert_same(train(kind, CHECKPOINTING, device=gpu.device), train(kind, None, device=gpu.device))


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_by_a_real_run_leaves_no_trace(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING.replace(use_static_profiling=False)), train(kind, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_from_the_first_batch_leaves_no_trace(kind: str) -> None:
    assert_same(train(kind, CHECKPOINTING, sample=False), train(kind, None))


def test_forwards_without_backward_do_not_pile_up() -> None:
    """A state with a history has the graph of the call before, whose regions must not have that of the one before."""
    torch.manual_seed(0)
    model, batch = Model("tuple"), torch.randn(6, 8)
    memscale.wrap(model, CHECKPOINTING, batch)
    old = []
    for _ in range(4):
        model(batch)
        old.append(torch.utils.weak.WeakTensorKeyDictionary({model.layers[0].state[0]: None}))
    assert [len(each) for each in old] == [0, 0, 0, 1]
    memscale.detach(model)
