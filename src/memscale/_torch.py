"""The private torch APIs that MemScale uses, in one place.

Tried on torch 2.13 and 2.15. Each docstring or comment says what it is for and what happens on a torch that lacks it.
No other module imports a name of torch that begins with an underscore, or reads one from a module of torch. Of torch's
objects others read a few such attributes, which `tests/test_contributing.py` lists: the dictionaries of an `nn.Module`,
a storage's `_cdata`, a tensor's `_version`, an operator's `_schema`; and they have four names in strings: `_apply`,
`_init_group`, `_ff_block`, `_orig_mod`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CellType, CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.grad_scaler import GradScaler, _MultiDeviceReplicator
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils, backend_registration
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

OUTSIDE_BACKWARD = -1  # what `graph_task_id` says when no backward pass is running

# Fake tensors and their mode: the simulator. `torch.compile` stands on them, so they will not go away.
# pytree: flattening of a user's nested inputs and outputs. Dispatch modes: the tracker and kept products.
# ConvNd, NormBase: the classes of all convolutions, and of all batch and instance norms.
__all__ = [
    "ConvNd",
    "FakeTensor",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
    "current_dispatch_modes",
    "disable_current_modes",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "outside_compiler",
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


def _ask(owner: Any, name: str, *args: Any, otherwise: Any) -> Any:
    """Return what a private function of torch returns; `otherwise` on a torch that lacks it."""
    function = getattr(owner, name, None)
    return otherwise if function is None else function(*args)


def graph_task_id() -> int:
    """Return a number that each backward pass has for itself, or `OUTSIDE_BACKWARD`. Needed to tell passes apart."""
    return cast(int, _C._current_graph_task_id())


def in_backward() -> bool:
    return graph_task_id() != OUTSIDE_BACKWARD


def changed_since_saved(node: Any) -> bool:
    """Return whether autograd will refuse a node's backward: a tensor that it saved was changed in place since.

    Tensors that go through hooks are skipped, as autograd does not compare their versions; all are, on a torch without
    `SavedTensor.unpack_hook`.
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
    """Return whether someone sees every operation: then `foreach` operations raise no versions. Without it, True."""
    return bool(_ask(_C, "_len_torch_dispatch_stack", otherwise=1))


def at_end_of_backward(method: Callable[..., None], *args: object) -> None:
    """Call a method, if its object is alive then, when the running backward pass has ended without an error."""
    # Needed: what a backward pass has not used would live as long as its graph.
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def has_other_views(tensor: torch.Tensor) -> bool:
    """Return whether other tensors use the memory of a tensor; True where that is not known."""
    # The storage is counted once for the tensor, and once for the object that asks for it.
    count = _ask(torch._C, "_storage_Use_Count", tensor.untyped_storage()._cdata, otherwise=3)
    return bool(count > 2)


def backward_keeps_graph() -> bool:
    """Return whether the running pass was asked to keep its graph; True where that is not known."""
    return not in_backward() or bool(_ask(_autograd, "_get_current_graph_task_keep_graph", otherwise=True))


def surrounding_hooks() -> Hooks | None:
    """Return the saved-tensor hooks around this call. Without it a region inside a region holds its inputs itself."""
    hooks: Hooks | None = _ask(_autograd, "_top_saved_tensors_default_hooks", False, otherwise=None)
    return hooks


def hooks_are_allowed() -> bool:
    """Return False where saved-tensor hooks cannot be: where torch refuses them, and under `torch.func`.

    Without the first a region raises there. Without the second `vmap` and `jvp`, which do not refuse them, hand them
    tensors without memory.
    """
    if _ask(_C._functorch, "peek_interpreter_stack", otherwise=None) is not None:
        return False
    return bool(_ask(_autograd, "_saved_tensors_hooks_is_enabled", otherwise=True))


