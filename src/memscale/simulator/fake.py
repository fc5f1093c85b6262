"""Fake tensors for the simulator: shapes and lifetimes without data.

It stands on torch's fake tensors (`memscale._torch`), which are what ``torch.compile``
traces with. Without it a step could not be run without computing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from memscale._torch import (
    FakeTensor,
    current_fake_mode,
    dispatch_stack_length,
    leave_fake_mode,
    return_to_fake_mode,
    tree_leaves,
)
from memscale.errors import SimulationError
from memscale.simulator import known
from memscale.simulator.patches import attribute
from memscale.simulator.remembered import FORGOTTEN, RememberingMode
from memscale.simulator.tracking import DeviceTracker, op_name
from memscale.simulator.workspace import lstm_workspace_bytes
from memscale.testing.kernels import gru_cell, gru_cell_backward

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

LSTM = 2  # oneDNN's number for it

MANY = ("_foreach_", "_fused_")  # operations on many tensors at once


def _group_norm_backward(
    gradient: torch.Tensor,
    values: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    of_weight = values.new_empty(channels) if weight is None else torch.empty_like(weight)
    made = (torch.empty_like(values), of_weight, torch.empty_like(of_weight))
    return tuple(tensor if asked else None for tensor, asked in zip(made, wanted, strict=True))


def _mkldnn_rnn_layer(values: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer.default(values, *args)
    mode, hidden_size, is_training = args[8], args[9], args[14]
    if (
        is_training and mode == LSTM and values.dim() == 3
    ):  # its input is turned to (steps, samples, width) before it comes here
        steps, samples, width = values.shape
        workspace = workspace.new_empty(lstm_workspace_bytes(steps, samples, width, hidden_size))
    return output, hidden, cell, workspace


# torch has no shape rules for these, so that they are made of operations that it has them for; or rules that are
# wrong (torch 2.13): of group norm's backward with values in 16 bits and weights in 32, which gives them the type of
# the weights, and of oneDNN's LSTM, which has no workspace.
SHAPES: dict[str, Callable[..., Any]] = {
    "mkldnn_rnn_layer": _mkldnn_rnn_layer,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "native_group_norm_backward": _group_norm_backward,
}

# What ``.item()`` says of a number nobody computed. A loop that waits for a condition must end (ViT's
# ``trunc_normal_`` draws until all values are within bounds), and checks for bad values must pass.
ANSWERS: dict[str, float] = {
    "any": 0,
    "all": 1,
    "zeros": 0,
    "zeros_like": 0,
    "ones": 1,
    "ones_like": 1,
    "isnan": 0,
    "isinf": 0,
    "isfinite": 1,
    "equal": 1,
}
FILLED = {"full": 1, "full_like": 1, "scalar_tensor": 0}  # position of the value in the arguments
SAME_VALUE = {"_to_copy", "clone", "detach", "alias", "lift_fresh", "view", "_unsafe_view"}
# Comparisons of activations: what they say is a guess, also of all of them together (`any`). Checks for values that
# are not finite are not among them: a step is taken to pass them.
COMPARISONS = {"gt", "lt", "ge", "le", "eq", "ne"}
SAME_GUESS = SAME_VALUE | {"any", "all", "logical_not", "logical_and", "logical_or"}
SAME_GUESS |= {"bitwise_not", "bitwise_and", "bitwise_or"}
# Of a number that is not known: 1.0 would be worse, as optimizers divide by 1 - x.
UNKNOWN_FLOAT = 0.5
UNKNOWN_INT = 1


class FakeMode(RememberingMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """Fake tensors whose device does not exist on this machine."""

    # torch.tensor(data, device=...) makes the tensor on the CPU, then moves the fake: no device is needed.
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        return self  # a copied tensor (nn.TransformerEncoder copies its layer) belongs to the same mode


def is_simulating() -> bool:
    """Are tensors made here and now fake?"""
    return current_fake_mode() is not None


class StepTracker(DeviceTracker):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """The device's tracker, with answers for the few operations that need data or a device."""

    _plain = DeviceTracker._plain | {FakeTensor}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Of all dispatches two thirds only ask a fake tensor for its device.
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        name = op_name(func)
        if name == "_local_scalar_dense":
            self.guesses += _is_guess(args[0])
            known.asked += getattr(args[0], "_memscale_known", None) is not None
            return _number(args[0])
        if name == "record_stream" or (name.startswith(MANY) and _changes_values_only(name, args)):
            return None
        if name in ("_pin_memory", "pin_memory"):
            func, args, kwargs = aten.clone.default, args[:1], {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, FakeTensor) and result.numel() == 1:
            _remember_value(result, name, args)
        if name in COMPARISONS or name in SAME_GUESS:
            _remember_guess(result, name, args)
        known.follow(result, func, name, args, kwargs)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = SHAPES.get(op_name(func))
        if own is not None:
            return own(*args, **kwargs)
        if dispatch_stack_length() == 1:  # nobody stands between this mode and the fake one
            mode = current_fake_mode()
            if isinstance(mode, RememberingMode):
                leave_fake_mode()
                try:
                    result = mode.recall(func, args, kwargs)
                finally:
                    return_to_fake_mode(mode)
                if result is not FORGOTTEN:
                    return result
        return super()._run(func, args, kwargs)

    def _device_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.device | None:
        if not isinstance(tensor, FakeTensor):
            return super()._device_of(tensor, storage)
        return None if tensor.fake_device.type == "meta" else tensor.fake_device


