"""Plans follow the batch: one that is larger than planned for is planned for before it runs, and never per step."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale.planner import replan as replanning
from memscale.profiler import Sample
from memscale.profiler.sample import PlannedBatches, call_key, resized, roundings
from memscale.testing import executing

QUIET = Config(enable_logging=False, fused_host_step=False)
WIDTH, SHORTER, LONGEST = 48, 800, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Words to words, of at most so many positions."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 64)
        self.positions = None if limit is None else nn.Parameter(torch.zeros(limit, WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(limit: int | None = None) -> Model:
    torch.manual_seed(0)
    return Model(limit)


def words(length: int, batch: int = 2, device: torch.device | str = "cpu") -> torch.Tensor:
    return (torch.arange(batch * length).reshape(batch, length) * 7 % 64).to(device)


def train(model: nn.Module, lengths: list[int], device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """The gradients of all steps, added up, on the CPU."""
    for length in lengths:
        ids = words(length, device=device)
        loss = model(ids, labels=ids)
        loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The batches that plans were tried for after wrap, in words."""
    made: list[str] = []
    make_plan = replanning.make_plan

    def counted(model: nn.Module, sample: Sample, *args: Any, **kwargs: Any) -> Any:
        made.append(sample.describe())
        return make_plan(model, sample, *args, **kwargs)

    monkeypatch.setattr(replanning, "make_plan", counted)
    return made


def lengths_of_a_run(seed: int = 5, steps: int = 8) -> list[int]:
    draw = random.Random(seed)
    lengths = [draw.randint(64, SHORTER) for _ in range(steps)]
    return [64, *lengths, LONGEST, *lengths[:3]]


# The run that only its longest batch breaks --------------------------------------------------------

CAPACITY = "84MiB"  # 82 hold all but the longest batch, which alone needs 90


@pytest.mark.parametrize("with_sample", [True, False], ids=["sample", "no sample"])
@pytest.mark.slow
def test_lengths_that_vary_break_the_plain_model_and_not_the_wrapped_one(
    with_sample: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = lengths_of_a_run()
    expected = train(build(), lengths)
    with executing("1GiB") as gpu:
        ample = train(build().to(gpu.device), lengths, gpu.device)
    with executing(CAPACITY) as gpu:
        model = build().to(gpu.device)
        train(model, [length for length in lengths if length < LONGEST], gpu.device)
        with pytest.raises(torch.OutOfMemoryError):
            train(model, [LONGEST], gpu.device)
    caplog.set_level(logging.INFO, "memscale")
    with executing(CAPACITY) as gpu:
        model = build().to(gpu.device)
        memscale.wrap(
            model, Config(mode="conservative"), words(64, device=gpu.device) if with_sample else None
        )
        caplog.clear()
        gradients = train(model, lengths, gpu.device)
        peak = gpu.tracker.peak_reserved_bytes(gpu.device)
    for got, wanted, on_cpu in zip(gradients, ample, expected, strict=True):
        assert torch.equal(got, wanted)
        torch.testing.assert_close(got, on_cpu, rtol=1e-4, atol=1e-6)
    anew = [record for record in caplog.records if "planned anew" in record.getMessage()]
    assert 1 <= len(anew) <= 4
    assert peak <= 84 * 2**20


@pytest.mark.slow
def test_each_bucket_is_planned_for_once(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, words(64))
    train(model, lengths_of_a_run())
    assert len(planned) == len(set(planned)) <= 4
    assert planned[-1] == f"int64[2, {LONGEST}], labels=int64[2, {LONGEST}]"
    count = len(planned)
    train(model, lengths_of_a_run(seed=6))
    assert len(planned) == count


def test_a_plan_for_more_stays_on_for_less() -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64), words(64)))
    train(model, [600])
    plan = model._memscale_executor.plan
    assert "[2, 1024]" in plan.batch
    train(model, [64, 1024, 3])
    assert model._memscale_executor.plan is plan


