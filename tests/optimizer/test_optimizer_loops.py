"""Training loops as people write them, with streamed steps: nothing they can see is different."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from support.optimizers import (
    Elsewhere,
    assert_equal,
    give_gradients,
    in_groups,
    leaves,
    loss_of,
    model,
    parameters,
    plain_adamw,
    steps_of,
    streamed,
)


def test_state_is_elsewhere_between_steps():
    tensors = parameters()
    place = Elsewhere()
    with streamed(tensors, place, bucket_bytes=6000) as steps:
        optimizer = optim.AdamW(tensors)
        steps_of(tensors, optimizer, 3)
        homes = [each for each in leaves(optimizer.state_dict()["state"]) if each.dim()]
        assert all(steps.is_stored(each) for each in homes)
        large = [each for each in tensors if each.dim()]
        assert place.allocations == 2 * len(large)  # once, then the values go back into the same tensors
        assert place.loads == 2 * place.allocations
        total = sum(each.nbytes for each in homes)
        assert steps.bytes_moved == 5 * total  # down, up, down, up, down
        assert place.most_loaded < total
        assert {id(each) for each in (*homes, *tensors, *(each.grad for each in tensors))} <= set(
            place.released
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
        steps.store_state(optimizer)
        assert all(steps.is_stored(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())


def test_state_without_a_gradient_goes_down_too():
    tensors = parameters()
    optimizer = optim.AdamW(tensors)
    steps_of(tensors, optimizer, 1)
    with streamed(tensors) as steps:
        give_gradients(tensors, 1, without=range(4))
        optimizer.step()
        assert all(steps.is_stored(each) for each in leaves(optimizer.state_dict()["state"]) if each.dim())


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
