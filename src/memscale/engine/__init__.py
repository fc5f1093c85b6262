"""The decision engine: from a profile and a device to a plan, by rules, the same every time."""

from memscale.engine.engine import (
    decide,
    fastest_seconds,
    has_plan_within,
    least_by_hand,
    plain_point,
    plan_of,
    points_of,
    room_of,
)

__all__ = [
    "decide",
    "fastest_seconds",
    "has_plan_within",
    "least_by_hand",
    "plain_point",
    "plan_of",
    "points_of",
    "room_of",
]
