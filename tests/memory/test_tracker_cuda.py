"""On CUDA the tracker agrees with the caching allocator's own statistics."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memscale.memory.allocator import CachingAllocator
from memscale.memory.tracker import MemoryTracker

pytestmark = pytest.mark.cuda


class Net(nn.Module):
    """Layers whose CUDA kernels take no scratch memory of their own."""

    def __init__(self, width=1536, depth=4, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            call = lambda value, layer=layer: layer(value).relu()  # noqa: E731
            x = checkpoint(call, x, use_reentrant=False) if self.recompute else call(x)
        return x.square().mean()


@pytest.fixture
def clean():
    """The cuBLAS workspaces exist (one for each thread), and nothing else does."""
    warm = Net(width=16, depth=1).cuda()
    warm(torch.ones(2, 16, device="cuda")).backward()
    del warm
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def requested():
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_requested_bytes_agree_at_every_phase(recompute, foreach):
    base = requested()
    with MemoryTracker() as tracker:

        def check():
            assert tracker.live_bytes("cuda") == requested() - base

        model = Net(recompute=recompute).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        x = torch.ones(64, 1536, device="cuda")
        check()
        for _ in range(3):
            loss = model(x)
            check()
            loss.backward()
            check()
            optimizer.step()
            check()
            optimizer.zero_grad()
            del loss
            check()


@pytest.mark.usefixtures("clean")
def test_allocated_and_peak_agree_with_the_model_of_the_allocator():
    base = torch.cuda.memory_allocated()
    with MemoryTracker(allocators={"cuda": CachingAllocator}) as tracker:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = torch.ones(64, 1536, device="cuda")
        for _ in range(3):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        assert tracker.live_bytes("cuda") == torch.cuda.memory_allocated() - base
        assert tracker.peak_bytes("cuda") == torch.cuda.max_memory_allocated() - base


@pytest.mark.usefixtures("clean")
def test_a_resized_storage_agrees():
    base = requested()
    with MemoryTracker() as tracker:
        x = torch.zeros(1 << 20, device="cuda")
        for size in (0, 1 << 22, 1 << 10):
            x.untyped_storage().resize_(size)
            assert tracker.live_bytes("cuda") == requested() - base == size
