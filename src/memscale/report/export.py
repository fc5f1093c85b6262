"""A plan's simulated step for other viewers: PyTorch's memory viewer, and chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from memscale.errors import PlanError
from memscale.execution_plan import Plan, StepMemory
from memscale.version import __version__

# The newest that the viewer reads. Python's own default may be newer.
PICKLE_PROTOCOL = 4
# Where the segments of a device begin, times its number from 1 on: any will do without overlaps.
ADDRESS = 1 << 40


def write_memory_snapshot(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the simulated memory as a snapshot that pytorch.org/memory_viz opens.

    Device 0 is the step with the plan, device 1 the plain step, if it was simulated. A block is a rise of what one
    use (weights, activations, ...) takes, not a tensor.

    Raises:
        PlanError: the plan has no simulated step.
    """
    Path(path).write_bytes(pickle.dumps(memory_snapshot(plan), protocol=PICKLE_PROTOCOL))


def memory_snapshot(plan: Plan) -> dict[str, Any]:
    """Return what `write_memory_snapshot` writes, in the form of `torch.cuda.memory._snapshot`."""
    snapshot: dict[str, Any] = {"segments": [], "device_traces": [], "allocator_settings": {}}
    for device, (name, step) in enumerate(_steps(plan)):
        segments, trace = _allocations(device, name, step)
        snapshot["segments"] += segments
        snapshot["device_traces"].append(trace)
    return snapshot


def _steps(plan: Plan) -> list[tuple[str, StepMemory]]:
    steps = (("step with the plan", plan.predicted_memory), ("plain step", plan.baseline_memory))
    known = [(name, step) for name, step in steps if step is not None]
    if not known:
        raise PlanError(
            "The plan has no memory over a step: its peak is an estimate. Make it with a sample_input, so that a step "
            "is simulated."
        )
    return known


def _allocations(
    device: int, name: str, step: StepMemory
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a segment for each category, and the events that fill and empty them."""
    segments: list[dict[str, Any]] = []
    events: list[tuple[int, bool, int, list[dict[str, Any]]]] = []
    address = ADDRESS * (device + 1)
    for category, levels in zip(step.categories, zip(*step.samples, strict=True), strict=True):
        at_end: list[dict[str, Any]] = []
        for low, high, begin, end in _blocks(levels):
            frames = [
                {"name": category, "filename": step.phase_of(begin), "line": begin},
                {"name": f"{name} (simulated)", "filename": "memscale", "line": 0},
            ]
            block = {"addr": address + low, "size": high - low, "stream": 0, "frames": frames}
            events.append((begin, True, address + low, [{"action": "alloc", **block, "category": category}]))
            if end is None:
                at_end.append(_block(address + low, high - low, "active_allocated", frames))
            else:
                freed = [{"action": f"free_{what}", **block} for what in ("requested", "completed")]
                events.append((end, False, -address - low, freed))
        at_end.sort(key=lambda each: int(each["address"]))
        used, size = levels[-1], max(levels)
        if size > used:
            at_end.append(_block(address + used, size - used, "inactive", []))
        segments.append(
            {
                "device": device,
                "address": address,
                "total_size": size,
                "allocated_size": used,
                "active_size": used,
                "requested_size": used,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": at_end,
            }
        )
        address += size
    # Once there are categories, the viewer (of 2025) fails unless one of them is "unknown".
    trace: list[dict[str, Any]] = [
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown"}
    ]
    for _, _, _, some in sorted(events, key=lambda event: event[:3]):  # releases before allocations
        trace += some
    return segments, trace


def _block(address: int, size: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}


def _blocks(levels: Sequence[int]) -> Iterator[tuple[int, int, int, int | None]]:
    """Cut the area below a line of bytes into blocks: from and to which byte, since and until when.

    Example:
        >>> sorted(_blocks([4, 6, 3]), key=lambda block: block[:2])
        [(0, 3, 0, None), (3, 4, 0, 2), (4, 6, 1, 2)]
    """
    held: list[tuple[int, int, int]] = []  # from, to, since
    for now, level in enumerate(levels):
        while held and held[-1][1] > level:
            low, high, begin = held.pop()
            yield max(low, level), high, begin, now
            if low < level:
                held.append((low, level, begin))
        top = held[-1][1] if held else 0
        if level > top:
            held.append((top, level, now))
    for low, high, begin in held:
        yield low, high, begin, None


def write_chrome_trace(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan's timeline as a trace that chrome://tracing and ui.perfetto.dev open.

    Step times are estimated, and their parts drawn one after the other, though some overlap in training. Memory is
    simulated; its samples have an order but no times, and are spread evenly over the step.
    """
    Path(path).write_text(json.dumps(chrome_trace(plan), indent=1), encoding="utf-8")


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Return what `write_chrome_trace` writes, in Chrome's trace event format; times are in microseconds."""
    parts = [
        (each.name.replace("_", " "), getattr(plan.step_time, each.name)) for each in fields(plan.step_time)
    ]
    steps = (
        ("step with the plan", plan.step_time.total, parts, plan.predicted_memory),
        ("plain step", plan.baseline_seconds, [("plain step", plan.baseline_seconds)], plan.baseline_memory),
    )
    events: list[dict[str, Any]] = []
    for process, (name, seconds, spans, memory) in enumerate(steps, start=1):
        events.append(_named("process_name", name, process, 0))
        events.append(_named("thread_name", "time by what it is spent on (estimated)", process, 1))
        begin = 0.0
        for what, duration in spans:
            if duration:
                events.append(_span(what, "estimated", process, 1, begin, duration))
            begin += duration
        if memory is None:
            continue
        events.append(_named("thread_name", "phases (by samples of memory, not by time)", process, 2))
        # Without rates there is no time: then a sample takes a millisecond.
        each_takes = seconds / len(memory.samples) or 1e-3
        ends = [phase.begin for phase in memory.phases[1:]] + [len(memory.samples)]
        for phase, end in zip(memory.phases, ends, strict=True):
            if end > phase.begin:
                start, duration = phase.begin * each_takes, (end - phase.begin) * each_takes
                events.append(_span(phase.name, "simulated", process, 2, start, duration))
        for index, sample in enumerate(memory.samples):
            uses = dict(zip(memory.categories, sample, strict=True))
            at = {"ph": "C", "pid": process, "tid": 0, "ts": index * each_takes * 1e6}
            events.append({"name": "device memory (simulated), bytes", **at, "args": uses})
    about = {"plan": str(plan), "device": plan.device, "batch": plan.batch, "memscale": __version__}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _span(name: str, how: str, process: int, thread: int, begin: float, duration: float) -> dict[str, Any]:
    times = {"ts": begin * 1e6, "dur": duration * 1e6}
    return {"name": name, "cat": how, "ph": "X", "pid": process, "tid": thread, **times, "args": {"how": how}}
