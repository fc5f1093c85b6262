"""Kept outputs: not computed again, freed when used, and never a reason for another result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memscale.checkpointing import run_region
from memscale.checkpointing.keep import calls_to_keep
from memscale.errors import ConfigError
from support.regions import LiveBytes, Mlp, assert_same, flops, in_region, regions_alive, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)
ADDMM = "aten.addmm.default"
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"
LAYER = 2 * 4 * 8 * 16  # FLOPs of one layer of an Mlp


class Deep(nn.Module):
    """Four linear layers: up, down, up, down."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Mlp(), nn.Tanh(), Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.reshape(1, 4, 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        y = nn.functional.dropout(y.transpose(1, 2).reshape(4, 8), 0.3)
        return self.out(torch.tanh(y))


POLICIES = [
    (),
    (ADDMM,),
    (f"{ADDMM}#0",),
    (f"{ADDMM}#1", f"{ADDMM}#3"),
    (f"{ADDMM}#99",),
    ("aten.tanh.default", "aten.mul.Tensor", "aten.native_dropout.default", "aten.bernoulli_.float"),
    ("aten.view.default", "aten.t.default", "aten.detach.default", "aten.transpose.int"),
    (SDPA, ADDMM),
    ("aten.bmm.default", "aten._softmax.default", "aten._safe_softmax.default"),
    ("none.such.op",),
]


@pytest.mark.matrix(7)
@pytest.mark.parametrize("ops", POLICIES)
@pytest.mark.parametrize("build", [Deep, Attention, lambda: Attention(0.3)])
def test_training_is_bit_equal_to_the_plain_run(build: Callable[[], nn.Module], ops: tuple[str, ...]) -> None:
    plain = train(build, lambda model: model(X).pow(2).sum())
    ours = train(build, lambda model: in_region(model, keep=ops)(X).pow(2).sum())
    assert_same(ours, plain)


@pytest.mark.parametrize(
    ("ops", "recomputed"),
    [((), 3), ((f"{ADDMM}#0",), 2), ((f"{ADDMM}#0", f"{ADDMM}#2"), 1), ((ADDMM,), 0), ((f"{ADDMM}#3",), 3)],
)
def test_kept_products_are_not_computed_again(ops: tuple[str, ...], recomputed: int) -> None:
    def backward_flops(forward: Callable[..., torch.Tensor]) -> int:
        with flops() as so_far:
            out = forward(X)
            assert so_far() == 4 * LAYER
            out.sum().backward()
        return so_far() - 4 * LAYER

    model = Deep()
    plain = backward_flops(model)
    assert backward_flops(in_region(model, keep=ops)) == plain + recomputed * LAYER


def test_kept_attention_is_not_computed_again() -> None:
    def recomputed(ops: tuple[str, ...]) -> list[str]:
        seen: list[str] = []

        class Spy(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(str(func))
                return func(*args, **(kwargs or {}))

        out = in_region(Attention(), keep=ops)(X)
        with Spy():
            out.sum().backward()
        return seen

    assert SDPA in recomputed(())
    assert SDPA not in recomputed((SDPA,))


def test_what_is_kept_is_what_was_named() -> None:
    model = Deep()
    kept = {}
    for ops in ((), (f"{ADDMM}#0",), (f"{ADDMM}#0", f"{ADDMM}#1"), ("aten.t.default", "aten.view.default")):
        with LiveBytes() as live:
            out = in_region(model, keep=ops)(X * 2)
            kept[ops] = live.now
        del out
    nothing = kept[()]
    hidden, outer = 4 * 16 * 4, 4 * 8 * 4
    assert list(kept.values()) == [nothing, nothing + hidden, nothing + hidden + outer, nothing]


def test_kept_outputs_go_as_backward_uses_them() -> None:
    with LiveBytes() as live, regions_alive() as alive:
        model = Deep()
        parameters = live.now
        out = in_region(model, keep=(ADDMM,))(X)
        out.sum().backward()
        assert alive() == 0
        del out
        assert live.now == 2 * parameters  # and their gradients


def test_a_kept_output_is_given_up_when_the_recomputation_has_it() -> None:
    product: list[weakref.ref[Any]] = []
    alive = []

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, w)
        z = torch.exp(y)  # saves its result, so nothing holds y
        if not product:
            product.append(weakref.ref(y.untyped_storage()))
            z.register_hook(lambda grad: alive.append(product[0]() is not None))
        return torch.sin(z)

    w = torch.eye(8, requires_grad=True)
    out = run_region(function, (X, w), {}, keep=("aten.mm.default",))
    for retain in (True, False):
        assert product[0]() is not None
        out.sum().backward(retain_graph=retain)
    assert alive == [True, False]


