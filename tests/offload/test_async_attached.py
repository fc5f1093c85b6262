"""Transfers beside the computation, as a plan attaches them: the same numbers, nothing stale, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import AsyncOffloadConfig, Config
from memscale.errors import TransferError
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, Plan
from memscale.observe.counters import Meter
from memscale.offload.activations import Activations
from memscale.offload.layer import GradientTransfer
from memscale.offload.prefetch import Prefetcher
from memscale.simulator import simulate
from memscale.tiers.engine import Engine, async_settings
from support.devices import accelerator, reference
from support.families import FAMILIES
from support.offloaded import (
    activations_of,
    attached,
    bytes_prefetched,
    large_batch,
    plan_of,
    prefetcher_of,
    train,
)
from support.pretend_cuda import CUDA, LOG, Pretend, cuda  # noqa: F401  # a fixture
from support.wrapping import Layer

ASYNC = Config(enable_logging=False, async_offload=True, fused_host_step=False)  # to the bit
DEPTH_1 = ASYNC.replace(async_config=AsyncOffloadConfig(prefetch_depth=1))
NAMES = ["gpt2", "llama", "vit"]


def stack(layers: int = 4, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers))).train()


def plan_for(
    model: nn.Sequential, *, to: Any = "host", activations: bool = False, recomputed: bool = False
) -> Plan:
    techniques = ("offloading", "checkpointing") if recomputed else ("offloading",)
    names = [name for name, _ in model.named_children()]
    settings = Offloading(to, activations)
    return Plan(tuple(LayerPlan(n, (n,), techniques, "-", "-", offloading=settings) for n in names))


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    model(x).square().mean().backward()
    return [each.grad.cpu() for each in model.parameters()]


def steps(model: nn.Module, x: torch.Tensor, count: int) -> None:
    for _ in range(count):
        step(model, x)


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    gc.collect()
    left = [each for each in threading.enumerate() if each.name.startswith("memscale-offload")]
    for thread in left:
        thread.join(10)  # one that has been told to end may still be about to
    assert not [each for each in left if each.is_alive()]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each working copy whether it had been fetched ahead."""
    found: list[bool] = []
    take = Prefetcher.take

    def watched(self: Prefetcher, *args: Any) -> torch.Tensor | None:
        values = take(self, *args)
        found.append(values is not None)
        return values

    monkeypatch.setattr(Prefetcher, "take", watched)
    return found


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.matrix(5)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("activations", [False, True], ids=["parameters", "and activations"])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_bit_equal_to_the_plain_run(
    name: str, activations: bool, recomputed: bool, taken: list[bool]
) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    expected = train(family, family.build().to(reference()), large_batch(family, reference()))
    with accelerator() as gpu:
        model, batch = family.build().to(gpu.device), large_batch(family, gpu.device)
        plan = plan_of(model, to="host", activations=activations, recomputed=recomputed)
        with attached(model, plan, ASYNC) as executor:
            got = train(family, model, batch)
            assert bytes_prefetched(prefetcher_of(executor)) == 0
            if activations:
                assert activations_of(executor).bytes_sent > 0
                assert activations_of(executor).memory.bytes_used == 0
    got.assert_equals(expected)
    assert sum(taken) > 0.9 * len(taken), "nearly all were fetched ahead"


@pytest.mark.accelerator
def test_parameters_on_disk_are_fetched_ahead(tmp_path: Any, taken: list[bool]) -> None:
    x = torch.randn(32, 64)
    expected = step(stack().to(reference()), x.to(reference()))
    config = ASYNC.replace(offload_dir=str(tmp_path))
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model, to="disk"), config) as executor:
            assert executor.placement.store.bytes_used > 0
            assert_equal(step(model, x.to(gpu.device)), expected)
    assert all(taken)


@pytest.mark.accelerator
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_accumulation_and_a_retained_graph(recomputed: bool) -> None:
    def run(model: nn.Module, device: Any) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model.zero_grad()
        for _ in range(2):
            model(x.to(device)).square().mean().backward()
        loss = model(x.to(device)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [each.grad.cpu() for each in model.parameters()]

    x = torch.randn(512, 64)
    expected = run(stack().to(reference()), reference())
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model, activations=True, recomputed=recomputed), ASYNC):
            assert_equal(run(model, gpu.device), expected)


