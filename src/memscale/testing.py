"""A virtual GPU that computes, for tests of MemScale and for users' tests of their own training code.

`executing` runs code written for a device on a machine without one. A tensor is a wrapper with the device `vgpu:0`
around an ordinary CPU tensor. Operations run on the CPU tensors, random ones with the device's own generator; operands
on two devices raise as on CUDA; memory goes through the same tracker and allocator as in the simulator, with a
capacity. It is slow, but its numbers can be compared with the CPU's, and its bytes with the simulator's.

Nothing in MemScale imports this module.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from memscale._torch import (
    FOREACH_MUL,
    decomposition,
    disabled_torch_function,
    foreach_mul_,
    make_wrapper_subclass,
    map_location_in_use,
    pytree,
    with_autograd_below_dispatch,
)
from memscale.memory.allocator import CachingAllocator
from memscale.simulator import device as backend
from memscale.simulator.cuda import behaving_as_cuda
from memscale.simulator.device import DeviceTracker, op_name, workspace_bytes
from memscale.simulator.fake import gru_cell, gru_cell_backward
from memscale.simulator.simulate import PLAIN_KINDS
from memscale.units import parse_bytes

__all__ = ["ExecutingDevice", "ExecutingTensor", "executing"]

aten = torch.ops.aten

# Operations that accept operands on two devices, as on CUDA.
CROSS_DEVICE = {"index", "_index_put_impl_", "index_put", "index_put_", "copy_", "_to_copy", "_unsafe_index"}


class ExecutingTensor(Tensor):
    """A CPU tensor under the label of the virtual device."""

    host: Tensor
    __slots__ = ()  # tensors with slots of their own cannot be swapped by Module.to
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, host: Tensor) -> ExecutingTensor:
        tensor: ExecutingTensor = make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(backend.NAME, 0),
            requires_grad=False,
        )
        tensor.host = host
        return tensor

    @property
    def data(self) -> Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        assert isinstance(value, ExecutingTensor)
        self.host = value.host

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {backend.NAME}:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]  # torch has one option, unused
        return f"ExecutingTensor({self.host!r}, device='{backend.NAME}:0')"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.host, isinstance(self, nn.Parameter), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copy = self.detach().clone()
            memo[id(self)] = _with_flags(copy, isinstance(self, nn.Parameter), self.requires_grad)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it on the instance
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _execute(func, args, kwargs or {})


PLAIN_KINDS.add(ExecutingTensor)  # a model on this device can be simulated


def _with_flags(tensor: Tensor, parameter: bool, requires_grad: bool) -> Tensor:
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _rebuild(host: Tensor, parameter: bool, requires_grad: bool) -> Tensor:
    # None outside of `torch.load`.
    to = map_location_in_use()
    if isinstance(to, (str, torch.device)) and torch.device(to).type == "cpu":
        return _with_flags(host, parameter, requires_grad)
    return _with_flags(ExecutingTensor(host), parameter, requires_grad)


class ExecutingTracker(DeviceTracker):
    """The device's tracker; page-locked host memory is ordinary host memory here."""

    _plain = DeviceTracker._plain | {ExecutingTensor}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if name == "is_pinned":
            return False
        if name in ("pin_memory", "_pin_memory"):
            func, args, kwargs = aten.clone.default, args[:1], {}
        elif kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return super().__torch_dispatch__(func, types, args, kwargs)


