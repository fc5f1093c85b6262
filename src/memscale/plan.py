"""The plan: what the engine decided, as plain data.

Left of the plan nothing touches the user's model; right of it nothing decides. A plan can be printed, compared,
hashed, written to JSON and read back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from memscale.errors import PlanError

SCHEMA = 1

DecisionSource = Literal["user_config", "ml", "rule", "rule_fallback"]
DECISION_SOURCES: tuple[DecisionSource, ...] = ("user_config", "ml", "rule", "rule_fallback")


@dataclass(frozen=True)
class Checkpointing:
    """How a block is recomputed.

    Attributes:
        keep: operations whose outputs are kept nevertheless, as ``"aten.addmm.default#3"`` (the fourth call of
            that overload in the block) or ``"aten.addmm.default"`` (every call).
        chained: the block's input is not kept either, but recomputed from the block before it.
    """

    keep: tuple[str, ...] = ()
    chained: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """What one block gets, and why.

    Attributes:
        name: the block's name in the model.
        members: the modules it consists of; one, but for a slice of an ``nn.Sequential``.
        techniques: names of what is put on it, in order; empty if it is left as it is.
        rule: the engine's rule that decided.
        reason: that rule, applied to this block, in words and numbers.
        saved_bytes: device memory that it no longer holds at the end of forward (predicted).
        extra_seconds: predicted time that this adds to a step.
        checkpointing: settings of the technique ``"checkpointing"``.
    """

    name: str
    members: tuple[str, ...]
    techniques: tuple[str, ...]
    rule: str
    reason: str
    saved_bytes: int = 0
    extra_seconds: float = 0.0
    checkpointing: Checkpointing | None = None


@dataclass(frozen=True)
class FrontierPoint:
    """A trade that the engine found: this peak at this time."""

    label: str
    peak_bytes: int
    time_ratio: float


@dataclass(frozen=True)
class Plan:
    """What MemScale will do to a model, and what it predicts of it.

    Attributes:
        layers: one entry per block, in model order.
        device: the device planned for, in words.
        mode: the mode's name.
        batch: the shapes planned for, in words.
        baseline_peak_bytes: peak of device memory of a step without MemScale.
        predicted_peak_bytes: peak of a step with this plan.
        predicted_time_ratio: step time with the plan over step time without it.
        baseline_saved_bytes: what the plain forward leaves on the device for backward.
        predicted_saved_bytes: what forward leaves there with this plan.
        host_bytes: host memory that the plan uses beside the device.
        disk_bytes: disk space that the plan uses.
        decision_source: who chose the strategy.
        prediction_source: "simulated", "measured" (a real run) or "estimated" (model hints only).
        notes: what the user should know: fall-backs, skipped blocks, what does not fit.
        frontier: the trades the engine chose from.
    """

    layers: tuple[LayerPlan, ...]
    device: str = ""
    mode: str = "balanced"
    batch: str = ""
    baseline_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_time_ratio: float = 1.0
    baseline_saved_bytes: int = 0
    predicted_saved_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    decision_source: DecisionSource = "rule"
    prediction_source: str = "simulated"
    notes: tuple[str, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()

    def layer(self, name: str) -> LayerPlan:
        """The entry of one block."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise PlanError(f"The plan has no layer {name!r}; it has {[layer.name for layer in self.layers]}.")

    def to_json(self) -> str:
        """The plan as JSON text, the same bytes for equal plans."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True)
