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
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

import memscale
from memscale import Config, Plan
from memscale.errors import WrapError
from memscale.execution_plan import Checkpointing, LayerPlan
from memscale.executor import Executor
from support.steps import AGGRESSIVE, assert_has_techniques, counted_regions, plan_of
from support.surfaces import Row, record


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


def saved_bytes(model: object, parameters: nn.Module) -> int:
    """What a forward pass leaves for backward, parameters and inputs left out."""
    own = {each.untyped_storage().data_ptr() for each in (*parameters.parameters(), IDS)}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(IDS)  # type: ignore[operator]
    return sum(storage.nbytes() for storage in held.values())


MADE = {
    "wrap, compile": lambda model, backend: torch.compile(memscale.wrap(model, AGGRESSIVE), backend=backend),
    "compile, wrap": lambda model, backend: memscale.wrap(torch.compile(model, backend=backend), AGGRESSIVE),
    "wrap, model.compile()": lambda model, backend: memscale.wrap(model, AGGRESSIVE).compile(backend=backend),
    "model.compile(), wrap": lambda model, backend: memscale.wrap(
        (model, model.compile(backend=backend))[0], AGGRESSIVE
    ),
    "wrap, layer.compile()": lambda model, backend: (
        memscale.wrap(model, AGGRESSIVE),
        *(layer.compile(backend=backend) for layer in model[1:]),
    )[0],
    "layer.compile(), wrap": lambda model, backend: memscale.wrap(
        (model, [layer.compile(backend=backend) for layer in model[1:]])[0], AGGRESSIVE
    ),
    "compiled layers, wrap": lambda model, backend: memscale.wrap(
        nn.Sequential(model[0], *(torch.compile(layer, backend=backend) for layer in model[1:])), AGGRESSIVE
    ),
}


@pytest.mark.parametrize(
    ("order", "backend"),
    [
        *((order, "aot_eager") for order in MADE),
        pytest.param("compiled layers, wrap", "inductor", marks=pytest.mark.slow),  # the others leave it out
    ],
)
def test_less_is_saved_for_backward(order: str, backend: str) -> None:
    plain = build_with_embedding()
    compiled = nn.Sequential(plain[0], *(torch.compile(layer, backend=backend) for layer in plain[1:]))
    expected, whole = train(compiled, plain), saved_bytes(compiled, plain)
    model = build_with_embedding()
    called = MADE[order](model, backend) or model
    assert all(map(torch.equal, train(called, model), expected))
    left = saved_bytes(called, model)
    assert left < 0.6 * whole
    techniques = tuple(sorted({name for layer in plan_of(called).layers for name in layer.techniques}))
    record(Row("torch.compile", f"{order}, {backend}", techniques, (whole, left), None))


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


def test_compiled_layers_keep_no_products() -> None:
    """A dispatch mode, which keeps products, would have the layers run without the compiler, and be compiled itself."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = build()
    for index in range(4):
        model[index] = torch.compile(model[index], backend=backend)
    keep = Checkpointing(("aten.addmm.default",))
    layers = (
        LayerPlan(each, (each,), ("checkpointing",), "", "", checkpointing=keep)
        for each in ("0", "1", "2", "3")
    )
    Executor(model, Plan(tuple(layers))).attach()
    with counted_regions() as regions:
        for one, other in zip(gradients(model, model), gradients(plain := build(), plain), strict=True):
            assert torch.equal(one, other)
    assert regions == [8]
    assert graphs
    assert all(graph.code.count("linear") == 2 for graph in graphs)  # the layers, whole, and nothing else


def test_a_model_compiled_as_one_graph_is_refused() -> None:
    model = build()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(WrapError, match="fullgraph=True"):
        memscale.wrap(compiled, AGGRESSIVE)
    assert not [name for each in model.modules() for name in vars(each) if "memscale" in name]


@pytest.mark.parametrize("sample", [None, torch.ones(2, 32)], ids=["first batch", "sample"])
def test_a_wrapped_model_compiled_as_one_graph_fails_with_the_reason(sample: torch.Tensor | None) -> None:
    model = memscale.wrap(build(), AGGRESSIVE, sample)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in (compiled, torch.compile(lambda x: model(x), backend="eager", fullgraph=True)):
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match="compile without fullgraph=True, or call memscale"
        ):
            call(torch.ones(2, 32))
    memscale.detach(compiled)
    assert torch.equal(call(torch.ones(2, 32)), build()(torch.ones(2, 32)))


def test_layers_compiled_as_one_graph_are_recomputed() -> None:
    model, expected = build(), build()
    for index, layer in enumerate(model):
        model[index] = torch.compile(layer, backend="eager", fullgraph=True)
    memscale.wrap(model, AGGRESSIVE, torch.ones(2, 32))
    with counted_regions() as regions:
        for one, other in zip(gradients(model, model), gradients(expected, expected), strict=True):
            assert torch.equal(one, other)
    assert regions[0]


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


class Stepped(nn.Module):
    """Trained by a step that calls its network, as a Lightning module may be."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build_with_embedding()

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids)


def test_a_compiled_step_that_calls_a_part_leaves_the_planner_alone() -> None:
    """The compiler traced the planner as a part of the step, up to its limit of recompilations."""
    plain = Stepped()
    expected = train(plain.step, plain)
    model = memscale.wrap(Stepped(), AGGRESSIVE)
    clear_compilation_metrics()
    assert all(map(torch.equal, train(torch.compile(model.step, backend="eager"), model), expected))
    assert model._memscale_executor.model is model.net
    assert_has_techniques(model, "checkpointing")
    compiled = {Path(each.co_filename) for each in get_compilation_metrics() if each.co_filename}
    assert Path(__file__) in compiled
    ours = Path(memscale.__file__).parent
    # An override is compiled with the forward that it runs.
    assert {each.name for each in compiled if each.is_relative_to(ours)} <= {"forward.py"}


def test_a_forward_that_is_compiled_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    """As Lightning does in `fit` of a compiled module: what each plan puts there anew is not reported as lost."""
    plain = build_with_embedding()
    expected = train(plain, plain)
    model = memscale.wrap(build_with_embedding(), AGGRESSIVE)
    model.forward = torch.compile(model.forward, backend="eager")
    with caplog.at_level(logging.WARNING, "memscale"):
        assert all(map(torch.equal, train(model, model), expected))
    assert_has_techniques(model, "checkpointing")
    memscale.detach(model)
    assert not caplog.messages
    assert torch.equal(model(IDS), plain(IDS))


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
