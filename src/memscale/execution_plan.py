"""The plan: what the engine decided, as plain data.

Left of the plan nothing touches the user's model; right of it nothing decides. A plan can be printed,
compared, hashed, written to JSON and read back.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from memscale.errors import PlanError, shown
from memscale.units import format_bytes

if TYPE_CHECKING:
    from memscale._util.terminal import Terminal

__all__ = [
    "ALLOWANCES",
    "DECISION_SOURCES",
    "PREDICTION_SOURCES",
    "SCHEMA",
    "Checkpointing",
    "DecisionSource",
    "FrontierPoint",
    "LayerPlan",
    "LossTiling",
    "Offloading",
    "OptimizerPlan",
    "Plan",
    "Precision",
    "PredictionSource",
    "Tier",
    "Tiling",
]

SCHEMA = 3
MOST_TRADES = 12  # that a person is shown of a frontier
"""The version of the JSON form; it changes with the fields."""

DecisionSource = Literal["user_config", "ml", "rule", "rule_fallback"]
DECISION_SOURCES: tuple[DecisionSource, ...] = get_args(DecisionSource)

PredictionSource = Literal["simulated", "measured", "estimated"]
PREDICTION_SOURCES: tuple[PredictionSource, ...] = get_args(PredictionSource)

Tier = Literal["device", "host", "disk"]

ALLOWANCES: dict[PredictionSource, float] = {"simulated": 0.01, "measured": 0.03, "estimated": 0.1}
"""What a step may need beyond its predicted peak, as a share of that, by how the peak was predicted."""


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
        to: where its parameters and their gradients are at home; ``"device"`` if they stay.
        activations: what forward leaves for backward (or the input of a recomputed block) goes down as well.
        resident: names of its parameters that stay on the device, as something reads them while the block does not run.
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
        state: where it waits between steps; ``"device"`` leaves it beside its parameters.
        bucket_bytes: the most that is brought up at once while the optimizer steps.
        eight_bit: Adam's moments are kept in 8 bits.
        rule: the engine's rule that decided.
        reason: that rule in words and numbers.
    """

    state: Tier = "device"
    bucket_bytes: int = 0
    eight_bit: bool = False
    rule: str = ""
    reason: str = ""


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
        recompute_flops: floating-point operations of computing it again once, by the profile; 0 if it is not.
        checkpointing: settings of the technique ``"checkpointing"``.
        offloading: settings of the technique ``"offloading"``.
        tiling: settings of the technique ``"tiling"``.
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
class FrontierPoint:
    """A trade that the engine found: this peak at this time, both as it reckons.

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
        """The `Config.memory_budget` for which the engine takes this point: its peak, and room for the allowance."""
        with_allowance = self.peak_bytes * (1 + ALLOWANCES["simulated"])
        return math.ceil(with_allowance) + self.unseen_bytes + 1  # a byte for what rounding loses


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
        baseline_seconds: step time without it, estimated from the device's rates.
        baseline_saved_bytes: what the plain forward leaves on the device for backward.
        predicted_saved_bytes: what forward leaves there with this plan.
        host_bytes: host memory that the plan uses beside the device.
        disk_bytes: disk space that the plan uses.
        decision_source: who chose the strategy.
        prediction_source: "simulated", "measured" (a real run) or "estimated" (model hints only).
        unseen_bytes: what a step may need that the prediction does not see, by a bound; the notes say of what.
        notes: what the user should know: fall-backs, skipped blocks, what does not fit.
        frontier: the trades the engine chose from.
        precision: what layers compute in, if not in the parameters' own type.
        optimizer: how optimizer state is kept, if not as the optimizer itself does.
        loss: how head and loss are computed, if not whole.
        async_offload: transfers overlap with compute.
    """

    layers: tuple[LayerPlan, ...]
    device: str = ""
    mode: str = "balanced"
    batch: str = ""
    baseline_peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    predicted_time_ratio: float = 1.0
    baseline_seconds: float = 0.0
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

    @property
    def allowance_bytes(self) -> int:
        """What a step may need beyond the predicted peak. A plan fits if both together do."""
        share = ALLOWANCES[self.prediction_source]
        return math.ceil(self.predicted_peak_bytes * share) + self.unseen_bytes

    @property
    def predicted_seconds(self) -> float:
        """The time of a step with this plan, estimated from the device's rates."""
        return self.baseline_seconds * self.predicted_time_ratio

    @property
    def actions(self) -> tuple[object, ...]:
        """What is done to a model, without why and without figures: plans that are equal in this train alike."""
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
        """The entry of one block."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise PlanError(f"The plan has no layer {name!r}; it has {[layer.name for layer in self.layers]}.")

    def to_json(self) -> str:
        """The plan as JSON text, the same bytes for equal plans.

        Raises:
            PlanError: A number is not finite, which JSON cannot say.

        Example:
            >>> plan = Plan(layers=(LayerPlan("head", ("head",), (), "small", "nothing to gain"),))
            >>> Plan.from_json(plan.to_json()) == plan
            True
        """
        return json.dumps({"schema": SCHEMA, **_as_data(self, "plan")}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back from what :meth:`to_json` wrote.

        Raises:
            PlanError: The text is not JSON, of another schema, or has a field that is missing, unknown or of
                a wrong type; or two of its values contradict each other.
        """
        try:
            data = json.loads(text, object_pairs_hook=_object)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"The plan is not JSON ({error}); it begins {shown(text, 40)}. Give Plan.from_json the whole "
                "text that Plan.to_json returned."
            ) from None
        if not isinstance(data, dict):
            raise PlanError(f"The plan must be a JSON object, not {shown(data)}. {_AGAIN}")
        schema = data.pop("schema", None)
        if type(schema) is not int or schema != SCHEMA:
            raise PlanError(
                f"The plan has schema {shown(schema)}, and this version of MemScale reads {SCHEMA}. {_AGAIN}"
            )
        plan: Plan = _build(cls, data, "plan")
        _check(plan)
        return plan

    def explain(self, *, trades: bool = True, terminal: Terminal | None = None) -> str:
        """The plan as a table that a person reads: what each layer gets and why, what it saves and costs.

        Args:
            trades: Show the trades that the engine chose from as well.
            terminal: What to write for; by default what `Terminal.detect` finds.
        """
        from memscale._util.terminal import Terminal, clean, table, wrap

        screen = terminal or Terminal.detect()
        about = [self.device, f"mode {self.mode}", self.batch, f"numbers are {self.prediction_source}"]
        title = f"Plan: {', '.join(text for text in about if text)}"
        columns = ["layer", "technique", "why", "saves", "costs"]
        rows = [*_layer_rows(self.layers), *_whole_rows(self)]
        parts = [table(title, columns, rows, terminal=screen)]
        columns = ["totals", "plain", "with this plan", "change"]
        parts.append(table("", columns, _total_rows(self), terminal=screen))
        if self.frontier and trades:
            shown_points = _spread(self.frontier, MOST_TRADES)
            rest = len(self.frontier) - len(shown_points)
            title = "The trades found" + (
                f" (and {rest} more between them, in plan.frontier)" if rest else ""
            )
            trade_rows = [(p.label, format_bytes(p.peak_bytes), _ratio(p.time_ratio)) for p in shown_points]
            parts.append(table(title, ["plan", "peak", "step time"], trade_rows, terminal=screen))
        for note in self.notes:
            parts.append(screen.show(wrap(f"Note: {clean(note)}", screen.width)))
        return "\n".join(parts)

    def __str__(self) -> str:
        counts = Counter(name for layer in self.layers for name in layer.techniques)
        done = ", ".join(f"{name} on {count}" for name, count in counts.items()) or "nothing on any"
        return (
            f"Plan for {self.device or 'an unnamed device'} ({self.mode}): {done} of {len(self.layers)} "
            f"layers; peak {format_bytes(self.baseline_peak_bytes)} → "
            f"{format_bytes(self.predicted_peak_bytes)}, step time {_ratio(self.predicted_time_ratio)} "
            f"({self.prediction_source})"
        )


