"""Running a region again, and handing out what that gives. See Note [Regions]."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import OUTSIDE_BACKWARD, at_end_of_backward
from memscale._util.trees import Tree
from memscale.checkpointing.chain import order_to_run
from memscale.checkpointing.saved import CAUSES, FREED, Holder
from memscale.errors import RecomputeError

if TYPE_CHECKING:
    from memscale.checkpointing.region import Region

__all__ = ["CAUSES", "hand_out", "recompute_outputs"]

_one_at_a_time = threading.RLock()


def hand_out(holder: Holder, task: int) -> torch.Tensor:
    """The tensor that a holder stands for, recomputed if it is not there."""
    tensor = holder.take(task)
    if tensor is not None:
        return tensor
    with _one_at_a_time:
        tensor = holder.take(task)  # another thread may have been at it
        if tensor is None:
            _recompute(holder, task)
            tensor = holder.take(task)
    if tensor is None:
        raise RecomputeError(
            f"Recomputing a checkpointed region did not reach its saved tensor {holder.index}.\n{CAUSES}"
        )
    return tensor


def _recompute(holder: Holder, task: int) -> None:
    region = holder.region
    if region.is_released:
        raise RuntimeError(FREED)
    *earlier, _ = order = order_to_run(region, task)
    try:
        for predecessor in earlier:
            recompute_outputs(predecessor, task)
        if _may_fill(region, task):
            _Rerun(region, task, only=None, to_the_end=False).run()
            _mark_filled(region, task)
        else:
            _Rerun(region, task, only=holder, to_the_end=False).run()
    except BaseException:
        for one in order:
            one.forget(task)
        raise
    if task == OUTSIDE_BACKWARD:
        for one in earlier:
            one.forget(task)


def recompute_outputs(region: Region, task: int) -> None:
    """Run a region to its end, for those chained to it, and fill its holders on the way if that is to do."""
    fill = _may_fill(region, task)
    outputs = _Rerun(region, task, only=None if fill else _NOBODY, to_the_end=True).run()
    if fill:
        _mark_filled(region, task)
    region.put_outputs(task, outputs)


def _may_fill(region: Region, task: int) -> bool:
    return task != OUTSIDE_BACKWARD and not region.is_filled(task)


def _mark_filled(region: Region, task: int) -> None:
    region.mark_filled(task)
    at_end_of_backward(functools.partial(_end_of_backward, weakref.ref(region), task))


def _end_of_backward(region: weakref.ref[Region], task: int) -> None:
    found = region()
    if found is not None:
        found.forget(task)


class _Nobody:
    """For `only`: fill no holder."""


_NOBODY = _Nobody()


class _Stop(BaseException):
    """All that was wanted is there. Not an `Exception`, so that the function does not catch it by mistake."""


class _Rerun:
    """One more run of a region's function."""

    def __init__(self, region: Region, task: int, only: Holder | _Nobody | None, to_the_end: bool) -> None:
        self._region = region
        self._task = task
        self._only = only
        self._count = 0
        self._is_done = False
        self._error: RecomputeError | None = None
        self._last = -1
        if to_the_end:
            self._last = len(region.saved)
        elif isinstance(only, Holder):
            self._last = only.index
        else:
            alive = (saved.index for saved in reversed(region.saved) if saved.holder() is not None)
            self._last = next(alive, -1)

    def run(self) -> list[torch.Tensor]:
        """Fill the holders; the tensors that the function returned, if it was run to its end."""
        region = self._region
        if not region.is_filled(self._task):
            region.conditions.check_parameters()
        args, kwargs = region.inputs.rebuild(self._task)
        kept = region.kept
        output: object = None
        with region.conditions.replay(), region.buffers.put_back(), contextlib.ExitStack() as stack:
            if kept is not None:
                stack.callback(setattr, kept, "recording", kept.recording)
                kept.recording = False  # forward may still be running: Note [Regions], early stop
                stack.enter_context(kept.recompute_mode())
            stack.enter_context(saved_tensors_hooks(self._pack, _as_it_is))
            try:
                output = region.function(*args, **kwargs)
            except (_Stop, Exception) as raised:
                if not self._is_done and self._error is None:
                    raise
                # Ours, or what the function made of it: TorchScript's interpreter makes a RuntimeError. The
                # traceback holds the frames of the function, with every tensor in them.
                raised.__traceback__ = raised.__context__ = raised.__cause__ = None
        if self._error is not None:
            raise self._error
        if not self._is_done and self._count != len(region.saved):
            raise RecomputeError(
                f"Recomputing a checkpointed region saved {self._count} tensors for backward; its forward "
                f"pass saved {len(region.saved)}.\n{CAUSES}"
            )
        return list(Tree.of(output).tensors())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        region = self._region
        index = self._count
        self._count += 1
        # Without its history, or a node that saves its own output would keep itself alive.
        plain = tensor.detach() if tensor.requires_grad else tensor
        if index >= len(region.saved):
            return plain  # more than forward saved: `run` will say so
        saved = region.saved[index]
        self._error = self._error or saved.check(tensor)
        if self._error is not None:
            raise _Stop
        holder = saved.holder()
        if holder is not None and (self._only is None or self._only is holder):
            holder.put(self._task, plain)
        if index >= self._last:
            self._is_done = True
            raise _Stop
        return plain


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    # The graph of a recomputation is used only by a function that calls backward itself.
    return tensor
