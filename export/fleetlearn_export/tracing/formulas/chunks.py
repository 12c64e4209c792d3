"""``chunk`` along an axis whose size depends on the number of examples.

Siamese networks put two images of each example into one batch, and divide the result in two.
PyTorch counts the pieces by rounding, which fixes the number of examples: it cannot tell that (3 *
n - 1) // n is 2.
"""

from __future__ import annotations

from torch import SymInt, Tensor, ops


def chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    size = x.shape[dim]
    # The exporter refuses what this condition demands of the number of examples, such as that it is
    # even.
    if isinstance(size, SymInt) and size % chunks == 0:
        length = size // chunks
        return [x.narrow(dim, piece * length, length) for piece in range(chunks)]
    pieces: list[Tensor] = ops.aten.split.Tensor(x, max(1, (size + chunks - 1) // chunks), dim)
    return pieces


FORMULAS = {ops.aten.chunk.default: chunk}
