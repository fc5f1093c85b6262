"""The virtual GPU: train on a device that is not there."""

from memscale.simulator.simulate import Simulation, simulate

__all__ = ["Simulation", "simulate"]
