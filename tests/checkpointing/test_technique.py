"""Checkpointing on a block: what goes in and out of it, when it is in use, and when it must not be."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memscale.checkpointing.technique import is_cache
from memscale.errors import WrapError
from memscale.execution_plan import Checkpointing, LayerPlan, Plan
from memscale.executor import Executor
from memscale.executor.registry import LAYER_TECHNIQUES
from memscale.techniques.base import LayerTechnique

X = torch.linspace(-1, 1, 24).reshape(3, 8)


def plan_of(*names: str, **settings: Any) -> Plan:
    return Plan(
        tuple(
            LayerPlan(
                name, (name,), ("checkpointing",), "test", "test", checkpointing=Checkpointing(**settings)
            )
            for name in names
        )
    )


def slice_plan(container: str, *slices: tuple[int, int], **settings: Any) -> Plan:
    prefix = f"{container}." if container else ""
    return Plan(
        tuple(
            LayerPlan(
                f"{container}[{start}:{stop}]",
                tuple(f"{prefix}{index}" for index in range(start, stop)),
                ("checkpointing",),
                "test",
                "test",
                checkpointing=Checkpointing(**settings),
            )
            for start, stop in slices
        )
    )


def attach(model: nn.Module, plan: Plan) -> Executor:
    executor = Executor(model, plan)
    executor.attach()
    return executor


class Layer(nn.Module):
    """A layer with dropout that counts how often it runs."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(2 * width, width)
        self._runs = SimpleNamespace(count=0)  # an object: a number would be put back for a recomputation

    @property
    def runs(self) -> int:
        return self._runs.count

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        self._runs.count += 1
        y = self.down(self.dropout(torch.tanh(self.up(x)))) * scale
        return x + y if shift is None else x + y + shift


class Stack(nn.Module):
    def __init__(self, depth: int = 2, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, x: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


def gradients(model: nn.Module, call: Callable[[nn.Module], Tensor], *inputs: Tensor) -> list[Tensor | None]:
    """The loss, and its gradients for parameters and inputs, from one seed."""
    for tensor in (*model.parameters(), *inputs):
        tensor.grad = None
    torch.manual_seed(11)
    loss = call(model)
    loss.backward()
    tensors = [loss.detach(), *(p.grad for p in model.parameters()), *(x.grad for x in inputs)]
    return [None if tensor is None else tensor.clone() for tensor in tensors]


def assert_equal(ours: list[Tensor | None], plain: list[Tensor | None]) -> None:
    for one, other in zip(ours, plain, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


def assert_unchanged_by_checkpointing(
    model: nn.Module, names: tuple[str, ...], call: Callable[[nn.Module], Tensor], *inputs: Tensor
) -> None:
    plain = gradients(model, call, *inputs)
    executor = attach(model, plan_of(*names))
    ours = gradients(model, call, *inputs)
    executor.detach()
    assert_equal(ours, plain)
    assert_equal(gradients(model, call, *inputs), plain)


# What goes in and out ----------------------------------------------------------------------------


def test_keyword_and_plain_arguments(regions) -> None:
    shift = torch.ones(8, requires_grad=True)
    model = Stack()
    assert_unchanged_by_checkpointing(
        model, ("layers.0", "layers.1"), lambda m: m(X, scale=0.5, shift=shift).pow(2).sum(), shift
    )
    assert len(regions) == 2


@dataclass
class Pair:
    first: Tensor
    label: str


class Nested(Layer):
    """Takes and returns containers in containers, with things in them that are no tensors."""

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        hidden = super().forward(x["pair"].first, scale=x["numbers"][1][0])
        return {
            "pair": Pair(hidden, x["pair"].label),
            "numbers": (None, [0.5, "text"]),
            "extra": [hidden * 2, (hidden.detach(), 3)],
        }


def test_nested_containers_and_several_outputs(regions) -> None:
    def call(model: nn.Module) -> Tensor:
        out = model({"pair": Pair(X, "a"), "numbers": (None, [2.0, "text"])})
        assert out["pair"].label == "a"
        assert out["extra"][1][1] == 3
        return out["pair"].first.sum() + out["extra"][0].pow(2).sum()

    assert_unchanged_by_checkpointing(Stack(layer=Nested), ("layers.0", "layers.1"), call)
    assert len(regions) == 2


def test_frozen_layers_before_and_after_a_trained_one(regions) -> None:
    model = Stack(3)
    model.layers[0].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    names = ("layers.0", "layers.1", "layers.2")
    assert_unchanged_by_checkpointing(model, names, lambda m: m(X).pow(2).sum())
    assert len(regions) == 2, "nothing before the trained layer needs a gradient"


def test_a_layer_called_twice_with_different_inputs(regions) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x), 0.5) * self.layer(x)

    assert_unchanged_by_checkpointing(Twice(), ("layer",), lambda m: m(X).pow(2).sum())
    assert len(regions) == 3