def _execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU tensors behind the wrappers."""
    name = op_name(func)
    if name == "record_stream":
        return None
    wrappers: dict[int, ExecutingTensor] = {}
    foreign: list[Tensor] = []

    def unwrap(value: Any) -> Any:
        if isinstance(value, ExecutingTensor):
            wrappers[id(value.host)] = value
            return value.host
        if isinstance(value, Tensor) and value.dim() and value.device.type == "cpu":
            foreign.append(value)
        if isinstance(value, torch.device) and value.type == backend.NAME:
            return torch.device("cpu")
        return value

    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    host_args, host_kwargs = pytree.tree_map(unwrap, (args, kwargs))
    if foreign and wrappers and name not in CROSS_DEVICE:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{backend.NAME}:0 and cpu! (when checking arguments of {func})"
        )
    if name == "copy_":
        host_args[0].copy_(*host_args[1:])
        return args[0]
    if name == "_to_copy" and device is not None:
        layout = host_kwargs.get("memory_format") or torch.preserve_format
        dtype = host_kwargs.get("dtype") or host_args[0].dtype
        result = host_args[0].to(dtype, copy=True, memory_format=layout)
    else:
        kernel = CPU_KERNELS.get(func, func)
        with _device_random(func):
            result = kernel(*host_args, **host_kwargs)
    if to_host:
        return result
    return pytree.tree_map(lambda leaf: _wrap(leaf, wrappers, func._schema.is_mutable), result)


def _wrap(leaf: Any, wrappers: dict[int, ExecutingTensor], mutable: bool) -> Any:
    if not isinstance(leaf, Tensor) or isinstance(leaf, ExecutingTensor):
        return leaf
    original = wrappers.get(id(leaf))
    if original is None or not mutable:
        return ExecutingTensor(leaf)
    if original.shape != leaf.shape or original.stride() != leaf.stride():
        # resize_, t_ and the like also change the wrapper's metadata.
        torch.Tensor.data.__set__(original, ExecutingTensor(leaf))  # type: ignore[attr-defined]
        original.host = leaf
    return original


@contextlib.contextmanager
def _device_random(func: Any) -> Iterator[None]:
    """Let a random operation inside the block draw from the device's generator instead of the host's."""
    if torch.Tag.nondeterministic_seeded not in func.tags or _generator is None:
        yield
        return
    host = torch.get_rng_state()
    torch.set_rng_state(_generator.get_state())
    try:
        yield
    finally:
        _generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


_generator: torch.Generator | None = None


class ExecutingDevice(backend.VirtualDevice):
    """The executing device of a block, and its memory."""

    computes: ClassVar[bool] = True

    def __init__(self, capacity: int, capability: tuple[int, int]) -> None:
        tracker = ExecutingTracker(
            workspace_bytes=workspace_bytes(capability),
            allocators={backend.NAME: lambda: CachingAllocator(capacity)},
        )
        device = torch.device(backend.NAME, 0)
        super().__init__("executing virtual GPU", capacity, capability, device, tracker)
        self.generator = torch.Generator()

    def get_rng_state(self) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    form = memory_format or torch.contiguous_format
    return ExecutingTensor(torch.empty(size, dtype=dtype, device="cpu", memory_format=form))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return ExecutingTensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    # torch.tensor(..., device="vgpu") copies with Python dispatch disabled.
    host = [each.host if isinstance(each, ExecutingTensor) else each for each in (source, target)]
    host[1].copy_(host[0])
    return target


@contextlib.contextmanager
def executing(
    capacity: int | str = "24GiB", *, capability: tuple[int, int] = (8, 6), seed: int = 0
) -> Iterator[ExecutingDevice]:
    """Run the block with a virtual GPU that computes.

    Args:
        capacity: its memory, in bytes or with a unit.
        capability: the compute capability that it reports, which decides on attention kernels and workspaces.
        seed: of its random generator.

    Raises:
        SimulationError: a virtual GPU is active already.
        torch.OutOfMemoryError: inside the block, if it needs more than the capacity.

    Example:
        >>> with executing("64MiB") as gpu:
        ...     x = torch.ones(4, device=gpu.device)
        ...     float((x + x).sum())
        8.0
    """
    global _generator
    backend.register()
    device = ExecutingDevice(parse_bytes(capacity, field="executing(capacity)"), capability)
    device.manual_seed(seed)
    with (
        backend.activate(device),
        backend.operators("PrivateUse1") as implement,
        behaving_as_cuda(device.device, capability),
        backend.like_cuda_tensors(ExecutingTensor),
        cast(Any, torch.serialization.safe_globals)([_rebuild]),
        device.tracker,
    ):
        implement("empty.memory_format", _empty)
        implement("empty_strided", _empty_strided)
        implement("_copy_from", _copy_from)
        _generator = device.generator
        try:
            yield device
        finally:
            _generator = None
            _random_states.clear()


# -- CUDA-only operations, and those that round otherwise there, computed on the CPU
#
# Each returns tensors of exactly the shapes and layouts of the CUDA operation, by torch's shape rules for meta tensors:
# the executing device and the simulator account for the same bytes.

# Backward draws a dropout mask again from the random state that forward began with. The operation only passes an 8-byte
# seed, so the state is kept here under that number; old ones are dropped.
_random_states: dict[int, bytearray] = {}  # not tensors, which a count of those alive would find
_state_numbers = itertools.count(1)
_MAX_STATES = 1024


def _like_cuda(func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the operation's outputs with CUDA's shapes and strides, uninitialised."""
    meta = [each.to("meta") if isinstance(each, Tensor) else each for each in args]
    shapes = func(*meta, **kwargs)
    return tuple(
        torch.empty_strided(each.size(), each.stride(), dtype=each.dtype)
        if isinstance(each, Tensor)
        else each
        for each in shapes
    )


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an attention operation by name, with key and value repeated for each head."""
    arguments = func._schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    groups = given["query"].size(1) // given["key"].size(1)
    for name in ("key", "value"):
        if groups > 1:
            given[name] = given[name].repeat_interleave(groups, 1)
    return given


def _attend(given: dict[str, Any], *inputs: Tensor | None) -> Tensor:
    # The CPU's own attention, for the numbers of a CPU run, whichever kernels the user allows on the device.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        attend: Any = functional.scaled_dot_product_attention
        out: Tensor = attend(*inputs, given["dropout_p"], given["is_causal"], scale=given["scale"])
    return out


def _attention(func: Any, seed_output: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Compute one of CUDA's attention kernels; `seed_output` is the position of the random seed in its results."""
    given = _named(func, args, kwargs)
    outputs = _like_cuda(func, *args, **kwargs)
    number = 0
    if given["dropout_p"] > 0:
        number = next(_state_numbers)
        _random_states[number] = bytearray(torch.get_rng_state().tolist())
        _random_states.pop(number - _MAX_STATES, None)
    outputs[0].copy_(_attend(given, given["query"], given["key"], given["value"], given.get("attn_bias")))
    outputs[seed_output].fill_(number)
    return outputs


