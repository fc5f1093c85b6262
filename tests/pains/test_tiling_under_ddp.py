"""Two real processes train a model whose head is tiled: with a static graph gradients were not averaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.tiled_processes import STEPS

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiled")
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.tiled_processes", str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=200)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", [" True", "inside True", "inside False", "around True", "around False"])
@pytest.mark.slow
def test_ranks_stay_together(case: str, ranks: list[dict[str, Any]]) -> None:
    (first, *_), (second, *_) = (rank[case] for rank in ranks)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.slow
def test_a_static_graph_has_the_weights_of_the_plain_model_and_no_tiles(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        weights, lazy, lines = rank["inside True"]
        assert all(torch.equal(one, other) for one, other in zip(weights, rank[" True"][0], strict=True))
        assert lazy == 0
        assert sum("static_graph" in line for line in lines) == 1
        assert rank["inside False"][1] == STEPS
        assert not any("static_graph" in line for line in rank["inside False"][2])
