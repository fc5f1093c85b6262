"""Note [Awaited values]: a wrapped model on the meta device has values when someone needs them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.errors import WrapError
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.offload import awaited, own_initialisation
from memscale.offload.awaited import AwaitedBuffer, AwaitedParameter
from support.families import FAMILIES, TINY

QUIET = Config(enable_logging=False)


class Model(nn.Module):
    """Some layers that go to disk, one that stays, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(self.norm(x))


def plain() -> Model:
    torch.manual_seed(7)
    return Model()


def attached() -> tuple[Model, Executor]:
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Model()
    layers = tuple(
        LayerPlan(name, (name,), ("offloading",), "test", "to disk", offloading=Offloading("disk"))
        for name in ("layers.0", "layers.1", "layers.2")
    )
    executor = Executor(model, Plan(layers), QUIET)
    executor.attach()
    return model, executor


def awaits(model: nn.Module) -> bool:
    kinds = {type(each) for each in model.parameters()}
    assert len(kinds) == 1
    return kinds == {AwaitedParameter}


def assert_has_values(model: nn.Module) -> None:
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert {type(each) for each in model.buffers()} <= {torch.Tensor}
    for one, other in zip(model.state_dict().values(), plain().state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_wrapping_draws_nothing() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model, executor = attached()
    assert torch.equal(torch.get_rng_state(), before)
    assert awaits(model)
    assert isinstance(model.norm.running_var, AwaitedBuffer)
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cpu"}
    executor.detach()


NEEDS: dict[str, Callable[[Model, Executor], object]] = {
    "forward": lambda model, executor: model.eval()(torch.ones(2, 64)),
    "a layer's forward": lambda model, executor: model.head(torch.ones(2, 64)),
    "state_dict": lambda model, executor: model.state_dict(),
    "a value": lambda model, executor: model.head.weight.sum(),
    "a value of a buffer": lambda model, executor: model.norm.running_var.sum(),
    "an element": lambda model, executor: model.head.weight[0, 0],
    "data": lambda model, executor: model.head.weight.data,
    "numpy": lambda model, executor: model.head.weight.detach().numpy(),
    "in words": lambda model, executor: repr(model.head.weight),
    "a list": lambda model, executor: torch._foreach_norm(list(model.parameters())),
    "a named argument": lambda model, executor: torch.add(torch.ones(8), other=model.head.bias),
    "memory": lambda model, executor: model.head.weight.data_ptr(),
    "deepcopy": lambda model, executor: copy.deepcopy(model),
    "deepcopy of one": lambda model, executor: copy.deepcopy(model.head.weight),
    "pickle": lambda model, executor: pickle.dumps(model),
    "pickle of one": lambda model, executor: pickle.dumps(model.head.weight),
    "torch.save": lambda model, executor: torch.save(model.state_dict(), io.BytesIO()),
    "a vector": lambda model, executor: nn.utils.parameters_to_vector(model.parameters()),
    "another type": lambda model, executor: copy.copy(model.head.weight.double()),
    "asking for it": lambda model, executor: executor.make_values(),
    "another plan": lambda model, executor: executor.replan(Plan(())),
    "detach": lambda model, executor: executor.detach(),
}


@pytest.mark.parametrize("need", NEEDS)
def test_whoever_needs_values_finds_them(need: str) -> None:
    model, executor = attached()
    parameters = list(model.parameters())
    NEEDS[need](model, executor)
    assert [id(each) for each in model.parameters()] == [id(each) for each in parameters]
    assert_has_values(model)
    executor.detach()
    assert_has_values(model)
    assert {key for each in model.parameters() for key in vars(each)} == set()


def test_copies_have_values_too() -> None:
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model, executor = attached()
        assert_has_values(copied(model))
        executor.detach()


def test_questions_do_not_need_values() -> None:
    model, executor = attached()
    weight = model.head.weight
    optimizers = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)]
    torch.optim.lr_scheduler.StepLR(optimizers[0], 1)
    model.zero_grad()
    model.train().eval()
    weight.requires_grad_(False).requires_grad_(True)
    weight.register_hook(lambda gradient: gradient).remove()
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.device.type, weight.dtype, weight.numel()) == (
        (8, 64),
        "cpu",
        torch.float32,
        512,
    )
    assert (weight.requires_grad, weight.is_leaf, weight.grad, weight.nbytes) == (True, True, None, 2048)
    assert sum(each.numel() for each in model.parameters()) == sum(p.numel() for p in plain().parameters())
    assert awaits(model)
    executor.detach()