def alias_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """Return a second tensor over the same memory and the same version counter, with no history.

    Inside a dispatch mode the key that passes version counters on to aliases is switched off, so that a plain
    `detach()` there would not see later in-place changes.
    """
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def same_version(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a block in which writing to a tensor does not raise its version counter."""
    # Without it, a buffer that is restored invalidates an earlier graph that saved it.
    name = "_unsafe_preserve_version_counter"
    block: contextlib.AbstractContextManager[None]
    block = _ask(torch.autograd, name, tensor, otherwise=contextlib.nullcontext())
    return block


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that a view is of, or the tensor itself; None for views made in inference mode."""
    return tensor._base if tensor._is_view() else tensor


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return a number for the memory of a tensor, unique while that is alive; None if it is not one storage.

    Version counters do not tell: the results of `_unsafe_view`, `unsafe_chunk` and `unsafe_split` share memory with
    their argument and have counters of their own.
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
    """Return the name of the backward node that is running, such as `AddmmBackward0`, for error messages."""
    node = _ask(_C, "_current_autograd_node", otherwise=None)
    return None if node is None else str(node.name())


def graph_nodes(roots: Iterable[Any], goes_on: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield the nodes of the graph behind some tensors (or nodes), each once; not those behind where it ends."""
    nodes = (each.grad_fn if isinstance(each, torch.Tensor) else each for each in roots)
    pending: list[Any] = [node for node in dict.fromkeys(nodes) if node is not None]
    seen = {None, *pending}
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions if goes_on(node) else ():
            if following not in seen:
                seen.add(following)
                pending.append(following)


def release_saved_tensors(tensors: Sequence[torch.Tensor], error: str) -> None:
    """Free what the graph behind some tensors has saved for backward, as a backward pass does at its end.

    Backward through it raises a `RuntimeError` with the message `error` from then on. An object that saved-tensor hooks
    keep in the place of a tensor, and a node of a custom function, are asked to release what they hold by
    `memscale_release()`, if they have it. Without `SavedTensor.data`, what hooks keep lives as long as the graph.
    """

    def refuse(_: None) -> torch.Tensor:
        raise RuntimeError(error)

    for node in graph_nodes(tensors):
        for saved in _saved_tensors(node):
            try:
                with disable_current_modes():  # which cannot detach a Python number that was saved
                    # What the first hook returns is kept instead.
                    saved.register_hooks(lambda _: None, refuse)
            except RuntimeError:  # it is empty, or has hooks
                _ask(getattr(saved, "data", None), "memscale_release", otherwise=None)
        _ask(node, "memscale_release", otherwise=None)


def _saved_tensors(node: Any) -> Iterator[Any]:
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with contextlib.suppress(RuntimeError):  # it was freed before
                found = getattr(node, name)
                yield from found if isinstance(found, (list, tuple)) else [found]


class LightDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """A dispatch mode that the compiler stays out of, without importing it.

    To hide the body of a mode from the compiler, torch puts a wrapper around it that costs as much as a mode itself,
    and imports all of `torch._dynamo` at the first operation: seconds, and a traceback that holds on to the caller's
    frames. Here its code is marked, and what it calls is skipped as well (torch 2.13 and 2.15). On a torch that cannot
    do that, the compiler traces it where a compiled model runs under it, which takes time and changes nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        frames = _C._dynamo.eval_frame
        if "__torch_dispatch__" in vars(cls) and hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, skip)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def next_sequence_number() -> int:
    """Return the number that autograd's next node will get in this thread: by it, backward is assigned to modules."""
    return int(_autograd._get_sequence_nr())


def running_sequence_number() -> int | None:
    """Return the number of the node whose backward is running; leaves (AccumulateGrad) have none."""
    node = _C._current_autograd_node()
    if node is None:
        return None
    number = int(node._sequence_nr())
    return number if number < 1 << 62 else None


# -- functions of torch that are replaced for a while


@contextlib.contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the block."""
    inherited = name not in vars(owner)
    before = None if inherited else vars(owner)[name]  # not by getattr: a staticmethod stays one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class PatchedFunction:
    """A public function of torch that is replaced, while it has subscribers, by one that calls them around it.

    Subscribers are nested by `order`, the lowest outermost. Owners are referred to weakly: torch's own function is back
    when the last one has unsubscribed or was collected. If somebody else has replaced the function meanwhile, theirs
    stays, and the one below it passes calls on.
    """

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name
        self._subscribers: dict[Callable[..., Any], tuple[int, weakref.WeakSet[Any]]] = {}
        self._original: Any = None
        self._replacement: Any = None

    def subscribe(self, around: Callable[..., Any], owner: object, order: int = 0) -> None:
        """Call `around(inner, owners, *args, **kwargs)` in the place of the function while `owner` is alive.

        `around` must not refer to the owner; `inner` is the function with the subscribers that are further in.
        """
        self._subscribers.setdefault(around, (order, weakref.WeakSet()))[1].add(owner)
        weakref.finalize(owner, self._restore_if_unused).atexit = False
        if self._replacement is None:
            self._original = vars(self._holder)[self._name]
            self._replacement = self._dispatcher(self._original)
            setattr(self._holder, self._name, self._replacement)

    def unsubscribe(self, around: Callable[..., Any], owner: object) -> None:
        """Call `around` for this owner no more; nothing happens if it is not subscribed."""
        if around in self._subscribers:
            self._subscribers[around][1].discard(owner)
        self._restore_if_unused()

    def _dispatcher(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            call = original
            innermost_first = sorted(self._subscribers.items(), key=lambda item: -item[1][0])
            for around, (_, owners) in innermost_first:
                if alive := list(owners):
                    call = functools.partial(around, call, alive)
            return call(*args, **kwargs)

        return dispatch

    def _restore_if_unused(self) -> None:
        for around, (_, owners) in list(self._subscribers.items()):
            if not any(True for _ in owners):  # not its length, which counts one that is being collected
                del self._subscribers[around]
        if not self._subscribers and self._replacement is not None:
            if vars(self._holder)[self._name] is self._replacement:
                setattr(self._holder, self._name, self._original)
            self._original = self._replacement = None


class BackwardOrder(enum.IntEnum):
    """Who is around `torch.autograd.backward`, the outermost first."""

    LOSS_SCALING = 0  # changes the gradients that a pass begins with and those that arrive
    RECOVERY = 1  # may run a pass again, which must not be scaled a second time


BACKWARD = PatchedFunction(torch.autograd, "backward")
"""The only patch of `torch.autograd.backward`, which `Tensor.backward` looks up when it is called.

A subscriber is called as `around(backward, owners, tensors, grad_tensors=None, retain_graph=None, create_graph=False,
grad_variables=None, inputs=None)`. A pass that does not go through the attribute (`torch.autograd.grad`, a reference
imported earlier) is not seen.
"""

GRAD_SCALER_SCALE = PatchedFunction(GradScaler, "scale")
"""`GradScaler.scale`, by which a loop is noticed that scales its loss itself."""

GRAD_SCALER_COPY = PatchedFunction(_MultiDeviceReplicator, "get")
"""Where a `GradScaler` copies its scale, and its flag for infinite gradients, to the device of some gradients."""


def wait_for_copy(get: Callable[..., torch.Tensor], owners: Any, source: Any, device: Any) -> torch.Tensor:
    """Subscribe to `GRAD_SCALER_COPY`: have a copy from CUDA to the host be there before it is read.

    torch makes it without waiting for it (pytorch#176429): gradients on the host are divided by whatever the memory
    held, and what is found in them is overwritten when the copy arrives.
    """
    copy = get(source, device)
    if copy.device.type == "cpu" and source.master.device.type == "cuda":
        torch.cuda.current_stream(source.master.device).synchronize()
    return copy


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that gradients of these would be accumulated in: without `node.variable`, these alone."""
    tensors = list(tensors)
    leaves = [each for each in tensors if each.grad_fn is None and each.requires_grad]
    leaves += [node.variable for node in graph_nodes(tensors) if hasattr(node, "variable")]
    return list({id(leaf): leaf for leaf in leaves}.values())


def forget_global_forward_hook(hook_id: int) -> None:
    """Remove what torch 2.13 leaves behind of a global forward hook with keyword arguments that was removed."""
    from torch.nn.modules import module as module_hooks

    module_hooks._global_forward_hooks_with_kwargs.pop(hook_id, None)


# -- tensors


def allows_shallow_copy(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether `old.data = new` is allowed, as `nn.Module.to` asks it."""
    return bool(cast(Any, torch)._has_compatible_shallow_copy_type(old, new))


def largest_magnitudes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the largest absolute value of each tensor; `torch.nn.utils` stands on the same function."""
    return tuple(cast(Any, torch)._foreach_norm(tensors, float("inf")))


def without_torch_function() -> contextlib.AbstractContextManager[None]:
    """Return a block in which `__torch_function__` of subclasses is not called."""
    return cast("contextlib.AbstractContextManager[None]", _C.DisableTorchFunctionSubclass())


disabled_torch_function = _C._disabled_torch_function_impl  # what a subclass without `__torch_function__` has
make_wrapper_subclass = cast(Any, torch.Tensor)._make_wrapper_subclass


# -- the compiler

try:
    from torch._compile import _disable_dynamo
except ImportError:  # `torch.compiler.disable` does the same, and imports the compiler
    _disable_dynamo = torch.compiler.disable

Function = TypeVar("Function", bound=Callable[..., Any])


OUTSIDE_COMPILER = (
    "MemScale's hooks and the layers that its plan has changed run without the compiler: compile without "
    "fullgraph=True, or call memscale.detach(model) first"
)


def outside_compiler(function: Function) -> Function:
    """Return a function that compiled code calls without tracing it (a graph break).

    With `fullgraph=True` that is an error, which has this reason as that of `torch.compiler.disable(reason=...)`.
    """
    outside: Any = _disable_dynamo(function)
    outside._torchdynamo_disable = True
    outside._torchdynamo_disable_msg = OUTSIDE_COMPILER
    return cast(Function, outside)  # it has the same signature


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is what `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"  # by name: to import the class takes a second


def is_checkpoint_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is torch's `checkpoint_wrapper`, known by the name of what it wraps."""
    return "_checkpoint_wrapped_module" in module._modules


def forbids_graph_breaks(module: torch.nn.Module) -> bool:
    """Return whether a module is what `torch.compile(module, fullgraph=True)` returns; no, where unknown."""
    return is_compiled(module) and bool(getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False))


# -- the simulator: dispatch keys and modes

DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
exclude_dispatch_keys = _C._ExcludeDispatchKeyGuard


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data: it is simulated."""
    return isinstance(tensor, FakeTensor)


def current_fake_mode() -> FakeTensorMode | None:
    """Return the fake mode that is on in this thread."""
    return cast("FakeTensorMode | None", _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE))


def with_autograd_below_dispatch() -> contextlib.AbstractContextManager[None]:
    """Return a block in which operations record a graph, inside a `__torch_dispatch__` that switched it off."""
    autograd = DispatchKeySet(DispatchKey.AutogradCPU) | DispatchKeySet(DispatchKey.ADInplaceOrView)
    included, excluded = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    guard: contextlib.AbstractContextManager[None] = _C._ForceDispatchKeyGuard(included, excluded - autograd)
    return guard


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

    CUDA's `_foreach_mul_` keeps the number in 32 bits when the tensors have 16. That of the CPU rounds it first (tried
    on 2.13): 0.999 is 1 in bfloat16, and a second moment would never decay.
    """
    factors = factor if isinstance(factor, Sequence) else [factor] * len(tensors)
    for tensor, each in zip(tensors, factors, strict=True):
        tensor.mul_(each)


def decomposition(operation: Any) -> Callable[..., Any]:
    """Return a function that computes an operation from elementary ones."""
    from torch._decomp import decomposition_table

    return decomposition_table[operation]


FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


# -- the simulator: a device answered from Python (torch's PrivateUse1 slot)

Generator = _C.Generator
PRIVATE_DEVICE_TYPE = _autograd.DeviceType.PrivateUse1
private_device_name = _C._get_privateuse1_backend_name
set_up_private_device: Any = cast(Any, backend_registration)._setup_privateuseone_for_python_backend
if TYPE_CHECKING:
    PrivateDeviceGuard = object
    PrivateDeviceHooks = object
else:
    PrivateDeviceGuard = _C._acc.DeviceGuard
    PrivateDeviceHooks = _C._acc.PrivateUse1Hooks


def destroy_library(library: Any) -> None:
    """Remove the operator implementations of a `torch.library.Library` now, not when it is collected."""
    library._destroy()


@contextlib.contextmanager
def wrapped_engine(wrapper: Callable[..., Any]) -> Iterator[None]:
    """Call `wrapper(run_backward, *args, **kwargs)` instead of autograd's engine inside the block."""
    from torch.autograd import graph

    name = "_engine_run_backward"
    run_backward = functools.partial(wrapper, getattr(graph, name))
    with attribute(graph, name, run_backward), attribute(torch.autograd, name, run_backward):
        yield


def map_location_in_use() -> Any:
    """Return the `map_location` of the `torch.load` that is running in this thread."""
    return cast(Any, torch.serialization)._serialization_tls.map_location


# -- optimizers: the way into a step
#
# Note [Inside optimizer.step]
# torch wraps the `step` of every optimizer class once, when the first instance is built
# (`Optimizer.profile_hook_step`). The wrapper runs the pre-hooks (those of all optimizers, then the instance's own),
# the class's step, which it holds in its closure as `func`, and the post-hooks. The step of a class of torch.optim is
# wrapped once more, in what turns gradients off, which also holds it as `func`. MemScale has to be exactly in these
# two places: a pre-hook would be too early (the user's own, which may clip gradients, run later), cannot skip a step,
# and none runs when a step raises; a replaced `optimizer.step` or class attribute is outside of the hooks, which
# would run once for each bucket of parameters, and LR schedulers and `GradScaler` keep the function that they found
# earlier. So the content of such a closure cell is exchanged while someone is subscribed to steps.
# Without the names and wrappers (tried on 2.13) no cell is found: then only the public hooks run, and every optimizer
# is stepped as it is.


def step_cell(kind: type[torch.optim.Optimizer]) -> CellType | None:
    """Return the cell in which torch's outermost wrapper keeps the step of an optimizer class, inside of the hooks.

    A class may override a step that is wrapped already and call it: the outer one is a whole step.
    """
    hook_step = getattr(torch.optim.Optimizer.profile_hook_step, "__code__", None)
    wrappers = [each for each in getattr(hook_step, "co_consts", ()) if isinstance(each, CodeType)]
    for owner in kind.__mro__:
        for function in _unwrapped(vars(owner).get("step")):
            if any(getattr(function, "__code__", None) is each for each in wrappers):
                return _cell_of_func(function)
    return None


def arithmetic_cell(step: Callable[..., Any]) -> CellType | None:
    """Return the cell in which the innermost wrapper of a step of torch.optim keeps the function itself."""
    layers = list(_unwrapped(step))
    return _cell_of_func(layers[-2]) if len(layers) > 1 else None


def _cell_of_func(function: Any) -> CellType | None:
    code = getattr(function, "__code__", None)
    if code is None or "func" not in code.co_freevars:
        return None
    cell: CellType = function.__closure__[code.co_freevars.index("func")]
    return cell


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yield a function and what it wraps: the compiler, for one, wraps the steps that it must not trace into."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


FUSED_CHECK = "_need_device_dtype_check_for_fused"
"""An attribute that fused steps leave behind in an optimizer."""

HAS_WARNED_OF_CAPTURABLE = "_warned_capturable_if_run_uncaptured"
"""What `Optimizer.__init__` sets. Without it a step reads `capturable` of its groups, which those of Adafactor lack: on
2.13 beside a CUDA device, on 2.15 beside any accelerator."""


# -- distributed training

DDP_WITHOUT_COMMUNICATION = {
    "require_backward_grad_sync": False,
    "require_forward_param_sync": False,
    "_static_graph_delay_allreduce_enqueued": True,  # else backward begins the first reduction of a static graph
}
"""Attributes of a DistributedDataParallel by which it trains alone."""


class _NoReducer:
    """Stands in for the reducer of a DistributedDataParallel that does not communicate; holds its buckets."""

    def __init__(self, buckets: torch.Tensor) -> None:
        self.buckets = buckets

    def _rebuild_buckets(self) -> bool:
        return False


def drop_reducers(model: torch.nn.Module) -> None:
    """Have each DistributedDataParallel in a simulated copy train alone, with memory in the place of its buckets.

    A reducer holds the accumulators of the gradients, and torch swaps no parameter whose accumulator is held.
    """
    for each in model.modules():
        if isinstance(each, torch.nn.parallel.DistributedDataParallel):
            trained = [parameter for parameter in each.parameters() if parameter.requires_grad]
            separate = trained and not each.gradient_as_bucket_view
            size = sum(parameter.nbytes for parameter in trained) if separate else 0
            buckets = torch.empty(size, dtype=torch.uint8, device=next(each.parameters()).device)
            vars(each).update(DDP_WITHOUT_COMMUNICATION, reducer=_NoReducer(buckets), logger=None)


def in_ddp_static_graph() -> bool:
    """Return whether a forward of `DistributedDataParallel(static_graph=True)` is running; no, where unknown."""
    active = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    return active is not None and bool(active.static_graph)


def default_store() -> Any | None:
    """Return the key-value store that the processes of a job share; None on a torch that lacks the function."""
    return _ask(torch.distributed.distributed_c10d, "_get_default_store", otherwise=None)


class ShardedGroup(NamedTuple):
    """Parameters that FSDP2 (`fully_shard`) gathers together before their modules compute, and frees after."""

    modules: tuple[torch.nn.Module, ...]
    parameters: tuple[tuple[torch.nn.Module, str, torch.nn.Parameter], ...]  # owner, name, and the shard
    reshards: bool  # whether they are freed after forward, too, not after backward only
    dtype: torch.dtype | None  # that they are gathered in; None for their own
    on_host: bool  # whether FSDP2 keeps the shards on the host, and not on the device
    device: torch.device  # that they are gathered on


def _fsdp_module() -> Any:
    """Return the class of the modules that FSDP2 has sharded; None while nobody has imported it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def sharded_groups(model: torch.nn.Module) -> list[ShardedGroup]:
    """Return what FSDP2 has sharded of a model, whether it is gathered now or not; nothing on a torch without it."""
    kind = _fsdp_module()
    found: dict[int, ShardedGroup] = {}
    is_root = True
    for module in model.modules() if kind is not None else ():
        if not isinstance(module, kind):
            continue
        state: Any = module._get_fsdp_state()
        keeps_root = is_root and state._auto_reshard_after_forward
        is_root = False
        for group in getattr(state, "_fsdp_param_groups", ()):
            parameters = tuple(
                (each._module_info.module, each._module_info.param_name, each.sharded_param)
                for each in group.fsdp_params
            )
            found[id(group)] = ShardedGroup(
                tuple(group.modules),
                parameters,
                reshards=group.post_forward_mesh_info is not None and not keeps_root,
                dtype=group.mp_policy.param_dtype,
                on_host=group.device.type != "cpu" and any(each.offload_to_cpu for each in group.fsdp_params),
                device=group.device,
            )
    return list(found.values())


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether parameters of a model are spread over processes, by FSDP2 or as other DTensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and any(isinstance(each, kind) for each in model.parameters())


def is_flattened(model: torch.nn.Module) -> bool:
    """Return whether `FullyShardedDataParallel` (FSDP1) has put parameters of a model into flat ones."""
    return any(getattr(each, "_fsdp_flattened", False) for each in model.parameters())


@contextlib.contextmanager
def without_sharding(model: torch.nn.Module) -> Iterator[None]:
    """Let a model be copied inside the block as it was before `fully_shard`, whose class refuses that."""
    kind = _fsdp_module()
    sharded = [each for each in model.modules() if kind is not None and isinstance(each, kind)]
    before = [(each, type(each), dict(vars(each))) for each in sharded]
    try:
        for module, cls, attributes in before:
            module.__class__ = cls.__mro__[kind._orig_cls_mro_index]
            for name, value in attributes.items():
                if name.startswith("__composable_api_"):  # its state
                    del vars(module)[name]
                elif name in _FORWARD_HOOKS:
                    vars(module)[name] = type(value)(
                        (key, hook)
                        for key, hook in value.items()
                        if not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
                    )
        yield
    finally:
        for module, cls, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
            module.__class__ = cls


_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def has_global_forward_hooks() -> bool:
    """Return whether hooks on the forward of all modules are registered."""
    hooks: Any = torch.nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has hooks on its gradient; a torch without the attributes has none."""
    return any(getattr(tensor, name, None) for name in _GRADIENT_HOOKS)


def accumulation_hooks(tensor: torch.Tensor) -> Mapping[int, Any]:
    """Return the hooks that are called when a tensor's gradient was accumulated; a torch without them has none."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}


def call_last_hook_first(tensor: torch.Tensor) -> None:
    """Have the hook that was registered last on a tensor's gradient called before the others."""
    hooks = tensor._backward_hooks or {}
    for key in list(hooks)[:-1]:
        # The others to the end, one by one: autograd goes by insertion, not by `move_to_end`.
        hooks[key] = hooks.pop(key)


def drop_empty_hooks(tensor: torch.Tensor) -> None:
    """Leave no empty dictionaries of hooks on a tensor's gradient: without hooks it has none."""
    for name in _GRADIENT_HOOKS:
        if getattr(tensor, name, None) is not None and not getattr(tensor, name):
            setattr(tensor, name, None)


def share_gradient_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give a tensor the hooks on another one's gradient, to be exchanged with it by `torch.utils.swap_tensors`."""
    for name in _GRADIENT_HOOKS:
        setattr(target, name, getattr(source, name))


@contextlib.contextmanager
def without_flat_weights(model: torch.nn.Module) -> Iterator[None]:
    """Drop the weak references of recurrent layers to their weights for a block: they forbid `swap_tensors`."""
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in recurrent:
            module._init_flat_weights()


# What `torch.compile` imports when it is first used, some 200 MiB: for measurements that are to be without.
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")


def set_activation_memory_budget(budget: float) -> None:
    """Have `torch.compile` keep that share of what a step would save for backward, and recompute the rest.

    For this process, and by the documented name of the setting; an AttributeError on a torch that lacks it.
    """
    import torch._functorch.config as settings

    if not hasattr(settings, "activation_memory_budget"):
        raise AttributeError(f"torch {torch.__version__} has no activation_memory_budget.")
    settings.activation_memory_budget = budget
