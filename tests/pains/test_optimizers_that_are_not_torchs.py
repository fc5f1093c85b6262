"""Optimizers that see some of their parameters at a time, or whose step is called several times in one.

What a user's class does in ``step``, statistics of all parameters included, happens once, with all of them.
"""

from __future__ import annotations

import pytest
import torch
from torch import optim

import memscale
from memscale.executor import executor_of
from support.wrapping import Stack


class ByTheNormOfAll(optim.Optimizer):
    """Hand-written: one norm of all gradients, divided by their number."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.seen.append(len(parameters))
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() / len(parameters)
        for p in parameters:
            p.sub_(self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad / norm, 0.1), alpha=0.05)


class WithAverage(optim.AdamW):
    """Keeps a moving average of all its parameters, updated in its step."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr=lr)
        self.seen = []
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen.append(len(parameters))
        with torch.no_grad():
            for average, p in zip(self.average, parameters, strict=True):
                average.lerp_(p, 0.1)
        return loss


def train(kind, wrapped):
    torch.manual_seed(0)
    model = Stack(4, 128).train()
    batch = torch.randn(4, 128)
    if wrapped:
        config = memscale.Config(memory_budget=600_000, enable_logging=False)
        memscale.wrap(model, config, batch)
        executor = executor_of(model)
        assert executor.plan.optimizer.state == "disk"
    optimizer = kind(model.parameters())
    events = []
    optimizer.register_step_pre_hook(lambda *_: events.append("before"))
    optimizer.register_step_post_hook(lambda *_: events.append("after"))
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def closure():
        events.append("closure")
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(5):
        if kind is ByTheNormOfAll:  # it evaluates no closure
            losses.append(closure().item())
            optimizer.step()
        else:
            losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert optimizer.seen == [len(list(model.parameters()))] * 5
    if wrapped:
        buckets = executor.placement.states.buckets_run
        assert buckets > 5 if kind is WithAverage else buckets == 0
        memscale.detach(model)
    state = [value for each in optimizer.state.values() for value in each.values()]
    return losses, events, [*map(torch.clone, model.parameters()), *state, *getattr(optimizer, "average", [])]


@pytest.mark.parametrize("kind", [ByTheNormOfAll, WithAverage])
def test_a_users_step_happens_once_with_all_parameters(kind):
    plain, ours = train(kind, False), train(kind, True)
    assert ours[:2] == plain[:2]
    assert len(ours[2]) == len(plain[2])
    assert all(map(torch.equal, ours[2], plain[2]))
