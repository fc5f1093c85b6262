"""Transfers beside the training: their order, their depth, their errors, and the end of their threads."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierError, TransferError
from memscale.tiers import disk_file as disk_module
from memscale.tiers.engine import Engine, Lane
from memscale.tiers.tier import DiskTier, HostTier

CPU = torch.device("cpu")


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("memscale-offload")]


@pytest.fixture
def engine():
    made = Engine(AsyncOffloadConfig(prefetch_depth=2, workers=2))
    yield made
    made.close()
    assert not our_threads()


class Gate:
    """Stands in for the disk's writes or reads, and lets them through when told."""

    def __init__(self, monkeypatch, name, error=None):
        self.open = threading.Event()
        self.calls = 0
        self.error = error
        self._real = getattr(disk_module, name)
        monkeypatch.setattr(disk_module, name, self)

    def __call__(self, fd, tensor, offset):
        self.calls += 1
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        self._real(fd, tensor, offset)


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


# ---------------------------------------------------------------------- threads


def test_threads_start_with_the_first_job_and_end_with_the_engine():
    engine = Engine(AsyncOffloadConfig(workers=3))
    assert not our_threads()
    assert engine.run(threading.get_ident, Lane.WRITE, CPU).wait() != threading.get_ident()
    assert our_threads()
    engine.close()
    assert not our_threads()
    with pytest.raises(TierError, match="closed"):
        engine.run(print, Lane.WRITE, CPU)


def test_an_engine_that_is_dropped_finishes_and_ends():
    engine, done = Engine(AsyncOffloadConfig()), []
    for index in range(50):
        engine.run(lambda index=index: done.append(index), Lane.WRITE, CPU)
    del engine
    gc.collect()
    wait_until(lambda: sorted(done) == list(range(50)) and not our_threads())


def test_closing_does_what_is_in_the_queue():
    engine, done = Engine(AsyncOffloadConfig(workers=1)), []
    for index in range(20):
        engine.run(lambda index=index: (time.sleep(0.001), done.append(index)), Lane.WRITE, CPU)
    engine.close()
    assert done == list(range(20))


def test_an_error_belongs_to_its_transfer_and_keeps_its_cause(engine):
    ended = []
    transfer = engine.run(lambda: 1 / 0, Lane.WRITE, CPU, on_end=ended.append)
    with pytest.raises(TransferError, match="division by zero") as error:
        transfer.wait()
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert ended == [error.value.__cause__]
    assert engine.run(lambda: 5, Lane.WRITE, CPU).wait() == 5


def test_a_transfer_does_not_outlive_its_work(engine):
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    transfer = engine.run(lambda tensor=tensor: None, Lane.WRITE, CPU)
    transfer.wait()
    del tensor
    wait_until(lambda: alive() is None)


def test_a_fork_is_told_that_it_has_no_threads(engine, monkeypatch):
    gate = threading.Event()
    transfer = engine.run(gate.wait, Lane.WRITE, CPU)
    owner = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: owner + 1)
        for call in (lambda: engine.run(lambda: 1, Lane.WRITE, CPU), transfer.wait):
            with pytest.raises(TierError, match="is a fork of it"):
                call()
    gate.set()


def test_without_settings_everything_runs_here():
    assert Engine().run(threading.get_ident, Lane.READ, CPU).wait() == threading.get_ident()


def test_the_lanes_of_an_asynchronous_engine(engine):
    here = threading.get_ident()
    assert engine.run(threading.get_ident, Lane.CALLER, CPU).wait() == here
    assert engine.run(threading.get_ident, Lane.READ, CPU).wait() != here
    assert engine.run(threading.get_ident, Lane.WRITE, CPU).wait() != here
    assert engine.depth == 2


# ---------------------------------------------------------------------- storing beside the training


