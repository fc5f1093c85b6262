"""Rows and the document that holds them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from memscale.benchmarks import Results, Row
from memscale.errors import ConfigError
from memscale.execution_plan import StepTime

FIELDS = [
    "model",
    "params",
    "batch",
    "seq",
    "mode",
    "on",
    "source",
    "peak_bytes",
    "host_bytes",
    "disk_bytes",
    "baseline_bytes",
    "reduction",
    "time_ratio",
]
ROW = Row(
    model="gpt2-tiny",
    params=172_928,
    batch=2,
    seq=64,
    mode="none",
    on="RTX 3090",
    source="simulated",
    baseline_bytes=4 << 20,
    peak_bytes=4 << 20,
    host_bytes=0,
    disk_bytes=0,
    reduction=0.0,
    time_ratio=1.0,
)
TOO_LARGE = dataclasses.replace(ROW, baseline_bytes=None, peak_bytes=None, note="does not fit: needs more")
RESULTS = Results(
    "python -m memscale.benchmarks", {"torch": "2.13.0", "transformers": "5.22.0"}, (ROW, TOO_LARGE)
)


def test_a_row_has_exactly_these_fields():
    assert list(ROW.to_dict()) == FIELDS


def test_a_row_that_did_not_fit_says_so():
    values = TOO_LARGE.to_dict()
    assert list(values) == [*(name for name in FIELDS if name != "baseline_bytes"), "note"]
    assert values["peak_bytes"] is None
    assert values["note"] == "does not fit: needs more"


def test_a_step_time_is_there_where_it_was_estimated(tmp_path):
    row = dataclasses.replace(ROW, step_time=StepTime(compute=0.25, overhead=0.5))
    assert row.to_dict()["step_time"] == dataclasses.asdict(row.step_time)
    assert list(row.to_dict()) == [*FIELDS, "step_time"]
    results = dataclasses.replace(RESULTS, rows=(row,))
    assert Results.from_json(json.dumps(results.to_dict())) == results


def test_a_row_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.peak_bytes = 1  # type: ignore[misc]


def test_round_trip_through_a_file(tmp_path):
    file = tmp_path / "results.json"
    RESULTS.write(file)
    assert Results.read(file) == RESULTS
    document = json.loads(file.read_text())
    assert list(document) == ["schema", "command", "versions", "rows", "commit"]
    assert document["schema"] == 1
    assert document["rows"] == [row.to_dict() for row in RESULTS.rows]


def without(values: dict[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in values.items() if key != name}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "Not JSON"),
        ("[]", "Not results of python -m memscale.benchmarks"),
        ('{"schema": 2}', '"schema": 1'),
        ('{"schema": 1, "rows": []}', "command and a list of rows"),
        ({"rows": 3}, "a list of rows"),
        ({"rows": [1]}, "Not a row of results"),
        ({"rows": [without(ROW.to_dict(), "seq")]}, "'seq'"),
        ({"rows": [ROW.to_dict() | {"speed": 1}]}, "'speed'"),
    ],
)
def test_documents_that_are_none(tmp_path, document, message):
    if isinstance(document, dict):
        document = json.dumps({"schema": 1, "command": "c", "torch": "t", "transformers": "f"} | document)
    file = tmp_path / "results.json"
    file.write_text(document)
    with pytest.raises(ConfigError, match=message) as caught:
        Results.read(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json"):
        Results.read(tmp_path / "absent.json")


def test_whole_numbers_for_fractions_are_fine():
    assert Row.from_dict(ROW.to_dict() | {"time_ratio": 1, "reduction": None}).time_ratio == 1
