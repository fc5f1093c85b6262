"""Four processes: HSDP, tensor parallelism, and the latter beside FSDP2, give the numbers that they give alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.mesh_processes import MESHES
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, bool], Any]]:
    folder = tmp_path_factory.mktemp("meshes")
    run = torchrun("support.mesh_processes", str(folder), processes=4)
    assert run.returncode == 0, run.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize("case", MESHES)
def test_a_mesh_trains_as_it_does_alone(case: str, ranks: list[dict[tuple[str, bool], Any]]) -> None:
    for rank in ranks:
        plain, ours = rank[case, False], rank[case, True]
        assert ours["recomputations"] == 12  # 4 layers, 3 steps
        for what in ("losses", "weights"):
            assert all(map(torch.equal, ours[what], plain[what]))
