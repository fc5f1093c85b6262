"""Fake tensors for the simulator: shapes and lifetimes without data.

Private torch API: ``torch._subclasses.fake_tensor`` (tried on torch 2.13); it is what ``torch.compile`` traces
with. Without it a step could not be run without computing it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memscale.errors import SimulationError
from memscale.simulator.patches import attribute
from memscale.simulator.tracking import DeviceTracker

aten = torch.ops.aten

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
DEFAULT_NUMBER = 1.0


class FakeMode(FakeTensorMode):
    """Fake tensors whose device does not exist on this machine."""

    # torch.tensor(data, device=...) makes the tensor on the CPU, then moves the fake: no device is initialised.
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        return self  # a copied tensor (nn.TransformerEncoder copies its layer) belongs to the same mode


class StepTracker(DeviceTracker):
    """The device's tracker, with answers for the few operations that need data or a device."""

    def run(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        if func is aten._local_scalar_dense.default:
            return _number(args[0])
        if func is aten.record_stream.default:
            return None
        if func is aten._pin_memory.default or func is aten.pin_memory.default:
            func, args, kwargs = aten.clone.default, args[:1], {}
        result = super().run(func, types, args, kwargs)
        if isinstance(result, FakeTensor) and result.dim() == 0:
            _remember_value(result, func._schema.name[6:], args)
        return result


def _number(tensor: torch.Tensor) -> bool | int | float:
    value = getattr(tensor, "_memscale_value", None)
    if tensor.dtype is torch.bool:
        return bool(value)  # a comparison nobody computed is false: no early exit, no dropped layer
    value = DEFAULT_NUMBER if value is None else value
    return float(value) if tensor.dtype.is_floating_point else int(value)


def _remember_value(result: FakeTensor, name: str, args: tuple[Any, ...]) -> None:
    """Keep the value of a scalar that is known without computing."""
    value: Any = None
    if name in ANSWERS:
        value = ANSWERS[name]
    elif name in FILLED and len(args) > FILLED[name]:
        value = args[FILLED[name]]
    elif name in SAME_VALUE and args:
        value = getattr(args[0], "_memscale_value", None)
    if isinstance(value, (bool, int, float)):
        result._memscale_value = value  # type: ignore[attr-defined]


@contextlib.contextmanager
def module_conversion() -> Iterator[None]:
    """``module.to(device)`` works on fake parameters, and refuses to turn real weights into fake ones."""
    swap = torch.utils.swap_tensors
    apply = nn.Module._apply

    def swap_tensors(first: torch.Tensor, second: torch.Tensor) -> None:
        if isinstance(first, FakeTensor):
            # The converter's memo holds weak references, and tensors with weak references cannot be swapped.
            first.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(first, second)

    def checked_apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if not isinstance(tensor, FakeTensor):
                raise SimulationError(
                    f"{type(module).__name__} holds real data ({name} on {tensor.device}): converting it inside "
                    "a simulation would lose it. Build the model inside the `simulate` block, or simulate a "
                    "copy: `sim.copy_of(model)`."
                )
        return apply(module, function, recurse)

    with attribute(torch.utils, "swap_tensors", swap_tensors), attribute(nn.Module, "_apply", checked_apply):
        yield