def test_random_numbers_go_on_as_after_plain_building() -> None:
    plain()
    expected = torch.rand(3)
    model, executor = attached()
    model.eval()(torch.ones(2, 64))
    assert torch.equal(torch.rand(3), expected)
    executor.detach()


def test_a_generator_that_was_used_is_left_as_it_was() -> None:
    model, executor = attached()
    torch.manual_seed(8)
    expected = torch.rand(3)
    torch.manual_seed(8)
    executor.make_values()
    assert torch.equal(torch.rand(3), expected)
    assert_has_values(model)
    executor.detach()


def test_a_checkpoint_needs_no_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(9)
    checkpoint = Model().state_dict()
    model, executor = attached()
    monkeypatch.setattr(own_initialisation.OwnInitialisation, "run", None)
    assert str(model.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    model.eval()(torch.ones(2, 64))
    for name, value in model.state_dict().items():
        assert torch.equal(value, checkpoint[name])
    executor.detach()


def test_what_a_checkpoint_does_not_have_is_initialised() -> None:
    torch.manual_seed(9)
    whole = Model().state_dict()
    checkpoint = {name: whole[name] for name in whole if name.startswith(("layers.1", "norm"))}
    model, executor = attached()
    model.load_state_dict(checkpoint, strict=False)
    assert type(model.layers[1].weight) is nn.Parameter
    assert type(model.layers[0].weight) is AwaitedParameter
    model.eval()(torch.ones(2, 64))
    expected = {**plain().state_dict(), **checkpoint}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    executor.detach()


def test_a_copy_that_fails_gives_nothing() -> None:
    model, executor = attached()
    with pytest.raises(RuntimeError), torch.no_grad():
        model.head.weight.copy_(torch.ones(3, 3))
    assert awaits(model)
    executor.make_values()
    assert_has_values(model)
    executor.detach()


def test_a_layer_may_be_exchanged_before() -> None:
    model, executor = attached()
    head = model.head = nn.Linear(64, 2)
    values = head.weight.detach().clone()
    gc.collect()
    assert model.eval()(torch.ones(2, 64)).shape == (2, 2)
    assert torch.equal(head.weight, values)
    assert torch.equal(model.layers[0].weight, plain().layers[0].weight)
    executor.detach()


def test_a_failure_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, executor = attached()

    def fail(*args: Any) -> None:
        raise WrapError("as an example")

    with monkeypatch.context() as patch:
        patch.setattr(awaited, "materialise", fail)
        for _ in range(2):
            with pytest.raises(WrapError, match="as an example"):
                model.eval()(torch.ones(2, 64))
            assert awaits(model)
    executor.make_values()
    assert_has_values(model)
    executor.detach()


def test_under_a_mode_of_fake_tensors_values_are_real() -> None:
    model, executor = attached()
    with torch._subclasses.FakeTensorMode():
        executor.make_values()
    assert_has_values(model)
    executor.detach()


def test_nothing_is_left_of_a_model_that_nobody_used() -> None:
    model, executor = attached()
    store = executor.homes.store
    assert store.bytes_used > 0
    del model, executor
    gc.collect()
    assert store.bytes_used == 0


def wrapped(name: str) -> nn.Module:
    family = FAMILIES[name]
    with torch.device("meta"):
        model = family.make(family.scale)
    torch.manual_seed(3)
    batch = family.batch()
    torch.manual_seed(3)
    return memscale.wrap(model, QUIET, batch if isinstance(batch, dict) else batch[0])


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "lstm"])
def test_families_have_the_values_of_plain_ones(name: str) -> None:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    model = wrapped(name)
    assert awaits(model)
    torch.manual_seed(3)
    expected = FAMILIES[name].make(TINY)
    got = dict((*model.named_parameters(), *model.named_buffers()))
    for key, value in (*expected.named_parameters(), *expected.named_buffers()):
        assert torch.equal(got[key], value), key
    memscale.detach(model)


def test_where_initialisation_looks_at_values_they_are_made_at_once() -> None:
    pytest.importorskip("transformers")
    model = wrapped("vit")
    assert not awaits(model)
    memscale.detach(model)
