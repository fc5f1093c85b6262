"""One forward override per module: stages in their order, whoever adds them when, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from memscale.techniques.forward import ForwardOverride, ForwardStage, Stage, override_of
from memscale.techniques.undo_log import UndoLog

X = torch.ones(1, 2)
seen: list[Stage] = []


class Noting(ForwardStage):
    """Notes that it ran."""

    def __init__(self, order: Stage, *, in_evaluation: bool = False) -> None:
        self.order = order  # type: ignore[misc]
        self.in_evaluation = in_evaluation  # type: ignore[misc]

    def run(
        self, module: nn.Module, call_next: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        seen.append(self.order)
        return call_next(*args, **kwargs)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def add(module: nn.Module, *orders: Stage) -> UndoLog:
    log = UndoLog()
    for order in orders:
        log.add_stage(module, Noting(order))
    return log


@pytest.mark.parametrize(
    "orders", [list(Stage), list(reversed(Stage)), sorted(Stage, key=lambda one: one % 3)]
)
def test_stages_run_in_their_order_and_not_in_that_of_their_attachment(orders: list[Stage]) -> None:
    module = nn.Linear(2, 2)
    expected = module(X)
    before = dict(vars(module))
    log = add(module, *orders)
    assert isinstance(module.forward, ForwardOverride)
    assert torch.equal(module(X), expected)
    assert seen == list(Stage)
    log.undo()
    assert vars(module) == before


def test_with_gradients_off_only_stages_for_evaluation_run() -> None:
    module, log = nn.Linear(2, 2), UndoLog()
    log.add_stage(module, Noting(Stage.RECOMPUTE))
    log.add_stage(module, Noting(Stage.FETCH_PARAMETERS, in_evaluation=True))
    with torch.no_grad():
        module(X)
    assert seen == [Stage.FETCH_PARAMETERS]


def test_a_stage_that_was_removed_does_not_run_in_a_call_that_is_under_way() -> None:
    module, outer, inner = nn.Linear(2, 2), UndoLog(), UndoLog()

    class Removing(ForwardStage):
        order = Stage.RECOVER

        def run(
            self,
            module: nn.Module,
            call_next: Callable[..., Any],
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
        ) -> Any:
            inner.undo()
            return call_next(*args, **kwargs)

    outer.add_stage(module, Removing())
    inner.add_stage(module, Noting(Stage.RECOMPUTE))
    module(X)
    assert not seen


def test_an_instance_forward_of_the_user_is_called_and_restored() -> None:
    module = nn.Linear(2, 2)
    own = vars(module)["forward"] = lambda x: x + 1
    log = add(module, Stage.RECOMPUTE)
    assert torch.equal(module(X), X + 1)
    assert seen == [Stage.RECOMPUTE]
    log.undo()
    assert vars(module)["forward"] is own


def test_another_method_is_overridden_alike() -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.double(x)

        def double(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    block, log = Block(), UndoLog()
    log.add_stage(block, Noting(Stage.TILE), method="double")
    assert torch.equal(block(X), 2 * X)
    assert seen == [Stage.TILE]
    assert override_of(block) is None
    log.undo()
    assert "double" not in vars(block)


def test_an_override_that_is_copied_by_itself_is_the_method_of_a_plain_copy() -> None:
    module = nn.Linear(2, 2)
    log = add(module, Stage.RECOMPUTE)
    copied = copy.deepcopy(module.forward)
    assert copied.__self__ is not module
    assert torch.equal(copied(X), module(X))
    assert seen == [Stage.RECOMPUTE]
    log.undo()


def test_an_override_keeps_no_module_alive() -> None:
    module = nn.Linear(2, 2)
    log = add(module, Stage.RECOMPUTE, Stage.AUTOCAST)
    alive = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert alive() is None
    finally:
        gc.enable()
    log.undo()
