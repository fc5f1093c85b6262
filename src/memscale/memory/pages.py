"""Pages of mapped tensors that are in memory for a while: trackers count them as long as that is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memscale._torch import current_dispatch_modes
from memscale.memory.tracker import MemoryTracker

__all__ = ["Pages"]

_HOST = torch.device("cpu")


class Pages:
    """Bytes of mapped tensors that are in use, from now until `leave` is called.

    Args:
        nbytes: how many.
        simulated: they are in a simulation, and only its tracker is to know.

    Example:
        >>> with MemoryTracker() as tracker:
        ...     pages = Pages(4096)
        ...     before = tracker.live_bytes("cpu")
        ...     pages.leave()
        >>> before, tracker.live_bytes("cpu")
        (4096, 0)
    """

    def __init__(self, nbytes: int, *, simulated: bool = False) -> None:
        # Private in torch (tried on 2.13): the modes that are active in this thread, the innermost last.
        active = [mode for mode in current_dispatch_modes() if isinstance(mode, MemoryTracker)]
        looking_on = active[-1:] if simulated else active
        self._leave: list[Callable[[], None]] = [
            tracker.hold(nbytes, _HOST, "pages of mapped tensors") for tracker in looking_on
        ]

    def leave(self) -> None:
        """They are given back."""
        while self._leave:
            self._leave.pop()()
