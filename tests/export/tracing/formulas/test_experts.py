"""grouped_mm and its gradients in ONNX, against PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

RANDOM = torch.Generator().manual_seed(1)


def test_grouped_mm_and_its_gradients() -> None:
    """The groups have as many rows as the example's, 2 examples', and none."""
    rows, matrices = torch.randn(3, 4, 4, generator=RANDOM), torch.randn(4, 4, 8, generator=RANDOM)
    grad = torch.randn(3, 4, 8, generator=RANDOM)

    def product(rows: Tensor, matrices: Tensor) -> Tensor:
        count = rows.shape[0] * 4
        ends = torch.stack(
            [torch.full((), count - 3), torch.full((), count - 3), torch.full((), count - 1)]
        )
        ends = torch.cat([ends, torch.full((1,), count)]).to(torch.int32)
        return functional.grouped_mm(rows.flatten(0, 1), matrices, offs=ends).reshape(
            rows.shape[0], 4, 8
        )

    def each(rows: Tensor, grad: Tensor, matrices: Tensor) -> tuple[Tensor, ...]:
        gradients = [gradient_of(product, place)(rows, matrices, grad) for place in (0, 1)]
        return (product(rows, matrices), *gradients)

    check_emission(None, each, rows, grad, fixed=(matrices,), tolerance=1e-5)
