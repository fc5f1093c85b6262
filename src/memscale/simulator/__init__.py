"""The virtual GPU: train on a device that is not there."""

from memscale.simulator.executing import ExecutingDevice, executing
from memscale.simulator.simulate import Simulation, simulate

__all__ = ["ExecutingDevice", "Simulation", "executing", "simulate"]
