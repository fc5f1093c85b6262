"""Random cases: a module tree, a Config and a training loop, all from one integer.

A case is plain data, so that it can be printed and made smaller; `build_model` makes the modules of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memscale import AsyncOffloadConfig
from properties import pieces
from properties.pieces import ACTIVATIONS, IN_PLACE, Build, Options

WORDS = 17
FEATURES = 5
LOOPS = 4  # with each model and plan: to plan takes several times as long as to train


@dataclass(frozen=True)
class Piece:
    """One node of a module tree."""

    kind: str
    options: Options = field(default_factory=dict)
    inner: tuple[Piece, ...] = ()

    def __str__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.kind}({', '.join([*map(str, self.inner), *shown])})"

    def kinds(self) -> set[str]:
        return {self.kind}.union(*(piece.kinds() for piece in self.inner))


@dataclass(frozen=True)
class Stack:
    """Some equal blocks.

    Attributes:
        blocks: How many.
        pieces: What each consists of.
        form: "list" (called one by one), "sequential", or "attributes".
        calls: How often the model goes through the stack.
        one_module: All blocks are the same module.
        residual: Each block adds its input to its result.
        result: What a block returns: a "tensor", a "tuple", a "dict" or, with what it was called with, "pair".
        keyword: Blocks get a second tensor by name.
        scaled: A block's result is multiplied by a parameter of the block, and so is always a new tensor.
        frozen: Numbers of blocks that are not trained.
    """

    blocks: int
    pieces: tuple[Piece, ...]
    form: str = "list"
    calls: int = 1
    one_module: bool = False
    residual: bool = True
    result: str = "tensor"
    keyword: bool = False
    scaled: bool = True
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A module tree.

    Attributes:
        width: Features between blocks.
        tokens: Inputs are words; otherwise numbers.
        stacks: In the order of calls.
        skip: The result of the first stack is added to that of the last.
        head: "linear", "tied" (the embedding's weight), "borrowed" (the same, read from the embedding) or "two".
        result: What the model returns: "tensor", "tuple", "dict" or "loss" (which it computes itself).
        call: How it is called: by "position", by "name" or with a "dict" of tensors as one argument.
        frozen_embedding: The first layer is not trained.
        changes: What forward changes of its inputs: the "values" of a tensor of numbers, the "keys" of a dict, or
            "both".
    """

    width: int
    tokens: bool
    stacks: tuple[Stack, ...]
    skip: bool = False
    head: str = "linear"
    result: str = "tensor"
    call: str = "position"
    frozen_embedding: bool = False
    changes: str = "nothing"


@dataclass(frozen=True)
class PlanSpec:
    """What is asked of `wrap`.

    Attributes:
        mode: The mode's name.
        budget: Where on the planner's frontier the budget is, 0 (as plain) to 1 (the smallest); None for no budget.
        fields: More fields of the Config.
        sample: What `wrap` is given: the first "batch", or "nothing".
        optimizer_first: The optimizer is made before `wrap`.
    """

    mode: str = "balanced"
    budget: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    sample: str = "batch"
    optimizer_first: bool = False


@dataclass(frozen=True)
class StepSpec:
    """One step of a training loop.

    Attributes:
        micro_batches: How many batches are accumulated.
        batch: Samples in each.
        length: Positions in each.
        losses: "one", "two" (two backward passes over one graph), "sum" (of two calls), "grad"
            (`torch.autograd.grad`), "penalty" (double backward), "inputs" (backward to some parameters only),
            "adversarial" (the gradient of the input, too) or "functional" (a call with other weights).
        clip: "norm", "value" or None.
        autocast: Forward runs under autocast.
        closure: The optimizer gets a closure.
        skip: What is left out: "nothing", "step" or "backward".
        zero: How gradients are cleared: "none", "zeros", "model" or "by hand".
        before: What happens before the step; see `loops`.
        evaluating: The step is made in evaluation mode.
        anomaly: The step is made under autograd's anomaly detection.
    """

    micro_batches: int = 1
    batch: int = 2
    length: int = 4
    losses: str = "one"
    clip: str | None = None
    autocast: bool = False
    closure: bool = False
    skip: str = "nothing"
    zero: str = "none"
    before: str = "nothing"
    evaluating: bool = False
    anomaly: bool = False


