"""Measure the rates of this machine once, and read them again wherever its hardware is described.

Note [Calibrated rates]
Plans never depend on a clock: times follow from a description of the hardware, whose rates come from tables. Where
`calibrate` has measured them they come from the file that it wrote, so that a plan is still the same on every run.

The file is `$XDG_CACHE_HOME/memscale/<kind>-<name>.json` (`~/.cache/memscale/...` by default): one for each device, so
that machines may share a home directory. `MEMSCALE_CALIBRATION` names another file, or "none" for tables. A file at the
default place that is damaged, or was measured with other cores, is ignored with a warning; one that was named is an
error. Rates of the disk are for one directory. A virtual GPU always has those of tables.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memscale.errors import ConfigTypeError, HardwareError, shown
from memscale.hardware.specs import DiskSpec, Hardware, MeasuredRates

if TYPE_CHECKING:
    import torch

CALIBRATION_VARIABLE = "MEMSCALE_CALIBRATION"
SCHEMA = 1
REPEATS = 5  # of each measurement, of which the fastest counts: whatever else runs only slows it down
TENSORS = 16  # parameters that Adam is measured with
CHUNK_BYTES = 2**23  # of a file, written or read at once
VIRTUAL_KINDS = ("virtual", "vgpu")  # of devices that are planned for, and simulated

logger = logging.getLogger("memscale")
_warned: set[Path] = set()  # files that were warned of in this process


def _silent(done: int, total: int) -> None:
    """Show no progress."""


def calibrate(
    path: str | os.PathLike[str] | None = None,
    *,
    device: torch.device | str | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    nbytes: int = 2**28,
    side: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Hardware:
    """Measure the rates of this machine, write them to a file, and return its description with them.

    Matrix products, memory, the link to the host, Adam on the host and the disk are timed, in some ten seconds; nothing
    else should run meanwhile. Plans made from then on take their times from the file. Delete it to return to tables.

    Args:
        path: The file; by default the device's in the user's cache directory (`memscale.hardware.calibrate` says
            where), which is read without being named. Set `MEMSCALE_CALIBRATION` to have another one read.
        device: The device, as of `hardware.detect`: the machine's best one by default.
        offload_dir: The directory of the disk tier, if `Config(offload_dir=...)` names one.
        nbytes: The size of what is copied, stepped and written, in bytes: much larger than caches.
        side: The number of rows and columns of matrices; 4096 by default, on a CPU 2048.
        progress: Called after each measurement, with how many are done and how many there are.

    Raises:
        HardwareError: There is no such device, it is virtual, or the file or the directory can't be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as there:
        ...     hardware = calibrate(f"{there}/rates.json", device="cpu", nbytes=2**20, side=64)
        >>> hardware.measured.fp32 > 0
        True
    """
    from memscale.hardware.detect import detect_by_tables  # which reads what is written here

    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ConfigTypeError(f"path={shown(path)} is a {type(path).__name__}: give a path, as str or Path.")
    hardware = detect_by_tables(device, offload_dir=offload_dir)
    if hardware.device.kind in VIRTUAL_KINDS:
        raise HardwareError(f"{hardware.device.name} is virtual: calibrate outside of the simulation.")
    target = Path(path or default_path(hardware)).expanduser()
    contents = measure_calibration(hardware, nbytes, side, progress or _silent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.new")  # whole or not at all
        new.write_text(json.dumps(contents, indent=1), encoding="utf-8")
        new.replace(target)
    except OSError as error:
        raise HardwareError(
            f"path={shown(str(target), 200)} can't be written: {error.strerror or error}. Give calibrate a file in "
            "a directory that you may write to."
        ) from error
    return read_calibration(target, hardware)


# -- the file


def default_path(hardware: Hardware) -> Path:
    """Return the file of a device. See Note [Calibrated rates]."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = re.sub(r"[^a-z0-9]+", "-", f"{hardware.device.kind}-{hardware.device.name}".lower()).strip("-")
    return cache / "memscale" / f"{name}.json"


