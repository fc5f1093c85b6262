"""What training scripts use, on both virtual devices: the peaks are the same, and those of CUDA's own rules."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memscale.memory.record import Category
from memscale.simulator import simulate
from memscale.simulator.cuda import EFFICIENT_TAKES_GROUPS, choose_kernel
from memscale.simulator.device import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER
from memscale.testing import executing

MIB = 2**20
WIDTH, BATCH, DEPTH = 256, 1024, 4
ROW = BATCH * WIDTH * 4  # an activation: 1 MiB
WEIGHT = WIDTH * WIDTH * 4


class Layer(nn.Module):
    """Keeps its input and its inner activation for backward."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, recompute=None):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.recompute is None else checkpoint(layer, x, use_reentrant=self.recompute)
        return x.square().mean()


@pytest.fixture(params=["simulated", "executing"])
def device(request):
    block = simulate if request.param == "simulated" else executing
    gc.collect()
    with block("1GiB") as device:
        yield device


def train(device, *, model=None, optimizer=torch.optim.AdamW, context=contextlib.nullcontext, scaler=None):
    model = (model or Net()).to(device.device)
    steps = optimizer(model.parameters(), lr=0.1)
    x = torch.randn(BATCH, WIDTH, device=device.device, requires_grad=True)
    for _ in range(2):
        with context():
            loss = model(x)
        if scaler is None:
            loss.backward()
            steps.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(steps)
            scaler.update()
        steps.zero_grad()
        x.grad = None
    return model, steps


def activations(device):
    return max(dict(device.tracker.timeline(device.device).series)[Category.ACTIVATIONS])


# ------------------------------------------------------------------ attention


def qkv(dtype=torch.float32, heads=4, groups=4, length=64, keys=64, width=32, device="meta"):
    query = torch.empty(2, heads, length, width, dtype=dtype, device=device)
    key = torch.empty(2, groups, keys, width, dtype=dtype, device=device)
    return query, key, key.clone()


AMPERE, TURING = (8, 6), (7, 5)


@pytest.mark.parametrize(
    ("options", "mask", "causal", "capability", "kernel"),
    [
        ({}, False, False, AMPERE, "efficient"),
        ({}, True, False, AMPERE, "efficient"),
        ({"dtype": torch.float16}, False, False, AMPERE, "flash"),
        ({"dtype": torch.bfloat16}, False, True, AMPERE, "flash"),
        ({"dtype": torch.bfloat16}, True, False, AMPERE, "efficient"),  # flash takes no mask
        ({"dtype": torch.float16}, False, False, TURING, "efficient"),  # flash needs Ampere
        ({"dtype": torch.bfloat16}, False, False, TURING, "math"),
        ({"dtype": torch.float16, "keys": 32}, False, True, AMPERE, "efficient"),  # causal, not square
        ({"dtype": torch.float16, "keys": 32}, False, False, AMPERE, "flash"),
        ({"dtype": torch.float16, "width": 512}, False, False, AMPERE, "efficient"),
        ({"dtype": torch.float16, "groups": 2}, False, False, AMPERE, "flash"),
        ({"groups": 2}, False, False, AMPERE, "efficient" if EFFICIENT_TAKES_GROUPS else "math"),
        ({"width": 30}, False, False, AMPERE, "math"),  # rows that tensor cores can't read
        ({"width": 30}, False, False, TURING, "efficient"),
        ({"dtype": torch.float64}, False, False, AMPERE, "math"),
    ],
)
def test_the_kernel_that_cuda_takes(options, mask, causal, capability, kernel):
    query, key, value = qkv(**options)
    bias = torch.empty(64, key.size(2), device="meta") if mask else None
    assert choose_kernel(query, key, value, bias, causal, capability) == kernel


def test_three_dimensions_are_for_the_math_kernel():
    query, key, value = (each[0] for each in qkv())
    assert choose_kernel(query, key, value, None, False, AMPERE) == "math"


