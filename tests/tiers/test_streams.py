"""Transfers on CUDA streams, seen by a device that only writes down what it is told."""

import gc

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierFullError, TransferError
from memscale.hardware import HostSpec
from memscale.offload.activations import Activations, OffloadedStorage
from memscale.offload.prefetch import GRADIENTS_IN_FLIGHT, Prefetcher
from memscale.tiers import engine as engine_module
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import Engine, Lane, PinnedMemory
from support.pretend_cuda import CUDA, LOG, Pretend, Stream, cuda, on_cuda, on_stream  # noqa: F401


@pytest.fixture
def engine():
    return Engine(AsyncOffloadConfig(prefetch_depth=1))


def on_host(engine, capacity=2**20):
    return Activations(engine, CUDA, capacity=capacity)


def stored(activations, tensor):
    return OffloadedStorage(activations, tensor)


def loaded(storage):
    return storage._fetch().as_subclass(torch.Tensor)


def test_copies_in_both_directions_are_ordered_by_events(cuda, engine):  # noqa: F811
    storage = stored(on_host(engine), on_cuda(1000))
    assert LOG == [
        "compute: record event 1",
        "copy stream 1: wait for event 1",  # what computed it
        "copy stream 1: copy down, beside it",
        "copy stream 1: record event 2",
    ]
    LOG.clear()
    storage.finish_storing()
    assert LOG == ["compute: wait for event 2"]
    assert storage._source is None
    LOG.clear()
    storage.prefetch(1)
    assert LOG == [
        "compute: record event 3",
        "copy stream 2: wait for event 2",  # the copy to the host, on the other stream
        "copy stream 2: wait for event 3",  # what had the memory before
        "copy stream 2: copy up, beside it",
        "copy stream 2: record event 4",
    ]
    LOG.clear()
    assert bool((loaded(storage) == 1).all())
    assert LOG == ["compute: wait for event 4"]
    storage.prefetch(2)
    LOG.clear()
    storage.prefetched = None
    assert LOG == ["compute: wait for event 6"]  # nobody wants it: its memory is reused after the copy


def test_what_is_still_on_the_device_is_not_copied(cuda, engine):  # noqa: F811
    storage = stored(on_host(engine), on_cuda(1000))
    LOG.clear()
    assert bool((loaded(storage) == 1).all())
    assert LOG == []
    del storage
    assert LOG == ["compute: wait for event 2"]  # freed with the graph: its memory is reused after the copy


def test_memory_is_reused_after_the_copy_whichever_stream_is_current(cuda, engine):  # noqa: F811
    storage = stored(on_host(engine), on_cuda(1000))
    prefetcher = Prefetcher(engine, CUDA, [], [])
    gradients = [on_cuda(8) for _ in range(GRADIENTS_IN_FLIGHT + 1)]
    transfers = [engine.run(lambda: None, Lane.STREAM, CUDA, outward=True) for _ in gradients]
    LOG.clear()
    with on_stream(Stream(name="another")):
        storage.finish_storing()
        for each in zip(transfers, gradients, strict=True):
            prefetcher.hold_gradient(*each)
    # Their memory is of the stream that they were computed on.
    assert LOG == [
        "another: wait for event 2",
        "compute: wait for event 2",
        "another: wait for event 4",
        "compute: wait for event 4",
    ]


def test_a_tensor_that_is_changed_before_the_copy_is_over_is_an_error(cuda, engine):  # noqa: F811
    tensor = on_cuda(1000)
    storage = stored(on_host(engine), tensor)
    tensor.add_(1)
    storage.finish_storing()
    with pytest.raises(TransferError, match="changed in place"):
        loaded(storage)


def test_pinned_memory_is_capped_and_the_rest_is_ordinary(cuda):  # noqa: F811
    config = AsyncOffloadConfig(prefetch_depth=8, pinned_pool_gb=8192 / 1e9)
    activations = on_host(Engine(config), 32768)
    memory = activations.memory
    storages = [stored(activations, on_cuda(1024, float(index))) for index in range(8)]
    assert (memory.bytes_used, memory._pinned.bytes_locked) == (32768, 8192)
    with pytest.raises(TierFullError):
        stored(activations, on_cuda(1))
    for index, storage in enumerate(storages):
        storage.finish_storing()
        assert bool((loaded(storage) == index).all())
    storages.clear()
    del storage
    assert (memory.bytes_used, memory._pinned.bytes_locked) == (0, 0)


