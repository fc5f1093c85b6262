"""Activations below: they leave the device, come back as they were, and are freed with their graph."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.offload.activations import LEAST_BYTES, Activations
from memscale.simulator import simulate
from memscale.tiers.engine import Engine
from support.devices import accelerator, reference
from support.families import FAMILIES
from support.offloaded import QUIET, activations_of, attached, large_batch, plan_of, train
from support.wrapping import Layer

KIB = 2**10
MIB = 2**20
CPU = torch.device("cpu")
NAMES = ["gpt2", "llama", "vit"]


def stack(layers: int = 4, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width) for _ in range(layers))).train()


def plan_for(model: nn.Sequential, offloading: Offloading | None = None) -> Plan:
    settings = offloading or Offloading("device", activations=True)
    names = [name for name, _ in model.named_children()]
    return Plan(tuple(LayerPlan(n, (n,), ("offloading",), "-", "-", offloading=settings) for n in names))


def host(capacity: int = 2**30, *, logs: bool = False) -> Activations:
    return Activations(Engine(), CPU, capacity=capacity, logs=logs)


# Models ------------------------------------------------------------------------------------------


@pytest.mark.accelerator
@pytest.mark.matrix(5)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("to", ["device", "host"])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_bit_equal_to_the_plain_run(name: str, to: str, recomputed: bool) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    expected = train(family, family.build().to(reference()), large_batch(family, reference()))
    with accelerator() as gpu:
        model, batch = family.build().to(gpu.device), large_batch(family, gpu.device)
        with attached(model, plan_of(model, to=to, recomputed=recomputed)) as executor:
            got = train(family, model, batch)
            activations = activations_of(executor)
            assert activations.bytes_sent > 0
            assert activations.memory.bytes_used == 0, "freed with the graph"
    got.assert_equals(expected)


@pytest.mark.accelerator
@pytest.mark.virtual_only
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_the_peak_falls_and_is_the_simulated_one(recomputed: bool) -> None:
    """Without the technique the peak is another; with it, simulator and device agree to the byte."""
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]

    def peak_of(activations: bool, *, simulated: bool) -> tuple[int, int]:
        with simulate("24GiB") if simulated else accelerator("24GiB") as gpu:
            build = family.build()
            if simulated:
                model, batch = gpu.copy_of(build), gpu.batch_of(large_batch(family))
            else:
                model, batch = build.to(gpu.device), large_batch(family, gpu.device)
            plan = plan_of(
                model, to="host", activations=activations, recomputed=recomputed, repeated_only=True
            )
            with attached(model, plan):
                gpu.tracker.reset_peak()
                before = gpu.tracker.live_bytes(gpu.device)
                loss = family.loss(model, batch)
                left = gpu.tracker.live_bytes(gpu.device) - before
                loss.backward()
                return gpu.peak_bytes, left

    plain_peak, plain_left = peak_of(False, simulated=False)
    peak, left = peak_of(True, simulated=False)
    assert (peak, left) == peak_of(True, simulated=True)
    hidden = 16 * 48 * 32 * 4
    assert plain_left - left >= 3 * hidden, "at least the inputs of the blocks"
    assert (
        peak < plain_peak or recomputed
    )  # there the peak is where the head is, whose input is not a block's


@pytest.mark.accelerator
@pytest.mark.virtual_only
def test_it_fits_where_the_plain_model_does_not() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model(x).square().mean().backward()
        return [each.grad.cpu() for each in model.parameters()]

    x = torch.randn(512, 64)
    expected = step(stack(24), x)
    capacity = "36MiB"
    with accelerator(capacity) as gpu, pytest.raises(torch.OutOfMemoryError):
        step(stack(24).to(gpu.device), x.to(gpu.device))
    with accelerator(capacity) as gpu:
        model = stack(24).to(gpu.device)
        with attached(model, plan_for(model)):
            got = step(model, x.to(gpu.device))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.accelerator
def test_blocks_that_are_slices_of_a_sequence() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            *(part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3)))
        )

    def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model(x).square().mean().backward()
        return [each.grad.cpu() for each in model.parameters()]

    x = torch.randn(512, 64)
    expected = step(build().train().to(reference()), x.to(reference()))
    for recomputed in (False, True):
        with accelerator() as gpu:
            model = build().train().to(gpu.device)
            techniques = ("offloading", "checkpointing") if recomputed else ("offloading",)
            layers = [
                LayerPlan(
                    f"{start}", tuple(map(str, range(start, start + 3))), techniques, "-", "-",
                    offloading=Offloading("host", activations=True),
                )
                for start in (0, 3, 6)
            ]  # fmt: skip
            with attached(model, Plan(tuple(layers))) as executor:
                got = step(model, x.to(gpu.device))
                inputs = 3 * 512 * 64 * 4
                sent = activations_of(executor).bytes_sent
                assert sent == inputs if recomputed else sent > inputs
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.accelerator
def test_chained_blocks_stay_chained() -> None:
    """Of blocks that are recomputed as one, the input of the first goes down, and nothing else is kept."""
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    with accelerator() as gpu:
        model, batch = family.build().to(gpu.device), large_batch(family, gpu.device)
        plan = plan_of(model, to="host", recomputed=True, chained=True, repeated_only=True)
        with attached(model, plan) as executor:
            loss = family.loss(model, batch)
            assert activations_of(executor).bytes_sent == 16 * 48 * 32 * 4
            loss.backward()


@pytest.mark.accelerator
def test_activations_on_disk(tmp_path) -> None:
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    expected = train(family, family.build().to(reference()), large_batch(family, reference()))
    config = Config(enable_logging=False, offload_dir=str(tmp_path))
    with accelerator() as gpu:
        model, batch = family.build().to(gpu.device), large_batch(family, gpu.device)
        with attached(model, plan_of(model, to="disk", repeated_only=True), config) as executor:
            train(family, model, batch).assert_equals(expected)
            activations = activations_of(executor)
            sent = activations.bytes_sent
            assert sent > MIB
            at_home = executor.placement.store.bytes_used
            loss = family.loss(model, batch)
            assert executor.placement.store.bytes_used - at_home >= sent // 2
            del loss
            assert executor.placement.store.bytes_used == at_home


@pytest.mark.accelerator
def test_recurrent_layers_send_activations_and_keep_their_weights() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 4, 64)
    with accelerator() as gpu:
        model = nn.ModuleDict({"lstm": nn.LSTM(64, 64)}).to(gpu.device).train()
        layer = LayerPlan("lstm", ("lstm",), ("offloading",), "-", "-", offloading=Offloading("device", True))
        with attached(model, Plan((layer,))) as executor:
            model["lstm"](x.to(gpu.device))[0].sum().backward()
            assert activations_of(executor).bytes_sent > 0
            assert {each.device.type for each in model.parameters()} == {gpu.device.type}


@pytest.mark.accelerator
def test_where_gradients_are_off_nothing_goes_down() -> None:
    model, x = stack(), torch.randn(512, 64)
    with accelerator() as gpu:
        model = model.to(gpu.device)
        with attached(model, plan_for(model)) as executor:
            for training in (True, False):
                with torch.no_grad():
                    model.train(training)(x.to(gpu.device))
                assert activations_of(executor).bytes_sent == 0
            model(x.to(gpu.device))  # in eval mode, in which it may be trained as well
            assert activations_of(executor).bytes_sent > 0


# What is stored -----------------------------------------------------------------------------------


def test_a_storage_goes_down_once_whatever_views_of_it_are_saved() -> None:
    def compute(product: torch.Tensor) -> torch.Tensor:
        q, k, v = product.split(128, dim=1)
        return (q.t() @ k).sum() + (q * v).sum() + (product * product).sum()

    activations = host()
    x = torch.randn(128, 384, requires_grad=True)
    (expected,) = torch.autograd.grad(compute(x * 1), x)
    with activations.around([]):
        out = compute(x * 1)
    assert activations.bytes_sent == activations.memory.bytes_used == x.nbytes
    (got,) = torch.autograd.grad(out, x)
    assert torch.equal(got, expected)
    assert activations.memory.bytes_used == 0


def test_what_all_layers_save_goes_down_once() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask  # saves the mask alone, as it needs no gradient

    activations, mask = host(), torch.rand(128, 128)
    x = torch.randn(128, 128, requires_grad=True)
    y = x
    for layer in [Masked() for _ in range(5)]:
        with activations.around([layer]):
            y = layer(y, mask)
    assert activations.bytes_sent == mask.nbytes
    y.sum().backward()
    assert torch.allclose(x.grad, mask**5)


def test_parts_of_a_storage_that_are_no_views_of_one_tensor_stay() -> None:
    activations = host()
    x = torch.randn(256, 384, requires_grad=True)
    with activations.around([]):
        first, second, third = torch.unsafe_chunk(x * 1, 3, dim=1)  # as the gates of a GRU are made
        y = (first * second * third).sum()
    assert activations.bytes_sent == x.nbytes // 3, "first * second"
    y.backward()
    parts = x.detach().chunk(3, dim=1)
    assert torch.equal(
        x.grad, torch.cat([parts[1] * parts[2], parts[0] * parts[2], parts[0] * parts[1]], dim=1)
    )


def test_small_tensors_parameters_buffers_and_leaves_stay() -> None:
    activations = host()
    layer = nn.Linear(256, 256)
    layer.register_buffer("table", torch.randn(256, 256))
    small = torch.randn(LEAST_BYTES // 4 - 1, requires_grad=True)
    leaf = torch.randn(256, 256, requires_grad=True)
    with activations.around([layer]):
        outputs = [(small * 1).square().sum(), leaf.square().sum(), (leaf * layer.table).sum()]
        inner = (leaf * 1)[:8]
        outputs.append(layer(inner.clone()).sum())  # the weight is large, and its input small
    assert activations.bytes_sent == 0
    with activations.around([layer]):
        outputs.append(layer(leaf * 1).sum())
    assert activations.bytes_sent == leaf.nbytes
    torch.stack(outputs).sum().backward()
    assert activations.memory.bytes_used == 0


def test_of_16_bit_copies_of_parameters_nothing_is_kept() -> None:
    """Under autocast a linear layer saves a copy of its weight: it is made again, not moved."""

    def run(activations: Activations | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = nn.Linear(256, 256), torch.randn(256, 256, requires_grad=True)
        around = contextlib.nullcontext() if activations is None else activations.around([layer])
        with torch.autocast("cpu", torch.bfloat16), around:
            loss = layer(x * 1).float().square().sum()
        loss.backward()
        return [x.grad, layer.weight.grad, layer.bias.grad]

    activations = host()
    for ours, theirs in zip(run(activations), run(None), strict=True):
        assert torch.equal(ours, theirs)
    in_16_bits, in_32_bits = 256 * 256 * 2, 256 * 256 * 4
    assert activations.bytes_sent == in_16_bits + in_32_bits, (
        "the layer's input, and the output that is squared"
    )


@pytest.mark.parametrize("kind", ["transposed", "expanded", "channels_last", "complex", "bfloat16", "offset"])
def test_geometry_comes_back_as_it_was(kind: str) -> None:
    base = torch.randn(32, 16, 16, 16)
    tensor = {
        "transposed": lambda: base.permute(3, 1, 0, 2),
        "expanded": lambda: base[:1].expand(32, -1, -1, -1),
        "channels_last": lambda: base.to(memory_format=torch.channels_last),
        "complex": lambda: torch.complex(base, -base),
        "bfloat16": lambda: base.bfloat16(),
        "offset": lambda: base[5:],
    }[kind]()
    seen: list[torch.Tensor] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, saved):
            ctx.save_for_backward(saved)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            seen.extend(ctx.saved_tensors)  # asked for twice
            return gradient.expand(2), None

    activations = host()
    x = torch.ones(2, requires_grad=True)
    kept = tensor.clone(memory_format=torch.preserve_format)
    if kind == "expanded":
        base = torch.randn(8, 16, 16, 16)
        tensor = base[:, None].expand(-1, 4, -1, -1, -1)
        kept = tensor.clone()
    with activations.around([]):
        y = Look.apply(x, tensor)
    assert activations.bytes_sent > 0
    y.backward()
    for found in seen:
        assert found.shape == tensor.shape
        assert found.stride() == tensor.stride()
        assert found.dtype == tensor.dtype
        assert torch.equal(found, kept)


# Graphs -------------------------------------------------------------------------------------------


def layer_and_input() -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    return Layer(64).eval(), torch.randn(512, 64, requires_grad=True)  # eval: no dropout, to be compared


def test_a_retained_graph_is_run_again() -> None:
    activations, (layer, x) = host(), layer_and_input()
    with activations.around([layer]):
        loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    below = activations.memory.bytes_used
    assert below > 0
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    assert activations.memory.bytes_used == 0


def test_a_part_of_the_graph_is_run_and_then_the_rest() -> None:
    activations, x = host(), torch.randn(256, 256, requires_grad=True)
    with activations.around([]):
        shared = x * 1
        first, second = (shared * shared).sum(), shared.square().sum()
    first.backward(retain_graph=True)
    second.backward()
    assert torch.equal(x.grad, 4 * x.detach())


def test_gradients_of_gradients() -> None:
    def second(activations: Activations | None) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(256, 256, requires_grad=True)
        if activations is None:
            y = torch.tanh(x * 1).pow(3).sum()
        else:
            with activations.around([]):
                y = torch.tanh(x * 1).pow(3).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    activations = host()
    assert torch.equal(second(activations), second(None))
    assert activations.bytes_sent > 0


def test_a_forward_pass_that_is_not_followed_by_backward_leaves_nothing() -> None:
    activations, (layer, x) = host(), layer_and_input()
    with activations.around([layer]):
        y = layer(x)
    assert activations.memory.bytes_used > 0
    gc.disable()
    try:
        del y
        assert activations.memory.bytes_used == 0
    finally:
        gc.enable()


def test_an_error_in_forward_or_backward_leaves_nothing() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("broken")

    activations, (layer, x) = host(), layer_and_input()
    with pytest.raises(ZeroDivisionError), activations.around([layer]):
        layer(x).sum() / (1 // 0)
    gc.collect()  # the traceback held it
    assert activations.memory.bytes_used == 0
    with activations.around([layer]):
        loss = layer(Broken.apply(layer(x))).sum()
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    gc.collect()
    assert activations.memory.bytes_used == 0
    with activations.around([layer]):
        layer(x).sum().backward()
    assert x.grad is not None


def test_backward_inside_a_layer() -> None:
    activations, (layer, x) = host(), layer_and_input()
    with activations.around([layer]):
        energy = layer(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = force.square().sum()
    loss.backward()
    plain = torch.autograd.grad(
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0].square().sum(), x
    )[0]
    assert torch.equal(x.grad, plain)


def test_a_tensor_that_is_changed_after_it_was_saved() -> None:
    """Backward gets what was saved, where plain autograd would refuse."""
    activations, x = host(), torch.randn(256, 256, requires_grad=True)
    with activations.around([]):
        y = x * 1
        z = y.square().sum()
        with torch.no_grad():
            y.zero_()
        again = y.square().sum()  # other values under the same address
    (z + again).backward()
    assert torch.equal(x.grad, 2 * x.detach())


# Caps ---------------------------------------------------------------------------------------------


@pytest.mark.accelerator
def test_at_the_cap_tensors_stay_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    model, x = stack().to(reference()), torch.randn(512, 64)
    torch.manual_seed(2)
    model(x.to(reference())).sum().backward()
    expected = [each.grad.cpu() for each in model.parameters()]
    with accelerator() as gpu, caplog.at_level(logging.WARNING, logger="memscale"):
        model = stack().to(gpu.device)
        cap = 600_000  # an input and an inner product of one layer fit
        config = Config(max_cpu_offload_gb=cap / 1e9)
        with attached(model, plan_for(model), config) as executor:
            activations = activations_of(executor)
            for _ in range(2):
                model.zero_grad()
                torch.manual_seed(2)
                loss = model(x.to(gpu.device)).sum()
                assert 0 < activations.memory.bytes_used <= cap
                loss.backward()
            got = [each.grad.cpu() for each in model.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    said = [record.message for record in caplog.records if "the tier is full" in record.message]
    assert len(said) == 1
    assert "max_cpu_offload_gb" in said[0]


@pytest.mark.accelerator
def test_parameters_at_home_their_gradients_and_state_count_against_the_cap() -> None:
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        size = sum(each.nbytes for each in model.parameters())
        config = Config(enable_logging=False, max_cpu_offload_gb=(4 * size + 200 * KIB) / 1e9)
        with attached(model, plan_for(model, Offloading("host", activations=True)), config) as executor:
            loss = model(torch.randn(512, 64, device=gpu.device)).sum()
            assert 0 < activations_of(executor).memory.bytes_used <= 200 * KIB
            loss.backward()


def test_a_cap_of_nothing_is_no_crash() -> None:
    activations, (layer, x) = host(0), layer_and_input()
    with activations.around([layer]):
        layer(x).sum().backward()
    assert activations.bytes_sent == 0
    assert x.grad is not None


# Models that are copied, detached, dropped ----------------------------------------------------------


@pytest.mark.accelerator
def test_backward_after_detach() -> None:
    model, x = stack().to(reference()), torch.randn(512, 64)
    torch.manual_seed(2)
    model(x.to(reference())).sum().backward()
    expected = [each.grad.cpu() for each in model.parameters()]
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        torch.manual_seed(2)
        with attached(model, plan_for(model)) as executor:
            loss = model(x.to(gpu.device)).sum()
            activations = activations_of(executor)
            assert activations.memory.bytes_used > 0
        assert all("forward" not in vars(layer) for layer in model)
        loss.backward()
        got = [each.grad.cpu() for each in model.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_has_its_own(way: str) -> None:
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model)) as executor:
            x = torch.randn(512, 64, device=gpu.device)
            loss = model(x).sum()
            twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
            theirs = activations_of(twin._memscale_executor)
            assert theirs is not activations_of(executor)
            assert theirs.bytes_sent == 0
            twin(x).sum().backward()
            assert theirs.bytes_sent == activations_of(executor).bytes_sent
            loss.backward()


@pytest.mark.accelerator
def test_nothing_keeps_a_dropped_model_alive() -> None:
    with accelerator() as gpu:
        model = stack().to(gpu.device)
        Executor(model, plan_for(model), QUIET).attach()
        model(torch.randn(512, 64, device=gpu.device)).sum().backward()
        gone = weakref.ref(model[0])
        gc.collect()
        gc.disable()
        try:
            del model
            assert gone() is None
        finally:
            gc.enable()


@pytest.mark.accelerator
def test_hooks_of_others_around_the_model_are_left_alone() -> None:
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.nbytes)
        return tensor

    with accelerator() as gpu:
        model = stack().to(gpu.device)
        with attached(model, plan_for(model), QUIET) as executor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(torch.randn(512, 64, device=gpu.device)).sum().backward()
            assert seen
            assert activations_of(executor).bytes_sent == 0
