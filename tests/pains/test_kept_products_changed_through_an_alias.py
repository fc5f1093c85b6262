"""A kept product that an operation changes through an alias with a version counter of its own is computed again.

`nn.GRU` adds to the parts of a product that `unsafe_chunk` gave it, and a 3-D `nn.Linear` without a bias returns an
`_unsafe_view` of its product: neither shares the version counter of the product that was kept.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memscale
from memscale import Plan
from memscale.checkpointing import run_region
from memscale.execution_plan import Checkpointing, LayerPlan
from memscale.executor import Executor
from memscale.offload.activations import Activations
from memscale.testing import executing
from memscale.tiers.engine import Engine
from support.steps import counted_regions
from support.wrapping import lossless

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
WIDTH = 16


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.rnn(x)[0])


class InPlace(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.change = change
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.change(self.up(x)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: Recurrent(nn.GRU),
    "lstm": lambda: Recurrent(nn.LSTM),
    "rnn": lambda: Recurrent(nn.RNN),
    "leaky_relu": lambda: InPlace(nn.LeakyReLU(inplace=True)),
    "elu": lambda: InPlace(nn.ELU(inplace=True)),
    "relu": lambda: InPlace(nn.ReLU(inplace=True)),
    "mul": lambda: InPlace(lambda y: y.mul_(2)),
    "add_sigmoid": lambda: InPlace(lambda y: y.add_(1).sigmoid_()),
    "out": lambda: InPlace(lambda y: y + torch.add(y.detach(), 1, out=torch.empty_like(y))),
}


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(BLOCKS[name]() for _ in range(3)))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).pow(2).mean().backward()
    return [parameter.grad.cpu().clone() for parameter in model.parameters()]


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("chained", [False, True], ids=["single", "chained"])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_equal_when_all_products_are_kept(name: str, chained: bool) -> None:
    model, x = build(name), torch.randn(2, 5, WIDTH)
    plain = gradients(model, x)
    settings = [Checkpointing(PRODUCTS, chained=chained and number > 0) for number in range(3)]
    layers = (
        LayerPlan(str(number), (str(number),), ("checkpointing",), "-", "-", checkpointing=each)
        for number, each in enumerate(settings)
    )
    executor = Executor(model, Plan(tuple(layers)))
    executor.attach()
    with counted_regions() as regions:
        assert_equal(gradients(model, x), plain)
    assert regions == [3]
    executor.detach()


@pytest.mark.parametrize("name", ["gru", "add_sigmoid"])
def test_gradients_are_equal_on_an_accelerator(name: str) -> None:
    with executing("1GiB") as gpu:
        model, x = build(name).to(gpu.device), torch.randn(2, 5, WIDTH).to(gpu.device)
        plain = gradients(model, x)
        settings = Checkpointing(PRODUCTS)
        layers = (LayerPlan(n, (n,), ("checkpointing",), "-", "-", checkpointing=settings) for n in "012")
        executor = Executor(model, Plan(tuple(layers)))
        executor.attach()
        with counted_regions() as regions:
            assert_equal(gradients(model, x), plain)
        assert regions == [3]


def test_a_gru_trains_right_under_a_memory_budget() -> None:
    model, x = build("gru"), torch.randn(16, 3, WIDTH)
    plain = gradients(model, x)
    peak = memscale.plan(model, x, lossless("conservative", enable_offloading=False)).baseline_peak_bytes
    memscale.wrap(
        model, lossless("balanced", memory_budget=peak * 95 // 100, enable_offloading=False), sample_input=x
    )
    with counted_regions() as regions:
        assert_equal(gradients(model, x), plain)
    assert regions[0] > 0


def test_a_returned_alias_that_is_changed_after_the_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.up(x)
            return y, torch.exp(torch.tanh(y))

    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, WIDTH)
    seen = []
    for keep in (None, PRODUCTS):
        block.zero_grad()
        if keep is None:
            y, other = block(x)
        else:
            y, other = run_region(block, (x,), {}, modules=[block], keep=keep)
        y.mul_(0.5)
        (y.sum() + other.sum()).backward()
        seen.append(block.up.weight.grad.clone())
    assert torch.equal(*seen)


def test_activations_that_are_offloaded() -> None:
    torch.manual_seed(0)
    model, x = Recurrent(nn.GRU), torch.randn(512, 5, WIDTH * 4)
    model.rnn = nn.GRU(WIDTH * 4, WIDTH * 4, batch_first=True)
    plain = gradients(model, x)
    below = Activations(Engine(), torch.device("cpu"), capacity=2**30, logs=False)
    model.zero_grad()
    with below.around([model]):
        out = model(x)
    out.pow(2).mean().backward()
    assert below.bytes_sent > 0
    assert_equal([parameter.grad for parameter in model.parameters()], plain)
