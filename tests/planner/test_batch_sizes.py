"""`find_batch_size`, `plan(strict=True)`, and what is said of a batch that no plan makes fit."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memscale
from memscale import Config, OptimizationMode
from memscale.errors import DoesNotFitError, ProfileError
from memscale.hardware import virtual_hardware
from memscale.planner import batch_size as batch_sizes
from memscale.planner import make_plan as planning
from memscale.planner.estimates import (
    batch_size_of,
    largest_that,
    length_of,
    profile_between,
    with_batch_size,
    with_length,
)
from memscale.planner.make_plan import fits
from memscale.profiler import ModelProfile, Place, Sample, profile_model
from support.families import FAMILIES

EXACT_TO = 64  # sizes above are found to within a sixty-fourth

QUIET = Config(enable_logging=False)
CONSERVATIVE = QUIET.replace(mode=OptimizationMode.CONSERVATIVE)
AGGRESSIVE = QUIET.replace(mode=OptimizationMode.AGGRESSIVE)
MIB = 2**20
ROOM = (
    24 * MIB
)  # a budget: of a device, what torch's allocator must reserve counts, which grows in large steps
GPU = "RTX 3090"


class Gpt(nn.Module):
    """Wide enough that activations, and not workspaces, fill a small device."""

    def __init__(self, layers: int = 3, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def words(batch: int = 4, length: int = 64) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def within(budget: int, config: Config = QUIET) -> Config:
    return config.replace(memory_budget=budget)


def does_fit(model: nn.Module, batch: torch.Tensor, config: Config, hardware: str | int = GPU) -> bool:
    plan = memscale.plan(model, batch, config, hardware=hardware)
    return fits(plan, virtual_hardware(hardware), config)


# ---------------------------------------------------------------------- estimates


@given(most=st.integers(1, 2000), largest=st.integers(0, 2500), around=st.integers(-5, 3000))
def test_search_finds_the_largest(most: int, largest: int, around: int) -> None:
    assert largest_that(lambda number: number <= largest, most, around=around) == min(most, largest)


def test_search_near_the_answer_asks_seldom() -> None:
    asked: list[int] = []

    def has_room(number: int) -> bool:
        asked.append(number)
        return number <= 503

    assert largest_that(has_room, 2**16, around=500) == 503
    assert len(asked) <= 5


@pytest.mark.slow
def test_batches_that_cannot_fit_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, int]] = []
    looked_at: list[tuple[int, int]] = []
    simulated, profiled = batch_sizes.simulated_plan, batch_sizes.profile_settings

    def sizes_of(sample: Sample) -> tuple[int, int]:
        return batch_size_of(sample), length_of(sample)

    def noted(model: nn.Module, sample: Sample, *args: Any) -> tuple[memscale.Plan, float]:
        planned.append(sizes_of(sample))
        return simulated(model, sample, *args)

    def looked(model: nn.Module, sample: Sample, *args: Any) -> planning.ProfiledModel:
        looked_at.append(sizes_of(sample))
        return profiled(model, sample, *args)

    monkeypatch.setattr(batch_sizes, "simulated_plan", noted)
    monkeypatch.setattr(batch_sizes, "profile_settings", looked)
    found = memscale.find_batch_size(Gpt(), words(), within(ROOM, CONSERVATIVE), hardware=GPU)
    assert found.largest is not None
    assert (found.batch_size, 64) in planned
    assert (found.batch_size + 1, 64) not in looked_at  # what it needs follows from the others
    assert (found.batch_size + 1, 64) not in planned
    assert looked_at.count((4, 64)) == 1  # for the largest batch and for the longest


def profile_of(model: nn.Module, batch: torch.Tensor) -> ModelProfile:
    place = Place.of(virtual_hardware("RTX 3090").device)
    return profile_model(model, Sample((batch,), {}), place, static=True, empirical=False)


def test_profiles_of_other_sizes_follow_from_a_few() -> None:
    model = Gpt()
    by_samples = [(size, profile_of(model, words(size))) for size in (4, 16)]
    by_length = [(size, profile_of(model, words(4, size))) for size in (32, 64, 128)]
    for found, true in (
        (profile_between(by_samples, 40), profile_of(model, words(40))),
        (profile_between(by_length, 96), profile_of(model, words(4, 96))),
    ):
        assert found.parameter_bytes == true.parameter_bytes
        assert found.blocks[1].saved_bytes == pytest.approx(true.blocks[1].saved_bytes, rel=0.01)
        assert found.blocks[1].forward_flops == pytest.approx(true.blocks[1].forward_flops, rel=1e-6)
        assert found.blocks[1].ops[0].output_bytes == pytest.approx(
            true.blocks[1].ops[0].output_bytes, rel=0.01
        )
        assert found.tail_peak_bytes == pytest.approx(true.tail_peak_bytes, rel=0.02)


def test_profiles_of_different_operations_have_nothing_between() -> None:
    profiles = [(1, profile_of(Gpt(2), words(1))), (2, profile_of(Gpt(3), words(2)))]
    with pytest.raises(ProfileError, match="other operations for other sizes"):
        profile_between(profiles, 3)


# ---------------------------------------------------------------------- other sizes of a batch


def test_sizes_of_a_call_change_together() -> None:
    class Model(nn.Module):
        def forward(
            self,
            input_ids: torch.Tensor,
            mask: torch.Tensor,
            features: torch.Tensor,
            bias: torch.Tensor,
            temperature: torch.Tensor,
        ) -> torch.Tensor:
            return input_ids

    sample = Sample(
        (words(4, 16), torch.ones(4, 1, 16, 16, dtype=torch.bool)),
        {"features": torch.ones(4, 16, 16), "bias": torch.ones(16), "temperature": torch.tensor(1.0)},
    )
    assert (batch_size_of(sample), length_of(sample)) == (4, 16)
    more = with_batch_size(Model(), sample, 7)
    assert [tuple(each.shape) for each in more.tensors()] == [
        (7, 16),
        (7, 1, 16, 16),
        (7, 16, 16),
        (16,),
        (),
    ]
    longer = with_length(Model(), sample, 20)
    assert [tuple(each.shape) for each in longer.tensors()] == [
        (4, 20),
        (4, 1, 20, 20),
        (4, 20, 16),
        (16,),
        (),
    ]


# ---------------------------------------------------------------------- what fits


@functools.cache
def found_in(config: Config) -> memscale.BatchSizes:
    return memscale.find_batch_size(Gpt(), words(), within(ROOM, config), hardware=GPU)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONSERVATIVE, id="conservative"),
        pytest.param(QUIET, id="balanced"),
        pytest.param(AGGRESSIVE, id="aggressive"),
    ],
)
@pytest.mark.slow
def test_largest_batch_is_what_trying_each_one_finds(config: Config) -> None:
    largest = found_in(config).largest
    assert largest is not None
    assert 1 < largest.batch_size < EXACT_TO
    config = within(ROOM, config)
    assert does_fit(Gpt(), words(largest.batch_size), config)
    assert not any(does_fit(Gpt(), words(largest.batch_size + more), config) for more in (1, 4))
    assert largest.plan == memscale.plan(Gpt(), words(largest.batch_size), largest.config, hardware=GPU)


@pytest.mark.slow
def test_modes_that_do_more_fit_more() -> None:
    sizes = [found_in(config).batch_size for config in (CONSERVATIVE, QUIET, AGGRESSIVE)]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.slow
def test_longest_sequence() -> None:
    longest = found_in(QUIET).longest
    assert longest is not None
    assert longest.batch_size == 4
    config = within(ROOM)
    assert does_fit(Gpt(), words(4, longest.length), config)
    assert not does_fit(Gpt(), words(4, longest.length + max(1, longest.length // EXACT_TO)), config)


def test_fastest_batch_beats_the_others() -> None:
    largest, fastest = found_in(QUIET).largest, found_in(QUIET).fastest
    assert largest is not None
    assert fastest is not None
    assert fastest.batch_size <= largest.batch_size
    assert fastest.samples_per_second > largest.samples_per_second
    again = memscale.plan(Gpt(), words(fastest.batch_size), fastest.config, hardware=GPU)
    assert again == fastest.plan
    assert again.predicted_peak_bytes + again.allowance_bytes <= ROOM
    for other in (1, fastest.batch_size // 2, 2 * fastest.batch_size):
        plan = memscale.plan(Gpt(), words(other), fastest.config, hardware=GPU)
        assert other / plan.predicted_seconds < fastest.samples_per_second


@pytest.mark.slow
def test_batches_of_a_device_fit_what_the_allocator_reserves() -> None:
    room = 240 * MIB
    found = memscale.find_batch_size(Gpt(), words(4, 640), QUIET, hardware=room)
    assert found.largest is not None
    assert found.fastest is not None
    assert does_fit(Gpt(), words(found.batch_size, 640), QUIET, room)
    assert not does_fit(Gpt(), words(found.batch_size * 5 // 4, 640), QUIET, room)
    for fit in (found.largest, found.fastest):
        assert fit.plan.predicted_peak_bytes < fit.plan.predicted_capacity_bytes <= room
    # Not 1: what is transposed in larger batches is not copied in a batch of one, of which the search knows nothing.
    for other in (2, 2 * found.fastest.batch_size):
        plan = memscale.plan(Gpt(), words(other, 640), found.fastest.config, hardware=room)
        assert other / plan.predicted_seconds <= 1.02 * found.fastest.samples_per_second


@pytest.mark.slow
def test_positions_that_a_model_has_are_not_exceeded() -> None:
    family = FAMILIES["gpt2"]
    model = family.build()
    found = memscale.find_batch_size(model, family.batch(), QUIET, hardware="RTX 3090")
    assert found.longest is not None
    assert found.longest.length == model.config.max_position_embeddings


@pytest.mark.slow
def test_images_have_no_length() -> None:
    family = FAMILIES["resnet"]
    found = memscale.find_batch_size(family.build(), family.batch(), QUIET, hardware="2GiB")
    assert found.batch_size > 2
    assert found.longest is None
    assert str(found.batch_size) in str(found)


def test_nothing_fits() -> None:
    found = memscale.find_batch_size(Gpt(), words(), QUIET, hardware=MIB)
    assert (found.batch_size, found.largest, found.fastest) == (0, None, None)


def test_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    memscale.find_batch_size(model, torch.ones(4, 64), QUIET, hardware=ROOM)
    assert torch.equal(torch.rand(1), expected)
    assert not model.training
    assert not any(hasattr(each, "_memscale_executor") for each in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.slow
def test_wrapped_model_is_searched_as_it_is_without() -> None:
    model = Gpt()
    memscale.wrap(model, QUIET, words())
    try:
        assert memscale.find_batch_size(model, words(), within(ROOM), hardware=GPU) == found_in(QUIET)
    finally:
        memscale.detach(model)


@pytest.mark.parametrize("target", [None, "x", 3])
def test_not_a_model(target: object) -> None:
    with pytest.raises(TypeError, match=r"find_batch_size takes an nn\.Module"):
        memscale.find_batch_size(target, words())  # type: ignore[arg-type]


# ---------------------------------------------------------------------- nothing fits


def test_strict_plan_raises_with_numbers() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"needs .*MiB.* there is 200.0 MiB.*a batch of \d+ instead of 64"
    ):
        memscale.plan(Gpt(), words(64, 640), QUIET, hardware=200 * MIB, strict=True)
    assert (
        memscale.plan(Gpt(), words(1, 640), QUIET, hardware=240 * MIB, strict=True).predicted_peak_bytes > 0
    )


@pytest.mark.slow
def test_batch_that_would_fit_does() -> None:
    plan = memscale.plan(Gpt(), words(64, 640), QUIET, hardware=200 * MIB)
    (said,) = (note for note in plan.notes if "would fit" in note)
    size = int(re.search(r"a batch of (\d+) instead of 64", said)[1])  # type: ignore[index]
    assert does_fit(Gpt(), words(size, 640), QUIET, 200 * MIB)
    assert not does_fit(Gpt(), words(size + 2, 640), QUIET, 200 * MIB)


def test_sequence_that_would_fit_where_no_batch_does() -> None:
    plan = memscale.plan(Gpt(), words(1, 40960), QUIET, hardware=200 * MIB)
    assert any(re.search(r"a sequence of \d+ instead of 40960 would fit", note) for note in plan.notes)


def test_budget_that_nothing_fits_says_what_would() -> None:
    config = QUIET.replace(memory_budget=20 * MIB)
    plan = memscale.plan(Gpt(), words(64), config, hardware="RTX 3090")
    assert any("no plan fits the budget of 20.0 MiB" in note for note in plan.notes)
    assert any("would fit" in note for note in plan.notes)
    with pytest.raises(DoesNotFitError):
        memscale.plan(Gpt(), words(64), config, hardware="RTX 3090", strict=True)


# ---------------------------------------------------------------------- what is simulated


@pytest.mark.slow
def test_plans_that_do_the_same_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated: list[tuple[object, ...]] = []
    decided: list[tuple[object, ...]] = []
    predict, decide = planning.predict, planning.decide

    def noted(model: nn.Module, plan: memscale.Plan, *args: Any) -> memscale.Plan:
        simulated.append(plan.actions)
        found = predict(model, plan, *args)
        # As if every plan needed more than the engine reckons.
        return dataclasses.replace(found, predicted_peak_bytes=2 * found.predicted_peak_bytes)

    def made(*args: Any, **kwargs: Any) -> memscale.Plan:
        plan = decide(*args, **kwargs)
        decided.append(plan.actions)
        return plan

    monkeypatch.setattr(planning, "predict", noted)
    monkeypatch.setattr(planning, "decide", made)
    plan = memscale.plan(Gpt(), words(16), AGGRESSIVE, hardware=ROOM)
    assert len(decided) >= len(simulated) == len(set(simulated))
    assert any("more than there is" in note or "nothing fits" in note for note in plan.notes)


def test_actions_are_what_is_done_and_not_why() -> None:
    plan = memscale.plan(Gpt(), words(), within(ROOM), hardware=GPU)
    renamed = tuple(dataclasses.replace(layer, rule="another", reason="other words") for layer in plan.layers)
    assert dataclasses.replace(plan, layers=renamed, notes=("a note",)).actions == plan.actions
    assert dataclasses.replace(plan, async_offload=not plan.async_offload).actions != plan.actions
    assert dataclasses.replace(plan, layers=plan.layers[:-1]).actions != plan.actions
