"""Recomputation draws the very masks of forward, whatever was drawn in between.

Reported as OLMo-core#828, and as pytorch#190758 for the compiler's way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.families import FAMILIES, Family
from support.steps import assert_same_step, step, wrapped

NAMES = ["gpt2", "bert", "t5", "vit", "whisper", "lora", "tied", "shared_block", "unet"]


class Masks(TorchDispatchMode):
    """Every mask that is drawn, in forward and in recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[torch.Tensor] = []
        self.again: list[torch.Tensor] = []
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is torch.ops.aten.native_dropout:
            self._note(result[1])
        elif packet in (torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli):
            self._note(result)
        return result

    def _note(self, mask: torch.Tensor) -> None:
        (self.again if self.in_backward else self.forward).append(mask.detach() != 0)

    def begin_backward(self) -> None:
        """And draw, so that the generator is elsewhere than forward left it."""
        self.in_backward = True
        torch.rand(1000)

    def assert_the_same_were_drawn_again(self) -> None:
        assert self.again, "nothing was recomputed"
        assert not all(mask.all() for mask in self.again), "nothing was dropped"
        for mask in self.again:
            assert any(torch.equal(mask, other) for other in self.forward)


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_equal_to_the_bit(name: str) -> None:
    family = family_of(name)
    model, plain = wrapped(family), family.build()
    with Masks() as masks:
        ours = step(family, model, between=masks.begin_backward)
    random_state = torch.get_rng_state()
    masks.assert_the_same_were_drawn_again()
    assert_same_step(ours, step(family, plain, between=lambda: torch.rand(1000)))
    assert torch.equal(torch.get_rng_state(), random_state), "backward left the generator elsewhere"


@pytest.mark.parametrize("name", ["gpt2", "tied", "shared_block"])
def test_each_of_two_passes_before_one_backward_gets_its_own_again(name: str) -> None:
    family = family_of(name)
    seen = []
    for model in (wrapped(family), family.build()):
        torch.manual_seed(3)
        with Masks() as masks:
            loss = family.loss(model, family.batch()) + 2 * family.loss(model, family.batch())
            masks.begin_backward()
            loss.backward()
        seen.append((masks, [loss, *(p.grad for p in model.parameters())]))
    (masks, ours), (plain_masks, plain) = seen
    masks.assert_the_same_were_drawn_again()
    assert not plain_masks.again
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
