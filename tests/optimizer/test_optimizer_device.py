"""State on the host below a device: how much of it is on the device, to the byte."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn, optim

from memscale.optimizer.state_stores import HostStateStore
from memscale.simulator import simulate
from memscale.testing import executing
from memscale.tiers.disk import DiskStore
from support.optimizers import Elsewhere, assert_equal, give_gradients, leaves, parameters, streamed

KIB = 1024
# 4, 8, 16, 2, 4 and 6 KiB: multiples of the device allocator's 512 bytes.
SHAPES = ((32, 32), (64, 32), (64, 64), (512,), (32, 32), (48, 32))
TOTAL = 40 * KIB


def momentum(tensors):
    """Its arithmetic needs no memory of its own: what comes and goes is state."""
    return optim.SGD(tensors, lr=0.1, momentum=0.9)


def on_host(optimizer):
    return all(
        each.device.type == "cpu" for each in leaves(optimizer.state_dict()["state"]) if each is not None
    )


@pytest.mark.parametrize(
    ("bucket", "most"),
    [
        (48 * KIB, 16 * KIB),  # with parameters and gradients, 4 + 8, 16, 2 + 4 + 6
        (36 * KIB, 12 * KIB),
        (1, 16 * KIB),  # each alone
        (10**9, TOTAL),
    ],
)
def test_state_on_the_device_is_one_bucket(bucket, most):
    if bucket == 36 * KIB:
        shapes, total = tuple(shape for shape in SHAPES if shape != (64, 64)), TOTAL - 16 * KIB
    else:
        shapes, total = SHAPES, TOTAL
    with executing("64MiB") as gpu:
        tensors = parameters(shapes, device=gpu.device)
        with streamed(tensors, bucket_bytes=bucket) as steps:
            optimizer = momentum(tensors)
            for step in range(3):
                give_gradients(tensors, step)
                before = gpu.tracker.live_bytes(gpu.device)
                gpu.tracker.reset_peak()
                optimizer.step()
                assert on_host(optimizer)
                assert gpu.tracker.live_bytes(gpu.device) == before == 2 * total
                peak = gpu.peak_bytes - before
                # In the first step one parameter of each number of dimensions goes alone.
                assert peak == most if step else peak <= most
            assert steps.bytes_moved == 5 * total
        assert not on_host(optimizer)
        assert gpu.tracker.live_bytes(gpu.device) == 3 * total


@pytest.mark.parametrize(
    ("bucket", "most"),
    [
        (48 * KIB, 28 * KIB),  # 12 and 16, 16 and 12
        (1, 24 * KIB),  # each alone: 8 and 16
        (10**9, TOTAL),
    ],
)
def test_two_buckets_of_state_on_the_host_are_in_flight(bucket, most):
    """One is copied back while the next one comes: no more, and no less, or a copy would wait for the other."""
    with executing("64MiB") as gpu:
        tensors = parameters(SHAPES, device=gpu.device)
        with streamed(tensors, HostStateStore(DiskStore()), bucket, least_bytes=1) as steps:
            optimizer = momentum(tensors)
            for step in range(3):
                give_gradients(tensors, step)
                before = gpu.tracker.live_bytes(gpu.device)
                gpu.tracker.reset_peak()
                optimizer.step()
                assert on_host(optimizer)
                assert gpu.tracker.live_bytes(gpu.device) == before
                assert gpu.peak_bytes - before == most
            assert steps.bytes_moved == 5 * TOTAL
            assert steps.store.memory.bytes_used == TOTAL
        plain = parameters(SHAPES)
        expected = momentum(plain)
        for step in range(3):
            give_gradients(plain, step)
            expected.step()
        assert_equal((tensors, optimizer.state_dict()), (plain, expected.state_dict()))


def test_without_streaming_all_state_is_there():
    """What the test above would measure if nothing were streamed."""
    with executing("64MiB") as gpu:
        tensors = parameters(SHAPES, device=gpu.device)
        optimizer = momentum(tensors)
        give_gradients(tensors, 0)
        before = gpu.tracker.live_bytes(gpu.device)
        optimizer.step()
        assert gpu.peak_bytes - before == TOTAL


def test_fits_where_the_plain_step_does_not():
    shapes = ((1024, 3072),) * 4  # 12 MiB each

    def train(device, stream):
        tensors = parameters(shapes, device=device)
        with streamed(tensors if stream else [], bucket_bytes=2048 * KIB) as streaming:
            optimizer = optim.AdamW(tensors, foreach=False)
            for step in range(2):
                give_gradients(tensors, step)
                optimizer.step()
            if stream:  # there is no room for it beside the parameters
                with pytest.raises(torch.OutOfMemoryError):
                    streaming.restore()
                assert len(optimizer.state_dict()["state"]) == len(shapes)
                optimizer.state.clear()
        return tensors

    def on_a_small_device(stream):
        with executing("176MiB") as gpu:  # 96 of parameters and gradients, 96 of state
            return [each.detach().cpu() for each in train(gpu.device, stream)]

    with pytest.raises(torch.OutOfMemoryError):
        on_a_small_device(False)
    assert_equal(on_a_small_device(True), train("cpu", False))


@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"amsgrad": True}, {"capturable": True}])
def test_equal_to_the_cpu(options):
    def train(device, stream):
        tensors = parameters(SHAPES, device=device)
        with streamed(tensors if stream else [], bucket_bytes=40 * KIB) as steps:
            optimizer = optim.AdamW(tensors, weight_decay=0.1, **options)
            for step in range(4):
                give_gradients(tensors, step)
                nn.utils.clip_grad_norm_(tensors, 1.0)
                optimizer.step()
            assert not stream or steps.bytes_moved > 0
            counters = [state["step"] for state in optimizer.state.values()]
            expected = device if options.get("capturable") else torch.device("cpu")
            assert {each.device for each in counters} == {expected}  # they stay where the optimizer has them
            return [each.detach().cpu() for each in tensors], [
                each.detach().cpu() for each in leaves(optimizer.state_dict()["state"])
            ]

    with executing("64MiB") as gpu:
        ours, plain = train(gpu.device, True), train(gpu.device, False)
    assert_equal(ours, plain)
    if "capturable" not in options:
        options = {"foreach": True, **options}  # as a device does by default
        assert_equal(ours, train(torch.device("cpu"), False))


def test_simulated_as_executed():
    """The same bytes in a simulation, where nothing is computed."""

    def train(device, tracker):
        tensors = parameters(SHAPES, device=device)
        place = Elsewhere()
        with streamed(tensors, place, bucket_bytes=40 * KIB) as steps:
            optimizer = optim.AdamW(tensors)
            peaks = []
            for step in range(3):
                give_gradients(tensors, step)
                tracker.reset_peak()
                optimizer.step()
                peaks.append((tracker.peak_bytes(device), tracker.live_bytes(device)))
            assert on_host(optimizer)
            return peaks, steps.bytes_moved, steps.buckets_run, place.allocations, place.loads

    with executing("64MiB") as gpu:
        executed = train(gpu.device, gpu.tracker)
    with simulate("64MiB") as sim:
        simulated = train(sim.device, sim.tracker)
    assert simulated == executed
    assert executed[1] == 5 * 2 * TOTAL
    assert all(live == 2 * TOTAL for _, live in executed[0])


def test_whole_training_simulated():
    with simulate("RTX 3090") as sim:
        model = nn.Sequential(*(nn.Linear(512, 512, device=sim.device) for _ in range(4)))
        with streamed(model.parameters(), bucket_bytes=4 * 2**20) as steps:
            optimizer = optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.randn(4, 512, device=sim.device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert on_host(optimizer)
        assert steps.bytes_moved == 3 * 2 * sum(each.nbytes for each in model.parameters())


def test_counters_on_the_host_stay_and_loading_brings_state_up():
    with executing("64MiB") as gpu:
        tensors = parameters(SHAPES, device=gpu.device)
        with streamed(tensors, bucket_bytes=1) as steps:
            optimizer = optim.AdamW(tensors)
            give_gradients(tensors, 0)
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            moments = [each for each in leaves(optimizer.state_dict()["state"]) if each.dim()]
            assert {each.device for each in moments} == {gpu.device}
            steps.store_state(optimizer)
            assert on_host(optimizer)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_have_their_state_beside_them(way):
    """A copy knows nothing of the place, and is stepped by torch alone."""
    with executing("64MiB") as gpu:
        tensors = parameters(SHAPES, device=gpu.device)
        with streamed(tensors, bucket_bytes=1):
            optimizer = optim.AdamW(tensors)
            give_gradients(tensors, 0)
            optimizer.step()
            duplicate = (
                copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
            )
            assert on_host(optimizer)
        others = duplicate.param_groups[0]["params"]
        for each, every in ((optimizer, tensors), (duplicate, others)):
            give_gradients(every, 1)
            each.step()
        assert all(state["exp_avg"].device == gpu.device for state in duplicate.state.values())
        assert_equal(list(tensors), list(others))
        assert_equal(optimizer.state_dict()["state"], duplicate.state_dict()["state"])


def test_state_follows_a_parameter_that_moves():
    """Down it is on the host; up it is where its parameter is by then."""
    with executing("64MiB") as gpu:
        tensors = parameters(SHAPES, device=gpu.device)
        with streamed(tensors, bucket_bytes=1):
            optimizer = momentum(tensors)
            give_gradients(tensors, 0)
            optimizer.step()
            for each in tensors:
                torch.utils.swap_tensors(each, nn.Parameter(each.detach().cpu()))
            give_gradients(tensors, 1)
            optimizer.step()
            moved = [each.detach().clone() for each in tensors]
    plain = parameters(SHAPES)
    optimizer = momentum(plain)
    for step in range(2):
        give_gradients(plain, step)
        optimizer.step()
    assert_equal(moved, plain)
