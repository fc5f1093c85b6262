"""The plan: what the planner decided, as frozen data; `explain` writes it as text, `serialization` as JSON."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

from memscale.errors import PlanError

if TYPE_CHECKING:
    from memscale._util.terminal import Terminal

DecisionSource = Literal["user_config", "ml", "rule", "rule_fallback"]
PredictionSource = Literal["simulated", "measured", "estimated"]
Tier = Literal["device", "host", "disk"]

ALLOWANCES: dict[PredictionSource, float] = {"simulated": 0.01, "measured": 0.03, "estimated": 0.1}
"""What a step may need beyond its predicted peak, as a share of that, by how the peak was predicted."""

LEFT_AS_IT_IS = "the model is left as it is"
"""In the note of a plan that does nothing because the model needs little of the device."""
WITHIN_BUDGET = "budget-fastest"
"""The rule of layers in the fastest plan that fits a budget."""


@dataclass(frozen=True)
class Checkpointing:
    """How a block is recomputed.

    Attributes:
        keep: operations whose outputs are kept nevertheless, as ``"aten.addmm.default#3"`` (the fourth call
            of that overload in the block) or ``"aten.addmm.default"`` (every call).
        chained: the block's input is not kept either, but recomputed from the block before it.
    """

    keep: tuple[str, ...] = ()
    chained: bool = False


@dataclass(frozen=True)
class Offloading:
    """Where a block's tensors live while it does not compute.

    Attributes:
        to: the tier of its parameters and their gradients; ``"device"`` if they stay.
        activations: what forward saves for backward (or the input of a recomputed block) goes to that tier as well.
        resident: names of its parameters that stay on the device, because they are read while it does not run.
    """

    to: Tier = "host"
    activations: bool = False
    resident: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tiling:
    """How a block is computed in tiles: ``rows`` positions at a time."""

    rows: int


@dataclass(frozen=True)
class LossTiling:
    """The head and the loss, computed ``rows`` tokens at a time, so that the logits never exist whole."""

    rows: int
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Precision:
    """What the layers compute in; parameters and their gradients stay in full precision for the optimizer."""

    dtype: Literal["bfloat16", "float16"]
    rule: str = ""
    reason: str = ""


@dataclass(frozen=True)
class OptimizerPlan:
    """How optimizer state is kept.

    Attributes:
        state: the tier it is on between steps. ``"device"``: with its parameters; ``"host"``: in host memory, that of
            parameters on an accelerator, which are stepped on it; ``"disk"``: memory-mapped, on an accelerator's host
            only that of parameters on disk.
        bucket_bytes: the most that parameters, gradients and loaded state take in one call of the optimizer's
            arithmetic. 0: with ``state="device"`` the parameters on the device are stepped all at once, else a default.
        eight_bit: Adam's moments are kept in 8 bits between steps.
        layers: with ``state="host"``, the layers whose state is there; all of it if there are none.
        host_step: where the parameters are stepped that are in host memory, with gradients and state: on the CPU, or on
            the device, a bucket of them at a time.
        overlapped: with ``state="host"``, steps are computed while backward goes on, if the training loop allows it.
        rule: the planner's rule that decided.
        reason: that rule in words and numbers.
    """

    state: Tier = "device"
    bucket_bytes: int = 0
    eight_bit: bool = False
    layers: tuple[str, ...] = ()
    host_step: Literal["cpu", "device"] = "cpu"
    rule: str = ""
    reason: str = ""
    overlapped: bool = False


@dataclass(frozen=True)
class LayerPlan:
    """What one block gets, and why.

    Attributes:
        name: the block's name in the model.
        members: the modules it consists of; one, but for a slice of an ``nn.Sequential``.
        techniques: names of what is attached to it, in order; empty if it is left as it is.
        rule: the planner's rule that decided.
        reason: that rule, applied to this block, in words and numbers.
        saved_bytes: device memory that it no longer takes at the end of forward (predicted).
        extra_seconds: predicted time that this adds to a step.
        checkpointing, offloading, tiling: settings of the techniques of that name.
        recompute_flops: floating-point operations of computing it again once, by the profile; 0 if it is not.
    """

    name: str
    members: tuple[str, ...]
    techniques: tuple[str, ...]
    rule: str
    reason: str
    saved_bytes: int = 0
    extra_seconds: float = 0.0
    checkpointing: Checkpointing | None = None
    offloading: Offloading | None = None
    tiling: Tiling | None = None
    recompute_flops: int = 0


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, in seconds, estimated from the device's rates.

    Attributes:
        compute: forward and backward, each once.
        recomputation: forward again in backward, of checkpointed layers and of tiles.
        transfers: copies of parameters, gradients, activations and optimizer state that no computation hides.
        device_step: the optimizer's arithmetic on the device.
        host_step: that on offloaded masters: by the host's CPU, on the device with the copies for it, or through files.
        overhead: what does not depend on sizes: hooks, launches, the latency of copies.

    Example:
        >>> both = StepTime(compute=1.0) + StepTime(recomputation=0.25, overhead=0.25)
        >>> both.total
        1.5
    """

    compute: float = 0.0
    recomputation: float = 0.0
    transfers: float = 0.0
    device_step: float = 0.0
    host_step: float = 0.0
    overhead: float = 0.0

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(*map(operator.add, self.parts, other.parts))

    @property
    def parts(self) -> tuple[float, ...]:
        """Return the seconds of each part, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def total(self) -> float:
        """Return the seconds of the whole step."""
        return (
            self.compute
            + self.recomputation
            + self.transfers
            + self.device_step
            + self.host_step
            + self.overhead
        )


@dataclass(frozen=True)
class FrontierPoint:
    """A point of the Pareto frontier of peak and step time, both by the planner's cost model.

    Attributes:
        label: what is done, in words.
        peak_bytes: the peak.
        time_ratio: step time over that of the plain model.
        unseen_bytes: as of the plan.
    """

    label: str
    peak_bytes: int
    time_ratio: float
    unseen_bytes: int = 0

    @property
    def budget_bytes(self) -> int:
        """Return the `Config.memory_budget` that leads to this point: its peak and the allowance."""
        with_allowance = self.peak_bytes * (1 + ALLOWANCES["simulated"])
        return math.ceil(with_allowance) + self.unseen_bytes + 1  # a byte for what rounding loses


@dataclass(frozen=True)
class MemoryPhase:
    """A phase of a step, and the first sample of `StepMemory` in it."""

    name: str
    begin: int


@dataclass(frozen=True)
class MemoryHolder:
    """A tensor in use at the peak: what it is, what it is used for, and its bytes."""

    what: str
    category: str
    nbytes: int


@dataclass(frozen=True)
class StepMemory:
    """Device memory over one simulated step, by what it is used for.

    Attributes:
        categories: the uses: "weights", "gradients", "activations", ...
        samples: bytes of each category, at the highest moment of each part of the step, in order.
        phases: where forward, the loss, backward and the optimizer's step begin.
        peak: the sample at the peak.
        largest: the largest tensors at the peak.
    """

    categories: tuple[str, ...]
    samples: tuple[tuple[int, ...], ...]
    phases: tuple[MemoryPhase, ...]
    peak: int
    largest: tuple[MemoryHolder, ...]

    def phase_of(self, sample: int) -> str:
        """Return the phase that a sample is in."""
        return [phase.name for phase in self.phases if phase.begin <= sample][-1]

    @property
    def at_peak(self) -> dict[str, int]:
        """Return the bytes of each category at the peak."""
        return dict(zip(self.categories, self.samples[self.peak], strict=True))


@dataclass(frozen=True)
class Plan:
    """What MemScale will do to a model, and what it predicts of it.

    Attributes:
        layers: one entry per block, in model order.
        device: the device planned for, in words.
        mode: the mode's name.
        batch: the shapes planned for, in words.
        baseline_peak_bytes: peak of device memory of a step without MemScale.
        predicted_peak_bytes: peak of a step with this plan (`torch.cuda.max_memory_allocated`).
        predicted_reserved_bytes: what torch's allocator takes for that of a device with plenty of memory, free blocks
            included (`torch.cuda.max_memory_reserved`); 0 if the peak is an estimate.
        predicted_capacity_bytes: the least that the allocator must be able to take, beside CUDA's context and other
            processes: before it runs out of memory, it releases free blocks. 0 if the peak is an estimate.
        peak_at: where in the step that is: "backward of h.3", "backward of GPT2LMHeadModel" (outside of its modules, as
            its loss is), "loss" and "backward" (of a loss outside of the model), "optimizer step"; empty if the peak
            is an estimate.
        predicted_time_ratio: step time with the plan over step time without it.
        baseline_seconds: step time without it, estimated from the device's rates.
        step_time: step time with it, estimated likewise, by what it is spent on.
        baseline_saved_bytes: what the plain forward saves on the device for backward.
        predicted_saved_bytes: what forward saves there with this plan.
        host_bytes: host memory that the plan uses beside the device.
        disk_bytes: disk space that the plan uses.
        decision_source: what chose the strategy: fields of the Config that decide about it ("user_config"), the
            learned policy ("ml"), the rules of the mode ("rule"), or these because the policy did not decide or what
            was chosen could not be done ("rule_fallback").
        prediction_source: "simulated", "measured" (a real run) or "estimated" (cost model only).
        unseen_bytes: an upper bound of what the prediction does not see; the notes say what that is.
        notes: what the user should know: fallbacks, skipped blocks, what does not fit.
        frontier: the points the planner chose from, fastest first.
        precision: what layers compute in, if not in the parameters' own type.
        optimizer: how optimizer state is kept, if not as the optimizer itself does.
        loss: how head and loss are computed, if not whole.
        async_offload: transfers overlap with compute.
        baseline_memory: device memory over the plain step; None if that was not simulated.
        predicted_memory: device memory over a step with this plan; None if that was not simulated.
    """

    layers: tuple[LayerPlan, ...]
    device: str = ""
    mode: str = "balanced"
    batch: str = ""
    baseline_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_time_ratio: float = 1.0
    baseline_seconds: float = 0.0
    step_time: StepTime = StepTime()
    baseline_saved_bytes: int = 0
    predicted_saved_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    decision_source: DecisionSource = "rule"
    prediction_source: PredictionSource = "simulated"
    unseen_bytes: int = 0
    notes: tuple[str, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    precision: Precision | None = None
    optimizer: OptimizerPlan | None = None
    loss: LossTiling | None = None
    async_offload: bool = False
    peak_at: str = ""
    baseline_memory: StepMemory | None = None
    predicted_memory: StepMemory | None = None
    predicted_reserved_bytes: int = 0
    predicted_capacity_bytes: int = 0

    @property
    def allowance_bytes(self) -> int:
        """Return what a step may need beyond the predicted peak, and beyond the predicted capacity."""
        share = ALLOWANCES[self.prediction_source]
        return math.ceil(self.predicted_peak_bytes * share) + self.unseen_bytes

    @property
    def predicted_seconds(self) -> float:
        """Return the step time with this plan, estimated from the device's rates."""
        return self.step_time.total

    @property
    def does_nothing(self) -> bool:
        """Return whether no layer has a technique, and the rest of the step is as it is, too."""
        whole = (self.precision, self.loss, self.optimizer)
        return not any(layer.techniques for layer in self.layers) and all(each is None for each in whole)

    @property
    def actions(self) -> tuple[object, ...]:
        """Return what is done to a model, without reasons and figures: plans equal in this train alike."""
        layers = tuple(
            (each.members, each.techniques, each.checkpointing, each.offloading, each.tiling)
            for each in self.layers
        )
        return (
            layers,
            self.precision and self.precision.dtype,
            self.loss and self.loss.rows,
            self.optimizer and replace(self.optimizer, rule="", reason=""),
            self.async_offload,
        )

    def layer(self, name: str) -> LayerPlan:
        """Return the entry of the block of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise PlanError(f"The plan has no layer {name!r}; it has {[layer.name for layer in self.layers]}.")

    def to_json(self) -> str:
        """Return the plan as JSON text, the same bytes for equal plans.

        Raises:
            PlanError: A number is not finite, which JSON cannot say.

        Example:
            >>> plan = Plan(layers=(LayerPlan("head", ("head",), (), "small", "nothing to gain"),))
            >>> Plan.from_json(plan.to_json()) == plan
            True
        """
        from memscale.execution_plan.serialization import plan_to_json

        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back from what `to_json` wrote.

        Raises:
            PlanError: The text is no plan of this schema, or two of its values contradict each other.
        """
        from memscale.execution_plan.serialization import plan_from_json

        return plan_from_json(text)

    def explain(self, *, trades: bool = True, terminal: Terminal | None = None) -> str:
        """Return the plan as tables: what each layer gets and why, what it saves and costs; and the frontier."""
        from memscale.execution_plan.explain import explain_plan

        return explain_plan(self, trades=trades, terminal=terminal)

    def report(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Write the plan as a page: one HTML file without references to others, for any browser.

        Args:
            path: the file to write.
            title: the page's heading, such as the model's name.
        """
        from memscale.execution_plan.page import write_page

        write_page(self, path, title=title)

    def __str__(self) -> str:
        from memscale.execution_plan.explain import summarize_plan

        return summarize_plan(self)
