"""Config: what the user asks for, with a check for every setting."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypedDict, cast

from memscale.errors import ConfigError, ConfigTypeError, shown
from memscale.units import BYTES_PER_GB, parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["AsyncOffloadConfig", "Config", "ConfigFields", "OptimizationMode"]


class OptimizationMode(str, Enum):
    """How hard to press for memory; fields set on a Config win over its mode. Its name, in any case, serves as well.

    Example:
        >>> OptimizationMode("Aggressive") is OptimizationMode.AGGRESSIVE
        True
    """

    CONSERVATIVE = "conservative"
    """For a model that nearly fits: checkpointing, at the smallest slowdown."""
    BALANCED = "balanced"
    """For most models: checkpointing and offloading, time for memory at a fair rate."""
    AGGRESSIVE = "aggressive"
    """For a model that must fit: all five techniques, whatever it takes."""

    def __str__(self) -> str:
        # The default differs between Python versions.
        return self.value

    @classmethod
    def _missing_(cls, value: object) -> OptimizationMode:
        return _mode("mode", value)


# ---------------------------------------------------------------------- checks
# Each takes a field's name and value, and returns the value to store or raises.

_Check = Callable[[str, object], object]


def _setting(default: Any, check: _Check) -> Any:
    """Declare a field with the check that its values pass."""
    return dataclasses.field(default=default, metadata={"check": check})


def _refusal(field: str, value: object, allowed: str) -> str:
    return f"{field}={shown(value)} is not allowed: {field} must be {allowed}."


def _mode(field: str, value: object) -> OptimizationMode:
    if isinstance(value, OptimizationMode):
        return value
    allowed = "one of " + ", ".join(repr(mode.value) for mode in OptimizationMode)
    if not isinstance(value, str):
        raise ConfigTypeError(_refusal(field, value, f"an OptimizationMode or {allowed}"))
    for mode in OptimizationMode:
        if mode.value == value.strip().lower():
            return mode
    raise ConfigError(_refusal(field, value, allowed))


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigTypeError(_refusal(field, value, "True or False"))
    return value


def _number(kind: type[int] | type[float], allowed: str, accepts: Callable[[float], bool]) -> _Check:
    def check(field: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise ConfigTypeError(_refusal(field, value, allowed))
        try:
            is_allowed = math.isfinite(value) and accepts(value)
        except OverflowError:  # an int past the range of floats
            is_allowed = False
        if not is_allowed:
            raise ConfigError(_refusal(field, value, allowed))
        return kind(value)

    return check


def _optional(check: _Check) -> _Check:
    return lambda field, value: None if value is None else check(field, value)


def _path(field: str, value: object) -> str:
    allowed = "a path (str or os.PathLike) or None"
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise ConfigTypeError(_refusal(field, value, allowed))
    if not path:
        raise ConfigError(_refusal(field, value, f"{allowed}, and not empty"))
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise ConfigError(
            _refusal(field, value, f"{allowed} that the system can take, without NUL or lone surrogates")
        )
    return path


def _memory_budget(field: str, value: object) -> int | str:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    size = parse_bytes(cast("int | str", value), field=field)  # refuses other types itself
    if size < 1024:
        # Nobody trains in a kilobyte: `memory_budget=6` is a unit forgotten.
        raise ConfigError(
            f'{field}={shown(value)} is {size} bytes, too little for any model: add the unit, as in "6GB".'
        )
    return value.strip() if isinstance(value, str) else size


def _async_config(field: str, value: object) -> AsyncOffloadConfig:
    if not isinstance(value, AsyncOffloadConfig):
        raise ConfigTypeError(
            _refusal(field, value, "None or an AsyncOffloadConfig, as AsyncOffloadConfig(workers=2)")
        )
    return value


def _gb_to_bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * BYTES_PER_GB)


_offload_limit = _optional(
    _number(float, "a number of GB (10⁹ bytes), 0 for none, or None for what is free", lambda gb: gb >= 0)
)
_share = _number(float, "a share above 0 and at most 1, such as 0.85 for 85%", lambda share: 0 < share <= 1)
_port = _number(
    int, "a port from 0 (any that is free) to 65535, or None for no metrics", lambda port: 0 <= port <= 65535
)
_steps = _number(int, "a whole number, 0 or more", lambda steps: steps >= 0)
_depth = _number(
    int,
    "a whole number of layers, 1 or more (for no prefetch at all, async_offload=False)",
    lambda depth: depth >= 1,
)
_pool = _number(
    float, "a number of GB (10⁹ bytes) above 0, or None to size it from the plan", lambda gb: gb > 0
)
_threads = _number(int, "a whole number of threads, 1 or more", lambda workers: workers >= 1)
_batches = _number(int, "a whole number of batches, 1 or more", lambda batches: batches >= 1)


# ---------------------------------------------------------------------- the settings


@dataclass(frozen=True)
class AsyncOffloadConfig:
    """How transfers overlap with compute while layers are offloaded.

    Attributes:
        prefetch_depth: How many layers ahead of the one that computes are fetched. More hides slower links,
            and holds that many more layers on the device.
        pinned_pool_gb: The most page-locked host memory, for offloaded parameters, gradients and activations, in GB
            (10⁹ bytes). None: half of what may be offloaded to the host, for all models of a process together.
        workers: Threads that move tensors.

    Raises:
        ConfigError: A value is out of range.
        ConfigTypeError: A value has the wrong type.

    Example:
        >>> AsyncOffloadConfig(prefetch_depth=3)
        AsyncOffloadConfig(prefetch_depth=3, pinned_pool_gb=None, workers=2)
    """

    prefetch_depth: int = _setting(1, _depth)
    pinned_pool_gb: float | None = _setting(None, _optional(_pool))
    workers: int = _setting(2, _threads)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = field.metadata["check"](f"async_config.{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def pinned_pool_bytes(self) -> int | None:
        """Return `pinned_pool_gb` in bytes."""
        return _gb_to_bytes(self.pinned_pool_gb)


_MODE_DEFAULTS: dict[OptimizationMode, dict[str, object]] = {
    OptimizationMode.CONSERVATIVE: {"enable_offloading": False},
    OptimizationMode.BALANCED: {},
    OptimizationMode.AGGRESSIVE: {
        "enable_tiling": True,
        "use_mixed_precision": True,
        "use_8bit_optimizer": True,
    },
}


class ConfigFields(TypedDict, total=False):
    """The keywords of Config, as wide as they are taken. The attributes of a Config are narrower."""

    mode: OptimizationMode | str
    enable_checkpointing: bool
    enable_offloading: bool
    enable_tiling: bool
    use_mixed_precision: bool
    use_8bit_optimizer: bool
    max_cpu_offload_gb: float | None
    target_gpu_utilization: float
    force_optimize: bool
    use_static_profiling: bool
    use_empirical_fallback: bool
    warmup_steps: int
    enable_logging: bool
    log_file: str | os.PathLike[str] | None
    observability_port: int | None
    verify_correctness: bool
    async_offload: bool
    async_config: AsyncOffloadConfig | None
    auto_policy: bool
    memory_budget: int | str | None
    offload_dir: str | os.PathLike[str] | None
    max_disk_offload_gb: float | None
    fused_host_step: bool
    overlap_optimizer: bool | None
    gradient_accumulation_steps: int


@dataclass(frozen=True, init=False, repr=False)
class Config:
    """What to optimize, how hard, and with which limits.

    A field that is set wins over the default of the mode: CONSERVATIVE turns offloading off, and AGGRESSIVE turns
    tiling, mixed precision and the 8-bit optimizer on, unless that field is given. The attributes show what holds,
    :attr:`explicit_fields` which of them were given. Two Configs are equal when the same values hold, given or not.

    Args:
        mode: An :class:`OptimizationMode` or its name.
        enable_checkpointing: May recompute activations in the backward pass instead of keeping them.
        enable_offloading: May keep parameters, gradients, optimizer state and activations off the device.
        enable_tiling: May compute MLPs and the loss in tiles, and eager attention by torch's SDPA. On in AGGRESSIVE. On
            a CPU, BALANCED may compute the loss in tiles as well where the logits are large (64 MiB); False forbids it.
        use_mixed_precision: May compute in 16 bits. On in AGGRESSIVE.
        use_8bit_optimizer: May keep Adam's moments in 8 bits. On in AGGRESSIVE.
        max_cpu_offload_gb: The most host memory to offload to, in GB (10⁹ bytes). 0: none; None: what is free, less a
            reserve of up to a sixteenth of the RAM, divided by the processes that torchrun has started on the host.
        target_gpu_utilization: The share of the device's memory that a plan may fill, above 0 and at most 1.
        force_optimize: Optimize also a model that fits as it is.
        use_static_profiling: Profile without running the model, on fake tensors.
        use_empirical_fallback: Where that fails, run the model to profile it.
        warmup_steps: Training steps in which the loop is observed before optimizer steps overlap with backward.
        enable_logging: Log the hardware and the plan.
        log_file: A file to log to as well.
        observability_port: Serve metrics for Prometheus on this port of 127.0.0.1; 0 for any that is free.
        verify_correctness: Before the first training batch is trained on, compare loss and gradients of a step with
            those of the plain model, and raise a VerificationError if they differ by more than the plan's techniques
            may. It takes two steps, and host memory for the gradients of both.
        async_offload: Overlap transfers with compute. If it is not given, a plan does so where it has room for that and
            it pays; True: always; False: never.
        async_config: How; see :class:`AsyncOffloadConfig`.
        auto_policy: Let the learned policy choose mode, techniques and memory budget, for the most samples a second.
            Fields that are set are kept, and `use_mixed_precision` and `use_8bit_optimizer` as they are. Where it was
            not trained, or what it chooses does not fit, the rules decide; `plan.decision_source` says who did.
        memory_budget: Take the fastest plan that fits this size: `"6GB"`, `"6GiB"`, a number of bytes, or
            `"auto"` for `target_gpu_utilization` of the device.
        offload_dir: Where the disk tier keeps its files.
        max_disk_offload_gb: The most disk to offload to, in GB (10⁹ bytes). 0: none; None: what is free. Below an
            accelerator the disk is used where nothing fits with the host memory that there is, or that is allowed.
        fused_host_step: Where the CPU steps parameters that are on the host of an accelerator, do it by torch's fused
            implementation, where the optimizer has one and was given neither `foreach` nor `fused`: several times as
            fast as torch's loop, with other last bits. False: to the bit as the plain model.
        overlap_optimizer: Compute steps whose state is on the host while backward goes on, and commit them by
            `optimizer.step()` if nothing has changed in between, else as always: the numbers are the same. Not seen
            is a change of a few elements of optimizer state on the host, through `.data`, between backward and
            `step()`. None: once the loop was seen to leave gradients as backward makes them; True: plan for that from
            the start; False: never.
        gradient_accumulation_steps: Batches for each `optimizer.step()`: a plan spreads the time of a step over so
            many, and counts the gradients that wait for it. Nothing is accumulated by it; the loop does that. If
            it is not given, a `Trainer`'s own is taken, or what a loop is seen to do in its first two steps.

    Raises:
        ConfigError: A value is out of range.
        ConfigTypeError: A value has the wrong type, or there is no such field.

    Example:
        >>> config = Config(mode="aggressive", enable_tiling=False)
        >>> config.enable_tiling, config.use_8bit_optimizer
        (False, True)
        >>> config.replace(mode="balanced")
        Config(mode='balanced', enable_tiling=False)
    """

    mode: OptimizationMode = _setting(OptimizationMode.BALANCED, _mode)  # noqa: RUF009
    enable_checkpointing: bool = _setting(True, _boolean)
    enable_offloading: bool = _setting(True, _boolean)
    enable_tiling: bool = _setting(False, _boolean)
    use_mixed_precision: bool = _setting(False, _boolean)
    use_8bit_optimizer: bool = _setting(False, _boolean)
    max_cpu_offload_gb: float | None = _setting(None, _offload_limit)
    target_gpu_utilization: float = _setting(0.85, _share)
    force_optimize: bool = _setting(False, _boolean)
    use_static_profiling: bool = _setting(True, _boolean)
    use_empirical_fallback: bool = _setting(True, _boolean)
    warmup_steps: int = _setting(2, _steps)
    enable_logging: bool = _setting(True, _boolean)
    log_file: str | None = _setting(None, _optional(_path))
    observability_port: int | None = _setting(None, _optional(_port))
    verify_correctness: bool = _setting(False, _boolean)
    async_offload: bool = _setting(False, _boolean)
    async_config: AsyncOffloadConfig | None = _setting(None, _optional(_async_config))  # noqa: RUF009
    auto_policy: bool = _setting(False, _boolean)
    memory_budget: int | str | None = _setting(None, _optional(_memory_budget))
    offload_dir: str | None = _setting(None, _optional(_path))
    max_disk_offload_gb: float | None = _setting(None, _offload_limit)
    fused_host_step: bool = _setting(True, _boolean)
    overlap_optimizer: bool | None = _setting(None, _optional(_boolean))
    gradient_accumulation_steps: int = _setting(1, _batches)

    # `dataclasses.replace` calls the class with every field, so that it would set them all. It passes init-only
    # variables as well, by which such a call is known.
    _dataclasses_replace: InitVar[bool] = True

    def __init__(self, *positional: object, **given: Unpack[ConfigFields]) -> None:
        settings: dict[str, object] = {**given}
        if positional:
            raise ConfigTypeError(
                f"Config takes keywords only, and got {shown(positional[0])}: name the field, "
                "as in Config(mode='balanced')."
            )
        if settings.get("_dataclasses_replace") is True:
            raise ConfigTypeError(
                "dataclasses.replace() would set every field, and none would follow the mode: use config.replace(...)."
            )
        fields = {field.name: field for field in dataclasses.fields(self)}
        unknown = next((name for name in settings if name not in fields), None)
        if unknown is not None:
            import difflib  # only for a message: it is not free to import

            nearest = difflib.get_close_matches(unknown, fields, n=1, cutoff=0.5)
            advice = f"Did you mean {nearest[0]!r}?" if nearest else f"It has: {', '.join(fields)}."
            raise ConfigTypeError(f"Config has no field {shown(unknown)}. {advice}")
        checked = {name: fields[name].metadata["check"](name, value) for name, value in settings.items()}
        mode = checked.get("mode", fields["mode"].default)
        values = {name: field.default for name, field in fields.items()} | _MODE_DEFAULTS[mode] | checked
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_explicit_fields", frozenset(settings))

    @property
    def explicit_fields(self) -> frozenset[str]:
        """Return the names of the fields that were given, and so win over the mode."""
        return cast("frozenset[str]", vars(self)["_explicit_fields"])

    @property
    def memory_budget_bytes(self) -> int | None:
        """Return `memory_budget` in bytes; None where it is not a size (None or `"auto"`)."""
        if self.memory_budget is None or self.memory_budget == "auto":
            return None
        return parse_bytes(self.memory_budget, field="memory_budget")

    @property
    def max_cpu_offload_bytes(self) -> int | None:
        """Return `max_cpu_offload_gb` in bytes."""
        return _gb_to_bytes(self.max_cpu_offload_gb)

    @property
    def max_disk_offload_bytes(self) -> int | None:
        """Return `max_disk_offload_gb` in bytes."""
        return _gb_to_bytes(self.max_disk_offload_gb)

    def replace(self, **changes: Unpack[ConfigFields]) -> Config:
        """Return a Config with these fields changed; fields that were never set follow the new mode.

        Example:
            >>> Config(force_optimize=True).replace(mode="aggressive").enable_tiling
            True
        """
        given: dict[str, object] = {**self._given(), **changes}
        return Config(**given)  # type: ignore[arg-type]  # checked, field by field, by __init__

    __replace__ = replace  # for copy.replace, from Python 3.13 on

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _given(self) -> dict[str, object]:
        """Return the fields that were set, with their values, in the order of declaration."""
        names = [field.name for field in dataclasses.fields(self) if field.name in self.explicit_fields]
        return {name: self.mode.value if name == "mode" else getattr(self, name) for name in names}


Config.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for help() and notebooks
    [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(Config)
    ]
)
