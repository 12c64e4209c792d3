"""multilabel_margin_loss and its gradient, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.emission_cases import check_emission, gradient_of

SCORES = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([[3, 0, -1, 1], [-1, 2, 2, 0], [2, 1, 0, 3]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_labels_end_at_the_first_minus_one(reduction: str) -> None:
    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.multilabel_margin_loss(scores, labels, reduction=reduction)

    check_emission(None, loss, SCORES, LABELS)
    if reduction == "none":
        arriving = torch.tensor([1.0, -2.0, 0.5])
        check_emission(None, gradient_of(loss), SCORES, LABELS, arriving)
