"""Where the parameters of a model are while it is wrapped: on the device, on the host or on disk; and back again.

Parameters stay the same objects when they move. An optimizer's state follows its parameter, before a step and when
everything moves back, unless the plan has a tier of its own for it (``optimizer/bucketed_steps.py``).

Note [Parameters on disk]
~~~~~~~~~~~~~~~~~~~~~~~~~
A parameter on disk is the user's own ``nn.Parameter``; its ``.data`` is a mapped tensor (Note [Mapped tensors]), so
kernels, the optimizer and ``state_dict`` find its values. Its pages are released when a layer has used them: after its
forward pass; in backward, when the gradient of a parameter was accumulated; and, for the sake of frozen parameters,
when the next layer begins, and when backward ends. To release pages too early costs a page fault, and never a value.
What the page cache has not kept is prefetched, a layer at a time, while the layer before it computes.

*Gradients.* Autograd makes a gradient in memory. When it has been accumulated, it is exchanged for a mapped copy,
to which the next micro-batch adds in place, as autograd adds to any gradient that is there. What is no ordinary
gradient stays as it is: a sparse one, a view of a bucket, one with a graph of its own (``create_graph=True``).

*Small ones* stay in memory: below a page there is nothing to release.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import (
    OUTSIDE_BACKWARD,
    FakeTensor,
    allows_shallow_copy,
    at_end_of_backward,
    graph_task_id,
    is_fake,
    sharded_groups,
)
from memscale._util.interrupts import raise_pending_interrupt
from memscale.execution_plan import Tier
from memscale.hardware.host import read_host
from memscale.memory.tracker import ResidentPages
from memscale.observe.counters import Meter
from memscale.offload.materialise import Materialised, materialise, swap_keeping_hooks
from memscale.optimizer.bucketed_steps import BucketedSteps
from memscale.optimizer.device_steps import DeviceSteps
from memscale.optimizer.eight_bit import is_dense
from memscale.optimizer.placement import PlacementSteps
from memscale.optimizer.state_stores import tensors_in
from memscale.simulator.simulate import PLAIN_KINDS
from memscale.techniques.undo_log import GradientHook
from memscale.tiers.disk import HOST, PAGE, DiskStore
from memscale.tiers.engine import MASTERS_SHARE, PinnedMemory


def training_device(model: nn.Module) -> torch.device:
    """Return where a model trains: on the accelerator that any of its tensors is on, else on the CPU."""
    gathered = (group.device for group in sharded_groups(model))  # the shards may be on the host
    devices = (*gathered, *(each.device for each in (*model.parameters(), *model.buffers())))
    return next((device for device in devices if device.type not in ("cpu", "meta")), HOST)


def bytes_held_on_host(parameters: Iterable[nn.Parameter], placement: ModelPlacement | None = None) -> int:
    """Return what a model that trains on an accelerator has in this host's memory already, for its plans to count.

    That is parameters that are still there or are kept there, with gradients; optimizer state; and page-locked memory.
    """
    found: list[torch.Tensor] = []
    for parameter in parameters:
        found += [parameter] if parameter.grad is None else [parameter, parameter.grad]
        for optimizer in () if placement is None else placement.optimizers:
            state = optimizer.state.get(parameter)
            found += [tensor for *_, tensor in tensors_in(state)] if isinstance(state, dict) else []
    ordinary = sum(
        each.nbytes
        for each in found
        if each.device == HOST and each.layout is torch.strided and type(each) in PLAIN_KINDS
        if not is_fake(each)
        and not each.is_pinned()
        and (placement is None or not placement.store.holds(each))
    )
    return ordinary + (0 if placement is None else placement.pinned.bytes_locked)


@dataclass(eq=False)
class PlacedParameter:
    """A parameter with its gradient: where they are, and where they were."""

    parameter: nn.Parameter
    origin: torch.device  # where it was before, and will be again
    store: DiskStore
    pinned: PinnedMemory
    meter: Meter
    tier: Tier = "device"  # between the calls of its layer
    disk_bound: bool = False  # the plan has it on disk, though it may be too small for that
    page_locked: bool = False  # in the model's page-locked memory
    _gradient_hook: GradientHook | None = None
    _pages: ResidentPages | None = None  # what trackers are told of

    def move(self, tier: Tier, device: torch.device) -> None:
        """Move the parameter and its gradient to a tier; after a TierFullError or TierError it is in memory."""
        if self.tier == "disk" and tier != "disk":
            self.bring_to_memory()
        memory = None
        if tier == "host" and not self.page_locked:
            memory = self.pinned.empty_like(self.parameter, device, MASTERS_SHARE)
        relocate(self.parameter, device if tier == "device" else HOST, memory)
        self.page_locked = tier == "host" and (self.page_locked or memory is not None)
        self.tier = tier if tier != "disk" or self._move_to_disk() else "host"

    def _move_to_disk(self) -> bool:
        """Exchange its memory for mapped memory; returns False for one that is better left in memory."""
        parameter = self.parameter
        if not self.store.holds(parameter):
            if not can_be_mapped(parameter):
                return False
            mapped, gradient = self.store.copy_of(parameter), parameter.grad
            self.tier = "disk"  # so that `bring_to_memory` undoes what follows, should it fail
            exchange_data(parameter, mapped)
            parameter.grad = gradient
        self._watch_gradient()
        self._map_gradient()
        return True

    def bring_to_memory(self) -> None:
        """Make it an ordinary parameter in host memory again, with an ordinary gradient."""
        parameter, gradient = self.parameter, self.parameter.grad
        if self._gradient_hook is not None:
            self._gradient_hook.remove(parameter)
            self._gradient_hook = None
        # First all that there may be no memory for: then it stays on disk as it is.
        if gradient is not None and self.store.holds(gradient):
            gradient = gradient.detach().clone()
        if self.store.holds(parameter):
            exchange_data(parameter, parameter.detach().clone())
        parameter.grad = gradient
        self.tier = "host"

    def _watch_gradient(self) -> None:
        """Have its gradient go to disk, if it gets one."""
        parameter = self.parameter
        if self._gradient_hook is None and parameter.requires_grad and parameter.is_leaf:
            self._gradient_hook = GradientHook(parameter, self.gradient_arrived)

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Move the gradient to disk: it was accumulated."""
        if parameter is not self.parameter or not self.store.holds(parameter):
            return
        with self.meter.timing("offloading"):
            self._map_gradient()
            self.release_pages()
        if self.parameter.grad is not None and self.store.holds(self.parameter.grad):
            self.meter.count_written("gradients", "disk", self.parameter.grad.nbytes)

    def _map_gradient(self) -> None:
        gradient = self.parameter.grad
        if gradient is not None and not self.store.holds(gradient) and can_be_mapped(gradient):
            self.parameter.grad = self.store.copy_of(gradient)

    def begin_use(self) -> None:
        """Tell trackers that its pages are in memory; watch its gradient, as it may have been frozen until now."""
        self._watch_gradient()
        if self._pages is None:
            self._pages = ResidentPages(self.parameter.nbytes, simulated=is_fake(self.parameter))

    def release_pages(self) -> None:
        """Release its pages, and those of its gradient."""
        self.store.release_pages(self.parameter)
        if self.parameter.grad is not None:
            self.store.release_pages(self.parameter.grad)
        if self._pages is not None:
            self._pages.release()
            self._pages = None