@dataclass(frozen=True)
class LoopSpec:
    """A training loop; `in_backward`: each parameter has an optimizer of its own, which steps in backward."""

    optimizer: str
    options: dict[str, Any]
    steps: tuple[StepSpec, ...]
    schedule: bool = False
    groups: int = 1
    in_backward: bool = False


@dataclass(frozen=True)
class Case:
    """One case, and the integer that it was made from (a shrunken case keeps it).

    `exact`: numbers are compared to the bit; otherwise in double precision and up to rounding.
    """

    seed: int
    device: str
    model: ModelSpec
    plan: PlanSpec
    loop: LoopSpec
    exact: bool = True

    def draw(self, what: str) -> random.Random:
        """Return a generator of its own for a part of the case, so that what others draw stays as it was."""
        return random.Random(f"{what} {self.seed - self.seed % LOOPS}")

    def kinds(self) -> set[str]:
        """The kinds of pieces in it."""
        return set().union(*(piece.kinds() for stack in self.model.stacks for piece in stack.pieces))

    def describe(self) -> str:
        """The case, a line for each part; only what is not the default."""
        lines = [f"seed {self.seed} on {self.device}{'' if self.exact else ', up to rounding'}"]
        lines.append("model: " + _differences(replace(self.model, stacks=()), ("stacks",)))
        for stack in self.model.stacks:
            lines.append("  stack: " + _differences(stack, ("pieces",)))
            lines += [f"    {piece}" for piece in stack.pieces]
        lines.append("plan: " + _differences(self.plan, ()))
        lines.append("loop: " + _differences(self.loop, ("steps",)))
        lines += [f"  step: {_differences(step, ())}" for step in self.loop.steps]
        return "\n".join(lines)


def _differences(spec: Any, left_out: tuple[str, ...]) -> str:
    shown = []
    for name, each in spec.__dataclass_fields__.items():
        value = getattr(spec, name)
        if name not in left_out and value != each.default and value != {}:
            shown.append(f"{name}={value!r}")
    return ", ".join(shown) or "as by default"


Make = Callable[[random.Random], Options]


# Making a case --------------------------------------------------------------------------------------


def make_case(seed: int, device: str | None = None) -> Case:
    """Return the case of an integer; `device` ("cpu" or "vgpu") overrides the one that it draws.

    The cases from a multiple of `LOOPS` on to the next have the same model and Config, and other loops and weights.
    """
    draw = random.Random(seed - seed % LOOPS)
    drawn = draw.choice(["cpu", "cpu", "vgpu"])  # which takes five times as long
    case = Case(seed, device or drawn, _model(draw), _plan(draw), _loop(random.Random(f"loop {seed}")))
    return _with_more_settings(
        _with_inexact_techniques(_sensible(_with_inference(_with_changed_inputs(_with_memory(case)))))
    )


SETTINGS: dict[str, tuple[float, Callable[[random.Random], Any]]] = {
    "overlap_optimizer": (0.3, lambda d: d.choice([True, True, False])),
    "warmup_steps": (0.3, lambda d: d.choice([0, 1])),
    "gradient_accumulation_steps": (0.1, lambda d: d.choice([2, 3])),
    "max_cpu_offload_gb": (0.15, lambda d: 0),  # below the virtual GPU, what is offloaded is on disk then
    "async_config": (
        0.2,
        lambda d: AsyncOffloadConfig(prefetch_depth=d.choice([1, 2, 3]), workers=d.choice([1, 3])),
    ),
    "verify_correctness": (0.1, lambda d: True),
}


def _with_more_settings(case: Case) -> Case:
    """The case, with settings that many plans do not depend on: drawn apart, too."""
    draw = case.draw("settings")
    more = {name: make(draw) for name, (share, make) in SETTINGS.items() if _maybe(draw, share)}
    return replace(case, plan=replace(case.plan, fields={**case.plan.fields, **more}))


