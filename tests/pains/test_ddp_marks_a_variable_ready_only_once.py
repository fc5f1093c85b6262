"""Two real processes train a wrapped model under `DistributedDataParallel`, with the plain one's numbers.

Reported as peft#313 and accelerate#2017: "Expected to mark a variable ready only once", where a shared or
frozen part is checkpointed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.two_processes import CASES, PROCESSES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has seen, by case."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("two_processes")
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "support.two_processes", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


def assert_same(ours: dict[str, Any] | str, plain: dict[str, Any] | str) -> None:
    assert not isinstance(plain, str), plain
    assert not isinstance(ours, str), ours
    assert plain["regions"] == 0
    assert ours["regions"] > 0, "nothing was recomputed"
    assert all(torch.equal(a, b) for a, b in zip(ours["losses"], plain["losses"], strict=True))
    for what in ("gradients", "weights"):
        assert ours[what].keys() == plain[what].keys()
        for name, value in plain[what].items():
            assert torch.equal(ours[what][name], value), (what, name)


@pytest.mark.parametrize(("name", "option"), CASES)
def test_training_is_that_of_the_plain_model(name: str, option: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same(rank[f"{name} {option} inside"], rank[f"{name} {option} "])
    first, second = (rank[f"{name} {option} inside"] for rank in ranks)
    assert not torch.equal(first["losses"][0], second["losses"][0]), "each had its own data"
    for key, value in first["gradients"].items():
        assert torch.equal(second["gradients"][key], value), f"{key} was not averaged"


def test_wrap_around_a_parallel_model(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same(rank["tied plain around"], rank["tied plain "])


def test_the_pain_is_there(ranks: list[dict[str, Any]]) -> None:
    """The same set-up fails with reentrant checkpoints, so that it is able to fail."""
    for rank in ranks:
        assert "mark a variable ready only once" in str(rank["reentrant"])
