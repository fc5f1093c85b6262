"""Any `nn.Module` is checkpointed as it is: no base class, no list of names, no method to write.

Reported as pytorch-lightning#1308.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from support.families import FAMILIES, Family, Scale
from support.steps import AGGRESSIVE, assert_has_techniques, assert_same_step, step, wrapped

PLAIN = [name for name, family in FAMILIES.items() if not family.transformers]
FROM_A_LIBRARY = [name for name, family in FAMILIES.items() if family.transformers]


def check(family: Family) -> None:
    model = wrapped(family)
    assert type(model) is type(family.build())
    plain = family.build()
    for _ in range(2):  # a second step, as gradients of the first must leave nothing behind
        assert_same_step(step(family, model), step(family, plain))
    for (name, ours), (_, other) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(ours, other), name


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", PLAIN)
def test_modules_of_torch_alone(name: str) -> None:
    check(FAMILIES[name])


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", FROM_A_LIBRARY)
def test_modules_of_a_library(name: str) -> None:
    pytest.importorskip("transformers")
    check(FAMILIES[name])


class Attributes(nn.Module):
    """No list and no `nn.Sequential`: layers by name, one of them used twice, in an order of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("first", "second", "third"):
            setattr(self, name, nn.TransformerEncoderLayer(32, 4, 64, batch_first=True))
        self.out = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.third(self.first(self.second(self.first(x)))))


def test_layers_that_are_in_no_container() -> None:
    def images(scale: Scale, generator: torch.Generator, batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return (torch.randn(batch, length, 32, generator=generator), torch.zeros(batch, dtype=torch.long))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]).mean(1), batch[1])

    family = Family("attributes", lambda scale: Attributes(), images, 3, loss, transformers=False)
    model = memscale.wrap(family.build(), AGGRESSIVE, family.batch()[0])
    assert_has_techniques(model, "checkpointing")
    assert_same_step(step(family, model), step(family, family.build()))
