"""The decision engine: from a profile and a device to a plan, by rules, the same every time."""

from memscale.planner.engine import (
    decide,
    has_plan_within,
    plain_point,
    plan_of,
    points_by_hand,
    points_of,
    room_of,
    unseen_bytes,
)
from memscale.planner.mixtures import mixed_seconds

__all__ = [
    "decide",
    "has_plan_within",
    "mixed_seconds",
    "plain_point",
    "plan_of",
    "points_by_hand",
    "points_of",
    "room_of",
    "unseen_bytes",
]
