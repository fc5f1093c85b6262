"""Homes on disk: ordinary tensors whose pages can leave memory, with their values."""

import copy
import gc
import io
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memscale.config import AsyncOffloadConfig
from memscale.errors import TierError, TierFullError
from memscale.memory.process import measure_in_fresh_process, rss_bytes
from memscale.tiers import _libc
from memscale.tiers.disk import DiskTier
from memscale.tiers.engine import AsyncEngine
from memscale.tiers.mapped import MappedArena
from memscale.tiers.space import DiskSpace
from support.tensors import DTYPES, bits, filled

PAGE = _libc.PAGE
MIB = 2**20


@pytest.fixture
def arena(tmp_path):
    with DiskSpace(tmp_path, 256 * MIB) as space:
        yield MappedArena(space)
        gc.collect()
        assert space.bytes_used == 0
    assert list(tmp_path.iterdir()) == []


def blocks(space):
    return os.fstat(space.fd).st_blocks * 512


def resident(tensor):
    """Bytes of the tensor's pages that are in this process now."""
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    total, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low < stop and start < high
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
    return total


# ---------------------------------------------------------------------- pages


def test_values_survive_and_memory_falls(arena):
    values = torch.randn(16 * MIB // 4)
    x = arena.empty(values.shape)
    x.copy_(values)
    before = rss_bytes()
    assert resident(x) == x.nbytes
    assert arena.give_back(x) == x.nbytes
    assert before - rss_bytes() > 15 * MIB
    assert resident(x) == 0
    assert torch.equal(x, values)
    x.add_(1)
    arena.give_back(x)
    assert torch.equal(x, values + 1)


def test_pages_leave_the_page_cache_too(arena):
    values = torch.randn(4 * MIB // 4)
    x = arena.copy_of(values)
    assert arena.give_back(x, cached=False) == x.nbytes
    assert resident(x) == 0
    assert torch.equal(x, values)


def test_a_copy_takes_no_pages_in_this_process(arena):
    values = torch.randn(8 * MIB // 4)
    before = rss_bytes()
    x = arena.copy_of(values)
    assert resident(x) == 0
    assert rss_bytes() - before < 4 * MIB
    assert torch.equal(x, values)


def test_each_tensor_has_its_own_pages(arena):
    tensors = [arena.copy_of(torch.full((PAGE,), float(index))) for index in range(8)]
    for tensor in tensors:
        tensor.sum()
    arena.give_back(tensors[3])
    assert [resident(tensor) for tensor in tensors] == [0 if i == 3 else 4 * PAGE for i in range(8)]


def test_of_a_view_only_whole_pages_are_given_back(arena):
    x = arena.copy_of(torch.arange(4 * PAGE, dtype=torch.float32))  # four pages of floats a row
    rows = x.view(4, PAGE)
    assert arena.give_back(rows[1]) == 4 * PAGE
    assert arena.give_back(x[100 : 100 + PAGE]) == 3 * PAGE
    assert arena.give_back(x[:10]) == 0
    assert arena.give_back(x[-PAGE // 2 :]) == 2 * PAGE
    assert arena.give_back(rows.t()) == 16 * PAGE
    assert torch.equal(x, torch.arange(4 * PAGE, dtype=torch.float32))


def test_the_rest_of_the_last_page_is_given_back_with_it(arena):
    x = arena.copy_of(torch.ones(PAGE // 4 + 1))
    assert arena.give_back(x) == 2 * PAGE


def test_ordinary_memory_is_never_given_back(arena):
    x = torch.randn(MIB)
    kept = x.clone()
    for call in (arena.give_back, arena.read_ahead):
        with pytest.raises(TierError, match="not one of this arena"):
            call(x)
    assert torch.equal(x, kept)
    assert not arena.holds(x)
    assert arena.holds(arena.empty((5,)))
    assert arena.give_back(torch.empty(0)) == 0


@pytest.mark.parametrize("threads", [False, True])
def test_reading_ahead_brings_the_pages(tmp_path, threads):
    with DiskSpace(tmp_path, 64 * MIB) as space, AsyncEngine(AsyncOffloadConfig()) as engine:
        arena = MappedArena(space, engine if threads else None)
        values = torch.randn(MIB)
        x = arena.copy_of(values)
        arena.give_back(x, cached=False)
        arena.read_ahead(x)
        engine.close()
        if threads:
            assert resident(x) == x.nbytes
        assert torch.equal(x, values)
        del x


def test_a_tensor_that_is_dropped_while_it_is_read_ahead(tmp_path):
    with DiskSpace(tmp_path, 64 * MIB) as space, AsyncEngine(AsyncOffloadConfig()) as engine:
        arena = MappedArena(space, engine)
        for _ in range(20):
            arena.read_ahead(arena.copy_of(torch.randn(MIB // 4)))
        engine.close()
        gc.collect()
        assert space.bytes_used == 0


# ---------------------------------------------------------------------- an ordinary tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(arena, dtype):
    values = filled(600, dtype).view(20, 30)
    x = arena.copy_of(values)
    assert x.dtype is dtype
    assert x.is_contiguous()
    assert bits(x) == bits(values)
    assert bits(arena.copy_of(values.t())) == bits(values.t())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(shapes=st.lists(st.lists(st.integers(0, 70), max_size=3), max_size=8), random=st.randoms())
def test_any_shapes_come_and_go(arena, shapes, random):
    alive = []
    for seed, shape in enumerate(shapes):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        alive.append((arena.copy_of(values), values))
        if len(alive) > 3:
            alive.pop(random.randrange(len(alive)))
        for x, kept in alive:
            assert x.data_ptr() % 64 == 0
            arena.give_back(x)
            assert torch.equal(x, kept)
            assert x.untyped_storage().nbytes() == x.nbytes  # saved and copied alone, not with its neighbours


def test_a_parameter_trains_at_home(arena):
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 64)
    ours = copy.deepcopy(plain)
    for parameter in ours.parameters():
        parameter.data = arena.copy_of(parameter)
        parameter.grad = arena.empty(parameter.shape).zero_()
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (plain, ours)]
    for _ in range(3):
        x = torch.randn(8, 64)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for parameter in ours.parameters():
            arena.give_back(parameter)
            arena.give_back(parameter.grad)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
        assert arena.holds(b)
    assert all(not arena.holds(parameter) for parameter in copy.deepcopy(ours).parameters())


def test_saved_and_loaded_alone(arena):
    small, other = arena.copy_of(torch.ones(10)), arena.copy_of(torch.zeros(10))
    file = io.BytesIO()
    torch.save({"small": small}, file)
    assert len(file.getvalue()) < 3000
    file.seek(0)
    assert torch.equal(torch.load(file)["small"], torch.ones(10))
    assert float(other.sum()) == 0


def test_it_cannot_be_resized_and_says_so(arena):
    with pytest.raises(RuntimeError, match="not resizable"):
        arena.empty((10,)).resize_(20)


# ---------------------------------------------------------------------- room


def test_many_small_tensors_share_pages_and_one_file(arena):
    biases = [arena.copy_of(torch.full((100,), float(index))) for index in range(600)]
    assert arena.space.bytes_used <= 600 * 448 + 65536  # 400 bytes and alignment
    assert all(bool((bias == index).all()) for index, bias in enumerate(biases))
    del biases[::2]
    gc.collect()
    before = arena.space.bytes_used
    again = [arena.copy_of(torch.ones(100)) for _ in range(300)]
    assert arena.space.bytes_used == before
    assert all(bool((bias == 2 * index + 1).all()) for index, bias in enumerate(biases))
    assert bool((torch.stack(again) == 1).all())
    del biases, again


def test_the_file_gives_its_space_back_when_a_tensor_dies(arena):
    x = arena.copy_of(torch.randn(MIB))
    view = x[10:]
    del x
    assert arena.space.bytes_used == 4 * MIB
    assert blocks(arena.space) >= 4 * MIB
    del view
    assert arena.space.bytes_used == 0
    y = arena.copy_of(torch.zeros(MIB))  # in the same place
    assert blocks(arena.space) < 5 * MIB
    del y
    arena.space.trim()
    assert blocks(arena.space) <= PAGE


def test_memory_that_is_exchanged_is_freed(arena):
    x = arena.copy_of(torch.ones(MIB))
    x.share_memory_()  # the storage stays, and has other memory now
    assert arena.space.bytes_used == 0
    assert float(x.sum()) == MIB
    x.fill_(2)
    assert not arena.holds(x)


def test_the_cap_is_one_for_the_arena_and_the_tier(tmp_path):
    with DiskSpace(tmp_path, 10 * PAGE) as space:
        arena, tier = MappedArena(space), DiskTier(space=space)
        x = arena.empty((6 * PAGE,), torch.uint8)
        tier.store(torch.empty(4 * PAGE, dtype=torch.uint8))  # its ticket is dropped, and so its bytes
        ticket = tier.store(torch.empty(4 * PAGE, dtype=torch.uint8))
        for call in (lambda: arena.empty((1,)), lambda: tier.store(torch.ones(1))):
            with pytest.raises(TierFullError, match=r"cap of 40.0 KiB, of which 40.0 KiB is used"):
                call()
        del x
        y = arena.empty((1,))  # a slab as small as there is room
        tier.close()
        assert space.bytes_used <= space.capacity
        del y, ticket


def test_tensors_outlive_the_arena_and_the_space(tmp_path):
    with DiskSpace(tmp_path, 2**24) as space:
        x = MappedArena(space).copy_of(torch.ones(PAGE))
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert bool((x == 1).all())
    x.fill_(3)
    assert bool((x == 3).all())
    del x


def test_too_many_mappings_say_so(arena, monkeypatch):
    def refuse(fd, offset, nbytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(_libc, "map_shared", refuse)
    with pytest.raises(TierError, match=r"vm\.max_map_count"):
        arena.empty((PAGE,))
    assert arena.space.bytes_used == 0


# ---------------------------------------------------------------------- whole processes


def stream(total_mib, given_back):
    """Fill tensors of 8 MiB one after another, and sum them up in a second pass."""
    with DiskSpace(capacity=2**31) as space:
        arena = MappedArena(space)
        tensors = []
        for index in range(total_mib // 8):
            tensors.append(arena.empty((2 * MIB,)).fill_(index))
            if given_back:
                arena.give_back(tensors[-1])
        total = 0.0
        for tensor in tensors:
            total += float(tensor[::1024].sum())
            if given_back:
                arena.give_back(tensor)
        return total


def test_the_peak_of_a_process_is_what_it_uses_at_once():
    held = measure_in_fresh_process(stream, 256, False)
    streamed = measure_in_fresh_process(stream, 256, True)
    assert held.result == streamed.result
    assert held.peak_above_import_bytes > 250 * MIB
    assert streamed.peak_above_import_bytes < 40 * MIB


LIMITED = """
import resource, sys, torch
from memscale.tiers.mapped import MappedArena
from memscale.tiers.space import DiskSpace
torch.ones(1000).sum()
limit = 128 * 2**20 + int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(64 * 2**20)
except RuntimeError:
    print("refused")
with DiskSpace(sys.argv[1], 2**30) as space:
    arena = MappedArena(space)
    x = arena.empty((64 * 2**20,))
    x[::1024] = 1
    print(int(x[::1024].sum()))
    del x
"""


def test_a_hard_limit_on_private_memory_does_not_count_homes_on_disk(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "refused\n65536\n", done.stderr
