"""What MemScale says: through the logger ``memscale``, to the user's own handlers or, if there are none, stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from memscale.config import Config

logger = logging.getLogger("memscale")


@contextlib.contextmanager
def speaking(config: Config) -> Iterator[logging.Logger]:
    """The logger, set up for as long as the block runs; silent if the Config says so.

    Handlers are added for the block only: a library that configures logging for good takes it from the user.
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
        file = logging.FileHandler(config.log_file, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(file)
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
