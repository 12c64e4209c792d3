"""What models learn about the export: whether PyTorch exports them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fleetlearn_export.errors import ExportError
from fleetlearn_export.model.source_locations import is_user_code

Result = TypeVar("Result")


def traced_either_way(call: Callable[[bool], Result]) -> Result:
    """Trace a model that does what it does in training, ``call(False)``. If values decide what it
    does, trace it as it is while PyTorch exports it, ``call(True)``: libraries leave checks of
    values out then. Raises ExportError."""
    try:
        return call(False)
    except ExportError as error:
        if not isinstance(error.__cause__, GuardOnDataDependentSymNode):
            raise
        with suppress(ExportError):
            return call(True)
        raise


@contextmanager
def model_told(exporting: bool) -> Iterator[None]:
    """Tell models whether PyTorch exports them.

    Some do something else then: transformers' Informer makes masks that its layers do not take.
    PyTorch's own code learns the truth if models are told that there is no export, and else what
    they are told.
    """
    compiler: Any = torch.compiler
    names = (
        ("_is_exporting_flag", "_is_compiling_flag")
        if exporting
        else ("is_exporting", "is_compiling")
    )
    flags_before = [getattr(compiler, name) for name in names]

    def answer(truth: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: not is_user_code(sys._getframe(1).f_code.co_filename) and truth()

    for name, before in zip(names, flags_before, strict=True):
        setattr(compiler, name, True if exporting else answer(before))
    try:
        yield
    finally:
        for name, before in zip(names, flags_before, strict=True):
            setattr(compiler, name, before)
