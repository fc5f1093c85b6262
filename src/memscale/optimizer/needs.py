"""What the optimizer at hand needs: its state and the temporaries of its step; and what the step costs the planner.

Without an optimizer a plan reckons with AdamW: two moments of every parameter that is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memscale._torch import ShardedGroup, sharded_groups
from memscale.errors import WrapError
from memscale.memory.allocator import CachingAllocator
from memscale.optimizer.eight_bit import is_moment
from memscale.optimizer.interceptor import (
    NewState,
    arithmetic_of,
    has_moments,
    is_fused_on_cpu,
    leaves_gradients,
    step_alone,
    why_32_bits,
    why_whole,
)
from memscale.profiler import ModelProfile, Place, find_blocks
from memscale.simulator.shards import bytes_here
from memscale.techniques.cost import BUCKET_SECONDS, FOREACH_ACCESSES, CostTerms

LARGEST_BUCKET = 64 * 2**20  # bytes: runs long enough to be read at the disk's full rate
SMALLEST_BUCKET = 2**20  # bytes
BUCKET_SHARE = 1 / 8  # of the parameters, between the two
_SIDE = 1024  # of the matrices that a step is simulated with
SGD_ACCESSES = 3  # of SGD's foreach step: it reads parameters and gradients, and writes parameters
MOMENTUM_ACCESSES = 5  # it scales momentum, and adds the gradient to it
_PARTS = 8  # temporaries are counted in such parts of a parameter


@dataclass(frozen=True)
class StateTensor:
    """A tensor that an optimizer keeps for one parameter."""

    nbytes: int
    is_moment: bool  # whether it can be kept in 8 bits


@dataclass(frozen=True)
class OptimizerNeeds:
    kind: str  # the name of its class
    state: Mapping[str, tuple[StateTensor, ...]]  # by the names of the model's parameters that it steps
    # Bytes that its step makes in between, for each byte of all parameters that it steps at once, and of the largest.
    temporaries: tuple[float, float]
    moves: bool  # whether its state can be on another tier between steps
    eight_bit: bool  # whether its moments can be kept in 8 bits
    accesses: int = FOREACH_ACCESSES  # reads and writes of its step, for each byte of parameters
    fused_on_cpu: bool = True  # whether parameters on the host can be stepped by a fused implementation
    steps_on_device: bool = True  # whether they can be stepped on the device: Note [Device twins]
    overlaps: bool = True  # whether its steps can be computed in backward: Note [Overlapped steps]
    notes: tuple[str, ...] = ()  # for the plan


def needs_of(optimizer: Optimizer, model: nn.Module, place: Place) -> OptimizerNeeds:
    """Return what an optimizer needs for a model's parameters, by its class, its settings and the state that it has.

    Raises:
        WrapError: It steps none of the model's parameters.
    """
    kind, whole = type(optimizer).__name__, why_whole(optimizer)
    new = None if whole else NewState(optimizer)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    names |= {id(shard): name for name, (_, shard) in shards_of(model).items()}  # also while it is gathered
    state: dict[str, tuple[StateTensor, ...]] = {}
    notes: tuple[str, ...] = ()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or not parameter.requires_grad:
                continue
            found = {key: _local(value) for key, value in _tensors_of(optimizer.state.get(parameter)).items()}
            parameter = _local(parameter)
            if new is not None:
                found |= new.of(group, parameter)
            elif not found:
                notes = (f"what state {kind} keeps is not known before its first step: planned as for AdamW",)
                found = {"exp_avg": parameter, "exp_avg_sq": parameter}
            state[name] = tuple(
                StateTensor(value.nbytes, is_moment(each, value, parameter)) for each, value in found.items()
            )
    if not state:
        raise WrapError(
            f"optimizer ({kind}) steps none of the model's parameters that are trained: give the one that trains this "
            "model, built from its parameters."
        )
    temporaries = adamw_temporaries(place.kind) if whole else _simulated_temporaries(optimizer, place)
    has_own = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    is_sparse = arithmetic_of(type(optimizer)) is torch.optim.SparseAdam
    return OptimizerNeeds(
        kind,
        state,
        temporaries,
        moves=whole is None,
        eight_bit=why_32_bits(optimizer) is None,
        accesses=_accesses(optimizer),
        fused_on_cpu=all(
            group.get("fused") or is_fused_on_cpu(optimizer, group) for group in optimizer.param_groups
        ),
        steps_on_device=whole is None and not has_own and not is_sparse,
        overlaps=whole is None and leaves_gradients(optimizer),
        notes=notes,
    )


def _accesses(optimizer: Optimizer) -> int:
    """Return how often a foreach step accesses each byte of parameters; but for SGD, how often AdamW's does."""
    if arithmetic_of(type(optimizer)) is not torch.optim.SGD:
        return FOREACH_ACCESSES
    return SGD_ACCESSES + (MOMENTUM_ACCESSES if has_moments(optimizer) else 0)


