"""A layer's weight that something else reads as well trains on an accelerator, and the other layers are offloaded.

torchtune ties its head by `F.linear(h, self.tok.weight)`; others scale by a parameter of another layer, or call
`torch.utils.checkpoint` inside of a layer. While such a weight waited in host memory, the first step ended in
"Expected all tensors to be on the same device".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune, spectral_norm
from torch.utils.checkpoint import checkpoint

import memscale
from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.testing import executing
from support.disk import QUIET
from support.steps import AGGRESSIVE, plan_of

WIDTH, VOCABULARY, DEPTH = 32, 64, 6


class Layer(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = reentrant

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden))) * self.scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return hidden + self.inner(hidden)
        return hidden + checkpoint(self.inner, hidden, use_reentrant=self.reentrant)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        reentrant = {"every layer, reentrant": True, "every layer, not reentrant": False}.get(kind)
        self.kind = kind
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(reentrant) for _ in range(DEPTH))
        if kind.startswith("one layer"):
            self.layers[2].reentrant = kind == "one layer, reentrant"
        self.norm = nn.LayerNorm(WIDTH)
        if kind != "the embedding":
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tok(ids)
        for layer in self.layers:
            hidden = layer(hidden)
            if self.kind == "the first layer's scale":
                hidden = hidden * self.layers[0].scale
        if self.kind == "the last layer's scale":
            hidden = hidden * self.layers[-1].scale
        if self.kind == "the embedding":
            return F.linear(self.norm(hidden), self.tok.weight)
        return self.head(self.norm(hidden))


READ = {
    "the embedding": {"tok.weight"},
    "the first layer's scale": {"layers.0.scale"},
    "the last layer's scale": {"layers.5.scale"},
}
CHECKPOINTED = {
    "one layer, reentrant": [2],
    "one layer, not reentrant": [2],
    "every layer, reentrant": range(DEPTH),
    "every layer, not reentrant": range(DEPTH),
}


def build(kind: str, device: Any = "cpu") -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(kind).to(device)


def batch(device: Any = "cpu") -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(1)).to(device)


def train(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """The losses of three steps, then the weights, on the host."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.detach().cpu())
    return found + [parameter.detach().cpu().clone() for parameter in model.parameters()]


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))


@contextmanager
def trained_on_the_accelerator(kind: str, config: Config = AGGRESSIVE) -> Iterator[Model]:
    with executing() as gpu:
        ids = batch(gpu.device)
        plain = train(build(kind, gpu.device), ids)
        model = memscale.wrap(build(kind, gpu.device), config, ids)
        assert_equal(train(model, ids), plain)
        assert model._memscale_executor.report().bytes_read > 0
        yield model


def on_the_device(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.device.type != "cpu"}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", READ)
def test_a_weight_that_another_module_reads_stays_on_the_device_and_all_others_leave(
    kind: str, ahead: bool
) -> None:
    with trained_on_the_accelerator(kind, AGGRESSIVE.replace(async_offload=ahead)) as model:
        # Those of a small layer may stay as well: without them the peak would be no lower.
        kept = {f"{each.name}." for each in plan_of(model).layers if "offloading" not in each.techniques}
        staying = {name for name in on_the_device(model) if not name.startswith(tuple(kept - {"tok."}))}
        assert staying == READ[kind]
        assert len(on_the_device(model)) < DEPTH
        for name in READ[kind]:
            layer = next(each for each in plan_of(model).layers if name.startswith(f"{each.name}."))
            assert f"{name} stays on the device" in layer.reason


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_a_layer_that_checkpoints_inside_of_itself_stays_on_the_device_and_all_others_leave(
    kind: str,
) -> None:
    with trained_on_the_accelerator(kind) as model:
        stays = {f"layers.{index}" for index in CHECKPOINTED[kind]}
        names = [name for name, _ in model.named_parameters()]
        assert on_the_device(model) == {name for name in names if name.rsplit(".", 2)[0] in stays} | {
            f"{layer}.scale" for layer in stays
        }
        for layer in plan_of(model).layers:
            assert ("offloading" in layer.techniques) == (layer.name not in stays)
            assert ("5 parameters stay on the device" in layer.reason) == (layer.name in stays)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["the embedding", "the last layer's scale", "one layer, not reentrant"])
def test_with_precision_and_tiling_too_such_a_model_trains_as_without_offloading(kind: str) -> None:
    config = Config(mode="aggressive", enable_logging=False, use_8bit_optimizer=False, fused_host_step=False)
    with executing() as gpu:
        ids = batch(gpu.device)
        stays = memscale.wrap(build(kind, gpu.device), config.replace(enable_offloading=False), ids)
        leaves = memscale.wrap(build(kind, gpu.device), config, ids)
        assert plan_of(leaves).precision is not None
        assert_equal(train(leaves, ids), train(stays, ids))
        assert leaves._memscale_executor.report().bytes_read > 0


@pytest.mark.parametrize("kind", [*READ, *CHECKPOINTED])
def test_below_a_cpu_the_disk_holds_such_weights_too(kind: str) -> None:
    ids = batch()
    plain = train(build(kind), ids)
    model = memscale.wrap(build(kind), AGGRESSIVE, ids)
    assert_equal(train(model, ids), plain)
    assert model._memscale_executor.bytes_on_disk > 0
    memscale.detach(model)


def test_a_layer_that_shares_a_weight_with_an_offloaded_one_copies_it_too() -> None:
    with executing() as gpu:
        ids = batch(gpu.device)

        def shared() -> Model:
            model = build("", gpu.device)
            for layer in model.layers[1:]:
                layer.up = model.layers[0].up
            return model

        plain, model = train(shared(), ids), shared()
        layers = tuple(
            LayerPlan(
                f"layers.{index}", (f"layers.{index}",), ("offloading",), "", "", offloading=Offloading()
            )
            for index in range(3, DEPTH)
        )
        rest = tuple(LayerPlan(f"layers.{index}", (f"layers.{index}",), (), "", "") for index in range(3))
        executor = Executor(model, Plan((*rest, *layers)), QUIET)
        executor.attach()
        assert model.layers[0].up.weight.device.type == "cpu"
        assert model.layers[0].down.weight.device == gpu.device
        assert_equal(train(model, ids), plain)
        assert executor.report().bytes_read > 0


def test_a_weight_that_a_hook_of_its_own_layer_reads_stays_on_the_device() -> None:
    """Spectral norm and pruning compute a layer's weight before its forward."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [prune.random_unstructured(nn.Linear(WIDTH, WIDTH), "weight", 0.3) for _ in range(4)]
        layers += [spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))

    with executing() as gpu:
        ids = batch(gpu.device)
        plain = train(build().to(gpu.device), ids)
        model = memscale.wrap(build().to(gpu.device), AGGRESSIVE, ids)
        assert_equal(train(model, ids), plain)
        assert on_the_device(model) >= {f"{index}.weight_orig" for index in range(1, 9)}
        assert model._memscale_executor.report().bytes_read > 0
