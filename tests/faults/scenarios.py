"""What faults are injected into: one small model under a plan of each kind, a training loop, and what must hold."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from faults.injector import traced
from memscale import Config, Plan
from memscale._torch import (
    BACKWARD,
    GRAD_SCALER_COPY,
    GRAD_SCALER_SCALE,
    current_dispatch_modes,
    surrounding_hooks,
)
from memscale._util import interrupts
from memscale.execution_plan import (
    Checkpointing,
    LayerPlan,
    LossTiling,
    Offloading,
    OptimizerPlan,
    Precision,
    Tiling,
)
from memscale.executor import Executor
from memscale.executor import executor as executor_module
from memscale.offload import activations
from memscale.optimizer.interceptor import StepInterceptor
from memscale.recovery import StepGuard
from support.every_technique import device_of

WIDTH = 64  # so that a matrix has 8-bit moments
LEARNING_RATE = 1e-2
LOSSLESS = {  # of plans that are made after a shortage of memory
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
    "enable_tiling": False,
    "fused_host_step": False,
}
TORCH_BACKWARD = torch.autograd.backward
GRAD_SCALER = vars(torch.amp.GradScaler)["scale"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


def build(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH)).to(device)


@dataclass(frozen=True)
class Scenario:
    """A plan on a device.

    Attributes:
        lossless: Whether its numbers are the plain model's.
        config: Settings that differ from the defaults.
    """

    device: str
    plan: Plan
    lossless: bool = True
    config: dict[str, Any] = field(default_factory=dict)


def _plan(*techniques: str, optimizer: OptimizerPlan | None = None, **fields: Any) -> Plan:
    layers = (LayerPlan(name, (name,), techniques, "-", "-", **fields) for name in "012")
    return Plan(tuple(layers), optimizer=optimizer)


CPU, GPU = "cpu", "virtual GPU"
ASYNC = {"async_offload": True}
_DISK, _HOST = Offloading("disk", activations=True), Offloading("host", activations=True)
_BUCKET = 4 * 4 * 2 * WIDTH**2 * 2  # of two matrices with gradient and moments
SCENARIOS = {
    "checkpointing": Scenario(CPU, _plan("checkpointing", checkpointing=Checkpointing())),
    "kept products": Scenario(
        CPU, _plan("checkpointing", checkpointing=Checkpointing(("aten.addmm.default",)))
    ),
    "disk": Scenario(
        CPU,
        _plan(
            "offloading",
            "checkpointing",
            offloading=_DISK,
            checkpointing=Checkpointing(),
            optimizer=OptimizerPlan("disk", _BUCKET),
        ),
    ),
    "disk, async": Scenario(
        CPU, _plan("offloading", offloading=_DISK, optimizer=OptimizerPlan("disk", _BUCKET)), config=ASYNC
    ),
    "tiled": Scenario(
        CPU, Plan(_plan("tiling", tiling=Tiling(5)).layers, loss=LossTiling(5)), lossless=False
    ),
    "16 bits": Scenario(
        CPU,
        Plan(_plan("checkpointing", checkpointing=Checkpointing()).layers, precision=Precision("bfloat16")),
        lossless=False,
    ),
    "8 bits": Scenario(CPU, Plan((), optimizer=OptimizerPlan(eight_bit=True)), lossless=False),
    "host": Scenario(GPU, _plan("offloading", offloading=_HOST)),
    "host, async": Scenario(
        GPU,
        _plan(
            "offloading",
            "checkpointing",
            offloading=_HOST,
            checkpointing=Checkpointing(),
            optimizer=OptimizerPlan("host", _BUCKET, host_step="device"),
        ),
        config=ASYNC,
    ),
    "state on the host": Scenario(GPU, Plan((), optimizer=OptimizerPlan("host", _BUCKET))),
    "overlapped steps": Scenario(
        GPU,
        _plan(
            "offloading",
            offloading=Offloading("host"),
            optimizer=OptimizerPlan("host", _BUCKET, host_step="device", overlapped=True),
        ),
        config={"warmup_steps": 1, "overlap_optimizer": True},
    ),
}


class Training:
    """A loop over the model of a scenario, of which each part can be run by itself."""

    def __init__(self, scenario: Scenario, device: torch.device, directory: Path) -> None:
        self.device = device
        self.others = set(executor_module._wrapped_models)
        self.model = build(device)
        self.before = [dict(vars(module)) for module in self.model.modules()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.step = 0
        self.loss: Tensor | None = None
        config = Config(enable_logging=False, offload_dir=directory, **{**LOSSLESS, **scenario.config})
        self.make = lambda: Executor(
            self.model,
            scenario.plan,
            config,
            guard=StepGuard(),
        )
        self.executor = self.make()

    def attach(self) -> None:
        self.executor.attach()

    def forward(self) -> None:
        torch.manual_seed(self.step)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).manual_seed(self.step)
        x = torch.randn(16, 8, WIDTH, generator=torch.Generator().manual_seed(self.step))
        self.loss = traced(self.model(x.to(self.device)).float().square().mean())

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def finish_step(self) -> None:
        self.optimizer.zero_grad()
        self.loss = None
        self.step += 1

    def run_step(self) -> None:
        for phase in (self.forward, self.backward, self.optimizer_step, self.finish_step):
            phase()

    def detach(self) -> None:
        self.executor.detach()

    # ------------------------------------------------------------------ what can be seen of it

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by the names of the parameters, as a checkpoint has it."""
        state = self.optimizer.state_dict()["state"]
        names = [name for name, _ in self.model.named_parameters()]
        return {
            names[key]: {each: value.detach().cpu().clone() for each, value in entries.items()}
            for key, entries in state.items()
        }

    def numbers(self) -> dict[str, dict[str, Tensor]]:
        """Each parameter with its state."""
        states = self.states()
        return {name: {"": value, **states.get(name, {})} for name, value in self.weights().items()}

    def checkpoint(self) -> Any:
        return copy.deepcopy({"model": self.weights(), "optimizer": self.optimizer.state_dict()})

    def resume(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))

    def assert_whole(self) -> None:
        """Every parameter is one, of its shape, where the plan has it, and the optimizer steps all of them."""
        shapes = {name: each.shape for name, each in build(torch.device("cpu")).named_parameters()}
        found = dict(self.model.named_parameters())
        assert {name: each.shape for name, each in found.items()} == shapes
        places = {self.device, torch.device("cpu")}
        for name, each in found.items():
            assert isinstance(each, nn.Parameter), name
            assert each.is_leaf, name
            assert each.requires_grad, name
            assert each.device in places, name
            assert each.grad is None or each.grad.shape == each.shape, name
        stepped = [id(each) for group in self.optimizer.param_groups for each in group["params"]]
        assert stepped == [id(each) for each in found.values()]

    def assert_detached(self, directory: Path) -> None:
        """Nothing of MemScale is left in model, optimizer, torch or process."""
        assert not self.executor.attached
        for module, before in zip(self.model.modules(), self.before, strict=True):
            assert vars(module).keys() == before.keys(), type(module)
            for hooks in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
                assert not vars(module)[hooks], hooks
        for each in self.model.parameters():
            assert each.device == self.device
            assert not each._backward_hooks
            assert not each._post_accumulate_grad_hooks
        assert "__getstate__" not in vars(self.optimizer)
        assert not self.optimizer._optimizer_state_dict_post_hooks
        self.loss = None
        assert_nothing_left(directory, self.others)


