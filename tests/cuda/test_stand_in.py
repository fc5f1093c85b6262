"""The stand-in itself: copies as late as CUDA allows, memory that ends, errors that a test asks for."""

from __future__ import annotations

import ctypes

import pytest
import torch


def test_an_asynchronous_copy_is_seen_only_by_who_waits(runtime: ctypes.CDLL) -> None:
    runtime.fakecuda_set_copies(b"poisoned")
    on_device = torch.arange(8.0).pin_memory().to("cuda", non_blocking=True)
    landing = torch.empty(8, pin_memory=True)
    landing.copy_(on_device, non_blocking=True)
    assert landing.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert landing.tolist() == list(range(8))


def test_a_copy_to_pageable_memory_is_there_at_once(runtime: ctypes.CDLL) -> None:
    runtime.fakecuda_set_copies(b"late")
    assert torch.arange(8.0).to("cuda", non_blocking=True).to("cpu").tolist() == list(range(8))


def test_a_stream_waits_for_an_event_of_another(runtime: ctypes.CDLL) -> None:
    runtime.fakecuda_set_copies(b"late")
    other, event = torch.cuda.Stream(), torch.cuda.Event()
    source, target = torch.ones(8).pin_memory(), torch.zeros(8, device="cuda")
    landing = torch.zeros(8, pin_memory=True)
    with torch.cuda.stream(other):
        target.copy_(source, non_blocking=True)
        event.record()
    landing.copy_(target, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert landing.tolist() == [0.0] * 8, "nothing waited for the other stream"
    torch.cuda.current_stream().wait_event(event)
    landing.copy_(target, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert landing.tolist() == [1.0] * 8


def test_the_card_is_full_at_some_point(runtime: ctypes.CDLL) -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    assert torch.empty(2**20, device="cuda").numel() == 2**20


def test_page_locking_can_be_refused(runtime: ctypes.CDLL) -> None:
    runtime.fakecuda_set_page_locks(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(2**27, dtype=torch.uint8, pin_memory=True)


def test_any_call_can_be_made_to_fail(runtime: ctypes.CDLL) -> None:
    torch.cuda.empty_cache()
    for _ in range(2):  # torch frees its cache and tries once more
        runtime.fakecuda_fail(b"cudaMalloc", 0, 2)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**26, dtype=torch.uint8, device="cuda")
    assert torch.empty(2**26, dtype=torch.uint8, device="cuda").numel() == 2**26


def test_numbers_of_the_cpu(computing, runtime: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )
    x = torch.randn(3, 8)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with computing():
        model.cuda()
        model(x.cuda()).square().sum().backward()
        found = [parameter.grad.cpu() for parameter in model.parameters()]
    assert all(map(torch.equal, found, expected))
