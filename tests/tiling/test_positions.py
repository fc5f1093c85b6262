"""Layers in tiles of positions: exact with dropout, recomputed once, nothing held that need not be."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.checkpointing import run_region
from memscale.errors import RecomputeError
from memscale.tiling import run_in_tiles
from support.tiles import Tensors, assert_close

BATCH, LENGTH, WIDTH, WIDE, ROWS = 2, 9, 4, 32, 5
TOKENS = BATCH * LENGTH


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(WIDE, WIDTH, dtype=dtype)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.dropout(self.down(self.dropout(torch.tanh(self.up(x)))))


def mlp(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[Mlp, Tensor]:
    torch.manual_seed(0)
    return Mlp(dropout, dtype), torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)


def tiled(layer: nn.Module, x: Tensor) -> Tensor:
    return run_in_tiles(layer, x, ROWS, [layer])


def gradients(out: Tensor, layer: nn.Module, x: Tensor) -> list[tuple[str, Tensor]]:
    layer.zero_grad()
    x.grad = None
    (out * torch.linspace(-1, 1, WIDTH, dtype=out.dtype)).square().sum().backward()
    found = [(name, p.grad.clone()) for name, p in layer.named_parameters() if p.grad is not None]
    return [("out", out.detach()), *([] if x.grad is None else [("x", x.grad.clone())]), *found]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)], ids=str
)
def test_value_and_gradients_are_the_plain_ones(dtype: torch.dtype, tolerance: float) -> None:
    layer, x = mlp(dtype=dtype)
    assert_close(gradients(tiled(layer, x), layer, x), gradients(layer(x), layer, x), tolerance)


def test_masks_of_dropout_are_the_same_in_backward() -> None:
    layer, x = mlp(dropout=0.5)

    def by_hand() -> Tensor:
        flat = x.reshape(1, TOKENS, WIDTH)
        tiles = [layer(flat[:, start : start + ROWS]) for start in range(0, TOKENS, ROWS)]
        return torch.cat(tiles, dim=1).reshape(x.shape)

    torch.manual_seed(7)
    wanted = gradients(by_hand(), layer, x)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    out = tiled(layer, x)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(99)  # backward comes at some other point of the random sequence
    between = torch.get_rng_state()
    assert_close(gradients(out, layer, x), wanted)
    assert torch.equal(torch.get_rng_state(), between)


def test_nothing_wide_exists_whole() -> None:
    layer, x = mlp(dropout=0.5)
    with Tensors() as plain:
        gradients(layer(x), layer, x)
    with Tensors() as ours:
        gradients(tiled(layer, x), layer, x)
    assert plain.largest() == TOKENS * WIDE
    assert ours.largest() == ROWS * WIDE


def test_the_layer_is_run_twice_for_each_tile_also_inside_a_region() -> None:
    layer, x = mlp()
    tiles = -(-TOKENS // ROWS)
    gradients(tiled(layer, x), layer, x)
    assert layer.runs == 2 * tiles
    wanted = gradients(layer(x), layer, x)
    layer.runs = 0
    # As a block is: something before the layer that needs its output recomputed, and a sum after it.
    out = run_region(lambda x: x + tiled(layer, torch.sin(x)), (x,), {}, modules=[layer])
    gradients(out, layer, x)
    assert layer.runs == 2 * tiles
    del wanted


def test_inside_a_region_it_is_exact() -> None:
    layer, x = mlp(dropout=0.5)
    results = []
    for region in (False, True):
        torch.manual_seed(5)
        block = lambda x: x + tiled(layer, torch.sin(x)) + tiled(layer, torch.cos(x))  # noqa: E731
        out = run_region(block, (x,), {}, modules=[layer]) if region else block(x)
        results.append(gradients(out, layer, x))
    assert_close(results[1], results[0], tolerance=0)


def test_a_frozen_layer_and_an_input_without_a_gradient() -> None:
    layer, x = mlp()
    layer.up.requires_grad_(False)
    assert_close(gradients(tiled(layer, x), layer, x), gradients(layer(x), layer, x))
    x = x.detach()
    assert_close(gradients(tiled(layer, x), layer, x), gradients(layer(x), layer, x))
    layer.requires_grad_(False)
    assert not tiled(layer, x).requires_grad


def test_without_gradients_there_is_no_graph() -> None:
    layer, x = mlp()
    with torch.no_grad():
        out = tiled(layer, x)
    assert out.grad_fn is None
    assert torch.allclose(out, layer(x))


def test_a_weight_that_is_used_twice() -> None:
    layer, x = mlp()
    layer.down.weight = nn.Parameter(layer.down.weight.detach().clone())
    shared = nn.Sequential(layer.up, nn.Tanh(), nn.Linear(WIDE, WIDTH), layer.up, nn.Linear(WIDE, WIDTH))
    assert_close(gradients(tiled(shared, x), shared, x), gradients(shared(x), shared, x))


def test_under_autocast_it_computes_in_its_type() -> None:
    layer, x = mlp()
    results = []
    for call in (layer, lambda x: tiled(layer, x)):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
            # The weights can be used in the same autocast, and get their gradients from there, too.
            again = layer.up(x).float().sum()
        assert out.dtype is torch.bfloat16
        layer.zero_grad()
        (out.float().sum() + again).backward()
        results.append([(name, p.grad.clone()) for name, p in layer.named_parameters()])
    assert_close(results[1], results[0], tolerance=1e-2)


def test_training_is_put_back_for_backward() -> None:
    layer, x = mlp(dropout=0.5)
    torch.manual_seed(7)
    wanted = gradients(tiled(layer, x), layer, x)
    torch.manual_seed(7)
    out = tiled(layer, x)
    layer.eval()
    assert_close(gradients(out, layer, x), wanted, tolerance=0)
    assert not layer.training


def test_weights_that_have_changed_are_refused() -> None:
    layer, x = mlp()
    out = tiled(layer, x)
    with torch.no_grad():
        layer.up.weight.add_(1)
    with pytest.raises(RecomputeError, match="changed in place"):
        out.sum().backward()


def test_a_kept_graph_can_be_used_again_and_a_used_one_cannot() -> None:
    layer, x = mlp()
    out = tiled(layer, x).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    out.backward()
    assert torch.equal(x.grad, first)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        out.backward()


def test_after_backward_the_input_is_gone_though_the_loss_is_there() -> None:
    layer, x = mlp()
    inner = x * 2
    gone = weakref.ref(inner.untyped_storage())
    loss = tiled(layer, inner).sum()
    del inner
    assert gone() is not None
    loss.backward()
    gc.collect()
    assert gone() is None
    assert loss.grad_fn is not None


class Joined(torch.autograd.Function):
    """One node for several tensors, through which an undefined gradient reaches each that has none."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def test_a_layer_whose_output_is_not_used_has_no_gradient() -> None:
    layer, x = mlp()
    used, _ = Joined.apply(2 * x, tiled(layer, x))
    used.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert layer.runs == -(-TOKENS // ROWS)  # forward's: nothing was recomputed
