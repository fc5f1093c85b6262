"""Hooks that were on parameters before `wrap`: they are called wherever the parameters live, and are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from support.devices import accelerator
from support.wrapping import Layer

QUIET = Config(enable_logging=False, fused_host_step=False)


def train(to: str | None, *, moved: bool = False) -> tuple[list[torch.Tensor], list[str]]:
    """Train with an optimizer that steps inside backward, and with hooks that scale gradients."""
    heard: list[str] = []
    with accelerator() as gpu:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(8) for _ in range(3))).to(gpu.device).train()
        handles = []
        for name, parameter in model.named_parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.1)

            def stepped(
                each: nn.Parameter, name: str = name, optimizer: torch.optim.Optimizer = optimizer
            ) -> None:
                heard.append(name)
                optimizer.step()
                optimizer.zero_grad()

            handles.append(parameter.register_post_accumulate_grad_hook(stepped))
            handles.append(parameter.register_hook(lambda gradient: gradient * 0.5))
        executor = None
        if to is not None:
            names = [name for name, _ in model.named_children()]
            settings = Offloading(to, False)  # type: ignore[arg-type]
            layers = tuple(LayerPlan(n, (n,), ("offloading",), "-", "-", offloading=settings) for n in names)
            executor = Executor(model, Plan(layers), QUIET)
            executor.attach()
            assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        x = torch.ones(4, 8, device=gpu.device)
        gpu.manual_seed(3)
        for _ in range(2):
            model(x).square().mean().backward()
            if moved:
                model.to(gpu.device)
        if executor is not None:
            executor.detach()
        model(x).square().mean().backward()
        for handle in handles:
            handle.remove()
        model(x).square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return [parameter.detach().cpu() for parameter in model.parameters()], heard


@pytest.mark.accelerator
@pytest.mark.parametrize("to", ["host", "disk"])
def test_an_optimizer_that_steps_inside_backward_is_called(to: str) -> None:
    weights, heard = train(None)
    got, heard_by_us = train(to)
    assert len(heard) == 3 * len(weights)
    assert sorted(heard_by_us) == sorted(heard)
    for one, other in zip(got, weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.accelerator
def test_it_is_called_after_the_model_was_moved_to_its_device() -> None:
    """`Module.to` brings offloaded parameters to the device; they keep the hooks that they have had."""
    weights, heard = train(None, moved=True)
    got, heard_by_us = train("host", moved=True)
    assert len(heard) == 3 * len(weights)
    assert sorted(heard_by_us) == sorted(heard)
    for one, other in zip(got, weights, strict=True):
        assert torch.equal(one, other)
