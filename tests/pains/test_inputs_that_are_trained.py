"""A frozen model between a trained one and its loss (LLaVA's first stage, prompt tuning) is planned for as trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memscale
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions, plan_of
from support.surfaces import Run, trained

transformers = pytest.importorskip("transformers")

QUIET = AGGRESSIVE.replace(enable_offloading=False)
LABELS = torch.randint(1, 64, (4, 64), generator=torch.Generator().manual_seed(0))


def language_model(**changed: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changed})).train()


def train(language: nn.Module) -> Run:
    """Train a projector whose outputs a frozen model is given."""
    torch.manual_seed(1)
    projector, images = nn.Linear(16, 64), torch.randn(4, 64, 16)
    optimizer = torch.optim.AdamW(projector.parameters(), lr=1e-2)

    def steps() -> list[float]:
        losses = []
        for _ in range(3):
            loss = language(inputs_embeds=projector(images), labels=LABELS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return trained(language, steps)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_a_frozen_model_behind_a_projector(training: bool, static: bool) -> None:
    plain = language_model().requires_grad_(False).train(training)
    model = language_model().requires_grad_(False).train(training)
    memscale.wrap(model, QUIET.replace(use_static_profiling=static))
    expected = train(plain)
    with counted_regions() as regions:
        run = train(model)
    assert run.losses == expected.losses
    assert_has_techniques(model, "checkpointing")
    assert "inputs_embeds" in plan_of(model).batch
    assert regions[0] > 0
    assert run.activation_bytes < expected.activation_bytes / 2
    assert run.peak_bytes < expected.peak_bytes
    if static:  # the rest is the projector's
        assert expected.peak_bytes * 0.8 < plan_of(model).baseline_peak_bytes <= expected.peak_bytes


class Scaling(nn.Module):
    """Changes what it is given in place, as is legal with a tensor from a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3))
        )

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch.pop().mul_(2).add_(batch[0]))


@pytest.mark.parametrize("static", [True, False])
def test_inputs_are_changed_by_the_step_alone(static: bool) -> None:
    def step(model: nn.Module) -> tuple[list[Any], torch.Tensor]:
        scale = torch.ones(16, 8, requires_grad=True)
        moved, plain = scale * 3, torch.ones(16, 8)
        batch = [plain, moved]
        model(batch).pow(2).mean().backward()
        return [len(batch), batch[0], moved.detach()], scale.grad

    torch.manual_seed(0)
    model = Scaling().requires_grad_(False)
    expected = step(model)
    memscale.wrap(model, QUIET.replace(use_static_profiling=static, gradient_accumulation_steps=2))
    got = step(model)
    assert_has_techniques(model, "checkpointing")
    assert got[0][0] == expected[0][0] == 1
    assert all(map(torch.equal, got[0][1:], expected[0][1:]))
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("static", [True, False])
def test_a_cache_of_the_loop_is_filled_by_the_step_alone(static: bool) -> None:
    ids = LABELS[:, :8]

    def step(model: nn.Module) -> tuple[Any, ...]:
        torch.manual_seed(2)
        start = torch.randn(4, 2, 3, 32, requires_grad=True)  # as of a prefix that is trained
        cache = transformers.DynamicCache()
        for layer in range(4):
            cache.update(start * 1, start * 2, layer)
        loss = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
        loss.backward()
        return loss.detach(), start.grad, cache.layers[3].keys.detach(), cache.get_seq_length()

    expected = step(language_model())
    model = language_model()
    memscale.wrap(model, QUIET.replace(use_static_profiling=static, gradient_accumulation_steps=2))
    with counted_regions() as regions:
        got = step(model)
    assert regions[0] > 0
    assert got[3] == expected[3] == 11
    assert all(map(torch.equal, got[:3], expected[:3]))
