"""The tensors that a region's graph would have saved: what stands in for them, and what they looked like."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from memscale._torch import running_node_name
from memscale.checkpointing.inputs import version_of
from memscale.errors import RecomputeError

if TYPE_CHECKING:
    from memscale.checkpointing.region import Region

__all__ = ["CAUSES", "FREED", "Holder", "KeptTensor", "Saved", "changed_parameter"]


class Holder:
    """What autograd saves in place of a tensor: empty, until a recomputation fills it for one backward pass.

    The graph owns the holder, the holder owns the region, and nothing points back: when the graph goes, all
    goes.
    """

    __slots__ = ("__weakref__", "_tensors", "index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index
        self._tensors: dict[int, tuple[torch.Tensor, int]] | None = None

    def put(self, task: int, tensor: torch.Tensor) -> None:
        if self._tensors is None:
            self._tensors = {}
        self._tensors[task] = (tensor, version_of(tensor))

    def take(self, task: int) -> torch.Tensor | None:
        """The tensor for a backward pass, if it is there; it is handed out once.

        Raises:
            RecomputeError: The region changed the tensor in place after autograd had saved it.
        """
        found = self._tensors.pop(task, None) if self._tensors else None
        if found is None:
            return None
        tensor, version = found
        if version_of(tensor) != version:
            raise RecomputeError(
                f"Saved tensor {self.index} ({_looks_of(tensor)}) was changed in place by the checkpointed "
                f"region after an operation had saved it for backward: version {version} when it was saved, "
                f"{version_of(tensor)} now. This fails without checkpointing too: use the out-of-place form "
                "of the operation."
            )
        return tensor

    def memscale_release(self) -> None:
        """Free the region and its inputs; see `memscale._torch.release_saved_tensors`."""
        self.region.release()
        self._tensors = None

    def drop(self, task: int) -> None:
        if self._tensors:
            self._tensors.pop(task, None)


class KeptTensor:
    """What a saved-tensor hook gives autograd for a tensor that stays as it is.

    It has no history: a node that saves its own output would be in a cycle that nothing collects, if backward never
    comes. And it can be freed before the graph is; see `memscale._torch.release_saved_tensors`.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: It was freed.
        """
        if self._tensor is None:
            raise RuntimeError(FREED)
        return self._tensor

    def memscale_release(self) -> None:
        self._tensor = None


FREED = (
    "Trying to backward through the graph a second time: what it had saved has been freed. Specify retain_graph=True "
    "if you need to backward through the graph a second time."
)


class Saved:
    """One tensor that forward would have saved: its holder, if the graph has it still, and its looks."""

    __slots__ = ("_device", "_dtype", "_requires_grad", "_shape", "_version", "holder", "index")

    def __init__(self, holder: Holder, tensor: torch.Tensor) -> None:
        self.holder = weakref.ref(holder)
        self.index = holder.index
        self._shape = _shape_of(tensor)
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor) if _is_weight(tensor) else None

    def check(self, tensor: torch.Tensor) -> RecomputeError | None:
        """What is wrong with the tensor that a recomputation saved in this place, if anything is."""
        is_same = (
            _shape_of(tensor) == self._shape
            and tensor.dtype == self._dtype
            and tensor.device == self._device
            and tensor.requires_grad == self._requires_grad
        )
        if not is_same:
            made_by = "" if tensor.grad_fn is None else f", made by {tensor.grad_fn.name()}"
            node = running_node_name()
            expected = _looks(self._shape, self._dtype, self._device, self._requires_grad)
            return RecomputeError(
                "Recomputing a checkpointed region gave another tensor than its forward pass. It was to save "
                f"tensor {self.index} with {expected}; it saved one with {_looks_of(tensor)}{made_by}."
                f"{f' Backward was in {node}.' if node else ''}\n{CAUSES}"
            )
        if self._version is not None and self.holder() is not None and version_of(tensor) != self._version:
            return changed_parameter(tensor, self._version)
        return None


CAUSES = (
    "Likely causes: the function depends on something that changed since forward, such as a counter, a flag or "
    "a random generator that is not an attribute of a module, a cache that it appends to (use_cache=True), or a "
    "global setting. Make the function depend on its arguments, its modules and the global random generators only, or "
    "switch recomputation off: memscale.Config(enable_checkpointing=False)."
)


def changed_parameter(parameter: torch.Tensor, version: int) -> RecomputeError:
    return RecomputeError(
        f"A parameter (shape {tuple(parameter.shape)}, {parameter.dtype}) of a checkpointed region was "
        f"changed in place since its forward pass: version {version} then, {version_of(parameter)} now. The "
        "region would be recomputed with other weights than forward had. Call backward before "
        "optimizer.step(), or run forward again after it."
    )


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tensor.shape  # of a ragged one, asking is an error


def _looks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> str:
    return f"shape {tuple(shape)}, {dtype}, {device}{'' if requires_grad else ', no gradient'}"


def _looks_of(tensor: torch.Tensor) -> str:
    return _looks(_shape_of(tensor), tensor.dtype, tensor.device, tensor.requires_grad)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one (`nn.Linear` saves its weight transposed).

    Only of those can the version be compared with that at forward: of all else the recomputation makes new
    tensors.
    """
    owner = tensor._base if tensor._is_view() else tensor
    return isinstance(owner, nn.Parameter) or (owner is not None and owner.is_leaf and owner.requires_grad)