def test_a_retained_graph_keeps_them_for_the_next_backward() -> None:
    model = Deep()
    parameters = list(model.parameters())
    out = in_region(model, keep=(ADDMM,))(X)
    cost = []
    found = []
    for retain in (True, True, False):
        with flops() as so_far:
            found.append(torch.autograd.grad(out.pow(2).sum(), parameters, retain_graph=retain))
            cost.append(so_far())
    assert cost[0] == cost[1] == cost[2]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


def test_double_backward() -> None:
    seen = []
    for wrap in (lambda module: in_region(module, keep=(ADDMM,)), lambda module: module):
        torch.manual_seed(0)
        model = Deep()
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(wrap(model)(x).pow(2).sum(), x, create_graph=True)
        grad.pow(2).sum().backward()
        seen.append([grad.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_same(*seen)


class TestChangedInPlace:
    """A kept output that somebody writes into is computed again."""

    def test_by_the_region(self) -> None:
        def build() -> nn.Module:
            return nn.Sequential(
                nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Dropout(inplace=True)
            )

        plain = train(build, lambda model: model(X).pow(2).sum())
        ours = train(build, lambda model: in_region(model, keep=(ADDMM,))(X).pow(2).sum())
        assert_same(ours, plain)

    def test_by_the_region_through_a_view(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, w)
            torch.sin(x)
            y.view(-1).add_(1)
            return torch.exp(y * y)

        self.compare(function, ("aten.mm.default",))

    def test_by_what_comes_after_the_region(self) -> None:
        def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.mm(x, w)
            return y, torch.exp(y)  # exp saves its result, so y may be written into

        def after(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return outputs[0].mul_(3) + outputs[1]

        self.compare(function, ("aten.mm.default",), after)

    def compare(
        self, function: Any, policy: tuple[str, ...], after: Callable[[Any], Any] = torch.sin
    ) -> None:
        seen = []
        for run in (lambda *args: run_region(function, args, {}, keep=policy), function):
            x = X.clone().requires_grad_()
            w = (torch.eye(8) * 0.5).requires_grad_()
            out = run(x * 1, w)
            after(out).sum().backward()
            seen.append([x.grad, w.grad])
        assert_same(*seen)


def test_a_kept_random_operation_leaves_the_random_stream_in_step() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x, _ = torch.native_dropout(torch.exp(x * 0.1), 0.5, True)
        return torch.exp(nn.functional.dropout(x, 0.5) * 0.1)

    for ops in (("aten.native_dropout.default",), ("aten.native_dropout.default#1",)):
        seen = []
        for run in (lambda x, ops=ops: run_region(function, (x,), {}, keep=ops), function):
            torch.manual_seed(0)
            x = X.clone().requires_grad_()
            out = run(x)
            torch.rand(3)
            out.sum().backward()
            seen.append([out.detach(), x.grad, torch.get_rng_state()])
        assert_same(*seen)


def test_in_nested_regions() -> None:
    class Outer(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.a, self.b, self.c = Deep(), Deep(), Deep()
            self._wrap = wrap

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.sin(self._wrap(self.b)(self.a(x))))

    plain = train(lambda: Outer(lambda module: module), lambda model: model(X).pow(2).sum(), steps=2)
    for outer in ((ADDMM,), (f"{ADDMM}#5", f"{ADDMM}#9"), ()):
        for inner in ((ADDMM,), (f"{ADDMM}#2",), ()):
            ours = train(
                lambda inner=inner: Outer(lambda module: in_region(module, keep=inner)),
                lambda model, outer=outer: in_region(model, keep=outer)(X).pow(2).sum(),
                steps=2,
            )
            assert_same(ours, plain)


@pytest.mark.parametrize("number", ["", *(f"#{k}" for k in range(8))])
def test_a_derivative_inside_the_region(number: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.exp(torch.mm(x, w) * 0.1)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.exp(torch.mm(y, w) * 0.1) * torch.mm(grad, w)

    seen = []
    policy = (f"aten.mm.default{number}",)
    for run in (lambda *args: run_region(function, args, {}, keep=policy), function):
        x = X.clone().requires_grad_()
        w = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        run(x * 1, w).sum().backward()
        seen.append([x.grad, w.grad])
    assert_same(*seen)


def test_no_mode_is_entered_without_a_policy() -> None:
    depths = []

    def function(x: torch.Tensor) -> torch.Tensor:
        depths.append(torch._C._len_torch_dispatch_stack())
        return torch.exp(x)

    x = X.clone().requires_grad_()
    run_region(function, (x,), {}).sum().backward()
    assert depths == [0, 0]
    run_region(function, (x,), {}, keep=(ADDMM,)).sum().backward()
    assert depths == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "op", ["mm", "aten.mm", "aten.mm.default#", "aten.mm.default#x", "aten..default", "a.b.c.d"]
)
def test_it_is_said_what_is_wrong_with_a_name(op: str) -> None:
    with pytest.raises(ConfigError, match=r"namespace\.operation\.overload"):
        calls_to_keep((op,))
