"""Both tiers, with and without workers: what goes in comes out, within the cap, and nothing stays behind."""

import gc
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memscale.config import AsyncOffloadConfig
from memscale.errors import ConfigError, TierError, TierFullError
from memscale.tiers.engine import Engine
from memscale.tiers.tier import DiskTier, HostTier
from support.tensors import DTYPES, assert_same, filled, groups

PAGE = 4096


def make_tier(kind, tmp_path, capacity=2**24, engine=None):
    return (
        HostTier(capacity, engine=engine) if kind == "host" else DiskTier(tmp_path, capacity, engine=engine)
    )


@pytest.fixture(params=["sync", "async"])
def engine(request):
    made = Engine(AsyncOffloadConfig(prefetch_depth=2) if request.param == "async" else None)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("memscale-offload")]


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path, engine):
    made = make_tier(request.param, tmp_path, engine=engine)
    yield made
    made.close()
    assert made.bytes_used == 0
    assert list(tmp_path.iterdir()) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(tensors=groups())
def test_any_tensor_comes_back(tier, tensors):
    tensors = [each for each in tensors if not each.is_conj() and not each.is_neg()]
    group = object()
    tickets = [tier.store(each, group) for each in tensors]
    for ticket in tickets:
        tier.prefetch(ticket)
    for ticket, tensor in zip(tickets, tensors, strict=True):
        assert_same(tier.load(ticket), tensor)
        assert_same(tier.load(ticket), tensor)  # again
    for ticket in tickets:
        tier.free(ticket)
    tier.flush()
    assert tier.bytes_used == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tier, dtype):
    tensor = filled(1000, dtype).view(10, 100).t()
    assert_same(tier.load(tier.store(tensor)), tensor)


def test_a_column_is_stored_without_its_matrix(tier):
    column = torch.randn(1000, 8)[:, 3]
    ticket = tier.store(column)
    assert ticket.nbytes == 4000
    assert_same(tier.load(ticket), column)


def test_an_expanded_tensor_is_stored_as_its_one_row(tier):
    row = torch.randn(1, 100).expand(50, 100)
    ticket = tier.store(row)
    assert ticket.nbytes == 400
    assert_same(tier.load(ticket), row)


def test_loaded_tensors_are_no_views_for_autograd(tier):
    loaded = tier.load(tier.store(torch.randn(10, 4).t()))
    loaded.requires_grad_()
    with torch.no_grad():
        loaded.add_(1)
    (loaded * 2).sum().backward()
    assert loaded.grad is not None


def test_parameters_come_back_without_gradient_and_without_touching_them(tier):
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    loaded = tier.load(tier.store(parameter))
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, parameter)
    assert not loaded.requires_grad


def test_dropped_tickets_free_their_bytes(tier):
    tickets = [tier.store(torch.randn(1000)) for _ in range(5)]
    tier.flush()
    assert tier.bytes_used >= 20000
    cycle = [tickets]
    cycle.append(cycle)
    del tickets, cycle
    gc.collect()
    tier.flush()
    assert tier.bytes_used == 0


def test_a_tensor_that_is_dropped_at_once_is_stored(tier):
    tickets = [tier.store(torch.full((50_000,), float(index))) for index in range(10)]
    for index, ticket in enumerate(tickets):
        assert bool((tier.load(ticket) == index).all())


def test_freed_at_once(tier):
    for _ in range(20):
        tier.free(tier.store(torch.randn(100_000)))
    tier.flush()
    assert tier.bytes_used == 0


def test_freed_tickets_and_foreign_ones_are_refused(tier, tmp_path):
    ticket = tier.store(torch.randn(10))
    tier.free(ticket)
    tier.free(ticket)  # twice is once
    with pytest.raises(TierError, match="was freed"):
        tier.load(ticket)
    with HostTier(1000) as other:
        foreign = other.store(torch.randn(10))
        with pytest.raises(TierError, match="not one of this"):
            tier.load(foreign)


