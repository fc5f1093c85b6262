"""Lazy logits: what keeps them lazy, who gets the true ones, and that every loss has its plain value and gradients."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from memscale.errors import RecomputeError
from memscale.tiling import Head, LazyLogits, lazy_logits
from support.tiles import Tensors, assert_close

# A tile of logits is larger than the weight and than all hidden states, and a fifth of all logits.
BATCH, LENGTH, WIDTH, WORDS, ROWS = 3, 11, 4, 53, 7
TOKENS = BATCH * LENGTH
TARGET = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
TARGET[0, :3] = -100
CLASS_WEIGHT = torch.linspace(0.1, 2, WORDS)

Loss = Callable[[Tensor], Tensor]


class Case:
    """A head and its input, called plainly or lazily."""

    def __init__(
        self, *, bias: bool = True, dtype: torch.dtype = torch.float32, rows: int = ROWS, head: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype).requires_grad_(head)
        self.hidden = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
        self.rows = rows

    def plain(self) -> Tensor:
        return self.head(self.hidden)

    def lazy(self, dtype: torch.dtype | None = None) -> LazyLogits:
        weight, bias = self.head.weight, self.head.bias
        return lazy_logits(self.hidden, Head(weight, bias, dtype or weight.dtype, self.rows))

    def after(self, logits: Tensor, loss: Loss, factor: float = 1.0) -> list[tuple[str, Tensor]]:
        """The loss and all gradients."""
        self.head.zero_grad()
        self.hidden.grad = None
        value = loss(logits)
        (value * factor).backward()
        found = [(name, p.grad) for name, p in self.head.named_parameters() if p.grad is not None]
        return [("loss", value.detach()), ("hidden", self.hidden.grad), *found]


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, logits.size(-1))


def cross_entropy(**options: Any) -> Loss:
    return lambda logits: F.cross_entropy(flat(logits.float()), TARGET.view(-1), **options)


LOSSES: dict[str, Loss] = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "none": lambda logits: (cross_entropy(reduction="none")(logits) * torch.linspace(0, 1, TOKENS)).sum(),
    "none, shaped": lambda logits: F.cross_entropy(logits.mT, TARGET, reduction="none").amax(-1).sum(),
    "sum over a count": lambda logits: cross_entropy(reduction="sum")(logits) / torch.tensor(17),
    "other ignored index": lambda logits: F.cross_entropy(
        flat(logits), TARGET.clamp(min=0).view(-1), ignore_index=0
    ),
    "label smoothing": cross_entropy(label_smoothing=0.1),
    "class weights": cross_entropy(weight=CLASS_WEIGHT),
    "all options": cross_entropy(weight=CLASS_WEIGHT, label_smoothing=0.3),
    "all options, none": lambda logits: cross_entropy(
        weight=CLASS_WEIGHT, label_smoothing=0.3, reduction="none"
    )(logits).mean(),
    "module": lambda logits: nn.CrossEntropyLoss(CLASS_WEIGHT)(logits.flatten(0, -2), TARGET.flatten()),
    "vocabulary second": lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGET),
    "permuted": lambda logits: F.cross_entropy(logits.permute(1, 2, 0), TARGET.t()),
    "shifted": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, WORDS), TARGET[..., 1:].contiguous().view(-1)
    ),
    "shifted, short": lambda logits: F.cross_entropy(flat(logits[:, :-1].clone()), TARGET[:, 1:].reshape(-1)),
    "chosen tokens": lambda logits: F.cross_entropy(logits[TARGET != -100], TARGET[TARGET != -100]),
    "one sample": lambda logits: F.cross_entropy(logits[1], TARGET[1]),
    "log-softmax": lambda logits: F.nll_loss(F.log_softmax(flat(logits), dim=-1), TARGET.view(-1)),
    "log-softmax, weighted": lambda logits: F.nll_loss(
        flat(logits).log_softmax(1), TARGET.view(-1), weight=CLASS_WEIGHT, reduction="sum"
    ),
    "capped": lambda logits: cross_entropy()(3.0 * torch.tanh(logits / 3.0)),
    "constant bias": lambda logits: cross_entropy()(logits + CLASS_WEIGHT[None]),
    "constant bias, first": lambda logits: cross_entropy()(CLASS_WEIGHT[None] + logits),
    "scaled": lambda logits: cross_entropy()(logits * torch.tensor(0.5)),
    "z-loss": lambda logits: cross_entropy()(logits) + 1e-2 * logits.logsumexp(-1).pow(2).mean(),
    "smoothed by hand": lambda logits: (
        (-F.log_softmax(logits, dim=-1)).gather(-1, TARGET.clamp(min=0)[..., None]).mean()
        + (-F.log_softmax(logits, dim=-1)).sum(-1, keepdim=True, dtype=torch.float32).mean()
    ),
    "two losses": lambda logits: cross_entropy()(logits) + 2 * cross_entropy(label_smoothing=0.5)(logits),
}


@pytest.fixture(params=LOSSES.values(), ids=LOSSES.keys())
def loss(request: pytest.FixtureRequest) -> Loss:
    return request.param


@pytest.mark.matrix(4)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_value_and_gradients_are_the_plain_ones(loss: Loss, bias: bool) -> None:
    case = Case(bias=bias)
    plain = case.after(case.plain(), loss, 3.0)
    logits = case.lazy()
    ours = case.after(logits, loss, 3.0)
    assert_close(ours, plain)
    assert not logits.is_whole


@pytest.mark.parametrize("rows", [1, TOKENS - 1, TOKENS, 1000])
def test_a_tile_has_any_number_of_rows(rows: int) -> None:
    case = Case(rows=rows)
    plain = case.after(case.plain(), LOSSES["all options"])
    assert_close(case.after(case.lazy(), LOSSES["all options"]), plain)


@pytest.mark.parametrize("name", ["vocabulary second", "z-loss", "capped", "log-softmax", "one sample"])
def test_in_double_precision_the_difference_is_rounding(name: str) -> None:
    loss = {
        "z-loss": lambda logits: logits.logsumexp(-1).pow(2).mean(),
        "capped": lambda logits: F.cross_entropy(flat(3.0 * torch.tanh(logits / 3.0)), TARGET.view(-1)),
    }.get(name, LOSSES[name])
    case = Case(dtype=torch.float64)
    plain = case.after(case.plain(), loss)
    assert_close(case.after(case.lazy(), loss), plain, tolerance=1e-14)


@pytest.mark.matrix(4)
def test_logits_never_exist_whole(loss: Loss) -> None:
    case = Case()
    with Tensors() as plain:
        case.after(case.plain(), loss)
    with Tensors() as ours:
        case.after(case.lazy(), loss)
    assert (
        plain.largest() >= (BATCH * (LENGTH - 1) - 3 if loss is not LOSSES["one sample"] else LENGTH) * WORDS
    )
    assert ours.largest() == ROWS * WORDS


def test_a_mean_costs_no_matrix_product_more_than_the_plain_one() -> None:
    case = Case()
    flops = []
    for logits in (case.plain, case.lazy):
        with FlopCounterMode(display=False) as counter:
            case.after(logits(), LOSSES["mean"])
        flops.append(counter.get_total_flops())
    # The counter knows no `addmm_`, by which ours adds to the weight's gradient: all tiles but the first.
    products, added = 3 * 2 * TOKENS * WIDTH * WORDS, 2 * (TOKENS - ROWS) * WIDTH * WORDS
    assert flops == [products, products - added]


# Gradients ---------------------------------------------------------------------------------------


def test_gradients_accumulate() -> None:
    case = Case()
    grads = []
    for logits in (case.plain, case.lazy):
        case.head.zero_grad()
        for name in ("mean", "sum", "mean"):
            (LOSSES[name](logits()) / 3).backward()
        grads.append([("weight", case.head.weight.grad.clone()), ("bias", case.head.bias.grad.clone())])
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", ["mean", "none"])
def test_a_graph_that_is_kept_can_be_used_again(name: str) -> None:
    case = Case()
    value = LOSSES[name](case.lazy())
    first = torch.autograd.grad(value * 2, [case.hidden, case.head.weight], retain_graph=True)
    again = torch.autograd.grad(value * 2, [case.hidden, case.head.weight])
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    case = Case(head=False)
    plain = case.after(case.plain(), LOSSES["mean"])
    with Tensors() as made:
        ours = case.after(case.lazy(), LOSSES["mean"])
    assert_close(ours, plain)
    assert (WORDS, WIDTH) not in made.shapes
    assert (WIDTH, WORDS) not in made.shapes


def test_hidden_states_without_a_gradient() -> None:
    case = Case()
    case.hidden.requires_grad_(False)
    value = LOSSES["mean"](case.plain())
    plain = torch.autograd.grad(value, list(case.head.parameters()))
    ours = torch.autograd.grad(LOSSES["mean"](case.lazy()), list(case.head.parameters()))
    assert_close([("", each) for each in ours], [("", each) for each in plain])


def test_without_gradients_nothing_is_kept_for_them() -> None:
    case = Case()
    logits = case.lazy()
    with torch.no_grad():
        value = LOSSES["mean"](logits)
    assert value.grad_fn is None
    assert torch.allclose(value, LOSSES["mean"](case.plain()))


def test_a_mean_over_ignored_tokens_alone_is_nan_with_gradients_of_zero() -> None:
    case = Case()
    nothing = torch.full((TOKENS,), -100)
    loss = lambda logits: F.cross_entropy(flat(logits), nothing)  # noqa: E731
    plain, ours = case.after(case.plain(), loss), case.after(case.lazy(), loss)
    for (name, one), (_, other) in zip(ours, plain, strict=True):
        assert torch.equal(one, other) or (name == "loss" and one.isnan() and other.isnan())


def test_in_float16_gradients_wait_for_the_scale() -> None:
    """Of a mean over tokens, unscaled, half of the gradients are below what float16 can say."""
    case = Case()
    factor = 2.0**16
    with torch.autocast("cpu", torch.float16):
        logits = case.plain()
    plain = case.after(logits, LOSSES["mean"], factor)
    ours = case.after(case.lazy(torch.float16), LOSSES["mean"], factor)
    assert_close(ours, plain, tolerance=2e-3)
    unscaled = case.after(case.lazy(torch.float16), lambda logits: LOSSES["mean"](logits) * 1e-6, 1.0)
    assert unscaled[1][1].abs().max() < 1e-6  # the same path: no gradient was made before its factor came


def test_under_autocast_logits_are_of_its_type_and_the_loss_is_not() -> None:
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        plain = case.after(case.plain(), LOSSES["mean"])
        logits = case.lazy(torch.bfloat16)
        assert logits.dtype is torch.bfloat16
        assert logits.float().dtype is torch.float32
        ours = case.after(logits, LOSSES["mean"])
    assert ours[0][1].dtype is torch.float32
    assert_close(ours, plain, tolerance=5e-3)
    assert_close(ours[:1], plain[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_tiles_are_not_rounded_to_16_bits(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, rows=1)
    exact = Case(dtype=torch.float64)
    with torch.no_grad():
        exact.head.weight.copy_(case.head.weight)
        exact.head.bias.copy_(case.head.bias)
        exact.hidden.copy_(case.hidden)
    wanted = exact.after(exact.plain(), LOSSES["sum"])
    plain = case.after(case.plain(), LOSSES["sum"])
    ours = case.after(case.lazy(), LOSSES["sum"])
    for index, name in ((2, "weight"), (3, "bias")):
        truth = wanted[index][1]
        ours_off = (ours[index][1].double() - truth).norm()
        plain_off = (plain[index][1].double() - truth).norm()
        assert ours_off <= 1.5 * plain_off, name


# Who asks gets them ------------------------------------------------------------------------------

CHANCES = torch.linspace(0, 3, TOKENS * WORDS).sin().reshape(TOKENS, WORDS).softmax(-1)
ASKED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda logits: logits[0, 0, 0].item(),
    "print": lambda logits: str(logits.detach()),
    "numpy": lambda logits: logits.detach().numpy().tolist(),
    "array": lambda logits: np.asarray(logits.detach()).tolist(),
    "list": lambda logits: logits.tolist(),
    "a word": lambda logits: logits[..., 3].tolist(),
    "compare": lambda logits: bool((logits == logits).all()),
    "top": lambda logits: logits.topk(3, dim=-1).indices.tolist(),
    "max": lambda logits: logits.max(dim=-1).values.tolist(),
    "iterate": lambda logits: [each.tolist() for each in logits],
    "together": lambda logits: torch.cat([torch.ones(1, LENGTH, WORDS), logits]).tolist(),
    "saved": lambda logits: _saved(logits).tolist(),
    "probabilities": lambda logits: F.cross_entropy(flat(logits), CHANCES, label_smoothing=0.1).item(),
    "mean": lambda logits: logits.mean().item(),
    "copied": lambda logits: copy.deepcopy(logits.detach()).tolist(),
    "flat": lambda logits: flat(logits.float())[2, 4].item(),
    "turned": lambda logits: logits.permute(2, 0, 1)[5].tolist(),
    "turned, by name": lambda logits: logits.permute(dims=(2, 0, 1)).tolist(),
    "cut": lambda logits: logits[:, 1:].half().tolist(),
    "strides": lambda logits: (logits.stride(), logits.is_contiguous(), logits.numel(), len(logits)),
}


def _saved(logits: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_whoever_asks_for_logits_gets_them(ask: Callable[[Tensor], Any]) -> None:
    case = Case()
    assert ask(case.lazy()) == ask(case.plain())


def test_the_best_word_of_each_token_needs_no_whole_logits() -> None:
    case = Case()
    logits = case.lazy()
    assert torch.equal(logits.argmax(-1), case.plain().argmax(-1))
    assert torch.equal(logits.argmax(dim=-1, keepdim=True), case.plain().argmax(dim=-1, keepdim=True))
    assert not logits.is_whole


def test_true_logits_have_their_history_even_if_first_asked_for_without() -> None:
    case = Case()
    logits = case.lazy()
    with torch.no_grad():
        logits.max()
    assert logits.is_whole
    assert_close(case.after(logits, LOSSES["mean"]), case.after(case.plain(), LOSSES["mean"]))


def test_a_change_in_place_is_seen_by_views_and_not_by_copies() -> None:
    values = []
    for make in (Case().plain, Case().lazy):
        logits = make()
        view, copied, half = logits.view(-1, WORDS), logits.clone(), logits.half()
        logits[0, 0] = 5.0
        view.mul_(2)
        values.append([each.float().sum().item() for each in (logits, view, copied, half)])
        values[-1].append(F.cross_entropy(view, TARGET.view(-1)).item())
    assert values[0] == values[1]


def test_hooks_and_retained_gradients_of_logits_work() -> None:
    grads = []
    for make in (Case().plain, Case().lazy):
        logits = make()
        logits.retain_grad()
        seen: list[Tensor] = []
        logits.register_hook(seen.append)
        LOSSES["mean"](logits).backward()
        grads.append([logits.grad, seen[0]])
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


class Square(torch.autograd.Function):
    """A function for logits that is not told of anything."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits * 1)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * gradient


