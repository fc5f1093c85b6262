"""Small training runs on the user's own device against the plain model, and its rates.

Note [Self-test]
Each row of `selftest` trains a small model with one setting on the user's own device and compares it with the plain
model. First the plain model is trained twice: where its kernels give the same numbers both times, losses and gradients
of the first step must be equal to the bit. On a CPU that holds for all steps. On an accelerator the steps after it are
held to `STEP_TOLERANCE`: parameters that are stepped on the host's CPU may be rounded otherwise than by the device.

The JSON form is also a file of `memscale.calibrate`. It has no paths, so that it can be attached to a bug report.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from memscale._util.terminal import Terminal, table
from memscale.api import detach, wrap
from memscale.config import Config, OptimizationMode
from memscale.diagnosis.environment import (
    Failed,
    Finding,
    Found,
    Skipped,
    doctor,
    make_row,
    torch_device,
    versions,
)
from memscale.execution_plan import Plan
from memscale.executor import executor_of
from memscale.hardware import Hardware
from memscale.hardware.calibrate import measure_calibration
from memscale.hardware.detect import detect_by_tables
from memscale.memory.tracker import MemoryTracker
from memscale.observe.report import Report
from memscale.units import format_bytes

STEPS = 3
STEP_TOLERANCE = 1e-4  # relative, of losses after the first step on an accelerator
LOSSY_TOLERANCE = 0.05  # relative, of losses with 16-bit products, 8-bit optimizer state and tiles
WIDTH, LAYERS, WORDS, BATCH, LENGTH = 64, 4, 256, 8, 64
LEARNING_RATE = 1e-3
FAILING_STEP = 1
# By which torch's allocator asks for memory: a small model may need one more or less.
SEGMENT_BYTES = 20 * 2**20


@dataclass(frozen=True)
class SelfTest:
    """What `selftest` found.

    Attributes:
        device: the device, as its driver names it, with its size.
        rows: the checks in the order they were made.
        environment: what `doctor` found.
        versions: of MemScale, Python, torch, the driver and optional libraries.
        calibration: what `memscale.calibrate` writes to its file; empty if rates could not be measured.
    """

    device: str
    rows: tuple[Finding, ...]
    environment: tuple[Finding, ...]
    versions: Mapping[str, str]
    calibration: Mapping[str, object]

    @property
    def passed(self) -> bool:
        """Return whether no check failed."""
        return all(row.status != "fail" for row in self.rows)

    def to_json(self) -> str:
        """Return everything as JSON without personal paths: for a bug report, and as a calibration file.

        Saved to a file that `MEMSCALE_CALIBRATION` names, its rates are those that plans are made with.
        """
        contents = {
            **self.calibration,
            "passed": self.passed,
            "versions": dict(self.versions),
            "rows": [_as_dict(row) for row in self.rows],
            "environment": [_as_dict(row) for row in self.environment],
        }
        return json.dumps(contents, indent=1)

    def explain(self, terminal: Terminal | None = None) -> str:
        """Return the rows as a table."""
        failed = sum(row.status == "fail" for row in self.rows)
        verdict = f"{failed} of {len(self.rows)} checks failed" if failed else "no check failed"
        cells = [(row.name, row.status, row.detail) for row in self.rows]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        title = f"Self-test on {self.device}: {verdict}"
        return table(title, ["check", "result", "detail"], cells, caption=versions, terminal=terminal)

    def __str__(self) -> str:
        return self.explain()


def _as_dict(row: Finding) -> dict[str, object]:
    figures = {"figures": dict(row.figures)} if row.figures else {}
    return {"name": row.name, "status": row.status, "detail": row.detail, **figures}


def selftest(
    device: torch.device | str | None = None,
    *,
    offload_dir: str | os.PathLike[str] | None = None,
    nbytes: int = 2**28,
    side: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> SelfTest:
    """Try MemScale on this machine: measure its rates, and train a small model with every technique against plain.

    It takes about a minute, and more on a busy machine. A check that fails does not stop the others. The result prints
    as a table; its `to_json` is what to attach to a bug report, and a calibration file. See Note [Self-test].

    Args:
        device: The device, as of `hardware.detect`: the machine's best one by default.
        offload_dir: The directory of the disk tier, if `Config(offload_dir=...)` names one.
        nbytes: The size of what is copied, stepped and written to measure rates, in bytes, as of `calibrate`.
        side: The number of rows and columns of matrices, as of `calibrate`.
        progress: Called after each check, with how many are done and how many there are.

    Raises:
        HardwareError: There is no such device, or the directory can't be one.

    Example:
        >>> found = selftest("cpu", nbytes=2**20, side=64)
        >>> found.passed
        True
    """
    hardware = detect_by_tables(device, offload_dir=offload_dir)
    checks = _Checks(hardware, offload_dir)
    where = checks.device
    with (
        torch.random.fork_rng([] if where.type == "cpu" else [where], device_type=where.type),
        torch.enable_grad(),
    ):
        checks.run(nbytes, side, progress or (lambda done, total: None))
    return SelfTest(
        device=hardware.device.describe(),
        rows=tuple(checks.rows),
        environment=doctor(device, offload_dir=offload_dir),
        versions=MappingProxyType(versions()),
        calibration=MappingProxyType(checks.calibration),
    )


class _Model(nn.Module):
    """A small transformer with dropout, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.fails_in_backward = False

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if self.fails_in_backward and number == LAYERS // 2:
                hidden.register_hook(_raise)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), words.flatten())


