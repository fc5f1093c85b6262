"""Masters on the host of an accelerator are stepped by torch's fused implementation, others by their own."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import optim

from memscale import Config
from memscale.execution_plan import OptimizerPlan
from memscale.executor import Executor
from memscale.testing import executing
from support.offloaded import plan_of
from support.wrapping import Stack

FUSED = Config(enable_logging=False)
KINDS = {
    "adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True),
    "sgd": lambda p: optim.SGD(p, lr=1e-2, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
}
STEPS = 8
ADAM = sys.modules[optim.Adam.__module__]


def train(make, config=None, dtype=torch.float32, on_host=None):
    """Train on the virtual GPU; some layers, or all, have their masters on the host if there is a config."""
    with executing("256MiB") as gpu:
        torch.manual_seed(0)
        model = Stack(3, 16).to(gpu.device, dtype).train()
        executor = None
        if config is not None:
            plan = plan_of(model, to="host", activations=False)
            executor = Executor(model, replace(plan, layers=plan.layers[:on_host]), config)
            executor.attach()
            assert executor.placement.bytes_on_host > 0
        optimizer = make(model.parameters())
        for step in range(STEPS):
            torch.manual_seed(step)
            model(torch.randn(4, 16).to(gpu.device, dtype)).square().mean().backward()
            settings, attributes = [{**group} for group in optimizer.param_groups], set(vars(optimizer))
            optimizer.step()
            assert [{**group} for group in optimizer.param_groups] == settings
            assert set(vars(optimizer)) == attributes
            optimizer.zero_grad()
        if executor is not None:
            executor.detach()
        return [each.detach().cpu() for each in model.parameters()]


@pytest.fixture
def calls(monkeypatch):
    """The parameters of each call of torch's implementations of Adam: how it was made, and where they were."""
    seen = []
    for name in ("_single_tensor_adam", "_multi_tensor_adam", "_fused_adam"):
        plain = getattr(ADAM, name)

        def watched(params, *args, _plain=plain, _name=name, **kwargs):
            if any(each.numel() > 8 for each in params):  # not the trial that tells what state there will be
                seen.append((_name.split("_")[1], len(params), {each.device.type for each in params}))
            return _plain(params, *args, **kwargs)

        monkeypatch.setattr(ADAM, name, watched)
    return seen


def error(one, other):
    """Return the root of the mean square of the differences, over that of the weights."""
    difference = torch.cat([(a.double() - b.double()).flatten() for a, b in zip(one, other, strict=True)])
    return float(difference.norm() / torch.cat([each.double().flatten() for each in other]).norm())


@pytest.mark.parametrize("kind", KINDS)
def test_as_near_to_the_exact_result_as_the_loop(kind):
    exact, loop = train(KINDS[kind], dtype=torch.float64), train(KINDS[kind])
    fused = train(KINDS[kind], FUSED)
    assert error(fused, loop) < 2e-7 * STEPS
    assert error(fused, exact) < max(1.5 * error(loop, exact), 2e-7 * STEPS)


def test_masters_are_stepped_by_the_fused_implementation_and_the_others_by_their_own(calls):
    train(KINDS["adamw"], FUSED, on_host=2)
    assert {(name, *devices) for name, _, devices in calls} == {("multi", "vgpu"), ("fused", "cpu")}
    assert len(calls) == 2 * STEPS


def test_it_can_be_switched_off(calls):
    plain = train(KINDS["adamw"])
    calls.clear()
    ours = train(KINDS["adamw"], FUSED.replace(fused_host_step=False), on_host=2)
    assert {(name, *devices) for name, _, devices in calls} == {("multi", "vgpu"), ("single", "cpu")}
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("choice", [{"foreach": False}, {"foreach": True}, {"fused": False}])
def test_what_the_user_has_chosen_is_taken(calls, choice):
    train(lambda p: optim.AdamW(p, lr=1e-2, **choice), FUSED)
    assert {name for name, _, _ in calls} == {"multi" if choice.get("foreach") else "single"}


def test_other_classes_are_stepped_as_on_the_device():
    make = lambda p: optim.NAdam(p, lr=1e-2)  # noqa: E731
    assert all(map(torch.equal, train(make), train(make, FUSED, on_host=2)))


@pytest.mark.parametrize("kind", KINDS)
def test_in_sixteen_bits_as_on_the_device(kind):
    """torch's fused SGD is wrong there."""
    plain = train(KINDS[kind], dtype=torch.bfloat16)
    assert all(map(torch.equal, plain, train(KINDS[kind], FUSED, dtype=torch.bfloat16)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_other_strides(kind):
    """torch's fused implementations go by the order of memory, and would mix up the elements."""

    def run(config):
        with executing("256MiB") as gpu:
            torch.manual_seed(0)
            model = Stack(3, 16).to(gpu.device).train()
            if config is not None:
                Executor(model, plan_of(model, to="host", activations=False), config).attach()
            optimizer = KINDS[kind](model.parameters())
            for _ in range(3):
                model(torch.ones(4, 16).to(gpu.device)).square().mean().backward()
                for each in model.parameters():
                    if each.dim() == 2:
                        each.grad = each.grad.t().contiguous().t()
                optimizer.step()
                optimizer.zero_grad()
            return [each.detach().cpu() for each in model.parameters()]

    assert error(run(FUSED), run(None)) < 1e-6


def test_momentum_may_begin_late():
    """Fused SGD takes momentum of all parameters of a call, or of none."""

    def run(config):
        with executing("256MiB") as gpu:
            torch.manual_seed(0)
            model = Stack(3, 16).to(gpu.device).train()
            if config is not None:
                Executor(model, plan_of(model, to="host", activations=False), config).attach()
            optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(4):
                model.layers[0].requires_grad_(step >= 2)
                model(torch.ones(4, 16).to(gpu.device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [each.detach().cpu() for each in model.parameters()]

    assert error(run(FUSED), run(None)) < 1e-6


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_masters_are_stepped_fused_wherever_the_plan_has_their_state(calls, tier):
    """On disk in slices, for the sake of their pages; on the host at once."""
    with executing("256MiB") as gpu:
        torch.manual_seed(0)
        model = Stack(2, 128).to(gpu.device).train()
        plan = plan_of(model, to=tier, activations=False, optimizer=OptimizerPlan(tier, bucket_bytes=1))
        executor = Executor(model, plan, FUSED)
        executor.attach()
        optimizer = KINDS["adamw"](model.parameters())
        model(torch.ones(4, 128, device=gpu.device)).sum().backward()
        optimizer.step()
        assert {(name, *devices) for name, _, devices in calls} == {("fused", "cpu")}
        count = len(list(model.parameters()))
        assert len(calls) == 1 if tier == "host" else len(calls) > count
        executor.detach()
