"""A Hugging Face model trains without its cache, and its config never says so.

Reported as trl#3891: `config.use_cache` is set to False for training, stays so, and is saved with the model,
which then generates slowly for ever after.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from support.families import FAMILIES
from support.steps import AGGRESSIVE, assert_has_techniques, step, wrapped

transformers = pytest.importorskip("transformers")

IDS = torch.arange(3, 15).reshape(2, 6)
NAMES = ["gpt2", "llama"]


def settings(model: nn.Module) -> dict[str, Any]:
    """All that is said about the model, its use of a cache included."""
    said = {"config": model.config.to_dict(), "generation": model.generation_config.to_dict()}
    assert "use_cache" in said["config"]
    return said


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.matrix(2)
def test_it_is_off_in_training_only_and_the_config_never_changes(name: str) -> None:
    family = FAMILIES[name]
    before = settings(family.build())
    assert before["config"]["use_cache"] is True
    model = wrapped(family)
    inside: list[dict[str, Any]] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: inside.append(settings(model)))

    assert settings(model) == before
    assert model(IDS).past_key_values is None, "in training there is no cache"
    assert step(family, model).regions > 0
    model.eval()
    assert settings(model) == before
    with torch.no_grad():
        assert model(IDS).past_key_values is not None, "in evaluation there is"
    model.train()
    assert model(IDS).past_key_values is None
    assert settings(model) == before
    assert inside
    assert all(said == before for said in inside)
    memscale.detach(model)
    assert settings(model) == before
    assert model(IDS).past_key_values is not None, "after detach, as the model has it by itself"


@pytest.mark.parametrize("value", [True, False])
def test_what_is_saved_in_mid_training_has_the_true_value(value: bool, tmp_path: Path) -> None:
    family = FAMILIES["gpt2"]
    model = family.build()
    model.config.use_cache = value
    memscale.wrap(model, AGGRESSIVE, family.batch())
    assert_has_techniques(model, "checkpointing")
    optimizer = torch.optim.AdamW(model.parameters())
    assert step(family, model).regions > 0
    optimizer.step()
    # Inside a step too, as a callback of a trainer may do it.
    handle = model.transformer.ln_f.register_forward_hook(
        lambda *_: model.config.save_pretrained(tmp_path / "inside")
    )
    step(family, model)
    handle.remove()
    model.save_pretrained(tmp_path / "between")

    for place in ("inside", "between"):
        assert transformers.AutoConfig.from_pretrained(tmp_path / place).use_cache is value
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "between").eval()
    with torch.no_grad():
        assert (loaded(IDS).past_key_values is not None) is value
    assert all(torch.equal(p, q) for p, q in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_generation_between_two_steps_has_its_cache(name: str) -> None:
    family, model = FAMILIES[name], wrapped(FAMILIES[name])
    assert step(family, model).regions > 0
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    model.eval()
    model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert lengths == [IDS.shape[1], 1, 1], "a token at a time, not the whole text again"
