"""Attention written out, in tiles of queries: many ways to write it, one result, no scores whole."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memscale.tiling.scores import LazyScores, TiledAttention
from support.tiles import Tensors, assert_close

BATCH, HEADS, LENGTH, KEYS, WIDTH, ROWS = 2, 3, 13, 17, 4, 5
# Adding to scores is causal attention; keys are more than queries, as with a prefix.
CAUSAL = torch.ones(LENGTH, KEYS).tril(KEYS - LENGTH).bool()
MASK = torch.zeros(LENGTH, KEYS).masked_fill(~CAUSAL, -math.inf)
PADDING = torch.zeros(BATCH, 1, 1, KEYS).index_fill(-1, torch.tensor([0]), -1e9)

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = scores + PADDING
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def small_gpt(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL.view(1, 1, LENGTH, KEYS) == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    return att @ v


def with_where(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = torch.matmul(q, k.transpose(-1, -2))
    weights = weights / torch.full([], 2.0, dtype=weights.dtype, device=weights.device)
    weights = torch.where(
        CAUSAL, weights, torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
    )
    return weights.softmax(-1).type(v.dtype) @ v


def with_position_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = scores + bias
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def with_bias_first(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (bias[:, :, :1] + MASK + q @ k.mT).softmax(dim=-1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.tanh(q @ k.mT / 2.0) * 2.0
    return (scores + MASK).softmax(-1) @ v


def in_batches(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.5, dim=-1), v)


WAYS: dict[str, Attention] = {
    way.__name__: way
    for way in (eager, small_gpt, with_where, with_position_bias, with_bias_first, capped, in_batches)
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def attention(request: pytest.FixtureRequest) -> Attention:
    return request.param


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(LENGTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH)]
    made = [torch.randn(BATCH, HEADS, *shape, dtype=dtype) for shape in shapes]
    return [each.requires_grad_() for each in (*made, torch.randn(1, HEADS, LENGTH, KEYS, dtype=dtype))]


def run(attention: Attention, tensors: list[Tensor], tiled: bool) -> list[tuple[str, Tensor]]:
    if tiled:
        with TiledAttention(ROWS):
            out = attention(*tensors)
    else:
        out = attention(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    found = torch.autograd.grad((out * weights).sum(), tensors, allow_unused=True)
    return [
        ("out", out.detach()),
        *((str(index), each) for index, each in enumerate(found) if each is not None),
    ]


def test_value_and_gradients_are_the_plain_ones(attention: Attention) -> None:
    tensors = inputs()
    assert_close(run(attention, tensors, True), run(attention, tensors, False))


def test_scores_never_exist_whole(attention: Attention) -> None:
    tensors = inputs()
    queries = set()
    for tiled in (False, True):
        with Tensors() as made:
            run(attention, tensors, tiled)
        shapes = [
            shape for shape in made.shapes if len(shape) > 2 and shape[-1] == KEYS and shape[-2] != WIDTH
        ]
        own = {(1, HEADS, LENGTH, KEYS)} | {(1, 1, LENGTH, KEYS), (1, HEADS, 1, KEYS)}  # masks and biases
        queries = {shape[-2] for shape in shapes if shape not in own}
        assert (max(queries) == LENGTH) is not tiled
    assert queries <= {ROWS, LENGTH % ROWS, 1}


def test_dropout_draws_the_same_masks_in_backward() -> None:
    def dropping(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.dropout((q @ k.mT + MASK).softmax(-1), 0.5) @ v

    def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        tiles = [slice(start, start + ROWS) for start in range(0, LENGTH, ROWS)]
        parts = [F.dropout((q[..., t, :] @ k.mT + MASK[t]).softmax(-1), 0.5) @ v for t in tiles]
        return torch.cat(parts, dim=-2)

    tensors = inputs()
    torch.manual_seed(5)
    wanted = run(by_hand, tensors, False)
    torch.manual_seed(5)
    assert_close(run(dropping, tensors, True), wanted)


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda scores: scores.tolist(),
    "mean": lambda scores: scores.mean().item(),
    "cut": lambda scores: scores[..., :3].tolist(),
    "turned": lambda scores: scores.transpose(1, 2).tolist(),
    "softmax over queries": lambda scores: scores.softmax(-2).tolist(),
    "product with a matrix": lambda scores: (scores @ torch.ones(KEYS, 2)).tolist(),
    "in place": lambda scores: scores.mul_(2).add_(1).tolist(),
    "looks": lambda scores: (scores.shape, scores.dtype, scores.requires_grad, scores.size(-1)),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_whoever_asks_for_scores_gets_them(ask: Callable[[Tensor], Any]) -> None:
    q, k, _, bias = inputs()
    plain = ask(q @ k.mT + bias)
    with TiledAttention(ROWS):
        scores = q @ k.mT + bias
        assert isinstance(scores, LazyScores)
        assert ask(scores) == plain


def test_gradients_of_scores_that_were_asked_for() -> None:
    tensors = inputs()
    way = lambda q, k, v, bias: (q @ k.mT + bias).square().sum(-1)  # noqa: E731
    assert_close(run(way, tensors, True), run(way, tensors, False))


@pytest.mark.parametrize(
    "product",
    [
        lambda q, k: q[..., :ROWS, :] @ k.mT,  # one tile
        lambda q, k: q @ torch.ones(WIDTH, KEYS),  # a matrix, not a batch
        lambda q, k: q.detach() @ k.mT.detach(),  # no gradient
        lambda q, k: q @ k.mT[..., :2],  # smaller than its factors
    ],
    ids=["few queries", "a weight", "no gradient", "small"],
)
def test_other_products_are_left_alone(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    q, k, _, _ = inputs()
    with TiledAttention(ROWS):
        assert type(product(q, k)) is Tensor


def test_under_autocast_types_are_those_of_autocast() -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(small_gpt, tensors, False)
        with TiledAttention(ROWS):
            assert (tensors[0] @ tensors[1].mT).dtype is torch.bfloat16
        ours = run(small_gpt, tensors, True)
    assert_close(ours, plain, tolerance=2e-2)


def test_after_backward_nothing_is_held_though_the_result_is_there() -> None:
    q, k, v, bias = inputs()
    inner = q * 1
    gone = weakref.ref(inner.untyped_storage())
    with TiledAttention(ROWS):
        loss = ((inner @ k.mT + bias).softmax(-1) @ v).sum()
    del inner
    assert gone() is not None
    loss.backward()
    gc.collect()
    assert gone() is None
