"""Recomputation runs under the autocast of forward, though backward runs outside of it.

Reported as pytorch#141896 and DeepSpeed#8148: "Recomputed values for the following tensors have different
metadata", as tensors come out in 32 bits instead of 16, or as a mixture of experts routes differently.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn

import memscale
from support.families import FAMILIES, Family
from support.steps import AGGRESSIVE, assert_has_techniques, assert_same_step, step, wrapped

bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
NAMES = ["gpt2", "llama", "mixtral", "t5", "frozen_embeddings", "lora", "tied", "unet"]


def note_types(model: nn.Module) -> Counter[tuple[str, torch.dtype]]:
    """Counts the types of results by layer, in recomputation as well."""
    seen: Counter[tuple[str, torch.dtype]] = Counter()

    def note(name: str, out: object) -> None:
        if isinstance(out, torch.Tensor):
            seen[name, out.dtype] += 1

    for name, module in model.named_modules():
        if next(module.children(), None) is None:
            module.register_forward_hook(lambda _, __, out, name=name: note(name, out))
    return seen


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


@pytest.mark.matrix(3)
@pytest.mark.parametrize("name", NAMES)
def test_backward_outside_of_autocast_recomputes_inside_of_it(name: str) -> None:
    family = family_of(name)
    plain_model, model = family.build(), wrapped(family)
    plain_types, types = note_types(plain_model), note_types(model)
    plain, ours = step(family, plain_model, context=bfloat16), step(family, model, context=bfloat16)
    assert_same_step(ours, plain)
    assert torch.bfloat16 in {kind for _, kind in types}
    assert types.keys() == plain_types.keys()
    assert types.total() > plain_types.total()
    exact = step(family, family.build())
    assert not torch.equal(ours.loss, exact.loss), "autocast had no effect"


@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_backward_inside_of_autocast_recomputes_outside_of_it(name: str) -> None:
    family = family_of(name)
    results = []
    for model in (wrapped(family), family.build()):
        types = note_types(model)
        with bfloat16():
            results.append(step(family, model, context=functools.partial(bfloat16, enabled=False)))
        assert {kind for _, kind in types} == {torch.float32}
    assert_same_step(*results)


def test_a_part_that_leaves_autocast_by_itself() -> None:
    """A block that is half in 16 bits and half in 32 is so again."""
    family = FAMILIES["tied"]

    class InFull(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with bfloat16(enabled=False):
                return self.inner(x.float())

    def changed(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.mlp = InFull(block.mlp)
        return model

    model = memscale.wrap(changed(family.build()), AGGRESSIVE, family.batch())
    assert_has_techniques(model, "checkpointing")
    types = note_types(model)
    ours = step(family, model, context=bfloat16)
    assert_same_step(ours, step(family, changed(family.build()), context=bfloat16))
    assert {kind for name, kind in types if name == "blocks.0.mlp.inner.0"} == {torch.float32}
    assert {kind for name, kind in types if name == "blocks.0.qkv"} == {torch.bfloat16}
