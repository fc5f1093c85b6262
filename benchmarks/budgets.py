"""`python -m benchmarks.budgets`: what the planner makes of a memory budget, against plans made by hand.

Two tables, of GPT-2 Medium (4 × 512) on a simulated RTX 3090:

- for each budget the planner's plan, and the fastest that one would find by hand: full checkpointing (every layer
  recomputed whole) with the parameters of as many layers offloaded as it takes;
- at the memory of full checkpointing, the floating-point operations that the planner's plan recomputes. Nothing is
  offloaded there. Operations are counted by torch's `FlopCounterMode` over a step of the executor on the simulator.

Exits with 1 if a plan does not fit its budget, is slower than one by hand, or recomputes more than 75% of the
operations that full checkpointing does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.tables import check_into, write_into
from memscale.api import plan as make_plan
from memscale.benchmarks.models import find_model, quiet_transformers
from memscale.benchmarks.results import check_writable, command_line, write_document
from memscale.config import Config
from memscale.errors import MemScaleError
from memscale.execution_plan import Plan
from memscale.executor import Executor
from memscale.hardware import Hardware, virtual_hardware
from memscale.planner.assembly import Verdict, plan_of
from memscale.planner.cost_model import Point, full_checkpointing
from memscale.planner.decide import cost_models, room_of
from memscale.planner.make_plan import ProfiledModel, fits, profile_settings
from memscale.planner.predict import Step, predict, rehearsal
from memscale.profiler import Place, Sample, sample_of
from memscale.profiler.recorder import backward_targets, loss_of
from memscale.units import format_bytes, parse_bytes

__all__ = ["BudgetRow", "Selective", "budget_row", "main", "selective"]

_PROGRAM = "python -m benchmarks.budgets"
BUDGETS = ("8GiB", "6GiB", "4GiB", "3GiB", "2GiB", "1.5GiB")
SIMULATED_UP_TO = 1.05  # times a budget: estimates are better than that
FEWER = 0.25  # of the operations that full checkpointing recomputes, which the planner's plan must not


@dataclass(frozen=True)
class BudgetRow:
    """The planner's plan for a budget, and the fastest one by hand.

    Attributes:
        budget_bytes: what a plan and its allowance may take.
        peak_bytes: of the planner's plan, simulated.
        allowance_bytes: of the planner's plan.
        time_ratio: of the planner's plan: predicted step time over that of the plain step.
        what: is done, in words.
        hand_peak_bytes: of the plan by hand, simulated; None if no such plan fits.
        hand_time_ratio: of that.
        hand_what: of that.
    """

    budget_bytes: int
    peak_bytes: int
    allowance_bytes: int
    time_ratio: float
    what: str
    hand_peak_bytes: int | None
    hand_time_ratio: float | None
    hand_what: str

    @property
    def holds(self) -> bool:
        fits = self.peak_bytes + self.allowance_bytes <= self.budget_bytes
        return fits and (self.hand_time_ratio is None or self.time_ratio <= self.hand_time_ratio)


@dataclass(frozen=True)
class Selective:
    """The planner's plan at the memory of full checkpointing; nothing is offloaded.

    Attributes:
        full_peak_bytes: of full checkpointing, simulated.
        peak_bytes: of the planner's plan, simulated.
        plain_flops: of the plain step.
        full_flops: what full checkpointing computes besides.
        flops: what the planner's plan computes besides.
        what: the planner's plan does, in words.
    """

    full_peak_bytes: int
    peak_bytes: int
    plain_flops: int
    full_flops: int
    flops: int
    what: str

    @property
    def fewer(self) -> float:
        """The share of full checkpointing's operations that is saved."""
        return 1 - self.flops / self.full_flops

    @property
    def holds(self) -> bool:
        return self.peak_bytes <= self.full_peak_bytes and self.fewer >= FEWER


def budget_row(
    model: nn.Module, inputs: dict[str, torch.Tensor], hardware: Hardware, budget: str
) -> BudgetRow:
    """Plan for a budget, by the planner and by hand."""
    config = Config(memory_budget=budget, enable_logging=False)
    plan = make_plan(model, inputs, config, hardware)
    size = parse_bytes(budget, field="budget")
    hand = _fastest_by_hand(model, inputs, config, hardware)
    return BudgetRow(
        budget_bytes=size,
        peak_bytes=plan.predicted_peak_bytes,
        allowance_bytes=plan.allowance_bytes,
        time_ratio=plan.predicted_time_ratio,
        what=_what(plan),
        hand_peak_bytes=None if hand is None else hand.predicted_peak_bytes,
        hand_time_ratio=None if hand is None else hand.predicted_time_ratio,
        hand_what="" if hand is None else _what(hand),
    )


