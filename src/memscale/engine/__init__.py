"""The decision engine: from a profile and a device to a plan, by rules, the same every time."""

from memscale.engine.engine import decide, room_of

__all__ = ["decide", "room_of"]
