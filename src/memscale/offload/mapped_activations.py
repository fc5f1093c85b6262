"""Activations on disk, for a CPU host: what forward leaves for backward waits in the file.

Stored when autograd saves it, whole and at once, so that what becomes of the tensor later is of no consequence; and
read when backward asks. Of a recomputed block that is its input (Note [Inputs go through the surrounding hooks]).
Parameters, and what is too small to pay, are saved as ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from memscale.offload.disk import DiskTier
from memscale.offload.layout import is_fake
from memscale.offload.store import DiskStore
from memscale.offload.tier import Ticket
from memscale.offload.working import without_history

__all__ = ["StoredActivations"]

LEAST_BYTES = 2**16
"""Smaller tensors stay in memory."""

_Key = tuple[int, int, torch.dtype, torch.Size, tuple[int, ...], int]


class StoredActivations:
    """Saved-tensor hooks that keep what is saved in a store. A copy of a model has its own.

    Args:
        store: The disk.

    Example:
        >>> activations = StoredActivations(DiskStore(capacity=2**20))
        >>> x = torch.ones(128, 128, requires_grad=True)
        >>> with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
        ...     y = (x * 2).square().sum()  # saves x * 2
        >>> activations.store.bytes_used
        65536
        >>> y.backward()
        >>> float(x.grad[0, 0]), activations.store.bytes_used
        (8.0, 0)
        >>> activations.store.close()
    """

    def __init__(self, store: DiskStore) -> None:
        self.store = store
        # A tensor that several operations or blocks save is stored once.
        self._stored: weakref.WeakValueDictionary[_Key, _Stored] = weakref.WeakValueDictionary()

    def pack(self, tensor: torch.Tensor, never: Collection[int] = ()) -> torch.Tensor | _Stored:
        """What autograd saves in place of a tensor.

        Args:
            tensor: What it would save.
            never: Addresses of memory that stays where it is: that of parameters.

        Raises:
            TierFullError: The cap would be exceeded, or the disk is full.
            TierError: The directory can't be used.
        """
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or is_fake(tensor):
            return without_history(tensor)
        if tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES or self.store.holds(tensor):
            return without_history(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() in never:
            return without_history(tensor)
        version = 0 if tensor.is_inference() else tensor._version
        place = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        key = (storage._cdata, version, tensor.dtype, *place)
        stored = self._stored.get(key)
        if stored is None or stored.storage() is not storage:
            tier = self.store.tier
            stored = _Stored(tier.store(tensor), tier, weakref.ref(storage))
            self._stored[key] = stored
        return stored

    @staticmethod
    def unpack(saved: torch.Tensor | _Stored) -> torch.Tensor:
        return saved.load() if isinstance(saved, _Stored) else saved

    def __getstate__(self) -> dict[str, object]:
        return {"store": self.store}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Stored:
    """A saved tensor that is on disk; its room is free again when the graph lets go of it."""

    __slots__ = ("__weakref__", "_ticket", "_tier", "storage")

    def __init__(self, ticket: Ticket, tier: DiskTier, storage: weakref.ref[torch.UntypedStorage]) -> None:
        self._ticket = ticket
        self._tier = tier  # of the store as it was then: backward may come after detach
        self.storage = storage

    def load(self) -> torch.Tensor:
        return self._tier.load(self._ticket)