def _profiled(
    model: nn.Module, inputs: dict[str, torch.Tensor], config: Config, hardware: Hardware
) -> ProfiledModel:
    with rehearsal(model):
        return profile_settings(model, sample_of(inputs), config, hardware)


def _by_hand(profiled: ProfiledModel, hardware: Hardware, config: Config) -> list[Point]:
    """Return full checkpointing; then with the parameters of the last layers offloaded, one layer more at a time.

    Steps are whole, as without MemScale.
    """
    found: list[Point] = []
    whole = [(setting.whole_steps, needs) for setting, needs in profiled.under]
    for model in cost_models(whole, hardware, config):
        full = full_checkpointing(model.blocks)
        layers = [index for index, block in enumerate(model.blocks) if block.role == "repeated"]
        offloaded = [layers[len(layers) - count :] for count in range(len(layers) + 1)] + [range(len(full))]
        for which in offloaded if config.enable_offloading else offloaded[:1]:
            choices = (each._replace(offloaded=index in which) for index, each in enumerate(full))
            found.append(model.point(tuple(choices)))
    return found


def _fastest_by_hand(
    model: nn.Module, inputs: dict[str, torch.Tensor], config: Config, hardware: Hardware
) -> Plan | None:
    """The fastest plan by hand that fits, by simulation; those that are far too large are not simulated."""
    profiled = _profiled(model, inputs, config, hardware)
    room = room_of(hardware, config)
    for point in sorted(
        _by_hand(profiled, hardware, config), key=lambda point: (point.seconds, point.peak_bytes)
    ):
        if point.peak_bytes <= SIMULATED_UP_TO * room:
            plan = _simulated(model, point, profiled, inputs, config, hardware)
            if fits(plan, hardware, config):
                return plan
    return None


def _simulated(
    model: nn.Module,
    point: Point,
    profiled: ProfiledModel,
    inputs: dict[str, torch.Tensor],
    config: Config,
    hardware: Hardware,
) -> Plan:
    """A point as a plan, with its simulated peak."""
    decided = plan_of(Verdict(point, "by-hand"), profiled.profile, hardware, config, under=profiled.under)
    plain = Step(decided.baseline_peak_bytes, decided.baseline_saved_bytes)
    with rehearsal(model):
        return predict(model, decided, sample_of(inputs), Place.of(hardware.device), config, plain)


def selective(model: nn.Module, inputs: dict[str, torch.Tensor], hardware: Hardware) -> Selective:
    """Compare full checkpointing with the planner's plan for the same memory."""
    config = Config(mode="balanced", enable_offloading=False, enable_logging=False)
    profiled = _profiled(model, inputs, config, hardware)
    full = _simulated(model, _by_hand(profiled, hardware, config)[0], profiled, inputs, config, hardware)
    sample, place = sample_of(inputs), Place.of(hardware.device)
    budget = full.predicted_peak_bytes + full.allowance_bytes
    plan = make_plan(model, inputs, config.replace(memory_budget=budget), hardware)
    plain_flops = step_flops(model, None, sample, place)
    return Selective(
        full_peak_bytes=full.predicted_peak_bytes,
        peak_bytes=plan.predicted_peak_bytes,
        plain_flops=plain_flops,
        full_flops=step_flops(model, full, sample, place) - plain_flops,
        flops=step_flops(model, plan, sample, place) - plain_flops,
        what=_what(plan),
    )


def step_flops(model: nn.Module, plan: Plan | None, sample: Sample, place: Place) -> int:
    """Floating-point operations of a step, under a plan or without one."""
    with rehearsal(model), place.simulate() as simulation:
        twin = simulation.copy_of(model).train()
        if plan is not None:
            Executor(twin, plan, Config(enable_logging=False)).attach()
        batch = Sample(simulation.batch_of(sample.args), simulation.batch_of(sample.kwargs))
        with FlopCounterMode(display=False) as counter:
            targets = backward_targets(twin(*batch.args, **batch.kwargs))
            torch.autograd.backward(loss_of(targets))
        return int(counter.get_total_flops())