INEXACT: dict[str, Make] = {
    "SGD": lambda d: {"lr": 0.05, "momentum": d.choice([0.0, 0.9])},
    "Adam": lambda d: {"lr": 0.01, "eps": 0.01},  # with torch's 1e-8 it would step by the sign
    "AdamW": lambda d: {"lr": 0.01, "eps": 0.01},
}


def _with_inexact_techniques(case: Case) -> Case:
    """The case, sometimes with tiles and fused steps of host masters, which round in other places: drawn apart, too."""
    draw = case.draw("inexact")
    if not _maybe(draw, 0.2):
        return case
    case = _up_to_rounding(case)
    name = draw.choice(sorted(INEXACT))
    fields = {**case.plan.fields, "enable_tiling": _maybe(draw, 0.8), "fused_host_step": True}
    # Tiles refuse to be differentiated twice.
    steps = tuple(
        replace(step, losses="one") if step.losses == "penalty" else step for step in case.loop.steps
    )
    loop = replace(case.loop, optimizer=name, options=INEXACT[name](draw), steps=steps)
    return replace(case, plan=replace(case.plan, fields=fields), loop=loop)


MEMORY = ["replaced", "with history", "in place", "element in place", "tuple", "nested", "list", "deque"]


def _with_memory(case: Case) -> Case:
    """The case, sometimes with a piece that keeps tensors: drawn apart, so that the other cases stay as they were.

    Not inside of torch's own checkpoint, which finds what the call has left and computes something else.
    """
    draw = case.draw("memory")
    if not _maybe(draw, 0.12):
        return case
    first, *others = case.model.stacks
    place = draw.randint(0, len(first.pieces))
    piece = Piece("memory", {"how": draw.choice(MEMORY)})
    first = replace(first, pieces=(*first.pieces[:place], piece, *first.pieces[place:]))
    return replace(case, model=replace(case.model, stacks=(first, *others)))


def _with_inference(case: Case) -> Case:
    """The case, sometimes with a part in inference mode: drawn apart, too."""
    if not _maybe(case.draw("inference"), 0.08):
        return case
    *others, last = case.model.stacks
    last = replace(last, pieces=(Piece("no_grad", {"how": "inference"}), *last.pieces))
    return replace(case, model=replace(case.model, stacks=(*others, last)))


def _with_changed_inputs(case: Case) -> Case:
    """The case, sometimes with a model that changes what it is called with: drawn apart, too."""
    draw = case.draw("inputs")
    if not _maybe(draw, 0.15):
        return case
    model = replace(case.model, changes=draw.choice(["values", "keys", "both"]))
    # Leaves that require gradients cannot be changed in place.
    steps = tuple(
        replace(step, losses="one") if step.losses == "adversarial" else step for step in case.loop.steps
    )
    return replace(case, model=model, loop=replace(case.loop, steps=steps))


def _maybe(draw: random.Random, share: float) -> bool:
    return draw.random() < share


def _in_place(draw: random.Random, share: float = 0.6) -> str | None:
    return draw.choice(sorted(IN_PLACE)) if _maybe(draw, share) else None


