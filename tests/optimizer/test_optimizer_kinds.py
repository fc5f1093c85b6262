"""Optimizers of all kinds: those that count, that build on others, that keep state in their own way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim

from support.optimizers import assert_equal, give_gradients, in_groups, parameters, streamed


class Counting(optim.Optimizer):
    """Counts its steps wherever an optimizer might, and uses the counts."""

    def __init__(self, params, passes_over_empty=False):
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.0, "step": 0, "count": torch.zeros(())})
        self.passes_over_empty = passes_over_empty
        self.steps = 0
        self.history = []
        self.nested = {"calls": [0, (torch.zeros(1), "text")]}
        self.cache = None
        self.per_parameter = {p: 0 for group in self.param_groups for p in group["params"]}
        self.defaults["steps"] = 0
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.history.append(self.steps)
        self.defaults["steps"] += 1
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}
        self.nested["calls"][0] += 1
        self.cache = self.cache or {}
        self.lazily = getattr(self, "lazily", 0) + 1
        for group in self.param_groups:
            if self.passes_over_empty and not any(p.grad is not None for p in group["params"]):
                continue
            group["step"] += 1
            group["count"] += 1
            group["late"] = group["step"] * 10
            factor = self.steps + group["step"] + float(group["count"]) + self.lazily
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    self.per_parameter[p] += 1
                    own = factor + self.cache.setdefault(p, 1.0)
                    self.cache[p] += self.per_parameter[p]
                    state.setdefault("m", torch.zeros_like(p)).add_(p.grad, alpha=own)
                    p.add_(state["m"], alpha=-group["lr"] / self.defaults["steps"])


@pytest.mark.parametrize("passes_over_empty", [False, True])
def test_counters_count_steps(passes_over_empty):
    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1):
            optimizer = Counting(in_groups(tensors), passes_over_empty)
            for step in range(4):
                give_gradients(tensors, step, without=(3,) if step == 1 else ())  # a group without gradients
                optimizer.step()
            counts = [(group["step"], group["count"], group["late"]) for group in optimizer.param_groups]
            everything = optimizer.state.pop("all"), optimizer.defaults["steps"], optimizer.steps
            own = (
                optimizer.lazily,
                optimizer.history,
                optimizer.nested,
                list(optimizer.per_parameter.values()),
            )
            return tensors, counts, everything, own, list(optimizer.cache.values()), optimizer.state_dict()

    assert_equal(run(True), run(False))


class MoreState(optim.SGD):
    """Adds to the state: in containers, of other shapes than the parameter's, passed on, shared."""

    def __init__(self, params):
        super().__init__(params, lr=0.1, momentum=0.9)
        self.all = torch.zeros(2, 16, 16)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "new" not in state:
                    state["factors"] = [torch.zeros(size, 2) for size in p.shape]
                    state["pair"] = (torch.zeros_like(p), {"inside": torch.zeros_like(p)})
                    state["new"], state["old"] = torch.zeros_like(p), torch.zeros_like(p)
                    state["same"] = state["pair"][0]
                    state["part"] = self.all[0]
                for factor in state["factors"]:
                    factor.add_(float(p.grad.mean()))
                state["old"] = state["new"]
                state["new"] = p.grad * 2
                state["pair"][0].add_(state["old"])
                state["pair"][1]["inside"].add_(state["same"])
                p.sub_(state["pair"][1]["inside"], alpha=group["lr"])
        return super().step(closure)


def test_state_that_a_subclass_adds_stays_as_it_is():
    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            optimizer = MoreState(in_groups(tensors))
            for step in range(4):
                give_gradients(tensors, step)
                optimizer.step()
            state = optimizer.state[tensors[0]]
            assert state["same"] is state["pair"][0]
            stored = [name for name, value in state.items() if steps.is_stored(value)]
            assert stored == (["momentum_buffer"] if stream else [])
            duplicate, between = copy.deepcopy(optimizer), copy.deepcopy(optimizer.state_dict())
        others = [each for group in duplicate.param_groups for each in group["params"]]
        for each, every in ((optimizer, tensors), (duplicate, others)):
            give_gradients(every, 4)
            each.step()  # plain again: what was one tensor must be one
        return tensors, between, optimizer.state_dict(), others, duplicate.state_dict()

    assert_equal(run(True), run(False))


def test_small_state_stays():
    tensors = parameters(((16, 8), (32, 16)))
    with streamed(tensors, least_bytes=1024) as steps:
        optimizer = optim.AdamW(tensors)
        give_gradients(tensors, 0)
        optimizer.step()
        assert [steps.is_stored(optimizer.state[each]["exp_avg"]) for each in tensors] == [False, True]


def test_named_parameters():
    class Named(optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                names = [name for name, p in zip(group["param_names"], group["params"], strict=True)]
                assert names == [self.names[p] for p in group["params"]]
            return super().step(closure)

    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    optimizer = Named(module.named_parameters(), lr=0.1, momentum=0.9)
    optimizer.names = {p: name for name, p in module.named_parameters()}
    with streamed(module.parameters(), bucket_bytes=1) as steps:
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert steps.buckets_run == 6
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in module.named_parameters()]


@pytest.mark.parametrize("hooked_below", [False, True])
def test_class_on_top_of_another(hooked_below):
    """A step that calls the step of the class it derives from, which may have hooks of its own."""

    class Base(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            return optim.SGD.step.__wrapped__(self, closure)

    class Decaying(Base):
        def step(self, closure=None):
            for group in self.param_groups:
                torch._foreach_mul_([p.data for p in group["params"]], 0.99)
            return super().step(closure)

    def run(stream):
        tensors = parameters()
        calls = []
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            optim.SGD(parameters(), lr=0.1)
            if hooked_below:
                Base(parameters(), lr=0.1)
            optimizer = Decaying(in_groups(tensors), lr=0.1, momentum=0.9)
            for step in range(3):
                give_gradients(tensors, step)
                optimizer.register_step_pre_hook(lambda *_: calls.append(1)).remove()
                handle = optimizer.register_step_pre_hook(lambda *_: calls.append(1))
                optimizer.step()
                handle.remove()
            assert not stream or steps.buckets_run == 3 * len(tensors)
            return tensors, calls, optimizer.state_dict()

    assert_equal(run(True), run(False))


def test_more_arguments_than_a_closure():
    """The step is called once, with all of them, whatever they mean."""

    class Scaled(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "weight_decay": 0.0})

        @torch.no_grad()
        def step(self, closure=None, scales=()):
            every = [p for group in self.param_groups for p in group["params"]]
            for p, scale in zip(every, scales, strict=True):
                p.sub_(self.state[p].setdefault("m", torch.zeros_like(p)).add_(p.grad, alpha=scale))

    def run(stream):
        tensors = parameters()
        with streamed(tensors if stream else [], bucket_bytes=1) as steps:
            optimizer = Scaled(in_groups(tensors))
            for step in range(3):
                give_gradients(tensors, step)
                optimizer.step(scales=range(len(tensors)))
            assert not stream or (steps.buckets_run == 0 and optimizer in steps.skipped)
            return tensors, optimizer.state_dict()

    assert_equal(run(True), run(False))