def test_empty_tensors_need_no_room(tmp_path, engine):
    for kind in ("host", "disk"):
        with make_tier(kind, tmp_path, capacity=0, engine=engine) as tier:
            tensor = torch.empty(3, 0, 2, dtype=torch.int16)
            ticket = tier.store(tensor)
            tier.prefetch(ticket)
            assert_same(tier.load(ticket), tensor)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_full_tier_says_the_numbers_and_loses_nothing(kind, tmp_path, engine):
    with make_tier(kind, tmp_path, capacity=10 * PAGE, engine=engine) as tier:
        kept = [torch.randn(2 * PAGE // 4) for _ in range(4)]
        tickets = [tier.store(tensor) for tensor in kept]
        with pytest.raises(
            TierFullError, match=r"12.0 KiB more .* cap of 40.0 KiB, of which 32.0 KiB"
        ) as error:
            tier.store(torch.randn(3 * PAGE // 4))
        assert "Config(max_" in str(error.value)
        assert tier.bytes_used == 8 * PAGE
        for ticket, tensor in zip(tickets, kept, strict=True):
            assert_same(tier.load(ticket), tensor)
        tier.free(tickets[0])
        tier.store(torch.randn(3 * PAGE // 4))
        assert tier.bytes_used <= tier.capacity


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_room_that_a_transfer_still_uses_is_waited_for(kind, tmp_path):
    with (
        Engine(AsyncOffloadConfig()) as engine,
        make_tier(kind, tmp_path, capacity=100 * PAGE, engine=engine) as tier,
    ):
        for index in range(30):
            ticket = tier.store(torch.full((100 * PAGE // 4,), float(index)))
            assert tier.bytes_used <= tier.capacity
            del ticket


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_closed_tier_says_so(kind, tmp_path):
    tier = make_tier(kind, tmp_path)
    ticket = tier.store(torch.ones(3))
    tier.close()
    tier.close()
    for call in (lambda: tier.load(ticket), lambda: tier.store(torch.ones(3)), lambda: tier.prefetch(ticket)):
        with pytest.raises(TierError, match="is closed"):
            call()
    tier.free(ticket)
    assert tier.bytes_used == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_negative_capacity_is_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match="capacity=-1"):
        make_tier(kind, tmp_path, capacity=-1)


def test_without_a_capacity_it_is_what_is_free(tmp_path):
    assert HostTier().capacity > 2**20
    assert DiskTier(tmp_path).capacity > 2**20


def test_many_threads_use_one_tier(tier):
    errors = []

    def use(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(30):
                tensor = torch.randn(1000, generator=generator)
                ticket = tier.store(tensor)
                tier.prefetch(ticket)
                assert torch.equal(tier.load(ticket), tensor)
                if seed % 2:
                    tier.free(ticket)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tier.flush()
    assert tier.bytes_used == 0


def test_saved_tensors_of_autograd(tier):
    """As a model would use it: hooks that store what autograd saves, and free it by dropping the graph."""

    def loss_of(x, weights):
        for weight in weights:
            x = torch.nn.functional.gelu(x @ weight)
        return x.square().mean()

    weights = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
    x = torch.randn(16, 32)
    loss_of(x, weights).backward()
    expected = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    with torch.autograd.graph.saved_tensors_hooks(tier.store, tier.load):
        loss = loss_of(x, weights)
    tier.flush()
    assert tier.bytes_used > 0
    loss.backward()
    assert all(torch.equal(w.grad, e) for w, e in zip(weights, expected, strict=True))
    del loss
    gc.collect()
    tier.flush()
    assert tier.bytes_used == 0


class TierMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the cap and the values."""

    CAPACITY = 12 * PAGE

    def __init__(self):
        super().__init__()
        self.engine = Engine(AsyncOffloadConfig(prefetch_depth=1))
        self.tiers = [
            HostTier(self.CAPACITY),
            HostTier(self.CAPACITY, engine=self.engine),
            DiskTier(None, self.CAPACITY),
            DiskTier(None, self.CAPACITY, engine=self.engine),
        ]
        self.held = []  # (tensor, its ticket in each tier)

    @rule(sizes=st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=3), seed=st.integers(0, 99))
    def store(self, sizes, seed):
        for size in sizes:
            tensor, stored = filled(size, torch.uint8, seed), []
            for tier in self.tiers:
                try:
                    stored.append(tier.store(tensor, self))
                except TierFullError:
                    stored.append(None)
            self.held.append((tensor, stored))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def prefetch(self, data):
        _, tickets = data.draw(st.sampled_from(self.held))
        for tier, ticket in zip(self.tiers, tickets, strict=True):
            if ticket is not None:
                tier.prefetch(ticket)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def load(self, data):
        tensor, tickets = data.draw(st.sampled_from(self.held))
        for tier, ticket in zip(self.tiers, tickets, strict=True):
            if ticket is not None:
                assert_same(tier.load(ticket), tensor)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        _, tickets = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for tier, ticket in zip(self.tiers, tickets, strict=True):
            if ticket is not None:
                tier.free(ticket)

    @invariant()
    def within_the_cap(self):
        assert all(0 <= tier.bytes_used <= self.CAPACITY for tier in self.tiers)

    def teardown(self):
        for tier in self.tiers:
            tier.close()
            assert tier.bytes_used == 0
        self.engine.close()


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=20, stateful_step_count=20)
