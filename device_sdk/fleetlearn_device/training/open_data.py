"""Turns what a user gives as data into ``Data``: paths, functions, frames, loaders, arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fleetlearn_device.data.frames import frame_reader
from fleetlearn_device.data.raw import Choices, RawSource
from fleetlearn_device.data.sources import call_function, is_function, open_source
from fleetlearn_device.runtimes.checks import DataError
from fleetlearn_device.training.data import Data, as_data
from fleetlearn_device.training.source_data import SourceData


def open_data(
    source: Any,
    examples: int | Callable[[], int] | None = None,
    *,
    kind: str | None = None,
    **options: object,
) -> Data:
    """Return ``source`` as data to train on.

    Args:
        source: ``[KIND:]PATH[?NAME=VALUE&...]``, a path; ``module:function``, whose result is
            taken; a frame of pandas or Polars, a dataset of Hugging Face's; a PyTorch DataLoader;
            arrays ((x, y) or {"x": x, "y": y}); ``Data``; an iterable of batches.
        examples: How many examples one pass over an iterable of batches yields, or a function that
            says so.
        kind: Of what kind the data at a path are: a key of ``data.sources.SOURCES``.
        options: The kind's options, such as ``query=``; and of which columns an array of the bundle
            is made: ``x=["ax", "ay"], y="label"``.

    Raises DataError.
    """
    if isinstance(source, str) and kind is None and is_function(source):
        return open_data(call_function(source), examples, kind=None, **options)
    if isinstance(source, str | os.PathLike):
        return SourceData(*open_source(os.fspath(source), kind, **options))
    reader = frame_reader(source)
    if reader is not None:
        name = f"the {type(source).__name__}"
        rows = RawSource(name, lambda: reader(source, name), lambda: len(source))
        return SourceData(rows, Choices(name, options))
    if options or kind is not None:
        raise DataError(
            f"the options {', '.join([*options, *(['kind'] if kind else [])])} were given with a "
            f"{type(source).__name__}; expected them with a path or a frame alone"
        )
    return as_data(source, examples)
