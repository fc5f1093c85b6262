"""Settings of the model as a whole, chosen before those of its layers: precision, tiles, 8-bit optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from memscale.config import Config
from memscale.errors import ConfigError, shown
from memscale.execution_plan import LayerPlan, LossTiling, Offloading, Plan, Precision, Tier, Tiling
from memscale.hardware import DeviceSpec, Hardware
from memscale.profiler import Block
from memscale.tiling.technique import rows_of_layers, tiled_loss

__all__ = ["NOTHING", "BatchSize", "Setting", "choose_precision", "settings_for"]

LARGE_LOGITS = 64 * 2**20  # bytes: smaller logits are left whole unless tiling is asked for
EIGHT_BIT_SHARE = 2.1 / 8  # of Adam's state, with its scales; embeddings and small tensors stay in 32 bits


@dataclass(frozen=True)
class BatchSize:
    """The sizes that tiles depend on.

    Attributes:
        positions: positions of one sequence.
        tokens: positions of all sequences.
        vocabulary: outputs of the head; 0 if none was found.
    """

    positions: int
    tokens: int
    vocabulary: int

    @property
    def logits_bytes(self) -> int:
        return 4 * self.tokens * self.vocabulary


@dataclass(frozen=True)
class Setting:
    """One way to treat a model as a whole."""

    loss: LossTiling | None = None
    precision: Precision | None = None
    mlp_rows: int | None = None
    eight_bit: bool = False
    notes: tuple[str, ...] = ()

    @property
    def changes_the_profile(self) -> bool:
        """Return whether a step with it needs other memory, apart from optimizer state."""
        return self.loss is not None or self.precision is not None or self.mlp_rows is not None

    @property
    def working_share(self) -> float:
        return 1.0 if self.precision is None else 0.5

    @property
    def state_share(self) -> float:
        return EIGHT_BIT_SHARE if self.eight_bit else 1.0

    def alone(
        self, blocks: Sequence[Block], offload_to: Tier | None, resident: Mapping[str, tuple[str, ...]]
    ) -> Plan:
        """Return a plan that does this and nothing else, to profile a model under it.

        Args:
            blocks: the model's.
            offload_to: the tier of all parameters, if they may be offloaded: most plans will have them there.
            resident: by block, the parameters that stay on the device all the same.
        """
        layers = []
        for block in blocks:
            layer = LayerPlan(block.name, block.members, (), "", "")
            if offload_to is not None:
                offloading = Offloading(offload_to, resident=resident.get(block.name, ()))
                layer = replace(layer, techniques=("offloading",), offloading=offloading)
            if self.mlp_rows is not None and block.role == "repeated":
                techniques = (*layer.techniques, "tiling")
                layer = replace(layer, techniques=techniques, tiling=Tiling(self.mlp_rows))
            layers.append(layer)
        return Plan(tuple(layers), loss=self.loss, precision=self.precision)


NOTHING = Setting()


def settings_for(hardware: Hardware, config: Config, batch: BatchSize) -> tuple[Setting, ...]:
    """Return the settings to choose from; several if it depends on what they gain.

    What the user asks for, by a field or by AGGRESSIVE, is in all of them. On a CPU the loss may be tiled in
    BALANCED too, where the logits are large: the three copies of them in backward would undo much of what
    offloading gains there.
    """
    precision, reason = choose_precision(hardware.device, config.use_mixed_precision)
    notes: tuple[str, ...] = ()
    if config.use_mixed_precision and precision is None:
        notes = (f"no mixed precision: {reason}",)
    asked = Setting(
        precision=precision,
        eight_bit=config.use_8bit_optimizer,
        notes=notes,
        mlp_rows=rows_of_layers(batch.positions) if config.enable_tiling else None,
    )
    if not batch.logits_bytes:
        return (asked,)
    tiled = replace(asked, loss=tiled_loss(batch.tokens, batch.vocabulary, config.memory_budget_bytes))
    if config.enable_tiling:
        return (tiled,)
    may = "enable_tiling" not in config.explicit_fields and config.enable_offloading
    if hardware.device.kind == "cpu" and may and batch.logits_bytes >= LARGE_LOGITS:
        return asked, tiled
    return (asked,)


# Precision -------------------------------------------------------------------------------------------

_Dtype = Literal["bfloat16", "float16"]
_DTYPES: dict[str, _Dtype] = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}


def choose_precision(device: DeviceSpec, wanted: bool | str) -> tuple[Precision | None, str]:
    """Return the precision for a device, and the reason for it, or for none.

    bf16 where the device computes it at least as fast as fp32: it has the range of fp32. Else fp16, with loss
    scaling, on GPUs: there memory is what is short, also where it costs time.

    Args:
        device: What computes.
        wanted: Whether 16 bits are wanted at all; or which, and then it is used wherever it works.

    Raises:
        ConfigError: ``wanted`` is a name that is not known.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> choose_precision(virtual_hardware("V100").device, True)[0].dtype
        'float16'
    """
    if isinstance(wanted, str):
        return _by_name(device, wanted)
    if not wanted:
        return None, "16 bits were not asked for"
    if device.computes_bf16_fast:
        rate = _rate(device, "bfloat16")
        return _precision("bfloat16", f"{device.name} computes bf16 {rate}, with the range of fp32")
    if device.kind == "cpu":
        reason = "fp16 is for GPUs, unless it is asked for by name"
        return None, f"{device.name} does not compute bf16 fast{_note(device, 'bf16')}; {reason}"
    if not device.supports_fp16:
        return None, f"{device.name} has neither bf16 nor fp16"
    rate = _rate(device, "float16")
    if device.computes_fp16_fast:
        reason = f"{device.name} computes fp16 {rate}, and has no fast bf16; the loss is scaled"
    else:
        reason = (
            f"{device.name} computes fp16 only {rate}, and has no bf16: activations and working "
            "copies are halved all the same, at a cost in time; the loss is scaled"
        )
    return _precision("float16", reason)


def _by_name(device: DeviceSpec, wanted: str) -> tuple[Precision | None, str]:
    name = _DTYPES.get(wanted.lower())
    if name is None:
        raise ConfigError(f"The precision {shown(wanted)} is not known; allowed are {', '.join(_DTYPES)}.")
    short, supported = (
        ("bf16", device.supports_bf16) if name == "bfloat16" else ("fp16", device.supports_fp16)
    )
    if not supported:
        return None, f"{short} was asked for, and {device.name} has none{_note(device, short)}"
    return _precision(name, f"{short} was asked for; {device.name} computes it {_rate(device, name)}")


def _note(device: DeviceSpec, short: str) -> str:
    return next((f" ({note})" for note in device.notes if note.startswith(short)), "")


def _precision(name: _Dtype, reason: str) -> tuple[Precision, str]:
    return Precision(name, rule="precision", reason=reason), reason


def _rate(device: DeviceSpec, name: _Dtype) -> str:
    times = device.rates.of(getattr(torch, name)) / device.rates.fp32
    return f"{times:.1f}× as fast as fp32" if times >= 0.1 else f"at 1/{round(1 / times)} of the rate of fp32"
