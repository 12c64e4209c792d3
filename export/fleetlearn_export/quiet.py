"""Keeping third parties' talk out of the user's terminal, for as long as they are called."""

from __future__ import annotations

import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def quiet() -> Iterator[None]:
    """Without PyTorch's deprecation warnings, its exporters' logs, and the graphs that they print when they fail.

    What they would report as an error is raised as well. Warnings from the user's own code were shown before, when
    the model ran once as it is.
    """
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]
    levels = [(handler, handler.level) for logger in loggers for handler in logger.handlers]
    for handler, _ in levels:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


@contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Without what C++ code writes to the process's standard error, past Python and whatever the log level."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
