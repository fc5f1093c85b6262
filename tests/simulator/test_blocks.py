"""The blocks of both virtual devices: what they take and refuse, what they leave behind, how they fail."""

import gc
import sys
import types

import pytest
import torch
from torch import nn
from torch.autograd import graph
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memscale.errors import ConfigError, ConfigTypeError, HardwareError, SimulationError
from memscale.hardware import find_gpu
from memscale.memory.record import Category
from memscale.memory.tracker import MemoryTracker
from memscale.simulator import simulate
from memscale.testing import executing

MIB, GIB = 2**20, 2**30
BLOCKS = pytest.mark.parametrize("block", [simulate, executing])

# ------------------------------------------------------------------ what they take


@pytest.mark.parametrize(
    ("on", "name", "capacity"),
    [
        ("RTX 3090", "NVIDIA GeForce RTX 3090", 24 * GIB),
        ("3090", "NVIDIA GeForce RTX 3090", 24 * GIB),
        ("24GiB", "virtual GPU of 24GiB", 24 * GIB),
        ("24 GB", "virtual GPU of 24 GB", 24 * 10**9),
        (512 * MIB, f"virtual GPU of {512 * MIB}", 512 * MIB),
        (find_gpu("A100-80GB"), find_gpu("A100-80GB").name, 80 * GIB),
    ],
)
def test_a_device_is_a_name_a_size_or_a_specification(on, name, capacity):
    with simulate(on) as device:
        assert (device.device_name, device.capacity) == (name, capacity)
        assert torch.cuda.get_device_properties(0).total_memory == capacity


@pytest.mark.parametrize(
    ("on", "error", "message"),
    [
        (0, ConfigError, "must be more than zero bytes"),
        ("0GiB", ConfigError, "must be more than zero bytes"),
        (-1, ConfigError, "must be more than zero bytes"),
        ("-1GiB", ConfigError, "must be more than zero bytes"),
        (True, ConfigTypeError, "is a bool, which is not a size"),
        (None, ConfigTypeError, "is a NoneType, which is not a size"),
        (24.0, ConfigTypeError, "is a float, which is not a size"),
        (["24GiB"], ConfigTypeError, "is a list, which is not a size"),
        (2**63, ConfigError, "past any memory"),
        ("RTX 9999", HardwareError, "No GPU is known as 'RTX 9999'"),
        ("rtx 309", HardwareError, "The nearest names are"),
        ("", HardwareError, "No GPU is known"),
        ("24 parsecs", HardwareError, "No GPU is known"),
        ("24QiB", ConfigError, "unknown unit"),
    ],
)
def test_a_bad_device_is_refused_with_what_is_wrong(on, error, message):
    with pytest.raises(error, match=message), simulate(on):
        pass


@pytest.mark.parametrize("device", ["cuda", "gpu", "vgpu:1", "", None, 0, torch.device("meta")])
def test_a_bad_kind_of_device_is_refused(device):
    with (
        pytest.raises(SimulationError, match="allowed are 'vgpu' and 'cpu'"),
        simulate("1GiB", device=device),
    ):
        pass


@pytest.mark.parametrize(
    ("capacity", "error"),
    [
        (0, ConfigError),
        (-5, ConfigError),
        ("RTX 3090", ConfigError),
        (True, ConfigTypeError),
        (1.5, ConfigTypeError),
    ],
)
def test_a_bad_capacity_of_the_executing_device_is_refused(capacity, error):
    with pytest.raises(error, match="executing"), executing(capacity):
        pass


@pytest.mark.parametrize("inner", ["vgpu", "cpu"])
@pytest.mark.parametrize("outer", ["vgpu", "cpu"])
def test_a_simulation_inside_a_simulation_is_refused(outer, inner):
    with simulate("1GiB", device=outer) as device:
        with pytest.raises(SimulationError, match="running already"), simulate("1GiB", device=inner):
            pass
        assert torch.ones(2, device=device.device).shape == (2,), "the outer one goes on"


def test_an_executing_device_inside_another_block_is_refused():
    for block in (simulate, executing):
        with block("1GiB"), pytest.raises(SimulationError, match="active already"), executing("1GiB"):
            pass


def test_a_simulation_can_rehearse_what_an_executing_device_will_do():
    with executing("1GiB") as gpu:
        model = nn.Linear(256, 256).to(gpu.device)
        x = torch.ones(4, 256, device=gpu.device)
        live = gpu.tracker.live_bytes(gpu.device)
        with simulate("1GiB") as rehearsal:
            rehearsal.copy_of(model)(rehearsal.batch_of(x)).sum().backward()
        gc.collect()
        assert rehearsal.peak_bytes > live
        assert gpu.tracker.live_bytes(gpu.device) == live, "what is simulated takes no memory"
        model(x).sum().backward()
        assert gpu.peak_bytes == rehearsal.peak_bytes


