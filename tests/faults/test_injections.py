"""Faults at calls all over MemScale, in every phase of training under every technique.

After each of them the model is whole, a step was made wholly or not at all (or the log says that it was made in part),
training goes on with the numbers of an undisturbed run, and after `detach` nothing is left.
"""

from __future__ import annotations

import errno
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import pytest
import torch

import memscale
from faults.injector import Injector, Syscalls, spread
from faults.runs import Fault, Outcome, run_of
from faults.scenarios import CPU, GPU, SCENARIOS, WIDTH, assert_nothing_left, build, training
from memscale import Config
from memscale.executor import executor as executor_module
from memscale.executor import executor_of
from memscale.optimizer import device_steps
from memscale.planner.cache import plans_made
from support.pictures import assert_as_before, pictures

pytestmark = pytest.mark.cpu_only

PHASES = ("attach", "forward", "backward", "optimizer_step", "detach")
FAULTS: dict[str, Fault] = {
    "an error": lambda: RuntimeError("injected"),
    "Ctrl-C": None,
    "out of memory": lambda: torch.OutOfMemoryError("CUDA out of memory (injected)"),
    "no host memory": MemoryError,
}
SYSTEM_CALLS = {"posix_fallocate": errno.ENOSPC, "pwrite": errno.EIO, "preadv": errno.EIO}


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and Python leaves it at that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


Inject = Callable[..., Outcome]


@pytest.fixture
def inject(tmp_path: Path, record_property: Callable[[str, object], None]) -> Inject:
    """Inject faults at some points of phases; the terminal summary adds up how many there were."""

    injected = 0

    def run(
        name: str,
        phases: Sequence[str],
        faults: Sequence[str],
        points: int,
        tried: set[CodeType] | None = None,
    ) -> Outcome:
        nonlocal injected
        if name == "8 bits":
            pytest.importorskip("bitsandbytes")
        with run_of(name, tmp_path) as made:
            for phase, fault in itertools.product(phases, faults):
                torn = made.outcome.torn
                if fault in SYSTEM_CALLS:
                    made.inject(phase, lambda at, call=fault: Syscalls(at, call, SYSTEM_CALLS[call]), points)
                else:
                    made.inject(phase, lambda at, fault=fault: Injector(at, FAULTS[fault]), points, tried)
                assert fault != "Ctrl-C" or made.outcome.torn == torn
        injected += made.outcome.injected
        record_property("injections", injected)
        assert not made.outcome.failures, "\n".join(made.outcome.failures)
        return made.outcome

    return run


@pytest.mark.parametrize("name", ["checkpointing", "disk"])
def test_some_faults(name: str, inject: Inject) -> None:
    outcome = inject(name, PHASES, ["an error", "Ctrl-C"], 3)
    assert outcome.injected >= 28
    assert outcome.raised >= outcome.injected - 2  # Python drops one that comes in a finalizer


def test_some_faults_on_a_device(inject: Inject) -> None:
    assert inject("overlapped steps", ["optimizer_step"], ["Ctrl-C"], 3).injected == 3


def test_a_copy_to_the_device_that_fails_leaves_no_state_behind(tmp_path: Path) -> None:
    with training("host, async", tmp_path) as make:
        run = make()
        run.attach()
        for _ in range(2):
            run.run_step()
        run.forward()
        run.backward()
        with (
            patch.object(device_steps, "_copy", side_effect=RuntimeError("injected")),
            pytest.raises(RuntimeError, match="injected"),
        ):
            run.optimizer_step()
        assert set(run.optimizer.state) == set(run.model.parameters())
        run.optimizer.state_dict()
        run.detach()


@pytest.mark.parametrize("points", [4, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_errors_in_all_of_wrap(
    points: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In profiler, planner and executor: the model is as before, or wrapped, where another way was found."""
    device = torch.device("cpu")
    model = build(device)
    before, others = pictures(model), set(executor_module._wrapped_models)
    # Nothing on disk: what comes back from there has other memory, and is not as before in that.
    config = Config(mode="aggressive", force_optimize=True, enable_logging=False, enable_offloading=False)

    def wrap() -> None:
        plans_made.clear()
        memscale.wrap(model, config, torch.ones(16, 8, WIDTH))

    for _ in range(2):  # the second time with what is imported and cached
        counter = Injector(None, FAULTS["an error"])
        counter.run(wrap)
        memscale.detach(model)
    raised = 0
    for at in spread(counter.count * 9 // 10, points):
        injector = Injector(at, FAULTS["an error"])
        failed = injector.run(wrap) is not None
        assert injector.was_injected
        raised += failed
        assert failed == (executor_of(model) is None), injector.where
        if not failed:
            memscale.detach(model)
        assert_as_before(pictures(model), before)
        assert_nothing_left(tmp_path, others)
    record_property("injections", points)
    assert raised


@pytest.mark.parametrize("name", ["disk", pytest.param("disk, async", marks=pytest.mark.slow)])
def test_a_disk_that_fails(name: str, inject: Inject) -> None:
    outcome = inject(name, PHASES, list(SYSTEM_CALLS), 3)
    assert outcome.injected >= 12
    assert outcome.raised


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["an error", "Ctrl-C"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_many_faults(name: str, fault: str, inject: Inject) -> None:
    on_cpu = SCENARIOS[name].device == CPU
    points = 3 if not on_cpu else 10 if fault == "Ctrl-C" else 5  # errors: see the test below, too
    assert inject(name, PHASES, [fault], points).injected >= 15


@pytest.mark.slow
@pytest.mark.parametrize("device", [CPU, GPU])
def test_an_error_in_every_function(device: str, inject: Inject) -> None:
    """At its first call in each phase of the first scenario that calls it."""
    tried: dict[str, set[CodeType]] = {phase: set() for phase in PHASES}
    injected = 0
    for name, scenario in SCENARIOS.items():
        if scenario.device == device and (name != "8 bits" or find_spec("bitsandbytes")):
            for phase in PHASES:
                injected += inject(name, [phase], ["an error"], 0, tried[phase]).injected
    print(device, injected, {phase: len(each) for phase, each in tried.items()})
    assert len(set().union(*tried.values())) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpointing", "disk", "host"])
def test_memory_of_the_device_that_runs_out(name: str, inject: Inject) -> None:
    """The step is repeated under a heavier plan, to the bit, or the error is raised."""
    outcome = inject(name, PHASES[1:4], ["out of memory"], 3)
    assert outcome.raised < outcome.injected


@pytest.mark.slow
def test_memory_of_the_host_that_runs_out(inject: Inject) -> None:
    assert inject("disk", PHASES, ["no host memory"], 8).injected >= 38
