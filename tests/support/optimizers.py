"""Places to keep optimizer state in, and pairs of runs to compare: plain and streamed."""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn, optim

from memscale.observe.counters import Meter
from memscale.optimizer.bucketed_steps import BucketedSteps
from memscale.optimizer.state_stores import StateStore
from memscale.tiers.disk import DiskStore
from memscale.tiers.engine import PinnedMemory

SHAPES = ((16, 8), (8,), (32, 16), (4, 3, 2, 2), (), (24, 16), (16,), (5, 7))


class Elsewhere(StateStore):
    """Host memory: state is copied there, and back to the parameter's device for a step."""

    tier = "host"

    def __init__(self):
        super().__init__(DiskStore())
        self.allocations = self.loads = 0
        self.released = []  # their ids: a store holds on to nothing
        self.most_loaded = 0  # bytes of the copies that were alive at once
        self._alive = {}

    def accepts(self, parameter):
        return True

    def allocate(self, like, parameter):
        self.allocations += 1
        return torch.empty_like(like, device="cpu")

    def load(self, tensor, parameter):
        self.loads += 1
        copy = tensor.to(parameter.device, copy=True)
        self._alive[id(copy)] = copy.nbytes
        weakref.finalize(copy, self._alive.pop, id(copy))
        self.most_loaded = max(self.most_loaded, sum(self._alive.values()))
        return copy

    def release_pages(self, tensor):
        self.released.append(id(tensor))


class Mapped(Elsewhere):
    """Files: state is a tensor over a file, which the CPU computes with as it is."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def allocate(self, like, parameter):
        self.allocations += 1
        path = self._folder / f"{self.allocations}.bin"
        return torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)

    def load(self, tensor, parameter):
        self.loads += 1
        return tensor


@contextlib.contextmanager
def streamed(parameters, store=None, bucket_bytes=4096, least_bytes=1):
    """Steps run in buckets inside the block; tests have small tensors, so every one moves."""
    steps, store = BucketedSteps(DiskStore(), Meter(), PinnedMemory()), store or Elsewhere()
    store.least_bytes = least_bytes
    steps.attach(parameters, store, bucket_bytes)
    try:
        yield steps
    finally:
        steps.restore()


def parameters(shapes=SHAPES, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [nn.Parameter(each.to(device)) for each in made]


def give_gradients(tensors, step, without=()):
    """New gradients, the same for the same step; none for the positions in `without`."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, each in enumerate(tensors):
        gradient = torch.randn(each.shape, generator=generator, dtype=each.dtype)
        each.grad = None if index in without else gradient.to(each.device)


def in_groups(tensors, **settings):
    """Three groups with learning rates of their own, the last one with another weight decay."""
    return [
        {"params": tensors[:3]},
        {"params": tensors[3:4], "lr": 0.02},
        {"params": tensors[4:], "lr": 0.003, "weight_decay": 0.2},
    ]


def leaves(value):
    if isinstance(value, dict):
        for key in sorted(value, key=str):  # state is made in another order, which nobody reads
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def assert_equal(one, other):
    """The same values to the bit, in the same structure."""
    one, other = list(leaves(one)), list(leaves(other))
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a.detach().cpu(), b.detach().cpu())
        else:
            assert a == b or a is b


class Lion(torch.optim.Optimizer):
    """As people write their own: no foreach, state made on the first step, new tensors out of place."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((state["exp_avg"] * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                state["exp_avg"] = state["exp_avg"] * second + p.grad * (1 - second)
        return loss


def steps_of(tensors, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        give_gradients(tensors, step)
        optimizer.step()


def plain_adamw(steps=4, **options):
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors), **options)
    steps_of(tensors, optimizer, steps)
    return tensors, optimizer.state_dict()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def loss_of(module, step=0):
    generator = torch.Generator().manual_seed(step)
    return module(torch.randn(8, 12, generator=generator)).square().mean()
