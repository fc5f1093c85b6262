"""`python -m benchmarks.policy`: the sweeps, the training and the evaluation of the learned policy (`auto_policy`).

`sweep` writes one row for each model, batch, GPU and memory of it: the policy's features, and the step time of the plan
that each strategy leads to. It asks the cost model alone: models are profiled on fake tensors, and plans taken from the
frontier that the planner computes, thinner than in `wrap` (`FRONTIER_WIDTH`), without its refinement and without
simulating the plan. Whether a plan fits is estimated likewise. A model is profiled once, with the kernels of one GPU
(`PROFILED_FOR`); the points of a frontier do not depend on the size of the device, so that one serves several sizes.

`train` reads the rows, fits the ranker to those of generated shapes on the training GPUs, and evaluates it on models
and GPUs that it has not seen, against exhaustive search and against fixed strategies.

Note [Regret]
~~~~~~~~~~~~~
The regret of a strategy in a case is its step time over that of the best strategy that fits, less 1. Where a strategy
does not fit, what `wrap` does instead counts: the rules, which are those of BALANCED. If they do not fit either, though
some other strategy does, the step time counts as `NOTHING_FITS` times the best one's: such a training fails or is
rescued by a heavier plan, and no estimate says how long that takes. Cases in which no strategy fits are left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.tables import check_into, write_into
from memscale.benchmarks.models import find_model, quiet_transformers
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.config import Config
from memscale.errors import MemScaleError
from memscale.hardware import Hardware, virtual_hardware
from memscale.planner.assembly import plain_point, unseen_bytes
from memscale.planner.cost_model import Point
from memscale.planner.decide import choose_point, frontier_points, room_of
from memscale.planner.make_plan import profile_settings, situation_of, usable
from memscale.planner.predict import rehearsal
from memscale.planner.settings import Under
from memscale.policy.choose import RANKER_FILE, SCHEMA, Situation, Strategy, read_ranker
from memscale.profiler import Sample, sample_of

_PROGRAM = "python -m benchmarks.policy"
_TABLE = "policy"
RESULTS = Path(__file__).parent / "results"

FRONTIER_WIDTH = 10  # partial plans kept at a position
WORTH_WAITING = 0.99  # as in `memscale.planner.decide`
PRESSURES = (0.5, 8.0)  # plain peak over memory, between which sizes of devices are drawn
SIZES_DRAWN = 5  # for each model and GPU, beside the GPU's own

PROFILED_FOR = "RTX 3090"
TRAINING_GPUS = (
    "GTX 1050 Ti", "GTX 1080 Ti", "RTX 2080 Ti", "T4", "V100 SXM2 16GB", "RTX 3060", "RTX 3090", "A10G",
    "RTX 4060", "RTX 4090", "A100 SXM4 40GB", "L40S", "H100 SXM5 80GB", "GH200 144GB", "B200",
)  # fmt: skip
HELD_OUT_GPUS = (
    "P100 PCIe 16GB", "RTX 2060 6GB", "RTX 3080 10GB", "RTX A6000", "L4", "RTX 4070", "A100 PCIe 80GB", "H200 SXM5",
)  # fmt: skip
HOSTS_GIB = (16, 32, 64, 128, 512)

HELD_OUT_MODELS = (  # of the registry, with the batch that it names, or four times that
    "bert-large", "gpt2-medium", "vit-large", "llama-3.2-1b", "resnet-50", "qwen3-0.6b", "gpt2-xl", "diffusion-unet",
)  # fmt: skip

_EXACT = {"enable_checkpointing": True, "enable_offloading": True, "enable_tiling": False, "mode": "balanced"}
STRATEGIES: dict[str, tuple[dict[str, Any], float | None]] = {
    "the fastest plan that fits": (_EXACT, 1.0),
    "the fastest plan that fits, with tiles": ({**_EXACT, "enable_tiling": True}, 1.0),
    "the fastest plan that fits, nothing offloaded": ({**_EXACT, "enable_offloading": False}, 1.0),
    "the fastest plan in 85% of the device": (_EXACT, 0.85),
    "CONSERVATIVE": ({**_EXACT, "mode": "conservative", "enable_offloading": False}, None),
    "BALANCED": (_EXACT, None),
    "AGGRESSIVE in full precision": ({**_EXACT, "mode": "aggressive", "enable_tiling": True}, None),
}
"""The strategies by name: fields of Config, and the share of the room that is the memory budget."""
RULES = "BALANCED"
NOTHING_FITS = 2.0  # times the best step time; see Note [Regret]
NAMES = tuple(STRATEGIES)


# Models ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A generated model and its batch."""

    family: str
    layers: int
    width: int
    vocabulary: int  # 0 for images
    batch: int
    seq: int  # 0 for images
    frozen: float = 0.0  # share of the parameters, from the first one on

    @property
    def name(self) -> str:
        return f"{self.family}-{self.layers}x{self.width}-v{self.vocabulary}-f{self.frozen:g}"

    def build(self) -> nn.Module:
        heads = max(1, self.width // 64)
        wide = {"hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": heads}
        text = {"vocab_size": self.vocabulary, "max_position_embeddings": max(512, self.seq)}
        tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        four = {"intermediate_size": 4 * self.width}
        if self.family == "gpt2":
            return _built("GPT2Config", "GPT2LMHeadModel", wide, text, tokens)
        if self.family == "bert":
            return _built("BertConfig", "BertForMaskedLM", wide, text, four, tokens)
        if self.family == "llama":
            grouped = {"num_key_value_heads": max(1, heads // 4), "tie_word_embeddings": self.width < 2048}
            narrow = {"intermediate_size": 256 * round(self.width * 8 / 3 / 256 + 0.5)}
            return _built("LlamaConfig", "LlamaForCausalLM", wide, text, tokens, grouped, narrow)
        if self.family == "vit":
            return _built("ViTConfig", "ViTForImageClassification", wide, four, {"num_labels": 1000})
        sizes = [self.width, 2 * self.width, 4 * self.width, 8 * self.width]
        depths = [
            max(1, self.layers // 6),
            max(1, self.layers // 6),
            self.layers // 2,
            max(1, self.layers // 6),
        ]
        shape = {"hidden_sizes": sizes, "depths": depths, "num_labels": 1000}
        if self.family == "convnext":
            return _built("ConvNextConfig", "ConvNextForImageClassification", shape)
        return _built("ResNetConfig", "ResNetForImageClassification", shape, {"embedding_size": 64})

    def inputs(self) -> dict[str, torch.Tensor]:
        if not self.seq:
            return {
                "pixel_values": torch.empty(self.batch, 3, 224, 224),
                "labels": torch.zeros(self.batch).long(),
            }
        ids = torch.zeros(self.batch, self.seq, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}


def _built(config: str, model: str, *settings: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    together: dict[str, Any] = {name: value for each in settings for name, value in each.items()}
    return getattr(library, model)(getattr(library, config)(**together))


VOCABULARIES = {"gpt2": (8192, 50257), "llama": (32000, 128256, 151936), "bert": (30522,)}


def generated_shapes(count: int, seed: int = 0) -> list[Shape]:
    """Draw shapes, families in turn; the same for the same seed."""
    draw = random.Random(seed)
    families = ("gpt2", "llama", "bert", "llama", "vit", "gpt2", "convnext", "llama", "bert", "resnet")
    found = []
    for index in range(count):
        family = families[index % len(families)]
        vocabulary = seq = 0
        if family in ("gpt2", "llama", "bert"):
            vocabulary = draw.choice(
                {"gpt2": (8192, 50257), "llama": (32000, 128256, 151936), "bert": (30522,)}[family]
            )
            width = draw.choice((128, 256, 512, 768, 1024, 1536, 2048, 2560))
            layers = draw.choice((4, 4, 6, 6, 8, 8, 12, 12, 16, 24))
            seq = draw.choice((128, 256, 512) if family == "bert" else (128, 512, 1024, 2048))
            batch = draw.choice([size for size in (1, 2, 4, 8, 16, 32, 64) if size * seq <= 32768])
        elif family == "vit":
            width, layers = draw.choice((192, 384, 768, 1024, 1280)), draw.choice((4, 6, 12, 24))
            batch = draw.choice((8, 32, 128))
        else:
            width, layers, batch = (
                draw.choice((64, 96, 128)),
                draw.choice((6, 8, 12)),
                draw.choice((16, 64, 128)),
            )
        frozen = draw.choice((0.0, 0.0, 0.0, 0.5, 0.97))
        found.append(Shape(family, layers, width, vocabulary, batch, seq, frozen))
    return found


def freeze(model: nn.Module, share: float) -> None:
    """Freeze parameters from the first one on, up to a share of their bytes."""
    parameters = list(model.parameters())
    left = share * sum(each.nbytes for each in parameters)
    for each in parameters:
        left -= each.nbytes
        if left < 0:
            break
        each.requires_grad_(False)


@dataclass(frozen=True)
class Candidate:
    """A model and batch to sweep, on some GPUs."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    batch: int
    is_held_out: bool
    gpus: tuple[str, ...]
    frozen: float = 0.0


def candidates(shapes: int, seed: int) -> Iterator[Candidate]:
    """Yield generated shapes on three training GPUs, every third on a held-out one as well; held-out models between."""
    draw = random.Random(seed + 1)
    models = list(HELD_OUT_MODELS)
    for index, shape in enumerate(generated_shapes(shapes, seed)):
        gpus = [TRAINING_GPUS[(4 * index + 7 * offset) % len(TRAINING_GPUS)] for offset in range(3)]
        if index % 3 == 0:
            gpus.append(draw.choice(HELD_OUT_GPUS))
        yield Candidate(shape.name, shape.build, shape.inputs, shape.batch, False, tuple(gpus), shape.frozen)
        if index % 4 == 3 and models:
            case = find_model(models.pop(0))
            gpus = [TRAINING_GPUS[(index + 4) % len(TRAINING_GPUS)], *draw.sample(HELD_OUT_GPUS, 2)]
            batch = case.batch * (4 if index % 8 == 3 else 1)
            inputs = functools.partial(case.inputs, batch, case.seq, "meta")
            yield Candidate(case.name, case.build, inputs, batch, True, tuple(gpus))


# The sweep -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A case: its features, and the step time in seconds of each strategy's plan; None if it does not fit.

    Attributes:
        model: its name.
        gpu: its name in the table.
        gpu_memory: whether the device has the memory of that GPU, not one that was drawn.
        held_out_model: it is not used for training.
        held_out_gpu: it is not used for training.
        features: in the order of the document's `features`.
        seconds: in the order of the document's `strategies`.
    """

    model: str
    gpu: str
    gpu_memory: bool
    held_out_model: bool
    held_out_gpu: bool
    features: tuple[float, ...]
    seconds: tuple[float | None, ...]

    @property
    def best(self) -> float:
        return min(each for each in self.seconds if each is not None)

    @property
    def is_possible(self) -> bool:
        return any(each is not None for each in self.seconds)

    def outcome(self, strategy: int) -> float:
        """Return the step time of what `wrap` makes of a choice: of the rules if it does not fit, of the best else."""
        chosen, rules = self.seconds[strategy], self.seconds[NAMES.index(RULES)]
        return chosen if chosen is not None else rules if rules is not None else NOTHING_FITS * self.best

    def regret(self, strategy: int) -> float:
        return self.outcome(strategy) / self.best - 1


class Sweep:
    """The cases of one model and batch."""

    def __init__(self, candidate: Candidate, draw: random.Random) -> None:
        self.candidate = candidate
        self.draw = draw
        with quiet_transformers(), torch.device("meta"):
            self.model = candidate.build().train()
            self.sample: Sample = sample_of(candidate.inputs())
        freeze(self.model, candidate.frozen)
        hardware, config = (
            virtual_hardware(PROFILED_FOR),
            Config(enable_logging=False, use_empirical_fallback=False),
        )
        with rehearsal(self.model):
            self.profile = profile_settings(self.model, self.sample, config, hardware).profile
            config = config.replace(enable_tiling=True)
            self.tiled = profile_settings(self.model, self.sample, config, hardware, self.profile).under[0]

    def rows(self) -> Iterator[Row]:
        for gpu in self.candidate.gpus:
            host = self.draw.choice(HOSTS_GIB) * 2**30
            settings: dict[str, Any] = {"enable_logging": False, "use_empirical_fallback": False}
            accumulated = self.draw.choice((1, 1, 1, 4))
            settings["gradient_accumulation_steps"] = accumulated
            if accumulated == 1 and self.draw.random() < 0.3:
                settings["overlap_optimizer"] = True
            yield from self._on(gpu, virtual_hardware(gpu, host_bytes=host), Config(**settings))

    def _on(self, gpu: str, hardware: Hardware, config: Config) -> Iterator[Row]:
        with rehearsal(self.model):
            frontiers = {
                (offloading, tiling): self._frontier(
                    hardware, config.replace(enable_offloading=offloading, enable_tiling=tiling)
                )
                for offloading, tiling in ((True, False), (True, True), (False, False))
            }
            profile = self.profile
            plain = plain_point(profile, hardware, config)
            low, high = (math.log2(each) for each in PRESSURES)
            drawn = [int(plain.peak_bytes / 2 ** self.draw.uniform(low, high)) for _ in range(SIZES_DRAWN)]
            for size in (hardware.device.total_bytes, *drawn):
                there = replace(hardware, device=replace(hardware.device, total_bytes=size, free_bytes=size))
                situation = situation_of(self.model, self.sample, profile, config, there)
                seconds = tuple(
                    _seconds(Strategy(name, fields, share), situation, frontiers)  # type: ignore[arg-type]
                    for name, (fields, share) in STRATEGIES.items()
                )
                yield Row(
                    self.candidate.name,
                    gpu,
                    size == hardware.device.total_bytes,
                    self.candidate.is_held_out,
                    gpu in HELD_OUT_GPUS,
                    tuple(situation.features().values()),
                    tuple(None if each is None else float(f"{each:.6g}") for each in seconds),
                )

    def _under(self, hardware: Hardware, config: Config) -> Under:
        """Return the settings to choose from; those with tiles have the profile under them."""
        whole = config.replace(enable_tiling=False)
        under = profile_settings(self.model, self.sample, whole, hardware, self.profile).under
        if not config.enable_tiling:
            return under
        tiles, needs = self.tiled
        return [(replace(setting, loss=tiles.loss, mlp_rows=tiles.mlp_rows), needs) for setting, _ in under]

    def _frontier(self, hardware: Hardware, config: Config) -> tuple[list[Point], list[Point]]:
        """Return the plans that prefetch, or else do not offload, and those that wait for transfers."""
        under = self._under(hardware, config)
        waiting = frontier_points(under, hardware, config, prefetch=False, most=FRONTIER_WIDTH)
        if not config.enable_offloading:
            return waiting, waiting
        return frontier_points(under, hardware, config, most=FRONTIER_WIDTH), waiting


Frontiers = dict[tuple[bool, bool], tuple[list[Point], list[Point]]]


def _seconds(strategy: Strategy, situation: Situation, frontiers: Frontiers) -> float | None:
    """Return the step time of the plan that a strategy leads to; None if it does not fit. As `decide` does it."""
    config = strategy.applied(situation)
    assert config is not None  # the user has set none of its fields
    hardware, profile = situation.hardware, situation.profile
    plain = plain_point(profile, hardware, config)
    room = room_of(hardware, situation.config)
    margin = room - usable(room, unseen_bytes(profile, hardware, config))
    prefetching, waiting = frontiers[config.enable_offloading, config.enable_tiling]
    aggressive = config.mode.value == "aggressive"
    found = [
        choose_point(points, plain, hardware, config, margin)
        for points in ((waiting,) if aggressive else (prefetching, waiting))
    ]
    taken = found[0]
    if len(found) == 2:
        is_faster = found[1].point.seconds < WORTH_WAITING * taken.point.seconds
        if taken.point.peak_bytes + margin > room or (found[1].rule == taken.rule and is_faster):
            taken = found[1]
    return taken.point.seconds if taken.point.peak_bytes + margin <= room else None


def sweep(shapes: int, seed: int, seconds: float, path: Path | None, command: str) -> None:
    """Sweep as many models as time allows, and write what there is after each."""
    started, rows = time.perf_counter(), list[Row]()
    for candidate in candidates(shapes, seed):
        began = time.perf_counter()
        if began - started > seconds:
            break
        each = Sweep(candidate, random.Random(f"{seed} {candidate.name} {candidate.batch}"))
        new = list(each.rows())
        rows += new
        config, hardware = Config(enable_logging=False), virtual_hardware(PROFILED_FOR)
        names = list(situation_of(each.model, each.sample, each.profile, config, hardware).features())
        if path is not None:
            write_rows(path, names, rows, command)
        took = time.perf_counter() - began
        name = f"{candidate.name}, batch {candidate.batch}"
        print(f"{name}: {len(new)} cases ({took:.1f} s)", file=sys.stderr, flush=True)


def write_rows(path: Path, features: Sequence[str], rows: Sequence[Row], command: str) -> None:
    """Write a sweep, a line for each row."""
    head = {"schema": 1, "command": command, "torch": torch.__version__, "source": "estimated"}
    head |= {"features": list(features), "strategies": list(NAMES)}
    lines = [json.dumps(list(vars(row).values())) for row in rows]
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    path.write_text(text, encoding="utf-8", newline="")


def read_rows(path: Path) -> tuple[list[str], list[Row]]:
    document = json.loads(path.read_text(encoding="utf-8"))
    return document["features"], [Row(*each[:5], tuple(each[5]), tuple(each[6])) for each in document["rows"]]


# Training --------------------------------------------------------------------------------------------

NEGLIGIBLE = 0.001  # of a step time: strategies that are nearer to each other count as equal
KEPT_SHARE = 0.01  # of the training cases, in which a strategy must be the best one to be in the ranker
THRESHOLDS = 24  # tried for each feature at a node
FOLDS = 5
# A plan is made layer by layer, so that the choice for a deeper model is that for the deepest of the sweep. With the
# limit, the mean regret on held-out models was 8.7% and 7.6%.
MOST = {"layers": 64.0}  # the end of a range in the place of what was trained on


@dataclass(frozen=True)
class Size:
    """The size of an ensemble."""

    trees: int
    depth: int
    rate: float
    least: int  # rows in a leaf


SIZES = tuple(
    Size(trees, depth, 0.2, least) for trees in (20, 40) for depth in (2, 3, 4) for least in (6, 12)
)

Array = np.ndarray[Any, Any]


def fit(features: Array, targets: Array, size: Size) -> list[dict[str, Any]]:
    """Fit boosted regression trees with one value for each strategy in a leaf, by least squares."""
    mean = targets.mean(axis=0)
    trees = [{"feature": [-1], "threshold": [0.0], "left": [0], "right": [0], "value": [mean.tolist()]}]
    residual = targets - mean
    for _ in range(size.trees):
        tree: dict[str, Any] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
        _grow(tree, features, residual, np.arange(len(features)), size, size.depth)
        trees.append(tree)
    return trees


def _grow(tree: dict[str, Any], features: Array, residual: Array, rows: Array, size: Size, depth: int) -> int:
    """Add a node for some rows, and those below it; return its index. Leaves subtract from `residual`."""
    node = len(tree["feature"])
    for column, nothing in (("feature", -1), ("threshold", 0.0), ("left", 0), ("right", 0), ("value", [])):
        tree[column].append(nothing)
    split = _best_split(features[rows], residual[rows], size.least) if depth else None
    if split is None:
        value = size.rate * residual[rows].mean(axis=0)
        tree["value"][node] = [float(f"{each:.5g}") for each in value]
        residual[rows] -= tree["value"][node]
        return node
    feature, threshold = split
    tree["feature"][node], tree["threshold"][node] = feature, threshold
    is_left = features[rows, feature] <= threshold
    tree["left"][node] = _grow(tree, features, residual, rows[is_left], size, depth - 1)
    tree["right"][node] = _grow(tree, features, residual, rows[~is_left], size, depth - 1)
    return node


def _best_split(features: Array, residual: Array, least: int) -> tuple[int, float] | None:
    best, found = 1e-9, None
    count, total = len(features), residual.sum(axis=0)
    for feature in range(features.shape[1]):
        values = np.unique(features[:, feature])
        between = (values[1:] + values[:-1]) / 2
        for threshold in between[:: max(1, len(between) // THRESHOLDS)]:
            is_left = features[:, feature] <= threshold
            left = int(is_left.sum())
            if min(left, count - left) < least:
                continue
            part = residual[is_left].sum(axis=0)
            gain = (
                (part**2).sum() / left
                + ((total - part) ** 2).sum() / (count - left)
                - (total**2).sum() / count
            )
            if gain > best:
                best, found = float(gain), (feature, float(f"{threshold:.6g}"))
    return found


def scores(trees: Sequence[dict[str, Any]], features: Sequence[float]) -> Array:
    """Return the sum of the trees' leaves, as `memscale.policy.choose.Ranker.scores`."""
    total = 0.0
    for tree in trees:
        node = 0
        while tree["feature"][node] >= 0:
            is_left = features[tree["feature"][node]] <= tree["threshold"][node]
            node = tree["left" if is_left else "right"][node]
        total = total + np.array(tree["value"][node])
    return total  # type: ignore[return-value]


def targets_of(rows: Sequence[Row], kept: Sequence[int]) -> Array:
    return np.array([[math.log1p(row.regret(index)) for index in kept] for row in rows])


def kept_strategies(rows: Sequence[Row]) -> list[int]:
    """Return the strategies that are the fastest in some of the cases, of about equal ones the first."""
    wins = [0] * len(NAMES)
    for row in rows:
        times = [math.inf if each is None else each for each in row.seconds]
        wins[next(i for i, each in enumerate(times) if each <= (1 + NEGLIGIBLE) * row.best)] += 1
    return [index for index, count in enumerate(wins) if count >= KEPT_SHARE * len(rows)]


def train(rows: Sequence[Row], kept: Sequence[int]) -> tuple[list[dict[str, Any]], Size, float]:
    """Return the trees, their size by cross-validation over models, and the mean regret in that."""
    features = np.array([row.features for row in rows])
    targets = targets_of(rows, kept)
    models = sorted({row.model for row in rows})
    folds = np.array([models.index(row.model) % FOLDS for row in rows])
    found = []
    for size in SIZES:
        regrets = []
        for fold in range(FOLDS):
            trees = fit(features[folds != fold], targets[folds != fold], size)
            for index in np.flatnonzero(folds == fold):
                chosen = int(scores(trees, rows[index].features).argmin())
                regrets.append(rows[index].regret(kept[chosen]))
        found.append((float(np.mean(regrets)), size.trees * 2**size.depth, size))
        print(f"{size}: mean regret {found[-1][0]:.4f}", file=sys.stderr, flush=True)
    regret, _, size = min(found, key=lambda each: each[:2])
    return fit(features, targets, size), size, regret


def ranker_document(
    names: Sequence[str],
    rows: Sequence[Row],
    kept: Sequence[int],
    trees: Sequence[dict[str, Any]],
    command: str,
) -> dict[str, Any]:
    """Return what `memscale.policy.choose.read_ranker` reads."""
    columns = np.array([row.features for row in rows])
    ranges = {
        name: [float(column.min()), MOST.get(name, float(column.max()))]
        for name, column in zip(names, columns.T, strict=True)
    }
    strategies = [
        {
            "name": NAMES[index],
            "fields": STRATEGIES[NAMES[index]][0],
            "room_share": STRATEGIES[NAMES[index]][1],
        }
        for index in kept
    ]
    return {
        "schema": SCHEMA,
        "command": command,
        "strategies": strategies,
        "ranges": ranges,
        "trees": list(trees),
    }


# Evaluation ------------------------------------------------------------------------------------------

LEARNED = "the learned policy"
GROUPS: dict[str, Callable[[Row], bool]] = {
    "held-out models, training GPUs": lambda row: row.held_out_model and not row.held_out_gpu,
    "training shapes, held-out GPUs": lambda row: not row.held_out_model and row.held_out_gpu,
    "held-out models and GPUs": lambda row: row.held_out_model and row.held_out_gpu,
}


def evaluate(
    rows: Sequence[Row], ranges: Sequence[Sequence[float]], choose: Callable[[Row], int]
) -> dict[str, Any]:
    """Return the regret of the policy and of each strategy, by group. See Note [Regret]."""
    report = {}
    for group, belongs in GROUPS.items():
        cases = [row for row in rows if belongs(row) and row.is_possible]
        inside = [
            all(low <= each <= high for each, (low, high) in zip(row.features, ranges, strict=True))
            for row in cases
        ]
        rules = NAMES.index(RULES)
        chosen = [choose(row) if is_in else rules for row, is_in in zip(cases, inside, strict=True)]
        picks = {LEARNED: chosen} | {name: [index] * len(cases) for index, name in enumerate(NAMES)}
        report[group] = {
            "cases": len(cases),
            "outside the training range": len(cases) - sum(inside),
            f"{RULES} does not fit": sum(row.seconds[rules] is None for row in cases),
            "strategies": {name: _figures(cases, picked) for name, picked in picks.items()},
        }
    return report


def _figures(cases: Sequence[Row], picked: Sequence[int]) -> dict[str, float]:
    regrets = sorted(row.regret(index) for row, index in zip(cases, picked, strict=True))
    misses = sum(row.seconds[index] is None for row, index in zip(cases, picked, strict=True))
    return {
        "mean": round(float(np.mean(regrets)), 4),
        "p90": round(regrets[min(len(regrets) - 1, int(0.9 * len(regrets)))], 4),
        "worst": round(regrets[-1], 4),
        "best within 1%": round(sum(each <= 0.01 for each in regrets) / len(regrets), 4),
        "did not fit": round(misses / len(cases), 4),
    }


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return the table of regrets."""
    lines = []
    for group, figures in document["groups"].items():
        outside, unfit = figures["outside the training range"], figures[f"{RULES} does not fit"]
        lines += [
            f"{group[0].upper()}{group[1:]}: {figures['cases']} cases, {outside} of them outside the training range; "
            f"in {unfit} {RULES} does not fit.",
            "",
            "| strategy | mean regret | 90th percentile | worst | within 1% of the best | did not fit |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name, each in figures["strategies"].items():
            cells = " | ".join(
                f"{each[key]:.1%}" for key in ("mean", "p90", "worst", "best within 1%", "did not fit")
            )
            lines.append(f"| {f'**{name}**' if name == LEARNED else name} | {cells} |")
        lines.append("")
    lines.append(
        f"Estimated by the cost model; nothing was timed. Made by `{document['command']}` from {document['sweep']} "
        f"({document['training cases']} training cases)."
    )
    return {_TABLE: "\n".join(lines)}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Sweep, train and evaluate the learned policy."
    )
    parser.add_argument("what", choices=("sweep", "train"))
    parser.add_argument(
        "--shapes", type=int, default=120, help="generated shapes to sweep at most (default: 120)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1700, help="to begin another model in (default: 1700)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sweep", type=Path, default=RESULTS / "policy_sweep.json", help="the rows to train on"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--ranker", type=Path, metavar="FILE", help=f"write the ranker, as to {RANKER_FILE.name}"
    )
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="write the table between its markers")
    given = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    command = command_line(_PROGRAM, given)
    try:
        for path in (options.json, options.ranker):
            check_writable(path)
        check_into(options.into, (_TABLE,))
        if options.what == "sweep":
            sweep(options.shapes, options.seed, options.seconds, options.json, command)
            return 0
        document = _trained(options, command)
        text = tables(document)[_TABLE]
        print(text)
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, {_TABLE: text})
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _trained(options: argparse.Namespace, command: str) -> dict[str, Any]:
    names, rows = read_rows(options.sweep)
    training = [row for row in rows if not row.held_out_model and not row.held_out_gpu and row.is_possible]
    kept = kept_strategies(training)
    trees, size, regret = train(training, kept)
    document = ranker_document(names, training, kept, trees, command)
    if options.ranker is not None:
        options.ranker.write_text(
            json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8", newline=""
        )
        read_ranker(options.ranker)  # it must be readable

    def choose(row: Row) -> int:
        return kept[int(scores(trees, row.features).argmin())]

    used = [tree["feature"][node] for tree in trees for node in range(len(tree["feature"]))]
    splits = {name: used.count(index) for index, name in enumerate(names) if index in used}
    return {
        "schema": 1,
        "command": command,
        "source": "estimated",
        "sweep": options.sweep.name,
        "training cases": len(training),
        "training models": len({row.model for row in training}),
        "cross-validated mean regret": round(regret, 4),
        "size": vars(size),
        "splits": dict(sorted(splits.items(), key=lambda each: -each[1])),
        "groups": evaluate(rows, list(document["ranges"].values()), choose),
    }


if __name__ == "__main__":
    sys.exit(main())
