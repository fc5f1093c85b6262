"""The recomputation finds what forward found: random state, autocast, flags, attention kernels."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from memscale.checkpointing import region as region_module
from memscale.checkpointing import run_region
from memscale.checkpointing.state import Conditions
from support.regions import LiveBytes, Mlp, assert_same, in_region, train

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class FakeAccelerator:
    """A device module with three devices and a generator each, as `torch.cuda` is one."""

    def __init__(self, initialised: bool) -> None:
        self.generators = [torch.Generator().manual_seed(k) for k in range(3)]
        self.initialised = initialised
        self.asked: set[int] = set()

    def is_initialized(self) -> bool:
        return self.initialised

    def current_device(self) -> int:
        return 0

    def get_rng_state(self, device: int) -> torch.Tensor:
        assert self.initialised
        self.asked.add(device)
        return self.generators[device].get_state()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.generators[device].set_state(state)


def with_devices(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let regions find tensors on these devices."""
    devices = map(torch.device, names)
    monkeypatch.setattr(
        region_module, "Conditions", lambda flags, found: Conditions(flags, {*found, *devices})
    )


class TestRandomState:
    def test_of_the_devices_of_its_tensors_and_the_current_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        accelerators = []

        def run(in_a_region: bool) -> list[torch.Tensor]:
            with_devices(monkeypatch, "xpu:1")
            accelerator = FakeAccelerator(initialised=True)
            accelerators.append(accelerator)
            monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)

            def function(x: torch.Tensor) -> torch.Tensor:
                for generator in accelerator.generators[:2]:
                    x = torch.exp(x * torch.rand(8, generator=generator) * torch.rand(8))
                return x

            torch.manual_seed(0)
            x = X.clone().requires_grad_()
            out = run_region(function, (x,), {}) if in_a_region else function(x)
            for generator in accelerator.generators:
                torch.rand(3, generator=generator)  # the world moves on
            torch.rand(5)
            out.sum().backward()
            states = [generator.get_state() for generator in accelerator.generators]
            return [out.detach(), x.grad, *states, torch.get_rng_state()]

        assert_same(run(True), run(False))
        assert accelerators[0].asked == {0, 1}, "a region costs nothing on the other cards of a machine"

    def test_of_a_device_that_is_not_initialised_is_not_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_devices(monkeypatch, "xpu")
        accelerator = FakeAccelerator(initialised=False)
        monkeypatch.setattr(torch, "get_device_module", lambda _: accelerator)
        x = X.clone().requires_grad_()
        run_region(torch.exp, (x,), {}).sum().backward()
        assert not accelerator.asked

    def test_cuda_is_not_initialised_by_asking(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with_devices(monkeypatch, "cuda", "mps", "meta")
        was = torch.cuda.is_initialized()
        x = X.clone().requires_grad_()
        run_region(torch.exp, (x,), {}).sum().backward()
        assert torch.cuda.is_initialized() == was

    def test_after_backward_it_is_as_if_nothing_was_drawn(self) -> None:
        out = in_region(Mlp())(X)
        torch.rand(3)
        before = torch.get_rng_state()
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)

    def test_after_a_failed_recomputation_too(self) -> None:
        fails = False

        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(nn.functional.dropout(x))
            if fails:
                raise ValueError
            return torch.exp(y)

        out = run_region(function, (X.clone().requires_grad_(),), {})
        before = torch.get_rng_state()
        fails = True
        with pytest.raises(ValueError):  # noqa: PT011
            out.sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