@pytest.mark.accelerator
def test_gradients_of_gradients_frozen_and_unfrozen_parameters() -> None:
    def run(model: nn.Sequential, device: Any) -> list[torch.Tensor]:
        model.eval()
        model.zero_grad()
        inputs = x.detach().to(device).requires_grad_()
        model[1].requires_grad_(False)
        (gradient,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        gradient.square().sum().backward()
        model[1].requires_grad_(True)
        model(inputs).sum().backward()
        return [inputs.grad.cpu(), *(each.grad.cpu() for each in model.parameters())]

    x = torch.randn(16, 64)
    expected = run(stack().to(reference()), reference())
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model), ASYNC):
            for ours, theirs in zip(run(model, gpu.device), expected, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.accelerator
def test_hooks_on_parameters_see_their_gradients() -> None:
    seen: list[str] = []
    with accelerator() as gpu:
        model = stack(2).to(gpu.device)
        with attached(model, plan_for(model), ASYNC):
            weight = model[0].up.weight
            weight.register_hook(lambda gradient: seen.append(f"gradient on {gradient.device.type}"))
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(f"home on {p.grad.device.type}"))
            step(model, torch.randn(8, 64, device=gpu.device))
            assert seen == ["gradient on cpu", "home on cpu"]
            (only,) = torch.autograd.grad(model(torch.randn(8, 64, device=gpu.device)).sum(), weight)
            assert only.device.type == "cpu"


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_so_many_layers_ahead_and_no_more() -> None:
    """While a layer computes, the copies of the next ones are there, and nobody else's."""

    def note(seen: list[int], prefetcher: Prefetcher, one: int, *_: Any) -> None:
        seen.append(bytes_prefetched(prefetcher) // one)

    with accelerator() as gpu:
        for depth in (1, 2, 3):
            model = stack(6).to(gpu.device)
            x = torch.randn(8, 64, device=gpu.device)
            config = ASYNC.replace(async_config=AsyncOffloadConfig(prefetch_depth=depth))
            one = sum(each.nbytes for each in model[0].parameters())
            with attached(model, plan_for(model, recomputed=True), config) as executor:
                prefetcher = prefetcher_of(executor)
                seen: list[int] = []
                watch = functools.partial(note, seen, prefetcher, one)
                for layer in model:
                    layer.down.register_forward_hook(watch)
                step(model, x)
            one_way = [min(depth, 5 - index) for index in range(6)]
            assert seen == one_way + one_way, "forward, and backward in the other order"


@pytest.mark.accelerator
def test_two_gradients_are_in_flight_and_no_more() -> None:
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model), ASYNC) as executor:
            held = prefetcher_of(executor)._in_flight
            seen: list[int] = []
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: seen.append(len(held)))
            step(model, torch.randn(8, 64, device=gpu.device))
            assert max(seen) == 2
            assert not held


@pytest.mark.accelerator
@pytest.mark.virtual_only
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_the_first_step_is_as_every_other_and_as_simulated(recomputed: bool) -> None:
    """A prediction simulates one step: before the first one, the plan says in what order layers are reached."""
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]

    def peaks(config: Config, *, simulated: bool) -> list[int]:
        with simulate("24GiB") if simulated else accelerator("24GiB") as gpu:
            if simulated:
                model, batch = gpu.copy_of(family.build()), gpu.batch_of(large_batch(family))
            else:
                model, batch = family.build().to(gpu.device), large_batch(family, gpu.device)
            plan = plan_of(model, to="host", recomputed=recomputed, repeated_only=True)
            found = []
            with attached(model, plan, config):
                for _ in range(3):
                    gpu.tracker.reset_peak()
                    loss = family.loss(model, batch)
                    of_forward = gpu.tracker.workspace_bytes(gpu.device)
                    loss.backward()
                    del loss
                    model.zero_grad()
                    found.append(gpu.peak_bytes)
                    workspace.append(gpu.tracker.workspace_bytes(gpu.device) - of_forward)
            return found

    workspace: list[int] = []  # of backward, which the first step makes, before its peak or after
    first, second, third = peaks(ASYNC, simulated=False)
    assert second == third
    assert 0 <= second - first <= workspace[0]
    assert peaks(ASYNC, simulated=True) == [first, second, third]
    sync = peaks(Config(enable_logging=False, fused_host_step=False), simulated=False)
    assert second > sync[1], "what is prefetched is on the device"


