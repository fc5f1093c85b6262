"""What offloading a block costs: its options for the planner."""

from __future__ import annotations

from collections.abc import Iterator

from memscale.profiler.profile import BlockProfile
from memscale.techniques.cost import HOOK_SECONDS, BlockOption, CostTerms

__all__ = ["activation_seconds", "offload_options"]


def offload_options(block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
    """Yield what keeping a block's parameters, gradients and optimizer state on the tier below costs.

    Its parameters are copied to the device twice (forward and backward), its gradients back once, and the optimizer
    steps below. With prefetching, copies are from and to page-locked memory, both ways at once, and only that remains
    which takes longer than the computation beside it. One option is for a block that is not recomputed, one for
    a block that is: recomputation covers transfers as well.
    """
    if not terms.config.enable_offloading or not block.used_bytes:
        return
    rates, share, calls = terms.rates, terms.working_share, max(1, block.calls)
    latency = rates.latency * max(1, block.parameter_count)
    h2d, d2h = rates.h2d_per_second, rates.d2h_per_second
    if not terms.prefetch:
        h2d, d2h = min(h2d, rates.pageable_per_second), min(d2h, rates.pageable_per_second)
    fetch = (share * block.used_bytes / h2d + latency) * calls
    gradients = share * block.gradient_bytes / d2h + latency
    stepping = rates.optimizer_below(block.gradient_bytes) - rates.optimizer(block.gradient_bytes)
    for recomputed in (False, True):
        forward, backward = fetch, fetch + gradients
        if terms.prefetch:
            cover = rates.backward(block) + rates.forward(block) * recomputed
            forward = max(latency, fetch - rates.forward(block))
            backward = max(latency, max(fetch, gradients) - cover)
        seconds = HOOK_SECONDS + forward + backward + max(0.0, stepping)
        yield BlockOption("offloading", seconds, target="parameters", reruns_forward=recomputed)


def activation_seconds(nbytes: int, terms: CostTerms, cover: float = 0.0) -> float:
    """Return the time of copying activations to the tier below and back.

    With prefetching, what takes no longer than `cover` seconds each way is hidden.
    """
    rates = terms.rates
    if terms.prefetch:
        down, up = nbytes / rates.d2h_per_second, nbytes / rates.h2d_per_second
        return max(0.0, down - cover) + max(0.0, up - cover) + 2 * rates.latency
    return 2 * nbytes / rates.pageable_per_second + 2 * rates.latency
