"""Compare MemScale's modes with other ways to train in less memory. See Note [The same work] in `run.py`."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from memscale.benchmarks.models import Device, device_name, find_device, quiet_transformers, unknown_name
from memscale.benchmarks.peers import PEERS, PLAIN, Peer
from memscale.benchmarks.results import Cells, Field, Row, cells_of, missing
from memscale.benchmarks.run import (
    ENDLESS,
    MODES,
    OURS,
    Case,
    Outcome,
    empty_row,
    measured,
    reason,
    simulated_mode,
)
from memscale.hardware import GpuSpec
from memscale.simulator import simulate
from memscale.units import format_bytes

_GIB, _MIB = 2**30, 2**20
_NOTHING = "–"


def is_own(row: Row) -> bool:
    """Return whether a row is of the plain model or of a mode of MemScale, not of another tool."""
    return row.mode == PLAIN or row.mode not in PEERS


def versions(ways: Sequence[str]) -> dict[str, str]:
    packages = ("torch", "transformers", *(PEERS[way].package for way in ways if way in PEERS))
    found = {}
    for package in dict.fromkeys(packages):
        if package is not None and importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    return found


def ways_of(peers: Sequence[str], modes: Sequence[str]) -> list[str]:
    """Return the ways to compare, the plain one first; raise a ConfigError for a name that is none."""
    for name in peers:
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
    ours = [f"{OURS}{mode}" for mode in modes if MODES[mode] is not None]
    return list(dict.fromkeys([PLAIN, *peers, *ours]))


def compare(cases: Sequence[Case], ways: Sequence[str], on: str, known: Sequence[Row] = ()) -> Iterator[Row]:
    """Run every case in every way, but those in `known`, and yield each row.

    A way that is not installed, fails or does not fit gets a row that says so.
    """
    device = find_device(on)
    done = {row.key: row for row in known}
    for case in cases:
        empty = empty_row(case, PLAIN, on.strip(), device)
        with tempfile.TemporaryDirectory(prefix="memscale-compare-") as directory:
            weights = Path(directory) / "model.safetensors"
            for way in ways:
                row = replace(empty, mode=way)
                yield done.get(row.key) or replace(row, **vars(_outcome(case, way, device, weights)))


def _outcome(case: Case, way: str, device: Device, weights: Path) -> Outcome:
    peer = PEERS.get(way)
    if peer is not None and peer.package is not None and importlib.util.find_spec(peer.package) is None:
        return Outcome(None, note=f"not installed: pip install {peer.package}")
    if device is None:
        return measured(case, way, weights)
    if peer is None or way == PLAIN:
        found = simulated_mode(case, "none" if way == PLAIN else way.removeprefix(OURS), device)
        return replace(found, step_time=None, time_ratio=1.0 if way == PLAIN else found.time_ratio)
    if peer.not_simulated is not None:
        return Outcome(None, note=f"not simulated: {peer.not_simulated}")
    return _simulated(case, peer, device)


def _simulated(case: Case, peer: Peer, device: GpuSpec | int) -> Outcome:
    endless = replace(device, memory_bytes=ENDLESS) if isinstance(device, GpuSpec) else ENDLESS
    peaks = []
    try:
        for on in (device, endless):
            try:
                with simulate(on) as simulation, quiet_transformers():
                    model = case.model.build().to(simulation.device)
                    inputs = case.model.inputs(case.batch, case.seq, simulation.device)
                    simulation.tracker.reset_peak()
                    step = peer.prepare(model)
                    for _ in range(case.steps):
                        step(inputs)
                peaks.append(simulation)
                break
            except torch.OutOfMemoryError:
                continue
            finally:
                gc.collect()
    except Exception as error:  # of another package, on a device that it does not know
        return Outcome(None, note=f"not simulated: {reason(repr(error))}")
    if on is device:
        return Outcome(peaks[0].peak_bytes, peaks[0].host_peak_bytes)
    needed = f": needs {format_bytes(peaks[0].peak_bytes)}" if peaks else ""
    return Outcome(None, note=f"does not fit{needed}")


def tables(rows: Sequence[Row], mark: str = "*") -> list[tuple[str, Cells]]:
    """Return a title and a table for each model; the lowest of a column stands between `mark`s."""
    works = dict.fromkeys(map(_work, rows))
    return [_table([row for row in rows if _work(row) == work], mark) for work in works]


def _table(rows: Sequence[Row], mark: str) -> tuple[str, Cells]:
    first = rows[0]
    plain = next((row for row in rows if row.mode == PLAIN), first)

    def over_plain(name: Literal["step_seconds", "cpu_seconds"]) -> Callable[[Row], float | None]:
        def ratio(row: Row) -> float | None:
            mine, base = getattr(row, name), getattr(plain, name)
            return row.time_ratio if mine is None or base is None else mine / base

        return ratio

    def field(
        header: str,
        value: Callable[[Row], float | None],
        text: Callable[[float], str],
        shown: bool = True,
        marked: bool = True,
    ) -> Field:
        known = [value(row) for row in rows if row.peak_bytes is not None]
        least = min((each for each in known if each is not None), default=None)

        def cell(row: Row) -> str:
            mine = value(row)
            if header.startswith("peak") and row.peak_bytes is None and row.note is not None:
                return missing(row)  # the reason is below the table
            if mine is None or row.peak_bytes is None:
                return _NOTHING
            is_least = marked and least is not None and text(mine) == text(least)
            return f"{mark}{text(mine)}{mark}" if is_least else text(mine)

        return Field(header, cell, shown=shown)

    is_measured = first.source == "measured"
    unit, name = (_GIB, "GiB") if max(row.peak_bytes or 0 for row in rows) >= _GIB else (_MIB, "MiB")

    def size(nbytes: float) -> str:
        return f"{nbytes / unit:.2f}"

    has_host, has_disk = any(row.host_bytes >= _MIB for row in rows), any(row.disk_bytes for row in rows)
    fields = [
        Field("trained with", lambda row: _title(row.mode), "left"),
        field(f"peak ({name})", lambda row: row.peak_bytes, size),
        field(f"later steps ({name})", lambda row: row.later_peak_bytes, size, is_measured),
        # By the clock, what else the machine does counts too: nothing is won there.
        field("step time", over_plain("step_seconds"), "{:.2f} ×".format, marked=not is_measured),
        field("CPU time", over_plain("cpu_seconds"), "{:.2f} ×".format, is_measured),
        field(f"host ({name})", lambda row: row.host_bytes, size, has_host, marked=False),
        field(f"disk ({name})", lambda row: row.disk_bytes, size, has_disk, marked=False),
        Field("loss difference", lambda row: _loss_difference(row, plain), shown=is_measured),
    ]
    samples = f"{first.batch} samples" if first.seq is None else f"{first.batch} × {first.seq} tokens"
    title = f"{first.model}, {first.params / 1e6:,.1f} M parameters, {samples}, {first.steps} steps"
    title += "" if first.overlap else ", optimizer steps after backward"
    title = f"{title} on {device_name(first.on)} ({first.source})"
    return title, cells_of(fields, rows, _remarks(rows, mark))


def _work(row: Row) -> tuple[object, ...]:
    return row.key[:-1]


def _title(way: str) -> str:
    return PEERS[way].title if way in PEERS else f"MemScale, {way.removeprefix(OURS)}"


def _loss_difference(row: Row, plain: Row | None) -> str:
    if not row.losses or plain is None or not plain.losses:
        return _NOTHING
    difference = max(abs(mine - theirs) for mine, theirs in zip(row.losses, plain.losses, strict=True))
    return "none" if difference == 0 else f"{difference:.1e}"


def _remarks(rows: Sequence[Row], mark: str) -> tuple[str, ...]:
    said = [f"{_title(row.mode)}: {row.note.rstrip('.')}." for row in rows if row.note is not None]
    lowest = "In bold" if mark == "**" else f"Between {mark} {mark}"
    said.append(f"{lowest}: the lowest of its column.")
    if rows[0].source == "measured":
        said.append(
            "Measured on the CPU, each in a fresh process from the same weights on the same batch: peak resident "
            "memory above what it had after imports, over all steps and from the second one on; the fastest step "
            "after the first over that of plain PyTorch, by the clock (in which other processes of the machine count) "
            "and by processor time of all threads (in which waiting for the disk does not); the largest difference "
            "of a step's loss to plain PyTorch's."
        )
    else:
        said.append(
            f"Simulated on {device_name(rows[0].on)}: device memory in use at the peak. Step times are estimated by "
            "the cost model, which knows MemScale's plans alone. No GPU was used."
        )
    return tuple(said)
