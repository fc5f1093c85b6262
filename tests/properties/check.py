"""One random case: the plain model and a wrapped one train alike, to the bit, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import memscale
from memscale import Config, MemScaleError, Plan
from memscale.errors import RecomputeError, TransferError, VerificationError
from memscale.planner import cache, make_plan
from memscale.testing import executing
from properties.generator import LOOPS, Case, Piece, Stack
from properties.loops import Seen, Training

CAPACITY = "1GiB"
ROUNDING = 1e-10  # of the largest value, in double precision
LOSSLESS = {  # unless a case says otherwise
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
    "enable_tiling": False,
    "fused_host_step": False,
}


BROKEN_PROMISES = (RecomputeError, TransferError, VerificationError)  # no case gives cause for them

KINDS = ("equal", "invalid", "refused", "wrong", "crashed", "left behind", "mispredicted")


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        kind: "equal", "refused" (a `MemScaleError`), "wrong" (another number), "crashed" (another error, or one of
            `BROKEN_PROMISES`), "left behind" (files, threads), "mispredicted" (see `properties.plans`), or "invalid"
            (the plain model does not train).
        reason: In a line.
        details: More of it: a traceback, or all differences.
        techniques: How many layers had each technique in the plans that were attached.
    """

    kind: str
    reason: str = ""
    details: str = ""
    techniques: Counter[str] = field(default_factory=Counter)

    @property
    def is_failure(self) -> bool:
        return self.kind in ("wrong", "crashed", "left behind", "mispredicted")


def check(case: Case) -> Outcome:
    """Train the plain model and the wrapped one, and compare."""
    try:
        plain = _train(case, None)
    except Exception as error:
        return Outcome("invalid", line(error), traceback.format_exc())
    wrapping = Wrapping()
    threads = set(threading.enumerate())
    with cheaper_planning(), _directory() as directory:
        wrapping.directory = directory
        try:
            got = _train(case, wrapping)
        except Exception as error:
            refused = isinstance(error, MemScaleError) and not isinstance(error, BROKEN_PROMISES)
            kind = "refused" if refused else "crashed"
            return Outcome(kind, line(error), traceback.format_exc(), wrapping.techniques)
        finally:
            _detach_quietly(wrapping)
        left = sorted(os.listdir(directory))
    differences = compare(plain, got, exact=case.exact)
    if differences:
        return Outcome("wrong", differences[0], "\n".join(differences), wrapping.techniques)
    if left:
        return Outcome("left behind", f"files {left}", "", wrapping.techniques)
    more = _threads_beyond(threads)
    if more:
        return Outcome("left behind", f"threads {more}", "", wrapping.techniques)
    return Outcome("equal", techniques=wrapping.techniques)


@contextlib.contextmanager
def cheaper_planning() -> Iterator[None]:
    """Leave out advice for batches that do not fit, a quarter of all time, and let equal models share a plan."""
    # The hooks on all modules are those of the virtual device's tracker: plans do not depend on them.
    unhooked = patch.object(cache, "has_global_forward_hooks", bool)
    with patch.object(make_plan, "_what_would_fit", lambda *args: "no advice"), unhooked:
        yield


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    """A directory that has the same name in all cases of a process: equal models have a plan in common."""
    directory = os.path.join(tempfile.gettempdir(), f"memscale-case-{os.getpid()}")
    os.makedirs(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def config_of(case: Case, directory: str) -> Config:
    """What a case asks for, but for its budget."""
    fields = {**LOSSLESS, **case.plan.fields, "offload_dir": directory, "enable_logging": False}
    return Config(mode=case.plan.mode, **fields)


class Wrapping:
    """Puts plans on models, as a case asks for them."""

    def __init__(self) -> None:
        self.techniques: Counter[str] = Counter()
        self.directory = ""
        self.model: nn.Module | None = None

    def wrap(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], case: Case) -> None:
        args, kwargs = call
        sample: Any = kwargs or args
        config = config_of(case, self.directory)
        if case.plan.budget is not None:
            points = _budgets(model, sample, config, case)
            if points:
                budget = points[min(int(case.plan.budget * len(points)), len(points) - 1)]
                config = config.replace(memory_budget=budget)
        self.model = model
        memscale.wrap(model, config, sample if case.plan.sample == "batch" else None)
        self._count(model)

    def detach(self, model: nn.Module) -> None:
        self._count(model)  # a plan may have been made anew
        memscale.detach(model)
        self.model = None

    def _count(self, model: nn.Module) -> None:
        plan = model._memscale_executor.plan
        found: Counter[str] = Counter()
        for layer in plan.layers:
            found.update(layer.techniques)
            if layer.checkpointing is not None:
                found["kept outputs"] += bool(layer.checkpointing.keep)
                found["chained"] += layer.checkpointing.chained
            if layer.offloading is not None:
                found[f"offloading to {layer.offloading.to}"] += 1
                found["activations"] += layer.offloading.activations
        found["optimizer"] += plan.optimizer is not None
        found[plan.prediction_source] += 1
        self.techniques |= found


_known: dict[str, list[int]] = {}


def _budgets(model: nn.Module, sample: Any, config: Config, case: Case) -> list[int]:
    """The budgets of the planner's frontier, the loosest first; the same for all loops with a model and a plan."""
    step = case.loop.steps[0]
    key = repr((case.device, case.model, case.plan, case.exact, step.batch, step.length))
    if key not in _known:
        if len(_known) > LOOPS:
            _known.clear()
        with patch.object(make_plan, "predict", _not_simulated), patch.dict(cache.plans_made):
            frontier = memscale.plan(model, sample, config).frontier
        _known[key] = sorted((point.budget_bytes for point in frontier), reverse=True)
    return _known[key]


