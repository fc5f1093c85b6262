"""Parameters on disk on a CPU host: the same training to the bit, and pages that are in memory only while in use."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.offload.placement import ModelPlacement
from memscale.tiers.disk import PAGE
from support.devices import accelerator, reference
from support.disk import QUIET, adamw, assert_same, disk_plan, on_disk, resident_bytes, train
from support.families import FAMILIES, Family
from support.wrapping import Stack

pytestmark = pytest.mark.cpu_only

NAMES = ["gpt2", "bert", "llama", "t5", "vit", "whisper", "mixtral", "resnet", "cnn", "unet", "tied", "lora"]
NAMES += ["frozen_embeddings", "shared_block", "kwargs_only", "transformer_encoder", "lstm"]


# A page fault in one tensor brings in up to 15 pages around it, a neighbour's too: some come back after they left.
STRAY = 4 * 16 * PAGE


def family_of(name: str) -> Family:
    if FAMILIES[name].transformers:
        pytest.importorskip("transformers")
    return FAMILIES[name]


def large(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.nbytes >= PAGE]


def wide(layers: int = 4, width: int = 128) -> Stack:
    torch.manual_seed(0)
    return Stack(layers, width).train()


# ---------------------------------------------------------------------- the same numbers


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", NAMES)
def test_trains_as_the_plain_model_does(name: str) -> None:
    family = family_of(name)
    expected = train(family, family.build())
    model = family.build()
    with on_disk(model) as executor:
        placement = executor.placement
        assert placement.on_disk
        assert placement.store.bytes_used >= sum(parameter.nbytes for parameter in placement.on_disk)
        got = train(family, model)
        moved = placement.states.bytes_moved
    assert_same(got, expected)
    assert moved > 0 or name == "lora"  # whose adapters are smaller than a page


@pytest.mark.matrix(5)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("state", [None, "device", "host", "disk"])
def test_every_combination(checkpointing: bool, activations: bool, state: Any) -> None:
    family = family_of("tied")
    expected = train(family, family.build())
    model = family.build()
    with on_disk(model, checkpointing=checkpointing, activations=activations, state=state):
        assert_same(train(family, model), expected)


def test_all_parameters_of_a_page_or_more_go_and_the_others_stay() -> None:
    model = wide()
    assert any(parameter.nbytes < PAGE for parameter in model.parameters())
    with on_disk(model) as executor:
        assert {id(each) for each in executor.placement.on_disk} == {id(each) for each in large(model)}
        assert all(executor.placement.store.holds(parameter) for parameter in large(model))
        expected = sum(-(-parameter.nbytes // PAGE) * PAGE for parameter in large(model))
        assert executor.placement.store.bytes_used == expected


def test_a_tied_parameter_is_on_disk_once() -> None:
    family = family_of("gpt2")
    model = family.build()
    with on_disk(model) as executor:
        assert model.lm_head.weight is model.transformer.wte.weight
        kept = {parameter.data_ptr() for parameter in executor.placement.on_disk}
        assert len(kept) == len(executor.placement.on_disk)
        assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


def test_parameters_that_share_memory_stay_in_memory() -> None:
    model = wide(2)
    model.layers[1].up.weight.data = model.layers[0].up.weight.data
    with on_disk(model) as executor:
        assert not executor.placement.store.holds(model.layers[0].up.weight)
        assert model.layers[1].up.weight.data_ptr() == model.layers[0].up.weight.data_ptr()
        assert executor.placement.store.holds(model.layers[0].down.weight)


def test_dimensions_keep_their_order_in_memory() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 16, 3)).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    strides = [parameter.stride() for parameter in model.parameters()]
    x = torch.randn(2, 16, 8, 8)
    with on_disk(model, checkpointing=False) as executor:
        assert executor.placement.on_disk
        assert [parameter.stride() for parameter in model.parameters()] == strides
        for each in (plain, model):
            each(x).square().mean().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
            assert a.grad.stride() == b.grad.stride()
    assert [parameter.stride() for parameter in model.parameters()] == strides


# ---------------------------------------------------------------------- pages


class Watched(ModelPlacement):
    """Notes how much of a model's parameters and gradients is in memory when a layer begins or ends."""

    model: nn.Module
    most = 0

    def look(self) -> None:
        tensors = [each for each in self.model.parameters() if self.store.holds(each)]
        gradients = [each.grad for each in tensors if each.grad is not None and self.store.holds(each.grad)]
        self.most = max(self.most, resident_bytes(*tensors, *gradients))

    def begin_use(self, parameters: Any) -> Any:
        mapped = super().begin_use(parameters)
        self.look()
        return mapped

    def end_use(self, mapped: Any) -> None:
        self.look()
        super().end_use(mapped)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("trained", ["all", "one layer"])