@pytest.mark.parametrize(
    ("backend", "name"),
    [(SDPBackend.MATH, "Softmax"), (SDPBackend.EFFICIENT_ATTENTION, "EfficientAttention")],
)
def test_a_kernel_that_is_switched_off_is_not_taken(device, backend, name):
    query, key, value = (each.requires_grad_() for each in qkv(device=device.device))
    with sdpa_kernel(backend):
        out = functional.scaled_dot_product_attention(query, key, value)
    names, nodes = set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes.extend(each for each, _ in node.next_functions if each is not None)
    assert any(name in each for each in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fused_attention_never_holds_the_scores(device, dtype):
    length = 1024
    query, key, value = (
        each.requires_grad_() for each in qkv(dtype=dtype, length=length, keys=length, device=device.device)
    )
    functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    scores = 2 * 4 * length * length * dtype.itemsize
    assert device.peak_bytes < scores


def test_attention_written_out_does_hold_the_scores(device):
    query, key, _ = (each.requires_grad_() for each in qkv(length=512, keys=512, device=device.device))
    (query @ key.mT).softmax(-1).sum().backward()
    assert device.peak_bytes > 2 * (2 * 4 * 512 * 512 * 4)


@pytest.mark.parametrize("mask", [None, "bool", "float", "padded"])
@pytest.mark.parametrize("groups", [4, 2])
def test_both_devices_agree_on_attention(mask, groups):
    length = 60 if mask == "padded" else 64

    def run(device):
        query, key, value = (
            each.normal_().requires_grad_()
            for each in qkv(groups=groups, length=length, keys=length, device=device.device)
        )
        bias = None
        if mask is not None:
            bias = torch.ones(length, length, device=device.device).tril()
            bias = bias.log() if mask == "float" else bias > 0
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=0.1, enable_gqa=groups != 4
        )
        out.sum().backward()
        return device.peak_bytes

    with simulate("1GiB") as one:
        simulated = run(one)
    with executing("1GiB") as other:
        assert run(other) == simulated


# ------------------------------------------------------------------ precision


def test_autocast_lowers_what_cuda_lowers(device):
    layer, norm = nn.Linear(8, 8).to(device.device), nn.LayerNorm(8).to(device.device)
    x = torch.randn(4, 8, device=device.device)
    with torch.autocast(device.device.type, torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
        assert (x @ x.T).dtype is torch.bfloat16
        assert functional.scaled_dot_product_attention(*[x.view(1, 2, 4, 4)] * 3).dtype is torch.bfloat16
        assert norm(layer(x)).dtype is torch.float32
        assert layer(x).softmax(-1).dtype is torch.float32
        assert functional.mse_loss(layer(x), layer(x)).dtype is torch.float32
        assert torch.cat([x, layer(x)]).dtype is torch.float32
        assert (layer(x) + layer(x)).dtype is torch.bfloat16
        with torch.autocast(device.device.type, enabled=False):
            assert layer(x).dtype is torch.float32
    assert layer(x).dtype is torch.float32


def test_autocast_casts_a_weight_once_and_drops_the_copy_at_the_end(device):
    layer = nn.Linear(1024, 1024, bias=False).to(device.device)
    x = torch.randn(4, 1024, device=device.device)

    def live():
        return device.tracker.live_bytes(device.device)

    before = live()
    with torch.autocast(device.device.type, torch.bfloat16):
        first = layer(x)
        once = live() - before
        second = layer(x)
        assert once >= 2 * MIB
        assert live() - before < once + MIB
    del first, second
    gc.collect()
    assert live() - before < once


@pytest.mark.parametrize("on_cpu", [True, False], ids=["cpu", "virtual"])
def test_autocast_caches_casts_with_their_history_also_under_no_grad(on_cpu, device):
    place = torch.device("cpu") if on_cpu else device.device
    weight = torch.ones(4, 4, device=place).requires_grad_()
    x = torch.ones(4, 4, device=place)
    with torch.autocast(place.type, torch.bfloat16):
        with torch.no_grad():
            assert not (x @ weight).requires_grad
        assert (x @ weight).requires_grad


def test_bf16_autocast_halves_activations():
    def peak(context):
        with simulate("1GiB") as device:
            train(device, context=context)
        return activations(device)

    plain = peak(contextlib.nullcontext)
    lowered = peak(lambda: torch.autocast("cuda", torch.bfloat16))
    # Each layer's input and inner row; the batch is no activation, but its copy in 16 bits is, and the square
    # of the last row is computed in 32. The copies of the weights are kept, too.
    assert plain == pytest.approx(2 * DEPTH * ROW, rel=0.01)
    assert lowered == pytest.approx((2 * DEPTH * ROW + ROW + 2 * DEPTH * WEIGHT) / 2 + ROW, rel=0.2)
    assert lowered < 0.8 * plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
def test_both_devices_agree_under_autocast_and_gradient_scaling(dtype, scaled):
    def run(device):
        scaler = torch.amp.GradScaler("cuda") if scaled else None
        train(device, context=lambda: torch.autocast("cuda", dtype), scaler=scaler)
        return device.peak_bytes

    with simulate("1GiB") as one:
        simulated = run(one)
    with executing("1GiB") as other:
        assert run(other) == simulated


def test_a_gradient_scaler_takes_the_step(device):
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    model, optimizer = train(device, scaler=scaler)
    assert len(optimizer.state) == len(list(model.parameters()))
    assert device.tracker.now(device.device).of(Category.OPTIMIZER) == 2 * 2 * DEPTH * WEIGHT


# ------------------------------------------------------------------ what is kept for backward


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_inputs_only(device, reentrant):
    train(device, model=Net(recompute=reentrant))
    # The inputs of all layers but the first (the batch itself), the last one's result, its square.
    assert activations(device) == pytest.approx((DEPTH + 1) * ROW, abs=ROW)


@pytest.mark.parametrize("pin", [False, True])
def test_activations_saved_on_the_host_leave_the_device(device, pin):
    with torch.autograd.graph.save_on_cpu(pin_memory=pin):
        loss = Net().to(device.device)(torch.randn(BATCH, WIDTH, device=device.device))
    kept = device.tracker.now(device.device).of(Category.ACTIVATIONS)
    assert kept < ROW
    assert device.host_peak_bytes >= 2 * DEPTH * ROW
    loss.backward()


def test_saved_tensor_hooks_see_every_saved_tensor(device):
    moved = []

    def pack(tensor):
        moved.append(tensor.nbytes)
        return tensor.to("cpu")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to(device.device)):
        loss = Net().to(device.device)(torch.randn(BATCH, WIDTH, device=device.device))
    loss.backward()
    assert sum(moved) >= 2 * DEPTH * ROW


