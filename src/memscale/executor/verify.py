"""`Config(verify_correctness=True)`: before training, a step with the plan is compared with a step of the plain model.

Note [Verified plans]
~~~~~~~~~~~~~~~~~~~~~
Both steps run on the batch that is about to be trained on, from the same random state; the batch, gradients, buffers,
attributes and random states are restored afterwards, and the optimizer is not stepped. The plain step has the
parameters back on the device; its gradients wait on the host. Plans of exact techniques must give the same bits, in
buffers and in the random state after the step, too. If they do not, the plain step is run once more: a device whose
kernels add up in no fixed order differs from itself, and as much is allowed. If it differs from itself by more than
`LARGEST_NOISE` (random numbers from a source that cannot be restored), nothing is verified, and the log says so.
Tiles and 16-bit products have a bound instead (`BOUNDS`), and so have gradients of offloaded layers that are called
several times, which are added up in another order (Note [Master and working copy]).

Where the plain step does not fit the device, layers are compared one by one: in a forward pass without gradients, each
layer that has a technique is run twice on its inputs, with all its stages and with only its parameters fetched, and
backward through both. A head that is tiled is run on the positions of two tiles, as all logits may not fit, with
cross-entropy as its loss. That does not see what goes wrong between layers, nor in the rest of a tiled loss.

A batch with nothing to differentiate is not trained on: where everything is frozen, the next batch is compared instead.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from memscale._torch import pytree
from memscale._util.snapshots import RngState, inputs_before
from memscale.errors import VerificationError, is_out_of_memory
from memscale.execution_plan import Plan
from memscale.executor.executor import Executor
from memscale.hardware import detect
from memscale.observe.log import open_log
from memscale.offload.layer import bring_inputs
from memscale.profiler import Sample
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.profiler.run import compute_gradients, is_reentrant, untouched, without_cache
from memscale.techniques.forward import Stage, override_of
from memscale.units import format_bytes

BOUNDS = {"tiling": 1e-4, "float16": 0.02, "bfloat16": 0.1, "several calls": 1e-5}
"""Largest relative difference of a loss or gradient, by what may cause it; 0 for all else."""
NOISE = 4  # times how far two plain steps are apart, where they differ
LARGEST_NOISE = 1e-3  # that is allowed for; with more, a wrong plan could not be told from a right one
NEGLIGIBLE = 0.01  # of the norm of all gradients: the bound of a gradient is a share of that at least


@dataclass(frozen=True)
class _Numbers:
    """What a step, or a layer, computed, on the host.

    Attributes:
        loss: None if there was nothing to differentiate.
        gradients: by the names of parameters.
        outputs: of layers, in the order of the calls in forward: sum and norm of their elements.
        buffers: by name, after the step.
        random: the state of the random generators after it.
        host_bytes: what the gradients take on the host.
    """

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    outputs: list[tuple[str, float, float]] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    random: RngState | None = None
    host_bytes: int = 0

    @property
    def compared(self) -> int:
        """Return how many gradients there are."""
        return sum(each is not None for each in self.gradients.values())


def verify_plan(executor: Executor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare a step under the executor's plan with a plain one. See Note [Verified plans].

    Returns:
        Whether that is done with; False if the next batch is to be compared, as this one cannot be trained on.

    Raises:
        VerificationError: they differ by more than the plan's techniques may; it names the first layer that does.
    """
    if executor.is_sharded:
        with open_log(executor.config) as log:
            log.warning(
                "verify_correctness: not verified, as FSDP2 gathers parameters in the steps that are compared."
            )
        return True
    began = time.perf_counter()
    plan = executor.plan
    bound = bound_of(plan)
    sample = Sample(*bring_inputs(args, kwargs, executor.device))
    trained = (*executor.model.parameters(), *sample.tensors())
    if not any(each.requires_grad for each in trained):
        return False
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
            layers = _Layers(executor, bound)
            layers.compare_all(sample, restart)
            what, held, bound = layers.describe(), layers.host_bytes, max(bound, layers.noise)
        else:
            planned = _step(executor, sample, restart)
            bound = _check(
                "a step with the plan differs from a plain one",
                plain,
                planned,
                lambda: _plain_step(executor, sample, restart),
                bound,
                _bounds_of_sums(executor, plain),
            )
            held = plain.host_bytes + planned.host_bytes
            what = f"by one step: loss and {plain.compared} gradients"
            if plain.loss is None:
                what = f"by forward alone, as nothing depends on parameters: {len(plain.outputs)} outputs of layers"
    with open_log(executor.config) as log:
        if not what:
            log.warning(
                "verify_correctness: nothing was compared: the plain step does not fit, and no layer has a technique."
            )
            return True
        if bound > max(bound_of(plan), LARGEST_NOISE):
            log.warning(
                "verify_correctness: not verified: the plain step differs from itself by %.1e of a loss or gradient; "
                "does the model draw random numbers from a source of its own?",
                bound / NOISE,
            )
            return True
        log.info(
            "verified %s %s; it took %.1f s and %s of host memory for gradients",
            what,
            f"within {bound:.1e}" if bound else "equal to the bit",
            time.perf_counter() - began,
            format_bytes(held),
        )
    return True


