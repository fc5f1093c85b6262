"""A copy without data for the simulator: the same model in all but its numbers, and the original untouched."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from memscale.errors import SimulationError
from memscale.simulator import simulate
from support.families import FAMILIES


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.half = nn.Linear(4, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.view = nn.Parameter(self.frozen.weight.data[:2])
        self.turned = nn.Parameter(torch.zeros(4, 3).t())
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.kept = torch.ones(5)
        self.nested = {"list": [torch.ones(6), "text"], "number": 3}
        self.config = {"width": 4}


def test_names_shapes_dtypes_strides_flags_and_ties_are_kept():
    model = Model().eval()
    with simulate("1GiB") as device:
        twin = device.copy_of(model)
    assert type(twin) is Model
    assert not twin.training
    assert [name for name, _ in twin.named_modules()] == [name for name, _ in model.named_modules()]
    for mine, original in (
        (
            dict(twin.named_parameters(remove_duplicate=False)),
            dict(model.named_parameters(remove_duplicate=False)),
        ),
        (dict(twin.named_buffers()), dict(model.named_buffers())),
    ):
        assert mine.keys() == original.keys()
        for name, tensor in mine.items():
            assert isinstance(tensor, FakeTensor)
            assert tensor.device == device.device
            for quality in ("shape", "dtype", "requires_grad"):
                assert getattr(tensor, quality) == getattr(original[name], quality), (name, quality)
            assert tensor.stride() == original[name].stride()
            assert isinstance(tensor, nn.Parameter) == isinstance(original[name], nn.Parameter)
    assert twin.head.weight is twin.embedding.weight
    assert twin.view.untyped_storage()._cdata == twin.frozen.weight.untyped_storage()._cdata
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert twin.kept.device == twin.nested["list"][0].device == device.device
    assert (twin.nested["list"][1], twin.nested["number"], twin.config) == ("text", 3, {"width": 4})


def test_the_original_is_not_touched():
    model = Model()
    before = {name: (id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = {name: id(value) for name, value in vars(model).items()}
    with simulate("1GiB") as device:
        twin = device.copy_of(model)
    twin.requires_grad_(False)
    twin.config["width"] = 8
    assert {n: (id(v), v._version) for n, v in model.state_dict(keep_vars=True).items()} == before
    assert {name: id(value) for name, value in vars(model).items()} == attributes
    assert model.config == {"width": 4}
    assert model.head.weight.requires_grad


def test_hooks_come_along():
    called = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *args: called.append(args[0]))
    with simulate("1GiB") as device:
        twin = device.copy_of(model)
        twin(torch.ones(2, 4, device=device.device))
    assert called == [twin]


def test_a_copy_takes_the_memory_of_the_model():
    model = nn.Linear(1024, 1024, bias=False)
    with simulate("1GiB") as device:
        twin = device.copy_of(model)
        assert device.tracker.live_bytes(device.device) == model.weight.nbytes
        twin(torch.ones(1, 1024, device=device.device)).sum().backward()


def test_a_model_and_a_batch_made_inside_can_be_copied_too():
    with simulate("1GiB") as device:
        twin = device.copy_of(Model())
        assert twin.head.weight is twin.embedding.weight
        assert device.batch_of([torch.ones(2)])[0].device == device.device


@pytest.mark.matrix(5)
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES.values() if not f.data_dependent], ids=lambda f: f.name
)
def test_a_copy_of_a_real_model_needs_what_a_model_made_inside_needs(family):
    if family.transformers:
        pytest.importorskip("transformers")

    def step(device, model, batch):
        device.tracker.reset_peak()
        family.loss(model, batch).backward()
        return device.peak_bytes

    model = family.build()
    state = copy.deepcopy(model.state_dict())
    with simulate("1GiB") as device:
        copied = step(device, device.copy_of(model), device.batch_of(family.batch()))
    with simulate("1GiB") as device:
        made = step(device, family.build().to(device.device), family.batch(device.device))
    assert copied == made
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_batch_keeps_its_form():
    x = torch.ones(4, 3)
    batch = {"x": x, "same": x, "part": x[:2], "more": [torch.zeros(2, dtype=torch.int64), ("text", 3, None)]}
    with simulate("1GiB") as device:
        twin = device.batch_of(batch)
    assert twin["x"].shape == (4, 3)
    assert twin["x"].device == device.device
    assert twin["x"].untyped_storage()._cdata == twin["part"].untyped_storage()._cdata
    assert twin["more"][0].dtype is torch.int64
    assert twin["more"][1] == ("text", 3, None)
    assert batch["x"] is x


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(torch.eye(3).to_sparse(), "sparse_coo"), (torch.ones(3).as_subclass(Strange), "class Strange")],
)
def test_what_cannot_be_copied_is_refused(tensor, message):
    model = nn.Linear(2, 2)
    model.extra = tensor
    with simulate("1GiB") as device:
        with pytest.raises(SimulationError, match=message):
            device.batch_of(tensor)
        with pytest.raises(SimulationError, match=message):
            device.copy_of(model)
