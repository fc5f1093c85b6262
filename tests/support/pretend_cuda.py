"""The CUDA side without a CUDA device: streams and events that write down what they are told.

The tensors are CPU tensors that say they are on `cuda:0`; every line of the tiers and of the engine runs as it would
there, except the copies themselves.
"""

import contextlib
from typing import ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from memscale.tiers import engine as engine_module

CUDA = torch.device("cuda", 0)


class Pretend(torch.Tensor):
    """A CPU tensor that says it is on a CUDA device."""

    @property
    def device(self):
        return CUDA

    def record_stream(self, stream):
        LOG.append(f"record_stream({stream})")


LOG: list[str] = []


class Event:
    count = 0

    def __init__(self, stream):
        Event.count += 1
        self.name, self.over = f"event {Event.count}", False
        LOG.append(f"{stream}: record {self.name}")

    def query(self):
        return self.over

    def synchronize(self):
        LOG.append(f"synchronize {self.name}")
        self.over = True


class Stream:
    current: ClassVar[list["Stream"]] = []
    made = 0

    def __init__(self, device=None, name=None):
        Stream.made += name is None
        self.name = name or f"copy stream {Stream.made}"

    def __str__(self):
        return self.name

    device = CUDA

    def record_event(self):
        return Event(self)

    def wait_event(self, event):
        LOG.append(f"{self}: wait for {event.name}")

    def synchronize(self):
        LOG.append(f"synchronize {self}")


@contextlib.contextmanager
def on_stream(stream):
    Stream.current.append(stream)
    try:
        yield
    finally:
        Stream.current.pop()


class PretendCuda(TorchFunctionMode):
    """Copies to the CUDA device, and from it, on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            up = args[1].type == "cuda"
            LOG.append(f"{Stream.current[-1]}: copy {'up' if up else 'down'}")
            copy = args[0].detach().as_subclass(torch.Tensor).clone()
            return copy.as_subclass(Pretend) if up else copy
        if func is torch.Tensor.copy_ and isinstance(args[0], Pretend):
            asynchronous = ", beside it" if kwargs.get("non_blocking") else ""
            LOG.append(f"{Stream.current[-1]}: copy up{asynchronous}")
            return func(args[0].as_subclass(torch.Tensor), args[1]).as_subclass(Pretend)
        if func is torch.Tensor.copy_ and isinstance(args[1], Pretend):
            asynchronous = ", beside it" if kwargs.get("non_blocking") else ""
            LOG.append(f"{Stream.current[-1]}: copy down{asynchronous}")
            return func(args[0], args[1].as_subclass(torch.Tensor))
        if kwargs.get("device") == CUDA:
            return func(*args, **{**kwargs, "device": "cpu"}).as_subclass(Pretend)
        return func(*args, **kwargs)


@pytest.fixture
def cuda(monkeypatch):
    compute = Stream(name="compute")
    LOG.clear()
    Event.count = Stream.made = 0
    Stream.current[:] = [compute]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: LOG.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current[-1])
    monkeypatch.setattr(
        engine_module, "_allocate_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
    )
    with PretendCuda():
        yield compute


def on_cuda(numel, value=1.0):
    return torch.full((numel,), value).as_subclass(Pretend)
