"""Simulate the memory of one rank of a model that FSDP2 (`fully_shard`) has sharded.

Note [Simulated shards]
~~~~~~~~~~~~~~~~~~~~~~~
The copy of the model on fake tensors has whole parameters, so that it runs without other processes. Their memory is
released, and what a rank has instead is counted:

- all the time, its shards; from the first backward on those of gradients;
- a group's whole parameters from its forward on, to its end if FSDP2 reshards then, and from the gradient of its
  outputs until its own gradients are there, which are then replaced by their shards;
- the buffers of collectives, as large as the group: one while the group is there, as the next is gathered meanwhile (on
  a CPU in backward only), and one from the reduction of its gradients to that of the next group's.

Not counted: the memory of the communication library. The next group is taken to be as large as this one, and one of
several modules to be there until backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memscale._torch import ShardedGroup, disable_current_modes, pytree, sharded_groups
from memscale.memory.tracker import MemoryTracker

Release = Callable[[], None]


def bytes_here(group: ShardedGroup, shard: Tensor) -> int:
    """Return the device memory of a parameter's shard; none if FSDP2 keeps it on the host."""
    with disable_current_modes():  # a simulation would count what it is asked for
        local: Tensor = shard.to_local() if hasattr(shard, "to_local") else shard
    return 0 if group.on_host else local.nbytes


class SimulatedShards:
    """Counts what a rank has of each group of `twin`, the whole copy of `model`. See Note [Simulated shards]."""

    def __init__(
        self, model: nn.Module, twin: nn.Module, tracker: MemoryTracker, device: torch.device
    ) -> None:
        paths = {id(module): path for path, module in model.named_modules()}
        self._sizes: dict[int, int] = {}
        self._groups = []
        self._reducing: list[Release] = []
        for group in sharded_groups(model):
            whole = {}
            for owner, name, shard in group.parameters:
                parameter = twin.get_submodule(paths[id(owner)]).get_parameter(name)
                whole[id(parameter)] = parameter
                self._sizes[id(parameter)] = bytes_here(group, shard)
            modules = [twin.get_submodule(paths[id(module)]) for module in group.modules]
            local = sum(self._sizes[key] for key in whole)
            hold = functools.partial(tracker.hold, device=device)
            made = _Group(modules, list(whole.values()), local, group.reshards, hold, self._reducing)
            made.prefetches = device.type != "cpu"
            self._groups.append(made)

    def bytes_of(self, parameter: Tensor) -> int:
        """Return what a rank has of a parameter."""
        return self._sizes.get(id(parameter), parameter.nbytes)

    def end_backward(self) -> None:
        """Reduce what has not been: a group of which some parameters got no gradient."""
        for group in self._groups:
            group.reduce()
        _release(self._reducing)

    def has_gradient(self, parameter: Tensor) -> bool:
        """Return whether a parameter, or a rank's shard of it, has a gradient."""
        return parameter.grad is not None or any(id(parameter) in each.reduced for each in self._groups)

    def drop_gradients(self) -> None:
        for group in self._groups:
            group.drop_gradients()


class _Group:
    def __init__(
        self,
        modules: list[nn.Module],
        parameters: list[nn.Parameter],
        local: int,
        reshards: bool,
        hold: Callable[..., Release],
        reducing: list[Release],  # the buffer of the latest reduction of any group
    ) -> None:
        self.prefetches = True  # whether the next group is gathered while this one computes forward, too
        self._parameters = parameters
        self._bytes = sum(each.nbytes for each in parameters)
        self._local = local
        self._hold = hold
        self._reducing = reducing
        self._trained = sum(each.requires_grad for each in parameters)
        self._is_gathered = True
        self._buffer: list[Release] = []
        self._gradients: list[Release] = []
        self._arrived: set[int] = set()
        self.reduced: set[int] = set()
        self._free()
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_arrived)  # type: ignore[no-untyped-call]
        if local:
            self._hold(local, what="shards of parameters")
        for module in modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True)
            module.register_forward_hook(
                functools.partial(self._after_forward, reshards and len(modules) == 1)
            )

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self._gather()
        if not self.prefetches:
            _release(self._buffer)

    def _after_forward(self, reshards: bool, module: nn.Module, args: object, output: Any) -> None:
        if reshards:
            self._free()
        for each in pytree.tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda gradient: self._gather())  # type: ignore[no-untyped-call]

    def _gather(self) -> None:
        if self._is_gathered:
            return
        self._is_gathered = True
        self._buffer.append(self._hold(self._bytes, what="the buffer of an all-gather"))
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(parameter.nbytes)

    def _free(self) -> None:
        self._is_gathered = False
        _release(self._buffer)
        for parameter in self._parameters:
            parameter.untyped_storage().resize_(0)

    def _gradient_arrived(self, parameter: Tensor) -> None:
        self._arrived.add(id(parameter))
        if len(self._arrived) == self._trained:
            self.reduce()

    def reduce(self) -> None:
        """Exchange the gradients that have arrived for this rank's shards of them."""
        self._free()
        if not self._arrived:
            return
        _release(self._reducing)
        self._reducing.append(self._hold(self._bytes, what="the buffer of a reduce-scatter"))
        if self._local and not self._gradients:
            self._gradients.append(self._hold(self._local, what="shards of gradients"))
        for parameter in self._parameters:
            if id(parameter) in self._arrived:
                parameter.grad = None
        self.reduced |= self._arrived
        self._arrived.clear()

    def drop_gradients(self) -> None:
        self.reduced.clear()
        _release(self._gradients)


def _release(held: list[Release]) -> None:
    while held:
        held.pop()()
