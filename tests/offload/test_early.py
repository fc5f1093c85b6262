"""Copies that are begun early: what they hold, who writes them, and what is left of those that nobody takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.errors import TierError, TierFullError
from memscale.offload import early
from memscale.offload.early import EarlyCopies
from memscale.tiers import store
from memscale.tiers.mapped import MappedArena
from memscale.tiers.space import DiskSpace
from memscale.tiers.store import DiskStore
from support.wrapping import Stack

SIZES = [1024, 1025, 4096, 5000, 70_001]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are worth it here, and large tensors take several writes."""
    monkeypatch.setattr(store, "EARLY_FROM", 1)
    monkeypatch.setattr(early, "AT_ONCE", 2**16)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskSpace(tmp_path, 2**16) as space:
        try:
            os.close(space.open_direct())
        except OSError:
            pytest.skip("the file system of the tests has no direct I/O")
    disk = DiskStore(tmp_path, 2**26)
    yield disk
    disk.close()
    assert not workers()


def workers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("memscale-copies")]


def values(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size) for size in SIZES]


def copies_of(disk: DiskStore) -> EarlyCopies:
    assert disk._early is not None
    return disk._early


def wait(disk: DiskStore) -> None:
    for copy in copies_of(disk)._copies.values():
        assert copy.over.wait(60)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what was written through the page cache."""
    written: list[int] = []
    write = MappedArena.write

    def noted(self: MappedArena, tensor: torch.Tensor, values: torch.Tensor) -> None:
        written.append(tensor.nbytes)
        write(self, tensor, values)

    monkeypatch.setattr(MappedArena, "write", noted)
    return written


# ---------------------------------------------------------------------- what they hold


def test_workers_write_all_of_every_tensor(disk: DiskStore, here: list[int]) -> None:
    tensors = values()
    disk.copy_early(tensors)
    wait(disk)
    for tensor in tensors:
        home = disk.copy_of(tensor)
        assert disk.holds(home)
        assert torch.equal(home, tensor)
    assert not here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float64])
def test_any_kind_of_values(disk: DiskStore, dtype: torch.dtype) -> None:
    tensor = (torch.arange(9000) % 100).to(dtype)
    disk.copy_early([tensor])
    wait(disk)
    home = disk.copy_of(tensor)
    assert home.dtype is dtype
    assert torch.equal(home, tensor)


def test_dimensions_stay_in_their_order(disk: DiskStore, here: list[int]) -> None:
    tensor = torch.randn(8, 16, 7, 5).to(memory_format=torch.channels_last)
    disk.copy_early([tensor])
    wait(disk)
    home = disk.copy_of(tensor)
    assert home.stride() == tensor.stride()
    assert torch.equal(home, tensor)
    assert not here


def test_a_tensor_that_was_changed_is_copied_again(disk: DiskStore, here: list[int]) -> None:
    one, other = values()[:2]
    disk.copy_early([one, other])
    wait(disk)
    one.add_(1)
    assert torch.equal(disk.copy_of(one), one)
    assert here == [one.nbytes]
    assert torch.equal(disk.copy_of(other), other)
    assert len(here) == 1


def test_a_tensor_with_other_memory_is_copied_again(disk: DiskStore, here: list[int]) -> None:
    parameter = nn.Parameter(values()[3])
    disk.copy_early([parameter])
    wait(disk)
    parameter.data = parameter.data + 1
    assert torch.equal(disk.copy_of(parameter), parameter)
    assert here == [parameter.nbytes]


# ---------------------------------------------------------------------- who writes them


def test_what_no_worker_has_begun_is_written_by_who_takes_it(
    disk: DiskStore, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyCopies, "_work", lambda self, buffer: None)
    tensors = values()
    disk.copy_early(tensors)
    for tensor in tensors:
        assert torch.equal(disk.copy_of(tensor), tensor)
    assert here == [tensor.nbytes for tensor in tensors]


def test_who_is_slower_than_the_workers_waits_for_them(
    disk: DiskStore, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, work = threading.Event(), EarlyCopies._work

    def held_back(self: EarlyCopies, buffer: Any) -> None:
        begin.wait(60)
        work(self, buffer)

    monkeypatch.setattr(EarlyCopies, "_work", held_back)
    first, second, third = values()[:3]
    disk.copy_early([first, second, third])
    copies = copies_of(disk)
    copies._bytes, copies._seconds = 0, 1.0
    assert torch.equal(disk.copy_of(first), first)
    copies._bytes, copies._seconds = 2**50, 1.0
    assert torch.equal(disk.copy_of(second), second)
    assert here == [first.nbytes, second.nbytes]
    begin.set()
    assert torch.equal(disk.copy_of(third), third)
    assert len(here) == 2


def test_without_direct_io_they_are_written_when_asked_for(
    disk: DiskStore, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: DiskSpace) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(DiskSpace, "open_direct", refused)
    tensors = values()
    disk.copy_early(tensors)
    assert disk._early is None
    assert disk.bytes_used == 0
    for tensor in tensors:
        assert torch.equal(disk.copy_of(tensor), tensor)
    assert len(here) == len(tensors)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct writes fail half-way."""
    pwrite = os.pwrite

    def failing(fd: int, data: Any, offset: int) -> int:
        if threading.current_thread() is threading.main_thread():
            return pwrite(fd, data, offset)
        if len(data) > 4096:
            return pwrite(fd, data[:4096], offset)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(early.os, "pwrite", failing)