def test_one_log_line_for_each_plan(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memscale")
    model = build()
    memscale.wrap(model, Config(), (words(64), words(64)))
    caplog.clear()
    train(model, [64, 65, 66, 100, 129])
    assert [record.getMessage().partition(" is larger")[0] for record in caplog.records] == [
        "a batch of int64[2, 65], labels=int64[2, 65]",
        "a batch of int64[2, 129], labels=int64[2, 129]",
    ]


# What a batch is rounded up to ---------------------------------------------------------------------


def test_where_the_model_does_not_run_at_the_rounded_shape(planned: list[str]) -> None:
    model = build(limit=610)
    memscale.wrap(model, QUIET, (words(64), words(64)))
    train(model, [600])
    assert [each.partition(",")[2].partition("]")[0] for each in planned] == [" 1024", " 640", " 600"]
    assert "[2, 600]" in model._memscale_executor.plan.batch
    train(model, [599, 600])
    assert len(planned) == 3


def test_only_dimensions_that_differ_are_rounded(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64, batch=3),))
    model(words(70, batch=3))
    assert planned == ["int64[3, 128]"]
    model(words(128, batch=2))
    assert len(planned) == 1


def test_arguments_by_name_or_by_position_are_the_same_call(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64),))
    model(ids=words(64))
    model(words(60))
    assert not planned
    model(words(64), labels=words(64))  # a loss that was not planned for
    assert len(planned) == 1


def test_what_is_covered() -> None:
    batches = PlannedBatches()
    batches.add({"x": (2, 64)})
    assert batches.covers({"x": (1, 64)})
    assert batches.covers({"x": (1, 65)})  # fewer elements, and fewer scores of attention
    assert not batches.covers({"x": (1, 128)})  # as many elements, and twice the scores
    assert not batches.covers({"x": (3, 64)})
    assert not batches.covers({"x": (2, 64), "y": (2,)})
    batches.give_up({"y": (2,)})
    assert batches.covers({"y": (200,)})


def test_roundings() -> None:
    assert roundings({"x": (3, 1024)}, {"x": [1]}) == [{"x": (3, 1024)}]
    assert roundings({"x": (3, 5)}, {"x": [0, 1]}) == [{"x": (4, 8)}, {"x": (3, 5)}]
    sample = resized(nn.Identity(), Sample((torch.ones(2, 3),), {}), {"['input']": (2, 4)})
    assert sample.args[0].shape == (2, 4)
    key = call_key((torch.ones(2), 1, [torch.ones(3)]), {"a": None})
    assert key == ("a", torch.Size([2]), None, torch.Size([3]), None)


# Copies, evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_follows_its_own_batches(copied: Any, planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64), words(64)))
    other = copied(model)
    train(other, [65])
    assert len(planned) == 1
    assert "[2, 128]" in other._memscale_executor.plan.batch
    assert "[2, 64]" in model._memscale_executor.plan.batch
    train(model, [65])
    assert len(planned) == 2


def test_passes_without_gradients_are_not_planned_for(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64), words(64)))
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            model(words(100))
    model.requires_grad_(False)
    model(words(100))
    assert not planned


def test_a_model_that_trains_in_eval_mode_is_planned_for(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET, (words(64), words(64)))
    model.eval()
    model(words(100))
    assert len(planned) == 1


# Accumulated gradients -----------------------------------------------------------------------------


