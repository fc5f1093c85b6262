"""Transfers beside the computation: their threads, their errors, and how much of them is in flight."""

import gc
import threading
import time
import weakref

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TransferError
from memscale.offload.activations import Activations
from memscale.tiers import disk
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import Engine, Lane

CPU = torch.device("cpu")
KIB = 2**10


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("memscale-offload")]


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def engine():
    return Engine(AsyncOffloadConfig(prefetch_depth=1, workers=2))


class Gate:
    """Stands in for the disk's writes or reads, and lets them through when told."""

    def __init__(self, monkeypatch, name):
        self.open = threading.Event()
        self.calls = 0
        self._real = getattr(disk, name)
        monkeypatch.setattr(disk, name, self)

    def __call__(self, fd, tensor, offset):
        self.calls += 1
        assert self.open.wait(30)
        self._real(fd, tensor, offset)


# Threads -------------------------------------------------------------------------------------------


def test_threads_start_with_the_first_job_and_end_with_the_engine():
    engine, done = Engine(AsyncOffloadConfig(workers=3)), []
    assert not our_threads()
    assert engine.run(threading.get_ident, Lane.WORKER, CPU).wait() != threading.get_ident()
    assert our_threads()
    for index in range(50):
        engine.run(lambda index=index: done.append(index), Lane.WORKER, CPU)
    del engine
    gc.collect()
    wait_until(lambda: sorted(done) == list(range(50)) and not our_threads())


def test_an_error_belongs_to_its_transfer_and_keeps_its_cause(engine):
    transfer = engine.run(lambda: 1 / 0, Lane.WORKER, CPU)
    for _ in range(2):
        with pytest.raises(TransferError, match="division by zero") as error:
            transfer.wait()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert engine.run(lambda: 5, Lane.WORKER, CPU).wait() == 5


def test_a_transfer_does_not_outlive_its_work(engine):
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    engine.run(lambda tensor=tensor: None, Lane.WORKER, CPU).wait()
    del tensor
    wait_until(lambda: alive() is None)


def test_what_runs_here(engine, monkeypatch):
    here = threading.get_ident()
    assert Engine().run(threading.get_ident, Lane.WORKER, CPU).wait() == here
    assert engine.run(threading.get_ident, Lane.CALLER, CPU).wait() == here
    monkeypatch.setattr(engine, "_pid", -1)  # a fork has none of the threads
    assert engine.run(threading.get_ident, Lane.WORKER, CPU).wait() == here


# Activations on their way to the disk -----------------------------------------------------------------


@pytest.fixture
def activations(engine, tmp_path):
    store = DiskStore(tmp_path, 2**26)
    yield Activations(engine, CPU, store=store)
    gc.collect()
    wait_until(lambda: store.bytes_used == 0)  # a worker may still be writing
    store.close()


def chain(activations, x, layers):
    for _ in range(layers):
        with activations.around([]):
            x = (x * 2).square()
    return x


def test_a_layer_goes_on_before_the_disk_has_what_it_saved(activations, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    x = torch.randn(128, 128, requires_grad=True)
    with activations.around([]):
        y = (x * 2).square().sum()  # the gate is shut: to get here is the proof
    y.backward()  # what is on its way is still in memory
    assert torch.equal(x.grad, 8 * x.detach())
    gate.open.set()


def test_no_more_layers_than_the_depth_are_in_flight(activations, monkeypatch):
    gate, reached = Gate(monkeypatch, "write_from"), []

    def run():
        x = torch.randn(128, 128, requires_grad=True)
        for index in range(5):
            with activations.around([]):
                x = (x * 2).square()
            reached.append(index)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: len(reached) == 2)  # the layer that computes, and one more
    time.sleep(0.1)
    assert len(reached) == 2  # the third waits for the first
    gate.open.set()
    thread.join()
    assert len(reached) == 5


def test_memory_that_is_stored_is_freed_when_later_layers_run(activations):
    x = torch.randn(128, 128, requires_grad=True)
    with activations.around([]):
        product = x * 2
        alive = weakref.ref(product.untyped_storage())
        y = product.square()
    del product
    assert alive() is not None
    y = chain(activations, y, 2)
    assert alive() is None
    del y


def test_a_tensor_that_is_changed_while_it_is_stored_is_an_error(activations):
    x = torch.randn(128, 128, requires_grad=True)
    with activations.around([]):
        product = x * 2
        y = product.square()
    with torch.no_grad():
        product.add_(1)
    y = chain(activations, y, 2)  # nobody waits for it before it is dropped
    with pytest.raises(TransferError, match=r"16384 float32 was changed in place while it was being stored"):
        y.sum().backward()


def test_backward_prefetches_once_and_reads_once(activations, monkeypatch):
    reads = Gate(monkeypatch, "read_into")
    reads.open.set()
    x = torch.randn(128, 128, requires_grad=True)
    y = chain(activations, x, 6)
    y.sum().backward()
    assert reads.calls == 4  # the last two layers were still in memory
    assert x.grad is not None


def test_a_read_that_fails_surfaces_in_backward(activations, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    x = torch.randn(128, 128, requires_grad=True)
    y = chain(activations, x, 4)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_into", broken)
        with pytest.raises(TransferError, match=r"64.0 KiB could not be loaded by the disk tier") as error:
            y.sum().backward()
        assert isinstance(error.value.__cause__, OSError)
