"""A padding mask's values decide what a model builds, in a simulation as in a real step."""

from __future__ import annotations

import pytest
import torch

from memscale.simulator import simulate

MASKS = {"whole": torch.ones(2, 4, dtype=torch.long), "padded": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])}
QUESTIONS = {
    "all": lambda mask: mask.all(),
    "all of a bool": lambda mask: mask.to(torch.bool).all(),
    "by their sum": lambda mask: mask.bool().sum() == mask.numel(),
    "equal to one": lambda mask: torch.all(mask == 1),
    "none is zero": lambda mask: ~(mask == 0).any(),
    "on the device": lambda mask: mask.to("cpu")[:, 1:].all(),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
@pytest.mark.parametrize("name", MASKS)
def test_what_is_asked_of_a_mask_is_answered_by_its_values(name: str, question) -> None:
    with simulate("1GiB") as sim:
        mask = sim.batch_of(MASKS[name])
        assert mask.device == sim.device
        assert bool(question(mask)) == (name == "whole")


def test_values_that_were_changed_are_not_known_any_more() -> None:
    with simulate("1GiB") as sim:
        mask = sim.batch_of(MASKS["padded"])
        mask.fill_(1)
        assert bool(mask.all())  # as for every tensor that nothing is known of


def test_floating_point_numbers_and_what_has_no_values_are_not_looked_at() -> None:
    numbers, shapes = torch.zeros(3), torch.zeros(3, dtype=torch.long, device="meta")
    with simulate("1GiB") as sim:
        for each in (numbers, shapes):
            assert bool(sim.batch_of(each).all())


def test_what_is_known_takes_no_memory() -> None:
    with simulate("1GiB") as sim:
        mask = sim.batch_of(MASKS["padded"])
        before = sim.tracker.live_bytes(sim.device), sim.tracker.live_bytes("cpu")
        bool(mask.all())
        assert (sim.tracker.live_bytes(sim.device), sim.tracker.live_bytes("cpu")) == before


@pytest.mark.parametrize(("share", "runs"), [(0.0, True), (0.1, True), (0.9, False)])
def test_a_number_that_is_drawn_takes_the_likelier_branch(share: float, runs: bool) -> None:
    """As a layer that is dropped, or an adapter of PEFT: without a share to drop, it runs."""
    with simulate("1GiB") as sim:
        guesses = sim.tracker.guesses
        assert bool(torch.rand(1) > share) == runs
        assert bool(torch.rand([]).to(sim.device) < share) != runs
        assert sim.tracker.guesses == guesses + 2
