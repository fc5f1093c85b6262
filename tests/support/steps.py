"""Tools for the tests of pains: a wrapped model that is really changed, and what one training step does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale.checkpointing import region as region_module
from support.families import Batch, Family
from support.regions import LiveBytes
from support.wrapping import lossless

AGGRESSIVE = lossless("aggressive", force_optimize=True)  # tiny models gain too little for BALANCED


def plan_of(model: nn.Module) -> Plan:
    return model._memscale_executor.plan


def assert_has_techniques(model: nn.Module, technique: str | None = None) -> None:
    """A test of a technique that is not there proves nothing."""
    used = {name for layer in plan_of(model).layers for name in layer.techniques}
    assert used, plan_of(model).notes
    assert technique is None or technique in used, used


def wrapped(family: Family, config: Config = AGGRESSIVE) -> nn.Module:
    """A family's model, wrapped, and with techniques on it."""
    model = memscale.wrap(family.build(), config, family.batch())
    assert_has_techniques(model, "checkpointing")
    return model


@contextmanager
def counted_regions() -> Iterator[list[int]]:
    """A list of one number: how many recomputed regions were begun inside the block."""
    count = [0]
    init = region_module.Region.__init__

    def noted(self: region_module.Region, *args: Any, **kwargs: Any) -> None:
        count[0] += 1
        init(self, *args, **kwargs)

    region_module.Region.__init__ = noted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        region_module.Region.__init__ = init  # type: ignore[method-assign]


@dataclass(frozen=True)
class Step:
    """One training step.

    Attributes:
        loss: Its value.
        gradients: By name of the parameter; only those that got one.
        saved_bytes: Alive between forward and backward, of all that forward made.
        regions: Recomputed regions that forward began.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    saved_bytes: int
    regions: int


def step(
    family: Family,
    model: nn.Module,
    batch: Batch | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    between: Callable[[], object] = lambda: None,
) -> Step:
    """Forward inside a context, then `between`, then backward outside of it; from a known random state."""
    batch = family.batch() if batch is None else batch
    model.zero_grad()
    torch.manual_seed(11)
    with counted_regions() as regions:
        with LiveBytes() as live, context():
            loss = family.loss(model, batch)
            saved = live.now
        between()
        loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients, saved, regions[0])


def assert_same_step(ours: Step, plain: Step) -> None:
    """The same numbers to the bit, in less memory: it fails if nothing was recomputed, too."""
    assert torch.equal(ours.loss, plain.loss)
    assert ours.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name
    assert ours.regions > 0
    assert plain.regions == 0
    assert ours.saved_bytes < plain.saved_bytes
