"""What ``wrap`` says: the hardware, the plan, and what it predicts."""

from __future__ import annotations

import logging

from memscale.execution_plan import Plan
from memscale.hardware import Hardware
from memscale.units import format_bytes


def say_plan(log: logging.Logger, plan: Plan, hardware: Hardware, occasion: str = "planned") -> None:
    """Log the hardware, the predicted peak before and after, the step-time ratio, and the plan as a table."""
    if not log.isEnabledFor(logging.INFO):
        return
    log.info("hardware: %s", hardware.summary())
    log.info(
        "%s (%s) for %s: peak %s → %s, step time × %.2f (%s)",
        occasion,
        plan.mode,
        plan.batch,
        format_bytes(plan.baseline_peak_bytes),
        format_bytes(plan.predicted_peak_bytes),
        plan.predicted_time_ratio,
        plan.prediction_source,
    )
    for note in plan.notes:
        log.warning("%s", note)
    log.info("%s", plan.explain(trades=False))