def _what(plan: Plan) -> str:
    """What a plan does, in a few words."""
    layers = [layer for layer in plan.layers if layer.techniques]
    recomputed = [layer for layer in layers if layer.checkpointing is not None]
    parts = []
    if recomputed:
        keeping = sum(bool(layer.checkpointing and layer.checkpointing.keep) for layer in recomputed)
        chained = sum(bool(layer.checkpointing and layer.checkpointing.chained) for layer in recomputed)
        text = f"{len(recomputed)} blocks recomputed"
        if keeping:
            text += f", {keeping} of them keeping products"
        if chained:
            text += f", {chained} chained"
        parts.append(text)
    home = sum(layer.offloading is not None for layer in layers)
    if home:
        parts.append(f"{home} blocks offloaded" + (", prefetched" if plan.async_offload else ""))
    if plan.loss is not None:
        parts.append("loss in tiles")
    return "; ".join(parts) or "as it is"


# The command -----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Make both tables.

    Returns:
        0; 1 if something does not hold; 2 for arguments that are not allowed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Plans for budgets, against plans by hand.")
    parser.add_argument("--model", default="gpt2-medium", help="of the suite (default: %(default)s)")
    parser.add_argument("--on", default="RTX 3090", help="a GPU to simulate (default: %(default)s)")
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), metavar="SIZE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="write the tables (budgets, selective)")
    options = parser.parse_args(arguments)
    try:
        check_writable(options.json)
        check_into(options.into, ("budgets", "selective"))
        case = find_model(options.model)
        hardware = virtual_hardware(options.on)
        with torch.device("meta"), quiet_transformers():
            model = case.build()
            inputs = case.inputs(case.batch, case.seq)
        rows = []
        for budget in options.budgets:
            rows.append(budget_row(model, inputs, hardware, budget))
            print(rows[-1], file=sys.stderr, flush=True)
        kept = selective(model, inputs, hardware)
        print(kept, file=sys.stderr, flush=True)
        document = {
            "schema": 1,
            "command": command_line(_PROGRAM, arguments),
            "source": "simulated",
            "torch": torch.__version__,
            "budgets": [asdict(row) for row in rows],
            "selective": {**asdict(kept), "fewer": round(kept.fewer, 4)},
        }
        if options.json is not None:
            write_document(options.json, document)
        if options.into is not None:
            write_into(options.into, tables(document))
        else:
            print("\n\n".join(tables(document).values()))
    except MemScaleError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    return 0 if kept.holds and all(row.holds for row in rows) else 1


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Return both tables of a file of results."""
    command, kept = document["command"], dict(document["selective"])
    del kept["fewer"]
    return {
        "budgets": budgets_table([BudgetRow(**row) for row in document["budgets"]], command),
        "selective": selective_table(Selective(**kept), command),
    }


def budgets_table(rows: Sequence[BudgetRow], command: str) -> str:
    """Each budget with the two plans."""
    lines = [
        "| budget | peak | step time | the planner's plan | by hand: peak | step time | plan |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for row in rows:
        cells = [
            format_bytes(row.budget_bytes),
            format_bytes(row.peak_bytes),
            f"{row.time_ratio:.3f}×",
            row.what,
            "–",
            "–",
            "none fits",
        ]
        if row.hand_peak_bytes is not None:
            cells[4:] = [format_bytes(row.hand_peak_bytes), f"{row.hand_time_ratio:.3f}×", row.hand_what]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Peaks simulated (the allowance of 1% comes on top); times estimated, relative to the plain step. "
        f"Made by `{command}`.",
    ]
    return "\n".join(lines)


def selective_table(kept: Selective, command: str) -> str:
    """Full checkpointing and the planner's plan, side by side."""
    lines = [
        "| plan | peak (simulated) | recomputed (counted) | of the plain step |",
        "|---|---:|---:|---:|",
    ]
    for name, peak, flops in (
        ("full checkpointing", kept.full_peak_bytes, kept.full_flops),
        (f"the planner's: {kept.what}", kept.peak_bytes, kept.flops),
    ):
        share = flops / kept.plain_flops
        lines.append(f"| {name} | {format_bytes(peak)} | {flops / 1e12:.3f} TFLOP | {share:.1%} |")
    lines += ["", f"{kept.fewer:.0%} fewer operations recomputed. Made by `{command}`."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
