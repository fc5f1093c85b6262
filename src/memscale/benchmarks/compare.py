"""Compare MemScale's modes with other ways to train in less memory, on the same work.

Note [The same work]
Every case trains the same model from the same weights (a file that is written first) on the same batch, in fp32 with
the same learning rate, each in a fresh process. The generator is seeded anew before the first step, so that dropout
draws the same numbers. Of the seconds of a step, those of the fastest after the first one count.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from memscale._util.terminal import Column
from memscale.api import wrap
from memscale.benchmarks.models import Device, device_name, find_device, quiet_transformers, unknown_name
from memscale.benchmarks.peers import LEARNING_RATE, PEERS, Peer, Step, loop
from memscale.benchmarks.results import Cells, Source, write_whole
from memscale.benchmarks.run import (
    ENDLESS,
    MODES,
    Case,
    config_of,
    disk_watch,
    predicted_on_cpu,
    reason,
    simulated_mode,
)
from memscale.errors import ConfigError, ProfileError
from memscale.hardware import GpuSpec, read_host
from memscale.hardware.calibrate import CALIBRATION_VARIABLE
from memscale.memory.process import measure_in_fresh_process, peak_rss_bytes, reset_peak_rss, rss_bytes
from memscale.offload.loading import load_safetensors
from memscale.simulator import simulate
from memscale.units import format_bytes

KIND = "comparison"
SCHEMA = 1
PLAIN = next(iter(PEERS))
_GIB = 2**30
_MODE = "memscale-"  # before the name of a mode: what a mode is called among peers
_WEIGHTS_SEED, _INPUTS_SEED, _TRAINING_SEED = 0, 1, 2
_NOTHING = "–"


@dataclass(frozen=True)
class Compared:
    """What one way of training needed."""

    model: str
    params: int
    batch: int
    seq: int | None
    steps: int
    on: str
    way: str  # the name of a peer, or memscale- and a mode
    source: Source
    peak_bytes: int | None  # None: it did not run, and `note` says why
    later_peak_bytes: int | None  # from the second step on, without setting up and compiling; measured only
    host_bytes: int
    disk_bytes: int
    step_seconds: float | None  # measured
    cpu_seconds: float | None  # of all threads in that step: less is noise of other processes; measured
    time_ratio: float | None  # over the plain step: estimated, where the row is simulated
    losses: tuple[float, ...]  # of each step; none if simulated
    note: str | None = None
    overlap: bool = True  # whether the loop lets optimizer steps overlap with backward

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same case: a file that has it needs no second run."""
        return (self.model, self.batch, self.seq, self.steps, self.on, self.overlap, self.way)