def _changes_values_only(name: str, args: tuple[Any, ...]) -> bool:
    """Is this an in-place operation on many tensors that is surely allowed? Then there is nothing to do.

    Optimizers live of such operations, and to have the fake mode check them takes as long as the rest of a
    step. In doubt (other shapes, kinds or devices) it is asked, and raises where it must.
    """
    if not name.endswith("_"):
        return False
    targets = args[0]
    for others in args:
        if not isinstance(others, (list, tuple)) or not others or not isinstance(others[0], torch.Tensor):
            continue
        if len(others) != len(targets) or not all(map(_alike, others, targets)):
            return False
    for target in targets:
        target._memscale_value = None
    return True


def _alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        isinstance(first, FakeTensor)
        and isinstance(second, FakeTensor)
        and first.shape == second.shape
        and first.dtype is second.dtype
        and first.fake_device == second.fake_device
    )


def _is_guess(tensor: torch.Tensor) -> bool:
    """Is a number made up, so that Python code that goes by it may do something else in training?"""
    return getattr(tensor, "_memscale_value", None) is None or getattr(tensor, "_memscale_guess", False)


def _remember_guess(result: Any, name: str, args: tuple[Any, ...]) -> None:
    if not isinstance(result, FakeTensor):
        return
    if name in COMPARISONS:
        guess = isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
    else:
        guess = any(getattr(each, "_memscale_guess", False) for each in args)
    if guess:
        result._memscale_guess = True  # type: ignore[attr-defined]


def _number(tensor: torch.Tensor) -> bool | int | float:
    value = getattr(tensor, "_memscale_value", None)
    if tensor.dtype is torch.bool:
        return bool(value)  # a comparison nobody computed is false: no early exit, no dropped layer
    if tensor.dtype.is_floating_point:
        return float(UNKNOWN_FLOAT if value is None else value)
    return int(UNKNOWN_INT if value is None else value)


def _remember_value(result: FakeTensor, name: str, args: tuple[Any, ...]) -> None:
    """Keep the value of a scalar that is known without computing."""
    value: Any = None
    if name in ANSWERS:
        value = ANSWERS[name]
    elif name in FILLED and len(args) > FILLED[name]:
        value = args[FILLED[name]]
    elif name in SAME_VALUE and args:
        value = getattr(args[0], "_memscale_value", None)
    # An operation in place on a scalar makes an old value void.
    result._memscale_value = value if isinstance(value, (bool, int, float)) else None  # type: ignore[attr-defined]


@contextlib.contextmanager
def saving_refused() -> Iterator[None]:
    """``torch.save`` says why there is nothing to save."""
    save = torch.save

    def checked_save(thing: Any, *args: Any, **kwargs: Any) -> None:
        tensors = thing.parameters() if isinstance(thing, nn.Module) else tree_leaves(thing)
        if any(isinstance(each, FakeTensor) for each in tensors):
            raise SimulationError(
                "torch.save inside a simulation: its tensors have no data, so there is nothing to save. "
                "Leave saving out of what is simulated."
            )
        save(thing, *args, **kwargs)

    with attribute(torch, "save", checked_save):
        yield


@contextlib.contextmanager
def module_conversion() -> Iterator[None]:
    """``module.to(device)`` works on fake parameters, and refuses to turn real weights into fake ones."""
    swap: Any = torch.utils.swap_tensors
    apply: Any = nn.Module._apply

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor):
            # The converter's memo holds weak references, and tensors with weak references cannot be swapped.
            first.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    def checked_apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not isinstance(tensor, FakeTensor):
                raise SimulationError(
                    f"{type(module).__name__} holds real data ({name} on {tensor.device}): converting it "
                    "inside a simulation would lose it. Build the model inside the `simulate` block, or "
                    "simulate a copy: `sim.copy_of(model)`."
                )
        converted: nn.Module = apply(module, function, recurse)
        return converted

    with attribute(torch.utils, "swap_tensors", swap_tensors), attribute(nn.Module, "_apply", checked_apply):
        yield
