"""Settings of the model as a whole, chosen before those of its layers: precision, tiles, 8-bit optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from memscale.config import Config
from memscale.execution_plan import LayerPlan, LossTiling, Offloading, Plan, Precision, Tier, Tiling
from memscale.hardware import DeviceSpec, Hardware
from memscale.profiler import Block, ModelProfile
from memscale.tiling.technique import rows_of_layers, tiled_loss

LARGE_LOGITS = 64 * 2**20  # bytes: smaller logits are left whole unless tiling is asked for
EIGHT_BIT_SHARE = 2.1 / 8  # of Adam's state, with its scales; embeddings and small tensors stay in 32 bits


@dataclass(frozen=True)
class Setting:
    """One way to treat a model as a whole."""

    loss: LossTiling | None = None
    precision: Precision | None = None
    mlp_rows: int | None = None  # positions of a tile of an MLP
    eight_bit: bool = False  # Adam's moments are kept in 8 bits
    bucketed: bool = False  # parameters on the device are stepped by buckets, without foreach's temporaries
    device_step: bool = False  # parameters on the host are stepped on the device, not on the CPU
    overlapped: bool = False  # steps with state on the host are computed while backward goes on
    page_locked: bool = True  # all that is on the host is in page-locked memory
    notes: tuple[str, ...] = ()  # for the user

    @property
    def changes_the_profile(self) -> bool:
        """Return whether a step with it needs other memory, apart from optimizer state."""
        return self.loss is not None or self.precision is not None or self.mlp_rows is not None

    @property
    def whole_steps(self) -> Setting:
        """The same with steps of all parameters at once."""
        return replace(self, bucketed=False, device_step=False, overlapped=False, page_locked=True)

    @property
    def working_share(self) -> float:
        return 1.0 if self.precision is None else 0.5

    @property
    def state_share(self) -> float:
        return EIGHT_BIT_SHARE if self.eight_bit else 1.0

    def alone(
        self, blocks: Sequence[Block], offload_to: Tier | None, resident: Mapping[str, tuple[str, ...]]
    ) -> Plan:
        """Return a plan that does this alone, to profile a model under it, with parameters on a tier where they may be.

        `resident` has by block the parameters that stay on the device all the same.
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
Under = Sequence[tuple[Setting, ModelProfile]]
"""The settings to choose from, each with what the model needs under it."""


def settings_for(
    hardware: Hardware, config: Config, positions: int, tokens: int, vocabulary: int
) -> tuple[Setting, ...]:
    """Return the settings to choose from; several if it depends on what they gain.

    What the user asks for, by a field or by AGGRESSIVE, is in all of them. On a CPU the loss may be tiled in
    BALANCED too, where the logits are large: the three copies of them in backward would undo much of what
    offloading gains there. `positions` are those of one sequence, `tokens` those of all; a model without a head has no
    `vocabulary`.
    """
    precision, notes = None, []
    if config.use_mixed_precision:
        precision, reason = choose_precision(hardware.device)
        if precision is None:
            notes.append(f"no mixed precision: {reason}")
    asked = Setting(
        precision=precision,
        eight_bit=config.use_8bit_optimizer,
        notes=tuple(notes),
        mlp_rows=rows_of_layers(positions) if config.enable_tiling else None,
    )
    logits_bytes = 4 * tokens * vocabulary
    if not logits_bytes:
        return (asked,)
    tiled = replace(asked, loss=tiled_loss(tokens, vocabulary, config.memory_budget_bytes))
    if config.enable_tiling:
        return (tiled,)
    may = "enable_tiling" not in config.explicit_fields and config.enable_offloading
    if hardware.device.kind == "cpu" and may and logits_bytes >= LARGE_LOGITS:
        return asked, tiled
    return (asked,)


def choose_precision(device: DeviceSpec) -> tuple[Precision | None, str]:
    """Return the 16-bit precision for a device, and the reason for it, or for none.

    bf16 where the device computes it at least as fast as fp32: it has the range of fp32. Else fp16, with loss
    scaling, on GPUs: there memory is what is short, also where it costs time.

    Example:
        >>> from memscale.hardware import virtual_hardware
        >>> choose_precision(virtual_hardware("V100").device)[0].dtype
        'float16'
    """
    name: Literal["bfloat16", "float16"] = "bfloat16" if device.computes_bf16_fast else "float16"
    if name == "float16" and device.kind == "cpu":
        note = next((f" ({note})" for note in device.notes if note.startswith("bf16")), "")
        return None, f"{device.name} does not compute bf16 fast{note}; fp16 is for GPUs"
    if name == "float16" and not device.supports_fp16:
        return None, f"{device.name} has neither bf16 nor fp16"
    times = device.rates.of(getattr(torch, name)) / device.rates.fp32
    rate = f"{times:.1f}× as fast as fp32" if times >= 0.1 else f"at 1/{round(1 / times)} of the rate of fp32"
    if name == "bfloat16":
        reason = f"{device.name} computes bf16 {rate}, with the range of fp32"
    elif device.computes_fp16_fast:
        reason = f"{device.name} computes fp16 {rate}, and has no fast bf16; the loss is scaled"
    else:
        reason = (
            f"{device.name} computes fp16 only {rate}, and has no bf16: activations and working "
            "copies are halved all the same, at a cost in time; the loss is scaled"
        )
    return Precision(name, rule="precision", reason=reason), reason
