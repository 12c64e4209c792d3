"""A scikit-learn model that devices train by partial_fit, and whose coefficients are averaged.

McMahan et al. 2017, arXiv 1602.05629, algorithm 1. partial_fit.toml declares the arrays. Devices
need scikit-learn; the coordinator does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def fit(
    state: dict[str, Any], rows: dict[str, Any], *, passes: int = 1, rate: float = 0.05
) -> dict[str, Any]:
    """On a device: train the state's model on its rows, and return the trained one."""
    from sklearn.linear_model import SGDClassifier

    model = SGDClassifier(
        loss="log_loss", alpha=1e-4, learning_rate="constant", eta0=rate, random_state=0
    )
    model.coef_, model.intercept_ = state["coef"], state["intercept"]
    model.classes_ = np.array([0, 1])
    for _ in range(passes):
        model.partial_fit(rows["x"], rows["y"])
    right = model.score(rows["x"], rows["y"])
    return {"coef": model.coef_, "intercept": model.intercept_, "accuracy": right}


def average(
    state: dict[str, Any], sums: dict[str, Any], count: Any
) -> tuple[dict[str, Any], dict[str, float], bool]:
    """On the coordinator: the means, weighted by rows, are the next model."""
    model = {"coef": sums["coef"], "intercept": sums["intercept"]}
    return model, {"accuracy": sums["accuracy"]}, False
