"""Choose a strategy by a ranker that was trained offline, or say why the rules or the user's settings decide.

Note [The learned policy]
~~~~~~~~~~~~~~~~~~~~~~~~~
A strategy sets a mode, the techniques that may be used and a share of the room as memory budget; the planner makes a
plan of it, layer by layer, as of any Config. `ranker.json` has the strategies and an ensemble of small regression
trees, whose leaves hold for each strategy the expected logarithm of its step time over that of the best one. The lowest
sum is chosen: `benchmarks/policy.py` made it from sweeps of the cost model (docs/policy.md).

- A field that the user has set is kept: strategies with another value of it are not considered. A mode says by itself
  which plan is taken, so that one that was set leaves no strategy with a budget.
- 16-bit products and 8-bit state are used if the user's Config does; no strategy turns them on or off.
- The ranker answers only where each feature is within what it was trained on.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from memscale.config import Config, ConfigFields
from memscale.errors import ConfigError, PolicyError
from memscale.hardware import Hardware
from memscale.profiler.profile import ModelProfile
from memscale.techniques.cost import ReachedRates

RANKER_FILE = Path(__file__).with_name("ranker.json")
SCHEMA = 1
DIGITS = 5  # of a feature: two devices alike are not apart by rounding, and the ends of a range are in it
# Config fields that a strategy sets.
DECIDING_FIELDS = {"mode", "enable_checkpointing", "enable_offloading", "enable_tiling", "memory_budget"}


@dataclass(frozen=True)
class Situation:
    """What a strategy is chosen for.

    Attributes:
        profile: what the plain model needs for the batch.
        hardware: what there is.
        config: what the user has set.
        room_bytes: what a plan may take of the device: all that torch can have, or the user's budget.
        plain_peak_bytes: the estimated peak of the plain step.
        positions: of one sequence of the batch; 1 if it has none.
        tokens: of all sequences; the samples of a batch that has none.
        vocabulary: the outputs of the model's head; 0 without one.
        is_sharded: FSDP2 has sharded the model.
    """

    profile: ModelProfile
    hardware: Hardware
    config: Config
    room_bytes: int
    plain_peak_bytes: int
    positions: int
    tokens: int
    vocabulary: int
    is_sharded: bool = False

    def features(self) -> dict[str, float]:
        """Return the features by name, rounded as those that the ranker was trained on.

        Sizes and rates are logarithms to base 2, shares are themselves.
        """
        profile, config, rates = self.profile, self.config, ReachedRates.of(self.hardware)
        layers = [block for block in profile.blocks if block.role == "repeated" and block.calls]
        saved = profile.other_saved_bytes + sum(
            block.saved_bytes + block.boundary_bytes for block in profile.blocks
        )
        flops = profile.other_flops + sum(b.forward_flops + b.backward_flops for b in profile.blocks)
        half = profile.other_half_flops + sum(
            block.forward_half_flops + block.backward_half_flops for block in profile.blocks
        )
        traffic = profile.other_traffic + sum(b.forward_traffic + b.backward_traffic for b in profile.blocks)
        everything = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
        host = self.hardware.host
        cap, pool = config.max_cpu_offload_bytes, None
        if config.async_config is not None:
            pool = config.async_config.pinned_pool_bytes
        boundary = max((block.boundary_bytes // max(1, block.calls) for block in layers), default=0)
        plain_seconds = rates.seconds(flops, half, traffic)
        exact = {
            "parameter bytes": _log(profile.parameter_bytes),
            "activation bytes": _log(saved),
            "activation share": saved / max(1, saved + everything),
            "trainable share": profile.gradient_bytes / max(1, profile.parameter_bytes),
            "optimizer state per gradient": profile.optimizer_bytes / max(1, profile.gradient_bytes),
            "layers": _log(len(layers)),
            "bytes between layers for a token": _log(boundary // self.tokens),
            "logits bytes": _log(4 * self.tokens * self.vocabulary),
            "logits share of the room": 4 * self.tokens * self.vocabulary / max(1, self.room_bytes),
            "positions": _log(self.positions),
            "samples": _log(self.tokens // self.positions),
            "16-bit share": half / max(1, flops),
            "mixed precision": float(config.use_mixed_precision),
            "8-bit optimizer": float(config.use_8bit_optimizer),
            "overlapped steps": float(config.overlap_optimizer is True),
            "accumulated batches": _log(config.gradient_accumulation_steps),
            "room on the device": _log(self.room_bytes),
            "plain peak over room": _log(self.plain_peak_bytes) - _log(self.room_bytes),
            "parameters and state over room": _log(everything) - _log(self.room_bytes),
            "operations a second": _log(rates.fp32_flops),
            "bytes a second on the device": _log(rates.bytes_per_second),
            "bytes a second on the link": _log(rates.h2d_per_second),
            # How long the plain step hides transfers of everything, and how long the host takes to step.
            "plain step over transfers": _log(plain_seconds) - _log(everything / rates.h2d_per_second),
            "plain step over host Adam": _log(plain_seconds)
            - _log(profile.gradient_bytes * rates.host_adam_fused),
            "host memory": _log(host.offload_bytes if cap is None else min(cap, host.offload_bytes)),
            "page-locked memory over state": _log(host.page_locked_bytes if pool is None else pool)
            - _log(everything),
            "offloads to disk": float(self.hardware.offloads_to_disk),
            "sharded": float(self.is_sharded),
            "profiled by a real step": float(profile.source != "static"),
        }
        return {name: float(f"{value:.{DIGITS}g}") for name, value in exact.items()}


def _log(value: float) -> float:
    """Return the logarithm to base 2, and that of a tiny number for nothing."""
    return math.log2(max(value, 2.0**-40)) if math.isfinite(value) else 1000.0


@dataclass(frozen=True)
class Strategy:
    """What a plan is made with; see Note [The learned policy].

    Attributes:
        name: in words, for the log.
        fields: values of Config for the mode and the techniques.
        room_share: the memory budget as a share of the room on the device; None for no budget.
    """

    name: str
    fields: ConfigFields
    room_share: float | None

    def applied(self, situation: Situation) -> Config | None:
        """Return the user's Config with this strategy; None if the user has set something else."""
        config = situation.config
        given = config.explicit_fields
        for name, value in self.fields.items():
            if name in given and getattr(config, name) != value:
                return None
        if self.room_share is not None and "mode" in given and "memory_budget" not in given:
            return None
        if self.room_share is None and "memory_budget" in given:
            return None
        changes: ConfigFields = {
            "use_mixed_precision": config.use_mixed_precision,
            "use_8bit_optimizer": config.use_8bit_optimizer,
            **self.fields,
        }
        if self.room_share is not None and "memory_budget" not in given:
            share = self.room_share
            if "target_gpu_utilization" in given:
                share = min(share, config.target_gpu_utilization)
            changes["memory_budget"] = max(1024, int(share * situation.room_bytes))
        return config.replace(**changes)


