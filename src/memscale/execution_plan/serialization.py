"""Plans as JSON text: written so that equal plans are equal bytes, read with every field checked."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from memscale.errors import PlanError, shown
from memscale.execution_plan import Plan

SCHEMA = 8
"""The version of the JSON form; it changes with the fields."""

_ADVICE = "Make the plan again with memscale.plan(), or pass the text as Plan.to_json wrote it."


def plan_to_json(plan: Plan) -> str:
    """Return the plan as JSON text; see `Plan.to_json`."""
    return json.dumps({"schema": SCHEMA, **_to_data(plan, "plan")}, indent=1, sort_keys=True)


def plan_from_json(text: str) -> Plan:
    """Return the plan that a text describes; see `Plan.from_json`."""
    try:
        data = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"The plan is not JSON ({error}); it begins {shown(text, 40)}. Give Plan.from_json the whole "
            "text that Plan.to_json returned."
        ) from None
    if not isinstance(data, dict):
        raise PlanError(f"The plan must be a JSON object, not {shown(data)}. {_ADVICE}")
    schema = data.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA:
        raise PlanError(
            f"The plan has schema {shown(schema)}, and this version of MemScale reads {SCHEMA}. {_ADVICE}"
        )
    plan: Plan = _build(Plan, data, "plan")
    for contradiction in _contradictions(plan):
        raise PlanError(f"{contradiction}. {_ADVICE}")
    return plan


def _to_data(value: Any, where: str) -> Any:
    if isinstance(value, tuple):
        return [_to_data(item, f"{where}[{index}]") for index, item in enumerate(value)]
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
        data[field.name] = _to_data(inner, f"{where}.{field.name}")
    return data


def _build(cls: type, data: object, where: str) -> Any:
    """Build a dataclass from a JSON object that has exactly its fields."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object, not {shown(data)}. {_ADVICE}")
    hints = get_type_hints(cls)
    unknown, missing = sorted(data.keys() - hints.keys()), sorted(hints.keys() - data.keys())
    if unknown:
        raise PlanError(
            f"{where} has the unknown field {shown(unknown[0])}; it has {', '.join(hints)}. {_ADVICE}"
        )
    if missing:
        raise PlanError(f"{where} lacks the field {missing[0]!r}. {_ADVICE}")
    return cls(**{name: _read(hint, data[name], f"{where}.{name}") for name, hint in hints.items()})


def _read(hint: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type of its field."""
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
    raise PlanError(f"{where} must be {wanted}, not {shown(value)}. {_ADVICE}")


def _contradictions(plan: Plan) -> Iterator[str]:
    """Yield what no plan can mean."""
    names = [layer.name for layer in plan.layers]
    for layer in plan.layers:
        where = f"The layer {layer.name!r} of the plan"
        if names.count(layer.name) > 1:
            yield f"{where} is there twice"
        if not layer.members:
            yield f"{where} has no members; it must name at least one module"
        if len(set(layer.techniques)) != len(layer.techniques):
            yield f"{where} names a technique twice: {layer.techniques}"
        for technique in ("checkpointing", "offloading", "tiling"):
            if getattr(layer, technique) is not None and technique not in layer.techniques:
                yield f"{where} has settings for {technique}, which is not among its techniques {layer.techniques}"
        if layer.tiling is not None and layer.tiling.rows < 1:
            yield f"{where} has tiles of {layer.tiling.rows} rows; it must be 1 or more"
    sizes = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    if plan.optimizer is not None:
        sizes["optimizer.bucket_bytes"] = plan.optimizer.bucket_bytes
        for name in plan.optimizer.layers:
            if name not in names:
                yield f"plan.optimizer.layers names {name!r}, and the plan has no such layer"
    for name, value in sizes.items():
        if name.endswith("_bytes") and value < 0:
            yield f"plan.{name} is {value}; it must be 0 or more"
    if plan.loss is not None and plan.loss.rows < 1:
        yield f"plan.loss.rows is {plan.loss.rows}; it must be 1 or more"
    if plan.predicted_time_ratio <= 0:
        yield f"plan.predicted_time_ratio is {plan.predicted_time_ratio}; it must be above 0 (1.0 is the plain step)"
