"""What a report counts is what happened, to the byte and to the operation."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale
from families import FAMILIES
from memscale import Config
from memscale.execution_plan import Checkpointing, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.observe.report import Moved
from memscale.recompute._torch_private import OUTSIDE_BACKWARD, LightDispatchMode, graph_task_id
from memscale.simulator import executing
from observe.models import (
    LAYERS,
    ROWS,
    WIDTH,
    Stack,
    attached,
    batch,
    fresh,
    nothing,
    parameter_bytes,
    plan,
    train,
)
from wrapping import lossless, work_of

PAGE = 4096
STEPS = 3


def moved(executor: Executor) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.what, each.below): (each.up_bytes, each.down_bytes) for each in executor.report().moved}


# ---------------------------------------------------------------------- recomputing


@pytest.mark.parametrize("chained", [False, True])
def test_every_layer_is_recomputed_once_a_step(chained: bool) -> None:
    model, executor = fresh(plan("checkpointing", checkpointing=Checkpointing(chained=chained), flops=7))
    train(model, STEPS)
    report = executor.report()
    assert {each.layer: (each.times, each.flops) for each in report.recomputed} == {
        f"blocks.{index}": (STEPS, 7 * STEPS) for index in range(LAYERS)
    }
    assert (report.recomputations, report.recompute_flops) == (LAYERS * STEPS, 7 * LAYERS * STEPS)
    assert report.forward_passes == STEPS
    assert [each.to for each in report.lost] == ["recomputing"]
    assert report.seconds_lost_to("recomputing") > 0


def test_a_slice_of_a_sequential_is_counted_under_the_name_of_its_layer() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))
    layers = [
        dataclasses.replace(
            plan("checkpointing").layers[0], name="first two", members=("0", "1"), recompute_flops=3
        )
    ]
    executor = attached(model, Plan(tuple(layers)))
    model(torch.ones(2, 4)).sum().backward()
    assert [(each.layer, each.times, each.flops) for each in executor.report().recomputed] == [
        ("first two", 1, 3)
    ]


def test_two_backward_passes_over_one_graph_recompute_twice() -> None:
    model, executor = fresh(plan("checkpointing"))
    loss = model(batch())
    loss.backward(retain_graph=True)
    loss.backward()
    report = executor.report()
    assert (report.forward_passes, report.recomputations) == (1, 2 * LAYERS)


def test_evaluation_counts_nothing() -> None:
    model, executor = fresh(plan("checkpointing"))
    model.eval()
    with torch.no_grad():
        model(batch())
    report = executor.report()
    assert (report.forward_passes, report.recomputations, report.lost) == (0, 0, ())


@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_operations_of_recomputing_are_those_that_torch_counts(name: str, mode: str) -> None:
    """For models whose blocks end in a dropout, so that backward needs all of their products."""
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    config = lossless(mode, enable_offloading=False, force_optimize=True)
    planned = memscale.plan(family.build(), family.batch(), config)
    plain, model = family.build(), family.build()
    executor = Executor(model, planned)
    executor.attach()
    extra = work_of(family, model).flops - work_of(family, plain).flops
    assert executor.report().recompute_flops == extra
    assert extra > 0 or mode != "aggressive"  # the others may find nothing that is worth it


def test_full_checkpointing_of_gpt2_recomputes_all_that_its_blocks_compute() -> None:
    pytest.importorskip("transformers")
    family = FAMILIES["gpt2"]
    model = family.build()
    inside: list[int] = []
    with FlopCounterMode(display=False) as counter:
        for block in model.transformer.h:
            block.register_forward_pre_hook(lambda *_: inside.append(-counter.get_total_flops()))
            block.register_forward_hook(lambda *_: inside.append(counter.get_total_flops()))
        family.loss(model, family.batch()).backward()
    planned = memscale.plan(family.build(), family.batch(), lossless("aggressive", enable_offloading=False))
    each = sum(inside) // len(model.transformer.h)
    whole = [
        dataclasses.replace(layer, checkpointing=Checkpointing(), recompute_flops=each)
        for layer in planned.layers
        if layer.name.startswith("transformer.h.")
    ]
    plain, model = family.build(), family.build()
    executor = Executor(model, Plan(tuple(whole)))
    executor.attach()
    extra = work_of(family, model).flops - work_of(family, plain).flops
    assert executor.report().recompute_flops == extra == sum(inside)


def test_an_early_end_makes_the_operations_an_upper_bound() -> None:
    """A block that ends in a product: backward has all it needs before that product is computed again."""
    sample = batch()
    config = lossless("aggressive", enable_offloading=False)
    planned = memscale.plan(Stack(), sample, config)
    recomputed = [layer for layer in planned.layers if layer.recompute_flops]
    assert len(recomputed) == LAYERS
    model = Stack()
    executor = Executor(model, planned)
    executor.attach()
    with FlopCounterMode(display=False) as ours:
        model(sample).backward()
    with FlopCounterMode(display=False) as theirs:
        Stack()(sample).backward()
    last = 2 * ROWS * WIDTH * 2 * WIDTH  # `down`, of those that are not chained to a later block
    extra = ours.get_total_flops() - theirs.get_total_flops()
    left_out, rest = divmod(executor.report().recompute_flops - extra, last)
    assert rest == 0
    assert 1 <= left_out <= LAYERS


# ---------------------------------------------------------------------- bytes


def test_bytes_of_parameters_and_gradients_on_a_device() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        executor = attached(model, plan("offloading", "checkpointing", offloading=Offloading("host")))
        train(model, STEPS, gpu.device)
        size = parameter_bytes(model)
        assert moved(executor) == {
            ("parameters", "host"): (2 * size * STEPS, 0),  # forward, and the recomputation
            ("gradients", "host"): (0, size * STEPS),
        }
        report = executor.report()
        assert (report.bytes_up, report.bytes_down) == (2 * size * STEPS, size * STEPS)
        assert Moved("gradients", "host", "offloading", 0, size * STEPS) in report.moved
        assert report.seconds_lost_to("offloading") > 0
        assert report.seconds_lost_to("recomputing") > 0


def test_without_recomputing_backward_fetches_only_what_it_needs() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        executor = attached(model, plan("offloading", offloading=Offloading("host")))
        train(model, 1, gpu.device)
        size = parameter_bytes(model)
        weights = sum(p.nbytes for p in model.blocks.parameters() if p.dim() == 2)
        # The input needs no gradient, and so the first weight of all is not needed for one.
        fetched_again = weights - model.blocks[0].up.weight.nbytes
        assert moved(executor)["parameters", "host"] == (size + fetched_again, 0)
        assert moved(executor)["gradients", "host"] == (0, size)


def test_bytes_that_are_fetched_ahead() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        wanted = dataclasses.replace(
            plan("offloading", "checkpointing", offloading=Offloading("host")), async_offload=True
        )
        executor = attached(model, wanted)
        train(model, STEPS, gpu.device)
        size = parameter_bytes(model)
        assert moved(executor) == {
            ("parameters", "host"): (2 * size * STEPS, 0),
            ("gradients", "host"): (0, size * STEPS),
        }


def test_frozen_parameters_bring_no_gradients_home() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        model.blocks[0].requires_grad_(False)
        executor = attached(model, plan("offloading", "checkpointing", offloading=Offloading("host")))
        train(model, 1, gpu.device)
        assert moved(executor)["gradients", "host"] == (0, parameter_bytes(model) * 2 // 3)


def test_bytes_of_activations() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        executor = attached(
            model, plan("offloading", "checkpointing", offloading=Offloading("device", activations=True))
        )
        train(model, STEPS, gpu.device)
        inputs = LAYERS * ROWS * WIDTH * 4
        assert moved(executor) == {("activations", "host"): (inputs * STEPS, inputs * STEPS)}
        assert executor.report().seconds_lost_to("offloading") > 0


def test_homes_on_disk(tmp_path: Path) -> None:
    model = Stack()
    executor = Executor(
        model,
        plan(
            "offloading",
            "checkpointing",
            offloading=Offloading("disk"),
            optimizer=OptimizerPlan("disk", bucket_bytes=2**16),
        ),
        Config(offload_dir=str(tmp_path), enable_logging=False),
    )
    executor.attach()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        model(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    size = parameter_bytes(model, least=PAGE)
    assert size < parameter_bytes(model)
    assert moved(executor) == {
        # Forward, the recomputation, and the optimizer, which writes them as well.
        ("parameters", "disk"): (3 * size * STEPS, size * STEPS),
        ("gradients", "disk"): (size * STEPS, size * STEPS),
        ("optimizer state", "disk"): (2 * size * (STEPS - 1), 2 * size * STEPS),
    }
    report = executor.report()
    assert {each.to for each in report.lost} == {"recomputing", "offloading", "optimizer state"}
    assert report.disk_bytes == executor.bytes_on_disk >= 3 * size
    executor.detach()
    assert executor.report().disk_bytes == 0
    assert executor.report().bytes_up == report.bytes_up


def test_state_on_the_host_of_parameters_on_the_device_and_of_those_at_home() -> None:
    with executing() as gpu:
        model = Stack().to(gpu.device)
        layers = plan("offloading", "checkpointing", offloading=Offloading("host")).layers[:1]
        executor = Executor(model, Plan(layers, optimizer=OptimizerPlan("host", bucket_bytes=2**16)))
        executor.attach()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            model(batch(gpu.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        on_device = [*model.blocks[1:].parameters(), *model.head.parameters()]
        size = sum(p.nbytes for p in on_device if p.nbytes >= PAGE)
        # What is at home has its state beside it there, and nothing is moved for it.
        assert moved(executor)["optimizer state", "host"] == (2 * size * (STEPS - 1), 2 * size * STEPS)


# ---------------------------------------------------------------------- whose counts


def test_a_model_that_was_never_stepped_has_a_report_also_after_detach() -> None:
    model = memscale.wrap(Stack(), Config(enable_logging=False), batch())
    executor = model._memscale_executor
    memscale.detach(model)
    report = executor.report()
    assert (report.model, report.device) == ("Stack", "cpu")
    assert (report.forward_passes, report.backward_passes) == (0, 0)
    assert (report.moved, report.recomputed, report.lost, report.disk_bytes) == ((), (), (), 0)
    assert report.predicted_peak_bytes == executor.plan.predicted_peak_bytes
    del model
    assert executor.report().model == "a model that is gone"


def test_passes_of_a_wrapped_model() -> None:
    model = memscale.wrap(Stack(), Config(enable_logging=False), batch())
    first, second = model(batch()), model(2 * batch())
    (first + second).backward()
    model(batch()).backward()
    report = model._memscale_executor.report()
    assert (report.forward_passes, report.backward_passes) == (3, 2)


def test_passes_of_a_model_with_lazy_logits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50))
    ids = torch.arange(40).view(4, 10)
    config = Config(
        mode="aggressive", use_8bit_optimizer=False, use_mixed_precision=False, enable_logging=False
    )
    memscale.wrap(model, config, ids)
    if model._memscale_executor.plan.loss is None:
        pytest.fail("the loss is not tiled: this test needs a model whose is")
    for _ in range(2):
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    report = model._memscale_executor.report()
    assert (report.forward_passes, report.backward_passes) == (2, 2)


class OutOfMemoryOnce(LightDispatchMode):
    """The first product of a forward, or of a backward, is out of memory."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self._backward = backward
        self.raised = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        in_backward = graph_task_id() != OUTSIDE_BACKWARD
        if product and in_backward == self._backward and not self.raised:
            self.raised += 1
            raise torch.OutOfMemoryError("out of memory (injected)")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_that_was_repeated_after_an_error_counts_once(backward: bool) -> None:
    model = memscale.wrap(Stack(), Config(enable_logging=False, enable_offloading=False), batch())
    with OutOfMemoryOnce(backward=backward) as trouble:
        model(batch()).backward()
    report = model._memscale_executor.report()
    assert trouble.raised == 1
    assert (report.forward_passes, report.backward_passes) == (1, 1)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_nobody_counts_the_passes_of_an_executor_without_its_watch() -> None:
    model = Stack()
    executor = Executor(model, plan("checkpointing"))
    executor.attach()
    train(model, 1)
    report = executor.report()
    assert (report.forward_passes, report.backward_passes) == (None, None)
    assert report.recomputations == LAYERS


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_copy_counts_for_itself_from_nothing(copied) -> None:
    model, executor = fresh(plan("checkpointing"))
    train(model, 2)
    other = copied(model)
    assert other._memscale_executor.report().recomputations == 0
    train(other, 1)
    assert other._memscale_executor.report().recomputations == LAYERS
    assert other._memscale_executor.report().forward_passes == 1
    assert executor.report().recomputations == 2 * LAYERS
    train(model, 1)
    assert executor.report().recomputations == 3 * LAYERS
    assert other._memscale_executor.report().recomputations == LAYERS