@dataclass(frozen=True)
class Decision:
    """What a plan is to be made with, by whose choice, and the reason in words."""

    config: Config
    source: Literal["ml", "user_config", "rule_fallback"]
    reason: str


def choose(situation: Situation) -> Decision:
    """Choose a strategy; the user's Config stays as it is, and is returned where the policy does not decide.

    Raises:
        PolicyError: the ranker's file is damaged.
    """
    ranker = read_ranker(RANKER_FILE)
    config = situation.config
    allowed = [each.applied(situation) for each in ranker.strategies]
    if all(each is None or each == config for each in allowed):
        fields = sorted(config.explicit_fields & DECIDING_FIELDS)
        return Decision(config, "user_config", f"{' and '.join(fields)} of the Config decide")
    features = situation.features()
    if list(features) != list(ranker.ranges):
        raise PolicyError(
            f"{RANKER_FILE.name} was made for other features than this version of open-memscale has."
        )
    for name, (low, high) in ranker.ranges.items():
        if not low <= features[name] <= high:
            reason = f"{name} is {features[name]:.4g}, and it was trained on {low:.4g} to {high:.4g}"
            return Decision(config, "rule_fallback", reason)
    scores = ranker.scores(list(features.values()))
    best = min((i for i, each in enumerate(allowed) if each is not None), key=lambda i: (scores[i], i))
    return Decision(cast(Config, allowed[best]), "ml", ranker.strategies[best].name)


