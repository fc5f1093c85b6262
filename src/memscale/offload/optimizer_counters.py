"""Counters: what an optimizer changes in a step that is no parameter's, to be put back before the next call.

A counter is a number, a text, None or a tensor with one element, or a container of nothing but those.
Whatever else an optimizer holds may be about its parameters, and have been changed for some of them: that
is never put back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Counters"]


class Counters:
    """The counters in a dict as they are now.

    Args:
        holder: a parameter group, the attributes of an optimizer.
        counts: which of its keys are looked at.

    Example:
        >>> group = {"lr": 0.1, "step": 3}
        >>> counters = Counters(group, lambda key: True)
        >>> group.update(step=4, seen=1)
        >>> counters.put_back()
        >>> group
        {'lr': 0.1, 'step': 3}
    """

    def __init__(self, holder: dict[Any, Any], counts: Callable[[Any], bool]) -> None:
        self._holder = holder
        self._counts = counts
        self._others = {key for key, value in holder.items() if counts(key) and not _is_counter(value)}
        self._kept = {
            key: _Kept(value) for key, value in holder.items() if counts(key) and _is_counter(value)
        }

    def put_back(self) -> None:
        """As they were: new ones gone, changed ones with their values."""
        for key in [key for key in self._holder if self._counts(key) and key not in self._others]:
            if key not in self._kept and _is_counter(self._holder[key]):
                del self._holder[key]
        for key, kept in self._kept.items():
            # One that has become something else is a cache, or state that was made now: it stays.
            if _is_counter(self._holder.get(key)):
                self._holder[key] = kept.restored()


def _is_counter(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.layout is torch.strided and not value.is_inference()
    if type(value) in (list, tuple):
        return all(map(_is_counter, value))
    if type(value) is dict:
        # Other keys stand for parameters: it counts for each of them.
        return all(isinstance(key, str) and _is_counter(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, complex, str))


class _Kept:
    """A counter, and what was in it if it can be changed in place."""

    __slots__ = ("_inside", "_value", "_version")

    def __init__(self, value: Any) -> None:
        self._value = value
        self._inside: Any = None
        self._version = 0
        if isinstance(value, torch.Tensor):
            self._version = value._version
            self._inside = value.detach().clone()
        elif isinstance(value, dict):
            self._inside = {key: _Kept(each) for key, each in value.items()}
        elif isinstance(value, (list, tuple)):
            self._inside = [_Kept(each) for each in value]

    def restored(self) -> Any:
        """The same object, with what it held."""
        value, inside = self._value, self._inside
        if isinstance(value, torch.Tensor):
            if value._version != self._version:
                with torch.no_grad():
                    value.copy_(inside)
                self._version = value._version
        elif isinstance(value, dict):
            restored = {key: kept.restored() for key, kept in inside.items()}
            value.clear()
            value.update(restored)
        elif isinstance(value, list):
            value[:] = [kept.restored() for kept in inside]
        elif isinstance(value, tuple):
            for kept in inside:
                kept.restored()
        return value
