"""Streaming on and off: whose steps, beside whom, and what is left."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from memscale.observe.counters import Meter
from memscale.optimizer.bucketed_steps import BucketedSteps
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import PinnedMemory
from support.optimizers import (
    Elsewhere,
    Mapped,
    assert_equal,
    give_gradients,
    in_groups,
    leaves,
    loss_of,
    model,
    parameters,
    plain_adamw,
    steps_of,
    streamed,
)


@pytest.mark.parametrize("mapped", [False, True])
def test_detach_leaves_nothing(mapped, tmp_path):
    with streamed(parameters()):
        pass  # what other tests have dropped goes now
    before = (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    )
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors))
    attributes = dict(vars(optimizer))
    function = optim.AdamW.step.__closure__[0].cell_contents
    lists = [group["params"] for group in optimizer.param_groups]
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1) as steps:
        steps_of(tensors, optimizer, 2)
    assert (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    ) == before
    assert optim.AdamW.step.__closure__[0].cell_contents is function
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is attributes[name] for name in attributes)
    assert all(group["params"] is each for group, each in zip(optimizer.param_groups, lists, strict=True))
    for each in leaves(optimizer.state_dict()["state"]):
        assert not steps.is_stored(each)
        assert not each.untyped_storage().is_shared()
    moved = steps.bytes_moved
    steps_of(tensors, optimizer, 1, 2)
    assert steps.bytes_moved == moved
    place = Elsewhere()
    place.least_bytes = 1
    steps.attach(tensors, place, 1)
    steps_of(tensors, optimizer, 1, 3)
    assert steps.bytes_moved > moved
    steps.restore()
    steps.restore()
    assert_equal((tensors, optimizer.state_dict()), plain_adamw())


def test_optimizers_of_others_are_not_touched():
    tensors, others = parameters(), parameters(seed=1)
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(others)
        steps_of(others, optimizer, 2)
        assert (steps.bytes_moved, steps.buckets_run, dict(steps.skipped)) == (0, 0, {})
        assert "__getstate__" not in vars(optimizer)


def test_parameters_of_others_stay_up():
    tensors = parameters()
    with streamed(tensors[:4], bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 4)
        for index, tensor in enumerate(tensors):
            assert steps.is_stored(optimizer.state[tensor]["exp_avg"]) == (index < 4)
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())


@pytest.mark.parametrize("first", [0, 1])
def test_two_of_them_on_one_optimizer(first):
    """Two wrapped models, one optimizer; detached in either order."""
    tensors = parameters()
    with streamed(tensors[4:], bucket_bytes=1) as inner:
        with streamed(tensors[:4], bucket_bytes=1) as outer:
            optimizer = optim.AdamW(in_groups(tensors))
            steps_of(tensors, optimizer, 2)
            assert all(
                (outer if index < 4 else inner).is_stored(optimizer.state[tensor]["exp_avg"])
                for index, tensor in enumerate(tensors)
                if tensor.dim()
            )
            duplicate = copy.deepcopy(optimizer)
            (inner, outer)[first].restore()
            steps_of(tensors, optimizer, 1, 2)
    steps_of(tensors, optimizer, 1, 3)
    assert_equal((tensors, optimizer.state_dict()), plain_adamw())
    others = [each for group in duplicate.param_groups for each in group["params"]]
    steps_of(others, duplicate, 2, 2)
    assert_equal((others, duplicate.state_dict()), plain_adamw())
    assert "__getstate__" not in vars(optimizer)


def test_in_several_threads():
    expected, results = plain_adamw(6), {}

    def train(index, tensors):
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 6)
        results[index] = (tensors, optimizer.state_dict())

    every = [parameters() for _ in range(3)]
    with streamed([each for tensors in every for each in tensors], bucket_bytes=1):
        threads = [threading.Thread(target=train, args=pair) for pair in enumerate(every)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(3):
            assert_equal(results[index], expected)


def test_compiled_step():
    tensors = parameters(((16, 16), (8, 8)))
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(tensors)
        step = torch.compile(optimizer.step, backend="eager")
        for index in range(2):
            give_gradients(tensors, index)
            step()
        assert steps.buckets_run == 4
    torch._dynamo.reset()


def test_nothing_is_kept_alive():
    """A model that is dropped without detaching is collected; an optimizer keeps what it needs."""
    gc.collect()
    with streamed(parameters()):
        pass  # what other tests have dropped goes now
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    function = optim.AdamW.step.__closure__[0].cell_contents
    module, place = model(), Elsewhere()
    place.least_bytes = 1
    gone = weakref.ref(module), weakref.ref(place)
    module.steps = BucketedSteps(DiskStore(), Meter(), PinnedMemory())
    module.steps.attach(module.parameters(), place, 1)
    optimizer = optim.AdamW(module.parameters())
    for step in range(3):
        if step == 2:
            tensors = list(module.parameters())
            del module, place  # the optimizer goes on
            give_gradients(tensors, step)
        else:
            loss_of(module, step).backward()
        optimizer.step()
    assert tensors[0] in optimizer.state
    assert gone[1]().loads > 0
    del optimizer, tensors
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
    with streamed(parameters()):  # clears away after the one before
        assert len(torch_optimizer._global_optimizer_pre_hooks) == 1  # however many subscribe
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    assert optim.AdamW.step.__closure__[0].cell_contents is function


def test_parameters_can_be_swapped():
    """``Module.to`` may exchange parameters as a whole, which no weak reference may stand against."""
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        for each in tensors:
            each.grad = None
            torch.utils.swap_tensors(each, nn.Parameter(each.detach().clone()))
        steps_of(tensors, optimizer, 2, 2)
        assert steps.bytes_moved > 0
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())
