"""After `detach`, every module's `__dict__` is what it was before `wrap`.

A hook library that restores `forward` by assignment leaves an instance attribute behind on each module: the
class can no longer be patched, the model no longer pickled or compiled as before.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.testing import executing
from support.families import FAMILIES, Family
from support.steps import AGGRESSIVE, assert_has_techniques, step


class Opened(list[tuple[Any, Any]]):
    """The items of a dict, as they were."""


def is_same(new: Any, old: Any) -> bool:
    """Tensors, modules and hooks by identity, plain values by equality."""
    if new is old:
        return True
    if type(new) is not type(old) or isinstance(old, (torch.Tensor, nn.Module)):
        return False
    if isinstance(old, (list, tuple)):
        return len(new) == len(old) and all(map(is_same, new, old))
    if isinstance(old, weakref.ref):
        return new() is old()
    return bool(new == old)


def contents(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Each module's `__dict__` in order, containers (hooks, parameters, children) opened."""
    return {
        name: {
            key: Opened(value.items()) if isinstance(value, dict) else value
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules(remove_duplicate=False)
    }


def assert_as_before(now: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> None:
    assert list(now) == list(before)
    for name in before:
        assert list(now[name]) == list(before[name]), name
        for key, old in before[name].items():
            assert is_same(now[name][key], old), (name, key)


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.matrix(5)
def test_every_dict_is_as_before(family: Family) -> None:
    model = family.build()
    step(family, model)  # what a library does at the first call is not ours
    before = contents(model)
    memscale.wrap(model, AGGRESSIVE, family.batch())
    assert_has_techniques(model)
    with pytest.raises(AssertionError):
        assert_as_before(contents(model), before)
    assert step(family, model).regions > 0
    model.zero_grad()
    memscale.detach(model)
    assert_as_before(contents(model), before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert step(family, model).regions == 0


def test_also_after_a_block_that_raised() -> None:
    family = FAMILIES["tied"]
    model = family.build()
    before = contents(model)

    def interrupted() -> None:
        with memscale.optimize(model, config=AGGRESSIVE, sample_input=family.batch()) as executor:
            assert any(layer.techniques for layer in executor.plan.layers)
            assert any("forward" in vars(module) for module in model.modules())
            family.loss(model, family.batch())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert_as_before(contents(model), before)


def test_a_forward_of_the_users_own_stays_theirs() -> None:
    family = FAMILIES["tied"]
    model = family.build()
    calls = []
    block = model.blocks[0]
    plain = block.forward

    def mine(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return plain(x)

    block.forward = mine
    memscale.wrap(model, AGGRESSIVE, family.batch())
    assert_has_techniques(model)
    assert vars(block)["forward"] is not mine
    calls.clear()
    assert step(family, model).regions > 0
    assert len(calls) >= 2, "once in forward, and again in backward"
    memscale.detach(model)
    assert vars(block)["forward"] is mine
    assert not any("forward" in vars(module) for module in model.modules() if module is not block)


@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_offloaded_parameters_come_back_as_the_same_objects(name: str) -> None:
    family = FAMILIES[name]
    if family.transformers:
        pytest.importorskip("transformers")
    with executing() as gpu:
        model, batch = family.build().to(gpu.device), family.batch(gpu.device)
        family.loss(model, batch).backward()
        model.zero_grad()
        before = contents(model)
        memscale.wrap(model, AGGRESSIVE, batch)
        assert_has_techniques(model, "offloading")
        family.loss(model, batch).backward()
        model.zero_grad()
        memscale.detach(model)
        assert_as_before(contents(model), before)
        assert {p.device.type for p in model.parameters()} == {gpu.device.type}
