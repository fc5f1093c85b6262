"""Prefetching: while a layer computes, the parameters of the next ones are copied to the device.

Note [Prefetching]
~~~~~~~~~~~~~~~~~~
Layers are reached in the same order in every step. So the order of the last forward pass, and that of the last
backward pass, say what comes next; before the first pass the plan's order does. When a layer is reached, the next
`prefetch_depth` of that order are fetched, if they are not yet.

*Never wrong.* A layer takes its prefetched copy if its master has not changed since (by its version counter and its
memory), and else fetches by itself. Nothing is fetched across the end of a pass: between backward and the next forward
the optimizer changes every parameter. A layer that was not expected, an error in a layer, the end of a pass and the
beginning of the next drop what was fetched and not used. Where there is no room, a layer fetches when it is reached.

*Gradients in flight.* A gradient stays on the device until it is copied to the host, and no longer than until two
others are on their way: then the device waits for the copy. Virtual devices, which copy at once, hold it as long.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import OUTSIDE_BACKWARD, at_end_of_backward, graph_task_id, is_fake
from memscale._util.trees import Tree
from memscale.tiers.engine import Engine, Lane, Transfer

if TYPE_CHECKING:
    from memscale.offload.layer import OffloadedLayer

_MasterState = tuple[int, int, torch.dtype]
_Fetched = dict[int, tuple[_MasterState, Transfer[torch.Tensor]]]
"""Of one layer, by the parameter's id: what the copy was made of, and the copy."""

GRADIENTS_IN_FLIGHT = 2  # one is copied while the next is computed