OPTIONS: dict[str, tuple[float, Make]] = {
    "linear": (
        5,
        lambda d: {
            "bias": _maybe(d, 0.4),
            "then": _in_place(d, 0.7),
            "alias": d.choice([None, None, "view", "transpose", "slice"]),
            "tied": d.randrange(2) if _maybe(d, 0.15) else None,
            "frozen": _maybe(d, 0.1),
        },
    ),
    "in_place": (
        2,
        lambda d: {
            "act": d.choice(["relu", "leaky", "elu", "hardtanh", "dropout", "silu"]),
            "direct": _maybe(d, 0.4),
        },
    ),
    "activation": (2, lambda d: {"act": d.choice(sorted(ACTIVATIONS))}),
    "mlp": (3, lambda d: {"act": d.choice(sorted(ACTIVATIONS)), "bias": _maybe(d, 0.6)}),
    "gated": (
        2,
        lambda d: {
            "bias": _maybe(d, 0.4),
            "cut": d.choice(["chunk", "split", "unsafe_chunk", "unsafe_split", "slice"]),
            "then": _in_place(d),
        },
    ),
    "views": (
        2,
        lambda d: {
            "kind": d.choice(
                [
                    "view",
                    "transpose",
                    "expand",
                    "chunk",
                    "split",
                    "unsafe_view",
                    "flip",
                    "as_strided",
                    "unfold",
                    "itself",
                ]
            )
        },
    ),
    "norm": (
        3,
        lambda d: {
            "kind": d.choice(["layer", "rms", "batch", "batch", "instance", "group"]),
            "momentum": d.choice([0.1, None]),
        },
    ),
    "dropout": (2, lambda d: {"kind": d.choice(["plain", "plain", "alpha", "feature"]), "p": 0.3}),
    "recurrent": (
        3,
        lambda d: {
            "kind": d.choice(["rnn", "gru", "gru", "lstm"]),
            "bidirectional": _maybe(d, 0.3),
            "layers": d.choice([1, 1, 2]),
            "bias": _maybe(d, 0.8),
            "dropout": d.choice([0.0, 0.2]),
        },
    ),
    "cell": (0.5, lambda d: {}),
    "attention": (
        1.5,
        lambda d: {
            "dropout": d.choice([0.0, 0.1]),
            "bias": _maybe(d, 0.6),
            "weights": _maybe(d, 0.4),
            "causal": _maybe(d, 0.4),
        },
    ),
    "scores": (1.5, lambda d: {"fused": _maybe(d, 0.4)}),
    "conv": (1.5, lambda d: {"groups": d.choice([1, 2]), "bias": _maybe(d, 0.5), "then": _in_place(d, 0.5)}),
    "positions": (0.7, lambda d: {"persistent": _maybe(d, 0.5)}),
    "lazy_table": (0.7, lambda d: {}),
    "running_mean": (1, lambda d: {"how": d.choice(["in place", "new", "copy"])}),
    "counter": (0.5, lambda d: {}),
    "normed": (0.7, lambda d: {"spectral": _maybe(d, 0.5)}),
    "no_grad": (1, lambda d: {"how": d.choice(["no_grad", "detach"])}),
    "random": (1, lambda d: {"source": d.choice(["python", "numpy", "own", "torch host", "torch"])}),
    "layer_drop": (0.4, lambda d: {"source": d.choice(["python", "torch"])}),
    "branch": (0.4, lambda d: {}),
    "routed": (0.4, lambda d: {}),
    "sorted": (1, lambda d: {"kind": d.choice(["sort", "topk", "cumsum", "gather", "index_put", "fft"])}),
    "custom": (1.2, lambda d: {"kind": d.choice(["cube", "tanh", "double", "attribute"])}),
    "other_type": (0.7, lambda d: {"dtype": d.choice(["double", "bfloat16"])}),
    "autocast": (0.5, lambda d: {}),
    "shared": (0.8, lambda d: {"number": d.randrange(2)}),
    "twice": (0.7, lambda d: {}),
    "writer": (0.5, lambda d: {"history": _maybe(d, 0.6)}),
    "reader": (0.5, lambda d: {}),
    "hooked": (0.8, lambda d: {"kind": d.choice(["forward", "pre", "backward", "tensor"])}),
}

AROUND: dict[str, tuple[float, Make]] = {
    "residual": (2, lambda d: {"in_place": _maybe(d, 0.3)}),
    "sequential": (1, lambda d: {}),
    "parallel": (0.7, lambda d: {}),
    "checkpointed": (0.5, lambda d: {"reentrant": _maybe(d, 0.4)}),
    "packed": (0.2, lambda d: {}),
}