# ------------------------------------------------------------------ optimizers

OPTIMIZERS = {
    # name: optimizer, weights' worth of state
    "adamw": (torch.optim.AdamW, 2),
    "adamw foreach": (lambda p, lr: torch.optim.AdamW(p, lr, foreach=True), 2),
    "adamw fused": (lambda p, lr: torch.optim.AdamW(p, lr, fused=True), 2),
    "sgd": (torch.optim.SGD, 0),
    "sgd momentum": (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), 1),
    "sgd fused": (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, fused=True), 1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_optimizers(device, name):
    make, state = OPTIMIZERS[name]
    _, optimizer = train(device, optimizer=make)
    weights = 2 * DEPTH * WEIGHT
    now = device.tracker.now(device.device)
    assert now.of(Category.OPTIMIZER) == pytest.approx(state * weights, rel=0.01)
    assert optimizer.param_groups


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_both_devices_agree_on_optimizers(name):
    make, _ = OPTIMIZERS[name]
    peaks = []
    for block in (simulate, executing):
        with block("1GiB") as device:
            train(device, optimizer=make)
        peaks.append(device.peak_bytes)
    assert peaks[0] == peaks[1]


def test_foreach_holds_temporaries_of_all_weights_and_a_loop_of_one():
    def step_peak(**options):
        with simulate("1GiB") as device:
            model, optimizer = train(device, optimizer=lambda p, lr: torch.optim.AdamW(p, lr, **options))
            model(torch.randn(1, WIDTH, device=device.device)).backward()
            device.tracker.reset_peak()
            before = device.peak_bytes
            optimizer.step()
            return device.peak_bytes - before

    weights = 2 * DEPTH * WEIGHT
    assert step_peak(fused=True) == 0
    assert step_peak(foreach=False) == pytest.approx(
        3 * WEIGHT, rel=0.05
    )  # of this weight two, of the last one
    assert step_peak() == step_peak(foreach=True) == pytest.approx(weights, rel=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda p, lr: torch.optim.Adam(p, lr, amsgrad=True),
        lambda p, lr: torch.optim.AdamW(p, lr, capturable=True),
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        torch.optim.Adamax,
        torch.optim.RAdam,
    ],
)
def test_any_optimizer_of_torch_steps(device, make):
    train(device, optimizer=make)


