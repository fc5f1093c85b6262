"""The plan: what the planner decided, as frozen data that can be printed, compared, hashed, and kept as JSON."""

from memscale.execution_plan.plan import (
    ALLOWANCES,
    Checkpointing,
    FrontierPoint,
    LayerPlan,
    LossTiling,
    Offloading,
    OptimizerPlan,
    Plan,
    Precision,
    PredictionSource,
    Tier,
    Tiling,
)

__all__ = [
    "ALLOWANCES",
    "Checkpointing",
    "FrontierPoint",
    "LayerPlan",
    "LossTiling",
    "Offloading",
    "OptimizerPlan",
    "Plan",
    "Precision",
    "PredictionSource",
    "Tier",
    "Tiling",
]
