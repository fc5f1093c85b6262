"""Ctrl-C while a model is wrapped or detached leaves it wholly as before, or wholly detached."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, Plan
from memscale._util.interrupts import interrupts_deferred, raise_pending_interrupt
from memscale.errors import WrapError
from memscale.execution_plan import OptimizerPlan, Precision
from memscale.executor import Executor
from memscale.executor import executor as executor_module
from memscale.offload.placement import ModelPlacement
from memscale.planner.replan import follow_batch
from memscale.recovery import StepGuard
from support.every_technique import PLANS, TILED, batch, build, device_of
from support.pictures import assert_as_before, pictures

SOURCE = str(Path(memscale.__file__).parent)


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and Python leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def everything() -> Plan:
    """A plan with changes of every kind: forwards, hooks, autocast, optimizer state, parameters elsewhere."""
    layers = (PLANS["disk, recomputed"].layers[0], TILED["tiled"].layers[1], PLANS["host"].layers[2])
    return Plan(layers, precision=Precision("float16"), optimizer=OptimizerPlan(eight_bit=True))


def executor_for(model: nn.Module) -> Executor:
    return Executor(
        model,
        everything(),
        Config(enable_logging=False),
        on_training_batch=follow_batch,
        guard=StepGuard(),
    )


def ready(device: Any = "cpu") -> nn.Module:
    """A model with gradients: they are not to be lost."""
    model = build(device, torch.float32)
    model(batch(device, torch.float32)).sum().backward()
    return model


class Interrupted:
    """Runs a function with a Ctrl-C at one of the lines that it runs of MemScale."""

    def __init__(self, at: int) -> None:
        self.lines = 0
        self._at = at

    def run(self, function: Callable[[], object]) -> bool:
        """Whether there was a Ctrl-C: Python drops one that comes while an object is finalised."""
        sys.settrace(self._trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE) or frame.f_code.co_name == "interrupts_deferred":
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def lines_of(function: Callable[[], object]) -> int:
    counted = Interrupted(at=0)
    counted.run(function)
    return counted.lines


# How many lines are interrupted: each takes half a second on the virtual GPU.
LINES = pytest.mark.parametrize(
    ("device", "points"),
    [("cpu", 60), ("virtual GPU", 9), pytest.param("virtual GPU", 60, marks=pytest.mark.slow)],
)


@LINES
def test_detach_finishes_what_it_has_begun(device: str, points: int) -> None:
    with device_of(device) as where:
        model = ready(where)
        before = pictures(model)
        executor_for(model).attach()
        total = lines_of(lambda: memscale.detach(model))
        finished = interrupted = 0
        for line in range(3, total, max(1, total // points)):
            executor = executor_for(model)
            executor.attach()
            changes = len(executor._techniques)
            interrupted += Interrupted(at=line).run(lambda: memscale.detach(model))
            if executor.attached:  # not begun
                assert len(executor._techniques) == changes
                memscale.detach(model)
            else:
                finished += 1
            assert_same(model, before, where)
        assert min(finished, interrupted) > points * 2 / 3


@LINES
def test_an_interrupted_wrap_leaves_the_model_as_it_was(device: str, points: int) -> None:
    with device_of(device) as where:
        model = ready(where)
        before = pictures(model)
        executor = executor_for(model)
        total = lines_of(executor.attach)
        executor.detach()
        interrupted = 0
        for line in range(3, total, max(1, total // points)):
            executor = executor_for(model)
            interrupted += Interrupted(at=line).run(executor.attach)
            if executor.attached:
                executor.detach()  # it was over
            assert_same(model, before, where)
        assert interrupted > points * 2 / 3


def assert_same(model: nn.Module, before: dict[str, Any], device: torch.device) -> None:
    # What was on disk or on the host comes back to other memory.
    assert "_memscale_executor" not in vars(model)
    assert not any("forward" in vars(module) for module in model.modules())
    now = pictures(model)
    state = [(name, tensor) for name, tensor in now["state"]]
    assert all(torch.equal(tensor, old) for (_, tensor), (_, old) in zip(state, before["state"], strict=True))
    assert now["parameters"] == before["parameters"]
    assert all(each.device == device and each.grad is not None for each in model.parameters())
    assert all(each._model() is not model for each in executor_module._wrapped_models)


def test_a_second_detach_goes_on_where_the_first_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that is no Ctrl-C, at each of the changes and before and after the parameters come back."""
    model = ready()
    before = pictures(model)
    executor = executor_for(model)
    executor.attach()
    records = (executor._techniques, executor._hooks)
    changes = sum(map(len, records))
    executor.detach()
    assert changes > 8
    restore = ModelPlacement.restore
    for after in (False, True):
        for number in range(changes + 1):
            executor = executor_for(model)
            executor.attach()
            left = [number]

            def undo(
                change: Any, original: Callable[[], None], left: list[int] = left, after: bool = after
            ) -> None:
                left[0] -= 1
                if left[0] == -1 and not after:
                    raise KeyboardInterrupt
                original()
                if left[0] == -1 and after:
                    raise KeyboardInterrupt

            for record in (executor._techniques, executor._hooks):
                record._changes = [_Change(each, undo) for each in record._changes]
            with monkeypatch.context() as patch:
                patch.setattr(ModelPlacement, "restore", lambda homes: undo(homes, lambda: restore(homes)))
                with pytest.raises(KeyboardInterrupt):
                    memscale.detach(model)
            memscale.detach(model)
            assert_same(model, before, torch.device("cpu"))


