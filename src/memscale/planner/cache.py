"""Plans that were made in this process, by everything that they depend on.

Note [Equal models]
~~~~~~~~~~~~~~~~~~~
A plan depends on a model's structure and not on its weights, so that a second model of the same structure, called with
a batch of the same shapes, has the same plan. The key is what pickling the model, the batch, the Config, the hardware,
the optimizer's needs and torch's switches would write, with tensors replaced by their shape, type, place, flags and
ties, and classes and functions by themselves: one that was defined anew is another one.

In doubt there is no key, and the plan is made again: where something cannot be pickled, or a function is a closure, or
tensors have hooks. Values of integer tensors in the batch (masks) are part of the key if planning has read any.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import types
from dataclasses import replace

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
from memscale.hardware.host import in_process_group
from memscale.optimizer.needs import OptimizerNeeds
from memscale.profiler.sample import Sample

MOST_PLANS = 64  # the oldest are dropped
plans_made: dict[object, Plan] = {}


def keep_plan(key: object, plan: Plan) -> None:
    """Keep a plan under a key, and drop the oldest one where there are too many."""
    plans_made[key] = plan
    if len(plans_made) > MOST_PLANS:
        del plans_made[next(iter(plans_made))]


def plan_key(
    model: nn.Module,
    sample: Sample,
    config: Config,
    hardware: Hardware,
    optimizer: OptimizerNeeds | None,
    *,
    suggest: bool,
) -> object | None:
    """Return everything that a plan depends on, except values of the batch; None if that cannot be told."""
    if has_global_forward_hooks():
        return None
    # Of memory its size counts, and of an accelerator's host what may be offloaded to it, in steps; free disk space
    # counts in powers of two.
    host = hardware.host
    may_offload = 0 if hardware.device.kind == "cpu" else host.offload_bytes
    machine = replace(
        hardware,
        device=replace(hardware.device, free_bytes=0),
        host=replace(host, available_ram_bytes=may_offload),
        disk=replace(hardware.disk, free_bytes=hardware.disk.free_bytes.bit_length()),
    )
    batch = (sample.args, sample.kwargs, sample.beside)
    text = io.BytesIO()
    pickler = _StructurePickler(text)
    try:
        pickler.dump((model, batch, config, machine, optimizer, suggest, _switches(), list(LAYER_TECHNIQUES)))
    except Exception:  # whatever the user's classes raise when they are pickled
        return None
    return hashlib.sha256(text.getvalue()).digest(), pickler.code()


def values_of(sample: Sample) -> object:
    """Return the values of a batch that a model may read: those of its integer tensors."""
    return tuple(
        each.detach().cpu().numpy().tobytes()
        for each in sample.tensors()
        if type(each) is torch.Tensor
        and not each.is_floating_point()
        and not each.is_complex()
        and not each.is_meta
    )


def _switches() -> object:
    """Return the part of torch's global state that kernels, types and placement depend on."""
    kinds = ("cpu", "cuda", private_device_name())
    return (
        torch.get_default_dtype(),
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        flash_attention_is_enabled(),
        efficient_attention_is_enabled(),
        math_attention_is_enabled(),
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
        in_process_group(),
    )


class _StructurePickler(pickle.Pickler):
    """Writes objects without the values of tensors. See Note [Equal models]."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: dict[int, tuple[int, object]] = {}  # with the objects, so that ids stay unique

    def code(self) -> tuple[object, ...]:
        """Return the classes and functions that were met."""
        return tuple(each for _, each in self._seen.values() if not isinstance(each, torch.Tensor))

    def persistent_id(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or has_gradient_hooks(value):
                raise pickle.PicklingError("only plain tensors can be compared")
            place = (tuple(value.shape), value.stride(), str(value.dtype), str(value.device))
            return self._number(type(value)), self._number(value), place, value.requires_grad, value.is_leaf
        if isinstance(value, types.FunctionType) and value.__closure__:
            raise pickle.PicklingError("a closure has state that cannot be compared")
        if isinstance(value, type) and issubclass(value, nn.Module):
            return self._number(value), self._number(value.forward)
        if isinstance(value, (type, types.ModuleType, types.FunctionType)):
            return self._number(value)
        return None

    def _number(self, value: object) -> int:
        return self._seen.setdefault(id(value), (len(self._seen), value))[0]
