"""The executing device: a GPU's manners with the CPU's numbers."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memscale.memory.record import Category
from memscale.testing import ExecutingDevice, ExecutingTensor, executing

MIB = 2**20


@pytest.fixture
def gpu():
    with executing("1GiB") as gpu:
        yield gpu


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return functional.dropout(self.second(self.first(x).relu()), 0.5, self.training) * self.scale


# ------------------------------------------------------------------ random numbers


def test_the_device_has_random_numbers_of_its_own(gpu):
    host = torch.get_rng_state()
    first = torch.rand(4, device=gpu.device)
    assert torch.equal(torch.get_rng_state(), host), "the host's generator has not moved"
    device = torch.cuda.get_rng_state()
    torch.rand(4)
    assert torch.equal(torch.cuda.get_rng_state(), device), "nor the device's by the host's numbers"
    torch.cuda.set_rng_state(device)
    second = torch.rand(4, device=gpu.device)
    torch.cuda.set_rng_state(device)
    assert torch.equal(torch.rand(4, device=gpu.device).cpu(), second.cpu())
    assert not torch.equal(first.cpu(), second.cpu())


def test_one_seed_for_all_as_torch_does_it(gpu):
    torch.manual_seed(5)
    on_device = torch.rand(4, device=gpu.device).cpu()
    torch.manual_seed(5)
    assert torch.equal(torch.rand(4), on_device)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_block_starts_from_its_seed(seed):
    drawn = []
    for _ in range(2):
        with executing("1GiB", seed=seed) as gpu:
            drawn.append(torch.rand(4, device=gpu.device).tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("preserve", [False, True])
def test_a_dropout_mask_is_the_same_on_recompute_only_if_the_devices_state_is_kept(gpu, reentrant, preserve):
    """What a real GPU would show, and the CPU's one generator could hide."""
    masks = []

    def region(x):
        dropped = functional.dropout(x, 0.5)
        masks.append((dropped != 0).cpu())
        return dropped.square()

    x = torch.ones(256, device=gpu.device, requires_grad=True)
    out = checkpoint(region, x, use_reentrant=reentrant, preserve_rng_state=preserve)
    torch.rand(3, device=gpu.device)  # something else draws in between
    out.sum().backward()
    assert torch.equal(*masks) == preserve


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_draws_the_same_mask_in_backward(gpu, dtype, causal):
    """By a number that is linear in the values: forward and backward must see the same dropped weights."""
    torch.manual_seed(0)
    query, key = (torch.randn(1, 2, 16, 8, dtype=dtype, device=gpu.device) for _ in range(2))
    value = torch.randn(1, 2, 16, 8, dtype=dtype, device=gpu.device, requires_grad=True)
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5, is_causal=causal)
    torch.rand(3, device=gpu.device)
    (gradient,) = torch.autograd.grad(out.float().sum(), value)
    assert (gradient * value).float().sum().item() == pytest.approx(
        out.float().sum().item(), rel=0.02, abs=0.02
    )


# ------------------------------------------------------------------ two devices


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + b,
        lambda a, b: b + a,
        lambda a, b: a.add_(b),
        lambda a, b: a @ b,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: functional.linear(a, b),
        lambda a, b: functional.mse_loss(a, b),
        lambda a, b: torch._foreach_add([a], [b]),
        lambda a, b: nn.Linear(4, 4)(a),
    ],
)
def test_operands_on_two_devices_are_refused(gpu, mix):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        mix(torch.ones(4, 4, device=gpu.device), torch.ones(4, 4))


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a + torch.tensor(2.0),  # a number on the host may be used everywhere
        lambda a, b: a * 2,
        lambda a, b: a.copy_(b),
        lambda a, b: b.copy_(a),
        lambda a, b: a[torch.tensor([0, 1])],
        lambda a, b: a.index_put_((torch.tensor([0]),), torch.ones(4, device=a.device)),
    ],
)
def test_what_cuda_allows_across_devices_is_allowed(gpu, mix):
    mix(torch.ones(4, 4, device=gpu.device), torch.zeros(4, 4))


