"""The models and the data of distillation.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fleetlearn_export import LocalStep, export_bundle, export_distillation
from fleetlearn_protocol import Bundle, open_bundle
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples import digits

UNLABELLED = 400
"""Scans that no device has. The coordinator has them without their labels."""
PLANE = 3.0
"""The plane's points are from -PLANE to PLANE."""
CENTRES = ((-1.2, 1.0), (1.2, 1.0), (0.0, -1.2))
"""Of the three classes."""


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    return digits.model()


def plane() -> nn.Module:
    """Three layers, as in the paper's figure."""
    return nn.Sequential(
        nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "mlp": mlp,
    "cnn": cnn,
    "plane": plane,
}


def bundles_of(name: str, folder: Path) -> tuple[Bundle, Bundle]:
    """Return the training bundle and the distillation bundle of a model, exported once."""
    paths = folder / f"{name}.bundle", folder / f"{name}-distil.bundle"
    if not all(path.exists() for path in paths):
        torch.manual_seed(0)
        model = MODELS[name]()
        x = torch.rand(4, 2) if name == "plane" else torch.rand(4, 1, 8, 8)
        example = (x, torch.arange(4) % 3)
        step, metrics = LocalStep(), {"accuracy": accuracy}
        export_bundle(
            model, functional.cross_entropy, example, paths[0], step=step, metrics=metrics
        )
        export_distillation(model, (x,), paths[1])
    return open_bundle(paths[0]), open_bundle(paths[1])


def scans() -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Return the devices' scans and their labels, and the scans without labels."""
    found = digits.data()
    return found.x_train[UNLABELLED:], found.y_train[UNLABELLED:], found.x_train[:UNLABELLED]


def test_scans() -> dict[str, NDArray[Any]]:
    found = digits.data()
    return {"x": found.x_test, "y": found.y_test}


def clients_in_the_plane(seed: int) -> list[dict[str, NDArray[Any]]]:
    """Return two clients: each has two of the three classes, and few points of one of them."""
    random = np.random.default_rng(seed)
    found = list[dict[str, NDArray[Any]]]()
    for counts in ((150, 20, 0), (0, 20, 150)):
        y = np.repeat(np.arange(3), counts)
        x = np.array(CENTRES)[y] + 0.45 * random.normal(size=(len(y), 2))
        found.append({"x": x.astype(np.float32), "y": y.astype(np.int64)})
    return found


def noise_in_the_plane(seed: int, count: int = 1000) -> NDArray[np.float32]:
    """Return points anywhere in the plane, without labels."""
    random = np.random.default_rng(seed)
    return random.uniform(-PLANE, PLANE, (count, 2)).astype(np.float32)


def test_points(seed: int) -> dict[str, NDArray[Any]]:
    """Return points of all three classes."""
    random = np.random.default_rng((seed, 1))
    y = np.repeat(np.arange(3), 200)
    x = np.array(CENTRES)[y] + 0.45 * random.normal(size=(len(y), 2))
    return {"x": x.astype(np.float32), "y": y.astype(np.int64)}