def test_only_the_layer_that_computes_has_pages(checkpointing: bool, trained: str) -> None:
    model = wide(6)
    if trained == "one layer":
        model.layers.requires_grad_(False)
        model.layers[3].requires_grad_(True)
    x = torch.randn(4, 128, requires_grad=True)  # so that backward goes through the frozen layers
    with on_disk(model, checkpointing=checkpointing, activations=False) as executor:
        placement = executor.placement
        placement.__class__, placement.model = Watched, model
        for parameter in placement.on_disk:
            placement.store.release_pages(parameter)
        model(x).sum().backward()
        a_layer = sum(each.nbytes for each in large(model.layers[0]))
        assert 0 < placement.most <= 2 * a_layer + 16 * PAGE
        gradients = [each.grad for each in placement.on_disk if each.grad is not None]
        trained_here = model if trained == "all" else model.layers[3]
        assert len(gradients) == len(large(trained_here))
        assert all(placement.store.holds(gradient) for gradient in gradients)
        assert resident_bytes(*placement.on_disk, *gradients) <= STRAY
        del placement.model


def test_no_pages_are_left_after_evaluation_and_after_a_step() -> None:
    model = wide()
    optimizer = adamw(model)
    with on_disk(model) as executor:
        placement = executor.placement
        with torch.no_grad():
            model.eval()(torch.randn(2, 128))
        assert resident_bytes(*placement.on_disk) <= STRAY
        model.train()(torch.randn(2, 128)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        gradients = [parameter.grad for parameter in placement.on_disk]
        assert resident_bytes(*gradients) > 0  # the user has looked at all of them
        optimizer.step()
        state = [
            optimizer.state[each][name] for each in placement.on_disk for name in ("exp_avg", "exp_avg_sq")
        ]
        assert all(placement.states.is_stored(each) and placement.store.holds(each) for each in state)
        assert resident_bytes(*placement.on_disk, *gradients, *state) <= STRAY


def test_activations_wait_on_disk() -> None:
    model = wide()
    x = torch.randn(2 * 64, 128)  # 64 KiB
    with on_disk(model, activations=True) as executor:
        store = executor.placement.store
        before = store.bytes_used
        output = model(x)
        assert store.bytes_used - before == 5 * x.nbytes  # the inputs of four layers and of the head
        output.sum().backward()
        gradients = sum(each.grad.nbytes for each in executor.placement.on_disk)
        assert store.bytes_used - before == gradients
        model.zero_grad()
        assert store.bytes_used == before


# ---------------------------------------------------------------------- gradients


def test_micro_batches_add_to_the_gradient_on_disk() -> None:
    plain, model = wide(), wide()
    batches = [torch.randn(2, 128) for _ in range(3)]
    model.zero_grad()
    with on_disk(model) as executor:
        placement = []
        for index, batch in enumerate(batches):
            for each in (plain, model):
                torch.manual_seed(index)
                each(batch).square().mean().backward()
            placement.append([parameter.grad for parameter in executor.placement.on_disk])
        assert all(a is b for a, b in zip(placement[0], placement[2], strict=True))
        assert all(executor.placement.store.holds(gradient) for gradient in placement[0])
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        model.zero_grad(set_to_none=False)
        assert all(float(parameter.grad.abs().sum()) == 0 for parameter in model.parameters())
        model.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_no_ordinary_gradient_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(256, 64, sparse=True), nn.Linear(64, 64))
    with on_disk(model, checkpointing=False) as executor:
        model(torch.arange(4)).sum().backward(create_graph=True)
        assert model[0].weight.grad.is_sparse
        assert model[1].weight.grad.requires_grad
        assert not executor.placement.store.holds(model[1].weight.grad)


def test_an_optimizer_that_steps_in_backward() -> None:
    plain, model = wide(), wide()
    for each in (plain, model):
        for parameter in each.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

            def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    with on_disk(model):
        for seed in range(2):
            for each in (plain, model):
                torch.manual_seed(seed)
                each(torch.randn(2, 128)).square().mean().backward()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_parameter_changed_between_forward_and_backward_is_still_found_out() -> None:
    from memscale.errors import RecomputeError

    model = wide()
    with on_disk(model):
        output = model(torch.randn(2, 128)).sum()
        with torch.no_grad():
            model.layers[0].up.weight.add_(1)
        with pytest.raises(RecomputeError, match="changed"):
            output.backward()


