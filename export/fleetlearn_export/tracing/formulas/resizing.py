"""Resizing of images as products with a constant matrix along each axis.

PyTorch traces a resize as reads at computed indices, and its gradient as sums at indices, which
take many times longer. A resize is linear along each axis: ``matrix @ x``. Its gradient is the
product with the transposed matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def _resized(
    original: Callable[..., Any],
    line: Callable[..., Any],
    x: Tensor,
    sizes: Sequence[int] | None,
    *options: Any,
) -> Any:
    """Resize all axes behind the first two.

    original: PyTorch's own formula. line: resizes (1, channels, length). sizes: the new sizes; None
        if the last of the ``options`` has factors. options: align_corners first where the operator
        has it.
    """
    *aligned, factors = options
    lengths = x.shape[2:]
    if not x.dtype.is_floating_point or not all(
        isinstance(size, int) for size in (*lengths, *(sizes or ()))
    ):
        return original(x, sizes, *options)
    for axis in reversed(range(len(lengths))):
        factor = None if sizes else factors[axis]
        size = int(sizes[axis]) if sizes else int(lengths[axis] * factors[axis])
        before, length = x.shape[: axis + 2], int(lengths[axis])
        after = x.shape[axis + 3 :]
        if size == length * (size // length) and line is aten.upsample_nearest1d.default and after:
            shape = [*before, length, size // length, *after]
            x = x.unsqueeze(axis + 3).expand(shape).reshape([*before, size, *after])
            continue
        matrix = _matrix(line, length, size, *aligned, factor).to(x.dtype)
        if not after:
            x = x.reshape(-1, length).mm(matrix.t()).reshape([*before, size])
        else:
            flat = x.reshape(-1, length, prod(after))
            x = (
                matrix.expand(flat.shape[0], size, length)
                .bmm(flat)
                .reshape([*before, size, *after])
            )
    return x


@cache
def _matrix(line: Callable[..., Tensor], length: int, size: int, *options: Any) -> Tensor:
    """Return the matrix (size, length) of a resize along one axis: what it makes of each unit
    vector.

    In float64: in float32 PyTorch rounds the places between two pixels, so that the weights would
    be 1e-8 off for all who compute with them in float64, as the check does. A graph has them
    rounded once, to float32.
    """
    with _disable_current_modes():
        return (
            line(torch.eye(length, dtype=torch.float64).unsqueeze(0), [size], *options)[0]
            .t()
            .contiguous()
        )


def _row(image: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the resize of a line by one of images, for which PyTorch has none of lines."""

    def line(x: Tensor, size: list[int], align_corners: bool, factor: float | None) -> Tensor:
        return image(x.unsqueeze(2), [1, *size], align_corners, None, factor).squeeze(2)

    return line


LINES: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.upsample_nearest1d.vec: aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.vec: aten.upsample_nearest1d.default,
    aten.upsample_nearest3d.vec: aten.upsample_nearest1d.default,
    aten._upsample_nearest_exact1d.vec: aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.vec: aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact3d.vec: aten._upsample_nearest_exact1d.default,
    aten.upsample_linear1d.vec: aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.vec: aten.upsample_linear1d.default,
    aten.upsample_trilinear3d.vec: aten.upsample_linear1d.default,
    aten.upsample_bicubic2d.vec: _row(aten.upsample_bicubic2d.default),
    aten._upsample_bilinear2d_aa.vec: _row(aten._upsample_bilinear2d_aa.default),
    aten._upsample_bicubic2d_aa.vec: _row(aten._upsample_bicubic2d_aa.default),
}
"""Operator -> the one that resizes a line in the same way."""

FORMULAS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    operator: partial(_resized, operator.py_kernels[torch._C.DispatchKey.Autograd], line)
    for operator, line in LINES.items()
}
