"""Checkpointing where no input of a block needs a gradient: its parameters get theirs all the same.

Reported as transformers#42489, trl#2671, peft#1142: users have to call `enable_input_require_grads()`.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.families import FAMILIES
from support.steps import assert_same_step, step, wrapped

NAMES = ["frozen_embeddings", "lora"]


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_gets_its_gradient(name: str) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = wrapped(family)
    ours = step(family, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ours.gradients.keys() == trained
    assert all(gradient.count_nonzero() for gradient in ours.gradients.values())
    assert_same_step(ours, step(family, family.build()))


@pytest.mark.parametrize("name", NAMES)
def test_no_flag_is_changed_for_it(name: str) -> None:
    """The embeddings' output needs no gradient before, so it needs none in a wrapped model."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    frozen = [name for name, parameter in family.build().named_parameters() if not parameter.requires_grad]
    model = wrapped(family)
    flags: list[bool] = []
    model.get_input_embeddings().register_forward_hook(lambda *call: flags.append(call[-1].requires_grad))
    taken = step(family, model)
    assert flags == [False]
    assert taken.regions > 0
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


def test_the_first_block_has_inputs_without_gradients() -> None:
    """The pain is there: the reentrant way loses the gradients of such a block without an error."""
    pytest.importorskip("transformers")
    block = FAMILIES["frozen_embeddings"].build().transformer.h[0]
    hidden = torch.randn(2, 3, block.ln_1.normalized_shape[0])
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        out = checkpoint(block, hidden, use_reentrant=True)
    assert not (out[0] if isinstance(out, tuple) else out).requires_grad
