"""The executing virtual GPU: true numerics under a device label, for tests."""

from memscale.testing.executing import ExecutingDevice, executing

__all__ = ["ExecutingDevice", "executing"]
