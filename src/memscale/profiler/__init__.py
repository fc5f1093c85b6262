"""What a model needs: its blocks, and the memory and computation of each in a training step."""

from __future__ import annotations

import torch
from torch import nn

from memscale.errors import ProfileError
from memscale.profiler.blocks import Block, find_blocks
from memscale.profiler.empirical import profile_empirical
from memscale.profiler.place import Place
from memscale.profiler.profile import BlockProfile, ModelProfile, OpProfile
from memscale.profiler.sample import Sample, hinted_sample, sample_of
from memscale.profiler.static import profile_static

__all__ = [
    "Block",
    "BlockProfile",
    "ModelProfile",
    "OpProfile",
    "Place",
    "Sample",
    "find_blocks",
    "hinted_sample",
    "profile_model",
    "sample_of",
]


def profile_model(
    model: nn.Module, sample: Sample, place: Place, *, static: bool = True, empirical: bool = True
) -> ModelProfile:
    """Profile one training step: on fake tensors if possible, by a guarded real run if not.

    A profile of a step that calls no block at all is of little use: where a copy of the model calls none (a forward
    that someone has put on the model may refer to the original), a real run is tried too.

    Args:
        model: the model; it is not changed.
        sample: how it is called.
        place: the device to account for.
        static: try fake tensors first (``Config.use_static_profiling``).
        empirical: fall back to a real run (``Config.use_empirical_fallback``).

    Raises:
        ProfileError: neither way worked, with the reasons.
    """
    why_not_static = "use_static_profiling=False"
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    if static:
        try:
            profile = profile_static(model, sample, place)
        except Exception as error:
            why_not_static = f"fake tensors failed: {type(error).__name__}: {_first_line(error)}"
        else:
            if profile.calls_blocks or not empirical or is_on_meta:
                return profile
            why_not_static = "a copy of the model on fake tensors calls none of its layers"
    name = type(model).__name__
    if not empirical:
        raise ProfileError(
            f"{name} can't be profiled without running it ({why_not_static}), and a real run is switched off "
            "by use_empirical_fallback=False. Check that sample_input is what the model takes in training, or "
            "allow the fallback."
        )
    if is_on_meta:
        raise ProfileError(
            f"{name} can't be profiled without running it ({why_not_static}), and it can't be run while its "
            "weights are on the meta device. Check sample_input, or materialise the model first."
        )
    try:
        return profile_empirical(model, sample, reason=f"a real run ({why_not_static})")
    except (torch.OutOfMemoryError, ProfileError):
        raise
    except Exception as error:
        raise ProfileError(
            f"{name} does not run on the sample: {type(error).__name__}: {_first_line(error)}. The sample "
            f"was: {sample.describe() or 'no tensors'}. Pass as sample_input what you pass to the model in "
            "training."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
