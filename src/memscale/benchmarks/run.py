"""Run a case: on the virtual GPU, or on the CPU in a process of its own.

Note [Which steps are run]
Every case trains a model in fp32 with the default AdamW, in the loop of the tutorials:
`loss = model(...).loss`, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. It takes two steps
to see the peak: only in the second one are activations and optimizer state alive together.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memscale.api import wrap
from memscale.benchmarks.models import (
    BenchmarkModel,
    Device,
    find_device,
    find_model,
    quiet_transformers,
    unknown_name,
)
from memscale.benchmarks.results import Row, Source
from memscale.config import Config, OptimizationMode
from memscale.errors import ConfigError, ProfileError, shown
from memscale.execution_plan import Plan
from memscale.executor import Executor, executor_of
from memscale.hardware import GpuSpec, read_host, virtual_hardware
from memscale.memory.process import measure_in_fresh_process, rss_bytes
from memscale.memory.tracker import MemoryTracker
from memscale.planner.make_plan import make_plan
from memscale.profiler import sample_of
from memscale.simulator import Simulation, simulate
from memscale.units import format_bytes

__all__ = ["MODES", "Case", "run_case", "run_suite"]

MODES: dict[str, Config | None] = {
    "none": None,
    **{mode.value: Config(mode=mode, enable_logging=False) for mode in OptimizationMode},
}
"""The modes there are, by name: without MemScale, and with what `wrap` does in each of its modes."""

_ENDLESS = 2**50
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A model of the suite with a batch, and for how many steps it is trained."""

    model: BenchmarkModel
    batch: int
    seq: int
    steps: int = 2

    @classmethod
    def of(cls, name: str, batch: int | None = None, seq: int | None = None, steps: int = 2) -> Case:
        """Return the case of a model by its name; the model's own batch where none is given.

        Raises:
            ConfigError: There is no such model, a number is below 1, or the samples are too long for it.

        Example:
            >>> case = Case.of("gpt2-medium", batch=2)
            >>> case.batch, case.seq, case.steps
            (2, 512, 2)
        """
        model = find_model(name)
        case = cls(
            model, model.batch if batch is None else batch, model.seq if seq is None else seq, steps=steps
        )
        for field in ("batch", "seq", "steps"):
            value = getattr(case, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field}={shown(value)} is not allowed: give a whole number from 1 on.")
        model.check_length(case.seq)
        return case


@dataclass(frozen=True)
class _Outcome:
    """What a case needed; `peak_bytes` is None, and `note` says why, if it did not fit."""

    params: int
    peak_bytes: int | None
    host_bytes: int = 0
    disk_bytes: int = 0
    step_seconds: float | None = None
    tensor_bytes: int | None = None
    note: str | None = None
    time_ratio: float | None = None  # predicted; measured ones come from the seconds


def run_case(
    model: str,
    *,
    mode: str = "none",
    on: str = "RTX 3090",
    batch: int | None = None,
    seq: int | None = None,
    steps: int = 2,
    tensor_bytes: bool = False,
) -> Row:
    """Run one model in one mode on one device; the arguments are those of :func:`run_suite`.

    Example:
        >>> row = run_case("gpt2-tiny", on="1GiB")
        >>> row.source, row.mode, row.reduction
        ('simulated', 'none', 0.0)
    """
    (row,) = run_suite([model], [mode], on=on, batch=batch, seq=seq, steps=steps, tensor_bytes=tensor_bytes)
    return row


