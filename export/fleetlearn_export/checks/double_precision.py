"""Computation in float64 by code that was written for float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class DoublePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, every operator computes with float64 where it was asked for another
    floating-point type.

    Constants, casts and new tensors become float64 too. What is written into a float32 tensor is
    lost, since the operator writes into a copy: give parameters and buffers as float64.
    """

    def __init__(self, *, views_stay: bool = False) -> None:
        """``views_stay``: whether a view of a float32 tensor is one too, until an operator computes
        with it. That takes less memory, if nothing is written into a tensor."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._views_stay = views_stay

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._views_stay and func.is_view:
            return func(*args, **(kwargs or {}))
        return as_double(func(*as_double(args), **as_double(kwargs or {})))


def as_double(values: Any) -> Any:
    """Return the tensors, and the floating-point dtypes, in nested lists, tuples and dicts as
    float64."""
    # PyTorch's tree_map takes five times as long, and this is called for each operator.
    if isinstance(values, Tensor):
        return (
            values.double()
            if values.is_floating_point() and values.dtype != torch.float64
            else values
        )
    if isinstance(values, tuple | list):
        return type(values)([as_double(value) for value in values])
    if isinstance(values, dict):
        return {name: as_double(value) for name, value in values.items()}
    return torch.float64 if isinstance(values, torch.dtype) and values.is_floating_point else values


class Doubled(Tensor):
    """A tensor that is float64 for autograd. Each operator gets a float64 copy of it, which is
    freed afterwards.

    So a model in float64 takes no more memory than in float32. Views of such a tensor are
    such tensors too.
    """

    def __new__(cls, inner: Tensor) -> Doubled:
        layout = inner.stride(), inner.storage_offset()
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, *layout, dtype=torch.float64)
        made._inner = inner
        return made  # type: ignore[no-any-return]

    _inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view:
            args, kwargs = pytree.tree_map_only(
                Doubled, lambda value: value._inner, (args, kwargs or {})
            )
            return pytree.tree_map_only(Tensor, Doubled, func(*args, **kwargs))
        changed = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.is_write
        ]
        if any(isinstance(value, Doubled) for value in pytree.tree_leaves(changed)):
            raise TypeError(f"{func} writes into a tensor that nobody may write into")
        args, kwargs = pytree.tree_map_only(
            Doubled, lambda value: value._inner.double(), (args, kwargs or {})
        )
        return func(*args, **kwargs)
