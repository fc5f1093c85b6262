"""Out-of-memory errors: what they hold on to, and what to say of them.

Note [What an error holds]
~~~~~~~~~~~~~~~~~~~~~~~~~~
An error has a traceback, and a traceback has the frames of the calls that failed, with the tensors in them. To clear
the frames is not enough: a frame also has its function, and a function that was made inside another has what it shares
with that in a closure. ``nn.Module.__call__`` is such a pair: as long as the traceback is there, the input of every
module that was running is too, and with it the graph and all activations of the forward pass that failed. So the
traceback itself has to go, before a heavier plan is tried. What it says is kept in words, for the case that the error
is the user's in the end.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

__all__ = ["add_note", "free_memory"]


def free_memory(device: torch.device, *errors: BaseException) -> str:
    """Let go of all that failed calls hold: the tensors in their frames, cycles, and what the allocator caches.

    Returns:
        Where the first error came from, in words: it has no traceback any more. See Note [What an error holds].
    """
    words = [_words_of(error.__traceback__) for error in errors]
    for error in errors:
        for each in _chain(error):
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
    gc.collect()
    if device.type != "cpu":
        empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()
    return words[0] if words else ""


def _words_of(raised: TracebackType | None) -> str:
    """The lines of a traceback that are not of how torch and we call modules."""
    calls = {Path(torch.nn.modules.module.__file__)}
    ours = Path(__file__).parents[1]
    lines = [
        line
        for frame, line in zip(traceback.extract_tb(raised), traceback.format_tb(raised), strict=True)
        if Path(frame.filename) not in calls and ours not in Path(frame.filename).parents
    ]
    return "".join(lines).rstrip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__context__, each.__cause__]


def add_note(error: BaseException, note: str, came_from: str = "") -> None:
    """Say more under an error's message, and where it came from; before Python 3.11, in it."""
    if came_from:
        note = f"{note}\n  Where it came from:\n{came_from}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])