def _piece(draw: random.Random, depth: int) -> Piece:
    if depth and _maybe(draw, 0.22):
        kind = _weighted(draw, AROUND)
        count = draw.randint(1, 3) if kind != "parallel" else 2
        inner = tuple(_piece(draw, depth - 1) for _ in range(count))
        return Piece(kind, AROUND[kind][1](draw), inner)
    kind = _weighted(draw, OPTIONS)
    return Piece(kind, OPTIONS[kind][1](draw))


def _weighted(draw: random.Random, table: dict[str, tuple[float, Make]]) -> str:
    names = list(table)
    return draw.choices(names, [table[name][0] for name in names])[0]


def _stack(draw: random.Random) -> Stack:
    blocks = draw.choice([2, 2, 2, 3, 3, 4])
    form = draw.choice(["list", "list", "list", "sequential", "attributes"])
    plain = form == "sequential"
    frozen = tuple(sorted(draw.sample(range(blocks), draw.randint(1, blocks - 1))))
    return Stack(
        blocks=blocks,
        pieces=tuple(_piece(draw, 2) for _ in range(draw.randint(1, 3))),
        form=form,
        calls=2 if _maybe(draw, 0.1) else 1,
        one_module=_maybe(draw, 0.08),
        residual=_maybe(draw, 0.6),
        result="tensor" if plain else draw.choice(["tensor", "tensor", "tensor", "tuple", "dict", "pair"]),
        keyword=not plain and _maybe(draw, 0.2),
        scaled=_maybe(draw, 0.5),
        frozen=frozen if _maybe(draw, 0.12) else (),
    )


def _model(draw: random.Random) -> ModelSpec:
    return ModelSpec(
        width=draw.choice([8, 8, 12, 16]),
        tokens=_maybe(draw, 0.5),
        stacks=tuple(_stack(draw) for _ in range(draw.choice([1, 1, 1, 2]))),
        skip=_maybe(draw, 0.2),
        head=draw.choice(["linear", "linear", "tied", "borrowed", "two"]),
        result=draw.choice(["tensor", "tensor", "tuple", "dict", "loss"]),
        call=draw.choice(["position", "position", "name", "dict"]),
        frozen_embedding=_maybe(draw, 0.1),
    )


def _plan(draw: random.Random) -> PlanSpec:
    fields: dict[str, Any] = {}
    if _maybe(draw, 0.15):
        fields["enable_checkpointing"] = False
    if _maybe(draw, 0.3):
        fields["enable_offloading"] = draw.choice([True, False])
    if _maybe(draw, 0.25):
        fields["async_offload"] = True
    if _maybe(draw, 0.1):
        fields["use_static_profiling"] = False
    if _maybe(draw, 0.8):  # else most models are so small that they get no plan, after many were tried
        fields["force_optimize"] = True
    return PlanSpec(
        mode=draw.choice(["conservative", "balanced", "aggressive", "aggressive"]),
        budget=draw.choice([0.3, 0.5, 0.7, 0.85, 1.0, draw.random()]) if _maybe(draw, 0.75) else None,
        fields=fields,
        sample=draw.choice(["batch", "batch", "batch", "nothing"]),
        optimizer_first=_maybe(draw, 0.25),
    )


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda d: {"lr": 0.05, "momentum": d.choice([0.0, 0.9]), "weight_decay": d.choice([0.0, 0.01])},
    "Adam": lambda d: {"lr": 0.01},
    "AdamW": lambda d: {"lr": 0.01, "amsgrad": d.choice([False, False, True])},
    "NAdam": lambda d: {"lr": 0.01},
    "RAdam": lambda d: {"lr": 0.01},
    "Adagrad": lambda d: {"lr": 0.01},
    "RMSprop": lambda d: {"lr": 0.01, "momentum": d.choice([0.0, 0.5]), "centered": d.choice([False, True])},
    "Adadelta": lambda d: {"lr": 0.5},
    "Adamax": lambda d: {"lr": 0.01},
    "ASGD": lambda d: {"lr": 0.01},
    "Rprop": lambda d: {"lr": 0.01},
}