def run_suite(
    models: Iterable[str],
    modes: Iterable[str] = ("none",),
    *,
    on: str = "RTX 3090",
    batch: int | None = None,
    seq: int | None = None,
    steps: int = 2,
    tensor_bytes: bool = False,
) -> Iterator[Row]:
    """Run every model in every mode, one after the other; a row comes as soon as it is there.

    All arguments are checked before anything runs.

    Args:
        models: Names in `MODELS`.
        modes: Names in `MODES`.
        on: The name of a GPU or a size to simulate, or "cpu" to train for real.
        batch: Samples in a batch; the model's own default if None.
        seq: Tokens in a sample; the model's own default if None.
        steps: Training steps of each case.
        tensor_bytes: On the CPU, run each case once more to count the bytes of its tensors.

    Raises:
        ConfigError: A model, mode or number is not allowed.
        HardwareError: No GPU is known by that name.
        MissingPackageError: transformers is not installed.
    """
    device = find_device(on)
    cases = [Case.of(name, batch, seq, steps) for name in models]
    wanted = list(modes)
    for mode in wanted:
        if mode not in MODES:
            raise unknown_name("mode", mode, MODES)
    return _rows(cases, wanted, on.strip(), device, tensor_bytes)


def _rows(cases: list[Case], modes: list[str], on: str, device: Device, tensor_bytes: bool) -> Iterator[Row]:
    source: Source = "measured" if device is None else "simulated"

    def outcome(case: Case, mode: str) -> _Outcome:
        if device is None:
            return _measured(case, mode, tensor_bytes)
        return _simulated(case, mode, device)

    for case in cases:
        baseline = outcome(case, "none")  # whatever the mode: the others are relative to it
        for mode in modes:
            found = baseline if mode == "none" else outcome(case, mode)
            yield Row(
                model=case.model.name,
                params=found.params,
                batch=case.batch,
                seq=case.seq,
                mode=mode,
                on=on,
                source=source,
                baseline_bytes=baseline.peak_bytes,
                peak_bytes=found.peak_bytes,
                host_bytes=found.host_bytes,
                disk_bytes=found.disk_bytes,
                reduction=0.0 if mode == "none" else _reduction(found.peak_bytes, baseline.peak_bytes),
                time_ratio=1.0 if mode == "none" else _ratio(found, baseline),
                note=found.note,
                tensor_bytes=found.tensor_bytes,
            )


def _reduction(peak: int | None, baseline: int | None) -> float | None:
    return None if peak is None or baseline is None else round(1 - peak / baseline, 4)


def _ratio(found: _Outcome, baseline: _Outcome) -> float | None:
    if found.step_seconds is None or baseline.step_seconds is None:
        return None if found.time_ratio is None else round(found.time_ratio, 3)
    return round(found.step_seconds / baseline.step_seconds, 3)


