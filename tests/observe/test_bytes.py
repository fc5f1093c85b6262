"""Bytes that a report counts are those that were moved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from memscale import Config
from memscale.execution_plan import Offloading, OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.observe.report import Moved
from memscale.testing import executing
from support.observed import (
    LAYERS,
    PAGE,
    ROWS,
    STEPS,
    WIDTH,
    Stack,
    attached,
    batch,
    moved,
    parameter_bytes,
    plan,
    train,
)


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
        assert (report.bytes_read, report.bytes_written) == (2 * size * STEPS, size * STEPS)
        assert Moved("gradients", "host", "offloading", 0, size * STEPS) in report.moved
        assert [each.to for each in report.lost if each.seconds > 0] == ["offloading", "recomputing"]


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
        assert [each.to for each in executor.report().lost if each.seconds > 0] == [
            "offloading",
            "recomputing",
        ]


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
    assert executor.report().bytes_read == report.bytes_read


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
