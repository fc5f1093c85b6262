"""Measure what a model needs: its blocks, and the memory and computation of each in a training step."""

from __future__ import annotations

from memscale.profiler.blocks import Block, find_blocks, find_head
from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile
from memscale.profiler.run import Place, profile_model
from memscale.profiler.sample import Sample, hinted_sample, sample_of

__all__ = [
    "Block",
    "BlockProfile",
    "ModelProfile",
    "OpProfile",
    "Place",
    "Sample",
    "find_blocks",
    "find_head",
    "hinted_sample",
    "profile_model",
    "sample_of",
]
