"""A plan's step for other viewers: PyTorch's own functions read the snapshot, and both hold the plan's numbers."""

from __future__ import annotations

import dataclasses
import json
import pickletools
from pathlib import Path

import pytest
from torch.cuda import _memory_viz

from memscale import Plan
from memscale.errors import PlanError
from memscale.execution_plan import StepMemory
from memscale.report.export import chrome_trace, memory_snapshot, write_chrome_trace, write_memory_snapshot
from support.shown_plan import shown_plan

# What the viewer's own reader of pickles knows, of what Python writes for dicts, lists, tuples, texts and numbers.
KNOWN = {
    "PROTO",
    "FRAME",
    "MEMOIZE",
    "BINGET",
    "LONG_BINGET",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "MARK",
}
KNOWN |= {"SETITEM", "SETITEMS", "APPEND", "APPENDS", "TUPLE2", "SHORT_BINUNICODE", "BINUNICODE", "BININT"}
KNOWN |= {"BININT1", "BININT2", "LONG1", "NEWFALSE", "NEWTRUE", "NONE", "STOP"}


def totals_of(memory: StepMemory) -> list[int]:
    return [sum(sample) for sample in memory.samples]


def test_the_snapshot_replays_to_the_memory_of_the_step() -> None:
    plan = shown_plan()
    snapshot = memory_snapshot(plan)
    for device, memory in enumerate((plan.predicted_memory, plan.baseline_memory)):
        assert memory is not None
        segments = [each for each in snapshot["segments"] if each["device"] == device]
        in_use: dict[int, int] = {}
        most = 0
        by_part: dict[int, int] = {}
        for event in snapshot["device_traces"][device]:
            if event["action"] == "alloc":
                for address, size in in_use.items():  # nothing overlaps
                    assert event["addr"] >= address + size or event["addr"] + event["size"] <= address
                in_use[event["addr"]] = event["size"]
                end = event["addr"] + event["size"]
                assert any(
                    s["address"] <= event["addr"] and end <= s["address"] + s["total_size"] for s in segments
                )
                by_part[event["frames"][0]["line"]] = sum(in_use.values())
            elif event["action"] == "free_completed":
                assert in_use.pop(event["addr"]) == event["size"]
            most = max(most, sum(in_use.values()))
        assert most == max(totals_of(memory))
        assert all(totals_of(memory)[part] == size for part, size in by_part.items())
        assert (
            sum(each["allocated_size"] for each in segments) == totals_of(memory)[-1] == sum(in_use.values())
        )
        for seg in segments:
            assert sum(block["size"] for block in seg["blocks"]) == seg["total_size"]


def test_functions_of_torch_read_the_snapshot() -> None:
    plan = shown_plan()
    snapshot = memory_snapshot(plan)
    expected = sum(
        totals_of(memory)[-1] for memory in (plan.baseline_memory, plan.predicted_memory) if memory
    )
    assert f"total_allocated: {_memory_viz.Bytes(expected)}" in _memory_viz.segsum(snapshot)
    assert "Device 1" in _memory_viz.trace(snapshot)
    # Without this one the viewer fails where there are categories.
    assert all("unknown" in {each.get("category") for each in trace} for trace in snapshot["device_traces"])
    assert "forward:0:weights" in _memory_viz.memory(snapshot, format_flamegraph=str)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(snapshot)


def test_the_viewer_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    write_memory_snapshot(shown_plan(), path)
    operations = list(pickletools.genops(path.read_bytes()))  # reads, and runs nothing
    assert {operation.name for operation, _, _ in operations} <= KNOWN
    assert operations[0][1] == 4


def test_a_plan_that_was_not_simulated_has_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    with pytest.raises(PlanError, match="sample_input"):
        write_memory_snapshot(Plan(()), path)
    assert not path.exists()


def test_the_trace_has_the_times_and_the_memory_of_the_plan(tmp_path: Path) -> None:
    plan = shown_plan()
    path = tmp_path / "trace.json"
    write_chrome_trace(plan, path)
    trace = json.loads(path.read_text())
    assert trace == json.loads(json.dumps(chrome_trace(plan)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    times = {event["name"]: event["dur"] for event in spans if (event["pid"], event["tid"]) == (1, 1)}
    assert times == {
        field.name.replace("_", " "): pytest.approx(1e6 * getattr(plan.step_time, field.name))
        for field in dataclasses.fields(plan.step_time)
    }
    for process, memory in ((1, plan.predicted_memory), (2, plan.baseline_memory)):
        counters = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == process]
        assert memory is not None
        assert [tuple(event["args"].values()) for event in counters] == list(memory.samples)
        assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
    phases = [event["name"] for event in spans if (event["pid"], event["tid"]) == (1, 2)]
    assert phases == ["forward", "backward", "optimizer step"]
    assert chrome_trace(Plan(()))["traceEvents"]  # without rates and memory: names alone
