"""Recomputations and operations that a report counts are those that happened."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale
from memscale.execution_plan import Checkpointing, Plan
from memscale.executor import Executor
from support.families import FAMILIES
from support.observed import (
    LAYERS,
    ROWS,
    WIDTH,
    Stack,
    attached,
    batch,
    fresh,
    plan,
    train,
)
from support.wrapping import lossless, work_of

PAGE = 4096
STEPS = 3


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
    (lost,) = report.lost
    assert lost.to == "recomputing"
    assert lost.seconds > 0


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


@pytest.mark.matrix(4)
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