def _not_simulated(model: nn.Module, plan: Plan, *args: object) -> Plan:
    return plan


def _train(case: Case, wrapping: Wrapping | None) -> Seen:
    wrap = detach = None
    if wrapping is not None:
        wrap, detach = wrapping.wrap, wrapping.detach
    if case.device == "cpu":
        return Training(case, torch.device("cpu"), wrap, detach).run()
    with executing(CAPACITY, seed=case.seed) as gpu:
        return Training(case, gpu.device, wrap, detach, gpu.get_rng_state).run()


def _detach_quietly(wrapping: Wrapping) -> None:
    """After a failure: take the plan off, so that the next case finds nothing of this one."""
    if wrapping.model is not None:
        with contextlib.suppress(Exception):
            memscale.detach(wrapping.model)
        wrapping.model = None
        gc.collect()


def _threads_beyond(before: set[threading.Thread]) -> list[str]:
    """Threads that are still there after a grace period."""
    deadline = time.monotonic() + 5
    while True:
        more = [thread.name for thread in threading.enumerate() if thread not in before]
        if not more or time.monotonic() > deadline:
            return more
        gc.collect()
        time.sleep(0.05)


def line(error: BaseException) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def compare(expected: Seen, got: Seen, *, exact: bool = True) -> list[str]:
    """Return the differences, in the order in which they came about; up to rounding, if not `exact`."""
    found = []
    for (name, one), (other_name, other) in zip(expected, got, strict=False):
        if name != other_name:
            return [*found, f"{name!r} in the plain run, {other_name!r} in the other"]
        if not _same(one, other, exact):
            found.append(f"{name}: {_difference(one, other)}")
    if len(expected) != len(got):
        found.append(f"{len(expected)} values in the plain run, {len(got)} in the other")
    return found


def _same(one: Any, other: Any, exact: bool) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if exact or not one.is_floating_point():
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())
    return torch.allclose(one, other, rtol=0.0, atol=ROUNDING * max(1.0, _largest(one)), equal_nan=True)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().nan_to_num().max().item() if tensor.numel() else 0.0


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        gap = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        return f"off by {gap:.3g} (largest value {one.double().abs().max().item():.3g})"
    return f"{_short(one)} in the plain run, {_short(other)} in the other"


def _short(value: Any) -> str:
    text = f"tensor {tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 400 else text[:400] + "…"


# Making a failing case smaller ----------------------------------------------------------------------


def shrink(case: Case, outcome: Outcome, *, seconds: float = 60.0) -> Case:
    """Return the smallest case found that still fails in the same way, within a time."""
    deadline = time.monotonic() + seconds
    changed = True
    while changed and time.monotonic() < deadline:
        changed = False
        for smaller in _smaller(case):
            if time.monotonic() > deadline:
                break
            found = check(smaller)
            if found.kind == outcome.kind and _family(found) == _family(outcome):
                case, changed = smaller, True
                break
    return case


def _family(outcome: Outcome) -> str:
    """What a shrunken case must have in common with the first: the error's class, or nothing but a wrong number."""
    return outcome.reason.partition(":")[0] if outcome.kind == "crashed" else ""


def _smaller(case: Case) -> Iterator[Case]:
    loop, model, plan = case.loop, case.model, case.plan
    for steps in _without_one(loop.steps):
        if steps:
            yield replace(case, loop=replace(loop, steps=steps))
    for stacks in _without_one(model.stacks):
        if stacks:
            yield replace(case, model=replace(model, stacks=stacks))
    for number, stack in enumerate(model.stacks):
        for less in _smaller_stacks(stack):
            stacks = (*model.stacks[:number], less, *model.stacks[number + 1 :])
            yield replace(case, model=replace(model, stacks=stacks))
    for name in ("skip", "head", "result", "call", "frozen_embedding", "changes"):
        yield from _with_default(case, "model", model, name)
    for name in ("fields", "sample", "optimizer_first"):
        yield from _with_default(case, "plan", plan, name)
    for name in ("schedule", "groups", "in_backward"):
        yield from _with_default(case, "loop", loop, name)
    if loop.optimizer != "SGD":
        yield replace(case, loop=replace(loop, optimizer="SGD", options={"lr": 0.05}))
    for number, step in enumerate(loop.steps):
        for name in step.__dataclass_fields__:
            default = step.__dataclass_fields__[name].default
            if getattr(step, name) != default:
                steps = (*loop.steps[:number], replace(step, **{name: default}), *loop.steps[number + 1 :])
                yield replace(case, loop=replace(loop, steps=steps))


def _with_default(case: Case, part: str, spec: Any, name: str) -> Iterator[Case]:
    each = spec.__dataclass_fields__[name]
    default = {} if each.default_factory is dict else each.default
    if getattr(spec, name) != default:
        yield replace(case, **{part: replace(spec, **{name: default})})


def _smaller_stacks(stack: Stack) -> Iterator[Stack]:
    for pieces in _smaller_pieces(stack.pieces):
        if pieces:
            yield replace(stack, pieces=pieces)
    if stack.blocks > 2:
        yield replace(stack, blocks=2, frozen=())
    for name in ("form", "calls", "one_module", "result", "keyword", "scaled", "frozen"):
        default = stack.__dataclass_fields__[name].default
        if getattr(stack, name) != default:
            yield replace(stack, **{name: default})


def _smaller_pieces(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, ...]]:
    yield from _without_one(pieces)
    for number, piece in enumerate(pieces):
        if piece.inner:
            yield (*pieces[:number], *piece.inner, *pieces[number + 1 :])
            for inner in _smaller_pieces(piece.inner):
                if inner:
                    yield (*pieces[:number], replace(piece, inner=inner), *pieces[number + 1 :])


def _without_one(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for number in range(len(items)):
        yield (*items[:number], *items[number + 1 :])