# Nothing stale ------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_a_parameter_that_changes_after_it_was_fetched_is_fetched_again(taken: list[bool]) -> None:
    def build() -> nn.Sequential:
        model = stack().eval()

        def change(*_: Any) -> None:
            with torch.no_grad():
                model[2].up.weight.mul_(2)  # in place: its version tells
                model[3].up.weight.data = model[3].up.weight.data * 2  # other memory: that tells

        model[1].down.register_forward_pre_hook(change)
        return model

    x = torch.randn(8, 64)
    with torch.no_grad():
        expected = build().to(reference())(x.to(reference())).cpu()
    with accelerator() as gpu:
        model = build().to(gpu.device)
        two_ahead = ASYNC.replace(async_config=AsyncOffloadConfig(prefetch_depth=2))
        with attached(model, plan_for(model), two_ahead), torch.no_grad():
            assert torch.equal(model(x.to(gpu.device)).cpu(), expected)
    assert taken.count(False) == 2


@pytest.mark.accelerator
@pytest.mark.virtual_only
def test_nothing_is_fetched_across_an_optimizer_step() -> None:
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        x = torch.randn(8, 64, device=gpu.device)
        with attached(model, plan_for(model), ASYNC) as executor:
            live = gpu.tracker.live_bytes(gpu.device)
            for _ in range(2):
                loss = model(x).square().mean()
                assert bytes_prefetched(prefetcher_of(executor)) == 0
                loss.backward()
                assert bytes_prefetched(prefetcher_of(executor)) == 0
            del loss
            assert gpu.tracker.live_bytes(gpu.device) == live + gpu.tracker.workspace_bytes(gpu.device)


@pytest.mark.accelerator
def test_an_order_that_is_not_the_plans_is_learned(taken: list[bool]) -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer(64) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in (3, 0, 4, 2, 1):
                x = self.layers[index](x)
            return x

    x = torch.randn(8, 64)
    expected = step(Backwards().train().to(reference()), x.to(reference()))
    with accelerator() as gpu:
        model = Backwards().train().to(gpu.device)
        layers = tuple(
            LayerPlan(
                f"layers.{n}", (f"layers.{n}",), ("offloading",), "-", "-", offloading=Offloading("host")
            )
            for n in range(5)
        )
        with attached(model, Plan(layers), DEPTH_1):
            assert_equal(step(model, x.to(gpu.device)), expected)
            assert not all(taken)
            taken.clear()
            assert_equal(step(model, x.to(gpu.device)), expected)
            assert all(taken)


@pytest.mark.accelerator
def test_chained_blocks_are_reached_in_the_order_of_their_segments(taken: list[bool]) -> None:
    x = torch.randn(8, 64)
    expected = step(stack(6).to(reference()), x.to(reference()))
    with accelerator() as gpu:
        model = stack(6).to(gpu.device)
        layers = tuple(
            LayerPlan(
                f"{n}", (f"{n}",), ("offloading", "checkpointing"), "-", "-",
                offloading=Offloading("host"), checkpointing=Checkpointing((), n % 3 != 0),
            )
            for n in range(6)
        )  # fmt: skip
        with attached(model, Plan(layers), DEPTH_1):
            assert_equal(step(model, x.to(gpu.device)), expected)
    assert all(taken), "in the very first step"


