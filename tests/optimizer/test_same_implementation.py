"""Masters on the host below an accelerator: stepped to the bit as the plain model is on the device.

torch steps parameters on an accelerator by `foreach`, and those on a CPU by its loop over them, which for some classes
rounds differently.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import optim

from memscale.errors import TierFullError
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.optimizer.interceptor import ONE_BY_ONE
from memscale.recovery.guard import StepGuard
from memscale.testing import executing
from support.offloaded import QUIET, plan_of
from support.wrapping import Stack

OPTIONS = {
    optim.SGD: ({}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    optim.Adam: ({"weight_decay": 0.1}, {"amsgrad": True}, {"foreach": False}),
    optim.AdamW: ({"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}),
    optim.RMSprop: ({}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    optim.NAdam: ({}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"foreach": False}),
    optim.RAdam: ({}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"foreach": False}),
    optim.ASGD: ({"t0": 2, "weight_decay": 0.1},),
    optim.Adagrad: ({"lr_decay": 0.1, "weight_decay": 0.1},),
}
CASES = [
    pytest.param(kind, options, id=f"{kind.__name__}-{number}")
    for kind in ONE_BY_ONE
    if kind is not optim.SparseAdam  # for sparse gradients only
    for number, options in enumerate(OPTIONS.get(kind, ({},)))
]


def train(kind, options, on_host, dtype=torch.float32):
    with executing("256MiB") as gpu:
        torch.manual_seed(0)
        model = Stack(3, 16).to(gpu.device, dtype).train()
        executor = None
        if on_host != 0:
            plan = plan_of(model, to="host", activations=False)
            plan = replace(plan, layers=plan.layers[:on_host])
            executor = Executor(model, plan, QUIET)
            executor.attach()
            assert executor.placement.bytes_on_host > 0
        parameters = [each for each in model.parameters() if kind is not optim.Muon or each.dim() == 2]
        optimizer = kind(parameters, **options)
        groups = [{**group, "params": None} for group in optimizer.param_groups]
        for step in range(8):  # RAdam changes its formula after the fifth
            torch.manual_seed(step)
            model(torch.randn(4, 16).to(gpu.device, dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [{**group, "params": None} for group in optimizer.param_groups] == groups
        if executor is not None:
            executor.detach()
        state = [
            value.cpu()
            for each in parameters
            for value in optimizer.state[each].values()
            if isinstance(value, torch.Tensor)
        ]
        return [each.detach().cpu() for each in model.parameters()], state


@pytest.mark.matrix(5)
@pytest.mark.parametrize("on_host", [2, None])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_same_to_the_bit_as_on_the_device(kind, options, on_host):
    plain, ours = train(kind, options, 0), train(kind, options, on_host)
    for expected, got in zip(plain, ours, strict=True):
        assert len(expected) == len(got)
        assert all(map(torch.equal, expected, got))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("kind", [each for each in ONE_BY_ONE if each not in (optim.SparseAdam, optim.Muon)])
def test_the_same_in_sixteen_bits(kind, foreach):
    """On a CPU `_foreach_mul_` rounds its factor to 16 bits, on CUDA it does not."""
    options = {**OPTIONS.get(kind, ({},))[-1], "foreach": foreach}
    plain = train(kind, options, 0, torch.bfloat16)
    ours = train(kind, options, None, torch.bfloat16)
    for expected, got in zip(plain, ours, strict=True):
        assert all(map(torch.equal, expected, got))


def train_by_closures(kind, replan_at):
    """Train by closures; the model is wrapped, and offloaded in the forward pass of a closure."""
    with executing("256MiB") as gpu:
        torch.manual_seed(0)
        model = Stack(3, 16).to(gpu.device).train()
        optimizer = kind(model.parameters())
        step = 0

        def offload(executor, args, kwargs):
            if step == replan_at:
                executor.replan(plan_of(model, to="host", activations=False))

        if replan_at is not None:
            executor = Executor(model, Plan(()), QUIET, on_training_batch=offload, guard=StepGuard())
            executor.attach()

        def closure():
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = model(torch.randn(4, 16).to(gpu.device)).square().mean()
            loss.backward()
            return loss

        for number in range(8):
            step = number
            optimizer.step(closure)
        if replan_at is not None:
            assert executor.placement.bytes_on_host > 0
            executor.detach()
        return [each.detach().cpu() for each in model.parameters()]


@pytest.mark.parametrize("replan_at", [0, 6])
@pytest.mark.parametrize("kind", [optim.RAdam, optim.NAdam, optim.AdamW])
def test_a_closure_whose_forward_pass_makes_the_plan(kind, replan_at):
    """Masters go to the host after the step has begun: so does the state that they have, and the bits are the same."""
    plain, ours = train_by_closures(kind, None), train_by_closures(kind, replan_at)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda p: optim.AdamW(p), 4),
        (lambda p: optim.AdamW(p, amsgrad=True), 5),
        (lambda p: optim.SGD(p, momentum=0.9), 3),
        (lambda p: optim.SGD(p), 2),
    ],
)
def test_the_cap_on_host_memory_holds_for_the_optimizer_at_hand(make, times, by_closure):
    """With their gradients and state, masters take that many times their bytes: one less is refused before a step."""

    def step(model, optimizer, device):
        def closure():
            loss = model(torch.ones(4, 16).to(device)).square().mean()
            loss.backward()
            return loss

        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    with executing("256MiB") as gpu:
        for short in (0, 1):
            torch.manual_seed(0)
            model = Stack(3, 16).to(gpu.device).train()
            most = times * sum(each.nbytes for each in model.parameters())
            config = QUIET.replace(max_cpu_offload_gb=(most - short) / 10**9)
            executor = Executor(model, plan_of(model, to="host", activations=False), config)
            executor.attach()
            optimizer = make(model.parameters())
            before = [each.detach().clone() for each in model.parameters()]
            if short and times > 2:
                with pytest.raises(TierFullError, match=r"no parameter was changed.*max_cpu_offload_gb"):
                    step(model, optimizer, gpu.device)
                assert all(map(torch.equal, before, model.parameters()))
                assert not optimizer.state
            else:
                step(model, optimizer, gpu.device)
                assert not any(map(torch.equal, before, model.parameters()))
            executor.detach()
