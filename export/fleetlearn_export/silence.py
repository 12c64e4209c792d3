"""Keeps the output of PyTorch and ONNX Runtime out of the user's terminal while they are called."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def silenced_python() -> Iterator[None]:
    """Suppress PyTorch's deprecation warnings, its exporters' logs, and the graphs that they print
    when they fail.

    Errors are raised all the same. Warnings of the user's own code were shown earlier, when the
    model ran unchanged.
    """
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith("torch")
    ]
    levels = [(handler, handler.level) for logger in loggers for handler in logger.handlers]
    for handler, _ in levels:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


@contextmanager
def silenced_process() -> Iterator[None]:
    """Suppress what C++ code writes directly to the process's standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    originals = [(number, os.dup(number)) for number in (1, 2)]
    with tempfile.TemporaryFile() as log:
        for number, _ in originals:
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            for number, copy in originals:
                os.dup2(copy, number)
                os.close(copy)
