"""All the ways to call backward: twice, in part, doubly, nested, from inside a region, from a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale.checkpointing import run_region
from support.regions import LiveBytes, Mlp, assert_same, flops, in_region, regions_alive, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)

Wrap = Callable[[nn.Module], Callable[..., Any]]
WAYS: list[Wrap] = [in_region, lambda module: module]


def both(run: Callable[[Wrap], list[torch.Tensor]]) -> None:
    """The same, in a region and plainly."""
    seen = []
    for wrap in WAYS:
        torch.manual_seed(5)
        seen.append([*run(wrap), torch.get_rng_state()])
    assert_same(*seen)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_two_backward_calls_over_a_retained_graph() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        out = wrap(model)(X)
        out.sum().backward(retain_graph=True)
        out.pow(2).sum().backward()
        return gradients(model)

    both(run)


def test_each_backward_call_recomputes() -> None:
    model = Mlp()
    out = in_region(model)(X)
    for calls in (2, 3, 4):
        out.sum().backward(retain_graph=True)
        assert model.calls == calls


def test_gradients_of_some_inputs_only() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        x = X.clone().requires_grad_()
        out = wrap(model)(x)
        first = torch.autograd.grad(out.sum(), [model.down.weight], retain_graph=True)
        second = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        third = torch.autograd.grad(out.sum(), [model.up.bias, x])
        return [*first, *second, *third]

    both(run)


def test_a_second_backward_after_part_of_the_graph_is_freed() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.exp(torch.sin(x)), torch.exp(torch.cos(x))

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        a, b = function(x)
        a.sum().backward()  # frees one branch
        b.sum().backward()
        return [x.grad]

    assert_same(run(lambda x: run_region(two, (x,), {})), run(two))


def test_early_stop_looks_at_the_holders_that_are_left() -> None:
    late = []

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.exp(x)
        late.append(1)
        return a, torch.exp(torch.cos(x))

    x = X.clone().requires_grad_()
    a, b = run_region(two, (x,), {})
    b.sum().backward()
    late.clear()
    a.sum().backward()
    assert not late


def test_unused_outputs() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        wrap(model)(X)
        used = wrap(model)(X)
        used.sum().backward()
        return gradients(model)

    both(run)


def test_double_backward() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        x = X.clone().requires_grad_()
        out = wrap(model)(x)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        (grad.pow(2).sum() + out.sum()).backward()
        return [grad.detach(), x.grad, *gradients(model)]

    both(run)


def test_a_gradient_penalty_inside_the_region() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            out = self.body(x)
            (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
            return torch.exp(out) + grad.pow(2)

    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Penalised()
        x = X.clone().requires_grad_()
        wrap(model)(x).sum().backward()
        return [x.grad, *gradients(model)]

    both(run)


@pytest.mark.parametrize("retain", [True, False])
def test_a_first_derivative_inside_the_region(retain: bool) -> None:
    class Inside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.sin(x)
            z = torch.cos(y)
            (grad,) = torch.autograd.grad(z.sum(), x, retain_graph=retain)
            return torch.exp(x) * grad

    def run(wrap: Wrap) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        wrap(Inside())(x).sum().backward()
        return [x.grad]

    both(run)


class Nested(nn.Module):
    """Three levels of regions, each with something of its own around the inner one."""

    def __init__(self, wrap: Wrap, levels: int = 3) -> None:
        super().__init__()
        self.before = Mlp()
        self.inner = Nested(wrap, levels - 1) if levels > 1 else Mlp()
        self.after = Mlp()
        self._wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.exp(self.before(x))
        x = self._wrap(self.inner)(x)
        return self.after(torch.sin(x)) + x


TORCH: Wrap = lambda module: lambda *args: checkpoint(module, *args, use_reentrant=False)  # noqa: E731


@pytest.mark.parametrize("inner", [in_region, TORCH, lambda module: in_region(module, chain=True)])
@pytest.mark.parametrize("outer", [in_region, TORCH])
def test_regions_in_regions_and_in_torchs_checkpoints(outer: Wrap, inner: Wrap) -> None:
    plain = train(lambda: Nested(lambda module: module), lambda model: model(X).pow(2).sum())
    ours = train(lambda: Nested(inner), lambda model: outer(model)(X).pow(2).sum())
    assert_same(ours, plain)


def test_nested_regions_keep_the_outermost_input_only() -> None:
    model = Nested(in_region)
    with LiveBytes() as live, regions_alive() as alive:
        out = in_region(model)(X * 2)
        assert alive() == 4
        assert live.now == 2 * X.nbytes
        out.sum().backward()
        assert alive() == 0


def test_nested_regions_recompute_each_level_once() -> None:
    model = Nested(in_region, levels=2)
    in_region(model)(X).sum().backward()
    # Forward, the outer recomputation, and for the innermost its own.
    assert model.before.calls == 2
    assert model.inner.before.calls == 3
    assert model.inner.inner.calls == 4


def test_retained_and_double_backward_through_nested_regions() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Nested(wrap, levels=2)
        x = X.clone().requires_grad_()
        out = wrap(model)(x)
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        (grad.pow(2).sum()).backward(retain_graph=True)
        out.sum().backward()
        return [x.grad, *gradients(model)]

    both(run)


def test_shared_weights() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        wrap(model)(torch.sin(wrap(model)(wrap(model)(X)))).sum().backward()
        return gradients(model)

    both(run)


def test_accumulation_over_micro_batches_before_one_backward() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        losses = [wrap(model)(X * k).pow(2).sum() for k in (1, 2, 3)]
        torch.stack(losses).sum().backward()
        return gradients(model)

    both(run)


class TwiceRead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, _ = ctx.saved_tensors
        _, y = ctx.saved_tensors
        return grad * y, grad * x


def test_a_custom_function_that_reads_its_saved_tensors_twice() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(TwiceRead.apply(torch.exp(x), torch.cos(x)))

    def run(wrap: Wrap) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        wrap(Twice())(x).sum().backward()
        return [x.grad]

    both(run)


def test_a_saved_tensor_read_outside_backward() -> None:
    x = X.clone().requires_grad_()
    with LiveBytes() as live:
        out = run_region(lambda x: torch.exp(torch.sin(x)), (x,), {})
        before = live.now
        node = out.grad_fn
        assert torch.equal(node._saved_result, torch.exp(torch.sin(x)))
        assert torch.equal(node._saved_result, torch.exp(torch.sin(x)))
        assert live.now == before
    out.sum().backward()
    assert torch.equal(x.grad, torch.cos(x) * torch.exp(torch.sin(x)))


def test_backward_in_another_thread() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        loss = wrap(model)(X).pow(2).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return gradients(model)

    both(run)


def test_threads_recompute_one_at_a_time() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = torch.exp(x)
        time.sleep(0.002)  # time for the others to move the random state, if they could
        return torch.exp(nn.functional.dropout(x) * 0.1)

    leaves = [X.clone().requires_grad_() for _ in range(4)]
    outs = [run_region(function, (x,), {}) for x in leaves]
    expected = [
        torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out, x in zip(outs, leaves, strict=True)
    ]
    found: list[list[torch.Tensor]] = [[] for _ in outs]

    def go(index: int) -> None:
        for _ in range(5):
            found[index] += torch.autograd.grad(outs[index].sum(), leaves[index], retain_graph=True)

    threads = [threading.Thread(target=go, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for gradients, gradient in zip(found, expected, strict=True):
        assert_same(gradients, [gradient] * 5)


def test_a_backward_hook_that_calls_backward_through_another_region() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        first, second = Mlp(), Mlp()
        x = X.clone().requires_grad_()
        other = wrap(second)(x)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                (inner,) = torch.autograd.grad(other.pow(2).sum(), x, retain_graph=True)
            return grad + inner

        y = torch.sin(x)
        y.register_hook(hook)
        (wrap(first)(y).sum() + other.sum()).backward(retain_graph=True)
        return [x.grad, *gradients(first), *gradients(second)]

    both(run)


def test_torchs_reentrant_checkpoint_around_a_region() -> None:
    def run(wrap: Wrap) -> list[torch.Tensor]:
        model = Mlp()
        x = X.clone().requires_grad_()
        checkpoint(lambda x: torch.exp(wrap(model)(x)), x, use_reentrant=True).sum().backward()
        return [x.grad, *gradients(model)]

    both(run)


def test_flops_of_nested_regions() -> None:
    model = Nested(in_region, levels=1)
    with flops() as so_far:
        out = in_region(model)(X)
        forward = so_far()
        out.sum().backward()
        ours = so_far() - forward
    plain_model = Nested(lambda module: module, levels=1)
    with flops() as so_far:
        out = plain_model(X)
        assert so_far() == forward
        out.sum().backward()
        plain = so_far() - forward
    layer = 2 * 4 * 8 * 16
    # All but the last layer for the outer region; the inner one's first layer once more, for itself.
    assert ours == plain + 5 * layer + layer
