"""A small network with a backbone to freeze and a head to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Images (n, 3, 16, 16) -> 5 classes: convolutions with BatchNorm and dropout, then two layers
    of a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.Hardswish(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 2 * width),
        )
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(2 * width, 5))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(x))
        return scores


def classifier(width: int = 16, seed: int = 0) -> Classifier:
    """Return a model whose BatchNorms have seen data: their statistics, scales and shifts are not
    the initial ones."""
    torch.manual_seed(seed)
    model = Classifier(width)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight, module.running_var):
                nn.init.uniform_(value, 0.5, 1.5)
            for value in (module.bias, module.running_mean):
                nn.init.normal_(value, 0.0, 0.2)
    with torch.no_grad():
        model.backbone[1].weight[::3] *= -1  # a scale may be negative
    return model


def images(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random images and labels."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 16, 16, generator=random), torch.randint(5, (n,), generator=random)
