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
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memscale.errors import RecomputeError
from memscale.precision.weights import autocast_dtype, cast_by_autocast
from memscale.recompute._torch_private import surrounding_hooks


class WorkingCopies:
    """The parameters of some modules as copies on the device: in 16 bits where autocast would cast them anyway."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._owners = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.device != device
        ]
        self._dtype = autocast_dtype(device)
        self._cast = cast_by_autocast(self._owners) if self._dtype is not None else set()
        self._copies: dict[int, torch.Tensor] = {}
        self._homes: dict[int, nn.Parameter] = {}  # by the storage of the copy

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
            dtype = self._dtype if key in self._cast else None
            copy = parameter.to(self._device, dtype, non_blocking=True)
            self._copies[key] = copy
            self._homes[copy.untyped_storage()._cdata] = parameter
        return self._copies[key]

    @contextlib.contextmanager
    def not_saved(self) -> Iterator[None]:
        """Inside the block autograd saves of a copy only where its home is."""
        outer_pack, outer_unpack = surrounding_hooks() or (_as_it_is, _as_it_is)

        def pack(tensor: torch.Tensor) -> Any:
            home = self._homes.get(tensor.untyped_storage()._cdata)
            return outer_pack(tensor) if home is None else Refetch(home, tensor)

        def unpack(saved: Any) -> torch.Tensor:
            return saved.fetch() if isinstance(saved, Refetch) else outer_unpack(saved)

        with saved_tensors_hooks(pack, unpack):
            yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Refetch:
    """A working copy, or a view of one, that backward will ask for again."""

    __slots__ = ("_device", "_dtype", "_home", "_offset", "_shape", "_stride", "_version")

    def __init__(self, home: nn.Parameter, tensor: torch.Tensor) -> None:
        self._home = home
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
        copy = self._home.detach().to(self._device, self._dtype, non_blocking=True)
        return copy.as_strided(self._shape, self._stride, self._offset)
