"""Bundles for the simulator's tests: one written out by hand, and softmax regression exported
once."""

from __future__ import annotations

from pathlib import Path

import pytest
from line_bundle import write_line_bundle


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_line_bundle(
        tmp_path_factory.mktemp("line") / "line.bundle", references=["anchor"]
    ).path


@pytest.fixture(scope="session")
def private_line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The line without its buffer, which a plan with [privacy] refuses: w and h, four elements."""
    return write_line_bundle(tmp_path_factory.mktemp("line") / "line.bundle", buffer=False).path


@pytest.fixture(scope="session")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 features, 10 classes, FedProx; blocks of 8 devices and 3 steps."""
    import torch
    from bundle_cache import cached_export
    from fleetlearn_export import LocalStep, TrainMany
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model, x, y = nn.Linear(60, 10), torch.randn(10, 60), torch.randint(10, (10,))

    def accuracy(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == y).float()

    path = tmp_path_factory.mktemp("softmax") / "softmax.bundle"
    step, many = LocalStep(proximal=True), TrainMany(8, 3)
    cached_export(
        model,
        nn.functional.cross_entropy,
        (x, y),
        path,
        step=step,
        metrics={"accuracy": accuracy},
        many=many,
    )
    return path
