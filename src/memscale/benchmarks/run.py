"""Run a case: on the virtual GPU, or on the CPU in a process of its own.

Note [Which steps are run]
Every case trains a model in fp32 with the default AdamW, in the loop of the tutorials:
`loss = model(...).loss`, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`. It takes two steps
to see the peak: only in the second one are activations and optimizer state alive together.

Note [The same work]
What is measured trains in a fresh process. In a comparison every case trains the same model from the same weights (a
file that is written first) on the same batch, in fp32 with the same learning rate. The generator is seeded anew before
the first step, so that dropout draws the same numbers. Of the seconds of a step, those of the fastest after the first
one count.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from memscale.benchmarks.peers import LEARNING_RATE, PEERS, PLAIN, loop
from memscale.benchmarks.results import Row
from memscale.config import Config, OptimizationMode
from memscale.errors import ConfigError, ProfileError, shown
from memscale.execution_plan import Plan, StepTime
from memscale.executor import Executor, executor_of
from memscale.hardware import GpuSpec, read_host, virtual_hardware
from memscale.hardware.calibrate import CALIBRATION_VARIABLE
from memscale.memory.process import measure_in_fresh_process, peak_rss_bytes, reset_peak_rss, rss_bytes
from memscale.offload.loading import load_safetensors
from memscale.planner.assembly import plain_time
from memscale.planner.make_plan import make_plan
from memscale.planner.predict import rehearsal
from memscale.profiler import Place, Sample, profile_model, sample_of
from memscale.simulator import simulate
from memscale.units import format_bytes

MODES: dict[str, Config | None] = {
    "none": None,
    **{mode.value: Config(mode=mode, enable_logging=False) for mode in OptimizationMode},
}
"""The modes there are, by name: without MemScale, and with what `wrap` does in each of its modes."""

BUDGET = "budget"
"""Beside `MODES`: what `wrap` does within a `memory_budget` of the peak that others published for the model."""

OURS = "memscale-"  # before the name of a mode: what a mode is called among peers
ENDLESS = 2**50
_WEIGHTS_SEED, _INPUTS_SEED, _TRAINING_SEED = 0, 1, 2


@dataclass(frozen=True)
class Case:
    """A model of the suite with a batch, and for how many steps it is trained."""

    model: BenchmarkModel
    batch: int
    seq: int | None  # None if the model's samples have one size
    steps: int = 2
    overlap: bool = True  # whether the loop lets optimizer steps overlap with backward

    @classmethod
    def of(
        cls, name: str, batch: int | None = None, seq: int | None = None, steps: int = 2, overlap: bool = True
    ) -> Case:
        """Return the case of a model by its name; the model's own batch where none is given."""
        model = find_model(name)
        batch = model.batch if batch is None else batch
        case = cls(model, batch, model.seq if seq is None else seq, steps, overlap)
        for field in ("batch", "seq", "steps"):
            value = getattr(case, field)
            if value is None:
                continue  # of a model whose samples have one size
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field}={shown(value)} is not allowed: give a whole number from 1 on.")
        model.check_length(case.seq)
        return case


@dataclass(frozen=True)
class Outcome:
    """What a case needed, in the fields of its row; `peak_bytes` is None, and `note` says why, if it did not fit."""

    peak_bytes: int | None
    host_bytes: int = 0
    disk_bytes: int = 0
    step_seconds: float | None = None
    note: str | None = None
    time_ratio: float | None = None  # predicted; measured ones come from the seconds
    step_time: StepTime | None = None  # estimated; of those that are measured, none
    cpu_seconds: float | None = None
    later_peak_bytes: int | None = None
    losses: tuple[float, ...] = ()


