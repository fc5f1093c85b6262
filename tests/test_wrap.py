"""`wrap`, `detach`, `optimize` and `plan` as users call them."""

from __future__ import annotations

import functools
import logging
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import memscale
from memscale import Plan
from memscale.errors import MemScaleError, ProfileError, WrapError, WrapTypeError
from memscale.executor import Executor
from memscale.hardware import detect
from memscale.planner import replan as replanning
from memscale.profiler import run as profiling
from memscale.testing import executing
from support.families import FAMILIES
from support.pictures import assert_as_before, pictures
from support.wrapping import QUIET, Layer, Stack, lossless

AGGRESSIVE = lossless("aggressive")
X = torch.ones(4, 6, 8)
DEVICE = X.device


@pytest.fixture(autouse=True)
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEVICE", device)
    monkeypatch.setitem(globals(), "X", X.to(device))


@pytest.fixture
def gpu(device: torch.device) -> Iterator[torch.device]:
    """The device, or the virtual GPU if that is the CPU."""
    with executing("1GiB") if device.type == "cpu" else nullcontext(SimpleNamespace(device=device)) as found:
        yield found.device


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    """A training run with dropout, from one seed."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def build(**options: int) -> Stack:
    torch.manual_seed(0)
    return Stack(**options).to(DEVICE)


# One wrap, and its end -------------------------------------------------------------------------------


def test_wrap_returns_the_same_object_with_its_executor() -> None:
    model = build()
    assert memscale.wrap(model, AGGRESSIVE, X) is model
    assert isinstance(model._memscale_executor, Executor)
    assert all(model._memscale_executor.plan.layer(f"layers.{i}").techniques for i in range(3))


def test_detach_leaves_the_model_as_it_was() -> None:
    model = build()
    before = pictures(model)
    memscale.wrap(model, AGGRESSIVE, X)
    model(X).sum().backward()
    model.zero_grad()
    memscale.detach(model)
    assert_as_before(pictures(model), before)


def test_wrap_twice_is_wrap_once_with_the_new_plan() -> None:
    once, twice = build(), build()
    memscale.wrap(once, AGGRESSIVE, X)
    untouched = pictures(twice)
    memscale.wrap(twice, QUIET, X)
    assert memscale.wrap(twice, AGGRESSIVE, X) is twice

    assert twice._memscale_executor.plan == once._memscale_executor.plan
    handles = [len(module._forward_pre_hooks) for module in twice.modules()]
    assert handles == [len(module._forward_pre_hooks) for module in once.modules()]
    assert losses(twice) == losses(once)
    memscale.detach(twice)
    assert "_memscale_executor" not in vars(twice)
    assert_as_before(pictures(twice), untouched, values=False)


def test_a_second_wrap_that_fails_leaves_the_first() -> None:
    model = build()
    memscale.wrap(model, AGGRESSIVE, X)
    executor = model._memscale_executor
    with pytest.raises(ProfileError):
        memscale.wrap(model, AGGRESSIVE, torch.ones(3, 5))
    assert model._memscale_executor is executor
    assert executor.attached
    assert losses(model) == losses(build())


def test_a_second_wrap_that_cannot_attach_leaves_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    memscale.wrap(model, AGGRESSIVE, X)
    executor, attach = model._memscale_executor, Executor.attach

    def refuse(self: Executor) -> None:
        if self is not executor:
            raise WrapError("no")
        attach(self)

    monkeypatch.setattr(Executor, "attach", refuse)
    with pytest.raises(WrapError, match="no"):
        memscale.wrap(model, AGGRESSIVE, X)
    assert model._memscale_executor is executor
    assert executor.attached


class Raising(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise OSError("no such table")


@pytest.mark.parametrize(
    ("make", "sample", "message"),
    [
        (Stack, torch.ones(3, 5), "does not run on the sample: RuntimeError: .*float32\\[3, 5\\]"),
        (Stack, {"y": X}, "does not run on the sample: TypeError.*y=float32"),
        (Stack, {"x": X, 3: X}, "the key 3"),
        (Stack, "a text", "str without tensors"),
        (Raising, X, "does not run on the sample: OSError: no such table"),
    ],
    ids=["shape", "name", "key", "kind", "raising"],
)
def test_a_wrap_that_fails_leaves_the_model_untouched(
    make: Callable[[], nn.Module], sample: Any, message: str
) -> None:
    model = make()
    before, random = pictures(model), torch.get_rng_state()
    with pytest.raises(ProfileError, match=message):
        memscale.wrap(model, AGGRESSIVE, sample)
    assert_as_before(pictures(model), before)
    assert torch.equal(torch.get_rng_state(), random)


# optimize and plan -----------------------------------------------------------------------------------


def test_optimize_yields_the_executor_and_detaches_at_the_end() -> None:
    model = build()
    before = pictures(model)
    with memscale.optimize(model, config=AGGRESSIVE, sample_input=X) as executor:
        assert model._memscale_executor is executor
        model(X).sum().backward()
        model.zero_grad()
    assert not executor.attached
    assert_as_before(pictures(model), before)


def test_optimize_detaches_when_its_block_raises() -> None:
    model = build()
    before = pictures(model)
    with pytest.raises(KeyError, match="in the block"):
        with memscale.optimize(model, config=AGGRESSIVE, sample_input=X):
            raise KeyError("in the block")
    assert_as_before(pictures(model), before)


def test_a_block_may_detach_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with memscale.optimize(model, config=AGGRESSIVE, sample_input=X):
        memscale.detach(model)
    assert not caplog.records


def test_plan_is_what_wrap_does_and_attaches_nothing() -> None:
    model = build()
    before = pictures(model)
    plan = memscale.plan(model, X, AGGRESSIVE)
    assert_as_before(pictures(model), before)
    memscale.wrap(model, AGGRESSIVE, X)
    assert model._memscale_executor.plan == plan
    # And of a wrapped model it is the plan of the plain one.
    assert memscale.plan(model, X, AGGRESSIVE) == plan
    assert model._memscale_executor.attached


def test_plan_for_a_gpu_that_is_not_there() -> None:
    config = AGGRESSIVE.replace(enable_offloading=False)
    plan = memscale.plan(build(), X, config, hardware="RTX 3090")
    assert plan.device == "NVIDIA GeForce RTX 3090 (24.0 GiB)"
    assert plan.prediction_source == "simulated"
    assert 0 < plan.predicted_saved_bytes < plan.baseline_saved_bytes


# Samples ---------------------------------------------------------------------------------------------


@dataclass
class Fields:
    x: torch.Tensor
    bias: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor
    bias: torch.Tensor


BIAS = torch.ones(4)


@functools.cache
def plan_of_a_tensor() -> Plan:
    return memscale.plan(build(), X, AGGRESSIVE)


@pytest.mark.parametrize(
    "sample",
    [
        X,
        (X,),
        [X],
        (X, BIAS),
        (X, BIAS, torch.ones(4, dtype=torch.long)),  # a loader's: the model has room for two
        {"x": X},
        {"x": X, "bias": BIAS},
        UserDict(x=X, bias=BIAS),
        Fields(X, BIAS),
        Named(X, BIAS),
        SimpleNamespace(x=X, bias=BIAS),
    ],
    ids=lambda sample: f"{type(sample).__name__}",
)
def test_samples_of_every_kind_give_the_same_plan(sample: Any) -> None:
    assert memscale.plan(build(), sample, AGGRESSIVE).layers == plan_of_a_tensor().layers


def test_a_pair_of_inputs_and_targets_is_taken_apart() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    plan = memscale.plan(model, (X, torch.ones(4, dtype=torch.long)), AGGRESSIVE)
    assert plan.batch == "float32[4, 6, 8]"


def test_a_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    batch = transformers.BatchEncoding(family.batch())
    plan = memscale.plan(family.build(), batch, AGGRESSIVE)
    assert plan.batch == "input_ids=int64[2, 12], labels=int64[2, 12]"


# No sample: the first training batch ---------------------------------------------------------------


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that plans were made for after wrap, in words."""
    made: list[str] = []
    make_plan = replanning.make_plan

    def counted(model: nn.Module, sample: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(sample.describe())
        return make_plan(model, sample, *args, **kwargs)

    monkeypatch.setattr(replanning, "make_plan", counted)
    return made


def test_without_a_sample_the_first_training_batch_makes_the_plan_once(plans_made: list[str]) -> None:
    plain, model = losses(build()), build()
    memscale.wrap(model, AGGRESSIVE)
    first = model._memscale_executor.plan
    assert first.batch == "not seen yet"
    assert first.notes

    assert losses(model) == plain
    assert plans_made == ["float32[4, 6, 8]"]
    plan = model._memscale_executor.plan
    assert plan == memscale.plan(build(), X, AGGRESSIVE)
    assert plan.prediction_source == "simulated"


def test_evaluation_does_not_count_as_a_batch(plans_made: list[str]) -> None:
    model = memscale.wrap(build(), AGGRESSIVE)
    with torch.no_grad():
        model.eval()(X)
        model.train()(X)
    assert not plans_made
    model(X)
    assert plans_made == ["float32[4, 6, 8]"]


def test_a_detached_model_makes_no_plan(plans_made: list[str]) -> None:
    model = build()
    before = pictures(model)
    memscale.wrap(model, AGGRESSIVE)
    memscale.detach(model)
    assert_as_before(pictures(model), before)
    model(X)
    assert not plans_made


def test_a_first_batch_that_cannot_be_profiled_leaves_the_plan(
    plans_made: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Once(Stack):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Once.calls += 1
            if Once.calls < 2:  # the run that would profile it
                raise RuntimeError("not yet")
            return super().forward(x)

    model = Once().to(DEVICE)
    config = AGGRESSIVE.replace(enable_logging=True, use_static_profiling=False)
    memscale.wrap(model, config)
    plan = model._memscale_executor.plan
    model(X).sum().backward()
    assert model._memscale_executor.plan is plan
    assert "the first batch could not be profiled" in caplog.text
    assert len(plans_made) == 1


def test_nothing_is_moved_before_the_first_batch(gpu: torch.device) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    model = family.build().to(gpu)
    memscale.wrap(model, AGGRESSIVE.replace(use_mixed_precision=False))  # its hints would do for a plan
    assert all(parameter.device == gpu for parameter in model.parameters())
    family.loss(model, family.batch(gpu))
    assert any(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_model_without_weights_is_planned_by_its_hints() -> None:
    pytest.importorskip("transformers")
    family = FAMILIES["bert"]
    with torch.device("meta"):
        model = family.make(family.scale)
    memscale.wrap(model, AGGRESSIVE)
    plan = model._memscale_executor.plan
    assert plan.prediction_source == "simulated"
    assert plan.predicted_saved_bytes < plan.baseline_saved_bytes
    assert not any(parameter.is_meta for parameter in model.parameters())  # they are made at home


# Devices -----------------------------------------------------------------------------------------------


def test_a_model_on_a_device_is_planned_for_that_device(gpu: torch.device) -> None:
    model = build().to(gpu)
    memscale.wrap(model, AGGRESSIVE.replace(enable_offloading=False), X.to(gpu))
    plan = model._memscale_executor.plan
    assert plan.device.startswith(detect(gpu).device.name)
    assert not plan.device.startswith(detect("cpu").device.name)
    model(X.to(gpu)).sum().backward()
    assert all(parameter.grad.device == gpu for parameter in model.parameters())


def test_a_plain_step_that_does_not_fit_gives_a_plan_by_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(profiling, "profile_empirical", full)
    model = memscale.wrap(build(), AGGRESSIVE.replace(use_static_profiling=False), X)
    plan = model._memscale_executor.plan
    assert "runs out of memory" in plan.notes[0]
    assert all(plan.layer(f"layers.{i}").techniques for i in range(3))
    assert losses(model) == losses(build())


# Bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: memscale.wrap(None), WrapTypeError, "nn.Module or a Hugging Face Trainer, got None"),
        (lambda: memscale.wrap("x"), WrapTypeError, "got 'x' \\(str\\)"),
        (lambda: memscale.wrap(nn.Linear), WrapTypeError, "got .*Linear.*type"),
        (lambda: memscale.wrap(nn.Sequential(nn.ReLU())), WrapError, "Sequential has no parameters"),
        (lambda: memscale.wrap(nn.Linear(2, 2), {"mode": "aggressive"}), WrapTypeError, "Config\\(\\*\\*"),
        (lambda: memscale.wrap(nn.Linear(2, 2), "aggressive"), WrapTypeError, "memscale.Config, got"),
        (lambda: memscale.wrap(nn.Linear(2, 2), optimizer="adam"), WrapTypeError, "torch.optim.Optimizer"),
        (lambda: memscale.wrap(nn.Linear(2, 2), async_offload="yes"), MemScaleError, "async_offload"),
        (lambda: memscale.plan(None, X), WrapTypeError, "memscale.plan takes an nn.Module, got None"),
        (lambda: memscale.plan(nn.Linear(8, 2), X, hardware="RTX 9999"), MemScaleError, "RTX 9999"),
        (lambda: memscale.optimize(None).__enter__(), WrapTypeError, "memscale.optimize takes an nn.Module"),
    ],
    ids=[
        "None",
        "a text",
        "a class",
        "no parameters",
        "a dict",
        "a mode",
        "an optimizer's name",
        "async_offload",
        "plan of None",
        "an unknown GPU",
        "optimize None",
    ],
)
def test_bad_input_says_what_it_got(action: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        action()


def test_wrong_types_are_type_errors() -> None:
    with pytest.raises(TypeError):
        memscale.wrap(None)


@pytest.mark.parametrize("prepare", ["never wrapped", "already detached", "no model at all"])
def test_detach_of_what_is_not_wrapped_warns(prepare: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build()
    if prepare == "already detached":
        memscale.wrap(model, QUIET, X)
        memscale.detach(model)
    if prepare == "no model at all":
        model = "x"
    with caplog.at_level(logging.WARNING, logger="memscale"):
        assert memscale.detach(model) is None
    assert "is not wrapped" in caplog.text


def test_nothing_is_attached_if_checkpointing_is_off() -> None:
    model = build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    memscale.wrap(model, AGGRESSIVE.replace(enable_checkpointing=False, enable_offloading=False), X)
    plan = model._memscale_executor.plan
    assert not any(layer.techniques for layer in plan.layers)
    assert plan.layer("layers.1").rule == "checkpointing-off"
    ours = {"_memscale_executor", "_memscale_forward", "_apply", "forward"}
    for name, module in model.named_modules():
        added = set(vars(module)) - before[name] - {"__reduce_ex__"}  # which makes copies plain
        assert added == (set() if name else ours)
    assert plan.predicted_saved_bytes == plan.baseline_saved_bytes
