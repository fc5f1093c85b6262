"""`Config(auto_policy=True)`: a learned strategy in front of the engine, behind what the user has set."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from benchmarks.policy import HELD_OUT_GPUS, HOSTS_GIB, TRAINING_GPUS, Shape
from memscale import Config, Plan
from memscale.benchmarks.models import quiet_transformers
from memscale.errors import PolicyError
from memscale.executor.verify import bound_of
from memscale.hardware import virtual_hardware
from memscale.planner.cache import plans_made
from memscale.planner.make_plan import profile_settings, situation_of
from memscale.policy import choose
from memscale.policy.choose import RANKER_FILE, read_ranker
from memscale.profiler import sample_of

GPU = "RTX 3090"
FASTEST = {
    "mode": "balanced",
    "enable_checkpointing": True,
    "enable_offloading": True,
    "enable_tiling": False,
}
TILED = {**FASTEST, "enable_tiling": True}
ON_DEVICE = {**FASTEST, "enable_offloading": False}
LEAST = {**TILED, "mode": "aggressive"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Words(nn.Module):
    """A small language model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(64, 500)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def build() -> nn.Module:
    torch.manual_seed(0)
    return Words()


IDS = torch.arange(64 * 128).reshape(64, 128) % 500


@pytest.fixture(autouse=True)
def no_known_plans() -> None:
    plans_made.clear()


def use_ranker(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    choices: list[tuple[dict[str, Any], float | None]],
    **changed: Any,
) -> None:
    """Let a ranker decide that always prefers the first of the strategies that it may take."""
    names = read_ranker(RANKER_FILE).ranges
    document = {
        "schema": 1,
        "strategies": [
            {"name": f"strategy {index}", "fields": fields, "room_share": share}
            for index, (fields, share) in enumerate(choices)
        ],
        "ranges": {name: [-1e6, 1e6] for name in names} | changed.pop("ranges", {}),
        "trees": [
            {
                "feature": [-1],
                "threshold": [0],
                "left": [0],
                "right": [0],
                "value": [[*range(len(choices))]],
            }
        ],
        **changed,
    }
    path.write_text(json.dumps(document))
    monkeypatch.setattr(choose, "RANKER_FILE", path)


def planned(hardware: Any = GPU, **fields: Any) -> Plan:
    fields = {"enable_logging": False, **fields}
    return memscale.plan(build(), IDS, Config(**fields), hardware)


def techniques(plan: Plan) -> set[str]:
    return {name for layer in plan.layers for name in layer.techniques}


# Who decides


def test_without_the_policy_the_rules_or_the_config_decide() -> None:
    assert planned().decision_source == "rule"
    assert planned(enable_offloading=False).decision_source == "user_config"


def test_the_policy_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memscale")
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None), (FASTEST, 1.0)])
    plan = planned(auto_policy=True, enable_logging=True)
    assert plan.decision_source == "ml"
    assert "auto_policy: it chose strategy 0" in caplog.text
    by_hand = planned(mode="aggressive", use_mixed_precision=False, use_8bit_optimizer=False)
    assert plan.actions == by_hand.actions
    assert plan.actions != planned().actions
    assert Plan.from_json(plan.to_json()) == plan


def test_the_engine_still_names_a_rule_for_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None)])
    plan = planned(auto_policy=True)
    assert {layer.rule for layer in plan.layers} == {"least-peak"}


def test_a_mode_that_is_set_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(FASTEST, 1.0), (TILED, 1.0)])
    plan = planned(auto_policy=True, mode="balanced", force_optimize=True)
    assert plan.decision_source == "user_config"
    assert plan.actions == planned(mode="balanced", force_optimize=True).actions
    assert any("auto_policy: the Config decides: mode" in note for note in plan.notes)


def test_fields_that_are_set_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(TILED, 1.0), (FASTEST, 1.0), (ON_DEVICE, 1.0)])
    budget = int(0.65 * planned().baseline_peak_bytes)
    free = planned(auto_policy=True, memory_budget=budget)
    whole = planned(auto_policy=True, memory_budget=budget, enable_tiling=False)
    here = planned(auto_policy=True, memory_budget=budget, enable_tiling=False, enable_offloading=False)
    assert free.loss is not None
    assert whole.loss is None
    assert "offloading" not in techniques(here)
    # The last Config leaves one strategy, which is that Config.
    assert [each.decision_source for each in (free, whole, here)] == ["ml", "ml", "user_config"]
    for plan in (free, whole, here):
        assert plan.predicted_peak_bytes + plan.allowance_bytes <= budget


