"""The techniques, by the names that plans call them. A new one is a package and a line below."""

from __future__ import annotations

from memscale.checkpointing.technique import GradientCheckpointing
from memscale.offload.technique import FreedMemory, LayerOffloading, Transfers
from memscale.optimizer.placement import OptimizerState
from memscale.precision.technique import MixedPrecision
from memscale.techniques.base import LayerTechnique, ModelTechnique
from memscale.tiling.technique import ActivationTiling, SdpaAttention, TiledLoss

LAYER_TECHNIQUES: dict[str, LayerTechnique] = {
    "checkpointing": GradientCheckpointing(),
    "offloading": LayerOffloading(),
    "tiling": ActivationTiling(),
}

MODEL_TECHNIQUES: tuple[ModelTechnique, ...] = (
    FreedMemory(),
    Transfers(),
    OptimizerState(),
    SdpaAttention(),
    TiledLoss(),
    MixedPrecision(),
)
"""Techniques of a model as a whole, in the order in which they are attached: of those around an optimizer's step, the
innermost first."""