def calibrated(hardware: Hardware) -> Hardware:
    """Return a machine's description with the rates that were measured of it, if any were.

    Raises:
        HardwareError: `MEMSCALE_CALIBRATION` names a file that can't be used.
    """
    named = os.environ.get(CALIBRATION_VARIABLE)
    path = Path(named).expanduser() if named else default_path(hardware)
    if named == "none" or hardware.device.kind in VIRTUAL_KINDS or not (named or path.is_file()):
        return hardware
    try:
        return read_calibration(path, hardware)
    except HardwareError as error:
        if named:
            raise HardwareError(
                f"{CALIBRATION_VARIABLE}={shown(named, 200)}: {error} Write the file with memscale.calibrate(path), or "
                "set the variable to 'none', for the rates of tables."
            ) from error
        if path not in _warned:
            _warned.add(path)
            logger.warning("%s is ignored: %s Call memscale.calibrate() to measure again.", path, error)
        return hardware


def read_calibration(path: Path, hardware: Hardware) -> Hardware:
    """Return a description with the rates of a file.

    Raises:
        HardwareError: The file can't be read, is not one of `calibrate`, or belongs to another device.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        if contents["schema"] != SCHEMA:
            raise ValueError(f"schema {contents['schema']!r} is not {SCHEMA}")
        of, rates, disk = contents["device"], MeasuredRates(**contents["rates"]), contents["disk"]
        numbers = {each.name: getattr(rates, each.name) for each in fields(rates) if each.name != "date"}
        optional = {each.name for each in fields(rates) if each.default is None}
        numbers |= {name: disk[name] for name in ("read_bandwidth", "write_bandwidth")}
        for name, value in numbers.items():
            is_missing = value is None and name in optional
            if not is_missing and (type(value) not in (int, float) or not 0 < value < math.inf):
                raise ValueError(f"{name}={value!r} is not a rate")
    except OSError as error:
        raise HardwareError(f"it can't be read ({error.strerror or error}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HardwareError(f"it is damaged ({type(error).__name__}: {shown(str(error))}).") from error
    if of != _identity(hardware):
        raise HardwareError(f"it was measured on {shown(of, 200)}, and this is {_identity(hardware)}.")
    if disk.pop("directory_sha256", None) == _digest(hardware.disk):
        hardware = replace(hardware, disk=replace(hardware.disk, **disk))
    return replace(hardware, measured=rates)


def _identity(hardware: Hardware) -> dict[str, object]:
    """Return what rates belong to: the device, and the cores that compute beside it."""
    return {"kind": hardware.device.kind, "name": hardware.device.name, "cores": hardware.host.cores}


def _digest(disk: DiskSpec) -> str:
    """Return what names a directory without telling where it is: users attach the file to bug reports."""
    return hashlib.sha256(os.fsencode(disk.directory)).hexdigest()


# -- measurements


def measure_calibration(
    hardware: Hardware,
    nbytes: int,
    side: int | None = None,
    progress: Callable[[int, int], object] = _silent,
) -> dict[str, Any]:
    """Measure, and return what the file is to contain. The arguments are those of `calibrate`."""
    return {
        "schema": SCHEMA,
        "device": _identity(hardware),
        "rates": asdict(measure(hardware, nbytes, side, progress)),
        "disk": measure_disk(hardware.disk, nbytes),
    }


def measure(
    hardware: Hardware,
    nbytes: int,
    side: int | None = None,
    progress: Callable[[int, int], object] = _silent,
) -> MeasuredRates:
    """Time the device, its link to the host, and Adam on the host. The arguments are those of `calibrate`.

    The disk comes after it, and counts as one more for `progress`.
    """
    import torch

    spec = hardware.device
    device = torch.device(spec.kind) if spec.index is None else torch.device(spec.kind, spec.index)
    is_cpu = device.type == "cpu"
    side = side or (2048 if is_cpu else 4096)
    # Not random, for the user's generators; not constant, which is cheaper to multiply.
    numbers = torch.arange(side * side, device=device, dtype=torch.float32).mul_(0.618034).remainder_(1.0)

    def wait() -> None:
        if not is_cpu:
            torch.get_device_module(device).synchronize(device)

    def product_rate(dtype: torch.dtype, precision: str = "ieee") -> float:
        matrix = numbers.reshape(side, side).to(dtype)
        backends: Any = torch.backends
        switches = [backends.cuda.matmul, backends.mkldnn.matmul]
        before = [each.fp32_precision for each in switches]
        try:
            for each in switches:
                each.fp32_precision = precision
            return 2 * side**3 / _seconds(lambda: matrix @ matrix, wait)
        finally:
            for each, then in zip(switches, before, strict=True):
                each.fp32_precision = then

    half = torch.bfloat16 if spec.supports_bf16 else torch.float16
    has_half = spec.supports_bf16 or (spec.supports_fp16 and not is_cpu)  # a CPU may take minutes for fp16
    source, target = (torch.ones(nbytes // 4, device=device) for _ in range(2))
    bandwidth = partial(_seconds, lambda: torch.add(source, 1.0, out=target), wait)
    measurements: list[Callable[[], dict[str, float | None]]] = [
        lambda: {"fp32": product_rate(torch.float32)},
        lambda: {"tf32": product_rate(torch.float32, "tf32") if spec.rates.tf32 and not is_cpu else None},
        lambda: {"half": product_rate(half) if has_half else None},
        lambda: {"memory_bandwidth": 2 * source.nbytes / bandwidth()},
        lambda: {"host_adam_loop": _adam_seconds(nbytes, fused=False)},
        lambda: {"host_adam_fused": _adam_seconds(nbytes, fused=True)},
        lambda: {} if is_cpu else {**_link_rates(target, wait)},
    ]
    rates: dict[str, Any] = {}
    for number, measurement in enumerate(measurements, start=1):
        rates |= measurement()
        progress(number, len(measurements) + 1)
    return MeasuredRates(date=time.strftime("%Y-%m-%d"), **rates)


def _link_rates(on_device: torch.Tensor, wait: Callable[[], object]) -> dict[str, float]:
    import torch

    pageable = torch.ones(on_device.shape, device="cpu")
    try:
        pinned = pageable.pin_memory()
    except RuntimeError as error:  # the system may have none to give, as WSL
        logger.warning("No memory could be page-locked (%s): such copies count as others do.", error)
        pinned = pageable
    rates: dict[str, float] = {}
    for prefix, host in (("", pinned), ("pageable_", pageable)):
        h2d = _seconds(partial(on_device.copy_, host, non_blocking=True), wait)
        d2h = _seconds(partial(host.copy_, on_device, non_blocking=True), wait)
        rates |= {f"{prefix}h2d": host.nbytes / h2d, f"{prefix}d2h": host.nbytes / d2h}
    return rates


def _adam_seconds(nbytes: int, *, fused: bool) -> float:
    """Return the seconds of AdamW's step on the host for each byte of fp32 parameters."""
    import torch

    count = nbytes // 16 // TENSORS  # with gradients and two moments
    parameters = [torch.zeros(count, device="cpu", requires_grad=True) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=False, fused=fused)
    return _seconds(optimizer.step) / sum(parameter.nbytes for parameter in parameters)


