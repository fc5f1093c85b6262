"""The engine takes the point that its rules promise, on profiles of every kind, and says why."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale import OptimizationMode
from memscale.execution_plan import LayerPlan, Plan
from memscale.hardware import Hardware, virtual_hardware
from memscale.planner import decide as planning
from memscale.planner.cost_model import Point
from memscale.planner.decide import (
    AGGRESSIVE_SHARE,
    BALANCED_SHARE,
    BALANCED_TIME,
    CONSERVATIVE_TIME,
    decide,
    room_of,
)
from memscale.profiler.profile import ModelProfile, OpProfile
from memscale.units import BYTES_PER_GB, format_bytes
from support.profiles import GFLOP, LARGE, MIB, all_points_of, block, config_of, profile_of, stack

MODES = tuple(OptimizationMode)
ROUNDING = 2e-6  # of the ratios in a plan
some = settings(max_examples=50 if os.environ.get("CI") else 20)


@st.composite
def bodies(draw: st.DrawFn) -> dict:
    """What a block needs, without contradictions: what it could keep is part of what it saves."""
    sizes = st.integers(0, 64).map(lambda size: size * MIB)
    ops = tuple(
        OpProfile(
            f"aten.mm.default#{i}",
            draw(st.integers(0, 200)) * GFLOP,
            draw(st.integers(1, 16)) * MIB,
        )
        for i in range(draw(st.integers(0, 2)))
    )
    forward = sum(op.flops for op in ops) + draw(st.integers(1, 200)) * GFLOP
    return {
        "ops": ops,
        "parameter_bytes": draw(sizes),
        "saved_bytes": draw(sizes) + sum(op.output_bytes for op in ops),
        "forward_peak_bytes": draw(sizes),
        "backward_peak_bytes": draw(sizes),
        "forward_flops": forward,
        "backward_flops": 2 * forward,
        "forward_traffic": draw(sizes),
        "backward_traffic": draw(sizes),
    }


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    """An embedding, a stack of equal or unequal layers, a head; each but the stack may be missing."""
    names = [f"layers.{index}" for index in range(draw(st.integers(1, 6)))]
    body = draw(bodies())
    parts = [(name, "repeated", body if draw(st.booleans()) else draw(bodies())) for name in names]
    if draw(st.booleans()):
        parts.insert(0, ("embedding", "embedding", draw(bodies())))
    if draw(st.booleans()):
        parts.append(("head", "head", draw(bodies())))
    blocks = []
    before = 0
    for order, (name, role, needs) in enumerate(parts):
        output = draw(st.integers(1, 8)) * MIB
        own = draw(st.sampled_from((False, False, False, True)))
        blocks.append(
            block(
                name,
                **needs,
                role=role,
                order=order,
                boundary_bytes=before,
                output_bytes=output,
                has_own_checkpointing=own,
                container="layers" if role == "repeated" else "",
            )
        )
        before = output
    if draw(st.booleans()):
        blocks.append(block("unused", order=-1, container="", role="other", **draw(bodies())))
    tails = {name: draw(st.integers(-4, 64)) * MIB for name in ("loss_peak_bytes", "tail_peak_bytes")}
    return profile_of(*blocks, **tails)


def all_points(profile: ModelProfile, hardware: Hardware = LARGE) -> list[Point]:
    """Every choice without offloading, the plain model first."""
    return all_points_of(profile, hardware, config_of())


def rules_of(plan: Plan) -> set[str]:
    return {layer.rule for layer in plan.layers if layer.techniques}


def checkpointed(plan: Plan) -> list[LayerPlan]:
    return [layer for layer in plan.layers if "checkpointing" in layer.techniques]


def offloaded(plan: Plan) -> list[LayerPlan]:
    return [layer for layer in plan.layers if "offloading" in layer.techniques]


# The modes ---------------------------------------------------------------------------------------


@some
@given(profile=profiles())
def test_balanced_takes_the_fastest_plan_at_24_per_cent_or_as_near_as_twice_the_time_allows(profile):
    found = all_points(profile)
    plan = decide(profile, LARGE, config_of())
    plain = found[0]
    small = [point.seconds for point in found if point.peak_bytes <= BALANCED_SHARE * plain.peak_bytes]
    if small and min(small) <= BALANCED_TIME * plain.seconds:
        assert plan.predicted_peak_bytes <= BALANCED_SHARE * plain.peak_bytes
        assert plan.predicted_time_ratio <= min(small) / plain.seconds * (1 + ROUNDING)
        assert rules_of(plan) <= {"fastest-at-24%"}
    else:
        limit = BALANCED_TIME * plain.seconds
        assert plan.predicted_peak_bytes == min(each.peak_bytes for each in found if each.seconds <= limit)
        assert plan.predicted_time_ratio <= BALANCED_TIME * (1 + ROUNDING)
        assert rules_of(plan) <= {"least-peak-within-2x"}


@some
@given(profile=profiles())
def test_aggressive_takes_the_fastest_plan_within_2_per_cent_of_the_least_peak(profile):
    found = all_points(profile)
    plan = decide(profile, LARGE, config_of(OptimizationMode.AGGRESSIVE))
    least = min(point.peak_bytes for point in found)
    most = least + int(AGGRESSIVE_SHARE * min(least, found[0].peak_bytes - least))
    fastest = min(point.seconds for point in found if point.peak_bytes <= most)
    held = min(point.saved_bytes for point in found if point.peak_bytes == least)
    if plan.predicted_peak_bytes == least:
        assert plan.predicted_saved_bytes <= held
    else:
        assert plan.predicted_peak_bytes <= most
        assert plan.predicted_time_ratio <= fastest / found[0].seconds * (1 + ROUNDING)
    assert rules_of(plan) <= {"least-peak"}


@some
@given(profile=profiles())
def test_conservative_takes_the_least_peak_within_its_time(profile):
    found = all_points(profile)
    plan = decide(profile, LARGE, config_of(OptimizationMode.CONSERVATIVE))
    limit = CONSERVATIVE_TIME * min(point.seconds for point in found)
    assert plan.predicted_peak_bytes == min(point.peak_bytes for point in found if point.seconds <= limit)
    assert plan.predicted_time_ratio <= CONSERVATIVE_TIME * (1 + ROUNDING)
    assert rules_of(plan) <= {"least-peak-within-1.15x"}


def test_a_model_that_does_not_fit_takes_the_fastest_plan_within_the_utilization():
    profile = stack(8)
    plain = decide(profile, LARGE, config_of()).baseline_peak_bytes
    for share in (0.9, 0.6):
        hardware = virtual_hardware(plain - 1)
        plan = decide(profile, hardware, config_of(target_gpu_utilization=share))
        assert plan.predicted_peak_bytes <= share * (plain - 1)
        assert rules_of(plan) == {"fastest-within-utilization"}
        budget = config_of(memory_budget=int(share * (plain - 1)))
        assert plan.predicted_time_ratio == decide(profile, hardware, budget).predicted_time_ratio


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_needs_little_of_the_device_is_left_as_it_is(mode, monkeypatch):
    monkeypatch.setattr(planning, "UNTOUCHED_SHARE", 0.1)
    profile = stack(8)  # 1 of 80 GiB
    plan = decide(profile, LARGE, config_of(mode))
    if mode is OptimizationMode.AGGRESSIVE:
        assert checkpointed(plan)
        return
    assert not checkpointed(plan)
    assert {layer.rule for layer in plan.layers} == {"small-model"}
    (note,) = plan.notes
    assert "force_optimize=True" in note
    assert format_bytes(plan.baseline_peak_bytes) in note
    assert checkpointed(decide(profile, LARGE, config_of(mode, force_optimize=True)))
    assert checkpointed(decide(profile, LARGE, config_of(mode, memory_budget="500MB")))
    assert checkpointed(decide(profile, virtual_hardware(2 * plan.baseline_peak_bytes), config_of(mode)))


def test_what_others_have_of_a_device_is_not_planned_with():
    device = replace(LARGE.device, kind="cuda", index=0, capacity_bytes=40 * 2**30)
    assert room_of(replace(LARGE, device=device), config_of()) == 40 * 2**30
    assert room_of(LARGE, config_of()) == LARGE.device.total_bytes


@pytest.mark.parametrize("offloading", [False, True])
@some
@given(profile=profiles())
def test_from_mode_to_mode_peaks_fall(offloading, profile):
    plans = [decide(profile, LARGE, config_of(mode, enable_offloading=offloading)) for mode in MODES]
    peaks = [plan.predicted_peak_bytes for plan in plans]
    assert all(peaks[-1] <= (1 + AGGRESSIVE_SHARE) * peak for peak in peaks)
    assert all(peak <= plans[0].baseline_peak_bytes for peak in peaks)


def test_a_stack_by_hand():
    """Numbers worked out on paper: the timeline itself is under test here, not only the choice from it."""
    profile = stack(8)
    plan = decide(profile, LARGE, config_of(OptimizationMode.AGGRESSIVE))
    states = 8 * 4 * 3 + 1  # weights, two moments, and a MiB of buffers
    assert plan.baseline_saved_bytes == 8 * (100 + 10) * MIB
    # Plain, the peak is in the backward of the last layer.
    assert plan.baseline_peak_bytes == (states + 8 * 110 + 30) * MIB
    assert len(checkpointed(plan)) >= 7  # backward begins with the last one
    assert plan.predicted_saved_bytes <= (8 * 10 + 100) * MIB
    # Never more than all layers recomputed one by one: their outputs, one layer's 100, its backward's 30.
    assert plan.predicted_peak_bytes <= (1 + AGGRESSIVE_SHARE) * (states + 8 * 10 + 100 + 30) * MIB
    assert 1 < plan.predicted_time_ratio < 1.5


def test_the_dear_product_is_kept_where_that_is_cheap():
    """A product that is nearly all of the work and nearly none of the memory."""
    profile = stack(8, ops=(OpProfile("aten.mm.default#0", 99 * GFLOP, MIB // 64),))
    plain = decide(profile, LARGE, config_of()).baseline_peak_bytes
    plan = decide(profile, LARGE, config_of(memory_budget=plain // 2))
    assert len(checkpointed(plan)) >= 4
    assert {layer.checkpointing.keep for layer in checkpointed(plan)} == {("aten.mm.default#0",)}
    assert plan.predicted_time_ratio < 1.05


# What fits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offloading", [False, True])
@some
@given(profile=profiles(), share=st.floats(0, 1.1))
def test_a_budget_takes_the_fastest_plan_that_fits(offloading, profile, share):
    config = config_of(enable_offloading=offloading)
    found = decide(profile, LARGE, config)
    least = min(point.peak_bytes for point in found.frontier)
    budget = max(1024, int(least + share * (found.baseline_peak_bytes - least)))
    plan = decide(profile, LARGE, config.replace(memory_budget=budget))
    within = [point.time_ratio for point in found.frontier if point.peak_bytes <= budget]
    assert plan.predicted_peak_bytes <= budget
    assert plan.predicted_time_ratio <= min(within)  # looked at closer than the whole frontier is
    assert not plan.notes
    assert rules_of(plan) <= {"budget-fastest"}
    if not offloading:
        every = all_points(profile)
        fastest = min(point.seconds for point in every if point.peak_bytes <= budget)
        assert plan.predicted_time_ratio == pytest.approx(fastest / every[0].seconds, rel=ROUNDING)


@pytest.mark.parametrize("offloading", [False, True])
@some
@given(profile=profiles(), shares=st.tuples(st.floats(0.01, 1.2), st.floats(0.01, 1.2)))
@pytest.mark.matrix(2)
def test_more_budget_is_never_slower(offloading, profile, shares):
    config = config_of(enable_offloading=offloading)
    peak = decide(profile, LARGE, config).baseline_peak_bytes
    tight, wide = (
        decide(profile, LARGE, config.replace(memory_budget=max(1024, int(share * peak))))
        for share in sorted(shares)
    )
    assert wide.predicted_time_ratio <= tight.predicted_time_ratio
    assert wide.predicted_peak_bytes >= tight.predicted_peak_bytes


def test_budgets_of_a_stack_lead_to_different_plans():
    profile = stack(8)
    plain = decide(profile, LARGE, config_of()).baseline_peak_bytes
    budgets = [plain, plain * 3 // 4, plain // 2, plain // 3]
    plans = [decide(profile, LARGE, config_of(memory_budget=budget)) for budget in budgets]
    ratios = [plan.predicted_time_ratio for plan in plans]
    assert ratios[0] == 1.0
    assert not checkpointed(plans[0])
    assert ratios == sorted(ratios)
    assert len(set(ratios)) > 1
    assert all(plan.decision_source == "user_config" for plan in plans)


@pytest.mark.parametrize("mode", MODES)
@some
@given(profile=profiles(), share=st.floats(0, 1))
def test_a_small_device_is_fitted_where_anything_fits(mode, profile, share):
    found = all_points(profile)
    least, plain = min(point.peak_bytes for point in found), found[0].peak_bytes
    capacity = int(least + share * (plain - least))
    plan = decide(profile, virtual_hardware(capacity), config_of(mode))
    assert plan.predicted_peak_bytes <= capacity
    assert not plan.notes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given_as", ["device", "budget"])
@some
@given(profile=profiles(), share=st.floats(0.1, 0.95))
def test_where_nothing_fits_the_smallest_plan_is_taken_and_the_note_has_numbers(
    mode, given_as, profile, share
):
    least = min(point.peak_bytes for point in all_points(profile))
    room = max(1024, int(share * least))
    if given_as == "device":
        plan = decide(profile, virtual_hardware(room), config_of(mode))
    else:
        plan = decide(profile, LARGE, config_of(mode, memory_budget=room))
    assert plan.predicted_peak_bytes == least
    (note,) = plan.notes
    for number in (least, room, least - room):
        assert format_bytes(number) in note
    assert rules_of(plan) <= {"smallest-plan"}


def test_an_automatic_budget_is_a_share_of_the_device():
    profile = stack(8)
    plain = decide(profile, LARGE, config_of()).baseline_peak_bytes
    hardware = virtual_hardware(plain)
    for share in (0.9, 0.5):
        config = config_of(memory_budget="auto", target_gpu_utilization=share)
        plan = decide(profile, hardware, config)
        assert plan.predicted_peak_bytes <= share * plain
        assert plan == decide(profile, hardware, config_of(memory_budget=int(share * plain)))


# What each layer is told -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offloading", [False, True])
@some
@given(profile=profiles())
@pytest.mark.matrix(3)
def test_every_layer_has_a_rule_and_a_reason_and_their_savings_add_up(mode, offloading, profile):
    plan = decide(profile, LARGE, config_of(mode, enable_offloading=offloading))
    assert [layer.name for layer in plan.layers] == [each.name for each in profile.blocks]
    for layer, each in zip(plan.layers, profile.blocks, strict=True):
        assert layer.rule.strip()
        assert layer.reason.strip()
        assert layer.members == each.members
        assert (layer.checkpointing is not None) == ("checkpointing" in layer.techniques)
        assert layer.techniques or not (layer.saved_bytes or layer.extra_seconds)
        assert not layer.techniques or each.order >= 0
        if layer.checkpointing is not None:
            assert format_bytes(each.saved_bytes) in layer.reason
            assert layer.extra_seconds > 0
    at_home = sum(
        each.parameter_bytes + each.gradient_bytes + each.optimizer_bytes
        for each in profile.blocks
        if getattr(plan.layer(each.name).offloading, "to", "device") != "device"
    )
    inputs = [layer for layer in plan.layers if layer.offloading and layer.offloading.activations]
    assert plan.host_bytes > at_home if inputs else plan.host_bytes == at_home
    saved = sum(layer.saved_bytes for layer in plan.layers) - at_home
    assert saved == plan.baseline_saved_bytes - plan.predicted_saved_bytes
    assert (
        Plan.from_json(plan.to_json())
        == plan
        == decide(profile, LARGE, config_of(mode, enable_offloading=offloading))
    )


@pytest.mark.parametrize("mode", MODES)
@some
@given(profile=profiles(), force=st.booleans(), budget=st.none() | st.integers(1024, 2**30))
def test_without_checkpointing_nothing_is_recomputed(mode, profile, force, budget):
    config = config_of(mode, enable_checkpointing=False, force_optimize=force, memory_budget=budget)
    plan = decide(profile, LARGE, config)
    assert not checkpointed(plan)
    assert plan.predicted_saved_bytes == plan.baseline_saved_bytes
    assert plan.predicted_time_ratio == 1.0
    for each in profile.blocks:
        if each.order >= 0 and each.saved_bytes and not each.has_own_checkpointing:
            assert plan.layer(each.name).rule == "checkpointing-off"
            assert format_bytes(each.saved_bytes) in plan.layer(each.name).reason


@pytest.mark.parametrize("mode", MODES)
def test_the_switch_is_what_turns_checkpointing_off(mode):
    profile = stack(8)
    assert len(checkpointed(decide(profile, LARGE, config_of(mode)))) >= 7
    assert not checkpointed(decide(profile, LARGE, config_of(mode, enable_checkpointing=False)))


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("mode", MODES)
@some
@given(profile=profiles(), force=st.booleans())
def test_blocks_that_checkpoint_themselves_are_left_alone(mode, offloading, profile, force):
    plan = decide(profile, LARGE, config_of(mode, enable_offloading=offloading, force_optimize=force))
    for each in profile.blocks:
        layer = plan.layer(each.name)
        if each.has_own_checkpointing:
            assert "checkpointing" not in layer.techniques
            assert layer.techniques or layer.rule == "already-checkpointed"
        else:
            assert layer.rule != "already-checkpointed"


def test_a_model_that_checkpoints_itself_gets_nothing():
    plan = decide(stack(8, has_own_checkpointing=True), LARGE, config_of(OptimizationMode.AGGRESSIVE))
    assert {layer.rule for layer in plan.layers} == {"already-checkpointed"}
    assert plan.predicted_peak_bytes == plan.baseline_peak_bytes
    half = profile_of(*(block(f"layers.{i}", has_own_checkpointing=i < 4) for i in range(8)))
    plan = decide(half, LARGE, config_of(OptimizationMode.AGGRESSIVE))
    assert [layer.rule for layer in plan.layers] == ["already-checkpointed"] * 4 + ["least-peak"] * 4
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes


def test_blocks_that_cannot_be_recomputed_say_so():
    used = [block(f"layers.{index}") for index in range(4)]
    idle = block("spare", order=-1, container="", role="other")
    empty = block("norm", order=4, container="", role="other", saved_bytes=0, ops=())
    writer = block("writer", order=5, container="", role="other", changes_input=True)
    plan = decide(profile_of(*used, empty, writer, idle), LARGE, config_of(OptimizationMode.AGGRESSIVE))
    assert plan.layer("spare").rule == "not-called"
    assert plan.layer("norm").rule == "nothing-to-save"
    assert plan.layer("writer").rule == "changes-its-input"
    assert len(checkpointed(plan)) == 4


def test_force_optimize_recomputes_what_would_be_left_alone():
    profile = stack(4)
    config = config_of(memory_budget="40GB")
    assert not checkpointed(decide(profile, LARGE, config))
    plan = decide(profile, LARGE, config.replace(force_optimize=True))
    assert len(checkpointed(plan)) >= 3
    assert rules_of(plan) == {"forced"}
    assert any("force_optimize" in note for note in plan.notes)


# Host memory -------------------------------------------------------------------------------------


def heavy() -> ModelProfile:
    """A stack whose parameters are most of its memory: 8 × 500 MiB, four times that with Adam."""
    return stack(8, parameter_bytes=500 * MIB)


def test_parameters_that_fill_the_device_go_to_the_host():
    profile = heavy()
    plan = decide(profile, LARGE, config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True))
    assert len(offloaded(plan)) == 8
    inputs = [layer for layer in plan.layers if layer.offloading.activations]
    assert plan.host_bytes == 8 * 4 * 500 * MIB + len(inputs) * 10 * MIB
    alone = decide(profile, LARGE, config_of(OptimizationMode.AGGRESSIVE))
    assert not offloaded(alone)
    assert alone.host_bytes == 0
    assert plan.predicted_peak_bytes < alone.predicted_peak_bytes / 4
    assert plan.predicted_time_ratio > alone.predicted_time_ratio


@pytest.mark.parametrize("mode", MODES)
@some
@given(
    profile=profiles() | st.just(heavy()),
    cap=st.floats(0, 40).filter(lambda gb: gb == 0 or gb > 1e-6),
    budget=st.none() | st.integers(1024, 2**30),
)
def test_the_cap_on_host_memory_holds(mode, profile, cap, budget):
    config = config_of(mode, enable_offloading=True, max_cpu_offload_gb=cap, memory_budget=budget)
    plan = decide(profile, LARGE, config)
    assert plan.host_bytes <= cap * BYTES_PER_GB
    assert bool(plan.host_bytes) <= bool(offloaded(plan))


@pytest.mark.parametrize("budget", [None, 256 * 2**20], ids=["device", "budget"])
def test_the_figures_of_a_plan_that_does_not_fit_agree(budget):
    hardware, margin = virtual_hardware(256 * 2**20), 10 * 2**20
    config = config_of(OptimizationMode.BALANCED, memory_budget=budget)
    plan = decide(stack(8, parameter_bytes=100 * MIB), hardware, config, margin=margin)
    needs = plan.predicted_peak_bytes + margin
    assert any(
        f"the smallest plan needs {format_bytes(needs)} with its allowance, "
        f"{format_bytes(needs - 256 * 2**20)} more" in note
        for note in plan.notes
    )


def test_the_cap_is_what_decides():
    profile = heavy()
    config = config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True)
    needed = 8 * 4 * 500 * MIB
    enough = decide(profile, LARGE, config.replace(max_cpu_offload_gb=(needed + 1) / BYTES_PER_GB))
    short = decide(profile, LARGE, config.replace(max_cpu_offload_gb=(needed - 1) / BYTES_PER_GB))
    none = decide(profile, LARGE, config.replace(max_cpu_offload_gb=0))
    assert enough.host_bytes == needed
    assert short.host_bytes < needed
    assert none.host_bytes == 0
    assert not offloaded(none)
    small_host = virtual_hardware("A100-80GB", host_bytes=needed - 1)
    assert decide(profile, small_host, config).host_bytes < needed


def test_a_cpu_offloads_to_disk():
    hardware = replace(LARGE, device=replace(LARGE.device, kind="cpu", name="a CPU"))
    config = config_of(OptimizationMode.AGGRESSIVE, enable_offloading=True)
    plan = decide(heavy(), hardware, config)
    assert {layer.offloading.to for layer in offloaded(plan)} == {"disk"}
    assert plan.host_bytes == 0
    assert plan.disk_bytes > 0
    assert plan.optimizer.state == "disk"
    none = decide(heavy(), hardware, config.replace(max_disk_offload_gb=0))
    assert not offloaded(none)
    assert none.optimizer is None


def test_where_host_memory_is_too_small_for_any_plan_an_accelerator_offloads_to_disk():
    profile = heavy()
    room = 4 * 1000 * MIB  # less than the parameters of the eight layers with their gradients and state
    config = config_of(OptimizationMode.BALANCED, enable_offloading=True, memory_budget=room)
    on_host = decide(profile, LARGE, config)
    assert on_host.host_bytes > 0
    assert on_host.disk_bytes == 0

    small_host = config.replace(max_cpu_offload_gb=1)
    plan = decide(profile, LARGE, small_host)
    assert {layer.offloading.to for layer in offloaded(plan)} == {"disk"}
    assert (plan.host_bytes, plan.disk_bytes) == (0, on_host.host_bytes)
    assert plan.optimizer.state == "disk"
    assert plan.predicted_peak_bytes <= room
    assert plan.predicted_time_ratio > on_host.predicted_time_ratio
    assert "go to disk" in plan.notes[-1]

    forbidden = decide(profile, LARGE, small_host.replace(max_disk_offload_gb=0))
    assert forbidden.disk_bytes == 0
    assert forbidden.predicted_peak_bytes > room
