"""Working copies: a layer's parameters on the device, for as long as it computes.

Note [Home and working copy]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The user's ``nn.Parameter`` is at home, on the host: it is what the optimizer steps, what ``state_dict`` saves,
what ``clip_grad_norm_`` sees. When its layer runs, a differentiable copy goes to the device and stands in for it
in the module; autograd brings the copy's gradient home again, and accumulates it there. So everything a training
loop does with parameters and gradients stays true, because what it sees is the truth.

A copy must not outlive the layer's computation. Inside a recomputed region nothing is saved anyway: backward runs
the layer again and fetches again. Elsewhere autograd would hold the copies that it saved (``nn.Linear`` saves its
weight); there :class:`Refetch` is saved in their place, and backward fetches them again. All else that is saved goes
through the hooks that surround the layer, if there are any (``activations.py``).

Two sums are not in the order of the plain model, and may differ in the last bit: the gradient of a parameter that is
used several times in a call (a recurrent weight, or any weight in a loss that has a gradient in it, by
``create_graph=True``) by a layer that is called several times before one backward, which is added up by calls; and
the norm of ``clip_grad_norm_``, which adds up the gradients of each device apart. Under autocast the plain model casts
a parameter once for all of its uses and adds up their gradients in 16 bits; here that is so for the uses of a matrix
in one call only, and all else is added up in the parameter's own type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale._torch import (
    OUTSIDE_BACKWARD,
    graph_task_id,
    hooks_are_allowed,
    surrounding_hooks,
)
from memscale.checkpointing.state import KeptTensor, mark_as_copy
from memscale.errors import RecomputeError
from memscale.observe.counters import Meter
from memscale.offload.arrival import arrived
from memscale.offload.autocast_weights import autocast_dtype, cast_by_autocast
from memscale.tiers.engine import Engine


class Source(Protocol):
    """Where working copies come from, if not straight from home: they may have been fetched ahead."""

    def copy_of(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Return a differentiable copy of a parameter on the device."""

    def again(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter's values on the device once more, for backward."""


class WorkingCopies:
    """The parameters of some modules as copies on the device: in 16 bits where autocast would cast them anyway.

    Args:
        modules: Whose.
        device: Where.
        source: Where copies come from; None for straight from home.
        meter: Counts what is moved; not what comes from a source, which counts by itself.

    Attributes:
        refetched: The parameters that backward will ask for, by their ids, and in which type.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        source: Source | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._device = device
        self._source = source
        self._meter = meter
        self._owners = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.device != device
        ]
        # Embeddings with `sparse=True`: the backward of `parameter.to(device)` refuses a sparse gradient.
        self._sparse = {
            id(parameter) for module, _, parameter in self._owners if getattr(module, "sparse", False)
        }
        self._dtype = autocast_dtype(device)
        self._cast = cast_by_autocast(self._owners) if self._dtype is not None else set()
        self._copies: dict[int, torch.Tensor] = {}
        self._homes: dict[int, nn.Parameter] = {}  # by the storage of the copy
        self.refetched: dict[int, torch.dtype] = {}

    def wanted(self) -> list[tuple[nn.Parameter, torch.dtype]]:
        """Return the parameters that are copied, each once, and in which type."""
        found = {id(parameter): parameter for _, _, parameter in self._owners}
        return [(parameter, self._dtype_of(parameter)) for parameter in found.values()]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the modules see the copies; afterwards they have their own parameters again."""
        try:
            for module, name, parameter in self._owners:
                module._parameters[name] = self._copy_of(parameter)  # type: ignore[assignment]
            yield
        finally:
            for module, name, parameter in self._owners:
                module._parameters[name] = parameter
            self._copies.clear()

    def _copy_of(self, parameter: nn.Parameter) -> torch.Tensor:
        key = id(parameter)  # a tied parameter has one copy
        if key not in self._copies:
            dtype, source = self._dtype_of(parameter), self._source
            copy = self._fetched(parameter, dtype) if source is None else source.copy_of(parameter, dtype)
            if parameter.requires_grad and not copy.requires_grad and dtype == parameter.dtype:
                # Gradients are off. Still torch.matmul looks at this flag of a weight to choose between mm and bmm.
                copy = copy.detach().requires_grad_()
            mark_as_copy(copy, parameter)
            self._copies[key] = copy
            self._homes[copy.untyped_storage()._cdata] = parameter
        return self._copies[key]

    def _fetched(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        meter = self._meter
        if id(parameter) in self._sparse:
            values = brought(parameter.detach(), self._device, dtype)
            if meter is not None:
                meter.up("parameters", "host", values.nbytes)
            return arrived(parameter, values, Engine(), meter)
        if meter is None:
            return parameter.to(self._device, dtype, non_blocking=True)
        with meter.timing("offloading"):
            copy = parameter.to(self._device, dtype, non_blocking=True)
        meter.up("parameters", "host", copy.nbytes)
        if copy.grad_fn is not None and graph_task_id() == OUTSIDE_BACKWARD and hooks_are_allowed():
            GradientGoesHome(meter).watch(copy.grad_fn)
        return copy

    def _dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return self._dtype if self._dtype is not None and id(parameter) in self._cast else parameter.dtype

    @contextlib.contextmanager
    def not_saved(self) -> Iterator[None]:
        """Inside the block autograd saves of a copy only where its home is."""
        source = self._source
        outer_pack, outer_unpack = surrounding_hooks() or (KeptTensor, KeptTensor.get)

        def pack(tensor: torch.Tensor) -> Any:
            home = self._homes.get(tensor.untyped_storage()._cdata)
            if home is None:
                return outer_pack(tensor)
            self.refetched[id(home)] = tensor.dtype
            return Refetch(home, tensor, source, self._meter)

        def unpack(saved: Any) -> torch.Tensor:
            return saved.fetch() if isinstance(saved, Refetch) else outer_unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            yield


def brought(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter's values on the device."""
    return values.to(device, dtype, non_blocking=True)


class Refetch:
    """A working copy, or a view of one, that backward will ask for again."""

    __slots__ = (
        "_device",
        "_dtype",
        "_home",
        "_meter",
        "_offset",
        "_shape",
        "_source",
        "_stride",
        "_version",
    )

    def __init__(
        self, home: nn.Parameter, tensor: torch.Tensor, source: Source | None, meter: Meter | None = None
    ) -> None:
        self._home = home
        self._source = source
        self._meter = meter
        self._version = home._version
        self._device = tensor.device
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset()

    def fetch(self) -> torch.Tensor:
        if self._home._version != self._version:
            raise RecomputeError(
                f"An offloaded parameter (shape {tuple(self._home.shape)}) was changed in place between forward "
                f"and backward: version {self._version} then, {self._home._version} now. Call backward before "
                "optimizer.step(), or run forward again after it."
            )
        if self._source is not None:
            copy = self._source.again(self._home, self._dtype)
        elif self._meter is None:
            copy = brought(self._home.detach(), self._device, self._dtype)
        else:
            with self._meter.timing("offloading"):
                copy = brought(self._home.detach(), self._device, self._dtype)
            self._meter.up("parameters", "host", copy.nbytes)
        return copy.as_strided(self._shape, self._stride, self._offset)


class GradientGoesHome:
    """Sees the node of autograd that brings a gradient home, before and after it runs."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._start: Any = None

    def watch(self, node: Any) -> None:
        """Look at a node from now on."""
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, gradients: Any) -> None:
        self._start = self._meter.now()

    def _after(self, at_home: Any, gradients: Any) -> None:
        self._meter.lost("offloading", self._start)
        # As they arrive: they were converted on the device.
        strided = (each for each in at_home if each is not None and each.layout is torch.strided)
        self._meter.down("gradients", "host", sum(each.nbytes for each in strided))
