"""Batch normalisation's gradient on one example, which PyTorch computes wrongly for some layouts in
memory."""

from __future__ import annotations

from pathlib import Path

import torch
from fleetlearn_export import export_bundle
from fleetlearn_export.checks.one_example import BACKWARD, right_for_one_example
from torch import Tensor, nn


class Patches(nn.Module):
    """Patches of an image as a Vision Transformer has them, (n, places, channels), behind batch
    normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(3, 6, 2, 2), nn.BatchNorm2d(6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        hidden: Tensor = self.head(tokens).tanh()
        return hidden.mean(1)


def test_a_model_with_patches_behind_batch_norm_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    example = torch.randn(3, 3, 8, 8), torch.randint(2, (3,))
    exported = export_bundle(Patches(), nn.functional.cross_entropy, example, tmp_path / "b")
    assert exported.batch_of_one
    assert exported.difference < 1e-5


def test_the_gradient_of_one_example_is_right() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 4, 4), torch.rand(6)
    gradient = torch.randn(1, 16, 6).transpose(1, 2).reshape(1, 6, 4, 4)
    assert not gradient.is_contiguous()
    _, mean, inverse = torch.ops.aten.native_batch_norm(
        x, weight, weight, None, None, True, 0.1, 1e-5
    )
    for one, rows in (({"batch.x": x}, 1), ({"batch.x": x.expand(2, -1, -1, -1)}, 2)):
        with right_for_one_example(one):
            *_, bias = BACKWARD(
                gradient, x, weight, None, None, mean, inverse, True, 1e-5, [True] * 3
            )
        assert torch.allclose(bias, gradient.sum((0, 2, 3)), atol=1e-5) == (rows == 1), (
            "PyTorch computes it right now"
        )