def test_copies_between_devices_hold_the_values(gpu):
    host = torch.randn(4, 4)
    device = host.to(gpu.device)
    assert device.device == gpu.device
    assert torch.equal(device.cpu(), host)
    host.zero_()
    assert device.abs().sum().item() > 0, "a copy, not a view"
    device.zero_()
    assert torch.equal(device.to("cpu", torch.float64), torch.zeros(4, 4, dtype=torch.float64))
    back = torch.empty(4, 4)
    back.copy_(device.fill_(3))
    assert back.unique().tolist() == [3.0]


def test_a_tensor_on_the_device_is_no_array(gpu):
    x = torch.arange(3, device=gpu.device)
    with pytest.raises(TypeError, match=r"can't convert vgpu:0 device type tensor to numpy.*Tensor\.cpu\(\)"):
        x.numpy()
    assert x.tolist() == [0, 1, 2]
    assert x[1].item() == 1
    assert bool(x[1])
    assert "device='vgpu:0'" in repr(x)
    assert not x.is_cpu


# ------------------------------------------------------------------ models


def test_moving_a_model_keeps_identity_ties_and_values(gpu):
    model = Net()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    assert model.to(gpu.device) is model
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert torch.equal(parameter.detach().cpu(), before[name][1])
    assert model.second.weight is model.first.weight
    assert model.scale.device == gpu.device
    model.to("cpu")
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    gc.collect()
    assert gpu.tracker.live_bytes(gpu.device) == 0


def test_an_optimizer_made_before_the_move_goes_on(gpu):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(gpu.device)
    before = model.first.bias.detach().cpu().clone()
    model(torch.ones(2, 8, device=gpu.device)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.bias.detach().cpu(), before)


def test_hooks_on_gradients_stay_when_a_model_is_moved(gpu):
    """As on CUDA, where the data of a parameter alone is exchanged."""
    model, heard = Net(), []
    weight = model.first.weight
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: heard.append("stored"))
    weight.register_hook(lambda gradient: heard.append("made"))
    for place in (gpu.device, gpu.device, "cpu", gpu.device):  # the second is where it is already
        model.to(place)
        model(torch.ones(2, 8, device=place)).sum().backward()
    assert heard == ["made", "stored"] * 4
    handle.remove()
    model(torch.ones(2, 8, device=gpu.device)).sum().backward()
    assert heard[8:] == ["made"]


@pytest.mark.parametrize(
    "convert", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)]
)
def test_converting_a_model_on_the_device(gpu, convert):
    model = Net().to(gpu.device)
    before = gpu.tracker.live_bytes(gpu.device)
    convert(model)
    gc.collect()
    assert {p.device for p in model.parameters()} == {gpu.device}
    assert gpu.tracker.live_bytes(gpu.device) <= 2 * before
    model(torch.ones(2, 8, device=gpu.device, dtype=model.first.weight.dtype)).sum().backward()


def test_a_deep_copy_is_another_model(gpu):
    model = Net().to(gpu.device)
    twin = copy.deepcopy(model)
    assert twin.second.weight is twin.first.weight is not model.first.weight
    with torch.no_grad():
        twin.first.weight.zero_()
    assert model.first.weight.abs().sum().item() > 0
    assert isinstance(twin.first.weight, nn.Parameter)


@pytest.mark.parametrize("save", ["pickle", "torch.save"])
def test_a_model_survives_pickling(gpu, save):
    model = Net().to(gpu.device)
    if save == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert twin.first.weight.device == gpu.device
    assert isinstance(twin.first.weight, nn.Parameter)
    assert twin.second.weight is twin.first.weight
    assert torch.equal(twin.first.weight.detach().cpu(), model.first.weight.detach().cpu())


