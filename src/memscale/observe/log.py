"""Log lines: through the logger ``memscale``, to the user's own handlers or, if there are none, to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Iterator

from memscale.config import Config
from memscale.errors import ConfigError, shown
from memscale.execution_plan import LEFT_AS_IT_IS, WITHIN_BUDGET, Plan
from memscale.execution_plan.explain import outline_plan, reserved, sources_in_words
from memscale.hardware import Hardware
from memscale.hardware.host import process_rank
from memscale.units import format_bytes

logger = logging.getLogger("memscale")


class _LogFile(logging.FileHandler):
    """`Config.log_file` while it is open. That it can't be written is logged once for each file."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path = path

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _warn_once(self._path, error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what is still in its buffer, on a full disk
            _warn_once(self._path, error)


_unwritable: set[str] = set()  # log files that were warned of


def _warn_once(path: str, error: OSError) -> None:
    if path not in _unwritable:
        _unwritable.add(path)
        reason = error.strerror or error
        logger.warning("log_file=%r can't be written (%s): going on without it.", path, reason)


@contextlib.contextmanager
def open_log(config: Config, *, strict: bool = False) -> Iterator[logging.Logger]:
    """Yield the logger, or a silent one if the Config says so; handlers are added for the block only.

    A log file that can't be opened is a ConfigError if `strict`, and else warned of once: a step must not fail for it.
    """
    if not config.enable_logging or process_rank():  # of several processes the first one logs
        yield _silent
        return
    handlers: list[logging.Handler] = []
    if not logger.hasHandlers():
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(logging.Formatter("memscale: %(message)s"))
        handlers.append(stream)
    if config.log_file is not None:
        try:
            handlers.append(_LogFile(config.log_file))
        except OSError as error:
            if strict:
                raise ConfigError(
                    f"log_file={shown(config.log_file, 200)} can't be opened for writing: {error.strerror or error}. "
                    "Give the path of a file in a directory that exists and that you may write to, or None."
                ) from error
            _warn_once(config.log_file, error)
    level = logger.level
    if level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield logger
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)


_silent = logging.Logger("memscale.silent", logging.CRITICAL + 1)  # no message is even formatted


def log_plan(
    log: logging.Logger, plan: Plan | None, config: Config, hardware: Hardware, occasion: str = "planned"
) -> None:
    """Log the hardware, the predicted peak before and after, the step-time ratio, and the plan as a short table.

    Of a model that is left as it is, one line says so, and why.
    """
    # Without a plan, log that it is made from the first training batch.
    if plan is not None:
        warn_if_idle(log, plan, config)
    if not log.isEnabledFor(logging.INFO):
        return
    if plan is not None and any(LEFT_AS_IT_IS in note for note in plan.notes):
        log.info("%s", "; ".join(plan.notes))
        return
    if plan is None:  # the hardware is logged with the plan: the model may still move
        log.info("The plan is made from the first training batch; nothing is moved before.")
        return
    log.info("hardware: %s", hardware.summary())
    log.info("%s (%s) for %s: %s", occasion, plan.mode, plan.batch, figures_of(plan))
    for note in plan.notes:
        log.warning("%s", note)
    log.info("the plan (plan.explain() has all of it):\n%s", outline_plan(plan))


def figures_of(plan: Plan) -> str:
    """Return the figures of a plan in one line: peak before and after, step-time ratio, host memory and disk."""
    tiers = ((plan.host_bytes, "host memory"), (plan.disk_bytes, "disk"))
    return (
        f"peak {format_bytes(plan.baseline_peak_bytes)} → {format_bytes(plan.predicted_peak_bytes)}{reserved(plan)} "
        f"({sources_in_words(plan)}), step time × {plan.predicted_time_ratio:.2f} (estimated)"
        + "".join(f", {format_bytes(nbytes)} of {where}" for nbytes, where in tiers if nbytes)
    )


def warn_if_idle(log: logging.Logger, plan: Plan, config: Config) -> None:
    """Warn, with the reason, of a plan that does nothing although something was asked for.

    A model left as it is because it needs little of the device, or no more than its budget, has what was asked for.
    """
    wanted = (config.enable_checkpointing, config.enable_offloading, config.enable_tiling)
    is_asked_for = any((*wanted, config.use_mixed_precision, config.use_8bit_optimizer))
    is_small = any(LEFT_AS_IT_IS in note for note in plan.notes)
    is_small = is_small or any(layer.rule == WITHIN_BUDGET for layer in plan.layers)
    if plan.does_nothing and is_asked_for and not is_small:
        reasons = Counter(layer.reason for layer in plan.layers)
        why = "; ".join(f"{reason} ({count} layers)" for reason, count in reasons.most_common(2))
        log.warning(
            "The plan does nothing, the model trains as without MemScale: %s.", why or "it has no layers"
        )
