"""What recomputing a block costs: its options for the planner."""

from __future__ import annotations

from collections.abc import Iterator

from memscale.execution_plan import Checkpointing
from memscale.profiler.profile import BlockProfile, OpProfile
from memscale.techniques.cost import HOOK_SECONDS, BlockOption, CostTerms
from memscale.units import format_bytes

__all__ = ["can_recompute", "recompute_options", "worth_keeping"]


def can_recompute(block: BlockProfile) -> bool:
    """Return whether forward saves anything in a block, and the block can be run again from its input.

    A block that checkpoints itself is left alone.
    """
    return block.saved_bytes > 0 and not block.has_own_checkpointing and not block.changes_input


def worth_keeping(block: BlockProfile) -> tuple[OpProfile, ...]:
    """Return the block's heavy operations, those that save the most computation per byte first."""
    useful = [op for op in block.ops if op.output_bytes > 0]
    return tuple(sorted(useful, key=lambda op: (-op.flops / op.output_bytes, op.key)))


def recompute_options(block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
    """Yield one option for each number of kept products, none first."""
    if not terms.config.enable_checkpointing or not can_recompute(block):
        return
    products = worth_keeping(block)
    for count in range(len(products) + 1):
        keep = products[:count]
        kept_bytes = sum(op.output_bytes for op in keep)
        flops = max(0, block.forward_flops - sum(op.flops for op in keep) * block.calls)
        half = max(0, block.forward_half_flops - sum(op.flops for op in keep if op.half) * block.calls)
        seconds = terms.rates.seconds(flops, half, block.forward_traffic)
        reason = f"holds {format_bytes(block.saved_bytes)} for backward, recomputed instead"
        if keep:
            reason += f"; keeps {format_bytes(kept_bytes * block.calls)} that are expensive to compute"
        yield BlockOption(
            "checkpointing",
            HOOK_SECONDS + seconds,
            held_bytes=kept_bytes * block.calls,
            returned_bytes=max(0, block.saved_bytes // max(1, block.calls) - kept_bytes),
            reruns_forward=True,
            keep=keep,
            settings=Checkpointing(tuple(sorted(op.key for op in keep))),
            reason=reason,
        )