def accumulate(model: nn.Module, groups: list[int], *, zero_first: bool = False, length: int = 64) -> None:
    """Make one optimizer step for each group of batches; of a group of 0 it is left out, as by a `GradScaler`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ids = words(length)
    for batches in groups:
        for _ in range(batches or 1):
            loss = model(ids=ids, labels=ids)
            if zero_first:
                optimizer.zero_grad()
            loss.backward()
        if batches:
            optimizer.step()
        if not zero_first:
            optimizer.zero_grad()


def test_accumulation_is_observed_and_planned_for_once(
    planned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = build(), words(64)
    config = Config(mode="aggressive")
    memscale.wrap(model, config, {"ids": ids, "labels": ids})
    executor = model._memscale_executor
    before = executor.plan
    accumulate(model, [3, 3])
    assert (executor.plan, planned) == (before, [])  # it is known after the second step
    with caplog.at_level(logging.INFO, "memscale"):
        accumulate(model, [3, 3, 5, 1, 1])
    assert len(planned) == 1
    assert executor.config.gradient_accumulation_steps == 3
    assert executor.report().plans == 2
    told = memscale.plan(build(), {"ids": ids, "labels": ids}, config.replace(gradient_accumulation_steps=3))
    assert executor.plan == told
    assert executor.plan.baseline_peak_bytes > before.baseline_peak_bytes
    assert sum("gradients of 3 batches are accumulated" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize(
    ("groups", "zero_first"),
    [
        ([1] * 6, False),
        ([1] * 6, True),
        ([0, 0, 1, 1, 1], False),
        ([0, 0, 1, 1, 1], True),
        ([4, 1, 4, 4], False),
    ],
    ids=["plain loop", "gradients stay until backward", "skipped steps", "skipped, stay", "once only"],
)
def test_loops_that_do_not_accumulate_are_not_planned_again(
    groups: list[int], zero_first: bool, planned: list[str]
) -> None:
    model, ids = build(), words(64)
    memscale.wrap(model, QUIET, {"ids": ids, "labels": ids})
    accumulate(model, groups, zero_first=zero_first)
    assert planned == []
    assert model._memscale_executor.config is QUIET


def test_what_the_user_says_is_not_observed(planned: list[str]) -> None:
    model, ids = build(), words(64)
    config = QUIET.replace(gradient_accumulation_steps=1)
    memscale.wrap(model, config, {"ids": ids, "labels": ids})
    accumulate(model, [3, 3, 3])
    assert planned == []
    assert model._memscale_executor.config is config


def test_two_forwards_of_one_batch_are_no_accumulation(planned: list[str]) -> None:
    model, ids = build(), words(64)
    memscale.wrap(model, QUIET, {"ids": ids, "labels": ids})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        (model(ids=ids, labels=ids) + model(ids=ids, labels=ids)).backward()
        optimizer.step()
    assert planned == []


def test_computed_weights_are_not_asked_for_gradients(
    planned: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    model, ids = build(), words(64)
    memscale.wrap(model, QUIET, {"ids": ids, "labels": ids})
    weights = {name: each * 1.0 for name, each in model.named_parameters()}
    for _ in range(2):
        torch.func.functional_call(model, weights, (), {"ids": ids, "labels": ids}).backward(
            retain_graph=True
        )
    assert not [each for each in recwarn if "not a leaf" in str(each.message)]


def test_it_is_planned_for_the_largest_batch_so_far(planned: list[str]) -> None:
    model = build()
    memscale.wrap(model, QUIET.replace(force_optimize=True), {"ids": words(512), "labels": words(512)})
    batch = model._memscale_executor.plan.batch
    accumulate(model, [2, 2, 2])
    assert len(planned) == 1
    assert model._memscale_executor.plan.batch == batch
    assert "512" in batch


def test_it_is_not_planned_for_while_parameters_are_frozen(planned: list[str]) -> None:
    """As by the `toggle_optimizer` of a GAN in Lightning, in the steps of the other network."""
    model, ids = build(), words(64)
    config = QUIET.replace(mode="aggressive", force_optimize=True)
    memscale.wrap(model, config, {"ids": ids, "labels": ids})
    executor = model._memscale_executor
    accumulate(model, [3, 3])
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    model(ids=ids, labels=ids).backward()
    assert (planned, executor.config.gradient_accumulation_steps) == ([], 1)
    model.requires_grad_(True)
    model(ids=ids, labels=ids).backward()
    assert len(planned) == 1
    config = config.replace(gradient_accumulation_steps=3)
    assert executor.plan == memscale.plan(build(), {"ids": ids, "labels": ids}, config)


def test_no_more_plans_are_made_for_it_than_a_run_may_have(
    planned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedBatches, "is_full", property(lambda batches: True))
    model, ids = build(), words(64)
    memscale.wrap(model, QUIET, {"ids": ids, "labels": ids})
    accumulate(model, [3, 3, 3])
    assert planned == []
    assert model._memscale_executor.config.gradient_accumulation_steps == 3  # for what recovery plans
