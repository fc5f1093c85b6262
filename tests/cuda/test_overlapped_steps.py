"""Optimizer steps that overlap with backward on CUDA: to the bit as a plain run, however late copies are."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn, optim

import memscale.optimizer.overlap as overlap_module
from memscale import Config
from memscale.execution_plan import LayerPlan, Offloading, OptimizerPlan, Plan
from memscale.executor import Executor
from memscale.optimizer.overlap import OverlappedSteps
from memscale.tiers.engine import Engine, StreamTransfer
from support.families import FAMILIES

WIDTH, LAYERS = 64, 4
MATRIX = 4 * 4 * WIDTH**2  # bytes of a layer's matrix with its gradient and two moments
BUCKETS = {"one matrix": MATRIX, "two": 2 * MATRIX, "all": 2**30}
CONFIG = Config(enable_logging=False, warmup_steps=1, overlap_optimizer=True)
Computing = Callable[[], AbstractContextManager[None]]


class LateGradient(torch.autograd.Function):
    """The identity; its gradient comes by a copy that the compute stream may still be making when it is accumulated."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.cpu().pin_memory().to(gradient.device, non_blocking=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = LateGradient.apply(self.linear.weight)
        return self.scale * torch.tanh(nn.functional.linear(inputs, weight, self.linear.bias))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))).cuda()


def attach(
    model: nn.Module, bucket: int = MATRIX, offloaded: tuple[str, ...] = (), **settings: Any
) -> Executor:
    """Attach a plan with the state of all parameters on the host, and the layers of these names there themselves."""
    layers = [
        LayerPlan(name, (name,), ("offloading",), "", "", offloading=Offloading("host")) for name in offloaded
    ]
    optimizer = OptimizerPlan("host", bucket, host_step="device", overlapped=True)
    executor = Executor(model, Plan(tuple(layers), optimizer=optimizer), CONFIG.replace(**settings))
    executor.attach()
    assert bool(executor.placement.bytes_on_host) == bool(offloaded)
    return executor


def names(count: int) -> tuple[str, ...]:
    """Return the names of the first layers of a stack."""
    return tuple(map(str, range(count)))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()).square().mean()


