"""Activations on tiers below the simulated and the executing device: bytes move, and are accounted for."""

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError
from memscale.offload.activations import Activations
from memscale.simulator import simulate
from memscale.testing import executing
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import Engine

pytestmark = pytest.mark.virtual_only

MIB = 2**20


@pytest.fixture(params=["host", "disk"])
def to(request):
    return request.param


def activations_on(device, to, tmp_path, depth=0):
    engine = Engine(AsyncOffloadConfig(prefetch_depth=depth) if depth else None)
    store = DiskStore(tmp_path, 2**40) if to == "disk" else None
    return Activations(engine, device, store=store, capacity=2**34)


def chain(activations, x, layers):
    for _ in range(layers):
        with activations.around([]):
            x = x.square()  # saves its input
    return x


@pytest.mark.parametrize("virtual", [simulate, executing])
@pytest.mark.parametrize("depth", [0, 1])
def test_device_memory_falls_and_host_memory_rises(virtual, depth, to, tmp_path):
    with virtual("96MiB") as gpu:
        activations = activations_on(gpu.device, to, tmp_path, depth)
        x = torch.empty(MIB, device=gpu.device).fill_(1).requires_grad_()
        host = gpu.tracker.live_bytes("cpu")
        y = chain(activations, x * 1, 6)
        in_flight = depth + 1 if depth else 0
        assert gpu.tracker.live_bytes(gpu.device) == (2 + in_flight) * 4 * MIB  # with x and y
        assert activations.memory.bytes_used == 6 * 4 * MIB
        assert gpu.tracker.live_bytes("cpu") - host == (6 * 4 * MIB if to == "host" else 0)
        y.sum().backward()
        assert activations.memory.bytes_used == 0
        del y
        assert gpu.tracker.live_bytes(gpu.device) == 8 * MIB + gpu.tracker.workspace_bytes(
            gpu.device
        )  # with x.grad
        if virtual is executing:
            assert bool((x.grad == 64).all())
        else:
            assert list(tmp_path.iterdir()) == []


def test_on_the_way_to_the_disk_it_is_in_host_memory(tmp_path):
    with simulate("RTX 3090") as sim:
        activations = activations_on(sim.device, "disk", tmp_path)
        x = torch.empty(2**28, device=sim.device, requires_grad=True)  # 1 GiB that nobody has
        y = chain(activations, x * 1, 1)
        assert sim.host_peak_bytes >= 2**30
        assert sim.tracker.live_bytes("cpu") == 0
        y.sum().backward()


def test_mapped_tensors_on_a_simulated_disk(tmp_path):
    store = DiskStore(tmp_path, 2**30)
    with simulate("4GiB", device="cpu"):
        x = store.empty((1024, 1024))
        y = store.copy_of(torch.empty(100))
        assert store.bytes_used == 4 * MIB + 4096
        assert store.release_pages(x) == 0
        store.prefetch_pages(y)
        assert store.holds(x)
        with pytest.raises(TierFullError):
            store.empty((2**30,))
        del x, y
        assert store.bytes_used == 0
    store.close()
