"""Little graphs made at random, cut into regions at random: always what the plain run gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memscale.checkpointing import run_region
from support.regions import assert_same

WIDTH = 6
WEIGHTS = 3
VALUES = 3

OPERATIONS = {
    "sin": lambda a, b, w: torch.sin(a),
    "exp": lambda a, b, w: torch.exp(torch.tanh(a)),
    "product": lambda a, b, w: torch.mm(a, torch.tanh(w)),
    "multiply": lambda a, b, w: torch.tanh(a) * b,
    "add": lambda a, b, w: a + b,
    "dropout": lambda a, b, w: nn.functional.dropout(a, 0.4),
    "in place": lambda a, b, w: (a * 1.5).relu_(),
    "view": lambda a, b, w: a.t().reshape(WIDTH, WIDTH) + b[0],
    "norm": lambda a, b, w: nn.functional.layer_norm(a, (WIDTH,), w[0]),
    "constant": lambda a, b, w: a.detach() * 0.5 + w,
    "pass": lambda a, b, w: a,
}


@dataclasses.dataclass(frozen=True)
class Operation:
    name: str
    left: int
    right: int
    weight: int
    target: int


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of the graph: operations and smaller pieces, run as a region or not."""

    body: tuple[Operation | Part, ...]
    is_region: bool
    chain: bool
    keep: tuple[str, ...]

    def run(
        self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        if plain or not self.is_region:
            return self.inside(values, weights, plain)
        return run_region(self.inside, (values, weights, plain), {}, chain=self.chain, keep=self.keep)

    def inside(
        self, values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], plain: bool
    ) -> list[torch.Tensor]:
        values = list(values)
        for step in self.body:
            if isinstance(step, Part):
                values = step.run(values, weights, plain)
            else:
                operation = OPERATIONS[step.name]
                values[step.target] = operation(values[step.left], values[step.right], weights[step.weight])
        return values


operations = st.builds(
    Operation,
    name=st.sampled_from(sorted(OPERATIONS)),
    left=st.integers(0, VALUES - 1),
    right=st.integers(0, VALUES - 1),
    weight=st.integers(0, WEIGHTS - 1),
    target=st.integers(0, VALUES - 1),
)
keeps = st.just(()) | st.sampled_from(
    [
        ("aten.mm.default",),
        ("aten.mm.default#1", "aten.exp.default"),
        ("aten.mul.Tensor", "aten.tanh.default#0"),
    ]
)


def parts(bodies: st.SearchStrategy[Operation | Part]) -> st.SearchStrategy[Part]:
    return st.builds(
        Part,
        body=st.lists(bodies, min_size=1, max_size=5).map(tuple),
        is_region=st.integers(0, 3).map(bool),
        chain=st.booleans(),
        keep=keeps,
    )


graphs = parts(st.recursive(operations, parts, max_leaves=16))


@settings(max_examples=150)
@given(
    graph=graphs,
    first_requires_grad=st.booleans(),
    retain=st.booleans(),
    twice=st.booleans(),
    used=st.integers(1, VALUES),
)
def test_any_graph_cut_anyhow(
    graph: Part, first_requires_grad: bool, retain: bool, twice: bool, used: int
) -> None:
    def run(plain: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(WEIGHTS)]
        leaf = torch.randn(WIDTH, WIDTH, requires_grad=first_requires_grad)
        values = [leaf * 1.0, leaf.detach() + 1, torch.ones(WIDTH, WIDTH)]
        outputs = graph.run(values, weights, plain)
        loss = torch.stack([output.pow(2).mean() for output in outputs[:used]]).sum()
        wanted = [tensor for tensor in (leaf, *weights) if tensor.requires_grad]
        seen = [loss.detach(), *(output.detach() for output in outputs)]
        if not loss.requires_grad:
            return seen
        torch.rand(2)
        if retain:
            seen += _present(torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True))
        if twice:
            gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
            again = sum(gradient.pow(2).sum() for gradient in _present(gradients))
            if isinstance(again, torch.Tensor) and again.requires_grad:
                loss = loss + again
        seen += _present(torch.autograd.grad(loss, wanted, allow_unused=True))
        return [*seen, torch.get_rng_state()]

    assert_same(run(plain=False), run(plain=True))


def _present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]