def _check(
    what: str,
    plain: _Numbers,
    planned: _Numbers,
    run_plain: Callable[[], _Numbers],
    bound: float,
    bounds: Mapping[str, float] | None = None,
) -> float:
    """Return the bound within which two steps are equal, with what the plain one differs from itself by.

    One above `LARGEST_NOISE` means that this cannot be told.

    Raises:
        VerificationError: `what`; they are not.
    """
    wrong = _difference(plain, planned, bound, bounds or {})
    if wrong is not None:
        noise = NOISE * _distance(plain, run_plain())
        if max(bound, LARGEST_NOISE) < noise < math.inf:
            return noise
        if bound < noise < math.inf:
            bound, wrong = noise, _difference(plain, planned, noise, bounds or {})
    if wrong is None:
        return bound
    raise VerificationError(
        f"{what}, first in {wrong[0]}: {wrong[1]}; allowed: {f'{bound:.1e} of it' if bound else 'nothing'}. Please "
        "report it with the output of memscale doctor --selftest; Config(enable_...=False) switches single techniques "
        "off."
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
    uses: Counter[int] = Counter()  # calls that have a copy of a parameter of their own
    names: dict[str, int] = {}
    for layer in executor.plan.layers:
        for member in layer.members if layer.offloading is not None else ():
            for name, parameter in executor.model.get_submodule(member).named_parameters(member):
                uses[id(parameter)] += calls[layer.name] - len(layer.members) + 1
                names[name] = id(parameter)
    return {name: bound for name, parameter in names.items() if uses[parameter] > 1}


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
        stack.callback(inputs_before(sample.args, sample.kwargs).restore)
        for leaf in sample.tensors():
            if leaf.is_leaf and leaf.requires_grad:  # whose gradient reentrant checkpoints would add to
                stack.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
        stack.enter_context(untouched(model))
        hooks = stack.enter_context(contextlib.ExitStack())  # not in backward, where layers are recomputed
        for member, name in names.items():
            hook = model.get_submodule(member).register_forward_hook(functools.partial(note, name))
            hooks.callback(hook.remove)
        restart()
        output = model(*sample.args, **sample.kwargs)
        hooks.close()
        targets = backward_targets(output)
        del output
        if not targets:
            return _Numbers(None, {}, outputs, _buffers(model), RngState([executor.device]))
        loss = loss_of(targets)
        kept = loss.detach().cpu().clone()
        backward_without_hooks(model, executor)(loss)
        del loss
        # On a CPU the model's own, which `untouched` takes off it; files of the disk tier are used again.
        is_shared = executor.device.type == "cpu"
        on_disk = {id(each) for each in executor.placement.on_disk}
        gradients: dict[str, torch.Tensor | None] = {}
        held = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = None if parameter.grad is None else parameter.grad.detach()
                if gradient is not None:
                    gradient = _dense(gradient)
                    copied = not is_shared or id(parameter) in on_disk
                    held += gradient.nbytes * (
                        1 + (copied and not is_shared and gradient.device.type == "cpu")
                    )
                    gradient = gradient.to("cpu", copy=copied)
                gradients[name] = gradient
        buffers, random = _buffers(model), RngState([executor.device])
    return _Numbers(kept, gradients, outputs, buffers, random, held)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers on the host; on a CPU those that `untouched` takes off the model."""
    return {name: _dense(each.detach()).cpu() for name, each in model.named_buffers() if not each.is_meta}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with all its elements, on the host if it is sparse."""
    return tensor if tensor.layout is torch.strided else tensor.cpu().to_dense()


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
            gradients = compute_gradients(loss, trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    return backward


def _difference(
    plain: _Numbers, planned: _Numbers, bound: float, bounds: Mapping[str, float]
) -> tuple[str, str] | None:
    """Return where two steps differ first, and how; None if they do not. `bounds` are those of single gradients."""
    for one_call, other_call in zip_longest(plain.outputs, planned.outputs):
        if one_call is None or other_call is None or one_call[0] != other_call[0]:
            called = [f"{each[0] or 'the model'}" if each else "nothing" for each in (other_call, one_call)]
            return "the layers that are called", "it calls {} where the plain one calls {}".format(*called)
        name, *ones = one_call
        for what, own, other in zip(("sum", "norm"), ones, other_call[1:], strict=True):
            if bound and what == "sum":
                continue  # positive and negative elements may cancel out
            if not _is_near(own, other, bound):
                return f"the output of {name or 'the model'}", f"its {what} is {other:g} instead of {own:g}"
    if plain.loss is None or planned.loss is None:
        if (plain.loss is None) != (planned.loss is None):
            return "the loss", f"there is {'none' if planned.loss is None else 'one'}"
    elif _apart([plain.loss], [planned.loss]) > bound:
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
    return _difference_of_states(plain, planned, bound)


def _difference_of_states(plain: _Numbers, planned: _Numbers, bound: float) -> tuple[str, str] | None:
    if plain.buffers.keys() != planned.buffers.keys():
        return "the buffers", f"there are {sorted(planned.buffers)} instead of {sorted(plain.buffers)}"
    for name, buffer in plain.buffers.items():
        if (apart := _apart([buffer], [planned.buffers[name]])) > bound:
            return f"the buffer {name}", f"they are {apart:.1e} of its norm apart"
    # Within a bound, a technique may draw other numbers: of another type, or in tiles.
    if bound == 0 and plain.random and planned.random and not plain.random.is_same(planned.random):
        return "the random state after the step", "it is another"
    return None


def _distance(one: _Numbers, two: _Numbers) -> float:
    """Return how far two steps are apart at most, relatively."""
    known = [each for each in one.gradients.values() if each is not None]
    pairs = [(one.loss, two.loss), *zip(one.gradients.values(), two.gradients.values(), strict=True)]
    least = NEGLIGIBLE * _norm(known)
    distances = [_apart([a], [b], least) for a, b in pairs if a is not None and b is not None]
    if any((a is None) != (b is None) for a, b in pairs) or one.buffers.keys() != two.buffers.keys():
        return 1.0
    distances += [_apart([each], [two.buffers[name]]) for name, each in one.buffers.items()]
    return max(distances, default=0.0)


def _is_near(own: float, other: float, bound: float) -> bool:
    """Return whether two numbers are as near as allowed; NaN is near NaN, and infinity infinity of its sign."""
    if own == other or (math.isnan(own) and math.isnan(other)):
        return True
    return math.isfinite(own) and abs(own - other) <= bound * abs(own)


def _apart(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor], least: float = 0.0) -> float:
    """Return the norm of a difference over the norm (`least` at least); 0 if all is equal to the bit.

    Elements that are NaN or the same infinity in both are equal; one that is so in one alone makes them infinitely far
    apart.
    """
    differing = [(a, b) for a, b in zip(some, others, strict=True) if not torch.equal(a, b)]
    gaps = []
    for a, b in differing:
        if a.shape != b.shape:
            return math.inf
        gaps.append(torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, _wide(a) - _wide(b)))
    apart = _norm(gaps)
    if apart == 0 or not math.isfinite(apart):
        return apart if apart == 0 else math.inf
    size = max(_norm([torch.where(a.isfinite(), a, 0.0) for a, _ in differing]), least)
    return apart / size if size else math.inf


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return float(sum(float(_wide(each).norm()) ** 2 for each in tensors) ** 0.5)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# Layer by layer --------------------------------------------------------------------------------------


