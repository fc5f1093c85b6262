"""Optimizers that are left as they are, and the reasons that are given."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from memscale.optimizer.interceptor import ONE_BY_ONE, arithmetic_of, has_own_step, why_whole
from support.optimizers import assert_equal, give_gradients, in_groups, parameters, streamed


class Wrapping(optim.Optimizer):
    """As lookahead does: its groups and state are another optimizer's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class OwnGroups(optim.SGD):
    """As wrappers do that stand for another optimizer."""

    @property
    def param_groups(self):
        return list(self.groups)

    @param_groups.setter
    def param_groups(self, groups):
        self.groups = groups

    def add_param_group(self, group):
        self.groups.append({**self.defaults, **group})


class OfAllGradients(optim.Optimizer):
    """As people write their own: the step size comes from the norm of all gradients and the number of parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append(len(gradients))
        norm = torch.stack([each.norm() for each in gradients]).norm() / len(gradients)
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(momentum.lerp_(p.grad / norm, 0.1), alpha=group["lr"])


class Averaging(optim.AdamW):
    """Keeps a moving average of its parameters, updated after each step."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.calls = []

    def step(self, closure=None):
        loss = super().step(closure)
        every = [p for group in self.param_groups for p in group["params"]]
        self.calls.append(len(every))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, [p.detach() for p in every], 0.25)
        return loss


class OwnGroupInit(optim.SGD):
    def _init_group(self, group, *lists):
        return super()._init_group(group, *lists)


def test_lbfgs_is_left_alone(caplog):
    def run(stream):
        torch.manual_seed(0)
        module = nn.Linear(8, 8)
        with streamed(module.parameters() if stream else [], bucket_bytes=1) as steps:
            optimizer = optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)

            def closure():
                optimizer.zero_grad()
                loss = module(torch.ones(2, 8)).square().sum()
                loss.backward()
                return loss

            losses = [optimizer.step(closure) for _ in range(3)]
            if stream:
                assert "all parameters together" in steps.skipped[optimizer]
                assert (steps.bytes_moved, steps.buckets_run) == (0, 0)
            return list(module.parameters()), losses

    with caplog.at_level(logging.INFO, "memscale"):
        assert_equal(run(True), run(False))
    (record,) = caplog.records  # once, not at every step
    assert "LBFGS" in record.getMessage()
    assert "all parameters together" in record.getMessage()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: OwnGroups(p, lr=0.1, momentum=0.9), "param_groups"),
        (lambda p: OwnGroupInit(p, lr=0.1, momentum=0.9), "not one of torch.optim's"),
        (lambda p: OfAllGradients(p), "not one of torch.optim's"),
        (lambda p: Wrapping(optim.SGD(p, lr=0.1, momentum=0.9)), "not one of torch.optim's"),
        (lambda p: optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: optim.LBFGS(p), "all parameters together"),
    ],
)
def test_reasons(make, reason):
    assert reason in why_whole(make(parameters()))


def test_every_class_of_torch_is_known():
    """One that a new version of torch brings is looked at before it is split."""
    every = {
        each for each in vars(optim).values() if isinstance(each, type) and issubclass(each, optim.Optimizer)
    }
    assert every - {optim.Optimizer, optim.LBFGS} == set(ONE_BY_ONE)
    tensors = parameters(((4, 4),))
    for kind in ONE_BY_ONE:
        assert why_whole(kind(tensors)) is None
        assert not has_own_step(kind)
        # A class that derives from it and adds nothing is the same, before and after torch has wrapped its step.
        derived = type("Derived", (kind,), {})
        assert arithmetic_of(derived) is arithmetic_of(kind)
        assert why_whole(derived(tensors)) is None
        assert not has_own_step(derived)
    scheduled = optim.AdamW(tensors)
    optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    assert why_whole(scheduled) is None


def test_a_statistic_of_all_parameters_is_of_all_parameters(caplog):
    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            optimizer = OfAllGradients(in_groups(tensors))
            for step in range(3):
                give_gradients(tensors, step)
                optimizer.step()
            assert optimizer.seen == [len(tensors)] * 3
            assert not stream or "not one of torch.optim's" in steps.skipped[optimizer]
            assert steps.bytes_moved == 0
            return tensors, optimizer.state_dict()

    with caplog.at_level(logging.INFO, "memscale"):
        assert_equal(run(True), run(False))
    (record,) = caplog.records
    assert "OfAllGradients" in record.getMessage()


