"""The models of step.py in PyTorch, and batches for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from examples import digits

BATCH = 20
BATCHES = 10
CLASSES = 10


class Model(NamedTuple):
    """A model with the shape of one example, and how many steps make a good measurement."""

    module: nn.Module
    shape: tuple[int, ...]
    steps: int


def make(name: str) -> Model:
    """The model with its initial weights, the same ones each time.

    ``mlp`` and ``cnn`` are the 2NN and the CNN of McMahan et al. (2017), "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", arXiv 1602.05629, section 3: 199,210 and 1,663,370 parameters.
    """
    torch.manual_seed(0)
    match name:
        case "softmax":
            return Model(nn.Linear(784, CLASSES), (784,), 4000)
        case "mlp":
            layers = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, CLASSES)
            return Model(nn.Sequential(*layers), (784,), 2000)
        case "digits":
            return Model(digits.model(), (1, 8, 8), 1000)
        case "cnn":
            return Model(
                nn.Sequential(
                    nn.Conv2d(1, 32, 5, padding=2),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                    nn.Conv2d(32, 64, 5, padding=2),
                    nn.ReLU(),
                    nn.MaxPool2d(2),
                    nn.Flatten(),
                    nn.Linear(3136, 512),
                    nn.ReLU(),
                    nn.Linear(512, CLASSES),
                ),
                (1, 28, 28),
                60,
            )
    raise ValueError(f"model {name!r}; expected one of {', '.join(NAMES)}")


NAMES = ("softmax", "mlp", "digits", "cnn")


def batches(shape: tuple[int, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Random x float32 (BATCHES, BATCH, *shape) and y int64 (BATCHES, BATCH)."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCHES, BATCH, *shape), np.float32)
    return x, rng.integers(0, CLASSES, (BATCHES, BATCH))
