"""Optimizers that are left as they are, and the reasons that are given."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from memscale.errors import ConfigError, ConfigTypeError, WrapError
from memscale.offload.optimizer import StreamedSteps
from memscale.offload.optimizer_kinds import register_coupled, why_left_alone
from offload.optimizer_harness import Elsewhere, assert_equal, give_gradients, in_groups, parameters, streamed


class Wrapping(optim.Optimizer):
    """As lookahead does: its groups and state are another optimizer's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


class OwnList(optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.everything = [p for group in self.param_groups for p in group["params"]]


class OwnState(optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.moments = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]


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


class Registered(optim.SGD):
    pass


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
        (lambda p: OwnList(p, lr=0.1, momentum=0.9), "everything"),
        (lambda p: OwnState(p, lr=0.1, momentum=0.9), "moments"),
        (lambda p: OwnGroups(p, lr=0.1, momentum=0.9), "its groups"),
        (lambda p: Wrapping(optim.SGD(p, lr=0.1, momentum=0.9)), "inner: SGD"),
        (lambda p: Registered(p, lr=0.1, momentum=0.9), "for a test"),
        (lambda p: optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
        (lambda p: optim.SGD([{"params": p, "max_grad_norm": 1.0}], lr=0.1), "max_grad_norm=1.0"),
        (lambda p: type("Prodigy", (optim.SGD,), {})(p, lr=0.1), "one step size"),
        (
            lambda p: type("SAM", (optim.SGD,), {"step": lambda self, closure: None})(p),
            "evaluates the loss again",
        ),
        (lambda p: type("Own", (optim.SGD,), {"step": lambda self, closure: None})(p), "'closure'"),
    ],
)
def test_reasons(make, reason):
    register_coupled(Registered, "made for a test")
    assert reason in why_left_alone(make(parameters()))


def test_nothing_against_the_usual_ones():
    tensors = parameters(((4, 4),))
    for kind in (optim.AdamW, optim.SGD, optim.Adafactor, optim.SparseAdam, optim.Muon, optim.NAdam):
        assert why_left_alone(kind(tensors)) is None
    scheduled = optim.AdamW(tensors)
    optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1.0)
    assert why_left_alone(scheduled) is None


def test_one_inside_another_is_streamed():
    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            outer = Wrapping(optim.SGD(in_groups(tensors), lr=0.1, momentum=0.9))
            for step in range(3):
                give_gradients(tensors, step)
                outer.step()
            if stream:
                assert set(steps.skipped) == {outer}
                assert steps.bytes_moved > 0
            return tensors, outer.inner.state_dict()

    assert_equal(run(True), run(False))


def test_left_alone_late_gets_its_state_back():
    class Late(optim.AdamW):
        pass

    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = Late(tensors)
        give_gradients(tensors, 0)
        optimizer.step()
        assert steps.is_down(optimizer.state[tensors[0]]["exp_avg"])
        register_coupled(Late, "for a test")
        optimizer.step()
        assert not steps.is_down(optimizer.state[tensors[0]]["exp_avg"])
        assert steps.skipped[optimizer] == "for a test"


def test_step_that_is_not_torchs(monkeypatch):
    """Where the wrapper is not as expected, nothing is changed."""
    tensors = parameters()
    optimizer = optim.SGD(tensors, lr=0.1, momentum=0.9)
    plain = optim.SGD.step.__wrapped__

    def step(self, closure=None):
        for hook in list(torch_optimizer._global_optimizer_pre_hooks.values()):
            hook(self, (self,), {})
        return plain(self, closure)

    monkeypatch.setattr(optim.SGD, "step", step)
    with streamed(tensors, bucket_bytes=1) as steps:
        give_gradients(tensors, 0)
        optimizer.step()
        assert "wrapper" in steps.skipped[optimizer]
        assert steps.bytes_moved == 0


def test_closure_evaluated_twice_is_an_error():
    class Twice(optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    tensors = parameters()
    with streamed(tensors, bucket_bytes=1):
        optimizer = Twice(tensors, lr=0.1)
        give_gradients(tensors, 0)
        with pytest.raises(WrapError, match=r"Twice evaluates .*register_coupled\(Twice"):
            optimizer.step(lambda: torch.zeros(()))
        assert len(optimizer.param_groups[0]["params"]) == len(tensors)
        register_coupled(Twice, "it evaluates its closure again")
        optimizer.step(lambda: torch.zeros(()))


def test_wrong_arguments():
    with pytest.raises(ConfigTypeError, match=r"bucket_bytes .* '1MB'"):
        StreamedSteps([], Elsewhere(), "1MB")
    with pytest.raises(ConfigTypeError):
        StreamedSteps([], Elsewhere(), True)
    with pytest.raises(ConfigError, match="bucket_bytes=0"):
        StreamedSteps([], Elsewhere(), 0)
    with pytest.raises(TypeError, match="class of optimizers"):
        register_coupled("LBFGS", "a name")
