"""Out of memory on a device that has so much and no more: each step is as with ample memory, or the error is clear.

The executing GPU runs out for real, in the middle of whatever runs: someone else takes a part of it after the plan was
made, as happens on a card that is shared.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.memory.record import Category
from memscale.recovery.shortage import free_memory
from memscale.testing import ExecutingDevice, executing

pytestmark = pytest.mark.virtual_only  # what it has room for is counted with CUDA's workspaces

MIB = 2**20
CAPACITY = 96 * MIB
SEGMENT = 2 * MIB  # what the allocator takes at once for small tensors
PIECE = MIB // 4
WIDTH, LAYERS, WORDS, BATCH, LENGTH = 64, 4, 64, 8, 128
NOTHING = Config(memory_budget=80 * MIB)  # the fastest plan that fits, which is to do nothing


class Block(nn.Module):
    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm == "batch" else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = (
            self.norm(x.transpose(1, 2)).transpose(1, 2)
            if isinstance(self.norm, nn.BatchNorm1d)
            else self.norm(x)
        )
        return x + self.down(self.dropout(nn.functional.gelu(self.up(inner))))


class Model(nn.Module):
    """With dropout, with buffers or without; some 11 MiB of activations."""

    def __init__(self, norm: str = "layer") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """torch's own encoder, attention and its dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.encoder(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words(seed: int, gpu: ExecutingDevice, batch: int = BATCH) -> torch.Tensor:
    drawn = torch.randint(0, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
    return drawn.to(gpu.device)


class Squeeze:
    """Takes of a device all but so much; what is left is in one piece."""

    def __init__(self, gpu: ExecutingDevice) -> None:
        self._gpu = gpu
        self._taken: list[torch.Tensor] = []

    def to(self, room: int) -> None:
        self._taken.clear()
        self._gpu.tracker.empty_cache()
        for size in (2**power for power in range(24, 15, -1)):
            while self._takes_a_gap(size):
                pass
        free, _ = torch.get_device_module(self._gpu.device).mem_get_info()
        whole = -(-room // SEGMENT) * SEGMENT
        self._take(free - whole)
        for _ in range((whole - room) // PIECE):
            self._take(PIECE)

    def _takes_a_gap(self, size: int) -> bool:
        """Whether the allocator had room for it in what it has already."""
        before = self._gpu.tracker.reserved_bytes(self._gpu.device)
        try:
            self._take(size)
        except torch.OutOfMemoryError:
            return False
        if self._gpu.tracker.reserved_bytes(self._gpu.device) == before:
            return True
        self._taken.pop()
        self._gpu.tracker.empty_cache()
        return False

    def _take(self, size: int) -> None:
        self._taken.append(torch.empty(size, dtype=torch.uint8, device=self._gpu.device))


Loss = Callable[[nn.Module, ExecutingDevice, int], torch.Tensor]


def one_call(model: nn.Module, gpu: ExecutingDevice, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(words(seed, gpu), labels=words(seed, gpu))
    return loss


@dataclass
class Run:
    """Some steps of training; from a step on, or from its backward on, there may be so much memory and no more."""

    build: Callable[[], nn.Module] = Model
    config: Config | None = None
    rooms: dict[int, int] = field(default_factory=dict)
    rooms_in_backward: dict[int, int] = field(default_factory=dict)
    rooms_in_step: dict[int, int] = field(default_factory=dict)
    steps: int = 5
    accumulate: int = 1
    loss_of: Loss = one_call
    sample: Callable[[ExecutingDevice], Any] = lambda gpu: (words(0, gpu), words(0, gpu))
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    results: list[torch.Tensor] = field(default_factory=list)
    at_home: int = 0

    def go(self) -> Run:
        torch.manual_seed(0)
        with executing(CAPACITY) as gpu:
            model = self.build().to(gpu.device).train()
            if self.config is not None:
                memscale.wrap(model, self.config, self.sample(gpu))
            optimizer, squeeze = self.optimizer(model.parameters()), Squeeze(gpu)
            gpu.manual_seed(7)
            for step in range(self.steps):
                if step in self.rooms:
                    squeeze.to(self.rooms[step])
                loss = self.loss_of(model, gpu, step)
                if step in self.rooms_in_backward:
                    squeeze.to(self.rooms_in_backward[step])
                loss.backward()
                self._note(loss.detach(), *(each.grad for each in model.parameters()))
                if step in self.rooms_in_step:
                    squeeze.to(self.rooms_in_step[step])
                if step % self.accumulate == self.accumulate - 1:
                    optimizer.step()
                    optimizer.zero_grad()
            self._note(*model.parameters(), *model.buffers(), gpu.get_rng_state())
            self._note(*(each for state in optimizer.state.values() for each in state.values()))
            self.at_home = sum(each.device.type == "cpu" for each in model.parameters())
        return self

    def _note(self, *tensors: torch.Tensor | None) -> None:
        self.results += [each.detach().to("cpu", copy=True) for each in tensors if each is not None]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def assert_survived(options: dict[str, Any], config: Config = NOTHING) -> Run:
    """The plain model dies, and the wrapped one trains as with ample memory: to the bit."""
    ample = Run(**{name: value for name, value in options.items() if not name.startswith("rooms")}).go()
    with pytest.raises(torch.OutOfMemoryError):
        Run(**options).go()
    run = Run(config=config, **options).go()
    assert_same(run.results, ample.results)
    return run


@pytest.fixture
def recovered(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Where memory ran out and the step went on all the same, in the order of the log."""
    caplog.set_level(logging.WARNING, "memscale")

    def where() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [each.partition(" (")[0].removeprefix("out of memory in ") for each in messages]

    return where


# Forward -------------------------------------------------------------------------------------------


def two_calls(model: nn.Module, gpu: ExecutingDevice, seed: int) -> torch.Tensor:
    first, second = model(words(seed, gpu)), model(words(seed + 100, gpu))
    product: torch.Tensor = first.mean() * second.mean()
    return product


FORWARD = [
    pytest.param({"rooms": {0: 28 * MIB}}, id="first forward"),
    pytest.param({"build": lambda: Model("batch"), "rooms": {1: 10 * MIB}}, id="batch norm"),
    pytest.param({"rooms": {1: 10 * MIB}, "accumulate": 2, "steps": 6}, id="accumulation"),
    pytest.param({"build": Attention, "rooms": {1: 8 * MIB}}, id="attention"),
]


@pytest.mark.parametrize("options", FORWARD)
@pytest.mark.matrix(4)
def test_forward(options: dict[str, Any], recovered: Callable[[], list[str]]) -> None:
    assert_survived(options)
    assert recovered()[:1] == ["forward"]


def test_forward_and_then_backward(recovered: Callable[[], list[str]]) -> None:
    """The first plan has moved parameters when the second is needed, in the same step."""
    run = assert_survived(
        {
            "rooms": {1: 10 * MIB},
            "rooms_in_backward": {1: 3 * MIB // 4},
            # One by one, a step counts as a change of each parameter; to be moved must not count as another.
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        }
    )
    assert recovered() == ["forward", "backward"]
    assert run.at_home == len(list(Model().parameters()))


def test_forward_with_parameters_that_come_ahead(recovered: Callable[[], list[str]]) -> None:
    assert_survived({"rooms": {1: 10 * MIB, 2: 6 * MIB}}, NOTHING.replace(async_offload=True))
    assert recovered()[:1] == ["forward"]


def test_forward_while_the_graph_of_another_call_waits(recovered: Callable[[], list[str]]) -> None:
    """Its parameters are not moved before its backward has been."""
    run = assert_survived({"rooms": {1: 18 * MIB}, "loss_of": two_calls})
    assert recovered()[0] == "forward"
    assert not run.at_home


def test_what_a_plan_sends_home_leaves_the_device_at_once() -> None:
    """Optimizer state too, and not with the next step; and though the loop has the loss of the step before."""
    torch.manual_seed(0)
    with executing(CAPACITY) as gpu:
        model, squeeze = Model().to(gpu.device).train(), Squeeze(gpu)
        config = NOTHING.replace(enable_checkpointing=False)
        memscale.wrap(model, config, (words(0, gpu), words(0, gpu)))
        optimizer = torch.optim.AdamW(model.parameters())
        loss = one_call(model, gpu, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        squeeze.to(3 * MIB)  # too little for activations that go to the host to be enough
        again = one_call(model, gpu, 1)
        on_device = [each for each in model.parameters() if each.device.type != "cpu"]
        with_state = [each for each in on_device if optimizer.state[each]["exp_avg"].device.type != "cpu"]
        here = gpu.tracker.now(gpu.device)
        assert len(with_state) < len(list(model.parameters()))
        rounding = 512 * len(on_device)
        assert here.of(Category.WEIGHTS) <= sum(each.nbytes for each in on_device) + rounding
        assert here.of(Category.OPTIMIZER) <= 2 * (sum(each.nbytes for each in with_state) + rounding)
        assert loss.grad_fn is not None
        again.backward()


def test_an_error_that_was_recovered_from_holds_nothing() -> None:
    def fails(x: torch.Tensor) -> None:
        def inner() -> None:
            raise torch.OutOfMemoryError(f"out of memory at {len(x)}")

        inner()

    x = torch.ones(3)
    reference = weakref.ref(x)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fails(x)
    error = caught.value
    del x, caught
    words = free_memory(torch.device("cpu"), error)
    assert reference() is None
    assert "in fails" in words
    assert "in inner" in words


# Backward ------------------------------------------------------------------------------------------


def held_views(model: Any, gpu: ExecutingDevice, seed: int) -> torch.Tensor:
    """A loop that holds on to views of the logits, which cannot be detached in place."""
    model.kept = model(words(seed, gpu))[:, :-1]
    model.left, model.right = model.kept.chunk(2, -1)
    model.flat = model.kept.flatten(0, 1)
    model.squares = model.flat.square().view(-1)
    labels = words(seed, gpu)[:, 1:].flatten()
    loss = nn.functional.cross_entropy(model.flat, labels)
    return loss + model.squares.mean() + (model.left * model.right).mean()


BACKWARD = [
    pytest.param({"rooms_in_backward": {1: 0}, "accumulate": 2, "steps": 6}, id="accumulation"),
    pytest.param({"build": lambda: Model("batch"), "rooms_in_backward": {1: 0}}, id="batch norm"),
    pytest.param({"rooms_in_backward": {1: 3 * MIB // 2}, "loss_of": held_views}, id="views"),
]


@pytest.mark.parametrize("options", BACKWARD)
@pytest.mark.matrix(3)
def test_backward(options: dict[str, Any], recovered: Callable[[], list[str]]) -> None:
    assert_survived(options)
    assert recovered()[:1] == ["backward"]


# The optimizer's step ------------------------------------------------------------------------------


class Wide(nn.Module):
    """More parameters than activations: eight of a mebibyte each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(256, 1024, False), nn.Tanh(), nn.Linear(1024, 256, False))
                for _ in "1234"
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares: torch.Tensor = self.layers(x).square()
        return squares.mean()


def numbers(seed: int, gpu: ExecutingDevice) -> torch.Tensor:
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)).to(gpu.device)


def of_numbers(model: nn.Module, gpu: ExecutingDevice, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(numbers(seed, gpu))
    return loss


WIDE: dict[str, Any] = {
    "build": Wide,
    "loss_of": of_numbers,
    "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "sample": lambda gpu: numbers(0, gpu),
}


@pytest.mark.parametrize(
    "rooms",
    [
        pytest.param({0: 22 * MIB}, id="state and its temporaries"),  # 16 and 16; the state alone fits
        pytest.param({1: 2 * MIB}, id="temporaries of all but one"),
    ],
)
def test_step(rooms: dict[int, int]) -> None:
    assert_survived({**WIDE, "rooms_in_step": rooms})


@pytest.mark.parametrize("room", [2 * MIB, 14 * MIB], ids=["not even one", "not the temporaries"])
@pytest.mark.matrix(2)
def test_a_first_step_whose_state_has_no_room_leaves_everything_as_it_was(room: int) -> None:
    torch.manual_seed(0)
    with executing(CAPACITY) as gpu:
        model = Wide().to(gpu.device).train()
        memscale.wrap(model, NOTHING, numbers(0, gpu))
        optimizer, squeeze = WIDE["optimizer"](model.parameters()), Squeeze(gpu)
        of_numbers(model, gpu, 0).backward()
        before = [each.detach().cpu() for each in model.parameters()]
        squeeze.to(room)
        with pytest.raises(torch.OutOfMemoryError, match=r"\(optimizer\)") as caught:
            optimizer.step()
        (note,) = caught.value.__notes__
        assert "all is as before the step" in note
        assert not optimizer.state
        assert_same([each.detach().cpu() for each in model.parameters()], before)
        del caught
        squeeze.to(48 * MIB)
        optimizer.step()
        got = [each.detach().cpu() for each in model.parameters()]
    assert_same(got, Run(**WIDE, steps=1).go().results[-8 * 4 - 1 : -8 * 3 - 1])


# When nothing helps --------------------------------------------------------------------------------


def assert_explained(error: BaseException, where: str) -> None:
    (note,) = error.__notes__
    assert f"MemScale: out of memory in {where}" in note
    for said in ("the plan: ", "its predicted peak: ", "plans tried in this step", "temporary ", "float32["):
        assert said in note
    assert "in forward" in note if where == "forward" else "backward" in note


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_no_plan_helps_leaves_the_model_fit_for_a_smaller_one(where: str) -> None:
    def small(model: nn.Module, gpu: ExecutingDevice) -> list[torch.Tensor]:
        ids = words(5, gpu, batch=1)
        gpu.manual_seed(9)
        loss = model(ids, labels=ids)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return [
            loss.detach().cpu(),
            *(each.detach().cpu() for each in (*model.parameters(), *model.buffers())),
        ]

    torch.manual_seed(0)
    with executing(CAPACITY) as gpu:
        expected = small(Model("batch").to(gpu.device).train(), gpu)
    torch.manual_seed(0)
    with executing(CAPACITY) as gpu:
        model, squeeze = Model("batch").to(gpu.device).train(), Squeeze(gpu)
        memscale.wrap(model, NOTHING, (words(0, gpu), words(0, gpu)))
        random = gpu.get_rng_state()
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
        if where == "forward":
            squeeze.to(22 * MIB)
            with pytest.raises(torch.OutOfMemoryError, match=r"\(forward\)") as caught:
                one_call(model, gpu, 0)
            assert all(each.grad is None for each in model.parameters())
            assert torch.equal(gpu.get_rng_state(), random)
            assert_same([value.cpu() for value in model.state_dict().values()], list(weights.values()))
        else:
            loss = one_call(model, gpu, 0)
            squeeze.to(5 * MIB)  # of which the libraries want more in backward, whatever the plan
            with pytest.raises(torch.OutOfMemoryError, match=r"\(backward\)") as caught:
                loss.backward()
            assert_same(
                [each.detach().cpu() for each in model.parameters()],
                [weights[name] for name, _ in model.named_parameters()],
            )
            del loss
            squeeze.to(24 * MIB)
            model.zero_grad()
            model.load_state_dict(weights)  # batch norm has seen a batch
        assert_explained(caught.value, where)
        del caught
        got = small(model, gpu)
    assert_same(got, expected)
