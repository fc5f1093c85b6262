"""Layers that draw from Python's `random` or NumPy (layer drop, Wav2Vec2's masks) train as without MemScale.

Recomputation draws the numbers of forward again, and neither it nor planning leaves the generators elsewhere.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import memscale
from memscale.checkpointing import run_region
from memscale.tiling.layers import NotPositionWise, show_position_wise
from support.steps import counted_regions
from support.wrapping import lossless

WIDTH = 16
DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python_gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "numpy_one_of_two_normal_numbers": lambda: float(np.random.randn()),
}


class Noisy(nn.Module):
    """A layer that scales by a number it draws, which tanh saves for backward."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) * self.draw()))


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def states() -> tuple[object, ...]:
    key, *rest = np.random.get_state()[1:]
    return (random.getstate(), key.tolist(), *rest)


@pytest.mark.parametrize("keep", [(), ("aten.addmm.default",)], ids=["recomputed", "kept"])
@pytest.mark.parametrize("name", DRAWS)
def test_recomputation_draws_the_numbers_of_forward(name: str, keep: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    layers, x = [Noisy(DRAWS[name]) for _ in range(3)], torch.randn(4, WIDTH)
    seen = []
    for recomputed in (True, False):
        seed()
        gradients = []
        for _ in range(3):  # an odd number of draws before the next step
            y = x
            for layer in layers:
                layer.zero_grad()
                y = run_region(layer, (y,), {}, modules=[layer], keep=keep) if recomputed else layer(y)
            DRAWS[name]()
            y.sum().backward()
            gradients += [each.grad.clone() for layer in layers for each in layer.parameters()]
            DRAWS[name]()
        seen.append((gradients, states()))
    (ours, our_states), (plain, plain_states) = seen
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert our_states == plain_states


def test_backward_leaves_the_generators_alone_where_forward_draws_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    np.random.seed(0)
    output = run_region(layer, (torch.randn(4, WIDTH),), {}, modules=[layer])
    monkeypatch.setattr(random, "setstate", pytest.fail)
    monkeypatch.setattr(np.random, "set_state", pytest.fail)
    output.sum().backward()


@pytest.mark.parametrize("name", ["python", "numpy_one_of_two_normal_numbers"])
def test_a_wrapped_model_draws_as_the_plain_one(name: str) -> None:
    """Planning at wrap, planning at the first batch, and planning anew for a larger one."""
    seen = []
    for config in (None, lossless("aggressive")):
        torch.manual_seed(0)
        model = nn.Sequential(*(Noisy(DRAWS[name]) for _ in range(3)), nn.Linear(WIDTH, 1))
        seed()
        if config is not None:
            memscale.wrap(model, config)
        losses = []
        with counted_regions() as regions:
            for size in (8, 8, 64):
                loss = model(torch.ones(size, WIDTH)).square().mean()
                loss.backward()
                losses.append(loss.item())
        assert (regions[0] > 0) == (config is not None)
        seen.append((losses, [each.grad.clone() for each in model.parameters()], states()))
    plain, ours = seen
    assert ours[0] == plain[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], plain[1], strict=True))
    assert ours[2] == plain[2]


def test_wav2vec2_masks_the_same_positions() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.5,
        mask_time_length=2,
        layerdrop=0.5,
    )
    batch = {
        "input_values": torch.linspace(-1, 1, 2 * 512).reshape(2, 512),
        "labels": torch.ones(2, 3).long(),
    }
    seen = []
    for wrapped in (False, True):
        seed()
        model = transformers.Wav2Vec2ForCTC(config).train()
        if wrapped:
            memscale.wrap(model, lossless("aggressive"), batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        seen.append((losses, states()))
    assert seen[0] == seen[1]


def test_a_layer_that_draws_is_not_tiled() -> None:
    """Each tile would draw a number of its own."""
    seed()
    before, layer = states(), Noisy(random.random)
    with pytest.raises(NotPositionWise, match="random numbers"):
        show_position_wise(layer.forward, layer, WIDTH, torch.float32)
    assert states() == before


def test_numpy_is_not_imported_for_it() -> None:
    code = (
        "import sys, torch; from torch import nn; from memscale.checkpointing import run_region\n"
        "layer = nn.Linear(2, 2)\n"
        "run_region(layer, (torch.ones(2),), {}, modules=[layer]).sum().backward()\n"
        "assert 'numpy.random' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


IN_A_NEW_PROCESS = """
import random, sys
import torch
from torch import nn
import memscale

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
random.seed(0)
before = random.getstate()
memscale.wrap(model, memscale.Config(force_optimize=True), torch.ones(256, 64))
print(model._memscale_executor.plan.explain())
assert "rich.style" in sys.modules
assert random.getstate() == before
"""


@pytest.mark.slow
def test_the_first_table_of_a_process_draws_no_number() -> None:
    """`rich` draws one from Python's generator when it is imported."""
    pytest.importorskip("rich")
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True)
