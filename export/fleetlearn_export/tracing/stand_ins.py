"""Shapes of some operators' results on stand-ins, tensors without values, while a step is traced.

Where a shape depends on the number of examples, PyTorch finds the shapes of an operator's results
by running the operator's formula on stand-ins: some thirty operators for a batch norm, which was a
fifth of the tracing of a network with many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten
Results = tuple[Tensor | None, ...]


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any
) -> Results:
    """Return empty tensors for the result, mean and 1 / standard deviation; these are (0,) in
    evaluation, on a CPU."""
    count = x.shape[1] if training else 0
    return torch.empty_like(x), x.new_empty(count), x.new_empty(count)


def batch_norm_without_training(x: Tensor, *_: Any) -> Results:
    return batch_norm(x, None, None, None, None, False)


def batch_norm_backward(gradient: Tensor, x: Tensor, *rest: Any) -> Results:
    """Return empty tensors for the gradients of input, weight and bias; of the last two, None for
    one not wanted."""
    _, *wanted = rest[-1]
    return torch.empty_like(x), *(x.new_empty(x.shape[1]) if row else None for row in wanted)


def like_first(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(first)


SHAPES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._native_batch_norm_legit.default: batch_norm,
    aten._native_batch_norm_legit_no_training.default: batch_norm_without_training,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.threshold_backward.default: like_first,
}
"""Operator -> a function that returns empty tensors in the place of its results, for ``_usual``
arguments."""


@contextmanager
def kernels_chosen_freely() -> Iterator[None]:
    """While active, PyTorch's choice of a convolution's kernel is no condition on the number of
    examples.

    The kernel is chosen by that number, and decides how a stand-in's elements lie in memory, but no
    result.
    """
    original = torch._C._select_conv_backend

    def select(*args: Any, **options: Any) -> Any:
        x = args[0] if args else options["input"]  # by name in PyTorch 2.11
        with x.fake_mode.shape_env.suppress_guards():
            return original(*args, **options)

    torch._C._select_conv_backend = select
    try:
        yield
    finally:
        torch._C._select_conv_backend = original


@contextmanager
def shapes_known() -> Iterator[None]:
    """While active, SHAPES gives the results of operators on stand-ins. What tracing records stays
    the same."""
    table: Any = decomposition_table
    originals = {operator: table[operator] for operator in SHAPES}
    for operator, shapes in SHAPES.items():
        table[operator] = _in_place_of(originals[operator], shapes)
    try:
        yield
    finally:
        table.update(originals)


def _in_place_of(formula: Callable[..., Any], shapes: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``shapes``, with PyTorch's formula for arguments that are unusual in dtype or
    layout."""
    return lambda *args, **options: (shapes if _usual(args) else formula)(*args, **options)


def _usual(args: tuple[Any, ...]) -> bool:
    """Whether the tensors are float32, and those with more than one axis contiguous and of one
    shape."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    whole = [value for value in tensors if value.dim() > 1]
    return (
        len(whole) > 0
        and whole[0] is tensors[0]
        and all(value.dtype == torch.float32 for value in tensors)
        and all(value.shape == whole[0].shape and value.is_contiguous() for value in whole)
    )
