"""Plans in a job of torch.distributed.

For a model that FSDP2 (`fully_shard`) has sharded, of activations, tiles and precision only: FSDP2 decides where
parameters, gradients and optimizer state are; the plan counts what a rank has of them.

Note [Parameters under DDP]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
DistributedDataParallel hooks the gradient accumulators of the parameters, and has buckets on their device. Torch makes
a parameter that changes its device a new accumulator: its gradient would be averaged no more, without an error if that
is so for all of them. So on an accelerator parameters and gradients stay where they are as soon as there is a process
group: DDP may come before or after the plan. Optimizer state and activations may leave, and on a CPU parameters may go
to disk, where they are tensors of the same device.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from memscale._torch import is_flattened, is_sharded, sharded_groups
from memscale.config import Config, ConfigFields
from memscale.errors import WrapError
from memscale.hardware import Hardware
from memscale.hardware.host import in_process_group
from memscale.optimizer.needs import OptimizerNeeds, needs_of_shards, shards_of
from memscale.profiler import ModelProfile, find_blocks
from memscale.simulator.shards import bytes_here

NOTE = (
    "FSDP2 keeps parameters, gradients and optimizer state: planned are activations, tiles and precision, and peaks "
    "are those of one rank"
)
PARAMETERS_STAY = (
    "parameters and gradients stay on the device, as torch.distributed is initialised: DistributedDataParallel would "
    "not average the gradients of parameters that were moved"
)


def parameters_stay(hardware: Hardware) -> bool:
    """Return whether parameters must not leave the device. See Note [Parameters under DDP]."""
    return hardware.device.kind != "cpu" and in_process_group()


def refuse_flattened(model: nn.Module) -> None:
    """Raise a `WrapError` for a model that FSDP1 has sharded."""
    if is_flattened(model):
        raise WrapError(
            "FullyShardedDataParallel (FSDP1) has put the model's parameters into flat ones, so that its layers have "
            "none that could be planned for. Shard it with torch.distributed.fsdp.fully_shard (FSDP2) instead, before "
            "or after memscale.wrap."
        )


def settings_for_shards(model: nn.Module, config: Config) -> Config:
    """Return the settings for a model whose parameters are spread over processes; the same for any other."""
    refuse_flattened(model)
    if not is_sharded(model) and not sharded_groups(model):
        return config
    # A real run would communicate, with processes that do not plan now.
    changes: ConfigFields = {
        "enable_offloading": False,
        "use_8bit_optimizer": False,
        "use_empirical_fallback": False,
    }
    if any(group.dtype is not None for group in sharded_groups(model)):
        changes["use_mixed_precision"] = False  # FSDP2's mp_policy has it already
    return config.replace(**changes)


def optimizer_of_shards(
    model: nn.Module, optimizer: OptimizerNeeds | None, hardware: Hardware
) -> OptimizerNeeds | None:
    """Return what the optimizer needs on one rank; as it is for a model that is not sharded."""
    if not sharded_groups(model):
        return optimizer
    needs = needs_of_shards(model, optimizer, hardware.device.kind)
    return replace(needs, notes=(*needs.notes, NOTE))


def with_shards(profile: ModelProfile, model: nn.Module, hardware: Hardware) -> ModelProfile:
    """Return a profile of the whole model with what a rank has of it: shards, and one gathered group at a time.

    An estimate; the simulation follows each group. See Note [Simulated shards].
    """
    shards = shards_of(model)
    if not shards:
        if not parameters_stay(hardware):
            return profile
        return replace(profile, blocks=tuple(replace(block, used_bytes=0) for block in profile.blocks))
    sizes = {name: (shard.nbytes, bytes_here(group, shard), group) for name, (group, shard) in shards.items()}
    buffers = 1 if hardware.device.kind == "cpu" else 2
    inner = {id(module) for group in sharded_groups(model) for module in group.modules}
    names = {block.name: block.parameter_names for block in find_blocks(model)}

    def changed(found: list[str]) -> tuple[int, int, int]:
        """Return by how much parameters and gradients change, and the bytes of what is gathered for a while."""
        parameters = gradients = gathered = 0
        for name in found:
            whole, local, group = sizes[name]
            parameters += local - whole * group.reshards
            gradients += (local - whole) * shards[name][1].requires_grad
            gathered += whole * group.reshards
        return parameters, gradients, gathered

    blocks = []
    for block in profile.blocks:
        mine = [name for name in names[block.name] if name in sizes]
        parameters, gradients, gathered = changed(mine)
        modules = [model.get_submodule(path) for path in block.members]
        parts = [
            part for module in modules for part in module.modules() if part is not module or len(modules) > 1
        ]
        blocks.append(
            replace(
                block,
                container=block.name
                if mine
                else block.container,  # no chains: only its own group is gathered
                parameter_bytes=block.parameter_bytes + parameters,
                gradient_bytes=block.gradient_bytes + gradients,
                used_bytes=0 if mine else block.used_bytes,
                forward_peak_bytes=block.forward_peak_bytes + buffers * gathered,
                backward_peak_bytes=block.backward_peak_bytes + buffers * gathered,
                gathers_inside=any(id(part) in inner for part in parts),
            )
        )
    parameters, gradients, _ = changed(list(sizes))
    return replace(
        profile,
        blocks=tuple(blocks),
        parameter_bytes=profile.parameter_bytes + parameters,
        gradient_bytes=profile.gradient_bytes + gradients,
    )