def test_clipping(device):
    model = Net().to(device.device)
    model(torch.randn(4, WIDTH, device=device.device)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.device == device.device
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


# ------------------------------------------------------------------ kernels

KERNELS = {
    "silu": lambda: nn.SiLU(),
    "mish": lambda: nn.Mish(),
    "rms norm": lambda: nn.RMSNorm(32),
    "layer norm": lambda: nn.LayerNorm(32),
    "gelu": lambda: nn.GELU(),
    "gru": lambda: nn.GRU(32, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(32, 16, batch_first=True, num_layers=2),
    "rnn": lambda: nn.RNN(32, 16, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
    "conv": lambda: nn.Conv1d(8, 8, 3),
}


@pytest.mark.parametrize("name", KERNELS)
def test_both_devices_agree_on_kernels_and_the_numbers_are_the_cpus(name):
    def run(place):
        torch.manual_seed(0)
        layer = KERNELS[name]().to(place)
        x = torch.randn(4, 8, 32).to(place).requires_grad_()
        out = layer(x, x, x) if name == "attention" else layer(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        return [each.detach().cpu() for each in (out, x.grad, *(p.grad for p in layer.parameters()))]

    with simulate("1GiB") as one:
        run(one.device)
    with executing("1GiB") as other:
        found = run(other.device)
    assert one.peak_bytes == other.peak_bytes
    for mine, cpus in zip(found, run("cpu"), strict=True):
        torch.testing.assert_close(mine, cpus, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [nn.SiLU, nn.Mish, nn.GELU])
def test_the_backward_of_an_activation_function_takes_one_row_as_on_cuda(device, make):
    x = torch.randn(BATCH, WIDTH, device=device.device, requires_grad=True)
    loss = make()(x).sum()
    before = device.tracker.live_bytes(device.device)
    device.tracker.reset_peak()
    loss.backward()
    assert device.peak_bytes - before == pytest.approx(ROW, abs=2048)


@pytest.mark.parametrize(
    ("card", "workspace"), [("RTX 3090", CUBLAS_WORKSPACE), ("H100", CUBLAS_WORKSPACE_HOPPER)]
)
def test_cublas_takes_a_workspace_for_each_thread_that_multiplies(card, workspace):
    with simulate(card) as device:
        x = torch.randn(4, 4, device=device.device, requires_grad=True)
        assert device.tracker.now(device.device).of(Category.WORKSPACE) == 0
        y = x @ x
        assert device.tracker.now(device.device).of(Category.WORKSPACE) == workspace
        y.sum().backward()
        assert device.tracker.now(device.device).of(Category.WORKSPACE) == 2 * workspace
        (x @ x).sum().backward()
        assert device.tracker.now(device.device).of(Category.WORKSPACE) == 2 * workspace


@pytest.mark.parametrize("device", ["cpu", "vgpu"])
def test_the_backward_of_group_norm_keeps_the_type_of_its_values(device):
    """Values in 16 bits and weights in 32, as autocast has them on a CPU: torch's own shape rule gives 32."""
    with simulate("1GiB", device=device) as sim:
        values = torch.empty(2, 8, 4, 4, dtype=torch.bfloat16, device=sim.device, requires_grad=True)
        norm = nn.GroupNorm(2, 8, device=sim.device)
        gradients = torch.ops.aten.native_group_norm_backward(
            values,
            values,
            *(torch.empty(2, 2, device=sim.device) for _ in range(2)),
            norm.weight,
            2,
            8,
            16,
            2,
            [True] * 3,
        )
    assert [each.dtype for each in gradients] == [torch.bfloat16, torch.float32, torch.float32]
    assert [tuple(each.shape) for each in gradients] == [(2, 8, 4, 4), (8,), (8,)]
