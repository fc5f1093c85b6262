"""Gradient checkpointing changes no bit of any family's training, and does recompute."""

from __future__ import annotations

import functools

import pytest
import torch

from support.checkpointed import DEAR, Work, assert_same, blocks_of, train, work_of, wrapped
from support.families import FAMILIES, Family

CHAINED = pytest.mark.parametrize("chained", [False, True], ids=["alone", "chained"])


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys(), scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


# Each is needed by several tests of a family, and by no other family.


@functools.lru_cache(maxsize=1)
def plain_training(family: Family) -> list[tuple[str, torch.Tensor]]:
    return train(family)


@functools.lru_cache(maxsize=1)
def plain_work(family: Family) -> Work:
    return work_of(family)


@functools.lru_cache(maxsize=2)
def whole_work(family: Family, chained: bool) -> Work:
    return work_of(family, functools.partial(wrapped, chained=chained))


@pytest.mark.matrix(7)
@CHAINED
@pytest.mark.parametrize("keep", [(), DEAR], ids=["whole", "keeping"])
def test_three_steps_are_bit_equal(family: Family, chained: bool, keep: tuple[str, ...]) -> None:
    ours = train(family, functools.partial(wrapped, chained=chained, keep=keep))
    assert_same(ours, plain_training(family))


@pytest.mark.matrix(5)
@CHAINED
def test_every_block_is_computed_twice_and_keeps_less(family: Family, chained: bool) -> None:
    plain, ours = plain_work(family), whole_work(family, chained)

    assert plain.runs.keys() == {block.name for block in blocks_of(family.build())}
    if family.depth:
        assert plain.runs == dict.fromkeys(plain.runs, family.calls)
    assert ours.runs == {name: 2 * runs for name, runs in plain.runs.items()}
    # Not all of it twice: a recomputation stops once it has what backward needs.
    if plain.block_flops:
        assert plain.flops < ours.flops <= plain.flops + plain.block_flops
    else:
        assert family.name == "lstm", "one operation, which the counter does not know"
    assert ours.saved_bytes < plain.saved_bytes


@pytest.mark.matrix(5)
@CHAINED
def test_kept_operations_are_not_computed_again(family: Family, chained: bool) -> None:
    plain, whole = plain_work(family), whole_work(family, chained)
    ours = work_of(family, functools.partial(wrapped, keep=DEAR, chained=chained))

    assert ours.runs == {name: 2 * runs for name, runs in plain.runs.items()}
    assert ours.flops == plain.flops
    assert whole.saved_bytes < ours.saved_bytes < plain.saved_bytes


@pytest.mark.matrix(4)
def test_chained_blocks_keep_less_than_blocks_alone(family: Family) -> None:
    alone, chained = whole_work(family, False), whole_work(family, True)

    if len(blocks_of(family.build())) > 1:
        assert chained.saved_bytes < alone.saved_bytes
    else:  # there is nothing to chain it to
        assert chained.saved_bytes == alone.saved_bytes
