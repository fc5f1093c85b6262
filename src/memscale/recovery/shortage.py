"""Out-of-memory errors: which they are, what they hold on to, and what to say of them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator

import torch

__all__ = ["add_note", "free_memory", "is_out_of_memory"]

_WORDS = ("out of memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out on a device or, which torch says by a plain ``RuntimeError``, on the host.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to ..."))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def free_memory(device: torch.device, *errors: BaseException) -> None:
    """Let go of all that failed calls hold: the tensors in their frames, cycles, and what the allocator caches."""
    for error in errors:
        for each in _chain(error):
            traceback.clear_frames(each.__traceback__)
    gc.collect()
    if device.type != "cpu":
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__context__, each.__cause__]


def add_note(error: BaseException, note: str) -> None:
    """Say more under an error's message; before Python 3.11, in it."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])
