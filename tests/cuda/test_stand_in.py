"""The stand-in itself: copies as late as CUDA allows, memory that ends, errors that a test asks for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fakecuda.build


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


@pytest.mark.parametrize(
    ("call", "act"),
    [
        (b"cudaHostAlloc", lambda: torch.empty(2**25, pin_memory=True)),
        (b"cudaEventCreateWithFlags", lambda: torch.cuda.Event().record()),
        (b"cudaEventRecordWithFlags", lambda: torch.cuda.Event().record()),
        (b"cudaStreamWaitEvent", lambda: torch.cuda.Stream().wait_stream(torch.cuda.current_stream())),
        (b"cudaMemcpyAsync", lambda: torch.zeros(8).cuda()),
        (b"cudaLaunchKernel", lambda: torch.zeros(8, device="cuda") + 1),
        (b"cublasSetStream_v2", lambda: torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")),
        (b"cudaDeviceSynchronize", torch.cuda.synchronize),
    ],
    ids=lambda each: each.decode() if isinstance(each, bytes) else "",
)
def test_an_error_is_raised_once(call: bytes, act: Callable[[], object], runtime: ctypes.CDLL) -> None:
    torch.cuda.synchronize()
    assert runtime.fakecuda_fail(call, 0, 3) == 0
    with pytest.raises(RuntimeError):
        act()
    assert runtime.fakecuda_succeed() == 0, "no other error is to come"
    act()


NEVER_FAIL = {"cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError", "cudaPeekAtLastError"}


def test_each_call_fails_where_an_error_can_be_asked_for(runtime: ctypes.CDLL) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", runtime._name], capture_output=True, text=True, check=True
    )
    calls = {line.split()[-1] for line in listed.stdout.splitlines() if " T " in line}
    calls = {each for each in calls if not each.startswith("fakecuda_")}
    assert len(calls) > 90
    torch.cuda.synchronize()
    memory = ctypes.create_string_buffer(4096)
    refused = set()
    for call in sorted(calls):
        if runtime.fakecuda_fail(call.encode(), 0, 3) != 0:
            refused.add(call)
            continue
        assert runtime[call](*[ctypes.byref(memory)] * 10) == 3, call
        assert runtime.fakecuda_succeed() == 0, call
    runtime.cudaGetLastError()  # which torch would raise
    assert refused == {*NEVER_FAIL, "__cudaLaunchKernel"}, "the last one fails as cudaLaunchKernel"


def test_an_error_is_asked_for_only_where_it_can_be(runtime: ctypes.CDLL) -> None:
    assert runtime.fakecuda_fail(b"cudaNoSuchCall", 0, 2) == -1
    assert runtime.fakecuda_fail(b"malloc", 0, 2) == -1
    assert runtime.fakecuda_fail(b"fakecuda_used", 0, 2) == -1


# In the end torch's thread of backward must have let go of its work: else it takes the lock of a Python that ends, on
# a card as well, which aborts the process (pytorch#38228).
USE = """
import time

import torch

model = torch.nn.Linear(8, 8).cuda()
torch.zeros(8).pin_memory().to("cuda", non_blocking=True)
with torch.cuda.stream(torch.cuda.Stream()):
    model(torch.zeros(8, 8, device="cuda")).sum().backward()
time.sleep(0.2)
"""


@pytest.mark.parametrize("copies", ["now", "late", "poisoned", "random"])
def test_a_process_ends_without_a_word(copies: str, runtime: ctypes.CDLL) -> None:
    environment = {**os.environ, "FAKECUDA_COPIES": copies, "FAKECUDA_DEVICES": "2"}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COPIES", "sometimes"),
        ("DEVICES", "0"),
        ("DEVICES", "9"),
        ("DEVICES", "two"),
        ("MEMORY", "24GiB"),
        ("PAGE_LOCKS", "no"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_the_process(name: str, value: str, runtime: ctypes.CDLL) -> None:
    environment = {**os.environ, f"FAKECUDA_{name}": value}
    done = subprocess.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True)
    assert done.returncode == 78
    assert f"FAKECUDA_{name}" in done.stderr
    assert done.stderr.endswith(f"not {value}.\n")


def test_the_size_of_a_card_is_a_setting(runtime: ctypes.CDLL) -> None:
    code = "import torch; print(*torch.cuda.mem_get_info())"
    environment = {**os.environ, "FAKECUDA_MEMORY": str(3 * 2**30), "FAKECUDA_CONTEXT": str(2**28)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(3 * 2**30 - 2**28), str(3 * 2**30)]


DRIVERS = {
    "linux": "mount -t tmpfs none /dev && touch /dev/nvidiactl",
    # Of a copy of /usr/lib that only this namespace has.
    "wsl2": "mount -t tmpfs none /mnt && mkdir /mnt/upper /mnt/work && "
    "mount -t overlay none -o lowerdir=/usr/lib,upperdir=/mnt/upper,workdir=/mnt/work /usr/lib && "
    "mkdir -p /usr/lib/wsl/lib && touch /usr/lib/wsl/lib/libcuda.so.1",
}


@pytest.mark.parametrize("system", list(DRIVERS))
def test_it_refuses_to_load_beside_a_driver(system: str, runtime: ctypes.CDLL) -> None:
    """In a namespace with the file of a driver."""
    with_driver = ["unshare", "-rm", "sh", "-c", f'{DRIVERS[system]} && "$@"', "-"]
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    if subprocess.run([*with_driver, "true"], env=plain, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make namespaces")
    loaded = ["env", f"LD_PRELOAD={os.environ['LD_PRELOAD']}", sys.executable, "-c", "print('loaded')"]
    done = subprocess.run([*with_driver, *loaded], env=plain, capture_output=True, text=True)
    assert done.returncode == 78
    assert "run the tests on it" in done.stderr
    assert not done.stdout
    build = [sys.executable, fakecuda.build.__file__]
    done = subprocess.run([*with_driver, *build], env=plain, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.count("use the card")) == ("", 1)


def test_a_torch_without_cuda_is_named(tmp_path: Path, runtime: ctypes.CDLL) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, fakecuda.build.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "is not built for CUDA" in done.stderr


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
