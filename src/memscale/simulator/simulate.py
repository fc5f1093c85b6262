"""Run unchanged PyTorch training code on a device that is not there.

Note [The virtual GPU]
Inside the block every tensor is fake: it has a shape, a dtype, a device and a lifetime, but no data. The device is
torch's PrivateUse1 slot under the name `vgpu` (`device.py`), attention and autocast behave as on CUDA (`cuda.py`), and
the memory tracker follows every storage through a model of CUDA's caching allocator. All patches are undone at the end.

`simulate(..., device="cpu")` simulates the CPU: the same with the CPU's own kernels and exact bytes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memscale._torch import (
    FakeTensor,
    attribute,
    current_fake_mode,
    drop_reducers,
    pytree,
    sharded_groups,
    without_sharding,
)
from memscale._util.trees import any_on_accelerator, copied
from memscale.errors import SimulationError
from memscale.hardware import GpuSpec, gpu_or_size
from memscale.memory.allocator import CachingAllocator, ExactAllocator
from memscale.simulator import device as backend
from memscale.simulator.cuda import behaving_as_cuda, cuda_attention
from memscale.simulator.fake import FakeMode, StepTracker, data_protected, remember_values

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEFAULT_CAPABILITY = (8, 6)


class Simulation(backend.VirtualDevice):
    """A simulated device, and its memory during and after the block."""

    def copy_of(self, model: ModuleT, without: Iterable[nn.Module] = ()) -> ModuleT:
        """Return a copy of a real model on this device, without data, and empty in the place of `without`.

        What FSDP2 has sharded is whole in it, and DistributedDataParallel does not communicate.
        """
        storages: dict[int, Tensor] = {}
        left_out = set(without)
        memo: dict[int, Any] = {id(module): nn.Module() for module in left_out}
        groups = sharded_groups(model)
        for group in groups:
            for owner, name, shard in group.parameters:
                whole = torch.empty(shard.shape, dtype=group.dtype or shard.dtype, device=self.device)
                memo[id(getattr(owner, name))] = nn.Parameter(whole, shard.requires_grad)
        for tensor in _tensors_of(model, left_out):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake_twin(tensor, self.device, storages)
        with without_sharding(model):
            twin = copy.deepcopy(model, memo)
            is_alike = type(twin) is type(model)
        drop_reducers(twin)
        for group in groups:
            for module in group.modules:
                copied = memo.get(id(module))
                if group.dtype is not None and isinstance(copied, nn.Module):
                    cast = functools.partial(_cast_inputs, group.dtype)
                    copied.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
        if not is_alike:
            raise SimulationError(
                f"A deep copy of {type(model).__name__} is a {type(twin).__name__}; it can't be simulated."
            )
        return twin

    def batch_of(self, batch: Any) -> Any:
        """Return a copy of a real batch (tensors in containers and objects) on this device, without data."""
        storages: dict[int, Tensor] = {}
        keeps_host = any_on_accelerator(pytree.tree_leaves(batch))  # see Note [Inputs on the host]

        def twin(tensor: Tensor) -> Tensor:
            device = tensor.device if keeps_host and tensor.device.type == "cpu" else self.device
            fake = _fake_twin(tensor, device, storages)
            remember_values(fake, tensor)
            return fake

        return copied(batch, twin)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Cast what a module is called with, as FSDP2 does where parameters are gathered in another type."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    cast_args, cast_kwargs = pytree.tree_map(cast, (args, kwargs))
    return cast_args, cast_kwargs


def _resolve(on: str | int | GpuSpec) -> tuple[str, int, tuple[int, int]]:
    found = on if isinstance(on, GpuSpec) else gpu_or_size(on, field="simulate(on)")
    if isinstance(found, GpuSpec):
        return found.name, found.memory_bytes, found.compute_capability or DEFAULT_CAPABILITY
    return f"virtual GPU of {on}", found, DEFAULT_CAPABILITY


@contextlib.contextmanager
def simulate(
    on: str | int | GpuSpec = "RTX 3090", *, device: str = backend.NAME, index: int | None = None
) -> Iterator[Simulation]:
    """Run the block on a simulated device.

    Args:
        on: a GPU's name ("RTX 3090"), a size ("24GiB"), a number of bytes or a `GpuSpec`.
        device: "vgpu", or "cpu" to simulate a host of that much memory.
        index: on a machine with CUDA devices, which of them simulated tensors seem to be on; by default the current
            one.

    Raises:
        HardwareError: the name is unknown; the message lists the nearest ones.
        ConfigError: the size is not a positive number of bytes.
        SimulationError: a simulation is running already, or real weights are moved to the simulated device.
        torch.OutOfMemoryError: the step needs more than the device has.

    Example:
        >>> with simulate("RTX 3090") as sim:
        ...     model = nn.Linear(1024, 1024, device=sim.device)
        ...     model(torch.randn(8, 1024, device=sim.device)).sum().backward()
        >>> sim.peak_bytes > 2 * 4 * 1024 * 1024  # weights and gradients
        True
    """
    if device not in (backend.NAME, "cpu"):
        raise SimulationError(f"simulate(device={device!r}): allowed are {backend.NAME!r} and 'cpu'.")
    if current_fake_mode() is not None:
        raise SimulationError("A simulation is running already; leave its block before you open another.")
    name, capacity, capability = _resolve(on)
    tracker = StepTracker(allocators={"cpu": lambda: ExactAllocator(capacity)})
    target = torch.device("cpu")
    with contextlib.ExitStack() as stack:
        if device != "cpu":
            target = backend.virtual_device(index)
            tracker = StepTracker(
                workspace_bytes=backend.workspace_bytes(capability),
                allocators={target.type: lambda: CachingAllocator(capacity)},
            )
        simulation = Simulation(name, capacity, capability, target, tracker)
        if target.type == backend.NAME:
            installed = backend.is_active()  # by an executing device around this block
            stack.enter_context(backend.activate(simulation))
            if not installed:
                stack.enter_context(behaving_as_cuda(target, capability))
        elif target.type == "cuda":
            stack.enter_context(cuda_attention(capability, "AutogradCUDA"))
        masking = sys.modules.get("transformers.masking_utils")
        if hasattr(masking, "is_tracing"):
            # It takes fake tensors for a tracer's, for which it builds masks that a real step does not have.
            stack.enter_context(attribute(masking, "is_tracing", lambda *args, **kwargs: False))
        stack.enter_context(backend.like_cuda_tensors(FakeTensor))
        stack.enter_context(data_protected())
        stack.enter_context(FakeMode())
        stack.enter_context(tracker)
        yield simulation


# Attributes of modules that hold no tensors, or only those that are collected separately.
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_ATOMS = {bool, int, float, str, type(None)}
_CONTAINERS = {dict, OrderedDict, list, tuple, set}

# Classes of tensors that are nothing but memory; others may have more than a shape.
PLAIN_KINDS: set[type] = {Tensor, nn.Parameter, nn.Buffer, FakeTensor}


def _tensors_of(model: nn.Module, without: set[nn.Module]) -> list[Tensor]:
    """Return the parameters, buffers and tensors in plain attributes of all modules but those in `without`."""
    found: dict[int, Tensor] = {}
    for _, module in model.named_modules(memo=without):
        if isinstance(module, torch.jit.ScriptModule):
            raise SimulationError("A scripted module can't be simulated; profile with a real run instead.")
        for value in (*module._parameters.values(), *module._buffers.values()):
            if value is not None:
                found[id(value)] = value
        for name, value in vars(module).items():
            kind = type(value)
            if name in _REGISTERED or kind in _ATOMS or (kind in _CONTAINERS and not value):
                continue  # nearly all: flattening each is slow in deep models
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, Tensor):
                    found[id(leaf)] = leaf
    return list(found.values())


def _fake_twin(tensor: Tensor, device: torch.device, storages: dict[int, Tensor]) -> Tensor:
    if tensor.layout is not torch.strided:
        raise SimulationError(
            f"A {tensor.layout} tensor can't be simulated; profile with a real run instead."
        )
    if type(tensor) not in PLAIN_KINDS:
        raise SimulationError(
            f"A tensor of class {type(tensor).__name__} can't be simulated; profile with a real run instead."
        )
    storage = tensor.untyped_storage()
    if storage._cdata not in storages and tensor.nbytes == storage.nbytes() and tensor.is_contiguous():
        # Nearly all: a tensor that is all of its storage. Saving operations matters in deep models.
        twin = storages[storage._cdata] = torch.empty(tensor.size(), dtype=tensor.dtype, device=device)
    else:
        twin = _view(tensor, storage, device, storages)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad) if tensor.is_leaf else twin


def _view(
    tensor: Tensor, storage: torch.UntypedStorage, device: torch.device, storages: dict[int, Tensor]
) -> Tensor:
    """Return a fake tensor that shares its storage with others as `tensor` does."""
    if storage._cdata not in storages:
        elements = storage.nbytes() // max(1, tensor.element_size())
        storages[storage._cdata] = torch.empty(elements, dtype=tensor.dtype, device=device)
    base = storages[storage._cdata].detach().view(-1)
    if base.dtype is not tensor.dtype:
        base = base.view(tensor.dtype)
    return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
