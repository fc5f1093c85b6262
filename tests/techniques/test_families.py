"""Gradient checkpointing changes no bit of any family's training, and does recompute."""

from __future__ import annotations

import functools

import pytest
import torch

from families import FAMILIES, Family
from memscale.errors import WrapError
from techniques.harness import DEAR, Work, assert_same, blocks_of, train, work_of, wrapped

SETTINGS = {
    "whole blocks": {},
    "chained": {"chained": True},
    "keeping": {"keep": DEAR},
    "keeping, chained": {"keep": DEAR, "chained": True},
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


@functools.cache
def plain_training(name: str) -> list[tuple[str, torch.Tensor]]:
    return train(FAMILIES[name])


@functools.cache
def plain_work(name: str) -> Work:
    return work_of(FAMILIES[name])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_three_steps_are_bit_equal(family: Family, settings: dict) -> None:
    ours = train(family, functools.partial(wrapped, **settings))
    assert_same(ours, plain_training(family.name))


@pytest.mark.parametrize("chained", [False, True], ids=["whole blocks", "chained"])
def test_every_block_is_computed_twice_and_keeps_less(family: Family, chained: bool) -> None:
    plain = plain_work(family.name)
    ours = work_of(family, functools.partial(wrapped, chained=chained))

    assert plain.runs.keys() == {block.name for block in blocks_of(family.build())}
    if family.depth:
        assert plain.runs == dict.fromkeys(plain.runs, family.calls)
    if family.name == "lstm":  # its block is one operation: there is no module inside to count
        assert ours.runs == plain.runs
    else:
        assert ours.runs == {name: 2 * runs for name, runs in plain.runs.items()}
    # Not all of it twice: a recomputation stops once it has what backward needs.
    assert ours.block_flops == plain.block_flops
    assert plain.flops < ours.flops <= plain.flops + plain.block_flops
    assert ours.saved_bytes < plain.saved_bytes
