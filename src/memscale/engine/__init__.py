"""The decision engine: from a profile and a device to a plan, by rules, the same every time."""

from memscale.engine.engine import decide, plain_point, plan_of, points_of, room_of, usable

__all__ = ["decide", "plain_point", "plan_of", "points_of", "room_of", "usable"]
