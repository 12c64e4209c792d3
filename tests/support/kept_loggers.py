"""Loggers as they were before a test that runs a command in the test's own process.

Such a command sets their level and adds a handler, for good.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("fleetlearn", "asyncio")


@contextmanager
def loggers_kept() -> Iterator[None]:
    """A context after which the loggers named above have their earlier level and handlers."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
