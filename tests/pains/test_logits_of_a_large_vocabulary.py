"""Logits of a large vocabulary are the peak of small models (transformers#38452, unsloth#3700): no tensor holds all.

`wrap` finds the head and the loss of a Hugging Face model by itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale
from memscale import Config, MemoryTracker
from support.steps import plan_of
from support.tiles import Tensors

transformers = pytest.importorskip("transformers")

VOCAB, BATCH, LENGTH = 8192, 4, 64
IDS = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
BUDGET = 12 * 2**20  # logits of a batch take 8 MiB, and the plain loss several times that
TILED = Config(
    memory_budget=BUDGET,
    enable_tiling=True,
    enable_offloading=False,
    use_mixed_precision=False,
    use_8bit_optimizer=False,
    enable_logging=False,
)


def build() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))


def train(model: nn.Module) -> tuple[list[float], int, int]:
    """Losses, the peak in bytes, and of how many tokens a tensor had logits at most."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with MemoryTracker(model, optimizer) as tracker, Tensors() as made:
        for _ in range(3):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    tokens = [torch.Size(shape).numel() // VOCAB for shape in made.shapes if shape and shape[-1] == VOCAB]
    return losses, tracker.peak_bytes(), max(tokens)


def test_no_tensor_holds_all_logits() -> None:
    plain_losses, plain_peak, plain_tokens = train(build())
    model = memscale.wrap(build(), TILED, {"input_ids": IDS, "labels": IDS})
    losses, peak, tokens = train(model)
    assert plan_of(model).loss is not None
    assert plain_tokens == BATCH * LENGTH
    assert tokens == plan_of(model).loss.rows < BATCH * LENGTH
    assert peak <= BUDGET < plain_peak / 2
    assert losses == pytest.approx(plain_losses, rel=1e-6)


@pytest.mark.parametrize(("vocabulary", "batch", "length"), [(50, 4, 10), (4000, 8, 32), (4000, 16, 128)])
def test_small_logits_are_tiled_as_well(vocabulary: int, batch: int, length: int) -> None:
    """A tile with all positions holds more than the plain loss does."""
    model = nn.Sequential(nn.Embedding(vocabulary, 16), nn.Linear(16, 16), nn.Linear(16, vocabulary))
    ids = torch.arange(batch * length).view(batch, length) % vocabulary
    plan = memscale.plan(model, ids, TILED.replace(memory_budget=None))
    assert plan.loss is not None
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