# ---------------------------------------------------------------------- the steps


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _train(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> list[float]:
    """Train, and return the seconds of each step. See Note [Which steps are run]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    seconds = []
    with quiet_transformers():
        for _ in range(steps):
            start = time.perf_counter()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
    return seconds


# ---------------------------------------------------------------------- simulated


def _simulated(case: Case, mode: str, device: GpuSpec | int) -> _Outcome:
    found = _simulate(case, mode, device)
    if found.peak_bytes is not None:
        return found
    # Once more on a device without end, to say what it would take.
    endless = replace(device, memory_bytes=_ENDLESS) if isinstance(device, GpuSpec) else _ENDLESS
    needed = _simulate(case, mode, endless).peak_bytes or 0
    capacity = device.memory_bytes if isinstance(device, GpuSpec) else device
    return replace(found, note=_does_not_fit(needed, capacity))


def _does_not_fit(needed: int, capacity: int) -> str:
    if needed > capacity:
        return f"does not fit: needs {format_bytes(needed)}, has {format_bytes(capacity)}"
    # The allocator also holds pieces that it could put to no use.
    return f"does not fit: uses {format_bytes(needed)}, and more than {format_bytes(capacity)} with the gaps"


def _simulate(case: Case, mode: str, device: GpuSpec | int) -> _Outcome:
    params = 0
    plan = _plan(case, mode, device)
    try:
        with simulate(device) as simulation:
            model = case.model.build()
            params = _parameters(model)
            _simulated_steps(case, plan, model, simulation)
        return _Outcome(
            params,
            simulation.peak_bytes,
            host_bytes=simulation.host_peak_bytes,
            time_ratio=None if plan is None else plan.predicted_time_ratio,
        )
    except torch.OutOfMemoryError:
        return _Outcome(params, None)
    finally:
        gc.collect()  # modules and autograd graphs are cycles: the next case starts without this one's


def _plan(case: Case, mode: str, device: GpuSpec | int) -> Plan | None:
    """Return what `wrap` would do on that device; the model is on the meta device."""
    config = MODES[mode]
    if config is None:
        return None
    with torch.device("meta"), quiet_transformers():
        model = case.model.build()
        inputs = case.model.inputs(case.batch, case.seq)
    return make_plan(model, sample_of(inputs), config, virtual_hardware(device))


def _simulated_steps(case: Case, plan: Plan | None, model: nn.Module, simulation: Simulation) -> None:
    if plan is None:
        model.to(simulation.device)
    else:
        Executor(model, plan, device=simulation.device).attach()
    inputs = case.model.inputs(case.batch, case.seq, simulation.device)
    simulation.tracker.reset_peak()  # the host held the weights until now, which is not training
    _train(model, inputs, case.steps)


# ---------------------------------------------------------------------- measured


def _measured(case: Case, mode: str, tensor_bytes: bool) -> _Outcome:
    params, needed = _predicted_on_cpu(case)
    if mode == "none":
        # Not left to the system to find out: it may kill another process than this one.
        available = read_host().available_ram_bytes
        needed += rss_bytes()  # the other process holds the same libraries as this one
        if needed > available:
            note = f"does not fit: needs {format_bytes(needed)}, {format_bytes(available)} free; not run"
            return _Outcome(params, None, note=note)
    arguments = (case.model.name, case.batch, case.seq, case.steps, mode)
    try:
        measured = measure_in_fresh_process(measured_steps, *arguments, imports=case.model.modules)
        tracked = None
        if tensor_bytes:
            tracked = measure_in_fresh_process(tracked_steps, *arguments, imports=case.model.modules).result
    except ProfileError as error:
        if "SIGKILL" not in str(error):
            raise
        return _Outcome(params, None, note="does not fit: the process was killed, mostly a sign of no memory")
    # The first step also pays for warming up.
    *seconds, on_disk = measured.result
    return _Outcome(
        params,
        measured.peak_above_import_bytes,
        step_seconds=median(seconds[1:] or seconds),
        tensor_bytes=tracked,
        disk_bytes=int(on_disk),
    )


def _predicted_on_cpu(case: Case) -> tuple[int, int]:
    """Return the parameters, and the tensor bytes at the peak of the plain case."""
    try:
        with simulate(_ENDLESS, device="cpu") as simulation:
            model = case.model.build()
            params = _parameters(model)
            _train(model, case.model.inputs(case.batch, case.seq), case.steps)
        return params, simulation.peak_bytes
    finally:
        gc.collect()


def measured_steps(name: str, batch: int, seq: int, steps: int, mode: str) -> list[float]:
    """Train a case for real, in a fresh process; return the seconds of each step, and the bytes on disk.

    A model that is wrapped is described first, and gets its weights afterwards: so the peak is that of the whole
    process, and not of building the model in memory.
    """
    case = Case.of(name, batch, seq, steps)
    config = MODES[mode]
    with torch.device("cpu" if config is None else "meta"):
        torch.manual_seed(0)
        model = case.model.build()
    inputs = case.model.inputs(batch, seq)
    on_disk = [0]
    if config is not None:
        torch.manual_seed(0)
        wrap(model, config, inputs)
    executor = executor_of(model)

    def note(*_: object) -> None:  # neither gradients nor state have gone yet
        on_disk.append(0 if executor is None else executor.bytes_on_disk)

    watch = register_optimizer_step_post_hook(note)
    try:
        seconds = _train(model, inputs, steps)
    finally:
        watch.remove()
    return [*seconds, float(max(on_disk))]


def tracked_steps(name: str, batch: int, seq: int, steps: int, mode: str) -> int:
    """Do the same under the tracker, and return the peak of tensor bytes."""
    with MemoryTracker() as tracker:
        measured_steps(name, batch, seq, steps, mode)
    return tracker.peak_bytes("cpu")
