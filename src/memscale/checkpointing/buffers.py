"""Buffers that a forward pass changes: running statistics, moving averages, counters.

Note [Buffers of a region]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A recomputation must start from the buffers as the forward pass found them, and must not change the real ones
a second time. So the forward pass copies buffers before it runs, and the recomputation runs with copies in
place of the real ones: each module's `_buffers` dictionary is exchanged for another as long as it runs, and
then put back, so that even a buffer that the function registers, replaces or deletes leaves no trace.

A region copies every buffer before it runs: one that forward leaves alone a thousand times (an average that
begins after a warm-up) may be changed the next time, and then its value is lost. The copies live as long as
forward runs; of what has not changed they are dropped as soon as it ends. Whether a module's buffers have changed
is learned, for training and evaluation apart:

- The first call looks for a higher version or other values. The second is needed: batch norm writes its running
  statistics in a kernel that raises no version. (One module's buffers stand or fall together. Batch norm is known
  by its class too: the first values could be equal.)
- Later calls look at the versions only: to compare values, the host would wait for the device.
- A buffer that forward replaced by another tensor needs no copy: the old tensor is still what it was.

The call of a whole model (`memscale.checkpointing.calls`) is less thorough, as copies of all its large buffers would be
there when memory is short: it copies large ones only of modules that have been seen to change theirs. If another
changes, that call cannot be repeated.

A buffer of which forward changed nothing must also stay as it is until the recomputation: a new tensor under its
name is exchanged for the old one, a change in place raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memscale._torch import same_version
from memscale._util.attributes import Attributes
from memscale.errors import RecomputeError

__all__ = ["Buffers"]

SMALL_BYTES = 64 * 1024
"""A larger buffer is copied, in the call of a whole model, only if its module has been seen to change any."""

# Of each module, and of each value of `training`: does forward change its buffers?
_changes: weakref.WeakKeyDictionary[nn.Module, dict[bool, bool]] = weakref.WeakKeyDictionary()


class Buffers:
    """What forward may change of some modules, before it and after: buffers and Python attributes.

    See Note [Buffers of a region] and Note [Attributes of a region].

    Args:
        modules: Whose buffers and attributes.
        copy_all: Copy large buffers too that have not been seen to change.
    """

    __slots__ = ("_attributes", "_bare", "_owners")

    def __init__(self, modules: Sequence[nn.Module], *, copy_all: bool = True) -> None:
        self._attributes = Attributes(modules)
        with torch.no_grad():
            copies: dict[int, torch.Tensor] = {}  # a buffer shared by two modules has one copy
            self._owners = [
                _Owner(module, dict(module._buffers), copies, copy_all)
                for module in modules
                if _has_buffers(module)
            ]
        # Modules without a buffer may register one.
        self._bare = [(module, dict(module._buffers)) for module in modules if not _has_buffers(module)]

    def settle(self) -> None:
        """Forward has run: learn which modules changed their buffers, and drop the other copies."""
        self._attributes.settle()
        for owner in self._owners:
            owner.settle()
        for module, before in self._bare:
            if _has_buffers(module):
                self._owners.append(_Owner(module, before, {}, copy_all=False))
        self._bare = []

    def take_back(self) -> None:
        """Forward has failed: buffers and attributes are again as it found them.

        Raises:
            RecomputeError: A buffer's value at the beginning is not known any more.
        """
        self._attributes.take_back()
        with torch.no_grad():
            for owner in self._owners:
                owner.take_back()
        for module, before in self._bare:
            _set_buffers(module, before)

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Run with buffers (copies of them) and attributes as forward found them; leave the real ones untouched.

        Raises:
            RecomputeError: A buffer's value at forward is not known any more.
        """
        copies: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            exchanged = [(owner.module, owner.at_forward(copies)) for owner in self._owners]
        real = [(module, module._buffers) for module, buffers in exchanged if buffers is not None]
        try:
            for module, buffers in exchanged:
                if buffers is not None:
                    module.__dict__["_buffers"] = buffers
            with self._attributes.put_back():
                yield
        finally:
            for module, original in real:
                module.__dict__["_buffers"] = original