# ---------------------------------------------------------------------- copies and files


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    model = wide()
    config = Config(enable_logging=False, offload_dir=tmp_path)
    with on_disk(model, config) as executor:
        optimizer = adamw(model)
        model(torch.randn(2, 128)).sum().backward()
        optimizer.step()
        yield model, executor
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch]
)
def test_a_copy_is_in_ordinary_memory_and_trains(trained: Any, copied: Any) -> None:
    model, executor = trained
    twin = copied(model)
    store = executor.placement.store
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(store.holds(parameter) for parameter in twin.parameters())
    theirs = twin._memscale_executor
    assert theirs is not executor
    assert theirs.placement.store is not store
    used = store.bytes_used
    optimizer = adamw(twin)
    twin(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    assert theirs.placement.states.bytes_moved > 0
    theirs.detach()
    assert all(not theirs.placement.store.holds(each["exp_avg"]) for each in optimizer.state.values())
    assert store.bytes_used == used


def test_state_dict_holds_true_values_and_loads(trained: Any) -> None:
    model, executor = trained
    plain = wide()
    saved = model.state_dict()
    plain.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    model.load_state_dict({name: torch.ones_like(value) for name, value in saved.items()})
    assert all(executor.placement.store.holds(parameter) for parameter in large(model))
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())


def test_save_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    family = family_of("gpt2")
    model = family.build()
    with on_disk(model):
        train(family, model, 1)
        model.save_pretrained(tmp_path)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.accelerator
def test_moved_by_the_user_it_is_an_ordinary_model() -> None:
    model = wide()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    with accelerator() as gpu:
        executor = Executor(model, disk_plan(model), QUIET)
        executor.attach()
        model.to(gpu.device)
        assert {parameter.device.type for parameter in model.parameters()} == {gpu.device.type}
        assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), values, strict=True))
        executor.detach()
    model = wide()
    with on_disk(model):
        model.double()
        model(torch.randn(2, 128, dtype=torch.float64)).sum().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float64}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


# ---------------------------------------------------------------------- on and off


def test_detach_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = wide()
    before, values = picture(model), [parameter.detach().clone() for parameter in model.parameters()]
    config = Config(enable_logging=False, offload_dir=tmp_path)
    for _ in range(3):
        with on_disk(model, config) as executor:
            model(torch.randn(2, 128)).sum().backward()
        assert executor.placement.store.bytes_used == 0
        assert all(parameter._post_accumulate_grad_hooks is None for parameter in model.parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())
        model.zero_grad()
    assert picture(model) == before
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))


def picture(model: nn.Module) -> list[Any]:
    """The modules' own attributes and the parameters, all of them the same objects."""
    modules = [
        (name, type(each), [(key, id(value)) for key, value in vars(each).items()])
        for name, each in model.named_modules()
    ]
    parameters = [
        (name, id(each), each.stride(), each.requires_grad, each.dtype)
        for name, each in model.named_parameters()
    ]
    return [modules, parameters]


def test_many_times_leave_nothing_behind(tmp_path: Path) -> None:
    model = wide()
    config = Config(enable_logging=False, offload_dir=tmp_path)

    def once() -> None:
        with on_disk(model, config):
            model(torch.randn(2, 128)).sum().backward()
        model.zero_grad()

    def alive() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        once()
    before = alive()
    for _ in range(20):
        once()
    # What each time left behind would be 20 at least; torch makes one or two once.
    assert alive() < before + 20
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_dropped_leaves_nothing_behind(tmp_path: Path) -> None:
    model = wide()
    gone = [weakref.ref(model), weakref.ref(model.layers[0].up.weight)]
    config = Config(enable_logging=False, offload_dir=tmp_path)
    executor = Executor(model, disk_plan(model), config)
    executor.attach()
    optimizer = adamw(model)
    model(torch.randn(2, 128)).sum().backward()
    optimizer.step()
    store = executor.placement.store
    assert store.bytes_used > 0
    file = store.file
    del executor, model, optimizer, store
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert file.bytes_used == 0