class _Intended(Exception):
    """What a backward pass fails with on purpose."""


def _raise(gradient: Tensor) -> None:
    raise _Intended


@dataclass(frozen=True)
class _Case:
    """A way to train the model. `config` is None for the plain model."""

    config: Config | None = None
    fused: bool = False
    scaler: bool = False
    fails: bool = False


@dataclass(frozen=True)
class _Trained:
    """What training came to, on the CPU; memory is in bytes, without what was in use before."""

    losses: list[float]
    gradients: list[Tensor]  # of the first step
    parameters: list[Tensor]
    scale: float | None  # of the gradient scaler
    memory: dict[str, float]
    plan: Plan | None
    report: Report | None


class _Checks:
    """The checks of a self-test, one after the other."""

    def __init__(self, hardware: Hardware, offload_dir: str | os.PathLike[str] | None) -> None:
        self.hardware, self.device = hardware, torch_device(hardware)
        self.rows: list[Finding] = []
        self.calibration: dict[str, Any] = {}
        self._config = Config(
            force_optimize=True,
            enable_logging=False,
            use_mixed_precision=False,
            use_8bit_optimizer=False,
            enable_tiling=False,
            fused_host_step=False,
            overlap_optimizer=False,  # it would plan anew after some steps
            offload_dir=offload_dir,
        )
        self._plain: dict[_Case, _Trained] = {}
        self._is_repeatable = True
        self._release_cache()
        self._before = self._memory_now()
        generator = torch.Generator().manual_seed(1)
        self._words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator).to(self.device)

    def run(self, nbytes: int, side: int | None, progress: Callable[[int, int], object]) -> None:
        """Make all checks."""
        aggressive = self._config.replace(mode=OptimizationMode.AGGRESSIVE)
        lossy = aggressive.replace(use_mixed_precision=True, use_8bit_optimizer=True, enable_tiling=True)
        memory: dict[str, float] = {}

        def after_plain() -> None:
            self._release_cache()
            memory.update(self._memory_now())

        checks: list[Callable[[], None]] = [
            lambda: self._check("rates", lambda: self._measure_rates(nbytes, side)),
            lambda: self._check("plain model, twice", self._train_twice),
            after_plain,
            *(
                partial(self._compare, str(mode), _Case(self._config.replace(mode=mode, async_offload=False)))
                for mode in OptimizationMode
            ),
            lambda: self._compare(
                "asynchronous transfers", _Case(aggressive.replace(async_offload=True)), moves=True
            ),
            lambda: self._compare("fused optimizer", _Case(aggressive, fused=True)),
            lambda: self._compare("GradScaler", _Case(aggressive, scaler=True)),
            lambda: self._compare("failed backward", _Case(aggressive, fails=True)),
            lambda: self._check(
                "16-bit products, 8-bit state, tiles", lambda: self._train_lossy(_Case(lossy))
            ),
            self._release_cache,
            lambda: self._check("memory after detach", lambda: self._what_is_left(memory)),
            lambda: self._check("context", self._context),
        ]
        for number, check in enumerate(checks, start=1):
            check()
            progress(number, len(checks))

    def _check(self, name: str, check: Callable[[], Found]) -> None:
        self.rows.append(make_row(name, check))

    # -- rates

    def _measure_rates(self, nbytes: int, side: int | None) -> tuple[str, dict[str, float]]:
        self.calibration = measure_calibration(self.hardware, nbytes, side)
        rates, disk = self.calibration["rates"], self.calibration["disk"]
        figures = {key: value for key, value in rates.items() if isinstance(value, float)}
        gigabytes = {
            "page-locked to the device": rates["h2d"],
            "and back": rates["d2h"],
            "pageable to the device": rates["pageable_h2d"],
            "pageable back": rates["pageable_d2h"],
            "memory": rates["memory_bandwidth"],
            "disk read": disk["read_bandwidth"],
            "disk written": disk["write_bandwidth"],
        }
        words = [f"{name} {rate / 1e9:.2f}" for name, rate in gigabytes.items() if rate is not None]
        fused, loop = (rates[f"host_adam_{kind}"] * 4e9 for kind in ("fused", "loop"))
        adam = f"{fused:.2f} fused, {loop:.2f} by torch's loop"
        return f"in GB/s: {', '.join(words)}; Adam on the host in ns a parameter: {adam}", figures

    def _context(self) -> tuple[str, dict[str, float]]:
        now = self._memory_now()
        if "driver" not in now:
            raise Skipped(f"{self.device.type} has none")
        size = now["driver"] - now["reserved"]
        words = "what the driver counts beside torch's memory, other processes included"
        return f"at most {format_bytes(int(size))}: {words}", {"context_bytes": size}

    # -- training

    def _train(self, case: _Case) -> _Trained:
        self._release_cache()
        torch.manual_seed(0)
        model = _Model().to(self.device)
        if case.config is not None:
            wrap(model, case.config, self._words)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=case.fused or None)
        scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**12) if case.scaler else None
        losses: list[float] = []
        gradients: list[Tensor] = []

        def train(step: int) -> None:
            if case.fails and step == FAILING_STEP:
                self._fail(model)
                optimizer.zero_grad()
            loss: Tensor = model(self._words)
            scaled = loss if scaler is None else scaler.scale(loss)
            if scaler is not None and step == FAILING_STEP:
                scaled = scaled * torch.inf  # which the scaler must find, and skip the step
            torch.autograd.backward(scaled)
            if scaler is not None:
                scaler.unscale_(optimizer)
            if not step:
                gradients.extend(_on_host(cast(Tensor, each.grad)) for each in model.parameters())
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())

        train(0)
        with self._peaks(model) as memory:
            for step in range(1, STEPS):
                train(step)
        executor = executor_of(model)
        plan, report = (None, None) if executor is None else (executor.plan, executor.report())
        if executor is not None:
            detach(model)
        parameters = [_on_host(each) for each in model.parameters()]
        scale = None if scaler is None else scaler.get_scale()
        return _Trained(losses, gradients, parameters, scale, memory, plan, report)

    def _fail(self, model: _Model) -> None:
        model.fails_in_backward = True
        try:
            torch.autograd.backward(model(self._words))
        except _Intended:
            return
        finally:
            model.fails_in_backward = False
        raise Failed("the exception that was raised in backward did not reach the caller")

    def _train_twice(self) -> str:
        first, second = self._plain_run(_Case()), self._train(_Case())
        self._is_repeatable = not _distance(
            [*first.losses, *first.gradients], [*second.losses, *second.gradients]
        )
        if self._is_repeatable:
            return "the same numbers both times: what follows must be equal to the bit"
        return "other numbers each time, by the device's kernels: what follows is compared within a tolerance"

    def _plain_run(self, case: _Case) -> _Trained:
        plain = replace(case, config=None)
        if plain not in self._plain:
            self._plain[plain] = self._train(plain)
        return self._plain[plain]

    def _compare(self, name: str, case: _Case, *, moves: bool = False) -> None:
        """Train with a config, compare with the plain model, and the memory with the prediction."""
        trained: list[_Trained] = []

        def numbers() -> str:
            plain = self._plain_run(case)
            trained.append(self._train(case))
            return self._same(trained[0], plain, moves)

        self._check(name, numbers)
        if not case.fused and not case.scaler:  # of which nothing else is predicted
            self._check(f"{name}: memory", lambda: self._as_predicted(trained))

    def _same(self, trained: _Trained, plain: _Trained, moves: bool) -> str:
        report = cast(Report, trained.report)
        if not report.bytes_read and (moves or not report.recomputations):
            raise Failed(f"nothing was {'moved' if moves else 'recomputed or moved'}: the plan did nothing")
        is_exact = self._is_repeatable and self.device.type == "cpu"
        losses = f"losses {trained.losses}, of the plain model {plain.losses}"
        first = _distance([trained.losses[0], *trained.gradients], [plain.losses[0], *plain.gradients])
        if not first <= (0 if self._is_repeatable else STEP_TOLERANCE):  # also if it is no number
            raise Failed(f"the first loss or its gradients differ by {first:.1e} ({losses})")
        if trained.scale != plain.scale:
            raise Failed(f"the scaler is at {trained.scale}, that of the plain model at {plain.scale}")
        later = _distance(trained.losses, plain.losses)
        if is_exact:
            later = max(later, _distance(trained.parameters, plain.parameters))
        if not later <= (0 if is_exact else STEP_TOLERANCE):
            raise Failed(f"later losses or parameters differ by {later:.1e} ({losses})")
        equal = (
            "equal to the bit" if not first + later else f"first step within {first:.0e}, later {later:.0e}"
        )
        moved = f"{format_bytes(report.bytes_read)} read, {format_bytes(report.bytes_written)} written"
        return f"losses and gradients: {equal}; {report.recomputations} recomputations, {moved}"

    def _train_lossy(self, case: _Case) -> str:
        trained, plain = self._train(case), self._plain_run(_Case())
        plan = cast(Plan, trained.plan)
        used = [] if plan.precision is None else [f"products in {plan.precision.dtype}"]
        used += ["8-bit optimizer state"] if plan.optimizer is not None and plan.optimizer.eight_bit else []
        used += ["loss in tiles"] if plan.loss is not None else []
        if not used:
            raise Skipped(f"the plan uses none of them: {'; '.join(plan.notes) or 'nothing to gain'}")
        apart = _distance(trained.losses, plain.losses)
        if not apart <= LOSSY_TOLERANCE:
            raise Failed(
                f"losses {trained.losses} differ by {apart:.1%} from {plain.losses} of the plain model"
            )
        return f"{', '.join(used)}: losses within {apart:.2%} of the plain model's"

    # -- memory

    @contextlib.contextmanager
    def _peaks(self, model: nn.Module) -> Iterator[dict[str, float]]:
        """Measure the peaks of a block, in which there is optimizer state; the result is filled in at its end."""
        found: dict[str, float] = {}
        if self.device.type == "cpu":
            with MemoryTracker(model, self._words) as tracker:
                yield found
            found["allocated"] = tracker.peak_bytes(self.device)
            return
        module = torch.get_device_module(self.device)
        module.reset_peak_memory_stats(self.device)
        yield found
        found["allocated"] = module.max_memory_allocated(self.device) - self._before["allocated"]
        found["reserved"] = module.max_memory_reserved(self.device) - self._before["reserved"]
        found["driver"] = self._memory_now()["driver"] - self._before["driver"]

    def _release_cache(self) -> None:
        gc.collect()  # models that an exception held on to
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            module.synchronize(self.device)
            module.empty_cache()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # none can be had
                # With each new block torch releases those that copies are done with.
                torch.empty(1, pin_memory=True)

    def _memory_now(self) -> dict[str, float]:
        """Return what is in use on an accelerator, in bytes."""
        if self.device.type == "cpu":
            return {}
        module = torch.get_device_module(self.device)
        free, total = module.mem_get_info(self.device)
        now = {
            "allocated": module.memory_allocated(self.device),
            "reserved": module.memory_reserved(self.device),
            "driver": total - free,
        }
        if self.device.type == "cuda":
            now["page-locked"] = torch.cuda.host_memory_stats().get("active_bytes.current", 0)
        return now

    def _as_predicted(self, trained: list[_Trained]) -> tuple[str, dict[str, float]]:
        if not trained:
            raise Skipped("it was not trained")
        plan = cast(Plan, trained[0].plan)
        figures: dict[str, float] = {
            "predicted": plan.predicted_peak_bytes,
            "allowance": plan.allowance_bytes,
        }
        if "reserved" in trained[0].memory:
            figures["predicted reserved"] = plan.predicted_reserved_bytes
        figures |= {"plain": plan.baseline_peak_bytes, **trained[0].memory}
        words = ", ".join(f"{name} {format_bytes(int(each))}" for name, each in figures.items())
        if figures["allocated"] > figures["predicted"] + figures["allowance"]:
            raise Failed(f"more was allocated than was predicted: {words}")
        if "reserved" in figures:
            most = figures["predicted reserved"] + figures["allowance"] + SEGMENT_BYTES
            if figures["reserved"] > most:
                raise Failed(f"torch's allocator reserved more than was predicted: {words}")
        return words, figures

    def _what_is_left(self, before: dict[str, float]) -> tuple[str, dict[str, float]]:
        """Compare what is in use after all techniques were detached with what was after the plain runs."""
        now = self._memory_now()
        left = {name: now[name] - nbytes for name, nbytes in before.items() if name != "driver"}
        if not left:
            raise Skipped(f"not measured on {self.device.type}")
        words = ", ".join(f"{name} {int(nbytes):+,} bytes" for name, nbytes in left.items())
        if max(left.values()) > 0:
            raise Failed(f"more than after the plain model: {words}")
        return f"no more than after the plain model: {words}", left


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _distance(some: Sequence[float | Tensor], others: Sequence[float | Tensor]) -> float:
    """Return the largest difference of two equal-sized lists, relative to the second; NaN if there is one."""
    pairs = ((torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(some, others, strict=True))
    apart = [
        0.0 if torch.equal(*pair) else float((pair[0] - pair[1]).norm() / pair[1].norm()) for pair in pairs
    ]
    return float(torch.tensor(apart).max())
