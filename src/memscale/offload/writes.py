"""Which memory is written to while a block of code runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memscale._torch import LightDispatchMode, written_tensors

__all__ = ["Writes"]


class Writes(LightDispatchMode):
    """Sees which memory is written to, and keeps some of it from being written to.

    Args:
        kept: Tensors that keep their values.
        rehearses: Nothing is written at all: it is on the meta device, where an operation would only take time.

    Example:
        >>> x, y, z = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        >>> with Writes([y]) as writes:
        ...     _ = x.data.fill_(1), y.fill_(1)
        >>> writes.saw(x), writes.saw(y), writes.saw(z), y.tolist()
        (True, False, False, [0.0, 0.0])
    """

    def __init__(self, kept: Iterable[torch.Tensor] = (), *, rehearses: bool = False) -> None:
        super().__init__()
        self._rehearses = rehearses
        self._kept = {_key(tensor) for tensor in kept}
        self._written: set[int] = set()
        self._lately: set[int] = set()

    def begin(self) -> None:
        """What is written to from now on is written to lately."""
        self._lately.clear()

    def saw(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to a tensor's memory."""
        return not tensor.numel() or _key(tensor) in self._written

    def saw_lately(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written to it since `begin`."""
        return _key(tensor) in self._lately

    def forget(self, tensor: torch.Tensor) -> None:
        """It has new memory, which may be where other memory was before."""
        self._written.discard(_key(tensor))
        self._lately.discard(_key(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func._schema.is_mutable:
            return func(*args, **kwargs)
        changed = list(written_tensors(func, args, kwargs))
        keys = [_key(tensor) for tensor in changed]
        is_kept = any(key in self._kept for key in keys)
        if not is_kept:
            self._written.update(keys)
            self._lately.update(keys)
        if is_kept or self._rehearses:
            return changed[0] if len(func._schema.returns) == 1 else tuple(changed)
        return func(*args, **kwargs)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