def test_a_copy_of_an_offloaded_model_counts_its_own_bytes(tmp_path: Path) -> None:
    model = Stack()
    config = Config(offload_dir=str(tmp_path), enable_logging=False)
    wanted = plan(
        "offloading", offloading=Offloading("disk"), optimizer=OptimizerPlan("disk", bucket_bytes=2**16)
    )
    executor = Executor(model, wanted, config)
    executor.attach()
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters())
    other(batch()).backward()
    optimizer.step()
    assert executor.report().moved == ()
    assert moved(other._memscale_executor)["optimizer state", "disk"][1] > 0


def test_counts_go_on_over_plans_and_pauses() -> None:
    model, executor = fresh(plan("checkpointing", flops=1))
    train(model, 1)
    executor.replan(plan("checkpointing", flops=10))
    train(model, 1)
    with executor.suspended() as model:
        train(model, 5)
    train(model, 1)
    report = executor.report()
    assert (report.recomputations, report.recompute_flops) == (3 * LAYERS, (1 + 10 + 10) * LAYERS)
    assert report.forward_passes == 3


def test_a_model_on_which_the_plan_does_nothing_gets_nothing_for_the_meter() -> None:
    plain, model = Stack(), Stack()
    executor = Executor(model, plan())
    executor.attach()
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(one).keys() - {"_memscale_executor"} == vars(other).keys()
        assert [len(v) for k, v in vars(one).items() if k.endswith("hooks")] == [
            len(v) for k, v in vars(other).items() if k.endswith("hooks")
        ]
    model(batch()).backward()
    assert all(not p._backward_hooks for p in model.parameters())
    assert executor.report().scalars() == {
        "predicted_peak_bytes": 1000,
        "allowance_bytes": 10,
        **dict.fromkeys(("bytes_up", "bytes_down", "recomputations", "recompute_flops", "disk_bytes"), 0),
        **{k: v for k, v in executor.report().scalars().items() if k == "observed_peak_bytes"},
    }


def test_detach_takes_the_meter_along() -> None:
    model, plain = Stack(), Stack()
    executor = attached(model, plan("checkpointing"))
    train(model, 1)
    executor.detach()
    train(model, 1)
    assert executor.report().recomputations == LAYERS
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()


# ---------------------------------------------------------------------- for people and machines


def test_a_report_as_table_and_as_json() -> None:
    model, executor = fresh(plan("checkpointing", flops=7))
    train(model, 2)
    report = executor.report()
    text = str(report)
    assert "Report: Stack on cpu" in text
    assert "blocks.0 … blocks.2 ×3" in text
    assert "recomputing" in text
    data = json.loads(report.to_json())
    assert data["recomputed"][0] == {"layer": "blocks.0", "times": 2, "flops": 14}
    assert data["forward_passes"] == 2


def test_the_callback_of_the_tests_is_one_that_a_copy_keeps() -> None:
    assert copy.deepcopy(attached(Stack(), plan()).model)._memscale_executor.on_training_batch is nothing