@pytest.mark.parametrize(
    ("location", "device"), [(None, "vgpu"), ("cpu", "cpu"), (torch.device("cpu"), "cpu")]
)
def test_weights_are_saved_and_loaded(gpu, location, device):
    model = Net().to(gpu.device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=location)
    assert {value.device.type for value in state.values()} == {device}
    for name, value in model.state_dict().items():
        assert torch.equal(state[name].cpu(), value.cpu())


def test_a_state_dict_goes_from_device_to_host_and_back(gpu):
    source, target = Net().to(gpu.device), Net()
    target.load_state_dict(source.state_dict())
    assert target.first.weight.device.type == "cpu"
    assert torch.equal(target.first.weight, source.first.weight.detach().cpu())
    other = Net().to(gpu.device)
    other.load_state_dict(target.state_dict())
    assert other.first.weight.device == gpu.device
    assert torch.equal(other.first.weight.detach().cpu(), target.first.weight)


def test_exchanging_the_data_of_a_parameter(gpu):
    parameter = nn.Parameter(torch.zeros(MIB, device=gpu.device))
    parameter.data = torch.ones(4, device=gpu.device)
    assert parameter.shape == (4,)
    assert parameter.sum().item() == 4
    assert gpu.tracker.live_bytes(gpu.device) < MIB


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizers_step_as_on_the_cpu(gpu, optimizer, options):
    def train(device):
        torch.manual_seed(0)
        model = nn.Linear(8, 8).to(device)
        steps = optimizer(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            model(torch.ones(2, 8, device=device)).square().sum().backward()
            steps.step()
            steps.zero_grad()
        return model.weight.detach().cpu()

    torch.testing.assert_close(train(gpu.device), train("cpu"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [0.999, [0.999, 0.1]])
def test_foreach_multiplies_sixteen_bits_by_a_number_in_full(gpu, factor):
    tensors = [torch.linspace(1, 2, 100, device=gpu.device).bfloat16() for _ in range(2)]
    expected = [each * (factor if isinstance(factor, float) else factor[i]) for i, each in enumerate(tensors)]
    torch._foreach_mul_(tensors, factor)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(tensors, expected, strict=True))


def test_views_share_and_operations_in_place_write_through(gpu):
    x = torch.zeros(4, 4, device=gpu.device)
    row = x[1]
    row.add_(2)
    x.view(-1)[0] = 5
    assert x.tolist() == [[5, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert gpu.tracker.live_bytes(gpu.device) == 512
    x.t_()
    assert x[0].tolist() == [5, 2, 0, 0]
    x.resize_(2, 2)
    assert x.shape == (2, 2)


def test_data_dependent_shapes_run(gpu):
    x = torch.tensor([1.0, -1.0, 2.0], device=gpu.device)
    assert x[x > 0].tolist() == [1.0, 2.0]
    assert x.nonzero().shape == (3, 1)
    assert x.unique().device == gpu.device


def test_what_is_on_the_host_is_counted_there(gpu):
    host = torch.zeros(MIB)
    assert gpu.host_peak_bytes == host.nbytes
    assert gpu.peak_bytes == 0
    device = host.to(gpu.device)
    assert gpu.tracker.live_bytes(gpu.device) == device.nbytes
    assert gpu.tracker.now("cpu").total == host.nbytes


def test_categories_on_the_device(gpu):
    model = nn.Linear(256, 256, bias=False).to(gpu.device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(512, 256, device=gpu.device)
    model(x).square().sum().backward()
    optimizer.step()
    now = gpu.tracker.now(gpu.device)
    weight = 256 * 256 * 4
    assert now.of(Category.WEIGHTS) == now.of(Category.GRADIENTS) == weight
    assert now.of(Category.OPTIMIZER) == 2 * weight
    assert now.of(Category.INPUTS) == x.nbytes


def test_after_the_block_its_tensors_can_still_be_read():
    with executing("1GiB") as gpu:
        x = torch.ones(3, device=gpu.device)
    assert isinstance(gpu, ExecutingDevice)
    assert isinstance(x, ExecutingTensor)
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert x.cpu().sum().item() == 3