@BLOCKS
def test_a_tracker_around_a_block_sees_only_real_memory(block):
    with MemoryTracker() as tracker, block("1GiB") as device:
        model = nn.Linear(64, 64).to(device.device)
        model(torch.ones(4, 64, device=device.device)).sum().backward()
        assert device.tracker.live_bytes(device.device) > 64 * 64 * 4
    if block is simulate:
        assert tracker.live_bytes("vgpu") == 0


# ------------------------------------------------------------------ what they leave behind


def everything_global():
    """Every attribute of every place that is patched, and all of torch's global switches."""
    places = [
        torch,
        torch.cuda,
        torch.accelerator,
        torch.autograd,
        graph,
        torch.utils,
        nn.Module,
        torch.Tensor,
        torch.UntypedStorage,
        torch.amp.autocast_mode.autocast,
        torch.amp.grad_scaler.GradScaler,
        *filter(None, [sys.modules.get("transformers.masking_utils")]),
    ]
    attributes = {
        (getattr(place, "__name__", ""), name): value
        for place in places
        for name, value in vars(place).items()
        if not isinstance(value, types.ModuleType)  # modules that are imported late
    }
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    switches = {
        "foreach": [*torch_optimizer._foreach_supported_types, *_foreach_utils._foreach_supported_types],
        "attention": has_kernel("aten::scaled_dot_product_attention", "AutogradPrivateUse1"),
        "autocast": has_kernel("aten::mm", "AutocastPrivateUse1"),
        "silu": has_kernel("aten::silu_backward", "PrivateUse1"),
        "empty": has_kernel("aten::empty.memory_format", "PrivateUse1"),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "threads": torch.autograd.is_multithreading_enabled(),
        "modes": _get_current_dispatch_mode_stack() + _get_current_function_mode_stack(),
        "hooks": [
            dict(hooks)
            for hooks in (
                module_hooks._global_forward_pre_hooks,
                module_hooks._global_forward_hooks,
                module_hooks._global_forward_hooks_with_kwargs,
                torch_optimizer._global_optimizer_pre_hooks,
                torch_optimizer._global_optimizer_post_hooks,
            )
        ],
        "cuda": torch.cuda.is_available(),
        "accelerator": torch.accelerator.is_available(),
        "safe to load": set(torch.serialization.get_safe_globals()),
    }
    return attributes, switches


def changed(before, after):
    return [name for name, value in before.items() if name not in after or after[name] is not value]


@pytest.fixture
def untouched():
    with simulate("1GiB"), pytest.raises(SimulationError), executing("1GiB"):
        pass  # torch keeps the name of the device from its first use on
    before, switches = everything_global()
    yield
    after, switches_after = everything_global()
    assert changed(before, after) == changed(after, before) == []
    assert switches_after == switches
    assert not torch.accelerator.is_available()


def step(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).to(device.device)
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.ones(2, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()


class Stop(Exception):
    pass


@pytest.mark.usefixtures("untouched")
@BLOCKS
@pytest.mark.parametrize("how", ["well", "an error", "out of memory", "refused"])
def test_nothing_global_stays_patched(block, how):
    if how == "refused":
        with pytest.raises(ConfigError), block(0):
            pass
        return
    with pytest.raises((Stop, torch.OutOfMemoryError)), block("64MiB") as device:  # noqa: PT012
        torch.random.manual_seed(torch.initial_seed())
        step(device)
        assert torch.accelerator.is_available()
        if how == "out of memory":
            torch.empty(GIB, device=device.device)
        raise Stop


@pytest.mark.usefixtures("untouched")
def test_nothing_global_stays_patched_by_a_simulated_host():
    with simulate("1GiB", device="cpu"):
        nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
        assert not torch.cuda.is_available()


@BLOCKS
def test_outside_the_block_the_device_is_not_there(block):
    with block("1GiB"):
        pass
    assert not torch.vgpu.is_available()
    assert torch.vgpu.device_count() == 0
    assert torch.vgpu.memory_allocated() == torch.vgpu.max_memory_reserved() == 0
    for question in (torch.vgpu.get_device_name, torch.vgpu.mem_get_info, torch.vgpu.get_rng_state):
        with pytest.raises(SimulationError, match="only there inside"):
            question()
    torch.manual_seed(0)  # seeds every device that is there


def test_a_simulation_draws_no_random_numbers_of_the_host():
    before = torch.get_rng_state()
    with simulate("1GiB") as device:
        step(device)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_figures_are_there_after_the_block():
    with simulate("1GiB") as device:
        x = torch.ones(MIB, device=device.device)
        assert device.tracker.live_bytes(device.device) == 4 * MIB
        del x
    assert device.peak_bytes == 4 * MIB
    assert device.peak_reserved_bytes == 20 * MIB
    assert device.host_peak_bytes == 0
    assert device.tracker.at_peak(device.device).total == 4 * MIB


def test_a_simulation_forgets_its_tensors():
    with simulate("1GiB") as device:
        model = nn.Linear(8, 8, device=device.device)
        model(torch.ones(2, 8, device=device.device)).sum().backward()
    del model
    gc.collect()
    assert device.tracker.now(device.device).of(Category.WEIGHTS) == 0


# ------------------------------------------------------------------ real weights


@pytest.mark.parametrize("convert", [lambda m, d: m.to(d), lambda m, d: m.cuda(), lambda m, d: m.half()])
def test_real_weights_are_not_turned_into_simulated_ones(convert):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    with simulate("1GiB") as device:
        with pytest.raises(SimulationError, match=r"holds real data \(0.weight on cpu\).*copy_of"):
            convert(model, device.device)
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])


