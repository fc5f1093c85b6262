"""An error in a streamed step: the optimizer is whole, its state complete, the error unchanged."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import optim

from memscale.errors import TierFullError
from support.optimizers import (
    SHAPES,
    Elsewhere,
    Mapped,
    assert_equal,
    give_gradients,
    in_groups,
    leaves,
    parameters,
    streamed,
)


def momentum(tensors):
    return optim.SGD(in_groups(tensors), lr=0.1, momentum=0.9)


@contextlib.contextmanager
def failing(at, error):
    """torch's arithmetic raises before the n-th parameter of a step, whichever call it comes in."""
    before, seen = optim.SGD._init_group, 0

    def init_group(self, group, *lists):
        nonlocal seen
        for _ in group["params"] if hasattr(self, "_optimizer_step_pre_hooks") else ():  # a real one
            if seen == at:
                raise error
            seen += 1
        return before(self, group, *lists)

    optim.SGD._init_group = init_group
    try:
        yield
    finally:
        optim.SGD._init_group = before


def snapshot(optimizer):
    """What of an optimizer must be the same objects after an error."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    groups = [
        (id(group), id(group["params"]), [id(p) for p in group["params"]]) for group in optimizer.param_groups
    ]
    return id(optimizer.param_groups), groups, [id(each) for each in hooks]


@pytest.mark.matrix(11)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt(), ValueError("no")])
@pytest.mark.parametrize("at", range(len(SHAPES)))
@pytest.mark.parametrize("step", [0, 2])
def test_error_in_a_bucket(at, step, error, mapped, tmp_path):
    tensors = parameters()
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1) as steps:
        optimizer = momentum(tensors)
        for index in range(step):
            give_gradients(tensors, index)
            optimizer.step()
        before, buckets = snapshot(optimizer), steps.buckets_run
        give_gradients(tensors, step)
        with failing(at, error), pytest.raises(type(error)) as raised:
            optimizer.step()
        assert raised.value is error
        assert snapshot(optimizer) == before
        assert steps.buckets_run == buckets + at
        saved = optimizer.state_dict()
        with_state = len(tensors) if step else at
        assert len(saved["state"]) == with_state
        assert [len(group["params"]) for group in saved["param_groups"]] == [3, 1, 4]
        assert all(steps.is_stored(each) for each in leaves(saved["state"]) if each.dim())
        torch.save(saved, io.BytesIO())
        # A parameter has been stepped, or it has not; its state always with it.
        expected = parameters()
        plain = momentum(expected)
        for index in range(step + 1):
            give_gradients(expected, index, without=range(at, len(SHAPES)) if index == step else ())
            plain.step()
        assert_equal((tensors, saved), (expected, plain.state_dict()))
        # And it goes on.
        for each in (optimizer, plain):
            give_gradients(tensors if each is optimizer else expected, step + 1)
            each.step()
        assert_equal((tensors, optimizer.state_dict()), (expected, plain.state_dict()))
    assert_equal((tensors, optimizer.state_dict()), (expected, plain.state_dict()))


@pytest.mark.parametrize("method", ["allocate", "load", "release_pages"])
@pytest.mark.parametrize("at", [0, 1, 5, 7])
def test_place_that_fails(method, at):
    """A full disk, say: what is not down stays up, nothing is lost, and the step after is a step."""

    class Breaking(Elsewhere):
        left = None

        def _count(self):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise TierFullError("no room")

    def breaking(self, *args):
        self._count()
        return getattr(Elsewhere, method)(self, *args)

    setattr(Breaking, method, breaking)
    tensors = parameters()
    place = Breaking()
    with streamed(tensors, place, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        if method != "allocate":
            give_gradients(tensors, 0)
            optimizer.step()
        before = snapshot(optimizer)
        give_gradients(tensors, 1)
        place.left = at
        with pytest.raises(TierFullError, match="no room"):
            optimizer.step()
        place.left = None
        assert snapshot(optimizer) == before
        saved = optimizer.state_dict()
        torch.save(saved, io.BytesIO())
        for tensor, state in optimizer.state.items():
            assert state["exp_avg"].shape == state["exp_avg_sq"].shape == tensor.shape
        give_gradients(tensors, 2)
        optimizer.step()
        assert all(steps.is_stored(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())
    assert not any(steps.is_stored(each) for each in leaves(optimizer.state_dict()["state"]))


def test_error_of_the_place_does_not_hide_the_first():
    class Broken(Elsewhere):
        broken = False

        def release_pages(self, tensor):
            if self.broken:
                raise TierFullError("no room")

    tensors, place = parameters(), Broken()
    with streamed(tensors, place, bucket_bytes=1):
        optimizer = momentum(tensors)
        give_gradients(tensors, 0)
        optimizer.step()

        error = ZeroDivisionError()
        place.broken = True
        with failing(0, error), pytest.raises(ZeroDivisionError) as raised:
            optimizer.step()
        assert raised.value is error
        place.broken = False
        assert len(optimizer.state_dict()["state"]) == len(tensors)


def test_error_in_a_closure():
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1):
        optimizer = optim.AdamW(in_groups(tensors))
        before = snapshot(optimizer)

        def closure():
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert snapshot(optimizer) == before
        assert not optimizer.state