def shards_of(model: nn.Module) -> dict[str, tuple[ShardedGroup, Tensor]]:
    """Return the parameters that FSDP2 has sharded by their names, each with its group and this rank's shard."""
    paths = {id(module): path for path, module in model.named_modules()}
    return {
        ".".join(filter(None, (paths[id(owner)], name))): (group, shard)
        for group in sharded_groups(model)
        for owner, name, shard in group.parameters
    }


def needs_of_shards(model: nn.Module, needs: OptimizerNeeds | None, kind: str) -> OptimizerNeeds:
    """Return what an optimizer, AdamW if it is not known, needs where FSDP2 decides where its state is."""
    needs = needs or adamw_needs(model, kind)
    return replace(needs, moves=False, eight_bit=False, steps_on_device=False, overlaps=False)


def adamw_needs(model: nn.Module, kind: str) -> OptimizerNeeds:
    """Return what AdamW needs over all parameters that are trained, of shards what this rank has of them."""
    shards, state = shards_of(model), {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            nbytes = bytes_here(*shards[name]) if name in shards else parameter.nbytes
            state[name] = (StateTensor(nbytes, parameter.dtype is torch.float32),) * 2
    return OptimizerNeeds("AdamW", state, adamw_temporaries(kind), moves=True, eight_bit=True)


def adamw_temporaries(kind: str) -> tuple[float, float]:
    """Return the bytes that AdamW's step allocates for each of all parameters (foreach), and of the largest (loop)."""
    return (0.0, 2.0) if kind == "cpu" else (1.0, 0.0)


def _local(tensor: Tensor) -> Tensor:
    """Return what this process has of a tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def with_optimizer(
    profile: ModelProfile, model: nn.Module, needs: OptimizerNeeds | None, place: Place
) -> ModelProfile:
    """Return the profile with an optimizer's state and temporaries in the place of AdamW's."""
    if needs is None:
        return profile

    def bytes_of(name: str) -> int:
        sizes = [each.nbytes for each in needs.state.get(name, ())]
        return sum(
            sizes if place.counts_exactly else (CachingAllocator().allocate(each).size for each in sizes)
        )

    # On a CPU, state that can't wait on disk is in memory wherever its parameter is.
    with_blocks = needs.moves or place.kind != "cpu"
    by_block = {
        block.name: sum(map(bytes_of, block.parameter_names)) if with_blocks else 0
        for block in find_blocks(model)
    }
    return replace(
        profile,
        blocks=tuple(replace(block, optimizer_bytes=by_block.get(block.name, 0)) for block in profile.blocks),
        optimizer_bytes=sum(map(bytes_of, needs.state)),
        step_temporaries=needs.temporaries,
        step_accesses=needs.accesses,
        fused_on_cpu=needs.fused_on_cpu,
    )


def _tensors_of(state: object) -> dict[str, Tensor]:
    values = state.items() if isinstance(state, dict) else ()
    return {str(name): value for name, value in values if isinstance(value, Tensor) and value.dim()}


def _simulated_temporaries(optimizer: Optimizer, place: Place) -> tuple[float, float]:
    """Step one to three matrices on fake tensors; see `OptimizerNeeds.temporaries`."""
    if arithmetic_of(type(optimizer)) is torch.optim.SparseAdam:
        return 0.0, 0.0  # what it makes is as large as the rows that a batch has
    group = max(optimizer.param_groups, key=lambda group: sum(each.nbytes for each in group["params"]))
    one, two, three = (_temporaries_of(optimizer, group, count, place) for count in (1, 2, 3))
    of_all = max(0.0, three - two)  # a loop may have one of its last parameter's from the second on
    return of_all, max(0.0, one - of_all)


def _temporaries_of(optimizer: Optimizer, group: dict[str, object], count: int, place: Place) -> float:
    with place.simulate() as simulation:
        device = simulation.device
        parameters = [nn.Parameter(torch.empty(_SIDE, _SIDE, device=device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        state = step_alone(optimizer, group, parameters)
        simulation.tracker.reset_peak()
        before = simulation.tracker.live_bytes(device)
        step_alone(optimizer, group, parameters, state)
        above = simulation.tracker.peak_bytes(device) - before
        return round(_PARTS * above / parameters[0].nbytes) / _PARTS


# What a step costs the planner -----------------------------------------------------------------------


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
