"""What fails on CUDA leaves nothing behind: no memory that a late copy writes to, no pending error."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.executor import Executor
from memscale.tiers.engine import PinnedMemory
from support.families import FAMILIES
from support.offloaded import Tell, plan_of
from support.wrapping import Layer

Computing = Callable[[], AbstractContextManager[None]]
WIDTH = 64


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(WIDTH) for _ in range(5))).cuda().eval()


def offload(model: nn.Module, **settings: Any) -> Executor:
    config = Config(enable_logging=False, **settings)
    executor = Executor(model, plan_of(model, to="host", activations=False), config)
    executor.attach()
    return executor


def in_use(pinned: PinnedMemory) -> int:
    return sum(each.memory.nbytes - each.free.total for each in pinned._blocks)


def test_memory_of_gradients_in_flight_is_not_reused_when_backward_raises(
    runtime: ctypes.CDLL, computing: Computing
) -> None:
    runtime.fakecuda_set_copies(b"late")
    reached, device = threading.Event(), torch.device("cuda")

    def fail(gradient: torch.Tensor) -> None:  # when the gradients of all layers but two are on their way
        assert reached.wait(60)
        raise ValueError("of the user's hook")

    with computing():
        model = stack()
        executor = offload(model, async_offload=True)
        pinned = executor.placement.pinned
        masters = in_use(pinned)
        model[1].register_forward_pre_hook(lambda _, args: Tell.apply(args[0], reached))
        hook = list(model.parameters())[-1].register_hook(fail)
        with pytest.raises(ValueError, match="user's hook") as raised:
            model(torch.randn(8, WIDTH, device=device)).sum().backward()
        hook.remove()
        del raised
        gc.collect()
        # Autograd drops the rest of the pass while it waits for the device in a later one.
        for _ in range(100):
            torch.ones(1, device=device, requires_grad=True).sum().backward()
            if in_use(pinned) == masters:
                break
        assert in_use(pinned) == masters
        memory = [pinned.empty_like(each, device).fill_(7) for _ in range(2) for each in model.parameters()]
        torch.cuda.synchronize()
        assert all((each == 7).all() for each in memory)
        del memory
        executor.detach()
    assert pinned.bytes_locked == 0


def test_refused_page_locks_leave_no_error_behind(runtime: ctypes.CDLL, computing: Computing) -> None:
    x = torch.randn(8, WIDTH).cuda()
    with computing():
        plain, model = stack(), stack()
        torch._C._host_emptyCache()  # of page-locked memory that other tests have freed
        runtime.fakecuda_set_page_locks(1)
        executor = offload(model, async_offload=True)
        assert runtime.cudaPeekAtLastError() == 0
        assert not any(each.is_pinned() for each in model.parameters())
        for each in (plain, model):
            each(x).square().sum().backward()
        torch.cuda.synchronize()
        assert runtime.cudaPeekAtLastError() == 0
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())
        executor.detach()


def test_a_prefetch_without_room_is_made_up_for_when_its_layer_is_reached(
    runtime: ctypes.CDLL, computing: Computing
) -> None:
    """No guard repeats the step here: it must not fail."""
    x = torch.randn(8, 512).cuda()
    with computing():
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))).cuda()
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(5))).cuda()
        model.load_state_dict(plain.state_dict())
        executor = offload(model, async_offload=True)
        expected = plain(x)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_stats()["num_ooms"]
        for _ in range(2):  # torch frees its cache and tries once more
            runtime.fakecuda_fail(b"cudaMalloc", 0, 2)
        found = model(x)
        assert torch.cuda.memory_stats()["num_ooms"] == before + 1
        assert torch.equal(found, expected)
        for output in (expected, found):
            output.square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad.cpu(), theirs.grad.cpu())
        executor.detach()


OUT_OF_MEMORY, CUBLAS_ALLOC_FAILED, UNKNOWN = 2, 3, 999


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("cudaMalloc", OUT_OF_MEMORY),
        ("cudaHostAlloc", OUT_OF_MEMORY),
        ("cudaMemcpyAsync", UNKNOWN),
        ("cudaEventRecordWithFlags", UNKNOWN),
        ("cudaStreamWaitEvent", UNKNOWN),
        ("cudaEventSynchronize", UNKNOWN),
        ("cudaLaunchKernel", UNKNOWN),
        ("cublasLtMatmul", CUBLAS_ALLOC_FAILED),
        ("cublasSetStream_v2", CUBLAS_ALLOC_FAILED),
    ],
)
def test_a_step_that_failed_anywhere_can_be_made_again(
    call: str, error: int, runtime: ctypes.CDLL, computing: Computing
) -> None:
    """Errors of CUDA in forward or backward: the step is repeated by itself or by the loop, with the same numbers."""
    runtime.fakecuda_set_copies(b"poisoned")
    family = FAMILIES["gpt2"]
    batch = {name: each.cuda() for name, each in family.batch().items()}
    # torch 2.15 sets a handle's stream twice for a product, and never frees the workspace if the second one fails.
    after = [0, 4, 18, 60] if call == "cublasSetStream_v2" else [0, 3, 17, 60]
    config = Config(
        mode="aggressive",
        force_optimize=True,
        enable_logging=False,
        async_offload=True,
        use_mixed_precision=False,
        use_8bit_optimizer=False,
        enable_tiling=False,
        fused_host_step=False,
        overlap_optimizer=False,
    )
    raised: list[int] = []

    def train(model: nn.Module, fails_after: list[int | None]) -> list[torch.Tensor]:
        """Train; in some steps a call fails, after so many that do not."""
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for after in fails_after:
            if after is not None:
                torch.cuda.empty_cache()
                for _ in range(2 if call == "cudaMalloc" else 1):  # torch frees its cache and tries once more
                    assert runtime.fakecuda_fail(call.encode(), after, error) == 0
            try:
                family.loss(model, batch).backward()
            except RuntimeError:
                assert after is not None
                raised.append(after)
                optimizer.zero_grad()
                family.loss(model, batch).backward()
            runtime.fakecuda_succeed()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().cpu().clone() for each in model.parameters()]

    with computing():
        model, plain = family.build().cuda().eval(), family.build().cuda().eval()
        expected = train(plain, [None] * 5)
        memscale.wrap(model, config, batch)
        found = train(model, [None, *after])
        memscale.detach(model)
    assert all(map(torch.equal, found, expected))
    if error == CUBLAS_ALLOC_FAILED or call == "cudaMalloc":
        assert not raised
