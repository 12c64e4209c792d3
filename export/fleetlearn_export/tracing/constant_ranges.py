"""``torch.arange(...).tolist()`` while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary


@contextmanager
def ranges_known() -> Iterator[None]:
    """While active, the list of a range between numbers is a list of numbers, as libraries of
    losses name axes: ``x.sum(torch.arange(2, x.dim()).tolist())``.

    Tracing knows no values, so the list would hold unknown numbers, which are no axes. A range up
    to the number of examples, and one that was written into, stay unknown.
    """
    # Not a TorchFunctionMode, which would switch off PyTorch's own fused layers.
    arange: Callable[..., Tensor] = torch.arange
    tolist: Callable[[FakeTensor], Any] = FakeTensor.tolist
    ranges: Any = WeakTensorKeyDictionary()

    def remembered(*args: Any, **options: Any) -> Tensor:
        made = arange(*args, **options)
        if not any(
            isinstance(value, (torch.SymInt, Tensor)) for value in (*args, *options.values())
        ):
            ranges[made] = partial(arange, *args, **options)
        return made

    def listed(tensor: FakeTensor) -> Any:
        again = ranges.get(tensor)
        if again is None or tensor._version > 0:
            return tolist(tensor)
        with _disable_current_modes():
            return again().tolist()

    _set(remembered, listed)
    try:
        yield
    finally:
        _set(arange, tolist)


def _set(arange: Callable[..., Tensor], tolist: Callable[[FakeTensor], Any]) -> None:
    setattr(torch, "arange", arange)  # noqa: B010 - mypy takes no assignment to a function
    setattr(FakeTensor, "tolist", tolist)  # noqa: B010
