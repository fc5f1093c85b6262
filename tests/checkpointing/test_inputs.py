"""Arguments and results of every kind, and inputs that are changed, moved or shared."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from memscale.checkpointing import run_region
from memscale.errors import RecomputeError
from support.regions import LiveBytes, Mlp, assert_same, in_region

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    """A dataclass that pytree knows nothing of."""

    ids: torch.Tensor
    nested: dict[str, Any]
    name: str = "batch"


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    extra: tuple[torch.Tensor | None, str]


def everything(
    x: torch.Tensor, pair: Pair, flag: bool, *rest: Any, batch: Batch, table: dict[str, Any], scale: float
) -> Output:
    assert flag is True
    assert batch.name == "batch"
    assert rest == (None, "text")
    total = torch.exp(x * scale) + torch.sin(pair.left) * torch.cos(pair.right)
    total = total * torch.exp(batch.ids) + torch.tanh(batch.nested["deep"][0]) + torch.exp(table["list"][1])
    return Output(total, (None, "done"))


def arguments() -> tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]:
    leaves = [(X + k).requires_grad_() for k in range(6)]
    made = [leaf * 1.5 for leaf in leaves]
    args = (made[0], Pair(made[1], made[2]), True, None, "text")
    kwargs = {"batch": Batch(made[3], {"deep": [made[4]]}), "table": {"list": [1, made[5]]}, "scale": 0.5}
    return leaves, args, kwargs


def test_containers_keywords_and_other_objects() -> None:
    seen = []
    for run in (lambda f, a, k: run_region(f, a, k), lambda f, a, k: f(*a, **k)):
        leaves, args, kwargs = arguments()
        output = run(everything, args, kwargs)
        del args, kwargs
        assert isinstance(output, Output)
        assert output.extra == (None, "done")
        output.value.sum().backward()
        seen.append([leaf.grad for leaf in leaves])
    assert_same(*seen)


def test_tensors_in_containers_keep_no_history_alive() -> None:
    with LiveBytes() as live:
        _, args, kwargs = arguments()
        output = run_region(everything, args, kwargs)
        before = live.now
        del args, kwargs
        assert live.now == before  # the region holds them
        del output
        # Only the leaves are left.
    assert live.now < before


def test_what_is_before_an_input_is_not_kept_alive_by_it() -> None:
    before = torch.exp(X.clone().requires_grad_())
    storage = weakref.ref(before.untyped_storage())
    weight = torch.ones(8, requires_grad=True)
    hidden = torch.sin(before)  # saves `before`
    out = run_region(lambda h, w: torch.exp(h.detach() * w), (hidden, weight), {})
    del before, hidden
    assert storage() is None
    out.sum().backward()


def test_hugging_face_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = Mlp()

    def function(given: Any) -> Any:
        hidden = model(given.last_hidden_state)
        return outputs.BaseModelOutput(
            last_hidden_state=hidden, hidden_states=(given.last_hidden_state, hidden)
        )

    x = X.clone().requires_grad_()
    out = run_region(function, (outputs.BaseModelOutput(last_hidden_state=x * 2),), {}, modules=[model])
    assert isinstance(out, outputs.BaseModelOutput)
    (out.last_hidden_state.sum() + out.hidden_states[1].sum()).backward()
    assert x.grad is not None
    assert model.calls == 2


def test_none_and_numbers_as_outputs() -> None:
    x = X.clone().requires_grad_()
    first, second, third = run_region(lambda x: (None, torch.exp(x), 3), (x,), {})
    assert (first, third) == (None, 3)
    second.sum().backward()
    assert torch.equal(x.grad, torch.exp(x))


def test_one_tensor_given_twice_comes_twice_as_one() -> None:
    seen = []

    def function(query: torch.Tensor, key: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        seen.append((query is key, query is other))
        return torch.exp(query) * torch.sin(key) * torch.cos(other)

    x, y = (X.clone().requires_grad_() for _ in range(2))
    h = x * 2
    run_region(function, (h, h, y * 2), {}).sum().backward()
    assert seen == [(True, False), (True, False)]


def test_attention_of_torch_itself_takes_the_same_path_twice() -> None:
    seen = []
    for wrap in (in_region, lambda module: module):
        torch.manual_seed(0)
        attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        x = X[None].clone().requires_grad_()
        h = x * 2
        out, weights = wrap(attention)(h, h, h)
        (out.sum() + weights.pow(2).sum()).backward()
        seen.append([x.grad, *(p.grad for p in attention.parameters())])
    assert_same(*seen)


def test_parameters_and_constants_are_the_same_objects() -> None:
    weight = nn.Parameter(torch.ones(8))
    mask = torch.ones(8)
    seen = []

    def function(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        seen.append(w is weight and m is mask)
        return torch.exp(x * w * m)

    run_region(function, (X, weight, mask), {}).sum().backward()
    assert seen == [True, True]
    assert weight.grad is not None


class TestChangedInPlace:
    def test_between_forward_and_backward(self) -> None:
        x = X.clone().requires_grad_()
        h = x * 2
        out = in_region(Mlp())(h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RecomputeError, match=r"Input tensor 0 .*changed in place.*\bclone"):
            out.sum().backward()

    def test_a_constant(self) -> None:
        mask = torch.ones(8)
        x = X.clone().requires_grad_()
        out = run_region(lambda x, mask: torch.exp(x * mask), (x,), {"mask": mask})
        mask.zero_()
        with pytest.raises(RecomputeError, match="Input tensor 1"):
            out.sum().backward()

    def test_through_a_view(self) -> None:
        x = X.clone().requires_grad_()
        h = x * 2
        out = in_region(Mlp())(h)
        with torch.no_grad():
            h[0].zero_()
        with pytest.raises(RecomputeError):
            out.sum().backward()

    def test_by_the_function_itself(self) -> None:
        model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
        x = X.clone().requires_grad_()
        with pytest.raises(RecomputeError, match="inplace=False"):
            in_region(model)(x * 2)

    def test_by_the_function_where_nothing_is_saved(self) -> None:
        x = X.clone().requires_grad_()
        run_region(lambda x: x.add_(1), (x * 2,), {}).sum().backward()
        assert torch.equal(x.grad, torch.full_like(X, 2))

    def test_inside_the_region_is_none_of_our_business(self) -> None:
        seen = []
        for wrap in (in_region, lambda module: module):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(inplace=True)
            )
            wrap(model)(X).pow(2).sum().backward()
            seen.append([p.grad for p in model.parameters()])
        assert_same(*seen)


class TestSurroundingHooks:
    """To what surrounds a region, its inputs are its saved tensors."""

    def test_they_get_the_inputs_and_nothing_else(self) -> None:
        packed: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor.detach().clone()

        x = X.clone().requires_grad_()
        model = Mlp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = in_region(model)(x * 2)
        assert packed[-1:] == [X.shape]
        assert len(packed) <= 2  # the input, and what the multiplication saves of its own
        out.sum().backward()
        assert model.calls == 2
        assert x.grad is not None

    def test_inputs_go_to_the_host_with_save_on_cpu(self) -> None:
        seen = []
        for around in (save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)):
            torch.manual_seed(0)
            model = Mlp()
            x = X.clone().requires_grad_()
            with around():
                out = in_region(model)(x * 2)
            out.sum().backward()
            seen.append([x.grad, *(p.grad for p in model.parameters())])
        assert_same(*seen)


def test_an_inference_tensor_as_input() -> None:
    with torch.inference_mode():
        features = X * 2
    weight = torch.ones(8, requires_grad=True)
    out = run_region(lambda f, w: torch.exp(w).expand(4, 8) + f, (features, weight), {})
    out.sum().backward()
    assert weight.grad is not None