@pytest.mark.parametrize("hooked_below", [False, True])
def test_an_overridden_step_runs_once(hooked_below):
    """And what it calls of torch is split all the same."""

    def run(stream):
        tensors = parameters()
        events = []
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            if hooked_below:
                optim.AdamW(parameters())  # torch wraps the steps of a class when it is first built
            kind = type("Averaging", (Averaging,), {})
            optimizer = kind(in_groups(tensors), lr=0.1, weight_decay=0.1)
            optimizer.register_step_pre_hook(lambda *_: events.append("before"))
            optimizer.register_step_post_hook(lambda *_: events.append("after"))
            scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            for step in range(5):

                def closure(step=step):
                    events.append("closure")
                    give_gradients(tensors, step)
                    return torch.tensor(float(step))

                assert optimizer.step(closure) == step
                scheduler.step()
            assert optimizer.calls == [len(tensors)] * 5
            assert events.count("closure") == 5
            assert not stream or (steps.buckets_run == 5 * len(tensors) and not steps.skipped)
            assert not stream or steps.is_stored(optimizer.state[tensors[0]]["exp_avg"])
            return tensors, optimizer.average, events, optimizer.state_dict()

    assert_equal(run(True), run(False))


def test_an_overridden_step_that_calls_no_other_is_left(caplog):
    class Own(optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad), alpha=group["lr"])

    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            optimizer = Own(tensors)
            for step in range(3):
                give_gradients(tensors, step)
                optimizer.step()
            assert not stream or "does not call" in steps.skipped[optimizer]
            return tensors, optimizer.state_dict()

    with caplog.at_level(logging.INFO, "memscale"):
        assert_equal(run(True), run(False))
    assert len(caplog.records) == 1


def test_one_inside_another_is_streamed():
    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            outer = Wrapping(optim.SGD(in_groups(tensors), lr=0.1, momentum=0.9))
            for step in range(3):
                give_gradients(tensors, step)
                outer.step()
            if stream:
                assert not steps.skipped  # the one inside was reached
                assert steps.bytes_moved > 0
            return tensors, outer.inner.state_dict()

    assert_equal(run(True), run(False))


def test_left_alone_late_gets_its_state_back():
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(tensors)
        give_gradients(tensors, 0)
        optimizer.step()
        assert steps.is_stored(optimizer.state[tensors[0]]["exp_avg"])
        optimizer.param_groups[0]["differentiable"] = True
        optimizer.step()
        assert not steps.is_stored(optimizer.state[tensors[0]]["exp_avg"])
        assert "differentiable" in steps.skipped[optimizer]


def test_step_that_is_not_torchs(monkeypatch):
    """Where the wrapper is not as expected, nothing is changed."""
    tensors = parameters()
    optimizer = optim.SGD(tensors, lr=0.1, momentum=0.9)
    plain = optim.SGD.step.__wrapped__

    def step(self, closure=None):
        for hook in list(torch_optimizer._global_optimizer_pre_hooks.values()):
            hook(self, (self,), {})
        result = plain(self, closure)
        for hook in list(torch_optimizer._global_optimizer_post_hooks.values()):
            hook(self, (self,), {})
        return result

    monkeypatch.setattr(optim.SGD, "step", step)
    with streamed(tensors, bucket_bytes=1) as steps:
        give_gradients(tensors, 0)
        optimizer.step()
        assert "not one of torch.optim's" in steps.skipped[optimizer]
        assert steps.bytes_moved == 0


def test_closure_evaluated_twice():
    class Twice(optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    def run(stream):
        tensors = parameters()
        calls = []

        def closure():
            give_gradients(tensors, len(calls))
            calls.append(1)
            return torch.tensor(float(len(calls)))

        with streamed(tensors if stream else [], bucket_bytes=1):
            optimizer = Twice(tensors, lr=0.1)
            losses = [optimizer.step(closure) for _ in range(2)]
        return tensors, losses, calls

    assert_equal(run(True), run(False))
