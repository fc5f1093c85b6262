"""The Trainer and Accelerate in two processes, started by `torchrun`: DDP is around the wrapped model, or inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.surfaces import Run, assert_gains
from support.torchrun import torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.trainer_processes import WAYS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    folder = tmp_path_factory.mktemp("trainers")
    run = torchrun("support.trainer_processes", str(folder))
    assert run.returncode == 0, run.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("surface", "way"), [(surface, way) for surface in WAYS for way in WAYS[surface]])
def test_two_processes(surface: str, way: str, ranks: list[dict[tuple[str, str], Any]]) -> None:
    for number, rank in enumerate(ranks):
        plain, wrapped = Run(**rank[surface, "plain"]), Run(**rank[surface, way])
        if number == 0:
            assert_gains(surface, f"{way}, DDP, 2 processes", plain, wrapped)
        assert wrapped.losses == plain.losses
        assert wrapped.activation_bytes < plain.activation_bytes
        assert "checkpointing" in wrapped.techniques
