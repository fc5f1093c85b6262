"""Note [Remembered results]: equal operations are looked up, and give what torch would give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memscale.simulator import result_cache, simulate
from memscale.simulator.fake import FakeMode


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    result_cache._recipes.clear()
    yield
    result_cache._recipes.clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operations that torch's own fake mode was asked for."""
    found: list[str] = []
    dispatch = FakeTensorMode.dispatch

    def noted(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is not torch.ops.prim.device.default:  # a tensor's device is a question, not a result
            found.append(str(func))
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return found


def _description(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    assert isinstance(value, FakeTensor)
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.dtype,
        value.fake_device,
        value.requires_grad,
        value.untyped_storage().nbytes(),
        str(torch._C._dispatch_keys(value)),
        sorted(vars(value)),
    )


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(4, 6), torch.empty(6, 4).t()


Operation = Callable[[torch.Tensor, torch.Tensor], Any]

OPERATIONS: dict[str, Operation] = {
    "new memory": lambda x, y: x + y,
    "strides of its own": lambda x, y: x @ x.t() + torch.relu(y @ y.t()),
    "a view": lambda x, y: x.view(2, 12)[:, 3:].transpose(0, 1),
    "several views": lambda x, y: x.split(2, dim=1),
    "several results": lambda x, y: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "in place": lambda x, y: x.mul_(2).add_(y),
    "another type": lambda x, y: (x.to(torch.float16), x > y, x.argmax(1)),
    "many at once": lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0]),
    "nothing known of values": lambda x, y: torch.dropout(x, 0.5, train=True),
    "attention": lambda x, y: torch.nn.functional.scaled_dot_product_attention(
        x.view(1, 1, 4, 6), y.reshape(1, 1, 4, 6), x.view(1, 1, 4, 6)
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_time_is_as_the_first(name: str, asked: list[str]) -> None:
    operation = OPERATIONS[name]
    with FakeMode():
        first = operation(*_tensors())
        assert asked
        asked.clear()
        second = operation(*_tensors())
        assert asked == []
    assert type(first) is type(second)
    assert tree_map(_description, first) == tree_map(_description, second)


def test_torch_makes_the_same() -> None:
    for operation in OPERATIONS.values():
        with FakeTensorMode():
            plain = operation(*_tensors())
        with FakeMode():
            operation(*_tensors())
            again = operation(*_tensors())
        assert tree_map(_description, plain) == tree_map(_description, again)


def test_tensors_are_copied_as_torch_copies_its_own() -> None:
    with FakeMode():
        for _ in range(2):
            parameter = torch.nn.Parameter(torch.empty(3, 2))
            assert copy.deepcopy(parameter).shape == (3, 2)  # it looks at the address


def test_memory_is_shared_as_it_should_be() -> None:
    with FakeMode():
        for _ in range(2):
            x, y = _tensors()
            memory = x.untyped_storage()._cdata
            assert x.mul_(y) is x
            assert x.view(24).untyped_storage()._cdata == memory
            assert all(part.untyped_storage()._cdata == memory for part in x.chunk(2))
            assert (x + y).untyped_storage()._cdata != memory


def test_another_mode_has_results_of_its_own(asked: list[str]) -> None:
    with FakeMode():
        x, y = _tensors()
        _ = x + y
    asked.clear()
    with FakeMode() as mode:
        x, y = _tensors()
        result = x + y
    assert asked == []
    assert isinstance(result, FakeTensor)
    assert result.fake_mode is mode


def test_numbers_of_other_types_are_other_numbers() -> None:
    with FakeMode():
        for _ in range(2):
            counts = torch.ones(3, dtype=torch.int64)
            assert (counts * 1).dtype is torch.int64
            assert (counts * 1.0).dtype is torch.float32
            assert (counts.bool() * True).dtype is torch.bool


def test_the_default_type_counts() -> None:
    with FakeMode():
        assert torch.ones(2).dtype is torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert torch.ones(2).dtype is torch.float64
            assert (torch.ones(2, dtype=torch.int64) / 2).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert (torch.ones(2, dtype=torch.int64) / 2).dtype is torch.float32


def test_what_depends_on_data_is_asked_for_each_time(asked: list[str]) -> None:
    with FakeMode():
        for _ in range(2):
            asked.clear()
            with pytest.raises(Exception, match="nonzero"):
                torch.ones(3).nonzero()
            assert "aten.nonzero.default" in asked


def test_a_shape_changed_in_place_is_changed_each_time() -> None:
    with FakeMode():
        for _ in range(2):
            x, _y = _tensors()
            x.unsqueeze_(0)
            assert x.shape == (1, 4, 6)
            x.resize_(2, 2)
            assert x.shape == (2, 2)


def test_gradients_flow() -> None:
    with FakeMode():
        for _ in range(2):
            weight = torch.nn.Parameter(torch.empty(5, 3))
            loss = torch.nn.functional.linear(torch.empty(2, 3), weight).relu().sum()
            loss.backward()
            assert weight.grad is not None
            assert weight.grad.shape == (5, 3)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_cache, "_MAX_RECIPES", 10)
    with FakeMode():
        for size in range(1, 40):
            assert torch.ones(size).add(1).shape == (size,)
    assert 0 < len(result_cache._recipes) <= 10


def test_no_tensor_is_kept_alive() -> None:
    with FakeMode():
        x, y = _tensors()
        _ = x + y, x.view(24), x.mul_(y)
    kept = tree_leaves([*result_cache._recipes, *result_cache._recipes.values()])
    assert kept
    assert not any(isinstance(each, torch.Tensor) for each in kept)


class _Heard(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_simulation_recalls_without_asking_the_fake_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    dispatch = result_cache.CachingFakeMode.__torch_dispatch__

    def noted(self: Any, func: Any, *rest: Any) -> Any:
        heard.append(str(func))
        return dispatch(self, func, *rest)

    monkeypatch.setattr(result_cache.CachingFakeMode, "__torch_dispatch__", noted)
    with simulate("RTX 3090") as simulation:
        x = torch.empty(4, 6, device=simulation.device)
        first = x + x
        assert "aten.add.Tensor" in heard
        heard.clear()
        second = x + x
        assert heard == []
        assert _description(second) == _description(first)
        assert second.device == simulation.device
        assert simulation.tracker.live_bytes(simulation.device) == 3 * 512


def test_a_mode_between_hears_what_is_recalled() -> None:
    with _Heard() as mode, simulate("RTX 3090") as simulation:
        x = torch.empty(4, 6, device=simulation.device)
        for _ in range(3):
            x.add(1)
    assert mode.names.count("aten.add.Tensor") == 3
