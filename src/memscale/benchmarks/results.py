"""What the suite found: one row a case, the JSON document that holds the rows, and the table that shows them."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from memscale._util.terminal import Column
from memscale.benchmarks.models import MODELS, PUBLISHED_ON, Published, assumed_host, device_name, find_device
from memscale.errors import ConfigError, MemScaleError, shown
from memscale.execution_plan import StepTime
from memscale.hardware import GpuSpec, read_host

SCHEMA = 1
KIND = "comparison"
_NOTHING = "–"
_GIB = 2**30
_MIB = 2**20
_STEPS = {
    True: "Optimizer steps overlap with backward, as in a loop that leaves gradients alone; --no-overlap: without.",
    False: "Optimizer steps come after backward (--no-overlap).",
}
_DEFAULT_MODE = "balanced"  # what the published reductions are credited to

Source: TypeAlias = Literal["simulated", "measured"]


@dataclass(frozen=True)
class Row:
    """What a model needed in one mode, or trained in another way."""

    model: str
    params: int  # tied ones once
    batch: int  # samples
    seq: int | None  # tokens in a sample; None if samples have one size, as images
    # "none" is the plain model, "budget" one with the published peak as its memory_budget; of a comparison the name of
    # a peer, or memscale- and a mode.
    mode: str
    on: str  # the device as it was asked for
    source: Source
    peak_bytes: int | None = (
        None  # of device memory, or of the process above its imports; None: `note` says why
    )
    host_bytes: int = 0  # the most that tensors had while the model trained; 0 where the host is the device
    disk_bytes: int = 0
    # In JSON only where it is not the default:
    baseline_bytes: int | None = None  # the peak in mode "none"; None if that does not fit
    reduction: float | None = None  # 1 - peak / baseline
    time_ratio: float | None = None  # of a step, relative to the plain one
    step_time: StepTime | None = None  # estimated, where the row is simulated
    note: str | None = None
    steps: int = 2
    overlap: bool = True  # whether the loop lets optimizer steps overlap with backward
    # Where the row is measured, of the fastest step after the first:
    step_seconds: float | None = None
    cpu_seconds: float | None = None  # of all threads: less is noise of other processes
    later_peak_bytes: int | None = None  # from the second step on, without setting up and compiling
    losses: tuple[float, ...] = ()  # of each step

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same case: a file that has it needs no second run."""
        return (self.model, self.batch, self.seq, self.steps, self.on, self.overlap, self.mode)

    def to_dict(self) -> dict[str, object]:
        always = ("peak_bytes", "host_bytes", "disk_bytes")
        defaults = {field.name: field.default for field in fields(self) if field.name not in always}
        return {name: value for name, value in asdict(self).items() if value != defaults.get(name, MISSING)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Return the row that `to_dict` wrote; raise a ConfigError if a field is missing or unknown."""
        try:
            values = {**values, "losses": tuple(values.get("losses", ()))}
            if "way" in values:  # as comparisons were written at first
                values["mode"] = values.pop("way")
            row = cls(**values)
            return replace(row, step_time=row.step_time and StepTime(**values["step_time"]))
        except TypeError as error:
            raise ConfigError(
                f"Not a row of results ({error}): make the file anew with python -m memscale.benchmarks."
            ) from None


@dataclass(frozen=True)
class Results:
    """The rows of one run of the suite, or of a comparison, in their order, and how to make them again."""

    command: str
    versions: Mapping[str, str]  # of torch, transformers, and each package that was compared
    rows: tuple[Row, ...]
    machine: Mapping[str, str | int] = field(default_factory=dict)  # where rows are measured
    is_comparison: bool = False

    def to_dict(self) -> dict[str, object]:
        kind = {"kind": KIND} if self.is_comparison else {}
        where = {"machine": dict(self.machine)} if self.machine else {}
        head = {"command": self.command, "versions": dict(self.versions)}
        return {"schema": SCHEMA, **kind, **head, **where, "rows": [row.to_dict() for row in self.rows]}

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Return the results of a JSON document; raise a ConfigError if the text is none.

        Example:
            >>> results = Results("python -m memscale.benchmarks", {"torch": "2.13.0"}, ())
            >>> Results.from_json(json.dumps(results.to_dict())) == results
            True
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"Not JSON: {error}.") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ConfigError(
                f'Not results of python -m memscale.benchmarks, which have "schema": {SCHEMA} at the top; '
                f"got {shown(document)}."
            )
        try:
            rows = tuple(map(Row.from_dict, document["rows"]))
            old = {name: document[name] for name in ("torch", "transformers") if name in document}
            versions = document.get("versions") or old
            where, kind = document.get("machine", {}), document.get("kind")
            return cls(document["command"], versions, rows, where, is_comparison=kind == KIND)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"Results need a command and a list of rows ({error}).") from None

    def write(self, path: Path) -> None:
        write_document(path, self.to_dict())

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote; raise a ConfigError that names the file if it is something else."""
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None


def write_document(path: Path, document: Mapping[str, object]) -> None:
    """Write results as JSON, with the commit of this code; whole or not at all, as a later run may go on with them."""
    text = json.dumps({**document, **_commit()}, indent=1, ensure_ascii=False, allow_nan=False)
    new = path.with_name(f"{path.name}.new")
    new.write_text(f"{text}\n", encoding="utf-8", newline="")
    new.replace(path)


@functools.cache
def _commit() -> dict[str, str]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # installed, not a clone
        return {}
    return {"commit": done.stdout.strip()}


def check_resumable(old: Mapping[str, str | int], now: Mapping[str, str | int], path: Path) -> None:
    """Raise a ConfigError if a file has rows of other versions or another machine: new ones can't go beside them."""
    differ = [f"{name} {old[name]}" for name in now if old.get(name, now[name]) != now[name]]
    if differ:
        raise ConfigError(
            f"{path} has results of {', '.join(differ)}: give another file, or remove this one."
        )


def machine() -> dict[str, str | int]:
    """Describe this machine without naming it: the processor, its cores and the RAM."""
    host = read_host()
    model = "unknown"
    with_cpu = Path("/proc/cpuinfo")
    if with_cpu.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", with_cpu.read_text(), re.MULTILINE)
        model = named[1].strip() if named else model
    return {
        "processor": model,
        "cores": host.cores,
        "ram_bytes": host.total_ram_bytes,
        "threads": torch.get_num_threads(),
    }


def check_writable(path: Path | None) -> None:
    """Raise a ConfigError if a results file can't be written: before a run of minutes, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json {path} is a directory: give the name of a file.")
    if not path.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no directory {path.parent}, make it first.")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: the directory {path.parent} cannot be written to.")


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return the command line with each file by its place in this directory, or by its name alone.

    Example:
        >>> command_line("python -m memscale.benchmarks", ["--on", "RTX 3090", "--json=/nowhere/a.json"])
        "python -m memscale.benchmarks --on 'RTX 3090' --json=a.json"
    """
    here = f"{Path.cwd()}/"
    shown_arguments = [re.sub("(^|=)/.*/", r"\1", argument.replace(here, "")) for argument in arguments]
    return f"{program} {shlex.join(shown_arguments)}".rstrip()


@dataclass(frozen=True)
class Cells:
    """A table of text, with sentences to put below it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Field:
    """A column of a table of rows."""

    header: str
    text: Callable[[Row], str]
    align: Literal["left", "right"] = "right"
    shown: bool = True


def cells_of(fields: Sequence[Field], rows: Sequence[Row], remarks: Sequence[str]) -> Cells:
    """Return the fields that are shown, of each row."""
    shown = [each for each in fields if each.shown]
    return Cells(
        columns=tuple(Column(each.header, each.align) for each in shown),
        rows=tuple(tuple(each.text(row) for each in shown) for row in rows),
        remarks=tuple(remarks),
    )


def cells(rows: Sequence[Row], *, brief: bool = False) -> Cells:
    """Return the rows as text; columns that would be empty are left out, and if `brief` those that a terminal lacks."""
    compared = not brief and any(_published_for(row) for row in rows)
    modes = any(row.mode != "none" for row in rows)
    has_host = any(row.host_bytes >= _MIB for row in rows)
    has_disk = any(row.disk_bytes for row in rows)
    sizes = [size for row in rows for size in (row.peak_bytes, row.baseline_bytes) if size is not None]
    unit, unit_name = (_GIB, "GiB") if compared or max(sizes, default=_GIB) >= _GIB else (_MIB, "MiB")

    def size(nbytes: int) -> str:
        return f"{nbytes / unit:.2f}"

    shown = [
        Field("model", lambda row: row.model, "left"),
        Field("params", lambda row: f"{row.params / 1e6:,.1f} M", shown=not brief),
        Field("batch × seq", batch_text),
        Field("mode", mode_text, "left"),
        Field(
            f"peak ({unit_name})",
            lambda row: size(row.peak_bytes) if row.peak_bytes is not None else missing(row),
        ),
        Field("reduction", _reduction, shown=modes),
        Field("step time", _time, shown=modes),
        Field(f"host ({unit_name})", lambda row: size(row.host_bytes), shown=has_host),
        Field(f"disk ({unit_name})", lambda row: size(row.disk_bytes), shown=has_disk),
        Field("published (GiB)", _published, shown=compared),
        Field("error", _error, shown=compared),
    ]
    return cells_of(shown, rows, _remarks(rows, compared))


def missing(row: Row) -> str:
    """Return why a row has no peak, in two or three words; the rest of its note is below the table."""
    return (row.note or "does not fit").partition(":")[0]


def batch_text(row: Row) -> str:
    """Return the samples of a row and their length, if they have one."""
    return f"{row.batch}" if row.seq is None else f"{row.batch} × {row.seq}"


def mode_text(row: Row) -> str:
    """Return the mode of a row; of one with a budget, that."""
    published = MODELS[row.model].published if row.model in MODELS and row.mode == "budget" else None
    return row.mode if published is None else f"memory_budget {published.peak_gib} GiB"


def _reduction(row: Row) -> str:
    return _NOTHING if row.reduction is None or row.mode == "none" else f"{row.reduction:.1%}"


def _time(row: Row) -> str:
    return _NOTHING if row.time_ratio is None else f"{row.time_ratio:.2f} ×"


def _published_for(row: Row) -> Published | None:
    """Return what others published, if they did for this very case."""
    model = MODELS.get(row.model)
    if model is None or model.published is None or (row.batch, row.seq) != (model.batch, model.seq):
        return None
    if row.source != "simulated" or row.mode not in ("none", _DEFAULT_MODE, "budget"):
        return None
    try:
        device = find_device(row.on)
    except MemScaleError:  # a file of results from elsewhere
        return None
    return model.published if isinstance(device, GpuSpec) and device.name == PUBLISHED_ON else None


def _published(row: Row) -> str:
    published = _published_for(row)
    if published is None:
        return _NOTHING
    gib = published.baseline_gib if row.mode == "none" else published.peak_gib
    return "does not fit" if gib is None else f"{gib:.2f}"


def _error(row: Row) -> str:
    """Return how far the plain peak is from the published one; of a saving, a percentage would be no error."""
    published = _published_for(row)
    if row.mode != "none" or published is None:
        return _NOTHING
    gib = published.baseline_gib
    if gib is None or row.peak_bytes is None:
        both = gib is None and row.peak_bytes is None and missing(row) == "does not fit"
        return "agrees" if both else "differs"
    return f"{row.peak_bytes / _GIB / gib - 1:+.1%}"


def _remarks(rows: Sequence[Row], compared: bool) -> tuple[str, ...]:
    said = [f"{row.model}, {row.mode}: {row.note}." for row in rows if row.note is not None]
    sources = {row.source for row in rows}
    if "simulated" in sources:
        simulated = dict.fromkeys(row.on for row in rows if row.source == "simulated")
        devices = " and ".join(dict.fromkeys(map(device_name, simulated)))
        said.append(
            f"Simulated on {devices}: device memory in use at the peak, counted as CUDA's caching allocator "
            f"counts it. Assumed: {' and '.join(dict.fromkeys(map(assumed_host, simulated)))}. No GPU was used."
        )
    if any(row.source == "simulated" and row.mode != "none" and row.time_ratio for row in rows):
        said.append(_STEPS[rows[0].overlap])
    if "measured" in sources:
        said.append(
            "Measured on the CPU: peak resident memory of a fresh process, above what it had after imports."
        )
    if compared:
        said.append(
            "Published: by the makers of memscale 1.1 (another package) for an RTX 3090; not measured here."
        )
    return tuple(said)
