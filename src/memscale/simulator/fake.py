"""Fake tensors on a device that does not exist: shapes and lifetimes without data.

Note [Values of a batch]
A padding mask decides whether an attention mask is built, and with it which kernel runs and what is saved for
backward. So a fake batch remembers the integer values of the real one, and the operations by which code inspects
a mask (is all of it set? does it equal this value?) are answered from them. Weights and activations have no values.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memscale._torch import FakeTensor, FakeTensorMode, attribute, disable_current_modes, tree_leaves
from memscale.errors import SimulationError
from memscale.simulator.device import DeviceTracker, op_name

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

LSTM = 2  # oneDNN's number for it
SCRATCH_PAGE_BYTES = 4096

FOREACH_PREFIXES = ("_foreach_", "_fused_")  # operations on many tensors at once


def _group_norm_backward(gradient: Tensor, values: Tensor, *args: Any) -> tuple[Any, ...]:
    _, _, weight, _, channels, _, _, wanted = args
    of_weight = values.new_empty(channels) if weight is None else torch.empty_like(weight)
    made = (torch.empty_like(values), of_weight, torch.empty_like(of_weight))
    return tuple(tensor if asked else None for tensor, asked in zip(made, wanted, strict=True))


def lstm_workspace_bytes(steps: int, samples: int, inputs: int, hidden: int) -> int:
    """Return the bytes that oneDNN's LSTM layer saves for backward on the CPU in 32 bits (measured, torch 2.13)."""
    states = 2 * (steps + 1) * samples
    parts = [steps * samples * _padded(4 * hidden), steps * samples * _padded(hidden)]
    parts += [states * _padded(max(inputs, hidden))] * 3 + [states * hidden] * 2
    return sum(-(-4 * part // SCRATCH_PAGE_BYTES) * SCRATCH_PAGE_BYTES for part in parts)


def _padded(width: int) -> int:
    """Return the length of a row in oneDNN's buffers: whole cache lines, and one more where rows would collide."""
    padded = -(-width // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _mkldnn_rnn_layer(values: Tensor, *args: Any) -> tuple[Tensor, ...]:
    output, hidden, cell, workspace = aten.mkldnn_rnn_layer.default(values, *args)
    mode, hidden_size, is_training = args[8], args[9], args[14]
    if is_training and mode == LSTM and values.dim() == 3:  # (steps, samples, width), also if batch_first
        steps, samples, width = values.shape
        workspace = workspace.new_empty(lstm_workspace_bytes(steps, samples, width, hidden_size))
    return output, hidden, cell, workspace


def _mkldnn_rnn_layer_backward(*args: Any) -> tuple[Tensor, ...]:
    found = list(aten.mkldnn_rnn_layer_backward.default(*args))
    found[4] = torch.empty_like(found[3])
    return tuple(found)


def gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hidden: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute CUDA's fused GRU cell from elementary operations: the hidden state and its workspace."""
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    reset_in, update_in, new_in = input_gates.chunk(3, 1)
    reset_hidden, update_hidden, new_hidden = hidden_gates.chunk(3, 1)
    reset = (reset_in + reset_hidden).sigmoid()
    update = (update_in + update_hidden).sigmoid()
    new = (new_in + reset * new_hidden).tanh()
    workspace = torch.cat([reset, update, new, hidden, new_hidden], 1)
    return new + update * (hidden - new), workspace


def gru_cell_backward(gradient: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, hidden, new_hidden = workspace.chunk(5, 1)
    update_gate = gradient * (hidden - new) * update * (1 - update)
    new_gate = gradient * (1 - update) * (1 - new * new)
    reset_gate = new_gate * new_hidden * reset * (1 - reset)
    input_gates = torch.cat([reset_gate, update_gate, new_gate], 1)
    hidden_gates = torch.cat([reset_gate, update_gate, new_gate * reset], 1)
    biases = (input_gates.sum(0), hidden_gates.sum(0)) if has_bias else (None, None)
    return input_gates, hidden_gates, gradient * update, *biases


# Operations without shape rules in torch 2.13 (the GRU cell), computed from operations that have them, or with wrong
# ones: group norm's backward with 16-bit values and 32-bit weights returns the weights' dtype, oneDNN's LSTM has no
# workspace, and its backward returns one tensor for the gradients of both biases.
SHAPE_RULES: dict[str, Callable[..., Any]] = {
    "mkldnn_rnn_layer": _mkldnn_rnn_layer,
    "mkldnn_rnn_layer_backward": _mkldnn_rnn_layer_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "native_group_norm_backward": _group_norm_backward,
}

# What `.item()` returns for a number that was not computed. A loop that waits for a condition must end (ViT's
# `trunc_normal_` draws until all values are within bounds), and checks for bad values must pass.
ASSUMED_VALUES: dict[str, float] = {
    **dict.fromkeys(("any", "zeros", "zeros_like", "isnan", "isinf"), 0),
    **dict.fromkeys(("all", "ones", "ones_like", "isfinite", "equal"), 1),
}
FILL_VALUE_ARGUMENT = {"full": 1, "full_like": 1, "scalar_tensor": 0}  # its position
SAME_VALUE = {"_to_copy", "clone", "detach", "alias", "lift_fresh", "view", "_unsafe_view"}
# The result of comparing activations is a guess, and so is `any` of it. Checks for values that are not finite are not
# among them: a step is assumed to pass them.
COMPARISONS = {each: getattr(operator, each) for each in ("gt", "lt", "ge", "le", "eq", "ne")}
# Of a number that decides whether a layer or an adapter runs: the likelier is assumed.
DRAWS = {"rand", "rand_like"}
LOGIC = {"any", "all", "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or"}
# For unknown numbers. Not 1.0: optimizers divide by 1 - x.
UNKNOWN_FLOAT = 0.5
UNKNOWN_INT = 1

LARGEST_MASK = 1 << 20  # elements
VALUES_PROPAGATED = {"_to_copy", "detach", "alias", "view", "slice", "all", "any", "sum", "eq", "ne"}
VALUES_PROPAGATED |= {"logical_not", "bitwise_not"}
_value_reads = 0


def batch_value_reads() -> int:
    """Return how often code in this process has read a value of a fake batch."""
    return _value_reads


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]  # its `__init_subclass__`
    """A fake mode whose device does not exist on this machine."""

    # torch.tensor(data, device=...) makes the tensor on the CPU and moves the fake one: no device is needed.
    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in LightDispatchMode

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        return self  # a copied tensor (nn.TransformerEncoder copies its layer) belongs to the same mode


class StepTracker(DeviceTracker):
    """A device's tracker that also answers the few operations that need data or a real device."""

    _plain = DeviceTracker._plain | {FakeTensor}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        global _value_reads
        # Two thirds of all dispatches only ask a fake tensor for its device.
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        name = op_name(func)
        if name == "_local_scalar_dense":
            # Python code that depends on a guess may take another branch in training.
            value = getattr(args[0], "_memscale_value", None)
            self.guesses += value is None or getattr(args[0], "_memscale_guess", False)
            _value_reads += getattr(args[0], "_memscale_known", None) is not None
            dtype = args[0].dtype
            if dtype is torch.bool:
                return bool(value)  # an unknown comparison is false: no early exit, no dropped layer
            if dtype.is_floating_point:
                return float(UNKNOWN_FLOAT if value is None else value)
            return int(UNKNOWN_INT if value is None else value)
        if name == "record_stream" or (
            name.startswith(FOREACH_PREFIXES) and _changes_values_only(name, args)
        ):
            return None
        if name in ("_pin_memory", "pin_memory"):
            func, args, kwargs = aten.clone.default, args[:1], {}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, FakeTensor) and result.numel() == 1:
            _remember_value(result, name, args)
        if isinstance(result, FakeTensor) and _is_guess(name, args):
            result._memscale_guess = True  # type: ignore[attr-defined]
        _propagate_values(result, func, name, args, kwargs)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = SHAPE_RULES.get(op_name(func))
        return own(*args, **kwargs) if own is not None else super()._run(func, args, kwargs)

    def _device_of(self, tensor: Tensor, storage: torch.UntypedStorage) -> torch.device | None:
        if not isinstance(tensor, FakeTensor):
            return super()._device_of(tensor, storage)
        return None if tensor.fake_device.type == "meta" else tensor.fake_device


def _changes_values_only(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operation only writes to tensors in place and is certain to be valid.

    Optimizers consist of such `foreach` operations, and having the fake mode check them takes as long as the rest of a
    step.
    """
    if not name.endswith("_"):
        return False
    targets = args[0]
    for others in args:
        if not isinstance(others, (list, tuple)) or not others or not isinstance(others[0], Tensor):
            continue
        if len(others) != len(targets) or not all(map(_alike, others, targets)):
            return False
    for target in targets:
        target._memscale_value = None
    return True


def _alike(first: Tensor, second: Tensor) -> bool:
    return (
        isinstance(first, FakeTensor)
        and isinstance(second, FakeTensor)
        and first.shape == second.shape
        and first.dtype is second.dtype
        and first.fake_device == second.fake_device
    )


def _is_guess(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the values of a result are made up."""
    if name in DRAWS:
        return True
    if name in COMPARISONS:
        return isinstance(args[0], Tensor) and args[0].is_floating_point()
    return (name in SAME_VALUE or name in LOGIC) and any(
        getattr(each, "_memscale_guess", False) for each in args
    )


def _remember_value(result: FakeTensor, name: str, args: tuple[Any, ...]) -> None:
    """Store the value of a scalar that is known without computing."""
    value: Any = None
    if name in ASSUMED_VALUES:
        value = ASSUMED_VALUES[name]
    elif name in FILL_VALUE_ARGUMENT and len(args) > FILL_VALUE_ARGUMENT[name]:
        value = args[FILL_VALUE_ARGUMENT[name]]
    elif name in SAME_VALUE and args:
        value = getattr(args[0], "_memscale_value", None)
    elif name in DRAWS:
        value = UNKNOWN_FLOAT
    elif name in COMPARISONS and len(args) > 1 and isinstance(args[1], (int, float)):
        drawn = getattr(args[0], "_memscale_value", None)
        value = None if drawn is None else COMPARISONS[name](drawn, args[1])
    # None after an in-place operation on a scalar with a known value.
    result._memscale_value = value if isinstance(value, (bool, int, float)) else None  # type: ignore[attr-defined]


def remember_values(twin: Tensor, real: Tensor) -> None:
    """Give a fake tensor of a batch the values of the real one. See Note [Values of a batch]."""
    has_values = type(real) is Tensor and not real.is_meta and not isinstance(real, FakeTensor)
    if has_values and not real.is_floating_point() and not real.is_complex() and real.numel() <= LARGEST_MASK:
        twin._memscale_known = real  # type: ignore[attr-defined]


def _propagate_values(
    result: Any, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> None:
    """Compute the values of a result if those of its operand are known."""
    operand = args[0] if args else None
    known = getattr(operand, "_memscale_known", None)
    if known is None:
        return
    if name.endswith("_"):
        operand._memscale_known = None  # type: ignore[union-attr]  # changed in place to unknown values
    if name not in VALUES_PROPAGATED or any(isinstance(each, Tensor) for each in args[1:]):
        return
    options = {key: value for key, value in (kwargs or {}).items() if key == "dtype"}
    with disable_current_modes():
        values = known.to(**options) if name == "_to_copy" else func(known, *args[1:], **options)
        result._memscale_known = values
        if values.numel() == 1:
            result._memscale_value = values.item()


@contextlib.contextmanager
def data_protected() -> Iterator[None]:
    """Refuse to turn real weights into fake ones, and to save fake ones, inside the block."""
    save: Any = torch.save
    apply: Any = nn.Module._apply

    def checked_save(thing: Any, *args: Any, **kwargs: Any) -> None:
        tensors = thing.parameters() if isinstance(thing, nn.Module) else tree_leaves(thing)
        if any(isinstance(each, FakeTensor) for each in tensors):
            raise SimulationError(
                "torch.save inside a simulation: its tensors have no data, so there is nothing to save. "
                "Leave saving out of what is simulated."
            )
        save(thing, *args, **kwargs)

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

    with attribute(torch, "save", checked_save), attribute(nn.Module, "_apply", checked_apply):
        yield
