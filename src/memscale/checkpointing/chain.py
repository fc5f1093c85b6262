"""Regions that follow one another and are recomputed as one.

Note [Chained regions]
~~~~~~~~~~~~~~~~~~~~~~
A region keeps its inputs. Of two blocks in a row, each a region, the tensor between them is therefore kept.
If the second is called with `chain=True` it is not: the second region refers to the first instead of the
tensor, and when it must be recomputed has the first recomputed before it, to its end, and takes its output.
This fills the first region's saved tensors as well, which its own backward needs next: nothing is computed
more often, and nothing more is kept, than if both blocks were one checkpointed function.

*Which tensor comes from which region* is in `_origins`, weakly by the tensor: an entry lives as long as the
tensor, and refers to the region weakly. The region lives as long as the graph (or a region chained to it)
does. If it is gone, or the tensor was changed in place, the second region keeps its input.

*Segments.* A region that chains joins the segment of the latest region among its inputs' origins, and leaves
out just the inputs that come from its own segment. A tensor from further back (an encoder's output that each
decoder block takes, a skip connection of a U-Net) is kept: it is kept elsewhere anyway, and recomputing it
from each of its users would cost a whole encoder each time.

*Inside another region.* A region inside an outer one chains only to regions of the same run of the outer one.
When that is recomputed, a tensor from outside it is no region's output any more; were it one in forward, the
outer region would see another number of saved tensors the second time.

*How long an output lives.* Until the last chained region that will ask for it, in this backward pass, has it;
with one successor, which is the rule, that is at once. What nobody asks for is dropped at the end of the
backward pass.

*No cycles.* A region refers to earlier regions only. An earlier one knows of its successors weakly.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from memscale._torch import Hooks
from memscale.checkpointing.state import Slot, version_of

if TYPE_CHECKING:
    from memscale.checkpointing.region import Region

__all__ = ["Link", "OuterHooks", "Segment", "links_to", "order_to_run", "remember"]

_numbers = itertools.count()


class Segment:
    """A token that the regions of one chain have in common."""


class _RegionOutput:
    """The region that made a tensor, and as which of its outputs."""

    __slots__ = ("_region", "_version", "index", "number")

    def __init__(self, region: Region, index: int, number: int, version: int) -> None:
        self._region = weakref.ref(region)
        self._version = version
        self.index = index
        self.number = number

    def region_of(self, tensor: torch.Tensor, outer_hooks: OuterHooks) -> Region | None:
        """Return the region, if it is alive and this tensor is still its output, under the same hooks."""
        region = self._region()
        if region is None or version_of(tensor) != self._version:
            return None
        return region if region.outer_hooks.same_as(outer_hooks) else None


class OuterHooks:
    """The saved-tensor hooks around a region, by which one run of an outer region is told from another."""

    __slots__ = ("_hook",)

    def __init__(self, hooks: Hooks | None) -> None:
        # A bound method is made anew at every use; what it is bound to is what lasts.
        hook = _NO_HOOKS if hooks is None else getattr(hooks[0], "__self__", hooks[0])
        try:
            self._hook: Callable[[], object] = weakref.ref(hook)  # weakly: it may be an outer region's
        except TypeError:
            self._hook = _nothing

    def same_as(self, other: OuterHooks) -> bool:
        mine = self._hook()
        return mine is not None and mine is other._hook()


class _NoHooks:
    """What is around a region that nothing is around."""


_NO_HOOKS = _NoHooks()


def _nothing() -> None:
    return None


_origins: MutableMapping[torch.Tensor, _RegionOutput] = WeakTensorKeyDictionary()


def remember(region: Region, outputs: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
    """Remember which tensors a region has made: its outputs, except those that it was given."""
    given = {id(tensor) for tensor in inputs}
    number = next(_numbers)
    for index, tensor in enumerate(outputs):
        if id(tensor) not in given and not isinstance(tensor, torch.nn.Parameter):
            _origins[tensor] = _RegionOutput(region, index, number, version_of(tensor))


def links_to(
    tensors: Iterable[torch.Tensor], outer_hooks: OuterHooks
) -> tuple[Segment | None, Callable[[torch.Tensor], Slot | None] | None]:
    """Return the segment that a region with these inputs joins, and a function that finds an input's link into it."""
    origins: dict[int, tuple[_RegionOutput, Region]] = {}
    for tensor in tensors:
        origin = _origins.get(tensor)
        region = None if origin is None else origin.region_of(tensor, outer_hooks)
        if origin is not None and region is not None:
            origins[id(tensor)] = (origin, region)
    if not origins:
        return None, None
    _, latest = max(origins.values(), key=lambda found: found[0].number)

    def find(tensor: torch.Tensor) -> Slot | None:
        origin, region = origins.get(id(tensor), (None, None))
        if origin is None or region is None or region.segment is not latest.segment:
            return None
        return Link(region, origin.index, tensor.requires_grad)

    return latest.segment, find


class Link:
    """An input that is an earlier region's output and is not kept. See Note [Chained regions]."""

    __slots__ = ("__weakref__", "index", "region", "requires_grad")

    def __init__(self, region: Region, index: int, requires_grad: bool) -> None:
        self.region = region
        self.index = index
        self.requires_grad = requires_grad
        region.successors.append(weakref.ref(self))

    def fetch(self, task: int) -> torch.Tensor:
        return self.region.take_output(task, self).requires_grad_(self.requires_grad)


def order_to_run(target: Region, task: int) -> list[Region]:
    """Return the regions to recompute so that `target` can be: the head of its chain first, itself last.

    In a loop and not by recursion: a chain may be longer than Python's stack is deep.
    """
    order: list[Region] = []
    seen: set[int] = set()
    waiting: list[tuple[Region, bool]] = [(target, False)]
    while waiting:
        region, inputs_are_in = waiting.pop()
        if inputs_are_in:
            order.append(region)
        elif id(region) not in seen:
            seen.add(id(region))
            waiting.append((region, True))
            for slot in region.inputs.slots:
                if isinstance(slot, Link) and not slot.region.has_output(task, slot.index):
                    waiting.append((slot.region, False))
    return order
