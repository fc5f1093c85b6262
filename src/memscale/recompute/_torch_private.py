"""The private torch names that recomputation stands on, in one place.

Tried on torch 2.13.0 (CPU). Each docstring says what happens on a torch that lacks the name behind it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "OUTSIDE_BACKWARD",
    "Hooks",
    "LightDispatchMode",
    "a_dispatch_mode_is_active",
    "alias_below_autograd",
    "at_end_of_backward",
    "backward_keeps_graph",
    "graph_task_id",
    "hooks_are_allowed",
    "running_node_name",
    "same_version",
    "storage_key",
    "surrounding_hooks",
    "written_tensors",
]

OUTSIDE_BACKWARD = -1
"""What `graph_task_id` says when no backward pass is running."""

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
