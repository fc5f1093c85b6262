"""Every private torch API that MemScale uses, in one place.

Tried on torch 2.13 (CPU). Each docstring or comment says what it is for and what happens on a torch
that lacks it. No other module imports a name of torch that begins with an underscore.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

OUTSIDE_BACKWARD = -1
"""What `graph_task_id` says when no backward pass is running."""

# Fake tensors and their mode: the simulator. `torch.compile` stands on them, so they will not go away.
# pytree: flattening of a user's nested inputs and outputs. Dispatch modes: the tracker and kept products.
__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "current_dispatch_modes",
    "disable_current_modes",
    "disable_dynamo",
    "is_traceable_wrapper_subclass",
    "pytree",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
]

PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]
Hooks = tuple[PackHook, UnpackHook]

_C: Any = torch._C
_autograd: Any = _C._autograd


def graph_task_id() -> int:
    """A number that each backward pass has for itself, or `OUTSIDE_BACKWARD`.

    Without it (torch before 2.1) nothing works: two backward passes could not be told apart.
    """
    return cast(int, _C._current_graph_task_id())


def changed_since_saved(node: Any) -> bool:
    """Whether a node of autograd has saved a tensor that was changed in place since: its backward will refuse it.

    What goes through hooks is not looked at: autograd does not compare its versions. On a torch that does not say
    whether there are hooks (`SavedTensor.unpack_hook`), nothing is.
    """
    names = set(dir(node))
    for raw_name in names:
        if not raw_name.startswith("_raw_saved_"):
            continue
        raw = getattr(node, raw_name)
        saved = raw if isinstance(raw, (tuple, list)) else (raw,)
        if any(getattr(each, "unpack_hook", raw) is not None for each in saved if each is not None):
            continue
        name = raw_name.removeprefix("_raw")
        try:
            # Of a Function that is written in Python it is without the underscore.
            getattr(node, name if name in names else name.removeprefix("_"))
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                return True
    return False


def a_dispatch_mode_is_active() -> bool:
    """Whether someone sees every operation: then `foreach` operations raise no versions.

    Without it that is taken to be so.
    """
    ask = getattr(_C, "_len_torch_dispatch_stack", None)
    return True if ask is None else cast(int, ask()) > 0


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward pass that is running now has ended without an error.

    Without it nothing works: what a backward pass has not used would live as long as its graph.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def backward_keeps_graph() -> bool:
    """Whether the running backward pass was asked to keep its graph; yes, where that cannot be known.

    Without it kept outputs live as long as their region.
    """
    if graph_task_id() == OUTSIDE_BACKWARD:
        return True
    ask = getattr(_autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else cast(bool, ask())


def surrounding_hooks() -> Hooks | None:
    """The saved-tensor hooks that a tensor saved right here would go through.

    Without it (torch before 2.8) a region inside a region holds its inputs itself: right, but dearer.
    """
    ask = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    return None if ask is None else cast("Hooks | None", ask(False))


def hooks_are_allowed() -> bool:
    """False where torch refuses saved-tensor hooks, as it does under `torch.func` transforms.

    Without it a region raises there, instead of running plainly.
    """
    ask = getattr(_autograd, "_saved_tensors_hooks_is_enabled", None)
    return True if ask is None else cast(bool, ask())


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """A second tensor over the same memory and the same version counter, with no history.

    Inside a dispatch mode the key that passes version counters on to aliases is switched off, so a plain
    `detach()` there would not see later in-place changes. Without the guard nothing could safely be kept.
    """
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def same_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Inside the block a tensor may be written to without a trace in its version counter.

    Without it a buffer that is put back counts as changed, and an earlier graph that saved it as spoilt.
    """
    preserve: Any = getattr(torch.autograd, "_unsafe_preserve_version_counter", None)
    return contextlib.nullcontext() if preserve is None else preserve(tensor)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number for the memory of a tensor, unique while that is alive; None if it is not one storage.

    Version counters do not tell that memory has changed: the results of `_unsafe_view`, `unsafe_chunk` and
    `unsafe_split` share memory with their argument and count for themselves.
    """
    if not _C._has_storage(tensor) or is_traceable_wrapper_subclass(tensor):
        return None
    return int(tensor.untyped_storage()._cdata)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operation writes to, by its schema."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, torch.Tensor):
                yield each


def running_node_name() -> str | None:
    """The name of the backward node that is running, such as `AddmmBackward0`.

    Without it error messages do not name the operation.
    """
    ask = getattr(_C, "_current_autograd_node", None)
    node = None if ask is None else ask()
    return None if node is None else str(node.name())


class LightDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """A dispatch mode that does not pull in the compiler.

    Torch hides the body of a mode from the compiler, and for that imports the whole of `torch._dynamo` when
    the first operation runs: seconds, and a traceback that holds on to the caller's frames. Torch before 2.11
    does not do that, and does not ask.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# -- autograd: where a pass is


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return graph_task_id() != OUTSIDE_BACKWARD