def _attention_backward(func: Any, gradient: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Compute the backward of one of CUDA's attention kernels by recomputing its forward."""
    given = _named(func, (gradient, *args), kwargs)
    outputs = _like_cuda(func, gradient, *args, **kwargs)
    bias = given.get("attn_bias")
    inputs = [given["query"], given["key"], given["value"], bias]
    wanted = [True, True, True, bias is not None and given["grad_input_mask"][3]]
    now = torch.get_rng_state()
    if given["dropout_p"] > 0:
        state = _random_states[int(given["philox_seed"].flatten()[0])]
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
    try:
        with torch.enable_grad(), with_autograd_below_dispatch():
            leaves = [
                None if each is None else each.detach().requires_grad_(want)
                for each, want in zip(inputs, wanted, strict=True)
            ]
            asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found = torch.autograd.grad(_attend(given, *leaves), asked, gradient)
    finally:
        torch.set_rng_state(now)
    for output, value in zip(outputs, found, strict=False):
        if value.shape != output.shape:  # key and value were repeated
            value = value.reshape(*output.shape[:2], -1, *output.shape[2:]).sum(2)
        output.copy_(value)
    return outputs


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cell: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, new, show = gates.chunk(4, 1)
    workspace = torch.cat([enter.sigmoid(), forget.sigmoid(), new.tanh(), show.sigmoid()], 1)
    enter, forget, new, show = workspace.chunk(4, 1)
    next_cell = forget * cell + enter * new
    return show * next_cell.tanh(), next_cell, workspace


def _lstm_cell_backward(
    grad_hidden: Tensor | None,
    grad_cell: Tensor | None,
    cell: Tensor,
    next_cell: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    enter, forget, new, show = workspace.chunk(4, 1)
    hidden = torch.zeros_like(next_cell) if grad_hidden is None else grad_hidden
    squashed = next_cell.tanh()
    through = hidden * show * (1 - squashed * squashed)
    if grad_cell is not None:
        through = through + grad_cell
    gates = torch.cat(
        [
            through * new * enter * (1 - enter),
            through * cell * forget * (1 - forget),
            through * enter * (1 - new * new),
            hidden * squashed * show * (1 - show),
        ],
        1,
    )
    return gates, through * forget, gates.sum(0) if has_bias else None


_EFFICIENT = aten._scaled_dot_product_efficient_attention.default
_FLASH = aten._scaled_dot_product_flash_attention.default
_EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
_RMS_NORM_BACKWARD = aten._fused_rms_norm_backward.default

CPU_KERNELS: dict[Any, Callable[..., Any]] = {
    _EFFICIENT: partial(_attention, _EFFICIENT, 2),
    _FLASH: partial(_attention, _FLASH, 6),
    _EFFICIENT_BACKWARD: partial(_attention_backward, _EFFICIENT_BACKWARD),
    _FLASH_BACKWARD: partial(_attention_backward, _FLASH_BACKWARD),
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    _RMS_NORM_BACKWARD: decomposition(_RMS_NORM_BACKWARD),
    **dict.fromkeys(FOREACH_MUL, foreach_mul_),
}
