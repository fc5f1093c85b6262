"""A plan with everything that a report shows, made by hand: no planning, and names that are markup."""

from __future__ import annotations

from memscale.execution_plan import (
    Checkpointing,
    FrontierPoint,
    LayerPlan,
    MemoryHolder,
    MemoryPhase,
    Offloading,
    OptimizerPlan,
    Plan,
    StepMemory,
    StepTime,
)

MARKUP = '<img src="x" onerror="throw 1">'
SCRIPT = "</script><script>throw 2</script><!--"
MIB = 1 << 20
CATEGORIES = ("weights", "gradients", "optimizer state", "activations", "temporary")
PHASES = (
    MemoryPhase("forward", 0),
    MemoryPhase("loss", 2),
    MemoryPhase("backward", 2),
    MemoryPhase("optimizer step", 4),
)


def step(scale: int) -> StepMemory:
    """Return six samples; the peak is the fourth. Sizes are such that rounding shows."""
    samples = (
        (scale, 0, 2 * scale, 1023, 0),
        (scale, 0, 2 * scale, 5 * scale + 4096, 0),
        (scale, scale // 3, 2 * scale, 9 * scale + 1, 1048575),
        (scale, scale // 2, 2 * scale, 8 * scale, 7 * scale),
        (scale, scale, 2 * scale, 0, 123_456_789),
        (scale, 0, 2 * scale, 0, 0),
    )
    holder = MemoryHolder(f"float32[8] by aten.mul.Tensor in {MARKUP} (forward)", "activations", 8 * scale)
    return StepMemory(CATEGORIES, samples, PHASES, 3, (holder,))


def shown_plan() -> Plan:
    """Return the plan."""
    plain, planned = step(300 * MIB), step(40 * MIB)
    peaks = [sum(each.samples[each.peak]) for each in (plain, planned)]
    blocks = [
        LayerPlan(
            f"h.{index}",
            (f"h.{index}",),
            ("offloading", "checkpointing"),
            "fastest",
            "recomputed instead",
            saved_bytes=11 * MIB,
            extra_seconds=0.002,
            checkpointing=Checkpointing(),
            offloading=Offloading(),
            recompute_flops=10**9,
        )
        for index in (0, 1, 2, 5)
    ]
    return Plan(
        layers=(
            LayerPlan(MARKUP, (MARKUP,), (), "nothing-to-save", SCRIPT),
            *blocks,
            LayerPlan(
                SCRIPT, (SCRIPT,), ("checkpointing",), "fastest", MARKUP, checkpointing=Checkpointing()
            ),
        ),
        device="A device (2.0 GiB)",
        batch="float32[4, 8]",
        baseline_peak_bytes=peaks[0],
        predicted_peak_bytes=peaks[1],
        predicted_time_ratio=1.5,
        baseline_seconds=0.2,
        step_time=StepTime(0.15, 0.05, 0.03, 0.02, 0.04, 0.01),
        host_bytes=700 * MIB,
        notes=(f"a note about {MARKUP}",),
        frontier=tuple(
            FrontierPoint(f"{count} blocks, {MARKUP}", size * MIB, time)
            for count, size, time in ((0, 5500, 1.0), (1, 2000, 1.2), (2, 760, 1.5), (4, 300, 2.0))
        ),
        optimizer=OptimizerPlan("host", 64 * MIB, rule="fastest", reason="in buckets"),
        peak_at=f"backward of {MARKUP}",
        baseline_memory=plain,
        predicted_memory=planned,
    )
