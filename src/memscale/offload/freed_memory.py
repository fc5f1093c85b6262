"""On a CPU host: memory that is freed goes back to the system, so that what a plan saves is there for others.

Note [Freed memory]
~~~~~~~~~~~~~~~~~~~
glibc keeps blocks that were freed, up to 32 MiB each, for the next request. With a fixed threshold every larger
block is a mapping of its own, which goes back to the system when its tensor dies: the peak of the process falls by
6 to 20%, for a few page faults (`memory/process.py` has the measurement of it).

The threshold is the process's, so it is fixed while at least one wrapped model trains on the CPU, and set back to
what glibc starts with when the last is detached or dropped. One thing can't be undone: glibc raises the threshold
by itself as large blocks are freed, until it is set for the first time. Where the user has set it in the environment,
it is left alone; other C libraries have no such thing.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memscale._torch import FakeTensor
from memscale._util.locks import LateLock
from memscale.memory.process import fix_malloc_threshold, restore_malloc_threshold

if TYPE_CHECKING:
    from memscale.techniques.base import ModelSite
    from memscale.techniques.undo_log import UndoLog

__all__ = ["FreedMemory", "freed_memory_returns"]

THRESHOLD = 2**20  # as good as 64 KiB, with fewer page faults

_holders = 0  # models that have it now


class FreedMemory:
    """Has freed tensors return to the system while a plan is on a model that trains on the CPU."""

    def attach(self, site: ModelSite, log: UndoLog) -> None:
        plan = site.plan
        whole = (plan.optimizer, plan.loss, plan.precision)
        does_anything = any(layer.techniques for layer in plan.layers) or any(
            each is not None for each in whole
        )
        simulated = any(isinstance(each, FakeTensor) for each in site.model.parameters())
        if site.device.type == "cpu" and does_anything and not simulated:
            log.add(_Held())


@contextlib.contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Have freed tensors return to the system for the length of a block."""
    held = _Held()
    try:
        yield
    finally:
        held.undo()


class _Held:
    """One model's share in the fixed threshold, until it is undone or dropped."""

    def __init__(self) -> None:
        _counting.leave(1)
        self.undo = weakref.finalize(self, _counting.leave, -1)
        self.undo.atexit = False


def _count(change: int) -> None:
    global _holders
    before, _holders = _holders, _holders + change
    set_by_user = "MALLOC_MMAP_THRESHOLD_" in os.environ
    set_by_user |= "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if bool(before) != bool(_holders) and not set_by_user:
        if _holders:
            fix_malloc_threshold(THRESHOLD)
        else:
            restore_malloc_threshold()


_counting: LateLock[int] = LateLock(_count)  # models are dropped in finalizers, too
