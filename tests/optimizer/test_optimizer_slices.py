"""A parameter that needs more than a bucket is stepped in slices: the same to the bit, and a slice at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from memscale.optimizer.bucketed_steps import LEAST_SLICE_BYTES
from support.optimizers import Elsewhere, Mapped, assert_equal, steps_of, streamed

ROWS, COLUMNS = 300, 256  # 300 KiB, not a whole number of slices
SLICES = -(-ROWS * COLUMNS * 4 // LEAST_SLICE_BYTES)

SETTINGS = {
    "AdamW": lambda tensors: optim.AdamW(tensors, lr=1e-2),
    "AdamW amsgrad": lambda tensors: optim.AdamW(tensors, lr=1e-2, amsgrad=True),
    "AdamW fused": lambda tensors: optim.AdamW(tensors, lr=1e-2, fused=True),
    "AdamW foreach": lambda tensors: optim.AdamW(tensors, lr=1e-2, foreach=True),
    "AdamW tensor lr": lambda tensors: optim.AdamW(tensors, lr=torch.tensor(1e-2)),
    "Adam": lambda tensors: optim.Adam(tensors, lr=1e-2, weight_decay=0.1),
    "SGD": lambda tensors: optim.SGD(tensors, lr=1e-2),
    "SGD momentum": lambda tensors: optim.SGD(tensors, lr=1e-2, momentum=0.9, nesterov=True),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda tensors: optim.RMSprop(tensors, momentum=0.9, centered=True),
    "Adagrad": optim.Adagrad,
    "Adadelta": optim.Adadelta,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
}


def tensors() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, COLUMNS), (64,), (16, 16))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("mapped", [False, True])
def test_same_numbers(name, mapped, tmp_path):
    plain, ours = tensors(), tensors()
    theirs = SETTINGS[name](plain)
    steps_of(plain, theirs, 4)
    place = Mapped(tmp_path) if mapped else Elsewhere()
    with streamed(ours, place, bucket_bytes=1) as steps:
        optimizer = SETTINGS[name](ours)
        steps_of(ours, optimizer, 4)
        assert steps.buckets_run == 4 * (SLICES + 2)
        assert_equal((ours, optimizer.state_dict()), (plain, theirs.state_dict()))
        for value in optimizer.state[ours[0]].values():
            if isinstance(value, torch.Tensor) and value.dim():
                assert steps.is_stored(value)
                assert value.shape == ours[0].shape
        assert set(optimizer.state) <= set(ours)  # no slice is left there
    assert_equal((ours, optimizer.state_dict()), (plain, theirs.state_dict()))


def test_state_is_up_a_slice_at_a_time():
    place, ours = Elsewhere(), tensors()[:1]
    with streamed(ours, place, bucket_bytes=1):
        optimizer = optim.AdamW(ours)
        steps_of(ours, optimizer, 3)
    whole = 2 * ours[0].nbytes
    assert (
        0 < place.most_loaded <= 2 * LEAST_SLICE_BYTES < whole or place.most_loaded == whole
    )  # all of it at the end, by detach
    place = Elsewhere()
    with streamed(ours, place, bucket_bytes=1):
        steps_of(ours, optimizer, 2)
        assert 0 < place.most_loaded <= 2 * LEAST_SLICE_BYTES


def test_state_from_before_goes_down():
    plain, ours = tensors(), tensors()
    theirs, optimizer = optim.AdamW(plain), optim.AdamW(ours)
    steps_of(plain, theirs, 4)
    steps_of(ours, optimizer, 2)
    with streamed(ours, bucket_bytes=1) as steps:
        steps_of(ours, optimizer, 2, 2)
        assert steps.is_stored(optimizer.state[ours[0]]["exp_avg"])
    assert_equal((ours, optimizer.state_dict()), (plain, theirs.state_dict()))


def test_a_step_counts_as_a_change_of_the_parameter():
    ours = tensors()[:1]
    with streamed(ours, bucket_bytes=1):
        optimizer = optim.SGD(ours, lr=0.1)
        before = ours[0]._version
        steps_of(ours, optimizer, 1)
        assert ours[0]._version > before


class OfTheUser(optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda tensors: OfTheUser(tensors), 7),  # torch's own arithmetic is what is called for a slice
        (lambda tensors: optim.Adafactor(tensors, lr=1e-2), 3),
    ],
    ids=["a subclass", "Adafactor"],
)
def test_rows_and_columns_are_not_cut(make, calls):
    plain, ours = tensors(), tensors()
    theirs = make(plain)
    steps_of(plain, theirs, 2)
    with streamed(ours, bucket_bytes=1) as steps:
        optimizer = make(ours)
        steps_of(ours, optimizer, 2)
        assert steps.buckets_run == 2 * calls
    assert_equal((ours, optimizer.state_dict()), (plain, theirs.state_dict()))


def test_an_error_in_a_slice_leaves_the_groups_whole():
    class Full(Elsewhere):
        def allocate(self, like, parameter):
            raise RuntimeError("full")

    ours = tensors()
    with streamed(ours, Full(), bucket_bytes=1):
        optimizer = optim.AdamW(ours)
        with pytest.raises(RuntimeError, match="full"):
            steps_of(ours, optimizer, 1)
        assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(each) for each in ours]
        assert set(optimizer.state) <= set(ours)