def test_a_block_in_a_block(regions) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()
            self.last = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x))

    model = Stack(layer=Outer)
    names = ("layers.0", "layers.0.inner", "layers.1")
    assert_unchanged_by_checkpointing(model, names, lambda m: m(X).pow(2).sum())


def test_double_backward() -> None:
    def call(model: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    assert_unchanged_by_checkpointing(Stack(), ("layers.0", "layers.1"), call)


def test_backward_after_detach_and_after_another_plan(regions) -> None:
    model = Stack()
    plain = gradients(model, lambda m: m(X).pow(2).sum())

    executor = attach(model, plan_of("layers.0", "layers.1"))

    def call(model: nn.Module) -> Tensor:
        loss = model(X).pow(2).sum()
        executor.replan(plan_of("layers.0"))
        executor.detach()
        return loss

    assert_equal(gradients(model, call), plain)
    assert len(regions) == 2


def test_hooks_of_a_block_run_once_and_those_inside_with_each_run() -> None:
    model = Stack(1)
    calls: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: calls.append("block"))
    model.layers[0].up.register_forward_hook(lambda *_: calls.append("inside"))
    attach(model, plan_of("layers.0"))
    model(X).sum().backward()
    assert calls == ["inside", "block", "inside"]


# When it is in use -------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_make_no_regions(regions, context: Any, training: bool) -> None:
    model = Stack().train(training)
    attach(model, plan_of("layers.0", "layers.1"))
    with context():
        model(X)
    assert not regions
    assert [layer.runs for layer in model.layers] == [1, 1]


def test_a_model_that_trains_in_eval_mode_is_checkpointed(regions) -> None:
    model = Stack().eval()
    attach(model, plan_of("layers.0", "layers.1"))
    model(X).sum().backward()
    assert len(regions) == 2
    assert [layer.runs for layer in model.layers] == [2, 2]


def test_a_part_kept_in_eval_mode_is_checkpointed_while_the_model_trains(regions) -> None:
    model = Stack()
    attach(model, plan_of("layers.0", "layers.1"))
    model.layers[0].eval()
    model(X).sum().backward()
    assert len(regions) == 2
    assert [layer.runs for layer in model.layers] == [2, 2]


def test_the_signature_of_a_wrapped_forward_is_the_modules_own() -> None:
    model = Stack()
    before = inspect.signature(model.layers[0].forward)
    attach(model, plan_of("layers.0"))
    assert inspect.signature(model.layers[0].forward) == before
    assert inspect.unwrap(model.layers[0].forward) == Layer.forward.__get__(model.layers[0])
    assert model.layers[0].forward.__name__ == "forward"


def test_a_forward_that_was_there_before_is_run_inside(regions) -> None:
    model = Stack()
    own = model.layers[0].forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * own(x)

    model.layers[0].forward = doubled
    assert_unchanged_by_checkpointing(model, ("layers.0",), lambda m: m(X).pow(2).sum())
    assert len(regions) == 1
    assert model.layers[0].forward is doubled


