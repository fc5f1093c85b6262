"""The executor: attach, detach, another plan, the callback before each training pass."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale.config import Config
from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Plan
from memscale.executor import Executor, executor_of
from memscale.profiler.blocks import find_blocks
from support.checkpointed import checkpoint_plan, wrapped
from support.families import FAMILIES

PACKAGE = str(Path(memscale.__file__).parent)
X = torch.linspace(-1, 1, 24).reshape(3, 8)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def test_attach_twice_is_refused_and_detach_twice_does_nothing() -> None:
    model = sequential()
    executor = Executor(model, checkpoint_plan(model))
    assert (executor.attached, executor_of(model)) == (False, None)
    executor.attach()
    assert (executor.attached, executor_of(model)) == (True, executor)
    for again in (executor, Executor(model, executor.plan)):
        with pytest.raises(WrapError, match=r"memscale\.detach\(model\).*replan"):
            again.attach()
    executor.detach()
    executor.detach()
    assert (executor.attached, executor_of(model)) == (False, None)
    with pytest.raises(WrapError, match=r"attach\(\) first"):
        executor.replan(Plan(()))
    executor.attach()
    assert executor_of(model) is executor


def test_the_executor_is_no_submodule_and_does_not_keep_the_model() -> None:
    model = wrapped(sequential())
    executor = model._memscale_executor
    assert not isinstance(executor, nn.Module)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in sequential().named_modules()]
    assert "attached" in repr(executor)
    del model
    with pytest.raises(WrapError, match="gone"):
        executor.model  # noqa: B018


def test_suspended_is_the_plain_model(regions) -> None:
    model = sequential()
    blocks = find_blocks(model)
    wrapped(model)
    executor = model._memscale_executor

    def fail_inside() -> None:
        with executor.suspended() as plain:
            assert plain is model
            assert vars(model).keys() == vars(sequential()).keys()
            assert find_blocks(model) == blocks
            model(X)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not regions
    assert executor.attached
    model(X)
    assert len(regions) == 3


def test_the_callback_is_called_before_training_passes_only() -> None:
    model = sequential()
    calls: list[tuple[Any, ...]] = []
    executor = Executor(model, checkpoint_plan(model), on_training_batch=lambda *given: calls.append(given))
    executor.attach()
    model(X)
    assert calls == [(executor, (X,), {})]
    with torch.no_grad():
        model(X)
        model.eval()(X)
    assert len(calls) == 1
    model(X)  # it may be trained in this mode, too
    assert len(calls) == 2
    executor.on_training_batch = None
    model.train()(X)
    assert len(calls) == 2


def replanning(plan: Plan, *, once: bool = True) -> Any:
    """A callback that plans anew, and in between uses the model itself as a profiler does."""

    def callback(executor: Executor, args: Any, kwargs: Any) -> None:
        if once:
            executor.on_training_batch = None
        with executor.suspended() as model:
            model(*args, **kwargs)
        executor.model(*args, **kwargs)
        executor.replan(plan)

    return callback


@pytest.mark.parametrize("once", [True, False], ids=["once", "every time"])
def test_a_plan_made_in_the_callback_holds_for_the_same_pass(regions, once: bool) -> None:
    model = sequential()
    plan = checkpoint_plan(model)
    executor = Executor(model, Plan(()), on_training_batch=replanning(plan, once=once))
    executor.attach()
    expected = sequential()
    expected.load_state_dict(model.state_dict())
    for _ in range(2):
        regions.clear()
        output = model(X)
        assert torch.equal(output, expected(X))
        assert len(regions) >= 3
        assert executor.plan is plan
        output.sum().backward()
    executor.detach()
    assert vars(model).keys() == vars(sequential()).keys()


@pytest.mark.parametrize("name", ["gpt2", "t5", "cnn", "tied", "kwargs_only"])
def test_a_first_batch_that_replans_gives_the_same_numbers(name: str) -> None:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    family = FAMILIES[name]
    plain, model = family.build(), family.build()

    def callback(plan: Plan, executor: Executor, args: Any, kwargs: Any) -> None:
        executor.on_training_batch = None
        executor.replan(plan)

    plan = checkpoint_plan(model)
    Executor(model, Plan(()), on_training_batch=functools.partial(callback, plan)).attach()
    for each in (plain, model):
        for _ in range(2):
            torch.manual_seed(4)
            family.loss(each, family.batch()).backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
        if a.grad is not None
    )


def test_an_error_in_the_callback_reaches_the_caller_and_leaves_a_model_that_works(regions) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    model = sequential()
    executor = Executor(model, checkpoint_plan(model), on_training_batch=fail)
    executor.attach()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(X)
    executor.on_training_batch = None
    model(X).sum().backward()
    assert len(regions) == 3


def test_a_forward_put_over_ours_stays_and_ours_has_no_effect(
    regions, caplog: pytest.LogCaptureFixture
) -> None:
    model = FAMILIES["tied"].build()
    wrapped(model)
    block = model.blocks[0]
    ours = block.forward

    @functools.wraps(ours)
    def over(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    block.forward = over
    ids = FAMILIES["tied"].batch()[0]
    model(ids)
    assert len(regions) == 3
    model._memscale_executor.detach()
    assert "blocks.0.forward was replaced" in caplog.text
    assert block.forward is over
    model(ids)
    assert len(regions) == 3

    # What is left of ours is no hindrance to the next plan: their forward is run inside the new region.
    wrapped(model)
    model(ids).sum().backward()
    assert len(regions) == 6
    model._memscale_executor.detach()
    assert block.forward is over


def test_a_layer_left_alone_is_said_once_for_all_and_not_at_all_if_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = FAMILIES["tied"].build()
    model.blocks.gradient_checkpointing = True
    wrapped(model)
    assert [record.getMessage() for record in caplog.records] == [
        "No checkpointing on blocks.0, blocks.1, blocks.2: blocks has gradient checkpointing of its own "
        "switched on."
    ]
    caplog.clear()
    model._memscale_executor.detach()
    Executor(model, checkpoint_plan(model), Config(enable_logging=False)).attach()
    assert not caplog.records


def test_settings_that_name_no_operation_are_refused_when_attaching() -> None:
    model = sequential()
    with pytest.raises(ValueError, match="'addmm' names no operation"):
        Executor(model, checkpoint_plan(model, keep=("addmm",))).attach()
    assert vars(model).keys() == vars(sequential()).keys()


def test_a_layer_without_settings_is_checkpointed_whole(regions) -> None:
    model = sequential()
    Executor(model, Plan((LayerPlan("0", ("0",), ("checkpointing",), "", ""),))).attach()
    model(X).sum().backward()
    assert len(regions) == 1


@pytest.mark.slow
def test_a_call_of_a_model_without_techniques_passes_through_few_functions() -> None:
    """Of a model for which nothing was planned, with the callback on: some microseconds a call."""
    model, x = nn.Linear(1, 1), torch.ones(1, 1)
    Executor(model, Plan(()), on_training_batch=lambda *_: None).attach()
    model(x)
    entered: list[str] = []

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.append(frame.f_code.co_name)

    sys.setprofile(on_event)
    try:
        model(x)
    finally:
        sys.setprofile(None)
    assert 0 < len(entered) <= 24, entered
