"""Copies of an optimizer whose state waits elsewhere.

A deep copy or a pickle of an optimizer knows nothing of a place: it must hold its state beside its
parameters, or its first step would find operands on two devices. Copying and pickling both ask the object
itself for ``__reduce_ex__``, so that one attribute of the instance is enough; copies don't inherit it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from memscale.optimizer.state import MovingState

__all__ = ["copy_with_state", "copy_without"]

_REDUCE = "__reduce_ex__"


class _Reduce:
    """An optimizer's ``__reduce_ex__``, with its state as it would be if it were not kept in a place."""

    def __init__(
        self,
        optimizer: Optimizer,
        state: MovingState,
        keeper: object,
        inner: Callable[[Any], Any] | None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)  # or the optimizer would be in a cycle, and live longer
        self._keeper = keeper  # who can bring the state back lives as long as an optimizer needs it
        self.inner = inner  # of another place that keeps some of the same optimizer's state
        self.state = state

    def __call__(self, protocol: Any) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "an optimizer's own attribute was called after it was gone"
        whole = self.inner(protocol) if self.inner else type(optimizer).__reduce_ex__(optimizer, protocol)
        contents = whole[2] if isinstance(whole, tuple) and len(whole) > 2 else None
        if not isinstance(contents, dict) or not isinstance(contents.get("state"), dict):
            return whole  # a class that is copied in its own way
        contents = {key: value for key, value in contents.items() if key != _REDUCE}
        contents["state"] = self._beside_parameters(contents["state"])
        return (*whole[:2], contents, *whole[3:])

    def _beside_parameters(self, state: dict[Any, Any]) -> dict[Any, Any]:
        copy: dict[Any, Any] = defaultdict(dict) if isinstance(state, defaultdict) else {}
        with torch.no_grad():
            for key, value in state.items():
                copy[key] = self.state.copied(value, key) if isinstance(key, torch.Tensor) else value
        return copy


def copy_with_state(optimizer: Optimizer, state: MovingState, keeper: object) -> None:
    """Let copies of this optimizer get ordinary state; the optimizer keeps ``keeper`` alive."""
    attributes = vars(optimizer)
    attributes[_REDUCE] = _Reduce(optimizer, state, keeper, attributes.get(_REDUCE))


def copy_without(optimizer: Optimizer, state: MovingState) -> None:
    """Undo :func:`copy_with_state`, also under another place's."""
    outer, own = None, vars(optimizer).get(_REDUCE)
    while isinstance(own, _Reduce) and own.state is not state:
        outer, own = own, own.inner
    if not isinstance(own, _Reduce):
        return
    if outer is not None:
        outer.inner = own.inner
    elif own.inner is not None:
        vars(optimizer)[_REDUCE] = own.inner
    else:
        del vars(optimizer)[_REDUCE]