class TestAutocast:
    @pytest.mark.parametrize("cache", [True, False])
    def test_backward_outside(self, cache: bool) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            def forward(model: nn.Module) -> torch.Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                    out = wrap(model)(wrap(model)(X))
                assert out.dtype == torch.bfloat16
                return out.float().pow(2).sum()

            return train(Mlp, forward)

        assert_same(run(in_region), run(lambda module: module))

    def test_backward_inside_another(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            def backward(loss: torch.Tensor) -> None:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss.backward()

            def forward(model: nn.Module) -> torch.Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return wrap(model)(X).float().pow(2).sum()

            return train(Mlp, forward, backward=backward)

        assert_same(run(in_region), run(lambda module: module))

    def test_forward_without_and_backward_with(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            def backward(loss: torch.Tensor) -> None:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss.backward()

            return train(Mlp, lambda model: wrap(model)(X).pow(2).sum(), backward=backward)

        assert_same(run(in_region), run(lambda module: module))

    def test_a_region_that_switches_it_off_inside(self) -> None:
        class Careful(Mlp):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = super().forward(x)
                with torch.autocast("cpu", enabled=False):
                    return self.up(x.float())

        def run(wrap: Any) -> list[torch.Tensor]:
            def forward(model: nn.Module) -> torch.Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return wrap(model)(X).float().pow(2).sum()

            return train(Careful, forward)

        assert_same(run(in_region), run(lambda module: module))

    def test_recomputed_casts_are_not_left_in_the_cache(self) -> None:
        model = Mlp()
        with torch.autocast("cpu", dtype=torch.bfloat16), LiveBytes() as live:
            out = in_region(model)(X)
            torch.clear_autocast_cache()
            before = live.now
            gradients = torch.autograd.grad(out.float().sum(), list(model.parameters()), retain_graph=True)
            del gradients
            assert live.now == before

    def test_casts_without_a_history_in_the_cache_are_not_used(self) -> None:
        model = Mlp(dropout=0.0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = in_region(model)(X)
            torch.clear_autocast_cache()
            with torch.no_grad():
                model(X)  # an evaluation in between leaves casts that know of no gradient
            out.float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    def test_with_kept_outputs(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            def forward(model: nn.Module) -> torch.Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    out = wrap(model)(wrap(model)(X))  # the second call finds the casts of the first
                return out.float().pow(2).sum()

            return train(Mlp, forward)

        policy = ("aten.addmm.default", "aten._to_copy.default")
        assert_same(run(lambda module: in_region(module, keep=policy)), run(lambda module: module))


class TestFlags:
    def test_evaluation_mode_between_forward_and_backward(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(Mlp(), Mlp())
            loss = wrap(model)(X).pow(2).sum()
            model.eval()
            loss.backward()
            assert not any(module.training for module in model.modules())
            return [loss.detach(), *(p.grad for p in model.parameters())]

        assert_same(run(in_region), run(lambda module: module))

    def test_training_mode_after_a_forward_in_evaluation(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Mlp().eval()
            loss = wrap(model)(X).pow(2).sum()
            model.train()
            loss.backward()
            assert model.dropout.training
            return [loss.detach(), *(p.grad for p in model.parameters())]

        assert_same(run(in_region), run(lambda module: module))

    def test_parameters_frozen_between_forward_and_backward(self) -> None:
        def run(wrap: Any) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Mlp()
            x = X.clone().requires_grad_()
            loss = wrap(model)(x).pow(2).sum()
            model.requires_grad_(False)
            loss.backward()
            assert not any(p.requires_grad for p in model.parameters())
            return [x.grad]

        assert_same(run(in_region), run(lambda module: module))

    def test_they_are_put_back_after_a_failure(self) -> None:
        fails = False

        class Failing(Mlp):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                out = super().forward(x)
                if fails:
                    raise ValueError("no")
                return torch.exp(out)

        model = Failing()
        loss = in_region(model)(X).sum()
        model.eval()
        fails = True
        with pytest.raises(ValueError, match="no"):
            loss.backward()
        assert not model.training
        assert not model.dropout.training


def test_the_default_device_of_forward() -> None:
    devices = []

    def function(x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.empty(1).device.type)
        return torch.exp(x)

    x = X.clone().requires_grad_()
    with torch.device("meta"):
        out = run_region(function, (x,), {})
    out.sum().backward()
    assert devices == ["meta", "meta"]
    assert torch.empty(1).device.type == "cpu"


@pytest.mark.parametrize("forward", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("backward", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_attention_kernels_of_forward(forward: SDPBackend, backward: SDPBackend) -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, torch.sin(x), torch.cos(x), is_causal=True)

    def run(function: Any) -> list[torch.Tensor]:
        x = X.reshape(1, 2, 4, 4).clone().requires_grad_()
        with sdpa_kernel(forward):
            out = function(x)
        with sdpa_kernel(backward):
            out.pow(2).sum().backward()
            allowed = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
        assert allowed == (backward == SDPBackend.MATH, backward == SDPBackend.FLASH_ATTENTION)
        return [out.detach(), x.grad]

    assert_same(run(lambda x: run_region(attend, (x,), {})), run(attend))


def test_the_switches_between_kernels_of_forward() -> None:
    """`with torch.backends.cudnn.flags(...)`, or TF32, around the forward pass alone."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    seen = []

    def switches() -> tuple[Any, ...]:
        precision = cuda.matmul.fp32_precision, cudnn.conv.fp32_precision
        older = (
            cudnn.allow_tf32,
            torch.get_float32_matmul_precision(),
        )  # which raise if they do not agree with those
        return cudnn.enabled, cudnn.benchmark, *precision, torch.get_deterministic_debug_mode(), *older

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(switches())
        return torch.exp(x)

    before = switches()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    try:
        with cudnn.flags(enabled=False, benchmark=True, allow_tf32=False, fp32_precision="none"):
            out = run_region(function, (X.clone().requires_grad_(),), {})
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    between = switches()
    out.sum().backward()
    assert seen[0] == seen[1]
    assert all(each != then for each, then in zip(between, seen[0], strict=True)), (between, seen)
    assert switches() == between
    assert (before[0], before[1], before[4]) == (between[0], between[1], between[4])


def test_gradients_are_on_in_the_recomputation() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.exp(x)

    run_region(function, (X.clone().requires_grad_(),), {}).sum().backward()
    assert seen == [True, True]


@pytest.mark.parametrize("keep", [(), ("aten.addmm.default", "aten.native_dropout.default")])
def test_under_fake_tensors(keep: tuple[str, ...]) -> None:
    with FakeTensorMode(), contextlib.ExitStack():
        model = nn.Sequential(Mlp(), nn.BatchNorm1d(8), Mlp())
        x = torch.randn(4, 8, requires_grad=True)
        hidden = in_region(model[0], keep=keep)(x)
        out = in_region(model[1:], keep=keep, chain=True)(hidden)
        out.sum().backward()
        assert x.grad is not None
        assert model[0].calls == 2
        assert all(p.grad is not None for p in model.parameters())


def test_device_modules_without_a_random_state_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch, "xpu")
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    x = X.clone().requires_grad_()
    run_region(torch.exp, (x,), {}).sum().backward()
    assert torch.equal(x.grad, torch.exp(x))
