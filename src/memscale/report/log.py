"""What MemScale says: through the logger ``memscale``, to the user's own handlers or, if there are none, stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from memscale.config import Config
from memscale.errors import ConfigError, shown

logger = logging.getLogger("memscale")


class _LogFile(logging.FileHandler):
    """`Config.log_file` while it is open. A line that can't be written is said once a file, and nothing else."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path = path

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            _say_unwritable(self._path, error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what is still in its buffer, on a full disk
            _say_unwritable(self._path, error)


_unwritable: set[str] = set()  # log files of which it was said that they can't be written


def _say_unwritable(path: str, error: OSError) -> None:
    if path not in _unwritable:
        _unwritable.add(path)
        logger.warning(
            "log_file=%r can't be written (%s): going on without it.", path, error.strerror or error
        )


@contextlib.contextmanager
def speaking(config: Config, *, strict: bool = False) -> Iterator[logging.Logger]:
    """The logger, set up for as long as the block runs; silent if the Config says so.

    Handlers are added for the block only: a library that configures logging for good takes it from the user.

    Args:
        config: Says whether to log, and to which file.
        strict: Raise if that file can't be opened; otherwise that is said once, as a step must not die of it.

    Raises:
        ConfigError: `strict`, and the log file can't be opened.
    """
    if not config.enable_logging:
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
            _say_unwritable(config.log_file, error)
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


_silent = logging.Logger("memscale.silent")
_silent.addHandler(logging.NullHandler())
