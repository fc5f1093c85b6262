"""Tensors on disk: ordinary tensors whose pages can leave memory, with their values."""

import contextlib
import copy
import ctypes
import errno
import gc
import io
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memscale.errors import TierError
from memscale.memory.process import measure_in_fresh_process, rss_bytes
from memscale.tiers import disk
from memscale.tiers.disk import PAGE, DiskStore
from support.tensors import DTYPES, bits, filled

MIB = 2**20


@pytest.fixture
def store(tmp_path):
    made = DiskStore(tmp_path, 256 * MIB)
    yield made
    gc.collect()
    assert made.bytes_used == 0
    made.close()


def blocks(store):
    return os.fstat(store.file.fd).st_blocks * 512


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


def test_values_survive_and_memory_falls(store):
    values = torch.randn(16 * MIB // 4)
    x = store.empty(values.shape)
    x.copy_(values)
    before = rss_bytes()
    assert resident(x) == x.nbytes
    assert store.release_pages(x) == x.nbytes
    assert before - rss_bytes() > 15 * MIB
    assert resident(x) == 0
    assert torch.equal(x, values)
    x.add_(1)
    store.release_pages(x)
    assert torch.equal(x, values + 1)


def test_a_copy_takes_no_pages_in_this_process(store):
    values = torch.randn(8 * MIB // 4)
    before = rss_bytes()
    x = store.copy_of(values)
    assert resident(x) == 0
    assert rss_bytes() - before < 4 * MIB
    assert torch.equal(x, values)


def test_each_tensor_has_its_own_pages(store):
    tensors = [store.copy_of(torch.full((PAGE,), float(index))) for index in range(8)]
    for tensor in tensors:
        tensor.sum()
    store.release_pages(tensors[3])
    assert [resident(tensor) for tensor in tensors] == [0 if i == 3 else 4 * PAGE for i in range(8)]


def test_of_a_view_only_whole_pages_are_released(store):
    x = store.copy_of(torch.arange(4 * PAGE, dtype=torch.float32))  # four pages of floats a row
    rows = x.view(4, PAGE)
    assert store.release_pages(rows[1]) == 4 * PAGE
    assert store.release_pages(x[100 : 100 + PAGE]) == 3 * PAGE
    assert store.release_pages(x[:10]) == 0
    assert store.release_pages(x[-PAGE // 2 :]) == 2 * PAGE
    assert store.release_pages(rows.t()) == 16 * PAGE
    assert torch.equal(x, torch.arange(4 * PAGE, dtype=torch.float32))


def test_the_rest_of_the_last_page_is_released_with_it(store):
    x = store.copy_of(torch.ones(PAGE // 4 + 1))
    assert store.release_pages(x) == 2 * PAGE


def test_ordinary_memory_is_never_released(store):
    x = torch.randn(MIB)
    kept = x.clone()
    mapped = store.empty((5,))
    assert store.release_pages(x) == 0
    store.prefetch_pages(x)
    assert torch.equal(x, kept)
    assert not store.holds(x)
    assert store.holds(mapped)
    assert store.release_pages(torch.empty(0)) == 0


def test_prefetching_and_reading_keep_the_values(store):
    values = torch.randn(MIB)
    x = store.copy_of(values)
    store.release_pages(x)
    store.prefetch_pages(x)
    assert torch.equal(x, values)
    store.release_pages(x)
    assert torch.equal(store.read(x), values)
    assert resident(x) == 0
    assert not store.holds(store.read(x))


# ---------------------------------------------------------------------- an ordinary tensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(store, dtype):
    values = filled(600, dtype).view(20, 30)
    x = store.copy_of(values)
    assert x.dtype is dtype
    assert bits(x) == bits(values)
    assert bits(store.copy_of(values.t())) == bits(values.t())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(shapes=st.lists(st.lists(st.integers(0, 70), max_size=3), max_size=8), random=st.randoms())
def test_any_shapes_come_and_go(store, shapes, random):
    alive = []
    for seed, shape in enumerate(shapes):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        alive.append((store.copy_of(values), values))
        if len(alive) > 3:
            alive.pop(random.randrange(len(alive)))
        for x, kept in alive:
            assert x.data_ptr() % 64 == 0
            store.release_pages(x)
            assert torch.equal(x, kept)
            assert x.untyped_storage().nbytes() == x.nbytes  # saved and copied alone, not with its neighbours


def test_a_parameter_trains_on_disk(store):
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 64)
    ours = copy.deepcopy(plain)
    for parameter in ours.parameters():
        parameter.data = store.copy_of(parameter)
        parameter.grad = store.empty(parameter.shape).zero_()
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (plain, ours)]
    for _ in range(3):
        x = torch.randn(8, 64)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for parameter in ours.parameters():
            store.release_pages(parameter)
            store.release_pages(parameter.grad)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)
        assert store.holds(b)
    assert all(not store.holds(parameter) for parameter in copy.deepcopy(ours).parameters())


def test_saved_and_loaded_alone(store):
    small, other = store.copy_of(torch.ones(10)), store.copy_of(torch.zeros(10))
    file = io.BytesIO()
    torch.save({"small": small}, file)
    assert len(file.getvalue()) < 3000
    file.seek(0)
    assert torch.equal(torch.load(file)["small"], torch.ones(10))
    assert float(other.sum()) == 0


def test_it_cannot_be_resized_and_says_so(store):
    with pytest.raises(RuntimeError, match="not resizable"):
        store.empty((10,)).resize_(20)


# ---------------------------------------------------------------------- room


def test_the_file_gives_its_space_back_when_a_tensor_dies(store):
    x = store.copy_of(torch.randn(MIB))
    view = x[10:]
    del x
    assert store.bytes_used == 4 * MIB
    assert blocks(store) >= 4 * MIB
    del view
    assert store.bytes_used == 0
    again = store.copy_of(torch.zeros(MIB))  # in the same place
    assert blocks(store) < 5 * MIB
    del again


def test_memory_that_is_exchanged_is_freed(store):
    x = store.copy_of(torch.ones(MIB))
    x.share_memory_()  # the storage stays, and has other memory now
    assert store.bytes_used == 0
    assert float(x.sum()) == MIB
    x.fill_(2)
    assert not store.holds(x)


def test_tensors_outlive_the_store(tmp_path):
    store = DiskStore(tmp_path, 2**24)
    x = store.copy_of(torch.ones(PAGE))
    store.close()
    del store
    gc.collect()
    assert bool((x == 1).all())
    x.fill_(3)
    assert bool((x == 3).all())
    del x


def test_too_many_mappings_say_so(store, monkeypatch):
    class Refuses:
        def mmap(self, *args):
            ctypes.set_errno(errno.ENOMEM)

    kept = store.copy_of(torch.ones(PAGE))
    monkeypatch.setattr(disk, "_libc", Refuses)
    with pytest.raises(TierError, match=r"vm\.max_map_count"):
        store.empty((PAGE,))
    monkeypatch.undo()
    assert store.bytes_used == 4 * PAGE
    del kept


# ---------------------------------------------------------------------- whole processes


def stream(total_mib, released):
    """Fill tensors of 8 MiB one after another, and sum them up in a second pass."""
    with contextlib.closing(DiskStore(capacity=2**31)) as store:
        tensors = []
        for index in range(total_mib // 8):
            tensors.append(store.empty((2 * MIB,)).fill_(index))
            if released:
                store.release_pages(tensors[-1])
        total = 0.0
        for tensor in tensors:
            total += float(tensor[::1024].sum())
            if released:
                store.release_pages(tensor)
        return total


@pytest.mark.slow
def test_the_peak_of_a_process_is_what_it_uses_at_once():
    held = measure_in_fresh_process(stream, 256, False)
    streamed = measure_in_fresh_process(stream, 256, True)
    assert held.result == streamed.result
    assert held.peak_above_import_bytes > 250 * MIB
    assert streamed.peak_above_import_bytes < 40 * MIB


LIMITED = """
import resource, sys, torch
from memscale.tiers.disk import DiskStore
torch.ones(1000).sum()
limit = 128 * 2**20 + int(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(64 * 2**20)
except RuntimeError:
    print("refused")
x = DiskStore(sys.argv[1], 2**30).empty((64 * 2**20,))
x[::1024] = 1
print(int(x[::1024].sum()))
"""


def test_a_hard_limit_on_private_memory_does_not_count_tensors_on_disk(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "refused\n65536\n", done.stderr