def _seconds(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return the time of the fastest of some calls, after one that warms up."""
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def measure_disk(disk: DiskSpec, nbytes: int) -> dict[str, Any]:
    """Time a file of the disk tier: written until it is on the disk, and read again without the system's cache.

    A rate that can't be measured stays what it was assumed to be.
    """
    rates = {"read_bandwidth": disk.read_bandwidth, "write_bandwidth": disk.write_bandwidth}
    nbytes = max(CHUNK_BYTES, nbytes)
    if disk.writable and disk.free_bytes > 2 * nbytes:
        chunk = os.urandom(CHUNK_BYTES)  # a file system may compress
        try:
            disk.directory.mkdir(0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=disk.directory, buffering=0) as file:
                start = time.perf_counter()
                written = sum(file.write(chunk) for _ in range(nbytes // CHUNK_BYTES))
                os.fsync(file)
                rates["write_bandwidth"] = written / (time.perf_counter() - start)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    file.seek(0)
                    start = time.perf_counter()
                    while file.read(CHUNK_BYTES):
                        pass
                    rates["read_bandwidth"] = written / (time.perf_counter() - start)
        except OSError as error:
            raise HardwareError(
                f"offload_dir={shown(str(disk.directory), 200)} can't be timed: {error.strerror or error}. "
                "Give another directory."
            ) from error
    return {"directory_sha256": _digest(disk), **rates}