class _Change:
    def __init__(self, change: Any, undo: Callable[[Any, Callable[[], None]], None]) -> None:
        self._change = change
        self._undo = undo

    def undo(self) -> None:
        self._undo(self._change, self._change.undo)


def test_the_whole_of_wrap() -> None:
    """Planning too, at some of the many lines that it runs."""
    model = ready()
    before, x = pictures(model), batch(dtype=torch.float32)
    config = Config(mode="aggressive", enable_logging=False)

    def wrap() -> None:
        memscale.wrap(model, config, x)

    for _ in range(2):  # the first one learns what later ones know
        total = lines_of(wrap)
        memscale.detach(model)
    for part in (0.001, 0.1, 0.5, 0.9, 0.96, 0.98, 0.99):
        assert Interrupted(at=int(total * part)).run(wrap)
        assert_same(model, before, torch.device("cpu"))


def test_an_interrupt_comes_at_the_end_of_the_block_or_where_it_is_asked_for() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with interrupts_deferred(), interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            seen.append("held back")
        seen.append("not reached")
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():  # noqa: PT012
        raise_pending_interrupt()
        signal.raise_signal(signal.SIGINT)
        raise_pending_interrupt()
        seen.append("not reached")
    assert seen == ["held back"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class TestNestedWraps:
    """Of a model and a part of it only one can be wrapped."""

    CONFIG = Config(mode="aggressive", enable_offloading=False, enable_logging=False)

    def test_a_model_with_a_wrapped_part_is_refused(self) -> None:
        model, x = nn.Sequential(build(dtype=torch.float32), nn.Tanh()), batch(dtype=torch.float32)
        before = pictures(model)
        memscale.wrap(model[0], self.CONFIG, x)
        with pytest.raises(WrapError, match=r"memscale\.detach\(model\.get_submodule\('0'\)\)"):
            memscale.wrap(model, self.CONFIG, x)
        memscale.detach(model.get_submodule("0"))
        memscale.wrap(model, self.CONFIG, x)
        memscale.detach(model)
        assert_as_before(pictures(model), before)

    def test_a_part_of_a_wrapped_model_is_refused(self) -> None:
        model, x = nn.Sequential(build(dtype=torch.float32), nn.Tanh()), batch(dtype=torch.float32)
        before = pictures(model)
        memscale.wrap(model, self.CONFIG, x)
        with pytest.raises(WrapError, match="part of a Sequential that is wrapped already"):
            memscale.wrap(model[0], self.CONFIG, x)
        memscale.detach(model)
        memscale.wrap(model[0], self.CONFIG, x)
        memscale.detach(model[0])
        assert_as_before(pictures(model), before)
