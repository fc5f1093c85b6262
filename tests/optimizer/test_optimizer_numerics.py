"""A streamed step is the plain step, to the bit."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import optim

from support.optimizers import (
    SHAPES,
    Elsewhere,
    Mapped,
    assert_equal,
    give_gradients,
    in_groups,
    parameters,
    streamed,
)

KINDS = {
    "sgd": (optim.SGD, {}),
    "momentum": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    "nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "adamw": (optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "maximize": (optim.AdamW, {"maximize": True}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
    "adagrad": (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {"weight_decay": 0.1, "t0": 2}),
    "adafactor": (optim.Adafactor, {"weight_decay": 0.1}),
}
# What has a kernel for it on the CPU.
FUSED = ("adam", "amsgrad", "adamw", "momentum", "nesterov", "adagrad")


def train(tensors, optimizer, late=(2, 5)):
    """Five steps; some parameters have no gradient at first: they are unfrozen in the middle."""
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(5):
        give_gradients(tensors, step, without=late if step < 2 else ())
        torch.nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def compare(make, place=None, bucket_bytes=4096, shapes=SHAPES, groups=in_groups, late=(2, 5)):
    """Train plain and streamed; parameters and state must be equal. Gives what was streamed."""
    plain = parameters(shapes)
    expected = make(groups(plain))
    train(plain, expected, late)
    ours = parameters(shapes)
    with streamed(ours, place, bucket_bytes) as steps:
        optimizer = make(groups(ours))
        train(ours, optimizer, late)
        assert_equal(ours, plain)
        assert_equal(optimizer.state_dict(), expected.state_dict())
    assert_equal(optimizer.state_dict(), expected.state_dict())
    return steps


def rate(kind):
    return {} if kind is optim.Adafactor else {"lr": 0.01}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_each_optimizer(name, foreach):
    kind, options = KINDS[name]
    steps = compare(functools.partial(kind, **rate(kind), **options, foreach=foreach))
    assert steps.buckets_run > 2 * 5
    assert (steps.bytes_moved > 0) == (name != "sgd")


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    kind, options = KINDS[name]
    late = () if kind is optim.SGD else (2, 5)  # fused SGD can't begin late, streamed or not
    assert compare(functools.partial(kind, lr=0.01, fused=True, **options), late=late).buckets_run > 10


def test_muon():
    shapes = ((16, 8), (8, 32), (12, 12), (20, 4), (6, 6), (8, 8))
    make = functools.partial(optim.Muon, lr=0.01, weight_decay=0.1)
    assert compare(make, shapes=shapes, bucket_bytes=3000).bytes_moved > 0


@pytest.mark.parametrize("name", ["adamw", "momentum", "adafactor", "asgd"])
def test_state_in_files(name, tmp_path):
    """Where the home itself is computed with, and where an optimizer puts new tensors in its place."""
    kind, options = KINDS[name]
    place = Mapped(tmp_path)
    steps = compare(functools.partial(kind, **rate(kind), **options), place)
    assert place.ups > 0
    assert steps.bytes_moved > 0


def test_tensor_learning_rate():
    make = lambda groups: optim.Adam(groups, lr=torch.tensor(0.01), foreach=False)  # noqa: E731
    one_group = lambda tensors: tensors  # noqa: E731
    assert compare(make, groups=one_group).buckets_run > 10


def test_complex_parameters():
    def run(stream):
        tensors = parameters(((8, 8), (16,)), dtype=torch.complex64)
        with streamed(tensors, bucket_bytes=1) if stream else torch.enable_grad():
            optimizer = optim.AdamW(tensors, weight_decay=0.1)
            train(tensors, optimizer)
            return tensors, optimizer.state_dict()

    assert_equal(run(True), run(False))


def test_sparse_gradients():
    def run(stream):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(20, 8, sparse=True) for _ in range(3)]
        tensors = [table.weight for table in tables]
        with streamed(tensors, bucket_bytes=1) if stream else torch.enable_grad():
            optimizer = optim.SparseAdam(tensors)
            for step in range(3):
                for table in tables:
                    table(torch.tensor([step, 3, 7])).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return tensors, optimizer.state_dict()

    assert_equal(run(True), run(False))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=6),
    bucket_bytes=st.integers(1, 3000),
    least_bytes=st.sampled_from([1, 40, 200]),
    ours=st.sets(st.integers(0, 5)),
    without=st.sets(st.integers(0, 5)),
    cut=st.integers(0, 6),
    mapped=st.booleans(),
)
def test_any_shapes_buckets_and_groups(
    tmp_path_factory, sizes, bucket_bytes, least_bytes, ours, without, cut, mapped
):
    def run(stream):
        tensors = parameters([tuple(size) for size in sizes])
        groups = [{"params": tensors[:cut], "lr": 0.1}, {"params": tensors[cut:], "amsgrad": True}]
        place = Mapped(tmp_path_factory.mktemp("state")) if mapped else Elsewhere()
        followed = [each for index, each in enumerate(tensors) if index in ours] if stream else []
        with streamed(followed, place, bucket_bytes, least_bytes):
            optimizer = optim.AdamW(groups)
            for step in range(3):
                give_gradients(tensors, step, without if step != 1 else ())
                optimizer.step()
            if stream:
                assert place.most_up <= max(bucket_bytes, max(each.nbytes for each in tensors) * 3)
            return tensors, optimizer.state_dict()

    assert_equal(run(True), run(False))
