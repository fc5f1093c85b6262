"""Which 16-bit type a device is to compute in, and why."""

from __future__ import annotations

from typing import Literal

import torch

from memscale.errors import ConfigError, shown
from memscale.execution_plan import Precision
from memscale.hardware import DeviceSpec

__all__ = ["choose_precision"]

_Name = Literal["bfloat16", "float16"]
_NAMES: dict[str, _Name] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
_SHORT: dict[_Name, str] = {"bfloat16": "bf16", "float16": "fp16"}


def choose_precision(device: DeviceSpec, wanted: bool | str) -> tuple[Precision | None, str]:
    """The precision for a device, and the reason for it, or for none.

    bf16 where the device computes it at least as fast as fp32: it has the range of fp32. Else fp16, with loss
    scaling, on GPUs: there memory is what is short, also where it costs time.

    Args:
        device: What computes.
        wanted: Whether 16 bits are wanted at all; or which, and then it is given wherever it works.

    Raises:
        ConfigError: ``wanted`` is a name that is not known.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> choose_precision(virtual_hardware("V100").device, True)[0].dtype
        'float16'
    """
    if isinstance(wanted, str):
        return _as_told(device, wanted)
    if not wanted:
        return None, "16 bits were not asked for"
    if device.computes_bf16_fast:
        return _given(
            "bfloat16", f"{device.name} computes bf16 {_rate(device, 'bfloat16')}, with the range of fp32"
        )
    if device.kind == "cpu":
        slow = next((f" ({note})" for note in device.notes if note.startswith("bf16")), "")
        return (
            None,
            f"{device.name} does not compute bf16 fast{slow}; fp16 is for GPUs, unless it is asked for by name",
        )
    if device.computes_fp16_fast:
        reason = f"{device.name} computes fp16 {_rate(device, 'float16')}, and has no fast bf16; the loss is scaled"
        return _given("float16", reason)
    if device.supports_fp16:
        reason = (
            f"{device.name} computes fp16 only {_rate(device, 'float16')}, and has no bf16: activations and working "
            "copies are halved all the same, at a cost in time; the loss is scaled"
        )
        return _given("float16", reason)
    return None, f"{device.name} has neither bf16 nor fp16"


def _as_told(device: DeviceSpec, wanted: str) -> tuple[Precision | None, str]:
    name = _NAMES.get(wanted.lower())
    if name is None:
        raise ConfigError(f"The precision {shown(wanted)} is not known; allowed are {', '.join(_NAMES)}.")
    short = _SHORT[name]
    supported = device.supports_bf16 if name == "bfloat16" else device.supports_fp16
    if not supported:
        why = next((f" ({note})" for note in device.notes if note.startswith(short)), "")
        return None, f"{short} was asked for, and {device.name} has none{why}"
    return _given(name, f"{short} was asked for; {device.name} computes it {_rate(device, name)}")


def _given(name: _Name, reason: str) -> tuple[Precision, str]:
    return Precision(name, rule="precision", reason=reason), reason


def _rate(device: DeviceSpec, name: _Name) -> str:
    times = device.rates.of(getattr(torch, name)) / device.rates.fp32
    return f"{times:.1f}× as fast as fp32" if times >= 0.1 else f"at 1/{round(1 / times)} of the rate of fp32"
