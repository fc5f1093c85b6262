"""The simulator, the executing device and the CPU check one another, byte by byte and bit by bit.

What is expected of each family is in ``agreement.py``, reasons included.
"""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from memscale.memory.tracker import MemoryTracker
from memscale.simulator import simulate
from memscale.testing import executing
from support.agreement import EXCEPTIONS, agreement, table
from support.families import FAMILIES

STEPS = 3


def train(family, device):
    """Three steps as a user writes them; the losses."""
    torch.manual_seed(0)
    model = family.build().to(device).train()
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = family.batch(device)
    losses = []
    for _ in range(STEPS):
        loss = family.loss(model, batch)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request):
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.matrix(5)
def test_peaks_and_losses(family):
    expected = agreement(family.name)
    with executing("24GiB") as gpu:
        losses = train(family, gpu.device)
    with MemoryTracker() as tracker:
        cpu_losses = train(family, "cpu")
    host_peak = tracker.peak_bytes("cpu")

    if expected.losses == "equal":
        assert losses == cpu_losses
    elif expected.losses == "close":
        assert losses != cpu_losses, "equal now: no exception any more"
        assert losses == pytest.approx(cpu_losses, rel=1e-5)
    else:
        # Before 5.23 transformers draws on the host for a layer drop of 0, too.
        version = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2]))
        assert (losses != cpu_losses) == (version < (5, 23))

    if expected.device_bytes is None:
        with pytest.raises(DynamicOutputShapeException), simulate("24GiB") as simulation:
            train(family, simulation.device)
        return
    with simulate("24GiB") as simulation:
        train(family, simulation.device)
    with simulate("24GiB", device="cpu") as host:
        train(family, "cpu")
    assert simulation.peak_bytes - gpu.peak_bytes == expected.device_bytes
    if expected.host_bytes == "within 1%":
        assert host.peak_bytes == pytest.approx(host_peak, rel=0.01)
    else:
        assert host.peak_bytes - host_peak == expected.host_bytes
    assert host.peak_bytes == host.host_peak_bytes


def test_exceptions_have_reasons_and_are_of_families_that_exist():
    assert EXCEPTIONS.keys() <= FAMILIES.keys()
    assert all(each.reason for each in EXCEPTIONS.values())


def test_the_table_in_the_docs_is_this_one():
    page = Path(__file__).parents[2] / "docs" / "simulator.md"
    assert table() in page.read_text(encoding="utf-8"), "write it anew: python tests/simulator/agreement.py"
