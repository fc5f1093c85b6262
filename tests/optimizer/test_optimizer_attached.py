"""Optimizer state where the plan says, attached by the executor: on disk, on the host, and back."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from memscale import Config
from memscale.errors import TierFullError
from memscale.execution_plan import OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.optimizer.state_stores import HostStateStore
from memscale.testing import executing
from support.disk import QUIET, adamw, assert_same_state, disk_plan, on_disk, resident_bytes
from support.wrapping import Stack


def build() -> Stack:
    torch.manual_seed(0)
    return Stack(3, 64).train()


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3, device: Any = "cpu"
) -> list[float]:
    losses = []
    for step in range(count):
        torch.manual_seed(step)
        x = torch.randn(4, 64).to(device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def state_plan(state: Any, bucket_bytes: int = 2**16) -> Plan:
    return Plan((), optimizer=OptimizerPlan(state=state, bucket_bytes=bucket_bytes))


KINDS = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "SGD without state": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": model.layers.parameters(), "lr": 1e-2}, {"params": model.head.parameters()}], lr=1e-3
    ),
}


@pytest.mark.matrix(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("homes", [False, True], ids=["parameters in memory", "parameters on disk"])
def test_state_on_disk_steps_the_same(kind: str, homes: bool) -> None:
    plain, model = build(), build()
    theirs = KINDS[kind](plain)
    expected = steps(plain, theirs)
    executor = Executor(model, disk_plan(model) if homes else state_plan("disk"), QUIET)
    executor.attach()
    ours = KINDS[kind](model)
    assert steps(model, ours) == expected
    store = executor.placement.store
    large = [
        value
        for state in ours.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.nbytes >= 4096
    ]
    assert all(store.holds(value) for value in large)
    assert resident_bytes(*large) <= 64 * 4096
    assert store.bytes_used >= sum(value.nbytes for value in large)
    assert large or kind in ("Adafactor", "SGD without state")
    assert_same_state(ours.state_dict(), theirs.state_dict())
    executor.detach()
    assert_same_state(ours.state_dict(), theirs.state_dict())
    assert not any(
        store.holds(value) for state in ours.state.values() for value in state.values() if value is not None
    )
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_state_on_the_host_of_a_device() -> None:
    with executing() as gpu:
        plain = build().to(gpu.device)
        expected = steps(plain, adamw(plain), device=gpu.device)
        model = build().to(gpu.device)
        executor = Executor(model, state_plan("host"), QUIET)
        executor.attach()
        optimizer = adamw(model)
        assert steps(model, optimizer, device=gpu.device) == expected
        moments = [
            value for state in optimizer.state.values() for value in state.values() if value.nbytes >= 4096
        ]
        assert moments
        assert {value.device.type for value in moments} == {
            "cpu"
        }  # `ModelPlacement` has not brought them back
        assert executor.placement.states.bytes_moved > 0
        executor.detach()
        values = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        assert {value.device.type for value in values} == {gpu.device.type}
        steps(model, optimizer, 1, gpu.device)


def test_state_on_the_host_follows_parameters_at_home() -> None:
    with executing() as gpu:
        model = build().to(gpu.device)
        with on_disk(model, to="host", state="host", activations=False) as executor:
            optimizer = adamw(model)
            steps(model, optimizer, device=gpu.device)
            devices = {value.device.type for state in optimizer.state.values() for value in state.values()}
            assert devices == {"cpu"}
            assert executor.placement.store.bytes_used == 0


def test_the_cap_on_host_memory_holds() -> None:
    with executing() as gpu:
        model = build().to(gpu.device)
        config = Config(enable_logging=False, max_cpu_offload_gb=100_000 / 10**9)
        executor = Executor(model, state_plan("host"), config)
        executor.attach()
        optimizer = adamw(model)
        with pytest.raises(TierFullError, match=r"max_cpu_offload_gb"):
            steps(model, optimizer, 1, gpu.device)
        optimizer.state_dict()
        executor.detach()
        optimizer.step()


def test_host_memory_is_counted_while_it_is_used() -> None:
    from memscale.tiers.disk import DiskStore

    with executing() as gpu:
        store, parameter = HostStateStore(DiskStore(), capacity=10_000), torch.ones(1, device=gpu.device)
        first = store.allocate(torch.ones(1000), parameter)
        second = store.allocate(torch.empty(1000, device="meta"), parameter)
        assert store.memory.bytes_used == 8000
        with pytest.raises(TierFullError):
            store.allocate(torch.ones(1000), parameter)
        del first
        assert store.memory.bytes_used == 4000
        del second
        assert store.memory.bytes_used == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_the_optimizer_has_its_state(copied: Any) -> None:
    model = build()
    with on_disk(model) as executor:
        optimizer = adamw(model)
        steps(model, optimizer, 1)
        twin = copied(optimizer)
        assert_same_state(twin.state_dict(), optimizer.state_dict())
        assert executor.placement.store.bytes_used > 0


def test_loaded_state_goes_down_with_the_next_step() -> None:
    model = build()
    with on_disk(model) as executor:
        optimizer = adamw(model)
        steps(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        steps(model, optimizer, 1)
        optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), saved)
        steps(model, optimizer, 1)
        assert executor.placement.states.is_stored(optimizer.state[model.layers[0].up.weight]["exp_avg"])


def test_detach_leaves_nothing_in_torch() -> None:
    model = build()
    with on_disk(model):
        pass  # what others have dropped is removed now
    hooks = (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    )
    function = torch.optim.AdamW.step.__closure__[0].cell_contents
    optimizer = adamw(model)
    attributes = dict(vars(optimizer))
    with on_disk(model):
        steps(model, optimizer, 1)
    assert hooks == (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    )
    assert torch.optim.AdamW.step.__closure__[0].cell_contents is function
    assert vars(optimizer).keys() == attributes.keys()


def test_a_dropped_model_keeps_no_hook_alive() -> None:
    gc.collect()
    other = build()
    with on_disk(other):
        pass
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    model = build()
    Executor(model, disk_plan(model), QUIET).attach()
    steps(model, adamw(model), 1)
    del model
    gc.collect()
    with on_disk(other):  # whoever comes next takes the abandoned ones away
        pass
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def test_optimizers_that_are_left_alone_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with on_disk(model, Config()) as executor:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 64)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert optimizer in executor.placement.states.skipped
        assert "LBFGS stays" in caplog.text
        gradients = [each.grad for each in executor.placement.on_disk]
        assert resident_bytes(*executor.placement.on_disk, *gradients) <= 64 * 4096


@pytest.mark.matrix(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [2**15, 2**18], ids=["slices", "buckets"])
def test_state_on_the_host_in_a_loop_as_people_write_it(kind: str, bucket_bytes: int) -> None:
    """Clipping, accumulation, a scheduler, a GradScaler that skips a step, a checkpoint in between: the same bits."""

    def run(plan: Plan) -> tuple[list[torch.Tensor], Any, int]:
        with executing() as gpu:
            torch.manual_seed(0)
            model = Stack(2, 64).to(gpu.device).train()
            executor = Executor(model, plan, QUIET)
            executor.attach()
            optimizer = KINDS[kind](model)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            scaler = torch.amp.GradScaler(gpu.device.type, init_scale=8.0)
            for step in range(5):
                for _ in range(2):
                    loss = model(torch.randn(4, 64).to(gpu.device)).square().mean()
                    scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                optimizer.zero_grad()
                if step == 3:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            moved = executor.placement.states.bytes_moved
            executor.detach()
            return [each.detach().cpu() for each in model.parameters()], optimizer.state_dict(), moved

    weights, state, _ = run(Plan(()))
    our_weights, our_state, moved = run(state_plan("host", bucket_bytes))
    assert all(map(torch.equal, weights, our_weights))
    assert_same_state(our_state, state)
    assert moved > 0 or kind in ("Adafactor", "SGD without state")


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_on_the_device_are_stepped_in_buckets(kind: str) -> None:
    """The temporaries of a step are those of one bucket, a slice of the largest parameter included; same bits."""
    bucket = 2**16

    def run(plan: Plan) -> tuple[list[float], list[torch.Tensor], int, int]:
        with executing() as gpu:
            torch.manual_seed(0)
            model = Stack(3, 128).to(gpu.device).train()
            executor = Executor(model, plan, QUIET)
            executor.attach()
            optimizer = KINDS[kind](model)
            losses, above = [], 0
            for step in range(3):
                torch.manual_seed(step)
                loss = model(torch.randn(4, 128).to(gpu.device)).square().mean()
                loss.backward()
                gpu.tracker.reset_peak()
                before = gpu.tracker.live_bytes(gpu.device)
                optimizer.step()
                if step:  # in the first one, state is made
                    above = max(above, gpu.peak_bytes - before)
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            states = executor.placement.states
            assert states.bytes_moved == 0
            devices = {v.device for s in optimizer.state.values() for v in s.values() if v.dim()}
            assert devices <= {gpu.device}
            executor.detach()
            return losses, [each.detach().cpu() for each in model.parameters()], above, states.buckets_run

    losses, weights, above, _ = run(Plan(()))
    ours, our_weights, our_above, calls = run(state_plan("device", bucket))
    assert ours == losses
    assert all(map(torch.equal, weights, our_weights))
    assert calls > 3
    if kind != "Adafactor":  # it needs a parameter whole
        assert our_above <= bucket
        assert above == 0 or our_above < above / 4
