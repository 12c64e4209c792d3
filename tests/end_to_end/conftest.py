"""A real bundle for the processes: softmax regression on the handwritten digits, exported once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_coordinator.service.server import LARGE_MODEL
from fleetlearn_export import LocalStep
from fleetlearn_protocol import open_bundle
from postgres_server import PostgresServer
from processes import DATABASE, DIGITS, Processes, processes
from torch import nn

IN_POSTGRES = "FLEETLEARN_TESTS_IN_POSTGRES"
"""The environment's variable that is set where all runs keep their ledgers in PostgreSQL."""


@pytest.fixture(autouse=True)
def database_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where test_kills_postgres.py runs the tests: the runs of each keep their ledgers in a
    database of the test's own."""
    if IN_POSTGRES in os.environ:
        server: PostgresServer = request.getfixturevalue("postgres")
        name = token_hex(8)
        server.make_database(name)
        monkeypatch.setenv(DATABASE, server.url(name))


def digits_bundle(folder: Path, name: str, make: Callable[[], nn.Module], **options: Any) -> Path:
    """Export a model of the flat digits, made with a fixed seed, with ``options`` of
    export_bundle."""
    x, y = DIGITS["data"]()[:2]
    example = torch.from_numpy(x[:4].reshape(4, 64)), torch.from_numpy(y[:4])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = make()
    path = folder / f"{name}.bundle"
    cached_export(model, DIGITS["loss"], example, path, **options)
    return path


@pytest.fixture(scope="session")
def family_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three architectures for the flat digits, by the names of a family's members."""
    models: dict[str, Callable[[], nn.Module]] = {
        "cnn": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        ),
        "mlp": lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        "linear": lambda: nn.Linear(64, 10),
    }
    folder = tmp_path_factory.mktemp("family")
    options = {"step": LocalStep("sgd"), "metrics": {"accuracy": DIGITS["accuracy"]}}
    return {name: digits_bundle(folder, name, make, **options) for name, make in models.items()}


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"step": LocalStep("sgd", proximal=True), "metrics": {"accuracy": DIGITS["accuracy"]}}
    return digits_bundle(
        tmp_path_factory.mktemp("bundle"), "softmax", lambda: nn.Linear(64, 10), **options
    )


@pytest.fixture(scope="session")
def large_bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """9 MB, so that a coordinator does its steps in another thread."""
    path = digits_bundle(
        tmp_path_factory.mktemp("bundle"),
        "large",
        lambda: nn.Sequential(nn.Linear(64, 30_000), nn.ReLU(), nn.Linear(30_000, 10)),
        step=LocalStep("sgd", proximal=True),
    )
    assert 4 * open_bundle(path).manifest.size >= LARGE_MODEL
    return path


@pytest.fixture(scope="session")
def own_bundle_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device has something of its own here: a personal head, and the previous model of MOON's
    term. And dropout."""
    return digits_bundle(
        tmp_path_factory.mktemp("bundle"),
        "own",
        lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)),
        step=LocalStep("adam", contrastive=True),
        personal=["3.*"],
        features=lambda outputs: outputs,
    )


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight devices' data."""
    folder = tmp_path_factory.mktemp("shards")
    x, y = DIGITS["data"]()[:2]
    paths = []
    for number, indices in enumerate(DIGITS["dirichlet_shards"](y, 8, alpha=0.5, seed=1)):
        paths.append(folder / f"{number}.npz")
        np.savez(paths[-1], x=x[indices].reshape(len(indices), 64), y=y[indices])
    return paths


@pytest.fixture
def run(tmp_path: Path, warm: Path) -> Iterator[Processes]:
    with processes(tmp_path, warm) as running:
        yield running