def test_where_pages_cannot_be_locked_it_works_all_the_same(cuda, engine, monkeypatch):  # noqa: F811
    monkeypatch.setattr(engine_module, "_allocate_pinned", lambda nbytes: None)
    storage = stored(on_host(engine), on_cuda(100, 3.0))
    storage.finish_storing()
    assert bool((loaded(storage) == 3).all())


def test_a_budget_of_page_locked_memory(cuda):  # noqa: F811
    budget = PinnedMemory(8192)
    first = budget.allocate(3000)
    assert (first.numel(), budget.bytes_locked) == (3000, 4096)  # as torch's allocator rounds
    second = budget.allocate(4096)
    assert second is not None
    assert budget.allocate(1) is None
    del first
    assert budget.bytes_locked == 4096
    assert budget.allocate(4000) is not None


def test_all_models_of_a_process_share_what_may_be_page_locked_by_default(cuda, monkeypatch):  # noqa: F811
    locked = []  # what is page-locked is not available

    def host(processes=1):
        taken = 2**16 + processes * sum(each.nbytes for each in locked)
        return HostSpec(2**20, 2**20 - taken, cores=2, processes=processes)

    def allocate(pool):
        memory = pool.allocate(2**16)
        locked.extend([] if memory is None else [memory])
        return memory is not None

    gc.collect()  # what other tests have left
    monkeypatch.setattr(engine_module, "read_host", host)
    limit = host().page_locked_bytes
    assert limit == 7 * 2**16
    first, second = PinnedMemory(), PinnedMemory()
    assert all(allocate(first) for _ in range(4))
    assert all(allocate(second) for _ in range(3))
    assert not allocate(first)
    assert not allocate(second)
    assert second.limit == first.limit == limit  # what both have locked does not count as taken by others
    assert allocate(PinnedMemory(2**16))  # as the Config says
    del locked[:3]
    assert first.bytes_locked == 2**16
    assert allocate(second)
    assert allocate(second)
    assert not allocate(second)
    locked.clear()
    monkeypatch.setattr(engine_module, "read_host", lambda: host(processes=3))
    shared = PinnedMemory()
    assert all(allocate(shared) for _ in range(2))
    assert not allocate(shared)


def test_a_synchronous_engine_copies_on_the_compute_stream(cuda):  # noqa: F811
    storage = stored(on_host(Engine()), on_cuda(100))
    assert LOG == ["compute: copy down"]
    loaded(storage)
    assert LOG[1:] == ["compute: copy up"]


def test_from_cuda_to_disk_a_worker_copies_on_a_stream_of_its_own(cuda, engine, tmp_path):  # noqa: F811
    work = engine.run(lambda: LOG.append(f"{Stream.current[-1]}: work"), Lane.WORKER, CUDA, outward=True)
    work.wait()
    assert LOG == [
        "compute: record event 1",  # here, in the training thread
        "set cuda:0",  # of a new thread it is the first card
        "copy stream 1: wait for event 1",
        "copy stream 1: work",
        "synchronize copy stream 1",
    ]
    store = DiskStore(tmp_path, 2**20)
    storage = stored(Activations(Engine(), CUDA, store=store), on_cuda(1000, 2.0))
    assert bool((loaded(storage) == 2).all())
    del storage
    assert store.bytes_used == 0


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_real_device(kind, depth, tmp_path):
    engine = Engine(AsyncOffloadConfig(prefetch_depth=depth) if depth else None)
    store = DiskStore(tmp_path, 2**28) if kind == "disk" else None
    activations = Activations(engine, CUDA, store=store, capacity=2**28)
    gradients = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        x = first = torch.randn(512, 512, device="cuda", requires_grad=True)
        for _ in range(8):
            if offloaded:
                with activations.around([]):
                    x = (x * 2).tanh()
            else:
                x = (x * 2).tanh()
        x.sum().backward()
        gradients.append(first.grad)
    assert torch.equal(*gradients)
    assert activations.bytes_sent > 0
