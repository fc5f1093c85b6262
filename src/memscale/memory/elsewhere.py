"""Tensors whose bytes are not in memory: those of mapped files, which the tracker leaves out.

To torch they are ordinary CPU tensors. Their pages come and go, and the system can take them back at any time: what
is in memory of them at some moment is not theirs to say, but that of whoever uses them
(`memscale.offload.mapped_parameters`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch

__all__ = ["is_elsewhere", "made_elsewhere", "mark_elsewhere"]

_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by the address of the C++ object
_making = 0


def mark_elsewhere(storage: torch.UntypedStorage) -> None:
    """Say of a storage that its bytes are not in memory; before a tracker sees it.

    Example:
        >>> x = torch.ones(2)
        >>> mark_elsewhere(x.untyped_storage())
        >>> is_elsewhere(x.untyped_storage()), is_elsewhere(torch.ones(2).untyped_storage())
        (True, False)
    """
    key = storage._cdata
    _storages[key] = weakref.ref(storage, functools.partial(_forget, key))


def is_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether a storage's bytes are not in memory."""
    if _making:
        mark_elsewhere(storage)
        return True
    found = _storages.get(storage._cdata)
    return found is not None and found() is storage


@contextlib.contextmanager
def made_elsewhere() -> Iterator[None]:
    """Whatever a tracker meets for the first time inside the block is not in memory: for simulated tensors."""
    global _making
    _making += 1
    try:
        yield
    finally:
        _making -= 1


def _forget(key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
    if _storages.get(key) is reference:
        del _storages[key]
