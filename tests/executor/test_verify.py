"""`Config(verify_correctness=True)`: a step with the plan against a plain one, before training."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.checkpointing.region import Region
from memscale.errors import VerificationError
from memscale.executor import verify
from memscale.techniques.forward import ForwardOverride, Stage
from memscale.testing import executing
from memscale.tiling.head import _Gradients
from memscale.units import format_bytes
from support.families import FAMILIES, Family
from support.steps import counted_regions
from support.wrapping import lossless

EXACT = lossless("aggressive", force_optimize=True, verify_correctness=True).replace(enable_logging=True)
TILED = EXACT.replace(enable_tiling=True)


def family(name: str = "gpt2") -> Family:
    return FAMILIES[name]


def trained(config: Config | None, name: str = "gpt2", steps: int = 2) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = family(name).build()
    if config is not None:
        memscale.wrap(model, config, family(name).batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = family(name).loss(model, family(name).batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", ["gpt2", "cnn", "lora", "tied"])
def test_a_verified_model_trains_as_a_plain_one(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """With dropout and buffers: the comparison leaves random numbers and statistics as they were."""
    caplog.set_level(logging.INFO, "memscale")
    plain, model = trained(None, name)
    verified, wrapped = trained(EXACT, name)
    assert verified == plain
    for one, two in zip(model.state_dict().values(), wrapped.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert "verified by one step" in caplog.text
    assert "equal to the bit" in caplog.text
    assert caplog.text.count("verified by") == 1


def test_tiles_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memscale")
    _, model = trained(TILED, steps=1)
    assert model._memscale_executor.plan.loss is not None
    assert "within 1.0e-04" in caplog.text


def test_sixteen_bits_have_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memscale")
    _, model = trained(EXACT.replace(use_mixed_precision=True), steps=1)
    plan = model._memscale_executor.plan
    if any("does not compute bf16 fast" in note for note in plan.notes):
        pytest.skip("this CPU has no bf16 instructions")
    assert plan.precision is not None
    assert "verified by one step" in caplog.text


def test_without_a_sample_the_first_batch_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memscale")
    model = memscale.wrap(family().build(), EXACT)
    assert "verified" not in caplog.text
    family().loss(model, family().batch()).backward()
    assert "verified by one step" in caplog.text


def broken_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed layers give gradients that are a thousandth too large."""
    run = Region.run_forward

    def off(self: Region, *args: Any) -> Any:
        output = run(self, *args)
        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient * 1.001)
        return output

    monkeypatch.setattr(Region, "run_forward", off)


def test_a_wrong_gradient_is_found_and_the_model_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_recomputation(monkeypatch)
    torch.manual_seed(0)
    model = memscale.wrap(family().build(), EXACT, family().batch())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with counted_regions() as regions, pytest.raises(VerificationError, match="the gradient of") as error:
        family().loss(model, family().batch())
    assert regions
    assert "transformer.h." in str(error.value)
    monkeypatch.undo()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    memscale.detach(model)
    assert "forward" not in vars(model)


