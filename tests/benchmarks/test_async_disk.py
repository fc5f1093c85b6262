"""The benchmark of asynchronous transfers: what it moves and computes; how fast is for its own runs to say."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import async_disk
from benchmarks.async_disk import main, measure
from memscale.tiers import disk


def test_both_ways_move_the_same_and_come_to_the_same(tmp_path) -> None:
    found = measure(layers=3, elements=2**16, rounds=2, width=64, directory=str(tmp_path))
    assert found.equal
    assert found.bytes_per_step == 2 * 3 * 2**16 * 4, "the input and the tanh of each layer"
    assert len(found.ratios) == 2
    assert all(ratio > 0 for ratio in found.ratios)


@pytest.mark.parametrize("cached", [False, True])
def test_the_command_writes_what_it_measured(cached: bool, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(async_disk, "WIDTHS", (32, 64))
    threads, write_from = torch.get_num_threads(), disk.write_from
    result = tmp_path / "result.json"
    sizes = ["--layers", "2", "--elements", str(2**16), "--rounds", "1", "--repeats", "2"]
    try:
        assert main([*sizes, "--dir", str(tmp_path), "--json", str(result), *["--cached"] * cached]) == 0
    finally:
        torch.set_num_threads(threads)
    assert disk.write_from is write_from
    written = json.loads(result.read_text())
    assert written["source"] == "measured"
    assert written["numbers_equal"] is True
    assert written["page_cache"] is cached
    assert len(written["speedups"]) == 2
    assert "synchronous over asynchronous step time" in capsys.readouterr().out
