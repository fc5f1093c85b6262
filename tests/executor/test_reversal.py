"""Attaching a plan and detaching it leaves every module exactly as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Plan
from memscale.executor import Executor
from memscale.executor.registry import LAYER_TECHNIQUES
from memscale.techniques.base import LayerSite
from support.checkpointed import checkpoint_plan, wrapped
from support.families import FAMILIES, Family
from support.pictures import assert_as_before, pictures


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys(), scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


def step(family: Family, model: nn.Module) -> None:
    family.loss(model, family.batch()).backward()
    model.zero_grad()


@pytest.mark.matrix(5)
@pytest.mark.parametrize("settings", [{}, {"chained": True}], ids=["whole", "chained"])
def test_detach_restores_every_module(family: Family, settings: dict[str, Any]) -> None:
    model = family.build()
    step(family, model)  # what a library does at the first call is not ours
    before = pictures(model)

    executor = Executor(model, checkpoint_plan(model, **settings), on_training_batch=lambda *_: None)
    executor.attach()
    attached = pictures(model)
    assert attached != before
    assert [name for name, _ in attached["parameters"]] == [name for name, _ in before["parameters"]]
    assert attached["parameters"] == before["parameters"], "the parameters are the same objects"
    executor.detach()
    assert_as_before(pictures(model), before)
    assert not executor.attached

    executor.attach()
    step(family, model)
    model.eval()
    with torch.no_grad():
        family.loss(model, family.batch())
    model.train()
    executor.replan(Plan(()))
    executor.detach()
    assert_as_before(pictures(model), before, values=not family.updates_buffers)


def test_the_pictures_show_what_is_left_behind() -> None:
    """The comparison of this file is able to fail."""
    model = FAMILIES["tied"].build()
    before = pictures(model)
    block = model.blocks[0]

    def leave_forward() -> None:
        block.forward = block.forward

    def leave_hook() -> None:
        block.register_forward_pre_hook(print, with_kwargs=True).remove()
        block._forward_pre_hooks_with_kwargs[99] = True

    def leave_flag() -> None:
        block.eval()

    def leave_frozen() -> None:
        block.qkv.weight.requires_grad_(False)

    for leave in (leave_forward, leave_hook, leave_flag, leave_frozen):
        leave()
        with pytest.raises(AssertionError):
            assert_as_before(pictures(model), before)


class Failing:
    """A technique that changes something and then fails, on the third block."""

    name = "failing"

    def unsupported_reason(self, site: LayerSite) -> str | None:
        return None

    def attach(self, site: LayerSite, log: Any) -> None:
        LAYER_TECHNIQUES["checkpointing"].attach(site, log)
        log.add_forward_pre_hook(site.modules[0], lambda *_: None)
        if site.layer.name.endswith("2"):
            raise KeyboardInterrupt


@pytest.fixture
def failing_plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setitem(LAYER_TECHNIQUES, "failing", Failing())
    return Plan(tuple(LayerPlan(f"blocks.{i}", (f"blocks.{i}",), ("failing",), "", "") for i in range(3)))


def test_a_failure_half_way_leaves_the_model_untouched(failing_plan: Plan) -> None:
    model = FAMILIES["tied"].build()
    before = pictures(model)
    executor = Executor(model, failing_plan)
    with pytest.raises(KeyboardInterrupt):
        executor.attach()
    assert_as_before(pictures(model), before)
    assert not executor.attached


def test_a_new_plan_that_fails_leaves_the_old_one(failing_plan: Plan) -> None:
    model = FAMILIES["tied"].build()
    before = pictures(model)
    wrapped(model)
    executor = model._memscale_executor
    old = executor.plan
    with pytest.raises(KeyboardInterrupt):
        executor.replan(failing_plan)
    assert executor.plan is old
    assert all("forward" in vars(block) for block in model.blocks)
    assert not any(block._forward_pre_hooks for block in model.blocks)
    executor.detach()
    assert_as_before(pictures(model), before)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerPlan("blocks.7", ("blocks.7",), (), "", ""), "'blocks.7'.*TiedModel.*make a new one"),
        (LayerPlan("norm", ("norm",), ("magic",), "", ""), "'magic' on the layer 'norm'.*checkpointing"),
    ],
    ids=["no such module", "no such technique"],
)
def test_a_plan_for_another_model_is_refused(layer: LayerPlan, message: str) -> None:
    model = FAMILIES["tied"].build()
    before = pictures(model)
    plan = Plan((*checkpoint_plan(model).layers, layer))
    with pytest.raises(WrapError, match=message):
        Executor(model, plan).attach()
    assert_as_before(pictures(model), before)


@pytest.fixture
def collected() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there already is not looked at: faster, and exact
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", ["gpt2", "cnn", "unet"])
def test_a_hundred_times_leave_nothing_behind(name: str, collected: None) -> None:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    model = FAMILIES[name].build()
    plan = checkpoint_plan(model)

    def once() -> None:
        executor = Executor(model, plan, on_training_batch=lambda *_: None)
        executor.attach()
        executor.detach()

    def alive() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        once()
    sizes = _sizes(model)
    before = alive()
    for _ in range(100):
        once()
    assert alive() == before
    assert _sizes(model) == sizes


def test_an_executor_is_no_garbage_when_it_is_dropped() -> None:
    """Nothing waits for the garbage collector: detaching frees at once."""
    model = FAMILIES["tied"].build()
    gc.collect()
    gc.disable()
    try:
        wrapped(model)
        model._memscale_executor.detach()
        assert gc.collect() == 0
    finally:
        gc.enable()


def _sizes(model: nn.Module) -> list[int]:
    return [
        len(value)
        for module in model.modules()
        for value in vars(module).values()
        if hasattr(value, "__len__")
    ]
