"""A virtual GPU that computes, for tests of MemScale and for users' tests of their own training code.

`executing` runs code written for a device on a machine without one: operations give the numbers of the CPU, operands
on two devices raise, random numbers come from the device's own generator, and memory is limited as on a card.

Nothing in MemScale imports this package.
"""

from memscale.testing.executing import ExecutingDevice, executing

__all__ = ["ExecutingDevice", "executing"]
