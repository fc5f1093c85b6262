"""Tools for the tests of techniques: plans without an engine, runs to compare, proofs of recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memscale.execution_plan import Checkpointing, LayerPlan, Plan
from memscale.executor import Executor
from memscale.profiler.blocks import Block, find_blocks, stacks
from support.families import Family
from support.regions import LiveBytes

# Every operation of the families that the FLOP counter counts, and one that it does not know.
DEAR = (
    "aten.mkldnn_rnn_layer.default",
    "aten.addmm.default",
    "aten.mm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)


def blocks_of(model: nn.Module) -> tuple[Block, ...]:
    """The blocks to checkpoint: the repeated ones; of a model without any, all but embeddings and heads."""
    blocks = find_blocks(model)
    repeated = tuple(block for block in blocks if block.role == "repeated")
    return repeated or tuple(block for block in blocks if block.role == "other")


def checkpoint_plan(model: nn.Module, *, keep: tuple[str, ...] = (), chained: bool = False) -> Plan:
    """A plan that checkpoints those blocks; chained, all but the first of each stack."""
    blocks = blocks_of(model)
    firsts = {stack[0].name for stack in stacks(blocks)}
    return Plan(
        tuple(
            LayerPlan(
                name=block.name,
                members=block.members,
                techniques=("checkpointing",),
                rule="test",
                reason="every block",
                checkpointing=Checkpointing(keep, chained and block.name not in firsts),
            )
            for block in blocks
        )
    )


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    """The model, with every block checkpointed."""
    Executor(model, checkpoint_plan(model, **settings)).attach()
    return model


def train(
    family: Family,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    *,
    steps: int = 3,
    device: str | torch.device = "cpu",
) -> list[tuple[str, torch.Tensor]]:
    """Everything a training run leaves behind, step by step, by name; as CPU tensors."""
    model = prepare(family.build().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = family.batch(device)
    torch.manual_seed(5)
    seen: list[tuple[str, torch.Tensor]] = []
    for step in range(steps):
        loss = family.loss(model, batch)
        loss.backward()
        seen.append((f"loss {step}", loss.detach().cpu()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                seen.append((f"gradient {step} {name}", parameter.grad.cpu().clone()))
        seen += [(f"buffer {step} {name}", buffer.cpu().clone()) for name, buffer in model.named_buffers()]
        seen.append((f"random state {step}", torch.get_rng_state()))
        optimizer.step()
        optimizer.zero_grad()
    return seen + [(f"weight {name}", p.detach().cpu()) for name, p in model.named_parameters()]


def assert_same(ours: list[tuple[str, torch.Tensor]], plain: list[tuple[str, torch.Tensor]]) -> None:
    assert [name for name, _ in ours] == [name for name, _ in plain]
    for (name, one), (_, other) in zip(ours, plain, strict=True):
        assert torch.equal(one, other), name


@dataclass(frozen=True)
class Work:
    """What one training step computed and kept.

    Attributes:
        flops: Of forward and backward.
        block_flops: Of the blocks' forward passes alone, the first time.
        runs: How often the code of each block ran, by the block's name.
        saved_bytes: What was alive between forward and backward, of all that forward made.
    """

    flops: int
    block_flops: int
    runs: dict[str, int]
    saved_bytes: int


def work_of(family: Family, prepare: Callable[[nn.Module], nn.Module] = lambda model: model) -> Work:
    """Runs one step and counts."""
    model = family.build()
    runs = _count_runs(model)
    # The second step: the first one makes what a model makes once, such as masks.
    family.loss(prepare(model), family.batch()).backward()
    runs.clear()

    inside: list[int] = []
    with FlopCounterMode(display=False) as counter:
        # Hooks of a block run outside of a technique, once a call.
        for member in (member for block in blocks_of(model) for member in block.members):
            module = model.get_submodule(member)
            module.register_forward_pre_hook(lambda *_: inside.append(-counter.get_total_flops()))
            module.register_forward_hook(lambda *_: inside.append(counter.get_total_flops()))
        with LiveBytes() as live:
            loss = family.loss(model, family.batch())
            saved = live.now
        block_flops = sum(inside)
        loss.backward()
        return Work(counter.get_total_flops(), block_flops, dict(runs), saved)


def _count_runs(model: nn.Module) -> Counter[str]:
    """Counts how often the code of each block runs, from inside any technique that is put on it later."""
    runs: Counter[str] = Counter()
    for block in blocks_of(model):
        module = model.get_submodule(block.members[0])
        if len(block.members) > 1:  # of a slice, the hooks of its members run inside
            module.register_forward_pre_hook(lambda *_, name=block.name: runs.update([name]))
        else:
            module.forward = _Counted(module.forward, block.name, runs)
    return runs


class _Counted:
    """A forward that a user has put on a module, and that counts."""

    def __init__(self, forward: Callable[..., Any], name: str, runs: Counter[str]) -> None:
        self._forward, self._name, self._runs = forward, name, runs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._runs[self._name] += 1
        return self._forward(*args, **kwargs)
