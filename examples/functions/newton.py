"""Logistic regression by Newton's method: the model of all rows in one place, in a few rounds.

Bishop, Pattern Recognition and Machine Learning, 2006, section 4.3.3. newton.toml declares the
arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def sums(state: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """On a device: gradient and Hessian of the loss summed over its rows, at the state's model."""
    x = np.column_stack([rows["x"], np.ones(len(rows["x"]))])
    score, y = x @ state["model"], rows["y"]
    p = 0.5 * (1 + np.tanh(score / 2))
    return {
        "gradient": x.T @ (p - y),
        "hessian": x.T @ (x * (p * (1 - p))[:, None]),
        "loss": (np.logaddexp(0, score) - y * score).sum(),
    }


def step(
    state: dict[str, Any], sums: dict[str, Any], count: Any, *, l2: float, tolerance: float = 1e-10
) -> tuple[dict[str, Any], dict[str, float], bool]:
    """On the coordinator: Newton's step; beside the loss is l2 / 2 |w|^2 without the intercept."""
    model = state["model"]
    penalty = np.append(np.full(len(model) - 1, l2), 0.0)
    change = np.linalg.solve(sums["hessian"] + np.diag(penalty), sums["gradient"] + penalty * model)
    largest = float(np.abs(change).max())
    return {"model": model - change}, {"loss": sums["loss"] / count.rows}, largest < tolerance