@dataclass(frozen=True)
class RegressionTree:
    """A regression tree: where `feature[i]` is negative, node i is a leaf with `value[i]`."""

    feature: Sequence[int]
    threshold: Sequence[float]
    left: Sequence[int]  # where the feature is at most the threshold
    right: Sequence[int]
    value: Sequence[Sequence[float]]

    def leaf(self, features: Sequence[float]) -> Sequence[float]:
        node = 0
        while self.feature[node] >= 0:
            is_left = features[self.feature[node]] <= self.threshold[node]
            node = self.left[node] if is_left else self.right[node]
        return self.value[node]


@dataclass(frozen=True)
class Ranker:
    """The strategies, and the trees that rank them."""

    strategies: tuple[Strategy, ...]
    ranges: Mapping[str, tuple[float, float]]  # of each feature, in the order of the trees' indices
    trees: tuple[RegressionTree, ...]

    def scores(self, features: Sequence[float]) -> list[float]:
        """Return for each strategy the expected logarithm of its step time over the best one's."""
        leaves = [tree.leaf(features) for tree in self.trees]
        return [math.fsum(leaf[index] for leaf in leaves) for index in range(len(self.strategies))]


@functools.cache
def read_ranker(path: Path) -> Ranker:
    """Read a ranker and check all of it.

    Raises:
        PolicyError: it cannot be read, or is not what `benchmarks/policy.py` writes.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, not {SCHEMA}")
        strategies = tuple(_strategy(each) for each in document["strategies"])
        ranges = {
            str(name): (_number(low), _number(high)) for name, (low, high) in document["ranges"].items()
        }
        trees = tuple(_tree(each, len(ranges), len(strategies)) for each in document["trees"])
        if not strategies or not trees:
            raise ValueError("it has no strategies or no trees")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise PolicyError(
            f"The file of the learned policy, {path.name}, cannot be used ({type(error).__name__}: {error}). Install "
            "open-memscale again, or leave auto_policy out."
        ) from error
    return Ranker(strategies, ranges, trees)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _strategy(entry: Mapping[str, object]) -> Strategy:
    fields = cast("ConfigFields", entry["fields"])
    if set(fields) != DECIDING_FIELDS - {"memory_budget"}:
        raise ValueError(f"a strategy sets {sorted(fields)}")
    checked = Config(**fields)
    share = entry["room_share"]
    share = None if share is None else _number(share)
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"a strategy takes {share} of the room")
    values = cast("ConfigFields", {name: getattr(checked, name) for name in fields})
    return Strategy(str(entry["name"]), values, share)


def _tree(entry: Mapping[str, Sequence[object]], features: int, strategies: int) -> RegressionTree:
    index = [[cast(int, each) for each in entry[name]] for name in ("feature", "left", "right")]
    feature, left, right = index
    threshold = [_number(each) for each in entry["threshold"]]
    value = [[_number(each) for each in cast("Sequence[object]", row)] for row in entry["value"]]
    count = len(feature)
    if not count or {len(left), len(right), len(threshold), len(value)} != {count}:
        raise ValueError("a tree's lists differ in length")
    if not all(type(each) is int for column in index for each in column):
        raise ValueError("a tree has indices that are not whole numbers")
    for node in range(count):
        if feature[node] < 0:
            if len(value[node]) != strategies:
                raise ValueError(f"a leaf has {len(value[node])} values for {strategies} strategies")
        elif feature[node] >= features or not all(node < n < count for n in (left[node], right[node])):
            raise ValueError("a tree refers to what it does not have")
    return RegressionTree(feature, threshold, left, right, value)
