"""Training loops of random cases, and all that can be seen of them: losses, gradients, weights, random states."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils._pytree import tree_leaves

from properties.generator import FEATURES, WORDS, Block, Case, StepSpec, build_model, loss_of, widened

Wrap = Callable[[nn.Module, tuple[tuple[Any, ...], dict[str, Any]], Case], None]
Seen = list[tuple[str, Any]]


class Training:
    """One case's loop, on the plain model or on a wrapped one.

    Args:
        case: What to run.
        device: Where.
        wrap: Puts a plan on the model; None for the plain model.
        detach: Takes it off.
        device_rng: Reads the device's random state, if it has one of its own.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        wrap: Wrap | None = None,
        detach: Callable[[nn.Module], None] | None = None,
        device_rng: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.case = case
        self.device = device
        self.seen: Seen = []
        self._wrap, self._detach, self._device_rng = wrap, detach, device_rng
        self.model: nn.Module = build_model(case).to(device)
        seed_all(case.seed)
        self._saved: dict[str, Any] | None = None
        self._handles: list[Any] = []
        if case.plan.optimizer_first:
            self._make_optimizer()
            self.wrap()
        else:
            self.wrap()
            self._make_optimizer()

    def run(self) -> Seen:
        """Run the loop, take the plan off, run one more step; return all that was seen."""
        for number, step in enumerate(self.case.loop.steps):
            self._at = f"step {number}"
            self._before(number, step)
            self.model.train(not step.evaluating)
            with torch.autograd.set_detect_anomaly(step.anomaly):
                self._step(number, step)
            self.model.train()
            self._look()
        self._at = "detached"
        self.detach()
        self._look()
        self._step(100, StepSpec())
        self._at = "after detach"
        self._look()
        self._look_at_modules()
        return self.seen

    def wrap(self) -> None:
        if self._wrap is not None:
            step = self.case.loop.steps[0]
            self._wrap(self.model, self.call(0, 0, step), self.case)

    def detach(self) -> None:
        if self._detach is not None:
            self._detach(self.model)

    # The batches.

    def _batch(self, number: int, micro: int, step: StepSpec) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(self.case.seed * 1000 + number * 10 + micro)
        size = (step.batch, step.length)
        if self.case.model.tokens:
            x = torch.randint(0, WORDS, size, generator=source)
        else:
            x = torch.randn(*size, FEATURES, generator=source)
            x = x if self.case.exact else x.double()
        labels = torch.randint(0, WORDS, size, generator=source)
        return x.to(self.device), labels.to(self.device)

    def call(self, number: int, micro: int, step: StepSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model for a batch."""
        x, labels = self._batch(number, micro, step)
        with_labels = self.case.model.result == "loss"
        if self.case.model.call == "dict":
            return (), {"batch": {"x": x, "labels": labels} if with_labels else {"x": x}}
        if self.case.model.call == "name":
            return (), {"x": x, "labels": labels} if with_labels else {"x": x}
        return ((x, labels) if with_labels else (x,)), {}

    def _losses(self, number: int, micro: int, step: StepSpec) -> list[torch.Tensor]:
        """The losses of a batch: one, or with what the model returns beside its logits two."""
        args, kwargs = self.call(number, micro, step)
        if step.losses == "adversarial":
            self._inputs = [
                leaf.requires_grad_() for leaf in tree_leaves((args, kwargs)) if leaf.is_floating_point()
            ]
        with self._autocast(step):
            if step.losses == "functional":
                weights = {name: each * 0.9 for name, each in self.model.named_parameters()}
                out = torch.func.functional_call(self.model, weights, args, kwargs)
            else:
                out = self.model(*args, **kwargs)
        self._see_output("inputs", (args, kwargs))
        labels = self._batch(number, micro, step)[1]
        if isinstance(out, torch.Tensor):
            return [loss_of(out, labels), widened(out).square().mean()]
        if isinstance(out, tuple):
            return [loss_of(out[0], labels), out[1]]
        if out.get("loss") is not None:
            return [out["loss"], widened(out["logits"]).square().mean()]
        return [loss_of(out["logits"], labels), out["extra"][0]]

    @contextlib.contextmanager
    def _autocast(self, step: StepSpec) -> Iterator[None]:
        if not step.autocast:
            yield
            return
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            yield

    # The steps.

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def _make_optimizer(self) -> None:
        loop = self.case.loop
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters}]
        if loop.groups == 2 and len(parameters) > 1:
            lr = loop.options["lr"]
            groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": lr / 2}]
        kind = getattr(torch.optim, loop.optimizer)
        self.optimizer = kind(groups, **loop.options)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if loop.in_backward:
            own = {each: kind([each], **loop.options) for each in parameters if each.requires_grad}

            def step(parameter: nn.Parameter) -> None:
                own[parameter].step()
                parameter.grad = None

            self._handles += [each.register_post_accumulate_grad_hook(step) for each in own]
        self.scheduler = None
        if loop.schedule:
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.5, 1.0, total_iters=3)

    def _step(self, number: int, step: StepSpec) -> None:
        def forward_and_backward() -> torch.Tensor:
            self._zero(step.zero)
            total = torch.zeros(())
            for micro in range(step.micro_batches):
                total += self._backward(number, micro, step).detach().cpu()
            with_gradient = [each for each in self.model.parameters() if each.grad is not None]
            if step.clip == "norm" and with_gradient:
                self._see("norm", self._clip_norm(with_gradient, 0.5))
            elif step.clip == "value" and with_gradient:
                clip_grad_value_(with_gradient, 0.05)
            return total

        if step.closure and step.skip == "nothing":

            def closure() -> torch.Tensor:
                with torch.enable_grad():
                    return forward_and_backward()

            self._see("loss", self.optimizer.step(closure))
            return
        self._see("loss", forward_and_backward())
        if step.skip == "nothing" and not self.case.loop.in_backward:
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def _clip_norm(self, parameters: list[nn.Parameter], limit: float) -> torch.Tensor:
        """Clip gradients by their norm, which is taken in the same order wherever they are.

        torch's own function takes those of one device together: its sum is another in the last bit, if some layers are
        on the host.
        """
        if self.device.type == "cpu":
            return clip_grad_norm_(parameters, limit)
        norms = torch.stack([widened(each.grad.detach().cpu()).norm() for each in parameters])
        total = norms.norm()
        for parameter in parameters:
            parameter.grad.mul_((limit / (total + 1e-6)).clamp(max=1.0).to(parameter.grad.device))
        return total

    def _backward(self, number: int, micro: int, step: StepSpec) -> torch.Tensor:
        """Forward and backward of one batch, in the way that the step asks for."""
        losses = self._losses(number, micro, step)
        loss = losses[0] / step.micro_batches
        if step.skip == "backward" or not loss.requires_grad:
            return loss
        trained = self._trained()
        if step.losses == "two" and losses[1].requires_grad:
            loss.backward(retain_graph=True)
            (losses[1] * 0.3).backward()
        elif step.losses == "sum":
            loss = loss + self._losses(number, micro + 5, step)[0] * loss
            loss.backward()
        elif step.losses == "grad":
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    gradient = gradient.to(parameter.device)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        elif step.losses == "penalty":
            some = trained[: max(1, len(trained) // 2)]
            gradients = torch.autograd.grad(loss, some, create_graph=True, allow_unused=True)
            penalty = [widened(each).square().sum().to(self.device) for each in gradients if each is not None]
            if penalty:
                loss = loss + torch.stack(penalty).sum()
            loss.backward()
        elif step.losses == "inputs":
            loss.backward(inputs=trained[::2])
        else:
            loss.backward()
        if step.losses == "adversarial":
            for each in self._inputs:
                self._see("gradient of the input", each.grad)
        return loss

    def _zero(self, how: str) -> None:
        if how == "none":
            self.optimizer.zero_grad()
        elif how == "zeros":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            self.model.zero_grad()
        else:
            for parameter in self.model.parameters():
                parameter.grad = None

    # What happens between steps.

    def _before(self, number: int, step: StepSpec) -> None:
        what = step.before
        if what in ("evaluate", "inference", "evaluate in training mode"):
            self._evaluate(number, step, what)
        elif what in ("freeze", "unfreeze"):
            parameters = list(self.model.parameters())
            for parameter in parameters[: len(parameters) // 2]:
                if parameter.is_floating_point():
                    parameter.requires_grad_(what == "unfreeze")
        elif what == "save and load":
            weights, state = (
                copy.deepcopy(self.model.state_dict()),
                copy.deepcopy(self.optimizer.state_dict()),
            )
            for parameter in self.model.parameters():
                parameter.data.mul_(0.5)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)
        elif what == "rewind":
            if self._saved is not None:
                self.model.load_state_dict(self._saved)
            self._saved = {name: value.detach().cpu().clone() for name, value in self._state().items()}
        elif what == "detach and wrap":
            self.detach()
            self.wrap()
        elif what == "change weights":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.97)
        elif what == "new optimizer":
            self._make_optimizer()
        elif what == "copy":
            other = copy.deepcopy(self.model).eval()
            args, kwargs = self.call(number + 50, 0, step)
            with torch.no_grad():
                self._see_output("copy", other(*args, **kwargs))
        elif what == "to device":
            self.model.to(self.device)
        elif what == "replace head":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(number)
                head = nn.Linear(self.case.model.width, WORDS).to(self.device)
            self.model.head = head if self.case.exact else head.double()
            self._make_optimizer()
        elif what == "assign":
            weights = {name: value.detach().clone() for name, value in self._state().items()}
            self.model.load_state_dict(weights, assign=True)
            self._make_optimizer()
        elif what == "hook":
            block = next(each for each in self.model.modules() if isinstance(each, Block))
            block.register_forward_pre_hook(_scaled)
        elif what == "fail":
            with contextlib.suppress(RuntimeError, IndexError, AssertionError):
                self.model(torch.zeros(2, 3, 7, 2, device=self.device))

    def _evaluate(self, number: int, step: StepSpec, how: str) -> None:
        args, kwargs = self.call(number + 50, 0, step)
        if how != "evaluate in training mode":
            self.model.eval()
        # (The executing device's tensors have views in inference mode only if they were made in it.)
        inference = how == "inference" and self.device.type == "cpu"
        with torch.inference_mode() if inference else torch.no_grad():
            self._see_output(how, self.model(*args, **kwargs))
        self.model.train()

    # What is seen.

    def _see(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().clone()
        self.seen.append((f"{self._at}: {name}", value))

    def _see_output(self, name: str, output: Any) -> None:
        for index, leaf in enumerate(tree_leaves(output)):
            self._see(f"{name} {index}", leaf)

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if torch.is_tensor(value)}

    def _look(self) -> None:
        """All numbers after a step."""
        for name, parameter in self.model.named_parameters():
            self._see(f"gradient of {name}", parameter.grad)
            self._see(f"weight {name}", parameter)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                self._see(f"state {key} of {name}", value)
        for name, buffer in self.model.named_buffers():
            self._see(f"buffer {name}", buffer)
        for name, module in self.model.named_modules():
            if isinstance(calls := vars(module).get("calls"), int):
                self._see(f"count of {name}", calls)
            self._see_output(f"state of {name}", vars(module).get("state"))
        self._see("random state of torch", torch.get_rng_state())
        if self._device_rng is not None:
            self._see("random state of the device", self._device_rng())
        self._see("random state of Python", hash(random.getstate()))
        self._see("random state of NumPy", hash(np.random.get_state()[1].tobytes()))

    def _look_at_modules(self) -> None:
        """What a module is beside its numbers, after detach."""
        for name, module in self.model.named_modules():
            self._see(f"class of {name}", type(module).__qualname__)
            self._see(f"attributes of {name}", sorted(vars(module)))
            hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key}
            self._see(f"hooks of {name}", hooks)
        for name, parameter in self.model.named_parameters():
            looks = (type(parameter).__name__, parameter.dtype, parameter.device, parameter.requires_grad)
            self._see(f"looks of {name}", looks)
            self._see(f"hooks of {name}", len(parameter._backward_hooks or {}))
        self._see("names of the state", sorted(self.model.state_dict()))
        self._see("training", [module.training for module in self.model.modules()])


def _scaled(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (args[0] * 0.9, *args[1:])


def seed_all(seed: int) -> None:
    """Set the seeds of all generators that a model may draw from, but for the device's own."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
