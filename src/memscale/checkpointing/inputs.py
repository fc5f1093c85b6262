"""What a region was called with, kept so that it can be called again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from memscale._torch import Hooks
from memscale._util.trees import Tree
from memscale.errors import RecomputeError

__all__ = ["Inputs", "Slot", "version_of"]


class Slot(Protocol):
    """One input tensor, wherever it is kept."""

    def fetch(self, task: int) -> torch.Tensor:
        """The tensor as the function is to see it in a recomputation for this backward pass."""


class Inputs:
    """The arguments of a call, with each tensor in a slot.

    The function must not be able to tell the second call from the first. So a tensor that came twice comes
    twice again, as one object (attention modules ask whether the query *is* the key), and parameters and
    constants are the very same objects. Only a tensor with a history is given as a leaf of its own, so that
    the graph of the recomputation ends at the region's edge.
    """

    __slots__ = ("_slots", "_tree")

    def __init__(self, tree: Tree, find: Callable[[torch.Tensor], Slot | None], hooks: Hooks | None) -> None:
        places: dict[int, _Place] = {}
        self._slots: list[Slot] = []

        def place(tensor: torch.Tensor) -> _Place:
            if id(tensor) not in places:
                places[id(tensor)] = _Place(len(self._slots))
                self._slots.append(find(tensor) or _keep(tensor, len(self._slots), hooks))
            return places[id(tensor)]

        self._tree = tree.map(torch.Tensor, place)

    def rebuild(self, task: int) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments and keyword arguments for calling the function again.

        Raises:
            RecomputeError: An input was changed in place since the first call.
        """
        tensors = [slot.fetch(task) for slot in self._slots]
        args, kwargs = self._tree.map(_Place, lambda place: tensors[place.index]).build()
        return args, kwargs

    @property
    def slots(self) -> Sequence[Slot]:
        return self._slots


class _Place:
    """Where a tensor was in the arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _keep(tensor: torch.Tensor, position: int, hooks: Hooks | None) -> Slot:
    # Note [Inputs go through the surrounding hooks]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # To whatever surrounds a region, its inputs are what it saves for backward, so they go through the
    # saved-tensor hooks that surround it. If those are another region's, the input is not kept at all and the
    # outer region recomputes it first. If they move tensors to the host (`torch.autograd.graph.save_on_cpu`),
    # the inputs go there.
    if hooks is None or isinstance(tensor, nn.Parameter):
        return _Held(tensor, position)
    pack, unpack = hooks
    with torch.no_grad():
        return _Packed(pack(tensor), unpack, tensor.requires_grad)


class _Held:
    """An input kept as it is."""

    __slots__ = ("_needs_leaf", "_position", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, position: int) -> None:
        # With its history it would keep the graph before the region alive.
        self._needs_leaf = not tensor.is_leaf
        self._tensor = tensor.detach() if self._needs_leaf else tensor
        self._version = version_of(tensor)
        self._position = position

    def fetch(self, task: int) -> torch.Tensor:
        tensor = self._tensor
        if version_of(tensor) != self._version:
            raise RecomputeError(
                f"Input tensor {self._position} of a checkpointed region (shape {tuple(tensor.shape)}, "
                f"{tensor.dtype}, {tensor.device}) was changed in place after the region's forward pass: "
                f"version {self._version} then, {version_of(tensor)} now. The region is recomputed from its "
                "inputs, so they must stay as they are until backward. Use the out-of-place form of the "
                "operation that changes it (x = x + y, not x += y), or give the region a clone."
            )
        return tensor.detach().requires_grad_() if self._needs_leaf else tensor


class _Packed:
    """An input kept by the hooks around the region. See Note [Inputs go through the surrounding hooks]."""

    __slots__ = ("_packed", "_requires_grad", "_unpack")

    def __init__(self, packed: object, unpack: Callable[[Any], torch.Tensor], requires_grad: bool) -> None:
        self._packed = packed
        self._unpack = unpack
        self._requires_grad = requires_grad

    def fetch(self, task: int) -> torch.Tensor:
        return self._unpack(self._packed).detach().requires_grad_(self._requires_grad)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version