class _Layers:
    """Compares each layer with itself without techniques, on the inputs that it gets."""

    def __init__(self, executor: Executor, bound: float) -> None:
        self._executor = executor
        self._bound = bound
        self.noise = 0.0  # the largest that was allowed for, where plain layers differ from themselves
        self.host_bytes = 0  # held at a time
        self._calls = 0
        self._tiled_heads = 0
        self._gradients = 0

    def describe(self) -> str:
        """Return what was compared, in words; nothing if there was nothing to compare."""
        if not self._calls and not self._tiled_heads:
            return ""
        loss = f" and a loss in tiles ({self._tiled_heads})" if self._tiled_heads else ""
        return f"layer by layer: {self._calls} calls of layers{loss} with {self._gradients} gradients"

    def compare_all(self, sample: Sample, restart: Callable[[], None]) -> None:
        """Run forward without gradients, and compare each layer before its call."""
        model = self._executor.model
        with contextlib.ExitStack() as stack:
            stack.callback(inputs_before(sample.args, sample.kwargs).restore)
            stack.enter_context(untouched(model))

            def watch(module: nn.Module, compare: Callable[..., None], name: str) -> None:
                hook = functools.partial(compare, name)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

            for layer in self._executor.plan.layers:
                for member in layer.members if layer.techniques else ():
                    watch(model.get_submodule(member), self._compare_layer, layer.name)
            for name, module in model.named_modules():
                override = override_of(module)
                if override is not None and any(each.order is Stage.TILE_HEAD for each in override.stages):
                    watch(module, self._compare_head, name)
            restart()
            with torch.no_grad():
                model(*sample.args, **sample.kwargs)

    def _compare_layer(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not torch.is_grad_enabled():  # else it is one of the runs that are compared
            self._calls += self._compare(name, module, args, kwargs)

    def _compare_head(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        loss = self._executor.plan.loss
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if loss is not None and isinstance(hidden, torch.Tensor) and not torch.is_grad_enabled():
            some = hidden.flatten(0, -2)[: loss.rows + max(1, loss.rows // 2)]
            self._tiled_heads += self._compare(name, module, (some,), {})

    def _compare(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether there was something to differentiate; raise an error if the runs differ by too much."""
        override = override_of(module)
        if override is None:
            return False
        state = RngState([self._executor.device])

        def run(forward: Callable[..., Any]) -> _Numbers:
            state.restore()
            return _layer_step(module, forward, args, kwargs, self._executor.device)

        try:
            without = override.only(Stage.FETCH_PARAMETERS)
            plain, planned = run(without), run(override)
            layer = f"the layer {name or 'of the whole model'}"
            what = f"{layer} with its techniques differs from the same layer without"
            bound = _check(what, plain, planned, lambda: run(without), self._bound)
        finally:
            state.restore()
        self.noise = max(self.noise, bound)
        self.host_bytes = max(self.host_bytes, plain.host_bytes + planned.host_bytes)
        self._gradients += plain.compared
        return plain.loss is not None


def _layer_step(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> _Numbers:
    """Return the loss of a layer's outputs, and its gradients for inputs and parameters."""
    wanted: dict[str, torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        if type(value) is not torch.Tensor or not value.is_floating_point():
            return value
        inputs = f"its input {len(wanted)}"
        wanted[inputs] = value.detach().clone().requires_grad_()
        return wanted[inputs].clone()  # no leaf: the layer may change it in place

    with torch.enable_grad(), untouched(module):
        args, kwargs = pytree.tree_map(leaf, (args, kwargs))
        targets = backward_targets(forward(*args, **kwargs))
        if not targets:
            return _Numbers(None, {}, [], _buffers(module), RngState([device]))
        loss = loss_of(targets)
        wanted |= {name: each for name, each in module.named_parameters() if each.requires_grad}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients: dict[str, torch.Tensor | None] = {
            name: None if each is None else _dense(each).cpu()
            for name, each in zip(wanted, found, strict=True)
        }
        held = sum(each.nbytes for each in gradients.values() if each is not None)
        buffers, random = _buffers(module), RngState([device])
        return _Numbers(loss.detach().cpu(), gradients, [], buffers, random, held)
