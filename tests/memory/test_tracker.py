"""The tracker's block: what it installs and takes away, errors in the middle, nesting, history, capacity."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memscale.errors import ProfileError
from memscale.memory import record
from memscale.memory.allocator import MIB, CachingAllocator, ExactAllocator
from memscale.memory.record import Category, Phase
from memscale.memory.tracker import MemoryTracker


def everything_global():
    """All that a tracker touches outside itself."""
    return {
        "pre hooks": dict(module_hooks._global_forward_pre_hooks),
        "hooks": dict(module_hooks._global_forward_hooks),
        "with kwargs": dict(module_hooks._global_forward_hooks_with_kwargs),
        "always called": dict(module_hooks._global_forward_hooks_always_called),
        "step pre hooks": dict(optimizer_hooks._global_optimizer_pre_hooks),
        "step hooks": dict(optimizer_hooks._global_optimizer_post_hooks),
        "resize_": vars(torch.UntypedStorage).get("resize_"),
        "modes": _get_current_dispatch_mode_stack(),
    }


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def untouched():
    before = everything_global()
    yield
    assert everything_global() == before


class Broken(nn.Module):
    def forward(self, x):
        raise ValueError("in forward")


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        raise ValueError("in backward")


class BrokenInBackward(nn.Module):
    def forward(self, x):
        return BrokenBackward.apply(x)


class BrokenStep(torch.optim.SGD):
    def step(self, closure=None):
        raise ValueError("in the step")


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("where", ["nowhere", "forward", "backward", "step", "interrupt"])
def test_nothing_stays_behind(where):
    model = net()
    if where == "forward":
        model.append(Broken())
    if where == "backward":
        model.append(BrokenInBackward())
    optimizer = (BrokenStep if where == "step" else torch.optim.SGD)(model.parameters(), lr=0.1)
    try:
        with MemoryTracker(model) as tracker:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if where == "interrupt":
                raise KeyboardInterrupt
    except (ValueError, KeyboardInterrupt):
        assert where != "nowhere"
    assert tracker.phase is Phase.SETUP
    assert tracker.live_bytes() >= sum(p.nbytes for p in model.parameters())


@pytest.mark.usefixtures("untouched")
def test_after_an_error_in_a_module_the_next_step_is_followed_as_ever():
    model, broken = net(), nn.Sequential(nn.Linear(8, 8), Broken())
    with MemoryTracker(model, broken) as tracker:
        with pytest.raises(ValueError, match="in forward"):
            broken(torch.ones(2, 8))
        loss = model(torch.ones(2, 8)).square().sum()
        kept = [each.module for each in tracker.now().top if each.category is Category.ACTIVATIONS]
        loss.backward()
        assert tracker.phase is Phase.SETUP
    assert set(kept) == {"1", "2", ""}  # relu's, the last layer's, and what the loss made outside
    assert [mark.phase for mark in tracker.timeline().marks] == [Phase.FORWARD, Phase.BACKWARD, Phase.SETUP]


@pytest.mark.usefixtures("untouched")
def test_an_error_in_backward_ends_the_phase():
    model = nn.Sequential(nn.Linear(8, 8), BrokenInBackward())
    with MemoryTracker(model) as tracker:
        with pytest.raises(ValueError, match="in backward"):
            model(torch.ones(2, 8)).sum().backward()
        torch.ones(1)
        assert tracker.phase is Phase.SETUP


def test_a_hook_that_fails_before_ours_does_not_unbalance_the_names():
    def refuse(module, inputs):
        raise ValueError("refused")

    handle = module_hooks.register_module_forward_pre_hook(refuse)
    try:
        with MemoryTracker() as tracker:
            with pytest.raises(ValueError, match="refused"):
                net()(torch.ones(2, 8))
            handle.remove()
            kept = net()(torch.ones(2, 8))
            assert tracker.now().of(Category.ACTIVATIONS) >= kept.nbytes
    finally:
        handle.remove()


@pytest.mark.usefixtures("untouched")
def test_trackers_nest():
    with MemoryTracker() as outer:
        x = torch.zeros(10)
        with MemoryTracker() as inner:
            y = torch.zeros(5)
            y.untyped_storage().resize_(80)
            assert (inner.live_bytes(), outer.live_bytes()) == (80, 120)
            with pytest.raises(ProfileError, match="active already"), inner:
                pass
        z = torch.zeros(2)
        assert (inner.live_bytes(), outer.live_bytes()) == (80, 128)
        del x, y, z
        assert (inner.live_bytes(), outer.live_bytes()) == (0, 0)


@pytest.mark.usefixtures("untouched")
def test_a_tracker_used_twice_goes_on_where_it_was():
    model = net()
    tracker = MemoryTracker(model)
    for _ in range(2):
        with tracker:
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
        model.zero_grad()
    assert tracker.live_bytes() == sum(p.nbytes for p in model.parameters()) + loss.nbytes
    assert tracker.now().of(Category.WEIGHTS) == sum(p.nbytes for p in model.parameters())


def test_what_dies_after_the_block_is_noticed():
    with MemoryTracker() as tracker:
        x = torch.zeros(10)
    assert tracker.live_bytes() == 40
    del x
    assert tracker.live_bytes() == 0
    assert tracker.peak_bytes() == 40


def test_reset_peak_starts_again_from_what_is_alive():
    with MemoryTracker() as tracker:
        x = torch.zeros(10)
        y = torch.zeros(1000)
        del y
        assert tracker.peak_bytes() == 4040
        tracker.reset_peak()
        assert (tracker.peak_bytes(), tracker.at_peak().total) == (40, 40)
        assert tracker.timeline().totals() == (40,)
        z = torch.zeros(100)
        assert (tracker.peak_bytes(), tracker.at_peak().total) == (440, 440)
        assert tracker.timeline().totals() == (40, 440)
    assert len(x) + len(z) == 110


def test_an_unknown_device_has_nothing():
    tracker = MemoryTracker()
    assert tracker.devices == ()
    assert tracker.live_bytes("cpu") == tracker.peak_bytes("meta") == tracker.reserved_bytes("cpu") == 0
    assert tracker.at_peak("cpu").total == 0
    assert tracker.timeline("cpu").ticks == ()
    assert tracker.timeline("cpu").totals() == ()


# ------------------------------------------------------------------ a long training


def test_the_tracker_does_not_grow_with_the_training(monkeypatch):
    monkeypatch.setattr(record, "HISTORY", 1000)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, 8)
    with MemoryTracker(model) as tracker:
        for _ in range(60):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert max(len(tracker._events), len(tracker._marks)) <= 1000
            assert len(tracker._find("cpu").dead_at_peak) <= 50
            assert len(tracker._running.roots) == 1
    timeline = tracker.timeline()
    assert timeline.totals()[-1] == tracker.live_bytes()
    assert len(timeline.ticks) > 500
    # The peak of the first steps is forgotten by the timeline, and whole in the snapshot.
    peak = tracker.at_peak()
    assert peak.total == tracker.peak_bytes()
    assert peak.of(Category.GRADIENTS) == sum(p.nbytes for p in model.parameters())
    assert [mark.tick for mark in timeline.marks] == sorted(mark.tick for mark in timeline.marks)
    assert timeline.marks[0].tick == timeline.ticks[0]


def test_names_of_module_calls_are_bounded(monkeypatch):
    monkeypatch.setattr("memscale.memory.tracker.MAX_SPANS", 20)
    model = net()
    with MemoryTracker(model) as tracker:
        for _ in range(30):
            model(torch.ones(2, 8)).sum().backward()
            spans = tracker._running._spans
            assert len(spans._numbers) == len(spans._names) <= 20
        gradients = [each for each in tracker.now().top if each.category is Category.GRADIENTS]
    assert {each.module for each in gradients} == {"0", "2"}


def test_a_model_that_is_gone_is_not_kept_alive():
    with MemoryTracker() as tracker:
        model = net()
        model(torch.ones(2, 8)).sum().backward()
        del model
        gc.collect()
        assert len(tracker._running.roots) == 0
    assert tracker.live_bytes() == 0


# ------------------------------------------------------------------ capacity


def test_out_of_memory_says_what_is_there_and_who_asked():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.Linear(8, 8, bias=False)
            self.large = nn.Linear(8, 100_000, bias=False)

        def forward(self, x):
            return self.large(self.small(x))

    model = Wide()
    with MemoryTracker(model, allocators={"cpu": lambda: ExactAllocator(4 * MIB)}) as tracker:
        with pytest.raises(torch.OutOfMemoryError) as error:
            model(torch.ones(8, 8))
        assert tracker.live_bytes() <= 4 * MIB
    message = str(error.value)
    assert message.startswith(
        "cpu out of memory. Tried to allocate 3.05 MiB for float32[8, 100000] in large (forward). "
        "The device has a total capacity of 4.0 MiB, of which 970.25 KiB is free; 3.05 MiB is allocated"
    )
    assert "In use: weights 3.05 MiB, activations 256 B, inputs 256 B." in message
    assert "3.05 MiB  float32[100000, 8] from before in large (setup)" in message


def test_the_process_survives_and_goes_on_after_out_of_memory():
    with MemoryTracker(allocators={"cpu": lambda: ExactAllocator(1000)}) as tracker:
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                torch.zeros(1000)
            x = torch.zeros(200)
            assert tracker.live_bytes() == 800
            del x


def test_out_of_memory_of_a_workspace():
    tracker = MemoryTracker(allocators={"cpu": lambda: ExactAllocator(100)})
    tracker.reserve(60, torch.device("cpu"), "scratch")
    assert tracker.now().of(Category.WORKSPACE) == tracker.workspace_bytes() == 60
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 60 B for scratch"):
        tracker.reserve(60, torch.device("cpu"), "scratch")


def test_blocks_of_the_caching_allocator_are_what_counts():
    with MemoryTracker(allocators={"cpu": CachingAllocator}) as tracker:
        x = torch.zeros(1)
        assert (tracker.live_bytes(), tracker.reserved_bytes()) == (512, 2 * MIB)
        y = torch.zeros(3 * MIB // 4)
        assert (tracker.live_bytes(), tracker.reserved_bytes()) == (512 + 3 * MIB, 22 * MIB)
        assert tracker.timeline().totals()[-1] == tracker.peak_bytes() == tracker.live_bytes()
        del x, y
        assert (tracker.live_bytes(), tracker.reserved_bytes()) == (0, 22 * MIB)
        tracker.empty_cache()
        assert (tracker.reserved_bytes(), tracker.peak_reserved_bytes()) == (0, 22 * MIB)


def test_an_error_of_the_allocator_does_not_leave_the_tracker_deaf():
    class Failing(ExactAllocator):
        def allocate(self, nbytes):
            if nbytes > 100:
                raise RuntimeError("broken")
            return super().allocate(nbytes)

    with MemoryTracker(allocators={"cpu": Failing}) as tracker:
        x = torch.zeros(10)
        with pytest.raises(RuntimeError, match="broken"):
            torch.zeros(1000)
        del x
        assert tracker.live_bytes() == 0
