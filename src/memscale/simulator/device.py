"""The device `vgpu`: torch's PrivateUse1 slot, answered from Python, and the patches of torch that it needs.

torch has one such slot per process and no way to clear it: after the first use the name `vgpu` stays known, but
outside a `simulate` or `executing` block the device reports that it is not available.

Note [Errors in backward]
While autograd unwinds from an error it asks the device's guard for its device type. A guard written in Python fails
when it runs with an error set, where C++ allows no exceptions: the process ends (torch 2.13). So the guard stores the
error before it answers (`ctypes` raises an error that is set), and it is raised again where `backward` was called.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from memscale._torch import (
    PRIVATE_DEVICE_TYPE,
    FakeTensor,
    Generator,
    PrivateDeviceGuard,
    PrivateDeviceHooks,
    attribute,
    destroy_library,
    foreach_type_lists,
    private_device_name,
    set_up_private_device,
    share_gradient_hooks,
    wrapped_engine,
)
from memscale.errors import SimulationError
from memscale.memory.tracker import MemoryTracker

NAME = "vgpu"


@dataclass(eq=False)
class VirtualDevice:
    """A device that answers for `vgpu` while a block runs, and its memory."""

    computes: ClassVar[bool] = False  # real numbers, not only shapes
    device_name: str  # as `torch.cuda.get_device_name` reports it
    capacity: int  # its memory in bytes
    compute_capability: tuple[int, int]  # decides on attention kernels and workspaces
    device: torch.device
    tracker: MemoryTracker  # of the device and its host

    @property
    def peak_bytes(self) -> int:
        """The most memory in use on the device at once (`max_memory_allocated`)."""
        return self.tracker.peak_bytes(self.device)

    @property
    def peak_reserved_bytes(self) -> int:
        """The most memory that the device's allocator held (`max_memory_reserved`)."""
        return self.tracker.peak_reserved_bytes(self.device)

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory in use at once."""
        return self.tracker.peak_bytes("cpu")

    # Fake random numbers have no state, but code that saves and restores one must run.

    def get_rng_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass


def _device() -> torch.device:
    return torch.device(private_device_name(), 0)


class VirtualStream(torch.Stream):
    """A stream on which everything runs at once."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> VirtualStream:
        return super().__new__(cls, device=_device())


class VirtualEvent(torch.Event):
    def __new__(cls, *args: Any, **options: Any) -> VirtualEvent:
        return super().__new__(cls, device=_device())

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: torch.Event) -> float:
        return 0.0


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    """Make every generator an instance, also those created before the block began."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Generator)


class VirtualGenerator(torch.Generator, metaclass=_AnyGenerator):
    """The host's generator, which the virtual device's operations use as well."""

    def __new__(cls, device: Any = "cpu") -> VirtualGenerator:
        here = torch.device(device).type in ("cuda", _device().type)
        return super().__new__(cls, "cpu" if here else device)  # type: ignore[call-arg]


_raise_pending_error = ctypes.pythonapi.PyErr_Occurred
_raise_pending_error.restype = ctypes.c_void_p
_stored_errors: list[BaseException] = []


class Guard(PrivateDeviceGuard):
    """A device guard that stores errors. See Note [Errors in backward]."""

    def type_(self) -> Any:
        try:
            _raise_pending_error()
        except BaseException as error:  # even an interrupt: it is raised again after backward
            _stored_errors.append(error)
        return PRIVATE_DEVICE_TYPE


@contextlib.contextmanager
def errors_after_backward() -> Iterator[None]:
    """Raise stored errors when backward returns to the user. See Note [Errors in backward]."""

    def run_and_raise(run_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception": the guard has it
            if not _stored_errors:
                raise
        raise _stored_errors.pop()

    try:
        with wrapped_engine(run_and_raise):
            yield
    finally:
        _stored_errors.clear()


_active: VirtualDevice | None = None


def _require_active() -> VirtualDevice:
    if _active is None:
        raise SimulationError(
            "The virtual GPU is only there inside `with memscale.simulator.simulate(...)`; "
            "no such block is active."
        )
    return _active


class _DeviceModule:
    """The module `torch.vgpu`, with the names of `torch.cuda`."""

    _initialized = True
    _nothing = staticmethod(lambda *args, **kwargs: None)
    Stream = VirtualStream
    Event = VirtualEvent
    _lazy_init = init = set_device = set_stream = synchronize = ipc_collect = _nothing
    stream = device = staticmethod(contextlib.nullcontext)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    current_stream = default_stream = staticmethod(lambda device=None: VirtualStream())
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16, torch.float32])

    def is_available(self) -> bool:
        return _active is not None

    def device_count(self) -> int:
        return int(_active is not None)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return _active is not None and _active.compute_capability >= (8, 0)

    def manual_seed(self, seed: int) -> None:
        if _active is not None:
            _active.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return _require_active().get_rng_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        _require_active().set_rng_state(state)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        self.set_rng_state(states[0])

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the figures of `torch.cuda.memory_stats` that exist here."""
        tracker = MemoryTracker() if _active is None else _active.tracker
        return {
            "allocated_bytes.all.current": tracker.live_bytes(NAME),
            "allocated_bytes.all.peak": tracker.peak_bytes(NAME),
            "reserved_bytes.all.current": tracker.reserved_bytes(NAME),
            "reserved_bytes.all.peak": tracker.peak_reserved_bytes(NAME),
        }

    def _memory(self, figure: str, device: Any = None) -> int:
        return self.memory_stats()[figure]

    memory_allocated = functools.partialmethod(_memory, "allocated_bytes.all.current")
    max_memory_allocated = functools.partialmethod(_memory, "allocated_bytes.all.peak")
    memory_reserved = functools.partialmethod(_memory, "reserved_bytes.all.current")
    max_memory_reserved = functools.partialmethod(_memory, "reserved_bytes.all.peak")

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        _require_active().tracker.reset_peak()

    reset_max_memory_allocated = reset_peak_memory_stats

    def memory_summary(self, device: Any = None, abbreviated: bool = False) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.memory_stats().items())

    def empty_cache(self) -> None:
        if _active is not None:
            _active.tracker.empty_cache()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        capacity = _require_active().capacity
        return capacity - self.memory_reserved(), capacity

    def get_device_name(self, device: Any = None) -> str:
        return _require_active().device_name

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return _require_active().compute_capability

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        (major, minor), memory = self.get_device_capability(), _require_active().capacity
        return SimpleNamespace(name=self.get_device_name(), total_memory=memory, major=major, minor=minor)


