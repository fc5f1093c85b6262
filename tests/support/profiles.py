"""Profiles made by hand, for tests of the planner."""

from __future__ import annotations

from memscale import Config, OptimizationMode
from memscale.hardware import Hardware, virtual_hardware
from memscale.planner.cost_model import Point
from memscale.planner.decide import frontier_points
from memscale.planner.settings import NOTHING
from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile

MIB = 2**20
GFLOP = 10**9
LARGE = virtual_hardware("A100-80GB")


def config_of(mode: OptimizationMode = OptimizationMode.BALANCED, **given) -> Config:
    return Config(mode=mode, **{"enable_offloading": False, **given})


def block(name: str = "layers.0", **given) -> BlockProfile:
    """A layer of a stack that keeps 100 MiB, of which one product is a tenth and most of the work."""
    container, _, index = name.rpartition(".")
    values = {
        "container": container,
        "members": (name,),
        "role": "repeated",
        "calls": 1,
        "order": int(index) if index.isdigit() else 0,
        "parameter_bytes": 4 * MIB,
        "saved_bytes": 100 * MIB,
        "boundary_bytes": 10 * MIB,
        "output_bytes": 10 * MIB,
        "forward_peak_bytes": 120 * MIB,
        "backward_peak_bytes": 30 * MIB,
        "forward_flops": 100 * GFLOP,
        "backward_flops": 200 * GFLOP,
        "forward_traffic": 200 * MIB,
        "backward_traffic": 400 * MIB,
        "has_own_checkpointing": False,
        "changes_input": False,
        "ops": (OpProfile("aten.addmm.default#0", 80 * GFLOP, 10 * MIB),),
    } | given
    size = values["parameter_bytes"]
    trained = {"gradient_bytes": size, "optimizer_bytes": 2 * size, "used_bytes": size}
    return BlockProfile(name=name, **{**trained, **values})


def profile_of(*blocks: BlockProfile, **given) -> ModelProfile:
    parameters = sum(each.parameter_bytes for each in blocks)
    values = {
        "source": "static",
        "reason": "as an example",
        "batch": "float32[1]",
        "parameter_bytes": parameters,
        "gradient_bytes": parameters,
        "largest_gradient_bytes": max(each.gradient_bytes for each in blocks),
        "optimizer_bytes": 2 * parameters,
        "resident_bytes": MIB,
        "other_saved_bytes": 0,
        "loss_peak_bytes": MIB,
        "tail_peak_bytes": MIB,
        "other_flops": GFLOP,
        "other_traffic": MIB,
    }
    return ModelProfile(blocks=blocks, **{**values, **given})


def stack(layers: int = 8, **given) -> ModelProfile:
    """Equal layers, and more activations than parameters: what checkpointing is for."""
    return profile_of(*(block(f"layers.{index}", **given) for index in range(layers)))


def all_points_of(profile: ModelProfile, hardware: Hardware, config: Config) -> list[Point]:
    """All that the planner chooses from, the plain model first."""
    return frontier_points([(NOTHING, profile)], hardware, config)
