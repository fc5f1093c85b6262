"""The static profile: one step on fake tensors, with equal blocks run only twice.

Note [Shortened models]
~~~~~~~~~~~~~~~~~~~~~~~
Forty-eight equal layers need the same: it is enough to run two of them (two, because the first may differ: its
input may need no gradient). So the fake copy of the model is shortened before it runs: of each run of equal blocks
in a ``ModuleList`` the first two stay. The cost grows with the number of distinct blocks, not with depth. Where a
model does not run without its other blocks (a U-Net's skip connections), it is run whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import nn

from memscale.profiler.blocks import Block, find_blocks, stacks
from memscale.profiler.build import build_profile, run_step
from memscale.profiler.cache import without_cache
from memscale.profiler.place import Place
from memscale.profiler.profile import ModelProfile
from memscale.profiler.recorder import Recorder
from memscale.profiler.sample import Sample

KEPT_OF_EQUAL = 2


def profile_static(
    model: nn.Module,
    sample: Sample,
    place: Place,
    *,
    with_cache: bool = False,
    prepare: Callable[[nn.Module], object] | None = None,
    at_home: bool = False,
    resident: Mapping[str, tuple[str, ...]] | None = None,
) -> ModelProfile:
    """Profile a training step on fake tensors.

    Args:
        model: the model; it is not changed.
        sample: how it is called.
        place: the device to account for.
        with_cache: leave the cache for generation as the model has it; it is off while a plan is attached.
        prepare: called with the fake copy, shortened, before it runs, to change what its step needs.
        at_home: that sends its parameters to the tier below.
        resident: names of the parameters that it does not send there, by block; found by the profile if not given.

    Raises:
        Exception: whatever the model raises on fake tensors; the caller falls back to a real run.
    """
    blocks = find_blocks(model)
    short = _shortening(model, blocks)
    if short:
        try:
            found = _profile(model, sample, place, blocks, short, with_cache, prepare, at_home, resident)
        except Exception as error:
            why = f"as it does not run shortened ({type(error).__name__})"
        else:
            if resident is not None or not any(found.block(name).resident for name in short.values()):
                return found
            # Of the blocks that it stands in for, the model may read one only.
            why = "as a block that stands in for others is read outside of its forward"
        whole = _profile(model, sample, place, blocks, {}, with_cache, prepare, at_home, resident)
        return replace(whole, reason=f"{whole.reason}, whole, {why}")
    return _profile(model, sample, place, blocks, {}, with_cache, prepare, at_home, resident)


def _profile(
    model: nn.Module,
    sample: Sample,
    place: Place,
    blocks: Sequence[Block],
    short: dict[str, str],
    with_cache: bool,
    prepare: Callable[[nn.Module], object] | None,
    at_home: bool,
    resident: Mapping[str, tuple[str, ...]] | None,
) -> ModelProfile:
    with place.simulate() as simulation:
        left_out = [model.get_submodule(block.members[0]) for block in blocks if block.name in short]
        twin = simulation.copy_of(model, without=left_out).train(model.training)
        named = {
            block.name: [twin.get_submodule(member) for member in block.members]
            for block in blocks
            if block.name not in short
        }
        _shorten(twin, short)
        if prepare is not None:
            prepare(twin)
        batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
        recorder = Recorder(simulation.tracker, simulation.device)
        cache = contextlib.nullcontext() if with_cache else without_cache(twin)
        with recorder.listening(list(named.items())), cache:
            run_step(twin, batch, recorder, torch.autograd.backward)
    ran = sum(1 for block in blocks if block.name not in short)
    reason = f"{ran} of {len(blocks)} blocks run on fake tensors" if short else "run on fake tensors"
    return build_profile(
        model,
        blocks,
        recorder.step,
        stand_ins=short,
        source="static",
        reason=reason,
        batch=sample.describe(),
        exact_bytes=place.counts_exactly,
        at_home=at_home,
        resident=resident,
    )


# ---------------------------------------------------------------------- shortening


def _shortening(model: nn.Module, blocks: Sequence[Block]) -> dict[str, str]:
    """Blocks that need not run, each with the equal block that stands in for it."""
    short: dict[str, str] = {}
    for stack in stacks(blocks):
        if not isinstance(model.get_submodule(stack[0].container), nn.ModuleList):
            continue
        for _, run in groupby(stack, key=lambda block: block.signature):
            equal = list(run)
            for block in equal[KEPT_OF_EQUAL:]:
                short[block.name] = equal[KEPT_OF_EQUAL - 1].name
    return short


def _shorten(twin: nn.Module, short: dict[str, str]) -> None:
    by_container: dict[str, set[str]] = {}
    for name in short:
        container, _, index = name.rpartition(".")
        by_container.setdefault(container, set()).add(index)
    for container, dropped in by_container.items():
        modules = twin.get_submodule(container)
        kept = [module for index, module in modules._modules.items() if index not in dropped]
        modules._modules.clear()
        modules._modules.update({str(index): module for index, module in enumerate(kept)})