def test_saving_what_has_no_data_is_refused(tmp_path):
    with simulate("1GiB"):
        model = nn.Linear(2, 2)
        for thing in (model, model.state_dict(), {"step": 3, "weights": [model.weight]}):
            with pytest.raises(SimulationError, match="nothing to save"):
                torch.save(thing, tmp_path / "model.pt")
        torch.save({"step": 3}, tmp_path / "numbers.pt")
    assert torch.load(tmp_path / "numbers.pt") == {"step": 3}


# ------------------------------------------------------------------ failing


def deep(device, width=1024, depth=4):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).to(device)


@BLOCKS
def test_out_of_memory_in_forward(block):
    with block("66MiB") as device:
        model = deep(device.device)
        with pytest.raises(torch.OutOfMemoryError) as error:
            model(torch.ones(6 * 1024, 1024, device=device.device))
        message = str(error.value)
        assert message.startswith(
            "vgpu:0 out of memory. Tried to allocate 24.0 MiB for float32[6144, 1024] in 0 (forward). "
            "The device has a total capacity of 66.0 MiB, of which 22.0 MiB is free;"
        )
        assert "In use: weights 16.0 MiB, inputs 24.0 MiB." in message
        assert "24.0 MiB  float32[6144, 1024] by aten.ones.default (setup)" in message
        del error  # its traceback holds the batch
        gc.collect()
        model(torch.ones(1, 1024, device=device.device)).sum().backward()


@BLOCKS
def test_out_of_memory_in_backward_leaves_the_gradients_as_they_were(block):
    with block("92MiB") as device:
        model = deep(device.device, depth=8)
        loss = model(torch.ones(512, 1024, device=device.device)).sum()
        with pytest.raises(torch.OutOfMemoryError, match=r"\(backward\)"):
            loss.backward()
        have = [parameter.grad is not None for parameter in model.parameters()]
        # The last layers' gradients were made, the first ones' were not.
        assert have == [False] * 6 + [True] * 2
        del loss
        model.zero_grad()
        gc.collect()
        assert device.tracker.now(device.device).of(Category.GRADIENTS) == 0
        model[0](torch.ones(1, 1024, device=device.device)).sum().backward()
        assert model[0].weight.grad is not None, "the device goes on"


@BLOCKS
def test_out_of_memory_in_the_optimizer(block):
    with block("80MiB") as device:
        model = deep(device.device)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 1024, device=device.device)).sum().backward()
        with pytest.raises(torch.OutOfMemoryError, match=r"for float32\[1024, 1024\] \(optimizer\)"):
            optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_out_of_memory_of_a_simulated_host():
    with simulate("10MiB", device="cpu") as host:
        torch.ones(MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"cpu out of memory\. Tried to allocate 12\.0 MiB"):
            torch.ones(3 * MIB)
    assert host.peak_bytes == 4 * MIB


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        raise ValueError("mine")


def fail(*args):
    raise ValueError("mine")


def with_hook(x):
    x.register_hook(fail)
    return x


def with_unpack(x):
    with graph.saved_tensors_hooks(lambda tensor: tensor, fail):
        return x.exp()


def with_module_hook(x):
    layer = nn.Identity()
    layer.register_full_backward_hook(fail)
    return layer(x)


def with_checkpoint(x):
    calls = []

    def once(value):
        calls.append(value)
        if len(calls) > 1:
            fail()
        return value.exp()

    return torch.utils.checkpoint.checkpoint(once, x, use_reentrant=False)


@BLOCKS
@pytest.mark.parametrize("place", [Failing.apply, with_hook, with_unpack, with_module_hook, with_checkpoint])
def test_an_error_of_the_user_in_backward_is_raised_there_and_nowhere_else(block, place):
    """See Note [Errors in backward] in guard.py: the process would end."""
    with block("1GiB") as device:
        first = nn.Linear(8, 8).to(device.device)
        x = torch.ones(2, 8, device=device.device)
        with pytest.raises(ValueError, match="mine"):
            place(first(x)).sum().backward()
        assert first.weight.grad is None
        with pytest.raises(ValueError, match="mine"):
            torch.autograd.grad(place(first(x)).sum(), first.weight)
        first(x).sum().backward()
        assert first.weight.grad is not None


@BLOCKS
def test_an_interrupt_in_backward_is_raised(block):
    def interrupt(gradient):
        raise KeyboardInterrupt

    with block("1GiB") as device:
        x = torch.ones(2, 8, device=device.device, requires_grad=True)
        y = x * 2
        y.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            y.sum().backward()
