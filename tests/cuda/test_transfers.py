"""Masters and gradients of offloaded layers are page-locked, and no copy reads a master when a pass is over."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from memscale import AsyncOffloadConfig, Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.hardware import HostSpec, detect
from support.offloaded import plan_of
from support.wrapping import Layer

Computing = Callable[[], AbstractContextManager[None]]


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(64) for _ in range(5))).cuda().eval()


def offload(
    model: nn.Sequential, *, is_async: bool, pinned_pool_gb: float | None = None, device: Any = None
) -> Executor:
    config = Config(
        enable_logging=False,
        async_offload=is_async,
        async_config=AsyncOffloadConfig(pinned_pool_gb=pinned_pool_gb),
    )
    layers = (
        LayerPlan(name, (name,), ("offloading",), "-", "-", offloading=Offloading("host"))
        for name, _ in model.named_children()
    )
    executor = Executor(model, Plan(tuple(layers)), config, device=device)
    executor.attach()
    return executor


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_masters_and_gradients_are_page_locked(is_async: bool, computing: Computing) -> None:
    model, x = stack(), torch.randn(8, 64, device="cuda")
    with computing():
        executor = offload(model, is_async=is_async)
        assert all(each.is_pinned() for each in model.parameters())
        model(x).square().sum().backward()
        assert all(each.grad.is_pinned() for each in model.parameters())
        locked = executor.placement.pinned.bytes_locked
        assert locked == 64 * 2**20, "one block for all of them"
        addresses = {each.grad.data_ptr() for each in model.parameters()}
        model.zero_grad()
        model(x).square().sum().backward()
        assert {each.grad.data_ptr() for each in model.parameters()} == addresses, (
            "the same memory in each step"
        )
        model.zero_grad()
        executor.detach()
    assert {each.device.type for each in model.parameters()} == {"cuda"}
    assert executor.placement.pinned.bytes_locked == 0


@pytest.mark.parametrize("kind", ["on the CPU", "on the meta device"])
def test_masters_of_a_model_that_never_was_on_the_device(kind: str, computing: Computing) -> None:
    model = stack().cpu()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if kind == "on the meta device":
        model = model.to("meta")
    with computing():
        executor = offload(model, is_async=True, device=torch.device("cuda", 0))
        assert all(each.is_pinned() for each in model.parameters())
        model(torch.randn(8, 64)).square().sum().backward()
        executor.detach()
    assert not any(each.is_pinned() for each in model.parameters())
    if kind == "on the CPU":
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_beyond_the_limit_memory_is_ordinary(computing: Computing) -> None:
    with computing():
        expected, model, x = stack(), stack(), torch.randn(8, 64, device="cuda")
        executor = offload(model, is_async=True, pinned_pool_gb=150_000 / 1e9)
        locked = [each.is_pinned() for each in model.parameters()]
        assert any(locked)
        assert not all(locked)
        assert executor.placement.pinned.bytes_locked <= 150_000
        for each in (expected, model):
            each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())
        executor.detach()


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a layer alone"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_masters_may_be_changed_when_a_forward_pass_returns(
    whole: bool, is_async: bool, copies: str, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that reads a master later than that would see the new values: it is waited for."""
    x = torch.randn(8, 64, device="cuda")
    found = []
    waited = []
    synchronize = torch.cuda.Stream.synchronize
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: (waited.append(1), synchronize(self)))
    for wrapped in (False, True):
        model = stack()
        with computing():
            executor = offload(model, is_async=is_async) if wrapped else None
            with torch.no_grad():
                waited.clear()
                first = (model if whole else model[2])(x)
                assert waited or not (wrapped and whole and is_async)
                for parameter in model.parameters():
                    parameter.mul_(2)
                found.append([first.cpu(), model(x).cpu()])
            if executor is not None:
                executor.detach()
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_deep_model_needs_no_more_than_a_shallow_one(recomputed: bool, copies: str) -> None:
    """Nor is more reserved, though the host runs ahead of the device: copies and kernels are as late as can be."""
    peaks = []
    for depth in (6, 18):
        model = nn.Sequential(*(Layer(256) for _ in range(depth))).cuda()
        plan = plan_of(model, to="host", recomputed=recomputed)
        executor = Executor(model, plan, Config(enable_logging=False, async_offload=True))
        executor.attach()
        x = torch.randn(1024, 256, device="cuda")
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            model(x).square().sum().backward()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
        model.zero_grad()
        executor.detach()
        del model, executor, x
        gc.collect()
        torch.cuda.empty_cache()
    (allocated, reserved), (deep_allocated, deep_reserved) = peaks
    assert deep_allocated == allocated
    assert deep_reserved <= reserved + 2 * 2**20, "a segment for small tensors, of which the graph has more"


def test_page_locked_memory_that_torch_keeps_for_the_next_request_is_as_good_as_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.zeros(1, device="cuda")
    torch._C._host_emptyCache()
    host = HostSpec(2**36, 2**35, cores=2)
    monkeypatch.setattr(importlib.import_module("memscale.hardware.detect"), "read_host", lambda: host)
    before = detect("cuda").host.available_ram_bytes
    memory = torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    assert detect("cuda").host.available_ram_bytes == before
    del memory
    assert detect("cuda").host.available_ram_bytes == before + 2**24
