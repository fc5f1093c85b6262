"""Training loops as people write them, with streamed steps: nothing they can see is different."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from memscale.offload.optimizer import StreamedSteps
from memscale.offload.optimizer_hooks import Dispatcher
from offload.optimizer_harness import (
    Elsewhere,
    Lion,
    Mapped,
    assert_equal,
    give_gradients,
    in_groups,
    leaves,
    parameters,
    streamed,
)


def steps_of(tensors, optimizer, steps, begin=0):
    for step in range(begin, begin + steps):
        give_gradients(tensors, step)
        optimizer.step()


def plain_adamw(steps=4, **options):
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors), **options)
    steps_of(tensors, optimizer, steps)
    return tensors, optimizer.state_dict()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))


def loss_of(module, step=0):
    generator = torch.Generator().manual_seed(step)
    return module(torch.randn(8, 12, generator=generator)).square().mean()


def test_state_is_elsewhere_between_steps():
    tensors = parameters()
    place = Elsewhere()
    with streamed(tensors, place, bucket_bytes=6000) as steps:
        optimizer = optim.AdamW(tensors)
        steps_of(tensors, optimizer, 3)
        homes = [each for each in leaves(optimizer.state_dict()["state"]) if each.dim()]
        assert all(steps.is_down(each) for each in homes)
        large = [each for each in tensors if each.dim()]
        assert place.downs == 2 * len(large)  # once, then the values go back into the same homes
        assert place.ups == 2 * place.downs
        total = sum(each.nbytes for each in homes)
        assert steps.bytes_moved == 5 * total  # down, up, down, up, down
        assert place.most_up < total
        assert {id(each) for each in (*homes, *tensors, *(each.grad for each in tensors))} <= set(
            place.rested
        )


@pytest.mark.parametrize("built", ["before", "between", "after"])
def test_optimizer_built_before_or_after(built):
    """Also one that has state already when streaming begins."""
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors)) if built != "after" else None
    done = 2 if built == "before" else 0
    if done:
        steps_of(tensors, optimizer, done)
    with streamed(tensors) as steps:
        optimizer = optimizer or optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 4 - done, done)
        assert steps.bytes_moved > 0
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())


def test_settle_takes_down_what_is_there():
    tensors = parameters()
    optimizer = optim.AdamW(tensors)
    steps_of(tensors, optimizer, 1)
    with streamed(tensors) as steps:
        steps.settle(optimizer)
        assert all(steps.is_down(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())


def test_state_without_a_gradient_goes_down_too():
    tensors = parameters()
    optimizer = optim.AdamW(tensors)
    steps_of(tensors, optimizer, 1)
    with streamed(tensors) as steps:
        give_gradients(tensors, 1, without=range(4))
        optimizer.step()
        assert all(steps.is_down(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())


def test_step_hooks_run_once_and_see_everything():
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors), foreach=False)
    seen = []

    def note(when):
        def hook(each, args, kwargs):
            assert each is optimizer
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            stepped = [bool(optimizer.state.get(tensor)) for tensor in tensors]
            seen.append((when, sizes, set(stepped)))

        return hook

    with streamed(tensors, bucket_bytes=1) as steps:
        handles = [
            optimizer.register_step_pre_hook(note("own before")),
            optimizer.register_step_post_hook(note("own after")),
            torch_optimizer.register_optimizer_step_pre_hook(note("all before")),
            torch_optimizer.register_optimizer_step_post_hook(note("all after")),
        ]
        give_gradients(tensors, 0)
        optimizer.step()
        for handle in handles:
            handle.remove()
    assert steps.buckets_run == len(tensors)
    sizes = [3, 1, 4]
    assert seen == [
        ("all before", sizes, {False}),
        ("own before", sizes, {False}),
        ("own after", sizes, {True}),
        ("all after", sizes, {True}),
    ]


def test_pre_hook_that_changes_gradients():
    def run(stream):
        tensors = parameters()
        optimizer = optim.AdamW(in_groups(tensors))

        def norm():
            return nn.utils.get_total_norm([each.grad for each in tensors])

        optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grads_with_norm_(tensors, 0.1, norm()))
        with streamed(tensors if stream else [], bucket_bytes=1):
            steps_of(tensors, optimizer, 3)
        return tensors

    assert_equal(run(True), run(False))


def test_schedulers():
    def run(stream):
        tensors = parameters()
        optimizer = optim.SGD(in_groups(tensors), lr=0.1, momentum=0.9)
        schedules = [
            optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2, 0.05], total_steps=6),  # cycles momentum, too
            optim.lr_scheduler.StepLR(optimizer, 2),
        ]
        seen = []
        with streamed(tensors if stream else [], bucket_bytes=1):
            for step in range(5):
                give_gradients(tensors, step)
                optimizer.step()
                for schedule in schedules:
                    schedule.step()
                seen.append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
        assert optimizer._opt_called
        return tensors, seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(run(True), run(False))


@pytest.mark.parametrize("keyword", [False, True])
def test_closure_is_evaluated_once(keyword):
    def run(stream):
        module = model()
        calls = []
        with streamed(module.parameters() if stream else [], bucket_bytes=1):
            optimizer = optim.AdamW(module.parameters())

            def closure():
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = loss_of(module, len(calls))
                loss.backward()
                return loss

            losses = [
                optimizer.step(closure=closure) if keyword else optimizer.step(closure) for _ in range(3)
            ]
        assert calls == [True] * 3
        return list(module.parameters()), losses

    assert_equal(run(True), run(False))


def test_two_optimizers():
    def run(stream):
        module = model()
        with streamed(module.parameters() if stream else [], bucket_bytes=1):
            one = optim.AdamW(module[:3].parameters())
            other = optim.SGD(module[3:].parameters(), lr=0.1, momentum=0.9)
            for step in range(4):
                loss_of(module, step).backward()
                one.step()
                other.step()
                one.zero_grad()
                other.zero_grad()
            return list(module.parameters()), one.state_dict(), other.state_dict()

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    """Fused optimizers unscale and look for infinities themselves; the others are not called after one."""

    def run(stream):
        module = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        with streamed(module.parameters() if stream else [], bucket_bytes=1) as steps:
            optimizer = optim.AdamW(module.parameters(), fused=fused)
            for step in range(5):
                loss = loss_of(module, step) * (float("inf") if step == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert not stream or steps.bytes_moved > 0
            return list(module.parameters()), optimizer.state_dict(), scaler.state_dict()

    assert_equal(run(True), run(False))


def test_gradient_accumulation_and_new_group():
    def run(stream):
        module, late = model(), parameters(((6, 6),))
        with streamed([*module.parameters(), *late] if stream else [], bucket_bytes=3000):
            optimizer = optim.AdamW(module[:3].parameters(), lr=0.01)
            for step in range(6):
                if step == 2:
                    optimizer.add_param_group({"params": module[4].parameters(), "lr": 0.1})
                if step == 4:
                    optimizer.add_param_group({"params": late})
                    late[0].grad = torch.ones(6, 6)
                for micro in range(2):
                    loss_of(module, 2 * step + micro).backward()
                optimizer.step()
                optimizer.zero_grad()
            return list(module.parameters()), late, optimizer.state_dict()

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("mapped", [False, True])
def test_state_dict_is_portable(mapped, tmp_path):
    """Saved streamed, resumed plain, and the other way round; equal to a run that was never stopped."""
    tensors = parameters()
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1):
        optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
        steps_of(tensors, optimizer, 2)
        file = io.BytesIO()
        torch.save((optimizer.state_dict(), tensors), file)
    file.seek(0)
    saved, tensors = torch.load(file, weights_only=True)
    tensors = [nn.Parameter(each) for each in tensors]
    optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
    optimizer.load_state_dict(saved)
    steps_of(tensors, optimizer, 1, 2)

    saved = copy.deepcopy(optimizer.state_dict())
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors), amsgrad=True)
        optimizer.load_state_dict(saved)
        steps_of(tensors, optimizer, 1, 3)
        assert steps.bytes_moved > 0
        assert_equal((tensors, optimizer.state_dict()), plain_adamw(amsgrad=True))


def test_load_state_dict_in_the_middle():
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [each.detach().clone() for each in tensors]
        steps_of(tensors, optimizer, 2, 10)  # a detour
        optimizer.load_state_dict(saved)
        for tensor, weight in zip(tensors, weights, strict=True):
            tensor.data.copy_(weight)
        steps_of(tensors, optimizer, 2, 2)
        assert all(steps.is_down(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mapped", [False, True])
def test_copies_are_plain_optimizers(way, mapped, tmp_path):
    tensors = parameters()
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        duplicate = copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        assert vars(duplicate).keys() == vars(pickle.loads(pickle.dumps(optim.AdamW(parameters())))).keys()
        before, run = steps.bytes_moved, steps.buckets_run
        others = [each for group in duplicate.param_groups for each in group["params"]]
        steps_of(others, duplicate, 2, 2)
        assert (steps.bytes_moved, steps.buckets_run) == (before, run)
        steps_of(tensors, optimizer, 2, 2)
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())
        assert_equal((others, duplicate.state_dict()), plain_adamw())


@pytest.mark.parametrize("mapped", [False, True])
def test_detach_leaves_nothing(mapped, tmp_path):
    before = (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    )
    tensors = parameters()
    optimizer = optim.AdamW(in_groups(tensors))
    attributes = dict(vars(optimizer))
    function = optim.AdamW.step.__closure__[0].cell_contents
    lists = [group["params"] for group in optimizer.param_groups]
    with streamed(tensors, Mapped(tmp_path) if mapped else Elsewhere(), bucket_bytes=1) as steps:
        steps_of(tensors, optimizer, 2)
    assert (
        dict(torch_optimizer._global_optimizer_pre_hooks),
        dict(torch_optimizer._global_optimizer_post_hooks),
    ) == before
    assert optim.AdamW.step.__closure__[0].cell_contents is function
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is attributes[name] for name in attributes)
    assert all(group["params"] is each for group, each in zip(optimizer.param_groups, lists, strict=True))
    for each in leaves(optimizer.state_dict()["state"]):
        assert not steps.is_down(each)
        assert not each.untyped_storage().is_shared()
    moved = steps.bytes_moved
    steps_of(tensors, optimizer, 1, 2)
    assert steps.bytes_moved == moved
    steps.attach()
    steps_of(tensors, optimizer, 1, 3)
    assert steps.bytes_moved > moved
    steps.detach()
    steps.detach()
    assert_equal((tensors, optimizer.state_dict()), plain_adamw())


def test_optimizers_of_others_are_not_touched():
    tensors, others = parameters(), parameters(seed=1)
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(others)
        steps_of(others, optimizer, 2)
        assert (steps.bytes_moved, steps.buckets_run, dict(steps.skipped)) == (0, 0, {})
        assert "__reduce_ex__" not in vars(optimizer)


def test_parameters_of_others_stay_up():
    tensors = parameters()
    with streamed(tensors[:4], bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 4)
        for index, tensor in enumerate(tensors):
            assert steps.is_down(optimizer.state[tensor]["exp_avg"]) == (index < 4)
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())


@pytest.mark.parametrize("first", [0, 1])
def test_two_of_them_on_one_optimizer(first):
    """Two wrapped models, one optimizer; detached in either order."""
    tensors = parameters()
    with streamed(tensors[4:], bucket_bytes=1) as inner:
        with streamed(tensors[:4], bucket_bytes=1) as outer:
            optimizer = optim.AdamW(in_groups(tensors))
            steps_of(tensors, optimizer, 2)
            assert all(
                (outer if index < 4 else inner).is_down(optimizer.state[tensor]["exp_avg"])
                for index, tensor in enumerate(tensors)
                if tensor.dim()
            )
            duplicate = copy.deepcopy(optimizer)
            (inner, outer)[first].detach()
            steps_of(tensors, optimizer, 1, 2)
    steps_of(tensors, optimizer, 1, 3)
    assert_equal((tensors, optimizer.state_dict()), plain_adamw())
    others = [each for group in duplicate.param_groups for each in group["params"]]
    steps_of(others, duplicate, 2, 2)
    assert_equal((others, duplicate.state_dict()), plain_adamw())
    assert "__reduce_ex__" not in vars(optimizer)


def test_in_several_threads():
    expected, results = plain_adamw(6), {}

    def train(index, tensors):
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 6)
        results[index] = (tensors, optimizer.state_dict())

    every = [parameters() for _ in range(3)]
    with streamed([each for tensors in every for each in tensors], bucket_bytes=1):
        threads = [threading.Thread(target=train, args=pair) for pair in enumerate(every)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(3):
            assert_equal(results[index], expected)


def test_compiled_step():
    tensors = parameters(((16, 16), (8, 8)))
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = Lion(tensors)
        step = torch.compile(optimizer.step, backend="eager")
        for index in range(2):
            give_gradients(tensors, index)
            step()
        assert steps.buckets_run == 4
    torch._dynamo.reset()


def test_nothing_is_kept_alive():
    """A model that is dropped without detaching is collected; an optimizer keeps what it needs."""
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    module, place = model(), Elsewhere()
    gone = weakref.ref(module), weakref.ref(place)
    module.steps = StreamedSteps(module.parameters(), place, 1, least_bytes=1)
    module.steps.attach()
    optimizer = optim.AdamW(module.parameters())
    for step in range(3):
        if step == 2:
            tensors = list(module.parameters())
            del module, place  # the optimizer goes on
            give_gradients(tensors, step)
        else:
            loss_of(module, step).backward()
        optimizer.step()
    assert tensors[0] in optimizer.state
    assert gone[1]().ups > 0
    del optimizer, tensors
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
    with streamed(parameters()):  # clears away after the one before
        assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks + 1
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    assert not isinstance(optim.AdamW.step.__closure__[0].cell_contents, Dispatcher)


def test_parameters_can_be_swapped():
    """``Module.to`` may exchange parameters as a whole, which no weak reference may stand against."""
    tensors = parameters()
    with streamed(tensors, bucket_bytes=1) as steps:
        optimizer = optim.AdamW(in_groups(tensors))
        steps_of(tensors, optimizer, 2)
        for each in tensors:
            each.grad = None
            torch.utils.swap_tensors(each, nn.Parameter(each.detach().clone()))
        steps_of(tensors, optimizer, 2, 2)
        assert steps.bytes_moved > 0
        assert_equal((tensors, optimizer.state_dict()), plain_adamw())
