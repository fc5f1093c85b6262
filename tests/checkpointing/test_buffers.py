"""Buffers: recomputed from what they were, changed once, copied no more than needed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from memscale.checkpointing import state as buffers_module
from memscale.errors import RecomputeError
from support.regions import Mlp, assert_same, in_region, regions_alive, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class MovingAverage(nn.Module):
    """Scales by a running mean that forward updates in place, and reads both before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * self.mean.clone())
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return torch.tanh(torch.sin(y) * self.mean.clone())


class Replacing(MovingAverage):
    """The same by assignment: another tensor under the name at each call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * self.mean)
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0)
        return torch.tanh(torch.sin(y) * self.mean)


class Lazy(nn.Module):
    """Registers a buffer when it first runs, and from then on multiplies by it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if "scale" in self._buffers:
            y = torch.tanh(y * self.scale)
        else:
            self.register_buffer("scale", y.detach().mean(0))
        return torch.sin(y)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), Mlp())


def old_spectral() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), Mlp())


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Conv1d(2, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(inplace=True),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Dropout(0.3),
        nn.Conv1d(4, 4, 3),
        nn.BatchNorm1d(4, momentum=None),
    )


BUILDERS = [
    MovingAverage,
    Replacing,
    Lazy,
    spectral,
    old_spectral,
    convolutions,
    lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)),
]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("calls", [1, 2])
def test_training_is_bit_equal_to_the_plain_run(build: Any, calls: int) -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        def forward(model: nn.Module) -> torch.Tensor:
            return torch.stack([wrap(model)(X * k).pow(2).sum() for k in range(1, calls + 1)]).sum()

        return train(build, forward)

    assert_same(run(in_region), run(lambda module: module))


@pytest.mark.parametrize("build", BUILDERS)
def test_a_retained_graph_recomputes_from_the_same_buffers_twice(build: Any) -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = build()
        loss = wrap(model)(X).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert_same(run(in_region), run(lambda module: module))


@pytest.mark.parametrize("build", BUILDERS)
def test_the_tensors_in_the_module_are_the_ones_forward_left_there(build: Any) -> None:
    model = build()
    loss = in_region(model)(X).sum()
    before = {id(module): (module._buffers, dict(module._buffers)) for module in model.modules()}
    loss.backward()
    for module in model.modules():
        own, entries = before[id(module)]
        assert module._buffers is own
        assert own.keys() == entries.keys()
        assert all(own[name] is buffer for name, buffer in entries.items())


def test_buffers_are_put_back_after_a_failure() -> None:
    fails = False

    class Failing(MovingAverage):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            if fails:
                raise ValueError("no")
            return torch.exp(out)

    model = Failing()
    loss = in_region(model)(X).sum()
    real, values = model.mean, model.mean.clone()
    fails = True
    with pytest.raises(ValueError, match="no"):
        loss.backward()
    assert model.mean is real
    assert torch.equal(model.mean, values)


def test_evaluation_leaves_statistics_alone_and_training_after_it_is_learned_anew() -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
        seen = []
        for training in (False, True, False, True):
            model.train(training)
            wrap(model)(X).pow(2).sum().backward()
            seen += [*(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
        return seen

    assert_same(run(in_region), run(lambda module: module))


def test_a_buffer_shared_by_two_modules_stays_shared() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = MovingAverage(), MovingAverage()
            self.b._buffers["mean"] = self.a.mean

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    plain = train(Shared, lambda model: model(X).sum())
    assert_same(train(Shared, lambda model: in_region(model)(X).sum()), plain)


class TestCopies:
    """Every buffer is copied before a region runs; the call of a whole model leaves out what never changes."""

    class Masked(nn.Module):
        def __init__(self, size: int = 100_000) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(size))
            self.linear = nn.Linear(8, 8)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.linear(x))) * self.mask[:8]

    @pytest.fixture
    def copied(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        sizes: list[int] = []
        copy = buffers_module._copy

        def noted(buffer: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
            sizes.append(buffer.nbytes)
            return copy(buffer, copies)

        monkeypatch.setattr(buffers_module, "_copy", noted)
        return sizes

    def test_a_recomputation_copies_what_changed(self, copied: list[int]) -> None:
        model = self.Masked()
        for _ in range(2):
            loss = in_region(model)(X).sum()
            assert sorted(copied) == [8, 32, 32, 400_000]
            copied.clear()
            loss.backward()
            assert sorted(copied) == [8, 32, 32]  # batch norm's
            copied.clear()

    def test_later_calls_of_a_whole_model_copy_what_changes(self, copied: list[int]) -> None:
        model = self.Masked()
        for expected in ([8, 32, 32, 400_000], [8, 32, 32]):
            copied.clear()
            buffers = buffers_module.Buffers(list(model.modules()), copy_all=False)
            assert sorted(copied) == expected
            model(X)
            buffers.end_forward()

    def test_copies_of_what_did_not_change_are_dropped(self) -> None:
        model = self.Masked()
        buffers = buffers_module.Buffers(list(model.modules()))
        model(X)
        buffers.end_forward()
        kept = {name for owner in buffers._owners for name in owner._copies}
        assert kept == {"running_mean", "running_var", "num_batches_tracked"}

    def test_what_is_learned_dies_with_the_module(self) -> None:
        gc.collect()
        before = len(buffers_module._changes)
        model = self.Masked()
        in_region(model)(X).sum().backward()
        assert len(buffers_module._changes) == before + 2
        del model
        gc.collect()
        assert len(buffers_module._changes) <= before


class Late(nn.Module):
    """Changes its buffer at the third call only."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(size))
        self.linear = nn.Linear(8, 8)
        self.updates = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) * self.scale[:8].clone())
        if self.updates:
            with torch.no_grad():
                self.scale.mul_(0.5)
        return torch.tanh(y)


@pytest.mark.parametrize("size", [8, 100_000])
def test_a_buffer_that_changes_late_is_right_all_the_same(size: int) -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        def forward(model: Late) -> torch.Tensor:
            model.updates = bool(model.calls_so_far % 2)
            model.calls_so_far += 1
            return wrap(model)(X).sum()

        def build() -> Late:
            model = Late(size)
            model.calls_so_far = 0
            return model

        return train(build, forward, steps=5)

    assert_same(run(in_region), run(lambda module: module))


def test_the_call_of_a_whole_model_whose_large_buffer_changes_late_cannot_be_repeated() -> None:
    model = Late(100_000)
    for updates in (False, True):
        model.updates = updates
        buffers = buffers_module.Buffers(list(model.modules()), copy_all=False)
        model(X)
        buffers.end_forward()
    with pytest.raises(RecomputeError, match=r"'scale' of Late .*Run the step again"), buffers.put_back():
        pass


def test_a_buffer_changed_between_forward_and_backward() -> None:
    model = Late(8)
    loss = in_region(model)(X).sum()
    with torch.no_grad():
        model.scale.mul_(2)
    with pytest.raises(RecomputeError, match=r"'scale' of Late .*between forward and backward"):
        loss.backward()


def test_a_buffer_replaced_between_forward_and_backward() -> None:
    def run(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Late(8)
        loss = wrap(model)(X).sum()
        model.scale = torch.zeros(8)
        loss.backward()
        assert torch.equal(model.scale, torch.zeros(8))
        return [p.grad for p in model.parameters()]

    assert_same(run(in_region), run(lambda module: module))


def test_nothing_is_held_after_backward() -> None:
    with regions_alive() as alive:
        model = convolutions()
        in_region(model)(X).sum().backward()
        assert alive() == 0
