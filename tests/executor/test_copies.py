"""Copies and files of a wrapped model: true values, still wrapped, and independent of the original."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memscale.execution_plan import LayerPlan, Offloading, Plan
from memscale.executor import Executor
from memscale.techniques.forward import ForwardOverride
from memscale.testing import executing
from support.checkpointed import checkpoint_plan, wrapped
from support.families import FAMILIES, Family

Copy = Callable[[nn.Module], nn.Module]


def through_torch(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.fixture(
    params=[copy.deepcopy, through_pickle, through_torch], ids=["deepcopy", "pickle", "torch.save"]
)
def copied(request: pytest.FixtureRequest) -> Copy:
    return request.param


@pytest.fixture(params=["gpt2", "t5", "resnet", "cnn", "tied", "kwargs_only", "shared_block"])
def family(request: pytest.FixtureRequest) -> Family:
    found = FAMILIES[request.param]
    if found.transformers:
        pytest.importorskip("transformers")
    return found


def step(family: Family, model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss = family.loss(model, family.batch())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def forwards(model: nn.Module) -> dict[str, ForwardOverride]:
    found = {name: vars(module).get("forward") for name, module in model.named_modules()}
    return {name: value for name, value in found.items() if isinstance(value, ForwardOverride)}


@pytest.mark.matrix(5)
def test_a_copy_is_wrapped_by_itself(family: Family, copied: Copy, regions) -> None:
    plain = family.build()
    model = wrapped(family.build())
    other = copied(model)

    assert other._memscale_executor is not model._memscale_executor
    assert other._memscale_executor.model is other
    assert other._memscale_executor.attached
    assert other._memscale_executor.plan == model._memscale_executor.plan
    assert forwards(other).keys() == forwards(model).keys() != set()
    for name, forward in forwards(other).items():
        assert forward.module is other.get_submodule(name)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}

    expected = step(family, plain)
    assert_equal(step(family, other), expected)
    mine = len(regions)
    assert mine > 0
    assert all(parameter.grad is None for parameter in model.parameters()), "the original has taken part"

    # Each comes off by itself.
    model._memscale_executor.detach()
    assert_equal(step(family, other), expected if not family.updates_buffers else step(family, plain))
    assert len(regions) == 2 * mine
    other._memscale_executor.detach()
    assert not forwards(other)
    for ours, theirs in zip(other.modules(), plain.modules(), strict=True):
        assert vars(ours).keys() == vars(theirs).keys()
        assert [len(v) for k, v in vars(ours).items() if k.endswith("hooks")] == [
            len(v) for k, v in vars(theirs).items() if k.endswith("hooks")
        ]
    step(family, other)
    assert len(regions) == 2 * mine


def test_a_copy_after_a_step_in_training_has_the_same_values(copied: Copy) -> None:
    family = FAMILIES["tied"]
    model = wrapped(family.build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(family, model)
    optimizer.step()
    other = copied(model)
    assert_equal(list(other.state_dict().values()), list(model.state_dict().values()))
    assert other.head.weight is other.tokens.weight, "tied as the original"


def test_the_state_dict_is_that_of_the_plain_model(family: Family) -> None:
    plain, model = family.build(), wrapped(family.build())
    step(family, plain)
    step(family, model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_equal(list(model.state_dict().values()), list(plain.state_dict().values()))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    family.build().load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(model) == repr(plain)


@pytest.mark.slow
def test_a_saved_model_loads_in_another_process(tmp_path: Path) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()))
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch; model = torch.load(sys.argv[1], weights_only=False)\n"
        "from memscale.checkpointing import region\n"
        "runs = []; run = region.Region.run_forward\n"
        "region.Region.run_forward = lambda self, *args: (runs.append(1), run(self, *args))[1]\n"
        "model(torch.ones(1, 4)).sum().backward()\n"
        "print(len(runs), float(model[0].weight.grad.sum()))\n"
        "model._memscale_executor.detach()\n"
        "print(sorted(vars(model)) == sorted(vars(torch.nn.Sequential())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")], capture_output=True, text=True, check=True
    )
    model(torch.ones(1, 4)).sum().backward()
    assert done.stdout.split() == ["2", str(float(model[0].weight.grad.sum())), "True"]


def test_save_pretrained_in_the_middle_of_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    model = wrapped(family.build())
    step(family, model)
    model.save_pretrained(tmp_path / "outside")

    # Also while a forward pass is running.
    handle = model.transformer.h[1].register_forward_hook(
        lambda *_: model.save_pretrained(tmp_path / "inside")
    )
    step(family, model)
    handle.remove()
    for place in ("outside", "inside"):
        assert json.loads((tmp_path / place / "config.json").read_text())["use_cache"] is True
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / place)
        assert_equal(list(loaded.state_dict().values()), list(model.state_dict().values()))
        assert not hasattr(loaded, "_memscale_executor")


calls: list[Executor] = []


def module_level(executor: Executor, args: Any, kwargs: Any) -> None:
    calls.append(executor)


def test_a_copy_keeps_a_callback_of_a_module_and_no_other() -> None:
    family = FAMILIES["tied"]
    model = family.build()
    kept: list[Executor] = []
    executor = Executor(model, checkpoint_plan(model), on_training_batch=module_level)
    executor.attach()
    calls.clear()
    other = copy.deepcopy(model)
    step(family, other)
    assert calls == [other._memscale_executor]

    executor.on_training_batch = lambda *given: kept.append(given[0])
    for copied in (copy.deepcopy(model), through_pickle(model)):
        step(family, copied)
        assert copied._memscale_executor.on_training_batch is None
        assert not kept
        copied._memscale_executor.detach()
        assert not copied._forward_pre_hooks
    step(family, model)
    assert kept == [executor]


def test_a_copy_of_an_offloaded_model_goes_back_to_the_device_of_the_original(copied: Copy) -> None:
    with executing() as gpu:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(gpu.device)
        layers = [LayerPlan("0", ("0",), ("offloading",), "", "", offloading=Offloading("host"))]
        executor = Executor(model, Plan(tuple(layers)))
        executor.attach()
        assert model[0].weight.device.type == "cpu"
        other = copied(model)
        assert other[0].weight.device.type == "cpu"
        other._memscale_executor.detach()
        assert {each.device for each in other.state_dict().values()} == {gpu.device}
        executor.detach()


def test_a_module_with_a_deepcopy_of_its_own(copied: Copy) -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)))
    before = vars(model).keys() - {"_memscale_executor"}
    executor = Executor(model, Plan((LayerPlan("0", ("0",), ("checkpointing",), "", ""),)))
    executor.attach()
    other = copied(model)
    assert other._memscale_executor is not executor
    assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
    for each in (model, other):
        each._memscale_executor.detach()
        assert vars(each).keys() == before


def test_a_model_whose_modules_were_replaced_is_copied_without_a_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    del model[1:]
    other = copy.deepcopy(model)
    assert "_memscale_executor" not in vars(other)
    assert "is not wrapped" in caplog.text
    assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
