"""What of a tensor is stored: flat runs of bytes, and how to see the tensors in them again.

Note [Flat pieces]
~~~~~~~~~~~~~~~~~~
A tier moves dense runs of elements; a tensor is a view of one. Tensors over one storage become views of one
piece: it is stored once, and they share memory again when it is loaded. A piece spans from the first element
that any of them has to the last, so that permuted, expanded and interleaved tensors (the queries, keys and
values of one projection) need no copy. A slice with large gaps (a column of a matrix) would drag along what
nobody asked for: it is stored as a dense copy of its elements, and spread out again on loading. All of it is
done by ordinary torch operations, so it works on tensors without data too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memscale._torch import FakeTensor, is_traceable_wrapper_subclass
from memscale.errors import TierError

__all__ = ["Flat", "View", "flat_behind", "is_fake", "pack", "rebuild"]

_WIDEST = 16  # bytes of complex128: an offset that is a multiple of it suits every dtype


@dataclass(frozen=True)
class View:
    """How one tensor lies in its piece.

    Attributes:
        piece: Which piece; -1 for a tensor without elements, which has none.
        offset: Where it starts there, in bytes.
        dense: Whether its elements were copied together, in the order of its shape. See Note [Flat pieces].
        conjugate: Whether it is the lazy conjugate (`tensor.conj()`) of what is in memory.
    """

    piece: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dense: bool = False
    conjugate: bool = False


@dataclass(frozen=True, eq=False)
class Flat:
    """A piece: one dimension, no gaps.

    Attributes:
        run: The elements, in the memory of the tensors they were taken from, or a copy of their own.
        own: Whether it is such a copy.
    """

    run: torch.Tensor
    own: bool


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data: it is simulated."""
    return isinstance(tensor, FakeTensor)


def pack(tensors: Sequence[torch.Tensor]) -> tuple[list[Flat], list[View]]:
    """The pieces that the tensors are made of, and how each lies in its piece.

    Raises:
        TierError: A tensor has no memory that can be moved: sparse, quantized, nested, meta, or a wrapper.

    Example:
        >>> x = torch.arange(6.0).view(2, 3)
        >>> flats, views = pack([x.t(), x[1]])
        >>> len(flats), views[1].offset
        (1, 12)
    """
    members = [_Member(index, tensor) for index, tensor in enumerate(tensors)]
    by_storage: dict[int, list[_Member]] = {}
    for member in members:
        if member.span:
            by_storage.setdefault(member.physical.untyped_storage()._cdata, []).append(member)
    flats: list[Flat] = []
    placed: dict[int, View] = {}
    for sharers in by_storage.values():
        for group in _groups(sharers):
            flat, start = _flatten(group)
            for member in group:
                placed[member.index] = member.view(len(flats), flat, start)
            flats.append(flat)
    return flats, [placed.get(member.index) or member.view(-1, None, 0) for member in members]


def rebuild(flat: torch.Tensor, view: View) -> torch.Tensor:
    """The tensor again: of the same shape, stride, dtype and values, over the memory of `flat`.

    Example:
        >>> x = torch.arange(6.0).view(2, 3).t()
        >>> flats, views = pack([x])
        >>> y = rebuild(flats[0].run.clone(), views[0])
        >>> torch.equal(x, y), y.stride()
        (True, (1, 3))
    """
    if view.dense:
        tensor = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=flat.device)
        tensor.copy_(flat.view(view.shape))
    elif flat.dtype is view.dtype:
        offset = flat.storage_offset() + view.offset // view.dtype.itemsize
        # Detached, as a view that was made without gradients may not be changed in place with them.
        tensor = flat.as_strided(view.shape, view.stride, offset).detach()
    else:
        nbytes = _span(view.shape, view.stride) * view.dtype.itemsize
        part = flat[view.offset : view.offset + nbytes].view(view.dtype)
        tensor = part.as_strided(view.shape, view.stride, part.storage_offset()).detach()
    return tensor.conj() if view.conjugate else tensor


