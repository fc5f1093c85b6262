"""Steps in buckets and state on the host as plans have them: equal to the plain model, on the executing virtual GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import memscale
from memscale import Config, Plan
from memscale.execution_plan import LayerPlan, OptimizerPlan
from memscale.executor import Executor
from memscale.testing import executing

WIDTH, LAYERS, STEPS = 256, 6, 3
BUCKET = 2**20
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(
    planned: OptimizerPlan | None, kind: type[torch.optim.Optimizer], seen: dict[str, Any]
) -> list[torch.Tensor]:
    with executing("64MiB") as gpu:
        torch.manual_seed(0)
        model = Model().to(gpu.device)
        batch = BATCH.to(gpu.device)
        executor = None
        if planned is not None:
            names = [*(f"layers.{number}" for number in range(LAYERS)), "head"]
            layers = tuple(LayerPlan(name, (name,), (), "", "") for name in names)
            executor = Executor(model, Plan(layers, optimizer=planned), Config(enable_logging=False))
            executor.attach()
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            model(batch).square().mean().backward()
            before = gpu.tracker.live_bytes(gpu.device)
            gpu.tracker.reset_peak()
            optimizer.step()
            seen["extra"] = gpu.peak_bytes - before
            optimizer.zero_grad()
        seen["on host"] = {
            name.rpartition(".")[0].rpartition(".")[0]
            for name, parameter in model.named_parameters()
            for value in optimizer.state[parameter].values()
            if torch.is_tensor(value) and value.dim() == 2 and value.device.type == "cpu"
        }
        if executor is not None:
            seen["buckets"] = executor.placement.states.buckets_run
            executor.detach()
        states = [optimizer.state[each] for each in model.parameters()]
        values = [state[name] for state in states for name in sorted(state) if torch.is_tensor(state[name])]
        assert all(each.device.type != "cpu" for each in values if each.dim() == 2)  # detach brings it back
        return [each.detach().cpu() for each in (*model.parameters(), *values)]


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD], ids=lambda each: each.__name__
)
def test_a_step_in_buckets_is_equal_and_has_no_temporaries_of_all_parameters(kind) -> None:
    seen: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    expected = train(None, kind, plain)
    got = train(OptimizerPlan(bucket_bytes=BUCKET), kind, seen)
    assert all(map(torch.equal, got, expected))
    assert seen["buckets"] > 6 * STEPS
    assert not seen["on host"]
    assert seen["extra"] <= BUCKET
    if kind is torch.optim.AdamW:
        assert plain["extra"] > 4 * BUCKET


def test_the_state_of_some_layers_is_on_the_host_and_their_parameters_are_not() -> None:
    seen: dict[str, Any] = {}
    expected = train(None, torch.optim.AdamW, {})
    some = ("layers.1", "layers.4")
    got = train(OptimizerPlan("host", BUCKET, layers=some), torch.optim.AdamW, seen)
    assert all(map(torch.equal, got, expected))
    assert seen["on host"] == set(some)


def test_nothing_is_planned_where_every_technique_is_off() -> None:
    config = Config(enable_checkpointing=False, enable_offloading=False, enable_logging=False)
    with executing("64MiB") as gpu:
        model = Model().to(gpu.device)
        plan = memscale.plan(model, BATCH.to(gpu.device), config.replace(memory_budget="8MiB"))
    assert plan.optimizer is None


@pytest.mark.parametrize(("share", "state"), [(0.95, "device"), (0.75, "host")])
def test_a_budget_is_met_by_buckets_first_and_then_by_as_much_state_as_it_takes(share, state) -> None:
    """On a model whose parameters need most of the memory, and for which all else takes longer."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=768, n_head=12)).train()
    tokens = torch.zeros(1, 128, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    quiet = Config(enable_logging=False)
    plain = memscale.plan(model, batch, quiet, hardware="RTX 3090").baseline_peak_bytes
    budget = quiet.replace(memory_budget=int(share * plain))
    plan = memscale.plan(model, batch, budget, hardware="RTX 3090")
    assert plan.optimizer is not None
    assert plan.optimizer.state == state
    assert plan.predicted_peak_bytes + plan.allowance_bytes <= share * plain
    assert not any("checkpointing" in layer.techniques for layer in plan.layers)
    if state == "device":
        assert plan.predicted_time_ratio < 1.05
        assert plan.host_bytes == 0
    else:
        assert 0 < len(plan.optimizer.layers) < len(plan.layers)
        assert plan.host_bytes > 0