def test_sixteen_bits_are_neither_turned_on_nor_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None), (FASTEST, 1.0)])
    without, with_half = planned(auto_policy=True), planned(auto_policy=True, use_mixed_precision=True)
    assert without.precision is None
    assert with_half.precision is not None
    assert [each.decision_source for each in (without, with_half)] == ["ml", "ml"]


def test_a_utilization_that_is_set_limits_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(FASTEST, 1.0), (TILED, 1.0)])
    size = int(1.1 * planned().baseline_peak_bytes)
    full = planned(size, auto_policy=True)
    part = planned(size, auto_policy=True, target_gpu_utilization=0.6)
    assert full.decision_source == part.decision_source == "ml"
    assert part.predicted_peak_bytes <= 0.6 * size < full.predicted_peak_bytes


# When the rules decide instead


def test_outside_of_its_training_range_the_rules_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranges = {"layers": [10, 20]}
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None), (FASTEST, 1.0)], ranges=ranges)
    caplog.set_level(logging.INFO, "memscale")
    model = build()
    memscale.wrap(model, Config(auto_policy=True), IDS)
    plan = model._memscale_executor.plan
    memscale.detach(model)
    assert plan.decision_source == "rule_fallback"
    assert "auto_policy: the rules decide: layers is 2.585, and it was trained on 10 to 20" in caplog.text
    assert plan.actions == memscale.plan(build(), IDS, Config(enable_logging=False)).actions


def test_where_its_choice_does_not_fit_the_rules_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(ON_DEVICE, 1.0), (FASTEST, 1.0)])
    smallest = planned("64MiB", enable_offloading=False)  # nothing fits
    size = int(0.9 * smallest.predicted_capacity_bytes)
    plan = planned(size, auto_policy=True)
    assert plan.decision_source == "rule_fallback"
    assert "offloading" in techniques(plan)
    assert any("what it chose (strategy 0) does not fit" in note for note in plan.notes)
    assert plan.actions == planned(size).actions


def test_without_a_batch_the_policy_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None)])
    model = build()
    memscale.wrap(model, Config(auto_policy=True, enable_logging=False, fused_host_step=False))
    assert model._memscale_executor.plan.decision_source == "rule_fallback"
    model(IDS).backward()  # the first batch makes the plan
    assert model._memscale_executor.plan.decision_source == "ml"
    memscale.detach(model)


def test_the_cpu_is_outside_of_the_range_of_the_ranker_that_is_shipped() -> None:
    plan = memscale.plan(build(), IDS, Config(auto_policy=True, enable_logging=False))
    assert plan.decision_source == "rule_fallback"


# What must not change


def test_the_same_plan_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None)])
    first = planned(auto_policy=True).to_json()
    plans_made.clear()
    assert planned(auto_policy=True).to_json() == first


def test_the_config_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None)])
    config = Config(auto_policy=True, enable_logging=False)
    values, text, given = dict(vars(config)), repr(config), config.explicit_fields
    model = build()
    memscale.wrap(model, config, IDS)
    assert model._memscale_executor.config is config
    assert model._memscale_executor.plan.decision_source == "ml"
    memscale.detach(model)
    assert (dict(vars(config)), repr(config), config.explicit_fields) == (values, text, given)


def snapshot(model: nn.Module) -> list[dict[str, object]]:
    keys = ("_parameters", "_buffers", "_modules")
    return [
        {name: dict(value) if name in keys else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


def train(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(IDS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_training_gives_the_numbers_of_the_plain_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(FASTEST, 1.0), (TILED, 1.0)])
    plain, model = build(), build()
    budget = memscale.plan(build(), IDS, Config(enable_logging=False)).baseline_peak_bytes // 2
    before = snapshot(model)
    memscale.wrap(model, Config(auto_policy=True, memory_budget=budget, enable_logging=False), IDS)
    plan = model._memscale_executor.plan
    assert plan.decision_source == "ml"
    assert techniques(plan)
    assert bound_of(plan) == 0
    assert train(model) == train(plain)
    memscale.detach(model)
    assert snapshot(model) == before
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
def test_batch_sizes_are_found_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(LEAST, None)])
    size = planned().baseline_peak_bytes
    found = memscale.find_batch_size(build(), IDS, Config(auto_policy=True, enable_logging=False), size)
    assert found.largest is not None
    assert not found.largest.config.auto_policy
    assert found.largest.plan.decision_source == "rule"


