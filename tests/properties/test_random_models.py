"""Random models, plans and loops: what a wrapped model computes is what the plain one does, to the bit.

The long search is `make soak`. A seed that fails here or there is run again, and made smaller, by
``PYTHONPATH=src:tests python -m properties.search --only SEED``.
"""

from __future__ import annotations

import logging

import pytest

from memscale.errors import (
    MemScaleError,
    RecomputeError,
    TierFullError,
    TransferError,
    VerificationError,
)
from properties import plans
from properties.check import Wrapping, check
from properties.generator import make_case

SEEDS = range(48)
CHUNKS = [
    list(SEEDS[start::16]) for start in range(16)
]  # each of three models: four seeds in a row share one


@pytest.mark.matrix(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: "-".join(map(str, seeds)))
def test_a_wrapped_model_trains_as_the_plain_one(seeds: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "memscale")
    did_something = 0
    for seed in seeds:
        case = make_case(seed)
        outcome = check(case)
        message = f"{outcome.kind}: {outcome.reason}\n{case.describe()}\n{outcome.details}"
        assert outcome.kind == "equal", message
        did_something += any(outcome.techniques[name] for name in ("checkpointing", "offloading"))
    assert did_something  # a search among plans that do nothing would find nothing


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 8, 16))])
def test_plans_are_deterministic_keep_to_budgets_and_predict(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "memscale")
    predicted: list[int] = []
    most = plans._most

    def noted(training: plans.Training) -> int:
        predicted.append(most(training))
        return predicted[-1]

    monkeypatch.setattr(plans, "_most", noted)
    case = make_case(seed)
    outcome = plans.check_plans(case)
    assert outcome.kind == "equal", f"{outcome.kind}: {outcome.reason}\n{case.describe()}\n{outcome.details}"
    assert predicted  # it came to the comparison with what steps need


@pytest.mark.filterwarnings("ignore")
def test_a_prediction_that_is_too_low_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "memscale")
    most = plans._most
    monkeypatch.setattr(plans, "_most", lambda training: most(training) // 2)
    assert plans.check_plans(make_case(1)).kind == "mispredicted"


def test_a_case_follows_from_its_seed() -> None:
    assert make_case(12) == make_case(12)
    assert make_case(12) != make_case(13)
    assert {make_case(seed).device for seed in range(40)} == {"cpu", "vgpu"}


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is not blind: a gradient that is off by a millionth fails the case."""
    case = make_case(5)
    assert check(case).kind == "equal"
    from properties import loops

    seen = loops.Training._look

    def look(self: loops.Training) -> None:
        if self._wrap is not None:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= 1 + 1e-6
        seen(self)

    monkeypatch.setattr(loops.Training, "_look", look)
    outcome = check(case)
    assert outcome.kind == "wrong"
    assert "gradient of" in outcome.reason


@pytest.mark.parametrize("error", [VerificationError, RecomputeError, TransferError, TierFullError])
def test_a_broken_promise_is_a_failure_and_a_full_tier_is_not(
    error: type[MemScaleError], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "memscale")

    def refuse(*args: object) -> None:
        raise error("by this test")

    monkeypatch.setattr(Wrapping, "wrap", refuse)
    outcome = check(make_case(5))
    assert outcome.kind == ("refused" if error is TierFullError else "crashed")
    assert outcome.is_failure == (error is not TierFullError)
