"""The CUDA side without a CUDA device: streams and events that write down what they are told.

The tensors are CPU tensors that say they are on `cuda:0`; every line of the tiers and of `streams.py` runs as
it would there, except the copies themselves.
"""

import contextlib
import gc
from typing import ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError, TransferError
from memscale.tiers import streams
from memscale.tiers.disk import DiskTier
from memscale.tiers.engine import AsyncEngine
from memscale.tiers.host import HostTier
from memscale.tiers.pinned import PinnedPool

CUDA = torch.device("cuda", 0)
MIB = 2**20


class Pretend(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    @property
    def device(self):
        return CUDA

    def record_stream(self, stream):
        LOG.append(f"record_stream({stream})")


LOG: list[str] = []


class Event:
    count = 0

    def __init__(self, stream):
        Event.count += 1
        self.name, self.over = f"event {Event.count}", False
        LOG.append(f"{stream}: record {self.name}")

    def query(self):
        return self.over

    def synchronize(self):
        LOG.append(f"synchronize {self.name}")
        self.over = True


class Stream:
    current: ClassVar[list["Stream"]] = []
    made = 0

    def __init__(self, device=None, name=None):
        Stream.made += name is None
        self.name = name or f"copy stream {Stream.made}"

    def __str__(self):
        return self.name

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        LOG.append(f"{self}: wait for {event.name}")

    def synchronize(self):
        LOG.append(f"synchronize {self}")


@contextlib.contextmanager
def on_stream(stream):
    Stream.current.append(stream)
    try:
        yield
    finally:
        Stream.current.pop()


class PretendCuda(TorchFunctionMode):
    """Copies to the CUDA device, and from it, on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            up = args[1].type == "cuda"
            LOG.append(f"{Stream.current[-1]}: copy {'up' if up else 'down'}")
            copy = args[0].detach().as_subclass(torch.Tensor).clone()
            return copy.as_subclass(Pretend) if up else copy
        if func is torch.Tensor.copy_ and isinstance(args[1], Pretend):
            asynchronous = ", beside it" if kwargs.get("non_blocking") else ""
            LOG.append(f"{Stream.current[-1]}: copy down{asynchronous}")
            return func(args[0], args[1].as_subclass(torch.Tensor))
        if kwargs.get("device") == CUDA:
            return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(Pretend)
        return func(*args, **kwargs)


@pytest.fixture
def cuda(monkeypatch):
    compute = Stream(name="compute")
    LOG.clear()
    Event.count = Stream.made = 0
    Stream.current[:] = [compute]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current[-1])
    with PretendCuda():
        yield compute


@pytest.fixture
def engine():
    with AsyncEngine(AsyncOffloadConfig(prefetch_depth=1)) as made:
        yield made


def pool_of(limit):
    return PinnedPool(limit, lock=lambda memory: True, unlock=lambda memory: None)


def on_cuda(numel, value=1.0):
    return torch.full((numel,), value).as_subclass(Pretend)


def test_down_and_up_are_ordered_by_events(cuda, engine):
    with HostTier(2**20, engine=engine, pool=pool_of(2**20)) as tier:
        ticket = tier.store(on_cuda(1000))
        assert LOG == [
            "compute: record event 1",
            "copy stream 1: wait for event 1",  # what computed it
            "copy stream 1: copy down, beside it",
            "copy stream 1: record event 2",
        ]
        LOG.clear()
        other = tier.store(on_cuda(10))  # the depth is 1: the first has to be settled
        assert LOG[-1] == "compute: wait for event 2"
        assert ticket.piece.source is None
        LOG.clear()
        tier.prefetch(ticket)
        assert LOG == [
            "copy stream 2: wait for event 2",  # the copy down, on the other stream
            "copy stream 2: copy up",
            "copy stream 2: record event 5",
        ]
        LOG.clear()
        loaded = tier.load(ticket)
        assert LOG == ["compute: wait for event 5", "record_stream(compute)"]
        assert isinstance(loaded, Pretend)
        assert bool((loaded.as_subclass(torch.Tensor) == 1).all())
        del other


def test_what_is_still_on_the_device_is_copied_there(cuda, engine):
    with HostTier(2**20, engine=engine, pool=pool_of(2**20)) as tier:
        ticket = tier.store(on_cuda(1000))
        LOG.clear()
        assert bool((tier.load(ticket).as_subclass(torch.Tensor) == 1).all())
        assert LOG == ["compute: copy up"]


def test_a_tensor_that_is_changed_before_the_copy_is_settled_is_an_error(cuda, engine):
    with HostTier(2**20, engine=engine, pool=pool_of(2**20)) as tier:
        tensor = on_cuda(1000)
        ticket = tier.store(tensor)
        tensor.add_(1)
        with pytest.raises(TransferError, match="changed in place"):
            tier.flush()
        with pytest.raises(TransferError, match="changed in place"):
            tier.load(ticket)


def test_the_host_waits_only_if_it_reads_itself(cuda, engine):
    with HostTier(2**20, engine=engine, pool=pool_of(2**20)) as tier:
        tickets = [tier.store(on_cuda(1000)) for _ in range(2)]
        assert not [line for line in LOG if line.startswith("synchronize")]
        LOG.clear()
        loaded = tier.load(tickets[0], device="cpu")
        assert LOG[0] == "synchronize event 2"
        assert type(loaded) is torch.Tensor


def test_a_block_is_used_again_only_after_the_copy_from_it(cuda, engine):
    pool = pool_of(2**20)
    with HostTier(2**20, engine=engine, pool=pool) as tier:
        ticket = tier.store(on_cuda(1000))
        tier.flush()  # the copy down is over
        tier.prefetch(ticket)
        event = ticket.piece.fetching.event
        tier.free(ticket)
        assert pool.bytes_in_use == 4096  # it is being read
        event.over = True
        tier.flush()
        assert pool.bytes_in_use == 0
        assert pool.bytes_locked == 4096
        again = tier.store(on_cuda(1024))
        assert pool.bytes_locked == 4096
        del again


def test_pinned_memory_is_capped_and_the_rest_is_ordinary(cuda):
    config = AsyncOffloadConfig(prefetch_depth=4, pinned_pool_gb=8192e-9)
    locked = []
    with AsyncEngine(config) as engine:
        pool = PinnedPool(8192, lock=lambda memory: not locked.append(memory), unlock=lambda memory: None)
        with HostTier(32768, engine=engine, pool=pool) as tier:
            tickets = [tier.store(on_cuda(1024, float(index))) for index in range(8)]
            assert len(locked) == 2
            assert tier.bytes_used == tier.bytes_reserved == 32768
            with pytest.raises(TierFullError):
                tier.store(on_cuda(1))
            for index, ticket in enumerate(tickets):
                assert bool((tier.load(ticket).as_subclass(torch.Tensor) == index).all())
        with HostTier(2**20, engine=engine) as tier:
            assert tier._pool.limit == 8192


def test_idle_pinned_blocks_make_way_within_the_capacity(cuda):
    pool = pool_of(8192)
    with HostTier(8192, pool=pool) as tier:
        tier.free(tier.store(on_cuda(2048)))
        assert tier.bytes_reserved == 8192
        assert tier.bytes_used == 0
        kept = tier.store(torch.ones(2048))  # from the CPU: ordinary memory
        assert tier.bytes_reserved == 8192
        assert pool.bytes_locked == 0
        del kept


def test_where_pages_cannot_be_locked_it_works_all_the_same(cuda, engine):
    pool = PinnedPool(2**20, lock=lambda memory: False, unlock=lambda memory: None)
    with HostTier(2**20, engine=engine, pool=pool) as tier:
        ticket = tier.store(on_cuda(100, 3.0))
        tier.flush()
        assert bool((tier.load(ticket).as_subclass(torch.Tensor) == 3).all())
        assert pool.bytes_locked == 0


def test_without_an_engine_copies_wait(cuda):
    with HostTier(2**20, pool=pool_of(2**20)) as tier:
        ticket = tier.store(on_cuda(100))
        assert LOG == ["compute: copy down"]
        tier.load(ticket)
        assert LOG[1:] == ["compute: copy up"]


def test_a_worker_copies_on_a_stream_of_its_own(cuda, engine):
    copies = streams.CopyStreams()
    work = copies.in_worker(lambda: LOG.append(f"{Stream.current[-1]}: work"), CUDA, up=False)
    assert LOG == ["compute: record event 1"]  # here, in the training thread
    work()
    assert LOG[1:] == ["copy stream 1: wait for event 1", "copy stream 1: work", "synchronize copy stream 1"]
    LOG.clear()
    assert isinstance(copies.in_worker(lambda: on_cuda(3), CUDA, up=True)(), Pretend)
    assert LOG == ["synchronize copy stream 2", "record_stream(compute)"]


def test_from_cuda_to_disk(cuda, tmp_path):
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
    engine = AsyncEngine(AsyncOffloadConfig(prefetch_depth=depth)) if depth else None
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
        assert ticket.piece.place.memory.is_pinned()
