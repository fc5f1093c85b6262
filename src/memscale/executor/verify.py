"""`Config(verify_correctness=True)`: before training, a step with the plan is compared with a step of the plain model.

Note [Verified plans]
~~~~~~~~~~~~~~~~~~~~~
Both steps run on the batch that is about to be trained on, from the same random state; gradients, buffers, attributes
and random states are restored afterwards, and the optimizer is not stepped. The plain step has the parameters back on
the device; its gradients wait on the host. Plans of exact techniques must give the same bits. If they do not, the plain
step is run once more: a device whose kernels add up in no fixed order differs from itself, and as much is allowed.
Tiles and 16-bit products have a bound instead (`BOUNDS`), and so have gradients of offloaded layers that are called
several times, which are added up in another order (Note [Master and working copy]).

Where the plain step does not fit the device, layers are compared one by one: in a forward pass without gradients, each
layer that has a technique is run twice on its inputs, with all its stages and with only its parameters fetched, and
backward through both. That does not see what goes wrong between layers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale._torch import pytree
from memscale._util.snapshots import RngState
from memscale.errors import VerificationError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor.executor import Executor
from memscale.hardware import detect
from memscale.observe.log import open_log
from memscale.offload.layer import bring_inputs
from memscale.profiler import Sample
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.profiler.run import is_reentrant, untouched, without_cache
from memscale.techniques.forward import Stage, override_of
from memscale.units import format_bytes

BOUNDS = {"tiling": 1e-4, "float16": 0.02, "bfloat16": 0.1, "several calls": 1e-5}
"""Largest relative difference of a loss or gradient, by what may cause it; 0 for all else."""
NOISE = 4  # times how far two plain steps are apart, where they differ
NEGLIGIBLE = 0.01  # of the norm of all gradients: the bound of a gradient is a share of that at least


@dataclass(frozen=True)
class _Numbers:
    """What a step computed, on the host."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    outputs: list[
        tuple[str, float, float]
    ]  # of layers, in the order of the calls: sum and norm of their elements


