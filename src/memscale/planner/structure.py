"""A first plan from structure alone, for a model that has not seen a batch yet."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from memscale.config import Config, OptimizationMode
from memscale.execution_plan import Checkpointing, LayerPlan, Plan
from memscale.hardware import Hardware
from memscale.profiler import Block

RULE = "by-structure"


NO_BATCH = "planned without a batch: activations are not counted, the first training batch makes it anew"


def decide_by_structure(
    model: nn.Module,
    blocks: Sequence[Block],
    hardware: Hardware,
    config: Config,
    notes: tuple[str, ...] = (NO_BATCH,),
) -> Plan:
    """Recompute every repeated block: right for most models, and re-made from the first training batch."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    recompute = config.enable_checkpointing and config.mode is not OptimizationMode.CONSERVATIVE
    peak = parameters + 3 * trained  # weights, gradients, Adam's moments; activations are not known
    return Plan(
        layers=tuple(_layer(block, recompute) for block in blocks),
        device=hardware.device.describe(),
        mode=config.mode.value,
        batch="not seen yet",
        baseline_peak_bytes=peak,
        predicted_peak_bytes=peak,
        prediction_source="estimated",
        notes=notes,
    )


def _layer(block: Block, recompute: bool) -> LayerPlan:
    if recompute and block.role == "repeated":
        reason = "a repeated block; what it needs will be known from the first batch"
        return LayerPlan(
            block.name, block.members, ("checkpointing",), RULE, reason, checkpointing=Checkpointing()
        )
    return LayerPlan(block.name, block.members, (), RULE, "left as it is until the first batch")
