"""Saved, loaded, copied and pickled while its state is elsewhere: an optimizer like any other."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn, optim

from support.optimizers import (
    Elsewhere,
    Mapped,
    assert_equal,
    in_groups,
    leaves,
    parameters,
    plain_adamw,
    steps_of,
    streamed,
)


@pytest.mark.parametrize("mapped", [False, True])
def test_state_dict_is_portable(mapped, tmp_path):
    """Saved streamed, resumed plain, and the other way round; equal to a run that was never stopped."""
    tensors = parameters()
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1):
        optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
        steps_of(tensors, optimizer, 2)
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), tensors), file)
    file.seek(0)
    saved, tensors = torch.load(file, weights_only=True)
    tensors = [nn.Parameter(each) for each in tensors]
    optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
    optimizer.load_state_dict(saved)
    steps_of(tensors, optimizer, 1, 2)

    saved = copy.deepcopy(optimizer.state_dict())
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
        optimizer.load_state_dict(saved)
        steps_of(tensors, optimizer, 1, 3)
        assert steps.bytes_moved > 0
        assert_equal((tensors, optimizer.state_dict()), plain_adamw(amsgrad=True))


def test_load_state_dict_in_the_middle():
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [each.detach().clone() for each in tensors]
        steps_of(tensors, optimizer, 2, 10)  # a detour
        optimizer.load_state_dict(saved)
        for tensor, weight in zip(tensors, weights, strict=True):
            tensor.data.copy_(weight)
        steps_of(tensors, optimizer, 2, 2)
        assert all(steps.is_stored(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mapped", [False, True])
def test_copies_are_plain_optimizers(way, mapped, tmp_path):
    tensors = parameters()
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        duplicate = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        assert vars(duplicate).keys() == vars(pickle.loads(pickle.dumps(optim.AdamW(parameters())))).keys()
        before, run = steps.bytes_moved, steps.buckets_run
        others = [each for group in duplicate.param_groups for each in group["params"]]
        steps_of(others, duplicate, 2, 2)
        assert (steps.bytes_moved, steps.buckets_run) == (before, run)
        steps_of(tensors, optimizer, 2, 2)
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())
        assert_equal((others, duplicate.state_dict()), plain_adamw())
