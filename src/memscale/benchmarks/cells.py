"""Rows as a table of text, the same for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memscale.benchmarks.registry import MODELS, PUBLISHED_ON
from memscale.benchmarks.results import Row
from memscale.benchmarks.run import find_device
from memscale.errors import MemScaleError
from memscale.hardware import GpuSpec
from memscale.units import format_bytes

__all__ = ["Cells", "cells", "device_name"]

_NOTHING = "–"
_GIB = 2**30
_MIB = 2**20
_DEFAULT_MODE = "balanced"  # what the published reductions are credited to


@dataclass(frozen=True)
class Cells:
    """A table of text.

    Attributes:
        headers: Of the columns.
        right: For each column, whether it keeps to the right.
        rows: A cell for each column.
        remarks: Sentences to put below the table: what the figures are, what did not fit.
    """

    headers: tuple[str, ...]
    right: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    right: bool = True
    shown: bool = True


def cells(rows: Sequence[Row]) -> Cells:
    """The rows as text: columns that would say nothing are left out.

    Example:
        >>> row = Row("gpt2-tiny", 172_800, 2, 64, "none", "1GiB", "simulated", 2**21, 2**21, 0, 0, 0.0, 1.0)
        >>> table = cells([row])
        >>> table.headers
        ('model', 'params', 'batch × seq', 'mode', 'peak (MiB)')
        >>> table.rows
        (('gpt2-tiny', '0.2 M', '2 × 64', 'none', '2.00'),)
    """
    compared = any(_has_published(row) for row in rows)
    modes = any(row.mode != "none" for row in rows)
    sizes = [size for row in rows for size in (row.peak_bytes, row.baseline_bytes) if size is not None]
    unit, unit_name = (_GIB, "GiB") if compared or max(sizes, default=_GIB) >= _GIB else (_MIB, "MiB")

    def size(nbytes: int | None) -> str:
        return _NOTHING if nbytes is None else f"{nbytes / unit:.2f}"

    columns = [
        _Column("model", lambda row: row.model, right=False),
        _Column("params", lambda row: f"{row.params / 1e6:,.1f} M"),
        _Column("batch × seq", lambda row: f"{row.batch} × {row.seq}"),
        _Column("mode", lambda row: row.mode, right=False),
        _Column("on", lambda row: row.on, right=False, shown=len({row.on for row in rows}) > 1),
        _Column(
            f"peak ({unit_name})",
            lambda row: "does not fit" if row.peak_bytes is None else size(row.peak_bytes),
        ),
        _Column("reduction", _reduction, shown=modes),
        _Column("step time", _time, shown=modes),
        _Column(
            f"tensors ({unit_name})",
            lambda row: size(row.tensor_bytes),
            shown=any(row.tensor_bytes is not None for row in rows),
        ),
        _Column(
            f"host ({unit_name})",
            lambda row: size(row.host_bytes),
            shown=any(row.host_bytes >= _MIB for row in rows),
        ),
        _Column(
            f"disk ({unit_name})", lambda row: size(row.disk_bytes), shown=any(row.disk_bytes for row in rows)
        ),
        _Column("published (GiB)", _published, shown=compared),
        _Column("error", _error, shown=compared),
    ]
    columns = [column for column in columns if column.shown]
    return Cells(
        headers=tuple(column.header for column in columns),
        right=tuple(column.right for column in columns),
        rows=tuple(tuple(column.cell(row) for column in columns) for row in rows),
        remarks=_remarks(rows, compared),
    )


def device_name(on: str) -> str:
    """The device in full: its name, and its memory unless the name says that.

    Example:
        >>> device_name("rtx3090"), device_name("24GiB"), device_name("cpu")
        ('NVIDIA GeForce RTX 3090, 24.0 GiB', 'a GPU of 24.0 GiB', 'the CPU')
    """
    device = find_device(on)
    if device is None:
        return "the CPU"
    if isinstance(device, GpuSpec):
        return f"{device.name}, {format_bytes(device.memory_bytes)}"
    return f"a GPU of {format_bytes(device)}"


def _reduction(row: Row) -> str:
    return _NOTHING if row.reduction is None or row.mode == "none" else f"{row.reduction:.1%}"


def _time(row: Row) -> str:
    return _NOTHING if row.time_ratio is None else f"{row.time_ratio:.2f} ×"


def _has_published(row: Row) -> bool:
    """Whether there is a published figure for this very case."""
    model = MODELS.get(row.model)
    if model is None or model.published is None or (row.batch, row.seq) != (model.batch, model.seq):
        return False
    if row.source != "simulated" or row.mode not in ("none", _DEFAULT_MODE):
        return False
    try:
        device = find_device(row.on)
    except MemScaleError:  # a file of results from elsewhere
        return False
    return isinstance(device, GpuSpec) and device.name == PUBLISHED_ON


def _published_gib(row: Row) -> float | None:
    published = MODELS[row.model].published if _has_published(row) else None
    if published is None:
        return None
    return published.baseline_gib if row.mode == "none" else published.peak_gib


def _published(row: Row) -> str:
    if not _has_published(row):
        return _NOTHING
    gib = _published_gib(row)
    return "does not fit" if gib is None else f"{gib:.2f}"


def _error(row: Row) -> str:
    """How far the peak is from the published one; of a saving, a percentage would be no error."""
    gib = _published_gib(row)
    if row.mode != "none" or not _has_published(row):
        return _NOTHING
    if gib is None or row.peak_bytes is None:
        return "agrees" if gib is None and row.peak_bytes is None else "differs"
    return f"{row.peak_bytes / _GIB / gib - 1:+.1%}"


def _remarks(rows: Sequence[Row], compared: bool) -> tuple[str, ...]:
    said = [f"{row.model}, {row.mode}: {row.note}." for row in rows if row.note is not None]
    sources = {row.source for row in rows}
    if "simulated" in sources:
        devices = " and ".join(
            dict.fromkeys(device_name(row.on) for row in rows if row.source == "simulated")
        )
        said.append(
            f"Simulated on {devices}: device memory in use at the peak, counted as CUDA's caching allocator "
            "counts it. No GPU was used."
        )
    if "measured" in sources:
        said.append(
            "Measured on the CPU: peak resident memory of a fresh process, above what it had after imports."
        )
    if compared:
        said.append(
            "Published: by the makers of memscale 1.1 (another package) for an RTX 3090; not measured here."
        )
    return tuple(said)