def flat_behind(
    tensor: torch.Tensor, view: View, flat_dtype: torch.dtype, nbytes: int
) -> torch.Tensor | None:
    """The piece that `rebuild` made a tensor from, by way of the tensor; None where there is no such way."""
    if view.dense or nbytes % view.dtype.itemsize:
        return None
    physical = tensor.conj() if view.conjugate else tensor
    run = physical.detach().as_strided((nbytes // view.dtype.itemsize,), (1,), 0)
    return run if view.dtype is flat_dtype else run.view(flat_dtype)


class _Member:
    """A tensor on its way into a piece."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        _refuse_unmovable(tensor)
        self.index = index
        self.conjugate = tensor.is_conj()
        physical = tensor.detach()
        if physical.is_neg():
            physical = physical.resolve_neg()
        self.physical = physical.conj() if self.conjugate else physical
        self.shape, self.stride = tuple(physical.shape), tuple(physical.stride())
        self.itemsize = physical.element_size()
        self.span = _span(self.shape, self.stride)
        self.start = int(physical.storage_offset()) * self.itemsize
        self.stop = self.start + self.span * self.itemsize
        self.geometry = (self.start, self.shape, self.stride, physical.dtype)
        # Elements in memory: an expanded tensor has fewer of them than its shape says.
        self.covered = min(physical.numel(), self.span) * self.itemsize

    @property
    def is_scattered(self) -> bool:
        """Whether most of its span is gaps, and none of its elements lie on each other."""
        return 2 * self.covered < self.stop - self.start and _is_injective(self.shape, self.stride)

    def view(self, piece: int, flat: Flat | None, start: int) -> View:
        dense = flat is not None and flat.own
        return View(
            piece=piece,
            offset=0 if dense or flat is None else self.start - start,
            shape=self.shape,
            stride=self.stride,
            dtype=self.physical.dtype,
            device=self.physical.device,
            dense=dense,
            conjugate=self.conjugate,
        )


def _refuse_unmovable(tensor: torch.Tensor) -> None:
    kind = None
    if tensor.is_nested:
        kind = "nested"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif tensor.is_quantized:
        kind = "quantized"
    elif is_traceable_wrapper_subclass(tensor):
        kind = f"wrapper ({type(tensor).__name__})"
    elif tensor.device.type == "meta":
        kind = "meta"
    if kind is not None:
        raise TierError(
            f"A {kind} tensor has no memory of its own to offload: leave it where it is, or store the "
            "tensors that it is made of."
        )


def _groups(members: list[_Member]) -> list[list[_Member]]:
    """Tensors over one storage, split only if most of what lies between them belongs to none of them."""
    if len(members) == 1:
        return [members]
    covered = sum({member.geometry: member.covered for member in members}.values())
    total = max(member.stop for member in members) - min(member.start for member in members)
    if 2 * covered >= total:
        return [members]
    groups: list[list[_Member]] = []
    reach = -1
    for member in sorted(members, key=lambda member: member.start):
        if member.start >= reach:
            groups.append([])
        groups[-1].append(member)
        reach = max(reach, member.stop)
    return groups


def _flatten(group: list[_Member]) -> tuple[Flat, int]:
    """The piece of a group, and where it starts in the storage, in bytes."""
    first = group[0]
    start = min(member.start for member in group)
    stop = max(member.stop for member in group)
    if len({member.geometry for member in group}) == 1 and first.is_scattered:
        return Flat(first.physical.contiguous().view(-1), own=True), start
    if len({member.physical.dtype for member in group}) == 1:
        length, offset = (stop - start) // first.itemsize, start // first.itemsize
        return Flat(first.physical.as_strided((length,), (1,), offset), own=False), start
    start = start // _WIDEST * _WIDEST
    narrow = min(group, key=lambda member: member.itemsize)
    length, offset = (stop - start) // narrow.itemsize, start // narrow.itemsize
    return Flat(narrow.physical.as_strided((length,), (1,), offset).view(torch.uint8), own=False), start


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _is_injective(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether no two elements share a place. Says no to some that do not, of strides that nobody uses."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reach:
                return False
            reach += (size - 1) * step
    return True