class _Owner:
    """One module's own buffers."""

    __slots__ = ("before", "changed", "copies", "lost", "module", "training", "versions")

    def __init__(
        self,
        module: nn.Module,
        before: dict[str, torch.Tensor | None],
        copies: dict[int, torch.Tensor],
        copy_all: bool,
    ) -> None:
        self.module = module
        self.training = module.training
        self.before = before
        self.versions = _versions(self.before)
        self.changed = True  # until `settle` has looked
        self.lost: str | None = None
        known = _changes.get(module, {}).get(self.training)
        self.copies = {
            name: _copy(buffer, copies)
            for name, buffer in self.before.items()
            if buffer is not None and (copy_all or known is not False or buffer.nbytes <= SMALL_BYTES)
        }

    def settle(self) -> None:
        known = _changes.setdefault(self.module, {})
        first_call = self.training not in known
        in_place = [
            name for name, version in _versions(self.before).items() if version != self.versions[name]
        ]
        if first_call and not in_place:
            in_place = [name for name, copy in self.copies.items() if _differs(copy, self.before[name])]
        known[self.training] = (
            bool(in_place) or known.get(self.training, False) or _is_batch_norm(self.module)
        )
        self.changed = known[self.training] or not _same(self.before, self.module._buffers)
        self.lost = next((name for name in in_place if name not in self.copies), None)
        if not self.changed:
            self.copies = {}

    def take_back(self) -> None:
        for name, version in _versions(self.before).items():
            if version != self.versions[name] and name not in self.copies:
                raise RecomputeError(
                    f"The buffer {name!r} of {type(self.module).__name__} was changed in place by a forward pass "
                    "that failed, for the first time after passes that left it alone, so its value before that "
                    "is not known. Set it again, for example from a checkpoint, before you go on."
                )
        for name, copy in self.copies.items():
            buffer = self.before[name]
            if buffer is not None:
                with same_version(
                    buffer
                ):  # an earlier call's graph may have it: batch norm raises no version either
                    buffer.copy_(copy)
        self.versions = _versions(self.before)
        _set_buffers(self.module, self.before)

    def at_forward(self, copies: dict[int, torch.Tensor]) -> dict[str, torch.Tensor | None] | None:
        """What `_buffers` was, for a recomputation to change; None if the real ones will do."""
        if self.lost is not None:
            raise RecomputeError(
                f"The buffer {self.lost!r} of {type(self.module).__name__} was changed in place by a forward "
                "pass, for the first time after passes that left it alone, so its value before that is not "
                "known and the pass cannot be repeated. Run the step again: the buffer is copied from now on."
            )
        if self.changed:
            return {
                name: _copy(self.copies[name], copies) if name in self.copies else buffer
                for name, buffer in self.before.items()
            }
        for name, version in _versions(self.before).items():
            if version != self.versions[name]:
                raise RecomputeError(
                    f"The buffer {name!r} of {type(self.module).__name__} was changed in place between "
                    "forward and backward, so the forward pass cannot be recomputed. Change it after "
                    "backward, or assign a new tensor instead. (Under DistributedDataParallel, two forward "
                    "passes before one backward do this: pass broadcast_buffers=False.)"
                )
        return None if _same(self.before, self.module._buffers) else dict(self.before)


def _set_buffers(module: nn.Module, buffers: dict[str, torch.Tensor | None]) -> None:
    if not _same(buffers, module._buffers):
        module._buffers.clear()
        module._buffers.update(buffers)


def _has_buffers(module: nn.Module) -> bool:
    buffers = module.__dict__.get("_buffers")  # a scripted module keeps its own elsewhere, out of reach
    return bool(buffers) and any(buffer is not None for buffer in module._buffers.values())


def _same(before: dict[str, torch.Tensor | None], now: dict[str, torch.Tensor | None]) -> bool:
    return before.keys() == now.keys() and all(now[name] is buffer for name, buffer in before.items())


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _versions(buffers: dict[str, torch.Tensor | None]) -> dict[str, int]:
    return {
        name: buffer._version
        for name, buffer in buffers.items()
        if buffer is not None and not buffer.is_inference()
    }


def _copy(buffer: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(buffer) not in copies:
        copies[id(buffer)] = buffer.detach().clone()
    return copies[id(buffer)]


def _differs(copy: torch.Tensor, buffer: torch.Tensor | None) -> bool:
    if type(buffer) is not torch.Tensor or buffer.is_meta:
        return False  # a fake tensor has no values to look at
    return copy.shape != buffer.shape or not torch.equal(copy, buffer)