def next_sequence_number() -> int:
    """Return the number that autograd's next node will get in this thread.

    Without it the tracker could not tell which module a tensor made in backward belongs to.
    """
    return int(_autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward is running; leaves (AccumulateGrad) have none."""
    node = _C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 1 << 62 else None


# -- tensors


def allows_shallow_copy(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether `old.data = new` is allowed, as `nn.Module.to` asks it."""
    return bool(cast(Any, torch)._has_compatible_shallow_copy_type(old, new))


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the largest absolute value of each tensor; `torch.nn.utils` stands on the same function."""
    return tuple(cast(Any, torch)._foreach_norm(tensors, float("inf")))


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that the arguments of `Tensor.to` name, as `nn.Module.to` reads them."""
    device, dtype, *_ = _C._nn._parse_to(*args, **kwargs)
    return device, dtype


def without_torch_function(*, of_modes: bool = False) -> contextlib.AbstractContextManager[None]:
    """Return a block in which `__torch_function__` of subclasses (and, if asked for, of modes) is not called."""
    guard: Any = _C.DisableTorchFunction if of_modes else _C.DisableTorchFunctionSubclass
    return cast("contextlib.AbstractContextManager[None]", guard())


disabled_torch_function = _C._disabled_torch_function_impl  # what a subclass without `__torch_function__` has
make_subclass = cast(Any, torch.Tensor)._make_subclass
make_wrapper_subclass = cast(Any, torch.Tensor)._make_wrapper_subclass


# -- the compiler

try:
    from torch._compile import _disable_dynamo as disable_dynamo
except ImportError:  # `torch.compiler.disable` does the same, and imports the compiler
    disable_dynamo = torch.compiler.disable


# -- the simulator: dispatch keys and modes

DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
exclude_dispatch_keys = _C._ExcludeDispatchKeyGuard
dispatch_keys_of = _C._dispatch_keys
dispatch_stack_length = _C._len_torch_dispatch_stack
FAKE_MODE = _C._TorchDispatchModeKey.FAKE


def current_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that is on in this thread."""
    return cast("FakeTensorMode | None", _C._get_dispatch_mode(FAKE_MODE))


def leave_fake_mode() -> None:
    """Take the fake mode off this thread for a moment; `return_to_fake_mode` puts it on again."""
    _C._unset_dispatch_mode(FAKE_MODE)


return_to_fake_mode = _C._set_dispatch_mode


def with_autograd_below_dispatch() -> contextlib.AbstractContextManager[None]:
    """Return a block in which operations record a graph, inside a `__torch_dispatch__` that switched it off."""
    autograd = DispatchKeySet(DispatchKey.AutogradCPU) | DispatchKeySet(DispatchKey.ADInplaceOrView)
    return cast(
        "contextlib.AbstractContextManager[None]",
        _C._ForceDispatchKeyGuard(
            _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set() - autograd
        ),
    )


default_device = _C._get_default_device
warn_on_data_pointer = _C._set_warn_deprecated_on_mutable_data_ptr
throw_on_data_pointer = _C._set_throw_on_mutable_data_ptr
flash_attention_is_enabled = _C._get_flash_sdp_enabled
efficient_attention_is_enabled = _C._get_mem_efficient_sdp_enabled
math_attention_is_enabled = _C._get_math_sdp_enabled
foreach_type_lists = (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)


def takes_foreach(device_types: set[str], tensor_types: set[type]) -> bool:
    """Return whether an optimizer that is not told which takes its `foreach` implementation for such tensors."""
    devices = set(cast(Any, _foreach_utils)._get_foreach_kernels_supported_devices())
    return device_types <= devices and tensor_types <= set(foreach_type_lists[0])


FOREACH_MUL = (torch.ops.aten._foreach_mul_.Scalar, torch.ops.aten._foreach_mul_.ScalarList)


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: float | Sequence[float]) -> None:
    """Multiply tensors by numbers in place with CUDA's rounding.

    CUDA's `_foreach_mul_` keeps the number in 32 bits when the tensors have 16, as `mul_` does everywhere. That of the
    CPU rounds the number first (tried on 2.13): 0.999 is 1 in bfloat16, and a second moment would never decay.
    """
    factors = factor if isinstance(factor, Sequence) else [factor] * len(tensors)
    for tensor, each in zip(tensors, factors, strict=True):
        tensor.mul_(each)


FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


# -- the simulator: a device answered from Python (torch's PrivateUse1 slot)

Generator = _C.Generator
PRIVATE_DEVICE_TYPE = _autograd.DeviceType.PrivateUse1
private_device_name = _C._get_privateuse1_backend_name
set_up_private_device: Any = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
if TYPE_CHECKING:
    PrivateDeviceGuard = object
    PrivateDeviceHooks = object
else:  # without them (torch before 2.10) there is no second device on a machine without an accelerator
    PrivateDeviceGuard = _C._acc.DeviceGuard
    PrivateDeviceHooks = _C._acc.PrivateUse1Hooks


def map_location_in_use() -> Any:
    """Return the `map_location` of the `torch.load` that is running in this thread."""
    return cast(Any, torch.serialization)._serialization_tls.map_location


# -- distributed training

DDP_STATIC_GRAPH_REDUCED = "_static_graph_delay_allreduce_enqueued"
"""Flag of DistributedDataParallel(static_graph=True): its first reduction is under way."""