@pytest.mark.usefixtures("broken")
def test_what_a_worker_could_not_write_is_written_by_who_takes_it(disk: DiskStore, here: list[int]) -> None:
    tensors = values()
    disk.copy_early(tensors)
    wait(disk)
    for tensor in tensors:
        assert torch.equal(disk.copy_of(tensor), tensor)
    assert len(here) == len(tensors)


# ---------------------------------------------------------------------- their room


def test_what_nobody_takes_is_given_back(disk: DiskStore) -> None:
    tensors = values()
    disk.copy_early(tensors)
    home = disk.copy_of(tensors[0])
    disk.end_early()
    assert disk.bytes_used == home.nbytes
    assert disk._space is not None
    assert disk._space.bytes_on_disk == home.nbytes
    assert not workers()


def test_without_room_for_all_none_are_begun(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, 2**14)
    tensors = values()
    disk.copy_early(tensors)
    assert disk.bytes_used == 0
    assert not workers()
    home = disk.copy_of(tensors[0])
    assert torch.equal(home, tensors[0])
    with pytest.raises(TierFullError):
        disk.copy_of(tensors[-1])
    del home
    disk.close()


def test_few_bytes_are_not_worth_it(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "EARLY_FROM", 2**20)
    disk.copy_early(values())
    assert disk._early is None
    assert disk.bytes_used == 0


# ---------------------------------------------------------------------- wrap


BATCH = torch.ones(4, 6, 128)


def build() -> Stack:
    torch.manual_seed(0)
    return Stack(4, 128).train()


def settings(tmp_path: Path) -> Config:
    return Config(
        mode="aggressive",
        use_8bit_optimizer=False,
        use_mixed_precision=False,
        offload_dir=tmp_path,
        enable_logging=False,
    )


def train(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(BATCH).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.usefixtures("disk")
def test_wrap_takes_them(tmp_path: Path, here: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    start = EarlyCopies.start

    def finished(self: EarlyCopies) -> None:
        start(self)
        begun.extend(copy.home.nbytes for copy in self._copies.values())
        for copy in self._copies.values():
            assert copy.over.wait(60)

    monkeypatch.setattr(EarlyCopies, "start", finished)
    expected, model = train(build()), build()
    memscale.wrap(model, settings(tmp_path), BATCH)
    executor = model._memscale_executor
    on_disk = executor.homes.on_disk
    assert begun == [parameter.nbytes for parameter in on_disk]
    assert len(begun) > 4
    assert not here
    assert executor.bytes_on_disk == sum(-(-nbytes // 4096) * 4096 for nbytes in begun)
    assert not workers()
    for ours, plain in zip(train(model), expected, strict=True):
        assert torch.equal(ours, plain)
    memscale.detach(model)


@pytest.mark.usefixtures("disk")
def test_a_wrap_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    begun: list[bool] = []
    start = EarlyCopies.start
    monkeypatch.setattr(EarlyCopies, "start", lambda self: begun.append(True) or start(self))
    monkeypatch.setattr("memscale.planner.make_plan.predict", fails)
    model = build()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        memscale.wrap(model, settings(tmp_path), BATCH)
    assert begun
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
    assert not workers()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("disk")
def test_a_wrap_that_cannot_say_what_it_did_leaves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("memscale.api.say_plan", fails)
    expected, model = train(build()), build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(BrokenPipeError):
        memscale.wrap(model, settings(tmp_path), BATCH)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not workers()
    assert list(tmp_path.iterdir()) == []
    for ours, plain in zip(train(model), expected, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.usefixtures("disk")
def test_a_plan_that_leaves_weights_in_memory_drops_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memscale.planner import decide

    def without(*args: Any, **kwargs: Any) -> Any:
        plan = decide(*args, **kwargs)
        config = args[2].replace(enable_offloading=False)
        return decide(args[0], args[1], config, under=kwargs["under"]) if plan.disk_bytes else plan

    begun: list[bool] = []
    start = EarlyCopies.start
    monkeypatch.setattr(EarlyCopies, "start", lambda self: begun.append(True) or start(self))
    monkeypatch.setattr("memscale.planner.make_plan.decide", without)
    model = memscale.wrap(build(), settings(tmp_path), BATCH)
    assert begun
    executor = model._memscale_executor
    assert executor.bytes_on_disk == 0
    assert not executor.homes.on_disk
    memscale.detach(model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("disk")
def test_conservative_begins_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: EarlyCopies) -> None:
        raise AssertionError("a copy was begun")

    monkeypatch.setattr(EarlyCopies, "start", never)
    config = Config(mode="conservative", offload_dir=tmp_path, enable_logging=False)
    memscale.detach(memscale.wrap(build(), config, BATCH))


def test_a_closed_space_says_so(tmp_path: Path) -> None:
    space = DiskSpace(tmp_path, 2**20)
    space.close()
    with pytest.raises(TierError, match="closed"):
        space.open_direct()