class ModelPlacement:
    """Where one model's tensors are while it is wrapped, and where they were before.

    Args:
        store: The disk tier of the model; by default one with default settings.
        meter: Counts what is moved.
        pinned: The page-locked memory of the model; by default with default settings.

    Attributes:
        device: Where the model computes; None while nothing is placed.
        host_capacity: The most host memory for what is on the host instead of on an accelerator; None for what is free.
        fused_host_step: Whether those are stepped by torch's fused implementation, where there is one.
        device_steps: Steps those on the device instead of on the CPU; None if the plan does not.
        states: Where optimizer state is kept between steps, and what of it is in 8 bits.
    """

    def __init__(
        self, store: DiskStore | None = None, meter: Meter | None = None, pinned: PinnedMemory | None = None
    ) -> None:
        self.device: torch.device | None = None
        self.host_capacity: int | None = None
        self.fused_host_step = True
        self.device_steps: DeviceSteps | None = None
        self.store = store or DiskStore()
        self.pinned = pinned or PinnedMemory()
        self._meter = meter or Meter()
        self.states = BucketedSteps(self.store, self._meter, self.pinned)
        self._placed: dict[int, PlacedParameter] = {}  # by the parameter's id
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        self._steps = PlacementSteps(self)
        self._used_in_backward: list[PlacedParameter] = []
        self._task = OUTSIDE_BACKWARD
        self._latest: tuple[bool, int] | None = None
        self._followers: dict[tuple[bool, int], Sequence[PlacedParameter]] = {}  # by direction and layer

    @property
    def bytes_on_host(self) -> int:
        """Bytes of the parameters that are in host memory instead of on the device."""
        return sum(parameter.nbytes for parameter in self.host_masters())

    @property
    def optimizers(self) -> weakref.WeakSet[Optimizer]:
        """The optimizers that have stepped the parameters, whose state follows these."""
        return self._steps.optimizers

    def host_room(self) -> int:
        """Return the most that the model may have in host memory: its cap, or what is free and what it has there."""
        if self.host_capacity is not None:
            return self.host_capacity
        parameters = [each.parameter for each in self._placed.values()]
        if any(map(is_fake, parameters)):
            return sys.maxsize  # the host that is planned for need not be this one
        host, held = read_host(), bytes_held_on_host(parameters, self)
        return host.available_ram_bytes // host.processes + held

    @property
    def on_disk(self) -> list[nn.Parameter]:
        """The parameters that are on disk."""
        return [each.parameter for each in self._placed.values() if each.tier == "disk"]

    def parameter_ids(self) -> Container[int]:
        """Return the ids of the model's parameters."""
        return self._placed

    def host_masters(self, *, with_disk_bound: bool = True) -> list[nn.Parameter]:
        """Return the parameters that are in host memory instead of on the device."""
        if self.device in (None, HOST):
            return []
        return [
            each.parameter
            for each in self._placed.values()
            if each.parameter.device == HOST
            and each.tier != "disk"
            and (with_disk_bound or not each.disk_bound)
        ]

    # ------------------------------------------------------------------ moving

    def place_parameters(self, model: nn.Module, tiers: Mapping[int, Tier], device: torch.device) -> None:
        """Move parameters to their tiers, given by their ids, and all others to the device.

        After a TierError (TierFullError if the disk is full), what was not moved is as it was.
        """
        self.device = device
        shared = _shared_storages(model)
        for parameter in model.parameters():
            raise_pending_interrupt()
            placed = self._placed.get(id(parameter)) or self._add(parameter, parameter.device)
            tier = tiers.get(id(parameter), "device")
            placed.disk_bound = tier == "disk"
            # Moved one by one, parameters that share memory would share it no more: they stay.
            placed.move("device" if _memory_of(parameter) in shared else tier, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    self._buffers.append((module, name, buffer.device))
                    module._buffers[name] = buffer.to(device)
        if device != HOST:  # where nothing leaves the device, optimizers have nothing to follow
            self._steps.subscribe()

    def materialise(self, model: nn.Module, tiers: Mapping[int, Tier], device: torch.device) -> Materialised:
        """Give what is on the meta device memory where `place_parameters` would move it, and values.

        Raises as that and :func:`memscale.offload.materialise.materialise`.
        """
        before = training_device(model)  # where `restore` leaves all of it, with what has been somewhere
        locked: set[int] = set()

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            raise_pending_interrupt()
            if not isinstance(tensor, nn.Parameter):
                return torch.empty_like(tensor, device=before)
            tier = tiers.get(id(tensor), "device")
            pinned = self.pinned.empty_like(tensor, device, MASTERS_SHARE) if tier == "host" else None
            if pinned is not None:
                locked.add(id(tensor))
                return pinned
            where = device if tier == "device" else HOST
            memory = torch.empty_like(tensor, device=where, requires_grad=False)
            mapped = tier == "disk" and can_be_mapped(memory)  # memory is not used until it is touched
            return self.store.empty_like(tensor) if mapped else memory

        made = materialise(model, allocate, self.store.fill, self.store.release_pages)
        for parameter in made.parameters:
            placed = self._placed.get(id(parameter)) or self._add(parameter, before)
            placed.page_locked = id(parameter) in locked
        return made

    def _add(self, parameter: nn.Parameter, origin: torch.device) -> PlacedParameter:
        placed = PlacedParameter(parameter, origin, self.store, self.pinned, self._meter)
        self._placed[id(parameter)] = placed
        return placed

    def restore(self) -> None:
        """Move everything where it was before the first :meth:`place_parameters`."""
        self._steps.unsubscribe()
        self.states.restore()
        self.device_steps = None
        for placed in self._placed.values():
            if placed.tier == "disk":
                placed.bring_to_memory()
        if any(placed.parameter.device != placed.origin for placed in self._placed.values()):
            self._steps.find_optimizers()
        for placed in self._placed.values():
            parameter, to_ordinary = placed.parameter, placed.page_locked and placed.origin == HOST
            relocate(parameter, placed.origin, torch.empty_like(parameter) if to_ordinary else None)
        for module, name, device in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for optimizer in list(self._steps.optimizers):
            self._steps.follow(optimizer, unlock=self.device is not None and self.device.type == "cuda")
        self._buffers.clear()
        self.release()

    def release(self) -> None:
        """Let go of all parameters where they are, without moving any: others have replaced them."""
        self._steps.unsubscribe()
        self.states.restore()
        self.device_steps = None
        self._steps.optimizers.clear()
        self._placed.clear()
        self._used_in_backward.clear()
        self._followers.clear()
        self.store.close()
        self.pinned.trim()
        self.device = None

    def convert_masters(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """Change the type of offloaded parameters as `convert` does, not their tier; return whether any changed."""
        changed = False
        for placed in self._placed.values():
            parameter, tier = placed.parameter, placed.tier
            if tier == "device" or convert(torch.empty(0, dtype=parameter.dtype)).dtype == parameter.dtype:
                continue
            changed = True
            placed.bring_to_memory()
            placed.page_locked = False
            gradient = parameter.grad
            with torch.no_grad():
                exchange_data(parameter, convert(parameter.detach()).to(HOST))
                parameter.grad = None if gradient is None else convert(gradient).to(HOST)
            placed.move(tier, self.device or HOST)
        return changed

    def origins(self, model: nn.Module) -> dict[str, torch.device]:
        """Return where parameters and buffers were before, by their names."""
        if self.device is None:
            return {}
        found = {}
        for name, each in model.named_parameters():  # the user may have replaced some since they were placed
            placed = self._placed.get(id(each))
            found[name] = each.device if placed is None else placed.origin
        moved = {id(module._buffers.get(name)): device for module, name, device in self._buffers}
        return found | {name: moved.get(id(each), each.device) for name, each in model.named_buffers()}

    def set_origins(self, model: nn.Module, origins: dict[str, torch.device]) -> None:
        """Have parameters and buffers go elsewhere on :meth:`restore` than where they were before."""
        for path, origin in origins.items():
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            if name in module._parameters:
                if (placed := self._placed.get(id(module._parameters[name]))) is not None:
                    placed.origin = origin
            elif (buffer := module._buffers[name]) is not None and buffer.device != origin:
                self._buffers.append((module, name, origin))

    # ------------------------------------------------------------------ optimizer state

    def store_states(self) -> None:
        """Move optimizer state to its tier now, instead of before the next step: the device may be short of memory."""
        for optimizer in list(self._steps.optimizers):
            self._steps.follow(optimizer)
            self.states.store_state(optimizer)

    # ------------------------------------------------------------------ pages of parameters on disk

    def begin_use(self, parameters: Iterable[torch.Tensor]) -> Sequence[PlacedParameter]:
        """Prefetch and count the pages of a layer that is about to compute; returns what of it is on disk."""
        found = (self._placed.get(id(each)) for each in parameters)
        mapped = [each for each in found if each is not None and each.tier == "disk"]
        mapped = [each for each in mapped if self.store.holds(each.parameter)]  # the user may have moved it
        if not mapped:
            return mapped
        task = graph_task_id()
        in_backward = task != OUTSIDE_BACKWARD
        with self._meter.timing("offloading"):
            # This layer, and the one that came after it last time.
            key = (in_backward, id(mapped[0]))
            if self._latest is not None and self._latest[0] == in_backward and self._latest != key:
                self._followers[self._latest] = mapped
            self._latest = key
            for each in (*mapped, *self._followers.get(key, ())):
                self.store.prefetch_pages(each.parameter)
            if in_backward and task != self._task:
                self._task = task
                at_end_of_backward(self.release_pages_of_backward)
            self.release_pages_of_backward()  # in forward those of a pass that has failed
            if in_backward:
                self._used_in_backward += mapped
        self._meter.count_read("parameters", "disk", sum(each.parameter.nbytes for each in mapped))
        for each in mapped:
            each.begin_use()
        return mapped

    def end_use(self, mapped: Sequence[PlacedParameter]) -> None:
        """Release the pages of a layer whose forward is over, unless it was run by backward, which needs them."""
        if mapped and graph_task_id() == OUTSIDE_BACKWARD:
            with self._meter.timing("offloading"):
                for each in mapped:
                    each.release_pages()

    def release_pages(self, parameter: nn.Parameter) -> None:
        """Release the pages of one parameter and of its gradient."""
        self._placed[id(parameter)].release_pages()

    def release_pages_of_backward(self) -> None:
        """Release the pages of the layers that backward has used so far."""
        while self._used_in_backward:
            self._used_in_backward.pop().release_pages()


# ---------------------------------------------------------------------- a parameter's memory


def can_be_mapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an ordinary one in the CPU's memory, all of a storage that is its own."""
    if not is_fake(tensor) and type(tensor) not in (torch.Tensor, nn.Parameter):
        return False
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.nbytes < PAGE:
        return False
    if tensor.grad_fn is not None or (tensor.requires_grad and not isinstance(tensor, nn.Parameter)):
        return False
    storage = tensor.untyped_storage()
    shared = not is_fake(tensor) and storage.is_shared()
    return is_dense(tensor) and storage.nbytes() == tensor.nbytes and not shared


def exchange_data(parameter: nn.Parameter, new: torch.Tensor) -> None:
    """Give a parameter the memory of another tensor, and no gradient; it stays the same object."""
    # Whether `.data =` can do it, as `Module.to` decides it; fake and wrapped tensors are swapped.
    plain = type(new) is torch.Tensor and not isinstance(parameter, FakeTensor)
    parameter.grad = None
    with torch.no_grad():
        if plain and type(parameter.data) is torch.Tensor and allows_shallow_copy(parameter, new):
            parameter.data = new
            return
        old = nn.Parameter(new, parameter.requires_grad)
        swap_keeping_hooks(parameter, old)
        if not isinstance(old, FakeTensor):
            # The graph of the last loss, which a loop holds though it is through with it, refers to `old`.
            old.data = old.data.new_empty(0)


def relocate(parameter: nn.Parameter, device: torch.device, memory: torch.Tensor | None = None) -> None:
    """Move a parameter and its gradient, it to given memory if there is some; it stays the same object."""
    if (parameter.device == device and memory is None) or parameter.is_meta:
        return
    with torch.no_grad():
        # Both before the exchange: if there is no room for one of them, they stay where they are.
        gradient = None if parameter.grad is None else parameter.grad.to(device)
        values = parameter.detach()
        exchange_data(parameter, values.to(device) if memory is None else memory.copy_(values))
        parameter.grad = gradient


def _memory_of(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN_KINDS or tensor.is_meta:
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()


def _shared_storages(model: nn.Module) -> set[int]:
    """Return the memory that more than one parameter or buffer is a view of; a tied parameter is one."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    counts = Counter(map(_memory_of, tensors.values()))
    return {memory for memory, count in counts.items() if count > 1 and memory is not None}