def verify_plan(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare a step under the executor's plan with a plain one. See Note [Verified plans].

    Raises:
        VerificationError: they differ by more than the plan's techniques may; it names the first layer that does.
    """
    if executor.is_sharded:
        with open_log(executor.config) as log:
            log.warning(
                "verify_correctness: not verified, as FSDP2 gathers parameters in the steps that are compared."
            )
        return
    began = time.perf_counter()
    plan = executor.plan
    bound = bound_of(plan)
    sample = Sample(*bring_inputs(args, kwargs, executor.device))
    # As plans do in training: with a cache, keys and values have another layout, and gradients other last bits.
    with without_cache(executor.model), _same_random_numbers(executor) as restart:
        plain = None
        if _has_room_for_plain_step(executor):
            try:
                plain = _plain_step(executor, sample, restart)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        if plain is None:
            how, count = "layer by layer", _verify_layers(executor, sample, bound, restart)
        else:
            how, count = "one step", len(plain.gradients)
            planned = _step(executor, sample, restart)
            bounds = _bounds_of_sums(executor, plain)
            if (wrong := _difference(plain, planned, bound, bounds)) is not None and bound == 0:
                bound = NOISE * _distance(plain, _plain_step(executor, sample, restart))
                wrong = _difference(plain, planned, bound, bounds) if bound else wrong
            if wrong is not None:
                raise _error(
                    f"a step with the plan differs from a plain one, first in {wrong[0]}: {wrong[1]}", bound
                )
    with open_log(executor.config) as log:
        host = sum(each.nbytes for each in executor.model.parameters() if each.requires_grad)
        log.info(
            "verified by %s: loss and %d gradients %s; it took %.1f s and up to %s of host memory",
            how,
            count,
            f"within {bound:.1e}" if bound else "equal to the bit",
            time.perf_counter() - began,
            format_bytes(host),
        )


def _error(what: str, bound: float) -> VerificationError:
    return VerificationError(
        f"{what}; allowed: {f'{bound:.1e} of it' if bound else 'nothing'}. Please report it with the output of "
        "memscale doctor --selftest; Config(enable_...=False) switches single techniques off."
    )


def bound_of(plan: Plan) -> float:
    """Return how far a plan's numbers may be from the plain ones, relatively; 0 if its techniques are exact."""
    tiled = plan.loss is not None or any(layer.tiling is not None for layer in plan.layers)
    return max(BOUNDS["tiling"] if tiled else 0.0, BOUNDS[plan.precision.dtype] if plan.precision else 0.0)


def _bounds_of_sums(executor: Executor, plain: _Numbers) -> dict[str, float]:
    """Return the bounds of gradients that may be added up in another order than the plain model's, by their names."""
    device = executor.device.type
    if device == "cpu":  # masters are used themselves
        return {}
    calls = Counter(name for name, *_ in plain.outputs)
    bound = BOUNDS["several calls"]
    if torch.is_autocast_enabled(device):
        bound = BOUNDS.get(str(torch.get_autocast_dtype(device)).removeprefix("torch."), bound)
    return {
        f"{member}.{name}" if member else name: bound
        for layer in executor.plan.layers
        if layer.offloading is not None and calls[layer.name] > len(layer.members)
        for member in layer.members
        for name, _ in executor.model.get_submodule(member).named_parameters()
    }


@contextlib.contextmanager
def _same_random_numbers(executor: Executor) -> Iterator[Callable[[], None]]:
    """Yield what starts a step with the random state of now, which is restored at the end."""
    state = RngState([executor.device])
    try:
        yield state.restore
    finally:
        state.restore()


def _has_room_for_plain_step(executor: Executor) -> bool:
    """Return whether the device has as much as the plain step needs, by what the plan says of that."""
    device = detect(executor.device, offload_dir=executor.config.offload_dir).device
    there = sum(each.nbytes for each in executor.model.parameters() if each.device == executor.device)
    return executor.plan.baseline_peak_bytes <= device.free_bytes + there


def _plain_step(executor: Executor, sample: Sample, restart: Callable[[], None]) -> _Numbers:
    with executor.suspended(restore=True):
        return _step(executor, sample, restart)


def _step(executor: Executor, sample: Sample, restart: Callable[[], None]) -> _Numbers:
    """Run forward and backward as the executor is now; the model is as before."""
    model = executor.model
    outputs: list[tuple[str, float, float]] = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        leaves = (each for each in pytree.tree_leaves(output) if isinstance(each, torch.Tensor))
        tensors = (each for each in leaves if not hasattr(each, "to_local"))  # sharded ones would be gathered
        if (first := next((each for each in tensors if each.is_floating_point()), None)) is not None:
            values = first.detach().double()
            outputs.append((name, float(values.sum()), float(values.norm())))

    names = {member: layer.name for layer in executor.plan.layers for member in layer.members}
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(model))
        for member, name in names.items():
            hook = model.get_submodule(member).register_forward_hook(functools.partial(note, name))
            stack.callback(hook.remove)
        restart()
        output = model(*sample.args, **sample.kwargs)
        targets = backward_targets(output)
        del output
        loss = loss_of(targets)
        kept = loss.detach().cpu().clone()
        backward_without_hooks(model, executor)(loss)
        del loss
        gradients = {
            name: None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
    return _Numbers(kept, gradients, outputs)


def backward_without_hooks(model: nn.Module, executor: Executor) -> Callable[[torch.Tensor], object]:
    """Return a backward that accumulates nothing, so that the user's hooks on gradients do not run.

    Gradients of parameters on disk are copied there one by one, as they would be if they were accumulated.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_disk = {id(parameter) for parameter in executor.placement.on_disk}

    def copy_to_disk(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        copy = executor.placement.store.copy_of(gradient)
        executor.placement.release_pages(parameter)
        return copy

    def backward(loss: torch.Tensor) -> None:
        if is_reentrant(loss):
            torch.autograd.backward(loss)  # with no hooks but ours: see `gradients_of`
            return
        with contextlib.ExitStack() as stack:
            for parameter in trained:
                if id(parameter) in on_disk:
                    hook = functools.partial(copy_to_disk, parameter)
                    stack.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    return backward


def _difference(
    plain: _Numbers, planned: _Numbers, bound: float, bounds: Mapping[str, float]
) -> tuple[str, str] | None:
    """Return where two steps differ first, and how; None if they do not. `bounds` are those of single gradients."""
    for (name, *ones), (_, *others) in zip(plain.outputs, planned.outputs, strict=False):
        for what, own, other in zip(("sum", "norm"), ones, others, strict=True):
            if bound and what == "sum":
                continue  # positive and negative elements may cancel out
            if abs(own - other) > bound * abs(own) or math.isnan(own) != math.isnan(other):
                return f"the output of {name or 'the model'}", f"its {what} is {other:g} instead of {own:g}"
    if _apart([plain.loss], [planned.loss]) > bound:
        return "the loss", f"it is {float(planned.loss):g} instead of {float(plain.loss):g}"
    known = [each for each in plain.gradients.values() if each is not None]
    least = NEGLIGIBLE * _norm(known) if bound or bounds else 0.0
    # What goes wrong in backward of a layer is wrong in all layers before it.
    for name, one in reversed(plain.gradients.items()):
        two = planned.gradients[name]
        if one is None or two is None:
            if (one is None) != (two is None):
                return f"the gradient of {name}", f"there is {'none' if two is None else 'one'}"
        elif (apart := _apart([one], [two], least)) > max(bound, bounds.get(name, 0.0)):
            return f"the gradient of {name}", f"they are {apart:.1e} of its norm apart"
    return None


def _distance(one: _Numbers, two: _Numbers) -> float:
    """Return how far two steps are apart at most, relatively."""
    known = [each for each in one.gradients.values() if each is not None]
    pairs = [(one.loss, two.loss), *zip(one.gradients.values(), two.gradients.values(), strict=True)]
    least = NEGLIGIBLE * _norm(known)
    return max(_apart([a], [b], least) for a, b in pairs if a is not None and b is not None)


def _apart(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], least: float = 0.0) -> float:
    """Return the norm of a difference over the norm (`least` at least); 0 if all is equal to the bit."""
    differing = [(a, b) for a, b in zip(some, others, strict=True) if not _equal(a, b)]
    if not differing:
        return 0.0
    apart = _norm([a.double() - b.double() for a, b in differing])
    size = max(_norm([a for a, _ in differing]), least)
    return apart / size if size and not math.isnan(apart) else math.inf


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.shape == two.shape and torch.equal(one.nan_to_num(), two.nan_to_num())


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(float(each.double().norm()) ** 2 for each in tensors) ** 0.5)


# Layer by layer --------------------------------------------------------------------------------------


def _verify_layers(executor: Executor, sample: Sample, bound: float, restart: Callable[[], None]) -> int:
    """Compare each layer with itself without techniques, on the inputs that it gets; return how many tensors."""
    model = executor.model
    compared = 0

    def compare(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal compared
        override = override_of(module)
        if override is None or torch.is_grad_enabled():
            return
        state = RngState([executor.device])
        runs = []
        for forward in (override.only(Stage.FETCH_PARAMETERS), override):
            state.restore()
            runs.append(_layer_step(module, forward, args, kwargs))
        state.restore()
        for plain, planned in zip(*runs, strict=True):
            compared += 1
            if (plain is None) != (planned is None) or (
                plain is not None and planned is not None and _apart([plain], [planned]) > bound
            ):
                layer = f"the layer {name or 'of the whole model'}"
                raise _error(f"{layer} with its techniques differs from the same layer without", bound)

    with contextlib.ExitStack() as stack:
        stack.enter_context(untouched(model))
        for layer in executor.plan.layers:
            for member in layer.members if layer.techniques else ():
                hook = functools.partial(compare, layer.name)
                handle = model.get_submodule(member).register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        restart()
        with torch.no_grad():
            model(*sample.args, **sample.kwargs)
    return compared


def _layer_step(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor | None]:
    """Return the loss of a layer's outputs, and its gradients for inputs and parameters, on the host."""
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if type(value) is not torch.Tensor or not value.is_floating_point():
            return value
        leaves.append(value.detach().clone().requires_grad_())
        return leaves[-1]

    with torch.enable_grad(), untouched(module):
        args, kwargs = pytree.tree_map(leaf, (args, kwargs))
        targets = backward_targets(forward(*args, **kwargs))
        if not targets:
            return []
        loss = loss_of(targets)
        wanted = [*leaves, *(each for each in module.parameters() if each.requires_grad)]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        found = [loss.detach(), *gradients]
        return [None if each is None else each.to("cpu", copy=True) for each in found]
