"""Transfers on CUDA streams, seen by a device that only writes down what it is told."""

import gc

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError, TransferError
from memscale.tiers import engine as engine_module
from memscale.tiers.engine import Engine, Lane, PinnedBudget
from memscale.tiers.tier import DiskTier, HostTier
from support.pretend_cuda import CUDA, LOG, Pretend, Stream, cuda, on_cuda  # noqa: F401

MIB = 2**20


@pytest.fixture
def engine():
    with Engine(AsyncOffloadConfig(prefetch_depth=1)) as made:
        yield made


def test_down_and_up_are_ordered_by_events(cuda, engine):  # noqa: F811
    with HostTier(2**20, engine=engine) as tier:
        ticket = tier.store(on_cuda(1000))
        assert LOG == [
            "compute: record event 1",
            "copy stream 1: wait for event 1",  # what computed it
            "copy stream 1: copy down, beside it",
            "copy stream 1: record event 2",
        ]
        LOG.clear()
        others = [tier.store(on_cuda(10)) for _ in range(2)]  # the depth is 1: the first has to be stored
        assert LOG[-1] == "compute: wait for event 2"
        assert ticket.entry.source is None
        LOG.clear()
        tier.prefetch(ticket)
        assert LOG == [
            "copy stream 2: wait for event 2",  # the copy down, on the other stream
            "copy stream 2: copy up",
            "copy stream 2: record event 7",
        ]
        LOG.clear()
        loaded = tier.load(ticket)
        assert LOG == ["compute: wait for event 7", "record_stream(compute)"]
        assert isinstance(loaded, Pretend)
        assert bool((loaded.as_subclass(torch.Tensor) == 1).all())
        del others


def test_what_is_still_on_the_device_is_copied_there(cuda, engine):  # noqa: F811
    with HostTier(2**20, engine=engine) as tier:
        ticket = tier.store(on_cuda(1000))
        LOG.clear()
        assert bool((tier.load(ticket).as_subclass(torch.Tensor) == 1).all())
        assert LOG == []  # nothing crosses the link


def test_a_tensor_that_is_changed_before_the_copy_is_settled_is_an_error(cuda, engine):  # noqa: F811
    with HostTier(2**20, engine=engine) as tier:
        tensor = on_cuda(1000)
        ticket = tier.store(tensor)
        tensor.add_(1)
        with pytest.raises(TransferError, match="changed in place"):
            tier.flush()
        with pytest.raises(TransferError, match="changed in place"):
            tier.load(ticket)


def test_pinned_memory_is_capped_and_the_rest_is_ordinary(cuda):  # noqa: F811
    config = AsyncOffloadConfig(prefetch_depth=8, pinned_pool_gb=8 * 8192 / 7e9)  # an eighth is for gradients
    with Engine(config) as engine, HostTier(32768, engine=engine) as tier:
        tickets = [tier.store(on_cuda(1024, float(index))) for index in range(8)]
        assert sum(ticket.entry.place.pinned for ticket in tickets) == 2
        assert tier.bytes_used == 32768
        with pytest.raises(TierFullError):
            tier.store(on_cuda(1))
        for index, ticket in enumerate(tickets):
            assert bool((tier.load(ticket).as_subclass(torch.Tensor) == index).all())


def test_where_pages_cannot_be_locked_it_works_all_the_same(cuda, engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(engine_module, "_allocate_pinned", lambda nbytes: None)
    with HostTier(2**20, engine=engine) as tier:
        ticket = tier.store(on_cuda(100, 3.0))
        tier.flush()
        assert bool((tier.load(ticket).as_subclass(torch.Tensor) == 3).all())
        assert not ticket.entry.place.pinned


def test_a_budget_of_page_locked_memory(cuda):  # noqa: F811
    budget = PinnedBudget(8192)
    first = budget.allocate(3000)
    assert (first.numel(), budget.bytes_in_use) == (3000, 4096)  # as torch's allocator rounds
    assert budget.allocate(4096, limit=5000) is None
    second = budget.allocate(4096)
    assert second is not None
    assert budget.allocate(1) is None
    budget.release(3000)
    assert budget.bytes_in_use == 4096
    assert budget.allocate(4000) is not None


def test_without_an_engine_copies_wait(cuda):  # noqa: F811
    with HostTier(2**20) as tier:
        ticket = tier.store(on_cuda(100))
        assert LOG == ["compute: copy down"]
        tier.load(ticket)
        assert LOG[1:] == ["compute: copy up"]


def test_a_worker_copies_on_a_stream_of_its_own(cuda, engine):  # noqa: F811
    work = engine._on_worker_stream(lambda: LOG.append(f"{Stream.current[-1]}: work"), Lane.WRITE, CUDA)
    assert LOG == ["compute: record event 1"]  # here, in the training thread
    work()
    assert LOG[1:] == ["copy stream 1: wait for event 1", "copy stream 1: work", "synchronize copy stream 1"]
    LOG.clear()
    assert isinstance(engine._on_worker_stream(lambda: on_cuda(3), Lane.READ, CUDA)(), Pretend)
    assert LOG == ["synchronize copy stream 2", "record_stream(compute)"]


def test_from_cuda_to_disk(cuda, tmp_path):  # noqa: F811
    with DiskTier(tmp_path, 2**20) as tier:
        ticket = tier.store(on_cuda(1000, 2.0))
        loaded = tier.load(ticket)
        assert isinstance(loaded, Pretend)
        assert bool((loaded.as_subclass(torch.Tensor) == 2).all())
        del loaded, ticket
        gc.collect()
        assert tier.bytes_used == 0


# ---------------------------------------------------------------------- with a device


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("depth", [0, 2])
def test_round_trips_on_a_real_device(kind, depth, tmp_path):
    engine = Engine(AsyncOffloadConfig(prefetch_depth=depth)) if depth else None
    tier = (
        HostTier(256 * MIB, engine=engine) if kind == "host" else DiskTier(tmp_path, 256 * MIB, engine=engine)
    )
    with tier:
        for _ in range(3):
            tickets, expected = [], []
            for index in range(8):
                x = torch.randn(MIB, device="cuda") * (index + 1)
                expected.append(x.double().sum().item())
                tickets.append(tier.store(x))
                del x
            for index in reversed(range(8)):
                for ticket in tickets[max(0, index - 2) : index][::-1]:
                    tier.prefetch(ticket)
                assert tier.load(tickets[index]).double().sum().item() == expected[index]
                tier.free(tickets[index])
        tier.flush()
        assert tier.bytes_used == 0
    if engine is not None:
        engine.close()


@pytest.mark.cuda
def test_blocks_are_really_page_locked():
    with HostTier(64 * MIB) as tier:
        ticket = tier.store(torch.randn(MIB, device="cuda"))
        assert ticket.entry.place.memory.is_pinned()
