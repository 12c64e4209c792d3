"""``torch.full`` and its like with a number that is a tensor, while a step is traced.

PyTorch would ask for the tensor's value, which tracing does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def numbers_from_tensors() -> Iterator[None]:
    """While active, a tensor that is filled with another one's only element is an expanded copy of
    it."""
    full: Any = torch.full
    full_like: Any = torch.full_like
    new_full: Any = Tensor.new_full

    def filled(size: Any, fill_value: Any, **options: Any) -> Any:
        if not isinstance(fill_value, Tensor) or options.get("out") is not None:
            return full(size, fill_value, **options)
        usual = torch.get_default_dtype() if fill_value.is_floating_point() else fill_value.dtype
        return _expanded(size, fill_value, options.get("dtype") or usual)

    def like_another(like: Tensor, fill_value: Any, **options: Any) -> Any:
        if not isinstance(fill_value, Tensor):
            return full_like(like, fill_value, **options)
        return _expanded(like.shape, fill_value, options.get("dtype") or like.dtype)

    def new(like: Tensor, size: Any, fill_value: Any, **options: Any) -> Any:
        if not isinstance(fill_value, Tensor):
            return new_full(like, size, fill_value, **options)
        return _expanded(size, fill_value, options.get("dtype") or like.dtype)

    _set(filled, like_another, new)
    try:
        yield
    finally:
        _set(full, full_like, None)


def _expanded(size: Any, number: Tensor, dtype: torch.dtype) -> Tensor:
    return number.detach().reshape([]).to(dtype).expand(size).clone()


def _set(full: Any, full_like: Any, new_full: Any) -> None:
    setattr(torch, "full", full)  # noqa: B010 - mypy takes no assignment to a function
    setattr(torch, "full_like", full_like)  # noqa: B010
    if new_full:
        setattr(Tensor, "new_full", new_full)  # noqa: B010
    else:
        del Tensor.new_full  # PyTorch's is its base class's