# Nothing left behind ------------------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.virtual_only
@pytest.mark.parametrize("where", ["layer", "between", "backward"])
def test_an_error_leaves_no_copies_on_the_device(where: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack()
            self.fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            if self.fails and where == "between":
                raise ArithmeticError("between two layers")
            return self.layers[3](self.layers[2](x))

    def fail(*_: Any) -> None:
        if model.fails:
            raise ArithmeticError("in a layer")

    with accelerator() as gpu:
        model = Model().train().to(gpu.device)
        x = torch.randn(8, 64, device=gpu.device)
        layers = plan_for(model.layers)
        renamed = [
            LayerPlan(
                f"layers.{each.name}",
                (f"layers.{each.name}",),
                each.techniques,
                "-",
                "-",
                offloading=each.offloading,
            )
            for each in layers.layers
        ]
        with attached(model, Plan(tuple(renamed)), ASYNC) as executor:
            step(model, x)
            model.zero_grad()
            live = gpu.tracker.live_bytes(gpu.device)
            model.fails = True
            if where == "layer":
                model.layers[1].down.register_forward_pre_hook(fail)
            if where == "backward":
                model.layers[2].up.weight.register_hook(fail)
            with pytest.raises(ArithmeticError):
                step(model, x)
            gc.collect()
            if where == "backward":  # of which nobody is told: the next forward pass drops them
                model.fails = False
                with torch.no_grad():
                    model(x)
            assert bytes_prefetched(prefetcher_of(executor)) == 0
            left = gpu.tracker.live_bytes(gpu.device) - live
            # After an error in backward the graph itself is still there, of a plain model too.
            assert left == 0 or (where == "backward" and left < model.layers[0].up.weight.nbytes)


@pytest.mark.accelerator
@pytest.mark.virtual_only
def test_a_forward_pass_without_backward_leaves_nothing() -> None:
    """Some operations save their own output; behind a hook that would be a cycle."""
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        x = torch.randn(8, 64, device=gpu.device)
        for config in (ASYNC, ASYNC.replace(async_offload=False)):
            with attached(model, plan_for(model, activations=True), config):
                live = gpu.tracker.live_bytes(gpu.device)
                for _ in range(2):
                    model(x)
                workspace = gpu.tracker.workspace_bytes(gpu.device)
                assert gpu.tracker.live_bytes(gpu.device) in (live, live + workspace)


@pytest.mark.accelerator
def test_layers_that_are_skipped_are_dropped() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack(6)
            self.skips = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                if not (self.skips and index in (2, 3, 5)):
                    x = layer(x)
            return x

    plain, x = Skipping().train().to(reference()), torch.randn(8, 64)
    with accelerator() as gpu:
        model = Skipping().train().to(gpu.device)
        layers = tuple(
            LayerPlan(
                f"layers.{n}", (f"layers.{n}",), ("offloading",), "-", "-", offloading=Offloading("host")
            )
            for n in range(6)
        )
        with attached(model, Plan(layers), ASYNC) as executor:
            for skips in (False, True, False, True):
                plain.skips = model.skips = skips
                for one in (plain, model):
                    torch.manual_seed(2)
                    one.zero_grad(set_to_none=False)
                    one(x.to(gpu.device if one is model else reference())).sum().backward()
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    assert (ours.grad is None) == (theirs.grad is None)
                    if ours.grad is not None:
                        assert torch.equal(ours.grad, theirs.grad.cpu())
                assert bytes_prefetched(prefetcher_of(executor)) == 0


@pytest.mark.accelerator
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_its_own(way: str, taken: list[bool]) -> None:
    x = torch.randn(512, 64)
    expected = step(stack().to(reference()), x.to(reference()))
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model, activations=True), ASYNC) as executor:
            assert_equal(step(model, x.to(gpu.device)), expected)
            twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
            assert prefetcher_of(twin._memscale_executor) is not prefetcher_of(executor)
            taken.clear()
            assert_equal(step(twin, x.to(gpu.device)), expected)
            assert any(taken)
            hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
            assert hooks > (0, 0)
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == (0, 0)
        twin._memscale_executor.detach()
        assert (len(twin._forward_hooks), len(twin._forward_pre_hooks)) == (0, 0)


# Errors of transfers ------------------------------------------------------------------------------


@pytest.fixture
def offloaded_to_disk(tmp_path: Any) -> Iterator[tuple[nn.Sequential, torch.Tensor]]:
    """A model on the CPU whose activations go to disk by worker threads."""
    model, x = stack(), torch.randn(512, 64)
    config = ASYNC.replace(offload_dir=str(tmp_path))
    with attached(model, plan_for(model, to="device", activations=True), config):
        yield model, x


def test_on_a_cpu_host_activations_go_to_disk_by_workers(
    offloaded_to_disk: tuple[nn.Sequential, torch.Tensor],
) -> None:
    model, x = offloaded_to_disk
    expected = step(stack().to(reference()), x.to(reference()))
    for _ in range(3):
        assert_equal(step(model, x), expected)
    executor = model._memscale_executor
    assert activations_of(executor).bytes_sent > 0
    assert executor.placement.store.bytes_used == 0
    assert any(thread.name.startswith("memscale-offload") for thread in threading.enumerate())


