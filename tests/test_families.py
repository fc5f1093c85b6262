"""The model zoo of the suite is itself sound: it builds, trains and repeats."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.families import FAMILIES, Family


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.transformers:
        pytest.importorskip("transformers")
    return request.param


@pytest.mark.matrix(5)
def test_one_step_has_a_finite_loss_and_gradients(family):
    model = family.build()
    loss = family.loss(model, family.batch())
    loss.backward()

    assert loss.ndim == 0
    assert torch.isfinite(loss)
    assert model.training
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_two_builds_and_two_batches_are_equal(family):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = family.build().state_dict(), family.build().state_dict()
    one, two = family.batch(), family.batch()

    assert torch.equal(torch.get_rng_state(), before), "building a family moved the global RNG"
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    keys = one.keys() if isinstance(one, dict) else range(len(one))
    assert all(torch.equal(one[key], two[key]) for key in keys)


@pytest.mark.matrix(5)
def test_two_runs_from_one_seed_are_equal(family):
    model, batch = family.build(), family.batch()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        losses.append(family.loss(model, batch).detach())

    assert torch.equal(*losses)
    changed = any(not torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert changed == family.updates_buffers


def test_dropout_is_on_where_the_family_says_so(family):
    model, batch = family.build(), family.batch()
    torch.manual_seed(3)
    first = family.loss(model, batch)
    drawn = family.loss(model, batch)

    assert torch.equal(first, drawn) != family.dropout


def test_batch_takes_size_length_and_device(family):
    batch = family.batch(device="meta", batch_size=3)
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)

    assert all(tensor.shape[0] == 3 and tensor.device.type == "meta" for tensor in tensors)
    model = family.build()
    length = family.length if family.name == "vit" else 2 * family.length  # ViT: one image size
    assert torch.isfinite(family.loss(model, family.batch(batch_size=1 + len(tensors), length=length)))


def test_importing_the_families_does_not_import_transformers():
    code = "import support.families, sys; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
