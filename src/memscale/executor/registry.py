"""The techniques, by the names that plans call them. A new one is a file here and a line below."""

from __future__ import annotations

from memscale.checkpointing.technique import GradientCheckpointing
from memscale.offload.freed_memory import FreedMemory
from memscale.offload.technique import Offloading
from memscale.offload.transfers import Transfers
from memscale.optimizer.eight_bit_technique import EightBitOptimizer
from memscale.optimizer.state_technique import OptimizerState
from memscale.precision.technique import MixedPrecision
from memscale.techniques.base import Scene, Site, Technique, WholeTechnique
from memscale.tiling.loss_technique import TiledLoss
from memscale.tiling.technique import ActivationTiling

__all__ = ["TECHNIQUES", "WHOLE", "Scene", "Site", "Technique", "WholeTechnique"]

TECHNIQUES: dict[str, Technique] = {
    "checkpointing": GradientCheckpointing(),
    "offloading": Offloading(),
    "tiling": ActivationTiling(),
}

WHOLE: tuple[WholeTechnique, ...] = (
    FreedMemory(),
    Transfers(),
    EightBitOptimizer(),
    OptimizerState(),
    TiledLoss(),
    MixedPrecision(),
)
"""What concerns a model as a whole, in the order in which it goes on: of those around an optimizer's step, or
around the model, the one that is to be innermost first."""