class _Hooks(PrivateDeviceHooks):
    def is_available(self, device_index: int = 0) -> bool:
        return _active is not None

    has_primary_context = is_available

    def is_built(self) -> bool:
        return True


@functools.cache
def register() -> None:
    """Register the device name with torch, once per process."""
    try:
        set_up_private_device(NAME, _DeviceModule(), hook=_Hooks(), device_guard=Guard())
    except RuntimeError as error:
        raise SimulationError(
            f"torch's one slot for a device of our own (PrivateUse1) is taken by another package: {error}. "
            "Simulate in a process that does not load it."
        ) from error


def virtual_device(index: int | None = None) -> torch.device:
    """Return the device of simulated tensors: `vgpu`, or `cuda` on a machine that has one.

    Fake CUDA tensors work there, and a device in the PrivateUse1 slot would replace the real one as "the accelerator".
    torch makes the device of a tensor the current one while it is indexed, a fake one as well, by which a process gets
    a context on it: so `index` is to be that of the card it trains on, by default the current one.
    """
    if torch.cuda.is_available() and not is_active():
        current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        return torch.device("cuda", current if index is None else index)
    register()
    return torch.device(NAME, 0)


def is_active() -> bool:
    return _active is not None


@contextlib.contextmanager
def activate(device: VirtualDevice) -> Iterator[None]:
    """Let `device` answer for `vgpu` inside the block."""
    # One at a time, except for a simulation inside an executing device's block, which predicts what is to run there.
    global _active
    before = _active
    if before is not None and not (before.computes and not device.computes):
        raise SimulationError(
            f"A virtual GPU ({before.device_name}) is active already; "
            "leave its block before you open another."
        )
    register()
    _active = device
    try:
        yield
    finally:
        _active = before


@contextlib.contextmanager
def operators(key: str) -> Iterator[Callable[[Any, Callable[..., Any]], None]]:
    """Provide a function that implements an aten operator for a dispatch key inside the block."""
    library = cast(Any, torch.library.Library)("aten", "IMPL")
    try:
        yield lambda operator, kernel: library.impl(operator, kernel, key)
    finally:
        destroy_library(library)


