"""Jobs of two real processes, started by `torchrun`: one plan for all, and an end where one of them fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.parallel_processes import ORDERS
from support.surfaces import Row, record
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """What each process has seen, by case, and what the job has printed."""
    folder = tmp_path_factory.mktemp("parallel")
    run = torchrun("support.parallel_processes", "train", str(folder))
    assert run.returncode == 0, run.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)], run.stdout


@pytest.mark.parametrize("order", ORDERS)
def test_ddp_trains_as_it_does_alone_with_one_plan(order: str, job: tuple[list[dict[str, Any]], str]) -> None:
    first, second = (rank[order] for rank in job[0])
    assert first["plan"] == second["plan"]
    assert (first["plans"] > 0, second["plans"]) == (True, 0), "rank 0 makes the plan of all"
    assert first["techniques"] == ["checkpointing", "offloading"]
    for rank in job[0]:
        ours, plain = rank[order], rank["parallel"]
        assert (plain["regions"], ours["regions"] > 0) == (0, True)
        for what in ("losses", "weights"):
            assert all(map(torch.equal, ours[what], plain[what]))
        assert ours["peak"] < 0.8 * plain["peak"]
    peaks = job[0][0]["parallel"]["peak"], first["peak"]
    record(Row("DDP, 2 processes", f"{order}, no_sync", first["techniques"], None, peaks))


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_that_communicates_is_run_by_all_ranks_to_profile_it(
    order: str, job: tuple[list[dict[str, Any]], str]
) -> None:
    for rank in job[0]:
        ours, plain = rank[f"gathering, {order}"], rank["gathering, parallel"]
        assert ours["techniques"] == ["checkpointing", "offloading"]
        for what in ("losses", "weights"):
            assert all(map(torch.equal, ours[what], plain[what]))
        assert ours["peak"] < 0.8 * plain["peak"]


def test_two_processes_train_as_one_does_with_their_batches(job: tuple[list[dict[str, Any]], str]) -> None:
    for rank in job[0]:
        for one, other in zip(rank["two halves"], rank["whole batch"], strict=True):
            assert one.item() == pytest.approx(other.item(), rel=1e-9)


def test_a_rank_with_another_model_makes_its_own_plan(job: tuple[list[dict[str, Any]], str]) -> None:
    first, second = (rank["other model"] for rank in job[0])
    assert (first["plans"], second["plans"]) == (1, 1)
    assert second["layers"] == first["layers"] + 1
    assert "rank 1 makes a plan of its own: rank 0 has another model or Config" in job[1]


def test_a_rank_with_a_longer_first_batch_plans_for_it(job: tuple[list[dict[str, Any]], str]) -> None:
    first, second = (rank["longer batch"] for rank in job[0])
    assert first["batches"] == ["int64[4, 64]"] * 2
    assert second["batches"] == ["int64[4, 256]"] * 2
    assert second["regions"] > 0


def test_rank_0_prints(job: tuple[list[dict[str, Any]], str]) -> None:
    assert job[1].count("memscale: hardware:") == 1


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("runs out of memory", "FSDP2 communicates in it, with processes that would not repeat it"),
        ("runs out of memory, parallel", "DistributedDataParallel communicates in it"),
        ("runs out of memory in backward, parallel", "DistributedDataParallel communicates in it"),
        ("fails to plan", "rank 1 makes a plan of its own: rank 0 made none"),
    ],
)
def test_a_rank_that_fails_ends_the_job_with_its_error(case: str, message: str, tmp_path: object) -> None:
    run = torchrun("support.parallel_processes", case, str(tmp_path))
    assert run.returncode != 0
    assert "no memory left on this rank" in run.stdout
    assert message in run.stdout


@pytest.mark.parametrize("case", ["raises", "raises, sharded"], ids=["DDP", "FSDP2"])
def test_an_error_in_the_users_code_on_one_rank_ends_the_job(case: str, tmp_path: object) -> None:
    run = torchrun("support.parallel_processes", case, str(tmp_path))
    assert run.returncode != 0
    assert "ValueError: a mistake on this rank" in run.stdout


@pytest.mark.parametrize("case", ["resumes", "resumes, sharded"], ids=["DDP", "FSDP2"])
def test_a_second_job_resumes_from_what_the_first_has_saved(case: str, tmp_path: Path) -> None:
    for _ in range(2):
        run = torchrun("support.parallel_processes", case, str(tmp_path))
        assert run.returncode == 0, run.stdout
    for rank in range(2):
        first, second = (torch.load(tmp_path / f"{job} {rank}.pt") for job in ("first", "second"))
        assert all(map(torch.equal, first[0], second[0]))
        assert first[1] == second[1]
        assert "checkpointing" in first[1]