BEFORE = [
    "evaluate",
    "evaluate in training mode",
    "freeze",
    "unfreeze",
    "save and load",
    "rewind",
    "detach and wrap",
    "change weights",
    "new optimizer",
    "copy",
    "fail",
    "inference",
    "to device",
    "replace head",
    "assign",
    "hook",
]


def _step(draw: random.Random) -> StepSpec:
    # Another size makes another plan, which takes most of the time of a case: so seldom.
    batch, length = (draw.choice([1, 3, 4]), draw.choice([4, 5, 8])) if _maybe(draw, 0.06) else (2, 4)
    return StepSpec(
        micro_batches=draw.choice([1, 1, 1, 2, 3]),
        batch=batch,
        length=length,
        losses=draw.choice(
            ["one"] * 20 + ["two", "sum", "grad", "inputs", "adversarial", "functional"] * 2 + ["penalty"]
        ),
        clip=draw.choice([None, None, "norm", "value"]),
        autocast=_maybe(draw, 0.06),
        closure=_maybe(draw, 0.06),
        skip=draw.choice(["nothing"] * 8 + ["step", "backward"]),
        zero=draw.choice(["none", "none", "zeros", "model", "by hand"]),
        before=draw.choice(BEFORE) if _maybe(draw, 0.3) else "nothing",
        evaluating=_maybe(draw, 0.06),
        anomaly=_maybe(draw, 0.03),
    )


def _loop(draw: random.Random) -> LoopSpec:
    names = ["AdamW"] * 4 + ["SGD"] * 2 + list(OPTIMIZERS)
    name = draw.choice(names)
    options = OPTIMIZERS[name](draw)
    if _maybe(draw, 0.2):
        options["foreach"] = draw.choice([True, False])
    elif name in ("Adam", "AdamW", "SGD") and _maybe(draw, 0.1):
        options["fused"] = True
    return LoopSpec(
        optimizer=name,
        options=options,
        steps=tuple(_step(draw) for _ in range(draw.choice([2, 2, 3, 4]))),
        schedule=_maybe(draw, 0.25),
        groups=draw.choice([1, 1, 1, 2]),
        in_backward=_maybe(draw, 0.05),
    )


def _sensible(case: Case) -> Case:
    """Without combinations that no plain model can train."""
    model = case.model
    if not model.tokens and model.head in ("tied", "borrowed"):
        model = replace(model, head="linear")
    loop = case.loop
    if loop.in_backward:  # gradients are gone when backward ends: there is nothing to accumulate or to clip
        steps = tuple(
            replace(step, micro_batches=1, clip=None, losses="one", closure=False, skip="nothing")
            for step in loop.steps
        )
        loop = replace(loop, steps=steps, schedule=False)
    if any(stack.one_module for stack in model.stacks) or case.kinds() & {"shared", "checkpointed"}:
        # Of a module that has several names, torch.func.functional_call does not put the parameters back. And torch's
        # own checkpointing recomputes after it, with the weights of the module: gradients of the plain model are wrong.
        steps = tuple(
            replace(step, losses="one") if step.losses == "functional" else step for step in loop.steps
        )
        loop = replace(loop, steps=steps)
    case = replace(case, model=model, loop=loop)
    summed = case if case.device == "cpu" else _one_sum(case)
    if summed != case and _maybe(case.draw("rounding"), 0.5):
        return _up_to_rounding(case)
    return summed


# Pieces that use a parameter several times in one call.
SEVERAL_USES = {"recurrent", "cell", "twice", "normed"}


def _one_sum(case: Case) -> Case:
    """Without calls of offloaded layers whose gradients are added up in another order than those of the plain model.

    See Note [Master and working copy]: several uses of a parameter in one call, and several calls before one backward.
    """
    stacks = tuple(_used_once(stack) for stack in case.model.stacks)
    steps = case.loop.steps
    several_calls = any(stack.calls > 1 or stack.one_module or _has_common_weight(stack) for stack in stacks)
    if several_calls or case.model.head == "tied":
        # The penalty on a gradient uses each weight once more.
        steps = tuple(replace(step, losses="one") if step.losses == "penalty" else step for step in steps)
    if several_calls or case.kinds() & SEVERAL_USES:
        # Autocast casts a parameter once for all of its uses, and so adds up their gradients in 16 bits.
        steps = tuple(replace(step, autocast=False) for step in steps)
    if case.kinds() & SEVERAL_USES:
        stacks = tuple(replace(stack, calls=1, one_module=False) for stack in stacks)
        steps = tuple(replace(step, losses="one") if step.losses == "sum" else step for step in steps)
    return replace(case, model=replace(case.model, stacks=stacks), loop=replace(case.loop, steps=steps))