def numbers(model: nn.Module, optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """Return what a step has changed, read at once: when it returns, its copies are over."""
    states = [optimizer.state[each] for each in model.parameters()]
    state = [each[name] for each in states for name in sorted(each)]
    return [each.detach().cpu().clone() for each in (*model.parameters(), *state)]


Mutant = Callable[[pytest.MonkeyPatch], None]
Numbers = tuple[list[float], list[torch.Tensor]]
Action = Callable[[nn.Module, optim.Optimizer, int], None]


def train(model: nn.Module, act: Action, steps: int = 6, kind: Any = optim.AdamW) -> Numbers:
    """Train for some steps, of which `act` makes what is between backward and `zero_grad`."""
    optimizer = kind(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        act(model, optimizer, step)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, numbers(model, optimizer)


def are_equal(one: Numbers, other: Numbers) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def usual(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    optimizer.step()


def clips_sometimes(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    if step in (3, 4):  # value by value: a norm is added up for each device apart
        nn.utils.clip_grad_value_(model.parameters(), 1e-5)
    optimizer.step()


def skips_one(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    if step != 3:
        optimizer.step()


def changes_one_by_data(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    if step == 3:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.clamp_(-1e-5, 1e-5)
    optimizer.step()


def run(
    act: Action = usual, bucket: int = MATRIX, offloaded: int = 0, **settings: Any
) -> tuple[bool, OverlappedSteps]:
    """Train plainly, and with overlapped steps; return whether all numbers are equal."""
    plain, model = build(), build()
    expected = train(plain, act, **settings)
    executor = attach(model, bucket, names(offloaded))
    ours = train(model, act, **settings)
    overlap = executor.placement.states.overlap
    executor.detach()
    assert executor.placement.pinned.bytes_locked == 0
    return are_equal(expected, ours), overlap


@pytest.mark.parametrize("kind", [optim.AdamW, optim.RMSprop], ids=["AdamW", "RMSprop"])
@pytest.mark.parametrize("offloaded", [0, 2, LAYERS])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_trains_as_a_plain_model(
    bucket: str, offloaded: int, kind: Any, copies: str, computing: Computing
) -> None:
    with computing():
        is_equal, overlap = run(usual, BUCKETS[bucket], offloaded, kind=kind)
    assert is_equal
    # From the second step on. State of a bias on the device is smaller than a page, and stays there.
    assert (overlap.meter.steps_committed, overlap.meter.steps_dropped) == (5 * (LAYERS + offloaded), 0)


class MatrixAlone(nn.Module):
    """A layer all of whose parameters are stepped in backward, so that nothing is left for `step()`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(inputs, LateGradient.apply(self.linear.weight)))


@pytest.mark.parametrize("act", [usual, clips_sometimes])
@pytest.mark.parametrize("offloaded", [0, 2, LAYERS])
def test_a_model_without_biases(
    act: Action, offloaded: int, copies: str, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Layer", MatrixAlone)
    on_device: list[bool] = []

    def act_and_look(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
        act(model, optimizer, step)
        on_device.append(any(state["exp_avg"].is_cuda for state in optimizer.state.values()))

    with computing():
        is_equal, overlap = run(act_and_look, 2 * MATRIX, offloaded, steps=9)
    assert is_equal
    assert overlap.meter.steps_committed == 8 * LAYERS if act is usual else overlap.meter.steps_dropped > 0
    assert on_device == [True] * 9 + [False] * 9  # the first nine are the plain model's


@pytest.mark.parametrize("offloaded", [0, 2, LAYERS])
@pytest.mark.parametrize("act", [clips_sometimes, skips_one, changes_one_by_data])
def test_a_loop_that_changes_its_mind(act: Action, offloaded: int, copies: str, computing: Computing) -> None:
    with computing():
        is_equal, overlap = run(act, 2 * MATRIX, offloaded, steps=9)
    assert is_equal
    assert overlap.meter.steps_dropped > 0
    assert overlap.meter.steps_committed > 2 * (LAYERS + offloaded)  # also after the loop is as before


def test_gpt2(copies: str, computing: Computing) -> None:
    family = FAMILIES["gpt2"]

    def train(model: nn.Module) -> Numbers:
        torch.manual_seed(3)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(4):
            loss = family.loss(model, {name: each.cuda() for name, each in family.batch().items()})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, numbers(model, optimizer)

    with computing():
        expected = train(family.build().cuda())
        model = family.build().cuda()
        executor = attach(model, 2**16, ("transformer.h.0",))
        ours = train(model)
        overlap = executor.placement.states.overlap
        executor.detach()
    assert are_equal(expected, ours)
    assert overlap.meter.steps_committed > 0
    assert overlap.meter.steps_dropped == 0


@pytest.mark.parametrize("offloaded", [0, 2, LAYERS])
def test_a_gradient_that_changes_while_its_step_is_computed(
    offloaded: int, computing: Computing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a version, and as early as can be: when the arithmetic has read it."""
    step_alone, is_early = overlap_module.step_alone, False

    def step_and_change(optimizer: Any, group: Any, parameters: Any, state: Any) -> Any:
        stepped = step_alone(optimizer, group, parameters, state)
        for parameter in parameters if is_early else ():
            parameter.grad.data.clamp_(-1e-5, 1e-5)
        return stepped

    def act(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
        nonlocal is_early
        changes_one_by_data(model, optimizer, step)
        is_early = step == 2

    monkeypatch.setattr(overlap_module, "step_alone", step_and_change)
    with computing():
        is_equal, overlap = run(act, 2 * MATRIX, offloaded)
    assert is_equal
    assert overlap.meter.steps_dropped > 0


class Watching(optim.AdamW):
    """Keeps something of its own beside the state, on the device."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter, state in self.state.items():
            state["seen"] = torch.ones(WIDTH, device="cuda") * parameter.detach().sum().cuda()
        return loss


def test_state_that_is_on_the_device_is_not_overlapped(computing: Computing) -> None:
    with computing():
        is_equal, overlap = run(kind=Watching, steps=4)
    assert is_equal
    assert overlap.meter.steps_committed == 0


# ---------------------------------------------------------------------- memory


def accumulates_once(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
    if step == 3:
        loss_of(model, step).backward()
    optimizer.step()


@pytest.mark.parametrize("offloaded", [0, LAYERS])
@pytest.mark.parametrize("act", [usual, clips_sometimes, accumulates_once])
def test_nothing_stays_on_the_device_between_steps(
    act: Action, offloaded: int, copies: str, computing: Computing
) -> None:
    allocated = []

    def act_and_measure(model: nn.Module, optimizer: optim.Optimizer, step: int) -> None:
        act(model, optimizer, step)
        allocated.append(torch.cuda.memory_allocated())

    with computing():
        _, overlap = run(act_and_measure, 2 * MATRIX, offloaded)
    assert overlap.meter.steps_committed > 0
    assert len(set(allocated[6:])) == 1  # the first six are the plain model's


def test_new_values_are_not_given_away_before_they_were_read(
    runtime: ctypes.CDLL, computing: Computing
) -> None:
    """They were allocated on another stream than the compute stream, which has still to copy them."""
    runtime.fakecuda_set_copies(b"late")
    with computing():
        model = build()
        executor = attach(model)
        optimizer = optim.AdamW(model.parameters())
        pending = []
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            blocks = [block for each in torch.cuda.memory_snapshot() for block in each["blocks"]]
            sizes = [each["requested_size"] for each in blocks if each["state"] == "active_pending_free"]
            pending.append(sizes.count(4 * WIDTH**2))
            optimizer.zero_grad()
        executor.detach()
    assert pending == [0, LAYERS, LAYERS]


# ---------------------------------------------------------------------- mutants: each of these waits is needed


def without_a_wait_for_loaded_state(patch: pytest.MonkeyPatch) -> None:
    """Arithmetic does not follow the copies to the device: these are on a stream of their own."""
    load, other = OverlappedSteps._load, torch.cuda.Stream()

    def load_apart(self: OverlappedSteps, what: Any, value: Any) -> Any:
        with torch.cuda.stream(other):
            return load(self, what, value)

    patch.setattr(OverlappedSteps, "_load", load_apart)


def without_a_wait_for_written_state(patch: pytest.MonkeyPatch) -> None:
    """A step is committed while its state is on its way to the host."""
    patch.setattr(OverlappedSteps, "_finish_writing", lambda self: self._writing.clear())


def without_a_wait_for_gradients(patch: pytest.MonkeyPatch) -> None:
    """A step is computed before the compute stream has finished the gradients."""
    compute = OverlappedSteps._compute

    def compute_early(self: OverlappedSteps, *args: Any) -> None:
        self._streams.clear()
        compute(self, *args)

    patch.setattr(OverlappedSteps, "_compute", compute_early)


def without_a_wait_for_arithmetic(patch: pytest.MonkeyPatch) -> None:
    """New state is copied to the host before it was computed."""
    run = Engine.run

    def run_early(self: Engine, *args: Any, after: Any = None, outward: bool = False) -> Any:
        return run(self, *args, after=None if outward else after, outward=outward)

    patch.setattr(Engine, "run", run_early)


def without_a_wait_for_memory(patch: pytest.MonkeyPatch) -> None:
    """State of the next bucket is loaded into memory whose own state is still on its way to the host."""
    wait = StreamTransfer.wait
    patch.setattr(StreamTransfer, "wait", lambda self: self._value if self._value is None else wait(self))


def without_the_streams_of_gradients(patch: pytest.MonkeyPatch) -> None:
    """The stream of the thread that computes a step is taken for that of all its gradients."""
    compute = OverlappedSteps._compute

    def compute_early(self: OverlappedSteps, *args: Any) -> None:
        self._streams = {torch.cuda.current_stream()}
        compute(self, *args)

    patch.setattr(OverlappedSteps, "_compute", compute_early)


def without_a_wait_after_backward(patch: pytest.MonkeyPatch) -> None:
    """Gradients may be changed while their step is computed."""
    patch.setattr(OverlappedSteps, "_end_backward", lambda self: self._flush())


@pytest.mark.parametrize(
    ("mutate", "offloaded"),
    [
        (without_a_wait_for_loaded_state, 0),
        (without_a_wait_for_loaded_state, LAYERS),
        (without_a_wait_for_written_state, 0),
        (without_a_wait_for_written_state, LAYERS),
        (without_a_wait_for_memory, 0),
        (without_a_wait_for_memory, LAYERS),
    ],
)
def test_a_removed_wait_is_found(
    mutate: Mutant,
    offloaded: int,
    computing: Computing,
    runtime: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tests above can fail: by other numbers, or by steps that are not committed as their sums differ."""
    runtime.fakecuda_set_copies(b"poisoned")
    mutate(monkeypatch)
    with computing():
        is_equal, overlap = run(usual, MATRIX, offloaded)
    assert overlap.meter.steps_committed + overlap.meter.steps_dropped > 0
    assert not is_equal or overlap.meter.steps_dropped > 0


# ---------------------------------------------------------------------- torch's own sanitizer, which is for a process


def train_on_another_stream() -> OverlappedSteps:
    """Train with forward on another stream than backward, and a bucket whose gradients come by two threads."""
    model = build()[:2]
    executor = attach(model, 2 * MATRIX, ("1",), async_offload=True)
    arrived, stream = threading.Event(), torch.cuda.Stream()

    def wait(gradient: torch.Tensor) -> None:
        assert arrived.wait(60)

    model[1].linear.weight.register_hook(wait)
    model[0].linear.weight.register_post_accumulate_grad_hook(lambda parameter: arrived.set())
    optimizer = optim.AdamW(model.parameters())
    for step in range(3):
        arrived.clear()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    executor.detach()
    return executor.placement.states.overlap


def run_sanitized(mutant: str) -> None:
    """Run training loops, with a wait removed; the sanitizer raises at the first access that is in no order."""
    from torch.cuda._sanitizer import EventHandler, enable_cuda_sanitizer

    from fakecuda.computing import computing

    # What it notes of streams is not for several threads, as backward has them.
    lock = threading.RLock()

    def alone(handle: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return handle(*args, **kwargs)

        return call

    for name, handle in list(vars(EventHandler).items()):
        if name.startswith("_handle_"):
            setattr(EventHandler, name, alone(handle))
    enable_cuda_sanitizer()
    if mutant:
        globals()[mutant](pytest.MonkeyPatch())
    with computing() if "libfakecuda" in os.environ.get("LD_PRELOAD", "") else contextlib.nullcontext():
        for act in (usual, clips_sometimes, skips_one, changes_one_by_data):
            executor = attach(model := build(), MATRIX, names(2))
            train(model, act, steps=5)
            executor.detach()
            assert executor.placement.states.overlap.meter.steps_committed > 0
        assert train_on_another_stream().meter.steps_committed > 0


@pytest.mark.parametrize(
    "mutant",
    [
        None,
        without_a_wait_for_loaded_state,
        without_a_wait_for_gradients,
        without_a_wait_for_arithmetic,
        without_the_streams_of_gradients,
        without_a_wait_after_backward,
    ],
    ids=lambda each: each.__name__ if each else "as it is",
)
def test_the_sanitizer_finds_no_race(mutant: Mutant | None) -> None:
    name = mutant.__name__ if mutant else ""
    code = f"import test_overlapped_steps as tests; tests.run_sanitized({name!r})"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ("CSAN detected" in done.stderr) == (mutant is not None), done.stderr
    assert (done.returncode == 0) == (mutant is None), done.stderr
