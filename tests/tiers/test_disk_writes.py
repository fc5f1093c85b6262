"""How tensors are written to a file: in pieces, and all of them."""

from __future__ import annotations

import os

import pytest
import torch

from memscale.tiers import disk
from memscale.tiers.disk import AT_ONCE, DiskTier


def test_writes_are_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pwrite = os.pwrite

    def noted(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data, offset)

    values = torch.arange(AT_ONCE, dtype=torch.float32)[: AT_ONCE - 5]  # four pieces, the last one shorter
    with DiskTier(capacity=2**22) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwrite", noted)
            ticket = tier.store(values)
        written = [size for size in sizes if size > 4096]
        assert written == [AT_ONCE] * 3 + [AT_ONCE - 20]
        assert torch.equal(tier.load(ticket), values)


def test_a_write_that_takes_less_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    values = torch.arange(1000, dtype=torch.float32)
    with DiskTier(capacity=2**20) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:700], offset))
            ticket = tier.store(values)
        assert torch.equal(tier.load(ticket), values)
