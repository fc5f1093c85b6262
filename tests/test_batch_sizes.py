"""`find_batch_size`, `plan(strict=True)`, and what is said of a batch that no plan makes fit."""

from __future__ import annotations

import re

import pytest
import torch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memscale
from memscale import Config, OptimizationMode
from memscale.errors import DoesNotFitError
from memscale.fitting import EXACT_TO, largest_fitting
from memscale.hardware import virtual_hardware
from memscale.planning import fits
from memscale.profiler import Sample
from memscale.sizes import batch_size_of, length_of, with_batch_size, with_length

QUIET = Config(enable_logging=False)
CONSERVATIVE = QUIET.replace(mode=OptimizationMode.CONSERVATIVE)
AGGRESSIVE = QUIET.replace(mode=OptimizationMode.AGGRESSIVE)
MIB = 2**20


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


def does_fit(model: nn.Module, batch: torch.Tensor, config: Config, room: int) -> bool:
    plan = memscale.plan(model, batch, config, hardware=room)
    return fits(plan, virtual_hardware(room), config)


# ---------------------------------------------------------------------- the search


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.integers(0, 1000),
    slope=st.integers(1, 50),
    steeper=st.integers(0, 30),
    bend=st.integers(1, 5000),
    room=st.integers(1, 100_000),
    limit=st.sampled_from([1, 9, 700, 10**9]),
    start=st.integers(1, 200),
)
def test_search_finds_the_largest_that_fits(
    fixed: int, slope: int, steeper: int, bend: int, room: int, limit: int, start: int
) -> None:
    most, looks = 65536, 0

    def needs(size: int) -> int | None:
        nonlocal looks
        looks += 1
        return None if size > limit else fixed + slope * size + steeper * max(0, size - bend)

    found = largest_fitting(needs, room, start=start, most=most)
    assert looks <= 24  # a profile each
    assert found == 0 or (needs(found) or 0) <= room
    beyond = found + max(1, found // EXACT_TO)
    assert beyond > most or (needs(beyond) or room + 1) > room


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


@pytest.mark.parametrize("config", [CONSERVATIVE, QUIET, AGGRESSIVE], ids=lambda config: config.mode.value)
def test_largest_batch_is_what_trying_each_one_finds(config: Config) -> None:
    model, room = Gpt(), 24 * MIB
    found = memscale.find_batch_size(model, words(), config, hardware=room)
    largest = found.largest
    assert largest is not None and 1 < largest.batch_size < EXACT_TO
    assert does_fit(model, words(largest.batch_size), config, room)
    assert not any(does_fit(model, words(largest.batch_size + more), config, room) for more in (1, 2, 5))
    assert largest.plan == memscale.plan(model, words(largest.batch_size), largest.config, hardware=room)


def test_modes_that_do_more_fit_more() -> None:
    model = Gpt(layers=6)
    sizes = [
        memscale.find_batch_size(model, words(), config, hardware=24 * MIB).batch_size
        for config in (CONSERVATIVE, QUIET, AGGRESSIVE)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


def test_longest_sequence() -> None:
    model, room = Gpt(), 24 * MIB
    longest = memscale.find_batch_size(model, words(2), QUIET, hardware=room).longest
    assert longest is not None and longest.batch_size == 2
    assert does_fit(model, words(2, longest.length), QUIET, room)
    assert not does_fit(model, words(2, longest.length + max(1, longest.length // EXACT_TO)), QUIET, room)


def test_positions_that_a_model_has_are_not_exceeded() -> None:
    family = FAMILIES["gpt2"]
    model = family.build()
    found = memscale.find_batch_size(model, family.batch(), QUIET, hardware="RTX 3090")
    assert found.longest is not None
    assert found.longest.length == model.config.max_position_embeddings


def test_fastest_batch_beats_the_others() -> None:
    model, room = Gpt(layers=6), 24 * MIB
    found = memscale.find_batch_size(model, words(), QUIET, hardware=room)
    largest, fastest = found.largest, found.fastest
    assert largest is not None and fastest is not None
    assert fastest.batch_size <= largest.batch_size
    assert fastest.samples_per_second > largest.samples_per_second
    again = memscale.plan(model, words(fastest.batch_size), fastest.config, hardware=room)
    assert again == fastest.plan and again.predicted_peak_bytes + again.allowance_bytes <= room


def test_images_have_no_length() -> None:
    family = FAMILIES["resnet"]
    found = memscale.find_batch_size(family.build(), family.batch(), QUIET, hardware="2GiB")
    assert found.batch_size > 2 and found.longest is None
    assert str(found.batch_size) in str(found)


def test_nothing_fits() -> None:
    found = memscale.find_batch_size(Gpt(), words(), QUIET, hardware=MIB)
    assert (found.batch_size, found.largest, found.fastest) == (0, None, None)


def test_model_is_left_as_it_was() -> None:
    model = Gpt().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    memscale.find_batch_size(model, words(), QUIET, hardware=24 * MIB)
    assert torch.equal(torch.rand(1), expected)
    assert not model.training and not any(hasattr(each, "_memscale_executor") for each in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


def test_wrapped_model_is_searched_as_it_is_without() -> None:
    model = Gpt()
    plain = memscale.find_batch_size(model, words(), QUIET, hardware=24 * MIB)
    memscale.wrap(model, QUIET, words())
    try:
        assert memscale.find_batch_size(model, words(), QUIET, hardware=24 * MIB) == plain
    finally:
        memscale.detach(model)


@pytest.mark.parametrize("target", [None, "x", 3])
def test_not_a_model(target: object) -> None:
    with pytest.raises(TypeError, match="find_batch_size takes an nn.Module"):
        memscale.find_batch_size(target, words())  # type: ignore[arg-type]


# ---------------------------------------------------------------------- nothing fits


def test_strict_plan_raises_with_numbers() -> None:
    with pytest.raises(DoesNotFitError, match=r"needs .*MiB.* there is 8.00 MiB.*a batch of \d+ instead of 64"):
        memscale.plan(Gpt(), words(64), QUIET, hardware=8 * MIB, strict=True)
    assert memscale.plan(Gpt(), words(1), QUIET, hardware=24 * MIB, strict=True).predicted_peak_bytes > 0


def test_batch_that_would_fit_does() -> None:
    plan = memscale.plan(Gpt(), words(64), QUIET, hardware=16 * MIB)
    (said,) = (note for note in plan.notes if "would fit" in note)
    size = int(re.search(r"a batch of (\d+) instead of 64", said)[1])  # type: ignore[index]
    assert does_fit(Gpt(), words(size), QUIET, 16 * MIB)
    assert not does_fit(Gpt(), words(size + 2), QUIET, 16 * MIB)


def test_sequence_that_would_fit_where_no_batch_does() -> None:
    plan = memscale.plan(Gpt(), words(1, 4096), QUIET, hardware=16 * MIB)
    assert any(re.search(r"a sequence of \d+ instead of 4096 would fit", note) for note in plan.notes)


def test_budget_that_nothing_fits_says_what_would() -> None:
    config = QUIET.replace(memory_budget=12 * MIB)
    plan = memscale.plan(Gpt(), words(64), config, hardware="RTX 3090")
    assert any("budget" in note for note in plan.notes)
    assert any("would fit" in note for note in plan.notes)
    with pytest.raises(DoesNotFitError):
        memscale.plan(Gpt(), words(64), config, hardware="RTX 3090", strict=True)
