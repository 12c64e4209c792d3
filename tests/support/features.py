"""A small frozen encoder with a head to train, and a bundle whose features a device may keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bundle_cache import cached_export
from fleetlearn_export import Exported
from torch import Tensor, nn
from torch.nn import functional

BYTES = 4 * 6
"""Of an example's features."""


class Encoded(nn.Module):
    """Numbers (n, 10) -> 3 classes. The encoder's dropout does nothing while it is frozen; the
    head's does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(10, 32),
            nn.BatchNorm1d(32),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(32, 6),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.dropout(self.encoder(x)))
        return scores


def encoded(seed: int = 0) -> Encoded:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Encoded()


def examples(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random numbers, and labels that depend on them."""
    x = torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :3] ** 2).argmax(1)


def right(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def features_bundle(path: Path, **options: Any) -> Exported:
    """Export the model with its head to be trained."""
    given = {"train": "head", "cache_features": True, "metrics": {"right": right}, **options}
    return cached_export(encoded(), functional.cross_entropy, examples(6), path, **given)
