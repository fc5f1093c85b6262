"""Chained regions: as if they were one, without the tensor between them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale.checkpointing import region, run_region
from memscale.errors import RecomputeError
from support.regions import LiveBytes, Mlp, assert_same, flops, in_region, regions_alive, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LAYER = 2 * 4 * 8 * 16  # FLOPs of one layer of an Mlp


class Stack(nn.Module):
    """Blocks in a row, each a region, chained to the one before except for the first of each segment."""

    def __init__(
        self, depth: int, segment: int | None, dropout: float = 0.5, keep: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(dropout=dropout) for _ in range(depth))
        self._segment = segment
        self._keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self._segment is None:
                x = block(x)
            else:
                x = in_region(block, chain=index % self._segment > 0, keep=self._keep)(x)
        return x


@pytest.mark.parametrize("segment", [1, 2, 3, 6])
@pytest.mark.parametrize("keep", [(), ("aten.addmm.default#0",)])
def test_training_is_bit_equal_to_the_plain_run(segment: int, keep: tuple[str, ...]) -> None:
    plain = train(lambda: Stack(6, None), lambda model: model(X).pow(2).sum())
    ours = train(lambda: Stack(6, segment, keep=keep), lambda model: model(X).pow(2).sum())
    assert_same(ours, plain)


@pytest.mark.parametrize("segment", [1, 2, 3, 6])
def test_one_tensor_a_segment_is_kept(segment: int) -> None:
    model = Stack(6, segment)
    with LiveBytes() as live:
        out = model(X * 2)
        assert live.now == X.nbytes * (6 // segment + 1)  # and the output
    del out


def test_every_block_runs_twice() -> None:
    model = Stack(6, 3)
    model(X).sum().backward()
    assert [block.calls for block in model.blocks] == [2] * 6


def test_a_chain_costs_what_one_region_costs() -> None:
    def backward_flops(forward: Callable[..., torch.Tensor]) -> int:
        with flops() as so_far:
            out = forward(X)
            before = so_far()
            out.sum().backward()
        return so_far() - before

    plain = Stack(4, None, dropout=0.0)
    as_one = backward_flops(in_region(plain))
    assert backward_flops(Stack(4, 4, dropout=0.0)) == as_one
    # Both stop before the very last layer.
    assert as_one == backward_flops(plain) + 7 * LAYER
    # Regions apart stop before the last layer each.
    assert backward_flops(Stack(4, 1, dropout=0.0)) == backward_flops(plain) + 4 * LAYER


def test_memory_falls_as_backward_goes_and_nothing_is_left() -> None:
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live, regions_alive() as alive:
            model = Stack(4, 4)
            parameters = live.now
            out = model(X * 2)
            assert alive() == 4
            out.sum().backward()
            del out
            assert alive() == 0
            assert live.now == 2 * parameters
            out = model(X * 2)
            del out
            assert alive() == 0
            assert live.now == 2 * parameters
    finally:
        gc.enable()


def test_the_recomputed_boundary_is_dropped_when_the_successor_has_it() -> None:
    boundary: list[weakref.ref[Any]] = []
    alive_in_first_backward = []

    def first(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        y.register_hook(lambda grad: alive_in_first_backward.append([ref() is not None for ref in boundary]))
        out = y * 2  # saved by nobody in here
        boundary.append(weakref.ref(out.untyped_storage()))
        return out

    x = X.clone().requires_grad_()
    hidden = run_region(first, (x,), {})
    out = run_region(lambda h: torch.exp(h), (hidden,), {}, chain=True)  # saves its result, not the boundary
    del hidden
    assert boundary[0]() is None
    out.sum().backward()
    assert alive_in_first_backward[0] == [False, False]


def test_gradients_of_a_boundary_that_is_used_elsewhere_too() -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        a, b = Mlp(), Mlp()
        hidden = wrap(a, False)(X)
        (wrap(b, True)(hidden).sum() + torch.exp(hidden).sum()).backward()
        return [p.grad for p in [*a.parameters(), *b.parameters()]]

    assert_same(run(lambda module, chain: in_region(module, chain=chain)), run(lambda module, chain: module))


def _chained(function: Callable[..., Any], chain: bool = True) -> Callable[..., Any]:
    return lambda *args: run_region(function, args, {}, chain=chain)


def _plain(function: Callable[..., Any], chain: bool = True) -> Callable[..., Any]:
    return function


def compare(run: Callable[[Any, torch.Tensor], torch.Tensor], backward: Any = torch.Tensor.backward) -> None:
    seen = []
    for wrap in (_chained, _plain):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        backward(run(wrap, x))
        seen.append([x.grad, torch.get_rng_state()])
    assert_same(*seen)


def _drop(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(nn.functional.dropout(torch.sin(x), 0.3) * 0.5)


class TestShapesOfGraphs:
    def test_two_successors_of_one_region(self) -> None:
        calls = []

        def head(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return _drop(x)

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            hidden = wrap(head, False)(x)
            return wrap(_drop)(hidden).sum() + wrap(_drop)(hidden).sum()

        compare(run)
        assert len(calls) == 2 + 1  # in regions, then plainly: once for both successors

    def test_a_skip_inside_a_segment(self) -> None:
        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            a = wrap(_drop, False)(x)
            b = wrap(_drop)(a)
            c = wrap(lambda a, b: torch.exp(torch.sin(a) * torch.cos(b)))(a, b)
            return wrap(lambda a, c: _drop(a * c))(a, c).sum()

        compare(run)

    def test_a_skip_inside_a_segment_is_not_kept(self) -> None:
        with LiveBytes() as live:
            a = _chained(_drop, False)(X.clone().requires_grad_())
            b = _chained(_drop)(a)
            c = _chained(lambda a, b: torch.exp(torch.sin(a) * torch.cos(b)))(a, b)
            del a, b
            assert live.now == 2 * X.nbytes  # the leaf and the output
        del c

    def test_a_tensor_from_another_segment_is_kept(self) -> None:
        calls = []

        def encode(x: torch.Tensor) -> torch.Tensor:
            calls.append("encode")
            return _drop(x)

        def decode(y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            calls.append("decode")
            return torch.exp(torch.sin(y) * torch.cos(e))

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            encoded = wrap(encode, False)(x)
            y = wrap(lambda e: _drop(e * 0.5), False)(x)
            for _ in range(4):
                y = wrap(decode)(y, encoded)
            return y.sum()

        compare(run)
        # The encoder is recomputed when its own backward comes, not for the decoders.
        forward = ["encode", *["decode"] * 4]
        assert calls == [*forward, *["decode"] * 4, "encode", *forward]

    def test_several_outputs(self) -> None:
        def split(x: torch.Tensor) -> dict[str, Any]:
            return {"a": torch.exp(torch.sin(x)), "none": None, "b": [torch.exp(torch.cos(x)), 3]}

        def join(parts: dict[str, Any]) -> torch.Tensor:
            return torch.exp(parts["a"] * parts["b"][0] * 0.1 * parts["b"][1])

        compare(lambda wrap, x: wrap(join)(wrap(split, False)(x)).sum())

    def test_an_output_that_goes_to_the_loss_directly(self) -> None:
        def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.exp(torch.sin(x)), torch.exp(torch.exp(torch.cos(x)))

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            a, b = wrap(split, False)(x)
            return wrap(_drop)(a).sum() + b.sum()

        compare(run)

    def test_a_region_recomputed_without_its_output_is_asked_for_it(self) -> None:
        calls = []

        def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(1)
            a = nn.functional.dropout(torch.exp(torch.sin(x)), 0.3)
            return a, torch.exp(torch.cos(x))

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            a, b = wrap(split, False)(x)
            tail: list[torch.Tensor] = []
            # Autograd goes by order of making, which each thread counts for itself: what a new thread makes
            # comes last in backward.
            thread = threading.Thread(target=lambda: tail.append(wrap(_drop)(a).sum()))
            thread.start()
            thread.join()
            return b.sum() + tail[0]

        compare(run)
        assert len(calls) == 3 + 1  # in regions: forward, for b's node, for the tail

    def test_passing_an_input_through(self) -> None:
        def function(x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.exp(torch.sin(x) + bias), bias

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            bias = torch.cos(x)
            y = x
            for index in range(4):
                y, bias = wrap(function, index > 0)(y, bias)
            return y.sum()

        compare(run)

    def test_retained_and_double_backward(self) -> None:
        def backward(loss: torch.Tensor) -> None:
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()

        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            y = wrap(_drop)(wrap(_drop)(wrap(_drop, False)(x)))
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return grad.pow(2).sum() + y.sum()

        compare(run, backward)

    def test_inside_a_region(self) -> None:
        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            def outer(x: torch.Tensor) -> torch.Tensor:
                x = wrap(_drop, False)(torch.sin(x))
                return torch.sin(wrap(_drop)(wrap(_drop)(x)))

            return wrap(outer)(wrap(outer, False)(x)).sum()

        compare(run)

    def test_a_region_inside_another_does_not_chain_to_one_outside_it(self) -> None:
        def run(wrap: Any, x: torch.Tensor) -> torch.Tensor:
            def outer(hidden: torch.Tensor) -> torch.Tensor:
                return _drop(wrap(_drop)(hidden))

            return wrap(outer, False)(wrap(_drop, False)(x)).sum()

        compare(run)

    def test_a_saved_tensor_read_outside_backward(self) -> None:
        x = X.clone().requires_grad_()
        with LiveBytes() as live:
            out = _chained(torch.exp)(_chained(torch.sin, False)(x))
            before = live.now
            assert torch.equal(out.grad_fn._saved_result, torch.exp(torch.sin(x)))
            assert live.now == before
        out.sum().backward()
        assert torch.equal(x.grad, torch.exp(torch.sin(x)) * torch.cos(x))


class TestMismatches:
    def test_more_saved_tensors(self) -> None:
        depth = 2

        def head(x: torch.Tensor) -> torch.Tensor:
            for _ in range(depth):
                x = torch.sin(x)
            return x

        out = _chained(torch.exp)(_chained(head, False)(X.clone().requires_grad_()))
        depth = 3
        with pytest.raises(RecomputeError, match=r"saved 3 tensors for backward; its forward pass saved 2"):
            out.sum().backward()

    def test_fewer_outputs(self) -> None:
        both = True

        def head(x: torch.Tensor) -> list[torch.Tensor]:
            y = torch.sin(x)
            return [y * 2, y * 3] if both else [y * 2]

        out = _chained(torch.exp)(_chained(head, False)(X.clone().requires_grad_())[1])
        both = False
        with pytest.raises(RecomputeError, match=r"returned 1 tensors; its forward pass returned at least 2"):
            out.sum().backward()

    def test_a_failure_leaves_nothing_behind_and_can_be_tried_again(self) -> None:
        fails = False

        def tail(x: torch.Tensor) -> torch.Tensor:
            x = torch.exp(x)
            if fails:
                raise ValueError("out of luck")
            return torch.exp(x)

        with LiveBytes() as live:
            x = X.clone().requires_grad_()
            out = _chained(tail)(_chained(_drop, False)(x))
            before = live.now
            fails = True
            with pytest.raises(ValueError, match="out of luck"):
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert live.now == before
            fails = False
            first = torch.autograd.grad(out.sum(), x, retain_graph=True)
            second = torch.autograd.grad(out.sum(), x)
        assert_same(first, second)


class TestWhereItCannotChain:
    def kept_with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> int:
        with LiveBytes() as live:
            x = X.clone().requires_grad_()
            hidden = change(_chained(lambda x: torch.sin(torch.exp(x)), False)(x))
            out = _chained(torch.exp)(hidden)
            del hidden
            kept = live.now - 2 * X.nbytes  # the leaf and the output
            out.sum().backward()
            assert x.grad is not None
        return kept

    def test_the_same_object_is_chained(self) -> None:
        assert self.kept_with(lambda hidden: hidden) == 0

    def test_a_copy_is_kept(self) -> None:
        assert self.kept_with(lambda hidden: hidden.clone()) == X.nbytes

    def test_a_tensor_changed_in_place_is_kept(self) -> None:
        assert self.kept_with(lambda hidden: hidden.add_(1)) == X.nbytes

    def test_a_tensor_whose_graph_is_gone_is_kept(self) -> None:
        x = X.clone().requires_grad_()
        hidden = _chained(lambda x: torch.sin(torch.exp(x)), False)(x)
        hidden.sum().backward()
        leaf = hidden.detach().requires_grad_()
        _chained(torch.exp)(leaf).sum().backward()
        assert torch.equal(leaf.grad, torch.exp(leaf))
        with torch.no_grad():
            assert region._origins[hidden].region() is None

    def test_a_region_that_saves_nothing_is_gone_at_once(self) -> None:
        x = X.clone().requires_grad_()
        _chained(torch.exp)(_chained(lambda x: x + 1, False)(x)).sum().backward()
        assert torch.equal(x.grad, torch.exp(x + 1))


def test_a_chained_region_outlives_its_own_graph() -> None:
    """The first region's part of the graph is freed, the second's is not: it can still be recomputed."""
    x = X.clone().requires_grad_()
    hidden = _chained(lambda x: torch.sin(torch.exp(x)), False)(x)
    leaf = hidden.detach()
    y = X.clone().requires_grad_()
    out = run_region(lambda h, y: torch.exp(h.detach() * y), (hidden, y), {}, chain=True)
    hidden.sum().backward()
    out.sum().backward()
    assert torch.equal(y.grad, torch.exp(leaf * y) * leaf)


def test_the_memory_of_origins_dies_with_the_tensors() -> None:
    gc.collect()
    before = len(region._origins)
    out = Stack(4, 4)(X)
    assert len(region._origins) == before + 1
    del out
    assert len(region._origins) == before


def test_an_output_is_an_ordinary_tensor_that_can_be_saved(tmp_path: Path) -> None:
    out = Stack(2, 2)(X)
    assert not out.__dict__
    torch.save(out, tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt"), out)


def test_a_chain_longer_than_the_stack_is_deep() -> None:
    depth = 400
    x = X.clone().requires_grad_()
    out = x
    for index in range(depth):
        out = _chained(lambda x: torch.sin(torch.cos(x)), index > 0)(out)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 100)
    try:
        out.sum().backward()
    finally:
        sys.setrecursionlimit(limit)
    ours = x.grad
    y = X.clone().requires_grad_()
    out = y
    for _ in range(depth):
        out = torch.sin(torch.cos(out))
    out.sum().backward()
    assert torch.equal(ours, y.grad)


class TestGpt2:
    """Real blocks, in a real model, its code untouched."""

    def build(self) -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)

    def wrapped(self, chained: bool, keep: tuple[str, ...] = ()) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            model = self.build()
            for index, block in enumerate(model.transformer.h):
                block.forward = _as_region(block, block.forward, chained and index > 0, keep)
            return model

        return build

    @staticmethod
    def loss(model: nn.Module) -> torch.Tensor:
        ids = torch.arange(32).reshape(2, 16) % 64
        return model(input_ids=ids, labels=ids).loss

    KEEPS = (
        (),
        ("aten.addmm.default#0", "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        ("aten.addmm.default",),
    )

    @pytest.mark.parametrize("keep", KEEPS)
    @pytest.mark.parametrize("chained", [False, True])
    def test_training_is_bit_equal(self, chained: bool, keep: tuple[str, ...]) -> None:
        plain = train(self.build, self.loss)
        assert_same(train(self.wrapped(chained, keep), self.loss), plain)

    def test_each_block_keeps_its_input_and_a_chain_keeps_one(self) -> None:
        kept = []
        for build in (self.build, self.wrapped(False), self.wrapped(True)):
            model = build()
            with LiveBytes() as live:
                loss = self.loss(model)
                kept.append(live.now)
            del loss
        boundary = 2 * 16 * 32 * 4
        assert kept[1] - kept[2] == 2 * boundary
        assert kept[0] - kept[1] > 20 * boundary

    def test_flops_are_counted_to_the_last(self) -> None:
        def count(build: Callable[[], nn.Module]) -> tuple[int, int]:
            model = build().eval()
            with flops() as so_far:
                loss = self.loss(model)
                forward = so_far()
                loss.backward()
            return forward, so_far() - forward

        forward, plain = count(self.build)
        tokens, width = 32, 32
        head = 2 * tokens * width * 64
        block = (forward - head) // 3
        project = 2 * tokens * 4 * width * width  # the last product of a block
        assert count(self.wrapped(False)) == (forward, plain + 3 * (block - project))
        assert count(self.wrapped(True)) == (forward, plain + 3 * block - project)
        products = 2 * tokens * width * (3 + 1 + 4) * width
        keep = self.KEEPS[2]
        assert count(self.wrapped(False, keep)) == (forward, plain + 3 * (block - project - products))


def _as_region(block: nn.Module, forward: Callable[..., Any], chain: bool, keep: tuple[str, ...]) -> Any:
    return lambda *args, **kwargs: run_region(forward, args, kwargs, modules=[block], chain=chain, keep=keep)
