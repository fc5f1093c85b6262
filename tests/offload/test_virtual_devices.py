"""The tiers below the simulated and the executing device: bytes move, and are accounted for."""

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierError, TierFullError
from memscale.simulator import simulate
from memscale.testing import executing
from memscale.tiers.engine import Engine
from memscale.tiers.store import DiskStore
from memscale.tiers.tier import DiskTier, HostTier
from support.tensors import bits

MIB = 2**20


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def engine(request):
    if not request.param:
        yield None
        return
    with Engine(AsyncOffloadConfig(prefetch_depth=1)) as made:
        yield made


@pytest.fixture(params=["host", "disk"])
def make_tier(request, engine, tmp_path):
    def make(capacity=2**30):
        if request.param == "host":
            return HostTier(capacity, engine=engine)
        return DiskTier(tmp_path, capacity, engine=engine)

    return make


def test_round_trips_on_the_executing_device(make_tier):
    with executing("64MiB") as gpu, make_tier() as tier:
        base = torch.randn(64, 96, device=gpu.device)
        originals = [base.t(), base[:, 3], base[:, 32:64], base.to(torch.bfloat16), base > 0, base[:0]]
        expected = [bits(each) for each in originals]
        tickets = [tier.store(each) for each in originals]
        for ticket in tickets:
            tier.prefetch(ticket)
        for ticket, original, kept in zip(tickets, originals, expected, strict=True):
            loaded = tier.load(ticket)
            assert loaded.device == original.device
            assert loaded.shape == original.shape
            assert loaded.stride() == original.stride()
            assert bits(loaded) == kept


def test_device_memory_falls_and_host_memory_rises_on_the_executing_device():
    with executing("64MiB") as gpu, HostTier(2**30) as tier:
        x = torch.randn(MIB, device=gpu.device)
        before, host = gpu.tracker.live_bytes(gpu.device), gpu.tracker.live_bytes("cpu")
        ticket = tier.store(x)
        del x
        assert before - gpu.tracker.live_bytes(gpu.device) == 4 * MIB
        assert gpu.tracker.live_bytes("cpu") - host == 4 * MIB
        x = tier.load(ticket)
        assert gpu.tracker.live_bytes(gpu.device) == before
        tier.free(ticket)
        assert gpu.tracker.live_bytes("cpu") == host
        del x


def test_more_than_the_device_has_goes_through_it(make_tier):
    with executing("24MiB") as gpu, make_tier() as tier:
        tickets = [tier.store(torch.full((MIB,), float(index), device=gpu.device)) for index in range(12)]
        for index, ticket in enumerate(tickets):
            assert float(tier.load(ticket).mean()) == index
        assert gpu.peak_bytes <= 24 * MIB


def test_simulated_tensors_move_without_data(make_tier):
    with simulate("RTX 3090") as sim, make_tier(10 * 2**30) as tier:
        x = torch.empty(2**28, device=sim.device)  # 1 GiB that nobody has
        views = [x.view(2**14, -1).t(), x[10:20]]
        tickets = [tier.store(view) for view in views]
        shapes = [(view.shape, view.stride()) for view in views]
        assert tier.bytes_used >= 2**30
        host = 2**30 + 40 if isinstance(tier, HostTier) else 0
        assert sim.tracker.live_bytes("cpu") == host
        assert sim.host_peak_bytes >= 2**30  # also on the way to the disk
        del x, views
        tier.flush()  # until then an asynchronous one holds what it stores, as on a device with streams
        assert sim.tracker.live_bytes(sim.device) == 0
        loaded = [tier.load(ticket) for ticket in tickets]
        assert [(each.shape, each.stride()) for each in loaded] == shapes
        assert all(each.device == sim.device for each in loaded)
        assert sim.tracker.live_bytes(sim.device) == 2**30 + 512
        for ticket in tickets:
            tier.free(ticket)
        assert tier.bytes_used == 0
        with pytest.raises(TierFullError, match=r"12.0 GiB more .* cap of 10.0 GiB"):
            tier.store(torch.empty(3 * 2**30, device=sim.device))


def test_what_is_fetched_ahead_is_seen_by_the_simulator():
    with Engine(AsyncOffloadConfig(prefetch_depth=1)) as engine, simulate("RTX 3090") as sim:
        with HostTier(2**34, engine=engine) as tier:
            tickets = [tier.store(torch.empty(MIB, device=sim.device)) for _ in range(3)]
            assert sim.tracker.live_bytes(sim.device) == 8 * MIB  # the last two, which count as on their way
            assert tier.borrow(tickets[0]) is None
            assert tier.borrow(tickets[2]).shape == (MIB,)
            tier.flush()
            assert sim.tracker.live_bytes(sim.device) == 0
            for ticket in tickets:
                tier.prefetch(ticket)
            assert sim.tracker.live_bytes(sim.device) == 12 * MIB
            x = tier.load(tickets[0])
            assert sim.tracker.live_bytes(sim.device) == 12 * MIB
            del x
            assert sim.tracker.live_bytes(sim.device) == 8 * MIB
            tier.drop_prefetched()
            assert sim.tracker.live_bytes(sim.device) == 0


def test_a_simulated_disk_takes_no_disk(tmp_path):
    with simulate("RTX 3090") as sim, DiskTier(tmp_path, 2**40) as tier:
        ticket = tier.store(torch.empty(2**32, device=sim.device))
        assert tier.bytes_used == 2**34
        assert list(tmp_path.iterdir()) == []
        assert tier.load(ticket).shape == (2**32,)


def test_real_tensors_inside_a_simulation_are_refused(make_tier):
    real = torch.ones(10)
    with simulate("RTX 3090"), make_tier() as tier:
        with pytest.raises(TierError, match="inside a simulation"):
            tier.store(real)


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


def test_a_training_step_with_its_activations_below(make_tier):
    """Losses and gradients equal to the CPU's, with less than the plain step needs on the device."""

    def build():
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(24)]
        return torch.nn.Sequential(*layers)

    x = torch.randn(2048, 256)
    plain = build()
    plain(x).square().mean().backward()

    def step(hooks):
        model = build().to(gpu.device)
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def pack(tensor):
            kept = not hooks or tensor.untyped_storage()._cdata in parameters
            return tensor if kept else tier.store(tensor)

        def unpack(packed):
            return packed if isinstance(packed, torch.Tensor) else tier.load(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x.to(gpu.device)).square().mean()
        stored = tier.bytes_used
        loss.backward()
        return model, stored

    with executing("62MiB") as gpu, make_tier() as tier, pytest.raises(torch.OutOfMemoryError):
        step(hooks=False)
    with executing("62MiB") as gpu, make_tier() as tier:
        model, stored = step(hooks=True)
        assert stored >= 24 * 2 * MIB
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.cpu(), theirs.grad)
