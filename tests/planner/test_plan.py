"""Plans: plain data that goes through JSON unchanged, and a table that a person reads."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memscale._util.terminal import Terminal
from memscale.errors import PlanError
from memscale.execution_plan import ALLOWANCES, Checkpointing, FrontierPoint, LayerPlan, Plan
from memscale.execution_plan.explain import MOST_TRADES
from memscale.execution_plan.serialization import SCHEMA

GIB = 2**30


def example() -> Plan:
    """GPT-2 with twelve layers, all of them checkpointed."""
    layers = [LayerPlan("wte", ("wte",), (), "embedding", "keeps its indices only")]
    layers += [
        LayerPlan(
            f"h.{index}",
            (f"h.{index}",),
            ("checkpointing",),
            "recompute",
            "its activations cost less to compute again than to keep",
            saved_bytes=100 * 2**20,
            extra_seconds=0.001,
            checkpointing=Checkpointing(("aten.addmm.default#0", "aten.mm.default"), chained=index > 0),
        )
        for index in range(12)
    ]
    layers.append(LayerPlan("features[0:3]", ("features.0", "features.1", "features.2"), (), "", "small"))
    return Plan(
        tuple(layers),
        device="RTX 3090",
        batch="4 × 512",
        baseline_peak_bytes=10 * GIB,
        predicted_peak_bytes=5 * GIB,
        predicted_time_ratio=1.25,
        baseline_saved_bytes=4 * GIB,
        predicted_saved_bytes=GIB,
        notes=("The head is not checkpointed.",),
        frontier=(FrontierPoint("plain", 10 * GIB, 1.0), FrontierPoint("all", 5 * GIB, 1.25)),
    )


# JSON --------------------------------------------------------------------------------------------

texts = st.text(max_size=8)
names = st.lists(texts, max_size=3).map(tuple)
sizes = st.integers(min_value=0, max_value=2**70)
finite = st.floats(allow_nan=False, allow_infinity=False)
ratios = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def layer_plans(draw: st.DrawFn) -> LayerPlan:
    techniques = draw(st.lists(st.sampled_from(["checkpointing", "offloading"]), unique=True).map(tuple))
    settings = st.builds(Checkpointing, keep=names, chained=st.booleans())
    return LayerPlan(
        name=draw(texts),
        members=draw(st.lists(texts, min_size=1, max_size=3).map(tuple)),
        techniques=techniques,
        rule=draw(texts),
        reason=draw(texts),
        saved_bytes=draw(st.integers()),
        extra_seconds=draw(finite),
        checkpointing=draw(st.none() | settings) if "checkpointing" in techniques else None,
    )


plans = st.builds(
    Plan,
    layers=st.lists(layer_plans(), max_size=4, unique_by=lambda layer: layer.name).map(tuple),
    device=texts,
    mode=texts,
    batch=texts,
    baseline_peak_bytes=sizes,
    predicted_peak_bytes=sizes,
    predicted_time_ratio=ratios,
    baseline_saved_bytes=sizes,
    predicted_saved_bytes=sizes,
    host_bytes=sizes,
    disk_bytes=sizes,
    decision_source=st.sampled_from(("user_config", "ml", "rule", "rule_fallback")),
    prediction_source=st.sampled_from(tuple(ALLOWANCES)),
    notes=names,
    peak_at=texts,
    frontier=st.lists(st.builds(FrontierPoint, texts, sizes, finite), max_size=2).map(tuple),
)


@given(plans)
def test_a_plan_comes_back_from_json_equal(plan: Plan) -> None:
    text = plan.to_json()
    back = Plan.from_json(text)
    assert back == plan
    assert hash(back) == hash(plan)
    assert back.to_json() == text
    assert text.isascii()
    # Any tool may have had it in hand.
    assert Plan.from_json(json.dumps(json.loads(text))) == plan


@given(plans, plans)
def test_plans_are_equal_as_their_json_is(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.to_json() == other.to_json())


def test_equal_plans_are_the_same_bytes_whatever_numbers_they_were_made_of() -> None:
    one = Plan((), predicted_time_ratio=1, frontier=(FrontierPoint("a", 1, -0.0),))  # type: ignore[arg-type]
    other = Plan((), predicted_time_ratio=1.0, frontier=(FrontierPoint("a", 1, 0.0),))
    assert one == other
    assert one.to_json() == other.to_json()


def test_the_bytes_are_the_same_in_every_process() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from planner import test_plan; sys.stdout.write(test_plan.example().to_json())"
    )
    seen = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", script, os.path.dirname(os.path.dirname(__file__))],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(done.stdout)
    assert seen == {example().to_json()}


def test_a_plan_is_frozen_hashable_and_goes_through_pickle() -> None:
    plan = example()
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert {plan: 1}[example()] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mode = "aggressive"  # type: ignore[misc]


def test_a_layer_is_found_by_its_name() -> None:
    assert example().layer("h.3").checkpointing == Checkpointing(
        ("aten.addmm.default#0", "aten.mm.default"), True
    )
    with pytest.raises(PlanError, match=r"no layer 'h\.12'"):
        example().layer("h.12")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(value: float) -> None:
    with pytest.raises(PlanError, match=r"plan\.predicted_time_ratio is"):
        Plan((), predicted_time_ratio=value).to_json()
    with pytest.raises(PlanError, match=r"plan\.frontier\[0\]\.time_ratio"):
        Plan((), frontier=(FrontierPoint("a", 1, value),)).to_json()


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(example().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object"),
        ("{}", rf"schema None, and this version of MemScale reads {SCHEMA}"),
        (edited(lambda d: d.update(schema=SCHEMA + 1)), f"schema {SCHEMA + 1}"),
        (edited(lambda d: d.update(schema=True)), "schema True"),
        (edited(lambda d: d.update(extra=1)), r"plan has the unknown field 'extra'; it has layers, device"),
        (edited(lambda d: d.pop("notes")), "plan lacks the field 'notes'"),
        (edited(lambda d: d["layers"][1].pop("rule")), r"plan\.layers\[1\] lacks the field 'rule'"),
        (
            edited(lambda d: d["layers"][1]["checkpointing"].update(deep=1)),
            r"plan\.layers\[1\]\.checkpointing has the unknown field 'deep'; it has keep, chained",
        ),
        (edited(lambda d: d.update(layers={})), r"plan\.layers must be a list, not \{\}"),
        (edited(lambda d: d.update(layers=[3])), r"plan\.layers\[0\] must be an object, not 3"),
        (edited(lambda d: d.update(notes="x")), r"plan\.notes must be a list, not 'x'"),
        (edited(lambda d: d.update(notes=[1])), r"plan\.notes\[0\] must be a text, not 1"),
        (edited(lambda d: d.update(host_bytes=1.0)), r"plan\.host_bytes must be a whole number, not 1\.0"),
        (edited(lambda d: d.update(host_bytes=True)), r"plan\.host_bytes must be a whole number, not True"),
        (edited(lambda d: d.update(host_bytes=-1)), r"plan\.host_bytes is -1; it must be 0 or more"),
        (edited(lambda d: d.update(predicted_time_ratio="1")), r"must be a finite number, not '1'"),
        (edited(lambda d: d.update(predicted_time_ratio=False)), r"must be a finite number, not False"),
        (edited(lambda d: d.update(predicted_time_ratio=math.nan)), r"must be a finite number, not nan"),
        (edited(lambda d: d.update(predicted_time_ratio=10**400)), r"must be a finite number"),
        (edited(lambda d: d.update(predicted_time_ratio=0)), r"predicted_time_ratio is 0\.0.*above 0"),
        (edited(lambda d: d.update(decision_source="luck")), r"'user_config' or 'ml' .*not 'luck'"),
        (edited(lambda d: d.update(prediction_source=None)), r"'simulated' or .*not None"),
        (
            edited(lambda d: d["layers"][1]["checkpointing"].update(chained=0)),
            r"chained must be true or false",
        ),
        (edited(lambda d: d["layers"][0].update(checkpointing=3)), r"checkpointing must be an object, not 3"),
        (edited(lambda d: d["layers"][0].update(members=[])), r"'wte' of the plan has no members"),
        (edited(lambda d: d["layers"][1].update(techniques=[])), r"'h\.0' .* settings for checkpointing"),
        (edited(lambda d: d["layers"][1].update(techniques=["checkpointing"] * 2)), r"a technique twice"),
        (edited(lambda d: d["layers"][1].update(name="wte")), r"layer 'wte' of the plan is there twice"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        Plan.from_json(text)
    assert "Plan.to_json" in str(raised.value), "what to do"


def test_a_whole_number_will_do_for_a_real_one() -> None:
    plan = Plan.from_json(edited(lambda data: data.update(predicted_time_ratio=2)))
    assert plan.predicted_time_ratio == 2.0
    assert isinstance(plan.predicted_time_ratio, float)


# For a person ------------------------------------------------------------------------------------


def test_the_table_folds_like_layers_and_shows_all_else() -> None:
    text = example().explain(terminal=Terminal(width=160))
    lines = text.splitlines()
    assert (
        lines[0]
        == "Plan: RTX 3090, mode balanced, 4 × 512, numbers are simulated, of the plain step estimated"
    )
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert [row[0] for row in rows[:5]] == ["layer", "wte", "h.0", "h.1 … h.11 ×11", "features[0:3]"]
    assert rows[1][1:] == ["–", "keeps its indices only", "–", "–"]
    assert rows[2][1] == "checkpointing, keeps addmm#0, mm"
    assert rows[3][1] == "checkpointing, keeps addmm#0, mm, chained"
    assert rows[3][3:] == ["1.07 GiB", "+11 ms"]
    assert rows[4][2] == "small"
    totals = {row[0]: row[1:] for row in rows[5:]}
    assert totals["peak of device memory"] == ["10.0 GiB", "5.0 GiB", "-50.0%"]
    assert totals["activations saved for backward"] == ["4.0 GiB", "1.0 GiB", "-75.0%"]
    assert totals["step time"] == ["1.00×", "1.25×", "+25.0%"]
    assert "host memory" not in totals
    assert totals["all"] == ["5.0 GiB", "1.25×"]
    assert lines[-1] == "Note: The head is not checkpointed."


def test_memory_that_torch_could_reserve_is_told_from_what_it_needs() -> None:
    sizes = {"predicted_peak_bytes": 10 * 2**30, "predicted_capacity_bytes": 11 * 2**30}
    plan = dataclasses.replace(example(), **sizes, predicted_reserved_bytes=13 * 2**30)
    for text in (plan.explain(terminal=Terminal(width=200)), str(plan)):
        assert "(torch reserves 13.0 GiB where there is room; 11.0 GiB is enough)" in text


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("color", [False, True])
def test_the_table_fits_any_terminal(width: int, color: bool) -> None:
    plan = dataclasses.replace(example(), notes=("word " * 60, "\x1b[31mred"))
    text = plan.explain(terminal=Terminal(width=width, color=color))
    assert "chained" in text
    if not color:
        assert all(len(line) <= width for line in text.splitlines())
        assert "\x1b" not in text


def test_layers_that_differ_are_not_folded() -> None:
    def rows(*layers: LayerPlan) -> int:
        text = Plan(layers).explain(terminal=Terminal(width=200))
        return sum(line.startswith(("│ h", "│ k")) for line in text.splitlines())

    first = LayerPlan("h.0", ("h.0",), ("checkpointing",), "rule", "why", 1, 1.0)
    again = dataclasses.replace(first, name="h.1", members=("h.1",))
    assert rows(first, again) == 1
    for change in (
        {"name": "k.1"},
        {"techniques": ()},
        {"rule": "other"},
        {"reason": "other"},
        {"saved_bytes": 2},
        {"extra_seconds": 2.0},
        {"checkpointing": Checkpointing(chained=True)},
    ):
        assert rows(first, dataclasses.replace(again, **change)) == 2, change
    assert rows(first, LayerPlan("k", ("k",), (), "", ""), again) == 3, "neighbours only"


@given(plans)
def test_any_plan_can_be_explained(plan: Plan) -> None:
    assert plan.explain(terminal=Terminal(width=80))
    assert str(plan)


def test_the_summary_is_one_line() -> None:
    assert str(example()) == (
        "Plan for RTX 3090 (balanced): checkpointing on 12 of 14 layers; peak 10.0 GiB → 5.0 GiB, step time "
        "1.25× (simulated, of the plain step estimated)"
    )
    assert str(Plan(())).startswith("Plan for an unnamed device (balanced): nothing on any of 0 layers;")


def test_a_dozen_trades_are_shown_the_ends_among_them() -> None:
    points = tuple(
        FrontierPoint(f"trade {number}.", 10**9 - number, 1 + number / 100) for number in range(50)
    )
    text = Plan(layers=(), frontier=points).explain()
    assert sum(f"trade {number}." in text for number in range(50)) == MOST_TRADES
    assert "trade 0." in text
    assert "trade 49." in text
    assert f"{50 - MOST_TRADES} more" in text
    few = Plan(layers=(), frontier=points[:3]).explain()
    assert "more" not in few
