"""Handwritten digits: real 8x8 scans (scikit-learn's), a small CNN, and a non-iid split over
devices.

    fleetlearn-export examples.digits:export --output digits.bundle

The data functions need numpy and scikit-learn only; those of the model import torch when called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

CLASSES = 10


class Data(NamedTuple):
    """Scans float32 (n, 1, 8, 8) with pixels from 0 to 1, labels int64 (n,); a fixed fifth is held
    out as test set."""

    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


def data() -> Data:
    """All 1797 scans, shuffled once with a fixed seed: 1438 to train, 359 to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(2026).permutation(len(digits.target))
    x = (digits.images[order, None] / 16.0).astype(np.float32)
    y = digits.target[order].astype(np.int64)
    held_out = len(y) // 5
    return Data(x[held_out:], y[held_out:], x[:held_out], y[:held_out])


def dirichlet_shards(
    y: NDArray[np.int64], devices: int, alpha: float = 0.5, seed: int = 0, minimum: int = 10
) -> list[NDArray[np.int64]]:
    """Share out the examples: for each device the indices into ``y`` (int64, shuffled) that are its
    own.

    Each class is divided among the devices in proportions drawn from a Dirichlet distribution with
    all its parameters ``alpha`` (Hsu, Qi, Brown 2019, "Measuring the Effects of Non-Identical Data
    Distribution for Federated Visual Classification", arXiv 1909.06335): small alpha, few classes
    on a device. A device left with fewer than ``minimum`` examples is given some by those who have
    most. The same seed gives the same shards.
    """
    if devices < 1 or devices * minimum > len(y):
        raise ValueError(
            f"{len(y)} examples cannot be shared by {devices} devices with at least {minimum} each"
        )
    rng = np.random.default_rng(seed)
    shards: list[list[int]] = [[] for _ in range(devices)]
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        shares = rng.dirichlet(np.full(devices, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for shard, part in zip(shards, np.split(members, cuts), strict=True):
            shard.extend(part.tolist())
    for shard in shards:
        while len(shard) < minimum:
            richest = max(shards, key=len)
            shard.append(richest.pop(int(rng.integers(len(richest)))))
    return [rng.permutation(np.array(shard, np.int64)) for shard in shards]


def model(seed: int = 0) -> torch.nn.Module:
    """Two convolutions, two poolings, two linear layers: 22,602 parameters; float32 (n, 1, 8, 8) ->
    (n, 10)."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, CLASSES),
        )


def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the batch."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, y)


def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """For each example 1 where the largest output is the label's, else 0."""
    return (outputs.argmax(1) == y).float()


def export() -> dict[str, Any]:
    """The arguments of ``fleetlearn_export.export_bundle``, for the command
    ``fleetlearn-export``."""
    import torch
    from fleetlearn_export import LocalStep

    x, y = data()[:2]
    return {
        "model": model(),
        "loss": loss,
        "example": (torch.from_numpy(x[:16]), torch.from_numpy(y[:16])),
        "step": LocalStep(optimizer="sgd", proximal=True),
        "metrics": {"accuracy": accuracy},
        "name": "digits",
    }