def test_a_store_returns_before_the_disk_does(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tensor = torch.randn(1000)
        ticket = tier.store(tensor)  # the gate is shut: returning is the proof
        # It can be loaded before it is stored, and is then another tensor already.
        loaded = tier.load(ticket)
        assert torch.equal(loaded, tensor)
        assert loaded.data_ptr() != tensor.data_ptr()
        gate.open.set()
        tier.flush()
        assert gate.calls == 1


def test_memory_is_let_go_when_it_is_stored(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tensor = torch.randn(1000)
        alive = weakref.ref(tensor.untyped_storage())
        ticket = tier.store(tensor)
        del tensor
        assert alive() is not None
        gate.open.set()
        wait_until(lambda: alive() is None)  # without another call
        assert tier.load(ticket).numel() == 1000


def test_no_more_groups_than_the_depth_are_on_their_way_down(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tickets, stored = [], []

        def store():
            for index in range(6):
                tickets.append(tier.store(torch.full((500,), float(index)), group=index))
                tickets.append(tier.store(torch.ones(10), group=index))
                stored.append(index)

        thread = threading.Thread(target=store)
        thread.start()
        wait_until(lambda: len(stored) == 3)  # the layer that computes, and two more
        time.sleep(0.1)
        assert len(stored) == 3  # the fourth waits for the first
        gate.open.set()
        thread.join()
        for index, ticket in enumerate(tickets[::2]):
            assert bool((tier.load(ticket) == index).all())


def test_a_ticket_that_is_freed_in_time_is_not_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    with Engine(AsyncOffloadConfig(workers=1, prefetch_depth=9)) as engine:
        with DiskTier(tmp_path, 2**24, engine=engine) as tier:
            tickets = [tier.store(torch.randn(1000)) for _ in range(5)]
            del tickets[1:]
            gate.open.set()
            tier.flush()
            assert gate.calls == 1
            assert tier.bytes_used == 4096


def test_an_error_surfaces_once_with_its_cause_and_the_tensor_is_not_lost(engine, tmp_path, monkeypatch):
    broken = OSError(5, "Input/output error")
    gate = Gate(monkeypatch, "write_from", broken)
    for surface in ("store", "load", "prefetch", "flush"):
        with DiskTier(tmp_path, 2**24, engine=engine) as tier:
            tensor = torch.randn(1000)
            ticket = tier.store(tensor)
            gate.open.set()
            wait_until(lambda tier=tier: tier._failures)
            call = {
                "store": lambda tier=tier: tier.store(torch.ones(1)),
                "load": lambda tier=tier, ticket=ticket: tier.load(ticket),
                "prefetch": lambda tier=tier, ticket=ticket: tier.prefetch(ticket),
                "flush": lambda tier=tier: tier.flush(),
            }[surface]
            with pytest.raises(
                TransferError, match=r"3.91 KiB could not be stored by the disk tier"
            ) as error:
                call()
            assert error.value.__cause__ is broken
            assert torch.equal(tier.load(ticket), tensor)


def test_a_read_that_fails_surfaces_in_load(engine, tmp_path, monkeypatch):
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tickets = [tier.store(torch.randn(1000)) for _ in range(2)]
        tier.flush()
        gate = Gate(monkeypatch, "read_into", OSError(5, "Input/output error"))
        gate.open.set()
        tier.prefetch(tickets[0])
        for ticket in tickets:  # fetched ahead, and not
            with pytest.raises(TransferError, match="could not be loaded") as error:
                tier.load(ticket)
            assert isinstance(error.value.__cause__, OSError)
        monkeypatch.undo()
        assert tier.load(tickets[0]).numel() == 1000  # the bytes are where they were


def test_a_tensor_that_is_changed_while_it_is_stored_is_an_error(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch, "write_from")
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tensor = torch.randn(1000)
        ticket = tier.store(tensor)
        tensor.add_(1)
        gate.open.set()
        with pytest.raises(
            TransferError, match=r"1000 float32 was changed in place while it was being stored"
        ):
            tier.flush()
        for _ in range(2):  # never half old and half new
            with pytest.raises(TransferError, match="changed in place"):
                tier.load(ticket)
        tier.prefetch(ticket)
        # Afterwards it may be changed.
        tensor = torch.randn(1000)
        kept, ticket = tensor.clone(), tier.store(tensor)
        tier.flush()
        tensor.add_(1)
        assert torch.equal(tier.load(ticket), kept)


# ---------------------------------------------------------------------- fetching ahead


def test_what_was_fetched_ahead_is_what_is_loaded(engine, tmp_path, monkeypatch):
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tensor = torch.randn(5, 7).t()
        ticket = tier.store(tensor)
        tier.flush()
        gate = Gate(monkeypatch, "read_into")
        tier.prefetch(ticket)
        tier.prefetch(ticket)
        gate.open.set()
        assert torch.equal(tier.load(ticket), tensor)
        assert gate.calls == 1


def test_what_is_dropped_is_read_when_it_is_asked_for(engine, tmp_path, monkeypatch):
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        tickets = [tier.store(torch.full((10,), float(index))) for index in range(4)]
        tier.flush()
        gate = Gate(monkeypatch, "read_into")
        gate.open.set()
        for ticket in tickets:
            tier.prefetch(ticket)
        tier.drop_prefetched()
        assert all(ticket.entry.fetching is None for ticket in tickets)
        for index, ticket in enumerate(tickets):
            assert bool((tier.load(ticket) == index).all())
        assert gate.calls >= 4


def test_freed_while_it_is_fetched(engine, tmp_path, monkeypatch):
    with DiskTier(tmp_path, 2**24, engine=engine) as tier:
        ticket = tier.store(torch.randn(1000))
        tier.flush()
        gate = Gate(monkeypatch, "read_into")
        tier.prefetch(ticket)
        wait_until(lambda: gate.calls == 1)
        tier.free(ticket)
        assert tier.bytes_used == 4096  # it is still being read
        gate.open.set()
        wait_until(lambda: (tier.flush(), tier.bytes_used == 0)[1])


def test_transfers_overlap_with_compute(tmp_path, monkeypatch):
    """A disk that takes as long as the layers compute is hidden behind them; both only sleep, to be the same here
    and on a busy machine."""
    pause = 0.02
    for name in ("write_from", "read_into"):
        real = getattr(disk_module, name)
        monkeypatch.setattr(disk_module, name, lambda *args, real=real: (time.sleep(pause), real(*args)))

    def step(tier):
        start = time.perf_counter()
        tickets = []
        for index in range(10):
            time.sleep(pause)  # forward
            tickets.append(tier.store(torch.full((1000,), float(index))))
        for index in reversed(range(10)):
            for ticket in tickets[max(0, index - 1) : index + 1][::-1]:
                tier.prefetch(ticket)
            assert float(tier.load(tickets[index])[0]) == index
            time.sleep(pause)  # backward
        return time.perf_counter() - start

    with Engine(AsyncOffloadConfig(prefetch_depth=2, workers=2)) as engine:
        with DiskTier(tmp_path, 2**20) as sync, DiskTier(tmp_path, 2**20, engine=engine) as asynchronous:
            ratios = [step(sync) / step(asynchronous) for _ in range(3)]
    assert max(ratios) > 1.3  # two, if nobody else uses the machine


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_async_is_bit_equal_to_sync(kind, tmp_path):
    """A small training loop with its saved tensors and its optimizer state in the tier."""

    def train(engine):
        tier = HostTier(2**26, engine=engine) if kind == "host" else DiskTier(tmp_path, 2**26, engine=engine)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters())
        tickets = {}
        with tier:
            for _ in range(3):
                with torch.autograd.graph.saved_tensors_hooks(tier.store, tier.load):
                    loss = model(torch.randn(32, 64)).square().mean()
                loss.backward()
                for key, ticket in tickets.items():
                    optimizer.state[key[0]][key[1]] = tier.load(ticket)
                optimizer.step()
                tickets.clear()
                for parameter, state in optimizer.state.items():
                    for name, value in state.items():
                        tickets[parameter, name] = tier.store(value)
                        state[name] = None
                        tier.prefetch(tickets[parameter, name])
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in model.parameters()]

    with Engine(AsyncOffloadConfig(workers=3)) as engine:
        ours = train(engine)
    for a, b in zip(ours, train(None), strict=True):
        assert torch.equal(a, b)