# JSON --------------------------------------------------------------------------------------------

_AGAIN = "Make the plan again with memscale.plan(), or give the text as Plan.to_json wrote it."


def _as_data(value: Any, where: str) -> Any:
    if isinstance(value, tuple):
        return [_as_data(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return value
    data = {}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if field.type == "float":
            # 1 and 1.0, and 0.0 and -0.0, are equal, and equal plans are the same bytes.
            inner = float(inner) + 0.0
            if not math.isfinite(inner):
                raise PlanError(
                    f"{where}.{field.name} is {inner}, which JSON cannot say. Give a finite number."
                )
        data[field.name] = _as_data(inner, f"{where}.{field.name}")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise PlanError(f"The plan has the field {shown(twice)} twice in one object. {_AGAIN}")
    return data


def _build(cls: type, data: object, where: str) -> Any:
    """Make a dataclass from a JSON object that has exactly its fields."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object, not {shown(data)}. {_AGAIN}")
    hints = get_type_hints(cls)
    unknown, missing = sorted(data.keys() - hints.keys()), sorted(hints.keys() - data.keys())
    if unknown:
        raise PlanError(
            f"{where} has the unknown field {shown(unknown[0])}; it has {', '.join(hints)}. {_AGAIN}"
        )
    if missing:
        raise PlanError(f"{where} lacks the field {missing[0]!r}. {_AGAIN}")
    return cls(**{name: _read(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


def _read(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the type of the field that it is for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        if isinstance(value, list):
            return tuple(_read(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
        wanted = "a list"
    elif origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
        wanted = " or ".join(map(repr, inner))
    elif origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, where)
    elif dataclasses.is_dataclass(hint):
        return _build(hint, value, where)  # type: ignore[arg-type]  # a class: hints are
    elif hint is float:
        # JSON has one kind of number: a tool may have written 1.0 as 1.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:
            return float(value)
        wanted = "a finite number"
    else:
        if type(value) is hint:
            return value
        wanted = {int: "a whole number", str: "a text", bool: "true or false"}[hint]
    raise PlanError(f"{where} must be {wanted}, not {shown(value)}. {_AGAIN}")


def _check(plan: Plan) -> None:
    """Refuse a plan whose values contradict each other."""
    seen = set()
    for layer in plan.layers:
        where = f"The layer {layer.name!r} of the plan"
        if layer.name in seen:
            raise PlanError(f"{where} is there twice. {_AGAIN}")
        seen.add(layer.name)
        if not layer.members:
            raise PlanError(f"{where} has no members; it must name at least one module. {_AGAIN}")
        if len(set(layer.techniques)) != len(layer.techniques):
            raise PlanError(f"{where} names a technique twice: {layer.techniques}. {_AGAIN}")
        for technique in ("checkpointing", "offloading", "tiling"):
            if getattr(layer, technique) is not None and technique not in layer.techniques:
                raise PlanError(
                    f"{where} has settings for {technique}, which is not among its techniques "
                    f"{layer.techniques}. {_AGAIN}"
                )
        if layer.tiling is not None and layer.tiling.rows < 1:
            raise PlanError(f"{where} has tiles of {layer.tiling.rows} rows; it must be 1 or more. {_AGAIN}")
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name.endswith("_bytes") and value < 0:
            raise PlanError(f"plan.{field.name} is {value}; it must be 0 or more. {_AGAIN}")
    if plan.loss is not None and plan.loss.rows < 1:
        raise PlanError(f"plan.loss.rows is {plan.loss.rows}; it must be 1 or more. {_AGAIN}")
    if plan.optimizer is not None and plan.optimizer.bucket_bytes < 0:
        raise PlanError(
            f"plan.optimizer.bucket_bytes is {plan.optimizer.bucket_bytes}; it must be 0 or more. {_AGAIN}"
        )
    if plan.predicted_time_ratio <= 0:
        raise PlanError(
            f"plan.predicted_time_ratio is {plan.predicted_time_ratio}; it must be above 0 (1.0 is the plain "
            f"step). {_AGAIN}"
        )


# For a person ------------------------------------------------------------------------------------


def _layer_rows(layers: Iterable[LayerPlan]) -> Iterator[tuple[str | None, ...]]:
    """Rows of the table: neighbours that differ in nothing but a number in their names are one row."""
    for _, run in groupby(layers, key=_likeness):
        first, *others = group = list(run)
        name = first.name or "(the model)"
        saved = sum(layer.saved_bytes for layer in group)
        seconds = sum(layer.extra_seconds for layer in group)
        yield (
            f"{name} … {others[-1].name} ×{len(group)}" if others else name,
            "; ".join(_technique(technique, first) for technique in first.techniques) or None,
            f"{first.rule}: {first.reason}" if first.rule else first.reason,
            format_bytes(saved) if saved else None,
            _seconds(seconds) if seconds else None,
        )


def _whole_rows(plan: Plan) -> Iterator[tuple[str | None, ...]]:
    """Rows for what concerns the model as a whole."""
    if plan.loss is not None:
        yield "(head and loss)", f"tiling, {plan.loss.rows} tokens at a time", *_why(plan.loss)
    if plan.precision is not None:
        yield "(all layers)", f"mixed precision, {plan.precision.dtype}", *_why(plan.precision)
    if plan.optimizer is not None:
        parts = ["8-bit"] if plan.optimizer.eight_bit else []
        if plan.optimizer.state != "device":
            parts.append(f"state on {plan.optimizer.state}")
        yield "(optimizer)", ", ".join(parts) or None, *_why(plan.optimizer)


def _why(entry: LossTiling | Precision | OptimizerPlan) -> tuple[str, None, None]:
    return f"{entry.rule}: {entry.reason}" if entry.rule else entry.reason, None, None


def _likeness(layer: LayerPlan) -> LayerPlan:
    pattern = re.sub(r"\d+", "#", layer.name)
    return dataclasses.replace(layer, name=pattern, members=("",) * len(layer.members))


def _technique(name: str, layer: LayerPlan) -> str:
    if name == "offloading" and layer.offloading is not None:
        inside = " with activations" if layer.offloading.activations else ""
        return f"offloading to {layer.offloading.to}{inside}"
    if name == "tiling" and layer.tiling is not None:
        return f"tiling, {layer.tiling.rows} rows at a time"
    settings = layer.checkpointing
    if name != "checkpointing" or settings is None:
        return name
    if settings.keep:
        kept = ", ".join(op.removeprefix("aten.").replace(".default", "") for op in settings.keep)
        name += f", keeps {kept if len(settings.keep) <= 3 else f'{len(settings.keep)} outputs'}"
    return f"{name}, chained" if settings.chained else name


def _total_rows(plan: Plan) -> Iterator[tuple[str, str | None, str | None, str | None]]:
    for what, plain, planned in (
        ("peak of device memory", plan.baseline_peak_bytes, plan.predicted_peak_bytes),
        ("activations saved for backward", plan.baseline_saved_bytes, plan.predicted_saved_bytes),
        ("host memory", 0, plan.host_bytes),
        ("disk", 0, plan.disk_bytes),
    ):
        if plain or planned:
            change = f"{100 * (planned - plain) / plain:+.1f}%" if plain else None
            yield what, format_bytes(plain), format_bytes(planned), change
    yield (
        "step time",
        _ratio(1.0),
        _ratio(plan.predicted_time_ratio),
        f"{100 * (plan.predicted_time_ratio - 1):+.1f}%",
    )


def _spread(points: tuple[FrontierPoint, ...], most: int) -> tuple[FrontierPoint, ...]:
    """So many of them at the most, the ends among them."""
    if len(points) <= most:
        return points
    return tuple(points[index * (len(points) - 1) // (most - 1)] for index in range(most))


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if abs(value) * factor >= 1:
            return f"{value * factor:+.3g} {unit}"
    return f"{value * 1e6:+.3g} µs"
