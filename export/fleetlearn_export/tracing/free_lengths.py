"""``len`` of a tensor while a model is traced."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def lengths_free() -> Iterator[None]:
    """Let ``len(x)`` be ``x.shape[0]``, which stays free. Python's own ``len`` gives a plain
    number, and so fixes it.

    Where a plain number is needed, as in ``range(len(x))``, the size is fixed all the same.
    """
    original = builtins.len

    def length(value: Any, /) -> Any:
        return value.shape[0] if isinstance(value, Tensor) and value.dim() else original(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = original