def test_a_wrong_output_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ForwardOverride.__call__
    model = memscale.wrap(family().build(), EXACT, family().batch())
    wrong = model.get_submodule("transformer.h.1")

    def off(self: ForwardOverride, /, *args: Any, **kwargs: Any) -> Any:
        output = run(self, *args, **kwargs)
        if self.module is not wrong:
            return output
        return output + 1 if isinstance(output, torch.Tensor) else (output[0] + 1, *output[1:])

    monkeypatch.setattr(ForwardOverride, "__call__", off)
    with pytest.raises(VerificationError, match=r"the output of transformer\.h\.1\b"):
        family().loss(model, family().batch())


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
def test_parameters_on_the_host_of_a_device(
    has_room: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are back on the device for the plain step, if that has room for them, and on the host again after it."""
    caplog.set_level(logging.INFO, "memscale")
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    ids = torch.randint(0, 90, (2, 12))

    def losses(config: Config | None) -> list[float]:
        with executing("2GiB") as gpu:
            torch.manual_seed(0)
            model = family().build().to(gpu.device)
            batch = {"input_ids": ids.to(gpu.device), "labels": ids.to(gpu.device)}
            if config is not None:
                memscale.wrap(model, config, batch)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found = []
            for _ in range(2):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            if config is not None:
                assert model._memscale_executor.plan.host_bytes > 0
                assert any(parameter.device.type == "cpu" for parameter in model.parameters())
            return found

    assert losses(EXACT) == losses(None)
    assert "equal to the bit" in caplog.text


def test_the_error_is_raised_again_by_the_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that goes on after it does not train on unverified numbers."""
    broken_recomputation(monkeypatch)
    model = memscale.wrap(family().build(), EXACT, family().batch())
    for _ in range(2):
        with pytest.raises(VerificationError):
            family().loss(model, family().batch())


def test_a_wrong_output_within_a_bound_names_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiles too, whose outputs need not be equal to the bit."""
    run = ForwardOverride.__call__
    model = memscale.wrap(family().build(), TILED, family().batch())
    assert verify.bound_of(model._memscale_executor.plan) > 0
    wrong = model.get_submodule("transformer.h.1")

    def off(self: ForwardOverride, /, *args: Any, **kwargs: Any) -> Any:
        output = run(self, *args, **kwargs)
        if self.module is not wrong:
            return output
        return output * 1.01 if isinstance(output, torch.Tensor) else (output[0] * 1.01, *output[1:])

    monkeypatch.setattr(ForwardOverride, "__call__", off)
    with pytest.raises(VerificationError, match=r"the output of transformer\.h\.1\b"):
        family().loss(model, family().batch())


class Twice(nn.Module):
    """A layer that uses its weight twice in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Looped(nn.Module):
    """It goes through its layers twice: gradients of those on the host are added up by calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice() for _ in range(3))
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x).square().mean()


def test_gradients_that_are_added_up_in_another_order_are_allowed_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """See Note [Master and working copy]."""
    caplog.set_level(logging.INFO, "memscale")
    with executing("2GiB") as gpu:
        model = Looped().to(gpu.device)
        x = torch.randn(64, 64, device=gpu.device)
        memscale.wrap(model, EXACT, x)
        assert model._memscale_executor.plan.host_bytes > 0
        model(x).backward()
    assert "verified by one step" in caplog.text


def test_a_plain_step_that_does_not_fit_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """By the sizes of the device and of the model, without help of a test."""
    caplog.set_level(logging.INFO, "memscale")
    with executing("24MiB") as gpu:  # some 8 MiB of it for cuBLAS
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(gpu.device)
        memscale.wrap(model, EXACT, torch.ones(64, 256, device=gpu.device))
        assert model._memscale_executor.plan.baseline_peak_bytes > gpu.capacity
        model(torch.ones(64, 256, device=gpu.device)).sum().backward()
    assert "verified layer by layer" in caplog.text


class Gated(nn.Module):
    """A layer with a gate whose gradient is zero."""

    def __init__(self, scales: Iterator[float] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.gate = nn.Parameter(torch.zeros(64))
        self.scales = scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if self.scales is None else next(self.scales)
        return x + scale * self.down(torch.tanh(self.up(x))) + self.gate * 0


def gated(scales: Iterator[float] | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(scales) for _ in range(4)))


BATCH = torch.ones(64, 64)
RECOMPUTED = EXACT.replace(enable_offloading=False)
UNTOUCHED = RECOMPUTED.replace(enable_checkpointing=False)


def nan_for_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Techniques leave what they find in memory where a gradient is zero."""
    run = ForwardOverride.__call__

    def off(self: ForwardOverride, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.module, Gated) and any(each.order is Stage.RECOMPUTE for each in self.stages):
            gate = self.module.gate
            if not gate._backward_hooks:
                gate.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(ForwardOverride, "__call__", off)


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
def test_nan_is_not_zero(has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    model = memscale.wrap(gated(), RECOMPUTED, BATCH)
    nan_for_zero(monkeypatch)
    with pytest.raises(VerificationError, match=r"the gradient of .*gate: they are inf of its norm apart"):
        model(BATCH)


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
def test_a_model_that_computes_nan_is_verified(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    model = memscale.wrap(gated(itertools.repeat(math.nan)), RECOMPUTED, BATCH)
    assert model(BATCH).isnan().all()
    assert "equal to the bit" in caplog.text


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
def test_layers_that_differ_from_themselves_may_differ_as_much(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    scales = (1 + 1e-5 * (0.618 * number % 1) for number in itertools.count())
    model = memscale.wrap(gated(scales), RECOMPUTED, BATCH)
    model(BATCH).sum().backward()
    assert re.search(r"verified .* within \d\.\de-0[3-9]", caplog.text)


def test_a_batch_with_nothing_to_differentiate_is_not_verified_but_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    model = gated().requires_grad_(False)
    memscale.wrap(model, RECOMPUTED, BATCH)
    assert not model(BATCH).requires_grad
    assert "verified" not in caplog.text
    model.requires_grad_(True)
    model(BATCH).sum().backward()
    assert "verified by one step: loss and 20 gradients" in caplog.text


def test_of_outputs_that_nothing_can_be_differentiated_of_forward_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "memscale")

    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = gated()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).argmax(-1)

    model = memscale.wrap(Best(), RECOMPUTED, BATCH)
    for _ in range(2):
        model(BATCH)
    assert caplog.text.count("verified by forward alone, as nothing depends on parameters: 4 outputs") == 1


def test_the_memory_that_it_takes_is_stated(caplog: pytest.LogCaptureFixture) -> None:
    """The gradients of both steps."""
    caplog.set_level(logging.INFO, "memscale")
    model = memscale.wrap(gated(), RECOMPUTED, BATCH)
    model(BATCH)
    gradients = sum(each.nbytes for each in model.parameters())
    assert f" {format_bytes(2 * gradients)} of host memory for gradients" in caplog.text


def test_other_layers_than_the_plain_model_calls_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = gated()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wrapped = "forward" in vars(self.layers[1])
            for layer in [self.layers[index] for index in ((0, 2, 3) if wrapped else (0, 1, 2, 3))]:
                x = layer(x)
            return x

    model = memscale.wrap(Skips(), RECOMPUTED, BATCH)
    with pytest.raises(VerificationError, match=r"calls layers\.2 where the plain one calls layers\.1"):
        model(BATCH)


class Unrestorable(nn.Module):
    """Draws from the operating system."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x * (0.5 + random.SystemRandom().random()))
        return output


def test_a_model_that_differs_from_itself_by_much_is_not_called_verified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    model = memscale.wrap(Unrestorable(), RECOMPUTED, BATCH)
    model(BATCH).sum().backward()
    assert re.search(r"not verified: the plain step differs from itself by \d\.\de", caplog.text)
    assert "verified by" not in caplog.text


class ChangesInputs(nn.Module):
    """Takes its numbers out of a batch, and changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = gated()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch.pop("x").sub_(1.0))
        return output


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
def test_a_batch_that_the_model_changes_is_changed_once(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    model = memscale.wrap(ChangesInputs(), RECOMPUTED, ({"x": BATCH.clone()},))
    x = BATCH.clone()
    batch = {"x": x}
    model(batch).sum().backward()
    assert torch.equal(x, BATCH - 1)
    assert not batch
    assert "equal to the bit" in caplog.text


class Positions(Gated):
    """A layer with a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table(torch.arange(64)))


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
@pytest.mark.parametrize(
    ("layer", "config"),
    [(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)), EXACT), (Positions, RECOMPUTED)],
    ids=["in place", "sparse"],
)
def test_layers_that_begin_in_place_and_sparse_gradients_are_compared(
    layer: Any, config: Config, has_room: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    model = nn.Sequential(nn.Linear(64, 64), *(layer() for _ in range(3)))
    memscale.wrap(model, config, BATCH)
    model(BATCH).sum().backward()
    assert re.search("verified .* equal to the bit", caplog.text)


def changes_buffers(module: nn.Module) -> None:
    module.seen += 1


def draws(module: nn.Module) -> None:
    torch.rand(1)


class Counting(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


@pytest.mark.parametrize("has_room", [True, False], ids=["one step", "layer by layer"])
@pytest.mark.parametrize(
    ("trouble", "where"), [(changes_buffers, r"the buffer .*seen"), (draws, "the random state")]
)
def test_buffers_and_the_random_state_are_compared(
    trouble: Any, where: str, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: has_room)
    model = memscale.wrap(nn.Sequential(*(Counting() for _ in range(4))), RECOMPUTED, BATCH)
    run = ForwardOverride.__call__

    def off(self: ForwardOverride, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.module, Counting) and any(each.order is Stage.RECOMPUTE for each in self.stages):
            trouble(self.module)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(ForwardOverride, "__call__", off)
    with pytest.raises(VerificationError, match=where):
        model(BATCH)


def test_a_module_that_offloaded_layers_share_may_be_added_up_in_another_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Autocast casts its weight once for all layers of a plain model, and so adds up their gradients in 16 bits."""
    caplog.set_level(logging.INFO, "memscale")

    class Sharing(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.own(torch.tanh(self.shared(x))))

    torch.manual_seed(0)
    shared = nn.Linear(64, 64)
    with executing("1GiB") as gpu:
        model = nn.Sequential(*(Sharing(shared) for _ in range(4)), nn.Linear(64, 8)).to(gpu.device)
        x = torch.randn(64, 64, device=gpu.device)
        memscale.wrap(model, EXACT, x)
        assert model._memscale_executor.plan.host_bytes > 0
        with torch.autocast(gpu.device.type, dtype=torch.bfloat16):
            model(x).float().square().mean().backward()
    assert "verified by one step" in caplog.text


class TestLayerByLayer:
    """Where the plain step does not fit."""

    @pytest.fixture(autouse=True)
    def no_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "_has_room_for_plain_step", lambda executor: False)

    @pytest.mark.parametrize("name", ["gpt2", "cnn", "lora"])
    def test_it_is_compared_all_the_same(self, name: str, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "memscale")
        plain, _ = trained(None, name)
        assert trained(EXACT, name)[0] == plain
        assert "verified layer by layer" in caplog.text

    def test_a_wrong_gradient_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        broken_recomputation(monkeypatch)
        model = memscale.wrap(family().build(), EXACT, family().batch())
        with pytest.raises(VerificationError, match=r"the layer transformer\.h\."):
            family().loss(model, family().batch())

    @pytest.mark.parametrize("on_device", [False, True], ids=["CPU", "device"])
    def test_a_loss_in_tiles_is_compared(self, on_device: bool, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "memscale")
        with executing("2GiB") if on_device else contextlib.nullcontext() as gpu:
            model = family().build().to("cpu" if gpu is None else gpu.device)
            batch = {name: each.to(model.device) for name, each in family().batch().items()}
            memscale.wrap(model, TILED, batch)
            assert model._memscale_executor.plan.loss is not None
            model(**batch).loss.backward()
        assert "and a loss in tiles (1)" in caplog.text
        assert "within 1.0e-04" in caplog.text

    def test_a_loss_in_tiles_that_is_wrong_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        add = _Gradients.add
        monkeypatch.setattr(
            _Gradients, "add", lambda self, tile, slope, weight: add(self, tile, 1.01 * slope, weight)
        )
        model = memscale.wrap(family().build(), TILED, family().batch())
        with pytest.raises(VerificationError, match=r"the layer lm_head .* the gradient of"):
            family().loss(model, family().batch())

    def test_nothing_to_compare_is_not_called_verified(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "memscale")
        model = memscale.wrap(gated(), UNTOUCHED, BATCH)
        model(BATCH)
        assert "verify_correctness: nothing was compared" in caplog.text
        assert "verified" not in caplog.text


def test_a_difference_is_relative_to_the_norm_of_all_that_differs() -> None:
    some = [torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([9.0])]
    others = [torch.tensor([0.0]), torch.tensor([5.0]), torch.tensor([9.0])]
    assert verify._apart(some, others) == pytest.approx(10**0.5 / 5)
    assert verify._apart(some, some) == 0
    assert verify._apart([torch.tensor([3 + 4j])], [torch.tensor([3 + 9j])]) == 1


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([math.nan, 3.0], [math.nan, 3.0], 0),
        ([math.nan, 4.0], [math.nan, 5.0], 0.25),
        ([math.inf, 4.0], [math.inf, 5.0], 0.25),
        ([0.0, 3.0], [math.nan, 3.0], math.inf),
        ([math.nan, 3.0], [0.0, 3.0], math.inf),
        ([math.inf], [LARGEST], math.inf),
        ([math.inf], [-math.inf], math.inf),
        ([0.0], [1.0], math.inf),
    ],
)
def test_what_is_not_finite_must_be_the_same(one: list[float], other: list[float], expected: float) -> None:
    assert verify._apart([torch.tensor(one)], [torch.tensor(other)]) == expected


@pytest.mark.parametrize("other", [LARGEST, -math.inf, math.nan, 0.0])
def test_no_sum_is_near_infinity_but_infinity(other: float) -> None:
    assert verify._is_near(math.inf, math.inf, 0.0)
    assert verify._is_near(math.nan, math.nan, 0.0)
    for bound in (0.0, 0.1):
        assert not verify._is_near(math.inf, other, bound)
        assert not verify._is_near(other, math.inf, bound)
