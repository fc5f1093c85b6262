"""Predicted peaks against the peaks of the training they were predicted for.

Note [Observed peaks]
~~~~~~~~~~~~~~~~~~~~~
A model is wrapped as users wrap it and trained for three steps: `zero_grad(set_to_none=True)`, forward, backward,
AdamW. The learning rate is one of a warm-up: where shapes depend on data (which experts a router hits), they change
with the weights, and a prediction knows those of now.

The observed peak is that of the second step and later ones (Note [The step that is predicted]). On the
executing virtual GPU it is what its allocator had in use, workspaces included ("executed"); on the CPU it is the
bytes of all tensors, by `MemoryTracker` ("measured").
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from memscale.api import wrap
from memscale.benchmarks.models import quiet_transformers
from memscale.benchmarks.run import MODES
from memscale.execution_plan import Plan
from memscale.executor import executor_of
from memscale.memory.tracker import MemoryTracker
from memscale.testing import executing
from tests.support.families import SMALL_FAMILIES, Batch, Family

__all__ = ["BOUNDS", "DEVICES", "Device", "PredictionCase", "PredictionRow", "run_cases"]

Device: TypeAlias = Literal["vgpu", "cpu"]
DEVICES: tuple[Device, ...] = ("vgpu", "cpu")

BOUNDS: dict[Device, float] = {"vgpu": 0.01, "cpu": 0.03}
"""How far an observed peak may be from the predicted one, as a share of that."""

STEPS = 3
CAPACITY = "8GiB"
LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class PredictionCase:
    """A model of the small ones with a batch, in a mode, on a device."""

    family: str
    mode: str
    batch: int
    device: Device


@dataclass(frozen=True)
class PredictionRow:
    """What was predicted of a case, and what was observed.

    Attributes:
        family: of the model.
        mode: the optimization mode.
        batch: samples.
        device: "vgpu", the executing virtual GPU, or "cpu".
        prediction: how the peak was predicted: "simulated", "measured" or "estimated".
        predicted_bytes: the plan's peak.
        allowance_bytes: what the plan leaves for what it does not know.
        observation: "executed" or "measured".
        observed_bytes: see Note [Observed peaks].
    """

    family: str
    mode: str
    batch: int
    device: Device
    prediction: str
    predicted_bytes: int
    allowance_bytes: int
    observation: Literal["executed", "measured"]
    observed_bytes: int

    @property
    def error(self) -> float:
        """By how much more was needed than predicted, as a share of that."""
        return (self.observed_bytes - self.predicted_bytes) / self.predicted_bytes

    @property
    def holds(self) -> bool:
        """Whether the prediction is within its bound, and its allowance covers what it was short of."""
        enough = self.observed_bytes <= self.predicted_bytes + self.allowance_bytes
        return abs(self.error) <= BOUNDS[self.device] and (enough or self.device == "cpu")

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "error": round(self.error, 6)}


def run_cases(cases: Sequence[PredictionCase]) -> Iterator[PredictionRow]:
    """Train every case; a row comes as soon as it is there."""
    for case in cases:
        yield _row(case)
        gc.collect()  # modules and autograd graphs are cycles: the next case starts without this one's


def _row(case: PredictionCase) -> PredictionRow:
    model = SMALL_FAMILIES[case.family]
    torch.manual_seed(0)
    with quiet_transformers():
        plan, peak = (_executed if case.device == "vgpu" else _measured)(model, case)
    return PredictionRow(
        family=case.family,
        mode=case.mode,
        batch=case.batch,
        device=case.device,
        prediction=plan.prediction_source,
        predicted_bytes=plan.predicted_peak_bytes,
        allowance_bytes=plan.allowance_bytes,
        observation="executed" if case.device == "vgpu" else "measured",
        observed_bytes=peak,
    )


def _executed(model: Family, case: PredictionCase) -> tuple[Plan, int]:
    with executing(CAPACITY) as gpu:
        built = model.build().to(gpu.device)
        batch = model.batch(gpu.device, case.batch)
        plan = _wrapped(built, batch, case.mode)
        peak = _peak_of_training(model, built, batch, gpu.tracker, gpu.device)
    return plan, peak


def _measured(model: Family, case: PredictionCase) -> tuple[Plan, int]:
    built = model.build()
    batch = model.batch(batch_size=case.batch)
    plan = _wrapped(built, batch, case.mode)
    tensors = batch.values() if isinstance(batch, dict) else batch
    with MemoryTracker(built, *tensors) as tracker:
        peak = _peak_of_training(model, built, batch, tracker, torch.device("cpu"))
    return plan, peak


def _wrapped(model: nn.Module, batch: Batch, mode: str) -> Plan:
    wrap(model, MODES[mode], batch)
    executor = executor_of(model)
    assert executor is not None  # it was wrapped
    return executor.plan


def _peak_of_training(
    model: Family, built: nn.Module, batch: Batch, tracker: MemoryTracker, device: torch.device
) -> int:
    optimizer = torch.optim.AdamW(built.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(built, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 0:
            tracker.reset_peak()
    return tracker.peak_bytes(device)