def assert_nothing_left(directory: Path, others: set[Executor]) -> None:
    assert torch.autograd.backward is TORCH_BACKWARD
    assert vars(torch.amp.GradScaler)["scale"] is GRAD_SCALER
    assert not any(each._subscribers for each in (BACKWARD, GRAD_SCALER_COPY, GRAD_SCALER_SCALE))
    steps = StepInterceptor.instance
    assert not steps._alive()
    assert not steps._handles
    assert not steps._replaced
    assert not interrupts._active
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert surrounding_hooks() is None
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert len(current_dispatch_modes()) <= 1  # the virtual GPU's own
    assert set(executor_module._wrapped_models) <= others  # of other tests
    assert os.listdir(directory) == []
    if open_files(directory) or offload_threads():
        gc.collect()  # an error has held on to frames
    assert open_files(directory) == []
    assert offload_threads() == []


def open_files(directory: Path) -> list[str]:
    links = []
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    return [each for each in links if each.startswith(str(directory))]


def offload_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("memscale")]


@contextmanager
def training(name: str, directory: Path) -> Iterator[Callable[[], Training]]:
    """Return what makes trainings of a scenario, all on one device."""
    scenario = SCENARIOS[name]
    # Activations of this size are worth nothing elsewhere.
    with device_of(scenario.device) as device, patch.object(activations, "LEAST_BYTES", 4096):
        yield lambda: Training(scenario, device, directory)
