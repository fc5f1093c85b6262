"""Bad input: a clear error or warning, and the model that was given is exactly as it was, wrapped or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.errors import (
    ConfigError,
    ConfigTypeError,
    HardwareError,
    ProfileError,
    WrapError,
    WrapTypeError,
)
from support.pictures import assert_as_before, pictures
from support.wrapping import Stack

X = torch.ones(3, 8)
CONFIG = Config(mode="aggressive", force_optimize=True, enable_logging=False)
WRONG_SHAPE = torch.ones(3, 5)


def hooked(module: nn.Module, args: Any, output: Any) -> None:
    """The user's own hook, which must stay."""


def trained() -> nn.Module:
    """A model as it is in the middle of training: gradients, a hook, a frozen part, one layer in eval."""
    torch.manual_seed(3)
    model = Stack()
    model.layers[0].register_forward_hook(hooked)
    model.head.bias.requires_grad_(False)
    model.layers[1].eval()
    model(X).sum().backward()
    return model


def enter(context: Any) -> None:
    with context:
        raise AssertionError("the block must not run")


BAD: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "config is a dict": (
        lambda m: memscale.wrap(m, {"mode": "balanced"}, X),
        WrapTypeError,
        r"memscale\.Config.*dict.*Config\(\*\*",
    ),
    "config is a mode": (lambda m: memscale.wrap(m, "balanced", X), WrapTypeError, "got 'balanced'"),
    "optimizer is a name": (
        lambda m: memscale.wrap(m, CONFIG, X, optimizer="adam"),
        WrapTypeError,
        "torch.optim.Optimizer, got 'adam'",
    ),
    "optimizer is a class": (
        lambda m: memscale.wrap(m, CONFIG, X, optimizer=torch.optim.SGD),
        WrapTypeError,
        "torch.optim.Optimizer, got .*type",
    ),
    "async_offload is a text": (
        lambda m: memscale.wrap(m, CONFIG, X, async_offload="yes"),
        ConfigTypeError,
        "async_offload",
    ),
    "sample of a wrong shape": (
        lambda m: memscale.wrap(m, CONFIG, WRONG_SHAPE),
        ProfileError,
        r"float32\[3, 5\].*sample_input",
    ),
    "sample without tensors": (lambda m: memscale.wrap(m, CONFIG, "x"), ProfileError, "without tensors"),
    "sample with an unknown name": (lambda m: memscale.wrap(m, CONFIG, {"z": X}), ProfileError, "z=float32"),
    "log file in no directory": (
        lambda m: memscale.wrap(
            m, CONFIG.replace(enable_logging=True, log_file=str(Path(__file__).parent / "no" / "log")), X
        ),
        ConfigError,
        "log_file=.*No such file or directory.*directory that exists",
    ),
    "the model in a list": (lambda m: memscale.wrap([m], CONFIG, X), WrapTypeError, "nn.Module.*list"),
    "a bound method": (lambda m: memscale.wrap(m.modules, CONFIG, X), WrapTypeError, "nn.Module.*method"),
    "plan on a wrong shape": (lambda m: memscale.plan(m, WRONG_SHAPE, CONFIG), ProfileError, r"\[3, 5\]"),
    "plan with a dict": (lambda m: memscale.plan(m, X, {}), WrapTypeError, "memscale.Config"),
    "plan for an unknown GPU": (
        lambda m: memscale.plan(m, X, CONFIG, hardware="RTX 9999"),
        HardwareError,
        "RTX 9999",
    ),
    "plan for no memory": (lambda m: memscale.plan(m, X, CONFIG, hardware=-1), ConfigError, "-1"),
    "plan of what is not a module": (
        lambda m: memscale.plan(m.forward, X, CONFIG),
        WrapTypeError,
        r"memscale\.plan takes an nn\.Module",
    ),
    "optimize what is not a module": (
        lambda m: enter(memscale.optimize(m.forward, config=CONFIG)),
        WrapTypeError,
        r"memscale\.optimize takes an nn\.Module",
    ),
    "optimize with a dict": (lambda m: enter(memscale.optimize(m, config={})), WrapTypeError, "Config"),
    "optimize with a wrong optimizer": (
        lambda m: enter(memscale.optimize(m, 0.1, CONFIG, X)),
        WrapTypeError,
        "0.1 .float.",
    ),
    "optimize on a wrong shape": (
        lambda m: enter(memscale.optimize(m, None, CONFIG, WRONG_SHAPE)),
        ProfileError,
        r"\[3, 5\]",
    ),
}


