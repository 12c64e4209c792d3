from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fleetlearn_export import ExportError, export_bundle
from torch import Tensor, nn

from tests.support.emission_cases import check_emission


def test_halves_of_a_batch() -> None:
    check_emission(None, lambda x: torch.cat([x, 2 * x]).chunk(2)[1], torch.randn(3, 4))
    check_emission(None, lambda x: x.chunk(3, 1), torch.randn(3, 7))


class Siamese(nn.Module):
    """Two arrays of each example in one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        first, second = self.body(torch.cat([one, other])).chunk(2)
        return (first * second).sum(1)


def error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean()


def test_siamese_networks_train(tmp_path: Path) -> None:
    example = torch.randn(3, 3), torch.randn(3, 3), torch.randn(3)
    assert export_bundle(Siamese(), error, example, tmp_path / "b").difference < 1e-5


def test_a_batch_that_must_be_even_is_refused(tmp_path: Path) -> None:
    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            first, second = super().forward(x).chunk(2)
            return torch.cat([second, first])

    with pytest.raises(ExportError, match="the number n of examples decides what is computed at "):
        export_bundle(
            Halves(3, 4),
            nn.functional.cross_entropy,
            (torch.randn(4, 3), torch.zeros(4).long()),
            tmp_path,
        )
