"""Whose counts a report has: of which passes, of which plans, of which copy."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._torch import OUTSIDE_BACKWARD, LightDispatchMode, graph_task_id
from memscale.execution_plan import Offloading, OptimizerPlan
from memscale.executor import Executor
from support.observed import (
    LAYERS,
    Stack,
    attached,
    batch,
    fresh,
    moved,
    nothing,
    plan,
    train,
)


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
        assert vars(one).keys() - {"_memscale_executor", "__reduce_ex__", "_apply"} == vars(other).keys()
        assert [len(v) for k, v in vars(one).items() if k.endswith("hooks")] == [
            len(v) for k, v in vars(other).items() if k.endswith("hooks")
        ]
    model(batch()).backward()
    assert all(not p._backward_hooks for p in model.parameters())
    assert executor.report().scalars() == {
        "predicted_peak_bytes": 1000,
        "allowance_bytes": 10,
        **dict.fromkeys(
            ("bytes_read", "bytes_written", "recomputations", "recompute_flops", "disk_bytes"), 0
        ),
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
