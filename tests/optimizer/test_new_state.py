"""What state a step is about to make: as the step makes it, for every class of torch.optim."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from memscale.optimizer.interceptor import ONE_BY_ONE, NewState
from memscale.simulator import simulate

OPTIONS = {
    optim.SGD: ({}, {"momentum": 0.9}),
    optim.Adam: ({}, {"amsgrad": True}, {"lr": torch.tensor(0.1)}),
    optim.AdamW: ({}, {"amsgrad": True, "foreach": True}, {"fused": True}),
    optim.RMSprop: ({}, {"momentum": 0.9}, {"centered": True}),
    optim.Adafactor: ({}, {"lr": 0.1}),
}
CASES = [(kind, options) for kind in ONE_BY_ONE for options in OPTIONS.get(kind, ({},))]
SHAPES = ((6, 4), (1, 9), (7,), (4, 3, 2, 2), (0, 3))


def sizes(tensors, known=()):
    return {
        name: (value.shape, value.stride(), value.dtype)
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and value.dim() and name not in known
    }


@pytest.mark.matrix(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_as_the_step_makes_it(kind, options, dtype):
    shapes = SHAPES[:2] if kind is optim.Muon else SHAPES
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    if kind not in (optim.Muon, optim.SparseAdam):
        parameters.append(
            nn.Parameter(torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last))
        )
    if kind is optim.Adafactor:
        parameters = [each for each in parameters if each.numel()]  # it takes their mean
    optimizer = kind(parameters, **options)
    for each in parameters:
        each.grad = torch.randn_like(each)
        if kind is optim.SparseAdam:
            each.grad = each.grad.to_sparse(1)
    before = [dict(optimizer.state.get(each, {})) for each in parameters]
    new = NewState(optimizer)
    expected = [new.of(optimizer.param_groups[0], each) for each in parameters]
    assert all(value.is_meta for each in expected for value in each.values())
    assert [dict(optimizer.state.get(each, {})) for each in parameters] == before
    optimizer.step()
    for each, known, layout in zip(parameters, before, expected, strict=True):
        assert sizes(layout) == sizes(optimizer.state[each], known)
        assert NewState(optimizer).of(optimizer.param_groups[0], each) == {}


def test_nothing_is_counted_in_a_simulation():
    with simulate("64MiB") as sim:
        weight = nn.Parameter(torch.ones(256, 256, device=sim.device))
        optimizer = optim.AdamW([weight], amsgrad=True)
        before = sim.tracker.live_bytes(sim.device)
        sim.tracker.reset_peak()
        layout = NewState(optimizer).of(optimizer.param_groups[0], weight)
        assert [value.nbytes for value in layout.values()] == [weight.nbytes] * 3
        assert sim.tracker.peak_bytes(sim.device) == before


def test_torch_does_not_wrap_the_step_of_the_class_it_asks():
    """Or the hooks of a subclass would run twice in a step."""
    step = vars(optim.Adadelta)["step"]
    hooked = hasattr(step, "hooked")
    derived = type(
        "Derived", (optim.Adadelta,), {"step": lambda self, closure=None: super(derived, self).step()}
    )
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = derived([weight])
    NewState(optimizer).of(optimizer.param_groups[0], weight)
    assert hasattr(vars(optim.Adadelta)["step"], "hooked") == hooked