def _up_to_rounding(case: Case) -> Case:
    """The case, whose gradients are added up in another order, in double precision.

    Without what would make a difference in the last bit large: 16 bits, and optimizers that step by the sign.
    """
    steps = tuple(replace(step, autocast=False) for step in case.loop.steps)
    stacks = tuple(
        replace(stack, pieces=tuple(map(_without_casts, stack.pieces))) for stack in case.model.stacks
    )
    loop = replace(case.loop, optimizer="SGD", options={"lr": 0.05}, steps=steps)
    return replace(case, model=replace(case.model, stacks=stacks), loop=loop, exact=False)


def _without_casts(piece: Piece) -> Piece:
    if piece.kind in ("other_type", "autocast"):
        return Piece("mlp", {"act": "tanh", "bias": True})
    return replace(piece, inner=tuple(map(_without_casts, piece.inner)))


def _has_common_weight(stack: Stack) -> bool:
    def has(piece: Piece) -> bool:
        is_common = piece.kind == "shared" or piece.options.get("tied") is not None
        return is_common or any(map(has, piece.inner))

    return any(map(has, stack.pieces))


def _used_once(stack: Stack) -> Stack:
    """The stack, with at most one piece in each block that has a weight in common with others."""
    found: list[str] = []

    def change(piece: Piece) -> Piece:
        inner = tuple(change(each) for each in piece.inner)
        options = piece.options
        if piece.kind == "shared" or options.get("tied") is not None:
            found.append(piece.kind)
            if len(found) > 1 and piece.kind == "shared":
                return Piece("mlp", {"act": "tanh", "bias": True})
            if len(found) > 1:
                options = {**options, "tied": None}
        return replace(piece, options=options, inner=inner)

    return replace(stack, pieces=tuple(change(piece) for piece in stack.pieces))


# Building it ----------------------------------------------------------------------------------------


def build_piece(piece: Piece, build: Build) -> nn.Module:
    """Return the module of a piece."""
    if piece.kind in pieces.LEAVES:
        return pieces.LEAVES[piece.kind](build, piece.options)
    inner = [build_piece(each, build) for each in piece.inner]
    if piece.kind == "parallel":
        return pieces.Parallel(inner, piece.options)
    body = inner[0] if len(inner) == 1 else nn.Sequential(*inner)
    if piece.kind == "residual":
        return pieces.Residual(body, piece.options)
    if piece.kind == "checkpointed":
        return pieces.Checkpointed(body, piece.options)
    if piece.kind == "packed":
        return pieces.OnCpuSaved(body, piece.options)
    return body


class Block(nn.Module):
    """One block of a stack."""

    def __init__(self, stack: Stack, build: Build) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(build_piece(piece, build) for piece in stack.pieces))
        self.scale = nn.Parameter(torch.ones(build.width)) if stack.scaled else None
        self.residual = stack.residual
        self.result = stack.result

    def forward(self, x: torch.Tensor, beside: torch.Tensor | None = None) -> Any:
        if beside is not None:
            x = x + beside
        y = self.parts(x)
        if self.scale is not None:
            y = y * self.scale
        if self.residual:
            y = x + y
        if self.result == "tuple":
            return y, y.square().mean()
        if self.result == "dict":
            return {"y": y, "beside": y.square().mean(), "nothing": None}
        if self.result == "pair":
            return y, x
        return y