def run_suite(
    models: Iterable[str],
    modes: Iterable[str] = ("none",),
    *,
    on: str = "RTX 3090",
    batch: int | None = None,
    seq: int | None = None,
    steps: int = 2,
    overlap: bool = True,
    known: Sequence[Row] = (),
) -> Iterator[Row]:
    """Run every model in every mode, one after the other; a row comes as soon as it is there.

    A case that fails or does not fit is a row that says so. One that is in `known` comes from there.

    All arguments are checked before anything runs: names in `MODELS` and `MODES`, or `BUDGET`, the name of a GPU or a
    size to simulate (or "cpu" to train for real), samples in a batch and tokens in a sample (the model's own by
    default), training steps. `overlap` is whether optimizer steps may overlap with backward, as in a loop that leaves
    gradients alone.

    Raises:
        ConfigError: A model, mode or number is not allowed.
        HardwareError: No GPU is known by that name.
        MissingPackageError: transformers is not installed.

    Example:
        >>> (row,) = run_suite(["gpt2-tiny"], on="1GiB")
        >>> row.source, row.mode, row.reduction
        ('simulated', 'none', 0.0)
    """
    device = find_device(on)
    cases = [Case.of(name, batch, seq, steps, overlap) for name in models]
    wanted = list(modes)
    for mode in wanted:
        if mode not in (*MODES, BUDGET):
            raise unknown_name("mode", mode, (*MODES, BUDGET))
        for case in cases:
            config_of(case, mode)
    return _rows(cases, wanted, on.strip(), device, {row.key: row for row in known})


def config_of(case: Case, mode: str) -> Config | None:
    """Return the Config of a mode for a case; raise a ConfigError if there is no published peak to be its budget."""
    config = MODES.get(mode, Config(enable_logging=False))
    if config is None:
        return None
    published = case.model.published
    if mode == BUDGET:
        if published is None:
            raise ConfigError(
                f"Mode {BUDGET} takes the published peak of a model, and {case.model.name} has none: leave it out."
            )
        config = config.replace(memory_budget=f"{published.peak_gib}GiB")
    # The suite's loop leaves gradients alone, so that steps would overlap with backward after the warm-up.
    return config.replace(overlap_optimizer=case.overlap, warmup_steps=0)


def _rows(
    cases: list[Case], modes: list[str], on: str, device: Device, done: Mapping[tuple[object, ...], Row]
) -> Iterator[Row]:
    def outcome(case: Case, mode: str) -> Outcome:
        if device is not None:
            return simulated_mode(case, mode, device)
        return measured(case, PLAIN if mode == "none" else f"{OURS}{mode}")

    for case in cases:
        empty = empty_row(case, "none", on, device)
        plain = done.get(empty.key)
        # Whatever the mode: the others are relative to it.
        baseline = plain and Outcome(plain.peak_bytes, step_seconds=plain.step_seconds)
        for mode in modes:
            row = replace(empty, mode=mode)
            if row.key in done:
                yield done[row.key]
                continue
            baseline = baseline or outcome(case, "none")
            found = baseline if mode == "none" else outcome(case, mode)
            reduction = 0.0 if mode == "none" else _reduction(found, baseline)
            ratio = 1.0 if mode == "none" else _ratio(found, baseline)
            found = replace(found, time_ratio=ratio)
            yield replace(row, baseline_bytes=baseline.peak_bytes, reduction=reduction, **vars(found))


def empty_row(case: Case, mode: str, on: str, device: Device) -> Row:
    """Return the row of a case that was not run yet."""
    with torch.device("meta"):
        params = sum(parameter.numel() for parameter in case.model.build().parameters())
    return Row(
        model=case.model.name,
        params=params,
        batch=case.batch,
        seq=case.seq,
        mode=mode,
        on=on,
        source="measured" if device is None else "simulated",
        steps=case.steps,
        overlap=case.overlap,
    )


def _reduction(found: Outcome, baseline: Outcome) -> float | None:
    if found.peak_bytes is None or baseline.peak_bytes is None:
        return None
    return round(1 - found.peak_bytes / baseline.peak_bytes, 4)


def _ratio(found: Outcome, baseline: Outcome) -> float | None:
    if found.step_seconds is None or baseline.step_seconds is None:
        return found.time_ratio
    return round(found.step_seconds / baseline.step_seconds, 3)


