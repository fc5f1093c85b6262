"""The techniques, by the names that plans call them. A new one is a file here and a line below."""

from __future__ import annotations

from memscale.techniques.base import Site, Technique
from memscale.techniques.checkpointing import GradientCheckpointing
from memscale.techniques.offloading import Offloading

__all__ = ["TECHNIQUES", "Site", "Technique"]

TECHNIQUES: dict[str, Technique] = {
    "checkpointing": GradientCheckpointing(),
    "offloading": Offloading(),
}