class RandomModel(nn.Module):
    """The model of a case."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        build = Build(spec.width)
        self.spec = spec
        self.board = build.board
        self.embed = nn.Embedding(WORDS, spec.width) if spec.tokens else nn.Linear(FEATURES, spec.width)
        self.embed.requires_grad_(not spec.frozen_embedding)
        self.names: list[list[str]] = []
        for number, stack in enumerate(spec.stacks):
            self._add_stack(number, stack, build)
        self.head = nn.Linear(spec.width, WORDS, bias=spec.head != "tied")
        if spec.head == "tied":
            self.head.weight = self.embed.weight
        if spec.head == "two":
            self.second = nn.Linear(spec.width, 3)

    def _add_stack(self, number: int, stack: Stack, build: Build) -> None:
        if stack.one_module:
            blocks = [Block(stack, build)] * stack.blocks
        else:
            blocks = [Block(stack, build) for _ in range(stack.blocks)]
        for index in stack.frozen:
            blocks[index % len(blocks)].requires_grad_(False)
        if stack.form == "attributes":
            for index, block in enumerate(blocks):
                self.add_module(f"stack{number}_{index}", block)
        else:
            kind = nn.Sequential if stack.form == "sequential" else nn.ModuleList
            self.add_module(f"stack{number}", kind(*blocks) if kind is nn.Sequential else kind(blocks))

    def _blocks(self, number: int, stack: Stack) -> list[nn.Module]:
        if stack.form == "attributes":
            return [getattr(self, f"stack{number}_{index}") for index in range(stack.blocks)]
        return list(getattr(self, f"stack{number}"))

    def _through(self, number: int, stack: Stack, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        beside: list[torch.Tensor] = []
        first = x
        for _ in range(stack.calls):
            if stack.form == "sequential":
                x = getattr(self, f"stack{number}")(x)
                continue
            for block in self._blocks(number, stack):
                out = block(x, beside=first * 0.1) if stack.keyword else block(x)
                if stack.result == "tensor":
                    x = out
                elif stack.result == "dict":
                    x = out["y"]
                    beside.append(out["beside"])
                elif stack.result == "tuple":
                    x, more = out
                    beside.append(more)
                else:
                    x, before = out
                    x = x + 0.1 * before
        return F.layer_norm(x, (x.shape[-1],)), beside

    def forward(
        self, x: torch.Tensor | None = None, labels: torch.Tensor | None = None, *, batch: Any = None
    ) -> Any:
        if batch is not None:
            x, labels = batch["x"], batch.get("labels")
            if self.spec.changes in ("keys", "both"):
                batch["x"] = batch.pop("x") * 1
                batch.pop("labels", None)
        assert x is not None
        if self.spec.changes in ("values", "both") and x.is_floating_point():
            x.mul_(1.5).add_(0.25)
        self.board.clear()
        h = self.embed(x)
        beside: list[torch.Tensor] = []
        first = None
        for number, stack in enumerate(self.spec.stacks):
            h, more = self._through(number, stack, h)
            beside += more
            first = h if first is None else first
        if self.spec.skip and first is not None:
            h = h + first
        logits = F.linear(h, self.embed.weight) if self.spec.head == "borrowed" else self.head(h)
        self.board.clear()
        extra = (
            torch.stack([widened(each) for each in beside]).sum() if beside else widened(logits).mean() * 0.1
        )
        if self.spec.head == "two":
            extra = extra + widened(self.second(h)).square().mean()
        if self.spec.result == "tuple":
            return logits, extra
        if self.spec.result == "dict":
            return {"logits": logits, "extra": [extra], "width": self.spec.width}
        if self.spec.result == "loss":
            if labels is None:
                return {"loss": None, "logits": logits}
            return {"loss": loss_of(logits, labels) + 0.1 * extra, "logits": logits}
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss that all loops use."""
    return F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten())


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In single precision, or in double if it is: what is compared up to rounding must not be rounded here."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def build_model(case: Case) -> RandomModel:
    """Return the model of a case, with the same weights each time."""
    torch.manual_seed(case.seed)
    model = RandomModel(case.model).train()
    return model if case.exact else model.double()
