"""What the optimizer's step costs the planner: bytes of the device, and seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memscale.optimizer.needs import adamw_temporaries
from memscale.profiler.profile import ModelProfile
from memscale.techniques.cost import BUCKET_SECONDS, CostTerms

LARGEST_BUCKET = 64 * 2**20  # bytes: runs long enough to be read at the disk's full rate
SMALLEST_BUCKET = 2**20  # bytes
BUCKET_SHARE = 1 / 8  # of the parameters, between the two


def bucket_bytes_for(profile: ModelProfile) -> int:
    """Return how much of parameters, gradients and loaded state is stepped at once, where that is done in buckets."""
    return min(LARGEST_BUCKET, max(SMALLEST_BUCKET, int(profile.parameter_bytes * BUCKET_SHARE)))


@dataclass(frozen=True)
class StepCosts:
    """The step of all parameters of a profile, in one of the ways that there are."""

    profile: ModelProfile
    terms: CostTerms
    device_kind: str
    bucketed: bool = False  # parameters on the device are stepped a bucket at a time
    eight_bit: bool = False  # Adam's moments are kept in 8 bits

    @property
    def bucket_bytes(self) -> int:
        return bucket_bytes_for(self.profile)

    @property
    def temporaries(self) -> tuple[float, float]:
        return self.profile.step_temporaries or adamw_temporaries(self.device_kind)

    def temporary_bytes(self, *, odd_offloaded: bool, loads_state: bool) -> int:
        """Return what a step allocates for one parameter, or one bucket, at a time.

        With `odd_offloaded` the blocks outside of stacks are on the offload tier, with `loads_state` state is.
        """
        of_all, of_one = self.temporaries
        largest, bucket = self.profile.largest_gradient_bytes, self.bucket_bytes
        if self.device_kind == "cpu":  # the largest are embeddings: offloaded ones are stepped in buckets
            return bucket if odd_offloaded else int(of_one * largest)
        if not self.bucketed:
            in_32_bits = bucket if self.eight_bit else 0  # moments, again
            return int(of_one * largest) + in_32_bits
        # Half of a bucket are parameters, a quarter if state is loaded: then two buckets of state, half of each.
        loaded = loads_state or self.eight_bit
        parameters = min(bucket // 4 if loaded else bucket // 2, self.profile.gradient_bytes)
        return int(of_all * parameters) + int(of_one * min(largest, parameters)) + (bucket if loaded else 0)

    @property
    def device_step_bytes(self) -> int:
        """Return what stepping masters of the host on the device takes there: two buckets, temporaries of one."""
        profile, bucket = self.profile, self.terms.step_bucket
        copied = 2 * profile.gradient_bytes + profile.optimizer_bytes
        parameters = min(bucket, copied) * profile.gradient_bytes // max(1, copied)
        return min(2 * bucket, copied) + int(sum(self.temporaries) * parameters)

    @property
    def device_step_pays(self) -> bool:
        """Whether stepping all parameters, as masters on the host, takes less time on the device than on the CPU."""
        profile = self.profile
        tensors = sum(block.parameter_count for block in profile.blocks)
        needs = profile.gradient_bytes, profile.optimizer_bytes, tensors
        on_device = replace(self.terms, step_bucket=self.bucket_bytes).step_offloaded(*needs)
        return on_device < replace(self.terms, step_bucket=0).step_offloaded(*needs)

    @property
    def may_overlap(self) -> bool:
        """Whether the loop is known to allow steps in backward; without page-locked memory they would hold that up."""
        config = self.terms.config
        allowed = config.overlap_optimizer is True and config.gradient_accumulation_steps == 1
        return allowed and self.terms.page_locked and not self.terms.rates.tier_is_disk

    @property
    def buckets_are_free(self) -> bool:
        """Whether steps in buckets take no longer than whole ones."""
        return self.exposed_in_buckets(self.profile.gradient_bytes) == 0.0

    def exposed_in_buckets(self, gradient_bytes: int) -> float:
        """Return what buckets add to a step: the device computes one while the calls for the next are launched."""
        parameters = self.bucket_bytes / 2
        exposed = max(0.0, BUCKET_SECONDS - self.terms.rates.optimizer(int(parameters)))
        return exposed * gradient_bytes / parameters / self.terms.accumulated