@dataclass(frozen=True)
class Comparison:
    """The rows of a comparison, the machine and how to make them again."""

    command: str
    versions: Mapping[str, str]  # of torch, and of each package that was compared
    machine: Mapping[str, str | int]
    rows: tuple[Compared, ...]

    def write(self, path: Path) -> None:
        document = {"schema": SCHEMA, "kind": KIND, **asdict(self)}
        write_whole(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Read what `write` wrote; raise a ConfigError that names the file if it is something else."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["kind"] != KIND or document["schema"] != SCHEMA:
                raise KeyError("kind")
            rows = tuple(Compared(**{**row, "losses": tuple(row["losses"])}) for row in document["rows"])
            return cls(document["command"], document["versions"], document["machine"], rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no comparison by python -m memscale.benchmarks --compare ({error}): "
                "give another file, or remove this one."
            ) from None


def is_own(row: Compared) -> bool:
    """Return whether a row is of the plain model or of a mode of MemScale, not of another tool."""
    return row.way == PLAIN or row.way not in PEERS


def is_comparison(path: Path) -> bool:
    """Return whether a results file is a comparison."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


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
    ours = [f"{_MODE}{mode}" for mode in modes if MODES[mode] is not None]
    return list(dict.fromkeys([PLAIN, *peers, *ours]))


def compare(
    cases: Sequence[Case], ways: Sequence[str], on: str, known: Sequence[Compared] = ()
) -> Iterator[tuple[Compared, bool]]:
    """Run every case in every way, but those in `known`; yield each row, and whether it was run now.

    A way that is not installed, fails or does not fit gets a row that says so.
    """
    device = find_device(on)
    done = {row.key: row for row in known}
    for case in cases:
        with torch.device("meta"):
            params = sum(parameter.numel() for parameter in case.model.build().parameters())
        empty = Compared(
            model=case.model.name,
            params=params,
            batch=case.batch,
            seq=case.seq,
            steps=case.steps,
            on=on.strip(),
            way=PLAIN,
            source="measured" if device is None else "simulated",
            peak_bytes=None,
            later_peak_bytes=None,
            host_bytes=0,
            disk_bytes=0,
            step_seconds=None,
            cpu_seconds=None,
            time_ratio=None,
            losses=(),
            overlap=case.overlap,
        )
        with tempfile.TemporaryDirectory(prefix="memscale-compare-") as directory:
            weights = Path(directory) / "model.safetensors"
            rows = [replace(empty, way=way) for way in ways]
            is_measured = device is None and any(row.key not in done for row in rows)
            needed = predicted_on_cpu(case) if is_measured else 0
            for row in rows:
                if row.key in done:
                    yield done[row.key], False
                else:
                    yield _run(case, row, device, weights, needed), True


def _run(case: Case, row: Compared, device: Device, weights: Path, plain_bytes: int) -> Compared:
    peer = PEERS.get(row.way)
    if peer is not None and peer.package is not None and importlib.util.find_spec(peer.package) is None:
        return replace(row, note=f"not installed: pip install {peer.package}")
    if device is None:
        return _measured(case, row, peer, weights, plain_bytes)
    if peer is None or peer.name == PLAIN:
        found = simulated_mode(case, _mode(row.way), device)
        return replace(
            row,
            peak_bytes=found.peak_bytes,
            host_bytes=found.host_bytes,
            time_ratio=1.0 if row.way == PLAIN else found.time_ratio,
            note=found.note,
        )
    if peer.not_simulated is not None:
        return replace(row, note=f"not simulated: {peer.not_simulated}")
    return _simulated(case, row, peer, device)


def _mode(way: str) -> str:
    return "none" if way in PEERS else way.removeprefix(_MODE)


def _simulated(case: Case, row: Compared, peer: Peer, device: GpuSpec | int) -> Compared:
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
        return replace(row, note=f"not simulated: {reason(repr(error))}")
    if on is device:
        return replace(row, peak_bytes=peaks[0].peak_bytes, host_bytes=peaks[0].host_peak_bytes)
    return replace(
        row, note=f"does not fit: needs {format_bytes(peaks[0].peak_bytes)}" if peaks else "does not fit"
    )


def _measured(case: Case, row: Compared, peer: Peer | None, weights: Path, plain_bytes: int) -> Compared:
    if peer is not None:
        # Not left to the system to find out: it may kill another process than this one.
        available = read_host().available_ram_bytes
        needed = plain_bytes + rss_bytes()  # the other process has the same libraries
        if needed > available:
            size = f"the plain step needs {format_bytes(needed)}, {format_bytes(available)} free"
            return replace(row, note=f"not run: {size}")
    imports = (*case.model.modules, *(peer.modules if peer is not None else ()))
    try:
        if not weights.exists():
            measure_in_fresh_process(write_weights, case, weights)
        measured = measure_in_fresh_process(measured_case, case, row.way, weights, imports=imports)
    except ProfileError as error:
        if "SIGKILL" in str(error):
            return replace(row, note="killed: mostly a sign of no memory")
        return replace(row, note=f"failed: {reason(str(error))}")
    run = measured.result
    timed = run.seconds[1:] or run.seconds
    fastest = min(range(len(timed)), key=timed.__getitem__)
    return replace(
        row,
        peak_bytes=max(run.first_peak_bytes, measured.peak_bytes) - measured.baseline_bytes,
        later_peak_bytes=measured.peak_bytes - measured.baseline_bytes,
        disk_bytes=run.disk_bytes,
        step_seconds=round(timed[fastest], 4),
        cpu_seconds=round((run.cpu_seconds[1:] or run.cpu_seconds)[fastest], 4),
        losses=run.losses,
        note=peer.remark if peer is not None else None,
    )


@dataclass(frozen=True)
class _Run:
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    disk_bytes: int
    first_peak_bytes: int  # of the process, up to the end of the first step


def write_weights(case: Case, path: Path) -> None:
    """Write random weights of a model, with which every case begins; in a fresh process."""
    from safetensors.torch import save_model

    torch.manual_seed(_WEIGHTS_SEED)
    save_model(case.model.build(), str(path))


def measured_case(case: Case, way: str, weights: Path) -> _Run:
    """Train a case for real, in a fresh process. See Note [The same work]."""
    os.environ[CALIBRATION_VARIABLE] = "none"  # results are to be compared between machines
    with torch.device("cpu" if way in PEERS else "meta"):
        model = case.model.build()
    load_safetensors(model, weights)
    torch.manual_seed(_INPUTS_SEED)  # on the meta device, building draws nothing
    inputs = case.model.inputs(case.batch, case.seq)
    with quiet_transformers():
        step = PEERS[way].prepare(model) if way in PEERS else _wrapped(case, way, model, inputs)
    torch.manual_seed(_TRAINING_SEED)
    losses, seconds, cpu = [], [], []
    first_peak = 0
    with quiet_transformers(), disk_watch(model) as on_disk:
        for number in range(case.steps):
            if number == 1:
                first_peak = peak_rss_bytes()
                reset_peak_rss()
            start, start_cpu = time.perf_counter(), time.process_time()
            losses.append(step(inputs))
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    return _Run(tuple(map(float, losses)), tuple(seconds), tuple(cpu), max(on_disk), first_peak)


def _wrapped(case: Case, way: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Step:
    wrap(model, config_of(case, _mode(way)), inputs)
    return loop(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


@dataclass(frozen=True)
class _Field:
    header: str
    value: Callable[[Compared], float | None]  # of which the least is marked
    text: Callable[[float], str]
    shown: bool = True
    is_marked: bool = True


def tables(rows: Sequence[Compared], mark: str = "*") -> list[tuple[str, Cells]]:
    """Return a title and a table for each model; the lowest of a column stands between `mark`s."""
    works = dict.fromkeys(map(_work, rows))
    return [_table([row for row in rows if _work(row) == work], mark) for work in works]


def _table(rows: Sequence[Compared], mark: str) -> tuple[str, Cells]:
    first = rows[0]
    plain = next((row for row in rows if row.way == PLAIN), first)

    def over_plain(name: Literal["step_seconds", "cpu_seconds"]) -> Callable[[Compared], float | None]:
        def ratio(row: Compared) -> float | None:
            mine, base = getattr(row, name), getattr(plain, name)
            return row.time_ratio if mine is None or base is None else mine / base

        return ratio

    is_measured = first.source == "measured"
    fields = [
        _Field("peak (GiB)", lambda row: row.peak_bytes, _gib),
        _Field("later steps (GiB)", lambda row: row.later_peak_bytes, _gib, is_measured),
        # By the clock, what else the machine does counts too: nothing is won there.
        _Field("step time", over_plain("step_seconds"), "{:.2f} ×".format, is_marked=not is_measured),
        _Field("CPU time", over_plain("cpu_seconds"), "{:.2f} ×".format, is_measured),
        _Field(
            "host (GiB)",
            lambda row: row.host_bytes,
            _gib,
            any(row.host_bytes >= 2**20 for row in rows),
            False,
        ),
        _Field("disk (GiB)", lambda row: row.disk_bytes, _gib, any(row.disk_bytes for row in rows), False),
    ]
    fields = [field for field in fields if field.shown]
    lines = []
    for row in rows:
        line = [_title(row.way), *(_marked(field, row, rows, mark) for field in fields)]
        if row.peak_bytes is None and row.note is not None:
            line[1] = row.note.partition(":")[0]  # the reason is below the table
        lines.append((*line, _loss_difference(row, plain)) if is_measured else tuple(line))
    columns = [Column("trained with"), *(Column(field.header, "right") for field in fields)]
    if is_measured:
        columns.append(Column("loss difference", "right"))
    samples = f"{first.batch} samples" if first.seq is None else f"{first.batch} × {first.seq} tokens"
    title = f"{first.model}, {first.params / 1e6:,.1f} M parameters, {samples}, {first.steps} steps"
    title += "" if first.overlap else ", optimizer steps after backward"
    return f"{title} on {device_name(first.on)} ({first.source})", Cells(
        tuple(columns), tuple(lines), _remarks(rows, mark)
    )


def _work(row: Compared) -> tuple[object, ...]:
    return row.key[:-1]


def _gib(nbytes: float) -> str:
    return f"{nbytes / _GIB:.2f}"


def _title(way: str) -> str:
    return PEERS[way].title if way in PEERS else f"MemScale, {way.removeprefix(_MODE)}"


def _marked(field: _Field, row: Compared, others: Sequence[Compared], mark: str) -> str:
    value = field.value(row)
    if value is None or row.peak_bytes is None:
        return _NOTHING
    text = field.text(value)
    candidates = [field.value(each) for each in others if each.peak_bytes is not None]
    least = min(each for each in candidates if each is not None)
    return text if not field.is_marked or field.text(least) != text else f"{mark}{text}{mark}"


def _loss_difference(row: Compared, plain: Compared | None) -> str:
    if not row.losses or plain is None or not plain.losses:
        return _NOTHING
    difference = max(abs(mine - theirs) for mine, theirs in zip(row.losses, plain.losses, strict=True))
    return "none" if difference == 0 else f"{difference:.1e}"


def _remarks(rows: Sequence[Compared], mark: str) -> tuple[str, ...]:
    said = [f"{_title(row.way)}: {row.note.rstrip('.')}." for row in rows if row.note is not None]
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