def test_a_module_changed_after_attaching_is_followed(regions) -> None:
    model = Stack()
    attach(model, plan_of("layers.0", "layers.1"))
    model.double()
    model.layers[0].up = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).double()
    reference = copy.deepcopy(model)
    reference._memscale_executor.detach()

    def call(model: nn.Module) -> Tensor:
        return model(X.double()).pow(2).sum()

    assert_equal(gradients(model, call), gradients(reference, call))
    assert torch.equal(model.layers[0].up[1].running_mean, reference.layers[0].up[1].running_mean)
    assert int(model.layers[0].up[1].num_batches_tracked) == 1
    assert len(regions) == 2


# Where it must not be ----------------------------------------------------------------------------


class Cache:
    """As generation uses them: a layer writes into it, and reads what was written."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return torch.cat(self.seen)


class CachingLayer(Layer):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        return super().forward(x if cache is None else cache.update(x))


def test_a_layer_with_a_cache_is_not_run_twice(regions) -> None:
    model = Stack(1, CachingLayer)
    attach(model, plan_of("layers.0"))
    cache = Cache()
    model(X, cache=cache).sum().backward()
    assert len(cache.seen) == 1
    assert not regions
    model(X, cache=None).sum().backward()
    assert len(regions) == 1


def test_what_is_a_cache_and_what_is_not() -> None:
    assert is_cache(Cache())
    for value in (None, 1, True, "text", X, {"a": 1}, {1}, [1], (1,), nn.ModuleDict(), Pair(X, ""), object()):
        assert not is_cache(value)
    cache_utils = pytest.importorskip("transformers.cache_utils")
    assert is_cache(cache_utils.DynamicCache())
    assert is_cache(cache_utils.EncoderDecoderCache(cache_utils.DynamicCache(), cache_utils.DynamicCache()))


@pytest.mark.parametrize("marked", ["", "layers", "layers.0", "layers.0.up"])
def test_a_block_with_checkpointing_of_its_own_is_left_alone(
    marked: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack()
    model.get_submodule(marked).gradient_checkpointing = True
    attach(model, plan_of("layers.0"))
    assert "forward" not in vars(model.layers[0])
    assert "gradient checkpointing of its own" in caplog.text


def test_checkpointing_of_its_own_switched_on_later_is_seen(regions) -> None:
    model = Stack()
    attach(model, plan_of("layers.0", "layers.1"))
    model.layers[0].gradient_checkpointing = True
    model(X)
    assert len(regions) == 1


def test_torchs_own_checkpoint_wrapper_is_seen() -> None:
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = Stack()
    model.layers[1] = wrapper.checkpoint_wrapper(model.layers[1])
    attach(model, plan_of("layers.0", "layers.1"))
    assert ["forward" in vars(layer) for layer in model.layers] == [True, False]


def test_hugging_faces_own_checkpointing_is_replaced() -> None:
    pytest.importorskip("transformers")
    from support.families import FAMILIES

    model = FAMILIES["gpt2"].build()
    model.gradient_checkpointing_enable()
    attach(model, plan_of("transformer.h.0"))
    assert "forward" in vars(model.transformer.h[0])
    assert not model.is_gradient_checkpointing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_module_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8))
    attach(model, plan_of("0", "1"))
    assert "scripted" in caplog.text
    model(X).sum().backward()


def test_a_compiled_model_gives_the_same_and_is_recomputed(regions) -> None:
    model = Stack()
    for layer in model.layers:
        layer.dropout.p = 0.0
    plain = gradients(model, lambda m: m(X).pow(2).sum())
    attach(model, plan_of("layers.0", "layers.1"))
    compiled = torch.compile(model, backend="eager")
    assert_equal(gradients(model, lambda m: compiled(X).pow(2).sum()), plain)
    assert len(regions) == 2  # they run outside of the compiler


# Slices of nn.Sequential -------------------------------------------------------------------------


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
    )


@pytest.mark.parametrize("settings", [{}, {"chained": True}, {"keep": ("aten.addmm.default",)}], ids=str)
def test_slices_are_regions_and_change_nothing(regions, settings: dict[str, Any]) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = sequential()

        def forward(self, x: Tensor) -> Tensor:
            return self.features(x).pow(2).sum()

    model, plain = Holder(), Holder()
    plain.load_state_dict(model.state_dict())
    attach(model, slice_plan("features", (0, 2), (2, 5), **settings))
    assert_equal(gradients(model, lambda m: m(X)), gradients(plain, lambda m: m(X)))
    assert len(regions) == 2
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))

    model._memscale_executor.detach()
    assert "forward" not in vars(model.features)


def test_slices_of_the_model_itself_with_a_gap_between_and_one_replanned(regions) -> None:
    model = sequential()
    plain = gradients(model, lambda m: m(X).sum())
    executor = attach(model, slice_plan("", (4, 6), (0, 2)))
    assert_equal(gradients(model, lambda m: m(X).sum()), plain)
    assert len(regions) == 2
    executor.replan(slice_plan("", (2, 4)))
    assert_equal(gradients(model, lambda m: m(X).sum()), plain)
    assert len(regions) == 3


def test_a_sequential_changed_after_attaching_runs_as_it_is(regions) -> None:
    model = sequential()
    attach(model, slice_plan("", (0, 2), (2, 5)))
    model.insert(1, nn.Linear(8, 8))
    reference = nn.Sequential(*copy.deepcopy(model))
    assert_equal(gradients(model, lambda m: m(X).sum()), gradients(reference, lambda m: m(X).sum()))
    del model[1:]
    reference = nn.Sequential(*copy.deepcopy(model))
    assert_equal(gradients(model, lambda m: m(X).sum()), gradients(reference, lambda m: m(X).sum()))


def test_a_wrong_call_of_a_sequential_fails_as_ever() -> None:
    model, plain = sequential(), sequential()
    attach(model, slice_plan("", (0, 2)))
    for args, kwargs in (((X, X), {}), ((), {}), ((), {"x": X})):
        with pytest.raises(TypeError) as expected:
            plain(*args, **kwargs)
        with pytest.raises(TypeError) as raised:
            model(*args, **kwargs)
        assert str(raised.value) == str(expected.value)


def test_a_slice_that_is_none_is_refused() -> None:
    scattered = LayerPlan("odd", ("0", "2"), ("checkpointing",), "test", "test")
    model = sequential()
    with pytest.raises(WrapError, match="not neighbours"):
        attach(model, Plan((scattered,)))
    assert vars(model).keys() == vars(sequential()).keys()

    listed = Stack()
    with pytest.raises(WrapError, match=r"nn\.Sequential.*ModuleList"):
        attach(listed, Plan((LayerPlan("l", ("layers.0", "layers.1"), ("checkpointing",), "t", "t"),)))


# References --------------------------------------------------------------------------------------


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("plan", [plan_of("0"), slice_plan("", (0, 2), (2, 4))], ids=["block", "slices"])
def test_a_dropped_model_is_gone_at_once(no_gc, plan: Plan) -> None:
    model = sequential()
    attach(model, plan)
    model(X).sum().backward()
    alive = [weakref.ref(module) for module in model.modules()]
    del model
    assert not any(reference() is not None for reference in alive)


def test_a_copy_of_one_block_is_plain() -> None:
    model = Stack()
    plain = vars(copy.deepcopy(model.layers[0])).keys()
    attach(model, plan_of("layers.0", "layers.1"))
    layer = copy.deepcopy(model.layers[0])
    assert vars(layer).keys() == plain
    layer(X).sum().backward()
    assert (layer.runs, model.layers[0].runs) == (1, 0)


def test_a_forward_without_its_module_says_so() -> None:
    model = Stack()
    attach(model, plan_of("layers.0"))
    forward = model.layers[0].forward
    del model
    gc.collect()
    with pytest.raises(WrapError, match="Keep the module"):
        forward(X)


def test_the_registry_holds_techniques_under_their_names() -> None:
    for name, technique in LAYER_TECHNIQUES.items():
        checked: LayerTechnique = technique
        assert checked.name == name
