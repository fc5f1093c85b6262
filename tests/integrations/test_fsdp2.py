"""Two real processes train a model that FSDP2 has sharded, under plans for activations, with FSDP2's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from memscale import Plan
from support.sharded_processes import OPTIONS, ORDERS, TECHNIQUES
from support.surfaces import Row, record
from support.torchrun import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="this torch is built without gloo"
    ),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process has seen, by case."""
    folder = tmp_path_factory.mktemp("sharded")
    run = torchrun("support.sharded_processes", str(folder))
    assert run.returncode == 0, run.stdout
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_same(ours: dict[str, Any] | str, plain: dict[str, Any] | str, tolerance: float = 0) -> None:
    assert not isinstance(plain, str), plain
    assert not isinstance(ours, str), ours
    assert plain["regions"] == 0
    assert ours["regions"] > 0, "nothing was recomputed"
    for what in ("losses", "weights"):
        for one, other in zip(ours[what], plain[what], strict=True):
            assert torch.equal(one, other) if not tolerance else torch.allclose(one, other, rtol=tolerance)


@pytest.mark.parametrize("order", ORDERS)
def test_training_is_that_of_fsdp2_alone_in_less_memory(order: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, ours = rank[f"plain, {order.split(', ')[-1]}"], rank[order]
        assert_same(ours, plain)
        assert ours["techniques"] == ["checkpointing"]  # where parameters are is FSDP2's business
        assert ours["peak"] < 0.7 * plain["peak"]
    assert not torch.equal(ranks[0][order]["losses"][0], ranks[1][order]["losses"][0]), (
        "each had its own data"
    )
    peaks = ranks[0][f"plain, {order.split(', ')[-1]}"]["peak"], ranks[0][order]["peak"]
    record(Row("FSDP2, 2 processes", order, ranks[0][order]["techniques"], None, peaks))


@pytest.mark.parametrize("order", ORDERS)
def test_rank_0_makes_the_plan_of_all(order: str, ranks: list[dict[str, Any]]) -> None:
    first, second = (rank[order] for rank in ranks)
    assert first["plan"] == second["plan"]
    assert (first["plans"] > 0, second["plans"]) == (True, 0)
    notes = Plan.from_json(first["plan"]).notes
    assert any("FSDP2 keeps parameters" in note for note in notes)


@pytest.mark.parametrize("order", ORDERS)
def test_peaks_are_predicted_for_a_rank(order: str, ranks: list[dict[str, Any]]) -> None:
    """Shards of parameters, gradients and state, one gathered group, and the buffers of the collectives."""
    for rank in ranks:
        measured = (rank[f"plain, {order.split(', ')[-1]}"]["peak"], rank[order]["peak"])
        for predicted, peak in zip(rank[order]["predicted"], measured, strict=True):
            assert 0.98 * peak <= predicted <= 1.05 * peak


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_fsdp2(option: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same(rank[option], rank[f"plain, {option}"])
        assert rank[option]["peak"] < rank[f"plain, {option}"]["peak"]


@pytest.mark.parametrize("name", TECHNIQUES)
def test_techniques_on_sharded_layers(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_same(rank[name], rank[f"plain, {name}"], 1e-12 if name == "tiled" else 0)


def test_layers_that_fsdp2_gathers_in_parts_are_not_recomputed(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert isinstance(rank["in parts"], list), rank["in parts"]
        assert all("fully_shard the whole layer instead" in reason for reason in rank["in parts"])


def test_fsdp1_is_refused_before_and_after_wrap(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert isinstance(rank["flattened"], list), rank["flattened"]
        assert len(rank["flattened"]) == 4
        assert all("fully_shard (FSDP2) instead" in reason for reason in rank["flattened"])


def test_two_processes_train_as_one_does_with_their_batches(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for one, other in zip(rank["two halves"], rank["whole batch"], strict=True):
            assert one.item() == pytest.approx(other.item(), rel=1e-9)