@pytest.mark.parametrize(("act", "error", "message"), BAD.values(), ids=BAD.keys())
def test_a_plain_model_is_untouched(act, error, message):
    model = trained()
    before, random = pictures(model), torch.get_rng_state()
    with pytest.raises(error, match=message):
        act(model)
    assert_as_before(pictures(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    # The same model with good input is wrapped: what failed was the input.
    memscale.wrap(model, CONFIG, X)
    with pytest.raises(AssertionError):
        assert_as_before(pictures(model), before)
    memscale.detach(model)
    assert_as_before(pictures(model), before)


@pytest.mark.parametrize(("act", "error", "message"), BAD.values(), ids=BAD.keys())
def test_a_wrapped_model_stays_wrapped_as_it_was(act, error, message):
    model = trained()
    before = pictures(model)
    memscale.wrap(model, CONFIG, X)
    executor = model._memscale_executor
    plan = executor.plan
    names = {name: list(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(error, match=message):
        act(model)
    assert model._memscale_executor is executor
    assert executor.attached
    assert executor.plan is plan
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == {
        name: sorted(keys) for name, keys in names.items()
    }
    memscale.detach(model)
    assert_as_before(pictures(model), before)


def _kind_of(value: object) -> str:
    """A test's name must be the same in every process, so that it has no address in it."""
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize("target", [None, "x", 3, {}, nn.Linear, object(), torch.ones(2)], ids=_kind_of)
def test_what_is_not_a_model_is_refused_by_each_of_them(target):
    for act, name in (
        (memscale.wrap, "wrap"),
        (lambda value: memscale.plan(value, X), "plan"),
        (lambda value: enter(memscale.optimize(value)), "optimize"),
    ):
        with pytest.raises(WrapTypeError, match=rf"memscale\.{name} takes an nn\.Module") as caught:
            act(target)
        assert isinstance(caught.value, TypeError)
        assert (type(target).__name__ if target is not None else "None") in str(caught.value)


@pytest.mark.parametrize(
    "model", [nn.ReLU(), nn.Sequential(), nn.Sequential(nn.ReLU(), nn.Dropout())], ids=str
)
def test_a_module_without_parameters_is_refused(model):
    before = pictures(model)
    for act in (memscale.wrap, lambda value: enter(memscale.optimize(value))):
        with pytest.raises(WrapError, match=f"{type(model).__name__} has no parameters"):
            act(model)
    assert_as_before(pictures(model), before)


# detach ------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_detach_of_a_model_never_wrapped_warns(caplog):
    model = trained()
    before = pictures(model)
    memscale.detach(model)
    assert len(warnings_of(caplog)) == 1
    assert "Stack is not wrapped" in warnings_of(caplog)[0]
    assert_as_before(pictures(model), before)


@pytest.mark.parametrize("value", [None, "x", 3, nn.Linear], ids=_kind_of)
def test_detach_of_what_is_not_a_model_warns(value, caplog):
    memscale.detach(value)
    assert len(warnings_of(caplog)) == 1
    assert "is not wrapped" in warnings_of(caplog)[0]


def test_detach_twice_warns_the_second_time(caplog):
    model = trained()
    before = pictures(model)
    memscale.wrap(model, CONFIG, X)
    memscale.detach(model)
    assert warnings_of(caplog) == []
    assert_as_before(pictures(model), before)
    memscale.detach(model)
    assert len(warnings_of(caplog)) == 1
    assert_as_before(pictures(model), before)
    # An already detached model can be wrapped again.
    memscale.wrap(model, CONFIG, X)
    assert model._memscale_executor.attached


def test_detach_of_a_part_of_a_wrapped_model_leaves_the_whole(caplog):
    model = memscale.wrap(trained(), CONFIG, X)
    memscale.detach(model.layers[0])
    assert "Layer is not wrapped" in warnings_of(caplog)[0]
    assert model._memscale_executor.attached
    assert any("forward" in vars(layer) for layer in model.layers)


# optimize ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_optimize_around_code_that_raises_detaches_and_lets_it_through(error, caplog):
    model = trained()
    before = pictures(model)
    raised = error("of the user")
    executor = None

    def work() -> None:
        nonlocal executor
        with memscale.optimize(model, None, CONFIG, X) as executor:
            assert model._memscale_executor is executor
            assert executor.attached
            raise raised

    with pytest.raises(error) as caught:
        work()
    assert caught.value is raised
    assert not executor.attached
    assert_as_before(pictures(model), before)
    assert warnings_of(caplog) == []


def test_detach_of_a_whole_names_the_part_that_is_wrapped(caplog):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    memscale.wrap(model[0], Config(enable_logging=False))
    memscale.detach(model)
    assert warnings_of(caplog) == [
        "detach: '0' is wrapped by itself and stays so: memscale.detach(model.get_submodule('0'))."
    ]
    memscale.detach(model.get_submodule("0"))
    memscale.detach(model)
    assert "nothing to take off" in warnings_of(caplog)[-1]


def test_optimize_around_a_forward_that_raises_half_way():
    model = trained()
    model.zero_grad()
    before = pictures(model)

    def work() -> None:
        with memscale.optimize(model, None, CONFIG, X):
            model(X).sum().backward()
            model.zero_grad()
            model(WRONG_SHAPE)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        work()
    assert_as_before(pictures(model), before)


def test_a_model_that_a_device_map_has_spread_over_devices_is_refused() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.hf_device_map = {"0": 0, "1": "cpu"}
    with pytest.raises(WrapError, match=r"over 0, cpu, .* one device"):
        memscale.wrap(model)
    model.hf_device_map = {"0": "cpu", "1": "cpu"}
    memscale.detach(memscale.wrap(model, Config(enable_logging=False)))
