"""The self-test on a CUDA device."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import memscale
from memscale.diagnosis import environment

SIZES: dict[str, Any] = {"nbytes": 2**20, "side": 64}
Computing = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "LIBRARIES", [])


@pytest.mark.usefixtures("no_libraries")
def test_everything_works_and_memory_is_counted_in_all_ways(computing: Computing) -> None:
    with computing():
        found = memscale.selftest(**SIZES)
    assert found.passed, str(found)
    rows = {row.name: row for row in found.rows}
    assert not [row.name for row in found.rows if row.status == "skip"]
    for mode in ("conservative", "balanced", "aggressive", "asynchronous transfers", "failed backward"):
        figures = rows[f"{mode}: memory"].figures
        assert 0 < figures["allocated"] <= figures["reserved"] <= figures["driver"]
        assert figures["allocated"] < figures["plain"]
        assert figures["predicted"] <= figures["predicted reserved"]
    assert rows["context"].figures["context_bytes"] >= 0
    contents = json.loads(found.to_json())
    assert contents["device"]["kind"] == "cuda"
    assert all(contents["rates"][rate] > 0 for rate in ("h2d", "d2h", "pageable_h2d", "pageable_d2h"))
    assert "driver" in contents["versions"]


@pytest.mark.usefixtures("no_libraries")
def test_a_removed_wait_is_found(
    computing: Computing, runtime: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: None)
    runtime.fakecuda_set_copies(b"poisoned")
    with computing():
        found = memscale.selftest(**SIZES)
    rows = {row.name: row.status for row in found.rows}
    assert rows["asynchronous transfers"] == "fail"
    assert rows["conservative"] == rows["plain model, twice"] == "pass"


@pytest.mark.usefixtures("no_libraries")
def test_page_locked_memory_that_is_refused_is_reported(runtime: ctypes.CDLL) -> None:
    def row() -> memscale.Finding:
        (found,) = (row for row in memscale.doctor() if row.name == "page-locked memory")
        return found

    assert row().status == "pass"
    torch._C._host_emptyCache()
    runtime.fakecuda_set_page_locks(1)
    assert row().status == "fail"
