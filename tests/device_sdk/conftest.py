"""Real bundles of three models over the handwritten digits, exported once for the whole run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from bundle_cache import cached_export
from fleetlearn_device.runtimes.import_onnxruntime import installed
from fleetlearn_export import LocalStep
from numpy.typing import NDArray
from torch import nn

ROOT = Path(__file__).parents[2]
DIGITS: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "digits.py"))


class Case(NamedTuple):
    """A bundle, and what it was made of."""

    path: Path
    model: nn.Module
    x: NDArray[np.float32]
    y: NDArray[np.int64]


def _model(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        match name:
            case "cnn":
                return DIGITS["model"]()
            case "mlp":
                return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
            case "personal":
                return nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
            case "own":
                return nn.Sequential(
                    nn.Linear(64, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 10)
                )
            case _:
                return nn.Linear(64, 10)


EXPORTS: dict[str, dict[str, Any]] = {
    "plain": {"step": LocalStep("sgd")},
    "personal": {"step": LocalStep("momentum"), "personal": ["2.*"]},
    "own": {
        "step": LocalStep("momentum", contrastive=True),
        "personal": ["3.*"],
        "features": lambda outputs: outputs,
    },
}


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """By name: ``softmax`` (regression), ``mlp``, ``cnn``, and ``plain`` (softmax without proximal
    term).

    ``personal`` has momentum and a head that stays on the device, ``own`` MOON's term and dropout
    as well.
    """

    @cache
    def case(name: str) -> Case:
        x, y = DIGITS["data"]()[:2]
        x = x if name == "cnn" else x.reshape(len(x), 64)
        model = _model(name)
        path = tmp_path_factory.mktemp(name) / f"{name}.bundle"
        exported = cached_export(
            model,
            DIGITS["loss"],
            (torch.from_numpy(x[:4]), torch.from_numpy(y[:4])),
            path,
            metrics={"accuracy": DIGITS["accuracy"]},
            **EXPORTS.get(name, {"step": LocalStep("sgd", proximal=True)}),
        )
        if "onnxruntime-training-cpu" in installed():
            assert (exported.without_ort_training is None) == (name not in ("personal", "own"))
        return Case(path, model, x, y)

    return case
