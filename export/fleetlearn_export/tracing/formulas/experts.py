"""Products of groups of rows with a matrix for each group, as mixtures of experts have them:
PyTorch's grouped_mm."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (rows, width): the rows of ``a`` (rows, k) up to the first of ``offs`` times b[0] (k,
    width), and so on.

    How many rows a group has depends on the data, so each matrix is multiplied with all rows, those
    of other groups being 0. Rows behind the last group are 0.
    """
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise NotImplementedError(
            f"grouped_mm of {shapes}: only rows (n, k), matrices (groups, k, width) and offs"
        )
    row = torch.arange(a.shape[0])
    ends = offs.to(torch.int64).unsqueeze(1)
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    inside = ((row >= begins) & (row < ends)).unsqueeze(2)
    result: Tensor = torch.where(inside, a.unsqueeze(0), 0.0).bmm(b).sum(0)
    return result


FORMULAS = {aten._grouped_mm.default: grouped_mm}
