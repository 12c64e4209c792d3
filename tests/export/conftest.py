"""Bundles of the models, exported once for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from bundle_cache import cached_export
from export_cases import DIGITS, Case, mcmahan_cnn
from fleetlearn_export import LocalStep
from torch import nn


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """By name: ``softmax`` (regression), ``mlp`` (without proximal term), ``cnn``, ``mcmahan``
    (random images)."""

    @cache
    def case(name: str) -> Case:
        data = DIGITS["data"]()
        x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
        torch.manual_seed(7)
        match name:
            case "softmax":
                model, x = nn.Linear(64, 10), x.flatten(1)
            case "mlp":
                model, x = (
                    nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)),
                    x.flatten(1),
                )
            case "cnn":
                model = DIGITS["model"]()
            case _:
                model, x, y = mcmahan_cnn(), torch.rand(300, 1, 28, 28), torch.randint(10, (300,))
        exported = cached_export(
            model,
            DIGITS["loss"],
            (x[:4], y[:4]),
            tmp_path_factory.mktemp(name) / f"{name}.bundle",
            step=LocalStep("sgd", proximal=name != "mlp"),
            metrics={"accuracy": DIGITS["accuracy"]},
        )
        return Case(model, DIGITS["loss"], x, y, exported)

    return case
