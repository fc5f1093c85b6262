"""A region gives what the plain call gives, keeps only its inputs, and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale.checkpointing import region as region_module
from memscale.checkpointing import run_region
from memscale.errors import RecomputeError
from support.regions import LiveBytes, Mlp, assert_same, flops, in_region, regions_alive, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What dies here dies by its reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_training_is_bit_equal_to_the_plain_run() -> None:
    plain = train(Mlp, lambda model: model(X).pow(2).sum())
    ours = train(Mlp, lambda model: in_region(model)(X).pow(2).sum())
    assert_same(ours, plain)


def test_an_input_that_requires_grad_gets_its_gradient() -> None:
    def run(forward_of) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Mlp()
        x = X.clone().requires_grad_()
        forward_of(model)(x * 2).pow(2).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert_same(run(in_region), run(lambda model: model))


def test_the_function_runs_once_in_forward_and_once_in_backward() -> None:
    model = Mlp()
    out = in_region(model)(X)
    assert model.calls == 1
    out.sum().backward()
    assert model.calls == 2


def test_backward_costs_the_recomputation_and_nothing_more() -> None:
    model = Mlp(width=8, hidden=16, dropout=0.0)

    def count(forward) -> tuple[int, int]:
        with flops() as so_far:
            out = forward(X)
            in_forward = so_far()
            out.sum().backward()
        return in_forward, so_far() - in_forward

    forward, backward = count(model)
    region_forward, region_backward = count(in_region(model))
    up = 2 * 4 * 8 * 16
    assert forward == region_forward == 2 * up
    # The second layer is not run again: by then all that backward needs is there.
    assert region_backward == backward + up


def test_only_the_input_is_kept() -> None:
    model = Mlp()

    with LiveBytes() as live:
        out = model(X * 2)
        plain = live.now
    del out
    with LiveBytes() as live:
        out = in_region(model)(X * 2)
        region = live.now
    del out
    boundary = 2 * X.nbytes  # its input and its output
    hidden = 4 * 16 * 4
    assert plain >= boundary + 2 * hidden
    assert region == boundary


def test_memory_falls_as_backward_goes() -> None:
    depth, width = 6, 1000
    live = LiveBytes()
    seen: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            x = torch.tanh(x)
            if first_run and x.requires_grad:
                x.register_hook(lambda grad: seen.append(live.now))
        return x

    first_run = True
    with live:
        out = run_region(function, (torch.zeros(width, requires_grad=True),), {})
        first_run = False
        out.sum().backward()
    tensor = 4 * width
    assert len(seen) == depth
    steps = [before - after for before, after in itertools.pairwise(seen[1:])]
    assert steps == [tensor] * len(steps)


@pytest.mark.usefixtures("no_gc")
class TestLifetimes:
    def test_the_input_dies_with_the_output(self) -> None:
        with regions_alive() as alive:
            x = X * 2
            storage = weakref.ref(x.untyped_storage())
            out = in_region(Mlp())(x)
            del x
            assert alive() == 1
            assert storage() is not None
            del out
            assert alive() == 0
            assert storage() is None

    def test_the_input_dies_in_backward(self) -> None:
        with regions_alive() as alive:
            x = X * 2
            storage = weakref.ref(x.untyped_storage())
            out = in_region(Mlp())(x)
            del x
            out.sum().backward()
            assert alive() == 0
            assert storage() is None

    def test_a_retained_graph_keeps_it_until_a_backward_that_does_not(self) -> None:
        with regions_alive() as alive:
            out = in_region(Mlp())(X * 2)
            out.sum().backward(retain_graph=True)
            assert alive() == 1
            out.sum().backward()
            assert alive() == 0

    def test_recomputed_tensors_do_not_outlive_a_backward_that_retains_the_graph(self) -> None:
        model = Mlp()
        with LiveBytes() as live:
            out = in_region(model)(X)
            before = live.now
            torch.autograd.grad(out.sum(), list(model.parameters()), retain_graph=True)
            assert live.now == before

    def test_what_backward_did_not_ask_for_is_dropped_at_its_end(self) -> None:
        def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.exp(x) * 2, torch.exp(torch.sin(x)) * 3

        with LiveBytes() as live:
            x = X.clone().requires_grad_()
            a, b = run_region(two, (x,), {})
            before = live.now
            torch.autograd.grad(a.sum(), x, retain_graph=True)
            assert live.now == before
            torch.autograd.grad(a.sum() + b.sum(), x)
            assert live.now == before

    def test_a_failed_recomputation_holds_nothing(self) -> None:
        fails = False

        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)
            if fails:
                raise ValueError("out of luck")
            return torch.exp(y)

        x = X.clone().requires_grad_()
        with LiveBytes() as live:
            out = run_region(function, (x,), {})
            before = live.now
            fails = True
            with pytest.raises(ValueError, match="out of luck"):
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert live.now == before
            fails = False
            (grad,) = torch.autograd.grad(out.sum(), x)
        (plain,) = torch.autograd.grad(function(x).sum(), x)
        assert torch.equal(grad, plain)


class TestPlainCalls:
    """Where there is nothing to gain, or no way to run again, a region is a plain call."""

    @pytest.fixture(autouse=True)
    def _no_regions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a region was made")

        monkeypatch.setattr(region_module, "Region", refuse)

    def test_under_no_grad(self) -> None:
        with torch.no_grad():
            in_region(Mlp())(X)

    def test_under_inference_mode(self) -> None:
        with torch.inference_mode():
            in_region(Mlp())(X)

    def test_where_nothing_requires_grad(self) -> None:
        in_region(Mlp().requires_grad_(False))(X)

    def test_under_function_transforms_which_refuse_hooks(self) -> None:
        model = Mlp(dropout=0.0)
        ours = torch.func.grad(lambda x: in_region(model)(x).sum())(X)
        assert torch.equal(ours, torch.func.grad(lambda x: model(x).sum())(X))

    def test_a_scripted_module(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
        in_region(model)(X).sum().backward()
        assert model[1].num_batches_tracked == 1

    def test_the_first_call_of_a_lazy_module(self) -> None:
        model = nn.Sequential(nn.LazyLinear(8), nn.Tanh())
        in_region(model)(X).sum().backward()
        assert model[0].weight.grad is not None


def test_the_second_call_of_a_lazy_module_is_a_region() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), Mlp())
    in_region(model)(X).sum().backward()
    in_region(model)(X).sum().backward()
    assert model[2].calls == 1 + 2


def test_a_frozen_module_with_an_input_that_requires_grad_is_recomputed() -> None:
    model = Mlp().requires_grad_(False)
    x = X.clone().requires_grad_()
    in_region(model)(x).sum().backward()
    assert model.calls == 2
    assert x.grad is not None


def test_a_function_without_modules_is_recomputed_for_what_it_closes_over() -> None:
    weight = torch.ones(8, requires_grad=True)
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.exp(x * weight)

    run_region(function, (X,), {}).sum().backward()
    assert len(calls) == 2
    assert torch.equal(weight.grad, (X * torch.exp(X)).sum(0))


class TestMismatches:
    def test_fewer_saved_tensors(self) -> None:
        depth = 3

        def function(x: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = torch.exp(x)
            return x

        out = run_region(function, (X.clone().requires_grad_(),), {})
        depth = 2
        with pytest.raises(RecomputeError, match=r"saved 2 tensors for backward; its forward pass\s+saved 3"):
            out.sum().backward()

    def test_another_shape(self) -> None:
        rows = 4

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.exp(torch.sin(x)[:rows])

        out = run_region(function, (X.clone().requires_grad_(),), {})
        rows = 2
        with pytest.raises(RecomputeError) as caught:
            out.sum().backward()
        message = str(caught.value)
        assert "tensor 1 with shape (4, 8)" in message
        assert "saved one with shape (2, 8)" in message
        assert "ExpBackward0" in message
        assert "Config(enable_checkpointing=False)" in message

    def test_another_dtype(self) -> None:
        dtype = torch.float32

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x.to(dtype))

        out = run_region(function, (X.clone().requires_grad_(),), {})
        dtype = torch.float64
        with pytest.raises(RecomputeError, match=r"to save tensor 0 .*float32.* saved one .*float64"):
            out.sum().backward()

    def test_a_constant_in_place_of_a_value_of_the_same_shape(self) -> None:
        doubles = False

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x) * (torch.full((4, 8), 2.0) if doubles else torch.sin(x))

        out = run_region(function, (X.clone().requires_grad_(),), {})
        doubles = True
        with pytest.raises(RecomputeError):
            out.sum().backward()

    def test_a_function_that_catches_everything_cannot_swallow_it(self) -> None:
        rows = 4

        def function(x: torch.Tensor) -> torch.Tensor:
            try:
                return torch.exp(x[:rows])
            except Exception:
                return x

        out = run_region(function, (X.clone().requires_grad_(),), {})
        rows = 2
        with pytest.raises(RecomputeError):
            out.sum().backward()

    def test_a_parameter_stepped_before_backward(self) -> None:
        model = Mlp()
        out = in_region(model)(X)
        with torch.no_grad():
            model.up.weight.mul_(2)
        with pytest.raises(RecomputeError, match=r"before optimizer.step\(\)"):
            out.sum().backward()

    def test_an_optimizer_that_steps_inside_backward_is_no_mismatch(self) -> None:
        def run(forward_of) -> list[torch.Tensor]:
            torch.manual_seed(1)
            first, second = Mlp(), Mlp()
            for parameter in [*first.parameters(), *second.parameters()]:
                parameter.register_post_accumulate_grad_hook(_step)
            for _ in range(3):
                forward_of(second)(forward_of(first)(X)).pow(2).sum().backward()
            return [p.detach() for p in [*first.parameters(), *second.parameters()]]

        assert_same(run(in_region), run(lambda model: model))

    def test_a_saved_tensor_changed_in_place_by_the_function_itself(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(x)
            z = y * 2
            y.add_(1)  # exp has saved y
            return torch.sin(z)

        with pytest.raises(RuntimeError, match="inplace operation"):
            function(X.clone().requires_grad_()).sum().backward()
        out = run_region(function, (X.clone().requires_grad_(),), {})
        with pytest.raises(RecomputeError, match="changed in place"):
            out.sum().backward()


def _step(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.01)
    parameter.grad = None


def test_forward_is_not_dearer_than_torchs_own_checkpoint_in_what_it_keeps() -> None:
    model = nn.Sequential(Mlp(dropout=0.0), Mlp(dropout=0.0))
    kept = []
    for forward in (in_region(model), lambda x: checkpoint(model, x, use_reentrant=False)):
        with LiveBytes() as live:
            out = forward(X * 2)
            kept.append(live.now)
        del out
    assert kept[0] <= kept[1]
