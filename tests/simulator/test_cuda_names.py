"""A script that says "cuda" runs on both virtual devices, and gets answers from them."""

import gc

import pytest
import torch
from torch import nn

from memscale.simulator import simulate
from memscale.testing import executing

MIB, GIB = 2**20, 2**30


@pytest.fixture(params=["simulated", "executing"])
def device(request):
    with (simulate if request.param == "simulated" else executing)("24GiB") as device:
        yield device


@pytest.mark.matrix(13)
@pytest.mark.parametrize(
    "name", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), "vgpu", "vgpu:0"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda name: torch.zeros(3, device=name),
        lambda name: torch.tensor([1.0, 2.0], device=name),
        lambda name: torch.arange(3, device=name),
        lambda name: torch.randn(3, device=name),
        lambda name: torch.randint(5, (3,), device=name),
        lambda name: torch.full((3,), 2.0, device=name),
        lambda name: torch.empty(3, device=name),
        lambda name: torch.zeros(3).to(name),
        lambda name: torch.zeros(3).to(device=name, dtype=torch.float64),
        lambda name: torch.zeros(3).to(name, torch.float16, non_blocking=True),
        lambda name: torch.zeros_like(torch.ones(3), device=name),
        lambda name: torch.ones(3).new_zeros(2, device=name),
        lambda name: nn.Linear(3, 3).to(name).weight,
        lambda name: nn.Linear(3, 3, device=name).weight,
        lambda name: nn.Parameter(torch.ones(3, device=name)),
    ],
)
def test_every_way_to_name_the_device(device, name, make):
    tensor = make(name)
    assert tensor.device == device.device
    assert not tensor.is_cpu


def test_methods_and_defaults(device):
    assert torch.ones(3).cuda().device == device.device
    assert nn.Linear(3, 3).cuda().weight.device == device.device
    with torch.device("cuda"):
        assert torch.ones(3).device == device.device
        assert nn.Linear(3, 3).bias.device == device.device
    torch.set_default_device("cuda")
    try:
        assert torch.ones(3).device == device.device
    finally:
        torch.set_default_device(None)
    assert torch.ones(3).device.type == "cpu"
    assert torch.ones(3, device="cuda").cpu().device.type == "cpu"
    assert torch.ones(3, device="cuda").to("cpu").device.type == "cpu"


def test_questions(device):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name() == device.device_name
    assert torch.cuda.get_device_capability() == (8, 6)
    assert torch.cuda.is_bf16_supported()
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, properties.total_memory) == (device.device_name, 24 * GIB)
    assert (properties.major, properties.minor) == (8, 6)
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "vgpu"
    assert torch.get_device_module(device.device).device_count() == 1


def test_memory_questions(device):
    gc.collect()
    assert torch.cuda.memory_allocated() == 0
    x = torch.zeros(MIB, device="cuda")
    y = torch.zeros(MIB, device="cuda")
    del y
    assert torch.cuda.memory_allocated() == torch.accelerator.memory_allocated() == x.nbytes
    assert torch.cuda.max_memory_allocated() == 2 * x.nbytes
    assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 20 * MIB
    assert torch.cuda.mem_get_info() == (24 * GIB - 20 * MIB, 24 * GIB)
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.current"] == x.nbytes
    assert statistics["reserved_bytes.all.peak"] == 20 * MIB
    assert "allocated_bytes.all.peak: 8388608" in torch.cuda.memory_summary()
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == x.nbytes
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def test_streams_and_events(device):
    side, done = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        x = torch.ones(3, device="cuda")
        done.record(side)
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(done)
    x.record_stream(side)
    done.synchronize()
    side.synchronize()
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    assert done.query()
    assert done.elapsed_time(side.record_event()) == 0.0
    assert isinstance(side, torch.cuda.Stream)
    assert isinstance(torch.cuda.default_stream(), torch.Stream)


def test_random_state_and_generators(device):
    generator = torch.Generator(device="cuda").manual_seed(3)
    for draw in (
        lambda: torch.rand(3, generator=generator, device="cuda"),
        lambda: torch.randn(3, generator=generator, device="cuda"),
        lambda: torch.randint(5, (3,), generator=generator, device="cuda"),
        lambda: torch.empty(3, device="cuda").uniform_(generator=generator),
    ):
        assert draw().device == device.device
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    torch.cuda.manual_seed_all(3)
    with torch.random.fork_rng(devices=[0], device_type="cuda"):
        torch.rand(3, device="cuda")


def test_a_generator_repeats_on_the_executing_device():
    with executing("1GiB"):
        drawn = [
            torch.rand(4, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").tolist()
            for seed in (3, 3, 4)
        ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_training_script_as_people_write_it(device):
    """Nothing in it knows of a virtual device."""
    device_name = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    scaler = torch.cuda.amp.GradScaler()
    data = torch.utils.data.TensorDataset(torch.randn(8, 16), torch.zeros(8, dtype=torch.int64))
    for epoch in range(2):
        model.train()
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            x, y = x.to(device_name, non_blocking=True), y.cuda()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(-1) == y).sum().item()
        assert isinstance(right, int)
        assert torch.cuda.max_memory_allocated() > 0
        assert epoch < 2
    assert {p.device for p in model.parameters()} == {device.device}


def test_other_devices_keep_their_meaning(device):
    assert torch.ones(3, device="cpu").device.type == "cpu"
    assert torch.ones(3, device="meta").device.type == "meta"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.get_autocast_dtype("cpu") is torch.bfloat16
