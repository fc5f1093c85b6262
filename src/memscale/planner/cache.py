"""Plans that were made in this process, by everything that they depend on.

Note [Equal models]
~~~~~~~~~~~~~~~~~~~
A plan depends on a model's structure and not on its weights, so that a second model of the same structure, called
with a batch of the same shapes, has the same plan. The key has every module's class, its forward function, its
training flag and all of its attributes; every parameter and buffer by its shape, type, place, flags and ties; the
batch's tensors likewise, and its other values; the Config; what the optimizer needs; the hardware, free disk
space by powers of two; and the switches of torch that kernels depend on.

In doubt there is no key, and the plan is made again: where an attribute is not plain data (a generator, a closure, an
object without attributes of its own), or the model has hooks. Values of integer tensors in the batch (masks) are part
of the key if planning has read any.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memscale._torch import (
    efficient_attention_is_enabled,
    flash_attention_is_enabled,
    has_global_forward_hooks,
    has_gradient_hooks,
    math_attention_is_enabled,
    private_device_name,
)
from memscale.config import Config
from memscale.execution_plan import Plan
from memscale.executor.registry import LAYER_TECHNIQUES
from memscale.hardware import Hardware
from memscale.optimizer.needs import OptimizerNeeds
from memscale.profiler.sample import Sample

__all__ = ["PlanCache", "plan_key"]

MOST_PLANS = 64  # the oldest are dropped
LARGEST_ATTRIBUTE = 10_000  # items of one attribute: a longer list is data, not a setting

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_PICKLED_BY = frozenset({"__reduce__", "__reduce_ex__"})
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", "training"})


class _NoKey(Exception):
    """A value that cannot be compared with others of its type."""


class PlanCache:
    """The last plans that were made. See Note [Equal models]."""

    def __init__(self) -> None:
        self._plans: OrderedDict[tuple[object, object], Plan] = OrderedDict()

    def find(self, key: object, sample: Sample | None) -> Plan | None:
        """Return the plan for a key; one that depended on values of the batch, for those values only."""
        wanted: tuple[object, object] = (key, None)
        if wanted not in self._plans:
            wanted = (key, _values_of(sample))
        if wanted not in self._plans:
            return None
        self._plans.move_to_end(wanted)
        return self._plans[wanted]

    def add(self, key: object, sample: Sample | None, plan: Plan, *, by_values: bool) -> None:
        """Keep a plan, which depended on values of the batch, or on its shapes alone."""
        self._plans[key, _values_of(sample) if by_values else None] = plan
        while len(self._plans) > MOST_PLANS:
            self._plans.popitem(last=False)

    def clear(self) -> None:
        self._plans.clear()


def plan_key(
    model: nn.Module,
    sample: Sample | None,
    config: Config,
    hardware: Hardware,
    optimizer: OptimizerNeeds | None,
) -> object | None:
    """Return everything that a plan depends on, except values of the batch; None if that cannot be told."""
    try:
        key = (
            _model_key(model),
            None if sample is None else _Describer(model).of((sample.args, sample.kwargs, sample.beside)),
            _Describer(model).of([config.to_dict(), sorted(config.explicit_fields), config.enable_logging]),
            _hardware_key(hardware),
            None if optimizer is None else _optimizer_key(optimizer),
            _switches(),
            tuple(LAYER_TECHNIQUES),
        )
        hash(key)
    except (_NoKey, TypeError, RecursionError):
        return None
    return key


def _optimizer_key(needs: OptimizerNeeds) -> object:
    return (
        needs.kind,
        tuple(needs.state.items()),
        needs.temporaries,
        needs.moves,
        needs.eight_bit,
        needs.notes,
    )


def _values_of(sample: Sample | None) -> object:
    """Return the values of a batch that a model may read: those of its integer tensors."""
    tensors = [] if sample is None else sample.tensors()
    return tuple(
        each.detach().cpu().numpy().tobytes()
        for each in tensors
        if type(each) is torch.Tensor
        and not each.is_floating_point()
        and not each.is_complex()
        and not each.is_meta
    )


def _hardware_key(hardware: Hardware) -> object:
    disk = replace(hardware.disk, free_bytes=hardware.disk.free_bytes.bit_length())
    host = replace(hardware.host, available_ram_bytes=0)  # plans go by its size, not by what is free
    return replace(hardware, device=replace(hardware.device, free_bytes=0), host=host, disk=disk)


def _switches() -> object:
    """Return the part of torch's global state that kernels and types depend on."""
    kinds = ("cpu", "cuda", private_device_name())
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return (
        torch.get_default_dtype(),
        tuple(autocast),
        flash_attention_is_enabled(),
        efficient_attention_is_enabled(),
        math_attention_is_enabled(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _model_key(model: nn.Module) -> object:
    if has_global_forward_hooks():
        raise _NoKey
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        raise _NoKey
    describer = _Describer(model)
    return tuple(
        (
            name,
            type(module),
            type(module).forward,
            module.training,
            tuple((key, describer.of(value)) for key, value in module._parameters.items()),
            tuple((key, describer.of(value)) for key, value in module._buffers.items()),
            tuple((key, describer.of(value)) for key, value in _attributes(module)),
        )
        for name, module in model.named_modules(remove_duplicate=False)
    )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in _STRUCTURE:
            continue
        if name.endswith("_hooks") and isinstance(value, Mapping):
            if value:
                raise _NoKey
            continue
        yield name, value


class _Describer:
    """Describes values so that equal descriptions behave alike; a repeated object is described by its number."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # so that ids stay unique

    def of(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, (type, types.ModuleType)):
            return value
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            owner = getattr(value, "__self__", None)
            if getattr(value, "__closure__", None) or not isinstance(owner, (type(None), types.ModuleType)):
                raise _NoKey
            return value
        if isinstance(value, nn.Module):
            if id(value) not in self._modules:
                raise _NoKey
            return "module", self._modules[id(value)]
        number = self._numbers.get(id(value))
        if number is not None:
            return "again", number
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return type(value), self._parts(value)

    def _parts(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor_key(value)
        if isinstance(value, (list, tuple, Mapping, set, frozenset)) and len(value) > LARGEST_ATTRIBUTE:
            raise _NoKey
        if isinstance(value, Mapping):
            return tuple((self.of(key), self.of(each)) for key, each in value.items())
        if isinstance(value, (set, frozenset)):
            return frozenset(self.of(each) for each in value)
        if isinstance(value, (list, tuple)):
            return tuple(self.of(each) for each in value)
        if isinstance(value, functools.partial):
            return self.of(value.func), self.of(value.args), self.of(value.keywords)
        kinds = type(value).__mro__[:-1]
        hidden = any(vars(kind).get("__slots__") or _PICKLED_BY.intersection(vars(kind)) for kind in kinds)
        if hidden or not hasattr(value, "__dict__"):
            raise _NoKey  # it has state that its attributes do not show
        return self.of(vars(value))


def _tensor_key(tensor: torch.Tensor) -> object:
    if tensor.layout is not torch.strided or has_gradient_hooks(tensor):
        raise _NoKey
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
    )