@contextlib.contextmanager
def like_cuda_tensors(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let optimizers, `module.to` and backward treat tensors of a class as CUDA tensors inside the block.

    Optimizers use `foreach`. `module.to(device)` swaps whole tensors, as the data of virtual ones can't be exchanged.
    Backward runs in the calling thread, to which dispatch modes belong, and its errors are raised there.
    """
    swap_before = torch.__future__.get_swap_module_params_on_conversion()
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, nn.Parameter) and isinstance(second, nn.Parameter):
            share_gradient_hooks(first, second)
        if isinstance(first, FakeTensor):
            # The converter's memo holds weak references, and tensors with weak references cannot be swapped.
            first.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    for kinds in foreach_type_lists:
        kinds.append(kind)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            attribute(torch.utils, "swap_tensors", swap_tensors),
            torch.autograd.set_multithreading_enabled(False),
            errors_after_backward(),
        ):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap_before)
        for kinds in foreach_type_lists:
            kinds.remove(kind)


def op_name(func: Any) -> str:
    """Return the name without namespace and overload: "add" of aten::add.Tensor."""
    return str(getattr(func, "_opname", ""))  # higher-order operators have no such name


class DeviceTracker(MemoryTracker):
    """Track the memory of one virtual device and its host."""

    def __init__(self, *, workspace_bytes: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._workspace_bytes:
            self.temporary_bytes = 0
            name = op_name(func)
            if name in MATMULS:
                self._reserve_workspace(result)
            elif name in TEMPORARIES and args[0].device.type != "cpu":
                sizes = [size for size in TEMPORARIES[name](*args) if size]
                self.temporary_bytes = sum(sizes)
                device, what = args[0].device, f"a temporary of {name}"
                for release in [self.hold(size, device, what) for size in sizes]:
                    release()
            if self._log is not None and name in SCRATCH and args[0].device.type != "cpu":
                self._log_scratch(SCRATCH[name](self._workspace_bytes, *args))
        return result

    def _reserve_workspace(self, result: torch.Tensor) -> None:
        # One workspace per handle and one handle per thread: that of the training loop, and that of backward. (Tensors
        # of a simulation inside this block are not tracked.)
        if self._in_backward in self._workspaces or result.device.type == "cpu":
            return
        if result.untyped_storage()._cdata in self._live:
            self.reserve(self._workspace_bytes, result.device, "cuBLAS workspace")
            self._workspaces.add(self._in_backward)


CUBLAS_WORKSPACE = 8_519_680  # torch's default, ":4096:2:16:8"
CUBLAS_WORKSPACE_HOPPER = 32 * 2**20
HOPPER = (9, 0)
MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the workspace of a cuBLAS handle on a card of this compute capability."""
    return CUBLAS_WORKSPACE_HOPPER if capability >= HOPPER else CUBLAS_WORKSPACE


def _copy_bytes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.nbytes


def _group_norm_backward(grad: torch.Tensor, values: torch.Tensor, *args: Any) -> tuple[int, ...]:
    _, _, weight, samples, channels, pixels, groups, _ = args
    # Two sums for each sample and channel, the scale of each, and two numbers for each group.
    width = max(4, values.element_size())
    of_groups = (width * samples * groups,) * 2
    if pixels == 1:
        return of_groups
    return (width * samples * channels,) * (2 if weight is None else 3) + of_groups


# By operation: the bytes that its CUDA kernel allocates besides its results and frees before it returns
# (aten/src/ATen/native/cuda/SoftMax.cu and group_norm_kernel.cu of torch 2.13).
TEMPORARIES: dict[str, Callable[..., tuple[int, ...]]] = {
    # The product of gradient and output, and copies of what is not contiguous.
    "_softmax_backward_data": lambda grad, output, *_: (grad.nbytes, _copy_bytes(output)),
    "_log_softmax_backward_data": lambda grad, output, *_: (_copy_bytes(grad), _copy_bytes(output)),
    "native_group_norm_backward": _group_norm_backward,
}

RESIDENT_THREADS = 82 * 1536  # of an RTX 3090; the scratch memory of sums grows with it
CUBLASLT_WORKSPACE = 2**20


def _sum_buffer(workspace: int, values: torch.Tensor, dims: Sequence[int] | None = None, *_: Any) -> int:
    """Return the bytes by which thread blocks exchange partial sums over leading dimensions (gradients of biases)."""
    reduced = sorted(each % values.dim() for each in dims or ())
    outputs = math.prod(values.shape[len(reduced) :])
    if not reduced or not values.numel() or reduced != list(range(len(reduced))):
        return 0
    # As `setReduceConfig` in aten/src/ATen/native/cuda/Reduce.cuh of torch 2.13 does.
    inputs = values.numel() // outputs
    vector = next(size for size in (4, 2, 1) if outputs % size == 0)
    columns, most = outputs // vector, 512 // vector  # threads of a block
    width = min(1 << columns.bit_length() - 1, 32)
    height = min(1 << max(1, inputs).bit_length() - 1, most // width)
    width = min(1 << columns.bit_length() - 1, most // height)
    each = -(-inputs // height)  # values of a thread
    grid = -(-columns // width)
    target = RESIDENT_THREADS // (width * height)
    if inputs < 16 * height or each < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    return 4 * outputs * blocks * width * vector if blocks > 1 else 0


def _attention_sums(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """Return the bytes of sums in fp32 and a copy, and of gradients for each head of queries where keys have fewer."""
    groups = query.size(1) // key.size(1)
    return 8 * query.numel() + (groups * (key.nbytes + value.nbytes) if groups > 1 else 0)


# By operation: the bytes of scratch memory that count for what is reserved alone, as seen with torch 2.15.
SCRATCH: dict[str, Callable[..., int]] = {
    "mm": lambda workspace, *_: workspace,
    "bmm": lambda workspace, *_: workspace,
    "baddbmm": lambda workspace, *_: workspace,
    "addmm": lambda *_: CUBLASLT_WORKSPACE,
    "sum": _sum_buffer,
    **dict.fromkeys(
        ("_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention_backward"),
        lambda _workspace, _gradient, *inputs: _attention_sums(*inputs[:3]),
    ),
}
