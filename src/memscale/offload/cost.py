"""What offloading a block costs: its option for the planner."""

from __future__ import annotations

from collections.abc import Iterator

from memscale.profiler.profile import BlockProfile
from memscale.techniques.cost import BlockOption, CostTerms

__all__ = ["activation_seconds", "offload_options"]


def offload_options(block: BlockProfile, terms: CostTerms) -> Iterator[BlockOption]:
    """Yield the option of keeping a block's parameters, gradients and optimizer state on the tier below.

    Its parameters are copied to the device twice (forward and backward), its gradients back once, and the optimizer
    steps below. With prefetching only that remains which takes longer than the computation beside it.
    """
    if not terms.config.enable_offloading or not block.used_bytes:
        return
    rates, share, calls = terms.rates, terms.working_share, max(1, block.calls)
    fetch = (share * block.used_bytes / rates.h2d_per_second + rates.latency) * calls
    forward, backward = fetch, fetch + share * block.gradient_bytes / rates.d2h_per_second + rates.latency
    if terms.prefetch:
        forward = max(rates.latency, forward - rates.forward(block))
        backward = max(rates.latency, backward - rates.backward(block))
    stepping = rates.optimizer_below(block.gradient_bytes) - rates.optimizer(block.gradient_bytes)
    yield BlockOption("offloading", forward + backward + max(0.0, stepping), target="parameters")


def activation_seconds(nbytes: int, terms: CostTerms) -> float:
    """Return the time of copying activations to the tier below and back."""
    if terms.prefetch:
        return 2 * terms.rates.latency
    rates = terms.rates
    return nbytes / rates.d2h_per_second + nbytes / rates.h2d_per_second + 2 * rates.latency
