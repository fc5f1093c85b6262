"""Prefetching: while a layer computes, the parameters of the next ones are copied to the device.

Note [Prefetching]
~~~~~~~~~~~~~~~~~~
Layers are reached in the same order in every step. So the order of the last forward pass, and that of the last
backward pass, say what comes next; before the first pass the plan's order does. When a layer is reached, the next
`prefetch_depth` of that order are fetched, if they are not yet.

*Never wrong.* What was fetched is a guess: a layer takes its copy if it is there and its home has not changed since
(by its version counter and its memory), and else fetches by itself. Nothing is fetched across the end of a pass:
between backward and the next forward the optimizer changes every parameter.

*Never left behind.* A layer that was not expected, an error in a layer, the end of a pass and the beginning of the
next drop what was fetched and not used.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from memscale._torch import OUTSIDE_BACKWARD, at_end_of_backward, graph_task_id, is_fake
from memscale.tiers.engine import Engine, Lane, Transfer

__all__ = ["Layer", "Prefetcher"]


class Layer(Protocol):
    """A layer whose parameters are on the host."""

    def needs(self, *, in_backward: bool) -> Sequence[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters that it will copy to the device when it is reached, and in which type."""

    def copy_to_device(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device, as it computes with them."""


class Prefetcher:
    """Prefetches working copies. See Note [Prefetching].

    Args:
        engine: Who moves them.
        device: Where to.
        forward: The layers in the order in which forward is thought to reach them.
        backward: The same for backward.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        forward: Sequence[Layer],
        backward: Sequence[Layer],
    ) -> None:
        self.engine = engine
        self._device = device
        self._forward = _Route(forward)
        self._backward = _Route(backward)
        self._task = OUTSIDE_BACKWARD
        self._fetched: dict[int, _Fetched] = {}  # by the layer's id
        self._lock = threading.RLock()  # backward runs in threads of its own

    @property
    def bytes_prefetched(self) -> int:
        """Bytes that were prefetched, or are being, and wait for their use."""
        return sum(fetched.nbytes for fetched in self._fetched.values())

    # ------------------------------------------------------------------ passes

    def begin_forward(self) -> None:
        """Prefetch the first layers: the model is called."""
        with self._lock:
            self._forward.begin()
            self._fetch(self._forward.next(self.engine.depth), in_backward=False)

    def end_forward(self, *, complete: bool) -> None:
        """Drop what was not used; if the call was complete, its order is learnt."""
        with self._lock:
            self._forward.end(learn=complete)
            self._fetched.clear()

    def begin_backward(self) -> None:
        """Prefetch the last layers: backward has reached the model's output."""
        with self._lock:
            if self._enter(graph_task_id()):
                self._fetch(self._backward.next(self.engine.depth), in_backward=True)

    def forget(self) -> None:
        """Drop what is prefetched: something went wrong."""
        with self._lock:
            self._fetched.clear()

    def undo(self) -> None:
        """Drop what is fetched when another plan is attached: a graph of a failed pass may hold this."""
        self.forget()

    def _end_backward(self, task: int) -> None:
        with self._lock:
            if task == self._task:
                self._task = OUTSIDE_BACKWARD
                self._backward.end(learn=True)
                self._fetched.clear()

    def _enter(self, task: int) -> bool:
        """Begin a backward pass, if it is a new one; returns whether it is."""
        if task in (OUTSIDE_BACKWARD, self._task):
            return False
        self._task = task
        self._backward.begin()
        at_end_of_backward(functools.partial(_after_backward, weakref.ref(self), task))
        return True

    # ------------------------------------------------------------------ layers

    def take(self, layer: Layer, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the values of a parameter on the device, if they were prefetched and are still right.

        Raises:
            TransferError: They could not be fetched; its cause is chained.
        """
        with self._lock:
            fetched = self._fetched.get(id(layer))
            copy = None if fetched is None else fetched.take(parameter, dtype)
        return None if copy is None else copy.wait()

    def reached(self, layer: Layer, *, again: bool) -> None:
        """Prefetch the next layers: one has what it needs, and computes.

        Args:
            layer: Which.
            again: Whether it is to be counted as another visit if it was the last one as well.
        """
        task = graph_task_id()
        in_backward = task != OUTSIDE_BACKWARD
        with self._lock:
            if in_backward:
                self._enter(task)
            route = self._backward if in_backward else self._forward
            if route.reach(layer, again=again):
                expected = route.next(self.engine.depth)
                self._fetch(expected, in_backward=in_backward, besides=None if again else layer)

    def _fetch(self, expected: Iterable[Layer], *, in_backward: bool, besides: Layer | None = None) -> None:
        """Prefetch these, and drop everything else but perhaps one."""
        wanted = {id(layer): layer for layer in expected}
        kept = {*wanted, id(besides)}
        self._fetched = {key: fetched for key, fetched in self._fetched.items() if key in kept}
        for key, layer in wanted.items():
            if key not in self._fetched:
                self._fetched[key] = self._start(layer, in_backward)

    def _start(self, layer: Layer, in_backward: bool) -> _Fetched:
        fetched = _Fetched()
        for parameter, dtype in layer.needs(in_backward=in_backward):
            work = functools.partial(_copied, layer.copy_to_device, parameter.detach(), dtype)
            transfer = self.engine.run(work, _lane(parameter, self._device), self._device)
            fetched.add(parameter, dtype, transfer)
        return fetched


class _Route:
    """The order in which layers are reached: as it was in the last pass, and so far in this one."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._known = [weakref.ref(layer) for layer in layers]
        self._seen: list[weakref.ref[Layer]] = []
        self._place = 0

    def begin(self) -> None:
        self._seen = []
        self._place = 0

    def end(self, *, learn: bool) -> None:
        if learn and self._seen:
            self._known = self._seen
        self.begin()

    def reach(self, layer: Layer, *, again: bool) -> bool:
        """Note that a layer is reached; returns whether that is new."""
        if not again and self._seen and self._seen[-1]() is layer:
            return False
        self._seen.append(weakref.ref(layer))
        # If it does not come later, then a new pass has begun, of a part of the model say.
        places = [*range(self._place, len(self._known)), *range(self._place)]
        found = next((place for place in places if self._known[place]() is layer), None)
        self._place = len(self._known) if found is None else found + 1
        return True

    def next(self, count: int) -> list[Layer]:
        """Return what comes next, if the order is as it was."""
        return _alive(self._known[self._place : self._place + count])


def _alive(references: Iterable[weakref.ref[Layer]]) -> list[Layer]:
    return [layer for reference in references if (layer := reference()) is not None]


_State = tuple[int, int, torch.dtype]


class _Fetched:
    """One layer's parameters that are being copied."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[_State, Transfer[torch.Tensor]]] = {}
        self.nbytes = 0

    def add(self, parameter: nn.Parameter, dtype: torch.dtype, transfer: Transfer[torch.Tensor]) -> None:
        self._copies[id(parameter)] = (_state(parameter, dtype), transfer)
        self.nbytes += parameter.numel() * dtype.itemsize

    def take(self, parameter: nn.Parameter, dtype: torch.dtype) -> Transfer[torch.Tensor] | None:
        state, transfer = self._copies.pop(id(parameter), (None, None))
        if transfer is None or state is None:
            return None
        self.nbytes -= parameter.numel() * state[2].itemsize
        return transfer if state == _state(parameter, dtype) else None


def _state(parameter: nn.Parameter, dtype: torch.dtype) -> _State:
    """Return what changes when a copy would come out otherwise: in place, by other memory, or in another type."""
    return parameter._version, parameter.untyped_storage()._cdata, dtype


def _copied(
    copy: Callable[[torch.Tensor, torch.dtype], torch.Tensor], values: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    with torch.no_grad():  # which belongs to a thread
        return copy(values, dtype)


def _lane(parameter: nn.Parameter, device: torch.device) -> Lane:
    if device.type != "cuda" or is_fake(parameter):
        return Lane.CALLER
    # From pages that are not locked a copy holds up the thread that starts it: that had better be a worker.
    return Lane.STREAM if parameter.is_pinned() else Lane.WORKER


def _after_backward(reference: weakref.ref[Prefetcher], task: int) -> None:
    prefetcher = reference()
    if prefetcher is not None:
        prefetcher._end_backward(task)
