"""For tests: a model of films and ratings whose table is sparse, and devices that rated a few."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from bundle_cache import cached_export
from fleetlearn_export import LocalStep
from torch import Tensor, nn

FILMS, WIDTH = 500, 6


class Ratings(nn.Module):
    """Matrix factorisation of one user's ratings: the user's own vector and bias stay personal."""

    def __init__(self, films: int = FILMS, width: int = WIDTH) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(3.5))
        self.films = nn.Embedding(films, width)
        self.film_bias = nn.Embedding(films, 1)
        self.user = nn.Parameter(torch.full((width,), 0.1))
        self.user_bias = nn.Parameter(torch.zeros(1))
        nn.init.normal_(self.films.weight, 0, 0.1)
        nn.init.zeros_(self.film_bias.weight)

    def forward(self, film: Tensor) -> Tensor:
        of_film = (self.films(film) * self.user).sum(1) + self.film_bias(film)[:, 0]
        return self.mean + self.user_bias + of_film


def squared_error(outputs: Tensor, rating: Tensor) -> Tensor:
    return ((outputs - rating) ** 2).mean()


def ratings_bundle(folder: Path, *, films: int = FILMS, width: int = WIDTH, **step: str) -> Path:
    """Export the model with sparse tables. ``step``: of LocalStep."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Ratings(films, width)
    path = folder / "ratings.bundle"
    cached_export(
        model,
        squared_error,
        (torch.arange(4), torch.ones(4)),
        path,
        names=["film", "rating"],
        step=LocalStep(**step),
        personal=["user", "user_bias"],
        sparse=["films", "film_bias"],
    )
    return path


def ratings_of(device: int, films: int = FILMS, count: int = 40) -> dict[str, np.ndarray]:
    """What one user rated: some films of one's own, and the popular ones."""
    random = np.random.default_rng(device)
    own = random.choice(films, count, replace=False)
    film = np.concatenate([own, np.arange(5)]).astype(np.int64)
    rating = random.integers(1, 6, len(film)).astype(np.float32)
    return {"film": film, "rating": rating}


def ratings_files(folder: Path, devices: int = 4) -> list[Path]:
    """Return each device's data as a file."""
    paths = []
    for device in range(devices):
        path = folder / f"ratings-{device}.npz"
        np.savez(path, **ratings_of(device))
        paths.append(path)
    return paths