def test_a_transfer_error_surfaces_in_the_training_thread(
    offloaded_to_disk: tuple[nn.Sequential, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = offloaded_to_disk
    before = copy.deepcopy(model.state_dict())

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        with pytest.raises(TransferError, match="the disk is on fire") as raised:
            steps(model, x, 3)
        assert isinstance(raised.value.__cause__, OSError)
    del raised
    gc.collect()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.accelerator
def test_a_tensor_that_is_changed_while_it_is_on_its_way_is_an_error() -> None:
    """Never wrong numbers. Plain autograd refuses such a graph, too."""
    with accelerator() as gpu:
        activations = Activations(Engine(AsyncOffloadConfig()), gpu.device, capacity=2**30)
        x = torch.randn(256, 256, device=gpu.device, requires_grad=True)
        with activations.around([]):
            y = x * 1
            loss = y.square().sum()
        with torch.no_grad():
            y.zero_()
        with pytest.raises(TransferError, match="changed in place while it was being stored"):
            loss.backward()


def test_the_cap_on_disk_is_kept(tmp_path: Any) -> None:
    model, x = stack(), torch.randn(512, 64)
    expected = step(stack().to(reference()), x.to(reference()))
    cap = 800_000
    config = ASYNC.replace(offload_dir=str(tmp_path), max_disk_offload_gb=cap / 1e9)
    with attached(model, plan_for(model, to="device", activations=True), config) as executor:
        torch.manual_seed(2)
        loss = model(x).square().mean()
        assert 0 < executor.placement.store.bytes_used <= cap
        loss.backward()
        assert_equal([each.grad for each in model.parameters()], expected)


# On CUDA ------------------------------------------------------------------------------------------


def test_a_gradient_goes_home_on_a_stream_of_its_own(cuda: Any) -> None:  # noqa: F811
    engine = Engine(AsyncOffloadConfig())
    transfer = GradientTransfer(engine, torch.device("cpu"), Meter())
    gradient = torch.arange(6.0).view(2, 3).t().as_subclass(Pretend)
    LOG.clear()
    landing = transfer.start(gradient)
    assert LOG == [
        "compute: record event 1",
        "copy stream 1: wait for event 1",
        "copy stream 1: copy down, beside it",
        "copy stream 1: record event 2",
    ]
    assert engine.pinned.bytes_locked > 0
    LOG.clear()
    home = transfer.finish(landing)
    assert LOG == ["synchronize event 2"]
    assert home is landing, "it stays where it arrived"
    assert torch.equal(home, torch.arange(6.0).view(2, 3).t())
    assert home.stride() == (1, 3)


# Switches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "config", "expected"),
    [
        (False, Config(), False),
        (True, Config(), True),
        (False, Config(async_offload=True), True),
        (True, Config(async_offload=False), False),
    ],
)
def test_who_switches_it_on(plan: bool, config: Config, expected: bool) -> None:
    assert (async_settings(Plan((), async_offload=plan), config) is not None) is expected


def test_settings_of_the_user() -> None:
    settings = AsyncOffloadConfig(prefetch_depth=5)
    assert async_settings(Plan((), async_offload=True), Config(async_config=settings)) == settings


@pytest.mark.accelerator
def test_wrap_takes_both_settings(taken: list[bool]) -> None:
    def run(prepare: Callable[[nn.Module, torch.Tensor], None], device: Any) -> list[torch.Tensor]:
        model, inputs = stack(6).to(device), x.to(device)
        prepare(model, inputs)
        return step(model, inputs)

    x = torch.randn(8, 64)
    expected = run(lambda model, inputs: None, reference())

    def wrap(model: nn.Module, inputs: torch.Tensor) -> None:
        settings = AsyncOffloadConfig(prefetch_depth=1)
        config = Config(mode="aggressive", use_mixed_precision=False, enable_logging=False)
        memscale.wrap(model, config, inputs, async_offload=True, async_config=settings)
        prefetcher = prefetcher_of(model._memscale_executor)
        assert prefetcher.engine.depth == 1

    with accelerator() as gpu:
        for ours, theirs in zip(run(wrap, gpu.device), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert any(taken)


# What users change in between ------------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.parametrize("config", [ASYNC, ASYNC.replace(async_offload=False)], ids=["ahead", "when needed"])
def test_a_layer_that_is_replaced_is_not_fetched_any_more(config: Config) -> None:
    """A new head on a trained model: the old one is gone, and the others train on as the plain ones do."""

    def run(wrapped: bool) -> list[torch.Tensor]:
        with accelerator() as gpu:
            model, x = stack().to(gpu.device), torch.ones(8, 64, device=gpu.device)
            gpu.manual_seed(3)
            with attached(model, plan_for(model), config) if wrapped else contextlib.nullcontext():
                steps(model, x, 2)
                model[3] = nn.Sequential(nn.Tanh())
                gc.collect()
                found = [*step(model, x), *step(copy.deepcopy(model), x)]
            return [*found, *step(model, x)]

    assert_equal(run(True), run(False))