class Prefetcher:
    """Prefetches working copies of layers, given in the order in which forward and backward are expected to reach them.

    See Note [Prefetching].
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        forward: Sequence[OffloadedLayer],
        backward: Sequence[OffloadedLayer],
    ) -> None:
        self.engine = engine
        self._device = device
        self._forward = _Route(forward)
        self._backward = _Route(backward)
        self._task = OUTSIDE_BACKWARD
        self._fetched: dict[int, _Fetched] = {}  # by the layer's id
        self._in_flight: deque[tuple[Transfer[None], torch.Tensor]] = deque()
        self._in_forward = False
        self._lock = threading.RLock()  # backward runs in threads of its own

    @property
    def in_pass(self) -> bool:
        """Whether a forward pass of the model, or a backward pass, is running, at whose end copies are waited for."""
        task = graph_task_id()
        return self._in_forward or (task != OUTSIDE_BACKWARD and task == self._task)

    # ------------------------------------------------------------------ passes

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Prefetch the first layers: a hook before the model's forward."""
        if not torch.compiler.is_compiling():
            with self._lock:
                self.drop()
                self._in_forward = True
                self._forward.begin()
                self._fetch(self._forward.next(self.engine.depth), in_backward=False)

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """Drop what was not used, and learn the order: a hook after the model's forward, also if that failed."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            self._forward.end(learn=output is not None)
            self._in_forward = False
            self.drop()
        if output is not None and torch.is_grad_enabled():
            for tensor in Tree.of(output).tensors():
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, *gradients: Any) -> None:
        """Prefetch the last layers: backward has reached the model's output."""
        with self._lock:
            if self._enter(graph_task_id()):
                self._fetch(self._backward.next(self.engine.depth), in_backward=True)

    def _end_backward(self, task: int) -> None:
        """Drop what was not used, and learn the order."""
        with self._lock:
            if task == self._task:
                self._task = OUTSIDE_BACKWARD
                self._backward.end(learn=True)
                self.drop()

    def drop(self) -> None:
        """Drop what is prefetched, and finish copies: a pass is over, or something went wrong."""
        with self._lock:
            self._fetched.clear()
            self._finish_gradients(0)
            self.engine.drain(self._device)

    undo = drop  # when another plan is attached: a graph of a failed pass may hold this

    def _enter(self, task: int) -> bool:
        """Begin a backward pass, if it is a new one; returns whether it is."""
        if task in (OUTSIDE_BACKWARD, self._task):
            return False
        self._task = task
        self._backward.begin()
        at_end_of_backward(self._end_backward, task)
        return True

    # ------------------------------------------------------------------ layers

    def fetch(self, layer: OffloadedLayer, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of a parameter on the device, prefetched or not, or raise a TransferError."""
        values = self.take(layer, parameter, dtype)
        return self._copy(layer, parameter, dtype).wait() if values is None else values

    def take(self, layer: OffloadedLayer, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the values of a parameter on the device, if they were prefetched and are still right."""
        with self._lock:
            state, transfer = self._fetched.get(id(layer), {}).pop(id(parameter), (None, None))
        if transfer is None or state != _state(parameter, dtype):
            return None
        return transfer.wait()

    def reached(self, layer: OffloadedLayer, *, again: bool) -> None:
        """Prefetch the layers after one that has what it needs; with `again`, its second visit in a row counts."""
        task = graph_task_id()
        in_backward = task != OUTSIDE_BACKWARD
        with self._lock:
            if in_backward:
                self._enter(task)
            route = self._backward if in_backward else self._forward
            if route.reach(layer, again=again):
                expected = route.next(self.engine.depth)
                self._fetch(expected, in_backward=in_backward, besides=None if again else layer)

    def hold_gradient(self, transfer: Transfer[None], gradient: torch.Tensor) -> None:
        """Hold a gradient on the device while it is copied to the host."""
        with self._lock:
            self._enter(graph_task_id())  # at whose end it is dropped
            self._in_flight.append((transfer, gradient))
            self._finish_gradients(GRADIENTS_IN_FLIGHT)

    def _finish_gradients(self, limit: int) -> None:
        while len(self._in_flight) > limit:
            transfer, _ = self._in_flight.popleft()
            transfer.wait()  # on the device: its memory is used again after the copy
            transfer.abandon()  # another stream may be current than that of the gradient

    def _fetch(
        self, expected: Iterable[OffloadedLayer], *, in_backward: bool, besides: OffloadedLayer | None = None
    ) -> None:
        """Prefetch these, and drop everything else but perhaps one."""
        wanted = {id(layer): layer for layer in expected}
        kept = {*wanted, id(besides)}
        self._fetched = {key: fetched for key, fetched in self._fetched.items() if key in kept}
        for key, layer in wanted.items():
            if key in self._fetched:
                continue
            try:
                self._fetched[key] = {
                    id(parameter): (_state(parameter, dtype), self._copy(layer, parameter, dtype))
                    for parameter, dtype in layer.needs(in_backward=in_backward)
                }
            except torch.OutOfMemoryError:  # once it is reached there may be room for it
                return

    def _copy(
        self, layer: OffloadedLayer, parameter: nn.Parameter, dtype: torch.dtype
    ) -> Transfer[torch.Tensor]:
        values = parameter.detach()
        target = torch.empty_like(values, device=self._device, dtype=dtype)
        # From pages that are not locked a copy holds up the thread that starts it: that had better be a worker.
        lane = Lane.CALLER
        if self._device.type == "cuda" and not is_fake(parameter):
            lane = Lane.STREAM if parameter.is_pinned() else Lane.WORKER

        def copy() -> torch.Tensor:
            with torch.no_grad():  # which belongs to a thread
                return layer.copy_to_device(values, target)

        return self.engine.run(copy, lane, self._device, allocated=True)


class _Route:
    """The order in which layers are reached: as it was in the last pass, and so far in this one."""

    def __init__(self, layers: Sequence[OffloadedLayer]) -> None:
        self._known = [weakref.ref(layer) for layer in layers]
        self._seen: list[weakref.ref[OffloadedLayer]] = []
        self._position = 0

    def begin(self) -> None:
        self._seen = []
        self._position = 0

    def end(self, *, learn: bool) -> None:
        self._known = self._seen if learn and self._seen else self._known
        self.begin()

    def reach(self, layer: OffloadedLayer, *, again: bool) -> bool:
        """Note that a layer is reached; returns whether that is new."""
        if not again and self._seen and self._seen[-1]() is layer:
            return False
        self._seen.append(weakref.ref(layer))
        # If it does not come later, then a new pass has begun, of a part of the model say.
        positions = [*range(self._position, len(self._known)), *range(self._position)]
        found = next((index for index in positions if self._known[index]() is layer), None)
        self._position = len(self._known) if found is None else found + 1
        return True

    def next(self, count: int) -> list[OffloadedLayer]:
        """Return what comes next, if the order is as it was."""
        expected = self._known[self._position : self._position + count]
        return [layer for reference in expected if (layer := reference()) is not None]


def _state(parameter: nn.Parameter, dtype: torch.dtype) -> _MasterState:
    """Return what changes when a copy would come out otherwise: in place, by other memory, or in another type."""
    return parameter._version, parameter.untyped_storage()._cdata, dtype
