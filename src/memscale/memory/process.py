"""Resident memory (RSS) of this process, and of a function in a fresh process.

Note [Malloc threshold]
glibc serves large blocks by mappings (unmapped when freed) and smaller ones from the heap (mostly kept for reuse). The
threshold starts at 128 KiB and grows to 32 MiB as large blocks are freed: after a while most tensors are on the heap,
and RSS is 6 to 20% above what is in use, different in every run. With a fixed threshold the peak of RSS is that of the
tensors to 1 or 2%, repeatable to 1 MiB. Setting it stops the growing for the rest of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import multiprocessing
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from memscale.errors import ProfileError

T = TypeVar("T")

_THRESHOLD = 65536
_GLIBC_START_THRESHOLD = 128 * 2**10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def fix_malloc_threshold(threshold: int = _THRESHOLD) -> bool:
    """Return blocks of `threshold` bytes or more (at most 32 MiB) to the system when freed; False without glibc."""
    # See Note [Malloc threshold].
    mallopt = _mallopt() if sys.platform.startswith("linux") else None
    if mallopt is None:
        return False
    # The second returns a free tail of the heap, as the first returns a mapping.
    results = [mallopt(option, threshold) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(result == 1 for result in results)


def restore_malloc_threshold() -> bool:
    """Set the thresholds back to what glibc starts with; its own adjusting can't be turned on again."""
    return fix_malloc_threshold(_GLIBC_START_THRESHOLD)


@functools.cache  # a library opened by ctypes is a reference cycle
def _mallopt() -> Callable[[int, int], int] | None:
    """Return glibc's `mallopt`; None where the C library has none, as musl."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
        mallopt.restype = ctypes.c_int
    return mallopt


def rss_bytes() -> int:
    """Return the physical memory of this process now; a `ProfileError` where the system is not Linux."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return the largest physical memory of this process since it started or since `reset_peak_rss`."""
    # Accurate to a few hundred KiB: the kernel sums up its counters per core with a delay.
    return _status_bytes("VmHWM")


def reset_peak_rss() -> bool:
    """Set the peak to the present RSS; return False where the system does not offer that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: the peak only, see proc(5)
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise ProfileError(
            "The memory of a process is read from /proc/self/status, which is not readable on this "
            f"{platform.system()}: measure on Linux, or count tensor bytes with torch.profiler instead."
        ) from error
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024  # "  123456 kB", and by kB it means KiB
    raise ProfileError(f"/proc/self/status of this kernel has no {key}: measure on another Linux host.")


@dataclass(frozen=True)
class ProcessMeasurement(Generic[T]):
    """The memory and time of a function in a process of its own."""

    peak_bytes: int  # the largest physical memory of the process while the function ran
    baseline_bytes: int  # its memory just before: Python, torch and the other imports
    seconds: float  # how long the function ran, without imports
    result: T  # what it returned

    @property
    def peak_above_import_bytes(self) -> int:
        return max(0, self.peak_bytes - self.baseline_bytes)


def measure_in_fresh_process(
    function: Callable[..., T], *args: object, imports: Sequence[str] = (), **kwargs: object
) -> ProcessMeasurement[T]:
    """Run `function(*args, **kwargs)` in a new Python process and measure its memory there.

    The malloc threshold is fixed in that process (Note [Malloc threshold]), which makes the peak repeatable. Pages of
    memory-mapped files count, as they do in RSS. What the function prints is dropped.

    Args:
        function: A function that `multiprocessing` can start: at the top level of a module, with arguments and a
            result that can be pickled.
        args: Its arguments; `kwargs` are its keyword arguments.
        imports: Modules to import before the baseline is read, besides torch and the function's own.

    Raises:
        ProfileError: The process failed (the message ends with its traceback), or the system is not Linux.

    Example:
        >>> import math
        >>> measured = measure_in_fresh_process(math.factorial, 5)
        >>> measured.result, measured.peak_bytes >= measured.baseline_bytes
        (120, True)
    """
    rss_bytes()  # fails here, with its reason, where the new process would fail after seconds of imports
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, function, args, kwargs, list(imports)))
    with _sigint_ignored():  # which the process inherits: Ctrl-C is this one's to handle
        process.start()
    sender.close()
    try:
        answer: ProcessMeasurement[T] | str | None = receiver.recv()
    except EOFError:
        answer = None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
    if isinstance(answer, ProcessMeasurement):
        return answer
    if process.exitcode == -signal.SIGKILL:
        how = "was killed by SIGKILL, which is mostly the system running out of memory: try a smaller case"
    elif answer is None:
        how = f"ended with exit code {process.exitcode} before the function returned"
    else:
        how = f"failed:\n{answer}"
    raise ProfileError(f"The process that measured {function.__qualname__} {how}")


@contextlib.contextmanager
def _sigint_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _measure(
    sender: Connection,
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    imports: list[str],
) -> None:
    """Import, read the baseline, call the function and send the measurement, in the new process."""
    fix_malloc_threshold()
    try:
        for name in ("torch", *imports):
            importlib.import_module(name)
        reset_peak_rss()  # imports have a peak of their own
        baseline = rss_bytes()
        start = time.perf_counter()
        with contextlib.redirect_stdout(None):
            result = function(*args, **kwargs)
        seconds = time.perf_counter() - start
        sender.send(ProcessMeasurement(peak_rss_bytes(), baseline, seconds, result))
    except Exception:
        sender.send(traceback.format_exc())