def _train(model: nn.Module, inputs: dict[str, Tensor], steps: int) -> None:
    """Train on a simulated device. See Note [Which steps are run]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with quiet_transformers():
        for _ in range(steps):
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def simulated_mode(case: Case, mode: str, device: GpuSpec | int) -> Outcome:
    """Return what a case needs on a virtual GPU; if it fails or does not fit, with the reason as a note."""
    try:
        found = _simulate(case, mode, device)
        if found.peak_bytes is not None:
            return found
        # Once more on a device without end, to say what it would take.
        endless = replace(device, memory_bytes=ENDLESS) if isinstance(device, GpuSpec) else ENDLESS
        needed = _simulate(case, mode, endless).peak_bytes or 0
    except Exception as error:  # a row: the cases after it are run all the same
        return Outcome(None, note=f"failed: {reason(repr(error))}")
    capacity = device.memory_bytes if isinstance(device, GpuSpec) else device
    has = format_bytes(capacity)
    if needed > capacity:
        note = f"does not fit: needs {format_bytes(needed)}, has {has}"
    else:  # the allocator also holds pieces that it could put to no use
        note = f"does not fit: uses {format_bytes(needed)}, and more than {has} with the gaps"
    return replace(found, note=note)


def _simulate(case: Case, mode: str, device: GpuSpec | int) -> Outcome:
    config = config_of(case, mode)
    plan = None if config is None else _plan(case, config, device)
    step_time = _plain_time(case, device) if plan is None else plan.step_time
    try:
        with simulate(device) as simulation:
            model = case.model.build()
            if plan is None:
                model.to(simulation.device)
            else:
                Executor(model, plan, config, device=simulation.device).attach()
            inputs = case.model.inputs(case.batch, case.seq, simulation.device)
            simulation.tracker.reset_peak()  # the host held the weights until now, which is not training
            _train(model, inputs, case.steps)
        ratio = None if plan is None else round(plan.predicted_time_ratio, 3)
        return Outcome(
            simulation.peak_bytes,
            host_bytes=simulation.host_peak_bytes,
            time_ratio=ratio,
            step_time=step_time,
        )
    except torch.OutOfMemoryError:
        return Outcome(None, step_time=step_time if plan is None else None)
    finally:
        gc.collect()  # modules and autograd graphs are cycles: the next case starts without this one's


def _plan(case: Case, config: Config, device: GpuSpec | int) -> Plan:
    """Return what `wrap` would do on that device; the model is on the meta device."""
    model, sample = _on_meta(case)
    return make_plan(model, sample, config, virtual_hardware(device))


def _plain_time(case: Case, device: GpuSpec | int) -> StepTime:
    """Return the estimated time of a step without MemScale, to which ratios are relative."""
    model, sample = _on_meta(case)
    hardware = virtual_hardware(device)
    with rehearsal(model):
        profile = profile_model(model, sample, Place.of(hardware.device))
    return plain_time(profile, hardware, Config())


def _on_meta(case: Case) -> tuple[nn.Module, Sample]:
    with torch.device("meta"):
        model = case.model.build()
        return model, sample_of(case.model.inputs(case.batch, case.seq))


def measured(case: Case, way: str, weights: Path | None = None) -> Outcome:
    """Return what a case needs in a fresh process, in the way of a peer or of a mode, from the weights of a file."""
    peer = PEERS.get(way)
    if peer is not None:
        # Not left to the system to find out: it may kill another process than this one.
        available = read_host().available_ram_bytes
        needed = predicted_on_cpu(case) + rss_bytes()  # the other process has the same libraries
        if needed > available:
            size = f"the plain step needs {format_bytes(needed)}, {format_bytes(available)} free"
            return Outcome(None, note=f"not run: {size}")
    imports = (*case.model.modules, *(peer.modules if peer is not None else ()))
    try:
        if weights is not None and not weights.exists():
            measure_in_fresh_process(write_weights, case, weights)
        found = measure_in_fresh_process(measured_case, case, way, weights, imports=imports)
    except ProfileError as error:
        if "SIGKILL" in str(error):
            return Outcome(None, note="does not fit: the process was killed, mostly a sign of no memory")
        return Outcome(None, note=f"failed: {reason(str(error))}")
    run = found.result
    timed = run.seconds[1:] or run.seconds  # the first step also pays for warming up
    fastest = min(range(len(timed)), key=timed.__getitem__)
    return Outcome(
        max(run.first_peak_bytes, found.peak_bytes) - found.baseline_bytes,
        later_peak_bytes=found.peak_bytes - found.baseline_bytes,
        disk_bytes=run.disk_bytes,
        step_seconds=round(timed[fastest], 4),
        cpu_seconds=round((run.cpu_seconds[1:] or run.cpu_seconds)[fastest], 4),
        losses=run.losses,
        note=peer.remark if peer is not None else None,
    )


def reason(error: str) -> str:
    """Return the last line of a traceback, without the places of files on this machine."""
    line = [each for each in error.strip().splitlines() if each.strip()][-1].strip()
    line = re.sub(r"(?<![\w.])/[\w./-]+/", "", line)
    return line if len(line) <= 200 else f"{line[:199]}…"


@functools.lru_cache(maxsize=1)  # a comparison asks for each of its peers
def predicted_on_cpu(case: Case) -> int:
    """Return the tensor bytes at the peak of the plain case."""
    try:
        with simulate(ENDLESS, device="cpu") as simulation:
            # See Note [Which steps are run]: more than two would show no other peak.
            _train(case.model.build(), case.model.inputs(case.batch, case.seq), min(case.steps, 2))
        return simulation.peak_bytes
    finally:
        gc.collect()


@dataclass(frozen=True)
class _Run:
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    disk_bytes: int
    first_peak_bytes: int  # of the process, up to the end of the first step


def write_weights(case: Case, path: Path) -> None:
    """Write random weights of a model, with which every case of a comparison begins; in a fresh process."""
    from safetensors.torch import save_model

    torch.manual_seed(_WEIGHTS_SEED)
    save_model(case.model.build(), str(path))


def measured_case(case: Case, way: str, weights: Path | None = None) -> _Run:
    """Train a case for real, in a fresh process. See Note [The same work].

    A model that is wrapped is built on the meta device, so that the peak is that of training, and not of building the
    model in memory.
    """
    os.environ[CALIBRATION_VARIABLE] = "none"  # results are to be compared between machines
    torch.manual_seed(_WEIGHTS_SEED)
    with torch.device("cpu" if way in PEERS else "meta"):
        model = case.model.build()
    if weights is not None:
        load_safetensors(model, weights)
    torch.manual_seed(_INPUTS_SEED)  # on the meta device, building draws nothing
    inputs = case.model.inputs(case.batch, case.seq)
    with quiet_transformers():
        if way in PEERS:
            step = PEERS[way].prepare(model)
        else:
            wrap(model, config_of(case, way.removeprefix(OURS)), inputs)
            step = loop(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))
    torch.manual_seed(_TRAINING_SEED)
    losses, seconds, cpu = [], [], []
    first_peak = 0
    with quiet_transformers(), disk_watch(model) as on_disk:
        for number in range(case.steps):
            if number == 1:
                first_peak = peak_rss_bytes()
                reset_peak_rss()
            start, start_cpu = time.perf_counter(), time.process_time()
            losses.append(float(step(inputs)))
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    return _Run(tuple(losses), tuple(seconds), tuple(cpu), max(on_disk), first_peak)


@contextlib.contextmanager
def disk_watch(model: nn.Module) -> Iterator[list[int]]:
    """Note the bytes that a wrapped model has on disk after each optimizer step; 0 at first, and of a plain one."""
    executor = executor_of(model)
    on_disk = [0]

    def note(*_: object) -> None:  # neither gradients nor state have gone yet
        on_disk.append(0 if executor is None else executor.bytes_on_disk)

    watch = register_optimizer_step_post_hook(note)
    try:
        yield on_disk
    finally:
        watch.remove()
