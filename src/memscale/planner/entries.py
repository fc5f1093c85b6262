"""The plan's entries: what each block gets, with the rule that decided and the reason in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memscale.config import Config
from memscale.execution_plan import Checkpointing, LayerPlan, Offloading, Tier, Tiling
from memscale.planner.choices import PLAIN, Choice, called_blocks, can_recompute
from memscale.planner.rows import Rows
from memscale.planner.rules import WHY_KEPT, Verdict
from memscale.profiler.profile import BlockProfile, ModelProfile
from memscale.units import format_bytes

DIGITS = 9  # of seconds
NOT_CALLED = "not-called"  # the rule of a block that forward does not call


@dataclass(frozen=True)
class Entries:
    """Writes the entries of one plan."""

    verdict: Verdict
    rows: Rows
    config: Config

    def of(self, profile: ModelProfile) -> tuple[LayerPlan, ...]:
        """One entry per block, in model order."""
        names = [block.name for block in called_blocks(profile)]
        choices = dict(zip(names, self.verdict.point.candidate.choices, strict=True))
        return tuple(self._entry(block, choices.get(block.name, PLAIN)) for block in profile.blocks)

    def _entry(self, block: BlockProfile, choice: Choice) -> LayerPlan:
        layer = self._recomputed(block, choice) if choice.recompute else self._kept(block)
        rows = self.verdict.point.setting.mlp_rows
        if rows is not None and block.role == "repeated" and block.order >= 0:
            layer = replace(layer, techniques=(*layer.techniques, "tiling"), tiling=Tiling(rows))
        if not choice.home or not block.used_bytes:
            return (
                replace(layer, reason=f"{layer.reason}; {_why_resident(block)}") if block.resident else layer
            )
        home = block.parameter_bytes + block.gradient_bytes + block.optimizer_bytes
        tier: Tier = "disk" if self.rows.terms.clock.below_is_disk else "host"
        reason = f"{format_bytes(home)} of parameters, gradients and Adam state live on the {tier}"
        if block.resident:
            reason += f"; {_why_resident(block)}"
        moving = self.rows.home_seconds(block)
        waiting = 0
        if choice.down and not choice.chained:
            index = self.rows.blocks.index(block)
            waiting = self.rows.input_bytes(index)
            moving += self.rows.down_seconds(index)
            reason += f", where its input ({format_bytes(waiting)}) waits as well"
        return replace(
            layer,
            techniques=("offloading", *layer.techniques),
            rule=self.verdict.rule,
            reason=f"{reason}; {layer.reason}" if layer.techniques else reason,
            saved_bytes=layer.saved_bytes + home + waiting,
            extra_seconds=round(layer.extra_seconds + moving, DIGITS),
            offloading=Offloading(tier, choice.down, block.resident),
        )

    def _recomputed(self, block: BlockProfile, choice: Choice) -> LayerPlan:
        held = choice.kept_bytes * block.calls
        freed = block.saved_bytes - held + (block.boundary_bytes if choice.chained else 0)
        reason = f"holds {format_bytes(block.saved_bytes)} for backward, recomputed instead"
        if choice.keep:
            reason += f"; keeps {format_bytes(held)} that are dear to compute"
        if choice.chained:
            reason += f"; input ({format_bytes(block.boundary_bytes)}) from the block before"
        return LayerPlan(
            name=block.name,
            members=block.members,
            techniques=("checkpointing",),
            rule=self.verdict.rule,
            reason=reason,
            saved_bytes=freed,
            extra_seconds=round(self.rows.terms.clock.recompute(block, choice.kept_flops), DIGITS),
            checkpointing=Checkpointing(tuple(sorted(op.key for op in choice.keep)), choice.chained),
            recompute_flops=max(0, block.forward_flops // max(1, block.calls) - choice.kept_flops),
        )

    def _kept(self, block: BlockProfile) -> LayerPlan:
        rule, reason = self._why_kept(block)
        return LayerPlan(block.name, block.members, (), rule, reason)

    def _why_kept(self, block: BlockProfile) -> tuple[str, str]:
        if block.has_own_checkpointing:
            return "already-checkpointed", "the model checkpoints this block by itself"
        if block.order < 0:
            return NOT_CALLED, "forward does not call it"
        if block.changes_input:
            return (
                "changes-its-input",
                "its forward writes into its input, so that it can't be run again from it",
            )
        if not can_recompute(block):
            return "nothing-to-save", "holds only its inputs and outputs"
        keeps = f"keeps {format_bytes(block.saved_bytes)}"
        if not self.config.enable_checkpointing:
            return "checkpointing-off", f"{keeps}, as enable_checkpointing is off"
        return self.verdict.rule, f"{keeps}: {WHY_KEPT[self.verdict.rule]}"


def _why_resident(block: BlockProfile) -> str:
    what = block.resident[0] if len(block.resident) == 1 else f"{len(block.resident)} parameters"
    verb = "stays" if len(block.resident) == 1 else "stay"
    readers = "another module, a hook or a checkpoint in it"
    return f"{what} {verb} on the device: read while its forward does not run, by {readers}"
