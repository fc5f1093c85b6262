"""Which layers are position-wise: shown for MLPs of many kinds, refused for all that mixes positions."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memscale.simulator import simulate
from memscale.testing import executing
from memscale.tiling.layers import NotPositionWise, PositionWise, show_position_wise

WIDTH = 8


class Function(nn.Module):
    """A layer of two matrices that does one thing more."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(16, WIDTH))
        self.register_buffer("count", torch.zeros(1))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x, self.down(torch.relu(self.up(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


GOOD: dict[str, nn.Module] = {
    "sequential": nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH)
    ),
    "gated": Gated(),
    "glu": nn.Sequential(nn.Linear(WIDTH, 64), nn.GLU(), nn.Linear(32, WIDTH)),
    "residual": Function(lambda self, x, y: x + y),
    "flat": Function(lambda self, x, y: (x.view(-1, WIDTH) + y.flatten(0, 1)).view(x.shape)),
    "grouped": Function(lambda self, x, y: y.view(*y.shape[:-1], 2, 4).softmax(-1).flatten(-2)),
    "groups turned": Function(
        lambda self, x, y: y.view(*y.shape[:-1], 2, 4).transpose(-1, -2).reshape(y.shape)
    ),
    "scaled by its mean": Function(lambda self, x, y: y / y.pow(2).mean(-1, keepdim=True).sqrt()),
    "rounded": Function(lambda self, x, y: y.to(torch.bfloat16).float()),
    "clamped in place": Function(lambda self, x, y: y.clamp_(-1, 1)),
}

BAD: dict[str, tuple[nn.Module, str]] = {
    "attention": (Function(lambda self, x, y: F.scaled_dot_product_attention(x, x, y)), "mixes|not known"),
    "scores": (Function(lambda self, x, y: (x @ x.mT).softmax(-1) @ y), "mixes|not known"),
    "mean over the sequence": (
        Function(lambda self, x, y: y - x.mean(1, keepdim=True)),
        "mean over positions",
    ),
    "mean over the batch": (Function(lambda self, x, y: y - x.mean(0)), "mean over positions"),
    "mean over all": (Function(lambda self, x, y: y - x.mean()), "mean"),
    "softmax": (Function(lambda self, x, y: y.softmax(1)), "_softmax over positions"),
    "shift": (Function(lambda self, x, y: y.roll(1, 1)), "roll"),
    "flip": (Function(lambda self, x, y: y.flip(1)), "flip"),
    "running sum": (Function(lambda self, x, y: y.cumsum(1)), "cumsum"),
    "first position": (Function(lambda self, x, y: y + x[:, :1]), "mixes positions"),
    "turned": (Function(lambda self, x, y: y.transpose(0, 1)), "mixes positions"),
    "other order": (Function(lambda self, x, y: y.reshape(y.shape[1], y.shape[0], -1)), "mixes positions"),
    "wrong view": (Function(lambda self, x, y: y.mT.reshape(y.shape)), "mixes positions"),
    "own positions": (
        Function(lambda self, x, y: y + torch.arange(x.shape[1], device=x.device)[:, None]),
        "differs",
    ),
    "looks at a value": (Function(lambda self, x, y: y if bool(x[0, 0, 0] > 0) else x), "mixes|not known"),
    "two results": (Function(lambda self, x, y: (x, y)), "returns a tuple"),
    "changes its input": (Function(lambda self, x, y: x.add_(y)), "changes its input in place"),
    "changes a buffer": (Function(lambda self, x, y: (self.count.add_(1), y)[1]), "of its own"),
    "convolution": (
        nn.Sequential(nn.Linear(WIDTH, 16), nn.Conv1d(16, 16, 1), nn.Linear(16, WIDTH)),
        "not known|mixes",
    ),
    "batch norm": (
        Function(lambda self, x, y: F.batch_norm(y.flatten(0, 1), None, None, training=True)),
        "not known",
    ),
}


def show(layer: nn.Module) -> PositionWise:
    return show_position_wise(layer.forward, layer, WIDTH, torch.float32)


@pytest.mark.parametrize("layer", GOOD.values(), ids=GOOD.keys())
def test_a_position_wise_layer_is_shown_to_be_one(layer: nn.Module) -> None:
    shown = show(layer)
    assert shown.width == WIDTH
    assert shown.widest > WIDTH
    assert set(shown.uses) == {name for name, _ in layer.named_children()}


@pytest.mark.parametrize("layer", GOOD.values(), ids=GOOD.keys())
def test_what_is_shown_is_true(layer: nn.Module) -> None:
    layer.eval()
    x = torch.randn(3, 5, WIDTH)
    whole = layer(x.clone())
    for sample in range(3):
        for position in range(5):
            alone = layer(x[sample : sample + 1, position : position + 1].clone())
            assert torch.allclose(alone[0, 0], whole[sample, position], atol=1e-6)
    layer.train()


@pytest.mark.parametrize(("layer", "reason"), BAD.values(), ids=BAD.keys())
def test_a_layer_that_mixes_positions_is_refused(layer: nn.Module, reason: str) -> None:
    with pytest.raises(NotPositionWise, match=reason):
        show(layer)


@pytest.mark.parametrize("layer", [GOOD["gated"], BAD["changes a buffer"][0]], ids=["shown", "refused"])
def test_looking_changes_nothing(layer: nn.Module) -> None:
    before = {name: (tensor, tensor.clone()) for name, tensor in layer.state_dict(keep_vars=True).items()}
    random = torch.get_rng_state()
    with contextlib.suppress(NotPositionWise):
        show(layer)
    now = layer.state_dict(keep_vars=True)
    assert all(now[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in before.items())
    assert torch.equal(torch.get_rng_state(), random)


def test_on_a_virtual_device_too() -> None:
    with simulate("1GiB") as sim:
        shown = show(Gated().to(sim.device))
    with executing("1GiB") as gpu:
        assert show(Gated().to(gpu.device)) == shown == show(Gated())