def test_another_plan_brings_parameters_back(tmp_path: Path) -> None:
    model = wide()
    optimizer = adamw(model)
    with on_disk(model, Config(enable_logging=False, offload_dir=tmp_path)) as executor:
        model(torch.randn(2, 128)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.layers[0].up.weight]["exp_avg"]
        store = executor.placement.store
        part = executor.plan.layers[:1]
        executor.replan(Plan(part, optimizer=executor.plan.optimizer))
        assert [id(each) for each in executor.placement.on_disk] == [
            id(each) for each in large(model.layers[0])
        ]
        assert not store.holds(model.layers[1].up.weight)
        assert not store.holds(model.layers[1].up.weight.grad)
        assert optimizer.state[model.layers[0].up.weight]["exp_avg"] is state  # it has not moved
        del state
        executor.replan(Plan((LayerPlan("head", ("head",), (), "none", "none"),)))
        assert executor.placement.on_disk == []
        assert not store.holds(optimizer.state[model.layers[0].up.weight]["exp_avg"])
        assert store.bytes_used == 0
        executor.replan(disk_plan(model))
        model(torch.randn(2, 128)).sum().backward()
        optimizer.step()
        assert store.holds(optimizer.state[model.layers[0].up.weight]["exp_avg"])


def test_state_stays_on_disk_while_the_plan_is_suspended() -> None:
    model = wide()
    optimizer = adamw(model)
    with on_disk(model) as executor:
        model(torch.randn(2, 128)).sum().backward()
        optimizer.step()
        used = executor.placement.store.bytes_used
        with executor.suspended() as plain:
            assert "_memscale_executor" not in vars(plain)
            assert executor.placement.store.bytes_used in (0, used)
            plain(torch.randn(2, 128)).sum().backward()
        assert executor.placement.store.bytes_used == used
        optimizer.step()
        assert executor.placement.states.is_stored(optimizer.state[model.layers[0].up.weight]["exp_avg"])


# ---------------------------------------------------------------------- below an accelerator


@pytest.mark.accelerator
@pytest.mark.parametrize("name", ["gpt2", "tied"])
def test_with_an_accelerator_the_master_is_on_disk_and_the_copy_on_the_device(name: str) -> None:
    family = family_of(name)

    def losses_of(model: nn.Module, device: Any) -> list[float]:
        torch.manual_seed(11)
        optimizer, losses = adamw(model), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = family.loss(model, family.batch(device=device))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    expected = losses_of(family.build().to(reference()), reference())
    with accelerator() as gpu:
        model = family.build().to(gpu.device)
        with on_disk(model, activations=False) as executor:
            placement = executor.placement
            assert placement.on_disk
            assert all(placement.store.holds(parameter) for parameter in placement.on_disk)
            assert losses_of(model, gpu.device) == pytest.approx(expected, rel=1e-6)
            gradients = [each.grad for each in placement.on_disk if each.grad is not None]
            assert gradients
            assert all(placement.store.holds(gradient) for gradient in gradients)
            assert resident_bytes(*placement.on_disk, *gradients) <= STRAY
        assert {parameter.device.type for parameter in model.parameters()} == {gpu.device.type}


def test_a_layer_may_stay_in_memory_with_its_activations_on_disk() -> None:
    model = wide(1)
    layer = LayerPlan(
        "layers.0",
        ("layers.0",),
        ("offloading",),
        "t",
        "t",
        offloading=Offloading("device", activations=True),
    )
    executor = Executor(model, Plan((layer,)), QUIET)
    executor.attach()
    output = model(torch.randn(128, 128))
    assert executor.placement.on_disk == []
    assert executor.placement.store.bytes_used > 0
    output.sum().backward()
    assert executor.placement.store.bytes_used == 0
    executor.detach()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_backward_may_come_after_detach(tmp_path: Path, checkpointing: bool) -> None:
    plain, model = wide(), wide()
    x = torch.randn(128, 128)
    with on_disk(model, Config(enable_logging=False, offload_dir=tmp_path), checkpointing=checkpointing):
        torch.manual_seed(1)
        output = model(x).sum()
    assert list(tmp_path.iterdir()) == []
    torch.manual_seed(1)
    plain(x).sum().backward()
    output.backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_the_next_layer_is_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide(3)
    with on_disk(model, activations=False) as executor:
        store = executor.placement.store
        x = torch.randn(2, 128)
        model(x).sum().backward()
        read: list[int] = []
        monkeypatch.setattr(store, "prefetch_pages", lambda tensor: read.append(tensor.data_ptr()))
        output = model(x).sum()
        weights = [layer.up.weight.data_ptr() for layer in model.layers]
        order = [weights.index(each) for each in read if each in weights]
        assert order == [0, 1, 1, 2, 2]
        read.clear()
        output.backward()
        order = [weights.index(each) for each in read if each in weights]
        assert order == [2, 1, 1, 0, 0]
