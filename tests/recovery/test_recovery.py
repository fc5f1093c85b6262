"""Out of memory in a step: survived with the same numbers, or the error itself with what is known of it."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._torch import OUTSIDE_BACKWARD, LightDispatchMode, graph_task_id, release_saved_tensors
from memscale.errors import is_out_of_memory
from memscale.testing import executing

QUIET = Config(enable_logging=False, enable_offloading=False)
WIDTH, LAYERS, WORDS = 16, 5, 32
aten = torch.ops.aten
DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DEVICE", device)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.dropout(torch.nn.functional.gelu(self.up(inner))))


class Model(nn.Module):
    """With dropout, buffers, and a loss beside the logits it was made from."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class RunsOut(LightDispatchMode):
    """Raises torch's error at some operation: once, or from then on."""

    def __init__(
        self, at: int, *, backward: bool = False, ops: tuple[Any, ...] = (), always: bool = False
    ) -> None:
        super().__init__()
        self.at, self.backward, self.ops, self.always = at, backward, ops, always
        self.count = self.raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_backward = graph_task_id() != OUTSIDE_BACKWARD
        if in_backward == self.backward and (not self.ops or func in self.ops):
            self.count += 1
            if self.count == self.at or (self.always and self.count > self.at):
                self.raised += 1
                raise torch.OutOfMemoryError(f"out of memory (injected into {func})")
        return func(*args, **(kwargs or {}))


def build() -> Model:
    torch.manual_seed(0)
    return Model().train().to(DEVICE)


def wrapped(config: Config = QUIET) -> Model:
    model = build()
    memscale.wrap(model, config, {"ids": ids(), "labels": ids()})
    return model


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 12), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def loss_inside(model: nn.Module, seed: int) -> torch.Tensor:
    output = model(ids(seed), labels=ids(seed))
    output["loss"] /= 2
    loss: torch.Tensor = output["loss"]
    return loss


def loss_outside(model: nn.Module, seed: int) -> torch.Tensor:
    logits = model(ids(seed))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids(seed).flatten())


def two_calls(model: nn.Module, seed: int) -> torch.Tensor:
    first, second = model(ids(seed)), model(ids(seed + 1))
    return (first * second).mean() + first.square().mean()


def both(model: nn.Module, seed: int) -> torch.Tensor:
    output = model(ids(seed), labels=ids(seed))
    return output["loss"] + output["logits"].square().mean()


LOSSES = [loss_inside, loss_outside, two_calls, both]


def run(
    model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], trouble: RunsOut | None = None
) -> list[torch.Tensor]:
    """Three micro-steps, trouble in the second; all that a step leaves behind."""
    torch.manual_seed(7)
    results = []
    for step in range(3):
        if step == 1 and trouble is not None:
            with trouble:
                loss = loss_of(model, step)
                loss.backward()
        else:
            loss = loss_of(model, step)
            loss.backward()
        results.append(loss.detach())
    results += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    results += [buffer.clone() for buffer in model.buffers()]
    return [*results, torch.rand(3, device=DEVICE)]  # the random state after it


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def counted(loss_of: Callable[[nn.Module, int], torch.Tensor], *, backward: bool) -> int:
    """Operations of the second step of a wrapped model."""
    mode = RunsOut(-1, backward=backward)
    run(wrapped(), loss_of, mode)
    return mode.count


# Forward and backward ------------------------------------------------------------------------------


@pytest.mark.matrix(5)
@pytest.mark.parametrize("op", [aten.embedding, aten.gelu, aten.addmm, aten.native_batch_norm], ids=str)
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_out_of_memory_in_forward(loss_of: Any, where: str, op: Any) -> None:
    expected = run(build(), loss_of)
    model, calm = wrapped(), wrapped()
    mode = RunsOut(-1, ops=(op.default,))
    run(calm, loss_of, mode)
    before = calm._memscale_executor.plan  # made for what the model is called with here
    trouble = RunsOut(1 if where == "first" else mode.count, ops=(op.default,))
    assert_same(run(model, loss_of, trouble), expected)
    assert trouble.raised == 1
    assert model._memscale_executor.plan.predicted_peak_bytes < before.predicted_peak_bytes