# The file


def test_the_ranker_that_is_shipped() -> None:
    ranker = read_ranker(RANKER_FILE)
    assert len(ranker.strategies) > 1
    assert RANKER_FILE.stat().st_size < 200_000


def test_the_ranker_that_is_shipped_decides_on_the_gpus_of_the_table() -> None:
    """On those that it was trained on, whose rates are the ends of its ranges, and those between them."""
    shape, config = Shape("gpt2", 6, 256, 8192, batch=8, seq=512), Config(auto_policy=True)
    with quiet_transformers(), torch.device("meta"):
        model = shape.build().train()
    sample, gpu = sample_of(shape.inputs()), virtual_hardware(GPU)
    profile = profile_settings(model, sample, Config(), gpu).profile
    for name in (*TRAINING_GPUS, *HELD_OUT_GPUS):
        for gib in (min(HOSTS_GIB), max(HOSTS_GIB)):
            hardware = virtual_hardware(name, host_bytes=gib * 2**30)
            decision = choose.choose(situation_of(model, sample, profile, config, hardware))
            assert decision.source == "ml", f"{name}, {gib} GiB: {decision.reason}"


def test_a_tree_is_walked_to_its_leaf() -> None:
    tree = choose.RegressionTree(
        [1, -1, 0, -1, -1], [0.5, 0, 2, 0, 0], [1, 0, 3, 0, 0], [2, 0, 4, 0, 0], [[], [1], [], [2], [3]]
    )
    assert [tree.leaf(each) for each in ([0, 0.5], [2, 1], [3, 1])] == [[1], [2], [3]]


LEAF = {"feature": [-1], "threshold": [0], "left": [0], "right": [0], "value": [[1]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "its schema is 2"),
        ({"trees": []}, "no strategies or no trees"),
        ({"trees": [{**LEAF, "value": [[1, 2]]}]}, "2 values for 1 strategies"),
        ({"trees": [{**LEAF, "value": [[float("nan")]]}]}, "nan is not a finite number"),
        ({"trees": [{**LEAF, "feature": [0]}]}, "refers to what it does not have"),
        ({"trees": [{**LEAF, "feature": [-1, -1]}]}, "differ in length"),
        ({"trees": [{**LEAF, "left": [0.5]}]}, "not whole numbers"),
        ({"trees": 3}, "TypeError"),
        ({"strategies": [{"name": "x", "fields": {"mode": "balanced"}, "room_share": 1}]}, "a strategy sets"),
        (
            {"strategies": [{"name": "x", "fields": {**FASTEST, "mode": "fast"}, "room_share": 1}]},
            "mode='fast'",
        ),
        ({"strategies": [{"name": "x", "fields": FASTEST, "room_share": 2}]}, "takes 2.0 of the room"),
        ({"ranges": {"layers": ["a", 1]}}, "'a' is not a finite number"),
    ],
)
def test_a_damaged_file_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(FASTEST, 1.0)], **change)
    with pytest.raises(PolicyError, match=r"r\.json.* cannot be used .*leave auto_policy out") as error:
        planned(auto_policy=True)
    assert said in str(error.value)


def test_other_features_and_no_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_ranker(tmp_path / "r.json", monkeypatch, [(FASTEST, 1.0)], ranges={"speed": [0, 1]})
    with pytest.raises(PolicyError, match="other features"):
        planned(auto_policy=True)
    (tmp_path / "cut.json").write_text(RANKER_FILE.read_text()[:-50])
    for name in ("cut.json", "none.json"):
        monkeypatch.setattr(choose, "RANKER_FILE", tmp_path / name)
        with pytest.raises(PolicyError, match="cannot be used"):
            planned(auto_policy=True)
