"""``torch.compile`` over a wrapped model, under one, or around its layers: right numbers, and the plan's savings.

What has a technique on it runs without the compiler for now, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch.compiler.reset()  # there is a limit to how often a function is compiled in a process


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)))


def gradients(model: nn.Module, call: object) -> list[torch.Tensor]:
    for size in (2, 5):  # the second is larger than what was planned for
        model.zero_grad()
        call(torch.ones(size, 32)).pow(2).sum().backward()  # type: ignore[operator]
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_wrapped_model_can_be_compiled(on_meta: bool) -> None:
    expected = build()
    with torch.device("meta") if on_meta else contextlib.nullcontext():
        model = build()
    torch.manual_seed(0)
    memscale.wrap(model, Config(enable_logging=False, force_optimize=True), torch.ones(2, 32))
    compiled = torch.compile(model, backend="eager")
    for one, other in zip(gradients(model, compiled), gradients(expected, expected), strict=True):
        assert torch.equal(one, other)
    memscale.detach(model)


def test_a_layer_can_be_compiled_before_it_has_values() -> None:
    expected = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(0)
    memscale.wrap(model, Config(enable_logging=False), torch.ones(2, 32))
    first = torch.compile(model[0], backend="eager")
    assert torch.equal(first(torch.ones(2, 32)), expected[0](torch.ones(2, 32)))
    memscale.detach(model)


IDS = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))


def build_with_embedding() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), *build())


def train(model: object, parameters: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(parameters.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(IDS).pow(2).mean()  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    "order",
    ["wrap, compile", "compile, wrap", "compile, call, wrap", "wrap, compile layers", "compile layers, wrap"],
)
def test_it_trains_with_the_plan_in_any_order(order: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build_with_embedding()
    expected = train(plain, plain)

    model = build_with_embedding()
    called: nn.Module = model
    if order == "compile layers, wrap":
        for index in range(1, 5):
            model[index] = torch.compile(model[index], backend="eager")
    if order.startswith("compile, "):
        called = torch.compile(model, backend="eager")
    if order == "compile, call, wrap":
        called(IDS).sum().backward()
        model.zero_grad()
    assert memscale.wrap(called, AGGRESSIVE.replace(enable_logging=True)) is called
    if order == "wrap, compile":
        called = torch.compile(model, backend="eager")
    if order == "wrap, compile layers":
        for layer in model[1:]:
            layer.compile(backend="eager")
    with counted_regions() as regions, caplog.at_level(logging.WARNING, "memscale"):
        losses = train(called, model)
    assert all(map(torch.equal, losses, expected))
    assert regions[0] > 0
    assert_has_techniques(model, "checkpointing")
    said = [record.getMessage() for record in caplog.records if "without the compiler" in record.getMessage()]
    assert len(said) == (
        order != "compile layers, wrap"
    )  # there the compiled code is inside of the technique
    called.eval()
    with torch.no_grad():
        assert torch.equal(called(IDS), plain(IDS))
    memscale.detach(called)
    assert torch.equal(called(IDS), plain(IDS))


def test_without_techniques_a_model_is_compiled_as_ever() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = build_with_embedding()
    memscale.wrap(model, AGGRESSIVE.replace(enable_checkpointing=False, enable_offloading=False), IDS)
    assert not any(layer.techniques for layer in model._memscale_executor.plan.layers)
    torch.compile(model, backend=backend)(IDS).sum().backward()
    assert len(graphs) == 1


def test_a_compiled_model_can_be_planned() -> None:
    compiled = torch.compile(build_with_embedding(), backend="eager")
    plan = memscale.plan(compiled, IDS, AGGRESSIVE)
    assert plan == memscale.plan(build_with_embedding(), IDS, AGGRESSIVE)
    with memscale.optimize(compiled, config=AGGRESSIVE, sample_input=IDS) as executor:
        assert executor.plan == plan


@mock.patch.dict(os.environ)  # where transformers leaves the compiler's settings for accelerate
def test_a_trainer_that_compiles_trains_with_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from support.trainers import losses, make_trainer

    options = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}
    plain = make_trainer("gpt2", tmp_path / "plain", **options)
    plain.train()
    trainer = make_trainer(
        "gpt2", tmp_path / "wrapped", **options, torch_compile=True, torch_compile_backend="eager"
    )
    memscale.wrap(trainer, AGGRESSIVE)
    trainer.train()
    assert losses(trainer) == losses(plain)
    assert trainer.model._memscale_executor.report().recomputations > 0
