"""Where the tensors of a model live: on the device, on the host, or on disk; and back again.

Parameters keep their identity when they move, so that optimizers, schedulers and the user's own references go on
as before. An optimizer's state follows its parameter, before a step and when everything goes back, unless the plan
has a place of its own for it (``optimizer/bucketed_steps.py``).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch import is_fake
from memscale._util.interrupts import raise_pending_interrupt
from memscale.observe.counters import Meter
from memscale.offload.freed_memory import freed_memory_returns
from memscale.offload.mapped import MappedParameters, exchange_data
from memscale.offload.materialise import Materialised, materialise
from memscale.optimizer.bucketed_steps import BucketedSteps
from memscale.optimizer.placement import PlacementSteps
from memscale.simulator.simulate import PLAIN_KINDS
from memscale.tiers.disk import DiskStore

__all__ = ["HOST", "Homes", "training_device"]

HOST = torch.device("cpu")


def training_device(model: nn.Module) -> torch.device:
    """Return where a model trains: on the accelerator that any of its tensors is on, else on the CPU."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return HOST


class Placement(enum.Enum):
    """Where a parameter is between the calls of its layer."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(eq=False)
class _Placed:
    """A parameter, and where it is.

    Attributes:
        parameter: The parameter.
        origin: Where it was before, and will be again.
        placement: Where it is now.
        disk_bound: Whether the plan has it on disk; one that is smaller than a page stays on the host all the same.
    """

    parameter: nn.Parameter
    origin: torch.device
    placement: Placement = Placement.DEVICE
    disk_bound: bool = False


class Homes:
    """The places of one model's tensors while it is wrapped, and where they were before.

    Args:
        store: The disk tier of the model; one with default settings if it is not given.
        meter: Counts what is moved, if anyone asks.

    Attributes:
        device: Where the model computes; None while nothing is arranged.
        host_capacity: The most host memory for parameters that are on the host instead of on an accelerator, with their
            gradients and optimizer state; None for no other limit than the host's own.
        fused_host_step: Whether parameters on the host instead of on an accelerator are stepped by torch's fused
            implementation where there is one.
        store: The disk.
        mapped: The parameters that are on disk.
        states: Where optimizer state is kept between steps, and what of it is in 8 bits.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> homes = Homes()
        >>> homes.arrange(model, model.parameters(), HOST)
        >>> homes.restore()
    """

    def __init__(self, store: DiskStore | None = None, meter: Meter | None = None) -> None:
        self.device: torch.device | None = None
        self.host_capacity: int | None = None
        self.fused_host_step = True
        self.store = store or DiskStore()
        self.mapped = MappedParameters(self.store, meter)
        self.states = BucketedSteps(self.store, meter)
        self._placed: dict[int, _Placed] = {}  # by the parameter's id
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        self._steps = PlacementSteps(self)

    @property
    def bytes_at_home(self) -> int:
        """Bytes of the parameters that are on the host or on disk now instead of on the device."""
        moved = (each for each in self._placed.values() if each.origin != each.parameter.device)
        return sum(each.parameter.nbytes for each in moved)

    @property
    def bytes_on_host(self) -> int:
        """Bytes of the parameters that are in host memory now instead of on the device."""
        on_disk = sum(parameter.nbytes for parameter in self.on_disk)
        return self.bytes_at_home - on_disk if self.device != HOST else 0

    @property
    def on_disk(self) -> list[nn.Parameter]:
        """The parameters that are on disk."""
        return [each.parameter for each in self._placed.values() if each.placement is Placement.DISK]

    def arrange(
        self,
        model: nn.Module,
        at_home: Iterable[nn.Parameter],
        device: torch.device,
        *,
        on_disk: Iterable[nn.Parameter] = (),
    ) -> None:
        """Move parameters to the host or to disk, and the others to the device.

        Raises:
            TierFullError: The cap on the disk would be exceeded, or it is full. What was not sent is as it was.
            TierError: The directory for it can't be used.
        """
        self.device = device
        for_disk = {id(parameter) for parameter in on_disk}
        for_host = {id(parameter) for parameter in at_home} | for_disk
        several = _storages_of_several(model)
        for parameter in model.parameters():
            raise_pending_interrupt()
            placed = self._placed.setdefault(id(parameter), _Placed(parameter, parameter.device))
            placed.disk_bound = id(parameter) in for_disk
            if placed.placement is Placement.DISK and not placed.disk_bound:
                self._bring_back(placed)
            # Moved one by one, parameters that share memory would share it no more: they stay.
            leaves = id(parameter) in for_host and _memory_of(parameter) not in several
            relocate(parameter, HOST if leaves else device)
            if leaves and placed.disk_bound and self.mapped.send(parameter):
                placed.placement = Placement.DISK
            else:
                placed.placement = Placement.HOST if leaves else Placement.DEVICE
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    self._buffers.append((module, name, buffer.device))
                    module._buffers[name] = buffer.to(device)
        if device != HOST:  # where nothing leaves the device, optimizers have nothing to follow
            self._steps.subscribe()

    def materialise(
        self,
        model: nn.Module,
        at_home: Iterable[nn.Parameter],
        device: torch.device,
        *,
        on_disk: Iterable[nn.Parameter] = (),
    ) -> Materialised:
        """Give what is on the meta device memory where :meth:`arrange` would send it, and values.

        Raises:
            As :meth:`arrange` and :func:`memscale.offload.materialise.materialise`.
        """
        below = {id(parameter) for parameter in on_disk}
        host = {id(parameter) for parameter in at_home} | below
        before = training_device(model)  # where `restore` leaves all of it, with what has been somewhere

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            raise_pending_interrupt()
            if not isinstance(tensor, nn.Parameter):
                return torch.empty_like(tensor, device=before)
            mapped = self.mapped.home_of(tensor) if id(tensor) in below else None
            where = HOST if id(tensor) in host else device
            return torch.empty_like(tensor, device=where, requires_grad=False) if mapped is None else mapped

        with freed_memory_returns():
            made = materialise(model, allocate, self.store.fill, self.store.release_pages)
        for parameter in made.parameters:
            self._placed.setdefault(id(parameter), _Placed(parameter, before))
        return made

    def restore(self) -> None:
        """Move everything where it was before the first :meth:`arrange`."""
        self._steps.unsubscribe()
        self.states.restore()
        for placed in self._placed.values():
            if placed.placement is Placement.DISK:
                self._bring_back(placed)
        if any(placed.parameter.device != placed.origin for placed in self._placed.values()):
            self._steps.find_optimizers()
        for placed in self._placed.values():
            relocate(placed.parameter, placed.origin)
        for module, name, device in self._buffers:
            buffer = module._buffers.get(name)
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        for optimizer in list(self._steps.optimizers):
            self._steps.follow(optimizer)
        self._steps.optimizers.clear()
        self._placed.clear()
        self._buffers.clear()
        self.store.close()
        self.device = None

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer that steps the model's parameters: its state is where these are, or are to be."""
        self._steps.optimizers.add(optimizer)

    def settle_states(self) -> None:
        """Move optimizer state to its tier now, instead of before the next step: the device may be short of memory."""
        for optimizer in list(self._steps.optimizers):
            self._steps.follow(optimizer)
            self.states.store_state(optimizer)

    def _bring_back(self, placed: _Placed) -> None:
        self.mapped.bring_back(placed.parameter)
        placed.placement = Placement.HOST

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
            and each.placement is not Placement.DISK
            and (with_disk_bound or not each.disk_bound)
        ]

    def origins(self, model: nn.Module) -> dict[str, torch.device]:
        """Return where parameters and buffers were before, by their names."""
        if self.device is None:
            return {}
        found = {name: self._placed[id(each)].origin for name, each in model.named_parameters()}
        moved = {id(module._buffers.get(name)): device for module, name, device in self._buffers}
        return found | {name: moved.get(id(each), each.device) for name, each in model.named_buffers()}

    def set_origins(self, model: nn.Module, origins: dict[str, torch.device]) -> None:
        """Have parameters and buffers go elsewhere on :meth:`restore` than where they were before."""
        for path, origin in origins.items():
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            if name in module._parameters:
                self._placed[id(module._parameters[name])].origin = origin
            elif (buffer := module._buffers[name]) is not None and buffer.device != origin:
                self._buffers.append((module, name, origin))


def _memory_of(tensor: torch.Tensor) -> int | None:
    if tensor.layout is not torch.strided or type(tensor) not in PLAIN_KINDS or tensor.is_meta:
        return None
    storage = tensor.untyped_storage()
    return storage._cdata if is_fake(tensor) else storage.data_ptr()


def _storages_of_several(model: nn.Module) -> set[int]:
    """Return the memory that more than one parameter or buffer is a view of; a tied parameter is one."""
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    counts = Counter(map(_memory_of, tensors.values()))
    return {memory for memory, count in counts.items() if count > 1 and memory is not None}


def relocate(parameter: nn.Parameter, device: torch.device) -> None:
    """Move a parameter and its gradient; it stays the same object."""
    if parameter.device == device or parameter.is_meta:
        return
    gradient = parameter.grad
    parameter.grad = None
    with torch.no_grad():
        moved = parameter.detach().to(device)
        exchange_data(parameter, moved)
        if gradient is not None:
            parameter.grad = gradient.to(device)