@pytest.mark.matrix(5)
@pytest.mark.parametrize("where", [0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("loss_of", [loss_inside, loss_outside])
def test_out_of_memory_in_backward(loss_of: Any, where: float) -> None:
    expected = run(build(), loss_of)
    model, calm = wrapped(), wrapped()
    run(calm, loss_of)
    before = calm._memscale_executor.plan  # made for what the model is called with here
    trouble = RunsOut(int(where * counted(loss_of, backward=True)), backward=True)
    assert_same(run(model, loss_of, trouble), expected)
    assert trouble.raised == 1
    assert model._memscale_executor.plan.predicted_peak_bytes < before.predicted_peak_bytes


def test_out_of_memory_in_a_second_pass_over_a_kept_graph() -> None:
    """The gradients of outputs that the first pass has brought are not counted again."""

    def second_loss(model: nn.Module, seed: int) -> torch.Tensor:
        output = model(ids(seed), labels=ids(seed))
        output["loss"].backward(retain_graph=True)
        loss: torch.Tensor = output["logits"].square().mean()
        return loss

    expected = run(build(), second_loss)
    trouble = RunsOut(int(0.9 * counted(second_loss, backward=True)), backward=True)
    assert_same(run(wrapped(), second_loss, trouble), expected)
    assert trouble.raised == 1


class Changing(nn.Module):
    """Changes what it is called with: it takes its labels out of a batch, or scales numbers in place."""

    def __init__(self, inner: Model) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, dict):
            return self.inner(batch["ids"], batch.pop("labels"))["loss"]
        if isinstance(batch, torch.Tensor):
            batch.mul_(2.0)
            return self.inner(ids(), ids())["loss"] * batch.mean()
        batch.ids = batch.ids.flip(0)
        return self.inner(batch.ids, batch.labels)["loss"]


def out_in(backward: bool) -> RunsOut:
    """Run out of memory in the third block's forward or backward."""
    op = aten.gelu_backward if backward else aten.gelu
    return RunsOut(3, backward=backward, ops=(op.default,))


def changing(make: Callable[[int], Any], *, wraps: bool) -> nn.Module:
    model = Changing(build())
    return memscale.wrap(model, QUIET, (make(0),)) if wraps else model


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_a_model_that_changes_its_batch_is_called_again_with_the_batch_as_it_was(
    kind: Any, backward: bool
) -> None:
    batches: list[Any] = []

    def make(seed: int) -> Any:
        return kind(ids=ids(seed), labels=ids(seed))

    def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
        batches.append(make(seed))
        loss: torch.Tensor = model(batches[-1])
        return loss

    expected = run(changing(make, wraps=False), loss_of)
    trouble = out_in(backward)
    assert_same(run(changing(make, wraps=True), loss_of, trouble), expected)
    assert trouble.raised == 1
    for one, other in zip(batches[:3], batches[3:], strict=True):
        ones, others = (each if kind is dict else vars(each) for each in (one, other))
        assert ones.keys() == others.keys()
        assert torch.equal(ones["ids"], others["ids"])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_model_that_changes_its_batch_in_place_is_not_called_again(backward: bool) -> None:
    batch = torch.ones(4, device=DEVICE)
    model = changing(lambda _: torch.ones(4, device=DEVICE), wraps=True)
    model(batch.clone()).backward()  # the plan for such a batch is made
    with out_in(backward), pytest.raises(torch.OutOfMemoryError, match="injected") as caught:
        model(batch).backward()
    (note,) = caught.value.__notes__
    assert (
        "it was not repeated: a tensor of the batch (shape (4,), torch.float32) was changed in place" in note
    )
    assert ("the next step runs under a heavier plan" in note) == backward
    assert torch.equal(batch, torch.full((4,), 2.0, device=DEVICE))


def test_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memscale")
    model = wrapped(Config(enable_offloading=False))
    caplog.clear()
    run(model, loss_inside, RunsOut(60, backward=True))
    (record,) = caplog.records
    assert record.getMessage().startswith("out of memory in backward (out of memory (injected")


def test_what_the_failed_graph_has_saved_is_freed_though_the_loop_holds_on_to_it() -> None:
    model = wrapped()
    logits = model(ids())
    kept = logits * 2
    doubled = kept + 0  # not the tensor that square() saves
    saved = weakref.ref(kept)
    loss = kept.square().mean()
    history = (logits.grad_fn, loss.grad_fn)
    del kept
    assert saved() is not None
    with RunsOut(20, backward=True) as trouble:
        loss.backward()
    assert trouble.raised == 1
    assert saved() is None
    assert (logits.grad_fn, loss.grad_fn) == history
    assert doubled.requires_grad
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("loss_of", [two_calls, both])
def test_a_pass_through_several_outputs_is_repeated_only_if_their_gradients_are_known(loss_of: Any) -> None:
    """Of two calls the later one comes first in backward; of two outputs one is behind the other."""
    model, calm = wrapped(), wrapped()
    run(calm, loss_of)
    before = calm._memscale_executor.plan
    with pytest.raises(torch.OutOfMemoryError, match="injected") as caught:
        run(model, loss_of, RunsOut(int(0.3 * counted(loss_of, backward=True)), backward=True))
    (note,) = caught.value.__notes__
    assert "it was not repeated: " in note
    assert "the next step runs under a heavier plan" in note
    assert model._memscale_executor.plan.predicted_peak_bytes < before.predicted_peak_bytes
    model.zero_grad()
    run(model, loss_of)


def test_two_calls_of_which_one_is_through() -> None:
    expected = run(build(), two_calls)
    trouble = RunsOut(int(0.9 * counted(two_calls, backward=True)), backward=True)
    assert_same(run(wrapped(), two_calls, trouble), expected)
    assert trouble.raised == 1


def test_a_function_of_the_user_sees_no_gradient_for_outputs_that_are_not_used() -> None:
    seen: list[list[bool]] = []

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> torch.Tensor:
            seen.append([gradient is None for gradient in gradients])
            return 2 * gradients[0]

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return Pair.apply(self.inner(x))

    x = torch.ones(2, 4, device=DEVICE)
    model = memscale.wrap(Pairs().to(DEVICE), QUIET, x)
    model(x)[0].sum().backward()
    assert seen[-1] == [False, True]


def test_a_plan_that_failed_is_the_limit_for_later_ones() -> None:
    model = wrapped()
    run(model, loss_inside, RunsOut(60, backward=True))
    executor = model._memscale_executor
    assert executor.batches.ceiling == executor.plan.predicted_peak_bytes
    longer = ids().repeat(1, 3)
    model(longer, labels=longer)["loss"].backward()
    assert "[4, 36]" in executor.plan.batch


# When nothing helps --------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_the_heaviest_plan_fails_too(backward: bool) -> None:
    model = wrapped()
    loss_inside(model, 5).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    ops = (aten.native_batch_norm_backward.default,) if backward else (aten.gelu.default,)
    with (
        RunsOut(2, backward=backward, ops=ops, always=True),
        pytest.raises(torch.OutOfMemoryError, match="injected") as caught,
    ):
        loss_inside(model, 6).backward()
    (note,) = caught.value.__notes__
    for words in (
        "MemScale: out of memory in",
        "the plan: ",
        "its predicted peak: ",
        "activations ",
        "weights ",
    ):
        assert words in note
    assert model._memscale_executor.attached
    if not backward:
        assert torch.equal(torch.get_rng_state(), random)
        assert_same([parameter.grad for parameter in model.parameters()], gradients)
    model.zero_grad()
    loss_inside(model, 6).backward()


def test_a_model_whose_plans_all_failed_is_plain_after_detach(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    own = set(vars(model))
    memscale.wrap(model, QUIET, {"ids": ids(), "labels": ids()})
    with (
        RunsOut(1, ops=(aten.gelu.default,), always=True),
        pytest.raises(torch.OutOfMemoryError, match="injected"),
    ):
        loss_inside(model, 6)
    memscale.detach(model)
    assert set(vars(model)) == own
    assert "was replaced" not in caplog.text
    assert model.double().head.weight.dtype is torch.float64


@pytest.mark.parametrize("options", [{"retain_graph": True}, {"create_graph": True}])
def test_a_pass_that_is_to_keep_its_graph_is_not_repeated(options: dict[str, bool]) -> None:
    model = wrapped()
    loss = loss_inside(model, 0)
    with (
        RunsOut(60, backward=True),
        pytest.raises(torch.OutOfMemoryError, match="injected") as caught,
    ):
        loss.backward(**options)
    assert "it was not repeated: it was called with retain_graph" in caught.value.__notes__[0]
    assert "the next step runs under a heavier plan" in caught.value.__notes__[0]
    model.zero_grad()
    if "retain_graph" in options:  # as far as torch had come it was kept, and is not freed by us
        loss.backward()


def test_gradients_around_the_model_are_not_lost() -> None:
    model = wrapped()
    loss = loss_inside(model, 0) + sum(parameter.square().sum() for parameter in model.parameters())
    with (
        RunsOut(2, backward=True, ops=(aten.gelu_backward.default,)),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        loss.backward()
    assert "gradients to bring around the model" in caught.value.__notes__[0]


def test_other_errors_pass_by() -> None:
    model = wrapped()
    with pytest.raises(IndexError):
        model(ids() + WORDS)
    assert not is_out_of_memory(ValueError("out of memory"))


# What a loop does with outputs ---------------------------------------------------------------------


def test_outputs_are_as_ever() -> None:
    model, plain = wrapped(), build()
    for each in (model, plain):
        torch.manual_seed(1)
        each.logits = each(ids())
    assert torch.equal(model.logits, plain.logits)
    parameters = list(model.parameters())
    of_wrapped = torch.autograd.grad(model.logits.square().sum(), parameters, create_graph=True)
    of_plain = torch.autograd.grad(plain.logits.square().sum(), list(plain.parameters()), create_graph=True)
    assert_same(list(of_wrapped), list(of_plain))


def test_backward_is_torchs_own_after_detach() -> None:
    gc.collect()
    own = torch.autograd.backward
    assert own.__module__ == "torch.autograd"
    model = wrapped()
    assert torch.autograd.backward is not own
    other = copy.deepcopy(model)
    memscale.detach(model)
    assert torch.autograd.backward is not own
    expected = run(build(), loss_inside)
    assert_same(run(other, loss_inside, RunsOut(60, backward=True)), expected)
    memscale.detach(other)
    assert torch.autograd.backward is own
    dropped = wrapped()
    assert torch.autograd.backward is not own
    del dropped
    gc.collect()
    assert torch.autograd.backward is own


def test_a_graph_that_waits_for_backward_keeps_its_plan() -> None:
    model = wrapped()
    longer = ids().repeat(1, 3)
    plan = model._memscale_executor.plan
    first = model(ids(), labels=ids())["loss"]
    second = model(longer, labels=longer)["loss"]
    assert model._memscale_executor.plan is plan
    (first + second).backward()
    model(longer, labels=longer)
    assert model._memscale_executor.plan is not plan


# The optimizer's step ------------------------------------------------------------------------------

FOREACH_SQRT = (aten._foreach_sqrt.default,)


def stepped(
    model: nn.Module,
    trouble: RunsOut | None = None,
    *,
    at: int = 1,
    foreach: bool = True,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[torch.Tensor]:
    """Three steps, trouble in one; parameters and optimizer state after them."""
    torch.manual_seed(7)
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=foreach)
    for step in range(3):
        model(ids(step), labels=ids(step))["loss"].backward()
        if step == at and trouble is not None:
            with trouble:
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [each.detach().cpu() for each in (*model.parameters(), *state)]


@pytest.mark.parametrize("at", [0, 1], ids=["first step", "second step"])
@pytest.mark.parametrize(
    "op", [aten.zeros_like.default, aten._foreach_add_.Tensor, aten._foreach_mul_.Scalar], ids=str
)
def test_out_of_memory_before_an_update_has_begun(op: Any, at: int) -> None:
    expected = stepped(build())
    model = wrapped()
    trouble = RunsOut(3 if op is aten.zeros_like.default else 1, ops=(op,))
    assert_same(stepped(model, trouble, at=at), expected)
    assert trouble.raised == (op is not aten.zeros_like.default or at == 0)


def test_steps_are_run_in_buckets_after_the_first_time() -> None:
    expected = stepped(build())
    model = wrapped()
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    for step in range(3):
        model(ids(step), labels=ids(step))["loss"].backward()
        # At first in making state, before anything is changed; then in the middle of the arithmetic.
        with RunsOut(1, ops=(aten.zeros_like.default,) if step == 0 else FOREACH_SQRT) as trouble:
            optimizer.step()
        assert trouble.raised == 1
        optimizer.zero_grad()
    state = [value for each in optimizer.state.values() for value in each.values()]
    assert_same([each.detach().cpu() for each in (*model.parameters(), *state)], expected)


def test_a_step_that_never_fits_leaves_everything_as_it_was() -> None:
    model = wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loss_inside(model, 0).backward()
    before = copy.deepcopy([each.detach() for each in model.parameters()])
    with (
        RunsOut(1, ops=(aten.zeros_like.default,), always=True),
        pytest.raises(torch.OutOfMemoryError, match="injected") as caught,
    ):
        optimizer.step()
    assert "one parameter alone does not fit; all is as before the step" in caught.value.__notes__[0]
    assert not optimizer.state
    assert_same([each.detach() for each in model.parameters()], before)
    optimizer.step()
    assert len(optimizer.state) == len(before)


def test_an_update_that_had_begun_is_said_to_be_lost() -> None:
    model = wrapped()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        stepped(model, RunsOut(1, ops=FOREACH_SQRT))
    assert "load them from a checkpoint" in caught.value.__notes__[0]


# On a device with so much memory and no more -------------------------------------------------------


def on_gpu(hog_bytes: int, *, wraps: bool) -> list[torch.Tensor]:
    """Two steps on the executing GPU, of which someone else takes a part after the plan was made."""
    with executing("200MiB") as gpu:
        torch.manual_seed(0)
        model = Model(layers=10).to(gpu.device).train()
        batch = torch.zeros(64, 128, dtype=torch.long, device=gpu.device)
        if wraps:
            # The fastest plan that fits, which is to do nothing.
            memscale.wrap(model, Config(memory_budget="190MiB"), {"ids": batch, "labels": batch})
            assert not any(layer.techniques for layer in model._memscale_executor.plan.layers)
        hog = torch.zeros(hog_bytes, dtype=torch.uint8, device=gpu.device)
        for _ in range(2):
            loss = model(batch, labels=batch)["loss"]
            loss.backward()
        del hog
        return [
            each.cpu() for each in (*(p.grad for p in model.parameters()), *model.buffers(), loss.detach())
        ]


@pytest.mark.cpu_only  # it has a virtual GPU of its own
def test_a_device_that_is_full(caplog: pytest.LogCaptureFixture) -> None:
    hog = 115 * 2**20
    expected = on_gpu(1, wraps=False)
    with pytest.raises(torch.OutOfMemoryError):
        on_gpu(hog, wraps=False)
    caplog.set_level(logging.WARNING, "memscale")
    assert_same(on_gpu(hog, wraps=True), expected)
    assert ["out of memory in backward" in record.getMessage() for record in caplog.records] == [True]


def test_a_graph_with_a_saved_number_is_released_under_a_dispatch_mode() -> None:
    """The mode is not asked to detach the number, which is no tensor to it."""

    class Passes(LightDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Passes():
        loss = (torch.ones(3, requires_grad=True).tanh() * 0.5).sum()
        release_saved_tensors([loss], "it was freed")
    with pytest.raises(RuntimeError, match="it was freed"):
        loss.backward()