@pytest.mark.parametrize(
    "way", [lambda x: x, flat, lambda x: (x / 2).mT], ids=["as it is", "flat", "half, turned"]
)
def test_gradients_come_back_from_functions_below_python(way: Callable[[Tensor], Tensor]) -> None:
    case = Case()
    loss = lambda logits: Square.apply(way(logits))  # noqa: E731
    assert_close(case.after(case.lazy(), loss), case.after(case.plain(), loss))


def test_logits_of_weights_that_have_changed_are_refused() -> None:
    case = Case()
    logits, flat_logits = case.lazy(), flat(case.lazy())
    with torch.no_grad():
        case.head.weight.add_(1)
    for asked in (logits.tolist, lambda: F.cross_entropy(flat_logits, TARGET.view(-1))):
        with pytest.raises(RecomputeError, match=r"before optimizer\.step"):
            asked()


def test_hidden_states_changed_in_place_are_refused() -> None:
    case = Case()
    hidden = case.hidden * 1
    logits = lazy_logits(hidden, Head(case.head.weight, None, torch.float32, ROWS))
    hidden.add_(1)
    with pytest.raises(RecomputeError, match="changed in place"):
        LOSSES["mean"](logits)


@pytest.mark.parametrize(
    ("target", "error"),
    [(TARGET.view(-1)[:-1], ValueError), (torch.full((TOKENS,), WORDS), IndexError)],
    ids=["another length", "no such word"],
)
def test_errors_are_those_of_torch(target: Tensor, error: type[Exception]) -> None:
    case = Case()
    messages = []
    for logits in (case.plain(), case.lazy()):
        with pytest.raises(error) as raised:
            F.cross_entropy(flat(logits), target)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_old_names_of_a_reduction_are_taken() -> None:
    case = Case()
    loss = lambda logits: F.cross_entropy(flat(logits), TARGET.view(-1), size_average=False)  # noqa: E731
    with pytest.warns(UserWarning, match="size_average"):
        ours = case.after(case.lazy(), loss)
    assert_close(ours, case.after(case.plain(), LOSSES["sum"]))


def test_nothing_lives_longer_than_the_loss() -> None:
    case = Case()
    logits = case.lazy()
    gone = weakref.ref(logits)
    value = LOSSES["mean"](logits)
    del logits
    assert gone() is None
    value.backward()
