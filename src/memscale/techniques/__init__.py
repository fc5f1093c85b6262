"""The techniques, by the names that plans call them. A new one is a file here and a line below."""

from __future__ import annotations

from memscale.techniques.base import Scene, Site, Technique, WholeTechnique
from memscale.techniques.checkpointing import GradientCheckpointing
from memscale.techniques.freed_memory import FreedMemory
from memscale.techniques.loss import TiledLoss
from memscale.techniques.offloading import Offloading
from memscale.techniques.optimizer8bit import EightBitOptimizer
from memscale.techniques.optimizer_state import OptimizerState
from memscale.techniques.precision import MixedPrecision
from memscale.techniques.tiling import ActivationTiling
from memscale.techniques.transfers import Transfers

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
